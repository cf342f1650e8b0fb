"""The estimator: gradient-boosted trees over features, in scikit-learn's style. Fitting needs xgboost; see forest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kernelcast.costmodel.forest import Forest
from kernelcast.costmodel.heads import compress, expand, relative_log
from kernelcast.costmodel.uncertainty import ErrorHead, fit_error, folds_of
from kernelcast.errors import MissingExtraError, ModelError

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils.validation import check_is_fitted
except ImportError as _error:
    raise MissingExtraError("scikit-learn", "train", "Fitting a cost model") from _error

#: Size of the head that predicts a problem's overall level.
_LEVEL_TREES = 20
_SMALL_DEPTH = 5
_SMALL_RATE = 0.3

#: In the teachers' fit a candidate r times slower than the problem's best counts ``r ** -focus``: where differences are
#: predicted, and where compressed slowdowns are.
_TEACHER_FOCUS = 3.0
_SLOWDOWN_FOCUS = 1.0
_TEACHER_LEAST_LEAF = 2.0
#: Share of the measurement itself in what the order learns of a measured row.
_OWN_SHARE = 0.3
#: No leaf needs more than this share of all weight: with few problems the slow candidates together weigh next to nothing.
_LEAST_SHARE = 0.005
#: However slow a candidate, it counts something, so that its prediction is not just anything.
_LEAST_WEIGHT = 0.02
#: Least share of the features that each tree of a taught order sees.
_ORDER_COLUMNS = 0.6
#: Trees of the order that repeat the estimate, and how many it must have in all to afford them.
_ESTIMATE_TREES = 4
_LEAST_TREES = 32

#: Between the seeds of the teachers, so that models of neighbouring seeds share none.
_SEED_STEP = 100_003

#: Fewer values than this in the feature matrix are fitted on one thread.
_FEW_VALUES = 2_000_000


def differences(group: np.ndarray, target: np.ndarray, weights: np.ndarray) -> Callable[..., Any]:
    """An objective for xgboost: the weighted squared error of differences within a problem.

    A constant added to the predictions of one problem changes nothing, so no split is spent on the levels of problems.

    Args:
        group: number of the problem of each row, from 0 without gaps: [rows].
        target: what to predict up to a constant of the problem: [rows].
        weights: above 0: [rows].
    """
    total = np.bincount(group, weights=weights)

    def objective(predicted: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
        off = predicted - target
        return weights * (off - (np.bincount(group, weights=weights * off) / total)[group]), weights

    return objective


class CostModel(RegressorMixin, BaseEstimator):
    """Predicts the log latency of candidates, and so ranks them.

    Three heads share one feature matrix:

    * ``order`` predicts log latency up to a constant of the problem. It is the student of larger forests, the teachers: it
      learns what they say, of every row and of candidates that nobody measured, and comes close to them at a fraction of
      the cost of a prediction.
    * ``level`` predicts log latency as it is; its mean over a problem's candidates sets the level.
    * ``error`` predicts how far a predicted difference is off, fitted on problems that were left out in turn.

    A teacher is three forests, whose mean counts. All learn differences within a problem alone: the shape's own level, by
    far the largest part of the variance, cannot hide them. The first predicts log latency; the second the compressed log
    slowdown over the problem's best, and so spends its splits on candidates that may be the best; the third what an
    analytic estimate of the time leaves out, which holds for shapes that were never measured as well.

    Args:
        n_estimators: trees of the order.
        max_depth: depth of its trees.
        learning_rate: its shrinkage.
        min_child_weight: least sum of weights in a leaf.
        subsample: share of the rows that each tree sees.
        colsample_bytree: share of the features that each tree of a teacher sees; one of a taught order at least 60%.
        reg_lambda: L2 penalty of the leaves.
        focus: to the order a candidate that its teachers hold for r times slower than the problem's best has the weight
            ``r ** -focus``, at least a fiftieth; 0 weighs all alike.
        teachers: teachers, each with a seed of its own; 0 fits the order on the measured latencies.
        teacher_trees: trees of each forest of a teacher.
        teacher_depth: depth of their trees.
        teacher_rate: their shrinkage.
        error_folds: folds of problems for the error head; below 2, or with fewer problems, one error for all.
        random_state: seed.
        n_jobs: threads of the fit; where None, all cores, or one for a small matrix, on which threads that wait for one
            another cost more than they save, most of all on a busy machine. The result does not depend on it.
    """

    def __init__(
        self,
        n_estimators: int = 64,
        max_depth: int = 8,
        learning_rate: float = 0.3,
        min_child_weight: float = 1.0,
        subsample: float = 0.8,
        colsample_bytree: float = 0.4,
        reg_lambda: float = 0.5,
        focus: float = 12.0,
        teachers: int = 1,
        teacher_trees: int = 150,
        teacher_depth: int = 7,
        teacher_rate: float = 0.1,
        error_folds: int = 3,
        random_state: int = 0,
        n_jobs: int | None = None,
    ) -> None:
        self.n_estimators = n_estimators
        self.max_depth = max_depth
        self.learning_rate = learning_rate
        self.min_child_weight = min_child_weight
        self.subsample = subsample
        self.colsample_bytree = colsample_bytree
        self.reg_lambda = reg_lambda
        self.focus = focus
        self.teachers = teachers
        self.teacher_trees = teacher_trees
        self.teacher_depth = teacher_depth
        self.teacher_rate = teacher_rate
        self.error_folds = error_folds
        self.random_state = random_state
        self.n_jobs = n_jobs

    def fit(
        self,
        X: np.ndarray,
        y: np.ndarray,
        groups: np.ndarray,
        unlabelled: np.ndarray | None = None,
        unlabelled_groups: np.ndarray | None = None,
        estimate: int | None = None,
        sample_weight: np.ndarray | None = None,
        clusters: np.ndarray | None = None,
    ) -> CostModel:
        """Fit the three heads.

        Args:
            X: float32 [rows, features]; NaN is a missing value.
            y: log latency [rows], natural logarithm of microseconds, finite.
            groups: [rows] the problem of each row, in any order and of any type that numpy sorts.
            unlabelled: float32 [more rows, features] of candidates that were not measured; the teachers' answers on them
                are learned too. None, or without teachers: not used.
            unlabelled_groups: [more rows] their problems, which are none of ``groups``.
            estimate: the column that holds an estimate of the time, log2 and up to a constant of the problem.
            sample_weight: [rows] what each row counts, above 0; all alike where None.
            clusters: [rows] numbers of problems that are left out together when the error is fitted; each problem alone
                where None.

        Raises:
            ModelError: lengths differ, a weight is not positive, a target is not finite, a feature is infinite, or no problem has two candidates
                to compare.
        """
        with np.errstate(over="ignore"):
            X = np.ascontiguousarray(X, dtype=np.float32)
        y = np.asarray(y, dtype=np.float64)
        groups = np.asarray(groups)
        if X.ndim != 2 or y.shape != (len(X),) or groups.shape != (len(X),):
            raise ModelError(
                f"X is {X.shape}, y {y.shape}, groups {groups.shape}; their first lengths must be equal."
            )
        if not np.isfinite(y).all():
            raise ModelError(
                f"{int((~np.isfinite(y)).sum())} latencies are not finite; leave failures out of a fit."
            )
        if np.isinf(X).any():
            raise ModelError(
                f"{int(np.isinf(X).sum())} features are infinite in float32; NaN stands for a missing one."
            )
        weight = np.ones(len(X)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        if weight.shape != y.shape or not (np.isfinite(weight) & (weight > 0)).all():
            raise ModelError(
                f"The weights are {weight.shape}; there must be one above 0 for each of the {len(X)} rows."
            )
        _, group = np.unique(groups, return_inverse=True)
        counts = np.bincount(group) if len(group) else np.zeros(1)
        if counts.max() < 2:
            raise ModelError(
                "No problem has two measured candidates, so there is nothing to compare. Collect more."
            )

        mean = np.bincount(group, weights=y) / counts
        best = np.full(len(counts), np.inf)
        np.minimum.at(best, group, y)
        # A candidate alone in its problem is its own mean: it says nothing of differences, only of the level.
        pairs = counts[group] > 1
        compared, relative = X[pairs], (y - mean[group])[pairs]
        slowdown = (y - best[group])[pairs]
        _, compared_group = np.unique(group[pairs], return_inverse=True)

        self.n_features_in_ = X.shape[1]
        self.boosters_: dict[str, Any] = {}
        self.estimate_ = estimate
        more = None
        if unlabelled is not None and unlabelled_groups is not None and len(unlabelled):
            more = unlabelled, np.unique(unlabelled_groups, return_inverse=True)[1]
        self.boosters_["order"] = self._fit_order(
            compared,
            relative,
            slowdown,
            compared_group,
            weight[pairs],
            self.teachers,
            self.teacher_trees,
            more,
        )
        self.boosters_["level"] = self._boost(
            X, y - y.mean(), weight, _LEVEL_TREES, self.random_state, learning_rate=_SMALL_RATE, max_depth=_SMALL_DEPTH,
        )  # fmt: skip
        self.level_mean_ = float(y.mean())
        together = group if clusters is None else np.asarray(clusters)
        error = self._fit_error(compared, relative, slowdown, compared_group, weight[pairs], together[pairs])
        self.boosters_["error"], self.error_mean_ = error.booster, error.mean
        self.left_out_ = None if error.left_out is None else error.left_out.over(pairs)
        self.forests_ = {
            name: Forest.from_xgboost_json(bytes(booster.save_raw("json")))
            for name, booster in self.boosters_.items()
        }
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Log latency of rows that are all of one problem, up to a constant of the problem: [rows]."""
        check_is_fitted(self, "forests_")
        return relative_log(self.forests_, np.asarray(X, dtype=np.float32))

    def _boost(
        self,
        X: np.ndarray,
        target: np.ndarray,
        weights: np.ndarray | None,
        trees: int,
        seed: int,
        *,
        objective: Callable[..., Any] | None = None,
        start: Any = None,
        **changes: Any,
    ) -> Any:
        try:
            import xgboost
        except ImportError as error:
            raise MissingExtraError("xgboost", "train", "Fitting a cost model") from error
        parameters = {
            "objective": "reg:squarederror",
            "tree_method": "hist",
            "base_score": 0.0,
            "max_depth": self.max_depth,
            "learning_rate": self.learning_rate,
            "min_child_weight": self.min_child_weight,
            "subsample": self.subsample,
            "colsample_bytree": self.colsample_bytree,
            "reg_lambda": self.reg_lambda,
            "seed": seed,
            "nthread": self._threads(X),
            **changes,
        }
        return xgboost.train(
            parameters,
            xgboost.DMatrix(X, label=target, weight=weights),
            num_boost_round=trees,
            obj=objective,
            xgb_model=start,
        )

    def _fit_order(
        self,
        X: np.ndarray,
        relative: np.ndarray,
        slowdown: np.ndarray,
        group: np.ndarray,
        weight: np.ndarray,
        teachers: int,
        teacher_trees: int,
        unlabelled: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Any:
        """The head that decides the order, from the measured differences or from what its teachers say of them."""
        target, focus, share = relative, _TEACHER_FOCUS, 1.0
        if teachers > 0:
            asked, focus, share = X, self.focus, max(self.colsample_bytree, _ORDER_COLUMNS)
            if unlabelled is not None:
                asked = np.concatenate([X, unlabelled[0]])
                group = np.concatenate([group, unlabelled[1] + group.max() + 1])
                weight = np.concatenate([weight, np.full(len(unlabelled[0]), np.median(weight))])
            target = self._teach(
                X, relative, slowdown, group[: len(X)], weight[: len(X)], teachers, teacher_trees, asked
            )
            # What was measured of a row is a part of what is learned of it.
            target[: len(relative)] += _OWN_SHARE * (relative - target[: len(relative)])
            X = asked
        best = np.full(group.max() + 1, np.inf)
        np.minimum.at(best, group, target)
        weights = weight * np.maximum(np.exp(-focus * (target - best[group])), _LEAST_WEIGHT)
        start, first = None, 0
        if self.estimate_ is not None and self.n_estimators >= _LEAST_TREES:
            start, first = self._follow_estimate(X), _ESTIMATE_TREES
        return self._boost(
            X, target, None, self.n_estimators - first, self.random_state, learning_rate=self.learning_rate,
            max_depth=self.max_depth, colsample_bytree=share,
            min_child_weight=min(self.min_child_weight, _LEAST_SHARE * float(weights.sum())),
            objective=differences(group, target, weights), start=start,
        )  # fmt: skip

    def _estimated(self, X: np.ndarray) -> np.ndarray:
        """The log of the estimate; 0, the least time that the problem may take, where there is none (a closed library)."""
        assert self.estimate_ is not None
        return np.nan_to_num(X[:, self.estimate_].astype(np.float64), nan=0.0) * np.log(2.0)

    def _follow_estimate(self, X: np.ndarray) -> Any:
        """A few trees that see the estimate alone and repeat it in small steps: the others need not find it again."""
        alone = np.full_like(X, np.nan)
        alone[:, self.estimate_] = X[:, self.estimate_]
        return self._boost(
            alone, self._estimated(X), None, _ESTIMATE_TREES, self.random_state, learning_rate=1.0,
            max_depth=self.max_depth, subsample=1.0, colsample_bytree=1.0, reg_lambda=0.0, min_child_weight=1.0,
        )  # fmt: skip

    def _teach(
        self,
        X: np.ndarray,
        relative: np.ndarray,
        slowdown: np.ndarray,
        group: np.ndarray,
        weight: np.ndarray,
        teachers: int,
        teacher_trees: int,
        asked: np.ndarray,
    ) -> np.ndarray:
        """What large forests, fitted on the measurements, say of the rows asked: log latency, float64 [rows asked]."""
        import xgboost

        rows = xgboost.DMatrix(asked)
        said = np.zeros(len(asked))
        size: dict[str, Any] = {
            "learning_rate": self.teacher_rate,
            "max_depth": self.teacher_depth,
            "reg_lambda": 1.0,
        }
        sharp = weight * np.exp(-_TEACHER_FOCUS * slowdown)
        mild = weight * np.exp(-_SLOWDOWN_FOCUS * slowdown)
        size["min_child_weight"] = min(_TEACHER_LEAST_LEAF, _LEAST_SHARE * float(sharp.sum()))
        forests = 2 if self.estimate_ is None else 3
        for teacher in range(teachers):
            seeds = [
                self.random_state + _SEED_STEP * (forests * teacher + each + 1) for each in range(forests)
            ]
            objective = differences(group, relative, sharp)
            said += self._boost(
                X, relative, None, teacher_trees, seeds[0], objective=objective, **size
            ).predict(rows)
            said += expand(
                self._boost(X, compress(slowdown), mild, teacher_trees, seeds[1], **size).predict(rows)
            )
            if self.estimate_ is not None:
                left = relative - self._estimated(X)
                objective = differences(group, left, sharp)
                said += self._boost(
                    X, left, None, teacher_trees, seeds[2], objective=objective, **size
                ).predict(rows)
                said += self._estimated(asked)
        return said / (forests * teachers)

    def _fit_error(
        self,
        X: np.ndarray,
        relative: np.ndarray,
        slowdown: np.ndarray,
        group: np.ndarray,
        weight: np.ndarray,
        clusters: np.ndarray,
    ) -> ErrorHead:
        """Fit the error of a difference on problems that were left out in turn."""
        import xgboost

        def predict_left_out(out: np.ndarray) -> np.ndarray:
            order = self._fit_order(
                X[~out],
                relative[~out],
                slowdown[~out],
                np.unique(group[~out], return_inverse=True)[1],
                weight[~out],
                min(self.teachers, 1),
                max(self.teacher_trees // 2, 1),
            )
            return np.asarray(order.predict(xgboost.DMatrix(X[out])), dtype=np.float64)

        return fit_error(
            X, relative, slowdown, weight, group,
            folds_of(clusters, group, self.error_folds, self.random_state),
            predict_left_out,
            seed=self.random_state,
            threads=self._threads(X),
        )  # fmt: skip

    def _threads(self, X: np.ndarray) -> int:
        return self.n_jobs or (1 if X.size < _FEW_VALUES else 0)
