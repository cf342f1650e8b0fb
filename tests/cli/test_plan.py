"""The command that plans."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from kernelcast.cli import app as application
from kernelcast.runtime.plan import Plan

SMALL = ["--op", "softmax", "--dim", "columns=8..64", "rows=4", "threads=1"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command: (exit status, standard output, standard error)."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))

    def call(*arguments):
        status = application._run(["plan", *(str(each) for each in arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these expect the CPU to be this machine's device"
)


def test_a_plan_is_printed_drawn_and_exported(run, tmp_path):
    files = [tmp_path / f"plan{kind}" for kind in (".json", ".py", ".svg")]
    status, out, err = run(*SMALL, "--draw", *(word for each in files for word in ("--export", each)))
    assert (status, err) == (0, "")
    assert out.startswith("softmax columns=8..64 rows=4")
    assert "A  vendor" in out
    found = Plan.from_json(files[0].read_text())
    assert (dict(found.dynamic), found.verifications) == ({"columns": range(8, 65)}, 0)
    assert files[1].read_text() == found.to_python()
    assert files[2].read_text() == found.to_svg()
    assert run("--read", files[0]) == (0, f"{found}\n", "")
    assert not (tmp_path / "home" / "store").exists()


def test_an_export_into_a_new_folder_makes_it(run, tmp_path):
    path = tmp_path / "new" / "folder" / "plan.svg"
    status, out, err = run(*SMALL, "--export", path, "--json")
    assert (status, err) == (0, "")
    assert path.read_text() == Plan.from_json(out).to_svg()


@pytest.mark.parametrize("kind", ["below a file", "a folder", "read-only"])
def test_what_cannot_be_exported_is_refused_before_planning(run, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("kernelcast.runtime.plan.plan", lambda *_, **__: pytest.fail("it plans"))
    path = tmp_path / "plan.json"
    if kind == "below a file":
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "plan.json"
    elif kind == "a folder":
        path.mkdir()
    else:

        def refused(*_, **__):
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr("tempfile.TemporaryFile", refused)
    status, out, err = run(*SMALL, "--verify", "--export", path)
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: The plan {path} cannot be written: ")


def test_a_plan_may_be_verified(run, tmp_path):
    status, out, _ = run(*SMALL, "--verify", "--json")
    assert status == 0
    data = json.loads(out)
    assert data["verifications"] == data["proposed"] >= 1
    assert data["intervals"][0]["source"] == "verified"
    assert (tmp_path / "home" / "store").exists()


def test_a_plan_for_another_device_is_a_forecast(run):
    status, out, _ = run(
        "--op", "gemm", "--dim", "m=1..256", "n=256", "k=256", "dtype=float16", "--device", "a100", "--json"
    )  # fmt: skip
    assert status == 0
    data = json.loads(out)
    assert data["device"]["architecture"] == "sm80"
    assert (data["fixed"]["threads"], data["verifications"]) == (0, 0)
    assert {each["source"] for each in data["intervals"]} <= {"analytic", "default"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--op", "softmax", "rows=4"], "--dim"),
        (["--dim", "rows=1..4"], "--op"),
        (["--op", "softmax", "--dim", "columns=64", "rows=4"], "names no sizes"),
        (["--op", "softmax", "--dim", "columns=8..64", "columns=4"], "given twice"),
        (
            ["--op", "softmax", "--dim", "columns=64..8", "rows=4"],
            "are '64..8': its first size, 64, is above its last, 8",
        ),
        (["--op", "softmax", "--dim", "columns=-8..8", "rows=4"], "it begins at -8"),
        (["--op", "softmax", "--dim", "columns=1..8..0", "rows=4"], "its step is 0"),
        (["--op", "softmax", "--dim", "columns=1.5..8", "rows=4"], "in whole numbers"),
        (["--op", "softmax", "--dim", "columns=1.5", "rows=4"], "columns=1.5 names no sizes"),
        (["--op", "softmax", "--dim", "columns=few", "rows=4"], "columns=few names no sizes"),
        (
            ["--op", "softmax", "--dim", "width=1..8", "rows=4"],
            "no dimension or option 'width'. It has: rows, columns",
        ),
        (
            ["--op", "softmax", "--dim", "dtype=1..8", "rows=4", "columns=4"],
            "no dimension 'dtype' that could be dynamic",
        ),
        (
            ["--op", "softmax", "--dim", "columns=1..8", "rows=column"],
            "the name of a dynamic dimension (columns)",
        ),
        (["--op", "softmax", "--dim", "columns=8..64"], "rows"),
        (["--op", "no_such", "--dim", "columns=8..64"], "Unknown operation"),
        ([*SMALL, "self=3"], "'self'"),
        ([*SMALL, "mode=3"], "'mode'"),
        ([*SMALL, "--least-gain", "2"], "least_gain"),
        ([*SMALL, "--export", "plan.txt"], "must end in"),
        ([*SMALL, "--read", "plan.json"], "read or made"),
        (["--read", "no_such.json"], "no_such.json"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(run, words, said):
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_file_that_is_no_plan_is_named(run, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("{}")
    status, out, err = run("--read", path)
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: {path}: ")
