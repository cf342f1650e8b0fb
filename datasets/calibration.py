"""Whether this machine can be measured on now: one pair that is known to differ, and one of equals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernelcast.datasets.clocks import clock_for
from kernelcast.datasets.timing import TimingPlan, race
from kernelcast.kernels import Device

#: Noise of a comparison, as a standard error of log latency, beyond which measurements are not worth keeping.
MOST_NOISE = 0.1


@dataclass(frozen=True)
class Calibration:
    """What the timing protocol says of two pairs of matrix products.

    Attributes:
        twice: time of a product of twice the work over that of the single one; 2 is expected.
        equal: ratio of two equal products; 1 is expected.
        noise: standard error of the log of that ratio.
    """

    twice: float
    equal: float
    noise: float

    @property
    def ordered(self) -> bool:
        """Whether the pair that differs was ordered right, by a clear margin."""
        return self.twice > 1.35

    @property
    def tied(self) -> bool:
        """Whether the equal pair ties, with noise that is small enough to tell others apart."""
        return abs(math.log(self.equal)) < max(3.0 * self.noise, 0.03) and self.noise < MOST_NOISE

    @property
    def trustworthy(self) -> bool:
        """Whether measurements of this machine are worth keeping now."""
        return self.ordered and self.tied


def calibrate(device: Device, *, rounds: int = 30) -> Calibration:
    """Measure both pairs on this machine's device: about a second on a quiet one."""
    import torch

    target = "cuda" if device.kind == "gpu" else "cpu"
    size = 4096 if device.kind == "gpu" else 384
    a = torch.randn(size, size, device=target)
    tall = torch.randn(2 * size, size, device=target)
    plan = TimingPlan(rounds=rounds, least_rounds=rounds, hopeless=1e9, seconds=10.0, sample_us=5000.0)
    result = race(
        [lambda: torch.mm(a, a), lambda: torch.mm(tall, a), lambda: torch.mm(a, a)], clock_for(device), plan
    )
    logs, error = result.paired_log(), result.error_log()
    return Calibration(
        twice=math.exp(float(logs[1] - logs[0])),
        equal=math.exp(float(logs[2] - logs[0])),
        noise=float(math.hypot(error[0], error[2])),
    )
