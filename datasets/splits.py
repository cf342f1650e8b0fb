"""Splits of measured problems into a training side and a test side, so that no shape is on both.

Rows are never split by themselves: the candidates of one problem, and the dtypes and layouts of one shape, tell so much
of each other that a model tested on a shape it has seen looks far better than it is. Everything here takes shapes as
``shape_id`` (:func:`kernelcast.datasets.record.shape_id`) and needs numpy only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError, UnknownNameError

#: Shape ids of rows: a list, a numpy array or a pandas column of strings.
ShapeIds = Sequence[str] | np.ndarray


def by_shape(shape_ids: ShapeIds, folds: int = 5, seed: int = 0) -> np.ndarray:
    """The fold of each row: rows of one shape share it, and folds differ by at most one shape.

    The same set of shapes and the same seed give the same folds, whatever the order and number of rows.

    Args:
        shape_ids: [rows] shape of each row.
        folds: number of folds, at least 2.
        seed: which shapes fall together.

    Returns:
        [rows] int64, from 0 to ``folds - 1``.

    Raises:
        KernelcastError: fewer than two folds, or fewer shapes than folds.
    """
    shapes, number_of_row = np.unique(np.asarray(shape_ids, dtype=np.str_), return_inverse=True)
    if folds < 2:
        raise KernelcastError(f"folds is {folds}; a split needs at least 2.")
    if len(shapes) < folds:
        raise KernelcastError(
            f"{len(shapes)} shapes cannot be split into {folds} folds. Use more data, or fewer folds."
        )
    fold_of_shape = np.empty(len(shapes), dtype=np.int64)
    fold_of_shape[np.random.default_rng(seed).permutation(len(shapes))] = np.arange(len(shapes)) % folds
    return fold_of_shape[number_of_row]


class ShapeKFold:
    """:func:`by_shape` as a scikit-learn splitter.

    Where the estimator takes no groups of its own: ``cross_val_score(..., groups=shape_ids, cv=ShapeKFold(5, seed=0))``.
    For a :class:`kernelcast.costmodel.CostModel` groups are the problems of the rows; it takes the folds as a list::

        with sklearn.config_context(enable_metadata_routing=True):
            model = CostModel().set_fit_request(groups=True).set_score_request(groups=True)
            folds = list(ShapeKFold(5, seed=0).split(X, y, groups=shape_ids))
            cross_val_score(model, X, y, params={"groups": problem_ids}, cv=folds)
    """

    def __init__(self, folds: int = 5, *, seed: int = 0) -> None:
        self.folds = folds
        self.seed = seed

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """The number of folds."""
        return self.folds

    def split(
        self, X: Any = None, y: Any = None, groups: ShapeIds | None = None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(training rows, test rows) of each fold; ``groups`` are the shape ids of the rows.

        Raises:
            KernelcastError: no groups; otherwise as :func:`by_shape`.
        """
        if groups is None:
            raise KernelcastError("ShapeKFold needs groups: the shape_id of each row.")
        fold_of_row = by_shape(groups, self.folds, self.seed)
        for fold in range(self.folds):
            yield np.flatnonzero(fold_of_row != fold), np.flatnonzero(fold_of_row == fold)


def by_workload(
    frame: Mapping[str, Any], train: str | Collection[str], test: str | Collection[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Train on some workloads, test on others. Shapes that occur in both leave the training side.

    Args:
        frame: columns ``workload`` and ``shape_id``, as :meth:`kernelcast.datasets.store.Store.frame` returns them.
        train: one or more workloads.
        test: one or more other workloads.

    Returns:
        Positions of the training rows and of the test rows, ascending, int64.

    Raises:
        UnknownNameError: no row is of a workload that is named.
        KernelcastError: a workload is on both sides, or every shape to train on is tested.
    """
    workloads = np.asarray(frame["workload"], dtype=np.str_)
    shapes = np.asarray(frame["shape_id"], dtype=np.str_)
    train_names, test_names = ({names} if isinstance(names, str) else set(names) for names in (train, test))
    known = np.unique(workloads).tolist()
    for name in sorted(train_names | test_names):
        if name not in known:
            raise UnknownNameError("workload", name, known)
    if train_names & test_names:
        both = ", ".join(sorted(train_names & test_names))
        raise KernelcastError(f"{both} cannot be both trained on and tested on. Name it on one side.")
    tested = np.isin(workloads, sorted(test_names))
    trained = np.isin(workloads, sorted(train_names)) & ~np.isin(shapes, np.unique(shapes[tested]))
    if not trained.any():
        raise KernelcastError(
            f"Every shape of {', '.join(sorted(train_names))} is in {', '.join(sorted(test_names))} too: nothing is left "
            "to train on. Train on other workloads."
        )
    return np.flatnonzero(trained), np.flatnonzero(tested)
