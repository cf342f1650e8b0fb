"""The page on adaptive k, from hand-made figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import adaptive_k
from bench_tables import plain, write_result


def figures(problems: int, regret: float, measured: float, fixed: list[float]) -> dict:
    return {
        "problems": problems,
        "candidates_per_problem": 30.0,
        "calibration": {"within_1": 0.66, "within_2": 0.93},
        "fixed": {str(k): value for k, value in enumerate(fixed, 1)},
        "mean": {"0.005": {"regret": regret, "measured": measured, "fixed_k": 3}},
        "problem": {"0.005": {"regret": regret / 2, "measured": measured + 1, "fixed_k": 4}},
    }


FOUND = {
    "hf": figures(100, 0.002, 2.0, [0.05, 0.01, 0.002, 0.001]),
    "timm": figures(300, 0.006, 4.0, [0.08, 0.02, 0.006, 0.003]),
}


def test_all_problems_count_alike_in_the_whole():
    found = adaptive_k.pooled(FOUND)
    assert found["problems"] == 400
    assert found["mean"]["0.005"]["measured"] == pytest.approx(3.5)
    assert found["problem"]["0.005"]["measured"] == pytest.approx(4.5)
    assert found["mean"]["0.005"]["regret"] == pytest.approx(1 - 0.998**0.25 * 0.994**0.75)
    assert found["fixed"]["2"] == pytest.approx(1 - 0.99**0.25 * 0.98**0.75)
    assert found["mean"]["0.005"]["fixed_k"] == 3


def test_each_part_of_the_goal_is_judged():
    met = adaptive_k.goals(FOUND)
    assert met["mean"]["hf"] == {
        "regret": 0.002,
        "measured": 2.0,
        "held": True,
        "few": True,
        "fewer_than_fixed": True,
    }
    timm = met["mean"]["timm"]
    assert timm["held"] is timm["few"] is timm["fewer_than_fixed"] is False
    assert met["problem"]["timm"]["held"] is True
    note = adaptive_k.goal_notes(met)[0]
    assert "hf 0.20% with 2.00 measured (held, at most 3 measured, fewer than one k for all)" in note
    assert "timm 0.60% with 4.00 measured (not held, more than 3 measured, no fewer than" in note


def test_the_page_is_written(tmp_path):
    result = {"title": "Adaptive", "figures": FOUND, **adaptive_k.page(FOUND, 1)}
    text = write_result(tmp_path, "adaptive_k", {"date": "d"}, result)[0].read_text()
    assert "| mean | 0.5% | 0.20% | 2.00 | 3 (0.20%) |" in text
    assert "## all together: 400 problems" in text
    assert "| hf | 0.66 | 0.93 |" in text
    assert "mean of 1 seed." in text.lower()
    assert plain(result)["goals"]["mean"]["hf"]["held"] is True
