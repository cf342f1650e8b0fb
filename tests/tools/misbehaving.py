"""An operation whose variants do everything that a kernel should not; importing it registers it.

A measuring child imports it by its name, as it would a user's module.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import torch

from kernelcast.kernels import (
    Dim,
    Operation,
    Parameter,
    ProblemSchema,
    Tolerance,
    Variant,
    Work,
    register_operation,
    register_variant,
    registry,
)
from kernelcast.kernels.memory import empty

NAME = "test_misbehaving"

#: A folder in which variants leave marks, for what they do once over several processes.
MARKS = "KERNELCAST_TEST_MARKS"


class Doubling(Operation):
    """y = 2 x."""

    name = NAME
    doc = "2 x"
    schema = ProblemSchema(NAME, (Dim("n", "elements"),), ("float32",))

    def make_inputs(self, problem, *, seed, device):
        if problem["n"] == 13:
            os.abort()
        return (torch.randn(problem["n"], generator=torch.Generator().manual_seed(seed)).to(device),)

    def reference(self, problem, *inputs):
        return 2 * inputs[0].double()

    def tolerance(self, problem):
        return Tolerance(1e-3, 1e-6)

    def flops(self, problem):
        return float(problem["n"])

    def traffic_bytes(self, problem):
        return 8.0 * problem["n"]


class Good(Variant):
    """What the others are meant to be; slow enough for a clock."""

    name = "vendor"
    backend = "vendor"
    doc = "2 x"
    parameters = (Parameter("copy", (0, 1, 2), "of one"),)

    def work(self, problem, columns, device):
        return Work(1.0, 1.0, scratch_bytes=2.0**40 if self.name == "hungry" else 0.0)

    def build(self, problem, config):
        def run(x):
            time.sleep(0.0005)
            return 2 * x

        return run


def mark(name):
    """Leave a mark; returns whether it was there before."""
    path = Path(os.environ[MARKS]) / name
    before = path.exists()
    with path.open("a") as file:
        file.write("x")
    return before


class Bad(Variant):
    """Does what its config says, at the call that its config says (0: when it is built)."""

    name = "bad"
    backend = "user"
    doc = "2 x, or not"
    parameters = (
        Parameter(
            "deed",
            (
                "segfault", "abort", "hang", "memory", "bad_alloc", "exit", "raise", "wrong", "nan", "mutate", "killed",
                "killed_once", "wait", "poison",
            ),
            "what it does",
        ),
        Parameter("call", (0, 1, 4, 8, 40), "when"),
    )  # fmt: skip

    def work(self, problem, columns, device):
        return Work(1.0, 1.0)

    def build(self, problem, config):
        calls = [0]
        deed = config["deed"]
        if config["call"] == 0:
            do(deed, None)

        def run(x):
            time.sleep(0.0005)
            calls[0] += 1
            if config["call"] and calls[0] >= config["call"]:
                done = do(deed, x)
                if done is not None:
                    return done
            return 2 * x

        return run


class Hungry(Good):
    """States more scratch memory than there is."""

    name = "hungry"
    backend = "torch"
    parameters = ()


def do(deed, x):
    """Misbehave."""
    if deed == "segfault":
        ctypes.string_at(0)
    elif deed == "abort":
        os.abort()
    elif deed == "hang":
        while True:
            pass
    elif deed == "wait":
        mark("waiting")
        time.sleep(600)
    elif deed == "memory":
        torch.ones(2**31, device=x.device)
    elif deed == "bad_alloc":
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()
    elif deed == "exit":
        os._exit(0)
    elif deed == "raise":
        raise RuntimeError("refuses")
    elif deed == "wrong":
        return 3 * x
    elif deed == "nan":
        out = empty(x.shape, dtype=x.dtype, device=x.device)
        out[:-1] = 2 * x[:-1]
        return out
    elif deed == "mutate":
        x.mul_(2)
        return x
    elif deed == "killed" or (deed == "killed_once" and not mark("killed_once")):
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "poison":
        # An index outside fails an assertion on a GPU, after which this process cannot use it.
        return x[torch.full((x.shape[0],), 10**6, device=x.device)]
    return None


def register():
    """Put the operation into the catalogue."""
    register_operation(Doubling)
    for variant in (Good, Bad, Hungry):
        register_variant(NAME)(variant)


def forget():
    """Take it out again."""
    del registry._operations[NAME], registry._variants[NAME]


register()
