"""efficiency@k against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import ModelError
from kernelcast.training.metrics import (
    KS,
    as_json,
    charged_latency,
    efficiency,
    efficiency_curve,
    geometric_mean,
    regret,
    statistics,
)

LATENCY = np.array([10.0, 20.0, 40.0, 5.0])


def test_efficiency_is_the_best_over_the_best_among_the_first_k():
    order = np.array([1, 0, 3, 2])
    assert efficiency(LATENCY, order, 1) == 0.25
    assert efficiency(LATENCY, order, 2) == 0.5
    assert efficiency(LATENCY, order, 3) == 1.0


def test_the_curve_has_the_reported_ks_and_goes_beyond_the_candidates():
    assert KS == (1, 2, 3, 5, 10)
    assert efficiency_curve(LATENCY, np.array([2, 1, 0, 3])).tolist() == [0.125, 0.25, 0.5, 1.0, 1.0]


def test_k_beyond_a_partial_ranking_measures_all_that_it_holds():
    assert efficiency_curve(LATENCY, np.array([2, 0])).tolist() == [0.125, 0.5, 0.5, 0.5, 0.5]


def test_with_the_default_it_is_one_of_the_k():
    order = np.array([1, 0, 3, 2])
    curve = efficiency_curve(LATENCY, order, default=2, with_default=True, ks=(1, 2, 3, 4))
    # k = 1: the first; k = 2: {1} and the default; k = 3: {1, 0} and the default; k = 4: everything.
    assert curve.tolist() == [0.25, 0.25, 0.5, 1.0]
    # Without it, k = 2 and 3 measure one candidate more.
    assert efficiency_curve(LATENCY, order, default=2, ks=(1, 2, 3, 4)).tolist() == [0.25, 0.5, 1.0, 1.0]


def test_a_default_that_ranks_first_takes_one_place_only():
    order = np.array([2, 1, 0, 3])
    curve = efficiency_curve(LATENCY, order, default=2, with_default=True, ks=(1, 2, 3))
    assert curve.tolist() == [0.125, 0.25, 0.5]


def test_the_default_helps_where_it_is_the_fastest_and_ranked_last():
    curve = efficiency_curve(LATENCY, np.array([2, 1, 0, 3]), default=3, with_default=True, ks=(1, 2))
    assert curve.tolist() == [0.125, 1.0]


def test_with_the_default_changes_nothing_where_the_data_have_none():
    order = np.array([2, 1, 0, 3])
    with_default = efficiency_curve(LATENCY, order, default=None, with_default=True)
    assert with_default.tolist() == efficiency_curve(LATENCY, order).tolist()


@pytest.mark.parametrize("failure", [math.inf, math.nan])
def test_failures_use_up_places_and_the_default_is_charged_if_none_worked(failure):
    latency = np.array([failure, failure, 6.0, 3.0, 12.0])
    order = np.array([0, 1, 3, 2, 4])
    assert efficiency_curve(latency, order, default=2, ks=(1, 2, 3)).tolist() == [0.5, 0.5, 1.0]
    # With the default at k = 2 it is measured, not charged.
    assert efficiency(latency, order, 2, default=2, with_default=True) == 0.5


def test_without_a_working_default_the_slowest_that_worked_is_charged():
    latency = np.array([math.inf, 6.0, 3.0, 12.0])
    order = np.array([0, 1, 2, 3])
    assert efficiency(latency, order, 1) == 0.25
    assert efficiency(latency, order, 1, default=0) == 0.25
    assert efficiency(latency, order, 2, default=0, with_default=True) == 0.5
    assert charged_latency(latency, None) == 12.0
    assert charged_latency(latency, 1) == 6.0


def test_ties_are_worth_the_same():
    latency = np.array([2.0, 4.0, 2.0])
    assert efficiency(latency, np.array([0, 1, 2]), 1) == 1.0
    assert efficiency(latency, np.array([2, 1, 0]), 1) == 1.0


def test_an_empty_ranking_is_charged():
    nothing = np.array([], dtype=int)
    assert efficiency_curve(LATENCY, nothing, default=0).tolist() == [0.5] * 5
    assert efficiency(LATENCY, nothing, 1, default=0, with_default=True) == 0.5
    assert efficiency(LATENCY, nothing, 1) == 0.125


def test_a_problem_without_a_working_candidate_is_refused():
    with pytest.raises(ModelError, match="None of the problem's candidates worked"):
        efficiency(np.array([math.inf, math.nan]), np.array([0, 1]), 1)


def test_k_below_one_is_refused():
    with pytest.raises(ValueError, match="k is 0"):
        efficiency(LATENCY, np.array([0, 1]), 0)


def test_statistics_over_problems():
    curves = np.array([[1.0, 1.0], [0.25, 0.5]])
    # p5 lies 5% of the way from the smaller to the larger of two.
    expected = [[0.5, 0.2875, 0.25], [math.sqrt(0.5), 0.525, 0.5]]
    np.testing.assert_allclose(statistics(curves), expected)
    assert as_json(np.array([[0.5, math.nan, 0.25]]), ks=(3,)) == {
        "3": {"geomean": 0.5, "p5": None, "worst": 0.25}
    }


def test_geometric_mean_and_regret():
    assert geometric_mean(np.array([1.0, 0.25])) == pytest.approx(0.5)
    np.testing.assert_allclose(regret(np.array([1.0, 0.75])), [0.0, 0.25])


latencies = st.lists(st.one_of(st.floats(0.1, 1e6), st.just(math.inf)), min_size=1, max_size=12).filter(
    lambda values: any(map(math.isfinite, values))
)


@given(latencies, st.randoms(use_true_random=False), st.data())
def test_properties_of_every_curve(values, random, data):
    latency = np.array(values)
    order = np.array(random.sample(range(len(values)), len(values)))
    default = data.draw(st.one_of(st.none(), st.integers(0, len(values) - 1)))
    ks = tuple(range(1, len(values) + 2))
    plain = efficiency_curve(latency, order, default=default, ks=ks)
    with_default = efficiency_curve(latency, order, default=default, with_default=True, ks=ks)
    for curve in (plain, with_default):
        assert ((curve > 0) & (curve <= 1)).all()
        assert curve[-1] == 1.0
    assert plain[0] == with_default[0]
    if default is not None and math.isfinite(latency[default]):
        assert (with_default[1:] >= latency.min() / latency[default]).all()
