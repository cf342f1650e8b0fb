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
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.datasets.clocks import Clock, CpuClock, GpuClock, clock_for
from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.datasets.surroundings import cpu_threads, require_memory, tf32, tf32_allowed
from kernelcast.errors import InvalidRecordError, KernelcastError
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, operation, variant
from kernelcast.kernels.detect import torch_device
from kernelcast.kernels.memory import poisoned

__all__ = [
    "PROTOCOL",
    "Clock",
    "CpuClock",
    "GpuClock",
    "RaceResult",
    "TimingPlan",
    "Trial",
    "clock_for",
    "leader",
    "measure",
    "race",
    "tf32_allowed",
]

#: Name and version of the procedure, kept in each record. Raised when a step changes what is measured.
PROTOCOL = "interleaved-rounds-1"

_measuring = threading.Lock()


def _after_fork() -> None:
    """A forked child has no thread that could release what another thread of its parent held."""
    global _measuring
    _measuring = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class TimingPlan:
    """How much to measure.

    Attributes:
        rounds: rounds at most.
        least_rounds: rounds before a candidate may be raced out, unless it is hopeless.
        seconds: time for one problem's rounds, at most; at least one round is always completed.
        candidate_seconds: time given to one candidate, at most.
        sample_us: length that a sample aims at, by repeating short calls.
        repeats: calls in a sample, at most.
        race_margin: a candidate this much slower than the best (as a log ratio), beyond noise, is raced out.
        hopeless: a candidate this many times slower than the best in the first round is raced out at once.
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
    seed: int = 0

    def __post_init__(self) -> None:
        whole = (self.rounds, self.least_rounds, self.repeats)
        positive = (self.seconds, self.candidate_seconds, self.sample_us)
        if (
            min(whole) < 1
            or not all(0 < value < math.inf for value in positive)
            or not self.race_margin >= 0
            or not self.hopeless > 1
        ):
            raise InvalidRecordError(
                f"A timing plan needs positive rounds, repeats and seconds, a race_margin of at least 0 and a hopeless "
                f"ratio above 1; this is {self}."
            )


@dataclass(frozen=True)
class RaceResult:
    """What the rounds gave.

    Attributes:
        samples_us: float64 [rounds, candidates]; NaN where a candidate was not visited.
    """

    samples_us: np.ndarray

    def paired_log(self) -> np.ndarray:
        """Log latency of each candidate less that of the leader, from rounds that both ran in: [candidates].

        The median over rounds of the paired log ratio: drift between rounds cancels. The leader has 0; a candidate
        without a round has NaN.
        """
        return np.array([np.median(ratios) if len(ratios) else np.nan for ratios in self._ratios()])

    def paired_error(self) -> np.ndarray:
        """Standard error of each :meth:`paired_log`, from its spread over rounds: [candidates].

        0 for the leader; NaN for a candidate that ran in fewer than two rounds.
        """
        if not self.samples_us.size:
            return np.zeros(0)
        errors = np.array([_error(ratios) for ratios in self._ratios()])
        errors[leader(self.samples_us)] = 0.0
        return errors

    def error_log(self) -> np.ndarray:
        """Standard error of the log latency of each candidate, from its spread over rounds: [candidates].

        Drift between rounds is in it, as it is in a latency that is not compared with others of the same rounds.
        """
        return np.array([_error(np.log(column[np.isfinite(column)])) for column in self.samples_us.T])

    def _ratios(self) -> list[np.ndarray]:
        """Log ratios to the leader, of each candidate, over the rounds that both ran in."""
        if not self.samples_us.size:
            return []
        logs = np.log(self.samples_us)
        ratios = logs - logs[:, [leader(self.samples_us)]]
        return [column[np.isfinite(column)] for column in ratios.T]


def leader(samples_us: np.ndarray) -> int:
    """The fastest of the candidates that ran in the most rounds; the first of equals.

    Each sample is taken relative to the mean of its round over these candidates (which all ran in the same rounds, as
    who leaves does not come back), so that drift between rounds cancels.
    """
    counts = np.isfinite(samples_us).sum(axis=0)
    longest = np.flatnonzero(counts == counts.max())
    logs = np.log(samples_us[:, longest])
    logs = logs[np.isfinite(logs).all(axis=1)]
    if not len(logs):
        return int(longest[0])
    return int(longest[np.argmin(np.median(logs - logs.mean(axis=1, keepdims=True), axis=0))])


def _error(logs: np.ndarray) -> float:
    """Standard error of a median of logs, from the mean absolute deviation; NaN for fewer than two.

    sqrt(pi / 2) turns the mean absolute deviation of a normal distribution into its standard deviation, and is the
    standard error of a median over that of a mean. The last factor makes two errors cover 95% for few values too, as
    Student's quantiles do for a mean (fitted to simulated normal samples of 2 to 20). The median absolute deviation
    would not do: of three values it is the smaller gap, often next to nothing.
    """
    count = len(logs)
    if count < 2:
        return math.nan
    deviation = float(np.abs(logs - np.median(logs)).mean()) * math.sqrt(count / (count - 1))
    return max(math.pi / 2 * deviation / math.sqrt(count) * (1 + 3.5 / (count - 1) ** 2), 1e-4)


def race(
    calls: Sequence[Callable[[], Any]],
    clock: Clock,
    plan: TimingPlan,
    *,
    estimates_us: Sequence[float] | None = None,
    on_error: Callable[[int, Exception], None] | None = None,
) -> RaceResult:
    """Time calls against one another in shuffled, interleaved rounds.

    Args:
        calls: what to time; each must be ready to run (compiled, checked).
        clock: of the device that they run on.
        plan: how much to measure.
        estimates_us: a rough time of each call, to choose the repeats by; measured once where None.
        on_error: told of a call that raises, and what; that one leaves the race without any sample. Where None the
            error is passed on.
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
    with _steady():
        for number in range(1, plan.rounds + 1):
            row = np.full(count, np.nan)
            shuffle.shuffle(order)
            for index in order:
                if index not in running:
                    continue
                begin = clock.now_s()
                row[index] = attempt(index, lambda index=index: visit(index))  # type: ignore[misc]
                spent_s[index] += clock.now_s() - begin
            rounds.append(row)
            samples = np.stack(rounds)
            samples[:, sorted(failed)] = np.nan
            running -= _beaten(samples, running, plan, estimates_us)
            # A candidate that has used its time up keeps its samples and leaves; the leader too, as its own samples
            # cost the same.
            running = {i for i in running if spent_s[i] * (1 + 1 / number) <= plan.candidate_seconds}
            if not running:
                break
            # The last one runs on until its own median is worth something.
            if len(running) < 2 <= count and number >= plan.least_rounds:
                break
            next_s = sum(spent_s[i] for i in running) / number
            if clock.now_s() - started + next_s > plan.seconds:
                break
    return RaceResult(samples)


def _beaten(
    samples_us: np.ndarray, running: Collection[int], plan: TimingPlan, estimates_us: Sequence[float]
) -> set[int]:
    """Candidates that are slower than the leader beyond doubt."""
    best = leader(samples_us)
    logs = np.log(samples_us)
    rounds = len(samples_us)
    beaten = set()
    for index in running:
        ratios = logs[:, index] - logs[:, best]
        ratios = ratios[np.isfinite(ratios)]
        if index == best or not len(ratios):
            continue
        middle = float(np.median(ratios))
        # Of one or two samples an interruption by the system may have made any number: each of them, and the estimate
        # made before, must say the same.
        least = (
            middle
            if rounds > 2
            else min(ratios.min(), math.log(estimates_us[index]) - np.nanmedian(logs[:, best]))
        )
        # Three errors, and more for few rounds: 1 in 740 equal candidates is lost so, whatever the rounds.
        doubt = 3.0 * (1 + 8 / max(len(ratios) - 1, 1) ** 2) * _error(ratios)
        slower = rounds >= plan.least_rounds and middle - doubt > plan.race_margin
        if slower or least > math.log(plan.hopeless):
            beaten.add(index)
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
        measurements: one a candidate.
        paired_log: [candidates] log latency less the leader's, paired over rounds; NaN for a failure.
        error_log: [candidates] standard error of each ``paired_log``; NaN for a failure or a single round.
    """

    measurements: tuple[Measurement, ...]
    paired_log: np.ndarray
    error_log: np.ndarray


def measure(
    problem: Problem,
    table: CandidateTable | Sequence[Candidate],
    device: Device,
    *,
    plan: TimingPlan,
    workload: str = "",
    on_candidate: Callable[[int], None] | None = None,
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
        bench = _Bench(problem, device, where, clock, plan.seed)
        for number, candidate in enumerate(candidates):
            bench.prepare(number, candidate)
            if on_candidate is not None:
                on_candidate(number + 1)
        working = sorted(bench.calls)
        result = race(
            [bench.calls[number] for number in working],
            clock,
            plan,
            estimates_us=[bench.estimates_us[number] for number in working],
            on_error=lambda column, error: bench.fail(working[column], error),
        )
    paired, paired_errors = np.full(len(candidates), np.nan), np.full(len(candidates), np.nan)
    errors = np.full(len(candidates), np.nan)
    samples: dict[int, tuple[float, ...]] = {}
    if working:
        paired[working], paired_errors[working] = result.paired_log(), result.paired_error()
        errors[working] = result.error_log()
    for column, number in enumerate(working):
        row = result.samples_us[:, column]
        samples[number] = tuple(float(value) for value in row[np.isfinite(row)])
    paired_errors[np.isnan(paired)] = np.nan

    now = time.time()
    measurements = []
    for number, candidate in enumerate(candidates):
        outcome, detail = bench.failures.get(number, ("ok", ""))
        found = variant(problem.operation, candidate.variant)
        measurements.append(
            Measurement(
                problem=problem,
                candidate=candidate,
                device=device.name,
                device_fingerprint=device.fingerprint,
                environment=Environment.current(found.source_hash(), device_kind=device.kind),
                protocol=Protocol(
                    PROTOCOL,
                    cache=clock.cache,
                    dispatch="eager",
                    flush_bytes=clock.flush_bytes,
                    inputs="normal",
                    seed=plan.seed,
                    error_log=float(errors[number]),
                ),
                samples_us=samples.get(number, ()),
                outcome=outcome,
                detail=detail,
                workload=workload,
                created_at=now,
            )
        )
    return Trial(tuple(measurements), paired, paired_errors)


class _Bench:
    """The inputs and the reference of one problem, and what came of each candidate on them.

    Attributes:
        calls: candidate's number -> what to time; right ones only.
        estimates_us: candidate's number -> rough time of a call.
        failures: candidate's number -> (outcome, detail).
    """

    def __init__(self, problem: Problem, device: Device, where: str, clock: Clock, seed: int) -> None:
        require_memory(problem, device)
        self.calls: dict[int, Callable[[], Any]] = {}
        self.estimates_us: dict[int, float] = {}
        self.failures: dict[int, tuple[str, str]] = {}
        self._problem, self._clock = problem, clock
        self._operation = operation(problem.operation)
        self._make = lambda: self._operation.make_inputs(problem, seed=seed, device=where)
        try:
            self._inputs = list(self._make())
            self._pristine = [tensor.clone() for tensor in self._inputs]
            self._expected = self._operation.reference(problem, *self._inputs)
        except Exception as error:
            raise KernelcastError(
                f"The inputs and the reference of {problem} cannot be made ({type(error).__name__}: {error})."
            ) from error

    def prepare(self, number: int, candidate: Candidate) -> None:
        """Build one candidate and check its result."""
        output: list[Any] = []
        try:
            launch = variant(self._problem.operation, candidate.variant).build(
                self._problem, candidate.parameters
            )
            with poisoned():
                launch(*self._inputs)  # compiles, fills caches
                first_us = self._clock.single_us(lambda: output.append(launch(*self._inputs)))
            wrong = self._operation.check(self._problem, self._expected, output.pop())
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises is its outcome
            self.fail(number, error)
            self._changed()
            return
        if self._changed():
            wrong = "changed its inputs"
        if wrong is not None:
            self.failures[number] = "wrong_result", wrong
            return
        self.calls[number] = lambda: launch(*self._inputs)
        self.estimates_us[number] = first_us

    def fail(self, number: int, error: Exception) -> None:
        """Note what a candidate raised."""
        self.failures[number] = _outcome(error), f"{type(error).__name__}: {error}"[:500]

    def _changed(self) -> bool:
        """Whether the inputs are not what they were; then they are made anew."""
        import torch

        if all(map(torch.equal, self._inputs, self._pristine)):
            return False
        self._inputs[:] = self._make()
        return True


def _outcome(error: Exception) -> str:
    """The outcome that an exception stands for, by its name: triton need not be importable here."""
    name = type(error).__name__
    if name in ("OutOfMemoryError", "OutOfResources", "MemoryError"):
        return "out_of_resources"
    if name in (
        "CompilationError",
        "CompileTimeAssertionFailure",
        "UnsupportedLanguageConstruct",
        "PTXASError",
    ):
        return "compile_error"
    return "out_of_resources" if "can't allocate memory" in str(error) else "crash"
