"""How long a tiled matrix product takes a GPU, step by step: an estimate, and the ratios that it is made of.

Where :mod:`kernelcast.featurizer.analytic` knows amounts of work alone, this knows the tile. It counts the cycles that
the busiest core spends: in each step of the loop over k what binds it (multiplying, shared memory, the L2 cache, the
load units, pages, or the latency of memory that too few loads in flight cannot hide); the stores of each tile; the
fill of the pipeline for each round of tiles; and beside it the traffic of the whole grid, and the life of one block.

Everything of a config that no size decides is worked out once for a class of problems, and kept with the columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kernelcast.kernels import Block, Columns, Device, Problem
from kernelcast.kernels.candidate import remembered
from kernelcast.kernels.extension import load_extension
from kernelcast.kernels.triton_operands import matmul_class
from kernelcast.kernels.triton_rules import tile_facts

_tiles, _WHY_NUMPY = load_extension("kernelcast.featurizer._tiles", version=1)
_COMPILED = _tiles is not None

#: Columns of a config that the estimate needs.
TILE_COLUMNS = ("block_m", "block_n", "block_k", "num_stages", "num_warps")

#: Cycles from a load's issue to its data, under load.
LATENCY_CYCLES = 700.0
#: Cycles that a block takes to start and to compute its addresses.
START_CYCLES = 250.0
#: Bytes a cycle of one core: from its shared memory (CUDA programming guide), and from the L2 cache (A100 whitepaper).
SHARED_BYTES_PER_CYCLE = 128.0
L2_BYTES_PER_CYCLE = 64.0
#: Cycles of the load units for one load of a whole warp, by its width: 16 bytes a thread, 4 or 8, less.
LOAD_CYCLES = (8.0, 10.0, 12.0)
#: Part of the L2 cache that one operand may take and still be read from memory once.
L2_SHARE = 0.6
#: Microseconds of a launch.
LAUNCH_US = 4.0
#: Rows that lie this many bytes apart, and four times as many, begin to cost and cost fully one page each: seen in
#: recorded products of long rows, whose narrow tiles are up to 1.6 times slower than the traffic explains.
PAGE_STRIDE = 2.0**14
PAGE_CYCLES = 3.3
#: A thread that multiplies without tensor cores spills beyond so many accumulators times steps of k.
SIMT_SPILL, SIMT_SPILL_COST = 128.0 * 64.0, 2.5
#: Rows of tiles that are taken together where a config does not say.
GROUP_ROWS = 8.0

#: Names and units of the columns, in order. The logged ones come first.
TILE_UNITS = {
    "tile_estimate": "log2",
    "tile_memory_share": "log2",
    "tile_life_share": "log2",
    "tile_load": "log2",
    "tile_traffic": "log2",
    "tile_fill": "log2",
    "tile_bound": "log2",
    "tile_active_warps": "log2",
    "tile_turns": "1",
    "tile_last_turn": "1",
    "tile_waste_m": "1",
    "tile_waste_n": "1",
    "tile_waste_k": "1",
    "tile_resident": "blocks",
    "tile_shared_bytes": "bytes",
    "tile_accumulators": "registers",
    "tile_warp_loads": "log2",
    "tile_load_density": "log2",
    "tile_shared_share": "log2",
    "tile_issue_share": "log2",
    "tile_page_share": "log2",
    "tile_store_share": "log2",
    "tile_segment_a": "log2 bytes",
    "tile_segment_b": "log2 bytes",
}
_LOGGED = 8
_COUNTED = 13


@dataclass(slots=True)
class _Sizes:
    """What of the estimate one problem decides on one device. Never written to; one that is frozen takes longer to make."""

    key: tuple[object, ...]  # names the class of problems whose configs have the same facts
    widths: tuple[float, float, float]  # bytes that one load of A, of B and one store of C can have
    pages: tuple[float, float]  # how much of a page each row of A and of B costs
    sizes: np.ndarray  # m, n, k: [3, 1]
    numbers: np.ndarray  # all that the compiled estimate takes: [1, numbers]
    cores: float
    macs: float  # multiply-adds a cycle of one core
    work: float  # of one core, in multiply-adds, were the problem spread evenly
    least: float  # cycles of the arithmetic or of the compulsory traffic, the launch added
    launch: float
    moved: tuple[float, float, float]  # bytes of A, B, C
    cached: tuple[bool, bool]  # whether A, B stay in the L2 cache
    cycles_per_byte: float
    narrow: bool  # too narrow for asynchronous copies
    simt: bool
    paged: bool
    balance: float  # log2 of the time of the arithmetic over that of the traffic


def described_engine() -> str:
    """What computes the columns here: ``compiled``, or numpy and why, such as ``numpy (not compiled)``."""
    return "compiled" if _COMPILED else f"numpy ({_WHY_NUMPY})"


def balance(problem: Problem, device: Device) -> float:
    """log2 of the time of the arithmetic over that of the compulsory traffic; NaN where the device's facts are unknown."""
    sizes = _sizes(problem, device)
    return float("nan") if sizes is None else sizes.balance


def tile_features(problem: Problem, block: Block, device: Device, out: np.ndarray) -> None:
    """Write the columns of :data:`TILE_UNITS`.

    They are: the estimate over the least time that the problem takes; the time of memory and of the blocks' lives over
    the cycles of the busiest core; what that core multiplies over its even share; traffic over what is compulsory; steps
    over stages; a step's cycles over those of its multiplications; resident warps that have work; tiles of the busiest
    core, and how full the last turn is; padding along each side; and, of the config alone: blocks that a core holds, shared
    memory of a block and accumulators of a thread, loads of one warp in a step, loads per multiplication, the time of shared memory, of the load units, of pages and of
    the stores over that of the multiplications; and the bytes of A and of B that lie together in a tile.

    Args:
        problem: a gemm.
        block: candidates of one variant.
        device: the hardware facts.
        out: float64 [columns, rows]; left as NaN where the variant has no tile or the device's facts are unknown.
    """
    sizes = _sizes(problem, device)
    if sizes is None or any(name not in block.columns for name in TILE_COLUMNS):
        return
    facts = remembered(
        block.columns, sizes.key, lambda columns: _config_facts(problem, columns, device, sizes)
    )
    if _COMPILED:
        _tiles.estimate(sizes.numbers, facts, out)
    else:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            _estimate(sizes, facts, out)


def _estimate(of: _Sizes, facts: np.ndarray, out: np.ndarray) -> None:
    sides = facts[:3]
    multiply, bound, page_cubed, wait, store, life_step, life_start, quarter_warps, ahead, reads = facts[3:13]
    volume, resident = facts[13:15]
    counts = of.sizes / sides
    whole = np.ceil(counts)
    rows, columns, steps = whole
    tiles = rows * columns
    even = tiles / of.cores
    turns = np.ceil(even)
    active = np.minimum(turns, resident)
    rounds = np.ceil(turns / resident)
    if of.simt:
        step = np.maximum(multiply / np.sqrt(np.minimum(active * quarter_warps * 0.5, 1.0)) + reads, bound)
    else:
        step = np.maximum(multiply / np.minimum(active * quarter_warps, 1.0), bound)
    if of.paged:
        step = np.cbrt(step * step * step + page_cubed)
    if of.narrow:
        # Nothing is loaded ahead: only other blocks hide the latency.
        step = np.maximum(step, (LATENCY_CYCLES + step / active) / active)
    else:
        step = np.maximum(step, wait / active)
    busy = turns * (steps * step + store) + rounds * (2.0 * LATENCY_CYCLES)
    life = rounds * (steps * life_step + life_start)

    group = np.minimum(rows, GROUP_ROWS)
    beside = np.minimum(of.cores * resident, tiles) / group
    np.maximum(beside, 1.0, out=beside)
    np.minimum(beside, columns, out=beside)
    a_bytes, b_bytes, c_bytes = of.moved
    traffic = c_bytes + (a_bytes if of.cached[0] else a_bytes * np.ceil(columns / beside))
    traffic = traffic + (b_bytes if of.cached[1] else b_bytes * np.ceil(rows / group))
    memory = traffic * of.cycles_per_byte
    # The exponent of the mean of times that overlap: between their sum (1) and the largest (infinity).
    total = np.cbrt(busy * busy * busy + memory * memory * memory + life * life * life) + of.launch

    out[0] = total / of.least
    out[1] = memory / busy
    out[2] = life / busy
    out[3] = turns * steps * volume / of.work
    out[4] = traffic / (a_bytes + b_bytes + c_bytes)
    out[5] = steps / ahead
    out[6] = step / multiply
    out[7] = active * quarter_warps
    np.log2(out[:_LOGGED], out=out[:_LOGGED])
    np.minimum(turns, 64.0, out=out[8])
    np.divide(even, turns, out=out[9])
    np.divide(whole, counts, out=out[10:13])
    out[_COUNTED:] = facts[14:]


def _config_facts(problem: Problem, columns: Columns, device: Device, of: _Sizes) -> np.ndarray:
    """What of a config all problems of one class share: float64 [25, rows]."""
    block_m, block_n, block_k, stages, warps = (columns[name].astype(np.float64) for name in TILE_COLUMNS)
    (width_a, width_b, width_c), (pages_a, pages_b), layout = of.widths, of.pages, problem["layout"]
    element = float(problem.element_bytes)
    tile = tile_facts(problem, columns, device)
    lanes = max(device.warp_size, 1)
    area, volume = block_m * block_n, tile.volume
    a_elements, b_elements = block_m * block_k, block_k * block_n
    registers = tile.accumulators + 40.0 + 0.125 * element * (a_elements + b_elements) / (lanes * warps)
    registers = np.clip(registers, 32.0, 255.0)
    limits = [np.full_like(area, 32.0)]
    if device.shared_bytes_per_core:
        limits.append(device.shared_bytes_per_core / (tile.shared_bytes + 1024.0))
    if device.registers_per_core:
        limits.append(device.registers_per_core / (lanes * warps * registers))
    if device.max_threads_per_core:
        limits.append(device.max_threads_per_core / (lanes * warps))
    resident = np.maximum(np.floor(np.minimum.reduce(limits)), 1.0)

    a_loads = a_elements * element / width_a / lanes
    b_loads = b_elements * element / width_b / lanes
    loads = a_loads + b_loads
    issue = a_loads * _load_cycles(width_a) + b_loads * _load_cycles(width_b)
    multiply = volume / of.macs
    # Warps lie along m first, as square as they can.
    most = np.maximum(block_m / 16.0, 1.0)
    along_m = np.minimum(np.where(warps >= 4, warps / 2.0, warps), most)
    along_n = warps / along_m
    shared = (block_m * along_n + block_n * along_m) * block_k * element / SHARED_BYTES_PER_CYCLE
    cache = (block_m + block_n) * block_k * element / L2_BYTES_PER_CYCLE
    page = PAGE_CYCLES * (
        (block_k if layout[0] == "t" else block_m) * pages_a
        + (block_n if layout[1] == "t" else block_k) * pages_b
    )
    ahead = np.maximum(stages - 1.0, 1.0)
    if of.simt:
        # A warp's fused multiply-adds, each thread on its own square of the tile, and its reads of shared memory.
        spilled = np.where(tile.accumulators * block_k >= SIMT_SPILL, SIMT_SPILL_COST, 1.0)
        plain = warps * block_k * tile.accumulators / 2.0 * spilled
        reads = warps * block_k * np.sqrt(tile.accumulators) / 2.0 * spilled
        bound = np.maximum(cache, issue) * spilled
    else:
        plain, reads = multiply, np.zeros_like(area)
        bound = np.maximum.reduce([shared, cache, issue])
    per_warp = loads / warps
    slow_store = max(1.0, 4.0 / width_c)
    store = area * element / (1.0 / (of.cycles_per_byte * of.cores)) * slow_store
    life_step = np.maximum(per_warp * 8.0, LATENCY_CYCLES / ahead / 4.0) + volume / (warps * 1024.0)
    life_start = 2.0 * LATENCY_CYCLES + START_CYCLES + tile.accumulators * 8.0 * slow_store
    with np.errstate(divide="ignore"):
        logged = np.log2(
            [
                per_warp,
                loads / volume * 1024.0,
                shared / multiply,
                issue / multiply,
                page / multiply + 0.01,
                store / multiply,
                (block_m if layout[0] == "t" else block_k) * element,
                (block_k if layout[1] == "t" else block_n) * element,
            ]
        )
    return np.vstack(
        [
            block_m, block_n, block_k, plain, bound, page**3, LATENCY_CYCLES / ahead, store, life_step, life_start,
            warps / 4.0, ahead, reads, volume, resident, tile.shared_bytes, tile.accumulators, logged,
        ]
    )  # fmt: skip


def _load_cycles(width: float) -> float:
    return LOAD_CYCLES[0] if width >= 16 else LOAD_CYCLES[1] if width >= 4 else LOAD_CYCLES[2]


def _sizes(problem: Problem, device: Device) -> _Sizes | None:
    key = "tiles", device.fingerprint
    if key not in problem.derived:
        problem.derived[key] = _find_sizes(problem, device)
    found: _Sizes | None = problem.derived[key]
    return found


def _find_sizes(problem: Problem, device: Device) -> _Sizes | None:
    rates = _rates(problem, device)
    if rates is None:
        return None
    m, n, k = (size or 1 for size in (problem["m"], problem["n"], problem["k"]))
    element, layout = float(problem.element_bytes), problem["layout"]
    row_a, row_b = (m if layout[0] == "t" else k), (k if layout[1] == "t" else n)
    step_a, step_b = (problem["lda"] or row_a), (problem["ldb"] or row_b)
    widths = _width(step_a, row_a, element), _width(step_b, row_b, element), _width(n, n, element)
    pages = _page_level(step_a * element), _page_level(step_b * element)
    work = float(m) * n * k / rates.cores
    moved = (element * m * k, element * k * n, element * m * n)
    compute, memory = work / rates.macs, sum(moved) * rates.cycles_per_byte
    least = max(compute, memory) + rates.launch
    cached = moved[0] < rates.cached_bytes, moved[1] < rates.cached_bytes
    narrow = min(widths[0], widths[1]) < 4.0
    simt = problem.dtype == "float32" and not problem.allow_tf32
    paged = pages != (0.0, 0.0)
    numbers = np.array(
        [
            [
                m, n, k, rates.cores, work, least, rates.launch, *moved, *cached, rates.cycles_per_byte, narrow, simt, paged,
                LATENCY_CYCLES, GROUP_ROWS,
            ]
        ],
        dtype=np.float64,
    )  # fmt: skip
    return _Sizes(
        # Shared memory depends on more of the alignment than the widths of loads do.
        key=("tiles", matmul_class(problem, device), widths, pages),
        widths=widths,
        pages=pages,
        sizes=numbers[0, :3, None],
        numbers=numbers,
        cores=rates.cores,
        macs=rates.macs,
        work=work,
        least=least,
        launch=rates.launch,
        moved=moved,
        cached=cached,
        cycles_per_byte=rates.cycles_per_byte,
        narrow=narrow,
        simt=simt,
        paged=paged,
        balance=math.log2(compute / memory),
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    """What a device does in a cycle, with operands of one dtype."""

    cores: float
    macs: float  # multiply-adds a cycle of one core
    cycles_per_byte: float
    launch: float
    cached_bytes: float


#: What :func:`_rates` found, and how much of that is kept.
_RATES: dict[tuple[str, str, bool], _Rates | None] = {}
_MOST_RATES = 256


def _rates(problem: Problem, device: Device) -> _Rates | None:
    key = device.fingerprint, problem.dtype, problem.allow_tf32
    if key not in _RATES:
        if len(_RATES) >= _MOST_RATES:
            _RATES.clear()
        _RATES[key] = _find_rates(problem, device)
    return _RATES[key]


def _find_rates(problem: Problem, device: Device) -> _Rates | None:
    peak = device.flops_per_second(problem.dtype, allow_tf32=problem.allow_tf32)
    if device.kind != "gpu" or not (peak and device.cores and device.clock_hz and device.memory_bandwidth):
        return None
    cores, clock = float(device.cores), device.clock_hz
    return _Rates(
        cores=cores,
        macs=peak / 2.0 / cores / clock,
        cycles_per_byte=clock / device.memory_bandwidth,
        launch=LAUNCH_US * 1e-6 * clock,
        cached_bytes=L2_SHARE * device.l2_bytes,
    )


def _width(step: int, row: int, element: float) -> float:
    """Bytes of the widest load that rows of a length, so far apart, allow: at most 16."""
    return min(float(step & -step), float(row & -row), 16.0 / element) * element


def _page_level(stride_bytes: float) -> float:
    """How much of a page each row costs, from 0 to 1 in eighths: few values, so that few classes arise."""
    if stride_bytes <= PAGE_STRIDE:
        return 0.0
    return round(8.0 * min(math.log2(stride_bytes / PAGE_STRIDE) / 2.0, 1.0)) / 8.0
