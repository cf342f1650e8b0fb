"""Verification: measure a few candidates here, check their results, and decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.datasets.timing import TimingPlan, Trial, measure
from kernelcast.kernels import Candidate, Device, Problem

#: A verification takes less than a collection: few candidates race, and the race ends when its outcome is known to half a
#: percent, which is well below what is called a tie.
VERIFY_PLAN = TimingPlan(
    rounds=16, least_rounds=3, seconds=2.0, candidate_seconds=1.0, sample_us=1000.0, settled_error=0.005
)

#: Two candidates closer than this many standard errors of their difference are a tie ...
_TIE_ERRORS = 2.0
#: ... but noise never makes a tie of candidates further apart than this, in log latency.
_TIE_LIMIT = 0.03


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


def verify(
    problem: Problem,
    chosen: Sequence[Candidate],
    device: Device,
    *,
    plan: TimingPlan = VERIFY_PLAN,
    workload: str = "",
) -> Verdict:
    """Measure candidates against one another and pick the fastest that is right.

    Args:
        problem: what to compute.
        chosen: candidates in the fixed order that breaks ties: the default, then as predicted.
        device: this machine's.
        plan: how much to measure.
        workload: written into the records.
    """
    trial = measure(problem, chosen, device, plan=plan, workload=workload)
    winner, confidence = decide(trial.paired_log, trial.error_log)
    return Verdict(winner, confidence, trial)


def decide(paired_log: np.ndarray, error_log: np.ndarray) -> tuple[int | None, float]:
    """The winner's place and the confidence in it, from log latencies and their errors; NaN is a failure.

    Candidates that noise cannot tell from the fastest are a tie, and the first of them wins: a fixed order, so that
    all processes of a job that see the same tie choose alike. Noise that is not known (a single round) counts as large.
    """
    if not np.isfinite(paired_log).any():
        return None, math.nan
    fastest = int(np.nanargmin(paired_log))
    gap = paired_log - paired_log[fastest]
    known = np.where(np.isnan(error_log), _TIE_LIMIT, error_log)
    error = np.hypot(known, known[fastest])
    tied = gap <= np.minimum(_TIE_ERRORS * error, _TIE_LIMIT)
    winner = int(np.flatnonzero(tied)[0])
    return winner, confidence(gap - gap[winner], np.hypot(known, known[winner]), winner)


def confidence(gap: np.ndarray, error: np.ndarray, winner: int) -> float:
    """Probability that the closest rival of the winner is truly slower, from the normal distribution."""
    rivals = np.isfinite(gap) & np.isfinite(error)
    rivals[winner] = False
    if not rivals.any():
        return math.nan
    scores = gap[rivals] / np.maximum(error[rivals], 1e-9)
    return 0.5 * (1.0 + math.erf(float(scores.min()) / math.sqrt(2.0)))
