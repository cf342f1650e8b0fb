"""What batched_gemm variants share whose programs stay and make many tiles: counts over the batch, and rules on them.

The rules are those of gemm's variants with the batch counted. Triton itself is not needed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.ops.batched_gemm.triton_pieces import programs as tile_count
from kernelcast.kernels.ops.gemm.triton_persistent_pieces import PIPELINE_FILLED, program_count
from kernelcast.kernels.ops.gemm.triton_tiled import tiled_traffic_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import GRID, MAX_INT32, accumulators_per_thread, stages_filled, tiles
from kernelcast.kernels.work import Work


def rounds(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Tiles of the program that makes the most."""
    return np.ceil(tile_count(problem, columns) / program_count(columns, device))


def pipeline_steps(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Steps that one pipeline makes: those of a tile, or of all tiles of a program where it runs on."""
    one_tile = tiles(problem, columns)[2]
    return np.where(columns["flatten"], one_tile * rounds(problem, columns, device), one_tile)


def seen_tiles(problem: Problem, columns: Columns, device: Device) -> str:
    """The counts that decide whether programs make many tiles each."""
    return f"{tile_count(problem, columns)[0]:.0f} tiles, {program_count(columns, device)[0]} programs"


TILES_COUNTED = Rule(
    GRID.name,
    "programs count the tiles of the whole batch in 32 bits, up to one round past the last",
    check=lambda problem, columns, device: (
        tile_count(problem, columns) + program_count(columns, device) <= MAX_INT32
    ),
    explain=seen_tiles,
)
BATCHED_PIPELINE_FILLED = replace(
    PIPELINE_FILLED,
    check=lambda problem, columns, device: stages_filled(columns, pipeline_steps(problem, columns, device)),
    explain=lambda problem, columns, device: (
        f"{columns['num_stages'][0]} stages, {pipeline_steps(problem, columns, device)[0]:.0f} steps"
    ),
)


def over_the_batch(rules: Iterable[Rule], changed: Mapping[str, Rule]) -> tuple[Rule, ...]:
    """The rules of a gemm variant, with those on the number of tiles, and the ``changed`` ones, counting the batch."""
    counting = {rule.name: rule for rule in (TILES_COUNTED, BATCHED_PIPELINE_FILLED)} | dict(changed)
    return tuple(counting.get(rule.name, rule) for rule in rules)


def persistent_work(problem: Problem, columns: Columns, device: Device, *, shared_bytes: np.ndarray) -> Work:
    """The work of programs that share the tiles of all products."""
    tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
    padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
    return Work(
        flops=2.0 * problem["batch"] * padded,
        traffic_bytes=problem["batch"] * tiled_traffic_bytes(problem, columns),
        programs=np.minimum(tile_count(problem, columns), program_count(columns, device)),
        warps=columns["num_warps"],
        shared_bytes=shared_bytes,
        accumulators=accumulators_per_thread(columns, device),
        inner_steps=rounds(problem, columns, device) * steps,
    )
