"""The benchmarks: tables and files from hand-made numbers, rounds of calls, and the command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import for_each

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_data
import bench_rounds
import recorded_a100
import selection_speed
import training_speed
from bench_tables import markdown_table, plain, shown, write_result

from kernelcast.kernels import candidates, problem
from kernelcast.kernels.devices import device


def test_a_table_puts_numbers_right_and_text_left() -> None:
    table = markdown_table(["what", "us", "note"], [["a|b", 1.23456, "x\ny"], ["c", None, ""]])
    assert table == "| what | us | note |\n|:---|---:|:---|\n| a\\|b | 1.23 | x y |\n| c | - |  |\n"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="A row has 1 cells and the table 2 columns"):
        markdown_table(["a", "b"], [["x"]])


@for_each(
    ("value", "text"),
    [
        (0.00012345, "0.000123"),
        (0.5, "0.500"),
        (12.345, "12.3"),
        (123.0, "123"),
        (1234.5, "1,234"),
        (31_164_000, "31,164,000"),
        (float("nan"), "-"),
        (True, "yes"),
        (None, "-"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: Any, text: str) -> None:
    assert shown(value) == text


def test_a_result_becomes_two_files_with_date_device_versions_and_command(tmp_path: Path) -> None:
    header = {
        "date": "2026-01-02",
        "machine": "epyc-2c",
        "versions": "torch 2.9",
        "command": "run.py --only x",
    }
    result = {
        "title": "Speed",
        "figures": {"a": np.float64(1.5), "b": float("nan"), "c": np.array([1, 2])},
        "tables": [{"title": "Medians", "columns": ["what", "us"], "rows": [["a", 1.5]]}],
        "notes": ["Noise: 2%."],
    }
    paths = write_result(tmp_path / "results", "speed", header, result)
    assert [path.name for path in paths] == ["speed.md", "speed.json"]
    assert paths[0].read_text() == (
        "# Speed\n\n- date: 2026-01-02\n- machine: epyc-2c\n- versions: torch 2.9\n- command: run.py --only x\n\n"
        "## Medians\n\n| what | us |\n|:---|---:|\n| a | 1.50 |\n\n- Noise: 2%.\n"
    )
    kept = json.loads(paths[1].read_text())
    assert kept["figures"] == {"a": 1.5, "b": None, "c": [1, 2]}
    assert (kept["date"], kept["title"]) == ("2026-01-02", "Speed")
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["speed.json", "speed.md"]


def test_a_skipped_benchmark_says_why(tmp_path: Path) -> None:
    path, _ = write_result(tmp_path, "x", {"date": "d"}, {"title": "T", "skipped": "the data are absent"})
    assert path.read_text() == "# T\n\n- date: d\n\nSkipped: the data are absent\n"


def test_plain_values_hold_no_numpy_and_no_infinity() -> None:
    assert plain({1: (np.int64(2), float("inf"), Path("a"))}) == {"1": [2, None, "a"]}


def test_figures_are_medians_quartiles_and_ratios_to_the_loop() -> None:
    samples = {
        "work": np.array([10.0, 20.0, 30.0, 40.0, 50.0]),
        bench_rounds.REFERENCE: np.array([1.0, 2.0, 3.0, 4.0, 10.0]),
        bench_rounds.REFERENCE_AGAIN: np.array([1.0, 2.0, 3.0, 4.0, 11.0]),
    }
    figures = bench_rounds.summarise(samples)
    assert figures["work"] == {
        "us": 30.0,
        "spread": pytest.approx(20.0 / 30.0),
        # In each round, not of the medians: 10, 10, 10, 10, 5.
        "loops": 10.0,
    }
    note = bench_rounds.noise_note(figures, 5)
    assert "Medians of 5 interleaved rounds" in note
    assert "its ratio was 1.000" in note
    rows = selection_speed.speed_table(figures)["rows"]
    assert rows[0] == ["work", 30.0, 10.0, "66.7%"]


def test_rounds_call_everything_in_every_round() -> None:
    counts = {"a": 0, "b": 0}

    def call(name: str) -> None:
        counts[name] += 1

    samples = bench_rounds.rounds({"a": lambda: call("a"), "b": lambda: call("b")}, 3)
    assert set(samples) == {"a", "b", bench_rounds.REFERENCE, bench_rounds.REFERENCE_AGAIN}
    for values in samples.values():
        assert values.shape == (3,)
        assert (values > 0).all()
    # Two to learn the repeats, then in each round one that is dropped and at least one that counts.
    assert min(counts.values()) >= 2 + 3 * 2


def test_rows_are_taken_at_even_distances_and_stay_legal() -> None:
    where = device(bench_data.DEVICE)
    described = problem("gemm", m=1024, n=4096, k=4096, dtype="float16", layout="nt")
    table = candidates(described, where, subset="default")
    few = selection_speed.some_rows(table, 5)
    assert len(few) == 5
    assert (few[0], few[4]) == (table[0], table[len(table) - 1])
    assert {each.key for each in few} <= {each.key for each in table}
    with pytest.raises(
        ValueError, match=f"There are {len(table)} legal candidates; {len(table) + 1} were asked"
    ):
        selection_speed.some_rows(table, len(table) + 1)


def test_made_up_problems_repeat_and_follow_the_roofline_with_noise() -> None:
    first, again = bench_data.synthetic_problems(3), bench_data.synthetic_problems(3)
    assert [item.problem for item in first] == [item.problem for item in again]
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.log_latency, other.log_latency)
        assert len(one.table) > 20


def statistics_of(geomean: float) -> dict[str, float]:
    return {"geomean": geomean, "p5": 0.8, "worst": 0.5}


def evaluation(geomeans: tuple[float, ...], default: bool = True) -> dict[str, Any]:
    curve = {k: statistics_of(value) for k, value in zip(("1", "2", "3", "5", "10"), geomeans, strict=True)}
    return {
        "efficiency": curve,
        "efficiency_with_default": curve,
        "efficiency_std": {k: {"geomean": 0.004, "p5": None, "worst": None} for k in curve},
        "baselines": {
            "default": curve if default else None,
            "best_fixed": curve,
            "analytic": None,
            "random": curve,
        },
        "test_problems": 276,
        "train_problems": 3000,
        "candidates_per_problem": 29.5,
        "noise_floor": 0.9991,
    }


def test_quality_tables_have_the_model_beside_the_baselines_that_exist() -> None:
    figures = {
        "all candidates": {"hf": evaluation((0.97, 0.98, 0.985, 0.99, 1.0))},
        "Triton only": {"hf": evaluation((0.95, 0.96, 0.97, 0.98, 0.99), default=False)},
    }
    first, second = recorded_a100.quality_tables(figures)
    assert (
        first["title"] == "all candidates, hf left out: 276 problems, 29.5 candidates each, 3,000 to fit on"
    )
    assert first["columns"] == ["ranking", "@1", "@2", "@3", "@5", "@10"]
    assert [row[0] for row in first["rows"]] == [
        "model",
        "model, with the default among the k",
        "default alone",
        "best fixed candidate",
        "random order",
    ]
    assert first["rows"][0][1:3] == ["0.970 (0.80, 0.50)", "0.980 (0.80, 0.50)"]
    assert [row[0] for row in second["rows"]] == ["model", "best fixed candidate", "random order"]
    assert recorded_a100.noise_notes(figures) == [
        "Noise floor of efficiency@1, all candidates: hf 0.9991.",
        "Standard deviation of efficiency@1 over seeds, all candidates: hf 0.0040.",
        "Noise floor of efficiency@1, Triton only: hf 0.9991.",
        "Standard deviation of efficiency@1 over seeds, Triton only: hf 0.0040.",
    ]


def test_the_peers_stand_below_our_triton_figures_as_published() -> None:
    table = recorded_a100.peers_table({"hf": evaluation((0.95, 0.96, 0.97, 0.98, 0.99))})
    assert table["rows"] == [
        ["kernelcast, hf left out", 0.95, 0.97, 0.98],
        ["PyTorch AutoHeuristic (seen in its training)", 0.933, 0.98, 0.987],
        ["nvMatmulHeuristics", 0.901, 0.961, 0.983],
        ["torch-diode", 0.903, 0.963, 0.981],
    ]
    assert "measured by others on the same records, not by this run" in recorded_a100.PEERS_NOTE


def test_seconds_are_medians_with_their_extremes() -> None:
    table = training_speed.seconds_table({"fit": [3.0, 1.0, 2.0], "import": [4.0]})
    assert table["rows"] == [["fit", 2.0, 1.0, 3.0, 3], ["import", 4.0, 4.0, 4.0, 1]]


def test_without_the_records_the_benchmarks_skip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (recorded_a100, training_speed):
        monkeypatch.setattr(module, "A100_FILE", tmp_path / "absent.zip")
        found = module.main(True)
        assert found["skipped"].startswith("the recorded measurements are absent")


@pytest.mark.slow
def test_the_command_writes_the_files_of_one_benchmark(tmp_path: Path) -> None:
    import run

    from kernelcast.costmodel import CostModel

    assert run.main(["--quick", "--only", "selection_speed", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "selection_speed.json").read_text())
    assert found["command"] == "python benchmarks/run.py --only selection_speed --quick"
    assert found["quick"].endswith("not for quotation")
    assert found["model"]["trees"] == 3 * CostModel().n_estimators  # one number for each forest of the order
    assert len(found["first_selection_ms"]) == 5
    assert found["legal"] >= 2000
    for rows in ("32", "512", "2,000"):
        for what in (
            "features + prediction + ranking",
            "the same with the uncertainty",
            "Selector.select, cold, predict",
        ):
            assert found["figures"][f"{what}, {rows} candidates"]["us"] > 0
    assert found["import"]["pairs"] == 5
    assert (tmp_path / "selection_speed.md").read_text().startswith("# Speed of a selection on the host\n")
