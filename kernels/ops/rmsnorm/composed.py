"""RMS norm from single torch calls over the whole matrix."""

from __future__ import annotations

from kernelcast.kernels.operation import Parameter
from kernelcast.kernels.ops.layernorm import composed
from kernelcast.kernels.registry import register_variant

STATISTICS = Parameter(
    "statistics", ("mean", "norm"), "of a row: the mean of its squares, or its 2-norm, which makes no copy"
)


@register_variant("rmsnorm")
class Composed(composed.Composed):
    """Mean of squares, scaling and weight, each one torch call, in place where it can be.

    Where torch has no fused rms_norm (its CPU code) this makes fewer copies of the matrix.
    """

    doc = "a mean of squares, rsqrt, mul and mul, one call each"
    parameters = (STATISTICS,)
    rules = tuple(rule for rule in composed.Composed.rules if rule is not composed.VAR_MEAN_ON_GPUS)
    source_modules = (composed.__name__, *composed.Composed.source_modules)
