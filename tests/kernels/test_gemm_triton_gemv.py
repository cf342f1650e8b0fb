"""gemm's ``triton_gemv``: rules, work, results under Triton's interpreter, and what the compiler makes of it."""

from __future__ import annotations

import numpy as np
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
    assert_compiles,
    compiler,  # noqa: F401
    interpret,
    on_gpu,
    refused_by,
    work_of,
)

from kernelcast.kernels import Candidate, candidates, operation, problem, variant
from kernelcast.kernels.ops.gemm.triton_gemv import skinny
from kernelcast.kernels.triton_rules import needs_wide_offsets

A100, MI300 = DEVICES["sm80"], DEVICES["gfx942"]
GEMV = variant("gemm", "triton_gemv")
GEMM = operation("gemm")


def gemv(block_n=64, block_k=16, num_warps=4, split_k=1):
    return Candidate.of(
        "triton_gemv",
        {"block_n": block_n, "block_k": block_k, "num_warps": num_warps, "split_k": split_k},
    )


def half(m=1, n=4096, k=4096, **values):
    return problem("gemm", m=m, n=n, k=k, **{"dtype": "float16", **values})


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (gemv(), half(17, 17), A100, "few-rows", "m=17, n=17"),
        (gemv(), half(), CPU, "needs-gpu", "cpu is a cpu"),
        (gemv(), half(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (gemv(), half(k=2**31 - 2**16), A100, "dimensions", f"k={2**31 - 2**16}"),
        (gemv(num_warps=64), half(), A100, "block-threads", "2048 threads"),
        (gemv(block_n=64), half(n=31), A100, "blocks-fit", "block_n=64 for 31"),
        (gemv(block_n=64), half(31, 1), A100, "blocks-fit", "block_n=64 for 31"),
        (gemv(block_k=16), half(k=7), A100, "blocks-fit", "block_k=16 for k=7"),
        (gemv(64, 8), half(), A100, "wide-loads", "8 bytes a thread"),
        (gemv(64, 8, 2), half(), MI300, "wide-loads", "8 bytes a thread"),
        (gemv(8, 128), half(), A100, "sectors", "16 bytes"),
        (gemv(128, 8), half(layout="nt"), A100, "sectors", "16 bytes"),
        # The few rows are columns of B, so A's layout counts.
        (gemv(8, 128), half(4096, 1, layout="tn"), A100, "sectors", "16 bytes"),
        (gemv(64, 32), half(9), A100, "sums", "256 > 128 sums"),
        (gemv(64, 32), half(5, 1001), A100, "registers", "192 > 176 words"),
        (gemv(64, 16, split_k=8), half(k=100), A100, "slices-work", "7 steps of block_k in 8 slices"),
        (gemv(64, 16, split_k=4), half(k=80), A100, "slices-work", "5 steps of block_k in 4 slices"),
        (gemv(32, 8, 1, split_k=2), half(k=0), A100, "slices-work", "0 steps of block_k in 2 slices"),
        (gemv(split_k=64), half(16, 2**20, dtype="float32"), A100, "parts-fit", f"{2**32} bytes"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found = refused_by(candidate, described, device)
    assert found[0] == rule
    assert seen in found[1]


@for_each(
    ("candidate", "described", "device"),
    [
        (gemv(32, 32), half(16, 17), A100),
        (gemv(), half(100, 16), A100),
        (gemv(), half(dtype="bfloat16"), UNKNOWN),
        (gemv(), half(k=2**31 - 2**16 - 1), A100),
        (gemv(block_n=64), half(n=32), A100),
        (gemv(block_k=16), half(k=8), A100),
        (gemv(128, 4), half(dtype="float32"), UNKNOWN),
        (gemv(16, 64), half(), A100),
        (gemv(8, 128), half(layout="nt"), A100),
        (gemv(64, 16), half(9), A100),
        (gemv(64, 16), half(5, 1001), A100),
        (gemv(64, 16, split_k=4), half(k=100), A100),
        (gemv(32, 8, 1), half(k=0, n=32), UNKNOWN),
        (gemv(split_k=16), half(16, 2**20, dtype="float32"), A100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    assert refused_by(candidate, described, device) == ("", "")


def test_the_shorter_side_comes_first():
    plain = skinny(half(3, 50, 7, layout="nt", ldb=9))
    assert (plain.flipped, plain.few, plain.rows, plain.long) == (False, 3, 4, 50)
    assert (plain.few_strides, plain.long_strides, plain.output_strides) == ((7, 1), (1, 9), (50, 1))
    turned = skinny(half(50, 3, 7, layout="nt", lda=9))
    assert (turned.flipped, turned.few, turned.rows, turned.long) == (True, 3, 4, 50)
    # B [k, n] is column-major, so one of its columns is a row of few; A [m, k] runs along k and then along m.
    assert (turned.few_strides, turned.long_strides, turned.output_strides) == ((7, 1), (1, 9), (1, 3))
    assert [skinny(half(m, 50)).rows for m in (1, 2, 5, 8, 9, 16)] == [1, 2, 8, 8, 16, 16]


@settings(max_examples=examples(40), deadline=None)
@given(
    m=st.integers(0, 40),
    n=st.integers(0, 3000),
    k=st.integers(0, 3000),
    flip=st.booleans(),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    device=st.sampled_from([*DEVICES.values(), T4, UNKNOWN, CPU]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(m, n, k, flip, layout, dtype, device):
    sizes = (n, m, k) if flip else (m, n, k)
    described = half(*sizes, dtype=dtype, layout=layout)
    block = GEMV.space("default")
    legal = GEMV.legal(described, device, block)
    reasons = GEMV.refusals(described, device, block)
    assert len(reasons) == block.length - legal.sum()
    assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    work = GEMV.work(described, kept.columns, device).columns(kept.length)
    assert (work["accumulators"] <= 128).all()
    assert (work["flops"] >= GEMM.flops(described)).all()
    assert (work["traffic_bytes"] >= GEMM.traffic_bytes(described) * (m > 0) * (n > 0)).all()
    split = kept.columns["split_k"]
    assert ((work["scratch_bytes"] == 0) == ((split == 1) | (m * n == 0))).all()
    # The last slice has something to do, and the slices together reach k.
    done = work["inner_steps"] * kept.columns["block_k"]
    assert ((split == 1) | (done * (split - 1) < k)).all()
    assert (done * split >= k).all()


def test_the_spaces():
    quick, full = GEMV.space("default"), GEMV.space()
    rows = set(zip(*(column.tolist() for column in quick.columns.values()), strict=True))
    assert len(rows) == quick.length == 60
    assert full.length == 8 * 8 * 4 * 7
    assert rows <= set(zip(*(column.tolist() for column in full.columns.values()), strict=True))
    # Each of them is of use somewhere.
    useful = np.zeros(quick.length, dtype=bool)
    for layout in ("nn", "nt"):
        for dtype in ("float16", "float32"):
            useful |= GEMV.legal(half(k=16384, layout=layout, dtype=dtype), A100, quick)
    assert useful.all()


@for_each("device", [A100, DEVICES["sm100"], MI300])
@for_each("m", [1, 2, 4, 8, 16])
@for_each("layout", ["nn", "nt"])
@for_each("dtype", ["float16", "float32"])
def test_decoding_has_candidates(device, m, layout, dtype):
    found = candidates(half(m, 4096, 14336, layout=layout, dtype=dtype), device, subset="default")
    assert sum(each.variant == "triton_gemv" for each in found) >= 6


# Work


def test_work_counts_padding_and_rereads():
    described = half(3, 100, 200)
    work = work_of(gemv(64, 32), described, A100)
    # Two blocks of 64 places over seven steps of 32, with a fourth row; then the 32 sums of each output.
    assert work["flops"] == 2 * 4 * 128 * 224 + 4 * 128 * 32
    assert work["traffic_bytes"] == 2 * (3 * 200 * 2 + 200 * 100 + 3 * 100)
    assert (work["programs"], work["warps"], work["calls"], work["inner_steps"]) == (2, 4, 1, 7)
    assert (work["accumulators"], work["scratch_bytes"]) == (4 * 64 * 32 / 128, 0)
    # How the threads' sums meet is the compiler's choice; it takes a few kilobytes.
    assert np.isnan(work["shared_bytes"])
    turned = work_of(gemv(64, 32), half(100, 3, 200), A100)
    assert {name: turned[name] for name in ("flops", "traffic_bytes")} == {
        name: work[name] for name in ("flops", "traffic_bytes")
    }


def test_work_of_slices():
    work = work_of(gemv(64, 16, split_k=4), half(1, 128, 1024), A100)
    assert (work["programs"], work["calls"], work["inner_steps"]) == (8, 2, 16)
    assert work["scratch_bytes"] == 4 * 4 * 128
    assert work["flops"] == 2 * 128 * 1024 + 4 * 128 * 16 + 4 * 128


def test_tf32_changes_nothing():
    specs = [
        GEMV.compile_spec(half(dtype="float32", allow_tf32=allowed), gemv().parameters, "sm80")
        for allowed in (True, False)
    ]
    assert specs[0] == specs[1]


# Results


def case(candidate, m, n, k, **values):
    return candidate, {"m": m, "n": n, "k": k, "dtype": "float32", **values}


def test_results_quickly():
    interpret(
        "gemm",
        [
            case(gemv(16, 16), 3, 21, 37, layout="tn", lda=8),
            case(gemv(16, 16, split_k=2), 21, 2, 37, dtype="bfloat16", layout="nt"),
            case(gemv(16, 16, split_k=2), 1, 32, 32, dtype="float16"),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(dtype):
    interpret(
        "gemm",
        [
            case(gemv(16, 16, split_k=split), m, n, 41, dtype=dtype, layout=layout, **leading)
            for layout in ("nn", "nt", "tn", "tt")
            for leading in ({}, {"lda": 48, "ldb": 53})
            for m, n in ((5, 29), (29, 5))
            for split in (1, 2)
        ],
    )


@pytest.mark.slow
def test_results_of_degenerate_shapes_and_every_kind_of_config():
    shapes = [
        (1, 1, 1),
        (1, 33, 17),
        (33, 1, 17),
        (16, 16, 16),
        (3, 5, 2),
        (5, 3, 2),
        (15, 31, 1),
        (8, 32, 48),
    ]
    empty = [(0, 5, 7), (5, 0, 7), (5, 7, 0), (7, 5, 0), (0, 0, 0)]
    configs = [
        gemv(4, 64),
        gemv(64, 4),
        gemv(8, 8, 1),
        gemv(512, 4, 8),
        gemv(4, 512, 8),
        gemv(32, 32, split_k=8),
    ]
    far = {"dtype": "float16", "lda": 8_400_000}
    assert needs_wide_offsets(problem("gemm", m=2, n=3, k=5, **far))
    interpret(
        "gemm",
        [case(gemv(16, 16), *shape) for shape in shapes + empty]
        + [case(gemv(4, 4, 1), 2, 3, 5, **far), case(gemv(4, 4, 1), 3, 2, 2, layout="tn", **far)]
        # Ragged in one dimension after the other.
        + [
            case(gemv(8, 8), *shape)
            for shape in [(4, 16, 9), (4, 17, 8), (3, 16, 8), (16, 4, 9), (17, 4, 8), (16, 3, 8)]
        ]
        + [case(config, m, 70, 250) for config in configs for m in (1, 3)]
        # Slices of unequal length: seven steps in four.
        + [case(gemv(16, 16, split_k=4), 2, 20, 97), case(gemv(16, 16, split_k=4), 20, 2, 97)]
        # More outputs than one program of the sum.
        + [case(gemv(256, 16, split_k=2), 9, 260, 40), case(gemv(16, 16, split_k=2), 5, 7, 0)],
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    on_gpu(
        "gemm",
        [
            case(config, m, n, 1003, dtype=dtype, layout=layout)
            for layout in ("nn", "nt", "tn", "tt")
            for m, n in ((1, 512), (16, 130), (130, 7))
            for config in (gemv(), gemv(16, 64, split_k=4), gemv(32, 16, 1))
        ],
    )


# Offline compilation

COMPILED = [
    (gemv(16, 128, split_k=4), half(layout="nt")),
    (gemv(64, 32), half(8)),
    (gemv(32, 32, 2), half(3, 1001, 1003, dtype="bfloat16", layout="nt")),
    (gemv(128, 32, split_k=16), half(4096, 4, dtype="float32", layout="tn")),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(("candidate", "described"), COMPILED)
def test_what_is_legal_compiles_without_spills_and_tensor_cores(compiler, candidate, described, target):  # noqa: F811
    assert_compiles(compiler, candidate, described, target, tensor_cores=False)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "candidate"), [("nn", gemv(64, 16)), ("nt", gemv(16, 64))])
@pytest.mark.parametrize("m", [1, 16])
def test_the_large_matrix_is_read_sixteen_bytes_at_a_time(compiler, layout, candidate, m):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    described = half(m, layout=layout, dtype="float16")
    code = compile_spec_for(GEMV.compile_spec(described, candidate.parameters, "sm90"), "sm90").asm["sass"]
    assert "LDG.E.128" in code
    assert "HMMA" not in code
    # 8 elements a thread for every row; each product is added as it is.
    assert code.count("FFMA") >= 8 * m
    assert "FMUL" not in code
