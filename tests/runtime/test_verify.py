"""Verification: the fastest that is right, ties to the first."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.datasets.timing import TimingPlan
from kernelcast.kernels.detect import detect
from kernelcast.runtime.verify import VERIFY_PLAN, confidence, decide, verify

HERE = detect("cpu")
NAN = math.nan


def run(lab, *names, **options):
    return verify(lab.a_problem(), [lab.candidate(name) for name in names], HERE, **options)


def test_the_fastest_wins_and_everything_is_reported(lab):
    verdict = run(lab, "vendor", "quick", "slow", workload="w")
    assert verdict.winner == 1
    assert verdict.confidence > 0.99
    assert [m.candidate.variant for m in verdict.trial.measurements] == ["vendor", "quick", "slow"]
    assert [m.latency_us for m in verdict.trial.measurements] == pytest.approx([100.0, 50.0, 400.0])
    assert {m.workload for m in verdict.trial.measurements} == {"w"}


@pytest.mark.parametrize("names", [("vendor", "twin"), ("twin", "vendor")])
def test_a_tie_goes_to_the_first(lab, names):
    assert run(lab, *names).winner == 0


@pytest.mark.parametrize("mistake", ["wrong", "raising", "unbuildable"])
def test_a_fast_candidate_that_is_not_right_does_not_win(lab, mistake):
    getattr(lab.STATE, mistake).add("quick")
    verdict = run(lab, "vendor", "quick", "slow")
    assert verdict.winner == 0
    assert verdict.trial.measurements[1].outcome in ("wrong_result", "crash")


def test_the_default_fails_and_another_wins(lab):
    lab.STATE.wrong.add("vendor")
    assert run(lab, "vendor", "slow", "quick").winner == 2


def test_nothing_works(lab):
    lab.STATE.wrong.update(lab.VARIANTS)
    verdict = run(lab, "vendor", "quick")
    assert verdict.winner is None
    assert math.isnan(verdict.confidence)
    assert len(verdict.trial.measurements) == 2


def test_the_plan_is_followed(lab):
    run(lab, "vendor", plan=TimingPlan(rounds=2, repeats=1))
    # Two calls of the check, and two rounds of a dropped call and a counted one.
    assert lab.STATE.runs == {"vendor": 6}


def test_a_verification_is_shorter_than_a_collection():
    assert VERIFY_PLAN.seconds < TimingPlan().seconds
    assert VERIFY_PLAN.candidate_seconds < TimingPlan().candidate_seconds


@for_each(
    ("gaps", "errors", "winner"),
    [
        ([0.01, 0.0], [0.01, 0.0], 0),
        ([0.01, 0.0], [0.001, 0.0], 1),
        # However large, a gain over the first within two errors is none.
        ([0.05, 0.0], [0.5, 0.0], 0),
        ([0.30, 0.0], [0.16, 0.0], 0),
        ([0.30, 0.0], [0.14, 0.0], 1),
        # However noisy, a tie of others goes no further than 3%.
        ([1.0, 0.05, 0.0], [0.1, 0.1, 0.0], 2),
        ([1.0, 0.025, 0.0], [0.1, 0.1, 0.0], 1),
        # Of those that tie with the fastest, one that noise cannot tell from the first does not displace it.
        ([0.05, 0.025, 0.0], [0.02, 0.02, 0.0], 2),
        # After one round the noise is not known, and counts as 3%.
        ([0.02, 0.0], [NAN, 0.0], 0),
        ([0.05, 0.0], [NAN, 0.0], 0),
        ([0.07, 0.0], [NAN, 0.0], 1),
        # The noise of both counts.
        ([0.025, 0.0], [0.01, 0.01], 0),
        ([NAN, 0.0, 0.0], [NAN, 0.0, 0.001], 1),
        # The fastest is not the one that the race was led by.
        ([0.0, -0.2], [0.0, 0.01], 1),
        ([NAN, NAN], [NAN, NAN], None),
        ([], [], None),
    ],
)
def test_who_wins(gaps, errors, winner):
    assert decide(np.array(gaps), np.array(errors))[0] == winner


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(1e-4, 1)), min_size=1, max_size=8))
def test_the_winner_is_the_first_or_beats_it_beyond_noise_and_is_never_more_than_the_limit_behind(entries):
    gaps, errors = (np.array(column) for column in zip(*entries, strict=True))
    winner, sure = decide(gaps, errors)
    assert (winner == 0) == (gaps[0] - gaps.min() <= 2 * np.hypot(errors[0], errors[gaps.argmin()]))
    if winner:
        assert gaps[0] - gaps[winner] > 2 * np.hypot(errors[0], errors[winner])
        assert gaps[winner] - gaps.min() <= 0.03
        assert (gaps[:winner] > gaps.min()).all()
    assert math.isnan(sure) == (len(entries) == 1)


def test_confidence_in_a_tied_winner_is_that_of_its_own_difference_to_the_fastest():
    winner, sure = decide(np.array([0.01, 0.0]), np.array([0.01, 0.0]))
    assert winner == 0
    assert sure == pytest.approx(0.1587, abs=1e-4)


def test_confidence_is_the_normal_probability_of_the_closest_rival():
    assert confidence(np.array([0.0, 0.1, 0.5]), np.array([0.0, 0.1, 0.1]), 0) == pytest.approx(
        0.8413, abs=1e-4
    )
    assert confidence(np.array([0.0, 0.2]), np.array([0.0, 0.1]), 0) == pytest.approx(0.9772, abs=1e-4)
    # One that ties and is a little slower than the fastest: less likely than not.
    assert confidence(np.array([0.0, -0.01]), np.array([0.0, 0.02]), 0) < 0.5
    assert math.isnan(confidence(np.array([0.0]), np.array([0.0]), 0))
    assert math.isnan(confidence(np.array([0.0, NAN]), np.array([0.0, NAN]), 0))
    assert math.isnan(confidence(np.array([0.0, 0.1]), np.array([0.0, NAN]), 0))
