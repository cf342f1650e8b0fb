"""RMS norm in Triton: one program a row, in blocks, for long rows."""

from __future__ import annotations

from kernelcast.kernels.ops.layernorm import triton_two_pass
from kernelcast.kernels.registry import register_variant


@register_variant("rmsnorm")
class TritonTwoPass(triton_two_pass.TritonTwoPass):
    """A program reads its row twice: for the sum of its squares, then for the result.

    The second pass finds its row in the level-2 cache if the rows that are worked on at once fit there.
    """

    source_modules = (triton_two_pass.__name__, *triton_two_pass.TritonTwoPass.source_modules)

    #: A lane keeps the sum of its squares.
    kept = 1.0
    #: A square and a sum; a product in the second pass.
    two_pass_flops = 3.0
