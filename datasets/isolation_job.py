"""One job that another process measures: what it was asked, what it has told, and what is made of it when it dies.

No processes here: messages come in, and a result goes out. Whoever takes the same messages in the same order comes to the
same end, so the collecting process can follow a job that a worker on another machine supervises.

Messages are plain JSON values with a ``kind``:

=========  ======================================  ==================================================================
kind       fields                                  meaning
=========  ======================================  ==================================================================
compiled   facts, outcomes ({number: [outcome,     candidates whose compilation failed before anything was measured
           detail]})
begun      facts                                   the inputs and the reference are made
prepared   number                                  a candidate was checked, or failed
failed     number, outcome, detail                 a candidate has this outcome
timing                                             the rounds begin
round      samples ({number: microseconds})        a round is over
done                                               the end; candidates that were not prepared had no time
refused    detail                                  the problem cannot be measured there
lost       number, outcome, detail, outside        the process ended while it ran this candidate (none where None);
                                                   ``outside``: perhaps for no fault of the candidate's
over                                               the budget ended while candidates were being prepared
=========  ======================================  ==================================================================

When a process is lost, candidates that have samples enough keep them, the one that it ran gets its outcome, and the rest is
for the next process.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernelcast.datasets.jobs import Job, Result
from kernelcast.datasets.observing import Facts
from kernelcast.datasets.record import Measurement
from kernelcast.datasets.timing import RaceResult, TimingPlan, finite
from kernelcast.kernels import Device, operation, variant

#: So often a process may be lost in a job's rounds; then the others keep what samples they have, however few.
LOST_ROUNDS = 3
#: So often in a row processes may be lost without telling anything; then the rest of the job is given up.
LOST_SILENT = 3

Message = Mapping[str, Any]


class JobState:
    """How far a job is.

    Args:
        job: what is measured.
        device: on which.
        plan: how much.
        workload: written into the records.
        numbers: by which messages name the job's candidates; their places where left out.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        plan: TimingPlan,
        workload: str,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.job, self.device, self.plan, self.workload = job, device, plan, workload
        self._candidates = dict(
            zip(range(len(job.candidates)) if numbers is None else numbers, job.candidates, strict=True)
        )
        self.skipped = ""
        self.ended = not job.candidates
        self._started = time.monotonic()
        self._facts: Facts | None = None
        #: Number -> (outcome, detail), or the samples that it keeps.
        self._failed: dict[int, tuple[str, str]] = {}
        self._kept: dict[int, tuple[tuple[float, ...], float]] = {}
        # Of the process that measures now.
        self._rounds: list[dict[int, float]] = []
        self._timing = False
        # Over all processes.
        self._prepared: set[int] = set()
        self._forgiven: set[int] = set()
        self._lost_rounds = self._lost_silent = 0

    # --- What to ask ---

    @property
    def todo(self) -> list[int]:
        """Numbers of the candidates that have to be measured, those that were never prepared first.

        A process that dies costs the preparation of all before it, so what may kill it comes early.
        """
        left = [n for n in self._candidates if n not in self._failed and n not in self._kept]
        return sorted(left, key=lambda number: number in self._prepared)

    @property
    def seconds_left(self) -> float:
        """What is left of the job's budget."""
        return self.job.seconds - (time.monotonic() - self._started)

    @property
    def preparing(self) -> bool:
        """Whether no process has come to the rounds yet."""
        return not self._timing

    @property
    def checked(self) -> int:
        """Candidates that were prepared, or have an outcome."""
        return len(self._prepared | self._failed.keys())

    def request(self) -> dict[str, Any]:
        """What a process is asked to do."""
        seconds = self.seconds_left
        return {
            "device": self.device.to_dict(),
            "problem": self.job.problem.to_dict(),
            "candidates": [[number, self._candidates[number].key] for number in self.todo],
            "plan": vars(self.plan),
            "seconds": None if seconds == math.inf else max(seconds, 0.0),
            "imports": imports_of(self.job),
        }

    # --- What is told ---

    def take(self, message: Message) -> None:
        """Take in one message."""
        _TAKERS[message["kind"]](self, message)

    def _take_compiled(self, message: Message) -> None:
        self._learn(message)
        for number, (outcome, detail) in message["outcomes"].items():
            self._failed[int(number)] = str(outcome), str(detail)
        self.ended = not self.todo

    def _take_begun(self, message: Message) -> None:
        self._learn(message)

    def _learn(self, message: Message) -> None:
        facts = Facts.from_dict(message["facts"])
        if self._facts is not None:  # a new process tells of the candidates that are left
            facts = Facts(
                facts.device,
                facts.device_fingerprint,
                facts.protocol,
                {**self._facts.environments, **facts.environments},
            )
        self._facts = facts

    def _take_prepared(self, message: Message) -> None:
        self._lost_silent = 0
        self._prepared.add(int(message["number"]))

    def _take_failed(self, message: Message) -> None:
        self._lost_silent = 0
        self._failed[int(message["number"])] = str(message["outcome"]), str(message["detail"])

    def _take_timing(self, message: Message) -> None:
        self._timing = True

    def _take_round(self, message: Message) -> None:
        self._lost_silent = 0
        self._rounds.append({int(number): float(value) for number, value in message["samples"].items()})

    def _take_done(self, message: Message) -> None:
        self._keep(least=1)
        self.ended = True

    def _take_refused(self, message: Message) -> None:
        self.skipped = str(message["detail"])
        self._take_over(message)

    def _take_over(self, message: Message) -> None:
        self._keep(least=min(self.plan.least_rounds, self.plan.rounds))
        self.ended = True

    def _take_lost(self, message: Message) -> None:
        number = message["number"]
        forgive = number is None or (message["outside"] and number not in self._forgiven)
        if number is not None:
            self._lost_silent = 0
            if forgive:
                self._forgiven.add(number)
            else:
                self._failed[number] = str(message["outcome"]), str(message["detail"])
        else:
            self._lost_silent += 1
        self._lost_rounds += bool(self._rounds)
        least = 1 if self._lost_rounds >= LOST_ROUNDS else min(self.plan.least_rounds, self.plan.rounds)
        self._keep(least)
        if self._lost_silent >= LOST_SILENT:
            self.skipped = (
                f"The process that measures {self.job.problem} ended {self._lost_silent} times without a candidate to "
                f"blame: {message['detail']}"
            )
            self.ended = True
        self.ended = self.ended or not self.todo

    def _keep(self, least: int) -> None:
        """Let candidates keep their samples: of enough rounds, or of however many if they were out of the race."""
        rounds, self._rounds, self._timing = self._rounds, [], False
        numbers = sorted({number for row in rounds for number in row})
        if not numbers:
            return
        samples_us = np.array([[row.get(number, math.nan) for number in numbers] for row in rounds])
        errors = RaceResult(samples_us).error_log()
        for column, number in enumerate(numbers):
            taken = finite(samples_us[:, column])
            if len(taken) >= least or math.isnan(samples_us[-1, column]):
                self._kept[number] = taken, float(errors[column])

    # --- What came of it ---

    def interrupt(self) -> None:
        """End the job now: what was measured well enough is kept."""
        if not self.ended:
            self._take_over({})

    def result(self) -> Result:
        """The records so far, in the order of the candidates."""
        facts = self._facts
        records: list[Measurement] = []
        for number, candidate in self._candidates.items():
            if facts is None or (number not in self._failed and number not in self._kept):
                continue
            samples_us, error_log = self._kept.get(number, ((), math.nan))
            outcome, detail = self._failed.get(number, ("ok", ""))
            if outcome != "ok":
                samples_us, error_log = (), math.nan
            records.append(
                facts.record(
                    self.job.problem,
                    candidate,
                    samples_us=samples_us,
                    error_log=error_log,
                    outcome=outcome,
                    detail=detail[:500],
                    workload=self.workload,
                )
            )
        return Result(self.job, tuple(records), self.skipped)


_TAKERS = {
    kind: getattr(JobState, f"_take_{kind}")
    for kind in (
        "compiled",
        "begun",
        "prepared",
        "failed",
        "timing",
        "round",
        "done",
        "refused",
        "over",
        "lost",
    )
}


def imports_of(job: Job) -> list[list[str]]:
    """[module, file] of each module outside the package that describes the job's operation or a variant of it."""
    found: dict[str, str] = {}
    described: Sequence[Any] = [
        operation(job.problem.operation),
        *(variant(job.problem.operation, name) for name in {each.variant: None for each in job.candidates}),
    ]
    for each in described:
        name = type(each).__module__
        if not name.startswith("kernelcast."):
            found[name] = str(getattr(sys.modules.get(name), "__file__", None) or "")
    return [[name, file] for name, file in found.items()]
