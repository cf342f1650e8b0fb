"""RMS norm from single torch calls, by chunks of rows."""

from __future__ import annotations

from kernelcast.kernels.ops.layernorm import row_chunked
from kernelcast.kernels.ops.layernorm.composed import VAR_MEAN_ON_GPUS
from kernelcast.kernels.ops.rmsnorm.composed import STATISTICS
from kernelcast.kernels.registry import register_variant


@register_variant("rmsnorm")
class RowChunked(row_chunked.RowChunked):
    """The composed variant on one chunk of rows after another, so that all its passes but the first are over cache."""

    parameters = (STATISTICS, row_chunked.CHUNK)
    rules = tuple(rule for rule in row_chunked.RowChunked.rules if rule is not VAR_MEAN_ON_GPUS)
    source_modules = (row_chunked.__name__, *row_chunked.RowChunked.source_modules)
