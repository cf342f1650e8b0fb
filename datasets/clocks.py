"""Clocks: how long one call takes on a CPU or a GPU. :mod:`kernelcast.datasets.timing` says what is done with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from kernelcast.kernels import Device

#: No sample is shorter than this: a device's own clock may read the same before and after an empty call.
LEAST_US = 1e-3


class Clock(Protocol):
    """What the rounds need of a clock.

    Attributes:
        cache: ``"warm"`` or ``"cold"``: what a sample finds in the caches.
        flush_bytes: bytes written before each sample to empty them.
    """

    cache: str
    flush_bytes: int

    def sample_us(self, call: Callable[[], Any], repeats: int) -> float:
        """Mean time of ``repeats`` calls in microseconds, after one call that is not counted."""
        ...

    def single_us(self, call: Callable[[], Any]) -> float:
        """Time of one call in microseconds, nothing dropped."""
        ...

    def now_s(self) -> float:
        """Seconds since some moment: what budgets are counted in."""
        ...


class CpuClock:
    """Times calls that are done when they return."""

    cache = "warm"
    flush_bytes = 0

    def sample_us(self, call: Callable[[], Any], repeats: int) -> float:
        """Mean time of ``repeats`` calls after one that is not counted."""
        call()
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        return max((time.perf_counter_ns() - start) / 1000.0 / repeats, LEAST_US)

    def single_us(self, call: Callable[[], Any]) -> float:
        """Time of one call, nothing dropped."""
        start = time.perf_counter_ns()
        call()
        return max((time.perf_counter_ns() - start) / 1000.0, LEAST_US)

    def now_s(self) -> float:
        """The host's clock."""
        return time.perf_counter()


class GpuClock:
    """Times calls on the current GPU's own clock, with device events, after emptying its caches.

    Writing the buffer also keeps the device busy while the next call is being launched, so that the host's launch
    overhead does not show as a gap between the events.
    """

    cache = "cold"

    def __init__(self, device: Device) -> None:
        import torch

        self._torch = torch
        # Twice the last-level cache: the reported L2 alone leaves data behind on parts with a further level.
        self.flush_bytes = 2 * max(device.llc_bytes, device.l2_bytes, 32 * 2**20)
        self._buffer = torch.empty(self.flush_bytes // 4, dtype=torch.int32, device="cuda")

    def sample_us(self, call: Callable[[], Any], repeats: int) -> float:
        """Mean of ``repeats`` calls, each between two events and after a flush; one call before them is dropped."""
        call()
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            self._buffer.zero_()
            start.record()
            call()
            end.record()
        self._torch.cuda.synchronize()
        return max(sum(start.elapsed_time(end) for start, end in pairs) * 1000.0 / repeats, LEAST_US)

    def single_us(self, call: Callable[[], Any]) -> float:
        """Time of one call on the host's clock, waiting for the device: an upper bound, to plan by."""
        self._torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        self._torch.cuda.synchronize()
        return max((time.perf_counter_ns() - start) / 1000.0, LEAST_US)

    def now_s(self) -> float:
        """The host's clock."""
        return time.perf_counter()


def clock_for(device: Device) -> Clock:
    """The clock of a kind of device."""
    return GpuClock(device) if device.kind == "gpu" else CpuClock()
