from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kernelcast.datasets.splits import ShapeKFold, by_shape, by_workload
from kernelcast.errors import KernelcastError, UnknownNameError

shape_lists = st.lists(st.sampled_from([f"shape-{i}" for i in range(12)]), min_size=1, max_size=60)


@given(shape_lists, st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_no_shape_is_in_two_folds(shapes: list[str], folds: int, seed: int) -> None:
    assume(len(set(shapes)) >= folds)
    fold_of_row = by_shape(shapes, folds, seed)
    assert fold_of_row.shape == (len(shapes),)
    folds_of_shape: dict[str, set[int]] = {}
    for shape, fold in zip(shapes, fold_of_row.tolist(), strict=True):
        folds_of_shape.setdefault(shape, set()).add(fold)
    assert all(len(found) == 1 for found in folds_of_shape.values())
    sizes = np.bincount([next(iter(found)) for found in folds_of_shape.values()], minlength=folds)
    assert len(sizes) == folds
    assert sizes.max() - sizes.min() <= 1


@given(shape_lists, st.integers(0, 100), st.randoms())
def test_the_order_and_number_of_rows_do_not_matter(shapes: list[str], seed: int, random: object) -> None:
    assume(len(set(shapes)) >= 2)
    shuffled = [*shapes, *shapes]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = dict(zip(shapes, by_shape(shapes, 2, seed).tolist(), strict=True))
    second = dict(zip(shuffled, by_shape(shuffled, 2, seed).tolist(), strict=True))
    assert first == second


def test_the_seed_decides() -> None:
    shapes = [str(i) for i in range(100)]
    assert by_shape(shapes, 5, 1).tolist() == by_shape(shapes, 5, 1).tolist()
    assert by_shape(shapes, 5, 1).tolist() != by_shape(shapes, 5, 2).tolist()
    assert np.bincount(by_shape(shapes, 5, 1)).tolist() == [20] * 5


@pytest.mark.parametrize(
    ("shapes", "folds", "message"), [(["a", "b"], 1, "at least 2"), (["a", "b", "a"], 3, "2 shapes")]
)
def test_impossible_folds_are_refused(shapes: list[str], folds: int, message: str) -> None:
    with pytest.raises(KernelcastError, match=message):
        by_shape(shapes, folds)


def test_the_splitter_covers_every_row_once() -> None:
    shapes = ["a", "b", "b", "c", "d", "a", "e"]
    splits = list(ShapeKFold(3, seed=4).split(np.zeros(7), groups=shapes))
    assert len(splits) == ShapeKFold(3).get_n_splits() == 3
    assert sorted(np.concatenate([test for _, test in splits]).tolist()) == list(range(7))
    for train, test in splits:
        assert sorted([*train, *test]) == list(range(7))
        assert {shapes[i] for i in train}.isdisjoint(shapes[i] for i in test)
    with pytest.raises(KernelcastError, match="shape_id"):
        next(ShapeKFold(3).split(np.zeros(7)))


def test_the_splitter_works_in_scikit_learn() -> None:
    model_selection = pytest.importorskip("sklearn.model_selection")
    dummy = pytest.importorskip("sklearn.dummy").DummyRegressor()
    shapes = [str(i % 10) for i in range(40)]
    scores = model_selection.cross_val_score(
        dummy, np.zeros((40, 1)), np.arange(40.0), groups=shapes, cv=ShapeKFold(5)
    )
    assert len(scores) == 5


rows = st.lists(
    st.tuples(st.sampled_from(["hf", "timm", "random"]), st.sampled_from("abcdefgh")), min_size=1, max_size=60
)


@given(rows, st.sampled_from([("hf",), ("hf", "random")]), st.just(("timm",)))
def test_no_shape_is_on_both_sides(
    table: list[tuple[str, str]], train: tuple[str, ...], test: tuple[str, ...]
) -> None:
    frame = pd.DataFrame(table, columns=["workload", "shape_id"])
    assume(set(train) | set(test) <= set(frame["workload"]))
    tested_shapes = {shape for workload, shape in table if workload in test}
    expected = [
        i for i, (workload, shape) in enumerate(table) if workload in train and shape not in tested_shapes
    ]
    assume(expected)
    train_rows, test_rows = by_workload(frame, train, test)
    assert train_rows.tolist() == expected
    assert test_rows.tolist() == [i for i, (workload, _) in enumerate(table) if workload in test]
    shapes = frame["shape_id"].to_numpy()
    assert set(shapes[train_rows]).isdisjoint(shapes[test_rows])


def test_bad_workloads_are_refused() -> None:
    frame = pd.DataFrame({"workload": ["hf", "timm", "hf"], "shape_id": ["a", "a", "a"]})
    with pytest.raises(UnknownNameError, match=r"'tim'.*Did you mean 'timm'"):
        by_workload(frame, "hf", "tim")
    with pytest.raises(KernelcastError, match="hf cannot be both"):
        by_workload(frame, ["hf"], ["hf", "timm"])
    with pytest.raises(KernelcastError, match="nothing is left"):
        by_workload(frame, "hf", "timm")
