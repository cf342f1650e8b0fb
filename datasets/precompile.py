"""Compiling a job's Triton kernels in parallel before it is timed.

One process compiles kernels one after another, and a job of hundreds would spend its budget so. Worker processes fill
Triton's own cache on disk instead, for the target of the device; the launches then find their machine code there. The
bias it could bring is none: the cache holds what the launch would compile itself.
"""

from __future__ import annotations

from typing import Any

from kernelcast import settings
from kernelcast.datasets.jobs import Job
from kernelcast.datasets.observing import Facts
from kernelcast.datasets.record import Protocol
from kernelcast.datasets.timing import PROTOCOL
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Device, variant
from kernelcast.kernels.compile import TARGETS
from kernelcast.kernels.compile_many import CompileRequest, compile_many, default_workers

#: Share of what is left of a budget that compiling may take; checking and timing need the rest.
BUDGET_SHARE = 0.5

#: Fewer kernels are compiled by their launches, as starting the workers takes longer.
LEAST_KERNELS = 3


def precompile(
    job: Job, device: Device, *, time_limit_s: float, workers: int | None = None
) -> dict[str, Any] | None:
    """Compile the main kernels of a job's Triton candidates, where the device is a GPU that can be compiled for.

    A kernel that a compiler refuses is left to its launch, which says so; one that takes too long, or ends its compiler,
    would do the same to the process that measures, and is not launched.

    Args:
        job: what is to be measured next.
        device: on which.
        time_limit_s: for one kernel.
        workers: processes; one for each CPU where left out.

    Returns:
        A message of kind ``compiled`` (see :mod:`kernelcast.datasets.isolation_job`) with the candidates that failed so;
        None if none did.
    """
    target = device.architecture
    if device.kind != "gpu" or target not in TARGETS:
        return None
    operation = job.problem.operation
    numbers = {
        candidate: number
        for number, candidate in enumerate(job.candidates)
        if _has_kernel(operation, candidate.variant)
    }
    if len(numbers) < LEAST_KERNELS:
        return None
    outcomes: dict[int, list[str]] = {}
    try:
        for request, facts in compile_many(
            [CompileRequest(job.problem, candidate) for candidate in numbers],
            target,
            workers=min(workers or default_workers(), len(numbers)),
            time_limit_s=time_limit_s,
            budget_s=BUDGET_SHARE * job.seconds if job.seconds < float("inf") else None,
            fill=True,
        ):
            # A compiler that the system ended, for want of memory, may succeed when it is alone.
            died = (
                facts.outcome == "crash"
                and facts.detail.startswith("exit status")
                and " -9:" not in facts.detail
            )
            if facts.outcome == "timeout" or died:
                outcomes[numbers[request.candidate]] = [facts.outcome, f"compiling: {facts.detail}"]
    except KernelcastError:
        return None  # no Triton, or its interpreter: the launches say what they need
    if not outcomes:
        return None
    failed = [job.candidates[number] for number in outcomes]
    shared = Facts.here(job.problem, failed, device, Protocol(PROTOCOL))
    return {"kind": "compiled", "facts": shared.to_dict(), "outcomes": outcomes}


def _has_kernel(operation: str, name: str) -> bool:
    """Whether a compile worker can describe the kernel: of this package, or of what it is told to import."""
    found = variant(operation, name)
    known = type(found).__module__.startswith("kernelcast.") or bool(settings.imports())
    return known and hasattr(found, "compile_spec")
