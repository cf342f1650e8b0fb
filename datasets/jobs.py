"""Who measures, and what next: the two contracts between a collection and its parts.

Call order, of one collection::

    strategy.start(problems, tables, known)      what there is, and what the store holds of it
    while jobs := strategy.propose():            some jobs; none when nothing is left to measure
        for result in executor.run(jobs):        as they come; each candidate in exactly one result of its job
            strategy.tell(result)
    executor.close()

Between a proposal and the next one every job was run, or the collection is at its end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kernelcast.datasets.record import Measurement
from kernelcast.datasets.timing import TimingPlan, measure
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, Device, Problem

#: Set in a process that measures for another one.
_in_child = False


def enter_child() -> None:
    """Note that this process measures for another one."""
    global _in_child
    _in_child = True


def refuse_in_child() -> None:
    """Raise a KernelcastError in a process that measures for another one: it would start itself over and over."""
    if _in_child:
        raise KernelcastError(
            "A process that measures kernels of a script imports that script, which begins to collect. Put what it does "
            "under: if __name__ == '__main__'."
        )


@dataclass(frozen=True)
class Job:
    """Candidates of one problem, to be timed against one another.

    Attributes:
        problem: what they compute.
        candidates: at least one.
        seconds: what is left of a budget when the job is handed out, for compiling, checking and timing; infinite
            without a budget. It says nothing of what the job is, and two jobs are equal without it.
    """

    problem: Problem
    candidates: tuple[Candidate, ...]
    seconds: float = field(default=math.inf, compare=False)


@dataclass(frozen=True)
class Result:
    """What came of a job, or of a part of its candidates.

    Attributes:
        job: the job that was given out.
        measurements: one for each candidate that this result is of.
        skipped: why the rest of the job cannot be measured here; empty where there is no rest, or no time was left for it.
    """

    job: Job
    measurements: tuple[Measurement, ...]
    skipped: str = ""


class Strategy(ABC):
    """Chooses what is measured next."""

    @abstractmethod
    def start(
        self,
        problems: Sequence[Problem],
        tables: Sequence[Sequence[Candidate]],
        known: Mapping[tuple[Problem, Candidate], Measurement | None],
    ) -> None:
        """Take in what there is: problems, the legal candidates of each, and what has been measured already.

        ``known`` has a measurement for each candidate whose outcome this strategy asked for with ``needs_known``, and
        ``None`` for the others that the store holds.
        """

    #: Whether :meth:`start` needs the stored measurements themselves, which must be read for it.
    needs_known: bool = False

    @abstractmethod
    def propose(self) -> list[Job]:
        """The next jobs, of candidates that were neither known nor proposed before; empty at the end."""

    @abstractmethod
    def tell(self, result: Result) -> None:
        """Learn what came of a job."""

    @property
    @abstractmethod
    def total(self) -> int:
        """Candidates that will have been measured at the end, the known ones included; for progress."""


class Exhaustive(Strategy):
    """Every candidate of every problem, in order."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._total = 0

    def start(
        self,
        problems: Sequence[Problem],
        tables: Sequence[Sequence[Candidate]],
        known: Mapping[tuple[Problem, Candidate], Measurement | None],
    ) -> None:
        self._total = sum(map(len, tables))
        for problem, table in zip(problems, tables, strict=True):
            missing = tuple(candidate for candidate in table if (problem, candidate) not in known)
            if missing:
                self._jobs.append(Job(problem, missing))

    def propose(self) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def tell(self, result: Result) -> None:
        pass

    @property
    def total(self) -> int:
        return self._total


class Executor(ABC):
    """Measures jobs, on this machine's device or on many. Closed by :meth:`close`, or at the end of a ``with`` block."""

    @abstractmethod
    def run(
        self,
        jobs: Iterable[Job],
        *,
        plan: TimingPlan,
        workload: str,
        on_candidate: Callable[[Job, int], None] | None = None,
    ) -> Iterator[Result]:
        """Measure jobs, and give each result as soon as it is there.

        Jobs are taken from the iterable one at a time, as workers become free: a budget may end it. What a candidate
        does wrong is its outcome, and the others go on.

        Args:
            jobs: of problems that these devices can run.
            plan: how much to measure each problem.
            workload: written into the records.
            on_candidate: called with a job and how many of its candidates have been checked so far.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what was started for this executor."""

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InProcess(Executor):
    """One job after another, in this process, on this machine's device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def run(
        self,
        jobs: Iterable[Job],
        *,
        plan: TimingPlan,
        workload: str,
        on_candidate: Callable[[Job, int], None] | None = None,
    ) -> Iterator[Result]:
        for job in jobs:

            def checked(count: int, job: Job = job) -> None:
                if on_candidate is not None:
                    on_candidate(job, count)

            try:
                trial = measure(
                    job.problem,
                    job.candidates,
                    self._device,
                    plan=plan,
                    workload=workload,
                    on_candidate=checked,
                    budget_seconds=job.seconds,
                )
            except KernelcastError as error:
                # One that does not fit in memory must not keep the others from being measured.
                yield Result(job, (), str(error))
            else:
                yield Result(job, trial.measurements)
