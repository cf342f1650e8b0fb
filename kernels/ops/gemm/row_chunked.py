"""The product in chunks of m: row after row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("gemm")
class RowChunked(Variant):
    """``torch.mm`` of chunks of rows of A into slices of C.

    A chunk's part of C and of its own operand may stay in a cache that the whole product would overflow; the other
    operand is read once a chunk.
    """

    name = "row_chunked"
    backend = "torch"
    doc = "torch.mm on chunks of rows"
    parameters = (Parameter("chunks", (2, 4, 8), "parts of m"),)
    rules = (
        Rule(
            "cpu",
            "the chunks run one after the other: on a GPU each of them leaves cores idle that the whole would fill",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
        ),
        Rule(
            "chunks-large-enough",
            "libraries multiply several rows of C at a time in registers; a chunk of fewer than 4 leaves them unused",
            check=lambda problem, columns, device: problem["m"] // columns["chunks"] >= 4,
            explain=lambda problem, columns, device: f"m={problem['m']} in {columns['chunks'][0]} chunks",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        again = float(problem.element_bytes) * problem["k"] * problem["n"] * (columns["chunks"] - 1)
        return Work(
            flops=gemm.flops(problem),
            traffic_bytes=gemm.traffic_bytes(problem) + again,
            calls=columns["chunks"],
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        size = -(-problem["m"] // int(config["chunks"]))
        parts = [slice(first, first + size) for first in range(0, problem["m"], size)]

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
            for part in parts:
                torch.mm(a[part], b, out=out[part])
            return out

        return run
