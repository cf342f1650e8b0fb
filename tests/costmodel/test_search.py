"""Search in a large space: what it finds, what it avoids, and what it never does."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from cases import for_each
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.costmodel.prediction import Prediction
from kernelcast.costmodel.search import PriorRecords, Search, expected_improvement, normal_share
from kernelcast.costmodel.search_gp import Doubt, GaussianProcess, Scales
from kernelcast.costmodel.search_space import coordinates, levels
from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Block, Candidate, CandidateTable


def grid(**values):
    """A table of all combinations of some parameters' values."""
    rows = np.array(list(product(*values.values())))
    return CandidateTable([Block("kernel", {n: rows[:, i].copy() for i, n in enumerate(values)}, len(rows))])


TABLE = grid(x=[16, 32, 64, 128, 256], y=[1, 2, 4, 8], stages=[1, 2, 3, 4, 5], flag=[0, 1])


def latency(table=TABLE, best=(64, 4, 3, 1)):
    """A smooth bowl in the logarithms, with a wall: x * y above 512 fails."""
    x, y, stages, flag = table.blocks[0].columns.values()
    found = (
        0.3 * (np.log2(x / best[0])) ** 2
        + 0.4 * (np.log2(y / best[1])) ** 2
        + 0.2 * abs(stages - best[2])
        + 0.5 * (flag != best[3])
    )
    return np.where(x * y > 512, np.nan, found)


def searched(search, values, total):
    while search.told < total and (rows := search.propose(min(search.batch, total - search.told))):
        search.tell(rows, values[rows])
    return search


@pytest.mark.parametrize("seed", [0, 1])
def test_it_finds_the_best_of_a_space_in_a_quarter_of_it(seed):
    values = latency()
    search = searched(Search(TABLE, seed=seed, batch=4), values, 50)
    assert search.best == int(np.nanargmin(values))
    assert len(set(search.rows)) == search.told == 50


class Careless(Search):
    """Knows nothing of failures."""

    def _failure(self, rows, told):
        return np.zeros(len(rows))


def test_failures_are_avoided():
    values = latency()
    values[TABLE.blocks[0].columns["flag"] == 0] = np.nan  # of which no latency tells anything

    def failures(kind):
        runs = [searched(kind(TABLE, batch=4, seed=seed), values, 40) for seed in range(3)]
        # Careless is what failures are counted against; it need not find the best.
        assert kind is Careless or all(run.best == int(np.nanargmin(values)) for run in runs)
        return sum(np.isnan(values[run.rows[16:]]).sum() for run in runs)

    assert failures(Search) < 0.7 * failures(Careless)


def test_the_default_comes_first_and_what_is_known_next():
    prediction = Prediction(latency() * 2.0, np.full(len(TABLE), 0.3), ~np.isnan(latency()))
    prediction.log_latency[~prediction.covered] = 0.0
    search = Search(TABLE, default=7, prior=prediction, batch=3)
    assert search.propose() == [7, *prediction.order()[:2]]
    assert Search(TABLE, default=7, batch=3).propose()[0] == 7


@pytest.mark.slow
def test_records_from_elsewhere_lead_to_the_best_at_once():
    elsewhere = latency(best=(128, 4, 3, 1)) * 1.5 + 3.0
    values = latency()
    prior = PriorRecords(elsewhere, np.isnan(elsewhere))
    search = searched(Search(TABLE, prior=prior), values, 20)
    assert search.best == int(np.nanargmin(values))
    # What failed there is left for the end.
    assert np.isnan(values[search.rows]).sum() <= 2


def test_a_prior_that_tells_nothing_apart_is_none():
    flat = PriorRecords(np.full(len(TABLE), 2.0))
    assert Search(TABLE, prior=flat).propose(8) == Search(TABLE).propose(8)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 40), st.floats(0, 1))
def test_every_row_is_proposed_once(seed, batch, count, failing):
    random = np.random.default_rng(seed)
    table = CandidateTable.of(
        [Candidate.of("vendor"), *(Candidate.of("tile", {"size": int(n)}) for n in range(1, count + 1))]
    )
    values = np.where(random.random(len(table)) < failing, np.nan, random.normal(size=len(table)))
    first, second = (searched(Search(table, default=0, seed=seed, batch=batch), values, 99) for _ in range(2))
    assert first.rows == second.rows
    assert sorted(first.rows) == list(range(len(table)))
    assert first.rows[0] == 0
    assert first.propose() == []
    assert first.best == (None if np.isnan(values).all() else int(np.nanargmin(values)))


def test_asking_twice_is_answered_alike():
    search = searched(Search(TABLE, seed=3), latency(), 25)
    assert search.propose(1) == search.propose(1)


def test_the_spread_of_latencies_does_not_change_what_is_proposed():
    values = latency()
    once, twice = (searched(Search(TABLE, seed=5, batch=4), factor * values, 36) for factor in (1.0, 2.0))
    assert once.rows == twice.rows
    assert twice.expected_gain == pytest.approx(2.0 * once.expected_gain)


def test_features_tell_what_the_parameters_do_not():
    random = np.random.default_rng(0)
    secret = random.permutation(len(TABLE)).astype(float)
    values = secret / len(TABLE)
    with_it = searched(Search(TABLE, np.stack([secret, np.full(len(TABLE), np.nan)], axis=1)), values, 40)
    assert values[with_it.best] == 0.0


@for_each(
    ("build", "message"),
    [
        (lambda: Search(TABLE, default=200), "table has 200 candidates"),
        (lambda: Search(TABLE, batch=0), "at least 1"),
        (lambda: Search(TABLE, np.zeros((3, 2))), "one row for each of the 200"),
        (lambda: Search(TABLE, prior=PriorRecords(np.arange(3.0))), "of 3 candidates"),
        (lambda: PriorRecords(np.arange(3.0), np.zeros(2, bool)), "one shape"),
        (lambda: PriorRecords(np.array([np.inf])), "infinite"),
        (lambda: Search(TABLE).tell([1, 2], [0.0]), "2 rows and 1 latencies"),
        (lambda: Search(TABLE).tell([200], [0.0]), "Row 200"),
        (lambda: Search(TABLE).tell([1], [math.inf]), "NaN stands for a failure"),
    ],
)
def test_what_is_refused(build, message):
    with pytest.raises(InvalidRecordError, match=message):
        build()


def test_a_step_of_a_logarithm_is_as_long_everywhere():
    at = coordinates(grid(x=[1, 2, 4, 8, 16, 32, 64]))
    assert at.shape == (7, 1)
    assert np.allclose(np.diff(at[:, 0]), np.diff(at[:, 0])[0])
    assert at.std() == pytest.approx(1.0)
    # 48 is three times a power of two: alignment, and whether it is one, are told as well.
    assert coordinates(grid(x=[16, 32, 48, 64, 80, 96, 112, 128])).shape == (8, 3)


def test_neighbours_differ_in_one_level():
    table = CandidateTable([*TABLE.blocks, Block("vendor", {}, 1)])
    found = levels(table)
    assert found.shape == (201, 5)
    assert ((found != found[0]).sum(axis=1) == 1).sum() == 4 + 3 + 4 + 1
    assert (found[200] == [1, -1, -1, -1, -1]).all()


def test_the_gradient_is_that_of_the_density():
    random = np.random.default_rng(1)
    at, values = random.normal(size=(12, 3)), random.normal(size=12)
    process = GaussianProcess(at, values, Scales.even(3), Doubt(), steps=0)
    scales = Scales.even(3).vector() + random.normal(0.0, 0.3, 5)
    _, slope = process._density(scales)
    for place in range(5):
        step = np.zeros(5)
        step[place] = 1e-5
        rise = process._density(scales + step)[0] - process._density(scales - step)[0]
        assert slope[place] == pytest.approx(rise / 2e-5, rel=1e-3, abs=1e-6)


def test_a_process_passes_through_what_it_saw_and_is_unsure_elsewhere():
    at = np.linspace(-2.0, 2.0, 9)[:, None]
    process = GaussianProcess(at, np.sin(2 * at[:, 0]), Scales.even(1), Doubt())
    there = process.predict(np.array([[-2.0], [0.25], [9.0]]))
    assert there.mean[0] == pytest.approx(np.sin(-4.0), abs=0.05)
    assert there.mean[1] == pytest.approx(np.sin(0.5), abs=0.15)
    assert there.variance[0] < 0.1 * there.variance[1] < 0.1 * there.variance[2]
    before = there.variance.copy()
    there.expect(1)
    assert there.variance[1] < 0.2 * before[1]
    assert there.variance[2] == pytest.approx(before[2])


def test_expected_improvement_by_known_values():
    assert normal_share(np.array([-1.96, 0.0, 1.0])) == pytest.approx([0.0249979, 0.5, 0.8413447], abs=1e-6)
    found = expected_improvement(0.0, np.array([0.0, -1.0, 5.0]), np.array([1.0, 1e-6, 0.1]))
    assert found == pytest.approx([1 / math.sqrt(2 * math.pi), 1.0, 0.0], abs=1e-6)
