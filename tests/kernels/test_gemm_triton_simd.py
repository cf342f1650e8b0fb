"""gemm's ``triton_simd``: rules, work, results under Triton's interpreter, and what the compiler makes of it."""

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
from kernelcast.kernels.triton_rules import needs_wide_offsets

A100, MI300 = DEVICES["sm80"], DEVICES["gfx942"]
SIMD = variant("gemm", "triton_simd")
GEMM = operation("gemm")


def simd(block_m=8, block_n=32, block_k=8, num_warps=1):
    return Candidate.of(
        "triton_simd",
        {"block_m": block_m, "block_n": block_n, "block_k": block_k, "num_warps": num_warps},
    )


def half(m=64, n=64, k=64, **values):
    return problem("gemm", m=m, n=n, k=k, **{"dtype": "float16", **values})


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (simd(), half(), CPU, "needs-gpu", "cpu is a cpu"),
        (simd(), half(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (simd(), half(k=2**31), A100, "dimensions", f"k={2**31}"),
        (simd(num_warps=64), half(), A100, "block-threads", "2048 threads"),
        (simd(block_m=8), half(m=2), A100, "blocks-fit", "a tile of 8 x 32 in steps of 8 for m=2"),
        (simd(block_n=32), half(n=8), A100, "blocks-fit", "8 x 32"),
        (simd(block_k=8), half(k=2), A100, "blocks-fit", "in steps of 8"),
        (simd(2, 8), half(), A100, "outputs-fill-threads", "16 elements for 32 threads"),
        (simd(4, 8), half(), MI300, "outputs-fill-threads", "32 elements for 64 threads"),
        (simd(32, 32, 2), half(), A100, "column-of-a", "block_m=32, 32 threads"),
        (simd(64, 256, 2, 4), half(n=256), A100, "registers", "260 > 168 words"),
        # 64 accumulators, and 16 steps of 16 rows and 4 columns.
        (simd(16, 128, 16), half(n=128), A100, "registers", "384 > 168 words"),
        (simd(2, 16), half(2**28, 2**26), A100, "grid", f"{2**49} blocks"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found = refused_by(candidate, described, device)
    assert found[0] == rule
    assert seen in found[1]


@for_each(
    ("candidate", "described", "device"),
    [
        (simd(), half(dtype="bfloat16"), UNKNOWN),
        (simd(block_m=8), half(m=4), A100),
        (simd(block_m=8), half(m=3), A100),
        (simd(block_n=32), half(n=9), A100),
        (simd(block_n=8), half(n=1), A100),
        (simd(block_k=8), half(k=3), A100),
        (simd(block_k=2), half(k=0), A100),
        (simd(2, 16), half(), A100),
        (simd(16, 32, 2), half(), A100),
        (simd(32, 32, 2, 2), half(), A100),
        (simd(16, 128, 4), half(n=128), A100),
        (simd(2, 16), half(2**26, 2**6), A100),
        (simd(64, 64, 4, 4), half(), A100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    assert refused_by(candidate, described, device) == ("", "")


@settings(max_examples=examples(40), deadline=None)
@given(
    m=st.integers(0, 600),
    n=st.integers(0, 600),
    k=st.integers(0, 600),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    device=st.sampled_from([*DEVICES.values(), T4, UNKNOWN, CPU]),
    subset=st.sampled_from(["default", "full"]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(m, n, k, dtype, device, subset):
    described = problem("gemm", m=m, n=n, k=k, dtype=dtype)
    block = SIMD.space(subset)
    legal = SIMD.legal(described, device, block)
    if subset == "default":
        reasons = SIMD.refusals(described, device, block)
        assert len(reasons) == block.length - legal.sum()
        assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    work = SIMD.work(described, kept.columns, device).columns(kept.length)
    assert (work["accumulators"] <= 128).all()
    assert (work["accumulators"] >= 1).all()
    assert (work["flops"] >= GEMM.flops(described)).all()
    assert (work["traffic_bytes"] >= GEMM.traffic_bytes(described) * (m > 0) * (n > 0)).all()
    assert (kept.columns["block_m"] < kept.columns["num_warps"] * device.warp_size).all()


def test_the_spaces():
    quick, full = SIMD.space("default"), SIMD.space()
    rows = set(zip(*(column.tolist() for column in quick.columns.values()), strict=True))
    assert len(rows) == quick.length == 38
    assert full.length == 6 * 6 * 4 * 4
    assert rows <= set(zip(*(column.tolist() for column in full.columns.values()), strict=True))
    # Each of them is of use somewhere.
    assert SIMD.legal(half(512, 512, 512), A100, quick).all()


@for_each("device", [A100, DEVICES["sm100"], MI300])
@for_each("sizes", [(1, 1, 1), (4, 4, 4), (8, 8, 512), (3, 500, 7), (1024, 1024, 1024)])
def test_typical_problems_have_candidates(device, sizes):
    found = candidates(half(*sizes), device, subset="default", backends=["triton"])
    assert sum(each.variant == "triton_simd" for each in found) >= 1


# Work


def test_work_counts_padding_and_rereads():
    work = work_of(simd(8, 32, 4, 2), half(20, 40, 10), A100)
    # 3 x 2 tiles over three turns of four steps.
    assert work["flops"] == 2 * (3 * 8) * (2 * 32) * (3 * 4)
    assert work["traffic_bytes"] == 2 * (20 * 10 * 2 + 10 * 40 * 3 + 20 * 40)
    assert (work["programs"], work["warps"], work["calls"], work["inner_steps"]) == (6, 2, 1, 3)
    assert (work["accumulators"], work["shared_bytes"], work["scratch_bytes"]) == (4, 0, 0)


def test_tf32_changes_nothing():
    specs = [
        SIMD.compile_spec(half(dtype="float32", allow_tf32=allowed), simd().parameters, "sm80")
        for allowed in (True, False)
    ]
    assert specs[0] == specs[1]
    assert "PRECISION" not in specs[0].constants


# Results


def case(candidate, m, n, k, **values):
    return candidate, {"m": m, "n": n, "k": k, "dtype": "float32", **values}


def test_results_quickly():
    interpret(
        "gemm",
        [
            case(simd(4, 8, 4), 5, 9, 7, layout="tn", lda=8),
            case(simd(2, 16, 8), 3, 17, 11, dtype="bfloat16", layout="nt"),
            case(simd(4, 8, 4), 4, 8, 8, dtype="float16", layout="tt", ldb=9),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(dtype):
    interpret(
        "gemm",
        [
            case(simd(8, 16, 4), 11, 21, 9, dtype=dtype, layout=layout, **leading)
            for layout in ("nn", "nt", "tn", "tt")
            for leading in ({}, {"lda": 24, "ldb": 23})
        ],
    )


@pytest.mark.slow
def test_results_of_degenerate_shapes_and_every_kind_of_config():
    shapes = [(1, 1, 1), (1, 9, 5), (9, 1, 5), (4, 8, 4), (3, 5, 2), (8, 8, 1), (16, 16, 8), (13, 17, 19)]
    empty = [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)]
    configs = [
        simd(2, 16, 2),
        simd(2, 256, 16, 2),
        simd(64, 64, 2, 4),
        simd(16, 8, 16),
        simd(32, 128, 2, 8),
    ]
    far = {"dtype": "float16", "lda": 8_400_000}
    assert needs_wide_offsets(problem("gemm", m=2, n=3, k=5, **far))
    interpret(
        "gemm",
        [case(simd(4, 8, 4), *shape) for shape in shapes + empty]
        + [case(simd(2, 16, 2), 2, 3, 5, **far), case(simd(2, 16, 2), 3, 3, 2, layout="tn", **far)]
        # Ragged in one dimension after the other.
        + [
            case(simd(4, 8, 4), *shape)
            for shape in [(5, 8, 4), (4, 9, 4), (4, 8, 5), (5, 9, 4), (5, 8, 5), (4, 9, 5)]
        ]
        + [case(config, 40, 70, 5) for config in configs]
        # Nine rows of tiles: the group of eight and one more.
        + [case(simd(2, 16, 4), 17, 33, 4)],
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    on_gpu(
        "gemm",
        [
            case(config, 100, 136, 203, dtype=dtype, layout=layout)
            for layout in ("nn", "nt", "tn", "tt")
            for config in (simd(), simd(64, 64, 4, 4), simd(2, 16, 16))
        ],
    )


# Offline compilation

COMPILED = [
    (simd(2, 64), half(4, 1000, 1003, dtype="bfloat16", layout="nt")),
    (simd(16, 128, 4), half(500, 501, 503, dtype="bfloat16", layout="tn")),
    (simd(64, 64, 4, 4), half(dtype="float32")),
    (simd(4, 32, 8), half(layout="tt")),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(("candidate", "described"), COMPILED)
def test_what_is_legal_compiles_without_spills_tensor_cores_or_shared_memory(
    compiler, candidate, described, target  # noqa: F811
):  # fmt: skip
    assert_compiles(compiler, candidate, described, target, tensor_cores=False)


@pytest.mark.slow
def test_the_loop_is_loads_and_fused_multiply_adds(compiler):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    code = compile_spec_for(SIMD.compile_spec(half(), simd(8, 64, 4, 1).parameters, "sm80"), "sm80").asm[
        "sass"
    ]
    # Four steps of 8 x 2 products a thread, none of them rounded before it is added.
    assert code.count("FFMA") == 4 * 8 * 2
    assert not any(name in code for name in ("FMUL", "FADD", "LDS", "STS", "BAR.SYNC", "HMMA"))


def test_columns_in_words():
    """A fit of the registers: 16 rows and 4 columns of one thread."""
    from kernelcast.kernels.ops.gemm.triton_simd import words_per_thread

    columns = {name: np.array([value]) for name, value in simd(16, 128, 4).parameters.items()}
    assert words_per_thread(columns, A100) == 64 + 4 * (16 + 4)
    # 64 threads stand two abreast on 32 columns: four rows of eight each.
    columns = {name: np.array([value]) for name, value in simd(8, 32, 2, 2).parameters.items()}
    assert words_per_thread(columns, A100) == 4 + 2 * (4 + 1)
