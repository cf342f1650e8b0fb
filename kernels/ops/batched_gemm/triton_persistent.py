"""Persistent batched_gemm in Triton: as many programs as the device runs at once, each making tiles of many products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.batched_gemm import triton_persistent_pieces as stay
from kernelcast.kernels.ops.batched_gemm import triton_pieces as pieces
from kernelcast.kernels.ops.gemm import triton_persistent as single
from kernelcast.kernels.ops.gemm.triton_persistent_pieces import (
    FLATTEN,
    PROGRAMS_PER_CORE,
    launch_persistent,
    persistent_shared_bytes,
    program_count,
    quick_columns,
)
from kernelcast.kernels.ops.gemm.triton_tiled import tile_constants
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

(_OUTNUMBERED,) = (rule for rule in single.TritonPersistent.rules if rule.name == "tiles-outnumber-programs")
TILES_OUTNUMBER_PROGRAMS = replace(
    _OUTNUMBERED,
    check=lambda problem, columns, device: pieces.programs(problem, columns) > program_count(columns, device),
    explain=stay.seen_tiles,
)


@register_variant("batched_gemm")
class TritonPersistent(Variant):
    """Programs that stay: each makes every P-th tile of P programs, through the tiles of all products in turn.

    The order is that of ``triton_tiled``. Many products that are too small to fill the device alone still give each program
    many tiles; with ``flatten`` the loads of the next one begin before the last is stored. Each tile is made by one
    program in one order, so the result is the same in every run.
    """

    name = "triton_persistent"
    backend = "triton"
    doc = "Triton: a fixed number of programs, each making many tiles of the whole batch"
    parameters = single.TritonPersistent.parameters
    rules = stay.over_the_batch(
        single.TritonPersistent.rules, {TILES_OUTNUMBER_PROGRAMS.name: TILES_OUTNUMBER_PROGRAMS}
    )
    source_modules = (
        "kernelcast.kernels.ops.batched_gemm.triton_persistent_jit",
        "kernelcast.kernels.ops.batched_gemm.triton_persistent_pieces",
        "kernelcast.kernels.ops.batched_gemm.triton_pieces",
        "kernelcast.kernels.ops.batched_gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.gemm.triton_persistent",
        "kernelcast.kernels.ops.gemm.triton_persistent_pieces",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the list of gemm's ``triton_persistent``."""
        if subset != "default":
            return super().space(subset)
        columns = quick_columns(
            {PROGRAMS_PER_CORE.name: PROGRAMS_PER_CORE.quick, FLATTEN.name: FLATTEN.values}
        )
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        shared_bytes = persistent_shared_bytes(problem, columns, device)
        return stay.persistent_work(problem, columns, device, shared_bytes=shared_bytes)

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on: the same for every number of cores."""
        import triton

        from kernelcast.kernels.ops.batched_gemm.triton_persistent_jit import batched_persistent

        interpreted = not isinstance(batched_persistent, triton.JITFunction)
        return KernelSpec(
            kernel=batched_persistent,
            tensors={**pieces.input_pointers(problem), **pieces.output_pointer(problem)},
            integers={"batch": problem["batch"], **pieces.sizes_and_strides(problem)},
            constants={
                **tile_constants(problem, config, architecture, interpreted=interpreted),
                "FLATTEN": bool(config["flatten"]),
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        batch, m, n = problem["batch"], problem["m"], problem["n"]
        count = batch * -(-m // int(config["block_m"])) * -(-n // int(config["block_n"]))
        spec = self.compile_spec(problem, config, launch_architecture(problem))
        launch = launch_persistent(spec, count, int(config["programs_per_core"]))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((batch, m, n), dtype=a.dtype, device=a.device)
            if count:
                launch(a, b, out)
            return out

        return run
