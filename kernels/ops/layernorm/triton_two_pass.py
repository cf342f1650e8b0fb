"""Layer norm in Triton: one program a row, in blocks, for long rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from kernelcast.kernels import triton_row_rules as row_rules
from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.layernorm import triton_pieces as pieces
from kernelcast.kernels.ops.layernorm.pieces import VECTORS
from kernelcast.kernels.ops.softmax.schema import cached_passes, element_bytes
from kernelcast.kernels.ops.softmax.triton_pieces import reduction_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.work import Work


def _elements(problem: Problem, columns: Columns) -> np.ndarray:
    return columns["block"]


def _registers(problem: Problem, columns: Columns) -> np.ndarray:
    return pieces.registers_of_an_element(problem) * columns["block"]


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return np.full(len(columns["block"]), problem["rows"])


def _steps(problem: Problem, columns: Columns) -> np.ndarray:
    """Blocks of a row, the ragged last one included."""
    return -(-problem["columns"] // columns["block"])


@register_variant("layernorm")
class TritonTwoPass(Variant):
    """A program reads its row twice: for its mean and variance, then for the result.

    Mean and squared deviations are updated as Welford does (Technometrics 4, 1962), in every lane for itself, and merged as
    Chan, Golub and LeVeque do (The American Statistician 37, 1983). The second pass finds its row in the level-2 cache if
    the rows that are worked on at once fit there.
    """

    name = "triton_two_pass"
    backend = "triton"
    doc = "Triton: statistics in blocks of a row, then a second pass"
    parameters = (
        Parameter("block", (1024, 2048, 4096, 8192, 16384), "columns a step"),
        Parameter("num_warps", (2, 4, 8, 16), "warps of a program"),
    )
    rules = (
        *row_rules.COMMON_RULES,
        row_rules.BLOCK_IS_A_PART,
        row_rules.OFFSETS,
        # Each lane keeps a mean and a sum of squared deviations.
        row_rules.registers_rule(_registers, held=2),
        row_rules.threads_busy_rule(_elements),
        row_rules.programs_rule(_programs),
    )
    source_modules: ClassVar[tuple[str, ...]] = (
        "kernelcast.kernels.ops.layernorm.triton_two_pass_jit",
        *pieces.SOURCE_MODULES,
    )

    #: float32 values that a lane keeps through the first pass.
    kept = 2.0
    #: Floating-point operations for one element, without weight and bias: two differences, two products and two sums in
    #: the first pass; a difference and a product in the second.
    two_pass_flops = 8.0

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        steps = _steps(problem, columns).astype(np.float64)
        rows = float(problem["rows"])
        # At least one row is in flight on each core.
        in_flight = min(rows, device.cores) * problem["columns"] * problem.element_bytes
        matrices = element_bytes(problem) * cached_passes(device, in_flight, 3.0)
        each = self.two_pass_flops + VECTORS[problem["affine"]]
        return Work(
            flops=each * rows * steps * columns["block"],
            traffic_bytes=matrices + pieces.vector_traffic_bytes(problem, device, rows),
            programs=rows,
            warps=columns["num_warps"],
            shared_bytes=reduction_bytes(1, columns),
            accumulators=self.kept * columns["block"] / row_rules.threads(columns, device),
            inner_steps=2.0 * steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.layernorm.triton_two_pass_jit import norm_two_pass

        block = int(config["block"])
        constants = {"BLOCK": block, "EVEN": problem["columns"] % block == 0}
        return pieces.norm_spec(norm_two_pass, problem, config, {"columns": problem["columns"]}, constants)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        return pieces.norm_launcher(self.compile_spec(problem, config), problem, problem["rows"])
