"""Search in a large space: measure, fit, propose, repeat, with or without anything known before.

What is known is a Gaussian process over the coordinates of the candidates (:mod:`kernelcast.costmodel.search_gp`,
:mod:`kernelcast.costmodel.search_space`), refitted after each batch. A batch is chosen one by one; after each choice the
process counts on its expected result, so that a batch does not ask the same thing several times:

* every fourth by the lower confidence bound, which looks where little is known;
* every fourth by expected improvement everywhere;
* the other half by expected improvement among the candidates that differ from the fastest in one parameter, or in one or
  two: the best of a rough space often lies a step beside a good one, where a process sees little.

Failures are learnt as well, by a process of their own: the probability that a candidate works multiplies what it promises.

What is known before (a model's prediction, or the records of another device) is the mean that the process starts from and an
axis of its own. Records also tell which parameters matter, as the process's weights are fitted on them first.

That Gaussian processes find good configs of kernels in fewer measurements than other searches: Willemsen, van Nieuwpoort
and van Werkhoven, Bayesian Optimization for auto-tuning GPU kernels (2021). Needs numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from kernelcast.costmodel.prediction import Prediction
from kernelcast.costmodel.search_gp import Doubt, GaussianProcess, Scales
from kernelcast.costmodel.search_prior import FAILURE_SHARE, LEAST_SPREAD, Known, PriorRecords
from kernelcast.costmodel.search_space import coordinates, levels
from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import CandidateTable

__all__ = ["PriorRecords", "Search", "expected_improvement", "normal_share"]

#: Candidates spread over the space that are measured before the first fit, where nothing is known before.
_START = 16
#: Where something is known: the head of its order, and candidates spread over the space, which tell how far it holds.
_START_HEAD, _START_KNOWN = 3, 3
#: Measurements that worked which a fit needs.
_LEAST_FIT = 3
#: Measurements that a fit takes at most: the fastest third of them, and others at random. Its cost grows with the third power.
_MOST_FIT = 360
#: Candidates looked at for one batch at most, besides neighbours of the best and the head of what is known before.
_MOST_POOL = 8000
_HEAD = 500
#: Steps of a fit from scratch, and of one that goes on from the last; from scratch again after so many times as many.
_STEPS, _STEPS_ON, _AGAIN = 30, 4, 1.3
#: What the places of a batch are for, in turn; see the module.
_TURNS = ("bound", "anywhere", "near", "beside")
#: Parameters in which a candidate may differ from the fastest to be near it.
_WITHIN = {"near": 2, "beside": 1}
#: Standard errors below the mean of the lower confidence bound.
_BOUND = 2.0
#: No candidate is given up altogether.
_MOST_FAILURE = 1.0 - 1e-6
#: Standard deviation, about 1, of the slope on what is known before.
_SLOPE = 0.6
#: The start is spread over so many candidates for each that it has.
_SPREAD_OF = 60
#: Weight of the axis that is what is known before.
_KNOWN_WEIGHT = 0.3


class Search:
    """Chooses which candidates of one problem to measure next.

    Call :meth:`propose`, measure what it names, :meth:`tell` what was found, and repeat. The same seed and the same
    answers give the same proposals.

    Args:
        table: the candidates.
        features: further numbers of each candidate, [candidates, features], such as the featurizer's; NaN is missing.
        default: row of the default, which the first batch begins with.
        prior: what is known before: a ranker's prediction for the table, or records from elsewhere.
        seed: of every random choice.
        batch: candidates in a proposal.

    Raises:
        InvalidRecordError: the prior or the features do not have a value a candidate, or there is no such default.
    """

    def __init__(
        self,
        table: CandidateTable,
        features: np.ndarray | None = None,
        *,
        default: int | None = None,
        prior: Prediction | PriorRecords | None = None,
        seed: int = 0,
        batch: int = 1,
    ) -> None:
        self._count = len(table)
        if default is not None and not 0 <= default < self._count:
            raise InvalidRecordError(f"The default is row {default}; the table has {self._count} candidates.")
        if batch < 1:
            raise InvalidRecordError(f"A batch has {batch} candidates; it must have at least 1.")
        self.batch = batch
        self._default, self._seed = default, seed
        self._log_latency = np.full(self._count, np.nan)
        self._told: list[int] = []
        self._is_told = np.zeros(self._count, dtype=bool)
        self._at = coordinates(table, features)
        self._levels = levels(table)
        self._scales: Scales | None = None
        self._failure_scales: Scales | None = None
        self._fitted_on = 0
        self._gain = math.inf
        self._known = Known.of(prior, self._count)
        self._axes = self._at.shape[1]
        if self._known is None:
            self._centre = Scales.even(self._axes)
        else:
            weights = self._known.weights(self._at, self._random(0))
            self._at = np.concatenate([self._at, self._known.values.T], axis=1)
            more = np.full(len(self._known.values), math.log(_KNOWN_WEIGHT))
            self._centre = Scales(np.append(weights, more), 2.0 * math.log(self._known.doubt))
        self._first = self._opening()

    @property
    def told(self) -> int:
        """Candidates with an answer."""
        return len(self._told)

    @property
    def left(self) -> int:
        """Candidates without an answer."""
        return self._count - len(self._told)

    @property
    def rows(self) -> list[int]:
        """The rows with an answer, in the order in which they were first told."""
        return list(self._told)

    @property
    def best(self) -> int | None:
        """Row of the fastest so far; None if nothing has worked."""
        return None if np.isnan(self._log_latency).all() else int(np.nanargmin(self._log_latency))

    @property
    def expected_gain(self) -> float:
        """Largest expected improvement, in log latency, that the last proposal saw; infinite before the first fit."""
        return self._gain

    def tell(self, rows: Iterable[int], log_latency: Iterable[float]) -> None:
        """Say what was measured. A row may be told again; the last counts.

        Args:
            rows: candidates.
            log_latency: natural logarithm of the latency of each, on one scale; NaN is a failure.

        Raises:
            InvalidRecordError: there is no such row, the lengths differ, or a latency is infinite.
        """
        rows, values = [int(row) for row in rows], [float(value) for value in log_latency]
        if len(rows) != len(values):
            raise InvalidRecordError(f"{len(rows)} rows and {len(values)} latencies; each row has one.")
        for row, value in zip(rows, values, strict=True):
            if not 0 <= row < self._count:
                raise InvalidRecordError(f"Row {row} of a table of {self._count} candidates.")
            if math.isinf(value):
                raise InvalidRecordError(f"The latency of row {row} is {value}; NaN stands for a failure.")
        for row, value in zip(rows, values, strict=True):
            if not self._is_told[row]:
                self._told.append(row)
                self._is_told[row] = True
            self._log_latency[row] = value

    def propose(self, count: int | None = None) -> list[int]:
        """Rows to measure next, none of which was told; fewer than asked for at the end of the space, and then none.

        Args:
            count: how many; a batch where None.
        """
        count = min(self.batch if count is None else count, self._count - len(self._told))
        chosen = [row for row in self._first if not self._is_told[row]][:count]
        if len(chosen) < count:
            chosen += self._guided(count - len(chosen), chosen)
        return chosen

    def _random(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, number])

    def _opening(self) -> list[int]:
        """What is measured before the first fit: the default, and the fastest known or candidates spread over the space."""
        rows = [] if self._default is None else [self._default]
        if self._known is not None:
            head = self._known.order[: max(self.batch, _START_HEAD)].tolist()
            rows = list(dict.fromkeys([*rows, *head]))
            sound = np.flatnonzero(self._known.failures < 0.5)
            count = min(len(rows) + _START_KNOWN, len(np.union1d(sound, rows)))
            return _spread(self._at, rows, count, self._random(0), sound)
        return _spread(self._at, rows, min(_START, self._count), self._random(0))

    def _guided(self, count: int, pending: Sequence[int]) -> list[int]:
        told = np.array(self._told, dtype=np.intp)
        worked = told[~np.isnan(self._log_latency[told])]
        rows = self._pool(pending)
        if len(worked) < _LEAST_FIT:
            # Far from what failed, or down the order of what is known before.
            if self._known is not None:
                return [row for row in self._known.order.tolist() if row in set(rows.tolist())][:count]
            begun = [*self._told, *pending]
            return _spread(self._at, begun, len(begun) + count, self._random(len(told)))[len(begun) :]
        process, target, scale = self._fit(worked)
        posterior = process.predict(self._at[rows])
        mean = posterior.mean + (0.0 if self._known is None else self._shift(rows))
        works = 1.0 - self._failure(rows, told)
        best = int(worked[np.argmin(self._log_latency[worked])])
        differs = (self._levels[rows] != self._levels[best]).sum(axis=1)
        open_ = np.ones(len(rows), dtype=bool)
        found: list[int] = []
        first = len(told) + len(pending)
        for place in range(first, first + count):
            error = np.sqrt(posterior.variance)
            gain = expected_improvement(target, mean, error) * works
            if place == first:
                self._gain = float(gain.max()) * scale
            turn = _TURNS[place % len(_TURNS)]
            allowed = open_ & (differs <= _WITHIN.get(turn, self._levels.shape[1]))
            allowed = allowed if allowed.any() else open_
            score = _BOUND * error - mean + np.log(works) if turn == "bound" else gain
            chosen = int(np.flatnonzero(allowed)[np.argmax(score[allowed])])
            found.append(int(rows[chosen]))
            open_[chosen] = False
            target = min(target, float(mean[chosen]))
            posterior.expect(chosen)
        return found

    def _fit(self, worked: np.ndarray) -> tuple[GaussianProcess, float, float]:
        """(the process, the fastest on its scale, log latency of a unit of that scale)."""
        if len(worked) > _MOST_FIT:
            order = worked[np.argsort(self._log_latency[worked], kind="stable")]
            head = order[: _MOST_FIT // 3]
            rest = self._random(len(self._told)).choice(
                order[len(head) :], _MOST_FIT - len(head), replace=False
            )
            worked = np.concatenate([head, np.sort(rest)])
        found = self._log_latency[worked]
        if self._known is None:
            # Plain log latencies: what parameters do multiplies, and a warp that spares the slow would hide it.
            scale, doubt = max(float(found.std()), LEAST_SPREAD), Doubt()
            values = (found - found.mean()) / scale
            target = float(values.min())
        else:
            scale, doubt = self._known.scale, Doubt(weights=0.5, amplitude=0.7)
            target = float(found.min()) / scale
            values = found / scale - self._known.mean[worked]
            self._slope = _ridge(self._known.values[:, worked].T, values, self._known.doubt / _SLOPE)
            values = values - self._known.values[:, worked].T @ self._slope
        afresh = self._scales is None or len(worked) > _AGAIN * self._fitted_on
        if afresh:
            self._fitted_on = len(worked)
        process = GaussianProcess(
            self._at[worked],
            values,
            self._centre,
            doubt,
            start=self._scales,
            steps=_STEPS if afresh else _STEPS_ON,
        )
        self._scales = process.scales
        return process, target, scale

    def _shift(self, rows: np.ndarray) -> np.ndarray:
        """What is known before of some rows, which the process does not hold."""
        assert self._known is not None
        return self._known.mean[rows] + self._known.values[:, rows].T @ self._slope

    def _failure(self, rows: np.ndarray, told: np.ndarray) -> np.ndarray:
        """The probability that each row fails, by a process of its own: failures depend on other parameters than latencies."""
        failed = np.isnan(self._log_latency[told])
        before = np.full(self._count, FAILURE_SHARE) if self._known is None else self._known.failures
        if not failed.any():
            return np.minimum(before[rows], _MOST_FAILURE)
        if len(told) > _MOST_FIT:
            some = np.sort(self._random(len(told)).choice(len(told), _MOST_FIT, replace=False))
            told, failed = told[some], failed[some]
        values = failed - before[told]
        spread = max(float(values.std()), LEAST_SPREAD)
        at = self._at[:, : self._axes]
        process = GaussianProcess(
            at[told],
            values / spread,
            Scales.even(self._axes),
            Doubt(),
            start=self._failure_scales,
            steps=_STEPS if self._failure_scales is None else _STEPS_ON,
        )
        self._failure_scales = process.scales
        return np.clip(before[rows] + spread * process.predict(at[rows]).mean, 0.0, _MOST_FAILURE)

    def _pool(self, pending: Sequence[int]) -> np.ndarray:
        """Rows that a proposal looks at, sorted."""
        open_ = ~self._is_told
        open_[list(pending)] = False
        rows = np.flatnonzero(open_)
        if len(rows) <= _MOST_POOL:
            return rows
        parts = [self._random(len(self._told)).choice(rows, _MOST_POOL, replace=False)]
        if self.best is not None:
            parts.append(np.flatnonzero(open_ & ((self._levels != self._levels[self.best]).sum(axis=1) == 1)))
        if self._known is not None:
            head = self._known.order[open_[self._known.order]]
            parts.append(head[:_HEAD])
        return np.unique(np.concatenate(parts))


def expected_improvement(best: float, mean: np.ndarray, error: np.ndarray) -> np.ndarray:
    """How far below ``best`` a normally distributed value falls on average, counting 0 where it does not.

    Jones, Schonlau and Welch, Efficient global optimization of expensive black-box functions (1998).
    """
    z = (best - mean) / error
    return error * (z * normal_share(z) + np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))


def normal_share(z: np.ndarray) -> np.ndarray:
    """Share of a normal distribution below ``z``, to 1e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    above = np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi) * series
    return np.where(z < 0, above, 1.0 - above)


def _ridge(values: np.ndarray, target: np.ndarray, penalty: float) -> np.ndarray:
    """Slopes of a target on some columns, both less their means, with a squared penalty."""
    values, target = values - values.mean(axis=0), target - target.mean()
    return np.linalg.solve(values.T @ values + penalty**2 * np.eye(values.shape[1]), values.T @ target)


def _spread(
    at: np.ndarray,
    begun: Sequence[int],
    count: int,
    random: np.random.Generator,
    among: np.ndarray | None = None,
) -> list[int]:
    """The rows begun with, and others of a random part of the table, each as far as can be from those before it."""
    chosen = list(begun) or [int(random.integers(len(at)))]
    some = random.permutation(len(at) if among is None else among)[: _SPREAD_OF * count]
    distance = np.full(len(some), np.inf)
    for row in chosen:
        distance = np.minimum(distance, ((at[some] - at[row]) ** 2).sum(axis=1))
    while len(chosen) < count:
        # Rows at no distance may still be others: what is chosen is told by itself.
        distance[np.isin(some, chosen)] = -1.0
        place = int(np.argmax(distance))
        chosen.append(int(some[place]))
        distance = np.minimum(distance, ((at[some] - at[some[place]]) ** 2).sum(axis=1))
    return chosen[:count]
