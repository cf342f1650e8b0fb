"""Clocks: how long one call takes on a CPU or a GPU. :mod:`kernelcast.datasets.timing` says what is done with them."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, Protocol

from kernelcast.datasets.rounds import UNDISTURBED, Disturbance
from kernelcast.kernels import Device

#: No sample is shorter than this: a device's own clock may read the same before and after an empty call.
LEAST_US = 1e-3

#: Less of the time than this on a processor, and something took it: the calls waited for other programs.
_STARVED_SHARE = 0.8


class Clock(Protocol):
    """What the rounds need of a clock.

    Attributes:
        cache: ``"warm"`` or ``"cold"``: what a sample finds in the caches.
        flush_bytes: bytes written before each sample to empty them.
        disturbance: what kept the calls of the last sample waiting.
    """

    cache: str
    flush_bytes: int
    disturbance: Disturbance

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
    """Times calls that are done when they return.

    A sample is starved by two signs: the calling thread had a processor for less than four fifths of it, and the system took
    one from a thread of this process meanwhile. A thread that sleeps until others of its process are done shows the first alone.
    """

    cache = "warm"
    flush_bytes = 0
    disturbance = UNDISTURBED

    def sample_us(self, call: Callable[[], Any], repeats: int) -> float:
        """Mean time of ``repeats`` calls after one that is not counted."""
        call()
        return self._time_us(call, repeats)

    def single_us(self, call: Callable[[], Any]) -> float:
        """Time of one call, nothing dropped."""
        return self._time_us(call, 1)

    def _time_us(self, call: Callable[[], Any], repeats: int) -> float:
        before, own = resource.getrusage(resource.RUSAGE_SELF), time.thread_time_ns()
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        spent = time.perf_counter_ns() - start
        own = time.thread_time_ns() - own
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.disturbance = Disturbance(
            starved=own < _STARVED_SHARE * spent and after.ru_nivcsw > before.ru_nivcsw,
            sleeps=(after.ru_nvcsw - before.ru_nvcsw) / repeats,
        )
        return max(spent / 1000.0 / repeats, LEAST_US)

    def now_s(self) -> float:
        """The host's clock."""
        return time.perf_counter()


class GpuClock:
    """Times calls on the current GPU's own clock, with device events, after emptying its caches.

    Writing the buffer also keeps the device busy while the next call is being launched, so that the host's launch
    overhead does not show as a gap between the events.
    """

    cache = "cold"
    disturbance = UNDISTURBED  # a device's own clock stands still for none of it

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
