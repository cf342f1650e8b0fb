"""What the Triton attention kernels share: counts, resource estimates and rules. Triton itself is not needed here.

Every check is vectorised over the columns ``block_m``, ``block_n``, ``num_warps`` and ``num_stages``. The estimates were
fitted to what Triton 3.9 compiles for sm80, sm90, sm100, sm120, gfx942 and gfx950
(``tests/kernels/test_attention_triton.py`` holds them to it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.compile import Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.ops.attention.pieces import reach
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import (
    BLOCK_THREADS,
    BYTES_OF_ONE_COPY,
    DTYPE_SUPPORTED,
    GFX950_PADDING,
    LARGEST_BLOCK,
    MAX_ACCUMULATORS,
    MAX_INT32,
    MAX_REGISTERS,
    MIN_TILE,
    NEEDS_GPU,
    TENSOR_CORES,
    compute_capability,
    input_precision,
    pipeline_buffers,
    reads_operands_from_shared,
    uses_tensor_cores,
)

#: The largest head dimension: a tile of q and the accumulator hold a whole head.
MAX_HEAD_DIM = 256
#: The stages that mean another schedule to Triton's compiler for AMD's chips where one product feeds another.
CHAINED_STAGES = 4
#: Scores that one matrix instruction of a warp makes (16 x 8).
SCORES_OF_ONE_INSTRUCTION = 128

Count = Callable[[Problem, Columns], np.ndarray]


def padded_head_dim(problem: Problem) -> int:
    """The power of two, at least a tensor core's tile, that a head is padded to."""
    return max(MIN_TILE, _power_of_two(problem["head_dim"]))


def threads(columns: Columns, device: Device) -> np.ndarray:
    """Threads of one program."""
    return max(device.warp_size, 1) * columns["num_warps"]


def shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of one program, in bytes: its queries, the buffered keys and values, and the weights.

    Without a pipeline keys and values take turns in one place.
    """
    depth, element = padded_head_dim(problem), float(problem.element_bytes)
    q = columns["block_m"] * depth * element
    keys = columns["block_n"] * depth * element
    buffers = pipeline_buffers(problem, columns, device).astype(np.float64)
    one_by_one = loads_one_by_one(problem)
    alone = (columns["num_stages"] == 1) | one_by_one
    weights = np.where(
        weights_exchanged(problem, columns, device), columns["block_m"] * columns["block_n"] * element, 0.0
    )
    if device.architecture.startswith("gfx"):
        gfx950 = device.architecture.startswith("gfx95")
        padding = GFX950_PADDING if gfx950 else 1.0
        # Four stages select the compiler's schedule for two products in a chain, which holds fewer tiles.
        chained = columns["num_stages"] == CHAINED_STAGES
        buffers = np.where(chained, 2.0 if gfx950 else 1.0, buffers)
        # Queries only pass through, and unpipelined everything takes turns.
        passing = np.where(queries_pass_through_shared(problem, columns), q, 0.0)
        loaded = np.where(alone, np.maximum(keys, weights), 2.0 * buffers * keys + weights)
        return padding * np.maximum(passing, loaded)
    loaded = np.where(alone, keys, 2.0 * buffers * keys)
    if one_by_one and 100 <= compute_capability(device.architecture) < 120:
        # tcgen05 holds three tiles of what is not buffered ahead.
        from_shared = reads_operands_from_shared(problem, columns, device)
        loaded = np.where(from_shared & (columns["num_stages"] > 1), 3.0 * keys, loaded)
    return q + loaded + weights


def loads_one_by_one(problem: Problem) -> bool:
    """Whether elements are loaded one at a time: those are not buffered ahead."""
    return bool(problem["head_dim"] * problem.element_bytes % BYTES_OF_ONE_COPY != 0)


def weights_exchanged(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Where the weights go through shared memory, as the threads that make them are not those that need them.

    On tensor cores Triton gives each warp rows of its own only where the output's tile has at least as many rows as columns.
    On AMD's chips each warp has 32 rows of its own, and of small tiles the right ones in further cases (a fit).
    """
    rows, warps = columns["block_m"], columns["num_warps"]
    if device.architecture.startswith("gfx"):
        spread = rows < 32 * warps
        if device.architecture != "gfx942":
            return spread
        wide = columns["block_n"] >= 32
        if problem.element_bytes == 4 and input_precision(problem, device.architecture) == "ieee":
            return spread & ~(wide & (rows == 32))
        return np.where(wide, (rows >= 64) & spread, (rows >= 32) & (warps > 1))
    if not uses_tensor_cores(problem, device):
        return np.ones(len(columns["block_m"]), dtype=bool)
    by_row = rows >= padded_head_dim(problem)
    return ~by_row & ~reads_operands_from_shared(problem, columns, device) & (warps > 1)


def queries_pass_through_shared(problem: Problem, columns: Columns) -> np.ndarray:
    """On AMD's chips: where a tile of queries is loaded other than the product needs it."""
    as_needed = padded_head_dim(problem) <= 32 and problem.element_bytes == 2
    return ~(as_needed & (columns["block_n"] <= 16))


def accumulators_per_thread(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """float32 values that one thread holds: its part of the output's tile and of the tile of scores."""
    width = padded_head_dim(problem) + columns["block_n"]
    return columns["block_m"] * width / threads(columns, device)


def registers_per_thread(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Estimated 32-bit registers of one thread: the output's tile, the scores, their weights, and operands.

    A fit, not a count. On tensor cores the queries stay in registers, or in shared memory where products read that;
    without, each operand is needed by several threads.
    """
    depth, count = padded_head_dim(problem), threads(columns, device)
    output, scores = columns["block_m"] * depth / count, columns["block_m"] * columns["block_n"] / count
    q, keys = output, columns["block_n"] * depth / count
    if not uses_tensor_cores(problem, device):
        return 1.5 * output + 5.0 * scores + 3.25 * (q + keys)
    from_shared = reads_operands_from_shared(problem, columns, device)
    return output + 1.5 * scores + np.where(from_shared, 0.0, problem.element_bytes / 4.0 * q)


def _unestimated_bytes(device: Device) -> int:
    """What NVIDIA's compilers may add: barriers and row sums that warps exchange."""
    return 1024 if device.vendor == "nvidia" else 0


def _power_of_two(size: int) -> int:
    return 1 << max(int(size) - 1, 0).bit_length()


def _threads_busy(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    bytes_of_keys = columns["block_n"] * padded_head_dim(problem) * problem.element_bytes
    scores = columns["block_m"] * columns["block_n"]
    copies = bytes_of_keys >= BYTES_OF_ONE_COPY * threads(columns, device)
    return copies & (scores >= SCORES_OF_ONE_INSTRUCTION * columns["num_warps"])


def shared_memory_rule(estimate: Callable[[Problem, Columns, Device], np.ndarray]) -> Rule:
    """What the estimate says must fit the shared memory of one block."""
    return Rule(
        "shared-memory",
        "queries and buffered keys and values must fit the shared memory of one block; beyond it the compiled kernel does "
        "not load",
        check=lambda problem, columns, device: (
            not device.shared_bytes_per_block
            or estimate(problem, columns, device)
            <= device.shared_bytes_per_block - _unestimated_bytes(device)
        ),
        explain=lambda problem, columns, device: (
            f"{estimate(problem, columns, device)[0]:.0f} > "
            f"{device.shared_bytes_per_block - _unestimated_bytes(device)} bytes"
        ),
    )


HEAD_FITS = Rule(
    "head-fits",
    f"a program holds whole heads of queries and of its output: at most {MAX_HEAD_DIM} elements",
    check=lambda problem, columns, device: problem["head_dim"] <= MAX_HEAD_DIM,
    explain=lambda problem, columns, device: f"head_dim={problem['head_dim']}",
)
OFFSETS = Rule(
    "offsets",
    "elements of one head are counted in 32 bits, the last tile's padding included",
    check=lambda problem, columns, device: (
        (rows_of_a_head(problem) + LARGEST_BLOCK) * problem["head_dim"] <= MAX_INT32
    ),
    explain=lambda problem, columns, device: (
        f"{rows_of_a_head(problem)} rows of head_dim={problem['head_dim']}"
    ),
)
KEYS_FIT = Rule(
    "keys-fit",
    "a block of more than twice the keys that are seen (rounded up to a power of two, at least 16) computes mostly padding",
    check=lambda problem, columns, device: (
        columns["block_n"] <= 2 * max(MIN_TILE, _power_of_two(reach(problem)))
    ),
    explain=lambda problem, columns, device: (
        f"block_n={columns['block_n'][0]}, keys that are seen: {reach(problem)}"
    ),
)
ACCUMULATORS = Rule(
    "accumulators",
    f"a thread has 255 registers: more than {MAX_ACCUMULATORS} of the output or of the scores spill inside the main loop",
    check=lambda problem, columns, device: (
        columns["block_m"] * np.maximum(padded_head_dim(problem), columns["block_n"])
        <= MAX_ACCUMULATORS * threads(columns, device)
    ),
    explain=lambda problem, columns, device: (
        f"{columns['block_m'][0]} x {max(padded_head_dim(problem), int(columns['block_n'][0]))} values for "
        f"{threads(columns, device)[0]} threads"
    ),
)
REGISTERS = Rule(
    "registers",
    "output, scores, weights and queries share the 255 registers of a thread, and far beyond them a kernel runs from "
    "memory; float32 without tensor cores needs the most",
    check=lambda problem, columns, device: registers_per_thread(problem, columns, device) <= MAX_REGISTERS,
    explain=lambda problem, columns, device: (
        f"about {registers_per_thread(problem, columns, device)[0]:.0f} > {MAX_REGISTERS} registers a thread"
    ),
)
THREADS_BUSY = Rule(
    "threads-busy",
    f"a thread copies at least {BYTES_OF_ONE_COPY} bytes of the keys, and a warp multiplies at least 16 x 8 scores; more "
    "warps than that repeat what others do",
    check=_threads_busy,
    explain=lambda problem, columns, device: (
        f"{columns['block_m'][0]} x {columns['block_n'][0]} scores and keys of {padded_head_dim(problem)} elements for "
        f"{columns['num_warps'][0]} warps"
    ),
)

#: The rules of every Triton attention kernel; variants add their own.
COMMON_RULES = (
    NEEDS_GPU,
    DTYPE_SUPPORTED,
    TENSOR_CORES,
    HEAD_FITS,
    OFFSETS,
    BLOCK_THREADS,
    KEYS_FIT,
    ACCUMULATORS,
    REGISTERS,
    THREADS_BUSY,
    shared_memory_rule(shared_bytes),
)


def rows_of_a_head(problem: Problem) -> int:
    """The most rows that are counted from one head's start: keys, or the queries of all heads that share them."""
    queries = problem["heads"] // problem["kv_heads"] * problem["q_len"]
    return max(queries, problem["kv_len"])


def stages_rule(steps: Count) -> Rule:
    """Stages that a loop of so many steps fills, but two."""
    return Rule(
        "stages-filled",
        "a pipeline keeps num_stages - 1 loads in flight; stages far beyond the steps of the loop take shared memory, and "
        "so resident blocks, for nothing",
        check=lambda problem, columns, device: (
            columns["num_stages"] - 2 <= np.maximum(steps(problem, columns), 1)
        ),
        explain=lambda problem, columns, device: (
            f"{columns['num_stages'][0]} stages, {steps(problem, columns)[0]} steps"
        ),
    )


def queries_rule(rows: Callable[[Problem], int]) -> Rule:
    """A tile of queries is at most twice the rows that there are."""
    return Rule(
        "queries-fit",
        "a tile of more than twice the queries (rounded up to a power of two, at least 16) computes mostly padding",
        check=lambda problem, columns, device: (
            columns["block_m"] <= 2 * max(MIN_TILE, _power_of_two(rows(problem)))
        ),
        explain=lambda problem, columns, device: (
            f"block_m={columns['block_m'][0]} for {rows(problem)} queries"
        ),
    )


def programs_rule(programs: Count) -> Rule:
    """What the first dimension of a grid holds."""
    return Rule(
        "grid",
        "the first dimension of a grid holds at most 2**31 - 1 blocks",
        check=lambda problem, columns, device: programs(problem, columns) <= MAX_INT32,
        explain=lambda problem, columns, device: f"{programs(problem, columns)[0]} blocks",
    )


def input_pointers(problem: Problem) -> dict[str, Pointer]:
    """The pointers to q, k and v, as the kernels name them."""
    head = problem["batch"] * problem["head_dim"] * problem.element_bytes
    q = Pointer(problem.dtype, head * problem["heads"] * problem["q_len"])
    kv = Pointer(problem.dtype, head * problem["kv_heads"] * problem["kv_len"])
    return {"q_ptr": q, "k_ptr": kv, "v_ptr": kv}


def constants(
    problem: Problem, config: Mapping[str, Any], architecture: str, *, rows: int, interpreted: bool
) -> dict[str, Any]:
    """The constants that the kernels share, in their order; ``rows`` are the queries that tiles are cut from."""
    return {
        "HEAD_DIM": problem["head_dim"],
        "SCALE": math.log2(math.e) / math.sqrt(problem["head_dim"]),
        "BLOCK_M": int(config["block_m"]),
        "BLOCK_N": int(config["block_n"]),
        "BLOCK_D": padded_head_dim(problem),
        "EVEN_M": rows % config["block_m"] == 0,
        "PRECISION": input_precision(problem, architecture),
        "WIDEN": interpreted and problem.dtype == "bfloat16",
    }
