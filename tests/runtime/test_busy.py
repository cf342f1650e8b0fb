"""Verifications on a machine that other programs use too: what is chosen, what is said of it, and what it costs."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import numpy as np
import pytest

from kernelcast.datasets.rounds import Disturbance
from kernelcast.kernels.detect import detect
from kernelcast.runtime import Selector, tuning
from kernelcast.runtime.verify import VERIFY_PLAN, BusyWarning, cautious_gain, clearly_faster, decide, verify

HERE = detect("cpu")


@pytest.fixture(autouse=True)
def _not_yet_warned(monkeypatch):
    monkeypatch.setattr("kernelcast.runtime.verify._warned", set())


@pytest.fixture
def select(lab, tmp_path):
    def run(n=16):
        selector = Selector(HERE, models=tmp_path, cache=False, store=False, mode="verify")
        return selector.select(lab.a_problem(n))

    return run


def race_of(lab, seed, *names, **busy):
    lab.STATE.reset()
    lab.STATE.latency_us = lab.Busy(lab.STATE.latency_us, seed=seed, **busy)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = verify(lab.a_problem(), [lab.candidate(name) for name in names], HERE)
    return found, [each for each in given if each.category is BusyWarning]


def test_a_quiet_machine_is_not_called_busy(lab, select):
    lab.STATE.latency_us = lab.Busy(lab.STATE.latency_us, probability=0.02, times=8.0, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BusyWarning)
        selection = select()
    assert selection.candidate.variant == "quick"
    assert "busy" not in selection.reason


def test_a_busy_machine_is_said_in_the_reason_and_warned_of_once(lab, select):
    # Longer than a sample aims at: one call each, so that an interruption is seen whole.
    lab.STATE.latency_us = lab.Busy(
        {name: 10 * us for name, us in lab.STATE.latency_us.items()}, probability=0.45, times=40.0, seed=1
    )
    with pytest.warns(
        BusyWarning, match=r"middle half of the samples of vendor spreads over \d+%.*quiet machine"
    ):
        selection = select(16)
    assert "the machine was busy" in selection.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error", BusyWarning)
        assert "the machine was busy" in select(32).reason


def test_a_busy_machine_gets_more_rounds_but_no_more_than_the_plan_has(lab):
    rounds = []
    for probability in (0.0, 0.45):
        found, _ = race_of(lab, 5, "vendor", "twin", probability=probability, times=30.0)
        rounds.append(max(len(m.samples_us) for m in found.trial.measurements))
    assert rounds[0] == VERIFY_PLAN.least_rounds
    assert rounds[0] < rounds[1] <= VERIFY_PLAN.rounds


@pytest.mark.parametrize("only", [(), ("vendor",)])
def test_an_equal_of_the_default_hardly_ever_wins_by_interruptions(lab, only):
    lost = 0
    for seed in range(40):
        found, _ = race_of(lab, seed, "vendor", "twin", probability=0.3, times=100.0, only=only)
        lost += found.winner != 0
    assert lost <= 2


@pytest.mark.parametrize("times", [10.0, 100.0])
def test_an_equal_of_a_default_that_is_interrupted_as_often_as_not_is_no_winner(lab, times):
    # Longer than a sample aims at: one call each, so that 40% of the samples are hit.
    us = {"vendor": 1000.0, "twin": 1000.0}
    kept = 0
    for seed in range(100):
        lab.STATE.reset()
        lab.STATE.latency_us = lab.Noisy(us, probability=0.4, times=times, seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BusyWarning)
            kept += verify(lab.a_problem(), [lab.candidate(name) for name in us], HERE).winner == 0
    assert kept >= 95


def test_few_long_interruptions_are_said_where_the_quartiles_are_close(lab):
    found, _ = race_of(lab, 0, "vendor", "twin", probability=0.0, times=3.0)
    samples = (100.0,) * 13 + (12_800.0,) * 3
    first = replace(found.trial.measurements[0], samples_us=samples)
    trial = replace(found.trial, measurements=(first, *found.trial.measurements[1:]))
    verdict = replace(found, trial=trial)
    assert (verdict.busy, verdict.scatter) == (True, 0.0)
    assert verdict.note == (
        f"the machine was busy: 3 of 16 samples of {first.candidate} took more than three times their median"
    )


def starve(lab, monkeypatch, waited):
    """Make the first candidate's samples, in turn, those of calls that waited for a processor: for a hundred times as long."""
    turns = iter(waited)
    samples_us = lab.Clock.sample_us

    def sample_us(self, call, repeats):
        runs = lab.STATE.runs["vendor"]
        us = samples_us(self, call, repeats)
        starved = lab.STATE.runs["vendor"] > runs and next(turns)
        self.disturbance = Disturbance(starved=starved)
        return 100 * us if starved else us

    monkeypatch.setattr(lab.Clock, "sample_us", sample_us)


@pytest.mark.parametrize("fed", [0, 2])
def test_a_default_that_always_waits_for_a_processor_stays(lab, monkeypatch, fed):
    starve(lab, monkeypatch, [True] * (16 - fed) + [False] * fed)
    with pytest.warns(BusyWarning, match=rf"{16 - fed} of 16 samples of vendor waited for a processor"):
        found = verify(lab.a_problem(), [lab.candidate("vendor"), lab.candidate("twin")], HERE)
    # A hundredfold, in each of the rounds that a race may have at most; but of the machine, not of the candidate.
    assert np.exp(found.trial.paired_log[0]) > 50
    assert len(found.trial.measurements[0].samples_us) == VERIFY_PLAN.rounds
    assert (found.busy, found.winner, found.confidence) == (True, 0, 0.5)


@pytest.mark.parametrize(("rival", "winner"), [("twin", 0), ("quick", 1)])
def test_what_did_not_wait_decides(lab, monkeypatch, rival, winner):
    starve(lab, monkeypatch, [True, True, True, False] * 4)
    with pytest.warns(BusyWarning, match=r"12 of 16 samples of vendor waited"):
        found = verify(lab.a_problem(), [lab.candidate("vendor"), lab.candidate(rival)], HERE)
    assert found.winner == winner


def test_a_search_protects_the_default_too(lab, monkeypatch, tmp_path):
    starve(lab, monkeypatch, [True] * 1000)
    selector = Selector(HERE, models=tmp_path, cache=False, store=False, mode="tune", budget_seconds=60.0)
    with pytest.warns(BusyWarning, match="waited for a processor"):
        selection = selector.select(lab.a_problem())
    assert (selection.candidate.variant, selection.confidence) == ("vendor", 0.5)
    # Not the hundredfold that it took while it waited.
    assert selection.default_us == selection.measured_us


def test_a_search_whose_last_race_is_quiet_neither_warns_nor_is_marked(lab, monkeypatch, tmp_path):
    starve(lab, monkeypatch, [True] * 16 + [False] * 1000)
    selector = Selector(HERE, models=tmp_path, cache=False, store=False, mode="tune", budget_seconds=60.0)
    monkeypatch.setitem(tuning.tune.__kwdefaults__, "batch", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BusyWarning)
        selection = selector.select(lab.a_problem())
    assert (selection.candidate.variant, selection.busy) == ("last", False)


def sleep(lab, monkeypatch, sleeps, us):
    """Make threads sleep so often in each call of the first candidate, which takes so much longer for each."""
    samples_us = lab.Clock.sample_us

    def sample_us(self, call, repeats):
        runs = lab.STATE.runs["vendor"]
        took = samples_us(self, call, repeats)
        slept = sleeps if lab.STATE.runs["vendor"] > runs else 0
        self.disturbance = Disturbance(sleeps=slept)
        return took + us * slept

    monkeypatch.setattr(lab.Clock, "sample_us", sample_us)


@pytest.mark.parametrize(
    ("sleeps", "rival", "winner", "busy"),
    [
        # 20 us for each of two sleeps: the rival is no faster than without them.
        (2, "twin", 0, True),
        # Twice as fast in truth, but a sleep may have taken more than is missing.
        (2, "quick", 0, True),
        # 2 of 100 us are within the noise of the answer.
        (0.1, "quick", 1, False),
        (0, "quick", 1, False),
    ],
)
def test_what_threads_of_the_process_slept_is_no_gain(lab, monkeypatch, sleeps, rival, winner, busy):
    sleep(lab, monkeypatch, sleeps, 20.0)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        found = verify(lab.a_problem(), [lab.candidate("vendor"), lab.candidate(rival)], HERE)
    assert (found.winner, found.busy, len(given)) == (winner, busy, busy)
    if busy:
        assert "threads of this process slept 2 times in a call of vendor" in found.note


def test_the_warning_names_the_line_of_the_caller(lab):
    lab.STATE.latency_us = lab.Busy(
        {name: 10 * us for name, us in lab.STATE.latency_us.items()}, probability=0.45, times=40.0, seed=1
    )
    selector = Selector(HERE, cache=False, store=False, mode="verify")
    with pytest.warns(BusyWarning) as given:
        selector.select(lab.a_problem(16))
    lines, first = inspect.getsourcelines(test_the_warning_names_the_line_of_the_caller)
    line = first + next(place for place, text in enumerate(lines) if "selector.select(" in text)
    where = [(each.filename, each.lineno) for each in given if each.category is BusyWarning]
    assert where == [(__file__, line)]


@pytest.mark.parametrize(
    ("samples", "default", "clear"),
    [
        # A quarter, 3% faster than the default's quickest.
        ([96.0] * 4 + [900.0] * 12, [100.0] * 4 + [900.0] * 12, True),
        ([96.0] * 3 + [900.0] * 13, [100.0] * 16, False),
        ([98.0] * 16, [100.0] * 16, False),
        ([50.0] * 16, [900.0] * 15 + [50.0], False),
        # Of few samples three.
        ([50.0] * 2 + [900.0], [100.0] * 3, False),
        ([50.0] * 3, [100.0] * 3, True),
        ([], [100.0], False),
        ([50.0] * 3, [], False),
    ],
)
def test_what_is_clearly_faster_on_a_busy_machine(samples, default, clear):
    assert clearly_faster(samples, default) == clear


def test_what_is_truly_faster_still_wins(lab):
    won = [race_of(lab, s, "vendor", "quick", probability=0.2, times=20.0)[0].winner for s in range(20)]
    assert won.count(1) >= 18


def test_a_false_margin_of_the_default_is_none(lab):
    found, given = race_of(lab, 0, "vendor", "twin", probability=0.5, times=100.0, only=("vendor",))
    # By the medians alone the other one would be selected, as several times faster, and surely.
    assert np.exp(found.trial.paired_log[0]) > 3
    assert decide(found.trial.paired_log, found.trial.error_log)[0] == 1
    assert (found.busy, found.winner, len(given)) == (True, 0, 1)
    assert found.confidence < 0.9


def test_a_default_that_is_hopeless_leaves_after_three_quiet_samples(lab):
    found, _ = race_of(lab, 0, "slow", "quick", probability=0.0, times=3.0)
    assert [len(m.samples_us) for m in found.trial.measurements] == [3, 3]
    assert found.winner == 1


def test_the_speedup_of_a_selection_is_not_that_of_interruptions(lab, select):
    # A machine on which the default's calls take tens of times as long as they should, more often than not.
    latency_us = {"vendor": 200.0, "quick": 160.0, "slow": 800.0, "twin": 400.0, "last": 400.0}
    lab.STATE.latency_us = lab.Busy(latency_us, probability=0.6, times=50.0, only=("vendor",), seed=1)
    with pytest.warns(BusyWarning):
        selection = select()
    assert selection.candidate.variant == "quick"
    assert selection.speedup == pytest.approx(1.25, rel=0.01)
    assert "busy" in selection.reason


@pytest.mark.parametrize(
    ("gain", "samples", "default", "left"),
    [
        # The quickest tenths say the same, or more: the gain stays.
        (-0.2, [80.0] * 5, [100.0] * 5, -0.2),
        # The default's median was interrupted, its quickest samples were not: 5% is left of a gain of 90%.
        (-2.3, [95.0] * 5, [100.0, 100.0, 1000.0, 1000.0, 1000.0], -0.0513),
        # They say the opposite: nothing is left.
        (-2.3, [105.0] * 5, [100.0, 100.0, 1000.0, 1000.0, 1000.0], 0.0),
        (0.7, [200.0] * 5, [100.0] * 5, 0.693),
        (0.7, [90.0, 90.0, 200.0, 200.0, 200.0], [100.0] * 5, 0.0),
    ],
)
def test_a_gain_is_what_the_quickest_samples_show_too(gain, samples, default, left):
    assert cautious_gain(gain, samples, default) == pytest.approx(left, abs=1e-3)
