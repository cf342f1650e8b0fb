"""Layer norm in Triton: several whole rows a program, for short rows."""

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
from kernelcast.kernels.ops.layernorm.pieces import element_flops
from kernelcast.kernels.ops.softmax.schema import element_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.work import Work


def _elements(problem: Problem, columns: Columns) -> np.ndarray:
    return columns["rows_per_program"] * row_rules.padded_columns(problem)


def _registers(problem: Problem, columns: Columns) -> np.ndarray:
    return pieces.registers_of_an_element(problem) * _elements(problem, columns)


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return -(-problem["rows"] // columns["rows_per_program"])


@register_variant("layernorm")
class TritonRows(Variant):
    """As ``triton_row`` with several rows a program, so that short rows fill its threads."""

    name = "triton_rows"
    backend = "triton"
    doc = "Triton: several rows a program, held in registers"
    parameters = (
        Parameter("rows_per_program", (2, 4, 8, 16, 32), "rows of a program"),
        Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
    )
    rules = (
        *row_rules.COMMON_RULES,
        row_rules.ROWS_ENOUGH,
        row_rules.registers_rule(_registers, held=1),
        row_rules.threads_busy_rule(_elements),
        row_rules.programs_rule(_programs),
    )
    source_modules: ClassVar[tuple[str, ...]] = (
        "kernelcast.kernels.ops.layernorm.triton_rows_jit",
        *pieces.SOURCE_MODULES,
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        elements = _elements(problem, columns).astype(np.float64)
        programs = _programs(problem, columns).astype(np.float64)
        return Work(
            flops=element_flops(problem) * programs * elements,
            traffic_bytes=2.0 * element_bytes(problem)
            + pieces.vector_traffic_bytes(problem, device, programs),
            programs=programs,
            warps=columns["num_warps"],
            shared_bytes=row_rules.rows_reduction_bytes(problem, columns, device),
            accumulators=elements / row_rules.threads(columns, device),
            inner_steps=1.0,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.layernorm.triton_rows_jit import norm_rows

        count, block = int(config["rows_per_program"]), row_rules.padded_columns(problem)
        constants = {
            "ROWS": count,
            "BLOCK": block,
            "EVEN_ROWS": problem["rows"] % count == 0,
            "EVEN": block == problem["columns"],
        }
        integers = {"rows": problem["rows"], "columns": problem["columns"]}
        return pieces.norm_spec(norm_rows, problem, config, integers, constants)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        programs = -(-problem["rows"] // int(config["rows_per_program"]))
        return pieces.norm_launcher(self.compile_spec(problem, config), problem, programs)
