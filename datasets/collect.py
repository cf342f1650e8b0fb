"""Collection: problems x legal candidates -> measurements in the store, resumable at every record."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernelcast.datasets.journal import Journal
from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import PROTOCOL, TimingPlan, measure
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, Device, Problem, candidates, variant
from kernelcast.kernels.detect import detect, torch_device


@dataclass(frozen=True)
class Progress:
    """How far a collection is.

    Attributes:
        done: candidates measured, or known already.
        total: candidates of all problems.
        problem: what is being measured now.
        measured: candidates measured by this run.
        known: candidates that the store had already.
    """

    done: int
    total: int
    problem: Problem | None
    measured: int
    known: int


@dataclass
class CollectSummary:
    """What a collection did.

    Attributes:
        problems: problems gone through.
        measured: candidates measured by this run.
        known: candidates that the store had already.
        outcomes: how many measurements ended how.
        seconds: wall-clock time.
        complete: False if the budget ended it, or an interrupt.
        interrupted: whether Ctrl-C ended it.
        skipped: one sentence for each problem that cannot be measured here, such as one that needs too much memory.
    """

    problems: int = 0
    measured: int = 0
    known: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    complete: bool = True
    interrupted: bool = False
    skipped: list[str] = field(default_factory=list)


def collect(
    problems: Sequence[Problem],
    device: Device,
    store: Path,
    *,
    workload: str = "",
    subset: str = "full",
    backends: Collection[str] | None = None,
    plan: TimingPlan | None = None,
    budget_seconds: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> CollectSummary:
    """Measure every legal candidate of some problems that the store does not hold yet.

    A problem's records are on the disk before the next problem starts, so a kill loses the problem in hand and nothing
    else; the next run measures what is missing. Ctrl-C ends it in the same way, with the summary of what was done.

    Args:
        problems: of any operations.
        device: this machine's.
        store: folder of the store; created if there is none.
        workload: written into the records.
        subset: ``"full"`` or ``"default"``: each variant's whole space, or its quick subset.
        backends: keep variants of these backends only.
        plan: how much to measure each problem.
        budget_seconds: no further problem is started after this long.
        on_progress: called after each candidate's check and after each problem.

    Raises:
        StoreError: the store cannot be written, or is of a newer schema.
        KernelcastError: the device is not this machine's.
    """
    _require_here(device)
    plan = plan or TimingPlan()
    started = time.monotonic()
    summary = CollectSummary()
    done = total = 0

    def report(problem: Problem | None, ahead: int = 0) -> None:
        if on_progress is not None:
            on_progress(Progress(done + ahead, total, problem, summary.measured, summary.known))

    with Journal(store) as journal:
        journal.record_device(device)
        try:
            known = Store(store).ids()
            tables = [
                list(candidates(problem, device, subset=subset, backends=backends)) for problem in problems
            ]
            total = sum(map(len, tables))
            report(None)
            for problem, table in zip(problems, tables, strict=True):
                if budget_seconds is not None and time.monotonic() - started > budget_seconds:
                    summary.complete = False
                    break
                missing = [c for c in table if record_id(problem, c, device) not in known]
                summary.problems += 1
                summary.known += len(table) - len(missing)
                done += len(table) - len(missing)
                if missing:
                    try:
                        trial = measure(
                            problem,
                            missing,
                            device,
                            plan=plan,
                            workload=workload,
                            on_candidate=lambda checked, problem=problem: report(problem, checked - 1),  # type: ignore[misc]
                        )
                    except KernelcastError as error:
                        # One that does not fit in memory must not keep the others from being measured.
                        summary.skipped.append(str(error))
                        total -= len(missing)
                        continue
                    with _uninterrupted():
                        for measurement in trial.measurements:
                            journal.append(measurement)
                            known.add(measurement.id)
                            summary.outcomes[measurement.outcome] += 1
                            summary.measured += 1
                        done += len(missing)
                report(problem)
        except KeyboardInterrupt:
            summary.complete, summary.interrupted = False, True
    summary.seconds = time.monotonic() - started
    return summary


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until the end of the block: what was measured is written, and counted, to the last record."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    waiting: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if waiting:
        signal.raise_signal(signal.SIGINT)


def _require_here(device: Device) -> None:
    """Refuse to measure on another machine's device: its records would be this one's under a false name."""
    if device.kind == "gpu":
        torch_device(device)
    elif device.fingerprint != (here := detect("cpu")).fingerprint:
        raise KernelcastError(f"{device.name} is not here to measure on; this machine's CPU is {here.name}.")


def record_id(problem: Problem, candidate: Candidate, device: Device) -> str:
    """The id that a measurement made here and now would have."""
    found = variant(problem.operation, candidate.variant)
    return _unmeasured(problem, candidate, device, found.source_hash()).id


def _unmeasured(problem: Problem, candidate: Candidate, device: Device, variant_hash: str) -> Measurement:
    return Measurement(
        problem=problem,
        candidate=candidate,
        device=device.name,
        device_fingerprint=device.fingerprint,
        environment=Environment.current(variant_hash, device_kind=device.kind),
        protocol=Protocol(PROTOCOL),
        outcome="timeout",
    )


def with_threads(problems: Sequence[Problem], device: Device, threads: int) -> list[Problem]:
    """The same problems for a device: with this many CPU threads, or none on a GPU."""
    return [replace(problem, threads=threads if device.kind == "cpu" else 0) for problem in problems]
