"""Hyperparameters by cross-validation on training problems: other recipes are drawn, and one is taken if it is surely better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.costmodel import ProblemData, RankingModel
from kernelcast.errors import ModelError
from kernelcast.training.data import full_table
from kernelcast.training.held_out import curve_of
from kernelcast.training.metrics import KS

#: What is drawn from. No combination has more nodes on the way of a prediction than the recipe has for large data: what is
#: chosen never makes a selection slower.
SPACE: tuple[dict[str, list[float]], ...] = (
    {
        "n_estimators": [60, 80, 100, 120],
        "max_depth": [5, 6, 7],
        "learning_rate": [0.1, 0.15, 0.2, 0.3, 0.4],
        "min_child_weight": [0.2, 0.5, 1.0, 2.0, 4.0],
        "colsample_bytree": [0.25, 0.4, 0.6, 1.0],
        "reg_lambda": [0.3, 1.0, 3.0],
        "focus": [2.0, 3.0, 4.0],
    },
    {
        "n_estimators": [120, 160, 200],
        "max_depth": [3, 4],
        "learning_rate": [0.05, 0.1, 0.15, 0.2, 0.3],
        "min_child_weight": [0.1, 0.2, 0.5, 1.0],
        "colsample_bytree": [0.4, 0.6, 1.0],
        "reg_lambda": [0.3, 1.0, 3.0],
        "focus": [2.0, 3.0, 4.0],
    },
)

#: Each draw takes a fit for every part: more would take days, and the best of so many is mostly luck.
MOST_DRAWS = 1000

#: Parts of the problems that are left out in turn.
FOLDS = 3
#: A recipe is taken if it is better by more than so many standard errors of the difference.
_SURE_ERRORS = 2.0
#: What is compared: efficiency, with the default among the k, at these k, as the gate does.
_KS = (1, 3)

#: Fits a model with the parameters given, on problems given.
Fit = Callable[[Sequence[ProblemData], Mapping[str, Any]], RankingModel]


@dataclass(frozen=True)
class Drawn:
    """One recipe that was tried.

    Attributes:
        changes: its parameters that were drawn; empty for the recipe that others are compared with.
        efficiency: geometric mean over the problems left out of efficiency at 1 and at 3, the default among the k.
        gain_log: mean over the problems of its log efficiency less that of the recipe; 0 for the recipe itself.
        error_log: standard error of ``gain_log``.
    """

    changes: Mapping[str, Any]
    efficiency: float
    gain_log: float
    error_log: float

    @property
    def surely_better(self) -> bool:
        """Whether its gain is beyond noise."""
        return self.gain_log > _SURE_ERRORS * self.error_log

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON values."""
        return {**vars(self), "changes": dict(self.changes)}


@dataclass(frozen=True)
class Tuned:
    """What came of the drawing.

    Attributes:
        changes: parameters to take instead of the recipe's; empty where none was surely better.
        trials: every recipe, the standing one first.
        reason: why, in words.
    """

    changes: Mapping[str, Any]
    trials: tuple[Drawn, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON values."""
        return {
            "changes": dict(self.changes),
            "trials": [trial.to_json() for trial in self.trials],
            "reason": self.reason,
        }


def draw_hyperparameters(
    data: Sequence[ProblemData],
    fit: Fit,
    *,
    draws: int,
    seed: int = 0,
    folds: int = FOLDS,
    on_fit: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Try recipes on parts of some problems, and judge each on the parts left out.

    What is left out together are problems of one shape, and half of the regions of shapes as wholes
    (:func:`kernelcast.costmodel.uncertainty.regions`), so that recipes are judged on neighbours of what they were fitted on and
    on shapes with nothing like them. The best is taken if its problems gain more than two standard errors over the standing
    recipe: the best of many draws on few problems is mostly luck.

    Args:
        data: training problems. Nothing else may be judged by what is chosen here.
        fit: fits a model with some parameters changed.
        draws: how many recipes are drawn from :data:`SPACE`, all different, beside the standing one.
        seed: of the draws and of the parts.
        folds: how many parts.
        on_fit: called with (fits done, fits) after each.

    Raises:
        ModelError: no draws, or more than :data:`MOST_DRAWS`; fewer than two folds; a seed that is none.
    """
    from sklearn.model_selection import ParameterGrid, ParameterSampler

    from kernelcast.costmodel.uncertainty import folds_of, regions

    if not 1 <= draws <= MOST_DRAWS or folds < 2 or not 0 <= seed < 2**32:
        raise ModelError(
            f"{draws} draws in {folds} folds with seed {seed} are not possible; take 1 to {MOST_DRAWS} draws in at least 2 "
            "folds, with a seed from 0 to 2**32 - 1."
        )
    if not data:
        return Tuned(
            {}, (), "No problem was measured on the device itself, so there is none to compare recipes on."
        )
    part_of = folds_of(regions([item.problem for item in data]), np.arange(len(data)), folds, seed)
    if part_of is None:
        return Tuned({}, (), "The problems have one shape, so no part could be left out to compare recipes.")
    parts = [
        (
            [item for item, part in zip(data, part_of, strict=True) if part != out],
            [full_table(item) for item, part in zip(data, part_of, strict=True) if part == out],
        )
        for out in np.unique(part_of)
    ]
    draws = min(draws, len(ParameterGrid(SPACE)))
    recipes = [{}, *map(_plain, ParameterSampler(SPACE, draws, random_state=seed))]
    logs = np.empty((len(recipes), len(data)))
    places = [np.flatnonzero(part_of == out) for out in np.unique(part_of)]
    done, fits = 0, len(recipes) * len(parts)
    for recipe, changes in enumerate(recipes):
        for (train, test), place in zip(parts, places, strict=True):
            model = fit(train, changes)
            curves = np.array([curve_of(model, case) for case in test])
            logs[recipe, place] = np.log(curves[:, [KS.index(k) for k in _KS]]).mean(axis=1)
            done += 1
            if on_fit is not None:
                on_fit(done, fits)
    trials = tuple(_judged(changes, own, logs[0]) for changes, own in zip(recipes, logs, strict=True))
    best = max(trials, key=lambda trial: trial.gain_log)
    tried = f"{draws} drawn recipe{'s' if draws > 1 else ''}, {len(data)} problems in {len(parts)} parts"
    gains = f"{math.expm1(best.gain_log):+.2%} (standard error {best.error_log:.2%})"
    if best.changes and best.surely_better:
        return Tuned(best.changes, trials, f"The best of {tried}, gains {gains} over the standing recipe.")
    why = f"the best gains {gains}" if best.changes else "none is better"
    return Tuned({}, trials, f"The standing recipe stays: of {tried}, {why}.")


def _plain(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """A draw as Python's own numbers, by name: numpy's are no JSON."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in sorted(drawn.items())}


def _judged(changes: Mapping[str, Any], logs: np.ndarray, standing: np.ndarray) -> Drawn:
    gains = logs - standing
    error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return Drawn(changes, float(np.exp(logs.mean())), float(gains.mean()), float(error) if changes else 0.0)
