"""The estimator: contract with scikit-learn, what it refuses, determinism, and what it learns of data with known noise."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcast.costmodel import CostModel, Forest
from kernelcast.costmodel.estimator import _RANGES, check_parameters, differences
from kernelcast.costmodel.heads import contributions
from kernelcast.datasets import ShapeKFold
from kernelcast.errors import ModelError

sklearn = pytest.importorskip("sklearn")
pytest.importorskip("xgboost")

QUICK = {"n_estimators": 30, "max_depth": 4, "learning_rate": 0.3, "colsample_bytree": 1.0, "n_jobs": 1}
#: What the synthetic data can be learned with: all four features in every tree.
WHOLE = {"n_estimators": 120, "colsample_bytree": 1.0, "n_jobs": 1}
NOISE = 0.1


def synthetic(problems, candidates=16, *, seed=0, noise=NOISE):
    """Features, log latency and problem of candidates whose latency spans 1000 between problems and 5 within one."""
    rng = np.random.default_rng(seed)
    level = rng.uniform(0.0, np.log(1000.0), problems)
    group = np.repeat(np.arange(problems), candidates)
    tile, stages = rng.integers(0, 6, len(group)), rng.integers(1, 4, len(group))
    X = np.column_stack([level[group], tile, stages, rng.normal(size=len(group))]).astype(np.float32)
    best_tile = 5 * level / np.log(1000.0)
    y = level[group] + 0.3 * np.abs(tile - best_tile[group]) + 0.2 * (stages == 1)
    return X, y + noise * rng.normal(size=len(y)), group


@pytest.fixture(scope="module")
def data():
    return synthetic(60)


@pytest.fixture(scope="module")
def fitted(data):
    return CostModel(**QUICK).fit(*data)


def saved(model):
    return {name: bytes(booster.save_raw("json")) for name, booster in model.boosters_.items()}


def test_parameters_are_scikit_learns():
    from sklearn.base import clone, is_regressor

    model = CostModel(n_estimators=7, focus=0.25, random_state=3)
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == model.get_params()
    assert copy.get_params()["n_estimators"] == 7
    assert clone(copy.set_params(max_depth=2)).max_depth == 2
    assert is_regressor(model)
    with pytest.raises(ValueError, match="Invalid parameter"):
        model.set_params(no_such=1)


def test_it_cannot_predict_before_it_is_fitted():
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        CostModel().predict(np.zeros((1, 3)))


@pytest.mark.slow
def test_fitting_returns_itself_and_leaves_its_input_alone(data):
    before = [array.copy() for array in data]
    model = CostModel(**QUICK)
    assert model.fit(*data) is model
    assert model.n_features_in_ == 4
    assert all(isinstance(forest, Forest) and forest.width == 4 for forest in model.forests_.values())
    for array, kept in zip(data, before, strict=True):
        np.testing.assert_array_equal(array, kept)
    with pytest.raises(ModelError, match="rows of 4 features"):
        model.predict(np.zeros((2, 3)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_targets_that_are_not_finite_are_refused(data, bad):
    X, y, groups = data
    y = y.copy()
    y[[3, 8]] = bad
    with pytest.raises(ModelError, match="2 latencies are not finite; leave failures out"):
        CostModel(**QUICK).fit(X, y, groups)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, 1e300])
def test_features_that_are_infinite_are_refused(data, bad):
    X, y, groups = data
    X = X.astype(np.float64)
    X[5, 1] = bad
    with pytest.raises(ModelError, match="1 features are infinite in float32"):
        CostModel(**QUICK).fit(X, y, groups)


@pytest.mark.parametrize(
    "shapes", [((4, 2), (3,), (4,)), ((4, 2), (4,), (3,)), ((4,), (4,), (4,)), ((4, 2), (4, 1), (4,))]
)
def test_lengths_that_differ_are_refused(shapes):
    X, y, groups = (np.zeros(shape) for shape in shapes)
    with pytest.raises(ModelError, match="first lengths must be equal"):
        CostModel(**QUICK).fit(X, y, groups)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_problems_of_one_candidate_each_are_nothing_to_compare(rows):
    with pytest.raises(ModelError, match=r"nothing to compare\. Collect more"):
        CostModel(**QUICK).fit(np.zeros((rows, 2)), np.zeros(rows), np.arange(rows))


@pytest.mark.parametrize("groups", [[0, 0], ["a", "a"], [7.5, 7.5]])
def test_two_rows_are_enough(groups):
    X = np.array([[0.0], [1.0]])
    model = CostModel(**QUICK).fit(X, np.log([2.0, 8.0]), np.array(groups))
    assert np.isfinite(model.predict(X)).all()
    assert np.isfinite([model.level_mean_, model.error_mean_]).all()
    assert model.level_mean_ == pytest.approx(np.log(4.0))


def test_constant_latencies_give_constant_predictions():
    X, _, groups = synthetic(10)
    model = CostModel(**QUICK).fit(X, np.full(len(X), 3.0), groups)
    np.testing.assert_allclose(model.predict(X), 0.0, atol=1e-6)
    assert model.level_mean_ == 3.0
    assert np.isfinite(model.error_mean_)


@pytest.mark.slow
def test_a_constant_feature_and_one_that_is_always_missing(data, fitted):
    X, y, groups = data
    wide = np.column_stack([X, np.full(len(X), 5.0), np.full(len(X), np.nan)])
    model = CostModel(**QUICK).fit(wide, y, groups)
    np.testing.assert_allclose(model.predict(wide), fitted.predict(X), atol=1e-5)


@pytest.mark.slow
def test_the_names_of_the_problems_do_not_count(data, fitted):
    X, y, groups = data
    named = np.array([f"problem {number:03}" for number in groups])
    assert saved(CostModel(**QUICK).fit(X, y, named)) == saved(fitted)


@pytest.mark.slow
def test_rows_in_any_order_fit_the_same_model_once_sorted(data, fitted):
    X, y, groups = data
    shuffled = np.random.default_rng(0).permutation(len(X))
    back = np.argsort(shuffled)
    again = CostModel(**QUICK).fit(X[shuffled][back], y[shuffled][back], groups[shuffled][back])
    assert saved(again) == saved(fitted)
    # Without sampling of rows the order counts for nothing but the rounding of sums.
    whole = {**QUICK, "subsample": 1.0}
    one = CostModel(**whole).fit(X, y, groups)
    other = CostModel(**whole).fit(X[shuffled], y[shuffled], groups[shuffled])
    np.testing.assert_allclose(other.predict(X), one.predict(X), atol=1e-3)


@pytest.mark.slow
def test_the_same_data_and_seed_give_the_same_bytes(data, fitted):
    again = CostModel(**QUICK).fit(*data)
    assert saved(again) == saved(fitted)
    assert (again.level_mean_, again.error_mean_) == (fitted.level_mean_, fitted.error_mean_)
    other_seed = CostModel(**QUICK, random_state=1).fit(*data)
    assert saved(other_seed) != saved(fitted)


@pytest.mark.slow
def test_the_number_of_threads_does_not_count(data):
    few = {**QUICK, "n_estimators": 5}
    assert saved(CostModel(**{**few, "n_jobs": 2}).fit(*data)) == saved(CostModel(**few).fit(*data))


@pytest.mark.slow
def test_a_problem_of_one_candidate_says_nothing_of_differences(data):
    X, y, groups = data
    alone = np.array([[3.0, 0.0, 1.0, 0.0]], np.float32)
    more = np.concatenate([X, alone]), np.append(y, 50.0), np.append(groups, 999)
    kept, with_one = CostModel(**QUICK).fit(*data), CostModel(**QUICK).fit(*more)
    for head in saved(kept).keys() - {"level"}:
        assert saved(with_one)[head] == saved(kept)[head], head
    assert with_one.error_mean_ == kept.error_mean_
    assert with_one.level_mean_ == pytest.approx(np.append(y, 50.0).mean())


@pytest.mark.slow
def test_a_constant_added_to_a_problem_changes_no_difference(data, fitted):
    X, y, groups = data
    shifted = CostModel(**QUICK).fit(X, y + 0.25 * groups, groups)
    np.testing.assert_allclose(shifted.predict(X), fitted.predict(X), atol=0.02)
    assert shifted.level_mean_ == pytest.approx((y + 0.25 * groups).mean())


def test_it_ranks_problems_it_has_not_seen(fitted):
    X, y, groups = synthetic(40, seed=1, noise=0.0)
    predicted = fitted.predict(X)
    efficiency = []
    for number in np.unique(groups):
        rows = groups == number
        efficiency.append(np.exp(y[rows].min() - y[rows][np.argmin(predicted[rows])]))
    assert np.exp(np.mean(np.log(efficiency))) > 0.95
    # A random choice would have:
    assert (
        np.exp(
            np.mean([y[groups == number].min() - y[groups == number].mean() for number in np.unique(groups)])
        )
        < 0.75
    )


def standardised(fit, problems, seed):
    """Errors of differences over what the model says of them, on problems that it has not seen."""
    X, y, groups = synthetic(problems, seed=seed)
    predicted = fit.predict(X)
    error = np.exp(fit.error_mean_ + fit.forests_["error"].predict(X))
    scores = []
    rng = np.random.default_rng(0)
    for number in np.unique(groups):
        rows = np.flatnonzero(groups == number)
        other = rng.choice(rows)
        rows = rows[rows != other]
        off = (predicted[rows] - predicted[other]) - (y[rows] - y[other])
        scores.append(off / error[rows])
    return np.concatenate(scores)


@pytest.mark.slow
def test_the_error_is_a_standard_deviation():
    fit = CostModel(**WHOLE).fit(*synthetic(300))
    scores = standardised(fit, 100, seed=5)
    # Errors are judged by differences to the measured best, which noise flatters: any other difference is surer.
    assert 0.6 < np.mean(np.abs(scores) < 1) < 0.9
    assert 0.5 < np.std(scores) < 1.6
    # The noise alone makes a difference of two uncertain by sqrt(2) of it; the model cannot claim less, nor need much more.
    X, _, _ = synthetic(100, seed=5)
    claimed = np.exp(fit.error_mean_ + fit.forests_["error"].predict(X))
    assert 0.9 * NOISE * np.sqrt(2) < np.median(claimed) < 2 * NOISE * np.sqrt(2)


@pytest.mark.slow
def test_the_error_is_larger_where_the_noise_is():
    X, y, groups = synthetic(200, noise=0.0)
    loud = X[:, 2] == 3
    y += np.random.default_rng(1).normal(size=len(y)) * np.where(loud, 0.4, 0.02)
    fit = CostModel(**WHOLE).fit(X, y, groups)
    error = np.exp(fit.error_mean_ + fit.forests_["error"].predict(X))
    assert np.median(error[loud]) > 1.5 * np.median(error[~loud])


@pytest.mark.parametrize("folds", [0, 1])
def test_without_folds_there_is_one_error_for_all(data, folds):
    fit = CostModel(**QUICK, error_folds=folds).fit(*data)
    error = np.exp(fit.error_mean_ + fit.forests_["error"].predict(data[0]))
    np.testing.assert_allclose(error, error[0], rtol=1e-5)
    assert 0.1 < error[0] < 0.25


@pytest.mark.slow
def test_more_folds_than_problems():
    X, y, groups = synthetic(3)
    fit = CostModel(**QUICK, error_folds=50).fit(X, y, groups)
    assert np.isfinite(fit.predict(X)).all()
    one_tree = CostModel(n_estimators=1, error_folds=2, n_jobs=1).fit(X, y, groups)
    assert np.isfinite(one_tree.error_mean_)


def test_differences_alone_count_for_the_objective():
    group = np.array([0, 0, 0, 1, 1])
    target, weights = np.array([0.0, 1.0, 2.0, 5.0, 4.0]), np.array([1.0, 2.0, 1.0, 3.0, 1.0])
    objective = differences(group, target, weights)
    for shift in ([0.0, 0.0], [7.0, -3.0]):
        gradient, curvature = objective(target + np.array(shift)[group], None)
        np.testing.assert_allclose(gradient, 0.0, atol=1e-12)
        np.testing.assert_array_equal(curvature, weights)
    gradient, _ = objective(np.zeros(5), None)
    # The weighted mean of what is off is 1 too low in the first problem, 4.75 in the second.
    np.testing.assert_allclose(gradient, [1.0, 0.0, -1.0, -0.75, 0.75])


def test_the_order_is_the_mean_of_its_heads(fitted):
    X, _, _ = synthetic(5, seed=3)
    forests = fitted.forests_
    assert list(forests) == ["difference", "slowdown", "level", "error"]
    slowdown = np.expm1(forests["slowdown"].predict(X)) / 5.0
    np.testing.assert_allclose(
        fitted.predict(X), (forests["difference"].predict(X) + slowdown) / 2, rtol=1e-12
    )


def with_estimate(seed=0):
    """Latencies are the estimate's, and their problems' levels; nothing else tells the candidates apart."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(30), 12)
    estimate = rng.uniform(0.0, 6.0, len(group))
    X = np.column_stack([rng.normal(size=len(group)), estimate]).astype(np.float32)
    y = estimate * np.log(2.0) + rng.normal(size=30)[group]
    X[::12, 1] = np.nan  # a closed library: taken to be as fast as can be
    y[::12] = y[::12] - estimate[::12] * np.log(2.0)
    return X, y, group


def test_the_order_follows_an_estimate_where_there_is_one():
    few = {"n_estimators": 40, "max_depth": 5, "error_folds": 0, "n_jobs": 1}
    X, y, group = with_estimate()
    fitted = CostModel(**few).fit(X, y, group, estimate=1)
    line = np.column_stack([np.zeros(50), np.linspace(0.2, 5.8, 50)]).astype(np.float32)
    # What the estimate leaves out is nothing, so that head adds nothing.
    np.testing.assert_allclose(fitted.forests_["remainder"].predict(line), 0.0, atol=0.01)
    assert (np.argsort(fitted.predict(line)) == np.arange(50)).mean() > 0.9
    far = np.array([[0.0, 30.0], [0.0, 60.0]], np.float32)
    # Beyond the data the estimate alone goes on.
    assert np.diff(fitted.predict(far)) == pytest.approx(30.0 * np.log(2.0) / 3.0)
    assert all(
        each.num_boosted_rounds() == 40
        for name, each in fitted.boosters_.items()
        if name not in ("level", "error")
    )


def test_a_row_without_an_estimate_counts_as_the_least_time():
    few = {"n_estimators": 5, "max_depth": 3, "error_folds": 0, "n_jobs": 1}
    fitted = CostModel(**few).fit(*with_estimate(), estimate=1)
    rows = np.array([[0.0, np.nan], [0.0, 0.0]], np.float32)
    said = [fitted.forests_[name].predict(rows) for name in ("difference", "slowdown", "remainder")]
    wanted = (said[0] + np.expm1(said[1]) / 5.0 + said[2]) / 3.0
    np.testing.assert_allclose(fitted.predict(rows), wanted, rtol=1e-12)


@pytest.mark.parametrize("estimate", [None, 1])
def test_what_features_contribute_sums_to_the_prediction(estimate):
    X, y, group = with_estimate()
    few = {"n_estimators": 10, "max_depth": 4, "error_folds": 0, "n_jobs": 1}
    fitted = CostModel(**few).fit(X, y, group, estimate=estimate)
    start, parts = contributions(fitted.forests_, X, estimate)
    assert parts.shape == X.shape
    np.testing.assert_allclose(start + parts.sum(axis=1), fitted.predict(X), atol=1e-5)
    # The latencies follow the second feature; the first is noise.
    assert np.abs(parts[:, 1]).mean() > 3 * np.abs(parts[:, 0]).mean()


# Parameters


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("n_estimators", 0, "a whole number from 1 to 10000"),
        ("n_estimators", -1, "a whole number from 1 to 10000"),
        ("n_estimators", 10.0, "a whole number from 1 to 10000"),
        ("n_estimators", True, "a whole number from 1 to 10000"),
        ("max_depth", -1, "a whole number from 1 to 16"),
        ("max_depth", 17, "a whole number from 1 to 16"),
        ("learning_rate", np.nan, "a number above 0 and at most 1"),
        ("learning_rate", 1e30, "a number above 0 and at most 1"),
        ("learning_rate", 0.0, "a number above 0 and at most 1"),
        ("learning_rate", "0.1", "a number above 0 and at most 1"),
        ("min_child_weight", -0.5, "a number from 0 to 1000000000"),
        ("subsample", 0, "a number above 0 and at most 1"),
        ("colsample_bytree", 2, "a number above 0 and at most 1"),
        ("reg_lambda", np.inf, "a number from 0 to 1000000000"),
        ("focus", -1.0, "a number from 0 to 100"),
        ("error_folds", -1, "a whole number from 0 to 1000"),
        ("random_state", -5, "a whole number from 0 to 4294967295, or None, or RandomState"),
        ("random_state", 2**32, "a whole number from 0 to 4294967295, or None, or RandomState"),
        ("random_state", "7", "a whole number from 0 to 4294967295, or None, or RandomState"),
        ("n_jobs", -2, "a whole number from -1 to 1024, or None"),
    ],
)
def test_a_parameter_out_of_range_is_named_with_its_range(data, name, value, allowed):
    with pytest.raises(ModelError) as caught:
        CostModel(**{name: value}).fit(*data)
    assert str(caught.value) == f"{name} is {value!r}; it must be {allowed}."


def test_every_parameter_has_a_range_that_holds_its_default():
    assert set(_RANGES) == set(CostModel().get_params())
    check_parameters(CostModel().get_params())
    numpys = {"n_estimators": np.int64(3), "learning_rate": np.float32(0.5), "random_state": np.uint8(9)}
    check_parameters({**CostModel().get_params(), **numpys})


def test_a_seed_is_taken_as_everywhere_in_scikit_learn(data):
    few = {"n_estimators": 2, "max_depth": 2, "error_folds": 0, "n_jobs": 1}

    def fit(state):
        return CostModel(**few, random_state=state).fit(*data)

    assert fit(7).seed_ == 7
    drawn = np.random.RandomState(3).randint(2**31, size=2).tolist()
    state = np.random.RandomState(3)
    first, second = fit(state), fit(state)
    assert [first.seed_, second.seed_] == drawn
    assert saved(first) == saved(fit(drawn[0])) != saved(second)
    before = np.random.get_state()
    try:
        np.random.seed(3)
        assert [fit(None).seed_, fit(None).seed_] == drawn
    finally:
        np.random.set_state(before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"estimate": 9999}, "The estimate is column 9999; X has the columns 0 to 3."),
        ({"estimate": -1}, "The estimate is column -1; X has the columns 0 to 3."),
        ({"estimate": 1.0}, "The estimate is column 1.0; X has the columns 0 to 3."),
        ({"clusters": np.zeros(3)}, r"The clusters are \(3,\); there must be one for each of the 960 rows."),
        ({"sample_weight": np.ones(3)}, r"The weights are \(3,\); there must be one above 0 for each"),
    ],
    ids=str,
)
def test_what_is_given_beside_the_rows_must_fit_them(data, given, message):
    with pytest.raises(ModelError, match=message):
        CostModel(**QUICK).fit(*data, **given)


# Its score, and scikit-learn's ways of using it


def test_the_score_is_the_efficiency_at_1(fitted):
    X, y, groups = synthetic(20, seed=2)
    shuffled = np.random.default_rng(0).permutation(len(X))
    predicted = fitted.predict(X)
    best, first = [], []
    for number in range(20):
        rows = groups == number
        best.append(y[rows].min())
        first.append(y[rows][predicted[rows].argmin()])
    expected = np.exp(np.mean(best) - np.mean(first))
    assert 0.5 < expected < 1.0
    assert fitted.score(X, y, groups) == pytest.approx(expected, rel=1e-12)
    named = np.array([f"problem {number}" for number in groups])
    assert fitted.score(X[shuffled], y[shuffled], named[shuffled]) == pytest.approx(expected, rel=1e-12)
    # What is added to a problem's latencies, of which the model says nothing, changes nothing.
    assert fitted.score(X, y + 3.0 * groups, groups) == pytest.approx(expected, rel=1e-9)
    # By hand, the first of two equal predictions: 1 us over 4 us, and over 1 us.
    same = np.zeros((2, 4))
    assert fitted.score(same, np.log([4.0, 1.0]), [0, 0]) == pytest.approx(0.25)
    assert fitted.score(same, np.log([1.0, 4.0]), [0, 0]) == pytest.approx(1.0)
    assert fitted.score(np.zeros((4, 4)), np.log([4.0, 1.0, 1.0, 4.0]), [0, 0, 1, 1]) == pytest.approx(0.5)


def test_a_score_without_problems_or_rows_is_refused(fitted):
    with pytest.raises(TypeError, match="groups"):
        fitted.score(np.zeros((2, 4)), np.zeros(2))
    with pytest.raises(ModelError, match="no row to judge"):
        fitted.score(np.zeros((0, 4)), np.zeros(0), np.zeros(0))
    with pytest.raises(ModelError, match="first lengths must be equal"):
        fitted.score(np.zeros((2, 4)), np.zeros(2), np.zeros(3))


def test_cross_validation_and_grid_search_by_shape():
    """As the docstring of ShapeKFold and docs/models.md say: two problems, of two dtypes, are of one shape."""
    from sklearn.model_selection import GridSearchCV, cross_val_score

    X, y, problem_ids = synthetic(12, candidates=8)
    shape_ids = [str(number // 2) for number in problem_ids]
    folds = list(ShapeKFold(3, seed=0).split(X, y, groups=shape_ids))
    few = {"n_estimators": 20, "max_depth": 3, "error_folds": 0, "n_jobs": 1, "colsample_bytree": 1.0}
    with sklearn.config_context(enable_metadata_routing=True):
        model = CostModel(**few).set_fit_request(groups=True).set_score_request(groups=True)
        scores = cross_val_score(model, X, y, params={"groups": problem_ids}, cv=folds)
        search = GridSearchCV(model, {"n_estimators": [1, 20]}, cv=folds).fit(X, y, groups=problem_ids)
        refitted = search.score(X, y, groups=problem_ids)
    assert refitted == search.best_estimator_.score(X, y, problem_ids)
    by_hand = [
        CostModel(**few)
        .fit(X[train], y[train], problem_ids[train])
        .score(X[test], y[test], problem_ids[test])
        for train, test in folds
    ]
    np.testing.assert_array_equal(scores, by_hand)
    assert all(set(problem_ids[train]).isdisjoint(problem_ids[test]) for train, test in folds)
    np.testing.assert_allclose(search.cv_results_["mean_test_score"][1], np.mean(by_hand), rtol=1e-12)
    assert search.best_params_ == {"n_estimators": 20}
    assert search.best_score_ > search.cv_results_["mean_test_score"][0]
