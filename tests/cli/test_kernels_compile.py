"""``kernelcast kernels compile``, and the group that lists where no command is named."""

from __future__ import annotations

import json

import pytest

from kernelcast.cli import app as application
from kernelcast.errors import MissingExtraError
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.compile import CompileFacts, candidate_spec, code_key
from kernelcast.kernels.compile_cache import CompileCache
from kernelcast.kernels.compile_plan import plan, problems_to_compile

pytest.importorskip("triton")

SOFTMAX = ["kernels", "compile", "--op", "softmax", "--target", "sm90", "--variant", "triton_row"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command: (exit status, standard output, standard error)."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def call(*arguments):
        status = application._run([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def compiled(tmp_path):
    """A cache with facts of every candidate of softmax's triton_row for sm90, so that no compiler is started."""
    cache = CompileCache(tmp_path / "home" / "compile")
    planned = plan(problems_to_compile("softmax"), "sm90", names=["triton_row"])
    for place, row in enumerate(planned.rows):
        warps = row.request.candidate.parameters["num_warps"]
        facts = CompileFacts(
            registers=200 // warps, spills=7 * (place == 0), shared_bytes=8 * warps, compile_seconds=warps / 4
        )
        if place == 2:
            facts = CompileFacts(
                outcome="compile_error", detail="[bold]no[/bold] such thing", compile_seconds=1
            )
        spec = candidate_spec(row.request.problem, row.request.candidate, "sm90")
        cache.put("sm90", code_key(spec, "sm90"), facts)
    return planned


def test_the_table_and_its_figures(run, compiled):
    status, out, err = run(*SOFTMAX)
    # One of them fails.
    assert (status, err) == (1, "")
    assert "softmax(rows=4096, columns=4096, float16, layout=row) for sm90, triton " in out
    first, *_ = (line for line in out.splitlines() if "num_warps=1 " in line)
    assert [cell.strip() for cell in first.split("│")[1:-1]] == [
        "triton_row", "num_warps=1", "200", "7", "8", "0", "0.00", "no", "0.25", "ok",
    ]  # fmt: skip
    assert "5 candidates: 1 compile_error, 4 ok." in out
    assert "The rules' estimate is 0.00 to 0.50 of the compiler's shared memory." in out
    assert "1 spill, at most 7 words a thread; 0 exceed the 232448 bytes" in out
    assert "[bold]no[/bold] such thing" in out


def test_the_json_and_the_parquet_file_hold_a_row_a_candidate(run, compiled, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    status, out, _ = run(*SOFTMAX, "--json", "--out", path)
    assert status == 1
    found = json.loads(out)
    assert [row["candidate"] for row in found["rows"]] == [row.request.candidate.key for row in compiled.rows]
    assert found["summary"]["outcomes"] == {"compile_error": 1, "ok": 4}
    assert (found["target"], found["device"], found["not_started"]) == ("sm90", "h100-sxm5-80gb", 0)
    assert found["shared_bytes_per_block"] == 232_448
    assert found["file"] == str(path)
    read = parquet.read_table(path).to_pylist()
    assert read == found["rows"]
    assert {"problem", "target", "device", "triton", "registers", "spills", "uses_tensor_cores"} <= set(
        read[0]
    )
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["rows.parquet"]


def test_a_file_of_nothing_but_failures_has_typed_columns(run, tmp_path):
    from kernelcast.cli.kernels_compile import write_parquet

    parquet = pytest.importorskip("pyarrow.parquet")
    write_parquet(tmp_path / "none.parquet", [{"variant": "a", "registers": None}])
    types = {field.name: str(field.type) for field in parquet.read_schema(tmp_path / "none.parquet")}
    assert (types["registers"], types["estimate_ratio"], types["over_limit"]) == ("int64", "double", "bool")


def test_what_the_budget_leaves_is_said(run, compiled, tmp_path):
    (tmp_path / "home" / "compile" / "sm90.jsonl").unlink()
    status, out, _ = run(*SOFTMAX, "--budget", "0.000001s")
    assert status == 1
    assert "0 candidates: none compiled." in out
    assert "5 candidates were not started; the same command goes on from here." in out


def test_values_and_dtype_make_the_problem(run, tmp_path):
    cache = CompileCache(tmp_path / "home" / "compile")
    described = problem("softmax", rows=4096, columns=64, dtype="bfloat16")
    for row in plan([described], "gfx942", names=["triton_row"]).rows:
        spec = candidate_spec(described, row.request.candidate, "gfx942")
        cache.put("gfx942", code_key(spec, "gfx942"), CompileFacts(registers=9))
    status, out, _ = run(
        "kernels", "compile", "--op", "softmax", "--target", "gfx942", "columns=64", "--dtype", "bfloat16",
        "--variant", "triton_row", "--json",
    )  # fmt: skip
    assert status == 0
    rows = json.loads(out)["rows"]
    assert {row["problem"] for row in rows} == {described.key}
    assert {row["registers"] for row in rows} == {9}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--op", "gem", "--target", "sm90"], "Unknown operation 'gem'. Did you mean 'gemm'?"),
        (["--op", "gemm", "--target", "sm9"], "Unknown target 'sm9'"),
        (["--op", "gemm", "--target", "sm90", "--variant", "tiled"], "Unknown variant of gemm 'tiled'"),
        (["--op", "gemm", "--target", "sm90", "--variant", "vendor"], "vendor of gemm has no Triton kernel"),
        (["--op", "gemm", "--target", "sm90", "q=3"], "gemm has no dimension or option 'q'"),
        (["--op", "gemm", "--target", "sm90", "m"], "'m' is not of the form NAME=VALUE"),
        (["--op", "gemm", "--target", "sm90", "--dtype", "int8"], "gemm does not take dtype 'int8'"),
        (["--op", "gemm", "--target", "sm90", "dtype=float16", "--dtype", "float32"], "The dtype is given twice"),
        (["--op", "gemm", "--target", "sm90", "--budget", "soon"], "The duration 'soon'"),
        (["--op", "gemm", "--target", "sm90", "--workers", "0"], "workers is 0"),
        (["--op", "gemm", "--target", "sm90", "--time-limit", "-1"], "time_limit_s is -1.0"),
        (["--op", "gemm", "--target", "sm90", "--out", "rows.csv"], "it must end in .parquet"),
        (["--op", "gemm", "--target", "sm90", "--out", "/no/such/rows.parquet"], "there is no folder /no/such"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(run, words, sentence):
    status, out, err = run("kernels", "compile", *words)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_the_interpreter_and_operations_without_kernels_are_refused(run, monkeypatch):
    from kernelcast.kernels import compile_plan, variant

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    status, _, err = run(*SOFTMAX)
    assert (status, err) == (
        2,
        "Error: TRITON_INTERPRET=1 replaces the compiler; unset it to compile kernels.\n",
    )
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(compile_plan, "variants", lambda name: {"vendor": variant(name, "vendor")})
    status, _, err = run("kernels", "compile", "--op", "softmax", "--target", "sm90")
    assert status == 2
    assert "softmax has no Triton variant" in err


def test_a_missing_extra_is_said_before_anything_is_compiled(run, monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    status, _, err = run(*SOFTMAX, "--out", tmp_path / "rows.parquet")
    assert status == 2
    assert str(MissingExtraError("pyarrow", "train", "Writing a Parquet file")) in err


def test_the_word_list_may_be_left_out(run):
    named = run("kernels", "list", "softmax", "--json")
    assert named[0] == 0
    assert run("kernels", "softmax", "--json") == named
    assert run("kernels", "softmax", "rows=8", "columns=16", "threads=1", "--json")[0] == 0
    status, _, err = run("kernels", "compilation")
    assert status == 2
    assert "Unknown operation 'compilation'" in err
    status, out, _ = run("kernels", "--help")
    assert status == 0
    assert "kernelcast kernels compile --op gemm --target sm90" in out
    assert "kernelcast kernels gemm m=4096" in out


@pytest.mark.slow
def test_a_compile_from_scratch_and_again_from_the_cache(run, tmp_path):
    words = ["kernels", "compile", "--op", "gemm", "--target", "sm80", "--variant", "triton_tiled"]
    words += ["m=16", "n=16", "k=16", "--workers", "2", "--json"]
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    first = json.loads(out)
    assert first["summary"]["outcomes"] == {"ok": len(first["rows"])}
    assert first["summary"]["tensor_core_share_16_bit"] == 1.0
    assert json.loads(run(*words)[1]) == first
    assert len((tmp_path / "home" / "compile" / "sm80.jsonl").read_text().split()) == len(first["rows"])
    assert Candidate.from_key(first["rows"][0]["candidate"]).variant == "triton_tiled"


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_compiled(run, tmp_path):
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    status, _, err = run(*SOFTMAX, "--out", folder)
    assert status == 2
    assert "which is a folder" in err
    status, _, err = run(*SOFTMAX, "--out", "/proc/rows.parquet")
    assert status == 2
    assert "cannot be written" in err
