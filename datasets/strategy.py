"""What to measure where not everything can be: a limit, and the strategies that need no model.

The strategy that learns from what it measures is :class:`kernelcast.training.active.Active`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernelcast.datasets.jobs import Job, Result, Strategy
from kernelcast.datasets.record import Measurement
from kernelcast.errors import SettingsError
from kernelcast.kernels import Candidate, Problem, operation, operation_names

#: Fewer candidates of a problem leave nothing to compare.
_LEAST = 2


@dataclass(frozen=True)
class Limit:
    """How many candidates may be measured, those that the store holds already included: a number, or a share of all.

    The known ones count, so that a collection that was ended goes on to the same end.

    Attributes:
        count: at most so many; None where a share is given.
        share: above 0, at most 1: of the candidates of all problems; None where a number is given.

    Raises:
        SettingsError: neither or both are given, or one is out of range.
    """

    count: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.count is None) == (self.share is None):
            raise SettingsError("A limit is either a number of measurements or a share of them.")
        if self.count is not None and self.count < 1:
            raise SettingsError(f"A limit of {self.count} measurements is not possible; take at least 1.")
        if self.share is not None and not 0 < self.share <= 1:
            raise SettingsError(f"A share of {self.share:.6g} is not possible; it is above 0 and at most 1.")

    @classmethod
    def parse(cls, text: str) -> Limit:
        """``"5000"`` or ``"25%"``.

        Raises:
            SettingsError: the text is neither, or out of range.
        """
        try:
            if text.endswith("%"):
                return cls(share=float(text[:-1]) / 100.0)
            return cls(count=int(text))
        except (ValueError, SettingsError) as error:
            raise SettingsError(
                f"{text!r} is no number of measurements: write a whole number, such as 5000, or a share above 0% and "
                "up to 100%, such as 25%."
            ) from error

    def of(self, candidates: int) -> int:
        """How many of so many candidates; a share is rounded down, but to at least one."""
        if self.count is not None:
            return min(self.count, candidates)
        assert self.share is not None
        # The small amount keeps a product such as 0.07 * 100 from falling below the whole number that it means.
        return min(candidates, max(1, math.floor(self.share * candidates + 1e-6)))


def default_of(operation_name: str) -> Candidate:
    """The candidate that a user has without kernelcast; ``vendor`` for an operation that is not in the catalogue."""
    return (
        operation(operation_name).default if operation_name in operation_names() else Candidate.of("vendor")
    )


class Limited(Strategy):
    """Another strategy, up to a limit: what it proposes beyond is not measured.

    Args:
        inner: the other strategy.
        limit: where to end.
    """

    def __init__(self, inner: Strategy, limit: Limit) -> None:
        self._inner, self._limit = inner, limit
        self.needs_known = inner.needs_known
        self._left = self._total = 0

    def start(
        self,
        problems: Sequence[Problem],
        tables: Sequence[Sequence[Candidate]],
        known: Mapping[tuple[Problem, Candidate], Measurement | None],
    ) -> None:
        self._inner.start(problems, tables, known)
        self._total = max(self._limit.of(sum(map(len, tables))), len(known))
        self._left = self._total - len(known)

    def propose(self) -> list[Job]:
        if not self._left:
            return []
        jobs = []
        for job in self._inner.propose():
            kept = job.candidates[: self._left]
            if kept:
                jobs.append(replace(job, candidates=kept))
                self._left -= len(kept)
        return jobs

    def tell(self, result: Result) -> None:
        self._inner.tell(result)

    @property
    def total(self) -> int:
        return min(self._total, self._inner.total)


class Random(Strategy):
    """A random share of the candidates of each problem, the default always among them; problems in random order.

    Every problem gets its share of the limit. Where the limit does not give each problem the default and another
    candidate to compare it with, fewer problems get these. Known candidates count for their problem.

    Args:
        limit: how much of all; everything, in random order, where left out.
        seed: decides, together with what there is.
    """

    def __init__(self, limit: Limit | None = None, *, seed: int = 0) -> None:
        self._limit, self._seed = limit or Limit(share=1.0), seed
        self._jobs: list[Job] = []
        self._total = 0

    def start(
        self,
        problems: Sequence[Problem],
        tables: Sequence[Sequence[Candidate]],
        known: Mapping[tuple[Problem, Candidate], Measurement | None],
    ) -> None:
        rng = np.random.default_rng(self._seed)
        sizes = np.array([len(table) for table in tables], dtype=np.int64)
        order = rng.permutation(len(sizes))
        shares = np.zeros(len(sizes), dtype=np.int64)
        shares[order] = _shares(sizes[order], self._limit.of(int(sizes.sum())))
        left = max(self._limit.of(int(sizes.sum())) - len(known), 0)
        self._total = len(known)
        for place in order.tolist():
            problem, table = problems[place], tables[place]
            # Drawn for every problem alike, whatever is known: an interrupted collection goes on with the same ones.
            drawn = [table[row] for row in rng.permutation(len(table)).tolist()]
            default = default_of(problem.operation)
            drawn.sort(key=lambda candidate, default=default: candidate != default)  # type: ignore[misc]
            held = {candidate for candidate in table if (problem, candidate) in known}
            wanted = [candidate for candidate in drawn if candidate not in held]
            missing = tuple(wanted[: min(max(int(shares[place]) - len(held), 0), left)])
            if missing:
                self._jobs.append(Job(problem, missing))
                self._total += len(missing)
                left -= len(missing)

    def propose(self) -> list[Job]:
        jobs, self._jobs = self._jobs, []
        return jobs

    def tell(self, result: Result) -> None:
        pass

    @property
    def total(self) -> int:
        return self._total


def _shares(sizes: np.ndarray, limit: int) -> np.ndarray:
    """How many candidates of each problem, ``limit`` in all: the first problems get enough to compare, then all alike."""
    least = np.minimum(sizes, _LEAST)
    least[np.cumsum(least) > limit] = 0
    least[:1] = np.maximum(least[:1], np.minimum(sizes[:1], min(limit, 1)))
    rest = np.where(least > 0, sizes - least, 0)
    room = int(rest.sum())
    spare = min(limit - int(least.sum()), room)
    # Whole numbers whose running sum never strays from the exact one by as much as one candidate.
    upto = np.cumsum(rest) * spare // max(room, 1)
    return least + np.diff(upto, prepend=0)
