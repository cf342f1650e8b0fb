from __future__ import annotations

import pytest

from kernelcast.datasets.calibration import Calibration, calibrate
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
