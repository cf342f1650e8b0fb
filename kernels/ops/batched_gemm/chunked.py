"""The batch in chunks."""

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


@register_variant("batched_gemm")
class Chunked(Variant):
    """``torch.bmm`` of chunks of the batch into slices of the output.

    Libraries choose how to share a batch among threads by its length: a chunk may be shared out differently.
    """

    name = "chunked"
    backend = "torch"
    doc = "torch.bmm on chunks of the batch"
    parameters = (Parameter("chunks", (2, 4, 8, 16), "parts of the batch"),)
    rules = (
        Rule(
            "cpu",
            "the chunks run one after the other: on a GPU each of them leaves cores idle that the whole would fill",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
        ),
        Rule(
            "chunks-of-several",
            "a chunk of a single matrix is the product of one pair, which per_item is",
            check=lambda problem, columns, device: problem["batch"] // columns["chunks"] >= 2,
            explain=lambda problem, columns, device: (
                f"batch={problem['batch']} in {columns['chunks'][0]} chunks"
            ),
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        batched = operation("batched_gemm")
        return Work(
            flops=batched.flops(problem),
            traffic_bytes=batched.traffic_bytes(problem),
            calls=columns["chunks"],
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        chunks = int(config["chunks"])

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((a.shape[0], a.shape[1], b.shape[2]), dtype=a.dtype, device=a.device)
            parts = (tensor.tensor_split(chunks) for tensor in (a, b, out))
            for of_a, of_b, target in zip(*parts, strict=True):
                torch.bmm(of_a, of_b, out=target)
            return out

        return run
