"""layer_norm and rms_norm against torch's own."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from cases import for_each
from dropin_lab import (  # noqa: F401
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
from kernelcast.kernels import candidates
from kernelcast.runtime import dropins_norm
from kernelcast.runtime.dispatch import LaunchWarning

pytestmark = pytest.mark.usefixtures("fresh")

PROPERTY = settings(
    max_examples=examples(30),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
QUICK = TimingPlan(rounds=2, least_rounds=1, seconds=0.2, candidate_seconds=0.2, sample_us=50.0)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4)
dtypes = st.sampled_from(sorted(DTYPES))


class Own:
    """torch's own under the drop-ins' names."""

    layer_norm = staticmethod(F.layer_norm)
    rms_norm = staticmethod(F.rms_norm)


def vectors(shape, dtype=torch.float32):
    return (1 + 0.1 * randn(*shape, seed=1)).to(dtype), (0.1 * randn(*shape, seed=2)).to(dtype)


# --- Results ---


@given(
    shapes, st.integers(1, 4), dtypes, st.sampled_from(["weight_bias", "weight", "none"]),
    st.sampled_from([1e-5, 1e-12, 1, 0.5]), st.booleans(), st.integers(0, 30),
)  # fmt: skip
@PROPERTY
def test_layer_norm_is_torchs(shape, dims, dtype, affine, eps, as_list, number):
    shape = [*shape, 24]
    dims = min(dims, len(shape))
    x = randn(*shape, dtype=DTYPES[dtype])
    normalized = shape[-dims:] if as_list else torch.Size(shape[-dims:])
    given_ = vectors(shape[-dims:], DTYPES[dtype])[: {"none": 0, "weight": 1, "weight_bias": 2}[affine]]
    chooser = choose(nth_legal(number))
    out = run_twice(
        lambda: kc.layer_norm(x, normalized, *given_, eps=eps),
        lambda: F.layer_norm(x, normalized, *given_, eps=eps),
        [x, *given_],
        chooser,
    )
    assert out.is_contiguous()
    (problem,) = chooser.asked
    assert (problem["rows"], problem["columns"]) == (math.prod(shape[:-dims]), math.prod(shape[-dims:]))
    assert (problem.operation, problem["affine"], problem.dtype) == ("layernorm", affine, dtype)


@given(
    shapes, st.integers(1, 4), dtypes, st.booleans(), st.sampled_from([None, 1e-6, 1, 0.5]), st.booleans(),
    st.integers(0, 30),
)  # fmt: skip
@PROPERTY
def test_rms_norm_is_torchs(shape, dims, dtype, weighted, eps, as_list, number):
    dims = min(dims, len(shape))
    x = randn(*shape, dtype=DTYPES[dtype])
    normalized = shape[-dims:] if as_list else tuple(shape[-dims:])
    weight = vectors(shape[-dims:], DTYPES[dtype])[0] if weighted else None
    chooser = choose(nth_legal(number))
    out = run_twice(
        lambda: kc.rms_norm(x, normalized, weight, eps),
        lambda: F.rms_norm(x, normalized, weight, eps),
        [x] if weight is None else [x, weight],
        chooser,
    )
    assert out.is_contiguous()
    (problem,) = chooser.asked
    assert (problem["rows"], problem["columns"]) == (math.prod(shape[:-dims]), math.prod(shape[-dims:]))
    assert (problem.operation, problem["affine"]) == ("rmsnorm", "weight" if weighted else "none")


@for_each("dtype", DTYPES)
@for_each("eps", [None, 1e-6, 0.25])
def test_eps_reaches_every_candidate(dtype, eps):
    """Of rows as small as eps nothing else decides, and torch's own default is the same for all dtypes."""
    x = (1e-4 * randn(3, 40)).to(DTYPES[dtype])
    weight, bias = vectors((40,), DTYPES[dtype])
    calls = (
        ("rmsnorm", lambda o: o.rms_norm(x, (40,), weight, eps)),
        ("layernorm", lambda o: o.layer_norm(x, (40,), weight, bias, *([] if eps is None else [eps]))),
    )
    for name, call in calls:
        affine = "weight_bias" if name == "layernorm" else "weight"
        table = candidates(dropins_norm._norm_problem(name, x, 1, affine), HERE)
        assert len(table) >= 3
        for candidate in table:
            chooser = choose(candidate)
            torch.testing.assert_close(call(kc), call(Own), rtol=2e-2, atol=1e-4)
            assert len(chooser.asked) == 1


def test_every_candidate_runs_on_many_rows():
    x = randn(3, 2, 40, 8)
    weight, bias = vectors((40, 8))
    for table, drop_in, own in (
        (candidates(dropins_norm._norm_problem("layernorm", x, 2, "weight_bias"), HERE),
         lambda: kc.layer_norm(x, (40, 8), weight, bias), lambda: F.layer_norm(x, (40, 8), weight, bias)),
        (candidates(dropins_norm._norm_problem("layernorm", x, 1, "none"), HERE),
         lambda: kc.layer_norm(x, [8]), lambda: F.layer_norm(x, [8])),
        (candidates(dropins_norm._norm_problem("rmsnorm", x, 2, "weight"), HERE),
         lambda: kc.rms_norm(x, (40, 8), weight), lambda: F.rms_norm(x, (40, 8), weight)),
    ):  # fmt: skip
        for candidate in table:
            chooser = choose(candidate)
            run_twice(drop_in, own, [x, weight, bias], chooser)
            assert len(chooser.asked) == 1


def test_eps_is_no_part_of_the_key():
    chooser = choose(nth_legal(1))
    x = 1e-3 * randn(3, 40)
    for eps in (1e-5, 1e-3, 1, 1e-5):
        torch.testing.assert_close(kc.layer_norm(x, (40,), eps=eps), F.layer_norm(x, (40,), eps=eps))
        torch.testing.assert_close(kc.rms_norm(x, (40,), eps=eps), F.rms_norm(x, (40,), eps=eps))
    torch.testing.assert_close(kc.rms_norm(x, (40,)), F.rms_norm(x, (40,)))
    assert [p.operation for p in chooser.asked] == ["layernorm", "rmsnorm"]


# --- Fallbacks: torch's own runs, and nobody is asked ---


class Subclass(torch.Tensor):
    """A tensor with a type of its own."""


X = randn(3, 4, 8)
W, B = vectors((8,))
EPS = torch.tensor(0.5, dtype=torch.float64).numpy()[()]
FALLBACKS = {
    "layer_norm: strided": lambda o: o.layer_norm(X.transpose(0, 1), (8,), W, B),
    "layer_norm: columns with gaps": lambda o: o.layer_norm(randn(3, 16)[:, ::2], (8,), W, B),
    "layer_norm: strided weight": lambda o: o.layer_norm(X, (8,), randn(16)[::2], B),
    "layer_norm: expanded bias": lambda o: o.layer_norm(X, (8,), W, B[:1].expand(8)),
    "layer_norm: bias alone": lambda o: o.layer_norm(X, (8,), None, B),
    "layer_norm: float64": lambda o: o.layer_norm(X.double(), (8,), W.double(), B.double()),
    "layer_norm: mixed dtypes": lambda o: o.layer_norm(X.bfloat16(), (8,), W, B),
    "layer_norm: no rows": lambda o: o.layer_norm(X[:0], (8,), W, B),
    "layer_norm: subclass": lambda o: o.layer_norm(X.as_subclass(Subclass), (8,), W, B).as_subclass(torch.Tensor),
    "layer_norm: subclass of a weight": lambda o: o.layer_norm(X, (8,), W.as_subclass(Subclass), B).as_subclass(
        torch.Tensor
    ),
    "layer_norm: numpy's eps": lambda o: o.layer_norm(X, (8,), W, B, EPS),
    "rms_norm: strided": lambda o: o.rms_norm(X.transpose(0, 1), (8,), W),
    "rms_norm: strided weight": lambda o: o.rms_norm(X, (8,), randn(16)[::2]),
    "rms_norm: float64": lambda o: o.rms_norm(X.double(), (8,), W.double()),
    "rms_norm: complex": lambda o: o.rms_norm(X.to(torch.complex64), (8,)),
    "rms_norm: no rows": lambda o: o.rms_norm(X[:0], (8,), W),
    "rms_norm: subclass": lambda o: o.rms_norm(X.as_subclass(Subclass), (8,), W).as_subclass(torch.Tensor),
    "rms_norm: numpy's eps": lambda o: o.rms_norm(X, (8,), W, EPS),
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
    "layer_norm": (lambda o, t: o.layer_norm(t[0], (8,), t[1], t[2]), 3),
    "layer_norm without a bias": (lambda o, t: o.layer_norm(t[0], (8,), t[1]), 2),
    "layer_norm of all": (lambda o, t: o.layer_norm(t[0], (3, 4, 8)), 1),
    "rms_norm": (lambda o, t: o.rms_norm(t[0], (8,), t[1]), 2),
    "rms_norm without a weight": (lambda o, t: o.rms_norm(t[0], (4, 8), None, 1e-6), 1),
}


def operands(*, requires_grad=False):
    return [t.clone().requires_grad_(requires_grad) for t in (X, W, B)]


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
        assert (one.grad is not None) == (place < used)
        if one.grad is not None:
            assert_same(one.grad, other.grad)


@pytest.mark.parametrize("name", CALLS)
def test_one_operand_that_needs_a_gradient_is_enough(name):
    call, used = CALLS[name]
    for place in range(3):
        tensors = operands()
        tensors[place].requires_grad_()
        chooser = choose(nth_legal(1))
        assert call(kc, tensors).requires_grad == (place < used) == (chooser.asked == [])


@pytest.mark.parametrize("name", CALLS)
def test_where_no_gradient_is_recorded_parameters_are_served(name):
    call, _ = CALLS[name]
    for mode in (torch.no_grad, torch.inference_mode):
        chooser = choose(nth_legal(1))
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
        assert_same(call(kc, operands()), call(Own, operands()))
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


@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_torch_func_are_torchs(name):
    call, _ = CALLS[name]
    chooser = choose(nth_legal(1))
    stacked = [torch.stack([t, t + 1]) for t in operands()]
    assert_same(torch.vmap(lambda *t: call(kc, t))(*stacked), torch.vmap(lambda *t: call(Own, t))(*stacked))
    assert_same(
        torch.func.grad(lambda *t: call(kc, t).square().sum())(*operands()),
        torch.func.grad(lambda *t: call(Own, t).square().sum())(*operands()),
    )
    assert chooser.asked == []


# --- Errors are torch's ---

ERRORS = {
    "layer_norm: shape": lambda o: o.layer_norm(X, (4,)),
    "layer_norm: no shape": lambda o: o.layer_norm(X, ()),
    "layer_norm: number": lambda o: o.layer_norm(X, 8),
    "layer_norm: too many dimensions": lambda o: o.layer_norm(X, (1, 3, 4, 8)),
    "layer_norm: texts": lambda o: o.layer_norm(X, ("8",)),
    "layer_norm: weight": lambda o: o.layer_norm(X, (8,), W[:4]),
    "layer_norm: bias": lambda o: o.layer_norm(X, (8,), W, B[:4]),
    "layer_norm: weight of two dimensions": lambda o: o.layer_norm(X, (8,), W[None]),
    "layer_norm: dtypes": lambda o: o.layer_norm(X, (8,), W.double(), B.double()),
    "layer_norm: integers": lambda o: o.layer_norm(X.long(), (8,)),
    "layer_norm: eps": lambda o: o.layer_norm(X, (8,), W, B, None),
    "layer_norm: eps is a text": lambda o: o.layer_norm(X, (8,), W, B, "small"),
    "layer_norm: weight is a list": lambda o: o.layer_norm(X, (8,), [1.0] * 8),
    "rms_norm: shape": lambda o: o.rms_norm(X, (4,)),
    "rms_norm: number": lambda o: o.rms_norm(X, 8),
    "rms_norm: weight": lambda o: o.rms_norm(X, (8,), W[:4]),
    "rms_norm: nothing": lambda o: o.rms_norm(None, (8,)),
}


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
    chooser = choose(nth_legal(1))
    for fill in (0.0, 1.0, -math.inf, math.nan, 1e30):
        kc.layer_norm(torch.full_like(X, fill), (8,), W * fill, B)
        kc.rms_norm(torch.full_like(X, fill), (8,), W * fill)
    assert [p.operation for p in chooser.asked] == ["layernorm", "rmsnorm"]


def test_every_fact_asks_anew_and_none_of_them_twice():
    chooser = choose(nth_legal(0))
    calls = [
        call
        for norm in (kc.layer_norm, kc.rms_norm)
        for call in (
            lambda norm=norm: norm(X, (8,)),
            lambda norm=norm: norm(X, (4, 8)),
            lambda norm=norm: norm(X[:2], (8,)),
            lambda norm=norm: norm(randn(12, 9), (9,)),
            lambda norm=norm: norm(X, (8,), W),
            lambda norm=norm: norm(X.half(), (8,)),
            lambda norm=norm: norm(X.bfloat16(), (8,)),
        )
    ]
    calls.append(lambda: kc.layer_norm(X, (8,), W, B))
    for _ in range(2):
        for call in calls:
            call()
    assert len(chooser.asked) == len(set(chooser.asked)) == len(calls)


def test_how_the_shape_is_written_does_not_matter():
    chooser = choose(nth_legal(1))
    for shape in ((4, 8), [4, 8], torch.Size([4, 8])):
        torch.testing.assert_close(kc.layer_norm(X, shape), F.layer_norm(X, shape))
    assert len(chooser.asked) == 1
    # Other leading dimensions of as many rows pose the problem that was answered before.
    kc.layer_norm(X.view(3, 1, 4, 8), (4, 8))
    assert chooser.asked[0] == chooser.asked[-1]


@pytest.mark.parametrize("name", CALLS)
def test_threads_change_the_key(name):
    call, _ = CALLS[name]
    chooser = choose(nth_legal(0))
    before = torch.get_num_threads()
    for threads in (before, before + 1, before):
        torch.set_num_threads(threads)
        call(kc, operands())
    assert [p.threads for p in chooser.asked] == [before, before + 1]


# --- Failures ---


@pytest.mark.parametrize("good_calls", [0, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_candidate_that_fails_is_forgotten_and_torchs_own_runs(failing, name, good_calls):  # noqa: F811
    call, _ = CALLS[name]
    chooser = failing(name.split(" ")[0].replace("_", ""), good_calls)
    expected = call(Own, operands())
    for _ in range(good_calls):
        assert_same(call(kc, operands()), expected)
    with pytest.warns(LaunchWarning, match=r"norm\(rows=.*StopIteration"):
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
    torch.testing.assert_close(out, call(Own, tensors), rtol=1e-4, atol=1e-5)
    records = list(Store(tmp_path / "store").measurements())
    assert len(records) == 2
    assert "vendor" in {r.candidate.variant for r in records}
    torch.testing.assert_close(out, call(kc, tensors), rtol=0, atol=0)
    assert len(list(Store(tmp_path / "store").measurements())) == 2
    assert [storage_bytes(t) for t in tensors] == before
