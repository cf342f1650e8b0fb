"""Explanations: by the roofline here; by a model's trees, whose contributions add up, in a real one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kernelcast.costmodel import ProblemData, RankingModel
from kernelcast.kernels import candidates, problem
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device
from kernelcast.runtime import Selector

HERE = detect("cpu")


@pytest.fixture
def selector(lab, tmp_path):
    return Selector(HERE, models=tmp_path / "models", cache=False, store=False, mode="predict")


def test_the_roofline_explains_by_its_terms(selector, lab):
    selection = selector.select(lab.a_problem())
    found = selector.explain(selection, rivals=2)
    assert (found.ranked_by, found.place) == ("analytic", 1)
    terms = {each.feature: each for each in found.features}
    assert terms["roofline_us"].value == pytest.approx(selection.predicted_us, rel=1e-6)
    assert terms["roofline_us"].unit == "us"
    assert all(math.isnan(each.contribution_log) for each in found.features)
    # In the order of the ranking: "slow" has twice the work of "quick", the default three times.
    assert [each.candidate.variant for each in found.rivals] == ["slow", "vendor"]
    assert all(each.ratio > 1 for each in found.rivals)
    assert {each.feature for each in found.rivals[0].because} >= {"compute_us", "roofline_us"}
    text = str(found)
    assert "ranked by the roofline" in text
    assert "slow: predicted" in text


def test_what_was_selected_may_stand_further_down(selector, lab):
    verified = selector.select(lab.a_problem(), mode="verify")
    lab.STATE.illegal = set()
    found = selector.explain(verified)
    assert found.place == 1
    lab.STATE.illegal = {verified.candidate.variant}
    gone = selector.explain(verified)
    assert (gone.place, gone.features) == (0, ())
    assert all(math.isnan(each.ratio) for each in gone.rivals)


@pytest.mark.slow
def test_a_models_contributions_add_up_and_say_why_a_rival_lost(tmp_path):
    from kernelcast.costmodel.estimator import CostModel
    from kernelcast.runtime.explain import explain
    from kernelcast.runtime.ranking import Ranking, default_row

    a100 = device("a100-sxm4-80gb")
    data = []
    for m in (256, 512, 1024, 2048, 4096):
        each = problem("gemm", m=m, n=1024, k=1024, dtype="float16")
        table = candidates(each, a100, subset="default")
        # Twice as slow for every halving of num_warps: the one thing there is to learn.
        log = np.array([math.log(800.0 / dict(c.config).get("num_warps", 1)) for c in table])
        data.append(ProblemData(each, a100, table, log, np.full(len(table), np.nan)))
    model = RankingModel.fit(data, CostModel(n_estimators=30, error_folds=0, n_jobs=1))
    asked = data[2].problem
    table = data[2].table
    prediction = model.predict(asked, table, a100)
    ranking = Ranking(table, prediction, "predicted", "1", "by a test", default_row(table, asked))
    selector = Selector(a100, models=tmp_path, cache=False, store=False, mode="predict")
    selection = selector.select(asked)
    best = ranking.table[int(ranking.order()[0])]
    worst = ranking.table[int(ranking.order()[-1])]
    assert dict(best.config)["num_warps"] == 8
    found = explain(replace(selection, candidate=best), ranking, a100, model, rivals=len(table))
    sizes = [abs(each.contribution_log) for each in found.features]
    assert sizes == sorted(sizes, reverse=True)
    loser = next(each for each in found.rivals if each.candidate == worst)
    assert any("warps" in each.feature for each in loser.because)
    assert loser.ratio == pytest.approx(math.exp(prediction.log_latency.max() - prediction.log_latency.min()))
