"""The Triton variants of softmax: rules, work, results under Triton's interpreter, and what the compiler makes of them."""

from __future__ import annotations

import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import (
    CPU,
    DEVICES,
    T4,
    UNKNOWN,
    compiler,  # noqa: F401
    interpret_script,
    on_gpu,
    refused_by,
    work_of,
)

from kernelcast.kernels import Candidate, candidates, operation, problem, variant
from kernelcast.kernels.registry import require_legal

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
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


# Rules


@for_each(
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
    found, message = refused_by(candidate, described, device)
    assert found == rule
    assert seen in message


@for_each(
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


@settings(max_examples=examples(40), deadline=None)
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


@for_each("device", [A100, H100, MI300])
@for_each(
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
    work = work_of(row(4), softmax(rows=10, columns=1000), A100)
    assert work["flops"] == 5 * 10 * 1024
    assert work["traffic_bytes"] == 2 * 2 * 10 * 1000
    assert (work["programs"], work["warps"], work["calls"], work["inner_steps"]) == (10, 4, 1, 1)
    assert work["accumulators"] == 1024 / 128
    # One float32 for each of four warps, which meet to add up; one warp needs none.
    assert work["shared_bytes"] == 16
    assert work_of(row(1), softmax(rows=10, columns=1000), A100)["shared_bytes"] == 0


def test_work_of_several_rows_a_program():
    work = work_of(rows(8, 2), softmax(rows=10, columns=100, layout="column", dtype="float32"), A100)
    # Two programs of 8 x 128.
    assert work["flops"] == 5 * 2 * 8 * 128
    assert work["traffic_bytes"] == 2 * 4 * 10 * 100
    assert work["programs"] == 2
    assert work["accumulators"] == 8 * 128 / 64
    # A program's eight adjacent rows lie in two threads of four; the two warps take turns at the columns, and exchange.
    assert work["shared_bytes"] == 4 * 8 * 2


@for_each(
    ("candidate", "described", "device", "seen"),
    [
        # Sixteen lanes of 8 elements make a row of 128: every warp has rows of its own.
        (rows(16, 4), softmax(columns=128), H100, 0),
        # Sizes that are no multiple of 16: one element a lane, so that two warps share a row.
        (rows(4, 4), softmax(columns=33), H100, 4 * 4 * 2),
        # Few elements for many threads: two of them a lane.
        (rows(4, 8), softmax(columns=128), H100, 4 * 4 * 2),
        # All eight warps share every row, and a lane sends its 16 rows in four turns.
        (rows(16, 8), softmax(columns=1000), H100, 4 * 16 * 8 / 4),
        # In two turns; of a float32 matrix, whose lanes have four rows, in one.
        (rows(32, 4), softmax(columns=128, layout="column"), H100, 4 * 32 * 4 / 2),
        (rows(32, 4), softmax(columns=128, layout="column", dtype="float32"), H100, 4 * 32 * 4),
        # Turns of less than 128 bytes: one of 128.
        (rows(16, 2), softmax(columns=128, layout="column"), H100, 128),
        # Two groups of warps share rows, and each has 128 bytes.
        (rows(32, 4), softmax(columns=33), H100, 256),
        (rows(16, 8), softmax(columns=128, layout="column"), MI300, 4 * 16 * 8),
        (rows(32, 1), softmax(columns=128, layout="column"), MI300, 0),
    ],
)
def test_shared_memory_of_several_rows_a_program(candidate, described, device, seen):
    """What Triton 3.9 allots, to the byte; offline compilation holds some of it to that below."""
    assert work_of(candidate, described, device)["shared_bytes"] == seen


def test_work_of_two_passes():
    described = softmax(rows=4, columns=5000)
    work = work_of(two_pass(1024, 4), described, A100)
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
import math
import torch
from kernelcast.kernels import memory, operation, problem, variant

for name, config, values, fill in cases:
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
"""


def interpret(cases):
    interpret_script(CHECK, cases)


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
    sizes = {"rows": 40, "columns": 3001, "dtype": dtype}
    on_gpu(
        "softmax",
        [(row(), sizes), (rows(), sizes), (rows(16), {**sizes, "layout": "column"}), (two_pass(), sizes)],
    )


# Offline compilation


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_what_is_legal_compiles_within_the_registers(compiler, target):  # noqa: F811
    for candidate, values, spills in (
        (row(1), {"columns": 1}, 0),
        (row(4), {"columns": 4096}, 0),
        # A row of 65536 fills the registers of a whole core, so some elements wait in memory.
        (row(16), {"columns": 65536}, 100),
        (row(8), {"columns": 5001}, 0),
        (rows(32, 4), {"columns": 64, "layout": "column"}, 0),
        (rows(8, 4), {"columns": 100}, 0),
        (rows(16, 8), {"columns": 1000}, 0),
        (rows(32, 4), {"columns": 33}, 0),
        (two_pass(1024, 4), {"columns": 131072}, 0),
        (two_pass(16384, 8), {"columns": 128257}, 0),
    ):
        described = softmax(**values, dtype="bfloat16")
        require_legal(described, DEVICES[target], candidate)
        facts = compiler(described, candidate, target)
        assert facts.outcome == "ok", facts.detail
        assert facts.spills <= spills, (candidate, facts)
        # To the byte.
        assert work_of(candidate, described, DEVICES[target])["shared_bytes"] == facts.shared_bytes, candidate


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_a_row_is_read_and_written_sixteen_bytes_at_a_time(compiler, target):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    spec = variant("softmax", "triton_row").compile_spec(softmax(), row(4).parameters, target)
    code = compile_spec_for(spec, target).asm["sass"]
    assert "LDG.E.128" in code
    assert "STG.E.128" in code
