"""kernelcast.run: an operation of the user's own, run with what was selected."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import kernelcast as kc
from kernelcast.errors import InvalidProblemError, KernelcastError, UnknownNameError
from kernelcast.kernels import Candidate, registry
from kernelcast.runtime import Selection, dispatch
from kernelcast.runtime.run import problem_of

CPU = torch.device("cpu")
CALLS: list[object] = []


class Chooser:
    """Selects one candidate, and notes what it was asked and told."""

    drift_every = 0

    def __init__(self, candidate):
        self.candidate, self.asked, self.forgotten = candidate, [], []

    def select(self, problem):
        self.asked.append(problem)
        return Selection(problem, "cpu", self.candidate, "verified")

    def pending(self, problem):
        return False

    def reject(self, problem, candidate):
        self.forgotten.append(problem)
        return False


@pytest.fixture(autouse=True)
def _own_catalogue(monkeypatch):
    registry.operation_names()
    monkeypatch.setattr(registry, "_operations", dict(registry._operations))
    monkeypatch.setattr(
        registry, "_variants", {name: dict(found) for name, found in registry._variants.items()}
    )
    monkeypatch.setattr(dispatch, "selectors", {})
    dispatch.launchers.clear()
    dispatch.rescues.clear()
    CALLS.clear()

    @kc.kernel(
        "test_run",
        variant="chunked",
        tensors={"x": ("rows", "columns"), "index": kc.TensorSpec(("rows",), dtype="int64", high=3)},
        space={"chunk": (1, 2, 3)},
        options={"twice": (False, True)},
        dtypes=("float32", "bfloat16"),
    )
    def chunked(x, index, *, chunk, twice):
        CALLS.append(chunk)
        if chunk == 3:
            raise RuntimeError("no launch")
        return x * index[:, None] * (2 if twice else 1)

    yield
    dispatch.launchers.clear()
    dispatch.rescues.clear()


@pytest.fixture
def choose(monkeypatch):
    def pick(chunk):
        chooser = Chooser(Candidate.of("chunked", {"chunk": chunk}) if chunk else Candidate("default"))
        dispatch.selectors[CPU] = chooser
        return chooser

    return pick


X, INDEX = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 2, 1])


def test_the_selected_candidate_runs_and_is_asked_for_once(choose):
    chooser = choose(2)
    for _ in range(3):
        assert torch.equal(kc.run("test_run", X, INDEX), X * INDEX[:, None])
    assert torch.equal(kc.run("test_run", X, INDEX, twice=True), 2 * X * INDEX[:, None])
    assert [str(problem) for problem in chooser.asked] == [
        f"test_run(rows=4, columns=2, float32, threads={torch.get_num_threads()})",
        f"test_run(rows=4, columns=2, float32, twice=True, threads={torch.get_num_threads()})",
    ]
    assert CALLS == [2, 2, 2, 2]


def test_another_shape_dtype_or_option_is_another_problem(choose):
    chooser = choose(2)
    kc.run("test_run", X, INDEX)
    kc.run("test_run", X.bfloat16(), INDEX)
    kc.run("test_run", X[:3], INDEX[:3])
    assert len(set(chooser.asked)) == 3


def test_what_a_drop_in_would_leave_to_torch_runs_the_default(choose, monkeypatch):
    chooser = choose(2)
    expected = X * INDEX[:, None]
    wide = torch.zeros(4, 4)
    wide[:, :2] = X
    assert torch.equal(kc.run("test_run", wide[:, :2], INDEX), expected)
    leaf = X.clone().requires_grad_()
    kc.run("test_run", leaf, INDEX).sum().backward()
    assert torch.equal(leaf.grad, INDEX[:, None].expand(4, 2).float())
    assert kc.run("test_run", X[:0], INDEX[:0]).shape == (0, 2)
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    assert torch.equal(kc.run("test_run", X, INDEX), expected)
    assert (chooser.asked, CALLS) == ([], [1, 1, 1, 1])


def test_a_candidate_that_fails_is_forgotten_and_the_default_runs(choose):
    chooser = choose(3)
    with pytest.warns(dispatch.LaunchWarning, match="no launch"):
        assert torch.equal(kc.run("test_run", X, INDEX), X * INDEX[:, None])
    assert len(chooser.forgotten) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kc.run("test_run", X, INDEX)
    assert CALLS == [3, 1, 1]


@pytest.mark.parametrize(
    ("tensors", "values", "message"),
    [
        ((X,), {}, "takes 2 tensors .x, index.; 1 were given"),
        ((X[0], INDEX), {}, "x has 1 dimensions; it must have 2"),
        ((X, INDEX[:3]), {}, r"index has the shape \(3,\), where rows is 4"),
        ((X, INDEX), {"rows": 5}, r"x has the shape \(4, 2\), where rows is 5"),
        ((X, INDEX.int()), {}, "index is torch.int32; it must be int64"),
        ((X.double(), INDEX), {}, "float64"),
        ((X, INDEX), {"thrice": True}, "thrice"),
    ],
)
def test_what_does_not_fit_is_refused(choose, tensors, values, message):
    choose(2)
    with pytest.raises(InvalidProblemError, match=message):
        kc.run("test_run", *tensors, **values)


def test_unknown_and_built_in_operations(choose):
    choose(2)
    with pytest.raises(UnknownNameError, match="test_run"):
        kc.run("test_ran", X)
    with pytest.raises(KernelcastError, match="built in"):
        kc.run("gemm", X, X)


def test_dimensions_that_no_shape_tells():
    kc.kernel(
        "test_run_heads",
        variant="v",
        tensors={"x": ("rows", lambda p: p["heads"] * p["width"])},
        dims=("heads", "width"),
    )(lambda x, heads: x * heads)
    described = problem_of(
        registry.operation("test_run_heads"), (torch.ones(2, 12),), {"heads": 3, "width": 4}
    )
    assert dict(described.dims) == {"rows": 2, "heads": 3, "width": 4}
    with pytest.raises(InvalidProblemError, match=r"shape \(2, 12\); it must be \(2, 15\)"):
        problem_of(registry.operation("test_run_heads"), (torch.ones(2, 12),), {"heads": 3, "width": 5})


@pytest.mark.slow
def test_a_verifying_selection_of_a_kernel_of_the_users_own(tmp_path: Path):
    kc.configure(cache=tmp_path / "cache", store=tmp_path / "store", models=tmp_path / "models")
    try:
        assert torch.equal(kc.run("test_run", X, INDEX), X * INDEX[:, None])
        chosen = dispatch.selector_for(CPU).select(problem_of(registry.operation("test_run"), (X, INDEX), {}))
    finally:
        kc.configure()
    # chunk=3 fails its check, and is no choice.
    assert chosen.candidate in (Candidate("default"), Candidate.of("chunked", {"chunk": 2}))
    assert chosen.source in ("verified", "cached")
