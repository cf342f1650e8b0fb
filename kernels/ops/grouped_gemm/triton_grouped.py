"""Grouped gemm in Triton: one program a tile of C, which finds its group from the offsets on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.gemm.triton_tiled import TILE_PARAMETERS, named_configs, tile_constants
from kernelcast.kernels.ops.grouped_gemm.schema import (
    expected_busy_groups,
    expected_group_rows,
    expected_row_tiles,
    row_tiles_bound,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import (
    ACCUMULATORS,
    BLOCK_THREADS,
    BLOCKS_FIT,
    DIMENSIONS,
    DTYPE_SUPPORTED,
    GRID,
    GROUP_DIFFERS,
    MAX_INT32,
    NEEDS_GPU,
    REGISTERS,
    STAGES_FILLED,
    TENSOR_CORES,
    THREADS_BUSY,
    accumulators_per_thread,
    matmul_shared_bytes,
    operands,
    shared_memory_rule,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Groups whose ends a program holds, spread over its threads.
MOST_GROUPS = 1024
FEWEST_SLOTS = 16


def of_one_group(problem: Problem) -> Problem:
    """The problem as a tile sees it: with the rows of the group that a row is expected to belong to."""
    dims = {**dict(problem.dims), "m": expected_group_rows(problem)}
    return replace(problem, dims=tuple(dims.items()))


def programs_bound(problem: Problem, columns: Columns) -> np.ndarray:
    """The most tiles of C that any offsets can give."""
    return row_tiles_bound(problem, columns["block_m"]) * tiles(problem, columns)[1]


def expected_tiles(problem: Problem, columns: Columns) -> np.ndarray:
    """Expected tiles of C under the problem's distribution: those along the rows times those along n."""
    return expected_row_tiles(problem, columns["block_m"]) * tiles(problem, columns)[1]


def _group_differs(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    rows = row_tiles_bound(problem, columns["block_m"])
    height = np.where(tiles(problem, columns)[1] <= 1, 1, rows)
    group = columns["group_m"]
    return (group == 8) | (np.minimum(group, height) != np.minimum(8, height))


GROUPS_FIT = Rule(
    "groups-fit",
    f"every program holds the ends of all groups in its registers: at most {MOST_GROUPS} leave room for the product",
    check=lambda problem, columns, device: problem["groups"] <= MOST_GROUPS,
    explain=lambda problem, columns, device: f"groups={problem['groups']}",
)
GROUP_BLOCKS_FIT = Rule(
    BLOCKS_FIT.name,
    f"{BLOCKS_FIT.reason}; of m counts what a group is expected to have, as no tile has rows of two groups",
    check=lambda problem, columns, device: BLOCKS_FIT.check(of_one_group(problem), columns, device),
    explain=lambda problem, columns, device: (
        BLOCKS_FIT.explain(of_one_group(problem), columns, device) if BLOCKS_FIT.explain else ""
    ),
)
GROUP_GRID = Rule(
    GRID.name,
    GRID.reason,
    check=lambda problem, columns, device: programs_bound(problem, columns) <= MAX_INT32,
    explain=lambda problem, columns, device: f"{programs_bound(problem, columns)[0]} blocks",
)
GROUP_ORDER_DIFFERS = Rule(
    GROUP_DIFFERS.name,
    GROUP_DIFFERS.reason,
    check=_group_differs,
    explain=lambda problem, columns, device: (
        f"group_m={columns['group_m'][0]}, at most {row_tiles_bound(problem, columns['block_m'])[0]} x "
        f"{tiles(problem, columns)[1][0]} tiles"
    ),
)

#: The rules of every Triton kernel with one group a tile.
GROUPED_RULES = (
    NEEDS_GPU,
    DTYPE_SUPPORTED,
    TENSOR_CORES,
    DIMENSIONS,
    GROUPS_FIT,
    BLOCK_THREADS,
    GROUP_BLOCKS_FIT,
    GROUP_GRID,
    ACCUMULATORS,
    REGISTERS,
    THREADS_BUSY,
    shared_memory_rule(),
    STAGES_FILLED,
    GROUP_ORDER_DIFFERS,
)


def grouped_work(problem: Problem, columns: Columns, device: Device) -> Work:
    """The work of the tiles that are expected; programs that find no tile cost next to nothing and are left out.

    Expected tiles: see :func:`expected_row_tiles`. A is read once for every column of tiles; the weights of a group once
    for every row of tiles that it has.
    """
    m, n, k = (float(problem[name]) for name in ("m", "n", "k"))
    rows = expected_row_tiles(problem, columns["block_m"])
    _, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
    weights = np.maximum(rows, expected_busy_groups(problem)) * k * n
    padded = rows * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
    return Work(
        flops=2.0 * padded,
        traffic_bytes=problem.element_bytes * (m * k * np.maximum(tiles_n, 1.0) + weights + m * n),
        programs=rows * tiles_n,
        warps=columns["num_warps"],
        shared_bytes=matmul_shared_bytes(problem, columns, device),
        accumulators=accumulators_per_thread(columns, device),
        inner_steps=steps,
    )


def grouped_spec(
    kernel: Any, integers: Mapping[str, int], problem: Problem, config: Mapping[str, Any], architecture: str
) -> KernelSpec:
    """One of this folder's kernels; ``integers`` are those before N."""
    import triton

    groups, m, n, k = (problem[name] for name in ("groups", "m", "n", "k"))
    a, b = operands(problem)
    interpreted = not isinstance(kernel, triton.JITFunction)
    constants = tile_constants(problem, config, architecture, interpreted=interpreted)
    # Rows are always masked: groups begin and end anywhere.
    del constants["EVEN_M"]
    size = problem.element_bytes
    return KernelSpec(
        kernel=kernel,
        tensors={
            "a_ptr": Pointer(problem.dtype, m * k * size),
            "b_ptr": Pointer(problem.dtype, groups * k * n * size),
            "offsets_ptr": Pointer("int32", 4 * groups),
            "c_ptr": Pointer(problem.dtype, m * n * size),
        },
        integers={
            **integers,
            "N": n,
            "K": k,
            "stride_am": a.strides[0],
            "stride_ak": a.strides[1],
            "stride_bg": k * n,
            "stride_bk": b.strides[0],
            "stride_bn": b.strides[1],
        },
        constants={
            "GROUPS": groups,
            "SLOTS": max(FEWEST_SLOTS, 1 << (groups - 1).bit_length()),
            **constants,
        },
        options=launch_options(config),
    )


@register_variant("grouped_gemm")
class TritonGrouped(Variant):
    """A program multiplies one tile of C over all of k. The grid is large enough for any offsets."""

    name = "triton_grouped"
    backend = "triton"
    doc = "Triton: one program a tile of C, its group found on the GPU"
    parameters = TILE_PARAMETERS
    rules = GROUPED_RULES
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.grouped_gemm.schema",
        "kernelcast.kernels.ops.grouped_gemm.triton_grouped_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) gemm's list of 55 that are known to serve."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs()
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        return grouped_work(problem, columns, device)

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.grouped_gemm.triton_grouped_jit import grouped_tiled

        row_tiles = int(row_tiles_bound(problem, int(config["block_m"])))
        return grouped_spec(grouped_tiled, {"row_tiles": row_tiles}, problem, config, architecture)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        programs = int(row_tiles_bound(problem, int(config["block_m"]))) * -(-n // int(config["block_n"]))
        launch = self.compile_spec(problem, config, launch_architecture(problem)).bind((programs,))

        def run(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                launch(a, b, offsets, out)
            return out

        return run
