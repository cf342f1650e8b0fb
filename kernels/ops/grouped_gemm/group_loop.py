"""One ``torch.mm`` a group, where torch's default is another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.grouped_gemm.schema import expected_busy_groups
from kernelcast.kernels.ops.grouped_gemm.vendor import grouped_mm_takes, multiply_groups
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work


@register_variant("grouped_gemm")
class GroupLoop(Variant):
    """A product a group, each by the vendor's BLAS at its best; pays where groups are few and large.

    It reads the offsets on the host: on a GPU it waits for all work before it, and cannot be captured in a graph.
    """

    name = "group_loop"
    backend = "torch"
    doc = "torch.mm group by group, into slices of the output"
    rules = (
        Rule(
            "differs-from-the-default",
            "where grouped_mm does not take the problem, the default is this loop: the same computation twice",
            check=lambda problem, columns, device: grouped_mm_takes(problem),
            explain=lambda problem, columns, device: (
                f"groups={problem['groups']}, m={problem['m']}, n={problem['n']}, k={problem['k']}, {problem.dtype}"
            ),
        ),
    )
    source_modules = ("kernelcast.kernels.ops.grouped_gemm.vendor",)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        grouped = operation("grouped_gemm")
        return Work(
            flops=grouped.flops(problem),
            traffic_bytes=grouped.traffic_bytes(problem),
            calls=max(expected_busy_groups(problem), 1.0),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        return multiply_groups
