"""The weight cast and multiplied one chunk of columns after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.mixed_gemm.schema import cast_weight_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Columns of a chunk that give every core of a GPU a tile of its own.
MIN_COLUMNS_GPU = 2048


@register_variant("mixed_gemm")
class ColumnChunked(Variant):
    """A chunk of columns of B is cast, scaled and multiplied before the next one is touched.

    The cast chunk stays in a cache that the whole cast weight would overflow; A is read again for every chunk.
    """

    name = "column_chunked"
    backend = "torch"
    doc = "the weight cast, scaled and multiplied by chunks of columns"
    parameters = (
        Parameter(
            "chunk_columns",
            (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            "columns of a chunk",
            quick=(64, 256, 1024, 4096),
        ),
    )
    rules = (
        Rule(
            "chunk-is-a-part",
            "a chunk of all columns takes one step: the weight is cast whole",
            check=lambda problem, columns, device: columns["chunk_columns"] < problem["n"],
            explain=lambda problem, columns, device: (
                f"chunk_columns={columns['chunk_columns'][0]}, n={problem['n']}"
            ),
        ),
        Rule(
            "chunk-fills-gpu",
            "chunks run one after the other: on a GPU narrow ones leave cores idle that the whole would fill",
            check=lambda problem, columns, device: (
                (columns["chunk_columns"] >= MIN_COLUMNS_GPU) | (device.kind != "gpu")
            ),
            explain=lambda problem, columns, device: (
                f"{columns['chunk_columns'][0]} < {MIN_COLUMNS_GPU} columns"
            ),
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        mixed = operation("mixed_gemm")
        chunks = np.ceil(problem["n"] / columns["chunk_columns"])
        again = float(problem.element_bytes) * problem["m"] * problem["k"] * (chunks - 1)
        chunk_bytes = float(problem.element_bytes) * problem["k"] * columns["chunk_columns"]
        # One buffer serves every chunk; where it fits the cache, memory sees it once.
        scratch = np.where(chunk_bytes <= device.llc_bytes, chunk_bytes, cast_weight_bytes(problem))
        return Work(
            flops=mixed.flops(problem) + float(problem["k"]) * problem["n"],
            traffic_bytes=mixed.traffic_bytes(problem) + again,
            scratch_bytes=scratch,
            calls=2.0 * chunks,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        m, n, k, size = problem["m"], problem["n"], problem["k"], int(config["chunk_columns"])
        parts = [slice(first, min(first + size, n)) for first in range(0, n, size)]
        transposed = str(problem["layout"])[1] == "t"

        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            buffer = empty((size * k,), dtype=a.dtype, device=a.device)
            for part in parts:
                width = part.stop - part.start
                flat = buffer[: width * k]
                # In the order of B, so that both are passed through once.
                weight = flat.view(width, k).t() if transposed else flat.view(k, width)
                torch.mul(b[:, part], scale[part], out=weight)
                torch.mm(a, weight, out=out[:, part])
            return out

        return run
