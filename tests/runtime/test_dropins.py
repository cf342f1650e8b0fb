"""The drop-in operations against torch's own: results, fallbacks, failures, and what the choice depends on."""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cases import for_each
from dropin_lab import (
    CPU,
    DTYPES,
    HERE,
    assert_same,
    choose,
    fresh,  # noqa: F401
    nth_legal,
    randn,
    run_twice,
    storage_bytes,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kernelcast as kc
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import InvalidProblemError, SettingsError
from kernelcast.kernels import Candidate, Variant, Work, candidates, operation, registry
from kernelcast.kernels.detect import detect
from kernelcast.runtime import CacheKey, dispatch, dropins
from kernelcast.runtime.dispatch import LaunchWarning
from kernelcast.runtime.dropins_problem import problem_for

QUICK = TimingPlan(rounds=2, least_rounds=1, seconds=0.2, candidate_seconds=0.2, sample_us=50.0)


pytestmark = pytest.mark.usefixtures("fresh")


# --- Results ---

PROPERTY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
dtypes = st.sampled_from(sorted(DTYPES))
sizes = st.integers(1, 40)


@st.composite
def matrices(draw, rows, columns, dtype, seed):
    """A matrix of a shape with the strides of a view that a user may hold."""
    kind = draw(st.sampled_from(["rows", "columns", "padded rows", "padded columns", "every other row",
                                 "every other column", "row repeated", "offset"]))  # fmt: skip
    if kind == "rows":
        return randn(rows, columns, dtype=dtype, seed=seed)
    if kind == "columns":
        return randn(columns, rows, dtype=dtype, seed=seed).t()
    if kind == "padded rows":
        return randn(rows, columns + 3, dtype=dtype, seed=seed)[:, :columns]
    if kind == "padded columns":
        return randn(columns, rows + 5, dtype=dtype, seed=seed)[:, :rows].t()
    if kind == "every other row":
        return randn(2 * rows, columns, dtype=dtype, seed=seed)[::2]
    if kind == "every other column":
        return randn(rows, 2 * columns, dtype=dtype, seed=seed)[:, ::2]
    if kind == "row repeated":
        return randn(1, columns, dtype=dtype, seed=seed).expand(rows, columns)
    return randn(rows * columns + 1, dtype=dtype, seed=seed)[1:].view(rows, columns)


@given(st.data(), sizes, sizes, st.integers(1, 300), dtypes, st.integers(0, 40))
@PROPERTY
def test_matmul_is_torchs(data, m, n, k, dtype, number):
    a = data.draw(matrices(m, k, DTYPES[dtype], 0))
    b = data.draw(matrices(k, n, DTYPES[dtype], 1))
    chooser = choose(nth_legal(number))
    run_twice(lambda: kc.matmul(a, b), lambda: torch.matmul(a, b), [a, b], chooser)
    if not chooser.asked:
        return
    (problem,) = chooser.asked
    assert (problem["m"], problem["n"], problem["k"], problem.dtype) == (m, n, k, dtype)
    # The problem's own inputs have the strides of these, wherever a stride means something.
    for ours, made in zip((a, b), operation("gemm").make_inputs(problem, seed=0, device="cpu"), strict=True):
        for size, one, other in zip(ours.shape, ours.stride(), made.stride(), strict=True):
            assert size == 1 or one == other


def test_every_gemm_candidate_runs_through_matmul():
    a, b = randn(8, 512), randn(512, 16).t().contiguous().t()
    table = candidates(dropins._gemm_problem(a, b), HERE)
    assert len(table) > 8
    for candidate in table:
        chooser = choose(candidate)
        run_twice(lambda: kc.matmul(a, b), lambda: torch.matmul(a, b), [a, b], chooser)
        assert len(chooser.asked) == 1


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12),
    st.integers(1, 4), st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.tuples(st.integers(0, 3),
    st.integers(0, 3)), st.tuples(st.integers(1, 2), st.integers(1, 2)), st.booleans(), st.sampled_from(["nchw", "nhwc", "mixed"]),
    dtypes, st.integers(0, 60),
)  # fmt: skip
@PROPERTY
def test_conv2d_is_torchs(
    n, groups, c, k, h, w, r, s, stride, padding, dilation, with_bias, layout, dtype, number
):
    assume(
        h + 2 * padding[0] >= dilation[0] * (r - 1) + 1 and w + 2 * padding[1] >= dilation[1] * (s - 1) + 1
    )
    x = randn(n, c * groups, h, w, dtype=DTYPES[dtype])
    weight = randn(k * groups, c, r, s, dtype=DTYPES[dtype], seed=1)
    if layout != "nchw":
        x = x.to(memory_format=torch.channels_last)
    if layout == "nhwc":
        weight = weight.to(memory_format=torch.channels_last)
    bias = randn(k * groups, dtype=DTYPES[dtype], seed=2) if with_bias else None
    rest = (stride, padding, dilation, groups)
    chooser = choose(nth_legal(number))
    tensors = [x, weight] if bias is None else [x, weight, bias]
    out = run_twice(
        lambda: kc.conv2d(x, weight, bias, *rest), lambda: F.conv2d(x, weight, bias, *rest), tensors, chooser
    )
    if chooser.asked and layout == "nchw":
        assert out.is_contiguous()


def test_every_conv2d_candidate_runs_with_and_without_bias():
    x, weight, bias = randn(1, 4, 12, 12), randn(4, 4, 3, 3, seed=1), randn(4, seed=2)
    problem = dropins._conv2d_problem(x, weight, (1, 1), (1, 1), (1, 1), 1)
    table = candidates(problem, HERE)
    assert len(table) > 5
    for candidate in table:
        chooser = choose(candidate)
        for each in (None, bias):
            out = kc.conv2d(x, weight, each, padding=1)
            torch.testing.assert_close(out, F.conv2d(x, weight, each, padding=1), rtol=1e-3, atol=1e-3)
        # One key for both: the bias comes after the choice.
        assert len(chooser.asked) == 1


@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([1, 4, 8, 16]), st.booleans(), dtypes, st.integers(0, 60),
)  # fmt: skip
@PROPERTY
def test_attention_is_torchs(batch, kv_heads, group, q_len, kv_len, d, causal, dtype, number):
    q = randn(batch, kv_heads * group, q_len, d, dtype=DTYPES[dtype])
    k, v = (randn(batch, kv_heads, kv_len, d, dtype=DTYPES[dtype], seed=seed) for seed in (1, 2))
    options = {"is_causal": causal, "enable_gqa": group > 1}
    chooser = choose(nth_legal(number))
    run_twice(
        lambda: kc.attention(q, k, v, **options),
        lambda: F.scaled_dot_product_attention(q, k, v, **options),
        [q, k, v],
        chooser,
    )
    assert len(chooser.asked) == 1


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), dtypes, st.booleans(), st.integers(0, 60))
@PROPERTY
def test_softmax_is_torchs(shape, dtype, last_by_number, number):
    x = randn(*shape, dtype=DTYPES[dtype])
    dim = len(shape) - 1 if last_by_number else -1
    chooser = choose(nth_legal(number))
    out = run_twice(lambda: kc.softmax(x, dim), lambda: torch.softmax(x, dim), [x], chooser)
    assert len(chooser.asked) == 1
    assert out.is_contiguous()


def test_every_softmax_and_attention_candidate_runs():
    x = randn(80, 3000)
    q, k, v = randn(1, 4, 40, 8), randn(1, 2, 40, 8, seed=1), randn(1, 2, 40, 8, seed=2)
    for table, drop_in, own in (
        (candidates(problem_for("softmax", x, rows=80, columns=3000), HERE), lambda: kc.softmax(x),
         lambda: torch.softmax(x, -1)),
        (candidates(dropins._attention_problem(q, k, v, True, True), HERE),
         lambda: kc.attention(q, k, v, is_causal=True, enable_gqa=True),
         lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
    ):  # fmt: skip
        assert len(table) > 4
        for candidate in table:
            chooser = choose(candidate)
            run_twice(drop_in, own, [], chooser)
            assert len(chooser.asked) == 1


# --- Fallbacks: torch's own runs, and nobody is asked ---


class Subclass(torch.Tensor):
    """A tensor with a type of its own."""


def transposed(x):
    return x.transpose(-1, -2)


X, W = randn(1, 4, 8, 8), randn(4, 4, 3, 3, seed=1)
A, B = randn(6, 8), randn(8, 5, seed=1)
Q = randn(1, 2, 6, 4)
FALLBACKS = {
    "matmul: batches of batches": lambda o: o.matmul(randn(2, 2, 3, 4), randn(2, 2, 4, 5)),
    "matmul: vector": lambda o: o.matmul(A, randn(8)),
    "matmul: two vectors": lambda o: o.matmul(randn(8), randn(8)),
    "matmul: matrix by a batch": lambda o: o.matmul(randn(3, 4), randn(2, 4, 5)),
    "matmul: integers": lambda o: o.matmul(torch.arange(6).view(2, 3), torch.arange(6).view(3, 2)),
    "matmul: float64": lambda o: o.matmul(A.double(), B.double()),
    "matmul: complex": lambda o: o.matmul(A.to(torch.complex64), B.to(torch.complex64)),
    "matmul: subclass": lambda o: o.matmul(A.as_subclass(Subclass), B).as_subclass(torch.Tensor),
    "matmul: sparse": lambda o: o.matmul(A.to_sparse(), B),
    "matmul: sparse rows": lambda o: o.matmul(A.to_sparse_csr(), B),
    "matmul: empty sum": lambda o: o.matmul(A[:, :0], B[:0]),
    "matmul: no rows": lambda o: o.matmul(A[:0], B),
    "matmul: overlapping": lambda o: o.matmul(randn(20).as_strided((6, 8), (2, 1)), B),
    "matmul: nested": lambda o: o.matmul(
        torch.nested.nested_tensor([A, A]), torch.nested.nested_tensor([B, B])
    ).to_padded_tensor(0.0),
    "conv2d: same": lambda o: o.conv2d(X, W, padding="same"),
    "conv2d: valid": lambda o: o.conv2d(X, W, padding="valid"),
    "conv2d: unbatched": lambda o: o.conv2d(X[0], W),
    "conv2d: float64": lambda o: o.conv2d(X.double(), W.double()),
    "conv2d: no images": lambda o: o.conv2d(X[:0], W),
    "conv2d: numpy's integer": lambda o: o.conv2d(X, W, stride=torch.tensor(2).numpy()[()]),
    "conv2d: strided": lambda o: o.conv2d(transposed(X), W),
    "attention: mask": lambda o: o.attention(Q, Q, Q, torch.ones(6, 6, dtype=torch.bool).tril()),
    "attention: dropout": lambda o: (torch.manual_seed(0), o.attention(Q, Q, Q, dropout_p=0.5))[1],
    "attention: scale": lambda o: o.attention(Q, Q, Q, scale=0.1),
    "attention: three dimensions": lambda o: o.attention(Q[0], Q[0], Q[0]),
    "attention: strided": lambda o: o.attention(*[randn(1, 6, 2, 4).transpose(1, 2)] * 3),
    "attention: other width": lambda o: o.attention(Q, Q, randn(1, 2, 6, 8)),
    "attention: float64": lambda o: o.attention(Q.double(), Q.double(), Q.double()),
    "softmax: other dimension": lambda o: o.softmax(A, 0),
    "softmax: dtype": lambda o: o.softmax(A.half(), -1, torch.float32),
    "softmax: strided": lambda o: o.softmax(A.t(), -1),
    "softmax: nested": lambda o: o.softmax(torch.nested.nested_tensor([A, A]), -1).to_padded_tensor(0.0),
    "softmax: empty": lambda o: o.softmax(A[:0], -1),
    "softmax: scalar": lambda o: o.softmax(torch.tensor(1.0), 0),
    "softmax: subclass": lambda o: o.softmax(A.as_subclass(Subclass), -1).as_subclass(torch.Tensor),
}  # fmt: skip


class Own:
    """torch's own operators under the drop-ins' names."""

    matmul = staticmethod(torch.matmul)
    conv2d = staticmethod(F.conv2d)
    attention = staticmethod(F.scaled_dot_product_attention)
    softmax = staticmethod(torch.softmax)


@for_each("name", FALLBACKS)
def test_what_the_catalogue_does_not_cover_is_torchs_own(name):
    chooser = choose(nth_legal(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*(nested|Sparse|sparse).*")
        out, expected = FALLBACKS[name](kc), FALLBACKS[name](Own)
    assert type(out) is type(expected)
    if expected.layout is torch.strided:
        assert_same(out, expected)
    assert chooser.asked == []


CALLS = {
    "matmul": lambda o, t: o.matmul(t[0], t[1]),
    "conv2d": lambda o, t: o.conv2d(t[2], t[3], t[4], padding=1),
    "attention": lambda o, t: o.attention(t[5], t[6], t[7], is_causal=True),
    "softmax": lambda o, t: o.softmax(t[0], -1),
}


def operands(**options):
    tensors = (A, B, X, W, randn(4, seed=3), Q, randn(1, 2, 6, 4, seed=4), randn(1, 2, 6, 4, seed=5))
    return [t.clone().requires_grad_(options.get("requires_grad", False)) for t in tensors]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_torchs(name):
    chooser = choose(nth_legal(1))
    ours, theirs = operands(requires_grad=True), operands(requires_grad=True)
    out, expected = CALLS[name](kc, ours), CALLS[name](Own, theirs)
    assert_same(out, expected)
    upstream = randn(*out.shape, seed=9)
    out.backward(upstream)
    expected.backward(upstream)
    assert chooser.asked == []
    touched = 0
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_same(one.grad, other.grad)
            touched += 1
    assert touched >= 1


@for_each("name", CALLS)
@for_each("place", range(8))
def test_one_operand_that_needs_a_gradient_is_enough(name, place):
    tensors = operands()
    tensors[place].requires_grad_()
    chooser = choose(nth_legal(1))
    out = CALLS[name](kc, tensors)
    assert out.requires_grad == CALLS[name](Own, tensors).requires_grad == (chooser.asked == [])


@for_each("name", CALLS)
@for_each("mode", [torch.no_grad, torch.inference_mode])
def test_where_no_gradient_is_recorded_parameters_are_served(name, mode):
    tensors = [torch.nn.Parameter(t) for t in operands()]
    chooser = choose(nth_legal(0))
    with mode():
        out = CALLS[name](kc, tensors)
    assert len(chooser.asked) == 1
    assert not out.requires_grad
    # The same key serves tensors outside.
    CALLS[name](kc, operands())
    assert len(chooser.asked) == 1


@pytest.mark.parametrize("name", CALLS)
def test_the_kill_switch(name, monkeypatch):
    chooser = choose(nth_legal(1))
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    assert_same(CALLS[name](kc, operands()), CALLS[name](Own, operands()))
    assert chooser.asked == []
    monkeypatch.setenv("KERNELCAST_DISABLE", "0")
    CALLS[name](kc, operands())
    assert len(chooser.asked) == 1
    # Also for what was chosen already.
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    assert_same(CALLS[name](kc, operands()), CALLS[name](Own, operands()))


@pytest.mark.filterwarnings("ignore:KERNELCAST_DISABLE")
@pytest.mark.parametrize("name", CALLS)
def test_a_kill_switch_of_another_value_is_on(name, monkeypatch):
    chooser = choose(nth_legal(1))
    monkeypatch.setenv("KERNELCAST_DISABLE", "yes")
    assert_same(CALLS[name](kc, operands()), CALLS[name](Own, operands()))
    assert chooser.asked == []


def test_a_mode_that_is_none_is_said_once_and_torch_runs(monkeypatch):
    kc.configure(cache=False, store=False)
    monkeypatch.setattr(dispatch, "_warned_of", set())
    monkeypatch.setenv("KERNELCAST_MODE", "foo")
    with pytest.warns(LaunchWarning, match="KERNELCAST_MODE is 'foo'"):
        assert_same(kc.matmul(A, B), torch.matmul(A, B))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(kc.matmul(B.T, A.T), torch.matmul(B.T, A.T))
    with pytest.raises(SettingsError, match="KERNELCAST_MODE is 'foo'"):
        kc.select("softmax", rows=4, columns=8)


def test_configure_names_its_options():
    with pytest.raises(SettingsError, match=r"no option 'foo'; it has models, .*top_k"):
        kc.configure(foo=1)


@pytest.mark.parametrize("name", CALLS)
def test_autocast_and_determinism_are_torchs(name):
    chooser = choose(nth_legal(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(CALLS[name](kc, operands()), CALLS[name](Own, operands()))
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(CALLS[name](kc, operands()), CALLS[name](Own, operands()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert chooser.asked == []


@pytest.mark.parametrize("name", ["matmul", "softmax"])
def test_transforms_of_torch_func_are_torchs(name):
    chooser = choose(nth_legal(2))
    batches = [torch.stack([t, t + 1]) for t in operands()[:2]]

    def call(o):
        return torch.vmap(lambda a, b: CALLS[name](o, (a, b)))(*batches)

    assert_same(call(kc), call(Own))
    tangent = torch.ones_like(A)

    def jvp(o):
        return torch.func.jvp(lambda a: CALLS[name](o, (a, B)), (A,), (tangent,))

    for one, other in zip(jvp(kc), jvp(Own), strict=True):
        assert_same(one, other)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(A, tangent)
        out = torch.autograd.forward_ad.unpack_dual(CALLS[name](kc, (dual, B)))
        assert out.tangent is not None
    gradient = torch.func.grad(lambda a: CALLS[name](kc, (a, B)).square().sum())(A)
    torch.testing.assert_close(
        gradient, torch.func.grad(lambda a: CALLS[name](Own, (a, B)).square().sum())(A)
    )
    assert chooser.asked == []


def test_traces_hold_torchs_own():
    chooser = choose(Candidate.of("row_chunked", {"chunks": 2}))
    traced = torch.jit.trace(lambda a, b: kc.matmul(a, b), (A, B), check_trace=False)
    assert "aten::matmul" in str(traced.graph)
    assert chooser.asked == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv2d", "attention"])
def test_compiled_functions_hold_torchs_own(name):
    chooser = choose(nth_legal(1))
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    tensors = operands()
    compiled = torch.compile(lambda *t: CALLS[name](kc, t), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*tensors), CALLS[name](Own, tensors), rtol=1e-5, atol=1e-6)
    assert len(seen) == 1
    assert chooser.asked == []


# --- Errors are torch's ---

ERRORS = {
    "matmul: sizes": lambda o: o.matmul(A, A),
    "matmul: dtypes": lambda o: o.matmul(A, B.half()),
    "matmul: scalar": lambda o: o.matmul(A, torch.tensor(1.0)),
    "matmul: list": lambda o: o.matmul([[1.0]], B),
    "matmul: nothing": lambda o: o.matmul(None, B),
    "conv2d: channels": lambda o: o.conv2d(randn(1, 3, 8, 8), W),
    "conv2d: groups": lambda o: o.conv2d(X, W, groups=3),
    "conv2d: no groups": lambda o: o.conv2d(X, W, groups=0),
    "conv2d: kernel too large": lambda o: o.conv2d(X, randn(4, 4, 9, 9)),
    "conv2d: no stride": lambda o: o.conv2d(X, W, stride=0),
    "conv2d: negative padding": lambda o: o.conv2d(X, W, padding=-1),
    "conv2d: three strides": lambda o: o.conv2d(X, W, stride=(1, 1, 1)),
    "conv2d: short bias": lambda o: o.conv2d(X, W, randn(1)),
    "conv2d: bias of two dimensions": lambda o: o.conv2d(X, W, randn(4, 1)),
    "conv2d: bias of another dtype": lambda o: o.conv2d(X, W, randn(4).half()),
    "conv2d: unknown padding": lambda o: o.conv2d(X, W, padding="some"),
    "attention: widths": lambda o: o.attention(Q, randn(1, 2, 6, 8), randn(1, 2, 6, 8)),
    "attention: heads": lambda o: o.attention(randn(1, 3, 6, 4), Q, Q),
    "attention: groups": lambda o: o.attention(randn(1, 3, 6, 4), Q, Q, enable_gqa=True),
    "attention: dtypes": lambda o: o.attention(Q, Q.half(), Q),
    "softmax: dimension": lambda o: o.softmax(A, 2),
    "softmax: integers": lambda o: o.softmax(torch.arange(4), -1),
    "softmax: a fraction": lambda o: o.softmax(A, 1.0),
    "softmax: a flag": lambda o: o.softmax(A, True),
    "softmax: no dimension": lambda o: o.softmax(A, None),
}  # fmt: skip


@for_each("name", ERRORS)
def test_errors_are_torchs_own(name):
    choose(nth_legal(1))
    with pytest.raises(Exception) as expected:  # noqa: PT011 - compared below
        ERRORS[name](Own)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(type(expected.value)) as seen:
                ERRORS[name](kc)
        assert str(seen.value) == str(expected.value)


# --- What the choice depends on ---


def test_values_do_not_matter():
    chooser = choose(nth_legal(0))
    for fill in (0.0, 1.0, -math.inf, math.nan, 1e30):
        kc.matmul(torch.full_like(A, fill), B)
        kc.softmax(torch.full_like(A, fill))
    assert [p.operation for p in chooser.asked] == ["gemm", "softmax"]


def test_every_fact_asks_anew_and_none_of_them_twice():
    chooser = choose(nth_legal(0))
    calls = [
        lambda: kc.matmul(A, B),
        lambda: kc.matmul(A[:5], B),
        lambda: kc.matmul(A, B[:, :4]),
        lambda: kc.matmul(A[:, :7], B[:7]),
        lambda: kc.matmul(A.t().contiguous().t(), B),
        lambda: kc.matmul(A, B.t().contiguous().t()),
        lambda: kc.matmul(A.half(), B.half()),
        lambda: kc.matmul(A.bfloat16(), B.bfloat16()),
        lambda: kc.conv2d(X, W),
        lambda: kc.conv2d(X, W, stride=2),
        lambda: kc.conv2d(X, W, stride=(2, 1)),
        lambda: kc.conv2d(X, W, padding=1),
        lambda: kc.conv2d(X, W, padding=(0, 1)),
        lambda: kc.conv2d(X, W, dilation=2),
        lambda: kc.conv2d(X, W[:, :2].contiguous(), groups=2),
        lambda: kc.conv2d(*(t.to(memory_format=torch.channels_last) for t in (X, W))),
        lambda: kc.attention(Q, Q, Q),
        lambda: kc.attention(Q, Q, Q, is_causal=True),
        lambda: kc.attention(Q[:, :, :5].contiguous(), Q, Q),
        lambda: kc.attention(Q, Q[:, :1].contiguous(), Q[:, :1].contiguous(), enable_gqa=True),
        lambda: kc.softmax(A),
        lambda: kc.softmax(A.half()),
        lambda: kc.softmax(randn(8, 6)),
    ]
    for _ in range(2):
        for call in calls:
            call()
    assert len(chooser.asked) == len(set(chooser.asked)) == len(calls)


def test_stride_written_as_a_list_or_one_number_is_the_same_key():
    chooser = choose(nth_legal(0))
    for stride in (2, (2,), [2], (2, 2), [2, 2]):
        assert_same(kc.conv2d(X, W, stride=stride), F.conv2d(X, W, stride=stride))
    assert len(chooser.asked) == 1


def test_threads_change_the_key():
    chooser = choose(nth_legal(0))
    before = torch.get_num_threads()
    kc.matmul(A, B)
    try:
        torch.set_num_threads(before + 1)
        kc.matmul(A, B)
    finally:
        torch.set_num_threads(before)
    kc.matmul(A, B)
    assert [p.threads for p in chooser.asked] == [before, before + 1]


def test_matmul_works_whichever_of_torchs_switches_of_precision_is_used():
    choose(nth_legal(0))
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        kc.configure(cache=False, store=False, mode="verify", plan=QUICK, top_k=1)
        assert_same(kc.matmul(A, B), torch.matmul(A, B))
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision


def test_what_is_remembered_is_bounded(monkeypatch):
    choose(nth_legal(0))
    monkeypatch.setattr(dispatch, "_MOST_KEYS", 5)
    for rows in range(1, 20):
        kc.softmax(randn(rows, 3))
    assert len(dispatch.launchers) <= 5


# --- Failures ---


class Fails(Variant):
    """Fails from its so-manyth call on."""

    name = "test_fails"
    backend = "torch"
    doc = "fails"
    good_calls = 0
    #: What every call waits for before it fails.
    barrier = None

    def work(self, problem, columns, device):
        return Work(1.0, 1.0)

    def build(self, problem, config):
        left = iter(range(self.good_calls))

        def run(*tensors):
            if self.barrier is not None:
                self.barrier.wait(60)
            next(left)  # StopIteration when they are used up
            return Own.matmul(*tensors) if problem.operation == "gemm" else CALLS["softmax"](Own, tensors)

        return run


@pytest.fixture
def failing(monkeypatch):
    """Adds the variant to an operation, with a number of calls that work."""

    def add(good_calls, operation_name="gemm"):
        variant = Fails()
        variant.good_calls = good_calls
        registry.variants(operation_name)
        monkeypatch.setitem(registry._variants[operation_name], "test_fails", variant)
        return choose(Candidate.of("test_fails"))

    return add


@pytest.mark.parametrize("good_calls", [0, 1, 5])
def test_a_candidate_that_fails_is_forgotten_and_torchs_own_runs(failing, good_calls):
    chooser = failing(good_calls)
    for _ in range(good_calls):
        assert_same(kc.matmul(A, B), torch.matmul(A, B))
    with pytest.warns(LaunchWarning, match=r"gemm\(m=6.*StopIteration"):
        assert_same(kc.matmul(A, B), torch.matmul(A, B))
    assert [p["m"] for p in chooser.forgotten] == [6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(kc.matmul(A, B), torch.matmul(A, B))
    assert len(chooser.asked) == 1
    assert len(chooser.forgotten) == 1


def test_softmax_that_fails_keeps_its_shape(failing):
    failing(0, "softmax")
    x = randn(2, 3, 4)
    with pytest.warns(LaunchWarning):
        assert_same(kc.softmax(x), torch.softmax(x, -1))


def test_a_candidate_that_is_unknown_or_cannot_be_built(failing):
    chooser = choose(Candidate.of("no_such_variant"))
    with pytest.warns(LaunchWarning, match="no_such_variant"):
        assert_same(kc.conv2d(X, W, randn(4)), F.conv2d(X, W, randn(4)))
    assert len(chooser.forgotten) == 1


def test_a_selector_that_fails_does_not_end_the_program():
    def broken(problem):
        raise RuntimeError("the selector's own fault")

    choose(broken)
    with pytest.warns(LaunchWarning, match="the selector's own fault"):
        assert_same(kc.matmul(A, B), torch.matmul(A, B))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kc.matmul(A, B)


def test_threads_that_fail_together_all_get_torchs_result(failing):
    chooser = failing(0)
    registry.variant("gemm", "test_fails").barrier = threading.Barrier(8)
    found = []

    def call():
        found.append(kc.matmul(A, B))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 8
    for out in found:
        assert_same(out, torch.matmul(A, B))
    assert len(chooser.forgotten) == len(seen) == 1


def test_an_error_of_torchs_own_after_a_rescue_is_passed_on(failing, monkeypatch):
    chooser = failing(0)
    results = iter([torch.mm(A, B)])

    def own(a, b):
        for result in results:
            return result
        raise RuntimeError("torch's own fault")

    monkeypatch.setattr(torch, "mm", own)
    with pytest.warns(LaunchWarning, match="StopIteration"):
        kc.matmul(A, B)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="torch's own fault"):
            kc.matmul(A, B)
    assert len(chooser.forgotten) == 1


def test_an_evicted_entry_is_gone_from_the_disk(tmp_path, failing, monkeypatch):
    options = {
        "cache": tmp_path / "cache",
        "store": False,
        "models": tmp_path,
        "plan": QUICK,
        "mode": "verify",
    }
    kc.configure(**options, top_k=1)
    kc.matmul(A, B)
    selector = dispatch.selector_for(A.device)
    (described,) = selector._ready
    found = replace(selector.select(described), candidate=Candidate.of("onednn"), source="verified")
    selector.cache.put(CacheKey.of(described, selector.device, 1), found)
    kc.configure(**options, top_k=1)
    (entry,) = (tmp_path / "cache").glob("*/*.json")
    assert "onednn" in entry.read_text()
    variant = registry.variant("gemm", "onednn")
    monkeypatch.setattr(
        type(variant),
        "build",
        lambda self, problem, config: lambda a, b: (_ for _ in ()).throw(RuntimeError("gone")),
    )
    with pytest.warns(LaunchWarning, match="gone"):
        assert_same(kc.matmul(A, B), torch.matmul(A, B))
    assert not entry.exists()


# --- The whole way, with real measurements ---


def real(tmp_path, **options):
    kc.configure(
        cache=tmp_path / "cache", store=tmp_path / "store", models=tmp_path / "models", plan=QUICK, **options
    )


@pytest.mark.parametrize("name", CALLS)
def test_verified_calls_measure_the_default_once_and_leave_the_tensors_alone(tmp_path, name):
    real(tmp_path, mode="verify", top_k=2)
    tensors = operands()
    before = [storage_bytes(t) for t in tensors]
    out = CALLS[name](kc, tensors)
    torch.testing.assert_close(out, CALLS[name](Own, tensors), rtol=1e-3, atol=1e-3)
    records = list(Store(tmp_path / "store").measurements())
    assert len(records) == 2
    assert "vendor" in {r.candidate.variant for r in records}
    assert {r.problem.threads for r in records} == {torch.get_num_threads()}
    again = CALLS[name](kc, tensors)
    torch.testing.assert_close(out, again, rtol=0, atol=0)
    assert len(list(Store(tmp_path / "store").measurements())) == 2
    assert [storage_bytes(t) for t in tensors] == before


def test_another_process_finds_what_this_one_verified(tmp_path):
    real(tmp_path, mode="verify", top_k=2)
    first = kc.select("gemm", m=6, n=5, k=8)
    assert first.source == "verified"
    real(tmp_path, mode="cached")  # as a new process: nothing in memory
    kc.configure(cache=tmp_path / "cache", store=False, mode="cached", top_k=2)
    second = kc.select("gemm", m=6, n=5, k=8)
    assert (second.source, second.candidate) == ("cached", first.candidate)
    # The call on tensors of that problem asks for the same entry.
    kc.matmul(A, B)
    assert dispatch.selector_for(CPU).select(dropins._gemm_problem(A, B)).source == "cached"


@pytest.mark.parametrize("mode", ["predict", "cached", "off"])
def test_nothing_is_measured_or_written_without_verification(tmp_path, mode):
    real(tmp_path, mode=mode)
    for name in CALLS:
        out = CALLS[name](kc, operands())
        torch.testing.assert_close(out, CALLS[name](Own, operands()), rtol=1e-3, atol=1e-3)
    assert list(tmp_path.iterdir()) == []


def test_warmup_leaves_nothing_to_select(tmp_path):
    real(tmp_path, mode="verify", top_k=2)
    problem = kc.problem("gemm", m=6, n=5, k=8)
    assert [s.source for s in kc.warmup([problem])] == ["verified"]
    lines = sum(p.read_bytes().count(b"\n") for p in (tmp_path / "store" / "journal").glob("*"))
    kc.matmul(A, B)
    assert sum(p.read_bytes().count(b"\n") for p in (tmp_path / "store" / "journal").glob("*")) == lines == 2


@pytest.mark.parametrize("shape", [(4, 0), (0,), (0, 4), (2, 3, 0), (2, 0, 3)])
def test_softmax_of_nothing_is_torchs(shape):
    x = torch.empty(shape)
    assert_same(kc.softmax(x), torch.softmax(x, -1))
    assert_same(kc.layer_norm(x, shape[-1:]), F.layer_norm(x, shape[-1:]))


# --- configure and the functions beside ---


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mode": "guess"}, SettingsError),
        ({"top_k": 0}, SettingsError),
        ({"budget_seconds": -1}, SettingsError),
        ({"device": HERE}, SettingsError),
        ({"colour": "blue"}, SettingsError),
    ],
)
def test_bad_options_are_refused_and_change_nothing(options, error):
    selector = dispatch.selector_for(CPU)
    with pytest.raises(error):
        kc.configure(**options)
    assert dispatch.selector_for(CPU) is selector
    assert selector.mode == "predict"


def test_configure_sets_all_options_anew(tmp_path):
    kc.configure(mode="off", top_k=7)
    assert (dispatch.selector_for(CPU).mode, dispatch.selector_for(CPU).top_k) == ("off", 7)
    kc.configure(mode="predict")
    assert (dispatch.selector_for(CPU).mode, dispatch.selector_for(CPU).top_k) == ("predict", 3)


def test_select_and_problem_fill_the_threads_in():
    problem = kc.problem("gemm", m=2, n=3, k=4)
    assert problem.threads == (0 if torch.cuda.is_available() else torch.get_num_threads())
    assert kc.problem("gemm", m=2, n=3, k=4, threads=1).threads == 1
    with pytest.raises(InvalidProblemError, match="Leave it out"):
        kc.problem("gemm", m=2, n=3, k=4, threads=10**5)
    selection = kc.select("gemm", m=2, n=3, k=4)
    assert selection.problem == problem
    assert kc.select("gemm", mode="off", m=2, n=3, k=4).source == "default"


def test_device_by_name_and_of_this_machine():
    assert kc.device("a100").name == "a100-sxm4-80gb"
    assert kc.device() == detect()
    with pytest.raises(kc.KernelcastError, match="Known"):
        kc.device("abacus")
