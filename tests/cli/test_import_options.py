from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kernelcast.cli import app as application
from kernelcast.cli import data, import_
from kernelcast.datasets import Store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kernelcast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line with these two groups alone: (exit status, standard output, standard error)."""
    small = typer.Typer(no_args_is_help=True)
    small.callback()(lambda: None)
    import_.attach(small)
    data.attach(small)
    monkeypatch.setattr(application, "app", small)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        status = application._run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_an_importers_own_options_are_options_of_its_command(tmp_path: Path, kernelcast: Run) -> None:
    store, file = tmp_path / "store", tmp_path / "a.csv"
    file.write_text("M,us\n7,3\n")
    common = ("--device", "a100", "--workload", "mine", "--store", store)
    status, _, err = kernelcast("import", "table", file, *common, "--operation", "sort")
    assert status == 2
    assert "--map" in err
    mapping = ("--operation", "sort", "--map", "rows=M,latency_us=us")
    status, out, _ = kernelcast("import", "table", file, *common, *mapping, "--json")
    assert (status, json.loads(out)["added"]) == (0, 1)
    assert [each.problem.dims for each in Store(store).measurements()] == [(("rows", 7),)]
    status, _, err = kernelcast("import", "autoheuristic", file, *common, "--operation", "sort")
    assert status == 2
    assert "--operation" in err


def test_t4_goes_out_and_comes_back(tmp_path: Path, kernelcast: Run) -> None:
    store, file, again = tmp_path / "store", tmp_path / "a.json", tmp_path / "again"
    result = {"configuration": {"block": 3}, "times": {"runtimes": [1.5]}, "invalidity": "correct"}
    file.write_text(json.dumps({"results": [result]}))
    common = ("--device", "a100", "--workload", "mine", "--store")
    named = ("--operation", "blur", "--problem-size", "64,32")
    assert kernelcast("import", "t4", file, *common, store, *named)[0] == 0
    out = tmp_path / "out.json"
    assert kernelcast("data", "export", out, "--format", "t4", "--store", store)[0] == 0
    assert kernelcast("import", "t4", out, *common, again)[0] == 0
    facts = [
        [(each.problem, each.candidate, each.samples_us) for each in Store(root).measurements()]
        for root in (store, again)
    ]
    assert facts[0] == facts[1]
    assert facts[0][0][2] == (1500.0,)
    assert kernelcast("data", "export", out, "--format", "csv", "--store", store)[0] == 2
