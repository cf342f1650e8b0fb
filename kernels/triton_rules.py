"""Rules that Triton matrix products share, and the resource estimates behind them. Triton itself is not needed here.

Every check is vectorised over the columns ``block_m``, ``block_n``, ``block_k``, ``num_warps`` and ``num_stages`` of
the candidates of one problem with the dimensions m, n and k. The estimates were fitted to what Triton 3.9 compiles for
sm80, sm90, sm100, sm120, gfx942 and gfx950 (``tests/kernels/test_compile.py`` holds them to it).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kernelcast.kernels.candidate import Columns, remembered
from kernelcast.kernels.device import Device
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_operands import (
    BYTES_OF_ONE_COPY,
    LARGEST_BLOCK,
    compute_capability,
    device_class,
    largest_useful_block,
    matmul_class,
    operands,
)
from kernelcast.kernels.triton_operands import (
    MIN_TILE as MIN_TILE,
)
from kernelcast.kernels.triton_scratch import OutputTile, scratch_bytes, tensor_memory_scratch_bytes

#: Threads of a block, on every GPU that Triton compiles for.
MAX_BLOCK_THREADS = 1024
#: Accumulators of one thread: 256 spill on every architecture that was compiled for, 128 need not.
MAX_ACCUMULATORS = 128
#: Estimated registers of one thread beyond which a kernel is refused. It lies above the 255 that there are: recorded
#: winners on A100 and H100 spill a little (up to 320 by this estimate); beyond, spills grow to kilobytes a thread.
MAX_REGISTERS = 320
#: What 32-bit integers count. The side of the largest tile is kept free below it, as masked lanes count too.
MAX_INT32 = 2**31 - 1
#: Shared memory of gfx950's padded tiles over that of the tiles alone.
GFX950_PADDING = 1.04
#: float32 output tiles of up to so many bytes are rearranged at once.
OUTPUT_BYTES_AT_ONCE = 32768


def input_precision(problem: Problem, architecture: str) -> str:
    """``tl.dot``'s input precision: TF32 where the problem allows it and the hardware has it.

    NVIDIA's chips have it from compute capability 8.0 on, of AMD's gfx942 alone; permission to round is no duty to do
    so. An architecture that is not named counts as one that has it.
    """
    if architecture.startswith("gfx"):
        has_tf32 = architecture == "gfx942"
    else:
        has_tf32 = compute_capability(architecture) >= 80 or not architecture
    return "tf32" if problem.allow_tf32 and has_tf32 else "ieee"


def uses_tensor_cores(problem: Problem, device: Device) -> bool:
    """Whether products run on matrix units: 16-bit and TF32 inputs; on AMD's data-center chips float32 too."""
    if device.architecture.startswith("gfx"):
        return True
    return problem.dtype != "float32" or input_precision(problem, device.architecture) == "tf32"


def reads_operands_from_shared(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Where warp groups multiply straight from shared memory (``wgmma`` of sm90, ``tcgen05`` of sm100).

    They take tiles of at least 64 rows and a multiple of four warps; other tiles run as on older chips.
    """
    capability = compute_capability(device.architecture)
    available = (90 <= capability < 120) and uses_tensor_cores(problem, device)
    return available & (columns["block_m"] >= 64) & (columns["num_warps"] >= 4)


def pipeline_buffers(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Copies of an operand's tile that lie in shared memory at once.

    A pipeline of S stages holds S - 1 tiles where the product reads registers (the last stage's tile has been copied
    out), and S where it reads shared memory, or where copies bypass the registers (gfx950). One stage means no
    pipeline, and one tile.
    """
    stages = columns["num_stages"]
    if device.architecture.startswith("gfx95"):
        return stages
    from_shared = reads_operands_from_shared(problem, columns, device)
    return np.where(from_shared, stages, np.maximum(stages - 1, 1))


def matmul_shared_bytes(
    problem: Problem, columns: Columns, device: Device, *, output_bytes: int | None = None
) -> np.ndarray:
    """Shared memory of one block, in bytes: the buffered tiles of A and B, or the output tile if that is larger.

    The output has the problem's dtype, unless ``output_bytes`` names the bytes of its elements.
    """

    def larger(columns: Columns) -> np.ndarray:
        return np.maximum(
            operand_shared_bytes(problem, columns, device),
            output_shared_bytes(problem, columns, device, output_bytes=output_bytes),
        )

    return remembered(columns, ("shared bytes", output_bytes, matmul_class(problem, device)), larger)


def operand_shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of the tiles of A and B that a block holds at once, in bytes."""
    a, b = operands(problem)
    buffers = pipeline_buffers(problem, columns, device).astype(np.float64)
    a_bytes = columns["block_m"] * columns["block_k"] * float(a.element_bytes)
    b_bytes = columns["block_k"] * columns["block_n"] * float(b.element_bytes)
    if device.architecture.startswith("gfx95"):
        # Rows are padded so that they start in different banks.
        return GFX950_PADDING * buffers * (a_bytes + b_bytes)
    # Operands without asynchronous copies are not buffered ahead; tcgen05 keeps two tiles of them all the same.
    alone = np.minimum(
        buffers, np.where(_is_blackwell(device) & (buffers == columns["num_stages"]), 2.0, 1.0)
    )
    b_loaded = b_bytes * (buffers if b.vectorised else alone)
    if b.element_bytes < a.element_bytes:
        # B is widened in registers. Where warp groups multiply they read it from shared memory all the same: one tile
        # of widened elements lies there, beside the stages of the narrow ones if these are loaded ahead.
        ahead = np.where(b.vectorised, columns["num_stages"] - 1.0, 0.0)
        widened = a.element_bytes / b.element_bytes
        from_shared = reads_operands_from_shared(problem, columns, device)
        b_loaded = np.where(from_shared, b_bytes * (ahead + widened), b_loaded)
    loaded = a_bytes * (buffers if a.vectorised else alone) + b_loaded
    if device.architecture.startswith("gfx"):
        # Unpipelined, the tiles of A and B take turns in one place, and outputs are stored from registers.
        taking_turns = (columns["num_stages"] == 1) | (not a.vectorised and not b.vectorised)
        return np.where(taking_turns, np.maximum(a_bytes, b_bytes), loaded)
    return loaded


def output_shared_bytes(
    problem: Problem, columns: Columns, device: Device, *, output_bytes: int | None = None
) -> np.ndarray:
    """Shared memory in which the output tile is rearranged, in bytes. AMD's kernels store from registers."""
    if device.architecture.startswith("gfx"):
        return np.zeros(len(columns["block_m"]))
    size = output_bytes or problem.element_bytes
    if not uses_tensor_cores(problem, device):
        # Large tiles in two halves.
        output = columns["block_m"] * columns["block_n"] * float(size)
        output = np.minimum(output, np.maximum(output / 2, OUTPUT_BYTES_AT_ONCE))
        return np.where(columns["num_warps"] > 1, output, 0.0)
    from_shared = reads_operands_from_shared(problem, columns, device)
    tile = OutputTile(
        columns["block_m"],
        columns["block_n"],
        columns["num_warps"],
        element_bytes=size,
        aligned=problem["n"] % 16 == 0,
        warp_groups=from_shared,
        stores_matrices=compute_capability(device.architecture) >= 90,
    )
    if not _is_blackwell(device):
        return scratch_bytes(tile)
    return np.where(from_shared, tensor_memory_scratch_bytes(tile), scratch_bytes(tile))


def accumulators_per_thread(columns: Columns, device: Device) -> np.ndarray:
    """float32 accumulators that one thread holds."""
    lanes = max(device.warp_size, 1)
    return remembered(
        columns,
        ("accumulators", lanes),
        lambda columns: columns["block_m"] * columns["block_n"] / (lanes * columns["num_warps"]),
    )


def registers_per_thread(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Estimated 32-bit registers of one thread: its accumulators and its share of one stage of both operands.

    A fit, not a count: a grouped element takes its own size (half of it where the product reads shared memory, and
    only addresses are held), one that is loaded alone takes a register and a half with its mask, and without tensor
    cores each operand is needed by several threads.
    """
    threads = max(device.warp_size, 1) * columns["num_warps"]
    words = accumulators_per_thread(columns, device).astype(np.float64)
    from_shared = reads_operands_from_shared(problem, columns, device)
    for operand, side in zip(operands(problem), (columns["block_m"], columns["block_n"]), strict=True):
        if not uses_tensor_cores(problem, device):
            weight = np.full(len(side), 2.0)
        elif operand.vectorised:
            weight = operand.element_bytes / 4.0 * np.where(from_shared, 0.5, 1.0)
        else:
            weight = np.full(len(side), 1.5)
        words = words + weight * side * columns["block_k"] / threads
    return words


def tiles(problem: Problem, columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles along m, n and k, the ragged last ones included."""
    global _last_tiles
    # Rules and the work of one problem ask for the same tiles, one after the other.
    last = _last_tiles
    if last is not None and last[0] is problem and last[1] is columns:
        return last[2]
    sides = remembered(columns, "tile sides", _tile_sides)
    sizes = np.array([[-problem["m"]], [-problem["n"]], [-problem["k"]]])
    along_m, along_n, along_k = -(sizes // sides)
    found = along_m, along_n, along_k
    _last_tiles = problem, columns, found
    return found


@dataclass(frozen=True, slots=True)
class TileFacts:
    """What of many tiles no problem's size decides, float64 [rows] each.

    Attributes:
        sides: of the block: along m, along n, along k: [3, rows].
        volume: multiply-adds of one step.
        warps: of one program.
        shared_bytes: :func:`matmul_shared_bytes`.
        accumulators: :func:`accumulators_per_thread`.
    """

    sides: np.ndarray
    volume: np.ndarray
    warps: np.ndarray
    shared_bytes: np.ndarray
    accumulators: np.ndarray

    def counts(self, problem: Problem) -> np.ndarray:
        """:func:`tiles` as float64 [3, rows]. Exact: a size has 40 bits at most, and sides are small."""
        counts = np.array([[problem["m"]], [problem["n"]], [problem["k"]]]) / self.sides
        return np.ceil(counts, out=counts)


def tile_facts(
    problem: Problem, columns: Columns, device: Device, *, output_bytes: int | None = None
) -> TileFacts:
    """The facts of tiles whose output elements take so many bytes (``None``: the problem's)."""

    def stacked(columns: Columns) -> np.ndarray:
        sides = _tile_sides(columns)
        return np.vstack(
            [
                sides.astype(np.float64),
                np.prod(sides, axis=0, dtype=np.float64),
                columns["num_warps"],
                matmul_shared_bytes(problem, columns, device, output_bytes=output_bytes),
                accumulators_per_thread(columns, device),
            ]
        )

    found = remembered(columns, ("tile facts", output_bytes, matmul_class(problem, device)), stacked)
    return TileFacts(found[:3], found[3], found[4], found[5], found[6])


def _tile_sides(columns: Columns) -> np.ndarray:
    return np.stack([columns["block_m"], columns["block_n"], columns["block_k"]])


_last_tiles: tuple[Problem, Columns, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None


def needs_wide_offsets(problem: Problem) -> bool:
    """Whether a kernel must count elements in 64 bits: A, B or C reaches 2**31 elements."""
    output = (problem["m"] + LARGEST_BLOCK) * (problem["n"] + LARGEST_BLOCK)
    return max(output, *(operand.elements for operand in operands(problem))) > MAX_INT32


def stages_filled(columns: Columns, steps: np.ndarray) -> np.ndarray:
    """Whether a loop of so many steps fills all stages but two.

    One is filled while another is used. One more is allowed, as it costs little: winners among the recorded
    measurements, whose lists have few shallow pipelines, need it.
    """
    return columns["num_stages"] - 2 <= np.maximum(steps, 1)


def _is_blackwell(device: Device) -> bool:
    return 100 <= compute_capability(device.architecture) < 120


def _blocks_fit(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    met = np.ones(len(columns["block_m"]), dtype=bool)
    for name in ("m", "n", "k"):
        met &= columns[f"block_{name}"] <= largest_useful_block(problem[name])
    return met


def _threads_busy(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    return (
        _fewest_tile_bytes(problem, columns)
        >= BYTES_OF_ONE_COPY * max(device.warp_size, 1) * columns["num_warps"]
    )


def _fewest_tile_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Bytes of the smaller of the tiles of A and B."""
    a, b = operands(problem)
    sides = np.minimum(columns["block_m"] * a.element_bytes, columns["block_n"] * b.element_bytes)
    return sides * columns["block_k"]


def _group_differs(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    tiles_m, tiles_n, _ = tiles(problem, columns)
    height = np.where(tiles_n <= 1, 1, tiles_m)
    group = columns["group_m"]
    return (group == 8) | (np.minimum(group, height) != np.minimum(8, height))


NEEDS_GPU = Rule(
    "needs-gpu",
    "Triton compiles for GPUs",
    check=lambda problem, columns, device: device.kind == "gpu",
    explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
    of_problem=True,
)
DTYPE_SUPPORTED = Rule(
    "dtype-supported",
    "bfloat16 products begin with compute capability 8.0, and Triton's asynchronous copies with it",
    check=lambda problem, columns, device: (
        problem.dtype != "bfloat16"
        or device.vendor != "nvidia"
        or compute_capability(device.architecture) >= 80
    ),
    explain=lambda problem, columns, device: f"{problem.dtype} on {device.architecture}",
    of_problem=True,
)
TENSOR_CORES = Rule(
    "sixteen-bit-tiles",
    "Triton multiplies tiles of 16 bits on NVIDIA's tensor cores from compute capability 8.0 on; on older chips they become "
    "multiply-adds that run from memory",
    check=lambda problem, columns, device: (
        problem.element_bytes != 2
        or device.vendor != "nvidia"
        or not 0 < compute_capability(device.architecture) < 80
    ),
    explain=lambda problem, columns, device: f"{problem.dtype} on {device.architecture}",
    of_problem=True,
)
BLOCK_THREADS = Rule(
    "block-threads",
    f"a block holds at most {MAX_BLOCK_THREADS} threads",
    check=lambda problem, columns, device: (
        columns["num_warps"] * max(device.warp_size, 1) <= MAX_BLOCK_THREADS
    ),
    explain=lambda problem, columns, device: f"{columns['num_warps'][0] * max(device.warp_size, 1)} threads",
    class_of=device_class,
)


def shared_memory_rule(
    output_bytes: int | None = None,
    *,
    estimate: Callable[[Problem, Columns, Device], np.ndarray] | None = None,
    class_of: Callable[[Problem, Device], Hashable] | None = None,
) -> Rule:
    """The rule on shared memory, for kernels whose output elements take so many bytes (``None``: the problem's).

    Kernels that hold more than :func:`matmul_shared_bytes` at once bring their own ``estimate``, and say by ``class_of``
    what it looks at.
    """
    bytes_of = estimate or partial(matmul_shared_bytes, output_bytes=output_bytes)
    class_of = class_of if estimate else matmul_class
    return Rule(
        "shared-memory",
        "the buffered tiles must fit the shared memory of one block; beyond it the compiled kernel does not load",
        check=lambda problem, columns, device: (
            not device.shared_bytes_per_block
            or bytes_of(problem, columns, device) <= device.shared_bytes_per_block
        ),
        explain=lambda problem, columns, device: (
            f"{bytes_of(problem, columns, device)[0]:.0f} > {device.shared_bytes_per_block} bytes"
        ),
        class_of=class_of,
    )


ACCUMULATORS = Rule(
    "accumulators",
    f"a thread has 255 registers: more than {MAX_ACCUMULATORS} accumulators spill to memory inside the main loop",
    check=lambda problem, columns, device: accumulators_per_thread(columns, device) <= MAX_ACCUMULATORS,
    explain=lambda problem, columns, device: (
        f"{accumulators_per_thread(columns, device)[0]:g} > {MAX_ACCUMULATORS} accumulators a thread"
    ),
    class_of=device_class,
)
REGISTERS = Rule(
    "registers",
    "accumulators, operands and addresses share the 255 registers of a thread, and far beyond them a kernel runs from "
    "memory; float32 without tensor cores and elements that are loaded one at a time need the most",
    check=lambda problem, columns, device: registers_per_thread(problem, columns, device) <= MAX_REGISTERS,
    explain=lambda problem, columns, device: (
        f"about {registers_per_thread(problem, columns, device)[0]:.0f} > {MAX_REGISTERS} registers a thread"
    ),
    class_of=matmul_class,
)
THREADS_BUSY = Rule(
    "threads-busy",
    "a thread copies at least 4 bytes of each operand's tile; with more threads than that some have nothing to copy",
    check=_threads_busy,
    explain=lambda problem, columns, device: (
        f"{_fewest_tile_bytes(problem, columns)[0]} bytes "
        f"for {max(device.warp_size, 1) * columns['num_warps'][0]} threads"
    ),
    class_of=matmul_class,
)
BLOCKS_FIT = Rule(
    "blocks-fit",
    "a block of more than twice a dimension (rounded up to a power of two, at least 16) multiplies mostly padding",
    check=_blocks_fit,
    explain=lambda problem, columns, device: ", ".join(
        f"block_{name}={columns[f'block_{name}'][0]} for {name}={problem[name]}"
        for name in ("m", "n", "k")
        if columns[f"block_{name}"][0] > largest_useful_block(problem[name])
    ),
    class_of=matmul_class,
)
STAGES_FILLED = Rule(
    "stages-filled",
    "a pipeline keeps num_stages - 1 loads in flight; stages far beyond the steps of the loop take shared memory, and "
    "so resident blocks, for nothing",
    check=lambda problem, columns, device: stages_filled(columns, tiles(problem, columns)[2]),
    explain=lambda problem, columns, device: (
        f"{columns['num_stages'][0]} stages, {tiles(problem, columns)[2][0]} steps"
    ),
)
GROUP_DIFFERS = Rule(
    "group-differs",
    "with so few tiles this group_m visits them in the same order as group_m=8: the same kernel twice",
    check=_group_differs,
    explain=lambda problem, columns, device: (
        f"group_m={columns['group_m'][0]}, {tiles(problem, columns)[0][0]} x {tiles(problem, columns)[1][0]} tiles"
    ),
)
GRID = Rule(
    "grid",
    "the first dimension of a grid holds at most 2**31 - 1 blocks",
    check=lambda problem, columns, device: (
        problem["m"] * problem["n"] <= MAX_INT32
        or tiles(problem, columns)[0] * tiles(problem, columns)[1] <= MAX_INT32
    ),
    explain=lambda problem, columns, device: (
        f"{tiles(problem, columns)[0][0] * tiles(problem, columns)[1][0]} blocks"
    ),
)
DIMENSIONS = Rule(
    "dimensions",
    "rows, columns and steps are counted in 32 bits, the padding of tiles and slices included (elements in 64 if need be)",
    check=lambda problem, columns, device: (
        max(problem[name] for name in ("m", "n", "k")) <= MAX_INT32 - 16 * LARGEST_BLOCK
    ),
    explain=lambda problem, columns, device: f"m={problem['m']}, n={problem['n']}, k={problem['k']}",
    of_problem=True,
)

#: The rules of every tiled matrix product; variants add :func:`shared_memory_rule` and their own.
MATMUL_RULES = (
    NEEDS_GPU,
    DTYPE_SUPPORTED,
    TENSOR_CORES,
    DIMENSIONS,
    BLOCK_THREADS,
    BLOCKS_FIT,
    GRID,
    ACCUMULATORS,
    REGISTERS,
    THREADS_BUSY,
)
