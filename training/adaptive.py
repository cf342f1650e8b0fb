"""Regret against the number of measurements: k chosen for each problem, beside the same k for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernelcast.costmodel import Prediction
from kernelcast.costmodel.adaptive import BOUNDS, choose
from kernelcast.training.data import FullTable
from kernelcast.training.metrics import charged_latency, efficiency_curve, geometric_mean

#: Target regrets that are reported.
TARGETS = (0.001, 0.002, 0.005, 0.01, 0.02)
#: Bound and target of each choice.
CHOICES = tuple((bound, target) for bound in BOUNDS for target in TARGETS)
#: The most candidates measured, and the fixed k beside which they are judged.
MOST = 10
FIXED_KS = tuple(range(1, MOST + 1))


def fixed_curve(prediction: Prediction, case: FullTable) -> np.ndarray:
    """efficiency@k of one problem for each of :data:`FIXED_KS`, with the default among the k: float64 [ks]."""
    return efficiency_curve(
        case.latency_us, prediction.order(), default=case.default, with_default=True, ks=FIXED_KS
    )


def adaptive_choice(
    prediction: Prediction, case: FullTable, choices: Sequence[tuple[str, float]] = CHOICES
) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`kernelcast.costmodel.adaptive.choose` does on one problem.

    Returns:
        (candidates measured, efficiency of the best of them), each float64 [choices]. Where none of them worked, the
        default is charged, as in :mod:`kernelcast.training.metrics`.
    """
    latency_us = np.where(np.isfinite(case.latency_us), case.latency_us, np.inf)
    measured, efficiency = np.empty(len(choices)), np.empty(len(choices))
    for i, (bound, target) in enumerate(choices):
        rows = choose(prediction, default=case.default, target_regret=target, most=MOST, bound=bound).rows
        found = latency_us[rows].min()
        chosen = found if np.isfinite(found) else charged_latency(latency_us, case.default)
        measured[i], efficiency[i] = len(rows), latency_us.min() / chosen
    return measured, efficiency


def summary(
    fixed: np.ndarray,
    measured: np.ndarray,
    efficiency: np.ndarray,
    choices: Sequence[tuple[str, float]] = CHOICES,
) -> dict[str, Any]:
    """Figures over problems, as plain JSON values.

    Args:
        fixed: [problems, :data:`FIXED_KS`], of :func:`fixed_curve`.
        measured: [problems, choices], of :func:`adaptive_choice`.
        efficiency: [problems, choices].
        choices: the bounds and target regrets.

    Returns:
        ``{"fixed": {"1": regret, ...}, "mean": {"0.005": {"regret", "measured", "fixed_k"}, ...}, "problem": ...}``, the
        latter by the bound of :func:`kernelcast.costmodel.adaptive.choose`. Regrets are 1 less the geometric mean of the
        efficiencies; ``measured`` is the mean number of candidates; ``fixed_k`` the smallest k for all problems whose
        regret is not larger, None where :data:`MOST` is not enough.
    """
    of_fixed = [1.0 - geometric_mean(column) for column in fixed.T]
    found: dict[str, Any] = {"fixed": {str(k): value for k, value in zip(FIXED_KS, of_fixed, strict=True)}}
    for i, (bound, target) in enumerate(choices):
        regret = 1.0 - geometric_mean(efficiency[:, i])
        found.setdefault(bound, {})[f"{target:g}"] = {
            "regret": regret,
            "measured": float(measured[:, i].mean()),
            "fixed_k": smallest_k(of_fixed, regret),
        }
    return found


def smallest_k(of_fixed: Sequence[float], regret: float) -> int | None:
    """The smallest of :data:`FIXED_KS` whose regret is at most ``regret``."""
    return next((k for k, value in zip(FIXED_KS, of_fixed, strict=True) if value <= regret), None)


def mean_over_seeds(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each figure of several :func:`summary`; ``fixed_k`` is that of the mean regrets."""
    fixed = {k: float(np.mean([one["fixed"][k] for one in found])) for k in found[0]["fixed"]}
    mean: dict[str, Any] = {"fixed": fixed}
    for bound in found[0].keys() - {"fixed"}:
        mean[bound] = {}
        for target in found[0][bound]:
            figures = [one[bound][target] for one in found]
            regret = float(np.mean([one["regret"] for one in figures]))
            mean[bound][target] = {
                "regret": regret,
                "measured": float(np.mean([one["measured"] for one in figures])),
                "fixed_k": smallest_k(list(fixed.values()), regret),
            }
    return {name: mean[name] for name in found[0]}
