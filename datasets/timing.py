"""The timing protocol: how candidates become measurements. One module; each step says which bias it removes.

For one problem:

1. **Inputs** are random normal tensors of the problem's layout, never zeros (zeros draw less power and clock higher)
   and never the caller's own (they stay untouched).
2. **Check before timing.** Each candidate runs alone, into outputs poisoned with NaN, and is compared with the
   reference: a candidate that skips work would win every race. One that changes its inputs is wrong too, and the next
   candidates get fresh ones.
3. **Interleaved rounds.** In each round every candidate is visited once, in a shuffled order. Drift of the machine (clock,
   temperature, neighbours) then falls on all alike, and no candidate profits from what ran before it.
4. **The first call of a visit is dropped**: it pays for caches that another candidate filled.
5. **A sample is the mean of several back-to-back calls** of a short kernel, so that the clock's own cost does not show.
6. **Cold or warm** is decided, not left to chance: on a GPU a buffer larger than the last-level cache is written before
   each sample; on a CPU candidates run warm, as the layers of a network do. The record says which.
7. **Racing.** A candidate that is slower than the best beyond doubt, by the paired ratios of the rounds, is not
   visited again. Its samples are kept.
8. **The garbage collector is off** while rounds run.
9. **One measurement at a time** in a process: two at once would share the cores, and torch's switches.

The result is every sample, their median, and a standard error of the log latency from the spread over rounds.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernelcast.datasets.bench import Bench
from kernelcast.datasets.clocks import Clock, CpuClock, GpuClock, clock_for
from kernelcast.datasets.observing import Facts, Observer
from kernelcast.datasets.record import Measurement, Protocol
from kernelcast.datasets.rounds import (
    BUSY_SCATTER,
    DOUBT_ERRORS,
    Columns,
    Disturbance,
    RaceResult,
    error_of,
    interrupted,
    is_busy,
    known,
    leader,
    leader_of,
    median,
    paired_ratios,
    quantile,
    samples_of,
    scatter_of,
    sleeping,
    starving,
    undisturbed_us,
)
from kernelcast.datasets.surroundings import (
    candidate_bytes,
    cpu_threads,
    tf32,
    tf32_allowed,
)
from kernelcast.datasets.timing_plan import TimingPlan
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem
from kernelcast.kernels.detect import torch_device

__all__ = [
    "BUSY_SCATTER",
    "PROTOCOL",
    "Clock",
    "CpuClock",
    "GpuClock",
    "RaceResult",
    "TimingPlan",
    "Trial",
    "clock_for",
    "interrupted",
    "is_busy",
    "leader",
    "measure",
    "median",
    "quantile",
    "race",
    "scatter_of",
    "sleeping",
    "starving",
    "tf32_allowed",
    "undisturbed_us",
]

#: Name and version of the procedure, kept in each record. Raised when a step changes what is measured.
PROTOCOL = "interleaved-rounds-1"

#: Of a problem's budget so much is kept for the rounds, or the plan's seconds where those are less.
_ROUNDS_SHARE = 0.3
_LEAST_SECONDS = 1e-3

#: Samples, the call timed before the race among them, that must say a candidate is hopeless; and what an interruption by
#: the system may add to one.
_WITNESSES = 3
_INTERRUPTION_US = 20_000.0

#: In a verification the first, which is what runs without us, gets as many samples as there must be witnesses, unless a call
#: takes longer than this share of the time for the rounds: a sample is two calls, so three of them take three quarters of it.
_FIRST_SHARE = 1 / 8

_measuring = threading.Lock()


def _after_fork() -> None:
    """A forked child has no thread that could release what another thread of its parent held."""
    global _measuring
    _measuring = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def race(
    calls: Sequence[Callable[[], Any]],
    clock: Clock,
    plan: TimingPlan,
    *,
    estimates_us: Sequence[float] | None = None,
    on_error: Callable[[int, Exception], None] | None = None,
    on_visit: Callable[[int], None] | None = None,
    on_round: Callable[[np.ndarray], None] | None = None,
) -> RaceResult:
    """Time calls against one another in shuffled, interleaved rounds.

    Args:
        calls: what to time; each must be ready to run (compiled, checked).
        clock: of the device that they run on.
        plan: how much to measure.
        estimates_us: a rough time of each call, to choose the repeats by; measured once where None.
        on_error: told of a call that raises, and what; that one leaves the race without any sample. Where None the
            error is passed on.
        on_visit: told of a call that is about to be timed.
        on_round: told the samples of each round when it is over: [calls], NaN where one was not visited.
    """
    count = len(calls)
    if not count:
        return RaceResult(np.full((0, 0), np.nan))
    running = set(range(count))
    failed: set[int] = set()
    started = clock.now_s()

    def attempt(index: int, visit: Callable[[], float]) -> float:
        try:
            return visit()
        except Exception as error:
            if on_error is None:
                raise
            on_error(index, error)
            running.discard(index)
            failed.add(index)
            return math.nan

    if estimates_us is None:
        estimates_us = [attempt(i, lambda call=call: clock.single_us(call)) for i, call in enumerate(calls)]  # type: ignore[misc]

    def visit(index: int) -> float:
        estimate = estimates_us[index]
        if estimate > plan.candidate_seconds * 1e6 / 3:
            # Too slow to be called twice, and too long for a cold cache to matter.
            return clock.single_us(calls[index])
        repeats = int(np.clip(plan.sample_us / max(estimate, 0.1), 1, plan.repeats))
        return clock.sample_us(calls[index], repeats)

    order = list(range(count))
    shuffle = random.Random(plan.seed)
    spent_s = np.zeros(count)
    rounds: list[np.ndarray] = []
    columns: list[list[float]] = [[] for _ in range(count)]
    beaten: dict[int, float] = {}
    disturbances: list[Disturbance] = []
    with _steady():
        for number in range(1, plan.rounds + 1):
            row = np.full(count, np.nan)
            shuffle.shuffle(order)
            for index in order:
                if index not in running:
                    continue
                if on_visit is not None:
                    on_visit(index)
                begin = clock.now_s()
                row[index] = attempt(index, lambda index=index: visit(index))  # type: ignore[misc]
                spent_s[index] += clock.now_s() - begin
                if not index:
                    disturbances.append(clock.disturbance)
            rounds.append(row)
            if on_round is not None:
                on_round(row)
            for index, log in enumerate(np.log(row).tolist()):
                columns[index].append(log)
            for index in failed:
                columns[index] = [math.nan] * number
            beaten_now = _beaten(columns, running, plan, estimates_us, disturbances)
            beaten |= beaten_now
            running -= beaten_now.keys()
            # A candidate that has used its time up keeps its samples and leaves; the leader too, as its own samples
            # cost the same.
            due = _first_is_due(columns[0], plan, estimates_us[0])
            running = {
                i
                for i in running
                if spent_s[i] * (1 + 1 / number) <= plan.candidate_seconds or (due and not i)
            }
            if not running:
                break
            # The last one runs on until its own median is worth something.
            if len(running) < 2 <= count and number >= plan.least_rounds:
                break
            if number >= plan.least_rounds and _settled(
                columns, running, plan, estimates_us[0], disturbances
            ):
                break
            next_s = sum(spent_s[i] for i in running) / number
            if clock.now_s() - started + next_s > plan.seconds:
                break
    samples = np.stack(rounds)
    samples[:, sorted(failed)] = np.nan
    return RaceResult(samples, beaten, () if 0 in failed else tuple(disturbances))


def _settled(
    columns: Columns,
    running: Collection[int],
    plan: TimingPlan,
    first_us: float,
    disturbances: Sequence[Disturbance],
) -> bool:
    """Whether no further round would change what is known of the candidates that run.

    Each must be slower than the leader, in its fastest sample too, or surely no further from it than counts. The first, which is
    what runs without us, must be so beyond three errors, each other beyond two, or so far that it may be the faster one by no
    more than counts. Where the first does not lead and its samples are those of a busy machine, or all ``hopeless`` times as
    long as its call before the race, nothing is known: few samples that were all interrupted agree.
    """
    most = plan.settled_log
    if not most:
        return False
    best = leader_of(columns)
    if best and _interrupted(samples_of(columns[0]), plan, first_us, disturbances):
        return False
    for index in running:
        if index == best:
            continue
        ratios = paired_ratios(columns[index], columns[best])
        gap, doubt = median(ratios), 2.0 * error_of(ratios)
        beyond = gap > doubt or gap > max(doubt - most, most) if index else gap > 1.5 * doubt
        slower = beyond and min(known(columns[index])) > min(known(columns[best]))
        if not (slower or gap + doubt <= most):
            return False
    return True


def _interrupted(
    samples: Sequence[float], plan: TimingPlan, first_us: float, disturbances: Sequence[Disturbance]
) -> bool:
    """Whether the first's samples are a busy machine's, or all belied by its call before the race."""
    return is_busy(samples, disturbances) or min(samples, default=0.0) > plan.hopeless * first_us


def _first_is_due(column: Sequence[float], plan: TimingPlan, estimate_us: float) -> bool:
    """Whether the first must have more samples before it may leave a race that is to settle. Its fastest call so far says
    how long one is: a busy machine makes two short ones in a row take a tenth of a second each."""
    samples = samples_of(column)
    short = min([*samples, estimate_us]) <= _FIRST_SHARE * plan.seconds * 1e6
    return short and plan.settled_log > 0 and len(samples) < _WITNESSES


def _beaten(
    columns: Columns,
    running: Collection[int],
    plan: TimingPlan,
    estimates_us: Sequence[float],
    disturbances: Sequence[Disturbance],
) -> dict[int, float]:
    """Candidates that are slower than the leader beyond doubt -> by how much at least, as a log ratio.

    What interrupts a sample only ever makes it longer, on a busy machine that of every third. So no median of few may
    throw a candidate out: its fastest samples must agree. In a race that ends when it is settled, the first stays while
    it has fewer than three samples, unless its calls are long, or while they are those of a busy machine; and the call
    that was timed before the race must not belie them.
    """
    best = leader_of(columns)
    own = known(columns[best])
    if not own:
        return {}  # all have failed
    level = median(own)
    hopeless = math.log(plan.hopeless)
    beaten = {}
    for index in running:
        ratios = sorted(paired_ratios(columns[index], columns[best]))
        if index == best or not ratios:
            continue
        # The call that was timed before the race is a witness of the first rounds.
        estimate = math.log(estimates_us[index]) - level
        first = not index and plan.settled_log > 0
        least = min(ratios[0], estimate) if first or len(ratios) < _WITNESSES else ratios[0]
        if first and _first_is_due(columns[0], plan, estimates_us[0]):
            continue
        # No interruption turns a short call into one that long: it leaves at once, as each of its rounds is dear.
        fastest_us = min(math.exp(min(known(columns[index]))), estimates_us[index])
        long = fastest_us - _INTERRUPTION_US > plan.hopeless * math.exp(level)
        if least > hopeless and long:
            beaten[index] = hopeless
            continue
        if first and _interrupted(samples_of(columns[0]), plan, estimates_us[0], disturbances):
            continue
        if least > hopeless and len(ratios) + 1 >= _WITNESSES:
            beaten[index] = hopeless
            continue
        # Three errors, and more for few rounds: 1 in 740 equal candidates is lost so, whatever the rounds.
        doubt = DOUBT_ERRORS * (1 + 8 / max(len(ratios) - 1, 1) ** 2) * error_of(ratios)
        slower = min(median(ratios) - doubt, ratios[(len(ratios) - 1) // 4])
        if len(columns[best]) >= plan.least_rounds and slower > plan.race_margin:
            beaten[index] = slower
    return beaten


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """No garbage collection in the middle of a sample."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Trial:
    """The measurements of one problem's candidates, in the table's order, and what the race says of them.

    Attributes:
        measurements: one a candidate; of the first ones alone where there was no time for the others.
        paired_log: [candidates] log latency less the leader's, paired over rounds; NaN for a failure.
        error_log: [candidates] standard error of each ``paired_log``; NaN for a failure or a single round.
        disturbances: of each sample of the first candidate.
    """

    measurements: tuple[Measurement, ...]
    paired_log: np.ndarray
    error_log: np.ndarray
    disturbances: tuple[Disturbance, ...] = ()


def measure(
    problem: Problem,
    table: CandidateTable | Sequence[Candidate],
    device: Device,
    *,
    plan: TimingPlan,
    workload: str = "",
    on_candidate: Callable[[int], None] | None = None,
    observer: Observer | None = None,
    memory_bytes: float = math.inf,
    budget_seconds: float = math.inf,
) -> Trial:
    """Check and time candidates of one problem on this machine's device.

    Whatever a candidate does wrong is its outcome, and the others go on.

    Args:
        problem: what to compute; its thread count is set for the time of the measurement, on a CPU.
        table: the candidates, all legal.
        device: this machine's.
        plan: how much to measure.
        workload: written into the records.
        on_candidate: called with the number of candidates that have been checked so far.
        observer: told what is being done.
        memory_bytes: a problem that may need more is refused, and a candidate that may is not run: its outcome is
            ``out_of_resources``.
        budget_seconds: for all of it, compiling included. Where it is short, the last candidates are not checked, those
            that were share what is left for the rounds, and the others are not in the trial. One candidate is always
            checked, and one round completed.

    Raises:
        KernelcastError: the inputs or the reference cannot be made, or may not fit in memory; or the device is a GPU
            that is not here.
    """
    import torch

    candidates = list(table)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_measuring)
        where = torch_device(device)
        if device.kind == "gpu":
            stack.enter_context(torch.cuda.device(where))
            stack.enter_context(tf32(problem.allow_tf32))
        stack.enter_context(cpu_threads(problem.threads))
        stack.enter_context(torch.inference_mode())
        clock = clock_for(device)
        end_s = clock.now_s() + budget_seconds
        rounds_s = min(plan.seconds, _ROUNDS_SHARE * budget_seconds)
        bench = Bench(problem, device, where, clock, plan.seed, observer or Observer(), memory_bytes)
        facts = Facts.here(
            problem,
            candidates,
            device,
            Protocol(
                PROTOCOL,
                cache=clock.cache,
                dispatch="eager",
                flush_bytes=clock.flush_bytes,
                inputs="normal",
                seed=plan.seed,
            ),
        )
        bench.observer.begun(facts)
        needed = candidate_bytes(problem, candidates, device) if memory_bytes < math.inf else None
        for number, candidate in enumerate(candidates):
            if number and clock.now_s() > end_s - rounds_s:
                del candidates[number:]
                break
            if needed is not None and needed[number] > memory_bytes:
                bench.refuse(number, needed[number], memory_bytes)
            else:
                bench.prepare(number, candidate)
            if on_candidate is not None:
                on_candidate(number + 1)
        working = sorted(bench.calls)
        bench.observer.timing()
        result = race(
            [bench.calls[number] for number in working],
            clock,
            replace(plan, seconds=max(min(plan.seconds, end_s - clock.now_s()), _LEAST_SECONDS)),
            estimates_us=[bench.estimates_us[number] for number in working],
            on_error=lambda column, error: bench.fail(working[column], error),
            on_visit=None if observer is None else lambda column: observer.visiting(working[column]),
            on_round=None if observer is None else lambda row: observer.round(_by_number(row, working)),
        )
    paired, paired_errors = np.full(len(candidates), np.nan), np.full(len(candidates), np.nan)
    errors = np.full(len(candidates), np.nan)
    samples: dict[int, tuple[float, ...]] = {}
    if working:
        paired[working], paired_errors[working] = result.paired_log(), result.paired_error()
        errors[working] = result.error_log()
    for column, number in enumerate(working):
        samples[number] = finite(result.samples_us[:, column])
    paired_errors[np.isnan(paired)] = np.nan

    measurements = []
    for number, candidate in enumerate(candidates):
        outcome, detail = bench.failures.get(number, ("ok", ""))
        measurements.append(
            facts.record(
                problem,
                candidate,
                samples_us=samples.get(number, ()),
                error_log=float(errors[number]),
                outcome=outcome,
                detail=detail,
                workload=workload,
            )
        )
    return Trial(tuple(measurements), paired, paired_errors, result.disturbances if 0 in samples else ())


def finite(column: np.ndarray) -> tuple[float, ...]:
    """The numbers of a column that are no NaN."""
    return tuple(float(value) for value in column[np.isfinite(column)])


def _by_number(row: np.ndarray, numbers: Sequence[int]) -> dict[int, float]:
    return {number: float(value) for number, value in zip(numbers, row, strict=True) if math.isfinite(value)}
