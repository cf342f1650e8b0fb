"""Torch's own weight-only kernel for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Elements of k that the kernel loads at a time.
VECTOR = 16
#: Bytes to which it takes the start of A and B to be aligned, as torch's allocator does.
ALIGNMENT = 64
MAX_INT32 = 2**31 - 1


def _counted_in_32_bits(problem: Problem) -> int:
    m, n, k = (int(problem[name]) for name in ("m", "n", "k"))
    return max(m * k, n * k, m * n)


@register_variant("mixed_gemm")
class Int8Pack(Variant):
    """``torch._weight_int8pack_mm``: 8-bit weights are widened in registers, and never written.

    It blocks by four rows and four columns, and so reads A and B again for each: it is meant for few rows.
    """

    name = "int8pack"
    backend = "torch"
    doc = "torch._weight_int8pack_mm: weights widened in registers"
    rules = (
        Rule(
            "cpu",
            "torch's kernel for GPUs computes one element of C at a time, without tiles",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
        ),
        Rule(
            "int8",
            "the kernel reads signed weights",
            check=lambda problem, columns, device: problem["weight_dtype"] == "int8",
            explain=lambda problem, columns, device: str(problem["weight_dtype"]),
        ),
        Rule(
            "rows-of-k",
            "the kernel reads rows of A and columns of B one after the other, without gaps",
            check=lambda problem, columns, device: (
                problem["layout"] == "nt" and problem["lda"] == 0 and problem["ldb"] == 0
            ),
            explain=lambda problem, columns, device: (
                f"layout={problem['layout']}, lda={problem['lda']}, ldb={problem['ldb']}"
            ),
        ),
        Rule(
            "whole-vectors",
            f"the kernel loads {VECTOR} elements of k at a time without a mask, beyond the end of the matrix too",
            check=lambda problem, columns, device: problem["k"] % VECTOR == 0,
            explain=lambda problem, columns, device: f"k={problem['k']}",
        ),
        Rule(
            "32-bit-offsets",
            "the kernel counts elements in 32 bits",
            check=lambda problem, columns, device: _counted_in_32_bits(problem) <= MAX_INT32,
            explain=lambda problem, columns, device: f"{_counted_in_32_bits(problem)} elements",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        mixed = operation("mixed_gemm")
        return Work(flops=mixed.flops(problem), traffic_bytes=mixed.traffic_bytes(problem))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        multiply = torch._weight_int8pack_mm

        def aligned(matrix: torch.Tensor) -> torch.Tensor:
            # A view may begin anywhere, and the kernel's aligned loads would end the process.
            return matrix if matrix.data_ptr() % ALIGNMENT == 0 else matrix.clone()

        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return multiply(aligned(a), aligned(b.t()), scale)

        return run
