"""Forests predict what xgboost predicts, from arrays alone."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.costmodel import Forest
from kernelcast.costmodel.walk import Walk
from kernelcast.errors import ArtifactError, ModelError

xgboost = pytest.importorskip("xgboost")


def data(rows, features, *, missing=0.2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)).astype(np.float32)
    X[:, 0] = rng.integers(0, 5, rows)  # few values, so that thresholds are hit
    y = np.where(X[:, 0] > 2, 3.0, X[:, 1] * 2) + 0.5 * X[:, -1] ** 2 + rng.normal(size=rows) * 0.1
    X[rng.random(X.shape) < missing] = np.nan
    return X, y


def boosted(X, y, rounds=20, **parameters):
    defaults = {"max_depth": 4, "tree_method": "hist", "base_score": 0.0, "nthread": 1}
    return xgboost.train({**defaults, **parameters}, xgboost.DMatrix(X, label=y), num_boost_round=rounds)


def text_of(booster):
    return bytes(booster.save_raw("json"))


def edges(booster, features):
    """Rows at every threshold of the model and right beside it, with infinities and missing values among them."""
    trees = json.loads(text_of(booster))["learner"]["gradient_booster"]["model"]["trees"]
    thresholds = np.unique([np.float32(value) for tree in trees for value in tree["split_conditions"]])
    values = np.concatenate(
        [
            thresholds,
            np.nextafter(thresholds, np.float32(np.inf)),
            np.nextafter(thresholds, np.float32(-np.inf)),
            np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38], dtype=np.float32),
        ]
    ).astype(np.float32)
    rng = np.random.default_rng(1)
    return rng.choice(values, size=(500, features))


def same(booster, forest, X):
    wanted = booster.inplace_predict(X)
    found = forest.predict(X)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(Walk([forest], native=False).predict(X)[0], found, rtol=0, atol=1e-9)
    # The order is the same wherever the library tells two rows apart by more than the rounding of its sum.
    order = np.argsort(found, kind="stable")
    assert (np.diff(wanted[order]) > -1e-5).all()


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_depth": 1},
        {"max_depth": 3},
        {"max_depth": 9, "min_child_weight": 0.0},
        {"max_depth": 0, "max_leaves": 12, "grow_policy": "lossguide"},
        {"max_depth": 5, "subsample": 0.5, "colsample_bytree": 0.5, "learning_rate": 0.1},
        {"max_depth": 5, "gamma": 20.0},
        {"max_depth": 4, "tree_method": "exact"},
        {"max_depth": 4, "tree_method": "approx"},
        {"max_depth": 3, "num_parallel_tree": 3, "subsample": 0.5},
        {"base_score": 0.7},
        {"base_score": -12.5},
        {"base_score": None},
        {"objective": "reg:absoluteerror"},
        {"objective": "reg:pseudohubererror"},
    ],
    ids=str,
)
def test_predictions_are_xgboosts(parameters):
    X, y = data(400, 6)
    booster = boosted(X, y, **{name: value for name, value in parameters.items() if value is not None})
    forest = Forest.from_xgboost_json(text_of(booster))
    assert forest.trees == 20 * parameters.get("num_parallel_tree", 1)
    assert forest.width == 6
    for rows in (X, X[:1], edges(booster, 6)):
        same(booster, forest, rows)


@pytest.mark.parametrize("objective", ["rank:pairwise", "rank:ndcg"])
def test_rankers_are_sums_of_trees_too(objective):
    X, y = data(300, 4)
    matrix = xgboost.DMatrix(X, label=np.argsort(np.argsort(y)) % 5, qid=np.repeat(np.arange(30), 10))
    booster = xgboost.train(
        {"objective": objective, "max_depth": 3, "nthread": 1}, matrix, num_boost_round=10
    )
    same(booster, Forest.from_xgboost_json(text_of(booster)), X)


def test_a_model_of_single_leaves_and_one_of_no_trees():
    X, _ = data(50, 3)
    constant = boosted(X, np.full(50, 7.0), rounds=3)
    forest = Forest.from_xgboost_json(text_of(constant))
    assert (forest.depth, forest.trees) == (0, 3)
    same(constant, forest, X)
    empty = boosted(X, np.full(50, 7.0), rounds=0, base_score=2.5)
    forest = Forest.from_xgboost_json(text_of(empty))
    assert (forest.depth, forest.trees) == (0, 0)
    assert forest.predict(X).tolist() == [2.5] * 50
    same(empty, Forest.from_arrays(forest.arrays()), X)


def test_every_row_alone_is_predicted_as_among_many():
    X, y = data(5000, 5)
    forest = Forest.from_xgboost_json(text_of(boosted(X[:500], y[:500], rounds=5)))
    together = forest.predict(X)
    assert together.shape == (5000,)
    some = [*range(0, 5000, 371), 2047, 2048, 4095, 4096, 4999]
    assert [forest.predict(X[row : row + 1])[0] for row in some] == together[some].tolist()
    assert forest.predict(X[:0]).shape == (0,)
    assert forest.predict(X.astype(np.float64)).tolist() == together.tolist()
    assert forest.predict(np.asfortranarray(X)).tolist() == together.tolist()


def test_features_are_not_changed():
    X, y = data(100, 3)
    forest = Forest.from_xgboost_json(text_of(boosted(X, y, rounds=3)))
    before = X.copy()
    forest.predict(X)
    np.testing.assert_array_equal(X, before)


def test_the_base_score_in_the_text_of_older_versions():
    X, y = data(100, 3)
    booster = boosted(X, y, base_score=0.25)
    model = json.loads(text_of(booster))
    model["learner"]["learner_model_param"]["base_score"] = "2.5E-1"
    same(booster, Forest.from_xgboost_json(json.dumps(model)), X)


numbers = st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 1.0, 2.0, math.inf])


@st.composite
def trees(draw):
    """One tree in xgboost's JSON, of any shape, with any thresholds."""
    tree = {
        name: []
        for name in ("left_children", "right_children", "split_conditions", "split_indices", "default_left")
    }

    def grow(level):
        node = len(tree["left_children"])
        leaf = level == 4 or draw(st.booleans())
        threshold = float(draw(st.integers(-50, 50))) / 8 if leaf else draw(numbers)
        for name, value in (
            ("left_children", -1),
            ("right_children", -1),
            ("split_conditions", threshold),
            ("split_indices", 0 if leaf else draw(st.integers(0, 1))),
            ("default_left", 0 if leaf else draw(st.integers(0, 1))),
        ):
            tree[name].append(value)
        if not leaf:
            tree["left_children"][node] = grow(level + 1)
            tree["right_children"][node] = grow(level + 1)
        return node

    grow(0)
    return tree


def walk(tree, row):
    """A tree's answer by the definition: left where the value is below the threshold; the missing by default."""
    node = 0
    while tree["left_children"][node] != -1:
        value, threshold = row[tree["split_indices"][node]], tree["split_conditions"][node]
        left = bool(tree["default_left"][node]) if math.isnan(value) else value < threshold
        node = tree["left_children" if left else "right_children"][node]
    return tree["split_conditions"][node]


def model_of(found, width=2, base="[0E0]", **parameters):
    learner = {
        "learner_model_param": {
            "num_feature": str(width),
            "base_score": base,
            "num_class": "0",
            **parameters,
        },
        "objective": {"name": "reg:squarederror"},
        "gradient_booster": {"name": "gbtree", "model": {"trees": found}},
    }
    return json.dumps({"learner": learner})


@settings(max_examples=60, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3), st.data())
def test_any_tree_is_walked_by_the_definition(found, data):
    forest = Forest.from_xgboost_json(model_of(found, base="[1.5E0]"))
    values = st.sampled_from(
        [math.nan, -math.inf, -3e38, -2.0, -1.5, -1.0, 0.0, 0.5, 1.0, 2.0, 3e38, math.inf]
    )
    rows = data.draw(st.lists(st.tuples(values, values), min_size=1, max_size=8))
    wanted = [1.5 + sum(walk(tree, row) for tree in found) for row in rows]
    assert forest.predict(np.array(rows, dtype=np.float32)).tolist() == wanted
    # Beside others, of whatever depth, each forest says what it says alone.
    others = [Forest.from_xgboost_json(model_of(some)) for some in ([], found[:1], [leaf_only(0.25)])]
    for native in (True, False):
        both = Walk([*others, forest], native=native).predict(np.array(rows, dtype=np.float32))
        assert both.shape == (4, len(rows))
        assert both[3].tolist() == wanted
        assert both[0].tolist() == [0.0] * len(rows)
        assert both[1].tolist() == [walk(found[0], row) for row in rows]
        assert both[2].tolist() == [0.25] * len(rows)


def leaf_only(value):
    return {
        "left_children": [-1], "right_children": [-1], "split_conditions": [value], "split_indices": [0],
        "default_left": [0],
    }  # fmt: skip


def test_forests_of_several_widths_are_no_one_walk():
    one, other = (Forest.from_xgboost_json(model_of([GOOD], width=width)) for width in (2, 3))
    for forests in ([], [one, other]):
        with pytest.raises(ModelError, match="cannot be walked as one"):
            Walk(forests)


def test_threads_do_not_meet():
    X, y = data(3000, 5)
    forests = [Forest.from_xgboost_json(text_of(boosted(X[:400], y[:400], rounds=n))) for n in (5, 40)]
    wanted = [forest.predict(X) for forest in forests]
    wrong = []

    def ask(number):
        for turn in range(20):
            which, rows = (number + turn) % 2, 1 + (number * 131 + turn * 37) % 3000
            if forests[which].predict(X[:rows]).tolist() != wanted[which][:rows].tolist():
                wrong.append((number, turn))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    "parameters", [{}, {"max_depth": 7}, {"base_score": -3.5}, {"num_parallel_tree": 2}], ids=str
)
def test_contributions_are_xgboosts_and_sum_to_the_prediction(parameters):
    X, y = data(400, 6)
    booster = boosted(X, y, **parameters)
    forest = Forest.from_arrays(Forest.from_xgboost_json(text_of(booster)).arrays())
    for rows in (X[:50], np.clip(edges(booster, 6)[:50], -1e30, 1e30)):
        start, parts = forest.contributions(rows)
        assert parts.shape == rows.shape
        np.testing.assert_allclose(start + parts.sum(axis=1), forest.predict(rows), atol=1e-5)
        wanted = booster.predict(
            xgboost.DMatrix(rows, missing=np.nan), pred_contribs=True, approx_contribs=True
        )
        np.testing.assert_allclose(parts, wanted[:, :-1], atol=2e-4)
        np.testing.assert_allclose(start, wanted[:, -1], atol=2e-4)


def test_trees_that_do_not_say_how_many_rows_came_cannot_explain_themselves():
    forest = Forest.from_xgboost_json(model_of([GOOD]))
    assert forest.mean is None
    assert set(forest.arrays()) == {"feature", "threshold", "leaf", "base", "width"}
    with pytest.raises(ModelError, match="Train again"):
        forest.contributions(np.zeros((1, 2), np.float32))
    weighed = Forest.from_xgboost_json(model_of([{**GOOD, "sum_hessian": [5.0, 1.0, 4.0, 3.0, 1.0]}]))
    # Leaves 1, 3 and 4 of the chain, of which as many training rows came to each as its weight says.
    assert weighed.mean[0].tolist() == pytest.approx(
        [(1 * 1.0 + 3 * 3.0 + 1 * 4.0) / 5, 1.0, (3 * 3.0 + 1 * 4.0) / 4]
    )
    start, parts = weighed.contributions(np.array([[5.0, 0.0]], np.float32))
    assert start == pytest.approx(2.8)
    assert parts[0].tolist() == pytest.approx([4.0 - 2.8, 0.0])
    with pytest.raises(ModelError, match="rows of 2 features"):
        weighed.contributions(np.zeros((1, 3), np.float32))


def classes():
    X, y = data(60, 3)
    return text_of(boosted(X, y > 0, objective="binary:logistic", rounds=2, base_score=0.5))


def several_classes():
    X, _ = data(60, 3)
    return text_of(boosted(X, np.arange(60) % 3, objective="multi:softprob", num_class=3, rounds=2))


def several_targets():
    X, y = data(60, 3)
    return text_of(boosted(X, np.stack([y, -y], axis=1), rounds=2))


def vector_leaves():
    X, y = data(60, 3)
    return text_of(boosted(X, np.stack([y, -y], axis=1), multi_strategy="multi_output_tree", rounds=2))


def counts():
    X, y = data(60, 3)
    return text_of(boosted(X, np.abs(y), objective="count:poisson", rounds=2, base_score=1.0))


def dropped_trees():
    X, y = data(60, 3)
    return text_of(boosted(X, y, booster="dart", rate_drop=0.5, rounds=5))


def linear():
    X, y = data(60, 3, missing=0.0)
    parameters = {"booster": "gblinear", "nthread": 1}
    return text_of(xgboost.train(parameters, xgboost.DMatrix(X, label=y), num_boost_round=2))


def categories():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": pandas.Categorical(list("abcabcabcd") * 6)})
    y = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 5.0] * 6)
    matrix = xgboost.DMatrix(frame, label=y, enable_categorical=True)
    return text_of(xgboost.train({"max_depth": 2, "tree_method": "hist"}, matrix, num_boost_round=2))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (classes, "binary:logistic"),
        (several_classes, "multi:softprob"),
        (several_targets, "several outputs"),
        (vector_leaves, "several outputs"),
        (counts, "count:poisson"),
        (dropped_trees, "KeyError"),
        (linear, "KeyError"),
        (categories, "categorical"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_models_that_are_no_sum_of_plain_trees_are_refused(make, said):
    with pytest.raises(ArtifactError, match=said):
        Forest.from_xgboost_json(make())


def chain(depth):
    """A tree that goes right ``depth`` times."""
    nodes = 2 * depth + 1
    return {
        "left_children": [node + 1 if node % 2 == 0 and node < 2 * depth else -1 for node in range(nodes)],
        "right_children": [node + 2 if node % 2 == 0 and node < 2 * depth else -1 for node in range(nodes)],
        "split_conditions": [float(node) for node in range(nodes)],
        "split_indices": [0] * nodes,
        "default_left": [0] * nodes,
    }


def test_deep_trees_are_refused_and_those_at_the_limit_are_not():
    assert Forest.from_xgboost_json(model_of([chain(16)])).depth == 16
    assert Forest.from_xgboost_json(model_of([chain(16)])).predict(np.array([[31.0, 0]])).tolist() == [32.0]
    with pytest.raises(ArtifactError, match="depth 17; at most 16"):
        Forest.from_xgboost_json(model_of([chain(17)]))


GOOD = chain(2)


@pytest.mark.parametrize(
    "changes",
    [
        {"left_children": [1, -1, 3, -1]},
        {"left_children": [0, -1, 3, -1, -1]},
        {"left_children": [1, -1, 1, -1, -1]},
        {"left_children": [1, -1, 9, -1, -1]},
        {"left_children": [-2, -1, 3, -1, -1]},
        {"right_children": [2, -1, -1, -1, -1]},
        {"left_children": None},
        {"split_conditions": [0.0]},
        {"split_conditions": [0.0, 1.0, 2.0, 3.0, math.nan]},
        {"split_conditions": [0.0, 1.0, 2.0, 3.0, math.inf]},
        {"split_conditions": [math.nan, 1.0, 2.0, 3.0, 4.0]},
        {"split_indices": [2, 0, 0, 0, 0]},
        {"split_indices": [-1, 0, 0, 0, 0]},
        {"split_indices": [2**40, 0, 0, 0, 0]},
        {"split_indices": [10**30, 0, 0, 0, 0]},
        {"split_indices": [0.5, 0, 0, 0, 0]},
        {"split_type": [1, 0, 0, 0, 0]},
        {"default_left": []},
        {"sum_hessian": [1.0]},
        {"sum_hessian": ["many"] * 5},
        {"sum_hessian": [1.0, 1.0, math.nan, math.nan, 1.0]},
    ],
    ids=str,
)
def test_a_tree_that_contradicts_itself_is_refused(changes):
    assert Forest.from_xgboost_json(model_of([GOOD])).depth == 2
    with pytest.raises(ArtifactError):
        Forest.from_xgboost_json(model_of([{**GOOD, **changes}]))


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b"5", b"\xff\xfe", b'{"learner": 5}', b'{"learner": {}}', b"[" * 100_000,
        model_of([], width=0), model_of([], base="many"), model_of([], base="NaN"), model_of([], base="inf"),
        model_of([], base="[1E0,2E0]"), model_of([GOOD], num_target="2"), model_of({"a": 1}), model_of([5]),
    ],
    ids=lambda text: repr(text)[:30],
)  # fmt: skip
def test_what_is_no_model_is_refused(text):
    with pytest.raises(ArtifactError):
        Forest.from_xgboost_json(text)


def test_any_cut_of_a_model_is_refused():
    X, y = data(50, 2)
    text = text_of(boosted(X, y, rounds=2, max_depth=2))
    for length in range(0, len(text), 37):
        with pytest.raises(ArtifactError):
            Forest.from_xgboost_json(text[:length])


def test_the_arrays_are_the_whole_of_a_forest():
    X, y = data(300, 4)
    forest = Forest.from_xgboost_json(text_of(boosted(X, y, base_score=0.3)))
    arrays = forest.arrays()
    assert {name: array.dtype for name, array in arrays.items()} == {
        "feature": np.int32, "threshold": np.float32, "leaf": np.float32, "base": np.float64, "width": np.int64,
        "mean": np.float32,
    }  # fmt: skip
    assert Forest.from_arrays(arrays).predict(X).tolist() == forest.predict(X).tolist()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("leaf", lambda array: array[:, :3]),
        ("leaf", lambda array: array[0]),
        ("leaf", lambda array: array[1:]),
        ("leaf", lambda array: np.full_like(array, np.nan)),
        ("leaf", lambda array: array.astype(np.float64) + 1e300),
        ("leaf", lambda array: array.astype(str)),
        ("leaf", lambda array: array.astype(object)),
        ("feature", lambda array: array + 2**20),
        ("feature", lambda array: array - 9),
        ("feature", lambda array: array.astype(np.float32) + np.nan),
        ("feature", lambda array: array[:, :-1]),
        ("threshold", lambda array: np.full_like(array, np.nan)),
        ("threshold", lambda array: np.zeros(array.shape, np.int64)),
        ("threshold", lambda array: array.T),
        ("mean", lambda array: array[:, :-1]),
        ("mean", lambda array: array * np.nan),
        ("mean", lambda array: array.astype(str)),
        ("base", lambda array: np.float64("nan")),
        ("base", lambda array: np.zeros(2)),
        ("base", lambda array: np.array("x")),
        ("width", lambda array: np.int64(0)),
        ("width", lambda array: np.int64(2**40)),
        ("width", lambda array: np.float64("inf")),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(name, change):
    weights = {"sum_hessian": [2.0, 1.0, 1.0, 1.0, 1.0]}
    arrays = Forest.from_xgboost_json(model_of([{**GOOD, **weights}, {**chain(1), **weights}])).arrays()
    with pytest.raises(ArtifactError):
        Forest.from_arrays({**arrays, name: change(arrays[name])})
    if name == "mean":
        return  # not needed for a prediction
    with pytest.raises(ArtifactError, match=name):
        Forest.from_arrays({other: array for other, array in arrays.items() if other != name})


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 4), (1, 5, 2)])
def test_rows_of_another_width_are_refused(shape):
    with pytest.raises(ModelError, match="rows of 2 features"):
        Forest.from_xgboost_json(model_of([GOOD])).predict(np.zeros(shape, np.float32))
