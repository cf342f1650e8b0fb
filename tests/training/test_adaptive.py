"""Regret against measurements: k chosen for each problem beside one k for all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kernelcast.costmodel import Prediction
from kernelcast.costmodel.adaptive import Calibration, Curve
from kernelcast.kernels import Candidate, CandidateTable, Problem
from kernelcast.kernels.devices import device
from kernelcast.training.adaptive import (
    FIXED_KS,
    adaptive_choice,
    fixed_curve,
    mean_over_seeds,
    smallest_k,
    summary,
)
from kernelcast.training.data import FullTable

A100 = device("a100")


def case(*latency_us: float, default: int | None = 0) -> FullTable:
    candidates = [Candidate.of("tiled", {"tile": row}) for row in range(len(latency_us))]
    return FullTable(
        Problem("toy", (("m", 1),), "float32"),
        A100,
        CandidateTable.of(candidates),
        np.array(latency_us),
        default,
    )


def predicted(latency_us, error=0.05) -> Prediction:
    same = Curve((1.0,), (1.0,))
    return Prediction(
        np.log(latency_us),
        np.full(len(latency_us), error),
        np.ones(len(latency_us), dtype=bool),
        Calibration(same, same, same, 1.0, 50),
    )


def test_what_is_measured_counts_the_default_and_the_best_of_it_is_taken():
    # Told apart with ease: the default and the first. The first is in truth slower than the third.
    measured, efficiency = adaptive_choice(
        predicted([4.0, 1.0, 3.0]), case(4.0, 2.0, 1.0), (("mean", 0.001), ("problem", 0.01))
    )
    assert measured.tolist() == [2, 2]
    assert efficiency.tolist() == [0.5, 0.5]
    # Cannot be told apart: all of them.
    measured, efficiency = adaptive_choice(
        predicted([1.0, 1.0, 1.0], 0.5), case(4.0, 2.0, 1.0), (("problem", 0.001),)
    )
    assert (measured.tolist(), efficiency.tolist()) == ([3], [1.0])


def test_what_does_not_work_counts_and_the_default_is_charged_where_nothing_works():
    measured, efficiency = adaptive_choice(
        predicted([4.0, 1.0, 3.0]), case(4.0, np.inf, 1.0), (("problem", 0.01),)
    )
    assert (measured.tolist(), efficiency.tolist()) == ([2], [0.25])
    # Without a default the slowest that works is charged.
    measured, efficiency = adaptive_choice(
        predicted([4.0, 1.0, 3.0]), case(4.0, np.inf, 1.0, default=None), (("problem", 0.01),)
    )
    assert (measured.tolist(), efficiency.tolist()) == ([1], [0.25])


def test_the_fixed_k_has_the_default_among_them():
    found = fixed_curve(predicted([4.0, 1.0, 3.0]), case(4.0, 2.0, 1.0))
    assert len(found) == len(FIXED_KS) == 10
    assert found.tolist()[:4] == [0.5, 0.5, 1.0, 1.0]


def test_figures_are_means_over_problems_and_seeds():
    fixed = np.array([[0.5, 0.98, *[1.0] * 8], [1.0] * 10])
    one = summary(fixed, np.array([[2.0], [4.0]]), np.array([[0.98], [1.0]]), (("problem", 0.01),))
    assert one["fixed"]["1"] == pytest.approx(1 - np.sqrt(0.5))
    row = one["problem"]["0.01"]
    assert row == {"regret": pytest.approx(1 - np.sqrt(0.98)), "measured": 3.0, "fixed_k": 2}
    other = summary(fixed, np.array([[3.0], [5.0]]), np.array([[1.0], [1.0]]), (("problem", 0.01),))
    both = mean_over_seeds([one, other])
    assert both["problem"]["0.01"]["measured"] == 3.5
    assert both["problem"]["0.01"]["regret"] == pytest.approx((1 - np.sqrt(0.98)) / 2)
    assert both["problem"]["0.01"]["fixed_k"] == 3
    assert json.loads(json.dumps(both, allow_nan=False)) == both


def test_no_k_may_be_enough():
    assert smallest_k([0.5] * 10, 0.4) is None
    assert smallest_k([0.5, 0.4, *[0.1] * 8], 0.4) == 2
