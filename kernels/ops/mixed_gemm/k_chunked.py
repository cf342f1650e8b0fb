"""The weight cast and multiplied one chunk of rows after another, into one sum."""

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


@register_variant("mixed_gemm")
class KChunked(Variant):
    """A chunk of rows of B is cast, multiplied and added to C before the next one is touched; C is scaled at last.

    Rows of a row-major weight lie together, as columns do not. The cast chunk stays in cache; C is read and written
    again for every chunk.
    """

    name = "k_chunked"
    backend = "torch"
    doc = "the weight cast and multiplied by chunks of k, added up in C"
    parameters = (
        Parameter("chunk_k", (64, 128, 256, 512, 1024, 2048), "steps of k of a chunk", quick=(64, 256, 1024)),
    )
    rules = (
        Rule(
            "cpu",
            "the chunks run one after the other and C is rewritten by each: a GPU has the bandwidth to cast the whole",
            check=lambda problem, columns, device: device.kind == "cpu",
            explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
        ),
        Rule(
            "float32",
            "parts rounded to 16 bits before they are added would lose accuracy that the operation promises",
            check=lambda problem, columns, device: problem.dtype == "float32",
            explain=lambda problem, columns, device: problem.dtype,
        ),
        Rule(
            "chunk-is-a-part",
            "a chunk of all of k takes one step: the weight is cast whole",
            check=lambda problem, columns, device: columns["chunk_k"] < problem["k"],
            explain=lambda problem, columns, device: f"chunk_k={columns['chunk_k'][0]}, k={problem['k']}",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        mixed = operation("mixed_gemm")
        chunks = np.ceil(problem["k"] / columns["chunk_k"])
        m, n = float(problem["m"]), float(problem["n"])
        chunk_bytes = float(problem.element_bytes) * n * columns["chunk_k"]
        scratch = np.where(chunk_bytes <= device.llc_bytes, chunk_bytes, cast_weight_bytes(problem))
        return Work(
            flops=mixed.flops(problem) + m * n * (chunks - 1),
            # C is read and written by every chunk but the first, which only writes it, and by the scaling.
            traffic_bytes=mixed.traffic_bytes(problem) + 2.0 * problem.element_bytes * m * n * chunks,
            scratch_bytes=scratch,
            calls=2.0 * chunks + 1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        m, n, k, size = problem["m"], problem["n"], problem["k"], int(config["chunk_k"])
        parts = [slice(first, min(first + size, k)) for first in range(0, k, size)]
        transposed = str(problem["layout"])[1] == "t"

        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            buffer = empty((size * n,), dtype=a.dtype, device=a.device)
            for number, part in enumerate(parts):
                depth = part.stop - part.start
                flat = buffer[: depth * n]
                weight = flat.view(n, depth).t() if transposed else flat.view(depth, n)
                weight.copy_(b[part])
                # With beta=0 torch ignores what C held.
                torch.addmm(out, a[:, part], weight, beta=min(number, 1), out=out)
            return out.mul_(scale)

        return run
