"""The search of mode ``tune`` on made-up clocks: budget, champion, failures, drift, and its end."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from kernelcast.costmodel.search import Search
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, SettingsError
from kernelcast.kernels import Block, CandidateTable
from kernelcast.kernels.detect import detect
from kernelcast.runtime import Selector, tuning
from kernelcast.runtime.tuning import run, tune
from kernelcast.runtime.verify import Verdict, decide

VALUES = np.array(list(product([16, 32, 64, 128, 256], [1, 2, 4, 8, 16], [1, 2, 3, 4])))
TABLE = CandidateTable([Block("k", {n: VALUES[:, i].copy() for i, n in enumerate("abc")}, len(VALUES))])
LATENCY = (np.log2(VALUES[:, 0] / 64) ** 2 + np.log2(VALUES[:, 1] / 4) ** 2 + abs(VALUES[:, 2] - 3)) * 0.2
BEST = int(np.argmin(LATENCY))


class Machine:
    """Races rows in a second each; each race is slower than the one before by a factor, as on a warming machine."""

    def __init__(self, latency, drift=1.0):
        self.latency, self.drift = latency, drift
        self.now_s, self.races = 0.0, []

    def race(self, rows, seconds):
        self.now_s += len(rows)
        self.races.append(list(rows))
        logs = self.latency[list(rows)]
        us = np.exp(logs) * 100 * self.drift ** len(self.races)
        paired = logs - np.nanmin(logs) if np.isfinite(logs).any() else logs
        trial = SimpleNamespace(
            measurements=[SimpleNamespace(latency_us=each) for each in us],
            paired_log=paired,
            error_log=np.full(len(rows), 1e-3),
        )
        return Verdict(*decide(paired, trial.error_log), trial)

    def run(self, search, **options):
        options = {"budget_seconds": 1e9, **options}
        return run(search, self.race, clock=lambda: self.now_s, **options)


def test_the_default_and_the_fastest_so_far_are_in_every_race():
    machine, search = Machine(LATENCY), Search(TABLE, default=5, batch=6)
    found = machine.run(search, default=5, budget_seconds=200.0)
    assert machine.races[0][0] == 5
    for before, race in enumerate(machine.races[1:], 1):
        told = {row for each in machine.races[:before] for row in each}
        champion = min(told, key=lambda row: LATENCY[row])
        assert race[0] == 5
        assert champion in race[:2]
    assert found.rows[found.verdict.winner] == BEST


def test_drift_between_races_does_not_mislead():
    machine, search = Machine(LATENCY, drift=1.3), Search(TABLE, default=5, batch=6)
    found = machine.run(search, default=5)
    assert found.rows[found.verdict.winner] == BEST == search.best
    # What the search was told is relative to the first race, whatever the machine became.
    first = math.log(100 * 1.3)
    assert search._log_latency[search.rows] == pytest.approx(LATENCY[search.rows] + first)


def test_the_budget_ends_it_and_it_says_what_was_left():
    machine, search = Machine(LATENCY), Search(TABLE, default=0, batch=4)
    found = machine.run(search, default=0, budget_seconds=20.0)
    assert 20.0 <= machine.now_s < 20.0 + 6
    assert (found.ended, found.left) == ("budget", 100 - found.measured)
    assert found.measured == len({row for race in machine.races for row in race})
    assert found.note(20.0) == f" Incomplete: the budget of 20 s ended with {found.left} not tried."


def test_one_batch_is_measured_however_short_the_budget():
    machine = Machine(LATENCY)
    assert machine.run(Search(TABLE, batch=3), budget_seconds=1e-9).measured == 3
    with pytest.raises(SettingsError, match="must be positive"):
        machine.run(Search(TABLE), budget_seconds=0.0)


def test_it_ends_where_nothing_promises_anything(monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_MEASURED", 40)
    found = Machine(LATENCY).run(Search(TABLE, batch=6))
    assert found.ended == "gain"
    assert 40 <= found.measured < 100
    assert "none of which promised" in found.note(60.0)


def test_a_small_space_is_measured_whole():
    found = Machine(LATENCY[:7]).run(Search(CandidateTable([TABLE.blocks[0].take(np.arange(7))]), batch=3))
    assert (found.ended, found.left, found.measured, found.note(1.0)) == ("space", 0, 7, "")


def test_failures_rejections_and_harmful_compilations_are_never_the_answer():
    latency = LATENCY.copy()
    latency[BEST] = np.nan
    order = np.argsort(LATENCY)
    machine = Machine(latency)
    found = machine.run(
        Search(TABLE, batch=6),
        rejected=frozenset([int(order[1])]),
        harmful=lambda rows, seconds: {int(order[2])} & set(rows),
    )
    raced = {row for race in machine.races for row in race}
    assert not raced & set(order[1:3].tolist())
    assert found.rows[found.verdict.winner] == order[3]
    assert found.failed == len({BEST} & raced) + 1


def test_where_nothing_works_it_says_so():
    found = Machine(np.full(100, np.nan)).run(Search(TABLE, batch=10))
    assert (found.verdict.winner, found.failed, found.left) == (None, 100, 0)
    with pytest.raises(KernelcastError, match="Nothing could be measured"):
        Machine(LATENCY).run(Search(TABLE), rejected=frozenset(range(100)))


def test_on_this_machine_by_the_selectors_ranking(lab):
    selector = Selector(detect("cpu"), cache=False, store=False)
    problem = lab.a_problem()
    ranking = selector.rank(problem, whole=True)
    kept = []
    found = tune(
        problem,
        ranking,
        selector.device,
        budget_seconds=60.0,
        plan=TimingPlan(rounds=4),
        record=kept.extend,
        batch=2,
    )
    assert ranking.table[found.rows[found.verdict.winner]] == lab.candidate("last")
    assert (found.measured, found.left, found.ended) == (5, 0, "space")
    assert {each.candidate.variant for each in kept} == set(lab.VARIANTS)
    # The first batch is the default and the head of the ranking.
    assert [each.candidate.variant for each in kept[:2]] == ["vendor", "quick"]
