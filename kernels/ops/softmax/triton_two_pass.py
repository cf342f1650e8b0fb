"""Softmax in Triton: one program a row, in blocks, for long rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.softmax import schema
from kernelcast.kernels.ops.softmax import triton_pieces as pieces
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Floating-point operations for one element: the first pass takes a maximum, two differences, two exponentials, a product
#: and a sum; the second a difference, an exponential and a quotient.
TWO_PASS_FLOPS = 10.0


def _elements(problem: Problem, columns: Columns) -> np.ndarray:
    return columns["block"]


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return np.full(len(columns["block"]), problem["rows"])


def _steps(problem: Problem, columns: Columns) -> np.ndarray:
    """Blocks of a row, the ragged last one included."""
    return -(-problem["columns"] // columns["block"])


@register_variant("softmax")
class TritonTwoPass(Variant):
    """A program reads its row twice: for the maximum and sum, then for the result.

    The online softmax of Milakov and Gimelshein (arXiv:1805.02867). The second pass finds its row in the level-2 cache if
    the rows that are worked on at once fit there.
    """

    name = "triton_two_pass"
    backend = "triton"
    doc = "Triton: online maximum and sum in blocks of a row, then a second pass"
    parameters = (
        Parameter("block", (1024, 2048, 4096, 8192, 16384), "columns a step"),
        Parameter("num_warps", (2, 4, 8, 16), "warps of a program"),
    )
    rules = (
        *pieces.COMMON_RULES,
        pieces.ROWS_ADJACENT,
        pieces.BLOCK_IS_A_PART,
        pieces.OFFSETS,
        # Each lane keeps a maximum and a sum.
        pieces.registers_rule(_elements, held=2),
        pieces.threads_busy_rule(_elements),
        pieces.programs_rule(_programs),
    )
    source_modules = (
        "kernelcast.kernels.ops.softmax.triton_pieces",
        "kernelcast.kernels.ops.softmax.triton_two_pass_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_row_rules",
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        steps = _steps(problem, columns).astype(np.float64)
        # At least one row is in flight on each core.
        in_flight = min(problem["rows"], device.cores) * float(problem["columns"]) * problem.element_bytes
        return Work(
            flops=TWO_PASS_FLOPS * problem["rows"] * steps * columns["block"],
            traffic_bytes=schema.element_bytes(problem) * schema.cached_passes(device, in_flight, 3.0),
            programs=problem["rows"],
            warps=columns["num_warps"],
            shared_bytes=pieces.reduction_bytes(1, columns),
            accumulators=2.0 * columns["block"] / pieces.threads(columns, device),
            inner_steps=2.0 * steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.softmax.triton_two_pass_jit import softmax_two_pass

        return pieces.row_spec(softmax_two_pass, problem, config, int(config["block"]))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        rows = problem["rows"]
        launch = self.compile_spec(problem, config).bind((rows,))

        def run(x: torch.Tensor) -> torch.Tensor:
            out = empty(x.shape, dtype=x.dtype, device=x.device)
            if rows:
                launch(x, out)
            return out

        return run
