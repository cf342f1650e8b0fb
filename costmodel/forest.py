"""Boosted trees without the library that grew them: complete arrays, walked level by level in numpy.

A tree of depth d becomes 2**d - 1 nodes and 2**d leaves in breadth-first order; a shallower branch is continued by nodes
that lead to its own leaf either way. All trees and rows step down together, so a prediction is d gathers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelcast.errors import ArtifactError, ModelError

#: Deeper trees would need arrays of more than 2**16 nodes each.
MAX_DEPTH = 16
#: More features than any schema has; twice as many fit the nodes' int32.
MAX_WIDTH = 2**20

#: Rows that are walked at a time: bounds the arrays of one entry a tree and row.
_CHUNK_ROWS = 2048

#: Objectives of xgboost whose prediction is the sum of the trees itself, not a function of it.
_IDENTITY_OBJECTIVES = (
    "reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "rank:pairwise", "rank:ndcg", "rank:map",
)  # fmt: skip

_LARGEST = float(np.finfo(np.float32).max)
_BROKEN_JSON = (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError)


class Forest:
    """A sum of regression trees.

    Attributes:
        feature: int32 [trees, nodes]; column to look at. Columns from ``width`` on are the same features again, with
            NaN taken as larger than everything; below, as smaller. So a missing value needs no branch of its own.
        threshold: float32 [trees, nodes]; a row goes right where its value is at least this.
        leaf: float32 [trees, leaves].
        base: added to every prediction.
        width: number of features.
    """

    def __init__(
        self, feature: np.ndarray, threshold: np.ndarray, leaf: np.ndarray, *, base: float, width: int
    ) -> None:
        trees, leaves = leaf.shape if leaf.ndim == 2 else (0, 0)
        depth = max(leaves.bit_length() - 1, 0)
        if (
            leaves != 1 << depth
            or depth > MAX_DEPTH
            or feature.shape != (trees, leaves - 1)
            or threshold.shape != feature.shape
            or (feature.dtype.kind, threshold.dtype.kind, leaf.dtype.kind) != ("i", "f", "f")
            or not np.isfinite(base)
            or not 1 <= width <= MAX_WIDTH
            or (feature.size and (feature.min() < 0 or feature.max() >= 2 * width))
            or not (np.abs(leaf) <= _LARGEST).all()
            or np.isnan(threshold).any()
        ):
            raise ArtifactError("The trees' arrays contradict each other.")
        self.feature = feature.astype(np.int32)
        self.threshold = threshold.astype(np.float32)
        self.leaf = leaf.astype(np.float32)
        self.base = float(base)
        self.width = int(width)
        self.depth = depth
        self._flat_feature = self.feature.astype(np.intp).ravel()
        self._flat_threshold = self.threshold.ravel()
        self._flat_leaf = self.leaf.ravel()
        self._node_start = (np.arange(trees, dtype=np.intp) * (leaves - 1))[:, None]
        self._leaf_start = (np.arange(trees, dtype=np.intp) * leaves)[:, None]

    @property
    def trees(self) -> int:
        """Number of trees."""
        return self.leaf.shape[0]

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Predict rows.

        Args:
            features: float32 [rows, width]; NaN is a missing value.

        Returns:
            float64 [rows]. Equal to xgboost's own prediction up to the order of a float32 sum.

        Raises:
            ModelError: another number of features.
        """
        if features.ndim != 2 or features.shape[1] != self.width:
            raise ModelError(
                f"The trees take rows of {self.width} features; an array of the shape {features.shape} was given."
            )
        chunks = [self._walk(features[at : at + _CHUNK_ROWS]) for at in range(0, len(features), _CHUNK_ROWS)]
        return np.concatenate(chunks) if chunks else np.zeros(0)

    def _walk(self, features: np.ndarray) -> np.ndarray:
        rows, width = features.shape
        missing = np.isnan(features)
        both = np.empty((rows, 2 * width), dtype=np.float32)
        both[:, :width] = np.where(missing, -np.inf, features)
        both[:, width:] = np.where(missing, np.inf, features)
        values = both.ravel()
        row_start = np.arange(rows, dtype=np.intp) * (2 * width)
        node = np.zeros((self.trees, rows), dtype=np.intp)
        for _ in range(self.depth):
            at = node + self._node_start
            right = values.take(self._flat_feature.take(at) + row_start) >= self._flat_threshold.take(at)
            node *= 2
            node += 1
            node += right
        node -= (1 << self.depth) - 1
        node += self._leaf_start
        return self._flat_leaf.take(node).sum(axis=0, dtype=np.float64) + self.base

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays to save; :meth:`from_arrays` is the inverse."""
        return {
            "feature": self.feature,
            "threshold": self.threshold,
            "leaf": self.leaf,
            "base": np.array(self.base, dtype=np.float64),
            "width": np.array(self.width, dtype=np.int64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Forest:
        """Read what :meth:`arrays` gave.

        Raises:
            ArtifactError: an array is missing, or they contradict each other.
        """
        try:
            return cls(
                arrays["feature"],
                arrays["threshold"],
                arrays["leaf"],
                base=float(arrays["base"]),
                width=int(arrays["width"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArtifactError(f"Not the arrays of a forest ({type(error).__name__}: {error}).") from error

    @classmethod
    def from_xgboost_json(cls, text: str | bytes) -> Forest:
        """Read a regression model in xgboost's JSON format (``Booster.save_raw("json")``).

        Raises:
            ArtifactError: not such a model, or one with categorical splits, several outputs, or an objective that
                transforms the sum of the trees.
        """
        try:
            learner = json.loads(text)["learner"]
            objective = learner["objective"]["name"]
            if objective not in _IDENTITY_OBJECTIVES:
                raise ValueError(f"the objective {objective} is none of {', '.join(_IDENTITY_OBJECTIVES)}")
            if (
                max(int(learner["learner_model_param"].get(name, 0)) for name in ("num_class", "num_target"))
                > 1
            ):
                raise ValueError("it has several outputs")
            width = int(learner["learner_model_param"]["num_feature"])
            # xgboost 3 writes a list in text, "[5E-1]"; older versions a number in text.
            base = float(str(learner["learner_model_param"]["base_score"]).strip("[]"))
            trees = learner["gradient_booster"]["model"]["trees"]
            depth = max((_depth(tree) for tree in trees), default=0)
        except (*_BROKEN_JSON, RecursionError) as error:
            raise ArtifactError(
                f"Not an xgboost regression model ({type(error).__name__}: {error})."
            ) from error
        if depth > MAX_DEPTH:
            raise ArtifactError(f"The model has a tree of depth {depth}; at most {MAX_DEPTH} are supported.")
        leaves = 1 << depth
        feature = np.zeros((len(trees), leaves - 1), dtype=np.int32)
        threshold = np.full((len(trees), leaves - 1), np.inf, dtype=np.float32)
        leaf = np.zeros((len(trees), leaves), dtype=np.float32)
        try:
            for index, tree in enumerate(trees):
                _fill(tree, depth, width, feature[index], threshold[index], leaf[index])
        except _BROKEN_JSON as error:
            raise ArtifactError(f"Not an xgboost tree ({type(error).__name__}: {error}).") from error
        return cls(feature, threshold, leaf, base=base, width=width)


def _depth(tree: Mapping[str, Any]) -> int:
    depths = [0] * len(tree["left_children"])
    deepest = 0
    for node, (left, right) in enumerate(zip(tree["left_children"], tree["right_children"], strict=True)):
        for child in (left, right):
            if child != -1:
                if child <= node:  # parents come first in the format; anything else could be a cycle
                    raise ValueError("a tree's child stands before its parent")
                depths[child] = depths[node] + 1
                deepest = max(deepest, depths[child])
    return deepest


def _fill(
    tree: Mapping[str, Any],
    depth: int,
    width: int,
    feature: np.ndarray,
    threshold: np.ndarray,
    leaf: np.ndarray,
) -> None:
    if any(tree.get("split_type", ())):
        raise ValueError("a tree has a categorical split")
    left, right = tree["left_children"], tree["right_children"]
    pending = [(0, 0, 0)]  # node of the tree, place in the complete tree, level
    while pending:
        node, place, level = pending.pop()
        if left[node] == -1:
            # Every leaf below this place holds the value, so it does not matter which way the walk goes on.
            first = (place + 1 << depth - level) - (1 << depth)
            leaf[first : first + (1 << depth - level)] = tree["split_conditions"][node]
            continue
        index = tree["split_indices"][node]
        if right[node] == -1 or index not in range(width):
            raise ValueError(f"node {node} has one child, or looks at feature {index} of {width}")
        feature[place] = index + (0 if tree["default_left"][node] else width)
        # A threshold of minus infinity sends every value right and only the missing left, which stand for it here.
        threshold[place] = max(tree["split_conditions"][node], -_LARGEST)
        pending.append((left[node], 2 * place + 1, level + 1))
        pending.append((right[node], 2 * place + 2, level + 1))
