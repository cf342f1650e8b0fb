"""How good a ranker is on problems that it did not see, beside the baselines on the same problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.costmodel import ProblemData, Ranker, RankingModel
from kernelcast.errors import ModelError
from kernelcast.kernels import CandidateTable, operation_names, variants
from kernelcast.training import adaptive
from kernelcast.training.baselines import BASELINES, baseline_curves
from kernelcast.training.data import FullTable, MeasuredProblem, folds_by_shape, full_table
from kernelcast.training.metrics import as_json, efficiency_curve, geometric_mean, statistics
from kernelcast.training.recipe import hyperparameters

if TYPE_CHECKING:
    from kernelcast.costmodel.estimator import CostModel

#: Each holds its own copy of the features.
_MOST_FITS_AT_A_TIME = 8
#: The rule whose breach no compiler refuses: the kernel is built and cannot be loaded.
_LOADING_RULE = "shared-memory"

#: Called after each fit with the number of fits done and in all.
OnProgress = Callable[[int, int], None]

Figures = Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class RankerScores:
    """What one ranker achieved on test problems.

    Attributes:
        curves: efficiency@k, float64 [problems, ks]; k as in :data:`kernelcast.training.metrics.KS`.
        curves_with_default: the same with the default among the k.
        standardised: for every working, covered candidate but the problem's best: the error of its predicted
            difference to the best in log latency, absolute, over the predicted ``error_log``. One array, all problems.
        fixed: efficiency with the default among the k, for each of :data:`kernelcast.training.adaptive.FIXED_KS`,
            [problems, ks].
        measured: candidates that :func:`kernelcast.costmodel.adaptive.choose` measures, for each of
            :data:`kernelcast.training.adaptive.CHOICES`, [problems, choices].
        adaptive: efficiency of the best of those, [problems, choices].
    """

    curves: np.ndarray
    curves_with_default: np.ndarray
    standardised: np.ndarray
    fixed: np.ndarray
    measured: np.ndarray
    adaptive: np.ndarray

    @property
    def efficiency(self) -> Figures:
        """``{"1": {"geomean", "p5", "worst"}, "2": ..., ...}``."""
        return as_json(statistics(self.curves))

    @property
    def efficiency_with_default(self) -> Figures:
        """The same with the default among the k."""
        return as_json(statistics(self.curves_with_default))

    @property
    def calibration(self) -> dict[str, float | None]:
        """Shares of the differences to the best that are off by at most 1 and 2 predicted standard deviations.

        Normally distributed errors would give 0.68 and 0.95. None where there is nothing to judge.
        """
        if not len(self.standardised):
            return {"within_1": None, "within_2": None}
        return {f"within_{n}": float(np.mean(self.standardised <= n)) for n in (1, 2)}

    @property
    def regret_over_measured(self) -> dict[str, Any]:
        """Regret and mean number of measurements, with k chosen for each problem and with one k for all."""
        return adaptive.summary(self.fixed, self.measured, self.adaptive)

    def to_json(self) -> dict[str, Any]:
        """Every figure as plain JSON values."""
        return {
            "efficiency": self.efficiency,
            "efficiency_with_default": self.efficiency_with_default,
            "calibration": self.calibration,
            "regret_over_measured": self.regret_over_measured,
        }


@dataclass(frozen=True)
class Evaluation:
    """The figures of one comparison. Efficiencies are ``{"1": {"geomean", "p5", "worst"}, ...}`` by k.

    Attributes:
        operation: what was ranked.
        device: the test problems' device.
        train_problems: problems fitted on; with folds, the mean over them.
        test_problems: problems judged.
        train_workloads: their workloads, sorted.
        test_workloads: their workloads, sorted.
        folds: folds by shape; None where training and test were given.
        seeds: models fitted, which differ in the seed alone.
        candidates_per_problem: mean over the test problems, failed candidates included.
        candidates_per_problem_min: the fewest.
        candidates_per_problem_max: the most.
        efficiency: mean of each statistic over the seeds.
        efficiency_with_default: the same with the default among the k.
        efficiency_std: sample standard deviation of ``efficiency`` over the seeds; None with one seed.
        baselines: efficiencies of each of :data:`kernelcast.training.baselines.BASELINES`; None where there is none.
        noise_floor: geometric mean of efficiency@1 where the first half of a candidate's samples chooses and the others
            judge, over the test problems whose every working candidate has two samples; None where there is none.
        noise_floor_problems: how many such problems there are.
        calibration: mean over the seeds of :attr:`RankerScores.calibration`.
        regret_over_measured: the same of :attr:`RankerScores.regret_over_measured`.
    """

    operation: str
    device: str
    train_problems: int
    test_problems: int
    train_workloads: tuple[str, ...]
    test_workloads: tuple[str, ...]
    folds: int | None
    seeds: int
    candidates_per_problem: float
    candidates_per_problem_min: int
    candidates_per_problem_max: int
    efficiency: Figures
    efficiency_with_default: Figures
    efficiency_std: Figures
    baselines: Mapping[str, Figures | None]
    noise_floor: float | None
    noise_floor_problems: int
    calibration: Mapping[str, float | None]
    regret_over_measured: Mapping[str, Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON values, by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def evaluate_ranker(model: Ranker, test: Sequence[ProblemData]) -> RankerScores:
    """Judge a fitted ranker. Failed candidates are ranked along with the others.

    Raises:
        ModelError: there is no test problem, or the ranker is of another operation.
    """
    return _score(model, _full_tables(test))


def evaluate(
    train: Sequence[ProblemData],
    test: Sequence[ProblemData],
    *,
    seeds: int = 5,
    estimator_params: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Fit a model for each seed on the training problems, and judge it on the test problems.

    Args:
        train: problems of one operation.
        test: problems whose shapes the training side does not have on this device; see
            :func:`kernelcast.training.data.split_workloads`.
        seeds: number of fits. The first takes the ``random_state`` of ``estimator_params`` (0 if not given), the
            next ones count on from it.
        estimator_params: parameters of the estimator other than :func:`kernelcast.training.recipe.hyperparameters`
            gives.
        on_progress: see :data:`OnProgress`.

    Raises:
        ModelError: a side is empty, shapes are on both sides, or a parameter is unknown.
    """
    return _evaluate([(train, test)], seeds, estimator_params, on_progress, folds=None)


def evaluate_folds(
    data: Sequence[ProblemData],
    folds: int = 5,
    *,
    seeds: int = 5,
    estimator_params: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Judge each problem once a seed, by a model that did not see its shape. All seeds share the folds.

    Arguments and errors as for :func:`evaluate`; ``data`` is cut by
    :func:`kernelcast.training.data.folds_by_shape`.
    """
    return _evaluate(folds_by_shape(data, folds, 0), seeds, estimator_params, on_progress, folds=folds)


def noise_floor(test: Sequence[ProblemData]) -> tuple[float | None, int]:
    """(efficiency, problems): see :attr:`Evaluation.noise_floor`."""
    found = []
    for item in test:
        halves = item.halves if isinstance(item, MeasuredProblem) else None
        if halves is not None and np.isfinite(halves).all():
            first, others = halves
            found.append(np.exp(others.min() - others[np.argmin(first)]))
    return (geometric_mean(np.array(found)) if found else None), len(found)


def _evaluate(
    splits: Sequence[tuple[Sequence[ProblemData], Sequence[ProblemData]]],
    seeds: int,
    estimator_params: Mapping[str, Any] | None,
    on_progress: OnProgress | None,
    *,
    folds: int | None,
) -> Evaluation:
    if seeds < 1:
        raise ModelError(f"{seeds} seeds are not possible; take at least 1.")
    _estimator(1, estimator_params, 0, 1)  # a mistake in the parameters shows before the work
    for train, test in splits:
        _refuse_leaks(train, test)
    tables = [_full_tables(test) for _, test in splits]
    cases = [case for held_out in tables for case in held_out]
    baselines = [
        baseline_curves([full_table(item) for item in train], held_out)
        for (train, _), held_out in zip(splits, tables, strict=True)
    ]
    fits = [(split, seed) for split in range(len(splits)) for seed in range(seeds)]
    workers, threads = _share_cores(len(fits))
    scores: dict[tuple[int, int], RankerScores] = {}
    with ThreadPoolExecutor(workers) as pool:
        running = {
            pool.submit(_fit_and_score, splits[split][0], tables[split], estimator_params, seed, threads): (
                split,
                seed,
            )
            for split, seed in fits
        }
        try:
            for done, future in enumerate(as_completed(running), 1):
                scores[running[future]] = future.result()
                if on_progress is not None:
                    on_progress(done, len(fits))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

    joined = [_joined([scores[split, seed] for split in range(len(splits))]) for seed in range(seeds)]
    plain = np.array([statistics(one.curves) for one in joined])
    spread = plain.std(axis=0, ddof=1) if seeds > 1 else np.full_like(plain[0], np.nan)
    sizes = [len(case.table) for case in cases]
    judged = [item for _, test in splits for item in test]
    fitted = [item for train, _ in splits for item in train]
    floor, floor_problems = noise_floor(judged)
    return Evaluation(
        operation=cases[0].problem.operation,
        device=cases[0].device.name,
        train_problems=round(len(fitted) / len(splits)),
        test_problems=len(cases),
        train_workloads=tuple(sorted({item.workload for item in fitted})),
        test_workloads=tuple(sorted({item.workload for item in judged})),
        folds=folds,
        seeds=seeds,
        candidates_per_problem=float(np.mean(sizes)),
        candidates_per_problem_min=min(sizes),
        candidates_per_problem_max=max(sizes),
        efficiency=as_json(plain.mean(axis=0)),
        efficiency_with_default=as_json(
            np.mean([statistics(one.curves_with_default) for one in joined], axis=0)
        ),
        efficiency_std=as_json(spread),
        baselines={name: _baseline([fold[name] for fold in baselines]) for name in BASELINES},
        noise_floor=floor,
        noise_floor_problems=floor_problems,
        calibration=_mean_calibration(joined),
        regret_over_measured=adaptive.mean_over_seeds([one.regret_over_measured for one in joined]),
    )


def _fit_and_score(
    train: Sequence[ProblemData],
    held_out: Sequence[FullTable],
    estimator_params: Mapping[str, Any] | None,
    seed: int,
    threads: int,
) -> RankerScores:
    return _score(RankingModel.fit(train, _estimator(len(train), estimator_params, seed, threads)), held_out)


def _share_cores(fits: int) -> tuple[int, int]:
    """(fits at a time, threads of each). Whole fits side by side use cores better than the threads of one fit do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(fits, cores, _MOST_FITS_AT_A_TIME)
    return workers, max(cores // workers, 1)


def _score(model: Ranker, cases: Sequence[FullTable]) -> RankerScores:
    curves, with_default, standardised = [], [], []
    fixed, measured, chosen = [], [], []
    for case in cases:
        prediction = model.predict(case.problem, case.table, case.device)
        order = prediction.order()
        curves.append(efficiency_curve(case.latency_us, order, default=case.default))
        with_default.append(efficiency_curve(case.latency_us, order, default=case.default, with_default=True))
        fixed.append(adaptive.fixed_curve(prediction, case))
        count, efficiency = adaptive.adaptive_choice(prediction, case)
        measured.append(count)
        chosen.append(efficiency)

        best = int(np.argmin(case.latency_us))
        judged = np.isfinite(case.latency_us) & prediction.covered
        if judged[best]:
            judged[best] = False
            true = np.log(case.latency_us[judged] / case.latency_us[best])
            predicted = prediction.log_latency[judged] - prediction.log_latency[best]
            standardised.append(np.abs(true - predicted) / prediction.error_log[judged])
    return RankerScores(
        np.array(curves),
        np.array(with_default),
        np.concatenate(standardised) if standardised else np.zeros(0),
        np.array(fixed),
        np.array(measured),
        np.array(chosen),
    )


def _loads(case: FullTable) -> np.ndarray:
    """Which candidates the device can load, by the catalogue's rules: bool [rows]."""
    known = variants(case.problem.operation) if case.problem.operation in operation_names() else {}
    fits = []
    for block in case.table.blocks:
        rules = known[block.variant].rules if block.variant in known else ()
        met = [
            rule.met(case.problem, block.columns, case.device, block.length)
            for rule in rules
            if rule.name == _LOADING_RULE
        ]
        fits.append(np.logical_and.reduce([np.ones(block.length, dtype=bool), *met]))
    return np.concatenate(fits)


def rankable(case: FullTable) -> FullTable:
    """A problem without the candidates that failed and that the rules refuse beforehand: no ranker here ever sees them."""
    kept = _loads(case) | np.isfinite(case.latency_us)
    if kept.all():
        return case
    blocks, start = [], 0
    for block in case.table.blocks:
        blocks.append(block.take(np.flatnonzero(kept[start : start + block.length])))
        start += block.length
    return replace(
        case,
        table=CandidateTable(blocks),
        latency_us=case.latency_us[kept],
        default=None if case.default is None else int(kept[: case.default].sum()),
    )


def _full_tables(test: Sequence[ProblemData]) -> list[FullTable]:
    if not test:
        raise ModelError("There is no test problem to judge a model by.")
    return [rankable(full_table(item)) for item in test]


def _refuse_leaks(train: Sequence[ProblemData], test: Sequence[ProblemData]) -> None:
    """Refuse a test shape that was measured on the same device for training, in whatever dtype or layout."""
    seen = {(item.device.fingerprint, item.problem.shape) for item in train}
    leaked = [item.problem for item in test if (item.device.fingerprint, item.problem.shape) in seen]
    if leaked:
        raise ModelError(
            f"The shapes of {len(leaked)} test problems are also in training, the first {leaked[0]}. "
            "Split by workload or by shape, so that the scores are of problems that the model has not seen."
        )


def _estimator(problems: int, params: Mapping[str, Any] | None, seed: int, threads: int) -> CostModel:
    from kernelcast.costmodel.estimator import CostModel

    full = hyperparameters(problems, {"n_jobs": threads, **(params or {})})
    return CostModel(**{**full, "random_state": full["random_state"] + seed})


def _joined(scores: Sequence[RankerScores]) -> RankerScores:
    return RankerScores(
        *(np.concatenate([getattr(one, field.name) for one in scores]) for field in fields(RankerScores))
    )


def _baseline(folds: Sequence[np.ndarray | None]) -> Figures | None:
    present = [curves for curves in folds if curves is not None]
    # A baseline that one fold lacks would be judged on other problems than the rest.
    return as_json(statistics(np.concatenate(present))) if len(present) == len(folds) else None


def _mean_calibration(scores: Sequence[RankerScores]) -> dict[str, float | None]:
    found = [one.calibration for one in scores]
    if any(value is None for one in found for value in one.values()):
        return dict.fromkeys(found[0])
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}
