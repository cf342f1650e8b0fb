"""``kernelcast collect``: what is measured where not everything is, and collecting from records."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from kernelcast.cli import app as application
from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.devices import device

A100 = device("a100")
FEW = ["--rounds", "1", "--seconds", "0.1"]
VENDOR = Candidate.of("vendor")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command: (exit status, standard output, standard error)."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        status = application._run([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def recorded(tmp_path):
    """Thirty problems with six candidates, two workloads."""
    rows = []
    for m in range(1, 31):
        for size in (0, 16, 32, 64, 128, 256):
            candidate = Candidate.of("triton_toy", {"tile": size}) if size else VENDOR
            rows.append(
                Measurement(
                    problem=Problem("toy", (("m", 2**m),), "float16"),
                    candidate=candidate,
                    device=A100.name,
                    device_fingerprint=A100.fingerprint,
                    environment=Environment(source="elsewhere"),
                    protocol=Protocol("theirs"),
                    samples_us=(1.0 + m + abs(m - size / 8),),
                    workload="odd" if m % 2 else "even",
                )
            )
    store = Store(tmp_path / "recorded")
    store.add_device(A100)
    store.add_many(rows)
    return store.root


def replayed(run, recorded, tmp_path, *options):
    status, out, err = run(
        "collect", "toy", "--replay", recorded, "--store", tmp_path / "out", "--json", *options
    )
    assert status == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("strategy", "problems"),
    # In order: ten whole problems. At random: two of six of every one, and so on.
    [("exhaustive", 10), ("random", 30)],
)
def test_a_part_of_recorded_data(run, recorded, tmp_path, strategy, problems):
    found = replayed(run, recorded, tmp_path, "--strategy", strategy, "--measurements", "60")
    assert (found["measured"], found["known"], found["problems"]) == (60, 0, problems)
    assert (found["complete"], found["outcomes"]) == (True, {"ok": 60})
    assert found["device"] == A100.name
    records = {each.id: each.to_dict() for each in Store(tmp_path / "out").measurements()}
    whole = {each.id: each.to_dict() for each in Store(recorded).measurements()}
    assert len(records) == 60
    assert records.items() <= whole.items()
    again = replayed(run, recorded, tmp_path, "--strategy", strategy, "--measurements", "50%")
    assert (again["measured"], again["known"]) == (30, 60)


@pytest.mark.slow
def test_the_active_strategy_on_one_workload(run, recorded, tmp_path):
    options = ("--strategy", "active", "--measurements", "60%", "--from-workloads", "odd", "--device", "a100")
    found = replayed(run, recorded, tmp_path, *options)
    assert (found["measured"], found["outcomes"]) == (54, {"ok": 54})
    assert {each.workload for each in Store(tmp_path / "out").measurements()} == {"odd"}


def test_the_seed_is_the_strategys(run, recorded, tmp_path):
    ids = []
    for number, seed in enumerate((4, 4, 5)):
        replayed(run, recorded, tmp_path, "--strategy", "random", "--measurements", "30%", "--seed", seed)
        ids.append(Store(tmp_path / "out").ids())
        (tmp_path / "out").rename(tmp_path / f"out-{number}")
    assert ids[0] == ids[1] != ids[2]


def test_without_a_strategy_everything_is_taken(run, recorded, tmp_path):
    status, out, err = run("collect", "toy", "--replay", recorded, "--store", tmp_path / "out")
    assert status == 0, err
    assert out.startswith("Done: 30 problems, 180 candidates taken (180 ok), 0 known already, ")
    assert not (tmp_path / "home" / "store").exists()


@pytest.mark.slow
def test_a_random_part_is_measured_here(run, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    file = tmp_path / "problems.txt"
    file.write_text("".join(f"softmax rows={rows} columns=8 threads=1\n" for rows in (2, 3, 4)))
    options = ["collect", "--problems", file, "--strategy", "random", *FEW, "--store", tmp_path / "out"]
    status, out, err = run(*options, "--measurements", "5", "--json")
    assert status == 0, err
    first = json.loads(out)
    assert (first["measured"], first["complete"]) == (5, True)
    status, out, err = run(*options, "--measurements", "6", "--json")
    assert status == 0, err
    assert (json.loads(out)["measured"], json.loads(out)["known"]) == (1, 5)


# --- what is refused ---

GEMM = ("gemm", "m=8", "n=8", "k=8")
BAD = {
    "unknown strategy": ((*GEMM, "--strategy", "greedy"), "it must be exhaustive, random or active"),
    "no share": ((*GEMM, "--measurements", "0%"), "--measurements: '0%' is no number"),
    "no number": ((*GEMM, "--measurements", "all"), "--measurements: 'all' is no number"),
    "workloads of nothing": ((*GEMM, "--from-workloads", "odd"), "goes with --replay STORE"),
    "device without a choice": ((*GEMM, "--device", "a100"), "--device"),
}  # fmt: skip
BAD_REPLAY = {
    "no operation": ((), "--replay needs an operation"),
    "a problem": (("toy", "m=8"), "leave a problem (NAME=VALUE) out"),
    "a file": (("toy", "--problems", "x.txt"), "leave --problems out"),
    "rounds": (("toy", "--rounds", "20"), "leave --rounds out"),
    "a workload's name": (("toy", "--workload", "mine"), "leave --workload out"),
    "an executor": (("toy", "--executor", "processes"), "leave --executor out"),
    "another operation": (("gemm",), "holds no records of gemm"),
    "another device": (("toy", "--device", "h100"), "holds no records of h100"),
    "another workload": (("toy", "--from-workloads", "odd,evn"), "of the workload evn"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_contradiction_is_one_sentence(run, name, tmp_path):
    arguments, expected = BAD[name]
    status, out, err = run("collect", *arguments)
    assert (status, out) == (2, "")
    assert expected in err
    assert not (tmp_path / "home" / "store").exists()


@pytest.mark.parametrize("name", BAD_REPLAY)
def test_what_says_how_to_measure_is_refused_with_a_replay(run, recorded, tmp_path, name):
    arguments, expected = BAD_REPLAY[name]
    status, out, err = run("collect", *arguments, "--replay", recorded, "--store", tmp_path / "out")
    assert (status, out) == (2, "")
    assert expected in err
    assert not (tmp_path / "out").exists()


def test_the_store_that_is_replayed_is_not_written_to(run, recorded):
    status, _, err = run("collect", "toy", "--replay", recorded, "--store", recorded)
    assert status == 2
    assert "is the store that is replayed" in err


def test_the_active_strategy_without_its_libraries(run, recorded, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    status, _, err = run(
        "collect", "toy", "--replay", recorded, "--store", tmp_path / "out", "--strategy", "active"
    )
    assert status == 2
    assert "pip install 'kernelcast[train]'" in err
