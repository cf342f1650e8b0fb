"""Remembered selections measured again: do they still win?

One that was decided on a quiet machine is measured against the default. One of a busy machine may be wrong in either way,
the default of it too: it is selected anew.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kernelcast.datasets.record import Measurement
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Device, operation, require_legal
from kernelcast.runtime.cache_files import CacheEntry
from kernelcast.runtime.selection import Selection
from kernelcast.runtime.selector import Selector
from kernelcast.runtime.verify import VERIFY_PLAN, Verdict, decide, verify

#: ``"wins"``: faster than the default beyond noise; ``"ties"``: noise cannot tell them apart; ``"loses"``: slower beyond
#: noise; ``"fails"``: no longer legal, or it does not run or computes something else; ``"unmeasured"``: nothing could be
#: measured now; ``"default"``: the default is what is remembered, and nothing was measured. Of what was decided on a busy
#: machine: ``"confirmed"``: selected anew, and again; ``"changed"``: another was selected anew.
OUTCOMES = ("wins", "ties", "loses", "fails", "unmeasured", "default", "confirmed", "changed")

#: Gives the selector of as many candidates, or of a target regret.
_Selectors = Callable[[int, float | None], Selector]


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
        measurements: every sample; none where it was selected anew, as the selector keeps them.
        busy: whether other programs used the machine while it was measured against the default.
        selected: what was selected anew.
    """

    entry: CacheEntry
    outcome: str
    reason: str = ""
    candidate_us: float = math.nan
    default_us: float = math.nan
    confidence: float = math.nan
    measurements: tuple[Measurement, ...] = ()
    busy: bool = False
    selected: Selection | None = None

    @property
    def lost(self) -> bool:
        """Whether the entry no longer serves: the default is faster, another was selected, or it fails."""
        return self.outcome in ("loses", "fails", "changed")

    def renewed(self) -> Selection | None:
        """What is to be remembered from now on: what was selected anew; or else with what was measured now, and the default in
        the place of what lost.

        None where the candidate fails and the default was not measured either: nothing is to be remembered.
        """
        selection = self.entry.selection
        if self.selected is not None:
            return self.selected
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
            busy=self.busy,
        )


def recheck(
    entries: Iterable[CacheEntry],
    device: Device,
    *,
    plan: TimingPlan = VERIFY_PLAN,
    workload: str = "recheck",
    models: Path | None = None,
    cache: Path | None = None,
    store: Path | None = None,
) -> Iterator[Recheck]:
    """Measure each entry's candidate against the default, or select anew, one after another. No entry is written.

    Args:
        entries: of this machine.
        device: this machine's.
        plan: how much to measure.
        workload: written into the records.
        models: folder of registered models, to select anew; the home's where None.
        cache: folder of remembered selections, whose priors are measured along where it is selected anew.
        store: folder that the measurements of a selection anew go to; None keeps none.
    """

    @functools.cache
    def selector_of(top_k: int, target_regret: float | None) -> Selector:
        # top_k is 0 where a target or the whole space was asked for; then it is not looked at.
        return Selector(
            device,
            models=models,
            cache=cache or False,
            store=store or False,
            top_k=top_k or 1,
            target_regret=target_regret,
            plan=plan,
            workload=workload,
        )

    for entry in entries:
        if entry.selection.busy:
            yield _select_anew(entry, selector_of)
        else:
            yield _recheck(entry, device, plan, workload)


def _select_anew(entry: CacheEntry, selector_of: _Selectors) -> Recheck:
    key, before = entry.key, entry.selection
    mode = "verify" if key.top_k or key.target_regret is not None else "tune"
    try:
        found = selector_of(key.top_k, key.target_regret).select_anew(
            before.problem, mode, also=[before.candidate]
        )
    except KernelcastError as error:
        return Recheck(entry, "unmeasured", reason=str(error).rstrip("."))
    if found.source != "verified":
        return Recheck(entry, "fails", found.reason.rstrip("."))
    if found.candidate != before.candidate:
        return Recheck(entry, "changed", default_us=found.default_us, selected=found)
    return Recheck(
        entry,
        "confirmed",
        candidate_us=found.measured_us,
        default_us=found.default_us,
        confidence=found.confidence,
        selected=found,
    )


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
    found = Recheck(
        entry, "fails", fault.rstrip("."), default_us=default_us, measurements=measurements, busy=verdict.busy
    )
    if fault:
        return found
    if len(measurements) < 2:
        return replace(found, outcome="unmeasured", reason="no time was left for it")
    measured = measurements[1]
    if measured.outcome != "ok":
        return replace(found, reason=f"{measured.outcome}: {measured.detail}".rstrip("."))
    return replace(
        found,
        outcome=_outcome(verdict),
        candidate_us=measured.latency_us,
        confidence=verdict.confidence,
    )


def _outcome(verdict: Verdict) -> str:
    if verdict.winner == 1:
        return "wins"
    # Of a tie the first is taken: the default is faster beyond noise only if it wins from the second place too.
    turned, _ = decide(verdict.trial.paired_log[::-1], verdict.trial.error_log[::-1])
    return "loses" if turned == 1 else "ties"
