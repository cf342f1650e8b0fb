"""mixed_gemm: its schema, inputs, reference and tolerance, and the variants beside the Triton ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import CPU, DEVICES, fault, refused_by, work_of

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Candidate, candidates, operation, problem, variants

A100 = DEVICES["sm80"]
OP = operation("mixed_gemm")
VENDOR = Candidate.of("vendor")


def mixed(m=3, n=5, k=7, **values):
    return problem("mixed_gemm", m=m, n=n, k=k, **values)


def columns(size):
    return Candidate.of("column_chunked", {"chunk_columns": size})


def steps(size):
    return Candidate.of("k_chunked", {"chunk_k": size})


# The operation


def test_the_options_stand_in_the_order_of_imported_records():
    assert mixed().options == (("weight_dtype", "int8"), ("layout", "nn"), ("lda", 0), ("ldb", 0))
    assert [dim for dim, _ in mixed().dims] == ["m", "n", "k"]
    assert OP.schema.dtypes == ("float32", "float16", "bfloat16")
    with pytest.raises(InvalidProblemError, match="weight_dtype is 'int4'; it must be one of int8, uint8"):
        mixed(weight_dtype="int4")


def test_leading_dimensions_are_checked_and_made_one():
    assert mixed(layout="nt", ldb=7) == mixed(layout="nt")
    assert mixed(m=1, lda=100) == mixed(m=1)
    with pytest.raises(InvalidProblemError, match="mixed_gemm: ldb is 6, but 7 elements"):
        mixed(layout="nt", ldb=6)


@pytest.mark.parametrize(
    ("values", "strides_a", "strides_b"),
    [
        ({}, (7, 1), (5, 1)),
        ({"layout": "nt"}, (7, 1), (1, 7)),
        ({"layout": "tt", "lda": 10, "ldb": 11}, (1, 10), (1, 11)),
    ],
    ids=str,
)
def test_inputs_have_the_strides_and_dtypes_of_the_problem(values, strides_a, strides_b):
    import torch

    for dtype in ("float32", "float16", "bfloat16"):
        for weight in ("int8", "uint8"):
            described = mixed(dtype=dtype, weight_dtype=weight, **values)
            a, b, scale = OP.make_inputs(described, seed=0, device="cpu")
            assert (tuple(a.shape), a.stride(), a.dtype) == ((3, 7), strides_a, getattr(torch, dtype))
            assert (tuple(b.shape), b.stride(), b.dtype) == ((7, 5), strides_b, getattr(torch, weight))
            assert (tuple(scale.shape), scale.dtype) == ((5,), getattr(torch, dtype))


@pytest.mark.parametrize(
    ("weight", "centre", "low", "high"), [("int8", 0, -127, 127), ("uint8", 128, 0, 255)]
)
def test_the_distribution_of_inputs(weight, centre, low, high):
    import torch

    described = mixed(200, 500, 400, weight_dtype=weight)
    a, b, scale = OP.make_inputs(described, seed=7, device="cpu")
    again = OP.make_inputs(described, seed=7, device="cpu")
    other = OP.make_inputs(described, seed=8, device="cpu")
    assert all(torch.equal(x, y) for x, y in zip((a, b, scale), again, strict=True))
    assert not any(torch.equal(x, y) for x, y in zip((a, b, scale), other, strict=True))
    assert abs(a.mean()) < 0.02
    assert abs(a.std() - 1) < 0.02
    weights = b.float()
    assert abs(weights.mean() - centre) < 0.5
    assert abs(weights.std() - 32) < 0.5
    # Both ends are reached, and a wrapped value would be far outside the tails.
    assert (weights.min().item(), weights.max().item()) == (low, high)
    assert scale.min() >= 1 / 64
    assert scale.max() <= 3 / 64
    assert abs(scale.mean() - 1 / 32) < 1 / 1000


def test_the_reference_is_the_definition():
    for values in ({}, {"layout": "tt", "weight_dtype": "uint8", "dtype": "bfloat16"}):
        described = mixed(3, 4, 5, **values)
        a, b, scale = OP.make_inputs(described, seed=1, device="cpu")
        wanted = [
            [sum(float(a[i, x]) * float(b[x, j]) * float(scale[j]) for x in range(5)) for j in range(4)]
            for i in range(3)
        ]
        np.testing.assert_allclose(OP.reference(described, a, b, scale).numpy(), wanted, rtol=1e-14)


def test_flops_and_compulsory_traffic():
    described = mixed(64, 32, 1024, dtype="float16")
    assert OP.flops(described) == 2 * 64 * 32 * 1024 + 64 * 32
    # The weight takes one byte an element.
    assert OP.traffic_bytes(described) == 2 * (64 * 1024 + 32 + 64 * 32) + 1024 * 32
    assert OP.flops(mixed(0, 5, 5)) == 0
    assert OP.traffic_bytes(mixed(2**39, 2**39, 2**39)) == pytest.approx(9 * 2.0**78)


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each("weight", ["int8", "uint8"])
@for_each("k", [1, 64, 2048])
def test_the_tolerance_passes_both_orders_of_scaling_and_fails_what_is_wrong(dtype, weight, k):
    described = mixed(32, 40, k, dtype=dtype, weight_dtype=weight)
    a, b, scale = OP.make_inputs(described, seed=2, device="cpu")
    reference = OP.reference(described, a, b, scale)
    assert OP.check(described, reference, a @ (b.to(a.dtype) * scale)) is None
    # Weights rounded to the dtype before an otherwise exact product, and an exact product rounded twice.
    rounded = (b.double() * scale.double()).to(a.dtype).double()
    assert OP.check(described, reference, (a.double() @ rounded).to(a.dtype)) is None
    if (dtype, weight) != ("float16", "uint8"):
        unscaled = (a.double() @ b.double()).to(a.dtype)
        assert OP.check(described, reference, unscaled * scale) is None
    exact = a.double() @ b.double()
    assert OP.check(described, reference, exact.to(a.dtype)) is not None
    assert OP.check(described, reference, (exact * scale.double().roll(1)).to(a.dtype)) is not None
    lost = a[:, 1:].double() @ (b[1:].double() * scale.double())
    assert OP.check(described, reference, lost.to(a.dtype)) is not None


def test_the_tolerance_by_dtype_and_length():
    exact = OP.tolerance(mixed(k=1024))
    size = 1.5 / 32 * 32
    assert exact.relative == 4 * 2.0**-24
    assert exact.absolute == pytest.approx(size * 2.0**-24 * (8 * 1024 + 4 * 32))
    half = OP.tolerance(mixed(k=1024, dtype="float16"))
    assert half.absolute == pytest.approx(size * (8 * 2.0**-24 * 1024 + 12 * 2.0**-11 * 32))
    rounded = OP.tolerance(mixed(k=1024, allow_tf32=True))
    assert rounded.absolute == pytest.approx(size * (8 * 2.0**-11 * 32 + 4 * 2.0**-24 * 32))
    unsigned = OP.tolerance(mixed(k=1024, weight_dtype="uint8"))
    assert unsigned.absolute / exact.absolute == pytest.approx(math.hypot(32, 128) / 32)


# Rules


@for_each(
    ("name", "described", "device", "rule", "seen"),
    [
        ("scaled_output", mixed(dtype="float16"), CPU, "range", "float16"),
        ("float32_product", mixed(dtype="float16"), A100, "cpu", "a100 is a gpu"),
        ("float32_product", mixed(), CPU, "16-bit", "float32"),
        ("int8pack", mixed(k=16, layout="nt"), A100, "cpu", "a100 is a gpu"),
        ("int8pack", mixed(k=16, layout="nt", weight_dtype="uint8"), CPU, "int8", "uint8"),
        ("int8pack", mixed(k=16), CPU, "rows-of-k", "layout=nn"),
        ("int8pack", mixed(k=16, layout="nt", ldb=32), CPU, "rows-of-k", "ldb=32"),
        ("int8pack", mixed(k=24, layout="nt"), CPU, "whole-vectors", "k=24"),
        ("int8pack", mixed(n=2**20, k=2**11, layout="nt"), CPU, "32-bit-offsets", f"{2**31} elements"),
        (columns(64), mixed(n=64), CPU, "chunk-is-a-part", "chunk_columns=64, n=64"),
        (columns(1024), mixed(n=4096), A100, "chunk-fills-gpu", "1024 < 2048 columns"),
        (steps(64), mixed(k=4096), A100, "cpu", "a100 is a gpu"),
        (steps(64), mixed(k=4096, dtype="bfloat16"), CPU, "float32", "bfloat16"),
        (steps(64), mixed(k=64), CPU, "chunk-is-a-part", "chunk_k=64, k=64"),
    ],
)
def test_refusals_say_what_was_seen(name, described, device, rule, seen):
    candidate = Candidate.of(name) if isinstance(name, str) else name
    found, said = refused_by(candidate, described, device)
    assert found == rule
    assert seen in said


@for_each(
    ("name", "described", "device"),
    [
        ("vendor", mixed(0, 0, 0), A100),
        ("one_pass", mixed(dtype="float16", weight_dtype="uint8"), A100),
        ("scaled_output", mixed(dtype="bfloat16"), A100),
        ("scaled_output", mixed(), CPU),
        ("float32_product", mixed(dtype="float16"), CPU),
        ("int8pack", mixed(k=32, layout="nt", dtype="bfloat16"), CPU),
        ("int8pack", mixed(n=2**20, k=2**11 - 16, layout="nt"), CPU),
        (columns(64), mixed(n=65), CPU),
        (columns(2048), mixed(n=4096), A100),
        (steps(64), mixed(k=65), CPU),
    ],
)
def test_legal_next_to_the_limits(name, described, device):
    candidate = Candidate.of(name) if isinstance(name, str) else name
    assert refused_by(candidate, described, device) == ("", "")


# Work


def test_work_of_a_weight_cast_whole():
    described = mixed(8, 16, 512, dtype="bfloat16")
    product, traffic = 2 * 8 * 16 * 512 + 8 * 16, OP.traffic_bytes(described)
    cast = 2 * 512 * 16
    found = {
        name: work_of(Candidate.of(name), described, CPU)
        for name in ("vendor", "one_pass", "scaled_output", "float32_product")
    }
    assert {each["traffic_bytes"] for each in found.values()} == {traffic}
    assert {name: (each["flops"], each["scratch_bytes"], each["calls"]) for name, each in found.items()} == {
        "vendor": (product + 512 * 16, 2 * cast, 3),
        "one_pass": (product + 512 * 16, cast, 2),
        "scaled_output": (product, cast + 2 * 8 * 16, 3),
        "float32_product": (product + 512 * 16, 4 * (8 * 512 + 512 * 16 + 16 + 8 * 16), 5),
    }
    packed = work_of(Candidate.of("int8pack"), described, CPU)
    assert (packed["flops"], packed["scratch_bytes"], packed["calls"]) == (product, 0, 1)


def test_work_of_chunks_keeps_the_cast_weight_in_cache_where_it_fits():
    described = mixed(8, 5000, 1024, dtype="float16")
    # Three chunks: A is read twice more. 1024 x 2048 two-byte elements fit the A100's 40 MiB.
    found = work_of(columns(2048), described, A100)
    assert found["calls"] == 6
    assert found["traffic_bytes"] == OP.traffic_bytes(described) + 2 * (2 * 8 * 1024)
    assert found["scratch_bytes"] == 2 * 1024 * 2048
    # A CPU of unknown cache keeps nothing.
    assert work_of(columns(2048), described, CPU)["scratch_bytes"] == 2 * 1024 * 5000
    full = mixed(8, 5000, 1000)
    found = work_of(steps(512), full, CPU)
    assert found["calls"] == 5
    assert found["traffic_bytes"] == OP.traffic_bytes(full) + 4 * (2 * 8 * 5000) * 2
    assert found["flops"] == OP.flops(full) + 8 * 5000


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    m=st.integers(0, 3000),
    n=st.integers(0, 10_000),
    k=st.integers(0, 10_000),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    layout=st.sampled_from(["nn", "nt"]),
    device=st.sampled_from([CPU, A100]),
)
def test_work_is_never_less_than_the_definition(m, n, k, dtype, layout, device):
    described = mixed(m, n, k, dtype=dtype, layout=layout)
    for name, found in variants("mixed_gemm").items():
        if name.startswith("triton"):
            continue
        block = found.space()
        legal = found.legal(described, device, block)
        refused = found.refusals(described, device, block)
        assert len(refused) == block.length - legal.sum()
        assert all(each.reason and each.seen for each in refused)
        kept = block.take(legal)
        work = found.work(described, kept.columns, device).columns(kept.length)
        assert (work["flops"] >= OP.flops(described)).all()
        assert (work["traffic_bytes"] >= OP.traffic_bytes(described)).all()
        assert (work["scratch_bytes"] >= 0).all()


# Results

CASES = [
    (VENDOR, {}),
    (Candidate.of("one_pass"), {"dtype": "bfloat16", "weight_dtype": "uint8"}),
    (Candidate.of("scaled_output"), {"dtype": "bfloat16"}),
    (Candidate.of("float32_product"), {"dtype": "float16"}),
    (columns(32), {"dtype": "float16", "layout": "nt"}),
    (steps(64), {"layout": "nt", "weight_dtype": "uint8"}),
]


def legal_cases(m, n, k, **values):
    described = mixed(m, n, k, **values)
    torch_only = [each for each in candidates(described, CPU) if not each.variant.startswith("triton")]
    return [(each, {"m": m, "n": n, "k": k, **values}) for each in torch_only]


@pytest.mark.parametrize(("candidate", "values"), CASES, ids=lambda each: str(each))
def test_results(candidate, values):
    for layout in ("nn", "tt"):
        described = {"m": 5, "n": 70, "k": 130, "layout": layout, **values}
        assert fault("mixed_gemm", candidate, described, "cpu") is None


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each("m", [0, 1, 2, 3, 4, 9])
def test_results_of_torchs_own_kernel(dtype, m):
    for n, k in ((1, 16), (3, 32), (4, 48), (33, 80), (0, 16), (5, 0)):
        values = {"m": m, "n": n, "k": k, "layout": "nt", "dtype": dtype}
        candidate = Candidate.of("int8pack")
        assert refused_by(candidate, mixed(**values), CPU) == ("", "")
        assert fault("mixed_gemm", candidate, values, "cpu") is None


def test_torchs_own_kernel_takes_views_that_begin_anywhere():
    """Its loads are aligned: a view off by one element would end the process."""
    import torch

    described = mixed(3, 5, 32, layout="nt", dtype="bfloat16")
    a, b, scale = OP.make_inputs(described, seed=3, device="cpu")
    shifted_a = torch.empty(3 * 32 + 1, dtype=a.dtype)[1:].view(3, 32).copy_(a)
    shifted_b = torch.empty(5 * 32 + 1, dtype=b.dtype)[1:].view(5, 32).copy_(b.t()).t()
    assert shifted_a.data_ptr() % 4 == 2
    run = variants("mixed_gemm")["int8pack"].build(described, {})
    reference = OP.reference(described, a, b, scale)
    assert OP.check(described, reference, run(shifted_a, shifted_b, scale)) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("weight", ["int8", "uint8"])
def test_every_candidate_in_every_layout(dtype, weight):
    shapes = [
        (1, 1, 1),
        (1, 67, 33),
        (33, 1, 65),
        (17, 129, 192),
        (0, 5, 7),
        (5, 0, 7),
        (5, 7, 0),
        (64, 100, 257),
    ]
    tried = set()
    for m, n, k in shapes:
        for layout in ("nn", "nt", "tn", "tt"):
            for leading in ({}, {"lda": 260, "ldb": 264}):
                cases = legal_cases(m, n, k, dtype=dtype, weight_dtype=weight, layout=layout, **leading)
                for candidate, values in cases:
                    assert fault("mixed_gemm", candidate, values, "cpu") is None, (candidate, values)
                    tried.add(candidate.variant)
    assert {"vendor", "one_pass", "column_chunked"} <= tried
    assert ("k_chunked" in tried) is (dtype == "float32")
    assert ("float32_product" in tried) is (dtype != "float32")
    assert ("scaled_output" in tried) is (dtype != "float16")
    assert ("int8pack" in tried) is (weight == "int8")


@pytest.mark.parametrize("m", [1, 16])
def test_float16_stays_in_range_where_unscaled_sums_would_not(m):
    """Weights of 127 and activations of 30 over 64 steps reach 243840 before they are scaled."""
    import torch

    values = {"m": m, "n": 64, "k": 64, "dtype": "float16", "layout": "nt"}
    a = torch.full((m, 64), 30.0, dtype=torch.float16)
    b = torch.full((64, 64), 127, dtype=torch.int8).t()
    scale = torch.full((64,), 1 / 32, dtype=torch.float16)
    for candidate, _ in legal_cases(**values):
        run = variants("mixed_gemm")[candidate.variant].build(mixed(**values), candidate.parameters)
        assert run(a, b, scale).float().mean().item() == pytest.approx(7620, rel=1e-3), candidate
