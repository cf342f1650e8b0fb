"""Measuring, against candidates that misbehave."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
import torch
from cases import for_each

from kernelcast.datasets import surroundings
from kernelcast.datasets.timing import (
    PROTOCOL,
    TimingPlan,
    measure,
    tf32_allowed,
)
from kernelcast.errors import KernelcastError
from kernelcast.kernels import (
    Candidate,
    Dim,
    Operation,
    Problem,
    ProblemSchema,
    Tolerance,
    Variant,
    Work,
    register_operation,
    register_variant,
    registry,
)
from kernelcast.kernels.detect import detect
from kernelcast.kernels.memory import empty

HERE = detect("cpu")
QUICK = TimingPlan(rounds=3, seconds=0.5, sample_us=50.0)


@pytest.fixture(autouse=True, scope="module")
def _in_the_catalogue():
    """The operation below is there for this file's tests alone."""
    register_operation(Doubling)
    for variant in FAKES:
        register_variant(Doubling.name)(variant)
    yield
    del registry._operations[Doubling.name], registry._variants[Doubling.name]


class Doubling(Operation):
    """y = 2 x, of two inputs of which the second is not used."""

    name = "test_timing"
    doc = "2 x"
    schema = ProblemSchema("test_timing", (Dim("n", "elements"),), ("float32", "float16"))

    def make_inputs(self, problem, *, seed, device):
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, problem.dtype)
        return tuple(torch.randn(problem["n"], generator=generator).to(dtype) for _ in range(2))

    def reference(self, problem, *inputs):
        return 2 * inputs[0].double()

    def tolerance(self, problem):
        return Tolerance(1e-3, 1e-6)

    def flops(self, problem):
        return float(problem["n"])

    def traffic_bytes(self, problem):
        return 3.0 * problem["n"] * problem.element_bytes


FAKES: list[type[Variant]] = []


def fake(name, run):
    """A variant of the operation above that is one function of its inputs, made anew at each build."""

    class Fake(Variant):
        backend = "torch"
        doc = name

        def work(self, problem, columns, device):
            return Work(1.0, 1.0)

        def build(self, problem, config):
            return run()

    Fake.name = name
    FAKES.append(Fake)
    if Doubling.name in registry._operations:
        register_variant(Doubling.name)(Fake)
    return Candidate.of(name)


def half_written(x, y):
    out = empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[0] // 2
    out[:half] = 2 * x[:half]
    return out


def in_place(x, y):
    return x.mul_(2).clone()


def spoils_the_other(x, y):
    y.zero_()
    return 2 * x


def spoils_and_raises(x, y):
    x.zero_()
    raise RuntimeError("after the harm")


def raises(error):
    def run(x, y):
        raise error

    return run


def third_call_fails():
    count = iter(range(100))

    def run(x, y):
        if next(count) >= 2:
            raise RuntimeError("the third call")
        return 2 * x

    return run


def changes_threads(x, y):
    torch.set_num_threads(torch.get_num_threads() + 3)
    return 2 * x


class CompilationError(Exception):
    """As triton names its own."""


def build_fails():
    raise CompilationError("no such instruction")


VENDOR = fake("vendor", lambda: lambda x, y: 2 * x)
TWIN = fake("twin", lambda: lambda x, y: x + x)
MISTAKES = {
    "wrong_value": ("wrong_result", "differ from the reference", fake("wrong_value", lambda: lambda x, y: 3 * x)),
    "half": ("wrong_result", "are NaN", fake("half", lambda: half_written)),
    "wrong_dtype": ("wrong_result", "float64", fake("wrong_dtype", lambda: lambda x, y: 2 * x.double())),
    "wrong_shape": ("wrong_result", "shape", fake("wrong_shape", lambda: lambda x, y: 2 * x[:1])),
    "nothing": ("crash", "NoneType", fake("nothing", lambda: lambda x, y: None)),
    "in_place": ("wrong_result", "changed its inputs", fake("in_place", lambda: in_place)),
    "spoils": ("wrong_result", "changed its inputs", fake("spoils", lambda: spoils_the_other)),
    "spoils_and_raises": ("crash", "after the harm", fake("spoils_and_raises", lambda: spoils_and_raises)),
    "raises": ("crash", "RuntimeError: broken", fake("raises", lambda: raises(RuntimeError("broken")))),
    "memory": ("out_of_resources", "MemoryError", fake("memory", lambda: raises(MemoryError()))),
    "allocator": (
        "out_of_resources",
        "can't allocate",
        fake("allocator", lambda: raises(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))),
    ),
    "build": ("compile_error", "no such instruction", fake("build", build_fails)),
    "late": ("crash", "the third call", fake("late", third_call_fails)),
}  # fmt: skip
CHANGES_THREADS = fake("changes_threads", lambda: changes_threads)


def fake_problem(n=64, **values):
    from kernelcast.kernels import problem

    return problem("test_timing", n=n, **values)


@for_each("name", MISTAKES)
def test_a_mistake_is_an_outcome_and_the_others_go_on(name):
    outcome, detail, candidate = MISTAKES[name]
    trial = measure(fake_problem(), [VENDOR, candidate, TWIN], HERE, plan=QUICK, workload="w")
    first, mistaken, last = trial.measurements
    assert (first.outcome, last.outcome) == ("ok", "ok")
    assert len(first.samples_us) >= 1
    assert mistaken.outcome == outcome
    assert detail in mistaken.detail
    assert mistaken.samples_us == ()
    assert mistaken.candidate == candidate
    assert np.isnan(trial.paired_log[1])
    assert np.isnan(trial.error_log[1])
    assert np.isfinite(trial.paired_log[[0, 2]]).all()


def test_all_mistakes_at_once_harm_nobody():
    candidates = [VENDOR, *(candidate for _, _, candidate in MISTAKES.values()), TWIN]
    checked = []
    trial = measure(fake_problem(), candidates, HERE, plan=QUICK, on_candidate=checked.append)
    assert [m.outcome for m in trial.measurements] == ["ok", *(each[0] for each in MISTAKES.values()), "ok"]
    assert [m.candidate for m in trial.measurements] == candidates
    assert checked == list(range(1, len(candidates) + 1))


def test_nothing_works_and_nothing_to_measure():
    mistakes = [candidate for _, _, candidate in MISTAKES.values()]
    trial = measure(fake_problem(), mistakes, HERE, plan=QUICK)
    assert np.isnan(trial.paired_log).all()
    assert len(trial.measurements) == len(mistakes)
    trial = measure(fake_problem(), [], HERE, plan=QUICK)
    assert trial.measurements == ()
    assert trial.paired_log.shape == (0,)


def test_records_hold_what_was_measured_and_how():
    plan = TimingPlan(rounds=5, seconds=5.0, sample_us=50.0, seed=3)
    problem = fake_problem(threads=1)
    trial = measure(problem, [VENDOR, TWIN], HERE, plan=plan, workload="made up")
    for m in trial.measurements:
        assert m.problem == problem
        assert (m.device, m.device_fingerprint) == (HERE.name, HERE.fingerprint)
        assert m.workload == "made up"
        assert m.created_at > 1.7e9
        assert 1 <= len(m.samples_us) <= 5
        assert all(sample > 0 for sample in m.samples_us)
        assert (m.protocol.name, m.protocol.cache, m.protocol.dispatch) == (PROTOCOL, "warm", "eager")
        assert (m.protocol.flush_bytes, m.protocol.inputs, m.protocol.seed) == (0, "normal", 3)
        assert m.environment.source == "kernelcast"
        assert m.environment.torch == torch.__version__
        assert m.environment.runtime == "cpu"
        assert len(m.environment.variant_hash) == 16
    longest = max(trial.measurements, key=lambda m: len(m.samples_us))
    if len(longest.samples_us) > 1:
        assert longest.protocol.error_log > 0


def test_threads_are_put_back_even_if_a_candidate_changes_them():
    before = torch.get_num_threads()
    for problem in (fake_problem(), fake_problem(threads=before), fake_problem(threads=before + 1)):
        measure(problem, [CHANGES_THREADS], HERE, plan=TimingPlan(rounds=1, seconds=0.1))
        assert torch.get_num_threads() == before


def test_threads_are_set_for_the_problem():
    seen = []
    candidate = fake("thread_watcher", lambda: lambda x, y: (seen.append(torch.get_num_threads()), 2 * x)[1])
    other = torch.get_num_threads() + 1
    measure(fake_problem(threads=other), [candidate], HERE, plan=TimingPlan(rounds=1, seconds=0.1))
    assert set(seen) == {other}


def test_inputs_depend_on_the_seed_alone():
    seen = []
    candidate = fake("input_watcher", lambda: lambda x, y: (seen.append(x.clone()), 2 * x)[1])
    for seed in (1, 1, 2):
        measure(fake_problem(), [candidate], HERE, plan=TimingPlan(rounds=1, seconds=0.1, seed=seed))
    first, again, other = seen[0], seen[len(seen) // 3], seen[-1]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.5 < first.std() < 2.0


def test_what_does_not_fit_in_memory_is_refused_before_anything_is_allocated():
    with pytest.raises(KernelcastError, match=r"needs about .* GiB"):
        measure(fake_problem(n=2**38), [VENDOR], HERE, plan=QUICK)


def test_inputs_that_cannot_be_made_are_a_clear_error():
    class Unmakeable(Doubling):
        name = "test_timing_unmakeable"
        schema = ProblemSchema("test_timing_unmakeable", (Dim("n", "elements"),), ("float32",))

        def make_inputs(self, problem, *, seed, device):
            raise RuntimeError("no inputs today")

    register_operation(Unmakeable)
    try:
        with pytest.raises(KernelcastError, match="no inputs today"):
            measure(Problem("test_timing_unmakeable", (("n", 4),), "float32"), [], HERE, plan=QUICK)
    finally:
        del registry._operations[Unmakeable.name], registry._variants[Unmakeable.name]


def test_two_threads_take_turns():
    running, most = [], []
    lock = threading.Lock()

    def counted(x, y):
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.002)
        out = 2 * x
        with lock:
            running.pop()
        return out

    candidate = fake("counted", lambda: counted)
    threads = [
        threading.Thread(
            target=measure, args=(fake_problem(n=4096), [candidate], HERE), kwargs={"plan": QUICK}
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) >= 9


# --- torch's switches and memory ---


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_tf32_is_as_asked_inside_and_as_it_was_after(allowed, before):
    old = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(before)
    try:
        conv = torch.backends.cudnn.allow_tf32
        with surroundings.tf32(allowed):
            assert tf32_allowed("matmul") is allowed
            assert tf32_allowed("conv") is allowed
        assert torch.get_float32_matmul_precision() == before
        # The old switches are readable, as they would not be after a careless use of the new ones.
        assert torch.backends.cuda.matmul.allow_tf32 is (before != "highest")
        assert torch.backends.cudnn.allow_tf32 is conv
        assert tf32_allowed("matmul") is (before != "highest")
        assert tf32_allowed("conv") is conv
    finally:
        torch.set_float32_matmul_precision(old)


def test_tf32_for_who_uses_torchs_new_switches():
    # From here on torch refuses to read the old ones.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert tf32_allowed("matmul")
        with surroundings.tf32(False):
            assert not tf32_allowed("matmul")
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_tf32_is_put_back_after_an_error():
    before = tf32_allowed("matmul")
    with pytest.raises(ZeroDivisionError), surroundings.tf32(not before):
        raise ZeroDivisionError
    assert tf32_allowed("matmul") is before


def test_memory_estimate_covers_what_is_allocated():
    # Inputs of 2 x 4 bytes, their copies, the float64 reference and its input, and the comparison's temporaries.
    problem = fake_problem(n=1000)
    assert surroundings.measuring_bytes(problem) == 3000 * (2 * 4 + 24)


def test_memory_that_the_system_and_the_control_group_leave():
    assert surroundings._meminfo_bytes("MemTotal: 16 kB\nMemAvailable:   12 kB\n") == 12 * 1024
    assert surroundings._meminfo_bytes("") == math.inf
    assert surroundings._cgroup_bytes("1000", "700", "anon 5\ninactive_file 200\n") == 500.0
    assert surroundings._cgroup_bytes("max", "700", "") == math.inf
    assert surroundings._cgroup_bytes("", "", "") == math.inf
    assert 0 < surroundings.available_bytes("cpu") < 2**50
