from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kernelcast.cli import app as application
from kernelcast.cli import import_
from kernelcast.datasets import Store
from kernelcast.kernels.devices import device

HEADER = {
    "shared_memory": 166912,
    "device_capa": [8, 0],
    "name": "mm",
    "numerical_features": ["m", "k", "n", "mat1_stride_0", "mat1_stride_1", "mat2_stride_0", "mat2_stride_1"],
    "categorical_features": ["mat1_dtype", "mat2_dtype", "mat1_iscontig", "mat2_iscontig", "using_tf32"],
}
COLUMNS = (
    "m,k,n,mat1_dtype,mat2_dtype,mat1_stride_0,mat1_stride_1,mat2_stride_0,mat2_stride_1,"
    "mat1_iscontig,mat2_iscontig,using_tf32,choice,feedback"
)
TILE = "type=triton_BLOCK-M=16_BLOCK-K=32_BLOCK-N=64_numstages=4_numwarps=2"
FACTS = "64,32,48,torch.float16,torch.float16,32,1,1,32,True,False,not_float_32"
ROWS = [f"{FACTS},extern_mm,0.25", f"{FACTS},extern_mm,0.75", f"{FACTS},{TILE},inf"]


@pytest.fixture
def kernelcast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line: (exit status, standard output, standard error)."""
    # Wide enough for messages to stay on one line.
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        status = application._run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_mm.txt"
    path.write_text("\n".join([json.dumps(HEADER), COLUMNS, *ROWS, ""]))
    return path


@pytest.fixture
def store(tmp_path: Path, file: Path, kernelcast: Callable[..., tuple[int, str, str]]) -> Path:
    root = tmp_path / "store"
    status, _, _ = kernelcast(
        "import", "autoheuristic", file, "--device", "a100", "--workload", "few", "--store", root
    )
    assert status == 0
    return root


Run = Callable[..., tuple[int, str, str]]


def test_import_says_what_it_did(kernelcast: Run, file: Path, tmp_path: Path) -> None:
    arguments = (
        "import",
        "autoheuristic",
        file,
        "--device",
        "a100",
        "--workload",
        "few",
        "--store",
        tmp_path / "s",
    )
    status, out, err = kernelcast(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith("1 file: 3 rows, 1 problems, 2 records new, 0 known; ")
    status, out, _ = kernelcast(*arguments, "--json")
    figures = json.loads(out)
    assert figures.pop("seconds") > 0
    assert figures == {
        "store": str(tmp_path / "s"),
        "files": 1,
        "rows": 3,
        "problems": 1,
        "added": 0,
        "known": 2,
        "dropped": 0,
    }
    assert Store(tmp_path / "s").devices() == {device("a100").fingerprint: device("a100")}


def test_the_home_is_where_imports_go(
    kernelcast: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    assert kernelcast("import", "autoheuristic", file, "--device", "a100", "--workload", "few")[0] == 0
    assert len(Store(tmp_path / "home" / "store").ids()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--device", "h100", "--workload", "w"],
            "Error: FILE, line 1: it was measured on a device of compute",
        ),
        (["--device", "a100x", "--workload", "w"], "Error: Unknown device 'a100x'"),
        (["--device", "a100", "--workload", ""], "Error: The workload has no name"),
        (
            ["--device", "a100", "--workload", "w", "none.txt"],
            "Error: none.txt: it cannot be read: No such file",
        ),
    ],
)
def test_bad_imports_are_one_sentence(
    kernelcast: Run, file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    status, out, err = kernelcast("import", "autoheuristic", file, *arguments, "--store", tmp_path / "s")
    assert (status, out) == (2, "")
    assert err.startswith(message.replace("FILE", str(file)))
    assert err.count("\n") == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("left_out", ["--device", "--workload"])
def test_device_and_workload_must_be_named(file: Path, left_out: str) -> None:
    given = {"--device": "a100", "--workload": "w"}
    del given[left_out]
    app = typer.Typer()
    import_.attach(app)
    words = ["import", "autoheuristic", str(file), *(word for pair in given.items() for word in pair)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert f"Missing option '{left_out}'" in result.output


def test_summary(kernelcast: Run, store: Path) -> None:
    status, out, _ = kernelcast("data", "summary", "--store", store)
    assert status == 0
    assert out.startswith(f"{store}: 2 records with 2 samples of 1 problems")
    assert "1 segment and 0 journals; 2 to 2 candidates per problem and device, median 2." in out
    assert "a100-sxm4-80gb" in out
    assert "ok 1, out_of_resources 1" in out
    status, out, _ = kernelcast("data", "summary", "--store", store, "--json")
    assert json.loads(out)["groups"] == [
        {
            "operation": "gemm",
            "device": "a100-sxm4-80gb",
            "workload": "few",
            "source": "autoheuristic:some_mm.txt",
            "records": 2,
            "problems": 1,
            "samples": 2,
            "outcomes": {"ok": 1, "out_of_resources": 1},
        }
    ]


def test_check(kernelcast: Run, store: Path) -> None:
    assert kernelcast("data", "check", "--store", store) == (0, f"{store}: no faults.\n", "")
    (segment,) = (store / "parquet").iterdir()
    segment.write_bytes(segment.read_bytes()[:-1])
    status, out, _ = kernelcast("data", "check", "--store", store)
    assert status == 1
    assert out.startswith(f"The segment {segment} cannot be read")
    status, out, _ = kernelcast("data", "check", "--store", store, "--json")
    assert status == 1
    assert len(json.loads(out)["faults"]) == 1


def test_export(kernelcast: Run, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    arguments = ("data", "export", target, "--store", store, "--device", "a100", "--outcome", "ok")
    assert kernelcast(*arguments) == (0, f"{target}: 1 records.\n", "")
    assert "[250.0, 750.0]" in target.read_text()
    status, _, err = kernelcast(*arguments)
    assert status == 2
    assert "is there already" in err
    assert kernelcast(*arguments, "--overwrite")[0] == 0


def test_merge(kernelcast: Run, store: Path, tmp_path: Path) -> None:
    assert kernelcast("data", "merge", store, "--store", tmp_path / "new") == (
        0,
        "2 records new, 0 known.\n",
        "",
    )
    _, out, _ = kernelcast("data", "merge", store, "--store", tmp_path / "new", "--json")
    assert json.loads(out) == {"added": 0, "known": 2}
    assert Store(tmp_path / "new").ids() == Store(store).ids()


def test_prune(kernelcast: Run, store: Path) -> None:
    assert kernelcast("data", "prune", "--store", store)[0] == 2
    conditions = (
        "--store",
        store,
        "--outcome",
        "out_of_resources",
        "--workload",
        "few,many",
        "--device",
        "a100",
    )
    status, out, _ = kernelcast("data", "prune", *conditions, "--dry-run")
    assert (status, out) == (0, "1 records meet the conditions. Nothing was deleted.\n")
    assert len(Store(store).ids()) == 2
    status, out, _ = kernelcast("data", "prune", *conditions)
    assert (status, out) == (0, "1 record deleted, 1 record kept, from 1 segment and 0 journals.\n")
    assert len(Store(store).ids()) == 1
    status, out, _ = kernelcast("data", "prune", *conditions, "--dry-run", "--json")
    assert json.loads(out) == {"removed": 0, "matching": 0}


def test_compact(kernelcast: Run, store: Path) -> None:
    status, out, _ = kernelcast("data", "compact", "--store", store, "--json")
    assert status == 0
    assert json.loads(out) == {"records": 2, "removed": 0, "segments": 1, "journals": 0, "journals_in_use": 0}
    status, out, _ = kernelcast("data", "compact", "--store", store)
    assert (status, out) == (0, "0 records deleted, 2 records kept, from 1 segment and 0 journals.\n")


@pytest.mark.parametrize("command", ["summary", "check", "compact"])
def test_no_store_is_one_sentence(kernelcast: Run, tmp_path: Path, command: str) -> None:
    status, out, err = kernelcast("data", command, "--store", tmp_path / "none")
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: There is no store at {tmp_path / 'none'}. Fill one with")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ("import", "autoheuristic"),
        *(("data", name) for name in ("summary", "check", "export", "merge", "prune", "compact")),
    ],
)
def test_every_command_has_help_with_an_example(kernelcast: Run, command: tuple[str, str]) -> None:
    status, out, _ = kernelcast(*command, "--help")
    assert status == 0
    assert f"Example: kernelcast {' '.join(command)}" in out


def test_pruning_by_variant_and_age(kernelcast: Run, store: Path) -> None:
    # Times of imported records are unknown: they are older than nothing.
    status, out, _ = kernelcast("data", "prune", "--older-than", "1s", "--dry-run", "--store", store)
    assert (status, out) == (0, "0 records meet the conditions. Nothing was deleted.\n")
    status, out, _ = kernelcast(
        "data", "prune", "--variant", "extern_mm", "--dry-run", "--json", "--store", store
    )
    assert (status, json.loads(out)) == (0, {"removed": 0, "matching": 0})
    (variant, *_) = Store(store).frame(["variant"], outcome="ok")["variant"]
    status, out, _ = kernelcast("data", "prune", "--variant", variant, "--json", "--store", store)
    assert (status, json.loads(out)["removed"], len(Store(store).ids())) == (0, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--older-than", "90"], "The age '90' is no number with s, m, h, d or w behind it"),
        (["--older-than", "-1d"], "The age '-1d' is no number"),
        (["--older-than", "nand"], "The age 'nand' is no number"),
        (["--older-than", ""], "The age '' is no number"),
        (["--outcome", "crashed"], "Unknown outcome 'crashed'. Did you mean 'crash'?"),
        (["--dry-run"], "Pruning without a condition would delete every record"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(
    kernelcast: Run, store: Path, arguments: list[str], message: str
) -> None:
    status, out, err = kernelcast("data", "prune", *arguments, "--store", store)
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: {message}")
    assert len(Store(store).ids()) == 2
