"""What the Triton norms share: the description and the launch of their kernels. Triton is not needed to import this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.ops.layernorm.pieces import (
    EPSILON,
    has_bias,
    has_weight,
    subtracts_mean,
    vector_bytes,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_row_rules import ALIGNED_ELEMENTS
from kernelcast.kernels.work import Amount

if TYPE_CHECKING:
    import torch

#: Modules whose text is part of every Triton norm.
SOURCE_MODULES = (
    "kernelcast.kernels.ops.layernorm.pieces",
    "kernelcast.kernels.ops.layernorm.triton_pieces",
    "kernelcast.kernels.ops.layernorm.triton_pieces_jit",
    "kernelcast.kernels.triton_launch",
    "kernelcast.kernels.triton_row_rules",
)


def registers_of_an_element(problem: Problem) -> float:
    """Registers that a program needs for each element that it holds.

    Where rows start at multiples of 16 elements several are loaded at once; one that is loaded alone takes a register and
    a half with its mask.
    """
    return 1.0 if problem["columns"] % ALIGNED_ELEMENTS == 0 else 1.5


def norm_spec(
    kernel: Any,
    problem: Problem,
    config: Mapping[str, Any],
    integers: Mapping[str, int],
    constants: Mapping[str, Any],
) -> KernelSpec:
    """A kernel with all that its compilation depends on, for the operation's own eps.

    Its parameters are: x, weight, bias and out; the integers; the constants, of which EPS comes first and what
    rows and operation are like comes last. A vector that the problem lacks is never read; x stands in its place. eps is a constant as a
    model has one for all its layers.
    """
    matrix = Pointer(problem.dtype, problem["rows"] * problem["columns"] * problem.element_bytes)
    vector = Pointer(problem.dtype, problem["columns"] * problem.element_bytes)
    return KernelSpec(
        kernel=kernel,
        tensors={
            "x_ptr": matrix,
            "weight_ptr": vector if has_weight(problem) else matrix,
            "bias_ptr": vector if has_bias(problem) else matrix,
            "out_ptr": matrix,
        },
        integers=integers,
        constants={
            "EPS": EPSILON[problem.operation],
            **constants,
            "ALIGNED": problem["columns"] % ALIGNED_ELEMENTS == 0,
            "CENTRE": subtracts_mean(problem),
            "HAS_WEIGHT": has_weight(problem),
            "HAS_BIAS": has_bias(problem),
        },
        options=launch_options(config),
    )


def norm_launcher(spec: KernelSpec, problem: Problem, programs: int) -> Launcher:
    """A callable over x, weight and bias that launches so many programs of a kernel, compiled once for each eps."""
    from kernelcast.kernels.memory import empty

    @cache
    def launch_for(eps: float) -> Any:
        return dataclasses.replace(spec, constants={**spec.constants, "EPS": eps}).bind((programs,))

    own = EPSILON[problem.operation]
    launch_for(own)

    def run(
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        eps: float = own,
    ) -> torch.Tensor:
        out = empty(x.shape, dtype=x.dtype, device=x.device)
        if programs:
            launch_for(eps)(x, x if weight is None else weight, x if bias is None else bias, out)
        return out

    return run


def vector_traffic_bytes(problem: Problem, device: Device, programs: Amount) -> np.ndarray:
    """Bytes of weight and bias from memory: read once where they stay in the last-level cache, else by every program."""
    once = vector_bytes(problem)
    return once * np.where(once <= device.llc_bytes, 1.0, np.maximum(programs, 1.0))
