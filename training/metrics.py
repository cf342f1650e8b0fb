"""How good a ranking is: efficiency@k, on one problem and over many.

On one problem, efficiency@k is the best measured latency of the problem over the best among the first k of a ranking;
regret@k is one less that. Candidates that failed can stand in a ranking and use up places. *With the default*, the
default is one of the k: the first k - 1 others and the default; for k = 1 it is the first of the ranking, whatever it
is. If none of the k worked, the default is charged; where the data have no working default, the slowest that worked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kernelcast.errors import ModelError

#: The numbers of measured candidates that are reported.
KS = (1, 2, 3, 5, 10)

#: The statistics over problems, in the order of :func:`statistics`.
STATISTICS = ("geomean", "p5", "worst")


def efficiency(
    latency_us: np.ndarray,
    order: np.ndarray,
    k: int,
    *,
    default: int | None = None,
    with_default: bool = False,
) -> float:
    """efficiency@k of one ranking on one problem; see :func:`efficiency_curve`."""
    return float(efficiency_curve(latency_us, order, default=default, with_default=with_default, ks=(k,))[0])


def efficiency_curve(
    latency_us: np.ndarray,
    order: np.ndarray,
    *,
    default: int | None = None,
    with_default: bool = False,
    ks: Sequence[int] = KS,
) -> np.ndarray:
    """efficiency@k of one ranking on one problem, for several k.

    Args:
        latency_us: [candidates]; a candidate that failed has infinity or NaN.
        order: row numbers of the ranking, the first to be measured first. It may leave candidates out; a k beyond its
            end measures all that it holds.
        default: the default's row; None where the data have none.
        with_default: whether the default is one of the k.
        ks: each at least 1.

    Returns:
        float64 [len(ks)], each in (0, 1].

    Raises:
        ModelError: no candidate worked, so that there is no best.
        ValueError: a k is below 1.
    """
    if min(ks) < 1:
        raise ValueError(f"k is {min(ks)}; it counts measured candidates, so it must be at least 1.")
    latency_us = np.where(np.isfinite(latency_us), latency_us, np.inf)
    charge = charged_latency(latency_us, default)
    order = np.asarray(order, dtype=np.intp)
    best_of_first = np.minimum.accumulate(latency_us[order])
    best_of_others, default_us = best_of_first, np.inf
    if with_default and default is not None:
        best_of_others = np.minimum.accumulate(latency_us[order[order != default]])
        default_us = latency_us[default]
    chosen = np.full(len(ks), np.inf)
    for i, k in enumerate(ks):
        if k == 1 or not with_default or default is None:
            found = best_of_first[min(k, len(best_of_first)) - 1] if len(best_of_first) else np.inf
        else:
            others = best_of_others[min(k - 1, len(best_of_others)) - 1] if len(best_of_others) else np.inf
            found = min(others, default_us)
        chosen[i] = found if np.isfinite(found) else charge
    return latency_us.min() / chosen


def charged_latency(latency_us: np.ndarray, default: int | None) -> float:
    """The latency that counts where nothing that was tried worked: the default's, or else the slowest that worked.

    Raises:
        ModelError: no candidate worked.
    """
    worked = np.isfinite(latency_us)
    if not worked.any():
        raise ModelError("None of the problem's candidates worked, so no choice among them can be judged.")
    if default is not None and worked[default]:
        return float(latency_us[default])
    return float(latency_us[worked].max())


def regret(efficiency: np.ndarray) -> np.ndarray:
    """The share of the time that a better choice would have saved: 1 - efficiency."""
    return 1.0 - np.asarray(efficiency)


def geometric_mean(values: np.ndarray) -> float:
    """The geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(values))))


def statistics(curves: np.ndarray) -> np.ndarray:
    """Over problems: [problems, ks] -> [ks, 3], the columns named by :data:`STATISTICS`.

    The 5th percentile interpolates linearly between the two nearest problems.
    """
    return np.stack(
        [np.exp(np.log(curves).mean(axis=0)), np.percentile(curves, 5, axis=0), curves.min(axis=0)], axis=1
    )


def as_json(values: np.ndarray, ks: Sequence[int] = KS) -> dict[str, dict[str, float | None]]:
    """``{"1": {"geomean": ..., "p5": ..., "worst": ...}, ...}`` from [ks, 3]; NaN becomes None."""
    return {
        str(k): {name: None if np.isnan(v) else float(v) for name, v in zip(STATISTICS, row, strict=True)}
        for k, row in zip(ks, values, strict=True)
    }
