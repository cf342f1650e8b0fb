"""Drawn hyperparameters: what they are judged on, when one is taken, and that training keeps what came of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kernelcast.costmodel import Prediction, ProblemData, read_manifest
from kernelcast.errors import ModelError
from kernelcast.kernels import Candidate, CandidateTable, problem
from kernelcast.kernels.devices import device
from kernelcast.training import drawing
from kernelcast.training.drawing import SPACE, draw_hyperparameters
from kernelcast.training.recipe import hyperparameters
from kernelcast.training.train import train

A100 = device("a100-sxm4-80gb")
CONFIG = {"block_n": 64, "block_k": 32, "group_m": 8, "num_stages": 3, "num_warps": 4}
TABLE = CandidateTable.of(
    [Candidate.of("vendor"), *(Candidate.of("triton_tiled", {"block_m": m, **CONFIG}) for m in (16, 32, 64))]
)


def measured(m, latency_us=(2.0, 1.0, 4.0, 3.0)):
    """By default the first tile is best, twice as fast as the library."""
    unknown = np.full(len(TABLE), np.nan)
    return ProblemData(
        problem("gemm", m=m, n=512, k=512, dtype="float16"), A100, TABLE, np.log(latency_us), unknown
    )


DATA = [measured(m) for m in range(1, 31)]


@dataclass
class Ranker:
    """Ranks a tile first: the best, or another for some problems. Uncertain of nothing."""

    best: int
    but: frozenset[int] = frozenset()

    def predict(self, problem, table, device):
        latency = np.arange(len(table)) + 1.0
        latency[2 if problem["m"] in self.but else self.best] = 0.0
        return Prediction(latency, np.ones(len(table)), np.ones(len(table), dtype=bool))


class Fits:
    """A fit that notes what it was asked; only the recipes of ``good`` learning rates rank well."""

    def __init__(self, good, but=()):
        self.good, self.but, self.seen = good, frozenset(but), []

    def __call__(self, part, changes):
        self.seen.append((frozenset(item.problem["m"] for item in part), dict(changes)))
        return Ranker(1, self.but) if changes.get("learning_rate") in self.good else Ranker(0)


def rates(draws, seed=0):
    """The learning rates of the draws."""
    fits = Fits(good=())
    draw_hyperparameters(DATA, fits, draws=draws, seed=seed)
    return [changes.get("learning_rate") for _, changes in fits.seen[:: drawing.FOLDS]][1:]


def test_each_recipe_is_fitted_without_each_part_and_judged_on_it():
    fits = Fits(good=())
    told = []
    found = draw_hyperparameters(DATA, fits, draws=4, on_fit=lambda *counts: told.append(counts))
    assert told == [(done, 15) for done in range(1, 16)]
    everything = set(range(1, 31))
    parts = [everything - part for part, _ in fits.seen[:3]]
    assert sorted(number for part in parts for number in part) == sorted(everything)
    assert [part for part, _ in fits.seen] == [everything - part for part in parts] * 5
    assert [dict(trial.changes) for trial in found.trials] == [changes for _, changes in fits.seen[::3]]
    assert found.trials[0].changes == {}


def test_one_that_is_surely_better_is_taken():
    good = rates(5)[2]
    found = draw_hyperparameters(DATA, Fits(good={good}), draws=5)
    assert found.changes["learning_rate"] == good
    # At 1 the library is twice as slow as the best. At 3 the library and two tiles are measured: the best is among them.
    assert found.trials[0].efficiency == pytest.approx(np.sqrt(0.5))
    best = max(found.trials, key=lambda trial: trial.efficiency)
    assert (best.efficiency, best.error_log) == (1.0, pytest.approx(0.0, abs=1e-12))
    assert best.gain_log == pytest.approx(np.log(2.0) / 2)
    assert found.reason.startswith("The best of 5 drawn recipes, 30 problems in 3 parts, gains +41.42%")


def test_one_that_is_better_by_chance_is_not():
    # Half of the problems gain a factor of two at 1, the others lose it.
    good = rates(1)[0]
    data = [measured(m, (2.0, 1.0, 4.0, 3.0) if m % 2 else (2.0, 1.0, 3.9, 3.0)) for m in range(1, 31)]
    found = draw_hyperparameters(data, Fits(good={good}, but=range(2, 31, 2)), draws=1)
    (_, trial) = found.trials
    assert trial.gain_log == pytest.approx((np.log(2.0) / 2 - np.log(3.9 / 2.0) / 2) / 2, abs=1e-9)
    assert 0 < trial.gain_log < 2 * trial.error_log
    assert (found.changes, trial.surely_better) == ({}, False)
    assert found.reason.startswith(
        "The standing recipe stays: of 1 drawn recipe, 30 problems in 3 parts, the best gains +"
    )


def test_the_seed_decides_the_draws():
    assert rates(6) == rates(6)
    assert rates(6) != rates(6, seed=1)


def test_what_is_drawn_predicts_no_slower_than_the_recipe():
    most = hyperparameters(1000)
    for part in SPACE:
        assert max(part["n_estimators"]) * max(part["max_depth"]) <= most["n_estimators"] * most["max_depth"]
        assert not set(part) - set(most)


def test_one_shape_leaves_nothing_to_compare():
    found = draw_hyperparameters([measured(7)] * 4, Fits(good=()), draws=3)
    assert (found.changes, found.trials) == ({}, ())
    assert "one shape" in found.reason


def test_nothing_measured_on_the_device_is_said_to_be_that():
    found = draw_hyperparameters([], Fits(good=()), draws=3)
    assert (found.changes, found.trials) == ({}, ())
    assert (
        found.reason
        == "No problem was measured on the device itself, so there is none to compare recipes on."
    )


@pytest.mark.parametrize(
    ("draws", "folds", "seed"), [(0, 3, 0), (-1, 3, 0), (2, 1, 0), (1001, 3, 0), (2, 3, -1), (2, 3, 2**32)]
)
def test_draws_that_are_not_possible_are_refused_before_a_fit(draws, folds, seed):
    fits = Fits(good=())
    with pytest.raises(ModelError, match="are not possible; take 1 to 1000 draws in at least 2 folds"):
        draw_hyperparameters(DATA, fits, draws=draws, folds=folds, seed=seed)
    assert fits.seen == []


def test_no_more_is_drawn_than_there_are_and_the_reason_says_how_many(monkeypatch, recwarn):
    monkeypatch.setattr(drawing, "SPACE", ({"max_depth": [3, 4]}, {"max_depth": [5]}))
    found = draw_hyperparameters(DATA, Fits(good=()), draws=7)
    assert sorted(trial.changes.get("max_depth", 0) for trial in found.trials) == [0, 3, 4, 5]
    assert "of 3 drawn recipes, 30 problems" in found.reason
    assert [str(each.message) for each in recwarn] == []


def test_training_chooses_without_the_held_out_shapes_and_keeps_the_trials(tmp_path: Path, monkeypatch):
    seen = []

    def draw(data, fit, *, draws, seed, on_fit):
        seen.append({item.problem["m"] for item in data})
        on_fit(1, 1)
        changes = {"max_depth": 2 if len(data) < len(rows) else 3}
        return drawing.Tuned(changes, (drawing.Drawn(changes, 0.9, 0.1, 0.01),), "Chosen.")

    monkeypatch.setattr("kernelcast.training.train.draw_hyperparameters", draw)
    rows = [measured(m) for m in range(1, 61)]
    stages = []
    done = train(
        rows,
        device=A100,
        models_dir=tmp_path,
        tracking=False,
        draws=2,
        estimator_params={"n_estimators": 5, "error_folds": 1, "n_jobs": 1},
        on_progress=lambda stage, share: stages.append((stage, share)),
    )
    everything = {item.problem["m"] for item in rows}
    assert seen[1] == everything
    assert len(seen[0]) == 48  # a fifth of the shapes was left to judge by
    assert ("trying hyperparameters, fit 1 of 1", 0.5) in stages
    assert [share for _, share in stages] == sorted(share for _, share in stages)
    facts = read_manifest(done.model_dir)["facts"]
    assert facts["hyperparameters"]["max_depth"] == 3
    assert facts["drawn"] == done.drawn == json.loads(json.dumps(done.drawn))
    assert facts["drawn"]["trials"] == [
        {"changes": {"max_depth": 3}, "efficiency": 0.9, "gain_log": 0.1, "error_log": 0.01}
    ]


@pytest.mark.slow
def test_real_fits_can_be_drawn(tmp_path: Path):
    generator = np.random.default_rng(0)
    data = [
        measured(m, (2.0, *np.exp(generator.normal(0.002 * m * np.array([1, 0, -1]), 0.05))))
        for m in range(1, 61)
    ]
    options = {"device": A100, "models_dir": tmp_path, "tracking": False, "draws": 2}
    done = train(data, **options, estimator_params={"n_jobs": 1})
    trials = done.drawn["trials"]
    assert [bool(trial["changes"]) for trial in trials] == [False, True, True]
    assert all(0.8 < trial["efficiency"] <= 1 for trial in trials)
    again = train(data, **options, estimator_params={"n_jobs": 1})
    assert again.drawn == done.drawn
