"""What a ranker says of a problem's candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from kernelcast.costmodel.adaptive import Calibration
from kernelcast.kernels import CandidateTable, Device, Problem


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for the rows of one candidate table.

    Attributes:
        log_latency: natural logarithm of the latency in microseconds, float64.
        error_log: standard deviation of the error of a *difference* to another candidate of the problem, float64.
        covered: False where the model never saw such a candidate; those rank last.
        calibration: what came true of the regrets that the model expected; None where that is not known.
        judge: what :attr:`novel` asks; None where it is not known what is novel.
    """

    log_latency: np.ndarray
    error_log: np.ndarray
    covered: np.ndarray
    calibration: Calibration | None = None
    judge: Callable[[], str] | None = None

    @cached_property
    def novel(self) -> str:
        """What of the problem lies beyond the model's training, as a sentence; empty if nothing does. Found when asked."""
        return "" if self.judge is None else self.judge()

    @property
    def latency_us(self) -> np.ndarray:
        """Predicted latency in microseconds."""
        return np.exp(self.log_latency)

    def order(self) -> np.ndarray:
        """Row numbers, the fastest first; ties and rows that are not covered keep the table's order."""
        if self.covered.all():
            return np.argsort(self.log_latency, kind="stable")
        # What is predicted of a row that is not covered means nothing, not even beside another such row.
        return np.lexsort((np.where(self.covered, self.log_latency, 0.0), ~self.covered))


@dataclass(frozen=True, slots=True)
class Contribution:
    """How much one feature moves the prediction of one candidate.

    Attributes:
        feature: its name; empty for what every prediction starts from.
        unit: its unit.
        value: what it is of the candidate; NaN where it does not apply.
        contribution_log: what it adds to the predicted log latency; above 0 it slows down.
    """

    feature: str
    unit: str
    value: float
    contribution_log: float


class Ranker(Protocol):
    """Anything that ranks candidates: the trees, the analytic baseline, a fixed order."""

    def predict(self, problem: Problem, table: CandidateTable, device: Device) -> Prediction:
        """Predict every candidate of a table. Lower is faster."""
        ...
