"""Analytic costs: times that the amounts of work imply on a device's facts. Physics for the trees, and the baseline.

The model is a roofline (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009) with a term for the waves of a grid and one for launches. It is coarse on
purpose: the trees learn what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelcast.kernels import Device, Problem
from kernelcast.kernels.work import WORK_NAMES

#: Microseconds that one launch costs: a CUDA kernel launch, or the dispatch of one torch operator on a CPU.
LAUNCH_US = {"gpu": 4.0, "cpu": 3.0}

#: Registers of a thread beside its accumulators: addresses, masks, operand fragments.
OTHER_REGISTERS = 40.0

#: Blocks that a core holds at most, whatever they need.
MAX_RESIDENT_BLOCKS = 32.0

#: What :func:`_us_of_each` gave, and how much of that is kept.
_US_OF_EACH: dict[tuple[str, str, bool], np.ndarray] = {}
_MOST_RATES = 256

#: Names and units of the columns of :func:`analytic_costs`, in order.
ANALYTIC_UNITS = {
    "compute_us": "us",
    "memory_us": "us",
    "scratch_us": "us",
    "launch_us": "us",
    "blocks_per_core": "blocks",
    "waves": "1",
    "tail": "1",
    "busy_share": "1",
    "step_us": "us",
    "roofline_us": "us",
}


def analytic_costs(problem: Problem, work: Mapping[str, np.ndarray], device: Device) -> dict[str, np.ndarray]:
    """Times and occupancy of many candidates.

    Args:
        problem: what is computed.
        work: columns of :meth:`kernelcast.kernels.Work.columns`, float64, one row a candidate.
        device: the hardware facts; a fact of 0 is unknown and its term is left out.

    Returns:
        Columns named in :data:`ANALYTIC_UNITS`: the time of the arithmetic at peak rate, of the traffic and of the
        scratch at memory bandwidth, of the launches; resident blocks of a core; waves of the grid; ``tail``, the
        slots of the waves over the blocks that fill them (1 is no waste); the share of cores that have work; the time
        of the memory traffic of one step of the main loop; and the roofline estimate.
    """
    rows = np.array([work[name] for name in WORK_NAMES], dtype=np.float64)
    out = np.empty((len(ANALYTIC_UNITS), rows.shape[1]))
    with np.errstate(invalid="ignore", divide="ignore"):
        analytic_rows(problem, rows, device, out)
    return dict(zip(ANALYTIC_UNITS, out, strict=True))


def analytic_rows(problem: Problem, work: np.ndarray, device: Device, out: np.ndarray) -> None:
    """:func:`analytic_costs` from and into rows of arrays, without regard to warnings of numpy.

    Args:
        problem: what is computed.
        work: float64 [:data:`kernelcast.kernels.work.WORK_NAMES`, candidates].
        device: the hardware facts.
        out: float64 [:data:`ANALYTIC_UNITS`, candidates], written to.
    """
    programs, warps, shared_bytes, accumulators, inner_steps = work[4:]
    compute_us, memory_us, scratch_us, launch_us, blocks, waves, tail, busy_share, step_us, roofline_us = out
    # FLOPs, traffic, scratch and calls are the first of the amounts, and their times of the columns.
    np.multiply(work[:4], _us_of_each(device, problem), out=out[:4])
    _blocks_per_core(warps, shared_bytes, accumulators, device, blocks)
    np.maximum(programs, 1.0, out=busy_share)
    busy_share /= device.cores
    np.divide(busy_share, blocks, out=waves)
    np.minimum(busy_share, 1.0, out=busy_share)
    full_waves = np.ceil(waves)
    np.divide(full_waves, waves, out=tail)
    full_waves *= inner_steps
    np.divide(memory_us, full_waves, out=step_us)
    # Blocks that do not fill the cores leave some idle; a library whose grid is closed (NaN) is taken to fill the device.
    stretch = np.where(waves < 1.0, 1.0 / busy_share, tail)
    np.fmax(stretch, 1.0, out=stretch)
    np.multiply(compute_us, stretch, out=roofline_us)
    np.maximum(roofline_us, memory_us, out=roofline_us)
    roofline_us += scratch_us
    roofline_us += launch_us


def _us_of_each(device: Device, problem: Problem) -> np.ndarray:
    """Microseconds of one FLOP, of one byte of traffic, of one of scratch (written and read) and of one call: [4, 1]."""
    key = device.fingerprint, problem.dtype, problem.allow_tf32
    found = _US_OF_EACH.get(key)
    if found is None:
        if len(_US_OF_EACH) >= _MOST_RATES:
            _US_OF_EACH.clear()
        peak = device.flops_per_second(problem.dtype, allow_tf32=problem.allow_tf32)
        byte_us = 1e6 / device.memory_bandwidth if device.memory_bandwidth else 0.0
        found = np.array(
            [[1e6 / peak if peak else 0.0], [byte_us], [2.0 * byte_us], [LAUNCH_US[device.kind]]]
        )
        _US_OF_EACH[key] = found
    return found


def _blocks_per_core(
    warps: np.ndarray, shared_bytes: np.ndarray, accumulators: np.ndarray, device: Device, out: np.ndarray
) -> None:
    """Blocks that one core holds at a time: what shared memory, registers and thread slots allow, at least 1."""
    if device.kind == "cpu":
        out[:] = 1.0
        return
    # fmin: a limit that is not known (NaN) does not bind; all unknown gives the constant.
    threads = warps * device.warp_size
    np.fmin((device.max_threads_per_core or np.inf) / threads, MAX_RESIDENT_BLOCKS, out=out)
    if device.shared_bytes_per_core:
        np.fmin(out, device.shared_bytes_per_core / np.maximum(shared_bytes, 1.0), out=out)
    if device.registers_per_core:
        threads *= accumulators + OTHER_REGISTERS
        np.fmin(out, device.registers_per_core / threads, out=out)
    np.floor(out, out=out)
    np.maximum(out, 1.0, out=out)


def resident_blocks(facts: np.ndarray, warps: np.ndarray, device: Device) -> np.ndarray:
    """Blocks that one core holds at a time by what the compiler allotted; 0 where a block exceeds a core.

    As the occupancy calculator of the CUDA toolkit counts: registers are given out to whole warps in units of 8 a thread,
    and the system keeps 1 KiB of shared memory for every block.

    Args:
        facts: registers of one thread, spilled ones, shared memory of one block in bytes: float64 [rows, 3], NaN where
            unknown.
        warps: of one block, float64 [rows].
        device: the hardware facts; a fact of 0 is unknown and does not bind.
    """
    registers, shared = facts[:, 0], facts[:, 2]
    threads = warps * max(device.warp_size, 1)
    limits = [np.full(len(facts), MAX_RESIDENT_BLOCKS)]
    if device.registers_per_core:
        limits.append(device.registers_per_core / (threads * np.maximum(np.ceil(registers / 8.0) * 8.0, 8.0)))
    if device.shared_bytes_per_core:
        kept = 1024.0 if device.vendor == "nvidia" else 0.0
        limits.append(device.shared_bytes_per_core / np.maximum(shared + kept, 1.0))
    if device.max_threads_per_core:
        limits.append(device.max_threads_per_core / threads)
    # minimum: where a fact is missing, so is the answer.
    return np.floor(np.minimum.reduce(limits)) + 0.0 * (registers + shared)
