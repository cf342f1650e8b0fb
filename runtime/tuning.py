"""Mode ``tune``: a guided search through all candidates of one problem, within a time.

Each batch of :class:`kernelcast.costmodel.search.Search` races against the default and the fastest so far, so that what
drifts between batches falls on all alike; what the search is told is relative to that fastest one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernelcast.costmodel.search import PriorRecords, Search
from kernelcast.datasets.record import Measurement
from kernelcast.datasets.timing import TimingPlan, measure
from kernelcast.errors import SettingsError
from kernelcast.featurizer import FeatureSchema, Featurizer
from kernelcast.kernels import CandidateTable, Device, Problem, operation, operation_names
from kernelcast.runtime.compile_ahead import compile_ahead
from kernelcast.runtime.ranking import Ranking
from kernelcast.runtime.verify import Verdict, judged, warn_if_busy

#: New candidates of a batch; the default and the fastest so far race with them.
BATCH = 6

#: A search ends when so many batches in a row promised less than this, in log latency, and found nothing faster ...
PATIENCE, LEAST_GAIN = 4, 0.002
#: ... but not before so many candidates were measured: a model of few is sure of what it cannot know.
LEAST_MEASURED = 100

#: No race is given less time than this.
_LEAST_SECONDS = 0.1

#: Measures rows against one another within some seconds: a verdict on the first of them, or on all.
Race = Callable[[Sequence[int], float], Verdict]


@dataclass(frozen=True, eq=False)
class Tuned:
    """What a search found.

    Attributes:
        rows: those of the last race that had a winner, in the order that breaks ties: the default, the fastest before, others.
        verdict: of that race.
        measured: candidates that were measured, failures among them.
        failed: how many of them did not work.
        left: candidates that were not tried.
        ended: ``"space"`` (all were tried), ``"gain"`` (nothing was left that promised anything) or ``"budget"``.
    """

    rows: tuple[int, ...]
    verdict: Verdict
    measured: int
    failed: int
    left: int
    ended: str

    def note(self, budget_seconds: float) -> str:
        """What to add to the reason of a selection; empty if every candidate was tried."""
        if self.ended == "budget":
            return f" Incomplete: the budget of {budget_seconds:g} s ended with {self.left} not tried."
        if self.ended == "gain":
            return f" The search ended with {self.left} not tried, none of which promised more than {LEAST_GAIN:.1%}."
        return ""


def tune(
    problem: Problem,
    ranking: Ranking,
    device: Device,
    *,
    budget_seconds: float,
    plan: TimingPlan,
    workload: str = "",
    record: Callable[[Sequence[Measurement]], None] | None = None,
    prior: PriorRecords | None = None,
    batch: int = BATCH,
    seed: int = 0,
    on_batch: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Search the candidates of a ranking on the device that is here.

    Args:
        problem: what to compute.
        ranking: every candidate, with what is predicted of it; the search starts with the head of its order.
        device: this machine's.
        budget_seconds: for all of it, compiling included. What has begun to compile or to run is not interrupted; one
            candidate is always measured.
        plan: how much a race measures.
        workload: written into the records.
        record: given the measurements of each race.
        prior: records of these candidates from elsewhere, in place of the prediction.
        batch: new candidates of a race.
        seed: of the search.
        on_batch: told how many candidates were measured, and the row of the fastest, -1 where none has worked.

    Raises:
        SettingsError: the batch or the budget is not positive.
        KernelcastError: the problem's inputs or its reference cannot be made here.
    """

    def race(rows: Sequence[int], seconds: float) -> Verdict:
        trial = measure(
            problem,
            [ranking.table[row] for row in rows],
            device,
            plan=replace(plan, seconds=max(min(plan.seconds, seconds), _LEAST_SECONDS)),
            workload=workload,
            budget_seconds=max(seconds, 0.0),
        )
        if record is not None:
            record(trial.measurements)
        return judged(trial)

    def harmful(rows: Sequence[int], seconds: float) -> set[int]:
        found = compile_ahead(
            problem, [ranking.table[row] for row in rows], device, time_limit_s=max(seconds, 1.0)
        )
        return {row for row in rows if ranking.table[row] in found}

    search = Search(
        ranking.table,
        features_of(problem, ranking.table, device),
        default=ranking.default,
        prior=ranking.prediction if prior is None else prior,
        seed=seed,
        batch=batch,
    )
    tuned = run(
        search,
        race,
        default=ranking.default,
        rejected=ranking.rejected,
        harmful=harmful,
        budget_seconds=budget_seconds,
        on_batch=on_batch,
    )
    # What was busy in races before says nothing of the last, which decides.
    warn_if_busy(problem, tuned.verdict)
    return tuned


def run(
    search: Search,
    race: Race,
    *,
    budget_seconds: float,
    default: int | None = None,
    rejected: frozenset[int] = frozenset(),
    harmful: Callable[[Sequence[int], float], set[int]] = lambda rows, seconds: set(),
    on_batch: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Race what a search proposes until its space, its promise or the time is at an end.

    Args:
        search: nothing of it has been told.
        race: measures rows against one another.
        budget_seconds: no race begins after this long.
        default: races in every batch.
        rejected: rows that failed before: told as failures, and not measured.
        harmful: those of some rows that must not be launched, as compiling them ended a process or took too long.
        on_batch: see :func:`tune`.
        clock: seconds.

    Raises:
        SettingsError: the budget is not positive.
    """
    if not budget_seconds > 0:
        raise SettingsError(f"The budget is {budget_seconds!r} seconds; it must be positive.")
    deadline = clock() + budget_seconds
    search.tell(sorted(rejected), [math.nan] * len(rejected))
    level: dict[int, float] = {}
    final: tuple[tuple[int, ...], Verdict] | None = None
    measured = failed = waited = 0
    ended = "space"
    while new := search.propose():
        if final is not None and clock() >= deadline:
            ended = "budget"
            break
        bad = harmful(new, deadline - clock())
        search.tell(sorted(bad), [math.nan] * len(bad))
        measured, failed = measured + len(bad), failed + len(bad)
        champion = search.best
        old = [row for row in dict.fromkeys((default, champion)) if row is not None and row in level]
        rows = [*old, *(row for row in new if row not in bad)]
        if len(rows) == len(old):
            continue
        verdict = race(rows, deadline - clock())
        rows = rows[: len(verdict.trial.measurements)]
        values = levels(rows, verdict, level, champion)
        added = [row for row in rows if row not in old]
        search.tell(added, [values[row] for row in added])
        level |= {row: value for row, value in values.items() if row not in level and math.isfinite(value)}
        measured += len(added)
        failed += sum(math.isnan(values[row]) for row in added)
        if final is None or verdict.winner is not None:
            final = tuple(rows), verdict
        if on_batch is not None:
            on_batch(measured, -1 if search.best is None else search.best)
        promising = search.best != champion or not search.expected_gain < LEAST_GAIN
        waited = 0 if promising else waited + 1
        if waited >= PATIENCE and measured >= LEAST_MEASURED:
            ended = "gain"
            break
    if final is None:
        raise SettingsError(
            "Nothing could be measured: every candidate was rejected, or its compilation failed."
        )
    left = search.left
    return Tuned(*final, measured, failed, left, "space" if not left else ended)


def levels(
    rows: Sequence[int], verdict: Verdict, known: dict[int, float], champion: int | None
) -> dict[int, float]:
    """Log latencies of raced rows on the scale of the rows that are known: row -> value, NaN for a failure.

    The race is moved so that the fastest so far keeps its value, or else the default; the first race is as measured.
    """
    paired = verdict.trial.paired_log
    anchors = [row for row in ([champion] if champion is not None else []) + list(known) if row in rows]
    worked = [row for row in anchors if row in known and math.isfinite(paired[rows.index(row)])]
    if worked:
        shift = known[worked[0]] - float(paired[rows.index(worked[0])])
    elif np.isfinite(paired).any():
        first = int(np.nanargmin(paired))
        shift = math.log(verdict.trial.measurements[first].latency_us) - float(paired[first])
    else:
        shift = math.nan
    return {row: float(paired[place]) + shift for place, row in enumerate(rows)}


def features_of(problem: Problem, table: CandidateTable, device: Device) -> np.ndarray | None:
    """What the featurizer says of candidates beyond their parameters; None for an operation that states no work."""
    if problem.operation not in operation_names() or not len(table):
        return None
    if not operation(problem.operation).flops(problem) > 0:
        return None  # known from records alone
    featurizer = Featurizer(FeatureSchema.infer([problem], [table], with_work=True))
    kept = [
        place
        for place, name in enumerate(featurizer.names)
        if not name.startswith(("parameter_", "variant_"))
    ]
    return featurizer(problem, table, device)[:, kept]
