"""``kernelcast evaluate`` on a small store."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kernelcast.cli import main
from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.devices import device

A100 = device("a100")
TILES = (16, 64, 256)


def measurements(m: int, workload: str) -> list[Measurement]:
    """The tile nearest to sqrt(m) is the fastest; the vendor costs as much as a tile that is off by a factor of 4."""
    problem = Problem("toy", (("m", m),), "float32")
    latency_us = {Candidate.of("vendor"): m * 1.8}
    for tile in TILES:
        distance = abs(math.log2(tile) - math.log2(m) / 2)
        latency_us[Candidate.of("triton_toy", {"tile": tile})] = m * 1.4**distance
    return [
        Measurement(
            problem=problem,
            candidate=candidate,
            device=A100.name,
            device_fingerprint=A100.fingerprint,
            environment=Environment(source=workload),
            protocol=Protocol("test"),
            samples_us=(latency, latency * 1.001),
            workload=workload,
        )
        for candidate, latency in latency_us.items()
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """24 shapes of ``alpha``, 6 of ``beta``, of which one is in both, and 6 of ``gamma``."""
    root = tmp_path_factory.mktemp("evaluate") / "store"
    made = Store(root)
    made.add_device(A100)
    workloads = {"alpha": range(0, 72, 3), "beta": [1, 12, 22, 32, 43, 52], "gamma": [2, 11, 23, 35, 47, 59]}
    made.add_many(
        one
        for workload, steps in workloads.items()
        for step in steps
        for one in measurements(round(2 ** (7 + step / 8)), workload)
    )
    return root


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(["evaluate", "--op", "toy", "--device", "a100-sxm4-80gb", *arguments])
    return exit.value.code


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.slow
def test_workloads_on_the_screen_and_in_a_file(store, tmp_path, capsys):
    path = tmp_path / "out.json"
    split = ("--train-workloads", "alpha,gamma", "--test-workloads", "beta")
    assert run(*split, "--seeds", "1", "--store", str(store), "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    # One of alpha's 24 shapes is beta's too, and leaves the training side.
    assert (figures["train_problems"], figures["test_problems"]) == (29, 6)
    assert (figures["train_workloads"], figures["test_workloads"]) == (["alpha", "gamma"], ["beta"])
    assert figures["candidates_per_problem"] == 4.0
    assert figures["efficiency"]["1"]["geomean"] > figures["baselines"]["random"]["1"]["geomean"]
    assert figures["efficiency"]["5"] == {"geomean": 1.0, "p5": 1.0, "worst": 1.0}
    assert figures["noise_floor"] == pytest.approx(1.0)
    assert figures["folds"] is None

    printed = capsys.readouterr().out
    assert "toy on a100-sxm4-80gb: fitted on alpha, gamma, judged on beta" in printed
    assert "29 training and 6 test problems; 4.0 candidates each (4 to 4); mean of 1 seed\n" in printed
    assert f"{figures['baselines']['default']['1']['geomean']:.3f}" in printed
    (model,) = [line for line in printed.splitlines() if line.startswith("│ model ")]
    values = [f"{figures['efficiency'][k]['geomean']:.3f}" for k in ("1", "2", "3", "5", "10")]
    assert [word for word in model.split() if word[0].isdigit()] == values
    half = figures["regret_over_measured"]["problem"]["0.005"]
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("│  problem │   0.5%")]
    assert (row[5], row[7]) == (f"{half['regret']:.2%}", f"{half['measured']:.2f}")
    for label in (
        "model, with the default",
        "default alone",
        "best fixed",
        "analytic roofline",
        "random order",
    ):
        assert label in printed


@pytest.mark.slow
def test_folds_and_json_on_standard_output(store, capsys):
    arguments = ("--train-workloads", "alpha", "--folds", "2", "--backend", "triton", "--seeds", "1")
    assert run(*arguments, "--store", str(store), "--json", "-") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert (figures["folds"], figures["test_problems"], figures["train_problems"]) == (2, 24, 12)
    assert figures["test_workloads"] == ["alpha"]
    assert figures["candidates_per_problem"] == 3.0
    assert figures["baselines"]["default"] is None
    assert "2 folds by shape of alpha" in captured.err


@pytest.mark.slow
def test_folds_beside_test_workloads_cross_validate_the_training_side(store, capsys):
    arguments = ("--train-workloads", "alpha", "--test-workloads", "beta", "--folds", "2", "--seeds", "1")
    assert run(*arguments, "--store", str(store), "--json", "-") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert (figures["folds"], figures["test_workloads"]) == (None, ["beta"])
    within = figures["within_training"]
    assert (within["folds"], within["test_workloads"]) == (2, ["alpha"])
    assert within["test_problems"] == figures["train_problems"]
    assert "2 folds by shape of alpha" in captured.err


def test_what_the_store_lacks_is_said_and_the_status_is_2(store, capsys):
    assert run("--train-workloads", "alpha", "--test-workloads", "delta", "--store", str(store)) == 2
    error = capsys.readouterr().err
    assert "no records of toy on a100-sxm4-80gb of the workload delta" in error
    assert "The store holds: toy on a100-sxm4-80gb (alpha, beta, gamma)." in error

    assert run("--test-workloads", "zzz", "--store", str(store)) == 2
    assert "Unknown workload 'zzz'. Known: alpha, beta, gamma." in capsys.readouterr().err


def test_a_missing_store_is_status_2(tmp_path, capsys):
    assert run("--store", str(tmp_path / "none")) == 2
    assert "There is no store at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--folds", "1"), "folds is 1; a split needs at least 2"),
        (("--seeds", "0"), "0 seeds are not possible; take at least 1"),
        (("--json", "/no/such/folder/out.json"), "there is no folder /no/such/folder"),
    ],
)
def test_contradicting_arguments_are_status_2(store, capsys, arguments, message):
    assert run(*arguments, "--store", str(store)) == 2
    assert message in capsys.readouterr().err


def of(*problems: list[Measurement], root: Path) -> Path:
    made = Store(root)
    made.add_device(A100)
    made.add_many(one for each in problems for one in each)
    return root


def test_data_in_which_nothing_can_be_compared_are_named(tmp_path, capsys):
    root = of(measurements(64, "x")[:1], measurements(128, "x")[:1], root=tmp_path / "store")
    assert run("--store", str(root)) == 2
    error = capsys.readouterr().err
    assert "None of the 2 measured problems has two candidates that worked" in error


def test_few_shapes_make_fewer_folds(tmp_path, capsys):
    root = of(*(measurements(m, "x") for m in (64, 256, 4096)), root=tmp_path / "store")
    assert run("--store", str(root), "--seeds", "1", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["folds"] == 3
