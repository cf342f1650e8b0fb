"""The gate's decisions, on hand-made figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.training.gate import TIE, Scores, Standing, judge

BASELINES = {
    "default": Scores(0.90, 0.90),
    "best_fixed": Scores(0.80, 0.93),
    "analytic": Scores(0.85, 0.92),
    "random": Scores(0.50, 0.91),
}


def decide(model, baselines=BASELINES, *, constant=False, trained_on=100, standing=None):
    return judge(model, baselines, constant=constant, problems=40, trained_on=trained_on, standing=standing)


def champion(theirs, ours, *, trained_on=100):
    return Standing("0001-abcdef01", trained_on, 30, theirs, ours)


def test_a_first_model_better_than_every_baseline_is_promoted_and_the_reason_has_the_figures():
    decision = decide(Scores(0.95, 0.97))
    assert decision.promoted
    assert decision.reason == (
        "Efficiency 0.9500 at 1 and 0.9700 at 3 on 40 held-out problems; the best baselines have 0.9000 at 1 and "
        "0.9300 at 3. No champion stands yet."
    )


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Scores(0.89, 0.99), "default"),  # the default alone is better at 1
        (Scores(0.95, 0.925), "best_fixed"),  # better than all at 1, not at 3
        (Scores(0.90, 0.97), "default"),  # equal is not better
        (Scores(0.95, 0.9), "default"),
    ],
)
def test_a_model_that_any_baseline_matches_at_either_k_is_not_promoted(model, named):
    decision = decide(model)
    assert not decision.promoted
    assert f"baseline {named!r}" in decision.reason
    assert str(model) in decision.reason
    assert str(BASELINES[named]) in decision.reason


def test_a_champion_that_cannot_be_used_is_named_and_replaced():
    old = Standing("0001-abcdef01", 0, unusable="is of an earlier layout")
    decision = decide(Scores(0.95, 0.97), standing=old)
    assert decision.promoted
    assert decision.reason.endswith(
        "The champion 0001-abcdef01 is of an earlier layout and cannot be compared: it is replaced."
    )
    assert not decide(Scores(0.89, 0.99), standing=old).promoted


def test_a_perfect_baseline_may_be_equalled_at_one_k_but_not_at_both():
    assert decide(Scores(0.97, 1.0), {"default": Scores(0.96, 1.0)}).promoted


@pytest.mark.parametrize("model", [Scores(1.0, 1.0), Scores(0.9, 0.95)])
def test_beside_a_baseline_that_is_perfect_at_both_the_reason_says_that_none_is_promoted(model):
    decision = decide(model, {"random": Scores(0.5, 0.6), "best_fixed": Scores(1.0, 1.0)})
    if model.at_1 == 1.0:
        assert decision.reason == (
            "The baseline 'best_fixed' is perfect on 40 held-out problems, at 1 and at 3, so no model can be better there; "
            "this one has 1.0000 at 1 and 1.0000 at 3. To use it all the same: kernelcast models promote"
        )
    assert "is perfect" in decision.reason
    assert not decision.promoted


def test_a_constant_model_is_never_promoted_whatever_its_figures():
    decision = decide(Scores(1.0, 1.0), constant=True)
    assert not decision.promoted
    assert "one latency for all candidates" in decision.reason


@pytest.mark.parametrize(
    ("theirs", "ours", "promoted"),
    [
        (Scores(0.95, 0.97), Scores(0.96, 0.975), True),
        (Scores(0.95, 0.97), Scores(0.9501, 0.975), True),  # a tie at 1, better at 3
        (Scores(0.95, 0.97), Scores(0.96, 0.965), False),  # better at 1, worse at 3
        (Scores(0.95, 0.97), Scores(0.94, 0.97), False),
    ],
)
def test_a_champion_is_replaced_only_by_a_better_model_on_the_shared_problems(theirs, ours, promoted):
    decision = decide(Scores(0.95, 0.97), standing=champion(theirs, ours))
    assert decision.promoted is promoted
    assert f"it has {ours}, the champion 0001-abcdef01 {theirs}" in decision.reason
    assert "On the 30 problems" in decision.reason


@pytest.mark.parametrize(("trained_on", "promoted"), [(101, True), (100, False), (99, False)])
def test_a_tie_goes_to_the_model_trained_on_more_problems(trained_on, promoted):
    standing = champion(Scores(0.95, 0.97), Scores(0.951, 0.969))
    decision = decide(Scores(0.95, 0.97), trained_on=trained_on, standing=standing)
    assert decision.promoted is promoted
    assert f"a tie, decided by the number of problems: trained on {trained_on} problems" in decision.reason


@pytest.mark.parametrize(("trained_on", "promoted"), [(101, True), (100, False)])
def test_a_champion_that_cannot_be_compared_yields_to_more_problems_only(trained_on, promoted):
    decision = decide(Scores(0.95, 0.97), trained_on=trained_on, standing=Standing("0001-abcdef01", 100))
    assert decision.promoted is promoted
    assert "No held-out problem allows a fair comparison" in decision.reason


share = st.floats(0.01, 1.0)


@given(st.tuples(share, share), st.tuples(share, share), st.integers(1, 200))
def test_two_models_never_replace_each_other_in_turn(one, other, trained_on):
    """Judged on the same problems, at most one of two models beats the other: promotion cannot go in circles."""
    first, second = Scores(*one), Scores(*other)
    none = {"random": Scores(0.001, 0.001)}
    forth = decide(first, none, trained_on=trained_on, standing=champion(second, first))
    back = decide(second, none, trained_on=100, standing=champion(first, second, trained_on=trained_on))
    assert not (forth.promoted and back.promoted)


@given(share, share)
def test_a_model_that_beats_the_champion_by_more_than_a_tie_at_both_k_is_promoted(at_1, at_3):
    theirs = Scores(at_1 / 2, at_3 / 2)
    ours = Scores(theirs.at_1 + 1.1 * TIE, theirs.at_3 + 1.1 * TIE)
    none = {"random": Scores(0.0001, 0.0001)}
    assert decide(ours, none, trained_on=1, standing=champion(theirs, ours)).promoted
