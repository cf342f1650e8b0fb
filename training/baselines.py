"""Rankings without a model, to compare a model with on the same problems."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.costmodel import AnalyticModel
from kernelcast.kernels import operation_names
from kernelcast.training.data import FullTable
from kernelcast.training.metrics import charged_latency, efficiency_curve

BASELINES = ("default", "best_fixed", "analytic", "random")

#: Random orders of each problem.
RANDOM_ORDERS = 20


def default_order(case: FullTable) -> np.ndarray:
    """The default alone, whatever k is; nothing where the data have no default."""
    return np.array([] if case.default is None else [case.default], dtype=np.intp)


@dataclass(frozen=True)
class BestFixed:
    """One order for all problems: candidates by their geometric-mean slowdown over training problems.

    A candidate's slowdown on a problem is its latency over the problem's best; a candidate that failed is charged as in
    :mod:`kernelcast.training.metrics`. The mean is over the problems on which the candidate was tried. On a test
    problem only the candidates that are there are ranked; those that no training problem has come last, in the
    table's order.

    Attributes:
        slowdown_log: candidate's key -> natural logarithm of the geometric mean.
    """

    slowdown_log: dict[str, float]

    @classmethod
    def fit(cls, train: Sequence[FullTable]) -> BestFixed:
        """Average over training problems."""
        total: dict[str, float] = {}
        count: dict[str, int] = {}
        for case in train:
            charge = charged_latency(case.latency_us, case.default)
            latency_us = np.where(np.isfinite(case.latency_us), case.latency_us, charge)
            slowdown = np.log(latency_us / latency_us.min())
            for candidate, value in zip(case.table, slowdown.tolist(), strict=True):
                total[candidate.key] = total.get(candidate.key, 0.0) + value
                count[candidate.key] = count.get(candidate.key, 0) + 1
        return cls({key: total[key] / count[key] for key in total})

    def order(self, case: FullTable) -> np.ndarray:
        """Row numbers, the candidate with the smallest slowdown first; ties keep the table's order."""
        slowdown = [self.slowdown_log.get(candidate.key, np.inf) for candidate in case.table]
        return np.argsort(slowdown, kind="stable")


def analytic_orders(cases: Sequence[FullTable]) -> list[np.ndarray] | None:
    """The order of the roofline estimate on each problem; variants outside the catalogue come last.

    None where the operation is not in the catalogue, or where none of the candidates' variants is.
    """
    if any(case.problem.operation not in operation_names() for case in cases):
        return None
    predictions = [AnalyticModel().predict(case.problem, case.table, case.device) for case in cases]
    if not any(prediction.covered.any() for prediction in predictions):
        return None
    return [prediction.order() for prediction in predictions]


def random_curves(cases: Sequence[FullTable], orders: int = RANDOM_ORDERS) -> np.ndarray:
    """Expected efficiency@k of a random order: [problems, ks].

    On each problem, the arithmetic mean over seeded orders. So the geometric mean over problems, taken of these, is the
    geometric mean of expected efficiencies, not the expectation of a geometric mean. The seed comes from the problem
    itself: neither its place among the others nor the split changes its orders.
    """
    curves = []
    for case in cases:
        seed = int.from_bytes(hashlib.sha256(case.problem.key.encode()).digest()[:8], "big")
        rows = np.tile(np.arange(len(case.table)), (orders, 1))
        drawn = np.random.default_rng(seed).permuted(rows, axis=1)
        curves.append(
            np.mean(
                [efficiency_curve(case.latency_us, order, default=case.default) for order in drawn], axis=0
            )
        )
    return np.array(curves)


def baseline_curves(train: Sequence[FullTable], test: Sequence[FullTable]) -> dict[str, np.ndarray | None]:
    """efficiency@k of each of :data:`BASELINES` on the test problems: [problems, ks].

    None where a baseline does not exist: no test problem has a default, or :func:`analytic_orders` gives none.
    """

    def judged(orders: Sequence[np.ndarray]) -> np.ndarray:
        return np.array(
            [
                efficiency_curve(case.latency_us, order, default=case.default)
                for case, order in zip(test, orders, strict=True)
            ]
        )

    fixed = BestFixed.fit(train)
    analytic = analytic_orders(test)
    return {
        "default": judged([default_order(case) for case in test])
        if any(case.default is not None for case in test)
        else None,
        "best_fixed": judged([fixed.order(case) for case in test]),
        "analytic": None if analytic is None else judged(analytic),
        "random": random_curves(test),
    }
