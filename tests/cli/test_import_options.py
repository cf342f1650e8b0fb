from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelcast.cli import app as application
from kernelcast.datasets import Store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kernelcast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line: (exit status, standard output, standard error)."""
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


def test_an_export_comes_back_without_being_told_anything(tmp_path: Path, kernelcast: Run) -> None:
    store, file, again = tmp_path / "store", tmp_path / "a.csv", tmp_path / "again"
    file.write_text("M,us\n7,3\n")
    mapping = ("--op", "sort", "--map", "rows=M,latency_us=us")
    told = ("--device", "a100", "--workload", "mine")
    assert kernelcast("import", "table", file, *mapping, *told, "--store", store)[0] == 0
    for ending in ("csv", "parquet"):
        out = tmp_path / f"out.{ending}"
        assert kernelcast("data", "export", out, "--store", store)[0] == 0
        assert kernelcast("import", "records", out, "--store", again)[0] == 0
    assert list(Store(again).measurements()) == list(Store(store).measurements())
    status, _, err = kernelcast("import", "records", out, "--device", "h100", "--store", again)
    assert status == 2
    assert "--device is h100" in err


def test_the_largest_size_can_be_given(tmp_path: Path, kernelcast: Run) -> None:
    file = tmp_path / "a.csv"
    file.write_text("M,us\n7,3\n" + " " * 2000)
    common = ("import", "table", file, "--op", "sort", "--map", "rows=M,latency_us=us", "--device", "a100")
    common = (*common, "--workload", "mine", "--store", tmp_path / "store")
    status, _, err = kernelcast(*common, "--max-size", "1KiB")
    assert status == 2
    assert "holds more than 1,024 bytes unpacked" in err
    for size in ("0B", "1", "1TB", "-1GiB", "much"):
        status, _, err = kernelcast(*common, "--max-size", size)
        assert status == 2
        assert f"--max-size is '{size}'; it must be a size such as 512MiB" in err


def test_what_triton_cannot_tell_is_asked_for(tmp_path: Path, kernelcast: Run) -> None:
    file = tmp_path / "mm.autotune.json"
    config = {"kwargs": {"BLOCK": 16}, "num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None}
    file.write_text(
        json.dumps({"key": [64, 48, 32, "torch.float16"], "configs_timings": [[config, [1, 1, 2]]]})
    )
    told = (
        "import",
        "triton-autotune",
        file,
        "--op",
        "gemm",
        "--workload",
        "mine",
        "--store",
        tmp_path / "store",
    )
    status, _, err = kernelcast(*told)
    assert status == 2
    assert "--device" in err
    status, _, err = kernelcast(*told, "--device", "a100")
    assert status == 2
    assert "Say with --key what each of the first 3 is" in err
    assert len(err.splitlines()) == 1
    assert kernelcast(*told, "--device", "a100", "--key", "m,n,k")[0] == 0


@pytest.mark.slow
def test_an_operation_of_the_store_alone_is_listed_and_ranked_or_says_why_not(
    tmp_path: Path, kernelcast: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelcast.kernels import registry

    # What the command registers is gone after this test; what is built in is loaded before, and stays.
    registry.operation_names()
    monkeypatch.setattr(registry, "_operations", dict(registry._operations))
    monkeypatch.setattr(
        registry, "_variants", {known: dict(found) for known, found in registry._variants.items()}
    )
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    name = f"sort_{tmp_path.name.replace('-', '_').lower()}"
    file = tmp_path / "a.csv"
    file.write_text("M,tile,us\n7,1,3\n7,2,4\n")
    status, _, err = kernelcast("kernels", name)
    assert status == 2
    assert f"Unknown operation '{name}'" in err
    mapping = ("--op", name, "--map", "rows=M,config.tile=tile,latency_us=us")
    assert kernelcast("import", "table", file, *mapping, "--device", "a100", "--workload", "mine")[0] == 0
    status, out, _ = kernelcast("kernels", name, "--json")
    assert status == 0
    assert [(row["variant"], row["configs"]) for row in json.loads(out)] == [("table", 2)]
    status, out, _ = kernelcast("kernels", name, "rows=7", "--device", "a100", "--json")
    assert status == 0
    assert json.loads(out)["variants"][0]["legal"] == 2
    status, _, err = kernelcast("select", name, "rows=7", "--device", "a100")
    assert status == 2
    assert f"Train a model: kernelcast train --op {name} --device a100-sxm4-80gb" in err
