"""The strategy that learns: it measures the problems and candidates of which the model knows least, where it matters.

A collection goes in rounds. The first takes problems that lie far from one another. Each later one fits a small model
on what is known, and takes what promises most by it:

* **New problems**, by the product of two numbers: how much better than the candidate that the model would choose
  another may turn out to be (the largest expected improvement over the problem's candidates), and how far the problem
  lies from every problem that was measured. The first alone takes many like problems, the second alone extremes.
* **More candidates** of problems that were measured in part, by their expected improvement over the best measured.

The expected improvement of a candidate over a latency b, both logarithms, where its error is normal with the standard
deviation s: ``s (z P(z) + p(z))`` with ``z = (b - mean) / s`` (Jones, Schonlau and Welch 1998, equation 15).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from kernelcast.costmodel import AnalyticModel
from kernelcast.datasets.jobs import Job, Result, Strategy
from kernelcast.datasets.record import Measurement
from kernelcast.datasets.strategy import Limit
from kernelcast.errors import MissingExtraError, ModelError
from kernelcast.featurizer import FeatureSchema, Featurizer
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, operation_names
from kernelcast.kernels.problem import OptionValue
from kernelcast.training.data import default_candidate

#: A model needs as many problems that have something to compare.
_LEAST_PROBLEMS = 8

#: Rows of features held at a time, over all problems of an operation.
_MOST_ROWS = 500_000

#: Distance to a problem of another dtype or layout, in octaves of one dimension.
_CATEGORY_OCTAVES = 2.0
#: Of one more power of two that divides a dimension, up to 16, where loads are as wide as they get.
_ALIGNMENT_OCTAVES = 0.75
_MOST_ALIGNED = 4
#: Of an octave of a numeric option, most of which repeat what the dimensions say.
_OPTION_OCTAVES = 0.5

#: Distance of a problem from nothing.
_FAR = 1e3

_erf = np.frompyfunc(math.erf, 1, 1)

#: Of a forecast, in log latency. The model spends itself on the near-best: what is far behind is forecast too near, and its error
#: is large for that reason. That is no promise.
_MOST_ERROR = 0.25

#: Added to the improvement that a problem promises: where none promises any, the distance decides.
_LEAST_IMPROVEMENT = 1e-6


@dataclass(frozen=True)
class ActivePlan:
    """How an :class:`Active` collection is cut into rounds. The unit of shares is what it may measure in all, or where
    that is more, ``per_problem`` candidates of every problem.

    Attributes:
        start_share: of the first round.
        round_share: of each later one.
        more_share: of a later round: goes to further candidates of problems measured in part, if there are any.
        per_problem: candidates of a new problem: the default, half of the rest by the forecast, the others at random.
        pool: candidates of a problem that are looked at, at most, where it has more: as above.
        trees: of each head of the small models.
        depth: of these.
    """

    start_share: float = 0.2
    round_share: float = 0.1
    more_share: float = 0.3
    per_problem: int = 32
    pool: int = 256
    trees: int = 60
    depth: int = 6

    def __post_init__(self) -> None:
        shares = (self.start_share, self.round_share)
        if (
            not all(0 < share <= 1 for share in shares)
            or not 0 <= self.more_share <= 1
            or min(self.per_problem, self.pool) < 2
            or min(self.trees, self.depth) < 1
        ):
            raise ModelError(
                f"Shares of an active plan are above 0 and at most 1, per_problem and pool at least 2, trees and depth at "
                f"least 1; this is {self}."
            )


class Active(Strategy):
    """Chooses by a model that is fitted anew in each round. The same data and seed give the same choice.

    Each operation has a model of its own, and of the limit a part in proportion to its candidates.

    Args:
        device: where the candidates run.
        limit: how much of all; everything, the most instructive first, where left out.
        seed: of the first problem, of the candidates at random, and of the models.
        plan: how to cut it into rounds.

    Raises:
        MissingExtraError: xgboost or scikit-learn is not installed.
    """

    needs_known = True

    def __init__(
        self,
        device: Device,
        *,
        limit: Limit | None = None,
        seed: int = 0,
        plan: ActivePlan | None = None,
    ) -> None:
        _require_model()
        self._device, self._seed = device, seed
        self._limit, self._plan = limit or Limit(share=1.0), plan or ActivePlan()
        self._learners: dict[str, _Learner] = {}

    def start(
        self,
        problems: Sequence[Problem],
        tables: Sequence[Sequence[Candidate]],
        known: Mapping[tuple[Problem, Candidate], Measurement | None],
    ) -> None:
        places: dict[str, list[int]] = {}
        for place, problem in enumerate(problems):
            if len(tables[place]):
                places.setdefault(problem.operation, []).append(place)
        everything = sum(map(len, tables))
        limit = self._limit.of(everything)
        before = 0
        for name, found in sorted(places.items()):
            upto = before + sum(len(tables[place]) for place in found)
            part = limit * upto // everything - limit * before // everything
            before = upto
            self._learners[name] = _Learner(
                [problems[place] for place in found],
                [tables[place] for place in found],
                known,
                self._device,
                part,
                self._seed,
                self._plan,
            )

    def propose(self) -> list[Job]:
        return [job for learner in self._learners.values() for job in learner.propose()]

    def tell(self, result: Result) -> None:
        self._learners[result.job.problem.operation].tell(result)

    @property
    def total(self) -> int:
        return sum(learner.total for learner in self._learners.values())


class _Pool:
    """The candidates that are looked at: one row of features each, those of one problem beside each other.

    Attributes:
        features: float32 [rows, features].
        owner: number of the problem of each row.
        bounds: where each problem's rows begin, and the end.
        places: place of each row's candidate in its problem's table.
        latency_log: what was measured; NaN where nothing was, or it failed.
        taken: whether it was measured or proposed.
    """

    def __init__(self, features: list[np.ndarray], places: list[np.ndarray], taken: list[dict[int, float]]):
        sizes = [len(each) for each in places]
        self.features = np.concatenate(features)
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        self.bounds = np.concatenate([[0], np.cumsum(sizes)])
        self.places = np.concatenate(places)
        self.latency_log = np.full(len(self.owner), np.nan)
        self.taken = np.zeros(len(self.owner), dtype=bool)
        self._row_of = [
            {place: row for row, place in enumerate(found.tolist(), start)}
            for found, start in zip(places, self.bounds[:-1].tolist(), strict=True)
        ]
        for owner, held in enumerate(taken):
            for place, latency_log in held.items():
                self.note(owner, place, latency_log)

    def rows(self, owner: int) -> np.ndarray:
        """The open rows of a problem."""
        rows = np.arange(self.bounds[owner], self.bounds[owner + 1])
        return rows[~self.taken[rows]]

    def note(self, owner: int, place: int, latency_log: float) -> None:
        """Keep what is known of a candidate."""
        row = self._row_of[owner][place]
        self.latency_log[row], self.taken[row] = latency_log, True


@dataclass(frozen=True, eq=False)
class _Forecast:
    """What a model says of every row of a pool: log latency up to a constant of the problem, and its error."""

    mean: np.ndarray
    error: np.ndarray


class _Learner:
    """The collection of one operation."""

    def __init__(
        self,
        problems: list[Problem],
        tables: list[Sequence[Candidate]],
        known: Mapping[tuple[Problem, Candidate], Measurement | None],
        device: Device,
        limit: int,
        seed: int,
        plan: ActivePlan,
    ) -> None:
        self._problems, self._tables, self._device = problems, tables, device
        self._seed, self._plan, self._rng = seed, plan, np.random.default_rng(seed)
        self._number = {problem: number for number, problem in enumerate(problems)}
        #: Of each problem, what was proposed or known: place in the table -> log latency, NaN where there is none.
        self._taken: list[dict[int, float]] = [{} for _ in problems]
        self._proposed: dict[tuple[Problem, Candidate], int] = {}
        for number, (problem, table) in enumerate(zip(problems, tables, strict=True)):
            for place, candidate in enumerate(table):
                if (problem, candidate) in known:
                    self._taken[number][place] = _latency_log(known[problem, candidate])
        self.total = max(limit, self._spent)
        self._unit = min(self.total, sum(min(plan.per_problem, len(table)) for table in tables))
        self._at = positions(problems)
        self._pool: _Pool | None = None

    @property
    def _spent(self) -> int:
        return sum(map(len, self._taken))

    def propose(self) -> list[Job]:
        left = self.total - self._spent
        if left <= 0:
            return []
        if self._pool is None or self._pool.taken.all():
            self._pool = self._filled()
        first = math.ceil(self._plan.start_share * self._unit)
        share = math.ceil(self._plan.round_share * self._unit)
        size = max(first - self._spent if self._spent < first else share, 2)
        # No round for a small rest.
        size = left if left < 1.5 * size else size
        forecast = self._forecast(self._pool) if self._spent >= first else None
        return self._jobs(self._chosen(self._pool, forecast, size))

    def tell(self, result: Result) -> None:
        number = self._number[result.job.problem]
        for measurement in result.measurements:
            place = self._proposed.pop((measurement.problem, measurement.candidate))
            self._taken[number][place] = _latency_log(measurement)
            if self._pool is not None:
                self._pool.note(number, place, self._taken[number][place])

    # What is looked at

    def _filled(self) -> _Pool:
        """A pool of what is known and of open candidates of every problem."""
        schema = FeatureSchema.infer(
            self._problems,
            [_table_of(table) for table in self._tables],
            with_work=self._problems[0].operation in operation_names(),
        )
        featurizer = Featurizer(schema)
        share = min(self._plan.pool, max(self._plan.per_problem, _MOST_ROWS // len(self._problems)))
        features, places = [], []
        for number, (problem, table) in enumerate(zip(self._problems, self._tables, strict=True)):
            found = self._looked_at(number, share)
            features.append(featurizer(problem, _table_of([table[place] for place in found]), self._device))
            places.append(np.array(found, dtype=np.intp))
        return _Pool(features, places, self._taken)

    def _looked_at(self, number: int, share: int) -> list[int]:
        """Places of the candidates of a problem that are known, and of up to ``share`` others; in order."""
        taken, table = self._taken[number], self._tables[number]
        rest = [place for place in range(len(table)) if place not in taken]
        if len(rest) > share:
            problem = self._problems[number]
            forecast = AnalyticModel().predict(problem, _table_of(table), self._device).log_latency
            rest = self._mixed(number, np.array(rest), forecast[rest], share).tolist()
        return sorted([*taken, *rest])

    def _mixed(self, number: int, places: np.ndarray, forecast: np.ndarray, count: int) -> np.ndarray:
        """Some of a problem's places: the default, half of the rest by the forecast, the others at random."""
        default = default_candidate(self._problems[number].operation)
        table = self._tables[number]
        first = [row for row, place in enumerate(places.tolist()) if table[place] == default]
        ordered = [row for row in np.argsort(forecast, kind="stable").tolist() if row not in first]
        chosen = [*first, *ordered[: math.ceil((count - len(first)) / 2)]]
        seen = set(chosen)
        rest = [row for row in self._rng.permutation(len(places)).tolist() if row not in seen]
        return places[(chosen + rest)[:count]]

    # What is chosen

    def _forecast(self, pool: _Pool) -> _Forecast | None:
        """What a model of everything known says of the pool; None where too little is known."""
        from kernelcast.costmodel.estimator import CostModel

        rows = np.flatnonzero(np.isfinite(pool.latency_log))
        compared = np.bincount(pool.owner[rows], minlength=len(self._problems)) >= 2
        if np.count_nonzero(compared) < _LEAST_PROBLEMS:
            return None
        model = CostModel(
            n_estimators=self._plan.trees,
            max_depth=self._plan.depth,
            learning_rate=0.15,
            error_folds=2,
            random_state=self._seed,
        ).fit(pool.features[rows], pool.latency_log[rows], groups=pool.owner[rows])
        error = np.exp(model.error_mean_ + model.forests_["error"].predict(pool.features))
        error = np.minimum(error, _MOST_ERROR)
        return _Forecast(model.predict(pool.features), error)

    def _chosen(self, pool: _Pool, forecast: _Forecast | None, size: int) -> list[int]:
        """Rows of the pool to measure next, those of one problem together or not."""
        opened = np.array([bool(taken) for taken in self._taken])
        open_rows = np.flatnonzero(~pool.taken)
        partial = open_rows[opened[pool.owner[open_rows]]]
        rows: list[int] = []
        if forecast is None:
            promise = np.ones(len(self._problems))
        else:
            promise = self._promise(pool, forecast)
            partial = partial[np.argsort(-self._improvement(pool, forecast)[partial], kind="stable")]
            rows += partial[: int(self._plan.more_share * size)].tolist()
        spare = partial[len(rows) :]
        distance = np.full(len(self._problems), _FAR)
        for number in np.flatnonzero(opened).tolist():
            distance = np.minimum(distance, self._distance(number))
        waiting = ~opened
        for number in np.flatnonzero(waiting).tolist():
            waiting[number] = bool(len(pool.rows(number)))
        if not opened.any() and waiting.any():
            # Where the first one lies decides where the others do.
            number = int(self._rng.choice(np.flatnonzero(waiting)))
        while len(rows) < size and waiting.any():
            if opened.any() or rows:
                number = int(np.argmax(np.where(waiting, (promise + _LEAST_IMPROVEMENT) * distance, -1.0)))
            rows += self._new(pool, forecast, number)[: size - len(rows)]
            waiting[number] = False
            distance = np.minimum(distance, self._distance(number))
        return rows + spare[: size - len(rows)].tolist()

    def _promise(self, pool: _Pool, forecast: _Forecast) -> np.ndarray:
        """Of each problem: the largest expected improvement over the candidate that the model would choose."""
        found = np.zeros(len(self._problems))
        for number, (start, end) in enumerate(pairwise(pool.bounds.tolist())):
            mean, error = forecast.mean[start:end], forecast.error[start:end]
            best = int(np.argmin(mean))
            improvement = expected_improvement(mean[best], mean, error)
            improvement[best] = 0.0
            found[number] = improvement.max()
        return found

    def _improvement(self, pool: _Pool, forecast: _Forecast) -> np.ndarray:
        """Of each row: its expected improvement over the best that was measured of its problem.

        The forecast is moved so that it agrees in the mean with what was measured. Where nothing worked, any time is an
        improvement.
        """
        worked = np.flatnonzero(np.isfinite(pool.latency_log))
        owners, count = pool.owner[worked], len(self._problems)
        number = np.bincount(owners, minlength=count)
        off = np.bincount(owners, pool.latency_log[worked] - forecast.mean[worked], minlength=count)
        best = np.full(count, np.inf)
        np.minimum.at(best, owners, pool.latency_log[worked])
        best = np.where(number > 0, best - off / np.maximum(number, 1), np.inf)[pool.owner]
        found = np.full(len(pool.owner), np.inf)
        some = np.isfinite(best)
        found[some] = expected_improvement(best[some], forecast.mean[some], forecast.error[some])
        return found

    def _new(self, pool: _Pool, forecast: _Forecast | None, number: int) -> list[int]:
        """The first rows to measure of a new problem."""
        rows = pool.rows(number)
        table = self._tables[number]
        places = pool.places[rows]
        if forecast is None:
            candidates = _table_of([table[place] for place in places])
            order = AnalyticModel().predict(self._problems[number], candidates, self._device).log_latency
        else:
            order = forecast.mean[rows]
        chosen = set(self._mixed(number, places, order, self._plan.per_problem).tolist())
        return [row for row, place in zip(rows.tolist(), places.tolist(), strict=True) if place in chosen]

    def _distance(self, number: int) -> np.ndarray:
        """Of each problem from one of them."""
        return np.sqrt(((self._at - self._at[number]) ** 2).sum(axis=1))

    def _jobs(self, rows: list[int]) -> list[Job]:
        """The chosen rows as jobs, one a problem, and noted as proposed."""
        assert self._pool is not None
        jobs: dict[int, list[Candidate]] = {}
        for row in rows:
            number, place = int(self._pool.owner[row]), int(self._pool.places[row])
            candidate = self._tables[number][place]
            jobs.setdefault(number, []).append(candidate)
            self._taken[number][place] = math.nan
            self._pool.note(number, place, math.nan)
            self._proposed[self._problems[number], candidate] = place
        return [Job(self._problems[number], tuple(found)) for number, found in jobs.items()]


def expected_improvement(best: np.ndarray | float, mean: np.ndarray, error: np.ndarray) -> np.ndarray:
    """How far below ``best`` a value falls on average, counting 0 where it does not: see the module."""
    z = (best - mean) / error
    below = 0.5 + 0.5 * _erf(z / math.sqrt(2.0)).astype(np.float64)
    return error * (z * below + np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))


def positions(problems: Sequence[Problem]) -> np.ndarray:
    """Where problems of one operation lie, float64 [problems, axes]; distances are in octaves of a dimension.

    An axis for the logarithm of each dimension, for the power of two that divides it, for each dtype, and for the
    options: logarithms of numbers, and an axis for each word or flag.
    """
    columns: dict[str, np.ndarray] = {}

    def axis(name: str) -> np.ndarray:
        return columns.setdefault(name, np.zeros(len(problems)))

    for row, problem in enumerate(problems):
        for name, value in problem.dims:
            axis(f"log {name}")[row] = math.log2(max(value, 1))
            power = (value & -value).bit_length() - 1 if value else _MOST_ALIGNED
            axis(f"alignment {name}")[row] = _ALIGNMENT_OCTAVES * min(power, _MOST_ALIGNED)
        words: dict[str, OptionValue] = {"dtype": problem.dtype, "allow_tf32": problem.allow_tf32}
        for name, option in (*problem.options, ("threads", problem.threads)):
            if isinstance(option, int) and not isinstance(option, bool):
                axis(f"option {name}")[row] = _OPTION_OCTAVES * math.log2(1 + abs(option))
            else:
                words[name] = option
        for name, word in words.items():
            axis(f"{name} is {word}")[row] = _CATEGORY_OCTAVES / math.sqrt(2.0)
    return np.stack([columns[name] for name in sorted(columns)], axis=1)


def _latency_log(measurement: Measurement | None) -> float:
    if measurement is None or measurement.outcome != "ok":
        return math.nan
    return math.log(measurement.latency_us)


def _table_of(candidates: Sequence[Candidate]) -> CandidateTable:
    """A table of candidates in the order given, in blocks of one variant and one set of parameters."""
    runs = groupby(candidates, key=lambda one: (one.variant, [name for name, _ in one.config]))
    return CandidateTable(block for _, run in runs for block in CandidateTable.of(run).blocks)


def _require_model() -> None:
    for library, module in (("scikit-learn", "sklearn"), ("xgboost", "xgboost")):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(library, "train", "The active strategy")
