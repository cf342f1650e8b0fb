"""Drop-in normalisations over the last dimensions. They fall back to torch as those of :mod:`kernelcast.runtime.dropins` do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernelcast.kernels import Problem
from kernelcast.kernels.operation import Launcher
from kernelcast.runtime.dispatch import eligible, launchers, place, rescue, resolve
from kernelcast.runtime.dropins_compiled import operator, traced_alike
from kernelcast.runtime.dropins_problem import problem_for

# bool is an int, and numpy's numbers are floats, to isinstance; torch decides what they mean.
_NUMBERS = (float, int)
#: torch's rms_norm adds this where it is given no eps: that of float32, in which it computes for 16-bit dtypes too.
_RMS_EPS = torch.finfo(torch.float32).eps


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``torch.nn.functional.layer_norm`` of a contiguous tensor; all dimensions before the normalised ones are rows.

    torch's own for inputs, weights and biases that are not contiguous or not of one dtype (float32, float16 or
    bfloat16), and for a bias without a weight.
    """
    # A bias without a weight is a tensor too few, which no drop-in takes.
    tensors = (input, weight, bias) if bias is not None else (input,) if weight is None else (input, weight)
    if eligible(*tensors):
        dims = _normalised(input, normalized_shape, tensors)
        if dims and type(eps) in _NUMBERS:
            key = (
                "layernorm", input.shape, dims, len(tensors), input.dtype, place(input),
            )  # fmt: skip
            launch = launchers.get(key)
            if launch is None:
                shape = input.shape[-dims:]

                def own(
                    x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, eps: float
                ) -> torch.Tensor:
                    return F.layer_norm(x, shape, w, b, eps)

                launch = resolve(
                    key,
                    tensors,
                    own,
                    lambda: _norm_problem(
                        "layernorm", input, dims, ("none", "weight", "weight_bias")[len(tensors) - 1]
                    ),
                    lambda run: _flattened(run, input.shape, dims),
                )
            try:
                return launch(input, weight, bias, eps)
            except Exception as error:  # noqa: BLE001 - see rescue
                return rescue(key, launch, error)(input, weight, bias, eps)
    elif traced_alike(*tensors) and _normalised(input, normalized_shape, tensors) and type(eps) in _NUMBERS:
        return _LAYER_NORM(input, normalized_shape, weight, bias, eps)
    return F.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.rms_norm`` of a contiguous tensor; all dimensions before the normalised ones are rows.

    Without ``eps``, torch's is added: the distance from 1 to the next number of float32. torch's own for inputs and
    weights that are not contiguous or not of one dtype (float32, float16 or bfloat16).
    """
    tensors = (input,) if weight is None else (input, weight)
    if eligible(*tensors):
        dims = _normalised(input, normalized_shape, tensors)
        if dims and (eps is None or type(eps) in _NUMBERS):
            key = ("rmsnorm", input.shape, dims, len(tensors), input.dtype, place(input))
            launch = launchers.get(key)
            if launch is None:
                shape = input.shape[-dims:]

                def own(x: torch.Tensor, w: torch.Tensor | None, eps: float | None) -> torch.Tensor:
                    return F.rms_norm(x, shape, w, eps)

                def adapt(run: Launcher) -> Launcher:
                    flat = _flattened(run, input.shape, dims)
                    return lambda x, w, eps: flat(x, w, _RMS_EPS if eps is None else eps)

                launch = resolve(
                    key,
                    tensors,
                    own,
                    lambda: _norm_problem("rmsnorm", input, dims, ("none", "weight")[len(tensors) - 1]),
                    adapt,
                )
            try:
                return launch(input, weight, eps)
            except Exception as error:  # noqa: BLE001 - see rescue
                return rescue(key, launch, error)(input, weight, eps)
    elif (
        traced_alike(*tensors)
        and _normalised(input, normalized_shape, tensors)
        and (eps is None or type(eps) in _NUMBERS)
    ):
        return _RMS_NORM(input, normalized_shape, weight, eps)
    return F.rms_norm(input, normalized_shape, weight, eps)


def _normalised(
    input: torch.Tensor, normalized_shape: Sequence[int], tensors: tuple[torch.Tensor, ...]
) -> int:
    """How many dimensions are normalised; 0 where the tensors do not fit, or do not lie as the catalogue reads them."""
    if not isinstance(normalized_shape, tuple | list):
        return 0
    dims = len(normalized_shape)
    shape = input.shape[-dims:]
    if not dims or shape != tuple(normalized_shape) or not input.is_contiguous():
        return 0
    for vector in tensors[1:]:
        if vector.shape != shape or not vector.is_contiguous():
            return 0
    return dims


def _norm_problem(name: str, input: torch.Tensor, dims: int, affine: str) -> Problem:
    rows, columns = math.prod(input.shape[:-dims]), math.prod(input.shape[-dims:])
    return problem_for(name, input, rows=rows, columns=columns, affine=affine)


def _flattened(run: Launcher, shape: torch.Size, dims: int) -> Launcher:
    """Calls a launcher of a matrix [rows, columns] and vectors [columns] on tensors of the caller's shapes.

    Its last argument is eps; vectors that are None are left out.
    """
    columns = math.prod(shape[-dims:])
    reshaped = len(shape) != 2 or dims != 1

    def launch(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        *vectors, eps = rest
        if not reshaped:
            return run(x, *(each for each in vectors if each is not None), eps=eps)
        given = (each.view(columns) for each in vectors if each is not None)
        return run(x.view(-1, columns), *given, eps=eps).view(shape)

    return launch


_LAYER_NORM = operator(
    "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    layer_norm,
    F.layer_norm,
)
_RMS_NORM = operator(
    "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps) -> Tensor",
    rms_norm,
    F.rms_norm,
)
