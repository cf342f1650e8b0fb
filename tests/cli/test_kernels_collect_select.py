"""The commands that list, measure and select."""

from __future__ import annotations

import errno
import json

import pytest
import torch

from kernelcast.cli import app as application
from kernelcast.datasets import Journal
from kernelcast.datasets.store import Store
from kernelcast.kernels import candidates, operation_names, problem, variants
from kernelcast.kernels.detect import default_threads, detect
from kernelcast.kernels.devices import device

HERE = detect("cpu")
SMALL = ["gemm", "m=8", "n=8", "k=16", "threads=1"]
FEW = ["--rounds", "1", "--seconds", "0.1"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the three commands: (exit status, standard output, standard error)."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KERNELCAST_MODE", "predict")
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments):
        status = application._run([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these expect the CPU to be this machine's device"
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- kernels ---


def test_the_catalogue_is_listed(run):
    status, out, err = run("kernels", "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)
    assert [r["operation"] for r in rows if r["variant"] == "vendor"] == operation_names()
    row = next(r for r in rows if (r["operation"], r["variant"]) == ("gemm", "column_chunked"))
    found = variants("gemm")["column_chunked"]
    assert row == {
        "operation": "gemm", "variant": "column_chunked", "backend": "torch", "configs": found.space().length,
        "quick_configs": found.space("default").length, "doc": found.doc,
    }  # fmt: skip
    status, out, _ = run("kernels", "gemm")
    assert status == 0
    assert all(name in out for name in variants("gemm"))
    assert "softmax" not in out


def test_legal_candidates_of_a_problem_are_counted(run):
    status, out, _ = run("kernels", *SMALL, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["device"] == HERE.name
    assert found["problem"]["dims"] == {"m": 8, "n": 8, "k": 16}
    assert found["refused"] == []
    table = candidates(problem("gemm", m=8, n=8, k=16, threads=1), HERE)
    assert {r["variant"]: r["legal"] for r in found["variants"] if r["legal"]} == {
        block.variant: block.length for block in table.blocks
    }


def test_why_lists_the_reasons_once_with_their_counts(run):
    status, out, _ = run("kernels", "gemm", "m=64", "n=64", "k=64", "--why", "--json")
    assert status == 0
    found = json.loads(out)
    tiled = [r for r in found["refused"] if r["variant"] == "triton_tiled"]
    assert len(tiled) == 1
    assert tiled[0]["count"] == variants("gemm")["triton_tiled"].space().length
    assert tiled[0]["reason"] == "Triton compiles for GPUs"
    assert HERE.name in tiled[0]["seen"]
    for row in found["variants"]:
        refused = sum(r["count"] for r in found["refused"] if r["variant"] == row["variant"])
        assert row["legal"] + refused == row["of"]

    status, out, _ = run("kernels", "gemm", "m=64", "n=64", "k=64", "--why")
    assert status == 0
    assert "Triton compiles for GPUs" in out
    assert "few rows" in out or "beyond 8 rows" in out
    assert len(out.splitlines()) < 80


def test_another_device_has_other_candidates(run):
    _, out, _ = run("kernels", "gemm", "m=8", "n=8", "k=16", "--device", "h100", "--json")
    found = json.loads(out)
    assert found["device"] == device("h100").name
    assert {r["variant"]: r["legal"] for r in found["variants"]}["triton_tiled"] > 0


def test_threads_are_this_machines_where_none_are_given(run):
    _, out, _ = run("kernels", "gemm", "m=8", "n=8", "k=16", "--json")
    assert json.loads(out)["problem"]["threads"] == default_threads()
    _, out, _ = run("kernels", "gemm", "m=8", "n=8", "k=16", "--device", "h100", "--json")
    assert json.loads(out)["problem"]["threads"] == 0


# --- collect ---


def test_a_problem_is_measured_and_known_the_next_time(run, tmp_path):
    store = tmp_path / "store"
    arguments = ["collect", *SMALL, *FEW, "--workload", "w", "--store", store, "--json"]
    status, out, _ = run(*arguments)
    assert status == 0
    first = json.loads(out)
    expected = len(candidates(problem("gemm", m=8, n=8, k=16, threads=1), HERE))
    assert (first["problems"], first["measured"], first["known"]) == (1, expected, 0)
    assert (first["complete"], first["interrupted"], first["skipped"]) == (True, False, [])
    assert sum(first["outcomes"].values()) == expected
    assert (first["store"], first["device"]) == (str(store), HERE.name)
    records = list(Store(store).measurements())
    assert len(records) == expected
    assert {r.workload for r in records} == {"w"}
    assert {len(r.samples_us) for r in records if r.outcome == "ok"} == {1}
    status, out, _ = run(*arguments)
    assert status == 0
    assert (json.loads(out)["measured"], json.loads(out)["known"]) == (0, expected)


def test_the_store_is_the_homes_and_the_summary_is_text(run, tmp_path):
    status, out, _ = run(
        "collect", "softmax", "rows=4", "columns=8", "threads=1", "--subset", "default", *FEW
    )
    assert status == 0
    store = tmp_path / "home" / "store"
    assert out.startswith("Done: 1 problems, ")
    assert out.rstrip().endswith(f"Store: {store}")
    assert len(Store(store).ids()) == len(
        candidates(problem("softmax", rows=4, columns=8, threads=1), HERE, subset="default")
    )


def test_a_folder_with_brackets_in_its_name_is_named_in_full(run, tmp_path):
    store = tmp_path / "[bold]store[x]"
    status, out, _ = run("collect", "softmax", "rows=4", "columns=8", "threads=1", *FEW, "--store", store)
    assert status == 0
    assert str(store) in out
    assert store.is_dir()


def test_problems_come_from_a_file(run, tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text(
        "# a comment\n\nsoftmax rows=4 columns=8 threads=1  # and another\nsoftmax rows=5 columns=8 threads=1\n"
    )
    status, out, _ = run("collect", "--problems", file, *FEW, "--json")
    assert status == 0
    assert json.loads(out)["problems"] == 2
    store = Store(tmp_path / "home" / "store")
    assert sorted(p["rows"] for p in store.problems().values()) == [4, 5]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"softmax rows=4 columns=8\ngem m=1\n", "line 2: Unknown operation 'gem'"),
        (b"softmax rows=4 columns=8\n\nsoftmax rows=x columns=8\n", "line 3: softmax: rows is 'x'"),
        (b"# nothing\n\n", "holds no problem"),
        (b"", "holds no problem"),
        (bytes(range(256)), "is not a text file"),
        (b"\xff\xfe" + "gemm m=1".encode("utf-16-le"), "is not a text file"),
    ],
)
def test_a_broken_file_is_a_clear_error_and_nothing_is_measured(run, tmp_path, content, expected):
    file = tmp_path / "shapes.txt"
    file.write_bytes(content)
    status, out, err = run("collect", "--problems", file, *FEW)
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: {file}")
    assert expected in err
    assert err.count("\n") == 1
    assert not (tmp_path / "home").exists()


def test_budget_ends_it_and_says_how_to_go_on(run, tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("".join(f"softmax rows={n} columns=8 threads=1\n" for n in range(1, 30)))
    status, out, _ = run("collect", "--problems", file, *FEW, "--budget", "0.000001s")
    assert status == 0
    assert out.startswith("Stopped before the end; the same command goes on from here")


def test_what_does_not_fit_is_said(run):
    status, out, _ = run("collect", "softmax", f"rows={2**38}", "columns=8", *FEW)
    assert status == 0
    assert "Skipped: Measuring softmax" in out
    assert "GiB" in out


def test_an_interrupt_ends_with_the_summary_and_status_130(run, monkeypatch):
    from kernelcast.datasets import jobs as module

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "measure", interrupted)
    status, out, err = run("collect", *SMALL, *FEW)
    assert status == 130
    assert "Stopped before the end" in out
    assert err.rstrip().endswith("Interrupted.")
    status, out, _ = run("collect", *SMALL, *FEW, "--json")
    assert status == 130
    assert json.loads(out)["interrupted"] is True


def test_a_store_that_cannot_be_written_is_a_clear_error(run, tmp_path):
    (tmp_path / "file").write_text("")
    status, out, err = run("collect", *SMALL, *FEW, "--store", tmp_path / "file" / "store")
    assert (status, out) == (2, "")
    assert err.startswith("Error: The store ")
    assert "Choose a folder that can be written" in err
    assert err.count("\n") == 1


# --- select ---


def test_select_predicts_and_prints_the_ranking(run, tmp_path):
    status, out, err = run("select", *SMALL, "--json", "--top", "3")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["selection"]["source"], found["ranked_by"]) == ("analytic", "analytic")
    assert [r["rank"] for r in found["ranking"]] == [1, 2, 3]
    latencies = [r["predicted_us"] for r in found["ranking"]]
    assert latencies == sorted(latencies)
    assert found["ranking"][0]["candidate"] == "vendor"
    assert found["selection"]["measured_us"] is None
    assert not (tmp_path / "home").exists()
    status, out, _ = run("select", *SMALL)
    assert status == 0
    assert "by the roofline (no model)" in out
    assert "Selected: vendor (analytic)." in out
    assert " ranked candidates." in out
    assert "Measured" not in out


def test_select_verifies_here_and_remembers(run, tmp_path):
    status, out, err = run("select", *SMALL, "--mode", "verify", "--top-k", "2", "--json")
    assert (status, err) == (0, "")
    first = json.loads(out)["selection"]
    assert (first["source"], first["measured"]) == ("verified", 2)
    assert first["measured_us"] > 0
    assert len(Store(tmp_path / "home" / "store").ids()) == 2
    status, out, _ = run("select", *SMALL, "--mode", "cached", "--top-k", "2")
    assert status == 0
    assert "(cached)" in out
    assert "Measured " in out
    assert "among 2 candidates" in out
    assert len(Store(tmp_path / "home" / "store").ids()) == 2


def test_select_for_another_device_predicts_whatever_the_mode(run, tmp_path):
    status, out, _ = run(
        "select", "gemm", "m=64", "n=64", "k=64", "--device", "a100", "--mode", "verify", "--json"
    )
    assert status == 0
    selection = json.loads(out)["selection"]
    assert (selection["source"], selection["device"]) == ("analytic", "a100-sxm4-80gb")
    assert "is not here to measure on" in selection["reason"]
    assert not (tmp_path / "home").exists()


def test_a_store_that_cannot_be_written_is_refused_before_anything_is_measured(run, tmp_path, monkeypatch):
    """As a file system that was mounted read-only after the store was made."""
    Journal(tmp_path / "home" / "store").close()

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    monkeypatch.setattr("kernelcast.datasets.collect.collect", lambda *_, **__: pytest.fail("it measures"))
    monkeypatch.setattr("kernelcast.cli.common.warn_if_noisy", lambda _: pytest.fail("it measures"))
    status, out, err = run("collect", *SMALL)
    assert (status, out) == (2, "")
    assert err.startswith(
        f"Error: Cannot write to the store {tmp_path / 'home' / 'store'}: Read-only file system."
    )


def test_folders_that_cannot_be_written_are_warnings_of_one_sentence(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "file" / "home"))
    status, out, err = run("select", *SMALL, "--mode", "verify", "--top-k", "1")
    assert status == 0
    assert "(verified)" in out
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("Warning: The s") for line in lines)
    assert any("The store" in line and "cannot be created" in line for line in lines)
    assert any("cache" in line and "cannot be written" in line for line in lines)


def test_a_mode_of_the_environment_that_is_none(run, monkeypatch):
    monkeypatch.setenv("KERNELCAST_MODE", "guess")
    status, _, err = run("select", *SMALL)
    assert status == 2
    assert err.startswith("Error: KERNELCAST_MODE is 'guess'")
