"""Split-K from torch calls: of each product the parts of its sum over k as one batch, then one sum over all parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.batched_gemm.schema import output_elements
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

MAX_BATCH = 16
MAX_PARTS_BYTES = 2**30


def _parts_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    return columns["split"] * (float(problem.element_bytes) * output_elements(problem))


@register_variant("batched_gemm")
class SplitK(Variant):
    """Of each product a batch over slices of k; the parts of all products are added up at the end.

    Pays where few products, with outputs too small to fill the device, have a long k.
    """

    name = "split_k"
    backend = "torch"
    doc = "torch.bmm over slices of k for each product, then a sum"
    parameters = (Parameter("split", (2, 4, 8, 16, 32), "slices of k"),)
    rules = (
        Rule(
            "few-products",
            f"each product is a call of its own, as slices of several are not one batch as they lie in memory: beyond "
            f"{MAX_BATCH} the batch fills the device better unsplit",
            check=lambda problem, columns, device: problem["batch"] <= MAX_BATCH,
            explain=lambda problem, columns, device: f"batch={problem['batch']}",
        ),
        Rule(
            "float32",
            "parts rounded to 16 bits before they are added would lose accuracy that the operation promises",
            check=lambda problem, columns, device: problem.dtype == "float32",
            explain=lambda problem, columns, device: problem.dtype,
        ),
        Rule(
            "split-divides-k",
            "slices of unequal length cannot be one batched product",
            check=lambda problem, columns, device: problem["k"] % columns["split"] == 0,
            explain=lambda problem, columns, device: f"k={problem['k']}, split={columns['split'][0]}",
        ),
        Rule(
            "slices-long-enough",
            "a slice shorter than 64 spends more on adding the parts up than on multiplying",
            check=lambda problem, columns, device: problem["k"] // columns["split"] >= 64,
            explain=lambda problem, columns, device: f"{problem['k'] // columns['split'][0]} < 64",
        ),
        Rule(
            "parts-fit",
            "the parts are held at once: more than 1 GiB of them costs more than it saves",
            check=lambda problem, columns, device: _parts_bytes(problem, columns) <= MAX_PARTS_BYTES,
            explain=lambda problem, columns, device: f"{_parts_bytes(problem, columns)[0]:.0f} bytes",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        batched = operation("batched_gemm")
        return Work(
            flops=batched.flops(problem) + output_elements(problem) * columns["split"].astype(np.float64),
            traffic_bytes=batched.traffic_bytes(problem),
            scratch_bytes=_parts_bytes(problem, columns),
            calls=float(problem["batch"]) + 1.0,
            inner_steps=problem["k"] // columns["split"],
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        split = int(config["split"])

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            slices = (split, a.shape[2] // split)
            shape = (a.shape[0], split, a.shape[1], b.shape[2])
            parts = empty(shape, dtype=a.dtype, device=a.device)
            for of_a, of_b, target in zip(a.unbind(), b.unbind(), parts.unbind(), strict=True):
                # Views, whatever the strides: [m, split, k/split] -> [split, m, k/split], and [split, k/split, n].
                torch.bmm(of_a.unflatten(1, slices).transpose(0, 1), of_b.unflatten(0, slices), out=target)
            return parts.sum(1)

        return run
