"""The error head: what is left out together, what is learned of errors, and what came true of expected regrets."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("xgboost")

from kernelcast.costmodel.uncertainty import (
    LeftOut,
    _predict,
    fit_error,
    folds_of,
    regions,
    standardised,
)
from kernelcast.kernels import Problem


def toy(m, n, dtype="float32"):
    return Problem("toy", (("m", m), ("n", n)), dtype)


def shapes(count, seed=0):
    rng = np.random.default_rng(seed)
    return [toy(int(m), int(n)) for m, n in np.exp(rng.uniform(1, 9, (count, 2)))]


def test_half_of_the_regions_are_left_out_as_wholes():
    problems = shapes(600)
    label = regions(problems)
    _, counts = np.unique(label, return_counts=True)
    whole = counts[counts > 5]
    assert 12 <= len(whole) <= 15
    assert 0.3 < whole.sum() / 600 < 0.7
    assert counts[counts <= 5].max() <= 3
    assert (regions(problems) == label).all()
    # One region lies together: its problems are nearer to their own centre than most others are.
    sizes = np.log2([[p["m"], p["n"]] for p in problems])
    largest = label == np.unique(label)[np.argmax(counts)]
    away = np.linalg.norm(sizes - sizes[largest].mean(axis=0), axis=1)
    assert np.max(away[largest]) < np.median(away[~largest])


def test_problems_of_one_shape_go_together_and_few_shapes_have_no_regions():
    problems = [toy(4, 4), toy(8, 4), toy(4, 4, "float16")]
    label = regions(problems)
    assert label[0] == label[2] != label[1]
    again = [*shapes(300), *shapes(300)]
    label = regions(again)
    np.testing.assert_array_equal(label[:300], label[300:])


def test_folds_keep_clusters_together_and_are_of_like_size():
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(40), rng.integers(1, 12, 40))
    group = np.arange(len(cluster))
    fold = folds_of(cluster, group, 3, 0)
    assert all(len(set(fold[cluster == each])) == 1 for each in range(40))
    assert np.ptp(np.bincount(fold)) <= 3
    # A problem counts once, however many candidates it has.
    fold = folds_of(np.repeat([0, 1, 2, 3], [90, 1, 1, 1]), np.repeat([0, 1, 2, 3], [90, 1, 1, 1]), 2, 0)
    assert sorted([(fold == 0)[[0, 90, 91, 92]].sum(), (fold == 1)[[0, 90, 91, 92]].sum()]) == [2, 2]
    assert folds_of(np.zeros(5), np.arange(5), 3, 0) is None
    assert folds_of(np.arange(5), np.arange(5), 1, 0) is None
    assert set(folds_of(np.arange(2), np.arange(2), 9, 0)) == {0, 1}


def made_up(problems=300, rows=8, seed=0):
    """Two features: the first is the candidate's number, the second decides how far predictions are off: 2% or 20%."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(problems), rows)
    loud = rng.random(len(group)) < 0.5
    target = rng.normal(0, 0.15, len(group))
    predicted = target + rng.normal(0, 1, len(group)) * np.where(loud, 0.2, 0.02)
    # What all candidates of a problem share is no error of a difference.
    predicted += np.repeat(rng.normal(0, 3, problems), rows)
    X = np.column_stack([np.tile(np.arange(rows), problems), loud]).astype(np.float32)
    best = np.full(problems, np.inf)
    np.minimum.at(best, group, target)
    return X, target, target - best[group], group, predicted, loud


def fitted(data, fold):
    X, target, slowdown, group, predicted, _ = data
    return fit_error(
        X, target, slowdown, np.ones(len(X)), group, fold, lambda out: predicted[out], seed=0, threads=1
    )


def test_the_head_learns_which_differences_are_sure():
    data = made_up()
    X, target, _, group, predicted, loud = data
    head = fitted(data, group % 3)
    error = np.exp(head.mean + _predict(head.booster, X))
    # Not by the factor of 10 that their own errors differ by: what a difference is taken to is of either kind.
    assert np.median(error[loud]) / np.median(error[~loud]) > 1.5
    assert 0.15 < np.median(error[loud]) < 0.45
    scores = standardised(predicted, head.left_out.error, target, group)
    assert np.isnan(scores).sum() == 300
    assert np.mean(scores[~np.isnan(scores)] <= 1) == pytest.approx(0.6827, abs=0.002)
    # On problems that it has not seen the share is about the same.
    fresh = made_up(seed=1)
    error = np.exp(head.mean + _predict(head.booster, fresh[0]))
    scores = standardised(fresh[4], error, fresh[1], fresh[3])
    assert np.mean(scores[~np.isnan(scores)] <= 1) == pytest.approx(0.68, abs=0.05)


def test_errors_are_those_of_models_that_did_not_see_the_problem():
    data = made_up(60)
    seen = []

    def predict(out):
        seen.append(np.unique(data[3][out]).tolist())
        return data[4][out]

    fold = data[3] % 3
    fit_error(*data[:3], np.ones(480), data[3], fold, predict, seed=0, threads=1)
    assert seen == [list(range(start, 60, 3)) for start in range(3)]


def test_without_folds_one_error_is_claimed_for_all():
    data = made_up(5)
    head = fitted(data, None)
    assert head.left_out is None
    np.testing.assert_allclose(np.exp(head.mean + _predict(head.booster, data[0])), 0.15, rtol=1e-4)


def test_the_rest_of_the_rows_is_unknown():
    found = LeftOut(np.array([1.0, 2.0]), np.array([0.1, 0.2]), np.array([1, 0])).over(
        np.array([True, False, True])
    )
    np.testing.assert_array_equal(found.predicted, [1.0, np.nan, 2.0])
    assert found.fold.tolist() == [1, -1, 0]


def test_the_estimator_leaves_out_together_what_it_is_told_to():
    pytest.importorskip("sklearn")
    from kernelcast.costmodel import CostModel

    X, target, _, group, _, _ = made_up(40)
    small = CostModel(n_estimators=5, max_depth=2, n_jobs=1)
    left_out = small.fit(X, target, group, clusters=group // 10).left_out_
    assert sorted(np.bincount(left_out.fold)) == [80, 80, 160]
    assert all(len(set(left_out.fold[group // 10 == each])) == 1 for each in range(4))
    assert small.fit(X, target, group, clusters=np.zeros(len(group))).left_out_ is None
