"""The race of candidates against a scripted clock."""

from __future__ import annotations

import gc
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets.rounds import UNDISTURBED, Disturbance
from kernelcast.datasets.timing import (
    CpuClock,
    GpuClock,
    RaceResult,
    TimingPlan,
    leader,
    race,
)
from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Device
from kernelcast.runtime.verify import decide

SECOND_US = 1e6


class ScriptedClock:
    """Virtual time: call number i takes ``latencies_us[i]``, times noise, times a drift that changes with the rounds.

    Calls are numbers in disguise: ``call()`` tells which candidate is timed.
    """

    cache = "warm"
    flush_bytes = 0
    disturbance = UNDISTURBED

    def __init__(self, latencies_us, *, noise=0.0, drift=None, seed=0):
        self.latencies_us = latencies_us
        self.noise = noise
        self.drift = drift or (lambda visit: 1.0)
        self.random = random.Random(seed)
        self.seconds = 0.0
        self.visits = 0
        self.singles = [0] * len(latencies_us)
        self.repeats = [[] for _ in latencies_us]
        self.order = []

    def _latency(self, index):
        level = self.drift(self.visits // len(self.latencies_us))
        self.visits += 1
        return self.latencies_us[index] * level * math.exp(self.random.gauss(0.0, self.noise))

    def single_us(self, call):
        index = call()
        self.singles[index] += 1
        latency = self._latency(index)
        self.seconds += latency / SECOND_US
        return latency

    def sample_us(self, call, repeats):
        index = call()
        self.repeats[index].append(repeats)
        self.order.append(index)
        latency = self._latency(index)
        self.seconds += latency * (repeats + 1) / SECOND_US
        return latency

    def now_s(self):
        return self.seconds

    def calls(self):
        return [lambda index=index: index for index in range(len(self.latencies_us))]


def run(clock, plan=None, **options):
    return race(clock.calls(), clock, plan or TimingPlan(), **options)


def visits(result):
    return np.isfinite(result.samples_us).sum(axis=0).tolist()


@pytest.mark.parametrize(
    ("own_ms", "taken", "given_up", "disturbance"),
    [
        (5, 3, 0, Disturbance(starved=True)),
        (9, 3, 0, Disturbance()),
        (5, 0, 8, Disturbance(sleeps=2.0)),
    ],
    ids=["waited", "hardly", "slept by itself"],
)
def test_the_clock_tells_waiting_for_a_processor_from_sleeping(
    monkeypatch, own_ms, taken, given_up, disturbance
):
    """Of 10 ms, so many on a processor, which the system took away, or a thread gave up, so often."""
    spent = itertools.count(0, 10_000_000)
    own = itertools.count(0, own_ms * 1_000_000)
    usages = (SimpleNamespace(ru_nivcsw=7 + taken * i, ru_nvcsw=9 + given_up * i) for i in itertools.count())
    monkeypatch.setattr("kernelcast.datasets.clocks.time.perf_counter_ns", lambda: next(spent))
    monkeypatch.setattr("kernelcast.datasets.clocks.time.thread_time_ns", lambda: next(own))
    monkeypatch.setattr("kernelcast.datasets.clocks.resource.getrusage", lambda who: next(usages))
    clock = CpuClock()
    assert clock.sample_us(lambda: None, 4) == 2500.0
    assert clock.disturbance == disturbance
    assert clock.single_us(lambda: None) == 10_000.0
    assert clock.disturbance == disturbance._replace(sleeps=4 * disturbance.sleeps)


# --- The race ---


def test_a_first_one_that_fails_in_the_race_leaves_no_disturbances():
    clock = ScriptedClock([100.0, 100.0])
    clock.disturbance = Disturbance(starved=True)
    calls = clock.calls()

    def fails_late(seen=[]):  # noqa: B006 - counts its calls
        seen.append(1)
        if len(seen) > 3:
            raise RuntimeError("no launch")
        return 0

    result = race([fails_late, calls[1]], clock, TimingPlan(), on_error=lambda index, error: None)
    assert visits(result) == [0, 4]
    assert result.disturbances == ()
    sound = race(calls, clock, TimingPlan())
    assert sound.disturbances == (Disturbance(starved=True),) * 20


@pytest.mark.parametrize("seed", range(20))
def test_equal_candidates_tie_and_the_first_of_them_wins(seed):
    result = run(ScriptedClock([100.0] * 5, noise=0.02, drift=lambda r: 1.0 + 0.5 * (r % 2), seed=seed))
    winner, _ = decide(result.paired_log(), result.paired_error())
    assert winner == 0
    assert visits(result) == [20] * 5
    assert np.abs(result.paired_log()).max() < 0.03


@pytest.mark.parametrize("seed", range(20))
def test_order_is_right_under_drift_of_half_between_rounds(seed):
    levels = random.Random(seed)
    drifts = [1.0 + 0.5 * levels.random() for _ in range(60)]
    latencies = [130.0, 100.0, 120.0, 110.0]
    clock = ScriptedClock(latencies, noise=0.02, drift=lambda r: drifts[r % 60], seed=seed)
    result = run(clock)
    assert np.argsort(result.paired_log()).tolist() == [1, 3, 2, 0]
    assert leader(result.samples_us) == 1
    # The ratios themselves, not their order alone: three errors and what the median of the rounds may be off.
    np.testing.assert_allclose(np.exp(result.paired_log()), [1.3, 1.0, 1.2, 1.1], rtol=0.05)


def test_paired_errors_leave_the_drift_out_that_the_plain_ones_hold():
    clock = ScriptedClock([100.0, 101.0], noise=0.001, drift=lambda r: 1.0 + 0.5 * (r % 2))
    result = run(clock)
    assert result.paired_error().max() < 0.005
    assert result.error_log().min() > 0.03


def test_four_times_slower_leaves_after_two_rounds_and_keeps_its_samples():
    result = run(ScriptedClock([100.0, 400.0, 100.0]))
    assert visits(result) == [20, 2, 20]
    assert result.samples_us[:2, 1] == pytest.approx([400.0, 400.0])
    assert result.paired_log()[1] == pytest.approx(math.log(4.0))


def test_a_long_call_that_no_interruption_explains_leaves_after_one_round():
    # 20 ms more than three times the leader's 10 ms, or just less.
    assert visits(run(ScriptedClock([10_000.0, 50_100.0, 10_000.0]))) == [20, 1, 20]
    assert visits(run(ScriptedClock([10_000.0, 49_900.0, 10_000.0]))) == [20, 2, 20]


class BusyClock(ScriptedClock):
    """A machine that is shared: a sample is interrupted with a probability, for 1 to 8 ms."""

    def __init__(self, latencies_us, *, probability, **options):
        super().__init__(latencies_us, **options)
        self.probability = probability

    def _latency(self, index):
        latency = super()._latency(index)
        if self.random.random() < self.probability:
            # Spread over the calls of a sample of 2 ms.
            latency += self.random.uniform(1000.0, 8000.0) / max(2000.0 / latency, 1.0)
        return latency


@pytest.mark.parametrize("probability", [0.05, 0.3])
def test_a_busy_machine_throws_out_no_equal_and_changes_no_choice(probability):
    # The first would stand unless it were slower beyond noise.
    latencies = [20_000.0, 100.0, 400.0, 100.0, 1000.0, 112.0, 130.0]
    chosen, lost, rounds = [], 0, np.zeros(len(latencies))
    for seed in range(40):
        clock = BusyClock(latencies, probability=probability, noise=0.02, seed=seed)
        result = run(clock, TimingPlan(seed=seed))
        chosen.append(decide(result.paired_log(), result.paired_error())[0])
        lost += visits(result)[1] < 20 or visits(result)[3] < 20
        rounds += visits(result)
    # Once of 40 at most where every third sample is spoiled.
    assert lost <= (probability > 0.1)
    assert set(chosen) <= {1, 3}
    # It is still a race: what is hopeless costs two or three rounds.
    assert (rounds[[2, 4, 0]] <= 40 * np.array([6, 3, 2])).all()


def test_one_that_was_raced_out_does_not_win_by_an_interruption_of_the_leader():
    nan = np.nan
    # Beaten by the first; the last one led in the end, and was interrupted in the only rounds that both ran in.
    samples = np.array([[100.0, 400.0, 900.0], [100.0, 400.0, 900.0], *[[100.0, nan, 90.0]] * 12])
    assert RaceResult(samples).paired_log()[1] < 0
    result = RaceResult(samples, {1: math.log(3.0)})
    assert result.paired_log() == pytest.approx([math.log(100 / 90), math.log(3.0), 0.0])
    assert decide(result.paired_log(), result.paired_error())[0] == 2


def test_what_was_beyond_doubt_is_kept_of_those_raced_out_alone():
    result = run(ScriptedClock([100.0, 112.0, 100.0, 400.0], noise=0.002))
    assert set(result.beaten_log) == {1, 3}
    assert 0.05 < result.beaten_log[1] < math.log(1.12)
    assert result.beaten_log[3] == pytest.approx(math.log(3.0))


def test_one_interrupted_sample_throws_nobody_out():
    clock = ScriptedClock([100.0, 100.0])
    plain = clock.sample_us
    # The system takes the processor away in the middle of candidate 1's first sample.
    clock.sample_us = lambda call, repeats: plain(call, repeats) * (50.0 if call() == 1 and len(clock.repeats[1]) == 1 else 1.0)  # fmt: skip
    assert visits(run(clock)) == [20, 20]


def test_ten_percent_slower_is_raced_out_with_its_samples_kept():
    result = run(ScriptedClock([100.0, 112.0, 100.0], noise=0.002))
    ran = visits(result)
    assert ran[0] == ran[2] == 20
    assert 4 <= ran[1] < 20
    # NaN from the round after it left, and never again a number.
    assert np.isfinite(result.samples_us[: ran[1], 1]).all()
    assert np.isnan(result.samples_us[ran[1] :, 1]).all()


@pytest.mark.parametrize("rounds", [3, 4, 6])
def test_few_rounds_of_noise_throw_few_equals_out(rounds):
    plan = TimingPlan(rounds=rounds + 1, least_rounds=rounds)
    out = 0
    for seed in range(200):
        out += visits(run(ScriptedClock([100.0, 100.0], noise=0.1, seed=seed), plan)) != [rounds + 1] * 2
    assert out <= 4


def test_a_call_of_seconds_gets_a_single_sample():
    clock = ScriptedClock([4 * SECOND_US, 1 * SECOND_US])
    result = run(clock, estimates_us=[4 * SECOND_US, 1 * SECOND_US])
    assert visits(result)[0] == 1
    assert clock.singles[0] == 1
    assert clock.repeats[0] == []


def test_short_calls_are_repeated_up_to_the_limit_and_long_ones_are_not():
    clock = ScriptedClock([10.0, 1500.0])
    run(clock, TimingPlan(rounds=1, sample_us=2000.0, repeats=20))
    assert clock.repeats == [[20], [1]]


def test_budget_of_the_problem_holds():
    # A round takes 3 x 2 x 50 ms.
    clock = ScriptedClock([50_000.0] * 3)
    plan = TimingPlan(rounds=100, seconds=1.0, candidate_seconds=100.0)
    result = run(clock, plan, estimates_us=[50_000.0] * 3)
    assert clock.seconds <= 1.0
    assert len(result.samples_us) == 3


def test_one_round_is_completed_whatever_the_budget():
    clock = ScriptedClock([0.4 * SECOND_US] * 4)
    result = run(clock, TimingPlan(seconds=0.1), estimates_us=[0.4 * SECOND_US] * 4)
    assert visits(result) == [1, 1, 1, 1]


def test_budget_of_a_candidate_holds():
    clock = ScriptedClock([300_000.0, 310_000.0])
    plan = TimingPlan(rounds=50, seconds=1000.0, candidate_seconds=3.0)
    result = run(clock, plan, estimates_us=[300_000.0, 310_000.0])
    for index, latency in enumerate((0.3, 0.31)):
        assert sum(clock.repeats[index]) * 2 * latency <= 3.0
    assert visits(result)[0] >= 4


def test_one_candidate_alone_runs_every_round():
    result = run(ScriptedClock([100.0], noise=0.01))
    assert visits(result) == [20]
    assert result.paired_log().tolist() == [0.0]
    assert decide(result.paired_log(), result.paired_error())[0] == 0


def test_last_one_running_is_measured_until_its_median_is_worth_something():
    assert visits(run(ScriptedClock([100.0, 900.0]))) == [4, 2]


def test_no_candidates_at_all():
    result = race([], ScriptedClock([]), TimingPlan())
    assert result.samples_us.shape == (0, 0)
    assert result.paired_log().shape == result.paired_error().shape == result.error_log().shape == (0,)
    assert decide(result.paired_log(), result.paired_error())[0] is None


def test_estimates_are_measured_where_none_are_given():
    clock = ScriptedClock([100.0, 100.0])
    run(clock, TimingPlan(rounds=1))
    assert clock.singles == [1, 1]


def test_order_of_visits_is_shuffled_and_depends_on_the_seed_alone():
    orders = []
    for seed in (0, 0, 1):
        clock = ScriptedClock([100.0] * 6)
        run(clock, TimingPlan(rounds=4, seed=seed))
        orders.append([clock.order[i : i + 6] for i in range(0, 24, 6)])
    assert orders[0] == orders[1] != orders[2]
    assert len({tuple(each) for each in orders[0]}) > 1
    assert all(sorted(each) == list(range(6)) for each in orders[0])


def test_garbage_is_not_collected_during_rounds_and_is_again_after():
    seen = []
    clock = ScriptedClock([100.0])
    calls = [lambda: (seen.append(gc.isenabled()), 0)[1]]
    race(calls, clock, TimingPlan(rounds=2), estimates_us=[100.0])
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_call_that_raises_is_passed_on_unless_someone_listens():
    clock = ScriptedClock([100.0, 100.0, 100.0])

    def fails():
        if clock.repeats[0]:
            raise RuntimeError("on the way")
        return 1

    calls = [clock.calls()[0], fails, clock.calls()[2]]
    with pytest.raises(RuntimeError, match="on the way"):
        race(calls, clock, TimingPlan(), estimates_us=[100.0] * 3)
    assert gc.isenabled()

    clock.repeats = [[], [], []]
    heard = []
    result = race(
        calls, clock, TimingPlan(), estimates_us=[100.0] * 3, on_error=lambda i, e: heard.append((i, str(e)))
    )
    assert heard == [(1, "on the way")]
    assert visits(result) == [20, 0, 20]
    assert np.isnan(result.paired_log()[1])


def test_a_call_that_raises_in_a_later_round_keeps_no_sample():
    clock = ScriptedClock([100.0, 100.0])

    def fails():
        if len(clock.repeats[1]) == 3:
            raise RuntimeError
        return 1

    result = race(
        [clock.calls()[0], fails], clock, TimingPlan(), estimates_us=[100.0] * 2, on_error=lambda i, e: None
    )
    assert clock.repeats[1] == [20] * 3
    assert np.isnan(result.samples_us[:, 1]).all()
    assert visits(result)[0] >= 4


def test_everything_fails():
    def fails():
        raise RuntimeError

    heard = []
    result = race(
        [fails, fails], ScriptedClock([1.0, 1.0]), TimingPlan(), on_error=lambda i, e: heard.append(i)
    )
    assert heard == [0, 1]
    assert np.isnan(result.samples_us).all()
    assert np.isnan(result.paired_log()).all()
    assert decide(result.paired_log(), result.paired_error())[0] is None


@given(
    st.lists(st.floats(1.0, 1e5), min_size=1, max_size=6),
    st.floats(0.0, 0.5),
    st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None)
def test_layout_of_the_samples(latencies, noise, seed):
    result = run(ScriptedClock(latencies, noise=noise, seed=seed))
    ran = np.isfinite(result.samples_us)
    assert result.samples_us.shape[1] == len(latencies)
    # Everyone ran in the first round, nobody comes back, and each round has someone.
    assert ran[0].all()
    assert (ran[1:] <= ran[:-1]).all()
    assert ran.any(axis=1).all()
    assert np.isfinite(result.paired_log()).all()
    assert result.paired_log()[leader(result.samples_us)] == 0.0


def test_leader_is_the_first_of_equals_and_was_there_to_the_end():
    nan = np.nan
    assert leader(np.array([[2.0, 1.0, 1.0], [2.0, 1.0, 1.0]])) == 1
    assert leader(np.array([[2.0, 1.0], [2.0, nan]])) == 0
    # By medians of the plain samples (12 and 11) the second would lead; in two rounds of three the first is faster.
    assert leader(np.array([[10.0, 11.0], [20.0, 22.0], [12.0, 8.0]])) == 0


def test_worked_example_of_ratios_and_errors():
    samples = np.array([[10.0, 20.0], [20.0, 40.0], [10.0, 22.0]])
    result = RaceResult(samples)
    assert result.paired_log() == pytest.approx([0.0, math.log(2.0)])
    deviation = (0.0 + 0.0 + math.log(1.1)) / 3 * math.sqrt(3 / 2)
    expected = math.pi / 2 * deviation / math.sqrt(3) * (1 + 3.5 / 4)
    assert result.paired_error() == pytest.approx([0.0, expected])


@pytest.mark.parametrize(
    "values",
    [
        {"rounds": 0},
        {"least_rounds": 0},
        {"repeats": 0},
        {"seconds": 0.0},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"candidate_seconds": -1.0},
        {"sample_us": 0.0},
        {"race_margin": -0.1},
        {"hopeless": 1.0},
        {"hopeless": math.nan},
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(values):
    with pytest.raises(InvalidRecordError, match="timing plan"):
        TimingPlan(**values)


def test_the_caches_of_a_gpu_are_flushed_by_the_last_level(monkeypatch):
    import torch

    made = []
    monkeypatch.setattr(torch, "empty", lambda count, **options: made.append(4 * count))
    facts = {"name": "g", "kind": "gpu", "vendor": "amd", "architecture": "gfx942", "cores": 304}
    # 4 MiB of L2 before 256 MiB of last-level cache; a GPU that reports neither; one whose L2 is the last level.
    for caches, flushed_mib in (
        ({"l2_bytes": 2**22, "llc_bytes": 2**28}, 512),
        ({}, 64),
        ({"l2_bytes": 5 * 2**23}, 80),
    ):
        clock = GpuClock(Device(**facts, **caches))
        assert (clock.cache, clock.flush_bytes) == ("cold", flushed_mib * 2**20)
        assert made.pop() == clock.flush_bytes


def test_cpu_clock_calls_as_often_as_it_says():
    calls = []
    assert CpuClock().sample_us(lambda: calls.append(1), 5) > 0
    assert len(calls) == 6
    assert CpuClock().single_us(lambda: calls.append(1)) > 0
    assert len(calls) == 7
