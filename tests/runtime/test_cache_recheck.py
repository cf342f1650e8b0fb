"""Remembered selections measured again: what no longer wins is found out."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest

from kernelcast.datasets.timing import TimingPlan
from kernelcast.kernels import Candidate
from kernelcast.kernels.detect import detect
from kernelcast.runtime import CacheKey, Selection
from kernelcast.runtime.cache import CacheEntry
from kernelcast.runtime.cache_recheck import recheck
from kernelcast.runtime.verify import BusyWarning

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


# --- What was decided on a busy machine ---


@pytest.fixture
def anew(lab, tmp_path):
    """Rechecks an entry of a busy machine, whose search is the key's."""

    def run(name, top_k=3, target_regret=None):
        told = entry(lab, name, busy=True)
        key = CacheKey.of(told.selection.problem, HERE, top_k, target_regret=target_regret)
        (found,) = recheck(
            [replace(told, key=key)], HERE, plan=PLAN, models=tmp_path / "models", store=tmp_path / "store"
        )
        return found

    return run


@pytest.mark.parametrize(
    ("top_k", "target_regret", "measured"),
    [
        # The first of the ranking, the default and what was remembered.
        (2, None, {"quick", "vendor"}),
        (1, None, {"vendor"}),
        # The whole space, where the last of the ranking is the fastest.
        (0, None, {"quick", "slow", "vendor", "twin", "last"}),
    ],
)
def test_a_default_of_a_busy_machine_is_selected_anew_as_it_was_searched(
    lab, anew, top_k, target_regret, measured
):
    found = anew("vendor", top_k, target_regret)
    assert {name for name, runs in lab.STATE.runs.items() if runs} == measured
    best = min(measured, key=lab.STATE.latency_us.get)
    assert found.outcome == ("confirmed" if best == "vendor" else "changed")
    assert found.lost == (best != "vendor")
    renewed = found.renewed()
    assert (renewed.candidate, renewed.source, renewed.busy) == (lab.candidate(best), "verified", False)
    assert (renewed.measured_us, renewed.default_us) == (lab.STATE.latency_us[best], 100.0)


def test_a_target_regret_is_asked_for_again(lab, anew):
    found = anew("vendor", 0, 0.2)
    assert set(lab.STATE.runs) < {"quick", "slow", "vendor", "twin", "last"}
    assert found.renewed().measured == len(lab.STATE.runs)


def test_a_winner_of_a_busy_machine_is_measured_among_the_first(lab, anew):
    found = anew("last", top_k=2)
    assert set(lab.STATE.runs) == {"quick", "vendor", "last"}
    assert (found.outcome, found.lost, found.candidate_us, found.default_us) == (
        "confirmed",
        False,
        20.0,
        100.0,
    )
    assert (found.renewed().candidate, found.renewed().busy) == (lab.candidate("last"), False)


def test_where_the_machine_is_busy_again_the_mark_stays(lab, anew):
    lab.STATE.latency_us = lab.Busy(
        {name: 10 * us for name, us in lab.STATE.latency_us.items()}, probability=0.45, times=40.0, seed=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BusyWarning)
        found = anew("vendor")
    assert found.renewed().busy
    assert "the machine was busy" in found.renewed().reason


def test_what_lost_on_a_busy_machine_is_marked(lab):
    lab.STATE.latency_us = lab.Busy(
        {name: 10 * us for name, us in lab.STATE.latency_us.items()}, probability=0.45, times=40.0, seed=1
    )
    lab.STATE.raising.add("slow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BusyWarning)
        found = check(lab, "slow")
    assert (found.outcome, found.lost) == ("fails", True)
    assert (found.renewed().candidate, found.renewed().busy) == (lab.candidate("vendor"), True)


def test_what_cannot_be_selected_anew_stays_or_is_forgotten(lab, anew):
    lab.STATE.inputs_fail = True
    found = anew("quick")
    assert (found.outcome, found.lost) == ("unmeasured", False)
    assert found.renewed() is found.entry.selection
    lab.STATE.inputs_fail = False
    lab.STATE.raising.update(lab.VARIANTS)
    found = anew("quick")
    assert (found.outcome, found.renewed()) == ("fails", None)
    assert "cannot be run" in found.reason
