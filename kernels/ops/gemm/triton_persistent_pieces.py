"""What gemm variants share whose programs stay and make many tiles: counts, rules, estimates, launching."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Parameter
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import (
    STAGES_FILLED,
    accumulators_per_thread,
    compute_capability,
    matmul_shared_bytes,
    operands,
    pipeline_buffers,
    reads_operands_from_shared,
    stages_filled,
    tiles,
    uses_tensor_cores,
)

if TYPE_CHECKING:
    import torch

#: Programs that stand for a core's under the interpreter. It divides few numbers, so that rounds stay ragged.
INTERPRETED_CORES = 3
#: Shared memory that NVIDIA's driver keeps of each resident block, from compute capability 8.0 on.
RESERVED_SHARED_BYTES = 1024
#: Rows of one warp's instruction (mma, wgmma).
MMA_ROWS = 16
#: Without tensor cores a thread holds 4 x 4 float32 next to each other.
FMA_BYTES_PER_THREAD = 64

PROGRAMS_PER_CORE = Parameter(
    "programs_per_core", (1, 2, 4), "programs for each core of the device", quick=(1, 2)
)
FLATTEN = Parameter("flatten", (False, True), "whether the pipeline over k runs on from tile to tile")

# (block_m, block_k, block_n, num_stages, num_warps); group_m is 8. Tiles that are large enough to be worth a program
# of their own, and a few for outputs of few rows or columns with many tiles all the same.
QUICK_TILES = (
    (16, 64, 64, 4, 4),
    (16, 128, 32, 3, 4),
    (32, 64, 64, 4, 4),
    (64, 64, 64, 3, 4),
    (64, 32, 128, 4, 4),
    (64, 64, 128, 3, 4),
    (64, 64, 256, 3, 8),
    (128, 32, 64, 3, 4),
    (128, 64, 64, 3, 8),
    (128, 32, 128, 3, 4),
    (128, 64, 128, 3, 4),
    (128, 64, 128, 3, 8),
    (128, 64, 256, 3, 8),
    (256, 64, 128, 3, 8),
)


def quick_columns(extra: Mapping[str, tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """:data:`QUICK_TILES` as columns, crossed with every value of the ``extra`` parameters."""
    rows = np.array(QUICK_TILES)
    columns = {
        "block_m": rows[:, 0],
        "block_n": rows[:, 2],
        "block_k": rows[:, 1],
        "group_m": np.full(len(rows), 8),
        "num_warps": rows[:, 4],
        "num_stages": rows[:, 3],
    }
    for name, values in extra.items():
        count = len(columns["block_m"])
        columns = {key: np.tile(column, len(values)) for key, column in columns.items()}
        columns[name] = np.repeat(np.array(values), count)
    return columns


@cache
def core_count(index: int) -> int:
    """Streaming multiprocessors or compute units of a CUDA device; :data:`INTERPRETED_CORES` for the CPU (-1)."""
    if index < 0:
        return INTERPRETED_CORES
    import torch

    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def launch_persistent(spec: KernelSpec, work_items: int, programs_per_core: int) -> Callable[..., None]:
    """As ``spec.bind``, with the programs that the device of the first tensor runs at once, or fewer for few items."""
    bound: dict[int, Callable[..., None]] = {}

    def launch(*tensors: torch.Tensor) -> None:
        index = tensors[0].get_device()
        if index not in bound:
            bound[index] = spec.bind((min(work_items, programs_per_core * core_count(index)),))
        bound[index](*tensors)

    return launch


def tile_count(problem: Problem, columns: Columns) -> np.ndarray:
    """Tiles of C."""
    along_m, along_n, _ = tiles(problem, columns)
    return along_m * along_n


def program_count(columns: Columns, device: Device) -> np.ndarray:
    """Programs that a device is given, were there tiles for all of them."""
    return columns["programs_per_core"] * max(device.cores, 1)


def rounds(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Tiles of the program that makes the most."""
    return -(-tile_count(problem, columns) // program_count(columns, device))


def mma_warp_rows(columns: Columns) -> np.ndarray:
    """Warps along the rows of a tile that ``mma`` multiplies: the side with more instructions left takes the next pair."""
    along_m, along_n = np.ones_like(columns["num_warps"]), np.ones_like(columns["num_warps"])
    while np.any(more := along_m * along_n < columns["num_warps"]):
        taller = (columns["block_m"] // (MMA_ROWS * along_m) >= columns["block_n"] // (8 * along_n)) & (
            columns["block_m"] > MMA_ROWS * along_m
        )
        along_m = np.where(more & taller, 2 * along_m, along_m)
        along_n = np.where(more & ~taller, 2 * along_n, along_n)
    return along_m


def kept_output_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory in which the output tile is rearranged while the tiles of the next one arrive, in bytes.

    Threads hold rows of the product as the multiplying instruction leaves them, and store 16 bytes of a row each. Rows
    that a thread holds in both orders go through one after the other, and each halves the memory. What the compiler
    makes of it on chips without ``wgmma`` and ``tcgen05`` was fitted.
    """
    size = float(problem.element_bytes) * columns["block_m"] * columns["block_n"]
    held = accumulators_per_thread(columns, device)
    if not uses_tensor_cores(problem, device):
        return np.minimum(size, FMA_BYTES_PER_THREAD * columns["num_warps"] * max(device.warp_size, 1))
    capability = compute_capability(device.architecture)
    scattered = problem["n"] % 16 != 0  # elements are stored one at a time
    if scattered and capability // 10 != 9:
        return size
    if capability < 90:
        if problem.element_bytes == 2:
            halved = (columns["num_warps"] == 4) & (columns["block_n"] >= 128) & (held >= 64)
            halved |= (columns["block_n"] == 256) & (held >= 64)
            return np.where(halved, size / 2, size)
        return np.where(held >= 64, np.where(columns["block_m"] > 128, size / 2, size / 4), size)
    lanes_n = np.clip(columns["block_n"] * problem.element_bytes // 16, 1, 32)
    warps_n = np.clip(columns["block_n"] * problem.element_bytes // (16 * lanes_n), 1, columns["num_warps"])
    stored_rows = (32 // lanes_n) * (columns["num_warps"] // warps_n)
    from_shared = reads_operands_from_shared(problem, columns, device)
    warps_m = np.where(
        from_shared,
        np.where(columns["block_m"] >= 128, columns["num_warps"], np.minimum(columns["num_warps"], 4)),
        mma_warp_rows(columns),
    )
    alike = np.log2(np.maximum(columns["block_m"] / np.maximum(stored_rows, MMA_ROWS * warps_m), 1))
    alike = alike + ((stored_rows <= 8) & (columns["block_m"] > 8)) - (problem.element_bytes == 4)
    halves = size / 2.0 ** np.maximum(alike, 0)
    if capability // 10 in (10, 11):
        return np.where(from_shared, np.where(held >= 32, size / 4, size), halves)
    return np.where(scattered & (columns["block_n"] < 32 * columns["num_warps"]), size, halves)


def persistent_shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of one block, in bytes: as ``triton_tiled``, or where the pipeline runs on, the output besides."""
    plain = matmul_shared_bytes(problem, columns, device)
    if device.architecture.startswith("gfx"):
        return plain
    buffers = pipeline_buffers(problem, columns, device)
    a, b = operands(problem)
    if compute_capability(device.architecture) // 10 in (10, 11) and not (a.vectorised and b.vectorised):
        # tcgen05 then reads its operands from one tile less.
        buffers = np.minimum(buffers, np.maximum(columns["num_stages"] - 1, 1))
    ahead, alone = np.zeros(len(buffers)), np.zeros(len(buffers))
    for operand, side in ((a, "block_m"), (b, "block_n")):
        tile = float(operand.element_bytes) * columns[side] * columns["block_k"]
        if operand.vectorised:
            ahead = ahead + buffers * tile
        else:
            alone = alone + tile
    # A tile that is not copied ahead takes turns with the output.
    output = kept_output_bytes(problem, columns, device)
    runs_on = np.where(
        columns["num_stages"] > 1, ahead + np.maximum(alone, output), np.maximum(ahead + alone, output)
    )
    return np.where(columns["flatten"], runs_on, plain)


def _resident(
    problem: Problem,
    columns: Columns,
    device: Device,
    estimate: Callable[[Problem, Columns, Device], np.ndarray],
) -> np.ndarray:
    programs = columns["programs_per_core"]
    met = np.ones(len(programs), dtype=bool)
    if device.max_threads_per_core:
        met &= programs * columns["num_warps"] * max(device.warp_size, 1) <= device.max_threads_per_core
    if device.registers_per_core:
        met &= programs * columns["block_m"] * columns["block_n"] <= device.registers_per_core
    if device.shared_bytes_per_core:
        reserved = RESERVED_SHARED_BYTES if device.vendor == "nvidia" else 0
        met &= programs * (estimate(problem, columns, device) + reserved) <= device.shared_bytes_per_core
    return met


def residency_rule(
    estimate: Callable[[Problem, Columns, Device], np.ndarray],
    class_of: Callable[[Problem, Device], Hashable] | None = None,
) -> Rule:
    """The rule that all programs of a core run at once, for kernels with this estimate of shared memory.

    ``class_of`` says what the estimate looks at, where many problems share that.
    """
    return Rule(
        "programs-resident",
        "programs that share the work evenly must run at once: their threads, accumulators and shared memory must fit "
        "one core together, or the last ones begin when the first have ended",
        check=lambda problem, columns, device: _resident(problem, columns, device, estimate),
        explain=lambda problem, columns, device: (
            f"{columns['programs_per_core'][0]} programs of {columns['num_warps'][0]} warps, "
            f"{columns['block_m'][0] * columns['block_n'][0]} accumulators and "
            f"{estimate(problem, columns, device)[0]:.0f} bytes"
        ),
        class_of=class_of,
    )


SUM_NOT_EMPTY = Rule(
    "sum-not-empty",
    "a sum of no products is zero: there is no work to share among programs",
    check=lambda problem, columns, device: problem["k"] > 0,
    explain=lambda problem, columns, device: f"k={problem['k']}",
)


def pipeline_steps(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Steps that one pipeline makes: those of a tile, or of all tiles of a program where it runs on."""
    one_tile = tiles(problem, columns)[2]
    return np.where(columns["flatten"], one_tile * rounds(problem, columns, device), one_tile)


PIPELINE_FILLED = Rule(
    STAGES_FILLED.name,
    STAGES_FILLED.reason,
    check=lambda problem, columns, device: stages_filled(columns, pipeline_steps(problem, columns, device)),
    explain=lambda problem, columns, device: (
        f"{columns['num_stages'][0]} stages, {pipeline_steps(problem, columns, device)[0]} steps"
    ),
)
