"""A model for a new device: the records of other devices, and a few problems measured on the new one.

The features are physics on the facts of each record's own device, so that what was learned of waves, occupancy and traffic
on one device says something of another. What was measured on the new device counts more: see :func:`problem_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kernelcast.costmodel import ProblemData, RankingModel
from kernelcast.errors import ModelError
from kernelcast.training.baselines import baseline_curves
from kernelcast.training.data import full_table
from kernelcast.training.evaluate import Figures, OnProgress, evaluate_ranker
from kernelcast.training.metrics import as_json, statistics
from kernelcast.training.recipe import hyperparameters

#: What the new device's problems weigh together, in all problems of other devices, and one of them at most and at least, in
#: one of the others. From recorded H100 products beside those of an A100 (docs/experiments.md).
TARGET_SHARE = 0.1
MOST_WEIGHT = 10.0

#: Numbers of measured problems of the new device at which the curve is taken.
MEASURED = (0, 10, 30, 100)


@dataclass(frozen=True)
class TransferPoint:
    """What a model does with so many problems of the new device.

    Attributes:
        measured: how many.
        efficiency: mean of each statistic over the seeds: ``{"1": {"geomean", "p5", "worst"}, ...}`` by k.
        efficiency_with_default: the same with the default among the k.
        target_only: ``efficiency_with_default`` of a model of those problems alone; None with fewer than two.
    """

    measured: int
    efficiency: Figures
    efficiency_with_default: Figures
    target_only: Figures | None


@dataclass(frozen=True)
class TransferEvaluation:
    """The curve over the number of measured problems, all judged on the same others.

    Attributes:
        operation: what was ranked.
        train_devices: whose records are given.
        test_device: the new one.
        train_problems: of the former.
        test_problems: of the latter, judged with each seed.
        seeds: draws of the measured problems, and of the trees.
        points: one a number of measured problems.
        baselines: of each of :data:`kernelcast.training.baselines.BASELINES`, with nothing measured on the new device; None
            where there is none.
    """

    operation: str
    train_devices: tuple[str, ...]
    test_device: str
    train_problems: int
    test_problems: int
    seeds: int
    points: tuple[TransferPoint, ...]
    baselines: Mapping[str, Figures | None]

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON values, by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **values,
            "train_devices": list(self.train_devices),
            "points": [vars(point) for point in self.points],
        }


def fit_transfer(
    source: Sequence[ProblemData],
    target: Sequence[ProblemData],
    *,
    estimator_params: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> RankingModel:
    """Fit a model for the device of ``target`` on its few problems and those of other devices.

    Args:
        source: problems measured on other devices.
        target: problems measured on the new one; may be empty.
        estimator_params: parameters of the estimator other than :func:`kernelcast.training.recipe.hyperparameters` gives.
        seed: of the trees.

    Raises:
        ModelError: nothing to fit on, or problems of several operations.
    """
    from kernelcast.costmodel.estimator import CostModel

    params = hyperparameters(len(source) + len(target), estimator_params, seed=seed)
    weights = problem_weights(source, target)
    return RankingModel.fit([*source, *target], CostModel(**params), weights=weights)


def problem_weights(source: Sequence[ProblemData], target: Sequence[ProblemData]) -> np.ndarray | None:
    """The weight of each problem, sources first: float64; None where one side is empty.

    A source problem weighs 1. The targets weigh :data:`TARGET_SHARE` of all sources together, at least 1 and at most
    :data:`MOST_WEIGHT` each.
    """
    if not source or not target:
        return None
    each = float(np.clip(TARGET_SHARE * len(source) / len(target), 1.0, MOST_WEIGHT))
    return np.concatenate([np.ones(len(source)), np.full(len(target), each)])


def evaluate_transfer(
    source: Sequence[ProblemData],
    target: Sequence[ProblemData],
    *,
    measured: Sequence[int] = MEASURED,
    seeds: int = 5,
    estimator_params: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> TransferEvaluation:
    """How good a model of a new device gets with the number of problems measured there.

    For each seed the new device's problems are put in a random order: the first n of it are measured, and those after the
    largest n are judged, so that every point of the curve is of the same problems. Problems of one shape stay on one side.

    Args:
        source: problems measured on other devices.
        target: problems measured on the new one.
        measured: numbers of measured problems.
        seeds: draws.
        estimator_params: as for :func:`fit_transfer`.
        on_progress: called after each fit with the number of fits done and in all.

    Raises:
        ModelError: a side is empty, both are of one device, or more would be measured than can be spared.
    """
    if seeds < 1 or not measured or min(measured) < 0:
        raise ModelError(f"{seeds} seeds and {list(measured)} measured problems are not possible.")
    if not source or not target:
        raise ModelError(f"There is no problem of the {'new' if source else 'other'} device.")
    new = target[0].device
    if any(item.device.fingerprint == new.fingerprint for item in source):
        raise ModelError(f"{new.name} is on both sides; a transfer is from other devices.")
    points = sorted(set(measured))
    if points[-1] > len(target) // 2:
        raise ModelError(
            f"{new.name} has {len(target)} problems; at most half of them can be measured, and {points[-1]} were asked for."
        )
    curves: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {n: [] for n in points}
    alone: dict[int, list[np.ndarray]] = {n: [] for n in points}
    base: list[dict[str, np.ndarray | None]] = []
    tested = 0
    for seed in range(seeds):
        order = _by_shape(target, seed)
        judged = order[points[-1] :]
        shapes = {item.problem.shape for item in order[: points[-1]]}
        judged = [item for item in judged if item.problem.shape not in shapes]
        tested += len(judged)
        base.append(
            baseline_curves([full_table(item) for item in source], [full_table(item) for item in judged])
        )
        for place, n in enumerate(points):
            model = fit_transfer(source, order[:n], estimator_params=estimator_params, seed=seed)
            scores = evaluate_ranker(model, judged)
            curves[n].append((scores.curves, scores.curves_with_default))
            if n >= 2:
                own = fit_transfer([], order[:n], estimator_params=estimator_params, seed=seed)
                alone[n].append(evaluate_ranker(own, judged).curves_with_default)
            if on_progress is not None:
                on_progress(seed * len(points) + place + 1, seeds * len(points))
    return TransferEvaluation(
        operation=target[0].problem.operation,
        train_devices=tuple(sorted({item.device.name for item in source})),
        test_device=new.name,
        train_problems=len(source),
        test_problems=round(tested / seeds),
        seeds=seeds,
        points=tuple(
            TransferPoint(
                n,
                _mean([plain for plain, _ in curves[n]]),
                _mean([with_default for _, with_default in curves[n]]),
                _mean(alone[n]) if alone[n] else None,
            )
            for n in points
        ),
        baselines={name: _mean_or_none([each[name] for each in base]) for name in base[0]},
    )


def _by_shape(target: Sequence[ProblemData], seed: int) -> list[ProblemData]:
    """The problems in a random order that depends on them and the seed alone."""
    items = sorted(target, key=lambda item: (item.problem.key, item.workload))
    return [items[at] for at in np.random.default_rng(seed).permutation(len(items))]


def _mean(curves: Sequence[np.ndarray]) -> Figures:
    return as_json(np.mean([statistics(each) for each in curves], axis=0))


def _mean_or_none(curves: Sequence[np.ndarray | None]) -> Figures | None:
    present = [each for each in curves if each is not None]
    return _mean(present) if len(present) == len(curves) else None
