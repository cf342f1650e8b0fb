"""Drop-ins inside torch.compile: one operator of the graph, chosen when the graph runs; torch's own where gradients flow."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from dropin_lab import CPU, assert_same, choose, failing, fresh, nth_legal, randn  # noqa: F401

import kernelcast as kc
from kernelcast.kernels import candidates, operation
from kernelcast.runtime import dispatch, dropins_compiled
from kernelcast.runtime.dispatch import LaunchWarning

pytestmark = pytest.mark.usefixtures("fresh")

A, B = randn(6, 16), randn(16, 8, seed=1)
A3, B3 = randn(2, 6, 16), randn(2, 16, 8, seed=1)
INTEGERS = randn(16, 8, seed=2).mul(32).round().clamp(-127, 127).to(torch.int8)
SCALE = torch.full((8,), 0.03)
OFFS = torch.tensor([2, 6], dtype=torch.int32)
W, BIAS = 1 + 0.1 * randn(16, seed=3), 0.1 * randn(16, seed=4)


class Own:
    """torch's own under the drop-ins' names."""

    matmul = staticmethod(torch.matmul)
    bmm = staticmethod(torch.bmm)
    softmax = staticmethod(torch.softmax)
    layer_norm = staticmethod(F.layer_norm)
    rms_norm = staticmethod(F.rms_norm)

    @staticmethod
    def mixed_matmul(a, weight, scale):
        return a @ (weight.to(a.dtype) * scale)

    @staticmethod
    def grouped_matmul(a, b, offs, distribution="random"):
        return torch.cat([a[:2] @ b[0], a[2:] @ b[1]])


#: Name of the operator, the call, and the floating-point tensors that it takes.
CALLS = {
    "matmul": ("matmul", lambda o, a, b: o.matmul(a, b), (A, B)),
    "matmul of columns": ("matmul", lambda o, a, b: o.matmul(a.t(), b.t()), (randn(16, 6), randn(8, 16, seed=1))),
    "matmul of many rows": ("matmul", lambda o, a, b: o.matmul(a, b), (A3, B)),
    "matmul of many more rows": ("matmul", lambda o, a, b: o.matmul(a, b), (A3[None], B)),
    "matmul of rows with gaps": ("matmul", lambda o, a, b: o.matmul(a[:, :5], b), (A3, B)),
    "matmul of batches": ("matmul", lambda o, a, b: o.matmul(a, b), (A3, B3[:1])),
    "bmm": ("bmm", lambda o, a, b: o.bmm(a, b), (A3, B3)),
    "bmm of a view": ("bmm", lambda o, a, b: o.bmm(a.transpose(0, 1), b), (randn(6, 2, 16), B3)),
    "mixed_matmul": ("mixed_matmul", lambda o, a, s: o.mixed_matmul(a, INTEGERS, s), (A, SCALE)),
    "mixed_matmul of many rows": ("mixed_matmul", lambda o, a, s: o.mixed_matmul(a, INTEGERS, s), (A3, SCALE)),
    "grouped_matmul": (
        "grouped_matmul", lambda o, a, b: o.grouped_matmul(a, b, OFFS, distribution="skewed"), (A, B3)
    ),
    "grouped_matmul, unaligned": (
        "grouped_matmul", lambda o, a, b: o.grouped_matmul(a, b, OFFS), (randn(6, 7), randn(2, 7, 5, seed=1))
    ),
    "softmax": ("softmax", lambda o, a: o.softmax(a, 2), (A3,)),
    "layer_norm": ("layer_norm", lambda o, x, w, b: o.layer_norm(x, (16,), w, b), (A3, W, BIAS)),
    "layer_norm without vectors": ("layer_norm", lambda o, x: o.layer_norm(x, [6, 16], eps=1e-3), (A3,)),
    "rms_norm": ("rms_norm", lambda o, x, w: o.rms_norm(x, (16,), w), (A3, W)),
    "rms_norm with eps": ("rms_norm", lambda o, x: o.rms_norm(x, (16,), None, 0.5), (A3,)),
}  # fmt: skip


class Graphs:
    """A backend that runs AOTAutograd and keeps the calls of every graph."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return aot_eager(graph, inputs)

    @property
    def ours(self):
        """Our operators by graph."""
        return [[call for call in calls if call.startswith("kernelcast.")] for calls in self.calls]


def compiled(function, **options):
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(function, fullgraph=True, backend=graphs, **options), graphs


def second_choice(problem):
    """A candidate that is not the default."""
    table = candidates(problem, dispatch.detect("cpu"))
    return next(each for each in table if each != operation(problem.operation).default)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_holds_one_operator_that_chooses_when_it_runs(name):
    operator, call, tensors = CALLS[name]
    chooser = choose(second_choice)
    run, graphs = compiled(lambda *t: call(kc, *t) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = run(*tensors), run(*tensors)
    expected = call(Own, *tensors) + 1
    for out in (first, second):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert (out.is_contiguous(), out.requires_grad) == (True, False)
    assert graphs.ours == [[f"kernelcast.{operator}.default"]]
    # Where the layout is one that the catalogue lacks, torch's own runs inside the operator.
    assert len(chooser.asked) == ("gaps" not in name and "view" not in name)


# A product a group reads the offsets, which no whole graph can; see the test below for what has one.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if "grouped" not in name])
def test_where_a_gradient_is_needed_a_graph_holds_torchs_own(name):
    _, call, tensors = CALLS[name]
    chooser = choose(second_choice)
    ours, theirs = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    run, graphs = compiled(lambda *t: call(kc, *t) * 2)
    out, expected = run(*ours), call(Own, *theirs) * 2
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    upstream = randn(*out.shape, seed=9)
    out.backward(upstream)
    expected.backward(upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert graphs.ours == [[]]
    assert chooser.asked == []
    # The same function without gradients is another graph, and parameters are served.
    with torch.no_grad():
        torch.testing.assert_close(run(*ours), expected, rtol=1e-4, atol=1e-4)
    assert [len(each) for each in graphs.ours] == [0, 1]


@pytest.mark.slow
def test_a_grouped_product_with_gradients_is_torchs_in_a_graph():
    choose(second_choice)
    a, b = A.bfloat16().requires_grad_(), B3.bfloat16().requires_grad_()
    run, graphs = compiled(lambda a, b: kc.grouped_matmul(a, b, OFFS) * 1)
    out = run(a, b)
    torch.testing.assert_close(out, Own.grouped_matmul(a, b, OFFS), rtol=2e-2, atol=2e-2)
    out.backward(randn(6, 8, seed=9).bfloat16())
    assert a.grad.abs().sum() > 0
    assert b.grad.abs().sum() > 0
    assert any("grouped_mm" in each for each in graphs.calls[0])
    assert graphs.ours == [[]]


@pytest.mark.slow
def test_a_gradient_of_an_intermediate_result_is_torchs():
    choose(second_choice)
    weight = randn(16, 16, seed=5).requires_grad_()

    def model(o, x):
        return o.softmax(o.matmul(x @ weight, B), -1).square().sum()

    run, graphs = compiled(lambda x: model(kc, x))
    run(A).backward()
    found, weight.grad = weight.grad, None
    model(Own, A).backward()
    torch.testing.assert_close(found, weight.grad)
    assert graphs.ours == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["matmul", "layer_norm"])
def test_what_acts_on_a_graph_from_outside_makes_another_with_torchs_own(name, monkeypatch):
    _, call, tensors = CALLS[name]
    chooser = choose(second_choice)
    run, graphs = compiled(lambda *t: call(kc, *t))
    run(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = run(*tensors), call(Own, *tensors)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(run(*tensors), call(Own, *tensors))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [len(each) for each in graphs.ours] == [1, 0, 0]
    assert len(chooser.asked) == 1
    run, graphs = compiled(lambda *t: torch.vmap(lambda *u: call(kc, *u))(*t))
    stacked = [torch.stack([t, t + 1]) for t in tensors]
    torch.testing.assert_close(
        run(*stacked), torch.stack([call(Own, *t) for t in zip(*stacked, strict=True)])
    )
    assert graphs.ours == [[]]
    run, graphs = compiled(lambda *t: torch.func.grad(lambda *u: call(kc, *u).square().sum())(*t))
    torch.testing.assert_close(
        run(*tensors), torch.func.grad(lambda *u: call(Own, *u).square().sum())(*tensors)
    )
    assert graphs.ours == [[]]
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    run, graphs = compiled(lambda *t: call(kc, *t))
    torch.testing.assert_close(run(*tensors), call(Own, *tensors))
    assert graphs.ours == [[]]
    assert len(chooser.asked) == 1


@pytest.mark.slow
def test_the_kill_switch_works_on_a_graph_that_is_there(monkeypatch):
    chooser = choose(second_choice)
    run, graphs = compiled(kc.matmul)
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    run, graphs = compiled(kc.bmm)
    monkeypatch.setenv("KERNELCAST_DISABLE", "0")
    run, graphs = compiled(kc.matmul)
    run(A, B)
    assert len(graphs.ours[0]) == len(chooser.asked) == 1
    monkeypatch.setenv("KERNELCAST_DISABLE", "1")
    dispatch.launchers.clear()
    assert_same(run(A, B), torch.matmul(A, B))
    assert len(chooser.asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        lambda o: o.matmul(A.double(), B.double()),
        lambda o: o.matmul(A, B[:, 0]),
        lambda o: o.matmul(A3[None], B3[None]),
        lambda o: o.softmax(A3, 0),
        lambda o: o.softmax(A3.transpose(0, 1), -1),
        lambda o: o.layer_norm(A3.transpose(0, 1), (16,)),
        lambda o: o.layer_norm(A3, (16,), None, BIAS),
        lambda o: o.rms_norm(A3.double(), (16,)),
        lambda o: o.mixed_matmul(A, INTEGERS, SCALE[0]),
    ],
)  # fmt: skip
def test_what_the_catalogue_does_not_cover_is_torchs_own_in_a_graph(call):
    chooser = choose(second_choice)
    run, graphs = compiled(lambda: call(kc))
    assert_same(run(), call(Own))
    assert graphs.ours == [[]] or graphs.ours == []
    assert chooser.asked == []


@pytest.mark.slow
def test_dynamic_sizes_take_one_graph_and_choose_for_each_size():
    chooser = choose(second_choice)

    def model(o, x):
        x = o.layer_norm(x, (16,), W, BIAS)
        return o.softmax(o.matmul(x, B), -1)

    run, graphs = compiled(lambda x: model(kc, x), dynamic=True)
    traced = []
    for rows in (5, 9, 30):
        x = randn(2, rows, 16)
        torch.testing.assert_close(run(x), model(Own, x), rtol=1e-4, atol=1e-5)
        traced.append(len(graphs.calls))
    # Tracing may start anew when it learns which numbers are constant; sizes do not make it.
    assert traced[0] == traced[-1]
    assert len(graphs.ours[-1]) == 3
    assert [p["m"] for p in chooser.asked if p.operation == "gemm"] == [10, 18, 60]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_hold_torchs_own(strict):
    choose(second_choice)

    class Model(torch.nn.Module):
        def forward(self, a, b):
            return kc.softmax(kc.matmul(a, b), -1)

    with torch.no_grad():
        program = torch.export.export(Model(), (A, B), strict=strict)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called == ["aten.matmul.default", "aten.softmax.int"]


@pytest.mark.slow
def test_a_candidate_that_fails_inside_a_graph_is_rescued(failing):  # noqa: F811
    chooser = failing("gemm", 1)
    run, _ = compiled(kc.matmul)
    assert_same(run(A, B), torch.matmul(A, B))
    with pytest.warns(LaunchWarning, match="StopIteration"):
        assert_same(run(A, B), torch.matmul(A, B))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(run(A, B), torch.matmul(A, B))
    assert len(chooser.forgotten) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_warning_is_of_the_function_that_is_compiled(failing, backend):  # noqa: F811
    failing("gemm", 1)

    def model(a, b):
        a = torch.relu(a) + 1
        return kc.matmul(a, b) * 2

    torch._dynamo.reset()
    options = {"cpp_cache_precompile_headers": False} if backend == "inductor" else None
    run = torch.compile(model, fullgraph=True, backend=backend, options=options)
    run(A, B)
    with pytest.warns(LaunchWarning, match="StopIteration") as given:
        run(A, B)
    # A graph runs as a whole: to Python it is all in the function's first line.
    assert [(each.filename, each.lineno) for each in given] == [(__file__, model.__code__.co_firstlineno)]


def test_errors_come_while_tracing():
    choose(second_choice)
    run, _ = compiled(kc.matmul)
    with pytest.raises(RuntimeError, match=r"\[6, 16\]|6x16"):
        run(A, A)


def test_outside_of_graphs_nothing_of_it_runs(monkeypatch):
    monkeypatch.setattr(torch, "is_grad_enabled", lambda: pytest.fail("asked"))
    assert not dropins_compiled.traced(A, B)


def test_the_operators_say_what_they_do():
    """Schema, fake and real outputs, and registrations, by torch's own checks."""
    choose(second_choice)
    ops = torch.ops.kernelcast
    for op, arguments in (
        (ops.matmul, (A, B)), (ops.matmul, (A3, B)), (ops.matmul, (A3, B3[:1])), (ops.bmm, (A3, B3)),
        (ops.mixed_matmul, (A, INTEGERS, SCALE)), (ops.grouped_matmul, (A, B3, OFFS, "random")), (ops.softmax, (A3,)),
        (ops.layer_norm, (A3, [16], W, BIAS, 1e-5)), (ops.layer_norm, (A3, [6, 16], None, None, 1e-5)),
        (ops.rms_norm, (A3, [16], W, None)), (ops.rms_norm, (A3, [16], None, 1e-6)),
    ):  # fmt: skip
        torch.library.opcheck(
            op.default, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
        )


@pytest.mark.slow
def test_inductor_keeps_strides_and_results():
    """What comes before and after an operator is fused without it, and views reach it as they are."""
    chooser = choose(second_choice)

    def model(o, x, w, integers):
        x = o.layer_norm(torch.relu(x) + 1, (16,), W, BIAS)
        y = o.bmm(o.matmul(x, w.t()).transpose(1, 2), x)
        y = o.rms_norm(y * 2, (16,), None, 1e-6)
        return o.softmax(o.mixed_matmul(y, integers, SCALE), -1).transpose(1, 2)

    w = randn(16, 16, seed=7)
    torch._dynamo.reset()
    # A precompiled header pays for more kernels than these.
    options = {"cpp_cache_precompile_headers": False}
    run = torch.compile(lambda *t: model(kc, *t), fullgraph=True, options=options)
    arguments = (A3, w, INTEGERS)
    with torch.no_grad():
        out, expected = run(*arguments), model(Own, *arguments)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    assert out.stride() == expected.stride()
    posed = {p.operation: p for p in chooser.asked}
    assert set(posed) == {"layernorm", "gemm", "batched_gemm", "rmsnorm", "mixed_gemm", "softmax"}
    assert posed["gemm"]["layout"] == "nt"
    assert posed["batched_gemm"]["layout"] == "tn"
