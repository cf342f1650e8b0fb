"""How many candidates to measure: expected regrets, their calibration, and the shortlist."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.costmodel.adaptive import (
    CONSIDERED,
    Adaptive,
    Calibration,
    Curve,
    choose,
    expected_regrets,
    sequence,
)
from kernelcast.costmodel.novelty import Reach
from kernelcast.costmodel.prediction import Prediction
from kernelcast.errors import ArtifactError, ModelError
from kernelcast.kernels import Problem

TENTH = Curve((1e-4, 1.0), (1e-5, 0.1))
SAME = Curve((1.0,), (1.0,))


def predicted(log_latency, error=0.05, covered=None, **more) -> Prediction:
    log_latency = np.array(log_latency, dtype=np.float64)
    errors = np.broadcast_to(np.asarray(error, dtype=np.float64), log_latency.shape).copy()
    return Prediction(log_latency, errors, np.array(covered or [True] * len(log_latency), dtype=bool), **more)


def test_two_equal_candidates_cost_what_the_normal_distribution_says():
    # E[max(X, 0)] of a difference with standard deviation s and mean d is s phi(d/s) + d Phi(d/s).
    for gap, s in ((0.0, 0.1), (0.05, 0.1), (-0.1, 0.1)):
        found = expected_regrets(np.array([gap, 0.0]), np.array([s, s]))
        score = gap / s
        density = math.exp(-score * score / 2) / math.sqrt(2 * math.pi)
        expected = s * density + gap * 0.5 * (1 + math.erf(score / math.sqrt(2)))
        assert found[0] == pytest.approx(expected, rel=0.1)
        assert found[1] == 0.0


def test_candidates_that_are_known_exactly_cost_their_gap():
    found = expected_regrets(np.log([3.0, 2.0, 1.0, 8.0]), np.full(4, 1e-9))
    np.testing.assert_allclose(found, [np.log(3), np.log(2), 0, 0], atol=1e-6)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(0.005, 1)), min_size=1, max_size=CONSIDERED + 20),
    st.integers(1, 12),
)
def test_the_more_is_measured_the_less_is_lost(rows, most):
    mean, error = np.array(rows).T
    found = expected_regrets(mean, error, most)
    assert len(found) == min(most, len(rows))
    assert (np.diff(found) <= 0).all()
    assert (found >= 0).all()
    # A constant of the problem changes nothing.
    np.testing.assert_allclose(expected_regrets(mean + 7.0, error, most), found, atol=1e-9)
    if len(rows) <= most:
        assert found[-1] == 0.0


def test_an_easy_problem_takes_few_and_a_hard_one_many():
    easy = choose(predicted([1.0, 0.0, 0.9, 1.1, 1.2]), default=0, target_regret=0.005)
    assert easy.rows.tolist() == [0, 1]
    hard = choose(predicted([0.02, 0.0, 0.01, 0.015, 0.03]), default=0, target_regret=0.005)
    assert hard.rows.tolist() == [0, 1, 2, 3]
    assert hard.curve[2] > 0.005 >= hard.curve[3] == hard.expected_regret
    plain = choose(predicted([0.0, 0.5, 0.6]), default=0, target_regret=0.005)
    assert plain.rows.tolist() == [0]


def test_the_default_comes_first_and_may_be_absent():
    prediction = predicted([0.1, 0.3, 0.0, 0.2], 0.2)
    assert sequence(prediction, 1).tolist() == [1, 2, 0, 3]
    assert sequence(prediction, None).tolist() == [2, 0, 3, 1]
    found = choose(prediction, default=None, target_regret=0.01)
    assert found.rows[0] == 2
    with pytest.raises(ModelError, match="row 4 of 4"):
        choose(prediction, default=4, target_regret=0.01)


def test_no_more_than_the_most():
    found = choose(predicted(np.zeros(20), 0.3), default=3, target_regret=0.001, most=4)
    assert found.rows.tolist() == [3, 0, 1, 2]
    assert len(found.curve) == 4
    assert found.expected_regret == found.curve[3] > 0.001
    assert choose(predicted([0.0], 0.3), default=0, target_regret=0.001).rows.tolist() == [0]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.floats(0.01, 0.5), st.integers(0, 100))
def test_a_lower_target_measures_at_least_as_many(log_latency, error, default):
    prediction = predicted(log_latency, error)
    counts = [
        len(choose(prediction, default=default % len(log_latency), target_regret=target).rows)
        for target in (0.05, 0.01, 0.005, 0.001)
    ]
    assert counts == sorted(counts)


def test_rows_that_the_model_does_not_cover_come_last_and_are_never_expected_to_win():
    prediction = predicted([0.4, -9.0, 0.0, 0.3], covered=[True, False, True, True])
    found = choose(prediction, default=0, target_regret=0.001)
    assert found.rows.tolist() == [0, 2]
    # Of a default that is not covered nothing is known, so measuring it alone promises nothing.
    unknown = predicted([0.4, -9.0, 0.0, 0.3], covered=[False, False, True, True])
    found = choose(unknown, default=0, target_regret=0.02)
    assert found.rows.tolist() == [0, 2]
    assert math.isnan(found.curve[0])
    nothing = choose(predicted([0.0, 1.0], covered=[False, False]), default=0, target_regret=0.02)
    assert nothing.rows.tolist() == [0, 1]
    assert math.isnan(nothing.expected_regret)


def test_a_table_without_rows():
    found = choose(predicted([]), default=None, target_regret=0.01)
    assert found.rows.tolist() == []
    assert math.isnan(found.expected_regret)


def test_a_prediction_without_errors_is_refused():
    with pytest.raises(ModelError, match="without its uncertainty"):
        choose(predicted([0.0, 1.0], math.nan), default=0, target_regret=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_regret": 0.0}, "target regret is 0.0"),
        ({"target_regret": 1.0}, "between 0 and 1"),
        ({"target_regret": math.nan}, "between 0 and 1"),
        ({"most": 0}, "take at least 1"),
        ({"bound": "each"}, "one of mean, problem"),
    ],
)
def test_what_is_asked_must_make_sense(changes, message):
    with pytest.raises(ModelError, match=message):
        choose(predicted([0.0, 1.0]), **{"default": 0, "target_regret": 0.01, **changes})


def test_what_came_true_counts_and_not_what_was_believed():
    log_latency, error = [0.02, 0.0, 0.01, 0.015, 0.03], 0.05
    bare = choose(predicted(log_latency, error), default=0, target_regret=0.005)
    calibration = Calibration(TENTH, TENTH, SAME, 1.0, 100)
    found = choose(predicted(log_latency, error, calibration=calibration), default=0, target_regret=0.005)
    assert len(found.rows) < len(bare.rows)
    np.testing.assert_allclose(-np.log1p(-found.curve), -0.1 * np.log1p(-bare.curve), atol=2e-8)
    # The default alone has a curve of its own; what is expected still never rises.
    careless = Calibration(TENTH, SAME, SAME, 1.0, 100)
    found = choose(predicted(log_latency, error, calibration=careless), default=0, target_regret=0.005)
    assert found.rows.tolist() == [0]
    assert (np.diff(found.curve) <= 0).all()


def test_a_bound_on_the_mean_lets_easy_problems_pay_for_others():
    bounds = Curve((0.005, 0.01), (0.02, 0.04))
    prediction = predicted([0.02, 0.0, 0.01, 0.03], calibration=Calibration(SAME, SAME, bounds, 1.0, 100))
    each = choose(prediction, default=0, target_regret=0.005, bound="problem")
    mean = choose(prediction, default=0, target_regret=0.005)
    assert len(mean.rows) < len(each.rows)
    assert 0.005 < mean.expected_regret <= 0.021
    # Without a calibration nothing tells how much easier other problems are.
    bare = predicted([0.02, 0.0, 0.01, 0.03])
    assert choose(bare, default=0, target_regret=0.005, bound="mean").rows.tolist() == each.rows.tolist()
    # A calibration of few problems may know no bound for the mean: then it is that of each problem, not a smaller one.
    unsure = Calibration(SAME, SAME, Curve((0.005, 0.01), (1e-5, 1e-5)), 1.0, 30)
    small = predicted([0.02, 0.0, 0.01, 0.03], calibration=unsure)
    assert choose(small, default=0, target_regret=0.005, bound="mean").rows.tolist() == each.rows.tolist()


def test_beyond_training_more_is_measured():
    calibration = Calibration(SAME, SAME, SAME, 3.0, 100)
    asked = []

    def judge() -> str:
        asked.append(1)
        return "k = 9 is more than twice the largest in training, 4"

    row = [0.5, 0.0, 0.15, 0.2, 0.25]
    known = predicted(row, calibration=calibration, judge=lambda: "")
    novel = predicted(row, calibration=calibration, judge=judge)
    few = choose(known, default=0, target_regret=0.005)
    more = choose(novel, default=0, target_regret=0.005)
    assert few.rows.tolist() == [0, 1]
    assert len(more.rows) > 2
    assert choose(novel, default=0, target_regret=0.005).rows.tolist() == more.rows.tolist()
    assert asked == [1]
    assert novel.novel.startswith("k = 9")
    assert predicted(row).novel == ""


def test_without_a_calibration_a_novel_problem_has_larger_errors_too():
    row = [0.5, 0.0, 0.13, 0.2, 0.25]
    known = choose(predicted(row), default=0, target_regret=0.005)
    novel = choose(
        predicted(row, judge=lambda: "dtype int8 was not in training"), default=0, target_regret=0.005
    )
    wider = choose(predicted(row, 1.5 * 0.05), default=0, target_regret=0.005)
    np.testing.assert_array_equal(novel.curve, wider.curve)
    assert (novel.curve[1:4] > known.curve[1:4]).all()


def test_a_curve_goes_through_its_points_and_on_in_proportion():
    curve = Curve((0.001, 0.1), (0.01, 0.02))
    np.testing.assert_allclose(
        curve(np.array([0.001, 0.01, 0.1, 0.2, 0.0005])), [0.01, math.sqrt(2e-4), 0.02, 0.04, 0.005]
    )
    assert curve(np.zeros(1))[0] > 0


@pytest.mark.parametrize(
    ("xs", "ys"),
    [((), ()), ((1.0,), (1.0, 2.0)), ((1.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (2.0, 1.0)), ((0.0,), (1.0,)),
     ((1.0,), (math.nan,)), ((1.0,), (math.inf,))],
)  # fmt: skip
def test_what_is_no_rising_curve_is_refused(xs, ys):
    with pytest.raises(ArtifactError, match="no curve that rises"):
        Curve(xs, ys)


def test_what_is_kept_comes_back_and_what_is_broken_does_not():
    reach = Reach.of([Problem("toy", (("m", 3), ("n", 70)), "float32")])
    for kept in (Adaptive(reach), Adaptive(reach, Calibration(TENTH, SAME, TENTH, 1.5, 12))):
        data = json.loads(json.dumps(kept.to_dict(), allow_nan=False))
        back = Adaptive.from_dict(data)
        assert back.calibration == kept.calibration
        assert back.to_dict() == kept.to_dict()
    broken = [
        {**data, "reach": None},
        {**data, "calibration": []},
        {name: value for name, value in data.items() if name != "calibration"},
        *({**data, "calibration": {**data["calibration"], **change}} for change in (
            {"widening": 0.5}, {"widening": "x"}, {"alone": [[1.0]]}, {"several": [[2.0, 1.0], [1.0, 1.0]]}, {"bounds": 3},
            {"problems": None},
        )),
    ]  # fmt: skip
    for each in broken:
        with pytest.raises(ArtifactError):
            Adaptive.from_dict(each)
