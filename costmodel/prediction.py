"""What a ranker says of a problem's candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kernelcast.kernels import CandidateTable, Device, Problem


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for the rows of one candidate table.

    Attributes:
        log_latency: natural logarithm of the latency in microseconds, float64.
        error_log: standard deviation of the error of a *difference* to another candidate of the problem, float64.
        covered: False where the model never saw such a candidate; those rank last.
    """

    log_latency: np.ndarray
    error_log: np.ndarray
    covered: np.ndarray

    @property
    def latency_us(self) -> np.ndarray:
        """Predicted latency in microseconds."""
        return np.exp(self.log_latency)

    def order(self) -> np.ndarray:
        """Row numbers, the fastest first; ties and rows that are not covered keep the table's order."""
        # What is predicted of a row that is not covered means nothing, not even beside another such row.
        return np.lexsort((np.where(self.covered, self.log_latency, 0.0), ~self.covered))


class Ranker(Protocol):
    """Anything that ranks candidates: the trees, the analytic baseline, a fixed order."""

    def predict(self, problem: Problem, table: CandidateTable, device: Device) -> Prediction:
        """Predict every candidate of a table. Lower is faster."""
        ...
