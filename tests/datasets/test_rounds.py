"""What ends a race before its rounds are over, and the figures that rounds give."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets.rounds import interrupted, is_busy, lower_error
from kernelcast.datasets.timing import RaceResult, TimingPlan, leader, quantile, scatter_of
from kernelcast.runtime.verify import VERIFY_PLAN, decide


def load_race():
    name = "kernelcast_test_race"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_race.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


ScriptedClock, run, visits = load_race().ScriptedClock, load_race().run, load_race().visits


@pytest.mark.parametrize(("noise", "fewest", "most"), [(0.0, 4, 4), (0.02, 5, 29), (0.2, 30, 30)])
def test_a_race_ends_when_its_outcome_is_known(noise, fewest, most):
    latencies = [100.0, 101.0, 102.0]
    plan = TimingPlan(rounds=30, least_rounds=4, settled_log=0.04, race_margin=9.0)
    settled = run(ScriptedClock(latencies, noise=noise), plan)
    assert fewest <= len(settled.samples_us) <= most
    gap, error = settled.paired_log(), settled.paired_error()
    if len(settled.samples_us) < 30:
        assert (
            (gap + 2 * error <= 0.04) | (gap > 2 * error) | (gap > np.maximum(2 * error - 0.04, 0.04))
        ).all()
    whole = TimingPlan(rounds=30, least_rounds=4, race_margin=9.0)
    assert len(run(ScriptedClock(latencies, noise=noise), whole).samples_us) == 30


def test_a_clear_margin_ends_a_race_before_the_slower_one_is_raced_out():
    plan = TimingPlan(rounds=30, least_rounds=3, settled_log=0.03)
    clock = ScriptedClock([100.0, 120.0], noise=0.01, seed=1)
    assert visits(run(clock, plan)) == [3, 3]
    # A gap of 2.5% is neither a tie nor beyond doubt in three rounds of such noise.
    unsure = [ScriptedClock([100.0, 102.5], noise=0.02, seed=seed) for seed in range(20)]
    assert sum(visits(run(clock, plan))[0] > 3 for clock in unsure) >= 12


class InterruptedClock(ScriptedClock):
    """The first candidate's first samples are so many times too long."""

    def __init__(self, latencies_us, factors, **options):
        super().__init__(latencies_us, **options)
        self.factors = factors

    def sample_us(self, call, repeats):
        place = len(self.repeats[0])
        found = super().sample_us(call, repeats)
        return found * (self.factors[place] if call() == 0 and place < len(self.factors) else 1.0)


def test_a_default_that_was_interrupted_is_not_lost_to_its_interruptions():
    plan = TimingPlan(rounds=20, least_rounds=3, settled_log=0.03)
    # Shorter by 1%: a tie. Twice of three times interrupted, its median of three says 1.6 times slower.
    factors = [2.0, 1.6, 1.0]
    result = run(InterruptedClock([99.0, 100.0], factors, noise=0.002), plan)
    assert len(result.samples_us) > 5
    assert decide(result.paired_log(), result.paired_error())[0] == 0
    # What scatters so and leads all the same needs no more rounds.
    quick = run(InterruptedClock([50.0, 100.0], [1.6, 1.0, 1.3], noise=0.002), plan)
    assert len(quick.samples_us) < 8


def test_a_default_whose_first_calls_were_preempted_is_not_raced_out_by_them():
    # 800 us, of which the call before the race and the first samples took a tenth of a second each: more than candidate_seconds.
    clock = InterruptedClock([800.0, 780.0, 790.0], [150.0, 240.0, 1.0], noise=0.01)
    spent = clock.sample_us
    clock.sample_us = lambda call, repeats: (spent(call, repeats), setattr(clock, "seconds", clock.seconds + 0.35 * (call() == 0)))[0]  # fmt: skip
    result = run(clock, VERIFY_PLAN, estimates_us=[120_000.0, 780.0, 790.0])
    assert visits(result)[0] >= 3
    assert 0 not in result.beaten_log


@pytest.mark.parametrize(
    ("latency_us", "samples"),
    # Far off in three samples; too long for three, an eighth of the 2 s for the rounds; so long that it is called once.
    [(120_000.0, 3), (240_000.0, 3), (260_000.0, 1), (900_000.0, 1)],
)
def test_a_default_that_is_far_off_leaves_after_three_samples_or_one_that_is_long(latency_us, samples):
    result = run(ScriptedClock([latency_us, 1000.0]), VERIFY_PLAN, estimates_us=[latency_us, 1000.0])
    assert visits(result) == [samples, 3]
    assert decide(result.paired_log(), result.paired_error()) == (1, pytest.approx(1.0, abs=0.002))


def test_a_short_call_before_the_race_speaks_for_a_default_whose_samples_are_all_long():
    clock = InterruptedClock([800.0, 800.0], [150.0] * 3, noise=0.01)
    assert visits(run(clock, VERIFY_PLAN, estimates_us=[800.0, 800.0]))[0] > 3


def test_a_small_gain_on_a_quiet_machine_is_seen():
    chosen = []
    for seed in range(100):
        result = run(ScriptedClock([105.0, 100.0, 104.0], noise=0.01, seed=seed), VERIFY_PLAN)
        chosen.append(decide(result.paired_log(), result.paired_error())[0])
    assert chosen.count(1) >= 95


def test_one_whose_fastest_sample_beats_the_leader_is_not_settled_by_its_median():
    plan = TimingPlan(rounds=12, least_rounds=3, settled_log=0.03, race_margin=9.0)
    slower = InterruptedClock([90.0, 100.0], [1.7] + [1.5] * 19, noise=0.002)
    assert len(run(slower, plan).samples_us) < 8
    # Once it ran for 90: the others may all have been interrupted.
    unsure = InterruptedClock([90.0, 100.0], [1.0] + [1.5] * 19, noise=0.002)
    assert len(run(unsure, plan).samples_us) == 12


@pytest.mark.parametrize("candidates", [3, 40])
def test_bookkeeping_of_a_race_is_a_small_part_of_short_samples(candidates):
    clock = ScriptedClock([100.0 + i for i in range(candidates)], noise=0.02)
    counted = {"calls": 0}
    before = np.median

    def median(*args, **options):
        counted["calls"] += 1
        return before(*args, **options)

    np.median = median
    try:
        run(clock, TimingPlan(rounds=5))
    finally:
        np.median = before
    # An array's call takes as long as a sample of a short kernel: a round makes none.
    assert counted["calls"] == 0


@given(
    st.integers(1, 5).flatmap(
        lambda count: st.lists(
            st.lists(st.one_of(st.just(math.nan), st.floats(1.0, 1e4)), min_size=count, max_size=count),
            min_size=1,
            max_size=7,
        )
    )
)
@settings(max_examples=80, deadline=None)
def test_paired_figures_are_those_of_arrays(rows):
    samples = np.array(rows)
    result = RaceResult(samples)
    logs = np.log(samples)
    ratios = logs - logs[:, [leader(samples)]]
    for found, error, column in zip(result.paired_log(), result.paired_error(), ratios.T, strict=True):
        known = column[np.isfinite(column)]
        assert found == pytest.approx(np.median(known) if len(known) else np.nan, nan_ok=True)
        if len(known) >= 2 and np.ptp(known) > 1e-3:
            deviation = np.abs(known - np.median(known)).mean() * math.sqrt(len(known) / (len(known) - 1))
            wanted = math.pi / 2 * deviation / math.sqrt(len(known)) * (1 + 3.5 / (len(known) - 1) ** 2)
            assert error == pytest.approx(wanted)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9), st.floats(0.0, 1.0))
def test_quantiles_are_those_of_numpy(values, share):
    assert quantile(values, share) == pytest.approx(np.quantile(values, share))


def test_scatter_is_the_quartiles_over_the_median():
    assert scatter_of([100.0, 101.0, 99.0, 100.0, 100.0]) == 0.0
    assert scatter_of([100.0, 200.0, 300.0]) == pytest.approx(0.5)
    # One interruption of five is none of the machine's habits; two are.
    assert scatter_of([100.0, 900.0, 100.0, 100.0, 100.0]) == 0.0
    assert scatter_of([100.0, 900.0, 100.0, 500.0, 100.0]) == pytest.approx(4.0)
    assert math.isnan(scatter_of([100.0, 200.0]))


@pytest.mark.parametrize(
    ("samples", "long", "busy"),
    [
        ([100.0] * 16, 0, False),
        # Three of sixteen, as of a machine whose quartiles are close: 18%. One alone is no habit; two of twenty are a tenth.
        ([100.0] * 13 + [12_800.0] * 3, 3, True),
        ([100.0] * 15 + [12_800.0], 1, False),
        ([100.0] * 6 + [12_800.0], 1, False),
        ([100.0] * 18 + [301.0] * 2, 2, False),
        ([100.0] * 17 + [301.0] * 2, 2, True),
        ([100.0] * 14 + [300.0] * 2, 0, False),
        ([100.0, 100.0, 160.0, 160.0], 0, True),
        ([100.0, 900.0], 0, False),
        ([], 0, False),
    ],
)
def test_samples_of_a_busy_machine(samples, long, busy):
    assert (interrupted(samples), is_busy(samples)) == (long, busy)


@pytest.mark.parametrize(
    ("logs", "error"),
    [
        # Four rounds cannot tell; five that agree do, and of sixteen the fourth that is opposed.
        ([0.1] * 4, math.nan),
        ([0.06, 0.1, 0.1, 0.1, 5.0], 0.03),
        ([-9.0] * 4 + [0.08] + [0.1] * 11, 0.015),
        ([-9.0] * 5 + [0.1] * 11, 0.75 * 9.1),
    ],
)
def test_the_error_downwards_is_that_of_a_sign_test(logs, error):
    assert lower_error(logs) == pytest.approx(error, nan_ok=True)


def test_interruptions_of_a_quarter_of_the_rounds_hide_no_gain_and_raced_out_is_beyond_doubt():
    samples = np.array([[100.0, 90.0]] * 12 + [[100.0, 900.0]] * 4)
    result = RaceResult(samples)
    assert result.paired_log()[0] == pytest.approx(math.log(100 / 90))
    assert result.paired_error()[0] == pytest.approx(0.0)
    assert decide(result.paired_log(), result.paired_error())[0] == 1
    # One round tells no spread; leaving a race does.
    out = RaceResult(np.array([[400.0, 100.0], [math.nan, 100.0]]), {0: math.log(3.0)})
    assert out.paired_error()[0] == pytest.approx(math.log(4.0) / 3)
