"""What came true of expected regrets, on problems left out."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcast.costmodel.adaptive import MOST, expected_regrets
from kernelcast.costmodel.calibrate import _BOUNDS, _bounds, _never_falling, assess, calibrate
from kernelcast.costmodel.uncertainty import LeftOut
from kernelcast.kernels import Candidate, CandidateTable, Problem


def toy(m, n):
    return Problem("toy", (("m", m), ("n", n)), "float32")


def shapes(count, seed=0):
    rng = np.random.default_rng(seed)
    return [toy(int(m), int(n)) for m, n in np.exp(rng.uniform(1, 9, (count, 2)))]


def test_what_never_falls_is_closest():
    np.testing.assert_allclose(
        _never_falling(np.array([1.0, 3.0, 2.0, 1.0, 5.0]), np.array([1.0, 1, 1, 2, 1])),
        [1.0, 1.75, 1.75, 1.75, 5.0],
    )


def drawn(problems, factor, seed=0, rows=6):
    """Problems whose predictions are off by ``factor`` times what is claimed: 0.05 of a difference."""
    rng = np.random.default_rng(seed)
    predicted = rng.uniform(0, 0.15, (problems, rows))
    target = predicted + rng.normal(0, factor * 0.05 / np.sqrt(2), (problems, rows))
    group = np.repeat(np.arange(problems), rows)
    left_out = LeftOut(predicted.ravel(), np.full(problems * rows, 0.05), group % 3)
    return left_out, target.ravel(), group, np.tile(np.arange(rows) == 0, problems)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_calibration_says_what_comes_true(factor):
    left_out, target, group, default = drawn(1500, factor)
    found = calibrate(left_out, target, group, default, np.zeros(1500, dtype=bool))
    believed, true = [], []
    fresh, their, number, _ = drawn(1500, factor, seed=1)
    for each in range(1500):
        rows = np.flatnonzero(number == each)
        rows = np.concatenate([rows[:1], rows[1:][np.argsort(fresh.predicted[rows[1:]])]])
        believed.append(expected_regrets(fresh.predicted[rows], fresh.error[rows], MOST))
        true.append(np.minimum.accumulate(their[rows]) - their[rows].min())
    expected, true = found.truly(np.array(believed)).mean(axis=0), np.mean(true, axis=0)
    # Two standard errors are added, so it errs on one side.
    for k in range(3):
        assert 0.9 < expected[k] / true[k] < 1.6
    assert found.problems == 1500
    assert found.widening == 1.5


def test_a_bound_on_the_mean_is_where_the_mean_came_true():
    left_out, target, group, default = drawn(1500, 1.0)
    found = calibrate(left_out, target, group, default, np.zeros(1500, dtype=bool))
    assert found.bounds(np.array(0.005)) > 0.005
    assert (np.diff(found.bounds.ys) >= 0).all()


def test_a_bound_on_the_mean_leaves_two_standard_errors():
    # The first of two rows loses just what is expected of it, so a bound admits the problems up to it.
    regret = np.linspace(0.0, 0.1, 200)
    both = np.stack([regret, np.zeros(200)], axis=1)
    limit = float(_bounds(both, both)(np.array(0.005)))
    step = float(_BOUNDS[1] / _BOUNDS[0])

    def came_to(bound):
        lost = np.where(regret <= bound, regret, 0.0)
        return lost.mean() + 2 * lost.std() / np.sqrt(200)

    assert came_to(limit) <= 0.005 < came_to(limit * step)
    assert np.where(regret <= limit, regret, 0.0).mean() < 0.0045


def test_errors_beyond_training_are_widened_by_what_was_seen():
    left_out, target, group, default = drawn(400, 1.0)
    novel = np.arange(400) < 100
    target = np.where(novel[group], left_out.predicted + 2.0 * (target - left_out.predicted), target)
    found = calibrate(left_out, target, group, default, novel)
    # They are 2 times as large. Of 100 problems a third of that is believed: 2 ** (1 / 3).
    assert found.widening == pytest.approx(2.0 ** (1 / 3), abs=0.06)
    assert calibrate(left_out, drawn(400, 1.0)[1], group, default, novel).widening < 1.1


def test_of_few_problems_nothing_is_said():
    assert calibrate(*drawn(20, 1.0), np.zeros(20, dtype=bool)) is None


def test_a_fit_tells_its_reach_and_whether_a_problem_was_novel_to_its_fold():
    problems = [*shapes(90), toy(10**6, 10**6)]
    table = CandidateTable.of([Candidate.of("vendor"), *(Candidate.of("tiled", {"t": t}) for t in (1, 2))])
    group = np.repeat(np.arange(91), 3)
    rng = np.random.default_rng(0)
    target = rng.normal(size=273)
    left_out = LeftOut(target + 0.1 * rng.normal(size=273), np.full(273, 0.1), group % 3)
    found = assess(problems, [table] * 91, target, group, left_out)
    assert found.reach.largest == (10**6, 10**6)
    assert found.calibration.problems == 91
    assert assess(problems, [table] * 91, target, group, None).calibration is None


def test_a_model_keeps_what_it_knows_of_its_limits(tmp_path):
    pytest.importorskip("xgboost")
    pytest.importorskip("sklearn")
    from kernelcast.costmodel import CostModel, ProblemData, RankingModel
    from kernelcast.kernels.devices import device

    rng = np.random.default_rng(0)
    where = device("a100")
    table = CandidateTable.of([Candidate.of("vendor"), *(Candidate.of("tiled", {"t": t}) for t in (1, 2, 4))])
    data = [
        ProblemData(problem, where, table, rng.normal([0.2, 0.0, 0.1, 0.3], 0.1), np.full(4, 0.01))
        for problem in shapes(60)
    ]
    model = RankingModel.fit(data, CostModel(n_estimators=5, max_depth=2, n_jobs=1))
    assert model.adaptive.calibration.problems == 60
    model.save(tmp_path / "model")
    back = RankingModel.load(tmp_path / "model")
    assert back.adaptive.to_dict() == model.adaptive.to_dict()
    far = toy(10**7, 5)
    found = back.predict(far, table, where)
    assert found.novel.startswith("m = 10000000 is more than twice the largest in training")
    assert found.calibration == model.adaptive.calibration
    assert model.predict(data[0].problem, table, where).novel == ""
    # A model of before has nothing to say, and is read all the same.
    model.adaptive = None
    model.save(tmp_path / "old")
    old = RankingModel.load(tmp_path / "old").predict(far, table, where)
    assert (old.novel, old.calibration) == ("", None)
