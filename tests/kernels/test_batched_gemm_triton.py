"""The Triton variants of batched_gemm: rules, work, results under Triton's interpreter, and what the compiler makes of
them.
"""

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
OP = operation("batched_gemm")
NAMES = ("triton_gemv", "triton_simd", "triton_split_k", "triton_tiled")
TILE = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 1, "num_stages": 2}


def tiled(**changes):
    return Candidate.of("triton_tiled", {**TILE, **changes})


def split(**changes):
    return Candidate.of("triton_split_k", {**TILE, "split_k": 4, **changes})


def gemv(block_n=64, block_k=16, num_warps=4, split_k=1):
    config = {"block_n": block_n, "block_k": block_k, "num_warps": num_warps, "split_k": split_k}
    return Candidate.of("triton_gemv", config)


def simd(block_m=8, block_n=32, block_k=8, num_warps=1):
    config = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "num_warps": num_warps}
    return Candidate.of("triton_simd", config)


def half(batch=32, m=128, n=128, k=512, **values):
    return problem("batched_gemm", batch=batch, m=m, n=n, k=k, **{"dtype": "float16", **values})


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (tiled(), half(), CPU, "needs-gpu", "cpu is a cpu"),
        (tiled(), half(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (tiled(), half(n=2**31), A100, "dimensions", f"n={2**31}"),
        # 2**22 tiles of one product are legal, and 2**10 of those products are too many.
        (tiled(), half(2**10, 2**17, 2**17), A100, "grid", f"{2**32} blocks"),
        (split(), half(2**31), A100, "grid", f"{2**33} blocks"),
        (simd(2, 16), half(2**20, 2**8, 2**10), A100, "grid", f"{2**33} blocks"),
        (gemv(), half(2**31 // 2, 1), A100, "grid", f"{2**31} blocks"),
        (tiled(block_m=64, num_warps=2), half(m=16), A100, "blocks-fit", "block_m=64 for m=16"),
        (tiled(num_stages=5), half(k=64), A100, "stages-filled", "5 stages, 2 steps"),
        (tiled(group_m=16), half(m=256, n=256), A100, "group-differs", "group_m=16, 4 x 4 tiles"),
        (
            tiled(block_m=128, block_n=128, block_k=128, num_stages=5, num_warps=8),
            half(m=512, n=512),
            A100,
            "shared-memory",
            "262144 > 166912 bytes",
        ),
        (split(split_k=8), half(k=320), A100, "slices-work", "10 steps of block_k in 8 slices"),
        (split(num_stages=4), half(k=128), A100, "slices-fill-stages", "4 stages, 1 steps a slice"),
        # 16 parts of 32 x 1024 x 1024 floats.
        (split(split_k=16), half(m=1024, n=1024), A100, "parts-fit", f"{2**31} bytes"),
        (gemv(split_k=16), half(2**10, 1, 2**15), A100, "parts-fit", f"{2**31} bytes"),
        (gemv(), half(), A100, "few-rows", "m=128, n=128"),
        (simd(64, 64, 16, 4), half(), A100, "registers", "560 > 168 words"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found = refused_by(candidate, described, device)
    assert found[0] == rule
    assert seen in found[1]


@for_each(
    ("candidate", "described", "device"),
    [
        (tiled(), half(dtype="bfloat16"), UNKNOWN),
        (tiled(), half(2**9 - 1, 2**17, 2**17), A100),
        (tiled(), half(2**20, 64, 64), A100),
        (split(), half(2**12), A100),
        (gemv(), half(2**30 - 1, 1), A100),
        (simd(2, 16), half(2**17, 2**7, 2**7), A100),
        (tiled(num_stages=4), half(k=64), A100),
        (split(split_k=8), half(k=256), A100),
        (split(split_k=8), half(m=1024, n=1024), A100),
        (gemv(split_k=8), half(2**10, 1, 2**15), A100),
        (gemv(), half(m=16), A100),
        (gemv(), half(n=16), A100),
        (tiled(block_k=16, num_stages=1), half(k=0), A100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    assert refused_by(candidate, described, device) == ("", "")


@settings(max_examples=examples(30), deadline=None)
@given(
    batch=st.integers(0, 70_000),
    m=st.integers(0, 300),
    n=st.integers(0, 300),
    k=st.integers(0, 2000),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    broadcast=st.sampled_from(["none", "a", "b"]),
    device=st.sampled_from([*DEVICES.values(), T4, UNKNOWN, CPU]),
    name=st.sampled_from(NAMES),
)
def test_rules_agree_with_refusals_and_keep_their_promises(batch, m, n, k, dtype, broadcast, device, name):
    described = half(batch, m, n, k, dtype=dtype, broadcast=broadcast)
    found = variant("batched_gemm", name)
    block = found.space("default")
    legal = found.legal(described, device, block)
    reasons = found.refusals(described, device, block)
    assert len(reasons) == block.length - legal.sum()
    assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    work = found.work(described, kept.columns, device).columns(kept.length)
    assert (work["accumulators"] <= 128).all()
    assert (work["flops"] >= OP.flops(described)).all()
    assert (work["traffic_bytes"] >= OP.traffic_bytes(described) * (m > 0) * (n > 0)).all()
    slices = kept.columns.get("split_k", np.ones(kept.length))
    assert (work["programs"] / slices <= 2**31 - 1).all()
    if device.shared_bytes_per_block and name in ("triton_tiled", "triton_split_k"):
        assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()


@pytest.mark.parametrize("name", ["triton_gemv", "triton_simd", "triton_split_k", "triton_tiled"])
def test_a_batch_of_one_is_legal_and_worked_as_gemm(name):
    """The rules and the work of one product are those of gemm's variant of the name."""
    sizes = {"m": 16, "n": 300, "k": 1000, "dtype": "bfloat16"}
    for device in (A100, MI300):
        one, batch = problem("gemm", **sizes), problem("batched_gemm", batch=1, **sizes)
        ours, theirs = variant("batched_gemm", name), variant("gemm", name)
        block = ours.space("default")
        legal = ours.legal(batch, device, block)
        assert legal.any()
        assert (legal == theirs.legal(one, device, block)).all()
        works = [
            found.work(described, block.columns, device).columns(block.length)
            for found, described in ((ours, batch), (theirs, one))
        ]
        for amount, values in works[0].items():
            np.testing.assert_allclose(values, works[1][amount], rtol=1e-12, err_msg=amount)


@for_each("device", [A100, DEVICES["sm90"], MI300])
@for_each(
    "described",
    [
        half(),
        half(4096, 8, 8, 8),
        half(16, 1, 4096, 4096, layout="nt"),
        half(1, 1, 1, 1),
        half(2**20, 64, 64, 64),
    ],
)
def test_typical_problems_have_candidates(device, described):
    found = candidates(described, device, subset="default", backends=["triton"])
    assert len(found) >= 4


def test_the_spaces_are_gemms():
    for name in NAMES:
        for subset in ("default", "full"):
            ours, theirs = (variant(op, name).space(subset) for op in ("batched_gemm", "gemm"))
            assert list(ours.columns) == list(theirs.columns)
            assert all((column == theirs.columns[key]).all() for key, column in ours.columns.items())


# Work


def test_work_of_a_batch():
    described = half(10, 100, 200, 50)
    work = work_of(tiled(), described, A100)
    # Ten times 2 x 4 tiles of 64 x 64 over two steps of 32.
    assert (work["programs"], work["inner_steps"], work["calls"]) == (80, 2, 1)
    assert work["flops"] == 10 * 2 * 128 * 256 * 64
    assert work["traffic_bytes"] == 10 * 2 * (100 * 50 * 4 + 50 * 200 * 2 + 100 * 200)
    parts = work_of(split(split_k=2), half(10, 64, 64, 1024), A100)
    assert (parts["programs"], parts["inner_steps"], parts["calls"]) == (20, 16, 2)
    assert parts["scratch_bytes"] == 4 * 2 * 10 * 64 * 64
    assert parts["flops"] == 10 * (2 * 64 * 64 * 1024 + 2 * 64 * 64)
    few = work_of(gemv(split_k=2), half(10, 2, 128, 64), A100)
    assert (few["programs"], few["calls"]) == (40, 2)
    assert few["scratch_bytes"] == 4 * 2 * 10 * 2 * 128
    assert work_of(simd(), half(10, 8, 64, 64), A100)["programs"] == 20


# Results


def case(candidate, batch, m, n, k, **values):
    return candidate, {"batch": batch, "m": m, "n": n, "k": k, "dtype": "float32", **values}


def small(name, **changes):
    if name == "triton_gemv":
        return gemv(**{"block_n": 16, "block_k": 16, "num_warps": 1, **changes})
    if name == "triton_simd":
        return simd(**{"block_m": 8, "block_n": 16, "block_k": 8, **changes})
    extra = {"split_k": 2} if name == "triton_split_k" else {}
    return Candidate.of(name, {**SMALL, **extra, **changes})


def test_results_quickly():
    interpret(
        "batched_gemm",
        [
            case(small("triton_tiled"), 3, 17, 5, 20, layout="tn", lda=20, broadcast="b"),
            case(small("triton_split_k"), 2, 5, 17, 33, dtype="bfloat16", broadcast="a"),
            case(small("triton_gemv", split_k=2), 2, 19, 3, 20, layout="nt", dtype="float16"),
            case(small("triton_simd"), 3, 5, 9, 6, layout="tt", ldb=9),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(dtype):
    interpret(
        "batched_gemm",
        [
            case(small(name), 2, 9, 18, 21, dtype=dtype, layout=layout, broadcast=broadcast, **leading)
            for name in NAMES
            for layout in ("nn", "nt", "tn", "tt")
            for broadcast, leading in (("none", {"lda": 24, "ldb": 25}), ("a", {}), ("b", {"ldb": 32}))
        ],
    )


@pytest.mark.slow
def test_results_of_degenerate_shapes():
    shapes = [(1, 1, 1, 1), (1, 17, 5, 21), (3, 1, 33, 17), (3, 33, 1, 17), (2, 16, 16, 32), (5, 3, 2, 5)]
    empty = [(0, 4, 5, 20), (3, 0, 5, 20), (3, 5, 0, 20), (3, 4, 5, 0), (0, 0, 0, 0)]
    interpret(
        "batched_gemm",
        [case(small(name), *shape) for name in NAMES for shape in shapes + empty]
        + [case(small(name), 1, 5, 9, 33, broadcast="b") for name in NAMES]
        + [case(small(name), 3, 16, 16, 16, broadcast="a") for name in NAMES]
        # Several rows and columns of tiles to each product.
        + [case(small(name), 2, 16, 40, 16) for name in NAMES],
    )


@pytest.mark.slow
def test_results_of_unequal_slices_large_sums_and_64_bit_offsets():
    far = {"m": 2, "n": 3, "k": 5, "dtype": "float16", "lda": 8_400_000}
    assert needs_wide_offsets(problem("batched_gemm", batch=2, **far))
    interpret(
        "batched_gemm",
        [
            # Seven steps in four slices.
            case(small("triton_split_k", split_k=4), 2, 5, 6, 97),
            case(small("triton_gemv", split_k=4), 2, 5, 40, 97),
            # More outputs than one program of the sum.
            case(small("triton_split_k", block_m=32, block_n=64), 3, 20, 60, 40),
            case(small("triton_gemv", block_n=64, split_k=2), 5, 3, 100, 40, broadcast="b"),
            case(small("triton_tiled", group_m=1), 2, 40, 20, 16),
            *(case(small(name), 2, **far) for name in NAMES if name != "triton_split_k"),
        ],
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("broadcast", ["none", "a", "b"])
def test_results_on_a_gpu(dtype, broadcast):
    on_gpu(
        "batched_gemm",
        [
            case(candidate, 9, 16, 136, 520, dtype=dtype, layout=layout, broadcast=broadcast)
            for layout in ("nn", "nt", "tn", "tt")
            for candidate in (tiled(block_m=16), split(block_m=16), gemv(16, 64, 4, 2), simd())
        ]
        # More products than the second and third dimensions of a grid hold.
        + [case(simd(2, 16, 4), 70_000, 2, 9, 5, dtype=dtype, broadcast=broadcast)],
    )


# Offline compilation

COMPILED = [
    (tiled(block_m=16, num_warps=2), half(65, 16, 500, 72, dtype="bfloat16", layout="nt", broadcast="b")),
    (split(), half(2, dtype="float32", layout="tn")),
    (gemv(32, 64), half(m=4, layout="nt")),
    (simd(8, 16, 8), half(m=8, n=16, k=32, broadcast="a")),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(("candidate", "described"), COMPILED)
def test_what_is_legal_compiles(compiler, candidate, described, target):  # noqa: F811
    matrix_units = candidate.variant in ("triton_tiled", "triton_split_k")
    if described.dtype == "float32" and target != "gfx942":
        matrix_units = False
    assert_compiles(compiler, candidate, described, target, tensor_cores=matrix_units)


def test_all_matrices_are_behind_the_pointers():
    """Offsets of 32 bits are for storage below 2**31 bytes, all copies of a matrix counted."""
    described = half(6, 8, 24, 100, lda=104)
    shared = half(6, 8, 24, 100, lda=104, broadcast="b")
    pytest.importorskip("triton")
    for name in NAMES:
        found = variant("batched_gemm", name)
        for each, of_b in ((described, 6), (shared, 1)):
            spec = found.compile_spec(each, small(name).parameters, "gfx942")
            sizes = [pointer.storage_bytes for pointer in spec.tensors.values()]
            # Two parts of float32, or the output.
            output = 2 * 4 if name == "triton_split_k" else 2
            assert sizes == [2 * 6 * 8 * 104, 2 * of_b * 100 * 24, output * 6 * 8 * 24]
