"""The table of compiles: merging with earlier rows, the figures of the page, and the command on a filled cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import compile_table

from kernelcast.kernels.compile import CompileFacts, candidate_spec, code_key
from kernelcast.kernels.compile_cache import CompileCache
from kernelcast.kernels.compile_plan import plan, problems_to_compile

pytest.importorskip("triton")
parquet = pytest.importorskip("pyarrow.parquet")


def row(variant="triton_row", target="sm80", number=1, **changes):
    return {
        "target": target, "device": "card", "triton": "3.9.0", "operation": "softmax", "problem": "p",
        "dtype": "float16", "variant": variant, "candidate": json.dumps([variant, {"num_warps": number}]),
        "registers": 40, "spills": 0, "shared_bytes": 100, "estimated_shared_bytes": 100.0, "estimate_ratio": 1.0,
        "over_limit": False, "uses_tensor_cores": False, "compile_seconds": 0.5, "outcome": "ok", "detail": "",
        **changes,
    }  # fmt: skip


def test_new_rows_take_the_place_of_their_group_alone():
    old = [row(number=1), row(number=2), row(target="sm90"), row(variant="triton_rows"), row(dtype="float32")]
    new = [row(number=3, registers=7)]
    found = compile_table.merge(old, new)
    assert found == compile_table.merge(old[::-1], new)
    assert [each for each in found if compile_table.group_of(each) == compile_table.group_of(new[0])] == new
    assert len(found) == 4


def test_the_page_counts_by_variant_and_target_and_names_the_exceptions():
    rows = [
        row(estimate_ratio=0.9, spills=4),
        row(number=2, over_limit=True),
        row(
            number=4,
            outcome="timeout",
            estimate_ratio=None,
            over_limit=None,
            spills=None,
            uses_tensor_cores=None,
        ),
        row(target="sm90", estimate_ratio=1.25, uses_tensor_cores=True),
    ]
    found = compile_table.page(rows, ["a note"])
    table, exceptions = found["tables"]
    assert table["rows"] == [
        ["triton_row", "sm80", "float16", 3, "1 timeout", 0.9, 1.0, 1, 1, 4, "0%", 0.5],
        ["triton_row", "sm90", "float16", 1, 0, 1.25, 1.25, 0, 0, 0, "100%", 0.5],
    ]
    assert [line[4] for line in exceptions["rows"]] == ["estimate 0.90", "over the limit", "timeout"]
    assert exceptions["title"].endswith(": 3")
    assert found["notes"][-1] == "a note"
    assert len(compile_table.page(rows[3:], [])["tables"]) == 1


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """A home in which softmax is compiled for sm90."""
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cache = CompileCache(tmp_path / "home" / "compile")
    planned = plan(problems_to_compile("softmax"), "sm90", names=["triton_row"])
    for each in planned.rows:
        spec = candidate_spec(each.request.problem, each.request.candidate, "sm90")
        cache.put(
            "sm90", code_key(spec, "sm90"), CompileFacts(registers=32, shared_bytes=64, compile_seconds=0.25)
        )
    return planned


def test_the_command_writes_page_and_rows_and_keeps_those_of_other_groups(filled, tmp_path, capsys):
    words = [
        "--ops",
        "softmax",
        "--targets",
        "sm90",
        "--variants",
        "triton_row",
        "--output",
        str(tmp_path / "out"),
    ]
    assert compile_table.main(words) == 0
    text = (tmp_path / "out" / "compile.md").read_text()
    assert f"| triton_row | sm90 | float16 | {len(filled.rows)} | 0 |" in text
    assert "command: python benchmarks/compile_table.py --ops softmax" in text
    rows = parquet.read_table(tmp_path / "out" / "compile.parquet").to_pylist()
    assert {(each["registers"], each["outcome"]) for each in rows} == {(32, "ok")}
    assert len(rows) == len(filled.rows)

    # Another target of which nothing is known, and no time: the rows stay, and the page says what is missing.
    words[words.index("sm90")] = "sm80"
    assert compile_table.main([*words, "--budget", "0.000001s", "--limit", "2"]) == 0
    assert parquet.read_table(tmp_path / "out" / "compile.parquet").to_pylist() == rows
    text = (tmp_path / "out" / "compile.md").read_text()
    assert "2 candidates of softmax for sm80 were not started." in text
    assert "the first 2 candidates of each variant alone" in text
    assert "softmax float16 for sm80: 0 of 2 candidates" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--targets", "sm1"], ["--ops", "soft"], ["--budget", "soon"]])
def test_bad_input_is_one_sentence(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    assert compile_table.main([*words, "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("Error: ")
    assert not (tmp_path / "out").exists()
