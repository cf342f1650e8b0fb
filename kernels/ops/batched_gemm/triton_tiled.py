"""Tiled batched_gemm in Triton: one program a tile of one product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.batched_gemm import triton_pieces as pieces
from kernelcast.kernels.ops.gemm.triton_tiled import (
    TILE_PARAMETERS,
    named_configs,
    tile_constants,
    tiled_traffic_bytes,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
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


@register_variant("batched_gemm")
class TritonTiled(Variant):
    """A program multiplies one tile of one product over all of k, on tensor cores where the dtype allows it.

    The tiles of one product are neighbours in the grid, and the batch comes in its first dimension too.
    """

    name = "triton_tiled"
    backend = "triton"
    doc = "Triton: one program a tile of one product"
    parameters = TILE_PARAMETERS
    rules = (*pieces.BATCHED_RULES, shared_memory_rule(), STAGES_FILLED, GROUP_DIFFERS)
    source_modules = (
        "kernelcast.kernels.ops.batched_gemm.triton_pieces",
        "kernelcast.kernels.ops.batched_gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the list of gemm's ``triton_tiled``."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs()
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
        padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
        return Work(
            flops=2.0 * problem["batch"] * padded,
            traffic_bytes=problem["batch"] * tiled_traffic_bytes(problem, columns),
            programs=pieces.programs(problem, columns),
            warps=columns["num_warps"],
            shared_bytes=matmul_shared_bytes(problem, columns, device),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.batched_gemm.triton_tiled_jit import batched_tiled

        interpreted = not isinstance(batched_tiled, triton.JITFunction)
        return KernelSpec(
            kernel=batched_tiled,
            tensors={**pieces.input_pointers(problem), **pieces.output_pointer(problem)},
            integers=pieces.sizes_and_strides(problem),
            constants=tile_constants(problem, config, architecture, interpreted=interpreted),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        batch, m, n = problem["batch"], problem["m"], problem["n"]
        count = batch * -(-m // int(config["block_m"])) * -(-n // int(config["block_n"]))
        launch = self.compile_spec(problem, config, launch_architecture(problem)).bind((count,))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((batch, m, n), dtype=a.dtype, device=a.device)
            if count:
                launch(a, b, out)
            return out

        return run
