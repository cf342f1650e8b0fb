"""What is compiled for an operation and target, and the rows and figures of the table."""

from __future__ import annotations

import math

import pytest
from cases import for_each

from kernelcast.errors import InvalidProblemError, KernelcastError, UnknownNameError
from kernelcast.kernels import Candidate, operation_names, problem, variants
from kernelcast.kernels.compile import TARGETS, CompileFacts
from kernelcast.kernels.compile_many import CompileRequest
from kernelcast.kernels.compile_plan import (
    CARDS,
    REPRESENTATIVES,
    Planned,
    plan,
    problems_to_compile,
    row_of,
    summary_of,
    target_device,
    triton_variants,
)
from kernelcast.kernels.devices_table import ARCHITECTURES

COMPILED = [
    name
    for name in operation_names()
    if any(hasattr(each, "compile_spec") for each in variants(name).values())
]
A100 = target_device("sm80")


def test_every_target_has_a_card_of_its_architecture():
    assert list(CARDS) == list(TARGETS)
    for target in TARGETS:
        card = target_device(target)
        assert card.architecture == target
        assert card.shared_bytes_per_block == ARCHITECTURES[target].shared_bytes_per_block
    with pytest.raises(UnknownNameError, match=r"Unknown target 'sm81'\. Did you mean 'sm8"):
        target_device("sm81")


@for_each("name", COMPILED)
def test_every_triton_variant_has_a_candidate_on_a_representative_problem(name):
    assert name in REPRESENTATIVES
    found = problems_to_compile(name)
    assert {each.operation for each in found} == {name}
    assert {each.dtype for each in found} == {"float16"}
    left_out = set.intersection(*(set(plan(found, target).left_out) for target in TARGETS))
    assert left_out == set(), "no target has a legal candidate: add a problem to REPRESENTATIVES"


def test_values_replace_those_of_the_first_representative():
    assert problems_to_compile("gemm", {"m": 17, "layout": "tt", "dtype": "bfloat16"}) == [
        problem("gemm", m=17, n=4096, k=4096, layout="tt", dtype="bfloat16")
    ]
    every = problems_to_compile("gemm", {"dtype": "float32", "allow_tf32": True})
    assert len(every) == len(REPRESENTATIVES["gemm"])
    assert all(each.dtype == "float32" and each.allow_tf32 for each in every)


def test_an_operation_without_a_representative_needs_its_dimensions(monkeypatch):
    monkeypatch.delitem(REPRESENTATIVES, "softmax")
    with pytest.raises(InvalidProblemError, match="It needs: rows, columns"):
        problems_to_compile("softmax")
    assert problems_to_compile("softmax", {"rows": 2, "columns": 3}) == [
        problem("softmax", rows=2, columns=3, dtype="float16")
    ]


def test_a_plan_holds_the_legal_candidates_with_their_estimates():
    described = problem("gemm", m=4096, n=4096, k=4096, dtype="float16")
    found = plan([described], "sm80", names=["triton_tiled"])
    tiled = variants("gemm")["triton_tiled"]
    block = tiled.space("default")
    legal = block.take(tiled.legal(described, A100, block))
    assert [row.request for row in found.rows] == [
        CompileRequest(described, legal.at(row)) for row in range(legal.length)
    ]
    expected = tiled.work(described, legal.columns, A100).shared_bytes
    assert [row.estimated_shared_bytes for row in found.rows] == expected.tolist()
    assert (found.target, found.device, found.left_out) == ("sm80", A100, ())
    assert len(plan([described], "sm80", subset="full", names=["triton_tiled"]).rows) > 10 * len(found.rows)


def test_each_variant_takes_the_first_problem_on_which_it_has_a_candidate():
    wide, row = (problem("gemm", m=m, n=64, k=64, dtype="float16") for m in (4096, 1))
    # Eight slices need more steps of k than 64 has in blocks of 16: split-K takes neither of these.
    found = plan([wide, row], "sm80", names=["triton_tiled", "triton_split_k"])
    assert {
        each.request.problem for each in found.rows if each.request.candidate.variant == "triton_tiled"
    } == {wide}
    deep = problem("gemm", m=1, n=64, k=8192, dtype="float16")
    found = plan([row, deep], "sm80", names=["triton_split_k"])
    assert {each.request.problem for each in found.rows} <= {row, deep}
    none = problem("gemm", m=0, n=0, k=0, dtype="float16")
    assert plan([none], "sm80", names=["triton_split_k"]).left_out == ("triton_split_k",)


def test_variants_that_cannot_be_compiled_are_refused():
    described = problem("gemm", m=64, n=64, k=64)
    with pytest.raises(UnknownNameError, match="variant of gemm 'tiled'"):
        plan([described], "sm80", names=["tiled"])
    with pytest.raises(KernelcastError, match=r"vendor of gemm has no Triton kernel.*triton_tiled"):
        plan([described], "sm80", names=["vendor"])


def test_an_operation_without_triton_variants_is_refused(monkeypatch):
    from kernelcast.kernels import compile_plan

    monkeypatch.setattr(compile_plan, "variants", lambda name: {"vendor": variants("gemm")["vendor"]})
    with pytest.raises(KernelcastError, match="softmax has no Triton variant"):
        triton_variants("softmax")


def rows(*pairs, dtype="float16"):
    described = problem("gemm", m=64, n=64, k=64, dtype=dtype)
    request = CompileRequest(described, Candidate("triton_tiled"))
    return [row_of(Planned(request, estimate), facts, A100) for estimate, facts in pairs]


def ok(shared=0, spills=0, seconds=1.0, tensor_cores=True):
    return CompileFacts(
        registers=64,
        spills=spills,
        shared_bytes=shared,
        uses_tensor_cores=tensor_cores,
        compile_seconds=seconds,
    )


def test_the_columns_of_a_row():
    (row,) = rows((1100.0, ok(1000, 3)))
    assert row == {
        "operation": "gemm",
        "problem": problem("gemm", m=64, n=64, k=64, dtype="float16").key,
        "dtype": "float16",
        "variant": "triton_tiled",
        "candidate": Candidate("triton_tiled").key,
        "registers": 64,
        "spills": 3,
        "shared_bytes": 1000,
        "estimated_shared_bytes": 1100.0,
        "estimate_ratio": 1.1,
        "over_limit": False,
        "uses_tensor_cores": True,
        "compile_seconds": 1.0,
        "outcome": "ok",
        "detail": "",
    }
    limit = A100.shared_bytes_per_block
    assert [row["over_limit"] for row in rows((0.0, ok(limit)), (0.0, ok(limit + 1)))] == [False, True]
    (failed,) = rows((5.0, CompileFacts(outcome="timeout", compile_seconds=60.0)))
    assert failed["estimated_shared_bytes"] == 5.0
    unknown = ("registers", "spills", "shared_bytes", "estimate_ratio", "over_limit", "uses_tensor_cores")
    assert [failed[name] for name in unknown] == [None] * 6
    assert [row["estimate_ratio"] for row in rows((0.0, ok()), (8.0, ok()), (math.nan, ok(8)))] == [
        1.0,
        math.inf,
        None,
    ]


def test_the_figures_of_some_rows():
    assert summary_of([]) == {
        "candidates": 0, "outcomes": {}, "ratio_min": None, "ratio_max": None, "over_limit": 0, "spilling": 0,
        "most_spills": None, "tensor_core_share_16_bit": None, "median_compile_seconds": None,
    }  # fmt: skip
    found = rows(
        (1000.0, ok(1000, seconds=3.0)),
        (1200.0, ok(1000, spills=7, seconds=1.0, tensor_cores=False)),
        (500.0, ok(200_000, spills=2, seconds=2.0)),
        (5.0, CompileFacts(outcome="crash", compile_seconds=60.0)),
    ) + rows((1.0, ok(1, tensor_cores=False, seconds=0.5)), dtype="float32")
    assert summary_of(found) == {
        "candidates": 5, "outcomes": {"crash": 1, "ok": 4}, "ratio_min": 0.0025, "ratio_max": 1.2, "over_limit": 1,
        "spilling": 2, "most_spills": 7, "tensor_core_share_16_bit": 2 / 3, "median_compile_seconds": 2.0,
    }  # fmt: skip
