"""Verification: measure a few candidates here, check their results, and decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.datasets.timing import (
    BUSY_SCATTER,
    TimingPlan,
    Trial,
    interrupted,
    is_busy,
    measure,
    median,
    quantile,
    scatter_of,
    sleeping,
    starving,
    undisturbed_us,
)
from kernelcast.errors import warn
from kernelcast.kernels import Candidate, Device, Problem

#: But noise never makes a tie of candidates further apart than this, in log latency; of one and the default it does.
_TIE_LIMIT = 0.03

#: A verification takes less than a collection: few candidates race, and the race ends when nothing that runs may be faster
#: than the choice by more than what is called a tie. Many short samples show interruptions for what they are; few long ones do not.
VERIFY_PLAN = TimingPlan(
    rounds=16, least_rounds=3, seconds=2.0, candidate_seconds=1.0, sample_us=200.0, settled_log=_TIE_LIMIT
)

#: Two candidates closer than this many standard errors of their difference are a tie.
_TIE_ERRORS = 2.0

#: Share of the samples that interruptions leave alone, as good as always.
_QUICK = 0.1
_QUICK_QUARTER = 0.25
#: With fewer samples nothing is said of a candidate on a busy machine.
_FEW = 3


class BusyWarning(UserWarning):
    """A verification's samples scatter as on a machine that other programs use too."""


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    Attributes:
        winner: place in the list that was measured; None if nothing worked.
        confidence: probability that no other measured candidate is faster, as far as the noise tells.
        trial: every measurement.
    """

    winner: int | None
    confidence: float
    trial: Trial

    @property
    def scatter(self) -> float:
        """How far the quartiles of the first candidate's samples lie apart, as a share of their median; NaN for less than
        three samples."""
        return scatter_of(self.trial.measurements[0].samples_us) if self.trial.measurements else math.nan

    @property
    def busy(self) -> bool:
        """Whether the first candidate's samples are those of a machine that other programs use too
        (:func:`kernelcast.datasets.rounds.is_busy`)."""
        first = self.trial.measurements[:1]
        return bool(first) and is_busy(first[0].samples_us, self.trial.disturbances)

    @property
    def paired_log(self) -> np.ndarray:
        """[candidates] log latency less the leader's, paired over rounds; on a busy machine with as much of each gain over the
        first candidate as :func:`cautious_gain` leaves. NaN for a failure."""
        return _cautious_log(self.trial) if self.busy else self.trial.paired_log

    @property
    def error_log(self) -> np.ndarray:
        """[candidates] standard errors of ``paired_log``; on a busy machine with the first's and that of what beats all its
        samples as small as :func:`clearly_faster` makes them. NaN for a failure or a single round."""
        return _cautious_error(self.trial, self.paired_log) if self.busy else self.trial.error_log

    @property
    def note(self) -> str:
        """What to say of a busy machine; empty for a quiet one."""
        if not self.busy:
            return ""
        first, disturbances = self.trial.measurements[0], self.trial.disturbances
        if starving(disturbances):
            starved = sum(each.starved for each in disturbances)
            found = f"{starved} of {len(disturbances)} samples of {first.candidate} waited for a processor"
        elif sleeping(first.samples_us, disturbances):
            sleeps = median([each.sleeps for each in disturbances])
            found = (
                f"threads of this process slept {sleeps:.2g} times in a call of {first.candidate}, as they do where several "
                "threads use torch"
            )
        elif self.scatter > BUSY_SCATTER:
            found = f"the middle half of the samples of {first.candidate} spreads over {self.scatter:.0%} of their median"
        else:
            long, count = interrupted(first.samples_us), len(first.samples_us)
            found = f"{long} of {count} samples of {first.candidate} took more than three times their median"
        return f"the machine was busy: {found}"


def verify(
    problem: Problem,
    chosen: Sequence[Candidate],
    device: Device,
    *,
    plan: TimingPlan = VERIFY_PLAN,
    workload: str = "",
) -> Verdict:
    """Measure candidates against one another and pick the fastest that is right.

    Where the first one's samples are those of a busy machine, what is faster must be so in its quickest samples too, and
    once in a process a :class:`BusyWarning` says so.

    Args:
        problem: what to compute.
        chosen: candidates in the fixed order that breaks ties: the default, then as predicted.
        device: this machine's.
        plan: how much to measure.
        workload: written into the records.
    """
    verdict = judged(measure(problem, chosen, device, plan=plan, workload=workload))
    warn_if_busy(problem, verdict)
    return verdict


def judged(trial: Trial) -> Verdict:
    """What a trial says, the first of its candidates being what runs without us; as :func:`verify`, without a warning."""
    verdict = Verdict(*decide(trial.paired_log, trial.error_log), trial)
    if not verdict.busy:
        return verdict
    winner, confidence = decide(verdict.paired_log, verdict.error_log)
    # Of a first one that was never undisturbed nothing is known: that it stays is no finding.
    return Verdict(winner, confidence if _first_us(trial) else min(confidence, 0.5), trial)


def cautious_gain(gain_log: float, samples_us: Sequence[float], default_us: Sequence[float]) -> float:
    """A measured log ratio to the default, or as much of it as the quickest tenths of the samples show too.

    What interrupts a sample only makes it longer; on a busy machine that may hit more than half of one candidate's samples.
    """
    quick = math.log(quantile(samples_us, _QUICK) / quantile(default_us, _QUICK))
    return min(max(gain_log, quick), 0.0) if gain_log < 0 else max(min(gain_log, quick), 0.0)


def _cautious_log(trial: Trial) -> np.ndarray:
    """Paired log latencies with the gains over the first candidate that :func:`cautious_gain` leaves: none where almost all samples
    of the first waited for a processor, as how long it takes is not known then."""
    paired = trial.paired_log.copy()
    for place in np.flatnonzero(paired < paired[0]):
        paired[place] = paired[0] + sure_gain(trial, int(place))
    return paired


def sure_gain(trial: Trial, place: int) -> float:
    """A candidate's measured log ratio to the first one, or as much of a gain as what is sure to be the first's own shows too."""
    gain, first_us = float(trial.paired_log[place] - trial.paired_log[0]), _first_us(trial)
    if not first_us:
        return max(gain, 0.0)
    return cautious_gain(gain, trial.measurements[place].samples_us, first_us)


def _first_us(trial: Trial) -> list[float]:
    """What of the first candidate's samples is sure to be its own; empty where that is known of fewer than three."""
    samples_us = trial.measurements[0].samples_us
    found = undisturbed_us(samples_us, trial.disturbances)
    return found if len(found) >= min(_FEW, len(samples_us)) else []


def clearly_faster(samples_us: Sequence[float], default_us: Sequence[float]) -> bool:
    """Whether a quarter of some samples, and three at least, are each faster than every one of the default's by more than a tie.

    Of equals that are interrupted alike that is chance once in twenty times at most, and on a busy machine it is seen where the
    paired ratios scatter too far to tell.
    """
    if not samples_us or not default_us:
        return False
    enough = max(_FEW, math.ceil(_QUICK_QUARTER * len(samples_us)))
    return sum(each < min(default_us) * math.exp(-_TIE_LIMIT) for each in samples_us) >= enough


def _cautious_error(trial: Trial, paired_log: np.ndarray) -> np.ndarray:
    """Errors that leave what is :func:`clearly_faster` just beyond those of the default."""
    error = trial.error_log.copy()
    default_us = _first_us(trial)
    for place in np.flatnonzero(paired_log < paired_log[0]):
        if clearly_faster(trial.measurements[place].samples_us, default_us):
            most = 0.99 * float(paired_log[0] - paired_log[place]) / (_TIE_ERRORS * math.sqrt(2.0))
            error[0], error[place] = np.fmin(error[0], most), np.fmin(error[place], most)
    return error


#: Holds something once a :class:`BusyWarning` was given in this process.
_warned: set[bool] = set()


def warn_if_busy(problem: Problem, verdict: Verdict) -> None:
    """Give a :class:`BusyWarning` where a verdict is of a busy machine, once in a process."""
    if _warned or not verdict.busy:
        return
    _warned.add(True)
    warn(
        f"While {problem} was verified {verdict.note}. What other programs, or other threads of this one, run meanwhile "
        "may decide between candidates: verify on a quiet machine (`kernelcast doctor` checks it), or again with "
        "`kernelcast cache verify`. This is said once.",
        BusyWarning,
    )


def decide(paired_log: np.ndarray, error_log: np.ndarray) -> tuple[int | None, float]:
    """The winner's place and the confidence in it, from log latencies and their errors; NaN is a failure.

    The first is what runs without us: it wins unless the fastest is faster by more than two standard errors of their
    difference, however large these are. Else those that are, and that noise cannot tell from the fastest, are a tie, never
    further than 3% from it, and the first of them wins: a fixed order, so that all processes of a job that see the same tie
    choose alike. Noise that is not known (a single round) counts as large, 3%. A first one that failed has no say.

    Args:
        paired_log: float64 [candidates], log latencies less the leader's.
        error_log: float64 [candidates], their standard errors; 0 for the leader.
    """
    if not np.isfinite(paired_log).any():
        return None, math.nan
    known = np.where(np.isnan(error_log), _TIE_LIMIT, error_log)
    fastest = int(np.nanargmin(paired_log))
    gap = paired_log - paired_log[fastest]
    beyond = paired_log[0] - paired_log > _TIE_ERRORS * np.hypot(known, known[0])
    if np.isfinite(paired_log[0]) and not beyond[fastest]:
        winner = 0
    else:
        tied = gap <= np.minimum(_TIE_ERRORS * np.hypot(known, known[fastest]), _TIE_LIMIT)
        winner = int(np.flatnonzero(tied & (beyond | np.isnan(paired_log[0])))[0])
    return winner, confidence(gap - gap[winner], np.hypot(known, known[winner]), winner)


def confidence(gap: np.ndarray, error: np.ndarray, winner: int) -> float:
    """Probability that the closest rival of the winner is truly slower, from the normal distribution."""
    rivals = np.isfinite(gap) & np.isfinite(error)
    rivals[winner] = False
    if not rivals.any():
        return math.nan
    scores = gap[rivals] / np.maximum(error[rivals], 1e-9)
    return 0.5 * (1.0 + math.erf(float(scores.min()) / math.sqrt(2.0)))
