"""What layernorm and rmsnorm share: the base of both operations, torch calls that variants are composed of, and counts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Operation
from kernelcast.kernels.ops.gemm.schema import UNIT_ROUNDOFF
from kernelcast.kernels.ops.softmax.schema import cached_passes, element_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.work import Amount

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")

#: What is added to a row's variance, or mean square, where the caller names nothing else: torch's default for layer_norm,
#: and what most models pass to rms_norm. It changes no candidate's speed, so it is not part of a problem.
EPSILON = {"layernorm": 1e-5, "rmsnorm": 1e-6}

#: How many vectors of one element a column follow x among the inputs.
VECTORS = {"none": 0, "weight": 1, "weight_bias": 2}

#: Relative error of a root of a mean of n squares in float32, in units of 2**-24: a few, and SUM_GROWTH * sqrt(n).
FEW = 8.0
SUM_GROWTH = 1.0


def subtracts_mean(problem: Problem) -> bool:
    """Whether rows are centred before they are scaled."""
    return problem.operation == "layernorm"


def has_weight(problem: Problem) -> bool:
    return VECTORS[problem["affine"]] >= 1


def has_bias(problem: Problem) -> bool:
    return VECTORS[problem["affine"]] == 2


def element_flops(problem: Problem) -> float:
    """Floating-point operations of the definition for one element.

    The square, its sum and the product with the scale; where rows are centred, the sum and the difference; one each for
    weight and bias.
    """
    return (5.0 if subtracts_mean(problem) else 3.0) + VECTORS[problem["affine"]]


def vector_bytes(problem: Problem) -> float:
    """Bytes of weight and bias."""
    return float(VECTORS[problem["affine"]]) * problem["columns"] * problem.element_bytes


class RowNorm(Operation):
    """Every row of a contiguous matrix scaled by what its own elements say, then by column."""

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """x [rows, columns] standard normal, and as ``affine`` says: weight [columns] 1 + 0.1 z, bias [columns] 0.1 z."""
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32)

        columns = problem["columns"]
        found = [normal(problem["rows"], columns)]
        if has_weight(problem):
            found.append(1.0 + 0.1 * normal(columns))
        if has_bias(problem):
            found.append(0.1 * normal(columns))
        return tuple(each.to(dtype=getattr(torch, problem.dtype), device=device) for each in found)

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        x, *vectors = (each.double() for each in inputs)
        if subtracts_mean(problem):
            x = x - x.mean(1, keepdim=True)
        out = x / (x.square().mean(1, keepdim=True) + EPSILON[problem.operation]).sqrt()
        if has_weight(problem):
            out = out * vectors[0]
        return out + vectors[1] if has_bias(problem) else out

    def flops(self, problem: Problem) -> float:
        return element_flops(problem) * problem["rows"] * problem["columns"]

    def traffic_bytes(self, problem: Problem) -> float:
        return 2.0 * element_bytes(problem) + vector_bytes(problem)


def scale_error(problem: Problem) -> float:
    """Relative error of a row's scale, 1 / sqrt(mean of squares + eps), computed in float32.

    The squares are positive: adding n of them one after another is off by about sqrt(n / 3) units of 2**-24, as rounding
    errors add like square roots (Higham and Mary, SIAM J. Sci. Comput. 41, 2019), and rarely by more than three times
    that. The root halves it. The divisions, the root and the products that follow are a few units more.
    """
    return (FEW + SUM_GROWTH * math.sqrt(problem["columns"])) * UNIT_ROUNDOFF["float32"]


def smallest_number(problem: Problem) -> float:
    """The smallest normal number of float32, or float16's distance between numbers below its smallest normal one."""
    return 2.0**-24 if problem.dtype == "float16" else 2.0**-126


# --- torch calls ---


def normalise_into(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    eps: float,
    statistics: str,
    centre: bool,
) -> None:
    """Write the normalised ``x`` [rows, columns] into ``out`` of its shape and dtype, from single torch calls.

    float32 works in ``out`` itself, 16 bits in a float32 copy: statistics or differences rounded to 16 bits would each
    cost the accuracy that the output has. The mean is subtracted before anything is squared: the difference of a mean of
    squares and a squared mean would lose what they share.
    """
    import torch

    if not x.numel():
        return  # torch.var_mean warns of no rows.
    single = x.dtype == torch.float32
    values = x if single else x.float()
    work = out if single else values
    if statistics == "var_mean":
        variance, mean = torch.var_mean(values, 1, correction=0, keepdim=True)
        values = torch.sub(values, mean, out=work)
    else:
        if centre:
            values = torch.sub(values, values.mean(1, keepdim=True), out=work)
        if statistics == "norm":
            variance = torch.linalg.vector_norm(values, dim=1, keepdim=True).square_().div_(x.shape[1])
        else:
            variance = values.square().mean(1, keepdim=True)
    scale = variance.add_(eps).rsqrt_()
    if weight is None:
        torch.mul(values, scale, out=out)
        return
    torch.mul(values, scale, out=work)
    if bias is None:
        torch.mul(work, weight, out=out)
    else:
        torch.addcmul(bias, work, weight, out=out)


def composed_calls(problem: Problem, columns: Columns) -> np.ndarray:
    """Calls of :func:`normalise_into`."""
    statistics = columns["statistics"]
    # The square and its mean; or the norm, its square and a division; or variance and mean in one.
    calls = np.select([statistics == "mean", statistics == "norm"], [2.0, 3.0], 1.0)
    if subtracts_mean(problem):
        calls = calls + np.where(statistics == "var_mean", 1.0, 2.0)
    # The addition of eps, the root and the product; the copy of 16 bits; weight and bias in one.
    return calls + 3.0 + (problem.element_bytes < 4) + has_weight(problem)


def composed_traffic_bytes(
    problem: Problem, columns: Columns, device: Device, piece_bytes: Amount
) -> np.ndarray:
    """Bytes that :func:`normalise_into` moves to and from memory, for pieces of so many bytes of x and out.

    Passes over the matrix where a piece does not stay in cache: the mean reads it, the subtraction reads it and writes
    another, the squares read that, the product with the scale and the one with the weight each read and write it. Copies
    and squares are scratch.
    """
    passes = 3.0 + (3.0 if subtracts_mean(problem) else 0.0) + (2.0 if has_weight(problem) else 0.0)
    reached = np.where(
        columns["statistics"] == "var_mean",
        cached_passes(device, piece_bytes, passes - 1.0),
        cached_passes(device, piece_bytes, passes),
    )
    return element_bytes(problem) * reached + vector_bytes(problem)


def composed_scratch_bytes(problem: Problem, columns: Columns, elements: Amount) -> np.ndarray:
    """Temporaries of :func:`normalise_into` for so many elements: the float32 copy of 16 bits, and the squares."""
    copy = 4.0 if problem.element_bytes < 4 else 0.0
    return np.where(columns["statistics"] == "mean", copy + 4.0, copy) * elements
