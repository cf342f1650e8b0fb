"""The baselines on three problems made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kernelcast import kernels
from kernelcast.costmodel import AnalyticModel
from kernelcast.kernels import Candidate, CandidateTable, Problem
from kernelcast.kernels.devices import device
from kernelcast.training.baselines import (
    BestFixed,
    analytic_orders,
    baseline_curves,
    default_order,
    random_curves,
)
from kernelcast.training.data import FullTable

A100 = device("a100")
VENDOR = Candidate.of("vendor")


def tile(size: int) -> Candidate:
    return Candidate.of("triton_toy", {"tile": size})


def case(m: int, latency_us: dict[Candidate, float], operation: str = "toy") -> FullTable:
    problem = Problem(operation, (("m", m),), "float32")
    rows = list(latency_us)
    return FullTable(
        problem,
        A100,
        CandidateTable.of(rows),
        np.array([latency_us[row] for row in rows]),
        rows.index(VENDOR) if VENDOR in rows else None,
    )


def three() -> list[FullTable]:
    return [
        case(1, {VENDOR: 8.0, tile(16): 4.0, tile(32): 16.0}),
        case(2, {VENDOR: 2.0, tile(16): 4.0, tile(32): 1.0}),
        case(3, {VENDOR: 3.0, tile(16): math.inf, tile(64): 6.0}),
    ]


def test_the_default_alone_is_the_same_at_every_k():
    cases = three()
    assert [default_order(one).tolist() for one in cases] == [[0], [0], [0]]
    assert baseline_curves(cases, cases)["default"].tolist() == [[0.5] * 5, [0.5] * 5, [1.0] * 5]


def test_best_fixed_averages_slowdowns_over_the_problems_that_tried_the_candidate():
    fixed = BestFixed.fit(three())
    slowdown = {key: math.exp(value) for key, value in fixed.slowdown_log.items()}
    assert slowdown == pytest.approx(
        {
            VENDOR.key: 4 ** (1 / 3),  # 2, 2, 1
            tile(16).key: 4
            ** (1 / 3),  # 1, 4, and 1: it failed, so the default is charged, which is the best
            tile(32).key: 2.0,  # 4, 1
            tile(64).key: 2.0,
        }
    )


def test_best_fixed_ranks_what_is_present_and_unknown_candidates_last():
    fixed = BestFixed({VENDOR.key: 0.7, tile(16).key: 0.1, tile(64).key: 0.5})
    test = case(9, {VENDOR: 1.0, tile(8): 1.0, tile(16): 1.0, tile(32): 1.0})
    assert fixed.order(test).tolist() == [2, 0, 1, 3]


def test_best_fixed_is_judged_on_the_test_problems():
    train = [case(1, {VENDOR: 8.0, tile(16): 4.0, tile(32): 16.0})]
    test = [case(2, {VENDOR: 2.0, tile(16): 4.0, tile(32): 1.0})]
    # tile 16, then the vendor, then tile 32.
    assert baseline_curves(train, test)["best_fixed"].tolist() == [[0.25, 0.5, 1.0, 1.0, 1.0]]


def test_the_default_baseline_is_absent_where_no_problem_has_one():
    cases = [case(1, {tile(16): 4.0, tile(32): 16.0}), case(2, {tile(16): 4.0, tile(32): 1.0})]
    assert baseline_curves(cases, cases)["default"] is None


def test_random_is_the_expected_efficiency():
    cases = [case(m, {VENDOR: 1.0, tile(16): 4.0}) for m in range(400)]
    curves = random_curves(cases)
    # At k = 1 either of two: the mean of 1 and 1/4, over 20 orders of each problem.
    assert curves[:, 0].mean() == pytest.approx(0.625, abs=0.015)
    assert len(np.unique(curves[:, 0])) > 5
    assert (curves[:, 1:] == 1.0).all()


def test_random_orders_belong_to_the_problem():
    cases = three()
    np.testing.assert_array_equal(random_curves(cases)[::-1], random_curves(cases[::-1]))


def test_analytic_is_absent_without_the_operation_or_its_variants():
    assert analytic_orders(three()) is None
    assert baseline_curves(three(), three())["analytic"] is None
    problem = kernels.problem("gemm", m=64, n=64, k=64)
    table = CandidateTable.of([tile(16), tile(32)])
    assert analytic_orders([FullTable(problem, A100, table, np.array([1.0, 2.0]), None)]) is None


def test_analytic_ranks_as_the_analytic_model_does():
    problem = kernels.problem("gemm", m=64, n=64, k=65536, dtype="float16")
    table = CandidateTable(
        [*kernels.candidates(problem, A100, subset="default").blocks, *CandidateTable.of([tile(1)]).blocks]
    )
    found = analytic_orders([FullTable(problem, A100, table, np.arange(1.0, len(table) + 1), 0)])
    predicted = AnalyticModel().predict(problem, table, A100)
    assert found[0].tolist() == predicted.order().tolist()
    assert found[0][-1] == len(table) - 1
    assert (np.diff(predicted.log_latency[found[0][:-1]]) >= 0).all()
