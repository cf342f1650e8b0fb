from __future__ import annotations

import math
import random

import pytest

from kernelcast.datasets import calibration
from kernelcast.datasets.calibration import Calibration, calibrate
from kernelcast.datasets.rounds import UNDISTURBED
from kernelcast.kernels.detect import detect


@pytest.mark.parametrize(
    ("found", "ordered", "tied"),
    [
        (Calibration(twice=2.0, equal=1.0, noise=0.01), True, True),
        (Calibration(twice=1.2, equal=1.0, noise=0.01), False, True),
        (Calibration(twice=2.0, equal=1.2, noise=0.01), True, False),
        (Calibration(twice=2.0, equal=1.0, noise=0.2), True, False),  # a tie only because nothing can be told
        (Calibration(twice=float("nan"), equal=1.0, noise=0.01), False, True),
    ],
)
def test_what_can_be_trusted(found, ordered, tied):
    assert (found.ordered, found.tied) == (ordered, tied)
    assert found.trustworthy == (ordered and tied)


def test_this_machine_gives_positive_figures():
    found = calibrate(detect("cpu"), rounds=3)
    assert found.twice > 0
    assert found.equal > 0
    assert found.noise >= 0


class RowsClock:
    """A call takes as long as its result has rows, times noise and a drift of half between rounds of three visits."""

    cache = "warm"
    flush_bytes = 0
    disturbance = UNDISTURBED

    def __init__(self, noise):
        self.noise = noise
        self.random = random.Random(0)
        self.visits = 0
        self.seconds = 0.0

    def single_us(self, call):
        rows = call().shape[0]
        self.visits += 1
        level = 1.0 + 0.5 * (self.visits // 3 % 2)
        latency = rows * level * math.exp(self.random.gauss(0.0, self.noise))
        self.seconds += latency / 1e6
        return latency

    def sample_us(self, call, repeats):
        return self.single_us(call)

    def now_s(self):
        return self.seconds


@pytest.mark.parametrize(("noise", "trusted"), [(0.02, True), (1.5, False)])
def test_of_a_pair_that_differs_and_an_equal_one(monkeypatch, noise, trusted):
    monkeypatch.setattr(calibration, "clock_for", lambda device: RowsClock(noise))
    found = calibrate(detect("cpu"))
    assert found.trustworthy == trusted
    if trusted:
        # The product of twice the work is the slower one, and the drift of half is not in the ratios.
        assert found.twice == pytest.approx(2.0, rel=0.05)
        assert found.equal == pytest.approx(1.0, rel=0.03)
