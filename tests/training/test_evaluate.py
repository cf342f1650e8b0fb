"""Evaluation end to end, on data whose winner a feature decides."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from kernelcast import kernels
from kernelcast.costmodel import Prediction, ProblemData
from kernelcast.errors import ModelError
from kernelcast.kernels import Candidate, CandidateTable, Problem
from kernelcast.kernels.devices import device
from kernelcast.training.data import MeasuredProblem
from kernelcast.training.evaluate import (
    _full_tables,
    evaluate,
    evaluate_folds,
    evaluate_ranker,
    noise_floor,
)

A100 = device("a100")
VENDOR = Candidate.of("vendor")
TILES = (16, 32, 64, 128, 256)
QUICK = {
    "n_estimators": 120,
    "max_depth": 5,
    "learning_rate": 0.15,
    "error_folds": 0,
    "n_jobs": 1,
}


def tile(size: int) -> Candidate:
    return Candidate.of("triton_toy", {"tile": size})


def synthetic(m: int, n: int, workload: str = "net") -> ProblemData:
    """The tile nearest to sqrt(m) is the fastest, each factor of two beside it costs 40%; the vendor is in between.

    Tile 256 does not work where m is below 64.
    """
    distance = np.abs(np.log2(TILES) - math.log2(m) / 2)
    tiles_us = m * n * 1e-3 * 1.4**distance
    works = [size < 256 or m >= 64 for size in TILES]
    candidates = [VENDOR, *(tile(s) for s, ok in zip(TILES, works, strict=True) if ok)]
    latency_us = np.array([m * n * 1e-3 * 1.6, *tiles_us[works]])
    return MeasuredProblem(
        Problem("toy", (("m", m), ("n", n)), "float32"),
        A100,
        CandidateTable.of(candidates),
        np.log(latency_us),
        np.full(len(candidates), math.nan),
        failed=tuple(tile(s) for s, ok in zip(TILES, works, strict=True) if not ok),
        workload=workload,
        halves=np.log([latency_us, latency_us]),
    )


def network(workload: str, count: int, seed: int) -> list[ProblemData]:
    rng = np.random.default_rng(seed)
    exponents = rng.uniform([5, 3], [16, 10], (count, 2))
    shapes = sorted({(int(2**a), int(2**b)) for a, b in exponents})
    return [synthetic(m, n, workload) for m, n in shapes]


class Fixed:
    """A ranker that predicts what it was told."""

    def __init__(self, log_latency: list[float], error_log: float, covered: list[bool] | None = None) -> None:
        self.prediction = Prediction(
            np.array(log_latency),
            np.full(len(log_latency), error_log),
            np.array(covered or [True] * len(log_latency)),
        )

    def predict(self, problem, table, device) -> Prediction:
        return self.prediction


def hand_made() -> ProblemData:
    """Rows of its full table: vendor 4 us, tile 16 fails, tile 32 1 us, tile 64 2 us."""
    return ProblemData(
        Problem("toy", (("m", 1),), "float32"),
        A100,
        CandidateTable.of([VENDOR, tile(32), tile(64)]),
        np.log([4.0, 1.0, 2.0]),
        np.full(3, math.nan),
        failed=(tile(16),),
    )


def test_a_ranker_that_picks_a_failure_is_charged_the_default():
    # Ranks the failed tile 16, then tile 64, the vendor, tile 32.
    scores = evaluate_ranker(Fixed([3.0, 1.0, 4.0, 2.0], 1.0), [hand_made()])
    assert scores.curves.tolist() == [[0.25, 0.5, 0.5, 1.0, 1.0]]
    # With the default: the failure; the failure and the vendor; those and tile 64; all.
    assert scores.curves_with_default.tolist() == [[0.25, 0.25, 0.5, 1.0, 1.0]]
    assert scores.efficiency["2"] == pytest.approx({"geomean": 0.5, "p5": 0.5, "worst": 0.5})
    assert scores.efficiency_with_default["2"]["worst"] == 0.25


def test_calibration_counts_the_differences_to_the_best():
    # Measured differences to tile 32: vendor log 4, tile 64 log 2. Predicted: 1.5 and 0, off by 0.11 and 0.69.
    scores = evaluate_ranker(Fixed([1.5, 0.0, 0.0, 0.0], 0.4), [hand_made()])
    assert sorted(scores.standardised) == pytest.approx([(1.5 - math.log(4)) / 0.4, math.log(2) / 0.4])
    assert scores.calibration == {"within_1": 0.5, "within_2": 1.0}
    assert scores.to_json()["calibration"] == scores.calibration


def test_calibration_leaves_out_what_the_model_does_not_cover():
    scores = evaluate_ranker(Fixed([1.5, 0.0, 0.0, 0.0], 0.4, [True, True, True, False]), [hand_made()])
    assert len(scores.standardised) == 1
    scores = evaluate_ranker(Fixed([1.5, 0.0, 0.0, 0.0], 0.4, [True, True, False, True]), [hand_made()])
    assert scores.calibration == {"within_1": None, "within_2": None}


def test_an_empty_side_is_refused():
    with pytest.raises(ModelError, match="no measured problem to fit on"):
        evaluate([], [hand_made()], seeds=1)
    with pytest.raises(ModelError, match="no test problem"):
        evaluate([hand_made()], [], seeds=1)
    with pytest.raises(ModelError, match="no test problem"):
        evaluate_ranker(Fixed([0.0], 1.0), [])


def test_noise_floor_chooses_by_one_half_and_judges_by_the_other():
    one = synthetic(1024, 8)
    halves = np.log([[1.0, 2, 3, 4, 5, 6], [8.0, 4, 2, 9, 9, 9]])
    noisy = MeasuredProblem(**{**vars(one), "halves": halves})
    assert noise_floor([noisy]) == (pytest.approx(0.25), 1)
    assert noise_floor([noisy, one]) == (pytest.approx(0.5), 2)
    halves = halves.copy()
    halves[:, 3] = math.nan
    single = MeasuredProblem(**{**vars(one), "halves": halves})
    assert noise_floor([noisy, single]) == (pytest.approx(0.25), 1)
    assert noise_floor([single, hand_made()]) == (None, 0)


@pytest.fixture(scope="module")
def held_out():
    train, test = network("train", 150, 0), network("test", 60, 1)
    shapes = {one.problem.shape for one in train}
    test = [one for one in test if one.problem.shape not in shapes]
    return train, test, evaluate(train, test, seeds=2, estimator_params=QUICK)


def test_the_model_finds_what_decides_and_chance_does_not(held_out):
    train, test, result = held_out
    assert result.efficiency["1"]["geomean"] > 0.98
    assert result.baselines["random"]["1"]["geomean"] < 0.8
    assert result.baselines["default"]["1"] == result.baselines["default"]["10"]
    assert result.baselines["default"]["1"]["geomean"] < 0.8
    assert result.baselines["best_fixed"]["1"]["geomean"] < result.efficiency["1"]["geomean"]
    assert result.baselines["analytic"] is None
    assert result.efficiency["10"] == pytest.approx({"geomean": 1.0, "p5": 1.0, "worst": 1.0})
    # Six candidates, of which one is the default: at k = 2 it takes a place that the model would use better.
    assert result.efficiency_with_default["1"] == result.efficiency["1"]
    assert result.efficiency_with_default["2"]["geomean"] <= result.efficiency["2"]["geomean"]
    assert (result.train_problems, result.test_problems) == (len(train), len(test))
    assert result.noise_floor == pytest.approx(1.0)


def test_the_figures_have_their_names(held_out):
    _, _, result = held_out
    figures = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert set(figures) == {
        "operation", "device", "train_problems", "test_problems", "train_workloads", "test_workloads", "folds",
        "seeds", "candidates_per_problem", "candidates_per_problem_min", "candidates_per_problem_max", "efficiency",
        "efficiency_with_default", "efficiency_std", "baselines", "noise_floor", "noise_floor_problems", "calibration",
        "regret_over_measured",
    }  # fmt: skip
    assert list(figures["regret_over_measured"]["fixed"]) == [str(k) for k in range(1, 11)]
    assert figures["regret_over_measured"]["fixed"]["3"] == pytest.approx(
        1.0 - figures["efficiency_with_default"]["3"]["geomean"]
    )
    for target, row in figures["regret_over_measured"]["problem"].items():
        assert 0.0 <= row["regret"] <= max(2.0 * float(target), 0.02)
        assert 1.0 <= row["measured"] <= 6.0
    assert (figures["operation"], figures["device"]) == ("toy", "a100-sxm4-80gb")
    assert (figures["train_workloads"], figures["test_workloads"]) == (["train"], ["test"])
    # The failed candidates count: they were tried.
    assert figures["candidates_per_problem"] == 6.0
    assert set(figures["efficiency"]) == {"1", "2", "3", "5", "10"}
    for by_k in (figures["efficiency"], figures["efficiency_with_default"], figures["efficiency_std"]):
        assert all(set(statistics) == {"geomean", "p5", "worst"} for statistics in by_k.values())
    assert set(figures["baselines"]) == {"default", "best_fixed", "analytic", "random"}


def test_the_same_seeds_give_the_same_figures(held_out):
    train, test, result = held_out
    steps: list[tuple[int, int]] = []
    again = evaluate(
        train,
        test,
        seeds=2,
        estimator_params=QUICK,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    assert json.dumps(again.to_json()) == json.dumps(result.to_json())
    assert steps == [(1, 2), (2, 2)]


def test_seeds_are_averaged_each_with_its_own_model():
    train, test = network("train", 40, 0), network("test", 20, 1)
    params = {**QUICK, "n_estimators": 5}
    both = evaluate(train, test, seeds=2, estimator_params=params)
    single = [evaluate(train, test, seeds=1, estimator_params={**params, "random_state": s}) for s in (0, 1)]
    values = [one.efficiency["1"]["geomean"] for one in single]
    assert values[0] != values[1]
    assert both.efficiency["1"]["geomean"] == pytest.approx(np.mean(values))
    assert both.efficiency_std["1"]["geomean"] == pytest.approx(np.std(values, ddof=1))
    assert single[0].efficiency_std["1"]["geomean"] is None


def test_a_shape_on_both_sides_is_refused():
    train, test = network("train", 20, 0), network("test", 10, 1)
    with pytest.raises(ModelError, match="shapes of 1 test problems are also in training"):
        evaluate(train, [*test, train[0]], seeds=1, estimator_params=QUICK)


def test_folds_judge_every_problem_by_a_model_that_did_not_see_its_shape():
    data = network("net", 60, 0)
    result = evaluate_folds(data, 3, seeds=1, estimator_params=QUICK)
    assert (result.test_problems, result.train_problems, result.folds) == (
        len(data),
        round(len(data) * 2 / 3),
        3,
    )
    assert result.efficiency["1"]["geomean"] > 0.9
    assert result.baselines["random"]["1"]["geomean"] < 0.8


@pytest.mark.parametrize(
    ("params", "seeds", "message"),
    [({"depth": 3}, 1, "no parameter depth. It has: .*max_depth"), ({}, 0, "0 seeds are not possible")],
)
def test_impossible_arguments_are_refused(params, seeds, message):
    train, test = network("train", 5, 0), network("test", 5, 1)
    with pytest.raises(ModelError, match=message):
        evaluate(train, test, seeds=seeds, estimator_params=params)


def test_a_tile_that_failed_and_cannot_be_loaded_is_shown_to_no_ranker():
    sides = {"block_m": 128, "block_n": 128, "group_m": 8, "num_warps": 8}
    large = Candidate.of("triton_tiled", {**sides, "block_k": 128, "num_stages": 5})
    good, fails = (
        Candidate.of("triton_tiled", {**sides, "block_k": 32, "num_stages": stages}) for stages in (3, 2)
    )
    item = ProblemData(
        kernels.problem("gemm", m=512, n=512, k=512, dtype="float32"),
        device("a100-sxm4-80gb"),
        CandidateTable.of([Candidate("vendor"), good]),
        np.log([8.0, 4.0]),
        np.full(2, np.nan),
        failed=(large,),
    )

    class TableOrder:
        operation = "gemm"

        def predict(self, problem, table, where):
            assert list(table) == [Candidate("vendor"), good]
            return Prediction(np.arange(2.0), np.ones(2), np.ones(2, dtype=bool))

    scores = evaluate_ranker(TableOrder(), [item])
    assert scores.efficiency["1"]["geomean"] == pytest.approx(0.5)
    assert scores.efficiency["2"]["geomean"] == pytest.approx(1.0)
    # What failed for another reason stays, as a selection may rank it.
    assert len(_full_tables([replace(item, failed=(fails,))])[0].table) == 3
