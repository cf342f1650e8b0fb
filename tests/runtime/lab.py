"""An operation for tests of selection, on a clock of its own: each variant takes as long as the test says.

Loaded by ``conftest.py``, and imported by name in processes that tests start.
"""

from __future__ import annotations

import random
from collections import Counter

import torch

from kernelcast.datasets import timing
from kernelcast.datasets.rounds import UNDISTURBED
from kernelcast.kernels import (
    Candidate,
    Dim,
    Operation,
    Option,
    ProblemSchema,
    Rule,
    Tolerance,
    Variant,
    Work,
    problem,
    register_operation,
    register_variant,
    registry,
)

NAME = "test_runtime"
#: In the order of the roofline, the fastest first; the default comes third.
VARIANTS = ("quick", "slow", "vendor", "twin", "last")


class State:
    """What the variants do next, and what they have done.

    Attributes:
        latency_us: of one call, by variant.
        wrong, raising, unbuildable, illegal: names of variants that misbehave so.
        runs: calls by variant.
        now_us: the clock.
    """

    def __init__(self):
        self.reset()

    def reset(self):
        self.latency_us = {"quick": 50.0, "slow": 400.0, "vendor": 100.0, "twin": 100.0, "last": 20.0}
        self.wrong, self.raising, self.unbuildable, self.illegal = set(), set(), set(), set()
        self.inputs_fail = False
        self.runs = Counter()
        self.now_us = 0.0


STATE = State()


class Busy(dict):
    """Latencies, of which every call may be interrupted: with a probability, for so many times its own time."""

    def __init__(self, latency_us, *, probability, times, only=(), seed=0):
        super().__init__(latency_us)
        self.random = random.Random(seed)
        self.probability, self.times, self.only = probability, times, only

    def __getitem__(self, name):
        hit = (not self.only or name in self.only) and self.random.random() < self.probability
        return super().__getitem__(name) * (self.random.uniform(2.0, self.times) if hit else 1.0)


class Noisy(Busy):
    """The same, and 1% of noise."""

    def __getitem__(self, name):
        return super().__getitem__(name) * self.random.gauss(1.0, 0.01)


class Clock:
    """Reads the time that the variants say they take."""

    cache = "warm"
    flush_bytes = 0
    disturbance = UNDISTURBED

    def sample_us(self, call, repeats):
        call()
        start = STATE.now_us
        for _ in range(repeats):
            call()
        return max((STATE.now_us - start) / repeats, 1e-3)

    def single_us(self, call):
        start = STATE.now_us
        call()
        return max(STATE.now_us - start, 1e-3)

    def now_s(self):
        return STATE.now_us / 1e6


class Doubling(Operation):
    """y = 2 x."""

    name = NAME
    doc = "2 x"
    schema = ProblemSchema(
        NAME, (Dim("n", "elements"),), ("float32", "float16"), (Option("layout", "none", "a", ("a", "b")),)
    )

    def make_inputs(self, problem, *, seed, device):
        if STATE.inputs_fail:
            raise RuntimeError("no inputs today")
        values = torch.randn(problem["n"], generator=torch.Generator().manual_seed(seed))
        return (values.to(getattr(torch, problem.dtype)),)

    def reference(self, problem, *inputs):
        return 2 * inputs[0].double()

    def tolerance(self, problem):
        return Tolerance(1e-3, 1e-6)

    def flops(self, problem):
        return float(problem["n"])

    def traffic_bytes(self, problem):
        return 2.0 * problem["n"] * problem.element_bytes


def _variant(place, name):
    class Fake(Variant):
        backend = "vendor" if name == "vendor" else "torch"
        doc = name
        rules = (
            Rule(
                "allowed",
                "a test forbids it",
                check=lambda problem, columns, device: name not in STATE.illegal,
            ),
        )

        def work(self, problem, columns, device):
            return Work(flops=1e10 * (place + 1), traffic_bytes=1.0)

        def build(self, problem, config):
            if name in STATE.unbuildable:
                raise RuntimeError("cannot be built")

            def run(x):
                STATE.runs[name] += 1
                STATE.now_us += STATE.latency_us[name]
                if name in STATE.raising:
                    raise RuntimeError("cannot be run")
                return x * (3 if name in STATE.wrong else 2)

            return run

    Fake.name = name
    return Fake


def install():
    """Register the operation and put the clock in."""
    register_operation(Doubling)
    for place, name in enumerate(VARIANTS):
        register_variant(NAME)(_variant(place, name))
    timing.clock_for = lambda device: Clock()


def remove():
    """Take the operation out of the catalogue again, and put the real clock back."""
    registry._operations.pop(NAME, None)
    registry._variants.pop(NAME, None)
    timing.clock_for = _real_clock_for


_real_clock_for = timing.clock_for


def a_problem(n=16, **values):
    """A problem of the operation."""
    return problem(NAME, n=n, **values)


def candidate(name):
    """A candidate of the operation."""
    return Candidate.of(name)
