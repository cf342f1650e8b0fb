"""Racing against fixed rounds: the page from hand-made figures, and one small comparison."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cases import for_each

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import racing

from kernelcast.kernels import problem


def figures(**changes: Any) -> dict[str, Any]:
    return {
        "problem": "p",
        "candidates": 3,
        "fixed": "vendor",
        "race": "vendor",
        "regret": 0.0,
        "regret_error": 0.0,
        "fixed_seconds": 4.0,
        "race_seconds": 1.0,
        "share": 0.25,
        "fixed_samples": 120,
        "race_samples": 30,
        **changes,
    }


def test_the_page_sums_times_and_names_what_is_beyond_the_promise() -> None:
    found = [
        figures(),
        figures(race="other", regret=0.05, regret_error=0.01, race_seconds=3.0),
        # Within its noise of the promise.
        figures(race="other", regret=0.03, regret_error=0.02),
    ]
    page = racing.page(found, 40)
    assert (page["share"], page["largest_regret"]) == (5.0 / 12.0, 0.05)
    assert [row[1] for row in page["tables"][0]["rows"]] == ["41.7%", "5.00%", 1, 1]
    assert [row[4] for row in page["tables"][1]["rows"]] == ["same", "5.00% ± 1.00%", "3.00% ± 2.00%"]


@for_each(("operation", "dims"), racing.PROBLEMS)
def test_the_problems_are_of_the_catalogue(operation: str, dims: dict[str, int]) -> None:
    assert problem(operation, **dims, threads=1).operation == operation


@pytest.mark.slow
def test_one_small_problem_is_timed_both_ways() -> None:
    found = racing.compare("softmax", {"rows": 8, "columns": 64}, 4, race_first=True)
    assert found["fixed_samples"] == 4 * found["candidates"]
    assert found["candidates"] <= found["race_samples"] <= 2 * found["candidates"]
    assert found["share"] == found["race_seconds"] / found["fixed_seconds"] > 0
    assert found["regret"] > -1
    if found["race"] == found["fixed"]:
        assert (found["regret"], found["regret_error"]) == (0.0, 0.0)
