"""Analytic costs: times that the amounts of work imply on a device's facts. Physics for the trees, and the baseline.

The model is a roofline (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009) with a term for the waves of a grid and one for launches. It is coarse on
purpose: the trees learn what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernelcast.kernels import Device, Problem

#: Microseconds that one launch costs: a CUDA kernel launch, or the dispatch of one torch operator on a CPU.
LAUNCH_US = {"gpu": 4.0, "cpu": 3.0}

#: Registers of a thread beside its accumulators: addresses, masks, operand fragments.
OTHER_REGISTERS = 40.0

#: Blocks that a core holds at most, whatever they need.
MAX_RESIDENT_BLOCKS = 32.0

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
    peak = device.flops_per_second(problem.dtype, allow_tf32=problem.allow_tf32)
    zero = np.zeros_like(work["flops"])
    compute_us = work["flops"] / peak * 1e6 if peak else zero
    bandwidth = device.memory_bandwidth
    memory_us = work["traffic_bytes"] / bandwidth * 1e6 if bandwidth else zero
    scratch_us = 2.0 * work["scratch_bytes"] / bandwidth * 1e6 if bandwidth else zero
    launch_us = work["calls"] * LAUNCH_US[device.kind]

    blocks = _blocks_per_core(work, device)
    programs = np.maximum(work["programs"], 1.0)
    waves = programs / (device.cores * blocks)
    full_waves = np.ceil(waves)
    tail = full_waves / waves
    busy_share = np.minimum(programs / device.cores, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        step_us = memory_us / (full_waves * work["inner_steps"])

    # A library whose grid is closed (NaN) is taken to fill the device.
    stretch = np.where(np.isnan(tail), 1.0, np.where(waves < 1.0, 1.0 / busy_share, tail))
    roofline_us = np.maximum(compute_us * stretch, memory_us) + scratch_us + launch_us
    return {
        "compute_us": compute_us,
        "memory_us": memory_us,
        "scratch_us": scratch_us,
        "launch_us": launch_us,
        "blocks_per_core": blocks,
        "waves": waves,
        "tail": tail,
        "busy_share": busy_share,
        "step_us": step_us,
        "roofline_us": roofline_us,
    }


def _blocks_per_core(work: Mapping[str, np.ndarray], device: Device) -> np.ndarray:
    """Blocks that one core holds at a time: what shared memory, registers and thread slots allow, at least 1."""
    if device.kind == "cpu":
        return np.ones_like(work["warps"])
    threads = work["warps"] * device.warp_size
    limits = [np.full_like(threads, MAX_RESIDENT_BLOCKS)]
    with np.errstate(invalid="ignore", divide="ignore"):
        if device.shared_bytes_per_core:
            limits.append(device.shared_bytes_per_core / np.maximum(work["shared_bytes"], 1.0))
        if device.registers_per_core:
            limits.append(device.registers_per_core / (threads * (work["accumulators"] + OTHER_REGISTERS)))
        if device.max_threads_per_core:
            limits.append(device.max_threads_per_core / threads)
        # fmin: a limit that is not known (NaN) does not bind; all unknown gives the constant.
        return np.maximum(np.floor(np.fmin.reduce(limits)), 1.0)


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
