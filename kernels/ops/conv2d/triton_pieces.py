"""What the Triton variants of conv2d share. Triton itself is not needed here."""

from __future__ import annotations

from typing import Any

from kernelcast.kernels.compile import Pointer
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import MAX_INT32

POSITIONS = Rule(
    "positions",
    "kernels count input rows and columns, their padding included, in 32 bits (elements in 64 if need be)",
    check=lambda problem, columns, device: max(Geometry.of(problem).padded) <= MAX_INT32,
    explain=lambda problem, columns, device: "{} rows, {} columns".format(*Geometry.of(problem).padded),
)


def needs_wide_offsets(geometry: Geometry) -> bool:
    """Whether elements must be counted in 64 bits: input, weight or output has more than 2**31 - 1 of them."""
    largest = max(geometry.input_bytes, geometry.weight_bytes, geometry.output_bytes)
    return largest / geometry.element_bytes > MAX_INT32


def pointers(problem: Problem) -> dict[str, Pointer]:
    """Input, weight and output, as the kernels name them."""
    g = Geometry.of(problem)
    return {
        "x_ptr": Pointer(problem.dtype, int(g.input_bytes)),
        "weight_ptr": Pointer(problem.dtype, int(g.weight_bytes)),
        "out_ptr": Pointer(problem.dtype, int(g.output_bytes)),
    }


def window_constants(geometry: Geometry) -> dict[str, Any]:
    """The constants of the kernels that say which inputs an output reads, in their order.

    They are compiled in: a network has few of them, and positions are then divided by constants.
    """
    return {
        "R": geometry.r,
        "S": geometry.s,
        "STRIDE_H": geometry.stride[0],
        "STRIDE_W": geometry.stride[1],
        "PAD_H": geometry.pad[0],
        "PAD_W": geometry.pad[1],
        "DILATION_H": geometry.dilation[0],
        "DILATION_W": geometry.dilation[1],
    }
