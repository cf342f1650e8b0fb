"""The Triton variants of softmax: rules, work, results under Triton's interpreter, and what the compiler makes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.kernels import (
    Candidate,
    CandidateTable,
    Device,
    candidates,
    memory,
    operation,
    problem,
    variant,
)
from kernelcast.kernels.registry import require_legal

A100 = Device("a100", "gpu", "nvidia", "sm80", 108, shared_bytes_per_block=166_912, llc_bytes=40 * 2**20)
H100 = Device("h100", "gpu", "nvidia", "sm90", 132, shared_bytes_per_block=232_448, llc_bytes=50 * 2**20)
T4 = Device("t4", "gpu", "nvidia", "sm75", 40, shared_bytes_per_block=65_536, llc_bytes=4 * 2**20)
MI300 = Device("mi300x", "gpu", "amd", "gfx942", 304, warp_size=64, shared_bytes_per_block=65_536)
UNKNOWN = Device("new", "gpu", "nvidia", "sm80", 1)
CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)
GPUS = (A100, H100, T4, MI300, UNKNOWN)
NAMES = ("triton_row", "triton_rows", "triton_two_pass")
OP = operation("softmax")


def row(num_warps=4):
    return Candidate.of("triton_row", {"num_warps": num_warps})


def rows(rows_per_program=4, num_warps=2):
    return Candidate.of("triton_rows", {"rows_per_program": rows_per_program, "num_warps": num_warps})


def two_pass(block=1024, num_warps=4):
    return Candidate.of("triton_two_pass", {"block": block, "num_warps": num_warps})


def softmax(rows=4096, columns=4096, **options):
    return problem("softmax", rows=rows, columns=columns, **{"dtype": "float16", **options})


def work_of(candidate, described, device=A100):
    block = CandidateTable.of([candidate]).blocks[0]
    work = variant("softmax", candidate.variant).work(described, block.columns, device).columns(1)
    return {name: float(values[0]) for name, values in work.items()}


# Rules


@pytest.mark.parametrize(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (row(), softmax(), CPU, "needs-gpu", "cpu is a cpu"),
        (row(), softmax(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (two_pass(num_warps=64), softmax(columns=9000), A100, "block-threads", "2048 threads"),
        (row(), softmax(layout="column"), A100, "rows-adjacent", "layout=column"),
        (two_pass(), softmax(layout="column"), A100, "rows-adjacent", "layout=column"),
        (row(16), softmax(columns=65537), A100, "row-fits-a-program", "columns=65537"),
        # 4097 columns are padded to 8192: 256 values for each of 32 threads.
        (row(1), softmax(columns=4097), A100, "registers", "256 > 128 values a thread"),
        (row(2), softmax(columns=32), A100, "threads-busy", "32 elements for 64 threads"),
        (row(1), softmax(rows=2**31, columns=1), A100, "grid", f"{2**31} blocks"),
        (rows(8), softmax(layout="column"), A100, "rows-fill-a-sector", "8 rows of 2-byte elements"),
        (rows(8), softmax(rows=7, columns=64), A100, "rows-enough", "rows_per_program=8, rows=7"),
        (rows(32, 1), softmax(columns=129), A100, "registers", "256 > 128 values a thread"),
        (rows(2, 8), softmax(columns=64), A100, "threads-busy", "128 elements for 256 threads"),
        (two_pass(4096), softmax(columns=4096), A100, "block-is-a-part", "block=4096, columns=4096"),
        (two_pass(), softmax(rows=1, columns=2**31 - 1), A100, "offsets", f"columns={2**31 - 1}"),
        # A maximum and a sum for each of 16384 lanes over 128 threads.
        (two_pass(16384, 4), softmax(columns=20000), A100, "registers", "256 > 128 values a thread"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    block = CandidateTable.of([candidate]).blocks[0]
    (refusal,) = variant("softmax", candidate.variant).refusals(described, device, block)
    assert refusal.rule == rule
    assert seen in str(refusal)


@pytest.mark.parametrize(
    ("candidate", "described", "device"),
    [
        (row(16), softmax(columns=65536), A100),
        (row(1), softmax(columns=4096), A100),
        (row(1), softmax(columns=1), MI300),
        (row(), softmax(dtype="bfloat16"), UNKNOWN),
        (rows(16), softmax(columns=64, layout="column"), A100),
        (rows(8), softmax(rows=8, columns=64), A100),
        (rows(8, 1), softmax(columns=64, layout="column", dtype="float32"), A100),
        (two_pass(4096), softmax(columns=4097), A100),
        (two_pass(16384, 8), softmax(columns=20000), A100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    require_legal(described, device, candidate)


@settings(max_examples=40, deadline=None)
@given(
    row_count=st.integers(0, 3000),
    columns=st.integers(1, 200_000),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    layout=st.sampled_from(["row", "column"]),
    device=st.sampled_from(GPUS),
)
def test_rules_agree_with_refusals_and_keep_their_promises(row_count, columns, dtype, layout, device):
    described = softmax(row_count, columns, dtype=dtype, layout=layout)
    for name in NAMES:
        found = variant("softmax", name)
        block = found.space("default")
        legal = found.legal(described, device, block)
        reasons = found.refusals(described, device, block)
        assert len(reasons) == block.length - legal.sum()
        assert all(reason.reason and reason.seen for reason in reasons)
        kept = block.take(legal)
        work = found.work(described, kept.columns, device).columns(kept.length)
        assert (work["accumulators"] <= 128).all()
        assert (work["flops"] >= OP.flops(described)).all()
        assert (work["traffic_bytes"] >= OP.traffic_bytes(described)).all()
        # Every element has a place in some program.
        if name == "triton_two_pass":
            assert (work["inner_steps"] / 2 * kept.columns["block"] >= columns).all()
        if name == "triton_rows":
            assert (work["programs"] * kept.columns["rows_per_program"] >= row_count).all()


@pytest.mark.parametrize("device", [A100, H100, MI300])
@pytest.mark.parametrize(
    ("row_count", "columns", "layout"),
    [(1, 1, "row"), (4096, 4096, "row"), (65536, 128, "row"), (1, 131072, "row"), (256, 128, "column")],
)
def test_typical_problems_have_candidates(device, row_count, columns, layout):
    described = softmax(row_count, columns, layout=layout)
    assert len(candidates(described, device, subset="default", backends=["triton"])) >= 1


def test_the_quick_subset_is_small():
    assert 20 <= sum(variant("softmax", name).space("default").length for name in NAMES) <= 60


# Work


def test_work_of_one_row_a_program():
    work = work_of(row(4), softmax(rows=10, columns=1000))
    assert work["flops"] == 5 * 10 * 1024
    assert work["traffic_bytes"] == 2 * 2 * 10 * 1000
    assert (work["programs"], work["warps"], work["calls"], work["inner_steps"]) == (10, 4, 1, 1)
    assert work["accumulators"] == 1024 / 128
    # One float32 for each of four warps, which meet to add up; one warp needs none.
    assert work["shared_bytes"] == 16
    assert work_of(row(1), softmax(rows=10, columns=1000))["shared_bytes"] == 0


def test_work_of_several_rows_a_program():
    work = work_of(rows(8, 2), softmax(rows=10, columns=100, layout="column", dtype="float32"))
    # Two programs of 8 x 128.
    assert work["flops"] == 5 * 2 * 8 * 128
    assert work["traffic_bytes"] == 2 * 4 * 10 * 100
    assert work["programs"] == 2
    assert work["accumulators"] == 8 * 128 / 64
    assert np.isnan(work["shared_bytes"])


def test_work_of_two_passes():
    described = softmax(rows=4, columns=5000)
    work = work_of(two_pass(1024, 4), described)
    assert work["flops"] == 10 * 4 * 5 * 1024
    assert work["inner_steps"] == 10
    assert work["accumulators"] == 2 * 1024 / 128
    # The rows stay in the level-2 cache between the passes; where there is none, they are read twice.
    assert work["traffic_bytes"] == 2 * 2 * 4 * 5000
    assert work_of(two_pass(1024, 4), described, UNKNOWN)["traffic_bytes"] == 3 * 2 * 4 * 5000
    # 40 rows at once, each of 2**17 two-byte elements, are beyond T4's 4 MiB.
    long = softmax(rows=64, columns=2**17)
    assert work_of(two_pass(1024, 4), long, T4)["traffic_bytes"] == 3 * 2 * 64 * 2**17
    assert work_of(two_pass(1024, 4), long, A100)["traffic_bytes"] == 2 * 2 * 64 * 2**17


# Results. The interpreter is chosen when triton is imported, so it runs in a process of its own.

CHECK = """
import json, math, sys
import torch
from kernelcast.kernels import memory, operation, problem, variant

failures = []
for name, config, values, fill in json.load(sys.stdin):
    described = problem("softmax", **values)
    op = operation("softmax")
    (x,) = op.make_inputs(described, seed=7, device="cpu")
    if fill == "large":
        x.mul_(1e4)
    if fill == "masked":  # whole blocks of -inf, at the front, at the back and everywhere but once
        x[:, : described["columns"] // 2] = -math.inf
        x[1, described["columns"] // 2 + 3 :] = -math.inf
        x[2, :-1] = -math.inf
    if fill == "infinite":  # rows that are NaN in torch too, among rows that are not
        x[0] = -math.inf
        x[1, 5] = math.inf
        x[2, 7] = math.nan
    original = x.clone()
    launch = variant("softmax", name).build(described, config)
    with memory.poisoned():
        first, second = launch(x), launch(x)
    wrong = op.check(described, op.reference(described, x), first)
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        wrong = "two runs differ"
    if not torch.equal(x.nan_to_num(), original.nan_to_num()):
        wrong = "the input was changed"
    if first.stride() != x.stride():
        wrong = f"strides {first.stride()}, not {x.stride()}"
    if fill == "infinite" and not (first[:3].isnan().all() and first[3:].isfinite().all()):
        wrong = "other elements than torch's are NaN"
    if wrong:
        failures.append([name, config, values, fill, wrong])
json.dump(failures, sys.stdout)
"""


def interpret(cases):
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHECK],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == []


def case(candidate, row_count, columns, fill="", **options):
    values = {"rows": row_count, "columns": columns, "dtype": "float32", **options}
    return [candidate.variant, candidate.parameters, values, fill]


def test_results_quickly():
    interpret(
        [
            case(row(), 3, 131, dtype="bfloat16"),
            case(rows(), 7, 33, layout="column", dtype="float16"),
            case(two_pass(), 3, 2500, "masked"),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_size(dtype):
    sizes = [(1, 1), (5, 1), (1, 17), (3, 64), (2, 127), (3, 1031), (0, 33)]
    interpret(
        [case(row(), *size, dtype=dtype) for size in sizes]
        + [
            case(rows(count), *size, dtype=dtype, layout=layout)
            for size in [*sizes, (33, 65), (64, 32)]
            for count in (2, 16)
            for layout in ("row", "column")
        ]
        + [case(two_pass(), *size, dtype=dtype) for size in [(1, 1025), (3, 2048), (2, 3001), (0, 2048)]]
        + [case(two_pass(16384, 16), 1, 20011, dtype=dtype), case(row(16), 1, 40_001, dtype=dtype)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("fill", ["large", "masked", "infinite"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_large_and_infinite_values(dtype, fill):
    """Differences of infinities must appear where torch has them, and nowhere else."""
    interpret(
        [case(candidate, 6, 3001, fill, dtype=dtype) for candidate in (row(), rows(), two_pass())]
        + [case(rows(), 6, 40, fill, dtype=dtype, layout="column")]
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for candidate, options in (
        (row(), {}),
        (rows(), {}),
        (rows(16), {"layout": "column"}),
        (two_pass(), {}),
    ):
        described = softmax(40, 3001, dtype=dtype, **options)
        (x,) = OP.make_inputs(described, seed=7, device="cuda")
        launch = variant("softmax", candidate.variant).build(described, candidate.parameters)
        with memory.poisoned():
            output = launch(x)
        assert OP.check(described, OP.reference(described, x), output) is None, candidate


# Offline compilation


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from kernelcast.kernels.compile import compile_facts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return compile_facts


@pytest.mark.slow
@pytest.mark.parametrize("device", [A100, H100])
@pytest.mark.parametrize(
    ("candidate", "values"),
    [
        (row(1), {"columns": 1}),
        (row(4), {"columns": 4096}),
        (row(16), {"columns": 65536}),
        (row(8), {"columns": 5001}),
        (rows(32, 4), {"columns": 64, "layout": "column"}),
        (rows(8, 4), {"columns": 100}),
        (two_pass(1024, 4), {"columns": 131072}),
        (two_pass(16384, 8), {"columns": 128257}),
    ],
)
def test_what_is_legal_compiles_within_the_registers(compiler, device, candidate, values):
    described = softmax(**values, dtype="bfloat16")
    require_legal(described, device, candidate)
    facts = compiler(described, candidate, device.architecture)
    assert facts.outcome == "ok", facts.detail
    # A row of 65536 fills the registers of a whole core, so some elements wait in memory.
    assert facts.spills <= (100 if values["columns"] == 65536 else 0), facts
    assert facts.shared_bytes <= device.shared_bytes_per_block
    if candidate.variant != "triton_rows":
        assert work_of(candidate, described, device)["shared_bytes"] == facts.shared_bytes


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_a_row_is_read_and_written_sixteen_bytes_at_a_time(compiler, target):
    from kernelcast.kernels.compile import compile_spec_for

    spec = variant("softmax", "triton_row").compile_spec(softmax(), row(4).parameters, target)
    code = compile_spec_for(spec, target).asm["sass"]
    assert "LDG.E.128" in code
    assert "STG.E.128" in code
