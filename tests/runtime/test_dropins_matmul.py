"""bmm, mixed_matmul, grouped_matmul, and matmul with leading dimensions, against torch's own."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import for_each
from dropin_lab import (  # noqa: F401
    CPU,
    DTYPES,
    HERE,
    assert_same,
    choose,
    failing,
    fresh,
    nth_legal,
    randn,
    run_twice,
    storage_bytes,
)
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernelcast as kc
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import candidates, operation
from kernelcast.runtime import dispatch, dropins_matmul
from kernelcast.runtime.dispatch import LaunchWarning

pytestmark = pytest.mark.usefixtures("fresh")

PROPERTY = settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
QUICK = TimingPlan(rounds=2, least_rounds=1, seconds=0.2, candidate_seconds=0.2, sample_us=50.0)
dtypes = st.sampled_from(sorted(DTYPES))
sizes = st.integers(1, 24)


def mixed_own(a, weight, scale):
    return a @ (weight.to(a.dtype) * scale)


def grouped_own(a, b, offs, *, distribution="random"):
    """One product a group, as one writes it."""
    starts = [0, *offs.tolist()[:-1]]
    parts = [a[start:end] @ each for start, end, each in zip(starts, offs.tolist(), b.unbind(), strict=True)]
    return torch.cat(parts)


class Own:
    """torch's own under the drop-ins' names."""

    bmm = staticmethod(torch.bmm)
    matmul = staticmethod(torch.matmul)
    mixed_matmul = staticmethod(mixed_own)
    grouped_matmul = staticmethod(grouped_own)


def weights(rows, columns, dtype=torch.int8, seed=1):
    centre, low, high = (0, -127, 127) if dtype is torch.int8 else (128, 0, 255)
    return randn(rows, columns, seed=seed).mul(32).add(centre).round().clamp(low, high).to(dtype)


def scales(columns, dtype=torch.float32, seed=2):
    drawn = torch.rand(columns, generator=torch.Generator().manual_seed(seed))
    return ((0.5 + drawn) / 32).to(dtype)


def ends(*values):
    return torch.tensor(values, dtype=torch.int32)


def strides_mean_the_same(tensors, problem, made=None):
    """The problem's own inputs have the strides of these, wherever a stride means something."""
    made = made or operation(problem.operation).make_inputs(problem, seed=0, device="cpu")
    for ours, theirs in zip(tensors, made, strict=False):
        for size, one, other in zip(ours.shape, ours.stride(), theirs.stride(), strict=True):
            assert size == 1 or one == other


# --- Results ---


@st.composite
def batches(draw, batch, rows, columns, dtype, seed):
    """A batch of matrices of a shape with the strides of a view that a user may hold."""
    kind = draw(
        st.sampled_from(["rows", "columns", "padded rows", "padded columns", "shared", "shared columns", "heads",
                         "gaps", "every other column", "slice"])
    )  # fmt: skip
    if kind == "columns":
        return randn(batch, columns, rows, dtype=dtype, seed=seed).transpose(1, 2)
    if kind == "padded rows":
        return randn(batch, rows, columns + 3, dtype=dtype, seed=seed)[:, :, :columns]
    if kind == "padded columns":
        return randn(batch, columns, rows + 2, dtype=dtype, seed=seed)[:, :, :rows].transpose(1, 2)
    if kind == "shared":
        return randn(rows, columns, dtype=dtype, seed=seed).expand(batch, rows, columns)
    if kind == "shared columns":
        return randn(columns, rows, dtype=dtype, seed=seed).t().expand(batch, rows, columns)
    if kind == "heads":
        return randn(rows, batch, columns, dtype=dtype, seed=seed).transpose(0, 1)
    if kind == "gaps":
        return randn(2 * batch, rows, columns, dtype=dtype, seed=seed)[::2]
    if kind == "every other column":
        return randn(batch, rows, 2 * columns, dtype=dtype, seed=seed)[:, :, ::2]
    if kind == "slice":
        return randn(batch, rows + 2, columns, dtype=dtype, seed=seed)[:, :rows]
    return randn(batch, rows, columns, dtype=dtype, seed=seed)


@given(
    st.data(), st.integers(1, 4), sizes, sizes, st.integers(1, 160), dtypes, st.integers(0, 40), st.booleans()
)
@PROPERTY
def test_bmm_is_torchs(data, batch, m, n, k, dtype, number, by_matmul):
    a = data.draw(batches(batch, m, k, DTYPES[dtype], 0))
    b = data.draw(batches(batch, k, n, DTYPES[dtype], 1))
    chooser = choose(nth_legal(number))
    drop_in = kc.matmul if by_matmul else kc.bmm
    out = run_twice(lambda: drop_in(a, b), lambda: torch.bmm(a, b), [a, b], chooser)
    assert out.is_contiguous()
    if chooser.asked:
        (problem,) = chooser.asked
        assert [problem[x] for x in ("batch", "m", "n", "k")] == [batch, m, n, k]
        assert problem.dtype == dtype
        strides_mean_the_same((a, b), problem)


@pytest.mark.parametrize("layout", [True, False])
def test_every_batched_candidate_runs(layout):
    a = randn(4, 6, 256) if layout else randn(4, 256, 6).transpose(1, 2)
    for b in (randn(4, 256, 8, seed=1), randn(256, 8, seed=1).expand(4, 256, 8)):
        table = candidates(dropins_matmul._batched_problem(a, b), HERE)
        assert len(table) > 3
        for candidate in table:
            chooser = choose(candidate)
            run_twice(lambda b=b: kc.bmm(a, b), lambda b=b: torch.bmm(a, b), [a, b], chooser)
            assert len(chooser.asked) == 1


@pytest.mark.parametrize(
    ("of_a", "of_b", "broadcast"), [(1, 3, "a"), (3, 1, "b"), (1, 1, "none"), (3, 3, "none")]
)
def test_matmul_of_batches_of_other_lengths(of_a, of_b, broadcast):
    a, b = randn(of_a, 5, 7), randn(of_b, 7, 4, seed=1)
    for number in range(6):
        chooser = choose(nth_legal(number))
        run_twice(lambda: kc.matmul(a, b), lambda: torch.matmul(a, b), [a, b], chooser)
        (problem,) = chooser.asked
        assert (problem["batch"], problem["broadcast"]) == (max(of_a, of_b), broadcast)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    sizes,
    sizes,
    st.booleans(),
    dtypes,
    st.integers(0, 40),
)
@PROPERTY
def test_matmul_of_many_rows_is_one_product(leading, k, n, transposed, dtype, number):
    a = randn(*leading, 3, k, dtype=DTYPES[dtype])
    b = (
        randn(n, k, dtype=DTYPES[dtype], seed=1).t()
        if transposed
        else randn(k, n, dtype=DTYPES[dtype], seed=1)
    )
    chooser = choose(nth_legal(number))
    out = run_twice(lambda: kc.matmul(a, b), lambda: torch.matmul(a, b), [a, b], chooser)
    assert out.is_contiguous()
    (problem,) = chooser.asked
    assert (problem["m"], problem["n"], problem["k"]) == (3 * math.prod(leading), n, k)
    strides_mean_the_same((a.view(-1, k), b), problem)


def test_leading_dimensions_of_size_one_with_any_stride():
    a = randn(12).as_strided((1, 3, 4), (77, 4, 1))
    assert a.is_contiguous()
    b = randn(4, 5, seed=1)
    for number in range(8):
        chooser = choose(nth_legal(number))
        run_twice(lambda: kc.matmul(a, b), lambda: torch.matmul(a, b), [a, b], chooser)
        assert chooser.asked[0]["lda"] == 0


@given(
    st.data(), st.lists(st.integers(1, 4), max_size=2), sizes, sizes, st.integers(1, 160),
    st.sampled_from([torch.int8, torch.uint8]), dtypes, st.integers(0, 40),
)  # fmt: skip
@PROPERTY
def test_mixed_matmul_is_torchs(data, leading, m, n, k, weight_dtype, dtype, number):
    a = randn(*leading, m, k, dtype=DTYPES[dtype])
    if not leading and data.draw(st.booleans()):
        a = randn(k, m + 1, dtype=DTYPES[dtype])[:, :m].t()
    kind = data.draw(st.sampled_from(["rows", "columns", "padded"]))
    weight = {
        "rows": weights(k, n, weight_dtype),
        "columns": weights(n, k, weight_dtype).t(),
        "padded": weights(k, n + 5, weight_dtype)[:, :n],
    }[kind]
    scale = scales(n, DTYPES[dtype])
    chooser = choose(nth_legal(number))
    out = run_twice(
        lambda: kc.mixed_matmul(a, weight, scale),
        lambda: mixed_own(a, weight, scale),
        [a, weight, scale],
        chooser,
    )
    assert out.is_contiguous()
    (problem,) = chooser.asked
    assert (problem["m"], problem["n"], problem["k"]) == (m * math.prod(leading), n, k)
    assert f"torch.{problem['weight_dtype']}" == str(weight_dtype)
    strides_mean_the_same((a.view(-1, k) if leading else a, weight, scale), problem)


def test_every_mixed_candidate_runs():
    seen = set()
    for dtype in (torch.float32, torch.bfloat16):
        for a in (randn(6, 256, dtype=dtype), randn(2, 3, 256, dtype=dtype)):
            weight, scale = weights(80, 256).t(), scales(80, dtype)
            table = candidates(dropins_matmul._mixed_problem(a, weight), HERE)
            for candidate in table:
                seen.add(candidate.variant)
                chooser = choose(candidate)
                run_twice(
                    lambda a=a, w=weight, s=scale: kc.mixed_matmul(a, w, s),
                    lambda a=a, w=weight, s=scale: mixed_own(a, w, s),
                    [a, weight, scale],
                    chooser,
                )
                assert len(chooser.asked) == 1
    assert seen >= {
        "vendor",
        "int8pack",
        "one_pass",
        "scaled_output",
        "float32_product",
        "k_chunked",
        "column_chunked",
    }


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.sampled_from([1, 5, 8, 16]),
    st.sampled_from([3, 8, 24]), st.booleans(), dtypes, st.sampled_from(["random", "balanced", "skewed"]),
    st.integers(0, 40),
)  # fmt: skip
@PROPERTY
def test_grouped_matmul_is_a_product_a_group(rows, n, k, transposed, dtype, distribution, number):
    a = randn(sum(rows), k, dtype=DTYPES[dtype])
    stored = (len(rows), n, k) if transposed else (len(rows), k, n)
    b = randn(*stored, dtype=DTYPES[dtype], seed=1)
    b = b.transpose(1, 2) if transposed else b
    offs = torch.tensor(rows).cumsum(0).int()
    chooser = choose(nth_legal(number))
    out = run_twice(
        lambda: kc.grouped_matmul(a, b, offs, distribution=distribution),
        lambda: grouped_default(a, b, offs),
        [a, b, offs],
        chooser,
    )
    assert out.is_contiguous()
    (problem,) = chooser.asked
    assert [problem[x] for x in ("groups", "m", "n", "k")] == [len(rows), sum(rows), n, k]
    assert problem["distribution"] == distribution
    strides_mean_the_same((a, b), problem)


def grouped_default(a, b, offs):
    """What torch makes of it: its grouped_mm where sizes are multiples of 16 bytes, else the products."""
    size = a.element_size()
    if a.shape[1] * size % 16 == 0 and b.shape[2] * size % 16 == 0 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(a, b, offs=offs)
    return grouped_own(a, b, offs)


@pytest.mark.parametrize("distribution", ["random", "balanced", "skewed"])
def test_every_grouped_candidate_runs(distribution):
    a, b, offs = randn(20, 16), randn(4, 24, 16, seed=1).transpose(1, 2), ends(5, 5, 19, 20)
    table = candidates(dropins_matmul._grouped_problem(a, b, distribution), HERE)
    assert {each.variant for each in table} >= {"vendor", "group_loop", "chunked_bmm", "every_group"}
    for candidate in table:
        chooser = choose(candidate)
        run_twice(
            lambda: kc.grouped_matmul(a, b, offs, distribution=distribution),
            lambda: F.grouped_mm(a, b, offs=offs),
            [a, b, offs],
            chooser,
        )
        assert len(chooser.asked) == 1


def test_grouped_matmul_where_torch_has_no_grouped_mm(monkeypatch):
    monkeypatch.setattr(dropins_matmul, "_grouped_mm", None)
    a, b, offs = randn(7, 16), randn(3, 16, 16, seed=1), ends(2, 2, 7)
    expected = grouped_own(a, b, offs)
    choose(nth_legal(0))
    assert_same(kc.grouped_matmul(a, b, offs), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(kc.grouped_matmul(a, b, offs), grouped_own(a, b, offs))
    a.requires_grad_()
    kc.grouped_matmul(a, b, offs).sum().backward()
    torch.testing.assert_close(a.grad, torch.cat([b[0].sum(1).expand(2, 16), b[2].sum(1).expand(5, 16)]))


@pytest.mark.parametrize("where", ["a", "b", "neither"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_grouped_matmul_of_views_that_begin_anywhere(monkeypatch, where, requires_grad):
    """torch's grouped_mm demands aligned addresses on GPUs; without them the default is a product a group."""
    calls = []
    monkeypatch.setattr(
        dropins_matmul,
        "_grouped_mm",
        lambda *tensors, offs: calls.append(1) or F.grouped_mm(*tensors, offs=offs),
    )
    chooser = choose(nth_legal(0))
    offs = ends(2, 5)
    for moved in ("neither", where):
        a, b = (
            randn(size + 1, seed=seed)[1 if name == moved else 0 :][:size].view(shape)
            for name, seed, size, shape in (("a", 0, 40, (5, 8)), ("b", 1, 128, (2, 8, 8)))
        )
        aligned = (a.data_ptr() | b.data_ptr()) % 16 == 0
        assert aligned == (moved == "neither")
        calls.clear()
        out = kc.grouped_matmul(a.requires_grad_(requires_grad), b, offs)
        assert_same(out.detach(), grouped_own(a, b, offs).detach())
        assert calls == [1] * aligned
    # The address is no part of the key.
    assert len(chooser.asked) == (not requires_grad)


# --- Fallbacks: torch's own runs, and nobody is asked ---


class Subclass(torch.Tensor):
    """A tensor with a type of its own."""


A3, B3 = randn(2, 6, 8), randn(2, 8, 16, seed=1)
A, WEIGHT, SCALE = randn(6, 8), weights(8, 16), scales(16)
OFFS = ends(2, 6)
FALLBACKS = {
    "bmm: float64": lambda o: o.bmm(A3.double(), B3.double()),
    "bmm: integers": lambda o: o.bmm(A3.long(), B3.long()),
    "bmm: complex": lambda o: o.bmm(A3.to(torch.complex64), B3.to(torch.complex64)),
    "bmm: empty sum": lambda o: o.bmm(A3[:, :, :0], B3[:, :0]),
    "bmm: no matrices": lambda o: o.bmm(A3[:0], B3[:0]),
    "bmm: subclass": lambda o: o.bmm(A3.as_subclass(Subclass), B3).as_subclass(torch.Tensor),
    "bmm: both shared": lambda o: o.bmm(A.expand(2, 6, 8), B3[:1].expand(2, 8, 16)),
    "bmm: matrices interleaved": lambda o: o.bmm(randn(6, 2, 8).transpose(0, 1), B3),
    "bmm: gaps between matrices": lambda o: o.bmm(randn(4, 6, 8)[::2], B3),
    "bmm: overlapping matrices": lambda o: o.bmm(randn(60).as_strided((2, 6, 8), (4, 8, 1)), B3),
    "bmm: no adjacent elements": lambda o: o.bmm(randn(2, 6, 16)[:, :, ::2], B3),
    "matmul: rows with gaps": lambda o: o.matmul(randn(2, 6, 9)[:, :, :8], randn(8, 3)),
    "matmul: batch by a vector": lambda o: o.matmul(A3, randn(8)),
    "matmul: batches of batches": lambda o: o.matmul(A3[None], B3[None]),
    "matmul: matrix by a batch": lambda o: o.matmul(A, B3),
    "mixed_matmul: wide integers": lambda o: o.mixed_matmul(A, WEIGHT.short(), SCALE),
    "mixed_matmul: float weight": lambda o: o.mixed_matmul(A, WEIGHT.float(), SCALE),
    "mixed_matmul: float64": lambda o: o.mixed_matmul(A.double(), WEIGHT, SCALE.double()),
    "mixed_matmul: scale of another dtype": lambda o: o.mixed_matmul(A, WEIGHT, SCALE.half()),
    "mixed_matmul: one scale": lambda o: o.mixed_matmul(A, WEIGHT, SCALE[:1]),
    "mixed_matmul: expanded scale": lambda o: o.mixed_matmul(A, WEIGHT, SCALE[:1].expand(16)),
    "mixed_matmul: scalar scale": lambda o: o.mixed_matmul(A, WEIGHT, torch.tensor(0.5)),
    "mixed_matmul: a scale an element": lambda o: o.mixed_matmul(A, WEIGHT, SCALE.expand(8, 16)),
    "mixed_matmul: every other scale": lambda o: o.mixed_matmul(A, WEIGHT, scales(32)[::2]),
    "mixed_matmul: vector": lambda o: o.mixed_matmul(A[0], WEIGHT, SCALE),
    "mixed_matmul: batch of weights": lambda o: o.mixed_matmul(A3, WEIGHT.expand(2, 8, 16), SCALE),
    "mixed_matmul: leading dimensions with gaps": lambda o: o.mixed_matmul(randn(2, 6, 9)[:, :, :8], WEIGHT, SCALE),
    "mixed_matmul: no rows": lambda o: o.mixed_matmul(A[:0], WEIGHT, SCALE),
    "mixed_matmul: no columns": lambda o: o.mixed_matmul(A, WEIGHT[:, :0], SCALE[:0]),
    "mixed_matmul: subclass": lambda o: o.mixed_matmul(A, WEIGHT, SCALE.as_subclass(Subclass)).as_subclass(torch.Tensor),
    "mixed_matmul: no adjacent weights": lambda o: o.mixed_matmul(A, weights(8, 32)[:, ::2], SCALE),
    "grouped_matmul: rows with gaps": lambda o: o.grouped_matmul(randn(6, 12)[:, :8], B3, OFFS),
    "grouped_matmul: columns of rows": lambda o: o.grouped_matmul(randn(8, 6).t(), B3, OFFS),
    "grouped_matmul: matrices with gaps": lambda o: o.grouped_matmul(A, randn(4, 8, 16)[::2], OFFS),
    "grouped_matmul: every other offset": lambda o: o.grouped_matmul(A, B3, ends(2, 0, 6, 0)[::2]),
    "grouped_matmul: subclass": lambda o: o.grouped_matmul(A.as_subclass(Subclass), B3, OFFS).as_subclass(torch.Tensor),
    "grouped_matmul: no rows": lambda o: o.grouped_matmul(A[:0], B3, OFFS * 0),
    "grouped_matmul: empty sum": lambda o: o.grouped_matmul(A[:, :0], B3[:, :0], OFFS),
}  # fmt: skip


@for_each("name", FALLBACKS)
def test_what_the_catalogue_does_not_cover_is_torchs_own(name):
    chooser = choose(nth_legal(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, expected = FALLBACKS[name](kc), FALLBACKS[name](Own)
    assert type(out) is type(expected)
    assert_same(out, expected)
    assert chooser.asked == []


CALLS = {
    "bmm": (lambda o, t: o.bmm(t[0], t[1]), (0, 1)),
    "matmul of batches": (lambda o, t: o.matmul(t[0], t[1]), (0, 1)),
    "matmul of many rows": (lambda o, t: o.matmul(t[0], t[3]), (0, 3)),
    "mixed_matmul": (lambda o, t: o.mixed_matmul(t[2], WEIGHT, t[4]), (2, 4)),
    "mixed_matmul of many rows": (lambda o, t: o.mixed_matmul(t[0], WEIGHT, t[4]), (0, 4)),
    "grouped_matmul": (lambda o, t: o.grouped_matmul(t[2], t[1], OFFS), (2, 1)),
    "grouped_matmul, unaligned": (lambda o, t: o.grouped_matmul(t[5], t[6], OFFS), (5, 6)),
}


def operands(*, requires_grad=False):
    tensors = (A3, B3, A, randn(8, 5, seed=4), SCALE, randn(6, 7, seed=5), randn(2, 7, 3, seed=6))
    return [t.clone().requires_grad_(requires_grad) for t in tensors]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_torchs(name):
    call, used = CALLS[name]
    chooser = choose(nth_legal(1))
    ours, theirs = operands(requires_grad=True), operands(requires_grad=True)
    out, expected = call(kc, ours), call(Own, theirs)
    assert_same(out, expected)
    upstream = randn(*out.shape, seed=9)
    out.backward(upstream)
    expected.backward(upstream)
    assert chooser.asked == []
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert (one.grad is not None) == (other.grad is not None) == (place in used)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("name", CALLS)
def test_one_operand_that_needs_a_gradient_is_enough(name):
    call, used = CALLS[name]
    for place in range(len(operands())):
        tensors = operands()
        tensors[place].requires_grad_()
        chooser = choose(nth_legal(1))
        out = call(kc, tensors)
        assert out.requires_grad == (place in used) == (chooser.asked == [])


@pytest.mark.parametrize("name", CALLS)
def test_where_no_gradient_is_recorded_parameters_are_served(name):
    call, _ = CALLS[name]
    for mode in (torch.no_grad, torch.inference_mode):
        chooser = choose(nth_legal(0))
        with mode():
            out = call(kc, [torch.nn.Parameter(t) for t in operands()])
        assert len(chooser.asked) == 1
        assert not out.requires_grad
        call(kc, operands())
        assert len(chooser.asked) == 1


@pytest.mark.parametrize("name", CALLS)
def test_the_kill_switch_autocast_and_determinism_are_torchs(name, monkeypatch):
    call, _ = CALLS[name]
    chooser = choose(nth_legal(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = call(kc, operands()), call(Own, operands())
        torch.testing.assert_close(out, expected.to(out.dtype), rtol=2e-2, atol=2e-2)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(call(kc, operands()), call(Own, operands()))
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    assert_same(call(kc, operands()), call(Own, operands()))
    assert chooser.asked == []
    monkeypatch.setenv("KERNELCAST_DISABLE", "0")
    call(kc, operands())
    assert len(chooser.asked) == 1


@pytest.mark.parametrize("name", [name for name in CALLS if "grouped" not in name])
def test_transforms_of_torch_func_are_torchs(name):
    call, _ = CALLS[name]
    chooser = choose(nth_legal(2))
    stacked = [torch.stack([t, t + 1]) for t in operands()]
    assert_same(torch.vmap(lambda *t: call(kc, t))(*stacked), torch.vmap(lambda *t: call(Own, t))(*stacked))

    def gradient(o):
        return torch.func.grad(lambda *t: call(o, t).square().sum(), argnums=(0, 2))(*operands())

    for one, other in zip(gradient(kc), gradient(Own), strict=True):
        torch.testing.assert_close(one, other)
    assert chooser.asked == []


@pytest.mark.parametrize("name", [name for name in CALLS if "grouped" in name])
def test_transforms_of_a_grouped_product_are_torchs(name):
    call, used = CALLS[name]
    chooser = choose(nth_legal(2))

    def gradient(o):
        return torch.func.grad(lambda *t: call(o, t).square().sum(), argnums=used)(*operands())

    for one, other in zip(gradient(kc), gradient(Own), strict=True):
        torch.testing.assert_close(one, other)
    assert chooser.asked == []


# --- Errors are torch's ---

ERRORS = {
    "bmm: sizes": lambda o: o.bmm(A3, A3),
    "bmm: batches": lambda o: o.bmm(A3, B3[:1]),
    "bmm: matrices": lambda o: o.bmm(A, A.t()),
    "bmm: dtypes": lambda o: o.bmm(A3, B3.half()),
    "bmm: list": lambda o: o.bmm([[[1.0]]], B3),
    "bmm: nothing": lambda o: o.bmm(A3, None),
    "matmul: sizes of batches": lambda o: o.matmul(A3, A3),
    "matmul: lengths of batches": lambda o: o.matmul(A3, randn(3, 8, 4)),
    "matmul: rows": lambda o: o.matmul(A3, randn(7, 4)),
    "mixed_matmul: sizes": lambda o: o.mixed_matmul(A, weights(7, 16), SCALE),
    "mixed_matmul: scales": lambda o: o.mixed_matmul(A, WEIGHT, SCALE[:3]),
    "mixed_matmul: dtypes": lambda o: o.mixed_matmul(A, WEIGHT, SCALE.double()),
    "mixed_matmul: float32 scale of a float16 product": lambda o: o.mixed_matmul(A.half(), WEIGHT, SCALE),
    "mixed_matmul: nothing": lambda o: o.mixed_matmul(A, None, SCALE),
}  # fmt: skip
GROUPED_ERRORS = {
    "sizes": (A, B3[:, :4], OFFS),
    "groups": (A, B3, ends(6)),
    "offsets of 64 bits": (A, B3, OFFS.long()),
    "dtypes": (A, B3.half(), OFFS),
    "float64": (A.double(), B3.double(), OFFS),
    "rank": (A3, B3, OFFS),
    "list": ([[1.0]], B3, OFFS),
    "nothing": (A, B3, None),
}


@for_each("name", ERRORS)
def test_errors_are_torchs_own(name):
    check_errors(lambda: ERRORS[name](kc), lambda: ERRORS[name](Own))


@for_each("name", GROUPED_ERRORS)
def test_errors_of_grouped_mm_are_torchs_own(name):
    a, b, offs = GROUPED_ERRORS[name]
    check_errors(lambda: kc.grouped_matmul(a, b, offs), lambda: F.grouped_mm(a, b, offs=offs))


def check_errors(ours, theirs):
    choose(nth_legal(1))
    with pytest.raises(Exception) as expected:  # noqa: PT011 - compared below
        theirs()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(type(expected.value)) as seen:
                ours()
        assert str(seen.value) == str(expected.value)


@pytest.mark.parametrize("distribution", ["even", "", None])
def test_an_unknown_distribution_is_refused_whoever_runs(distribution):
    chooser = choose(nth_legal(0))
    for a in (A, A.clone().requires_grad_()):
        with pytest.raises(InvalidProblemError, match="balanced, random, skewed"):
            kc.grouped_matmul(a, B3, OFFS, distribution=distribution)
    assert chooser.asked == []


# --- What the choice depends on ---


def test_values_and_offsets_do_not_matter():
    chooser = choose(nth_legal(0))
    for fill in (0.0, 1.0, -math.inf, math.nan, 1e30):
        kc.bmm(torch.full_like(A3, fill), B3)
        kc.mixed_matmul(torch.full_like(A, fill), WEIGHT * 0, SCALE * fill)
    for offs in (ends(0, 6), ends(6, 6), ends(3, 6)):
        kc.grouped_matmul(A, B3, offs)
    assert [p.operation for p in chooser.asked] == ["batched_gemm", "mixed_gemm", "grouped_gemm"]


def test_offsets_are_not_read_where_the_candidate_does_not(monkeypatch):
    chooser = choose(nth_legal(0))
    table = candidates(dropins_matmul._grouped_problem(A, B3, "random"), HERE)
    chooser.pick = lambda problem: next(each for each in table if each.variant == "every_group")
    expected = grouped_own(A, B3, OFFS)
    for reader in ("tolist", "item", "numpy", "__bool__", "__int__", "__index__", "cpu"):
        monkeypatch.setattr(torch.Tensor, reader, lambda self, *rest: pytest.fail("read on the host"))
    out = kc.grouped_matmul(A, B3, OFFS), kc.grouped_matmul(A, B3, OFFS)
    monkeypatch.undo()
    for each in out:
        torch.testing.assert_close(each, expected)


def test_every_fact_asks_anew_and_none_of_them_twice():
    chooser = choose(nth_legal(0))
    t = torch.Tensor.transpose
    calls = [
        lambda: kc.bmm(A3, B3),
        lambda: kc.bmm(A3[:1], B3[:1]),
        lambda: kc.bmm(A3[:, :5].contiguous(), B3),
        lambda: kc.bmm(A3, B3[:, :, :4].contiguous()),
        lambda: kc.bmm(A3[:, :, :7].contiguous(), B3[:, :7].contiguous()),
        lambda: kc.bmm(A3[:, :, :7], B3[:, :7].contiguous()),
        lambda: kc.bmm(t(t(A3, 1, 2).contiguous(), 1, 2), B3),
        lambda: kc.bmm(A3, t(t(B3, 1, 2).contiguous(), 1, 2)),
        lambda: kc.bmm(A3[:1].expand(2, 6, 8), B3),
        lambda: kc.bmm(A3, B3[:1].expand(2, 8, 16)),
        lambda: kc.bmm(A3.half(), B3.half()),
        lambda: kc.bmm(A3.bfloat16(), B3.bfloat16()),
        lambda: kc.matmul(A3, B3[0]),
        lambda: kc.matmul(A3, t(B3, 1, 2).contiguous()[0].t()),
        lambda: kc.mixed_matmul(A, WEIGHT, SCALE),
        lambda: kc.mixed_matmul(A[:5], WEIGHT, SCALE),
        lambda: kc.mixed_matmul(A, WEIGHT[:, :4].contiguous(), SCALE[:4]),
        lambda: kc.mixed_matmul(A, WEIGHT[:, :4], SCALE[:4]),
        lambda: kc.mixed_matmul(A[:, :7], WEIGHT[:7], SCALE),
        lambda: kc.mixed_matmul(A, WEIGHT.t().contiguous().t(), SCALE),
        lambda: kc.mixed_matmul(A, WEIGHT.to(torch.uint8), SCALE),
        lambda: kc.mixed_matmul(A.half(), WEIGHT, SCALE.half()),
        lambda: kc.mixed_matmul(A3, WEIGHT, SCALE),
        lambda: kc.grouped_matmul(A, B3, OFFS),
        lambda: kc.grouped_matmul(A[:5], B3, ends(1, 5)),
        lambda: kc.grouped_matmul(A, B3[:1], ends(6)),
        lambda: kc.grouped_matmul(A, B3[:, :, :4].contiguous(), OFFS),
        lambda: kc.grouped_matmul(A[:, :4].contiguous(), B3[:, :4].contiguous(), OFFS),
        lambda: kc.grouped_matmul(A, t(t(B3, 1, 2).contiguous(), 1, 2), OFFS),
        lambda: kc.grouped_matmul(A.half(), B3.half(), OFFS),
        lambda: kc.grouped_matmul(A, B3, OFFS, distribution="skewed"),
        lambda: kc.grouped_matmul(A, B3, OFFS, distribution="balanced"),
    ]
    for _ in range(2):
        for call in calls:
            call()
    assert len(chooser.asked) == len(set(chooser.asked)) == len(calls)


def test_calls_that_pose_one_problem_ask_for_one():
    chooser = choose(nth_legal(0))
    kc.matmul(A3, B3)
    kc.bmm(A3, B3)
    assert len(chooser.asked) == 1
    kc.matmul(A3, B3[0])
    kc.matmul(A3.view(12, 8), B3[0])
    kc.mixed_matmul(A3, WEIGHT, SCALE)
    kc.mixed_matmul(A3.view(12, 8), WEIGHT, SCALE)
    assert chooser.asked[1] == chooser.asked[2]
    assert chooser.asked[3] == chooser.asked[4]


@pytest.mark.parametrize("name", CALLS)
def test_threads_change_the_key(name):
    call, _ = CALLS[name]
    chooser = choose(nth_legal(0))
    before = torch.get_num_threads()
    call(kc, operands())
    torch.set_num_threads(before + 1)
    call(kc, operands())
    torch.set_num_threads(before)
    call(kc, operands())
    assert [p.threads for p in chooser.asked] == [before, before + 1]


# --- Failures ---


@pytest.mark.parametrize("good_calls", [0, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_candidate_that_fails_is_forgotten_and_torchs_own_runs(failing, name, good_calls):  # noqa: F811
    call, _ = CALLS[name]
    expected = call(Own, operands())
    posed = {"bmm": "batched_gemm", "matmul of batches": "batched_gemm", "matmul of many rows": "gemm"}.get(
        name, "mixed_gemm" if "mixed" in name else "grouped_gemm"
    )
    chooser = failing(posed, good_calls)
    for _ in range(good_calls):
        assert_same(call(kc, operands()), expected)
    with pytest.warns(LaunchWarning, match=rf"{posed}\(.*StopIteration"):
        assert_same(call(kc, operands()), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(call(kc, operands()), expected)
    assert len(chooser.asked) == len(chooser.forgotten) == 1


# --- The whole way, with real measurements ---


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_verified_calls_measure_the_default_once_and_leave_the_tensors_alone(tmp_path, name):
    call, _ = CALLS[name]
    kc.configure(
        cache=tmp_path / "cache", store=tmp_path / "store", models=tmp_path / "models", plan=QUICK, mode="verify",
        top_k=2,
    )  # fmt: skip
    tensors = operands()
    before = [storage_bytes(t) for t in tensors]
    out = call(kc, tensors)
    torch.testing.assert_close(out, call(Own, tensors), rtol=1e-3, atol=1e-3)
    records = list(Store(tmp_path / "store").measurements())
    assert len(records) == 2
    assert "vendor" in {r.candidate.variant for r in records}
    torch.testing.assert_close(out, call(kc, tensors), rtol=0, atol=0)
    assert len(list(Store(tmp_path / "store").measurements())) == 2
    assert [storage_bytes(t) for t in tensors] == before
    assert len(dispatch.launchers) == 1
