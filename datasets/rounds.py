"""What the rounds of a race say: paired ratios, their medians and standard errors, the leader, and how far samples scatter.

Plain lists, not arrays: a race asks after each round, of few numbers, and an array's calls would take longer than a sample of
a short kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

#: Log samples of each candidate, [candidates][rounds]; NaN where it was not visited.
Columns = Sequence[Sequence[float]]

#: Samples of one candidate whose quartiles are further apart than this share of their median are those of a busy machine.
BUSY_SCATTER = 0.25

#: So are those of which more than this share, and two at least, took so many times their median: where few samples are
#: interrupted, but for long, the quartiles are close.
_BUSY_SHARE = 0.1
_BUSY_TIMES = 3.0

#: What a sign test calls chance.
_SIGN_CHANCE = 0.04

#: Standard errors that are beyond doubt.
DOUBT_ERRORS = 3.0


class Disturbance(NamedTuple):
    """What kept the calls of one sample waiting, as far as the system tells.

    Attributes:
        starved: whether they waited for a processor that other programs held.
        sleeps: how often a call made a thread of this process sleep.
    """

    starved: bool = False
    sleeps: float = 0.0


UNDISTURBED = Disturbance()

#: What a sleep adds to a call at most. The threads of a parallel region spin while they wait for one another, which adds nothing;
#: where several threads of a process have such regions, more of them than there are processors, they sleep, in each region again,
#: and 15 to 20 us go by until one is awake.
SLEEP_US = 50.0
#: Samples of which sleeps may be more than this share are those of a busy machine.
_SLEEPING_SHARE = 0.1


@dataclass(frozen=True)
class RaceResult:
    """What the rounds gave.

    Attributes:
        samples_us: float64 [rounds, candidates]; NaN where a candidate was not visited.
        beaten_log: candidate -> how much slower than the leader (as a log ratio) it was beyond doubt when it was raced
            out.
        disturbances: of each sample of the first candidate.
    """

    samples_us: np.ndarray
    beaten_log: Mapping[int, float] = field(default_factory=dict)
    disturbances: tuple[Disturbance, ...] = ()

    def paired_log(self) -> np.ndarray:
        """Log latency of each candidate less that of the leader, from rounds that both ran in: [candidates].

        The median over rounds of the paired log ratio: drift between rounds cancels. The leader has 0; a candidate
        without a round has NaN. One that was raced out has at least what was beyond doubt then: it may share only a
        round or two with who leads at the end, and an interruption of the leader in these would make it look fast.
        """
        paired = np.array([median(ratios) if ratios else np.nan for ratios in self._ratios()])
        for index, least in self.beaten_log.items():
            paired[index] = max(paired[index], least)
        return paired

    def paired_error(self) -> np.ndarray:
        """Standard error of each :meth:`paired_log`, from its spread over rounds or, where that is less, from the rounds that
        say the opposite (:func:`lower_error`): [candidates].

        0 for the leader; NaN for a candidate that ran in fewer than two rounds. One that was raced out has no more than
        leaves it slower beyond doubt: what raced it out was its fastest samples, not their spread.
        """
        if not self.samples_us.size:
            return np.zeros(0)
        errors = np.array([np.fmin(error_of(ratios), lower_error(ratios)) for ratios in self._ratios()])
        errors[leader(self.samples_us)] = 0.0
        paired = self.paired_log()
        for index in self.beaten_log:
            errors[index] = np.fmin(errors[index], paired[index] / DOUBT_ERRORS)
        return errors

    def error_log(self) -> np.ndarray:
        """Standard error of the log latency of each candidate, from its spread over rounds: [candidates].

        Drift between rounds is in it, as it is in a latency that is not compared with others of the same rounds.
        """
        return np.array([error_of(known(column)) for column in columns_of(self.samples_us)])

    def _ratios(self) -> list[list[float]]:
        """Log ratios to the leader, of each candidate, over the rounds that both ran in."""
        if not self.samples_us.size:
            return []
        columns = columns_of(self.samples_us)
        best = columns[leader_of(columns)]
        return [paired_ratios(column, best) for column in columns]


def columns_of(samples_us: np.ndarray) -> list[list[float]]:
    """Logarithms of samples [rounds, candidates], a list for each candidate."""
    columns: list[list[float]] = np.log(samples_us).T.tolist()
    return columns


def known(column: Sequence[float]) -> list[float]:
    """The numbers of a column that are no NaN."""
    return [value for value in column if math.isfinite(value)]


def samples_of(column: Sequence[float]) -> list[float]:
    """Samples of which a column holds the logarithms, in the same unit."""
    return [math.exp(log) for log in known(column)]


def paired_ratios(column: Sequence[float], best: Sequence[float]) -> list[float]:
    """Log ratios of a candidate to another over the rounds that both ran in."""
    # A NaN is no number equal to itself.
    return [own - other for own, other in zip(column, best, strict=True) if own == own and other == other]


def leader(samples_us: np.ndarray) -> int:
    """The fastest of the candidates that ran in the most rounds; the first of equals.

    Each sample is taken relative to the mean of its round over these candidates (which all ran in the same rounds, as
    who leaves does not come back), so that drift between rounds cancels.
    """
    return leader_of(columns_of(samples_us))


def leader_of(columns: Columns) -> int:
    """:func:`leader` of logarithms."""
    counts = [len(known(column)) for column in columns]
    longest = [place for place, count in enumerate(counts) if count == max(counts)]
    rounds = [
        row
        for row in zip(*(columns[place] for place in longest), strict=True)
        if all(map(math.isfinite, row))
    ]
    if not rounds:
        return longest[0]
    means = [sum(row) / len(row) for row in rounds]
    levels = [
        median([row[place] - mean for row, mean in zip(rounds, means, strict=True)])
        for place in range(len(longest))
    ]
    return longest[levels.index(min(levels))]


def median(values: Sequence[float]) -> float:
    """The middle of some numbers, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def error_of(logs: Sequence[float]) -> float:
    """Standard error of a median of logs, from the mean absolute deviation; NaN for fewer than two.

    sqrt(pi / 2) turns the mean absolute deviation of a normal distribution into its standard deviation, and is the
    standard error of a median over that of a mean. The last factor makes two errors cover 95% for few values too, as
    Student's quantiles do for a mean (fitted to simulated normal samples of 2 to 20). The median absolute deviation
    would not do: of three values it is the smaller gap, often next to nothing.
    """
    count = len(logs)
    if count < 2:
        return math.nan
    middle = median(logs)
    deviation = sum(abs(value - middle) for value in logs) / count * math.sqrt(count / (count - 1))
    return max(math.pi / 2 * deviation / math.sqrt(count) * (1 + 3.5 / (count - 1) ** 2), 1e-4)


def lower_error(logs: Sequence[float]) -> float:
    """Three quarters of the way from the median of logs down to the least one that a sign test leaves; NaN for less than five.

    Interruptions of some rounds, however long, hardly move a median, and make its :func:`error_of` large. A median of more
    than two of these errors is one of logs of which so many exceed a third of it as chance gives once in 25 times. (That they
    are positive would do for the test; the third keeps this error above the other one where nothing interrupts.)
    """
    count = len(logs)
    chance, opposed = 0.5**count, -1
    while chance <= _SIGN_CHANCE:
        opposed += 1
        chance += math.comb(count, opposed + 1) * 0.5**count
    return 0.75 * (median(logs) - sorted(logs)[opposed]) if opposed >= 0 else math.nan


def quantile(values: Sequence[float], share: float) -> float:
    """The number below which a share of some numbers lies, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def scatter_of(samples: Sequence[float]) -> float:
    """Distance of the quartiles of some samples, as a share of their median; NaN for fewer than three.

    A quiet machine gives a few percent. Other programs on the same cores give from a third to many times the median.
    """
    if len(samples) < 3:
        return math.nan
    return (quantile(samples, 0.75) - quantile(samples, 0.25)) / median(samples)


def interrupted(samples: Sequence[float]) -> int:
    """How many of some samples took more than three times their median."""
    most = _BUSY_TIMES * median(samples) if samples else math.inf
    return sum(value > most for value in samples)


def starving(disturbances: Sequence[Disturbance]) -> bool:
    """Whether more than half of some samples waited for a processor."""
    return sum(each.starved for each in disturbances) > len(disturbances) / 2


def sleeping(samples: Sequence[float], disturbances: Sequence[Disturbance]) -> bool:
    """Whether sleeps may be more than a tenth of what some samples took, in microseconds."""
    shares = [SLEEP_US * each.sleeps / us for us, each in zip(samples, disturbances, strict=False) if us > 0]
    return bool(shares) and median(shares) > _SLEEPING_SHARE


def undisturbed_us(samples: Sequence[float], disturbances: Sequence[Disturbance]) -> list[float]:
    """What of some samples, in microseconds, is sure to be the calls' own: those that did not wait for a processor, less what
    sleeps may have added. At least a nanosecond each."""
    if not disturbances:
        return list(samples)
    return [
        max(us - SLEEP_US * each.sleeps, 1e-3)
        for us, each in zip(samples, disturbances, strict=True)
        if not each.starved
    ]


def is_busy(samples: Sequence[float], disturbances: Sequence[Disturbance] = ()) -> bool:
    """Whether the samples of one candidate are those of a machine that other programs use too; False for less than three.

    Their quartiles lie further apart than :data:`BUSY_SCATTER`, or more than a tenth of them, and two at least, took more
    than three times their median. A single one is no habit of the machine. Or they were :func:`starving` or :func:`sleeping`.
    """
    return (
        starving(disturbances)
        or sleeping(samples, disturbances)
        or scatter_of(samples) > BUSY_SCATTER
        or interrupted(samples) >= max(2.0, math.nextafter(_BUSY_SHARE * len(samples), math.inf))
    )
