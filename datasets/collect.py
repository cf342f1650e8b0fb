"""Collection: problems x legal candidates -> measurements in the store, resumable at every record."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernelcast.datasets.jobs import Executor, Exhaustive, InProcess, Job, Result, Strategy, refuse_in_child
from kernelcast.datasets.journal import Journal
from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import PROTOCOL, TimingPlan
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, Device, Problem, candidates, operation, variant
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


@dataclass(frozen=True)
class Unfinished:
    """A problem whose measuring was cut short.

    Attributes:
        problem: which, in words.
        measured: of its candidates, those that were measured now.
        candidates: all that were to be measured now.
        best: the fastest of those measured now; None if none worked.
        latency_us: its latency.
    """

    problem: str
    measured: int
    candidates: int
    best: str | None
    latency_us: float | None

    @classmethod
    def of(cls, result: Result) -> Unfinished:
        """What came of a job that was cut short."""
        working = [each for each in result.measurements if each.outcome == "ok"]
        best = min(working, key=lambda each: each.latency_us, default=None)
        return cls(
            str(result.job.problem),
            len(result.measurements),
            len(result.job.candidates),
            None if best is None else str(best.candidate),
            None if best is None else best.latency_us,
        )


@dataclass
class CollectSummary:
    """What a collection did.

    Attributes:
        problems: problems of which something was measured, or everything known.
        measured: candidates measured by this run.
        known: candidates that the store had already.
        outcomes: how many measurements ended how.
        seconds: wall-clock time.
        complete: False if the budget ended it, or an interrupt.
        interrupted: whether Ctrl-C ended it.
        skipped: one sentence for each problem that cannot be measured here, such as one that needs too much memory.
        unfinished: problems of which a part was measured when the budget or an interrupt came, with the best so far.
        failures: a sentence for the first candidates that failed, one of each variant and outcome.
    """

    problems: int = 0
    measured: int = 0
    known: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    complete: bool = True
    interrupted: bool = False
    skipped: list[str] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


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
    strategy: Strategy | None = None,
    executor: Executor | None = None,
) -> CollectSummary:
    """Measure every legal candidate of some problems that the store does not hold yet.

    A problem's records are on the disk as soon as it is measured, so a kill loses the problems in hand and nothing else; the
    next run measures what is missing. Ctrl-C ends it in the same way, with the summary of what was done.

    Args:
        problems: of any operations.
        device: this machine's.
        store: folder of the store; created if there is none.
        workload: written into the records.
        subset: ``"full"``, ``"default"`` or ``"auto"``: each variant's whole space, its quick subset, or that of large spaces.
        backends: keep variants of these backends only.
        plan: how much to measure each problem.
        budget_seconds: for all of it, compiling included. Towards the end the problem in hand gets what is left: some of
            its candidates may then remain for the next run.
        on_progress: called after each candidate's check and after each problem.
        strategy: chooses what is measured; everything, where left out.
        executor: measures; in this process, where left out. It is the caller's to close.

    Raises:
        StoreError: the store cannot be written, or is of a newer schema.
        KernelcastError: the device is not this machine's.
    """
    refuse_in_child()
    if executor is None:
        _require_here(device)
        executor = InProcess(device)
    plan = plan or TimingPlan()
    strategy = strategy or Exhaustive()
    problems = list(dict.fromkeys(problems))
    with Journal(store) as journal:
        journal.record_device(device)
        run = _Run(journal, strategy, executor, on_progress, budget_seconds)
        try:
            tables = [
                list(candidates(problem, device, subset=subset, backends=backends)) for problem in problems
            ]
            run.start(problems, tables, _known(store, problems, tables, device, strategy))
            run.go_on(plan, workload)
        except KeyboardInterrupt:
            run.summary.complete, run.summary.interrupted = False, True
    run.summary.seconds = run.elapsed_s
    return run.summary


class _Run:
    """One collection: what it has done so far."""

    def __init__(
        self,
        journal: Journal,
        strategy: Strategy,
        executor: Executor,
        on_progress: Callable[[Progress], None] | None,
        budget_seconds: float | None,
    ) -> None:
        self.summary = CollectSummary()
        self._journal, self._strategy, self._executor = journal, strategy, executor
        self._on_progress, self._budget_seconds = on_progress, budget_seconds
        self._started = time.monotonic()
        self._noted: set[tuple[str, str, str]] = set()
        self._problems: set[Problem] = set()
        self._skipped = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def start(
        self,
        problems: Sequence[Problem],
        tables: Sequence[Sequence[Candidate]],
        known: dict[tuple[Problem, Candidate], Measurement | None],
    ) -> None:
        self._strategy.start(problems, tables, known)
        self.summary.known = len(known)
        open_candidates = {problem: len(table) for problem, table in zip(problems, tables, strict=True)}
        for problem, _ in known:
            open_candidates[problem] -= 1
        self._problems = {problem for problem, count in open_candidates.items() if not count}
        self.report(None)

    def go_on(self, plan: TimingPlan, workload: str) -> None:
        """Run what the strategy proposes until nothing is left, or the budget ends."""
        while self.summary.complete:
            jobs = self._strategy.propose()
            if not jobs:
                break
            results = self._executor.run(
                self._within_budget(jobs),
                plan=plan,
                workload=workload,
                on_candidate=lambda job, checked: self.report(job.problem, checked - 1),
            )
            for result in results:
                with _uninterrupted():
                    self._keep(result)
                self.report(result.job.problem)
        self.summary.problems = len(self._problems)

    def report(self, problem: Problem | None, ahead: int = 0) -> None:
        if self._on_progress is not None:
            done = self.summary.known + self.summary.measured
            self._on_progress(
                Progress(
                    done + ahead,
                    self._strategy.total - self._skipped,
                    problem,
                    self.summary.measured,
                    self.summary.known,
                )
            )

    def _within_budget(self, jobs: Iterable[Job]) -> Iterator[Job]:
        for job in jobs:
            if self._budget_seconds is None:
                yield job
            elif (left_s := self._budget_seconds - self.elapsed_s) > 0:
                yield replace(job, seconds=left_s)
            else:
                self.summary.complete = False
                return

    def _note(self, measurement: Measurement) -> None:
        """Say what failed, once for each variant and outcome."""
        problem, candidate = measurement.problem, measurement.candidate
        kind = problem.operation, candidate.variant, measurement.outcome
        if kind in self._noted:
            return
        self._noted.add(kind)
        hint = ""
        if candidate == operation(problem.operation).default and measurement.outcome == "wrong_result":
            hint = " This is the default: the reference or its tolerance may be wrong."
        self.summary.failures.append(
            f"{candidate} on {problem}: {measurement.outcome}: {measurement.detail}.{hint}"
        )

    def _keep(self, result: Result) -> None:
        for measurement in result.measurements:
            self._journal.append(measurement)
            self.summary.outcomes[measurement.outcome] += 1
            self.summary.measured += 1
            if measurement.outcome != "ok":
                self._note(measurement)
        self._problems.add(result.job.problem)
        self.summary.problems = len(self._problems)
        if result.skipped:
            self.summary.skipped.append(result.skipped)
            self._skipped += len(result.job.candidates) - len(result.measurements)
        elif len(result.measurements) < len(result.job.candidates):
            self.summary.complete = False
            self.summary.unfinished.append(Unfinished.of(result))
        self._strategy.tell(result)


def _known(
    store: Path,
    problems: Sequence[Problem],
    tables: Sequence[Sequence[Candidate]],
    device: Device,
    strategy: Strategy,
) -> dict[tuple[Problem, Candidate], Measurement | None]:
    """What the store holds of these candidates, measured here with these versions."""
    ids: dict[str, Measurement | None]
    if strategy.needs_known:
        ids = {measurement.id: measurement for measurement in Store(store).measurements()}
    else:
        ids = dict.fromkeys(Store(store).ids())
    found = {}
    for problem, table in zip(problems, tables, strict=True):
        for candidate in table:
            here = record_id(problem, candidate, device)
            if here in ids:
                found[problem, candidate] = ids[here]
    return found


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
