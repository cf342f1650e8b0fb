"""Layer norm in Triton: one program a row, which it holds whole."""

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
from kernelcast.kernels.ops.softmax.triton_pieces import reduction_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

#: 32-bit registers of a core where the device does not say: those of NVIDIA's.
REGISTERS_OF_A_CORE = 65536


def _elements(problem: Problem, columns: Columns) -> np.ndarray:
    return np.full(len(columns["num_warps"]), row_rules.padded_columns(problem))


def _registers(problem: Problem, columns: Columns) -> np.ndarray:
    return pieces.registers_of_an_element(problem) * _elements(problem, columns)


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return np.full(len(columns["num_warps"]), problem["rows"])


@register_variant("layernorm")
class TritonRow(Variant):
    """A program reads its row once, padded to a power of two, and keeps it in registers until it is written.

    The variance is that of the centred values in registers. There is no loop, so a software pipeline would change
    nothing: the only parameter is the number of warps.
    """

    name = "triton_row"
    backend = "triton"
    doc = "Triton: one program a row, held in registers"
    parameters = (Parameter("num_warps", (1, 2, 4, 8, 16), "warps of a program"),)
    rules = (
        *row_rules.COMMON_RULES,
        row_rules.ROW_FITS,
        Rule(
            "register-file",
            "a program's row, padded to a power of two, may take half of the registers of a core: weight, bias and addresses "
            "need some too, and a kernel that lacks them runs from memory",
            check=lambda problem, columns, device: (
                2 * row_rules.padded_columns(problem) <= (device.registers_per_core or REGISTERS_OF_A_CORE)
            ),
            explain=lambda problem, columns, device: (
                f"{row_rules.padded_columns(problem)} values, {device.registers_per_core or REGISTERS_OF_A_CORE} registers"
            ),
        ),
        row_rules.registers_rule(_registers, held=1),
        row_rules.threads_busy_rule(_elements),
        row_rules.programs_rule(_programs),
    )
    source_modules: ClassVar[tuple[str, ...]] = (
        "kernelcast.kernels.ops.layernorm.triton_row_jit",
        *pieces.SOURCE_MODULES,
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        padded, rows = float(row_rules.padded_columns(problem)), float(problem["rows"])
        vectors = pieces.vector_traffic_bytes(problem, device, rows)
        return Work(
            flops=element_flops(problem) * rows * padded,
            traffic_bytes=2.0 * element_bytes(problem) + vectors,
            programs=rows,
            warps=columns["num_warps"],
            shared_bytes=reduction_bytes(1, columns),
            accumulators=padded / row_rules.threads(columns, device),
            inner_steps=1.0,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.layernorm.triton_row_jit import norm_row

        block = row_rules.padded_columns(problem)
        constants = {"BLOCK": block, "EVEN": block == problem["columns"]}
        return pieces.norm_spec(norm_row, problem, config, {"columns": problem["columns"]}, constants)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        return pieces.norm_launcher(self.compile_spec(problem, config), problem, problem["rows"])
