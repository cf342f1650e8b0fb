"""Split-K from torch calls: parts of the sum over k as one batched product, then added up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


MAX_PARTS_BYTES = 2**30


@register_variant("gemm")
class SplitK(Variant):
    """A batched product over slices of k, then a sum over the slices.

    Pays where m * n is too small to fill the device and k is long.
    """

    name = "split_k"
    backend = "torch"
    doc = "torch.bmm over slices of k, then a sum"
    parameters = (Parameter("split", (2, 4, 8, 16, 32), "slices of k"),)
    rules = (
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
            check=lambda problem, columns, device: (
                4.0 * problem["m"] * problem["n"] * columns["split"] <= MAX_PARTS_BYTES
            ),
            explain=lambda problem, columns, device: (
                f"{4.0 * problem['m'] * problem['n'] * columns['split'][0]:.0f} bytes"
            ),
        ),
        Rule(
            "float32",
            "parts rounded to 16 bits before they are added would lose accuracy that the operation promises",
            check=lambda problem, columns, device: problem.dtype == "float32",
            explain=lambda problem, columns, device: problem.dtype,
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        gemm = operation("gemm")
        parts = columns["split"] * (float(problem.element_bytes) * problem["m"] * problem["n"])
        return Work(
            flops=gemm.flops(problem) + problem["m"] * problem["n"] * columns["split"].astype(np.float64),
            traffic_bytes=gemm.traffic_bytes(problem),
            scratch_bytes=parts,
            calls=2.0,
            inner_steps=problem["k"] // columns["split"],
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        split = int(config["split"])

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            slices = (split, a.shape[1] // split)
            # Views, whatever the strides: [m, split, k/split] -> [split, m, k/split], and [split, k/split, n].
            return torch.bmm(a.unflatten(1, slices).transpose(0, 1), b.unflatten(0, slices)).sum(0)

        return run
