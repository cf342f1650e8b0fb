"""The benchmarks of tuned Triton kernels run, and their figures are what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import triton_dispatch
import triton_ranking
from bench_data import A100_FILE, ABSENT


@pytest.mark.slow
def test_the_dispatch_benchmark_times_each_way_of_launching():
    found = triton_dispatch.main(quick=True)
    assert len(found["figures"]) == 7 + 2  # the reference loop and its twin
    assert all(each["us"] > 0 for each in found["figures"].values())
    assert len(found["tables"][1]["rows"]) == len(found["added_us"]) == 5
    assert found["overhead_ratio"] == pytest.approx(
        found["added_us"][triton_dispatch._OURS] / found["added_us"][triton_dispatch._THEIRS]
    )


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif(not A100_FILE.is_file(), reason=ABSENT)
def test_a_few_timings_of_recorded_products_come_near_all():
    found = triton_ranking.main(quick=True)
    assert [len(row) for row in found["tables"][0]["rows"]] == [6] * 6
    for figures in found["figures"].values():
        assert figures["default alone"] <= figures["random"] + 1e-12 <= 1 + 1e-12
        # After forty keys, the cold ones included.
        assert figures["nearest"] > max(0.88, figures["default alone"])
