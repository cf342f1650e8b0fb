"""Timing of calls of the host: all in one process, in shuffled rounds, beside a fixed loop that stands for the machine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: Name of the fixed loop among the calls, and of its twin, which shows the noise.
REFERENCE = "reference loop"
REFERENCE_AGAIN = "reference loop, again"

_SAMPLE_SECONDS = 0.005
_MOST_REPEATS = 20_000


def reference_loop() -> int:
    """Always the same work of the interpreter: a few milliseconds. Times in its units compare between machines."""
    total = 0
    for i in range(50_000):
        total += i * i & 7
    return total


def rounds(calls: Mapping[str, Callable[[], Any]], count: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Samples of each call in microseconds: float64 [count], one a round, in the order of the rounds.

    A sample is the mean of as many calls as fill some milliseconds; one call before them is dropped. The reference loop
    and its twin run in every round beside the calls.
    """
    every = {**calls, REFERENCE: reference_loop, REFERENCE_AGAIN: reference_loop}
    repeats = {name: _repeats(call) for name, call in every.items()}
    samples = {name: np.empty(count) for name in every}
    order = list(every)
    shuffle = random.Random(seed)
    for number in range(count):
        shuffle.shuffle(order)
        for name in order:
            call, times = every[name], repeats[name]
            call()
            began = time.perf_counter()
            for _ in range(times):
                call()
            samples[name][number] = (time.perf_counter() - began) * 1e6 / times
    return samples


def summarise(samples: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """For each call: ``us`` (median), ``spread`` (interquartile range over the median) and ``loops`` (the median over
    rounds of its ratio to the reference loop).
    """
    loop = samples[REFERENCE]
    found = {}
    for name, values in samples.items():
        low, middle, high = np.percentile(values, [25, 50, 75])
        found[name] = {
            "us": float(middle),
            "spread": float((high - low) / middle),
            "loops": float(np.median(values / loop)),
        }
    return found


def noise_note(figures: Mapping[str, Mapping[str, float]], count: int) -> str:
    """One sentence on how far these figures can be trusted."""
    again = figures[REFERENCE_AGAIN]
    return (
        f"Medians of {count} interleaved rounds, one thread. The reference loop took {figures[REFERENCE]['us']:,.0f} us "
        f"(interquartile range {figures[REFERENCE]['spread']:.1%}); beside itself its ratio was {again['loops']:.3f}."
    )


def _repeats(call: Callable[[], Any]) -> int:
    call()
    began = time.perf_counter()
    call()
    once = max(time.perf_counter() - began, 1e-7)
    return int(np.clip(_SAMPLE_SECONDS / once, 1, _MOST_REPEATS))
