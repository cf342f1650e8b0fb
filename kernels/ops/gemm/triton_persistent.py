"""Persistent gemm in Triton: as many programs as the device runs at once, each making many tiles of C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.gemm.triton_persistent_pieces import (
    FLATTEN,
    PIPELINE_FILLED,
    PROGRAMS_PER_CORE,
    SUM_NOT_EMPTY,
    launch_persistent,
    persistent_shared_bytes,
    program_count,
    quick_columns,
    residency_rule,
    rounds,
    tile_count,
)
from kernelcast.kernels.ops.gemm.triton_tiled import (
    TILE_PARAMETERS,
    operand_pointers,
    operand_strides,
    tile_constants,
    tiled_traffic_bytes,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import (
    GROUP_DIFFERS,
    MATMUL_RULES,
    accumulators_per_thread,
    matmul_class,
    shared_memory_rule,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("gemm")
class TritonPersistent(Variant):
    """Programs that stay: each makes every P-th tile of P programs, in the order of ``triton_tiled``.

    A program is set up once and not once a tile. With ``flatten`` one pipeline serves all of its tiles, and the loads of the
    next tile begin before the last one is stored; without, a tile ends before the next begins. Each tile is made
    by one program in one order, so the result is the same in every run.
    """

    name = "triton_persistent"
    backend = "triton"
    doc = "Triton: a fixed number of programs, each making many tiles of C"
    parameters = (*TILE_PARAMETERS, PROGRAMS_PER_CORE, FLATTEN)
    rules = (
        SUM_NOT_EMPTY,
        *MATMUL_RULES,
        Rule(
            "tiles-outnumber-programs",
            "with no more tiles than programs, each makes one at most: triton_tiled again",
            check=lambda problem, columns, device: (
                tile_count(problem, columns) > program_count(columns, device)
            ),
            explain=lambda problem, columns, device: (
                f"{tile_count(problem, columns)[0]} tiles, {program_count(columns, device)[0]} programs"
            ),
        ),
        shared_memory_rule(estimate=persistent_shared_bytes, class_of=matmul_class),
        residency_rule(persistent_shared_bytes, class_of=matmul_class),
        PIPELINE_FILLED,
        GROUP_DIFFERS,
    )
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_persistent_jit",
        "kernelcast.kernels.ops.gemm.triton_persistent_pieces",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) 14 tiles with one and two programs a core, flattened or not."""
        if subset != "default":
            return super().space(subset)
        columns = quick_columns(
            {PROGRAMS_PER_CORE.name: PROGRAMS_PER_CORE.quick, FLATTEN.name: FLATTEN.values}
        )
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
        padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
        return Work(
            flops=2.0 * padded,
            traffic_bytes=tiled_traffic_bytes(problem, columns),
            programs=np.minimum(tiles_m * tiles_n, program_count(columns, device)),
            warps=columns["num_warps"],
            shared_bytes=persistent_shared_bytes(problem, columns, device),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=rounds(problem, columns, device) * steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on: the same for every number of cores."""
        import triton

        from kernelcast.kernels.ops.gemm.triton_persistent_jit import gemm_persistent

        interpreted = not isinstance(gemm_persistent, triton.JITFunction)
        output_bytes = problem["m"] * problem["n"] * problem.element_bytes
        return KernelSpec(
            kernel=gemm_persistent,
            tensors={**operand_pointers(problem), "c_ptr": Pointer(problem.dtype, output_bytes)},
            integers={"M": problem["m"], "N": problem["n"], "K": problem["k"], **operand_strides(problem)},
            constants={
                **tile_constants(problem, config, architecture, interpreted=interpreted),
                "FLATTEN": bool(config["flatten"]),
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        count = -(-m // config["block_m"]) * -(-n // config["block_n"])
        spec = self.compile_spec(problem, config, launch_architecture(problem))
        launch = launch_persistent(spec, count, int(config["programs_per_core"]))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if count:
                launch(a, b, out)
            return out

        return run
