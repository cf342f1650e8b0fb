"""Tiled mixed_gemm in Triton: one program a tile of C, the weight widened in registers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.gemm.triton_tiled import operand_strides
from kernelcast.kernels.ops.mixed_gemm.triton_pieces import (
    MIXED_RULES,
    MIXED_TILE_PARAMETERS,
    launch_target,
    mixed_constants,
    mixed_pointers,
    mixed_traffic_bytes,
    named_configs,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_rules import (
    GROUP_DIFFERS,
    STAGES_FILLED,
    accumulators_per_thread,
    matmul_shared_bytes,
    shared_memory_rule,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("mixed_gemm")
class TritonTiled(Variant):
    """A program multiplies one tile of C over all of k, on tensor cores where A's dtype allows it.

    8-bit weights are loaded, widened to A's dtype in registers, and multiplied; the scale comes last, on the float32
    sums. The weight is read as it is stored, and never written.
    """

    name = "triton_tiled"
    backend = "triton"
    doc = "Triton: one program a tile of C, weights widened in registers"
    parameters = MIXED_TILE_PARAMETERS
    rules = (*MIXED_RULES, shared_memory_rule(), STAGES_FILLED, GROUP_DIFFERS)
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.mixed_gemm.triton_pieces",
        "kernelcast.kernels.ops.mixed_gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) a list that is known to serve."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs()
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
        area = tiles_m * columns["block_m"] * tiles_n * columns["block_n"]
        return Work(
            flops=2.0 * area * steps * columns["block_k"] + area,
            traffic_bytes=mixed_traffic_bytes(problem, columns),
            programs=tiles_m * tiles_n,
            warps=columns["num_warps"],
            shared_bytes=matmul_shared_bytes(problem, columns, device),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.mixed_gemm.triton_tiled_jit import mixed_gemm_tiled

        interpreted = not isinstance(mixed_gemm_tiled, triton.JITFunction)
        output_bytes = problem["m"] * problem["n"] * problem.element_bytes
        return KernelSpec(
            kernel=mixed_gemm_tiled,
            tensors={
                **mixed_pointers(problem),
                "scale_ptr": Pointer(problem.dtype, problem["n"] * problem.element_bytes),
                "c_ptr": Pointer(problem.dtype, output_bytes),
            },
            integers={"M": problem["m"], "N": problem["n"], "K": problem["k"], **operand_strides(problem)},
            constants=mixed_constants(problem, config, architecture, interpreted=interpreted),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        programs = -(-m // config["block_m"]) * -(-n // config["block_n"])
        launch = self.compile_spec(problem, config, launch_target()).bind((programs,))

        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                launch(a, b, scale, out)
            return out

        return run
