"""What a recipe of training does on problems that it did not see: the figures by which a model is judged and kept.

The record of it lies beside the trees as ``held_out.json``, its SHA-256 in the manifest: later trainings are compared
with it, and reports are drawn from it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.costmodel import ProblemData, Ranker, RankingModel
from kernelcast.datasets.journal import quoted
from kernelcast.errors import ArtifactError, ModelError
from kernelcast.kernels import Problem, operation, operation_names
from kernelcast.training.baselines import RANDOM_ORDERS, BestFixed, analytic_orders, default_order
from kernelcast.training.data import FullTable, dataset_hash, full_table
from kernelcast.training.gate import Scores
from kernelcast.training.metrics import KS, as_json, efficiency_curve, geometric_mean, statistics
from kernelcast.training.structure import (
    COUNT,
    NUMBER,
    NUMBER_OR_NULL,
    POSITIVE,
    POSITIVE_OR_NULL,
    TEXT,
    Form,
    check,
)

#: Name of the record in an artifact's folder.
FILE = "held_out.json"
RECORD_VERSION = 1

#: See :mod:`kernelcast.training.structure`. The curves are checked apart: they are many numbers.
_RECORD: Form = {
    "ks": [COUNT],
    "trained_shapes": [TEXT],
    "importance": {str: NUMBER},
    "problems": [
        {
            "evidence": TEXT,
            "problem": TEXT,
            "sizes?": {str: COUNT},  # a record of an earlier kernelcast says none
            "workload": TEXT,
            "candidates": COUNT,
            "flops": NUMBER_OR_NULL,
            **dict.fromkeys(("best", "first", "verified"), TEXT),
            **{f"{name}_us": POSITIVE_OR_NULL for name in ("best", "default", "first", "verified")},
        }
    ],
    "points": {"predicted_us": [POSITIVE], "measured_us": [POSITIVE]},
}

#: Below this many problems, folds: each problem is judged once, so that a handful of them says something.
FEW_PROBLEMS = 50
FOLDS = 5

#: Candidates kept for plots of predicted against measured latency.
_POINTS = 1500
#: A record beyond this is not one that this package wrote.
_MAX_BYTES = 1 << 28

Fit = Callable[[Sequence[ProblemData]], RankingModel]


@dataclass(frozen=True)
class Split:
    """One division of the data: fit on one side, judge on the other."""

    train: list[ProblemData]
    test: list[ProblemData]


@dataclass
class HeldOut:
    """Results on held-out problems, by problem.

    Attributes:
        how: the division in words.
        cases: the problems with every candidate that was tried.
        evidence: hash of each problem's measurements.
        workloads: of each problem.
        predicted: predicted latency in microseconds of every candidate of each problem.
        orders: the model's ranking of each problem.
        curves: ranker -> efficiency@k [problems, ks], nothing added to the ranking.
        curves_with_default: the same with the default among the k; see :mod:`kernelcast.training.metrics`.
    """

    how: str
    cases: list[FullTable]
    evidence: list[str]
    workloads: list[str]
    predicted: list[np.ndarray]
    orders: list[np.ndarray]
    curves: dict[str, np.ndarray]
    curves_with_default: dict[str, np.ndarray]

    @property
    def constant(self) -> bool:
        """Whether the model predicts one latency for all candidates, in every problem."""
        return all(float(np.ptp(np.log(values))) < 1e-9 for values in self.predicted)

    def scores(self, ranker: str = "model", rows: Sequence[int] | None = None) -> Scores:
        """The figures that the gate compares, over all problems or some."""
        curves = self.curves_with_default[ranker]
        return scores_of(curves if rows is None else curves[np.asarray(rows)])

    def baselines(self) -> list[str]:
        """The rankers other than the model."""
        return [name for name in self.curves if name != "model"]

    def summary(self) -> dict[str, Any]:
        """Statistics over the problems, as plain JSON values."""
        counts = [len(case.table) for case in self.cases]
        return {
            "how": self.how,
            "problems": len(self.cases),
            "candidates_per_problem": float(np.median(counts)),
            "rankers": {
                name: {
                    "with_default": as_json(statistics(self.curves_with_default[name])),
                    "without_default": as_json(statistics(self.curves[name])),
                }
                for name in self.curves
            },
        }


def scores_of(curves: np.ndarray) -> Scores:
    """The gate's figures of efficiency curves [problems, ks] with the default."""
    return Scores(geometric_mean(curves[:, KS.index(1)]), geometric_mean(curves[:, KS.index(3)]))


def shape_hash(problem: Problem) -> str:
    """12 hexadecimal digits over a problem's operation and dimensions."""
    return hashlib.sha256(json.dumps([problem.operation, problem.shape]).encode()).hexdigest()[:12]


def splits(data: Sequence[ProblemData], holdout: float) -> tuple[str, list[Split]]:
    """(the division in words, its parts). Problems of one shape stay together.

    Which shapes are held out depends on the shapes alone, never on a seed: trainings one after the other, on data that
    grow, hold out mostly the same ones and can be compared. Fewer than :data:`FEW_PROBLEMS` problems are divided into
    :data:`FOLDS` folds, so that each is judged once.

    Returns:
        No part where there are fewer than two shapes: nothing can be held out.

    Raises:
        ModelError: ``holdout`` is not between 0 and 1.
    """
    if not 0 < holdout < 1:
        raise ModelError(f"The held-out share is {holdout}; it must lie between 0 and 1, such as 0.2.")
    hashes = [shape_hash(item.problem) for item in data]
    shapes = sorted(set(hashes))
    if len(shapes) < 2:
        return "nothing held out", []
    if len(data) < FEW_PROBLEMS:
        folds = min(FOLDS, len(shapes))
        held = [set(shapes[fold::folds]) for fold in range(folds)]
        how = f"{folds} folds by shape, each problem judged once"
    else:
        amount = min(max(round(holdout * len(shapes)), 1), len(shapes) - 1)
        held = [set(shapes[:amount])]
        how = f"{amount} of {len(shapes)} shapes held out"
    parts = []
    for out in held:
        sides: tuple[list[ProblemData], list[ProblemData]] = ([], [])
        for item, digest in zip(data, hashes, strict=True):
            sides[digest in out].append(item)
        parts.append(Split(*sides))
    return how, parts


def judge_held_out(
    data: Sequence[ProblemData],
    fit: Fit,
    *,
    holdout: float = 0.2,
    on_split: Callable[[int, int], None] | None = None,
) -> HeldOut | None:
    """Fit without the held-out shapes, and judge on them; None where nothing can be held out.

    Args:
        data: measured problems of one operation on one device.
        fit: the recipe.
        holdout: share of the shapes.
        on_split: called with (parts done, parts) after each.
    """
    how, parts = splits(data, holdout)
    if not parts:
        return None
    pieces = []
    for number, part in enumerate(parts, start=1):
        pieces.append(judge_split(fit(part.train), part, how))
        if on_split is not None:
            on_split(number, len(parts))
    return _join(pieces)


def judge_split(model: Ranker, part: Split, how: str) -> HeldOut:
    """Judge a fitted model and the baselines on one part's held-out problems."""
    cases = [full_table(item) for item in part.test]
    predictions = [model.predict(case.problem, case.table, case.device) for case in cases]
    orders = [prediction.order() for prediction in predictions]
    fixed = BestFixed.fit([full_table(item) for item in part.train])
    # Of each ranker, the rankings of each case: one, or for the random order several, whose efficiencies are averaged.
    rankings: dict[str, list[list[np.ndarray]]] = {"model": [[order] for order in orders]}
    if any(case.default is not None for case in cases):
        rankings["default"] = [[default_order(case)] for case in cases]
    rankings["best_fixed"] = [[fixed.order(case)] for case in cases]
    analytic = analytic_orders(cases)
    if analytic is not None:
        rankings["analytic"] = [[order] for order in analytic]
    rankings["random"] = [_random_orders(case) for case in cases]
    return HeldOut(
        how=how,
        cases=cases,
        evidence=[dataset_hash([item]) for item in part.test],
        workloads=[item.workload for item in part.test],
        predicted=[prediction.latency_us for prediction in predictions],
        orders=orders,
        curves={name: _curves(cases, found, with_default=False) for name, found in rankings.items()},
        curves_with_default={
            name: _curves(cases, found, with_default=True) for name, found in rankings.items()
        },
    )


def curve_of(model: Ranker, case: FullTable) -> np.ndarray:
    """efficiency@k [ks] of a ranker on one problem, with the default."""
    order = model.predict(case.problem, case.table, case.device).order()
    return efficiency_curve(case.latency_us, order, default=case.default, with_default=True)


def record(held_out: HeldOut | None, data: Sequence[ProblemData], importance: dict[str, float]) -> bytes:
    """The record of a training as JSON: :func:`read_record` reads it.

    Args:
        held_out: results; None where nothing could be held out.
        data: everything that the final model was fitted on.
        importance: share of each feature in the gain of all splits of the final model.
    """
    content: dict[str, Any] = {
        "record_version": RECORD_VERSION,
        "ks": list(KS),
        "trained_shapes": sorted({shape_hash(item.problem) for item in data}),
        "importance": {name: _short(share) for name, share in importance.items()},
        "problems": [],
        "curves": {},
        "curves_with_default": {},
        "points": {"predicted_us": [], "measured_us": []},
    }
    if held_out is not None:
        content["problems"] = [_problem_record(held_out, index) for index in range(len(held_out.cases))]
        for kind in ("curves", "curves_with_default"):
            content[kind] = {
                name: [[_short(value) for value in row] for row in curves.tolist()]
                for name, curves in getattr(held_out, kind).items()
            }
        content["points"] = _points(held_out)
    return (json.dumps(content, separators=(",", ":")) + "\n").encode()


def read_record(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """The record in an artifact's folder, its digest and its structure checked.

    Raises:
        ArtifactError: there is none, it was changed, it is not what :func:`record` writes, or it is of a newer kernelcast.
    """
    path = folder / FILE
    try:
        expected = manifest["facts"]["held_out"]["sha256"]
        if path.stat().st_size > _MAX_BYTES:
            raise ArtifactError(f"{path} is larger than any record of held-out problems.")
        content = path.read_bytes()
    except (OSError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{folder} has no record of held-out problems ({type(error).__name__}: {error})."
        ) from error
    if hashlib.sha256(content).hexdigest() != expected:
        raise ArtifactError(f"{path} was changed after it was written: its digest does not match.")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({type(error).__name__}: {quoted(error)}).") from error
    check(data, {"record_version": COUNT}, str(path))
    if data["record_version"] != RECORD_VERSION:
        raise ArtifactError(
            f"{path} has version {data['record_version']}; this kernelcast reads {RECORD_VERSION}."
        )
    check(data, _RECORD, str(path))
    _check_numbers(data, path)
    return data


def _check_numbers(data: dict[str, Any], path: Path) -> None:
    """What the parts of a record must be to one another."""
    if data["ks"] != list(KS):
        raise ArtifactError(
            f"{path} has efficiencies at {quoted(data['ks'])}; this kernelcast reads {list(KS)}."
        )
    if len(data["points"]["predicted_us"]) != len(data["points"]["measured_us"]):
        raise ArtifactError(f"{path} has points without a predicted or a measured latency.")
    shape = (len(data["problems"]), len(data["ks"]))
    for kind in ("curves", "curves_with_default"):
        curves = data.get(kind)
        if not isinstance(curves, dict) or (shape[0] and "model" not in curves):
            raise ArtifactError(f"{path} has no {kind} of the model.")
        for name, rows in curves.items():
            try:
                found = np.array(rows)
            except ValueError:  # rows of several lengths
                found = np.array(None)
            # Without problems there is no row that could say how long it is.
            if found.shape != (shape if shape[0] else (0,)) or not _are_shares(found):
                raise ArtifactError(
                    f"{path}: {kind} of {quoted(name)} are no {shape[0]} rows of {shape[1]} numbers above 0 and at most 1."
                )


def _are_shares(found: np.ndarray) -> bool:
    return found.dtype.kind in "if" and bool(((found > 0) & (found <= 1)).all())


def _curves(
    cases: Sequence[FullTable], rankings: Sequence[Sequence[np.ndarray]], *, with_default: bool
) -> np.ndarray:
    return np.array(
        [
            np.mean(
                [
                    efficiency_curve(case.latency_us, order, default=case.default, with_default=with_default)
                    for order in orders
                ],
                axis=0,
            )
            for case, orders in zip(cases, rankings, strict=True)
        ]
    )


def _random_orders(case: FullTable) -> list[np.ndarray]:
    # The same orders as in kernelcast.training.baselines: the seed comes from the problem, not from its place.
    seed = int.from_bytes(hashlib.sha256(case.problem.key.encode()).digest()[:8], "big")
    rows = np.tile(np.arange(len(case.table)), (RANDOM_ORDERS, 1))
    return list(np.random.default_rng(seed).permuted(rows, axis=1))


def _join(pieces: Sequence[HeldOut]) -> HeldOut:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    # A baseline that some part lacks (no problem of it has a default) cannot be compared over all.
    names = [name for name in first.curves if all(name in piece.curves for piece in pieces)]
    return HeldOut(
        how=first.how,
        cases=[case for piece in pieces for case in piece.cases],
        evidence=[text for piece in pieces for text in piece.evidence],
        workloads=[text for piece in pieces for text in piece.workloads],
        predicted=[values for piece in pieces for values in piece.predicted],
        orders=[order for piece in pieces for order in piece.orders],
        curves={name: np.concatenate([piece.curves[name] for piece in pieces]) for name in names},
        curves_with_default={
            name: np.concatenate([piece.curves_with_default[name] for piece in pieces]) for name in names
        },
    )


def _problem_record(held_out: HeldOut, index: int) -> dict[str, Any]:
    case, order = held_out.cases[index], held_out.orders[index]
    best = int(np.argmin(case.latency_us))
    default_us = math.inf if case.default is None else float(case.latency_us[case.default])
    among = list(order[:3]) if case.default is None else [*order[order != case.default][:2], case.default]
    verified = min(among, key=lambda row: case.latency_us[row])
    flops = operation(case.problem.operation).flops(case.problem) if _in_catalogue(case.problem) else math.nan
    return {
        "evidence": held_out.evidence[index],
        "problem": str(case.problem),
        "sizes": dict(case.problem.dims),
        "workload": held_out.workloads[index],
        "candidates": len(case.table),
        "flops": _short(flops),
        "best": str(case.table[best]),
        "best_us": _short(float(case.latency_us[best])),
        "default_us": _short(default_us),
        "first": str(case.table[int(order[0])]),
        "first_us": _short(float(case.latency_us[order[0]])),
        "verified": str(case.table[int(verified)]),
        "verified_us": _short(float(case.latency_us[verified])),
    }


def _points(held_out: HeldOut) -> dict[str, list[float | None]]:
    predicted = np.concatenate(held_out.predicted)
    measured = np.concatenate([case.latency_us for case in held_out.cases])
    rows = np.flatnonzero(np.isfinite(measured))
    # Every n-th: the same candidates each time, spread over all problems.
    rows = rows[:: max(-(-len(rows) // _POINTS), 1)]
    return {
        "predicted_us": [_short(value) for value in predicted[rows].tolist()],
        "measured_us": [_short(value) for value in measured[rows].tolist()],
    }


def _in_catalogue(problem: Problem) -> bool:
    return problem.operation in operation_names()


def _short(value: float) -> float | None:
    """Six digits; None for what JSON cannot hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
