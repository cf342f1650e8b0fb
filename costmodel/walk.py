"""The walk through several forests over the same features: compiled where it was built, in numpy elsewhere.

Both take complete trees level by level and add up the leaves of each forest apart. The compiled one is in ``_walk.c``, which
says how. In numpy all trees and rows step down together, so a prediction is a few gathers a level: the nodes of one level of
all trees lie one after the other, and the children of node i of a level are the nodes 2 i and 2 i + 1 of the next, whatever
tree it is of.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.errors import ModelError
from kernelcast.kernels.extension import load_extension

if TYPE_CHECKING:
    from kernelcast.costmodel.forest import Forest

_walk, _WHY_NUMPY = load_extension("kernelcast.costmodel._walk", version=1)
_COMPILED = _walk is not None

#: Trees times rows that numpy walks at a time: what is read and written of them stays in a core's cache.
_CHUNK = 16384
#: Shapes of chunks that a thread has arrays for.
_MOST_SHAPES = 8

_local = threading.local()


def engine() -> str:
    """What walks forests here: ``compiled``, or ``numpy`` where kernelcast was installed without a C compiler."""
    return "compiled" if _COMPILED else "numpy"


def described_engine() -> str:
    """:func:`engine`, and where it is numpy why, such as ``numpy (not compiled)``."""
    return "compiled" if _COMPILED else f"numpy ({_WHY_NUMPY})"


class Walk:
    """Several forests over the same features.

    Args:
        forests: at least one; all have the same width. They are copied.
        native: whether the compiled walk is used where there is one.

    Attributes:
        width: number of features.
        engine: what walks them, ``compiled`` or ``numpy``.

    Raises:
        ModelError: there is none, or their widths differ.
    """

    def __init__(self, forests: Sequence[Forest], *, native: bool = True) -> None:
        if not forests or len({forest.width for forest in forests}) > 1:
            raise ModelError(
                f"Forests of the widths {[forest.width for forest in forests]} cannot be walked as one."
            )
        self.width = forests[0].width
        self._forests = tuple(forests)
        self._native = native
        looked_at = np.unique(np.concatenate([forest.feature.ravel() for forest in forests]))
        # More columns than a compiled node can name are no schema's.
        native = native and _COMPILED and len(looked_at) <= _walk.MAX_COLUMNS
        self.engine = "compiled" if native else "numpy"
        self._packed: Any = None
        self._levels: _Levels | None = None
        if native:
            column_of = np.zeros(2 * self.width, dtype=np.uint16)
            column_of[looked_at] = np.arange(len(looked_at))
            packed = [
                (
                    forest.depth,
                    forest.base,
                    np.ascontiguousarray(column_of[forest.feature]),
                    np.ascontiguousarray(forest.threshold),
                    np.ascontiguousarray(forest.leaf),
                )
                for forest in forests
            ]
            self._packed = _walk.pack(self.width, looked_at, tuple(packed))
        else:
            self._levels = _Levels(forests, looked_at)

    def __reduce__(self) -> tuple[Any, ...]:
        # What was packed is memory of this process.
        return _again, (self._forests, self._native)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Predict rows.

        Args:
            features: float32 [rows, width]; NaN is a missing value.

        Returns:
            float64 [forests, rows]. Equal to xgboost's own predictions up to the order of a float32 sum.

        Raises:
            ModelError: another number of features.
        """
        self.check(features)
        out = np.empty((len(self._forests), len(features)))
        if self._levels is None:
            _walk.walk(self._packed, np.ascontiguousarray(features, dtype=np.float32), out)
        else:
            self._levels.predict(features, out)
        return out

    def check(self, features: np.ndarray) -> None:
        """Raise a ModelError where features are no rows of this width."""
        if features.ndim != 2 or features.shape[1] != self.width:
            raise ModelError(
                f"The trees take rows of {self.width} features; an array of the shape {features.shape} was given."
            )


def _again(forests: tuple[Forest, ...], native: bool) -> Walk:
    return Walk(forests, native=native)


class _Levels:
    """The walk in numpy.

    Args:
        forests: of one width.
        looked_at: int32 [columns], what their nodes look at, sorted.
    """

    def __init__(self, forests: Sequence[Forest], looked_at: np.ndarray) -> None:
        self.width = forests[0].width
        self._base = np.array([forest.base for forest in forests])[:, None]
        # The deepest first: where some trees end, those that go on are the first ones.
        order = sorted(range(len(forests)), key=lambda place: -forests[place].depth)
        firsts = [0, *itertools.accumulate(forests[place].trees for place in order)]
        # The features that some node sends right where they are missing are there twice.
        twice = looked_at[looked_at >= self.width]
        self._twice = (twice - self.width).astype(np.intp)
        self._stages: list[_Stage] = []
        level = 0
        for depth in sorted({forest.depth for forest in forests}):
            going = [forests[place] for place in order if forests[place].depth >= depth]
            levels = []
            while level < depth:
                nodes = slice((1 << level) - 1, (2 << level) - 1)
                feature = np.concatenate([forest.feature[:, nodes].ravel() for forest in going])
                threshold = np.concatenate([forest.threshold[:, nodes].ravel() for forest in going])
                column = np.where(feature < self.width, feature, self.width + np.searchsorted(twice, feature))
                levels.append((column.astype(np.intp), threshold))
                level += 1
            ending = [
                _Part(
                    place, slice(first, last), first << depth, forests[place].leaf.astype(np.float64).ravel()
                )
                for place, first, last in zip(order, firsts, firsts[1:], strict=False)
                if forests[place].depth == depth
            ]
            self._stages.append(_Stage(sum(forest.trees for forest in going), tuple(levels), tuple(ending)))
        self._trees = firsts[-1]

    def predict(self, features: np.ndarray, out: np.ndarray) -> None:
        """Predict rows into ``out``, [forests, rows]."""
        step = max(_CHUNK // max(self._trees, 1), 1)
        for start in range(0, len(features), step):
            self._walk(features[start : start + step], out[:, start : start + step])
        out += self._base

    def _walk(self, features: np.ndarray, out: np.ndarray) -> None:
        """Walk some rows; the sums of the leaves go to ``out``, [forests, rows]."""
        rows = len(features)
        values = np.empty((rows, self.width + len(self._twice)), dtype=np.float32)
        values[:, : self.width] = features
        # A missing value is at least no threshold, so it goes left; as infinity it goes right.
        np.fmin(features.take(self._twice, axis=1), np.inf, out=values[:, self.width :])
        flat = values.ravel()
        before: np.ndarray | None = None
        for stage in self._stages:
            node, at, value, threshold, right, row_start = _buffers(rows, stage.trees, values.shape[1])
            if before is None:
                node[:] = np.arange(stage.trees, dtype=np.intp)
            else:
                node[:] = before[:, : stage.trees]
            for columns, thresholds in stage.levels:
                columns.take(node, out=at, mode="clip")
                at += row_start
                flat.take(at, out=value, mode="clip")
                thresholds.take(node, out=threshold, mode="clip")
                np.greater_equal(value, threshold, out=right)
                node += node
                node += right
            for part in stage.ending:
                leaves = part.leaves.take(node[:, part.trees] - part.first)
                np.add.reduce(leaves, axis=1, out=out[part.place])
            before = node


@dataclass(frozen=True, slots=True)
class _Part:
    """A forest: its place in the prediction, its trees, where its leaves start among those of all, and its leaves."""

    place: int
    trees: slice
    first: int
    leaves: np.ndarray


@dataclass(frozen=True, slots=True)
class _Stage:
    """Some levels that the first so many trees have: which value each node compares, and with what; and who ends then."""

    trees: int
    levels: tuple[tuple[np.ndarray, np.ndarray], ...]
    ending: tuple[_Part, ...]


def _buffers(rows: int, trees: int, columns: int) -> tuple[np.ndarray, ...]:
    """Arrays [rows, trees] of this thread.

    intp twice, float32 twice and bool, all with anything in them, and where each row of so many columns begins.
    """
    shape = rows, trees, columns
    held: dict[tuple[int, int, int], tuple[np.ndarray, ...]] | None = getattr(_local, "held", None)
    if held is None:
        held = _local.held = {}
    found = held.get(shape)
    if found is None:
        flat: list[np.ndarray] | None = getattr(_local, "flat", None)
        if flat is None or len(flat[0]) < rows * trees:
            kinds = (np.intp, np.intp, np.float32, np.float32, np.bool_)
            flat = _local.flat = [np.empty(max(rows * trees, _CHUNK), dtype=kind) for kind in kinds]
            held.clear()
        elif len(held) >= _MOST_SHAPES:
            held.clear()
        starts = np.repeat(np.arange(0, rows * columns, columns, dtype=np.intp), trees).reshape(rows, trees)
        found = held[shape] = (*(each[: rows * trees].reshape(rows, trees) for each in flat), starts)
    return found
