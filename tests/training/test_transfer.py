"""Transfer to a new device, on made-up devices whose latencies follow their facts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernelcast.costmodel import AnalyticModel, ProblemData, RankingModel, read_manifest
from kernelcast.errors import ModelError
from kernelcast.kernels import candidates, problem
from kernelcast.kernels.devices import device
from kernelcast.training.train import train
from kernelcast.training.transfer import evaluate_transfer, fit_transfer, problem_weights

OLD = device("a100-sxm4-80gb")
NEW = device("h100-sxm5-80gb")
SMALL = {"n_estimators": 40, "max_depth": 4, "error_folds": 0, "n_jobs": 1}


def measured(where, count, seed=0, penalty=0.0):
    """Problems whose latencies are the roofline's, many warps faster where a penalty below 0 says so."""
    rng = np.random.default_rng(seed)
    found = {}
    while len(found) < count:
        m, n, k = (int(2 ** rng.uniform(6, 12)) // 16 * 16 for _ in range(3))
        each = problem("gemm", m=m, n=n, k=k, dtype="float16")
        table = candidates(each, where, subset="default")
        log = AnalyticModel().predict(each, table, where).log_latency
        warps = np.array([dict(one.config).get("num_warps", 4) for one in table])
        log = log + penalty * (warps == 8)
        found[each.shape] = ProblemData(each, where, table, log, np.full(len(table), 0.01), workload="w")
    return list(found.values())


def test_few_targets_weigh_more_and_many_as_much():
    old, new = measured(OLD, 30), measured(NEW, 2)
    assert problem_weights(old, new).tolist() == [1.0] * 30 + [1.5] * 2
    assert problem_weights(old, new * 20).tolist() == [1.0] * 70
    assert problem_weights(old[:1] * 1000, new).tolist()[-1] == 10.0
    assert problem_weights(old, []) is None
    assert problem_weights([], new) is None


@pytest.mark.slow
def test_a_few_measured_problems_teach_what_only_the_new_device_does():
    old, new = measured(OLD, 60), measured(NEW, 40, seed=1, penalty=-1.0)
    found = evaluate_transfer(old, new, measured=(0, 20), seeds=1, estimator_params=SMALL)
    none, some = found.points
    assert (none.measured, some.measured, found.test_problems) == (0, 20, 20)
    assert none.target_only is None
    assert some.efficiency["1"]["geomean"] > none.efficiency["1"]["geomean"]
    assert some.efficiency_with_default["1"] == some.efficiency["1"]  # for k = 1 nothing is added
    assert (found.train_devices, found.test_device) == ((OLD.name,), NEW.name)
    assert found.to_json()["points"][1]["measured"] == 20


@pytest.mark.slow
def test_the_same_seed_gives_the_same_model():
    old, new = measured(OLD, 10), measured(NEW, 4, seed=1)
    one, two = (fit_transfer(old, new, estimator_params=SMALL, seed=3) for _ in range(2))
    assert np.array_equal(one.forests["difference"].leaf, two.forests["difference"].leaf)
    none = fit_transfer(old, [], estimator_params=SMALL, seed=3)
    assert not np.array_equal(one.forests["difference"].leaf, none.forests["difference"].leaf)


@pytest.mark.parametrize(
    ("source", "target", "options", "fault"),
    [
        ([], [1], {}, "other device"),
        ([1], [], {}, "new device"),
        ([1], [1], {"measured": (5,)}, "at most half"),
        ([1], [1], {"seeds": 0}, "0 seeds"),
        ([1], [1], {"measured": (-1,)}, "-1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(source, target, options, fault):
    old = measured(OLD, 2) if source else []
    new = [replace(item, device=NEW) for item in measured(OLD, 2, seed=1)] if target else []
    with pytest.raises(ModelError, match=fault):
        evaluate_transfer(old, new, **{"measured": (0,), "seeds": 1, **options})


def test_one_device_on_both_sides_is_refused():
    old = measured(OLD, 3)
    with pytest.raises(ModelError, match="both sides"):
        evaluate_transfer(old, old[:2], measured=(0,), seeds=1)


@pytest.mark.slow
def test_a_model_of_a_new_device_is_registered_with_what_it_learned_from(tmp_path):
    old, new = measured(OLD, 6), measured(NEW, 6, seed=1)
    found = train(
        new,
        device=NEW,
        others=old,
        models_dir=tmp_path,
        tracking=False,
        estimator_params={**SMALL, "n_estimators": 5},
    )
    facts = read_manifest(found.model_dir)["facts"]
    assert facts["device"]["name"] == NEW.name
    assert facts["problems"] == 6
    assert facts["others"] == {
        "problems": 6, "devices": {OLD.name: 6}, "measurements": sum(len(item.table) for item in old)
    }  # fmt: skip
    assert found.scores["problems"] == 6
    alone = train(
        new, device=NEW, models_dir=tmp_path, tracking=False, estimator_params={**SMALL, "n_estimators": 5}
    )
    assert "others" not in read_manifest(alone.model_dir)["facts"]
    assert read_manifest(alone.model_dir)["facts"]["dataset_hash"] != facts["dataset_hash"]


def test_with_nothing_measured_there_is_a_model_that_is_not_promoted(tmp_path):
    found = train(
        [], device=NEW, others=measured(OLD, 4), models_dir=tmp_path, tracking=False,
        estimator_params={**SMALL, "n_estimators": 5},
    )  # fmt: skip
    assert not found.promoted
    assert f"No problem was measured on {NEW.name}" in found.reason
    model = RankingModel.load(found.model_dir)
    (asked,) = measured(NEW, 1)
    assert model.predict(asked.problem, asked.table, NEW).covered.any()


def test_the_device_itself_is_none_of_the_others(tmp_path):
    new = measured(NEW, 2)
    with pytest.raises(ModelError, match="among the other devices"):
        train(new, device=NEW, others=new, models_dir=tmp_path, tracking=False)
