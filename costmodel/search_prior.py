"""What is known of a table's candidates before a search: a model's prediction, or records from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernelcast.costmodel.prediction import Prediction
from kernelcast.costmodel.search_gp import Doubt, GaussianProcess, Scales
from kernelcast.errors import InvalidRecordError

#: Prior probability of a failure where nothing is known.
FAILURE_SHARE = 0.02
#: Spreads of log latencies below this are none.
LEAST_SPREAD = 1e-6
#: Records of another device that the first weights are fitted on: so many, the fastest third among them.
_RECORDS_FIT = 250
#: Steps of that fit.
_STEPS = 30
#: Standard deviation of what is left when records of another device are taken off, over that of the records.
_OTHER_DEVICE = 0.5


@dataclass(frozen=True, eq=False)
class PriorRecords:
    """What the candidates of a table took elsewhere: on other devices, or on another problem of the same operation.

    Attributes:
        log_latency: natural logarithm of the latency, float64 [sources, candidates]; NaN where it is not known. One source
            may be [candidates].
        failed: bool of the same shape: it was tried and did not work. None where nothing is known of failures.

    Raises:
        InvalidRecordError: the shapes differ, or a latency is infinite.
    """

    log_latency: np.ndarray
    failed: np.ndarray | None = None

    def __post_init__(self) -> None:
        latency = np.atleast_2d(np.asarray(self.log_latency, dtype=np.float64))
        failed = np.zeros(latency.shape, bool) if self.failed is None else np.atleast_2d(self.failed)
        if failed.shape != latency.shape or failed.dtype != bool:
            raise InvalidRecordError(
                f"Records of {latency.shape} and failures of {failed.shape} ({failed.dtype}); they must be of one shape, "
                "the failures flags."
            )
        if np.isinf(latency).any():
            raise InvalidRecordError(f"{int(np.isinf(latency).sum())} recorded latencies are infinite.")
        object.__setattr__(self, "log_latency", latency)
        object.__setattr__(self, "failed", failed)


class Known:
    """What is known of a table before its search.

    Attributes:
        values: of each source, in standard deviations from its mean, float64 [sources, candidates].
        mean: of the sources, float64 [candidates].
        scale: a standard deviation in log latency.
        doubt: standard deviation of what it does not tell, in such scales.
        failures: prior probability that a candidate fails, float64 [candidates].
        order: rows, those that may be fastest first.
    """

    def __init__(self, latency: np.ndarray, failed: np.ndarray, doubt_log: float | None) -> None:
        spread = np.array([np.nanstd(source) for source in latency])
        self._latency = latency
        centred = (latency - np.nanmean(latency, axis=1, keepdims=True)) / spread[:, None]
        # What a source does not know is slow to it: a failure, or a candidate that nobody thought of trying.
        self.values = np.where(np.isnan(centred), np.nanmax(centred, axis=1, keepdims=True), centred)
        self.mean = self.values.mean(axis=0)
        self.scale = float(spread.mean())
        self.doubt = _OTHER_DEVICE if doubt_log is None else max(doubt_log / self.scale, 0.1)
        self.failures = np.maximum(failed.mean(axis=0), FAILURE_SHARE)
        self.order = np.argsort(self.mean, kind="stable")
        self._records = doubt_log is None

    @classmethod
    def of(cls, prior: Prediction | PriorRecords | None, count: int) -> Known | None:
        """From what a search was given; None where that tells no candidate from another."""
        if prior is None:
            return None
        if isinstance(prior, PriorRecords):
            latency, failed, doubt = prior.log_latency, np.asarray(prior.failed), None
        else:
            latency = np.where(prior.covered, prior.log_latency, np.nan)[None]
            failed = np.zeros(latency.shape, dtype=bool)
            doubt = float(np.median(prior.error_log[prior.covered])) if prior.covered.any() else 0.0
        if latency.shape[1] != count:
            raise InvalidRecordError(f"The prior is of {latency.shape[1]} candidates; the table has {count}.")
        told = np.array(
            [np.isfinite(source).sum() > 1 and np.nanstd(source) > LEAST_SPREAD for source in latency]
        )
        return cls(latency[told], failed[told], doubt) if told.any() else None

    def weights(self, at: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Log weights of the axes: as they fit the records, where there are some."""
        even = Scales.even(at.shape[1])
        if not self._records:
            return even.log_weights
        found = []
        for source in self._latency:
            order = np.argsort(source, kind="stable")[: int(np.isfinite(source).sum())]
            head = order[: _RECORDS_FIT // 3]
            rest = order[len(head) :]
            rest = random.choice(rest, min(_RECORDS_FIT - len(head), len(rest)), replace=False)
            rows = np.concatenate([head, np.sort(rest)])
            spread = max(float(source[rows].std()), LEAST_SPREAD)
            process = GaussianProcess(
                at[rows], (source[rows] - source[rows].mean()) / spread, even, Doubt(), steps=_STEPS
            )
            found.append(process.scales.log_weights)
        return np.mean(found, axis=0)
