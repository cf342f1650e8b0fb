"""Persistent grouped gemm in Triton: as many programs as the GPU runs at once, each making one tile after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.triton_tiled import TILE_PARAMETERS, named_configs
from kernelcast.kernels.ops.grouped_gemm.triton_grouped import (
    GROUPED_RULES,
    expected_tiles,
    grouped_spec,
    grouped_work,
    programs_bound,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Where there is no GPU to ask (the interpreter), so many cores are assumed: few, so that programs make several tiles.
CORES_WITHOUT_GPU = 3


def launched_programs(columns: Columns, device: Device) -> np.ndarray:
    """Programs that are launched where there are as many tiles."""
    return columns["programs_per_core"] * device.cores


@register_variant("grouped_gemm")
class TritonGroupedPersistent(Variant):
    """Programs walk over the tiles that the offsets give, with a stride of their number.

    None is launched in vain, as some of ``triton_grouped`` are, and a program reads the offsets once for all its tiles.
    """

    name = "triton_grouped_persistent"
    backend = "triton"
    doc = "Triton: programs that stay, each making one tile of C after another"
    parameters = (
        *TILE_PARAMETERS,
        Parameter("programs_per_core", (1, 2, 4), "programs launched for each core of the GPU", quick=(1, 2)),
    )
    rules = (
        *GROUPED_RULES,
        Rule(
            "several-tiles-a-program",
            "with a program for every expected tile none makes a second one: triton_grouped with a longer way to it",
            check=lambda problem, columns, device: (
                expected_tiles(problem, columns) > launched_programs(columns, device)
            ),
            explain=lambda problem, columns, device: (
                f"{expected_tiles(problem, columns)[0]:.0f} tiles expected, "
                f"{launched_programs(columns, device)[0]} programs"
            ),
        ),
    )
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.grouped_gemm.schema",
        "kernelcast.kernels.ops.grouped_gemm.triton_grouped",
        "kernelcast.kernels.ops.grouped_gemm.triton_grouped_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) gemm's list of 55, each with one program a core."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs({"programs_per_core": (1,)})
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        return grouped_work(problem, columns, device)

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.grouped_gemm.triton_grouped_jit import grouped_persistent

        return grouped_spec(grouped_persistent, {}, problem, config, architecture)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        single = {name: np.array([value]) for name, value in config.items()}
        most = int(programs_bound(problem, single)[0])
        spec = self.compile_spec(problem, config, launch_architecture(problem))
        cores = CORES_WITHOUT_GPU
        if torch.cuda.is_available():
            cores = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        programs = min(most, int(config["programs_per_core"]) * cores)
        launch = spec.bind((programs,))

        def run(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                launch(a, b, offsets, out)
            return out

        return run
