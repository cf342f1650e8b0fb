"""Remembered selections measured again: what no longer wins is found out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kernelcast.datasets.timing import TimingPlan
from kernelcast.kernels import Candidate
from kernelcast.kernels.detect import detect
from kernelcast.runtime import CacheKey, Selection
from kernelcast.runtime.cache import CacheEntry
from kernelcast.runtime.cache_recheck import recheck

HERE = detect("cpu")
PLAN = TimingPlan(rounds=6, least_rounds=3, seconds=5.0)


def entry(lab, name, **values):
    described = lab.a_problem()
    selection = Selection(
        described,
        HERE.name,
        Candidate.of(name),
        "verified",
        predicted_us=9.0,
        measured_us=1.0,
        default_us=2.0,
    )
    return CacheEntry(CacheKey.of(described, HERE, 3), replace(selection, **values), 5.0)


def check(lab, name, **values):
    (found,) = recheck([entry(lab, name, **values)], HERE, plan=PLAN)
    return found


def test_one_that_still_wins_has_the_new_figures(lab):
    found = check(lab, "quick")
    assert (found.outcome, found.lost) == ("wins", False)
    assert (found.candidate_us, found.default_us) == (50.0, 100.0)
    renewed = found.renewed()
    assert (renewed.candidate, renewed.measured_us, renewed.default_us) == (
        Candidate.of("quick"),
        50.0,
        100.0,
    )
    assert [m.candidate.variant for m in found.measurements] == ["vendor", "quick"]


def test_a_tie_stays(lab):
    found = check(lab, "twin")
    assert (found.outcome, found.lost) == ("ties", False)
    assert found.renewed().candidate == Candidate.of("twin")


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        ("slow", "loses", "400 us against the default's 100 us"),
        ("wrong", "fails", "wrong_result"),
        ("raising", "fails", "cannot be run"),
        ("unbuildable", "fails", "cannot be built"),
        ("illegal", "fails", "a test forbids it"),
    ],
)
def test_one_that_lost_is_replaced_by_the_default(lab, fault, outcome, reason):
    name = "slow" if fault == "slow" else "quick"
    if fault != "slow":
        getattr(lab.STATE, fault).add(name)
    found = check(lab, name)
    assert (found.outcome, found.lost) == (outcome, True)
    renewed = found.renewed()
    assert renewed.candidate == Candidate.of("vendor")
    assert (renewed.source, renewed.measured_us, renewed.default_us) == ("verified", 100.0, 100.0)
    assert math.isnan(renewed.predicted_us)
    assert reason in renewed.reason
    assert f"{name} no longer wins" in renewed.reason


def test_where_both_fail_nothing_is_remembered(lab):
    lab.STATE.raising.update(("quick", "vendor"))
    found = check(lab, "quick")
    assert (found.outcome, found.renewed()) == ("fails", None)
    lab.STATE.raising.remove("quick")
    assert check(lab, "quick").outcome == "wins"


def test_the_default_and_what_cannot_be_measured_stay_as_they_are(lab):
    found = check(lab, "vendor")
    assert (found.outcome, found.lost, lab.STATE.runs) == ("default", False, {})
    assert found.renewed() is found.entry.selection
    unknown = entry(lab, "quick")
    lab.remove()
    (found,) = recheck([unknown], HERE, plan=PLAN)
    assert (found.outcome, found.lost) == ("unmeasured", False)
    assert "test_runtime" in found.reason
    assert found.renewed() is unknown.selection
