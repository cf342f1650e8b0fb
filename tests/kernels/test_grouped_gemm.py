"""grouped_gemm: its schema, what its distributions let one expect, its inputs, and the variants made of torch calls."""

from __future__ import annotations

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import CPU, DEVICES, fault, refused_by, work_of

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Candidate, candidates, operation, problem, variant, variants
from kernelcast.kernels.ops.grouped_gemm.schema import (
    DISTRIBUTIONS,
    draw_ends,
    expected_busy_groups,
    expected_group_rows,
    expected_row_tiles,
    row_tiles_bound,
    shares,
)
from kernelcast.kernels.registry import require_legal

OP = operation("grouped_gemm")
BATCHED = Candidate.of("every_group", {"product": "batched"})
WIDE = Candidate.of("every_group", {"product": "wide"})
LOOP = Candidate("group_loop")
VENDOR = Candidate("vendor")


def chunked(chunk=16):
    return Candidate.of("chunked_bmm", {"chunk": chunk})


def grouped(groups=4, m=48, n=32, k=64, **options):
    return problem("grouped_gemm", groups=groups, m=m, n=n, k=k, **options)


# Problems


def test_the_schema_names_sizes_layout_and_distribution_and_no_offsets():
    described = grouped()
    assert dict(described.dims) == {"groups": 4, "m": 48, "n": 32, "k": 64}
    assert dict(described.options) == {"layout": "nn", "distribution": "random"}
    assert grouped(distribution="skewed") != described
    with pytest.raises(InvalidProblemError, match="balanced, random, skewed"):
        grouped(distribution="zipf")
    with pytest.raises(InvalidProblemError, match="layout is 'tn'; it must be one of nn, nt"):
        grouped(layout="tn")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"groups": 0}, "groups is 0; it must be at least 1"),
        ({"m": 2**31}, "m is 2147483648; it must be at most 2147483647, as offsets are int32"),
        ({"groups": 2**16 + 1}, "groups is 65537; it must be at most 65536"),
    ],
)
def test_impossible_sizes_are_refused(values, said):
    with pytest.raises(InvalidProblemError, match=said):
        grouped(**values)
    grouped(groups=1, m=2**31 - 1)
    grouped(groups=2**16)


# Distributions


def test_shares():
    assert shares(4, "random").tolist() == shares(4, "balanced").tolist() == [0.25] * 4
    # Three of four groups, as 1 : 1/2 : 1/3.
    assert shares(4, "skewed") == pytest.approx([6 / 11, 3 / 11, 2 / 11, 0.0])
    assert shares(1, "skewed").tolist() == [1.0]


def test_balanced_rows_differ_by_one_at_most():
    assert np.diff(draw_ends(grouped(groups=5, m=13, distribution="balanced"), 0), prepend=0).tolist() == [
        2,
        3,
        2,
        3,
        3,
    ]
    described = grouped(groups=8, m=4096, distribution="balanced")
    assert np.array_equal(draw_ends(described, 0), draw_ends(described, 1))


@pytest.mark.parametrize("distribution", ["random", "skewed"])
def test_offsets_follow_the_seed(distribution):
    described = grouped(groups=16, m=500, distribution=distribution)
    first = draw_ends(described, 3)
    assert first.dtype == np.int32
    assert np.array_equal(first, draw_ends(described, 3))
    assert not np.array_equal(first, draw_ends(described, 4))


def test_skewed_leaves_a_quarter_of_the_groups_empty_wherever_they_lie():
    described = grouped(groups=16, m=100_000, distribution="skewed")
    sizes = np.array([np.diff(draw_ends(described, seed), prepend=0) for seed in range(40)])
    assert (np.sum(sizes == 0, axis=1) == 4).all()
    assert (np.sum(sizes == 0, axis=0) > 0).all()
    # The first rank has 1 of 1 + 1/2 + ... + 1/12.
    assert sizes.max(axis=1).mean() == pytest.approx(100_000 / 3.1032, rel=0.01)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    groups=st.integers(1, 300),
    m=st.integers(0, 3000),
    distribution=st.sampled_from(DISTRIBUTIONS),
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from([1, 16, 64, 256]),
)
def test_drawn_offsets_are_sorted_end_at_m_and_need_no_more_tiles_than_the_bound(
    groups, m, distribution, seed, rows
):
    described = grouped(groups=groups, m=m, distribution=distribution)
    ends = draw_ends(described, seed)
    sizes = np.diff(ends, prepend=0)
    assert ends.shape == (groups,)
    assert ends[-1] == m
    assert (sizes >= 0).all()
    bound = row_tiles_bound(described, rows)
    assert np.sum(-(-sizes // rows)) <= bound <= m // rows + min(groups, m)


def test_the_bound_is_reached():
    # Ten groups of one row and one of 22: 10 + 2 tiles of 16.
    assert row_tiles_bound(grouped(groups=11, m=32), 16) == 12
    assert row_tiles_bound(grouped(groups=300, m=5), 64) == 5
    assert row_tiles_bound(grouped(m=0), 16) == 0


@for_each("distribution", DISTRIBUTIONS)
@for_each(("groups", "m"), [(1, 100), (2, 7), (8, 500), (60, 64), (128, 4096), (40, 40_000)])
def test_expectations_agree_with_what_is_drawn(distribution, groups, m):
    described = grouped(groups=groups, m=m, distribution=distribution)
    sizes = np.array([np.diff(draw_ends(described, seed), prepend=0) for seed in range(200)])
    found = expected_row_tiles(described, np.array([64, 16, 256, 16]))
    for rows, expected in zip((64, 16, 256, 16), found, strict=True):
        assert expected == pytest.approx((-(-sizes // rows)).sum(axis=1).mean(), rel=0.03)
        assert expected <= row_tiles_bound(described, rows) * (1 + 1e-9)
    assert expected_busy_groups(described) == pytest.approx((sizes > 0).sum(axis=1).mean(), rel=0.03)
    drawn = (sizes.astype(float) ** 2).sum(axis=1).mean() / m
    assert 0.96 * drawn <= expected_group_rows(described) <= 1.04 * drawn + 1


def test_without_rows_nothing_is_expected():
    for distribution in DISTRIBUTIONS:
        described = grouped(m=0, distribution=distribution)
        assert expected_row_tiles(described, np.array([16, 32])).tolist() == [0, 0]
        assert expected_busy_groups(described) == 0
        assert expected_group_rows(described) == 0


# Inputs, reference, amounts


@pytest.mark.parametrize(("layout", "strides"), [("nn", (15, 5, 1)), ("nt", (15, 1, 3))])
def test_inputs_have_the_strides_of_the_problem(layout, strides):
    torch = pytest.importorskip("torch")
    described = grouped(groups=2, m=7, n=5, k=3, layout=layout, dtype="bfloat16")
    a, b, offsets = OP.make_inputs(described, seed=0, device="cpu")
    assert (tuple(a.shape), a.stride(), a.dtype) == ((7, 3), (3, 1), torch.bfloat16)
    assert (tuple(b.shape), b.stride(), b.dtype) == ((2, 3, 5), strides, torch.bfloat16)
    assert (offsets.dtype, offsets.tolist()) == (torch.int32, draw_ends(described, 0).tolist())
    again = OP.make_inputs(described, seed=0, device="cpu")
    assert all(torch.equal(*pair) for pair in zip((a, b, offsets), again, strict=True))


def test_weights_are_standard_normal_and_differ_between_groups():
    _, b, _ = OP.make_inputs(grouped(groups=3, n=100, k=100), seed=1, device="cpu")
    assert b.mean().abs() < 0.02
    assert b.std() == pytest.approx(1.0, abs=0.02)
    assert (b[0] != b[1]).all()


def test_many_weights_are_one_matrix_with_its_rows_moved_round(monkeypatch):
    torch = pytest.importorskip("torch")
    import kernelcast.kernels.ops.grouped_gemm as module

    described = grouped(groups=3, n=10, k=8, layout="nt")
    _, few, _ = OP.make_inputs(described, seed=1, device="cpu")
    monkeypatch.setattr(module, "MOST_DRAWN", 3 * 10 * 8 - 1)
    _, many, _ = OP.make_inputs(described, seed=1, device="cpu")
    assert many.stride() == few.stride()
    assert torch.equal(many[0], few[0])
    # Stored [n, k], so a row is a column of the view.
    assert torch.equal(many[2][:, 2:], few[0][:, :-2])
    assert torch.equal(many[2][:, :2], few[0][:, -2:])


def test_the_reference_multiplies_each_row_by_the_matrix_of_its_group():
    torch = pytest.importorskip("torch")
    described = grouped(groups=4, m=5, n=3, k=2)
    a, b, _ = OP.make_inputs(described, seed=2, device="cpu")
    # Groups of 2, 0, 3 and 0 rows.
    found = OP.reference(described, a, b, torch.tensor([2, 2, 5, 5], dtype=torch.int32))
    assert found.dtype == torch.float64
    for row, group in enumerate((0, 0, 2, 2, 2)):
        assert torch.equal(found[row], (a[row].double()[:, None] * b[group].double()).sum(0))


def test_amounts_count_the_weights_of_the_groups_that_have_rows():
    described = grouped(groups=100, m=3, n=50, k=20, distribution="balanced", dtype="float16")
    assert OP.flops(described) == 2 * 3 * 50 * 20
    assert OP.traffic_bytes(described) == 2 * (3 * 20 + 3 * 50 * 20 + 3 * 50)
    assert OP.traffic_bytes(grouped(groups=2, m=3, distribution="balanced")) == 4 * (
        3 * 64 + 2 * 64 * 32 + 3 * 32
    )
    assert OP.tolerance(described) == operation("gemm").tolerance(
        problem("gemm", m=3, n=50, k=20, dtype="float16")
    )


# The variants of torch calls

RAGGED = (
    {"groups": 3, "m": 10, "n": 17, "k": 33},
    {"groups": 5, "m": 67, "n": 24, "k": 40, "layout": "nt"},
    {"groups": 7, "m": 130, "n": 16, "k": 16},
    {"groups": 200, "m": 5, "n": 8, "k": 8, "layout": "nt"},
    {"groups": 1, "m": 6, "n": 8, "k": 16},
    {"groups": 4, "m": 0, "n": 8, "k": 16},
    {"groups": 4, "m": 9, "n": 0, "k": 16},
    {"groups": 4, "m": 9, "n": 5, "k": 0},
    {"groups": 2, "m": 1, "n": 1, "k": 1},
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results(dtype):
    pytest.importorskip("torch")
    checked = set()
    for values in RAGGED:
        for distribution in DISTRIBUTIONS:
            given_values = {**values, "dtype": dtype, "distribution": distribution}
            table = candidates(grouped(**given_values), CPU)
            for candidate in table:
                if variant("grouped_gemm", candidate.variant).backend == "triton":
                    continue
                assert fault("grouped_gemm", candidate, given_values, "cpu") is None, (candidate, values)
                checked.add(str(candidate))
    # Largest last: a chunk of 64 serves 130 rows in 7 groups, 21 of them balanced.
    assert checked >= {str(VENDOR), str(LOOP), str(BATCHED), str(WIDE), str(chunked(16)), str(chunked(32))}


def test_padding_rows_do_not_spread_what_is_infinite():
    """Chunks are padded with rows of other groups, and each row is multiplied by other groups' weights."""
    torch = pytest.importorskip("torch")
    described = grouped(groups=3, m=20, n=8, k=8)
    a, b, _ = OP.make_inputs(described, seed=0, device="cpu")
    offsets = torch.tensor([6, 6, 20], dtype=torch.int32)
    a[7] = torch.nan
    b[1] = torch.inf
    for candidate in (VENDOR, LOOP, BATCHED, chunked(16)):
        out = variant("grouped_gemm", candidate.variant).build(described, candidate.parameters)(a, b, offsets)
        assert out[7].isnan().all(), candidate
        assert torch.cat([out[:7], out[8:]]).isfinite().all(), candidate


def test_the_default_is_torchs_grouped_mm_or_a_product_a_group(monkeypatch):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    if not hasattr(functional, "grouped_mm"):
        pytest.skip("torch before 2.10")
    called = []
    original = functional.grouped_mm

    def spy(a, b, *, offs):
        called.append(tuple(a.shape))
        return original(a, b, offs=offs)

    monkeypatch.setattr(functional, "grouped_mm", spy)

    def run(described, inputs=None):
        called.clear()
        inputs = inputs or OP.make_inputs(described, seed=0, device="cpu")
        out = variant("grouped_gemm", "vendor").build(described, {})(*inputs)
        assert OP.check(described, OP.reference(described, *inputs), out) is None
        assert out.is_contiguous()
        return list(called)

    assert run(grouped(m=48)) == [(48, 64)]
    # Rows of 33 * 4, 40 * 2 and 12 * 2 bytes, and what holds nothing.
    assert run(grouped(k=33)) == []
    assert run(grouped(k=40, n=32, dtype="bfloat16")) == [(48, 40)]
    assert run(grouped(n=12, dtype="bfloat16", layout="nt")) == []
    assert run(grouped(m=0)) == []
    assert run(grouped(groups=1024, m=4, n=4, k=4)) == []
    assert run(grouped(groups=1023, m=4, n=4, k=4)) == [(4, 4)]
    # Storage that begins between two multiples of 16 bytes.
    described = grouped()
    a, b, offsets = OP.make_inputs(described, seed=0, device="cpu")
    moved = torch.empty(48 * 64 + 1)[1:].view(48, 64).copy_(a)
    assert run(described, (moved, b, offsets)) == []
    # An older torch.
    monkeypatch.delattr(functional, "grouped_mm")
    assert run(grouped()) == []


@for_each(
    ("candidate", "described", "rule", "seen"),
    [
        (LOOP, grouped(n=17), "differs-from-the-default", "n=17"),
        (LOOP, grouped(m=0), "differs-from-the-default", "m=0"),
        (BATCHED, grouped(groups=1), "several-groups", "groups=1"),
        (BATCHED, grouped(m=129), "few-rows", "m=129"),
        (BATCHED, grouped(groups=2049, m=128, n=1024), "products-fit", f"{4 * 2049 * 128 * 1024} bytes"),
        (WIDE, grouped(layout="nn"), "side-by-side", "layout=nn"),
        (chunked(), grouped(m=0), "not-empty", "m=0"),
        (chunked(), grouped(groups=1), "several-groups", "groups=1"),
        # 48 balanced rows in 4 groups: 12 each, and at most 32 in a chunk.
        (chunked(64), grouped(distribution="balanced"), "chunk-fits", "chunk=64, 12 rows"),
        (chunked(64), grouped(m=136, distribution="balanced"), "", ""),
        # 4 rows in 4 groups: 4 chunks, with the weights of 2^26 elements for each.
        (chunked(), grouped(m=4, n=2**13, k=2**13), "copies-fit", "bytes"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, rule, seen):
    found, said = refused_by(candidate, described, CPU)
    assert found == rule
    assert seen in said


@for_each(
    ("candidate", "described"),
    [
        (LOOP, grouped(n=16)),
        (LOOP, grouped(groups=1)),
        (BATCHED, grouped(groups=2, m=128)),
        (BATCHED, grouped(groups=2048, m=128, n=1024)),
        (WIDE, grouped(layout="nt")),
        (chunked(32), grouped(distribution="balanced")),
        (chunked(16), grouped(groups=2, m=1)),
        (chunked(), grouped(m=4, n=2**12, k=2**13)),
    ],
)
def test_legal_next_to_the_limits(candidate, described):
    require_legal(described, CPU, candidate)


def test_work():
    described = grouped(groups=4, m=48, n=32, k=64, distribution="balanced", dtype="float16")
    definition = {"flops": 2 * 48 * 32 * 64, "traffic_bytes": 2 * (48 * 64 + 4 * 64 * 32 + 48 * 32)}
    for candidate in (VENDOR, LOOP):
        work = work_of(candidate, described, CPU)
        assert {name: work[name] for name in definition} == definition
        assert work["calls"] == 4
    work = work_of(BATCHED, described, CPU)
    assert work["flops"] == 4 * definition["flops"]
    assert work["traffic_bytes"] == definition["traffic_bytes"]
    assert work["scratch_bytes"] == 2 * 4 * 48 * 32
    # At most (48 + 4 * 15) // 16 = 6 chunks.
    work = work_of(chunked(16), described, CPU)
    assert work["flops"] == 2 * 6 * 16 * 32 * 64
    assert work["scratch_bytes"] == 2 * 6 * (16 * (64 + 32) + 64 * 32)
    # One kernel where torch has one.
    calls = {
        (target, dtype): work_of(VENDOR, grouped(distribution="balanced", dtype=dtype), DEVICES[target])[
            "calls"
        ]
        for target in ("sm80", "sm90")
        for dtype in ("float16", "bfloat16")
    }
    assert calls == {
        ("sm80", "float16"): 4,
        ("sm80", "bfloat16"): 4,
        ("sm90", "float16"): 4,
        ("sm90", "bfloat16"): 1,
    }


def test_the_catalogue_lists_them_default_first():
    assert list(variants("grouped_gemm")) == [
        "vendor",
        "chunked_bmm",
        "every_group",
        "group_loop",
        "triton_grouped",
        "triton_grouped_persistent",
        "triton_grouped_split_k",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for values in RAGGED:
        for distribution in DISTRIBUTIONS:
            given_values = {**values, "dtype": dtype, "distribution": distribution}
            for candidate in candidates(grouped(**given_values), CPU, backends=["vendor", "torch"]):
                assert fault("grouped_gemm", candidate, given_values, "cuda") is None, (candidate, values)
