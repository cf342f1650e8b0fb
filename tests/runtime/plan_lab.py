"""An operation of two dimensions for tests of plans: what each variant takes, and what is forecast, are functions of sizes.

Test files load it by path, as there are no packages in tests.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import torch

from kernelcast.costmodel import Prediction
from kernelcast.datasets import timing
from kernelcast.datasets.rounds import UNDISTURBED
from kernelcast.kernels import (
    Dim,
    Operation,
    Option,
    ProblemSchema,
    Rule,
    Tolerance,
    Variant,
    Work,
    candidates,
    register_operation,
    register_variant,
    registry,
)
from kernelcast.kernels.detect import detect
from kernelcast.runtime import Ranking, Selector

NAME = "test_plan"
VARIANTS = ("vendor", "low", "high", "even", "odd")
HERE = detect("cpu")


class State:
    """What the variants take, what is forecast of them, and what was measured.

    Attributes:
        takes_us, forecast_us: by variant, functions of (n, m) in microseconds.
        legal: by variant, functions of (n, m); legal everywhere where there is none.
        error_log: of the forecast.
        failing: variants that raise when they run.
        measured: the problems that inputs were made for, once each, in order.
    """

    def __init__(self):
        self.reset()

    def reset(self):
        self.takes_us = dict.fromkeys(VARIANTS, lambda n, m: 200.0)
        self.takes_us["vendor"] = lambda n, m: 100.0
        self.forecast_us = None
        self.legal = {}
        self.error_log = 0.02
        self.failing = set()
        self.measured = []
        self.now_us = 0.0

    def forecast(self, name, n, m):
        return (self.forecast_us or self.takes_us)[name](n, m)


STATE = State()


class Clock:
    """Reads the time that the variants say they take."""

    cache = "warm"
    flush_bytes = 0
    disturbance = UNDISTURBED

    def sample_us(self, call, repeats):
        start = STATE.now_us
        for _ in range(repeats):
            call()
        return max((STATE.now_us - start) / repeats, 1e-3)

    def single_us(self, call):
        return self.sample_us(call, 1)

    def now_s(self):
        return STATE.now_us / 1e6


class Doubling(Operation):
    """y = 2 x."""

    name = NAME
    doc = "2 x"
    schema = ProblemSchema(
        NAME,
        (
            Dim("n", "rows", minimum=1),
            Dim("m", "columns", default=1, minimum=1),
            Dim("k", "no matter", default=1),
        ),
        ("float32", "float16"),
        (Option("layout", "none", "a", ("a", "b")),),
    )

    def make_inputs(self, problem, *, seed, device):
        if problem not in STATE.measured:
            STATE.measured.append(problem)
        return (torch.ones(1),)

    def reference(self, problem, *inputs):
        return 2 * inputs[0].double()

    def tolerance(self, problem):
        return Tolerance(1e-3, 1e-6)

    def flops(self, problem):
        return 1.0

    def traffic_bytes(self, problem):
        return 1.0


def _variant(title):
    class Fake(Variant):
        backend = "vendor" if title == "vendor" else "torch"
        doc = title
        rules = (
            Rule(
                "allowed",
                "a test forbids it",
                check=lambda problem, columns, device: (
                    title not in STATE.legal or bool(STATE.legal[title](problem["n"], problem["m"]))
                ),
            ),
        )

        def work(self, problem, columns, device):
            return Work(flops=1e10, traffic_bytes=1.0)

        def build(self, problem, config):
            def run(x):
                STATE.now_us += STATE.takes_us[title](problem["n"], problem["m"])
                if title in STATE.failing:
                    raise RuntimeError("cannot be run")
                return x * 2

            return run

    Fake.name = title
    return Fake


class Oracle(Selector):
    """A selector whose forecast is the state's. ``covered``: what it knows of; ``source``: what it says it is."""

    source = "predicted"
    covered = frozenset(VARIANTS)

    def rank(self, problem, *, whole=False):
        table = candidates(problem, self.device)
        logs = np.log([STATE.forecast(c.variant, problem["n"], problem["m"]) for c in table])
        covered = np.array([c.variant in self.covered for c in table])
        prediction = Prediction(logs, np.full(len(table), STATE.error_log), covered)
        return Ranking(table, prediction, self.source, "0001-3f2a9c1b", "ranked by a test")


@contextmanager
def installed():
    """The operation in the catalogue and its clock in place."""
    STATE.reset()
    before = timing.clock_for
    register_operation(Doubling)
    for title in VARIANTS:
        register_variant(NAME)(_variant(title))
    timing.clock_for = lambda device: Clock()
    try:
        yield
    finally:
        registry._operations.pop(NAME, None)
        registry._variants.pop(NAME, None)
        timing.clock_for = before


def oracle(tmp_path, **options):
    """A selector that keeps what it measures below a folder."""
    folders = {"models": tmp_path / "models", "cache": False, "store": tmp_path / "store"}
    return Oracle(HERE, **{**folders, **options})
