"""What tests of the drop-ins share: a selector that picks what a test says, checked calls, a variant that fails."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import kernelcast as kc
from kernelcast.kernels import Candidate, Variant, Work, candidates, operation, registry
from kernelcast.kernels.detect import detect
from kernelcast.runtime import Selection, dispatch

HERE = detect("cpu")
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def fresh(tmp_path):
    """Nothing is read from the home, nothing is written, nothing is remembered from other tests. One thread is faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kc.configure(cache=False, store=False, models=tmp_path / "models", mode="predict")
    yield
    kc.configure()
    torch.set_num_threads(threads)


class Chooser:
    """Stands in for the CPU's selector: picks by a function of the problem, and remembers what it was asked."""

    drift_every = 0

    def __init__(self, pick):
        self.pick = pick
        self.asked = []
        self.forgotten = []

    def select(self, problem):
        self.asked.append(problem)
        return Selection(problem, HERE.name, self.pick(problem), "predicted")

    def pending(self, problem):
        return False

    def reject(self, problem, candidate):
        self.forgotten.append(problem)
        return False


def choose(pick):
    """Put a chooser in the place of the CPU's selector, everything before forgotten."""
    if isinstance(pick, Candidate):
        pick = functools.partial(lambda candidate, problem: candidate, pick)
    dispatch.launchers.clear()
    dispatch.rescues.clear()
    dispatch.selectors[CPU] = Chooser(pick)
    return dispatch.selectors[CPU]


def nth_legal(number):
    """Picks one of the legal candidates, the default among them."""

    def pick(problem):
        table = candidates(problem, HERE)
        return table[number % len(table)]

    return pick


def default(problem):
    return operation(problem.operation).default


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def storage_bytes(tensor):
    """Every byte of a tensor's storage, what its view leaves out included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage()).numpy().tobytes()


def run_twice(drop_in, own, tensors, chooser, *, expect_asked=True):
    """The drop-in's result on its first and its second call, checked against torch's and, if asked, the reference."""
    before = [(storage_bytes(t), t.stride(), t._version) for t in tensors]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = drop_in(), drop_in()
    assert [(storage_bytes(t), t.stride(), t._version) for t in tensors] == before
    expected = own()
    for out in (first, second):
        assert (out.shape, out.dtype, out.requires_grad) == (expected.shape, expected.dtype, False)
        assert type(out) is torch.Tensor
    assert len(chooser.asked) <= 1
    if not chooser.asked or chooser.pick(chooser.asked[0]) == default(chooser.asked[0]):
        assert_same(first, expected)
    else:
        problem = chooser.asked[0]
        tolerance = operation(problem.operation).tolerance(problem)
        for out in (first, second):
            torch.testing.assert_close(
                out.double(), expected.double(), rtol=2 * tolerance.relative, atol=2 * tolerance.absolute
            )
    return first


def assert_same(out, expected):
    """Bitwise equal, NaN included, with the same strides."""
    assert out.dtype == expected.dtype
    assert out.stride() == expected.stride()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


class Fails(Variant):
    """Runs what its default would, and fails from its so-manyth call on."""

    name = "test_fails"
    backend = "torch"
    doc = "fails"
    good_calls = 0

    def work(self, problem, columns, device):
        return Work(1.0, 1.0)

    def build(self, problem, config):
        left = iter(range(self.good_calls))
        good = registry.variant(problem.operation, "vendor").build(problem, {})

        def run(*tensors, **options):
            next(left)  # StopIteration when they are used up
            return good(*tensors, **options)

        return run


@pytest.fixture
def failing(monkeypatch):
    """Adds the variant to an operation, with a number of calls that work, and a selector that picks it."""

    def add(operation_name, good_calls):
        variant = Fails()
        variant.good_calls = good_calls
        registry.variants(operation_name)
        monkeypatch.setitem(registry._variants[operation_name], "test_fails", variant)
        return choose(Candidate.of("test_fails"))

    return add
