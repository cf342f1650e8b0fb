"""RMS norm in Triton: several whole rows a program, for short rows."""

from __future__ import annotations

from kernelcast.kernels.ops.layernorm import triton_rows
from kernelcast.kernels.registry import register_variant


@register_variant("rmsnorm")
class TritonRows(triton_rows.TritonRows):
    """As ``triton_row`` with several rows a program, so that short rows fill its threads."""

    source_modules = (triton_rows.__name__, *triton_rows.TritonRows.source_modules)
