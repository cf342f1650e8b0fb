"""Tuned kernels in processes of their own: real kernels under Triton's interpreter, the disk between two processes, and a model
that was trained on what was recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

import triton_host as host  # noqa: E402

import kernelcast as kc  # noqa: E402

KERNELS = '''
"""A kernel in every way that a tuner may be put around it; each is run, checked and counted."""

import json, os, sys, warnings
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton, triton.language as tl
import kernelcast as kc, kernelcast.triton

LATENCY_MS = {16: 3.0, 32: 1.0, 64: 2.0, 128: 4.0}
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=4) for block in LATENCY_MS]
launched, timed = [], []


def bench(call, quantiles=None):
    call()
    timed.append(launched[-1])
    return [LATENCY_MS[launched[-1]]] * 3


def body(x, out, n, BLOCK: tl.constexpr):
    """out += 2 x"""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(out + places, mask=places < n)
    tl.store(out + places, held + 2 * tl.load(x + places, mask=places < n), mask=places < n)


def grid(meta):
    launched.append(meta["BLOCK"])
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def run(tuner, n=100):
    """Whether the result has the bits of one launch, the config, how many were timed and launched."""
    launched.clear(), timed.clear()
    x, out = torch.randn(n), torch.randn(n)
    expected, before = out + 2 * x, x.clone()
    tuner[grid](x, out, n)
    right = bool(torch.equal(out, expected)) and bool(torch.equal(x, before))
    return right, tuner.best_config.kwargs["BLOCK"], len(timed), len(launched)


def tuned(decorator, fn=None, **options):
    return decorator(configs=CONFIGS, key=["n"], restore_value=["out"], do_bench=bench, **options)(fn or triton.jit(body))


ours = kc.triton.autotune
answers = {
    "triton": run(tuned(triton.autotune)),
    "tune": run(tuned(ours, mode="tune")),
    "again": run(tuned(ours)),
}
answers["other key"] = run(tuned(ours, top_k=2), n=40)
below = triton.heuristics({"n": lambda given: given["x"].numel()})(triton.jit(body))
tuner = ours(configs=CONFIGS, key=[], restore_value=["out"], do_bench=bench, top_k=2)(below)
launched.clear(), timed.clear()
x, out = torch.randn(70), torch.zeros(70)
tuner[grid](x, out)
answers["heuristics"] = bool(torch.equal(out, 2 * x)), tuner.best_config.kwargs["BLOCK"], len(timed), len(launched)
with kc.triton.record() as recording:
    answers["recorded"] = run(tuned(triton.autotune), n=30)
answers["records"] = recording.count
print(json.dumps(answers))
'''


def run(code, home, tmp_path, **more):
    script = tmp_path / "kernels.py"
    script.write_text(code)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("KERNELCAST_", "TRITON_"))
    }
    environment = {
        **kept,
        "KERNELCAST_HOME": str(home),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_interpreted_kernels_and_a_second_process(tmp_path):
    first, _ = run(KERNELS, tmp_path / "home", tmp_path)
    assert first == {
        "triton": [True, 32, 4, 5],
        "tune": [True, 32, 4, 5],
        "again": [True, 32, 0, 1],  # from the disk
        "other key": [True, 16, 2, 3],  # 16, the default, and 128, the furthest from it
        "heuristics": [True, 16, 2, 3],
        "recorded": [True, 32, 4, 5],
        "records": 4,
    }
    second, _ = run(KERNELS, tmp_path / "home", tmp_path)
    assert second["tune"] == second["again"] == [True, 32, 0, 1]
    assert second["other key"] == [True, 16, 0, 1]
    assert second["heuristics"] == [True, 16, 0, 1]
    broken = sorted((tmp_path / "home" / "cache" / "triton").glob("??/*.json"))
    assert len(broken) == 3
    for path in broken:
        path.write_bytes(path.read_bytes()[:-20])
    third, said = run(KERNELS, tmp_path / "home", tmp_path)
    assert third["tune"] == [True, 32, 4, 5]
    assert "broken and was ignored" in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cache").write_text("no folder")
    fourth, said = run(KERNELS, tmp_path / "other", tmp_path)
    assert fourth["tune"] == [True, 32, 4, 5]
    assert fourth["again"] == [True, 64, 3, 4]  # nothing is remembered: 16, 128 and 64 are timed
    assert "cannot be written" in said
    disabled, _ = run(KERNELS, tmp_path / "none", tmp_path, KERNELCAST_DISABLE="1")
    assert disabled["tune"] == disabled["again"] == [True, 32, 4, 5]
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_model_trained_on_what_was_recorded_ranks(tmp_path, monkeypatch):
    pytest.importorskip("xgboost")
    from kernelcast.datasets import Store
    from kernelcast.kernels.detect import detect
    from kernelcast.runtime.triton_perf import perf_model
    from kernelcast.training.data import load_problems
    from kernelcast.training.train import train

    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    for name in ("KERNELCAST_MODE", "KERNELCAST_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    kc.configure()
    blocks = (16, 32, 64, 128, 256, 512)

    def latency(launch):
        # The best block grows with n.
        return 1.0 + abs(launch["n"] - launch["BLOCK"]) / launch["n"]

    def tuned(**options):
        kernel = host.HostKernel(host.add)
        bench = host.Bench(kernel, latency)
        return kc.triton.autotune(configs=host.configs(*blocks), key=["n"], do_bench=bench, **options)(
            kernel
        ), bench

    def add(tuner, n):
        x, out = torch.randn(n), torch.empty(n)
        tuner[(1,)](x, x, out, n)
        return tuner.best_config.kwargs["BLOCK"]

    tuner, _ = tuned(mode="tune")
    lengths = [10 + 12 * step for step in range(44)]
    for n in lengths:
        add(tuner, n)
    device, name = detect("cpu"), "triton.triton_host.add"
    data = load_problems(Store(tmp_path / "store"), name, device=device)
    assert len(data) == len(lengths)
    result = train(data, device=device, models_dir=tmp_path / "models", tracking=False)
    assert result.promoted, result.reason
    kc.configure()  # reads the models anew

    tuner, bench = tuned(top_k=1)
    for n, best in ((65, 64), (251, 256), (500, 512), (35, 32)):
        assert add(tuner, n) == best
        assert tuner.ranked.by == "model"
        assert len(bench.timed) == 2 - (best == 16)
        bench.timed.clear()
    predicted, bench = tuned(mode="predict")
    assert (add(predicted, 253), bench.timed) == (256, [])

    # The same model behind Triton's own autotuner.
    kernel = host.HostKernel(host.add)
    bench = host.Bench(kernel, latency)
    configs = host.configs(*blocks)
    theirs = triton.autotune(
        configs=configs,
        key=["n"],
        prune_configs_by={"perf_model": perf_model(kernel, key=["n"], configs=configs), "top_k": 2},
        do_bench=bench,
    )(kernel)
    assert add(theirs, 130) == 128
    assert len(bench.timed) == 2
    kc.configure()


@pytest.mark.slow
def test_a_compiled_graph_holds_the_kernel_as_it_holds_tritons(tmp_path, monkeypatch):
    import torch.utils._triton

    # Without a GPU torch looks for no kernels of a user's in what it compiles.
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: True)
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    for name in ("KERNELCAST_MODE", "KERNELCAST_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    kc.configure()
    graphs = {}
    for decorator, timed in ((triton.autotune, 4), (kc.triton.autotune, 3)):
        kernel = host.HostKernel(host.add)
        bench = host.Bench(kernel, lambda launch: launch["BLOCK"])
        tuner = decorator(configs=host.configs(64, 16, 32, 128), key=["n"], do_bench=bench)(kernel)

        def doubled(x, tuner=tuner):
            out = torch.empty_like(x)
            tuner[(1,)](x, x, out, x.shape[0])
            return 2 * out

        def keep(graph, inputs, decorator=decorator):
            graphs[decorator] = [(node.op, str(node.target)) for node in graph.graph.nodes]
            return graph.forward

        torch._dynamo.reset()
        x = torch.randn(100)
        assert torch.equal(torch.compile(doubled, backend=keep, fullgraph=True)(x), 4 * x)
        assert len(bench.timed) == timed
        assert len(kernel.launches) == timed + 1
    torch._dynamo.reset()
    assert graphs[triton.autotune] == graphs[kc.triton.autotune]
    assert any("triton_kernel" in target for _, target in graphs[triton.autotune])
    kc.configure()


@pytest.mark.gpu
def test_a_compiled_kernel_on_a_gpu_is_tuned_and_launched_in_a_graph(tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    for name in ("KERNELCAST_MODE", "KERNELCAST_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    kc.configure()
    configs = [
        triton.Config({"BLOCK": block}, num_warps=warps) for block in (128, 512, 2048) for warps in (1, 4, 8)
    ]
    n = 1 << 20
    x, out = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    expected = out + x

    def grid(meta):
        return (triton.cdiv(meta["n"], meta["BLOCK"]),)

    def tuned(mode="verify"):
        return kc.triton.autotune(configs=configs, key=["n"], restore_value=["out"], mode=mode)(
            compiled_accumulate
        )

    cold = tuned("tune")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):  # a capture would fail if anything were timed in it
        tuned()[grid](x, out, n)
    torch.cuda.synchronize()
    assert not (tmp_path / "store").exists()
    out.copy_(expected - x)
    held = out.clone()
    cold[grid](x, out, n)
    assert torch.equal(out, held + x)
    assert len(cold.configs_timings) == len(configs)
    again = tuned()
    again[grid](x, out, n)
    assert torch.equal(out, held + x + x)
    assert again.best_config == cold.best_config
    kc.configure()


@triton.jit
def compiled_accumulate(x, out, n, BLOCK: triton.language.constexpr):
    places = triton.language.program_id(0) * BLOCK + triton.language.arange(0, BLOCK)
    held = triton.language.load(out + places, mask=places < n)
    triton.language.store(
        out + places, held + triton.language.load(x + places, mask=places < n), mask=places < n
    )
