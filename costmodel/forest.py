"""Boosted trees without the library that grew them: complete arrays, walked by :mod:`kernelcast.costmodel.walk`.

A tree of depth d becomes 2**d - 1 nodes and 2**d leaves in breadth-first order; a shallower branch is continued by nodes
that lead to its own leaf either way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.costmodel.walk import Walk
from kernelcast.errors import ArtifactError, ModelError

#: Deeper trees would need arrays of more than 2**16 nodes each.
MAX_DEPTH = 16
#: More features than any schema has; twice as many fit the nodes' int32.
MAX_WIDTH = 2**20

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
        mean: float32 [trees, nodes]; what a tree predicts on average of the training rows that came to a node. None
            where that is not known: it serves :meth:`contributions` alone.

    Raises:
        ArtifactError: the arrays contradict each other.
    """

    def __init__(
        self,
        feature: np.ndarray,
        threshold: np.ndarray,
        leaf: np.ndarray,
        *,
        base: float,
        width: int,
        mean: np.ndarray | None = None,
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
            or not (
                mean is None
                or (
                    mean.shape == feature.shape
                    and mean.dtype.kind == "f"
                    and (np.abs(mean) <= _LARGEST).all()
                )
            )
        ):
            raise ArtifactError("The trees' arrays contradict each other.")
        self.feature = feature.astype(np.int32)
        self.threshold = threshold.astype(np.float32)
        self.leaf = leaf.astype(np.float32)
        self.base = float(base)
        self.width = int(width)
        self.depth = depth
        self.mean = None if mean is None else mean.astype(np.float32)

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
        return self._alone.predict(features)[0]

    @cached_property
    def _alone(self) -> Walk:
        return Walk([self])

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own walk: one that was compiled holds memory of this process.
        return {name: value for name, value in self.__dict__.items() if name != "_alone"}

    def contributions(self, features: np.ndarray) -> tuple[float, np.ndarray]:
        """What each feature adds to each prediction.

        A tree predicts its mean at the root; each step down changes that by the difference of two nodes' means, which
        counts for the feature that the step looked at (Saabas, "Interpreting random forests", 2014; xgboost's
        ``approx_contribs``).

        Args:
            features: float32 [rows, width]; NaN is a missing value.

        Returns:
            The prediction where nothing is known, and float64 [rows, width]; a row's sum with the former is its
            prediction up to rounding.

        Raises:
            ModelError: another number of features, or the trees do not say how many training rows came to their nodes.
        """
        if self.mean is None:
            raise ModelError(
                "The trees hold no means of their nodes, so they cannot explain themselves. Train again."
            )
        self._alone.check(features)
        features = np.asarray(features, dtype=np.float32)
        value_of = np.concatenate([self.mean, self.leaf], axis=1).astype(np.float64)
        tree, row = np.arange(self.trees)[:, None], np.arange(len(features))
        node = np.zeros((self.trees, len(features)), dtype=np.intp)
        found = np.zeros(features.shape)
        for _ in range(self.depth):
            looked_at = self.feature[tree, node]
            column = looked_at % self.width
            value = features[row, column]
            right = np.where(np.isnan(value), looked_at >= self.width, value >= self.threshold[tree, node])
            child = 2 * node + 1 + right
            np.add.at(
                found,
                (np.broadcast_to(row, node.shape), column),
                value_of[tree, child] - value_of[tree, node],
            )
            node = child
        return self.base + float(value_of[:, 0].sum()), found

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays to save; :meth:`from_arrays` is the inverse."""
        found: dict[str, np.ndarray] = {
            "feature": self.feature,
            "threshold": self.threshold,
            "leaf": self.leaf,
            "base": np.array(self.base, dtype=np.float64),
            "width": np.array(self.width, dtype=np.int64),
        }
        return found if self.mean is None else {**found, "mean": self.mean}

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
                mean=arrays.get("mean"),
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
        mean = np.zeros((len(trees), leaves - 1), dtype=np.float32)
        try:
            means = [_means(tree) for tree in trees]
            for index, tree in enumerate(trees):
                _fill(
                    tree,
                    depth,
                    width,
                    means[index],
                    feature[index],
                    threshold[index],
                    leaf[index],
                    mean[index],
                )
        except _BROKEN_JSON as error:
            raise ArtifactError(f"Not an xgboost tree ({type(error).__name__}: {error}).") from error
        known = all(each is not None for each in means)
        return cls(feature, threshold, leaf, base=base, width=width, mean=mean if known else None)


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
    means: list[float] | None,
    feature: np.ndarray,
    threshold: np.ndarray,
    leaf: np.ndarray,
    mean: np.ndarray,
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
            for below in range(depth - level):
                first = (place + 1 << below) - 1
                mean[first : first + (1 << below)] = tree["split_conditions"][node]
            continue
        index = tree["split_indices"][node]
        if right[node] == -1 or index not in range(width):
            raise ValueError(f"node {node} has one child, or looks at feature {index} of {width}")
        feature[place] = index + (0 if tree["default_left"][node] else width)
        threshold[place] = tree["split_conditions"][node]
        mean[place] = 0.0 if means is None else means[node]
        pending.append((left[node], 2 * place + 1, level + 1))
        pending.append((right[node], 2 * place + 2, level + 1))


def _means(tree: Mapping[str, Any]) -> list[float] | None:
    """What the tree predicts on average below each of its nodes, by the weights of the training rows; None without them."""
    weights = tree.get("sum_hessian")
    if weights is None:
        return None
    if not all(0.0 <= weight < math.inf for weight in weights):
        raise ValueError("a node has a weight that is none")
    means = [float(value) for value in tree["split_conditions"]]
    for node in reversed(range(len(means))):
        left, right = tree["left_children"][node], tree["right_children"][node]
        if left != -1:
            below = float(weights[left]), float(weights[right])
            total = sum(below)
            share = below[0] / total if total > 0 else 0.5
            means[node] = share * means[left] + (1.0 - share) * means[right]
    return means
