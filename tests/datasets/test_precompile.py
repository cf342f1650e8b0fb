"""What is compiled ahead of timing is what a launch looks up, and what cannot be compiled is an outcome."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from kernelcast.datasets import precompile as module
from kernelcast.datasets.isolation_job import JobState
from kernelcast.datasets.jobs import Job
from kernelcast.datasets.precompile import precompile
from kernelcast.datasets.timing import TimingPlan
from kernelcast.kernels import Candidate, candidates, problem
from kernelcast.kernels.compile import TARGETS, CompileFacts, candidate_spec
from kernelcast.kernels.devices import device as known_device

A100 = known_device("a100")
H100 = known_device("h100")


def softmax_job(rows=64, columns=256, count=4):
    here = problem("softmax", rows=rows, columns=columns, dtype="float16")
    table = [c for c in candidates(here, A100, subset="default") if c.variant.startswith("triton")]
    return Job(here, (Candidate.of("vendor"), *table[:count]))


def failing(monkeypatch, *results):
    """Compilations that end so, in the order of the requests."""
    calls = []

    def compile_many(requests, target, **options):
        calls.append((target, options))
        return zip(requests, results, strict=False)

    monkeypatch.setattr(module, "compile_many", compile_many)
    return calls


def test_what_takes_too_long_or_ends_its_compiler_is_not_launched(monkeypatch):
    job = softmax_job()
    calls = failing(
        monkeypatch,
        CompileFacts(outcome="timeout", detail="over 3 s"),
        CompileFacts(outcome="crash", detail="exit status -11: boom"),
        CompileFacts(outcome="crash", detail="exit status -9: "),  # by the system, for want of memory
        CompileFacts(outcome="compile_error", detail="CompilationError: no"),  # its launch says so too
    )
    told = precompile(job, A100, time_limit_s=3.0)
    ((target, options),) = calls
    assert target == "sm80"
    assert (options["time_limit_s"], options["fill"], options["budget_s"]) == (3.0, True, None)
    assert told["outcomes"] == {
        1: ["timeout", "compiling: over 3 s"],
        2: ["crash", "compiling: exit status -11: boom"],
    }
    state = JobState(job, A100, TimingPlan(), "w")
    state.take(told)
    assert state.todo == [0, 3, 4]
    records = state.result().measurements
    assert [(each.candidate, each.outcome) for each in records] == [
        (job.candidates[1], "timeout"),
        (job.candidates[2], "crash"),
    ]
    assert {each.device for each in records} == {A100.name}


def test_a_budget_leaves_time_for_checking_and_timing(monkeypatch):
    calls = failing(monkeypatch)
    job = softmax_job()
    assert precompile(Job(job.problem, job.candidates, 10.0), A100, time_limit_s=3.0) is None
    assert calls[0][1]["budget_s"] == 5.0


def test_few_kernels_and_unknown_architectures_are_left_to_their_launches(monkeypatch):
    calls = failing(monkeypatch)
    from dataclasses import replace

    assert precompile(softmax_job(count=2), A100, time_limit_s=3.0) is None
    assert precompile(softmax_job(), replace(A100, architecture="sm70"), time_limit_s=3.0) is None
    assert calls == []


def test_the_interpreter_leaves_all_to_the_launches(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert precompile(softmax_job(), A100, time_limit_s=3.0) is None


class _Driver:
    """As much of a GPU's driver as a launch asks before it has its machine code."""

    def __init__(self, target):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(*TARGETS[target])

    def get_current_device(self):
        return int(self.target.arch)  # a kernel keeps what it was compiled to by the device's number

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


@contextlib.contextmanager
def launching_on(target):
    """A launch compiles for this target, and stops before it needs the device."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver(target))
    try:
        yield
    finally:
        driver._active = before


def files(folder):
    return {path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [A100, H100], ids=lambda gpu: gpu.architecture)
def test_a_launch_finds_what_was_compiled_ahead(tmp_path, monkeypatch, gpu):
    """The launch of each kernel, by Triton's own way up to the device, compiles nothing any more."""
    triton = pytest.importorskip("triton")
    import torch

    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    softmax = softmax_job(rows=100, columns=300, count=2)
    gemm = problem("gemm", m=96, n=64, k=80, dtype="float16")
    tiled = [c for c in candidates(gemm, gpu, subset="default") if c.variant == "triton_tiled"][:2]
    jobs = [
        softmax,
        Job(gemm, tuple(tiled)),
    ]
    monkeypatch.setattr(module, "LEAST_KERNELS", 1)
    for job in jobs:
        assert precompile(job, gpu, time_limit_s=120.0, workers=1) is None
    compiled = files(folder)
    assert any(path.suffix == ".cubin" for path in compiled)

    found = []

    def heard(*, cache_hit, **_):
        found.append(cache_hit)

    monkeypatch.setattr(triton.knobs.compilation, "listener", heard)
    with launching_on(gpu.architecture):
        for job in jobs:
            for candidate in job.candidates:
                if candidate.variant == "vendor":
                    continue
                spec = candidate_spec(job.problem, candidate, "" if gpu is A100 else gpu.architecture)
                tensors = [
                    torch.empty(64, dtype=getattr(torch, pointer.dtype)) for pointer in spec.tensors.values()
                ]
                spec.kernel.warmup(
                    *tensors, *spec.integers.values(), *spec.constants.values(), grid=(1,), **spec.options
                )
    assert found == [True] * 4
    assert files(folder) == compiled
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
