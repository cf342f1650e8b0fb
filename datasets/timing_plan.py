"""How much a measurement takes: the limits of a race."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kernelcast.errors import InvalidRecordError


@dataclass(frozen=True)
class TimingPlan:
    """How much to measure.

    Attributes:
        rounds: rounds at most.
        least_rounds: rounds before a candidate may be raced out, unless it is hopeless.
        seconds: time for one problem's rounds, at most; at least one round is always completed.
        candidate_seconds: time given to one candidate, at most. Where ``settled_log`` is given the first gets three samples
            all the same, as far as ``seconds`` go and unless its call takes longer than an eighth of them.
        sample_us: length that a sample aims at, by repeating short calls.
        repeats: calls in a sample, at most.
        race_margin: a candidate this much slower than the best (as a log ratio), beyond noise, is raced out.
        hopeless: a candidate this many times slower than the best is raced out before ``least_rounds``: when two samples
            and the call timed before the race say so, or at once if it is so long that no interruption explains it. Where
            ``settled_log`` is given the first has three samples before, as above.
        settled_log: the race ends when each candidate that still runs is slower than the leader beyond two errors, or within
            this log ratio of it by two errors (``kernelcast.datasets.timing._settled`` has the details); 0 takes all rounds.
        seed: of the inputs and the order.
    """

    rounds: int = 20
    least_rounds: int = 4
    seconds: float = 10.0
    candidate_seconds: float = 3.0
    sample_us: float = 2000.0
    repeats: int = 20
    race_margin: float = 0.05
    hopeless: float = 3.0
    settled_log: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole = (self.rounds, self.least_rounds, self.repeats)
        positive = (self.seconds, self.candidate_seconds, self.sample_us)
        if (
            min(whole) < 1
            or not all(0 < value < math.inf for value in positive)
            or not self.race_margin >= 0
            or not 0 <= self.settled_log < math.inf
            or not self.hopeless > 1
        ):
            raise InvalidRecordError(
                f"A timing plan needs positive rounds, repeats and seconds, a race_margin of at least 0 and a hopeless "
                f"ratio above 1; this is {self}."
            )
