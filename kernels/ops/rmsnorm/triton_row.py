"""RMS norm in Triton: one program a row, which it holds whole."""

from __future__ import annotations

from kernelcast.kernels.ops.layernorm import triton_row
from kernelcast.kernels.registry import register_variant


@register_variant("rmsnorm")
class TritonRow(triton_row.TritonRow):
    """Layernorm's kernel without the mean: a row is read once, and kept in registers until it is written."""

    source_modules = (triton_row.__name__, *triton_row.TritonRow.source_modules)
