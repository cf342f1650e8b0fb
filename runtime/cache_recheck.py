"""Remembered selections measured again against the default: do they still win?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kernelcast.datasets.record import Measurement
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Device, operation, require_legal
from kernelcast.runtime.cache_files import CacheEntry
from kernelcast.runtime.selection import Selection
from kernelcast.runtime.verify import VERIFY_PLAN, Verdict, decide, verify

#: ``"wins"``: faster than the default beyond noise; ``"ties"``: noise cannot tell them apart; ``"loses"``: slower beyond
#: noise; ``"fails"``: no longer legal, or it does not run or computes something else; ``"unmeasured"``: nothing could be
#: measured now; ``"default"``: the default is what is remembered, and nothing was measured.
OUTCOMES = ("wins", "ties", "loses", "fails", "unmeasured", "default")


@dataclass(frozen=True)
class Recheck:
    """What came of one entry.

    Attributes:
        entry: as it was remembered.
        outcome: one of :data:`OUTCOMES`.
        reason: why it fails or could not be measured; else empty.
        candidate_us: what was remembered takes now, in microseconds; NaN if not measured.
        default_us: what the default takes now, in microseconds; NaN if not measured.
        confidence: that the winner of the two is faster.
        measurements: every sample.
    """

    entry: CacheEntry
    outcome: str
    reason: str = ""
    candidate_us: float = math.nan
    default_us: float = math.nan
    confidence: float = math.nan
    measurements: tuple[Measurement, ...] = ()

    @property
    def lost(self) -> bool:
        """Whether the entry no longer serves: the default is faster, or it fails."""
        return self.outcome in ("loses", "fails")

    def renewed(self) -> Selection | None:
        """What is to be remembered from now on: with what was measured now, and the default in the place of what lost.

        None where the candidate fails and the default was not measured either: nothing is to be remembered.
        """
        selection = self.entry.selection
        if self.outcome in ("wins", "ties"):
            return replace(selection, measured_us=self.candidate_us, default_us=self.default_us)
        if not self.lost:
            return selection
        if math.isnan(self.default_us):
            return None
        why = self.reason or f"{self.candidate_us:.4g} us against the default's {self.default_us:.4g} us"
        return replace(
            selection,
            candidate=operation(selection.problem.operation).default,
            predicted_us=math.nan,
            measured_us=self.default_us,
            default_us=self.default_us,
            confidence=self.confidence,
            measured=len(self.measurements),
            reason=f"Measured again, {selection.candidate} no longer wins: {why}.",
        )


def recheck(
    entries: Iterable[CacheEntry],
    device: Device,
    *,
    plan: TimingPlan = VERIFY_PLAN,
    workload: str = "recheck",
) -> Iterator[Recheck]:
    """Measure each entry's candidate against the default, one after another. Nothing is written.

    Args:
        entries: of this machine.
        device: this machine's.
        plan: how much to measure.
        workload: written into the records.
    """
    for entry in entries:
        yield _recheck(entry, device, plan, workload)


def _recheck(entry: CacheEntry, device: Device, plan: TimingPlan, workload: str) -> Recheck:
    problem, candidate = entry.selection.problem, entry.selection.candidate
    try:
        default = operation(problem.operation).default
        if candidate == default:
            return Recheck(entry, "default")
        fault = ""
        try:
            require_legal(problem, device, candidate)
        except KernelcastError as error:
            fault = str(error)
        # The default is measured also alone: it takes the place of a candidate that is not legal.
        chosen = [default] if fault else [default, candidate]
        verdict = verify(problem, chosen, device, plan=plan, workload=workload)
    except KernelcastError as error:
        return Recheck(entry, "unmeasured", reason=str(error).rstrip("."))
    measurements = tuple(verdict.trial.measurements)
    by_default = measurements[0]
    default_us = by_default.latency_us if by_default.outcome == "ok" else math.nan
    if fault:
        return Recheck(entry, "fails", fault.rstrip("."), default_us=default_us, measurements=measurements)
    if len(measurements) < 2:
        return Recheck(entry, "unmeasured", reason="no time was left for it", default_us=default_us)
    measured = measurements[1]
    if measured.outcome != "ok":
        reason = f"{measured.outcome}: {measured.detail}".rstrip(".")
        return Recheck(entry, "fails", reason, default_us=default_us, measurements=measurements)
    return Recheck(
        entry,
        _outcome(verdict),
        candidate_us=measured.latency_us,
        default_us=default_us,
        confidence=verdict.confidence,
        measurements=measurements,
    )


def _outcome(verdict: Verdict) -> str:
    if verdict.winner == 1:
        return "wins"
    # Of a tie the first is taken: the default is faster beyond noise only if it wins from the second place too.
    turned, _ = decide(verdict.trial.paired_log[::-1], verdict.trial.error_log[::-1])
    return "loses" if turned == 1 else "ties"
