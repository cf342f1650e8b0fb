"""Triton kernels that run on the host, for tests of autotuning: real objects of Triton's, launches that can be counted, and
a benchmark that says what the test wants.

A kernel here is a ``JITFunction`` whose function is run as Python on CPU tensors instead of being compiled, so no GPU and no
interpreter is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


class HostKernel(JITFunction):
    """Runs its function on the host.

    Attributes:
        launches: the config and grid arguments of each launch.
        raising: called with each launch; may raise what a compiler or a driver would.
    """

    def __init__(self, fn: Callable[..., None], **options: Any) -> None:
        super().__init__(fn, **options)
        self.launches: list[dict[str, Any]] = []
        self.raising: Callable[[dict[str, Any]], None] = lambda launch: None

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if warmup:
            return
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        bound = inspect.signature(self.fn).bind(*args, **kwargs).arguments
        launch = {**options, **{name: bound[name] for name in bound if not hasattr(bound[name], "data_ptr")}}
        self.raising(launch)
        self.launches.append(launch)
        self.fn(**bound)


class Bench:
    """A ``do_bench`` that calls the kernel once and gives the latency in milliseconds that a function says of its launch."""

    def __init__(self, kernel: HostKernel, latency_ms: Callable[[dict[str, Any]], float]) -> None:
        self.kernel = kernel
        self.latency_ms = latency_ms
        self.timed: list[dict[str, Any]] = []

    def __call__(self, call: Callable[[], None], quantiles: Any = None) -> list[float]:
        call()
        launch = self.kernel.launches[-1]
        self.timed.append(launch)
        ms = float(self.latency_ms(launch))
        return [ms, 0.98 * ms, 1.05 * ms]


def out_of_resources() -> Exception:
    """What the driver raises for too much shared memory."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources(200_000, 100_000, "shared memory")


def add(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y, a block after another."""
    for start in range(0, n, BLOCK):
        end = min(start + BLOCK, n)
        out[start:end] = x[start:end] + y[start:end]


def accumulate(x, out, n, BLOCK: tl.constexpr):
    """out += x, in place."""
    out[:n] += x[:n]


def matmul(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c = a @ b."""
    c[:] = a @ b


def configs(*blocks: int, **options: Any) -> list[triton.Config]:
    """A config a block size."""
    return [triton.Config({"BLOCK": block}, **options) for block in blocks]
