"""Training: what is held out, how it is judged, what is registered, and that it can be repeated."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.costmodel import Prediction, ProblemData, RankingModel, artifact, read_manifest, verify_files
from kernelcast.costmodel.artifact import ARTIFACT_VERSION, write_artifact
from kernelcast.costmodel.locate import find_champion
from kernelcast.errors import ModelError
from kernelcast.kernels import Candidate, CandidateTable, Problem, problem
from kernelcast.kernels.devices import device
from kernelcast.training import held_out, registry
from kernelcast.training.data import dataset_hash
from kernelcast.training.recipe import hyperparameters
from kernelcast.training.train import standing_of, train

A100 = device("a100-sxm4-80gb")
TILES = [(rows, columns) for rows in (16, 32, 64, 128) for columns in (32, 128)]
SMALL = {"n_estimators": 40, "error_folds": 2, "n_jobs": 1}


def candidate(rows: int, columns: int) -> Candidate:
    config = {
        "block_m": rows,
        "block_n": columns,
        "block_k": 32,
        "group_m": 8,
        "num_stages": 3,
        "num_warps": 4,
    }
    return Candidate.of("triton_tiled", config)


def measured(
    m: int, n: int = 512, k: int = 512, *, dtype: str = "float16", noise: float = 0.0, on=A100
) -> ProblemData:
    """A tile costs its waves times its area; the vendor costs a little more than the largest tile."""

    def cost(rows: int, columns: int) -> float:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        return math.ceil(tiles / 108) * (rows * columns + 3000) * k / 1e6 + 2

    latency = np.array([1.03 * cost(128, 128), *(cost(*tile) for tile in TILES)]) * (1 + noise)
    table = CandidateTable.of([Candidate.of("vendor"), *(candidate(*tile) for tile in TILES)])
    unknown = np.full(len(latency), np.nan)
    workload = "timm" if m % 2 else "random"
    return ProblemData(
        problem("gemm", m=m, n=n, k=k, dtype=dtype), on, table, np.log(latency), unknown, workload=workload
    )


def dataset(count: int, seed: int = 0) -> list[ProblemData]:
    generator = np.random.default_rng(seed)
    return [measured(*(int(2 ** generator.uniform(4, 12)) for _ in range(3))) for _ in range(count)]


def trained(models: Path, data: list[ProblemData], **options):
    options = {"tracking": False, "estimator_params": SMALL, **options}
    return train(data, device=A100, models_dir=models, **options)


# Hyperparameters


@pytest.mark.slow
def test_fewer_than_100_problems_get_smaller_trees_and_the_caller_has_the_last_word():
    small, large = hyperparameters(99), hyperparameters(100)
    assert (small["n_estimators"], small["max_depth"], small["min_child_weight"]) == (200, 4, 0.2)
    assert (small["colsample_bytree"], large["colsample_bytree"]) == (1.0, 0.4)
    assert (large["n_estimators"], large["max_depth"], large["min_child_weight"]) == (120, 7, 2.0)
    assert hyperparameters(10, {"max_depth": 3}, seed=7) == {**small, "max_depth": 3, "random_state": 7}
    numpys = hyperparameters(
        10, {"n_estimators": np.int64(40), "learning_rate": np.float32(0.25)}, seed=np.int64(3)
    )
    assert json.loads(json.dumps(numpys)) == {
        **small,
        "n_estimators": 40,
        "learning_rate": 0.25,
        "random_state": 3,
    }
    with pytest.raises(ModelError, match=r"no parameter depth.*max_depth"):
        hyperparameters(10, {"depth": 3})
    with pytest.raises(ModelError, match="max_depth is 0; it must be a whole number from 1 to 16"):
        hyperparameters(10, {"max_depth": 0})
    with pytest.raises(ModelError, match="random_state is None; give a whole number"):
        hyperparameters(10, {"random_state": None})


# What is held out


@given(st.lists(st.integers(1, 60), min_size=2, max_size=60), st.floats(0.05, 0.95))
def test_no_shape_is_on_both_sides_and_nothing_is_lost(sizes, holdout):
    data = [measured(m, dtype=dtype) for m in sizes for dtype in ("float16", "float32")]
    _, parts = held_out.splits(data, holdout)
    if len(set(sizes)) < 2:
        assert parts == []
        return
    for part in parts:
        fitted = {item.problem.shape for item in part.train}
        judged = {item.problem.shape for item in part.test}
        assert fitted
        assert judged
        assert fitted.isdisjoint(judged)
        assert len(part.train) + len(part.test) == len(data)
    if len(data) < held_out.FEW_PROBLEMS:
        assert sorted(id(item) for part in parts for item in part.test) == sorted(map(id, data))


def test_a_fifth_of_many_shapes_is_held_out_and_five_folds_of_few():
    how, parts = held_out.splits([measured(m) for m in range(1, 101)], 0.2)
    assert [len(part.test) for part in parts] == [20]
    assert how == "20 of 100 shapes held out"
    how, parts = held_out.splits([measured(m) for m in range(1, 50)], 0.2)
    assert sorted(len(part.test) for part in parts) == [9, 10, 10, 10, 10]
    assert how == "5 folds by shape, each problem judged once"


def test_the_same_shapes_are_held_out_in_any_order_and_mostly_as_data_grow():
    def shapes(data):
        (part,) = held_out.splits(data, 0.2)[1]
        return {item.problem.shape for item in part.test}

    data = [measured(m) for m in range(1, 201)]
    assert shapes(data) == shapes(data[::-1])
    grown = [measured(m) for m in range(1, 251)]
    assert len(shapes(data) - shapes(grown)) <= 5  # of 40; a new drawing would lose about 32


@pytest.mark.parametrize("holdout", [0.0, 1.0, -1.0, math.nan])
def test_an_impossible_share_is_refused(holdout):
    with pytest.raises(ModelError, match="between 0 and 1"):
        held_out.splits(dataset(30), holdout)


# How it is judged


class Oracle:
    """Ranks by the measurements themselves, or by the opposite."""

    def __init__(self, data, sign: float = 1.0) -> None:
        self.sign = sign
        self.known = {item.problem: item.log_latency for item in data}

    def predict(self, problem, table, device) -> Prediction:
        log_latency = self.sign * self.known[problem]
        return Prediction(log_latency, np.ones(len(table)), np.ones(len(table), dtype=bool))


def test_the_judged_model_never_saw_a_held_out_shape_and_figures_are_exact():
    data = dataset(60)
    fitted = []

    def fit(part):
        fitted.append({item.problem.shape for item in part})
        return Oracle(data)

    results = held_out.judge_held_out(data, fit)
    assert len(fitted) == 1
    assert fitted[0].isdisjoint({case.problem.shape for case in results.cases})
    assert results.scores().at_1 == 1.0
    assert results.scores().at_3 == 1.0
    # By hand: the default's efficiency is the best latency over the vendor's.
    chosen = {item.problem: item for item in data}
    latencies = [np.exp(chosen[case.problem].log_latency) for case in results.cases]
    default = np.exp(np.mean([np.log(latency.min() / latency[0]) for latency in latencies]))
    assert results.scores("default").at_1 == pytest.approx(default, rel=1e-12)
    assert results.scores("default").at_3 == pytest.approx(default, rel=1e-12)
    assert results.baselines() == ["default", "best_fixed", "analytic", "random"]

    worst = held_out.judge_held_out(data, lambda _: Oracle(data, -1.0))
    slowest = np.exp(np.mean([np.log(latency.min() / latency.max()) for latency in latencies]))
    assert worst.scores().at_1 == pytest.approx(slowest, rel=1e-12)
    assert worst.scores().at_3 >= default  # the default is among the three


def test_random_figures_are_those_of_the_baselines_module():
    from kernelcast.training.baselines import random_curves

    results = held_out.judge_held_out(dataset(30), lambda _: Oracle(dataset(30)))
    np.testing.assert_allclose(results.curves["random"], random_curves(results.cases), rtol=1e-12)


def test_equal_predictions_are_a_constant_model():
    data = dataset(30)
    assert held_out.judge_held_out(data, lambda _: Oracle(data, 0.0)).constant
    assert not held_out.judge_held_out(data, lambda _: Oracle(data)).constant


# What is registered


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(models, data, result) of one training."""
    models = tmp_path_factory.mktemp("models")
    data = dataset(60)
    return models, data, trained(models, data)


@pytest.mark.slow
def test_a_good_model_is_registered_promoted_and_says_what_it_was_trained_on(first):
    models, data, result = first
    digest = dataset_hash(data)
    assert result.model_dir == models / "a100-sxm4-80gb" / "gemm" / f"0001-{digest[:8]}"
    assert result.promoted, result.reason
    assert find_champion(models, A100, "gemm") == result.model_dir
    verify_files(result.model_dir)
    facts = RankingModel.load(result.model_dir).facts
    assert facts["device"] == A100.to_dict()
    assert facts["dataset_hash"] == digest
    assert (facts["problems"], facts["candidates"], facts["measurements"]) == (60, 540, 540)
    assert sum(facts["workloads"].values()) == 60
    assert facts["hyperparameters"]["n_estimators"] == 40
    assert facts["hyperparameters"]["max_depth"] == 4
    assert "xgboost" in facts["libraries"]
    assert facts["gate"] == {"promoted": True, "reason": result.reason}
    rankers = facts["held_out"]["rankers"]
    assert facts["held_out"]["problems"] == 12
    assert rankers == result.scores["rankers"]
    assert (
        rankers["model"]["with_default"]["1"]["geomean"] > rankers["default"]["with_default"]["1"]["geomean"]
    )


@pytest.mark.slow
def test_the_record_beside_the_model_has_every_held_out_problem(first):
    _, data, result = first
    record = held_out.read_record(result.model_dir, read_manifest(result.model_dir))
    assert len(record["problems"]) == 12
    assert len(record["trained_shapes"]) == 60  # the registered model is fitted on everything
    assert sum(record["importance"].values()) == pytest.approx(1.0, abs=1e-4)
    by_text = {str(item.problem): np.exp(item.log_latency) for item in data}
    for item in record["problems"]:
        latency = by_text[item["problem"]]
        assert item["best_us"] == pytest.approx(latency.min(), rel=1e-5)
        assert item["default_us"] == pytest.approx(latency[0], rel=1e-5)
        assert item["best_us"] <= item["verified_us"] <= item["default_us"]


@pytest.mark.slow
def test_the_same_data_and_seed_give_the_same_bytes_but_for_the_time(first, tmp_path):
    _, data, result = first
    again = trained(tmp_path, data[:])
    other = trained(tmp_path, data[:], seed=1)
    names = sorted(path.name for path in result.model_dir.iterdir())
    assert names == sorted(path.name for path in again.model_dir.iterdir())
    for name in names:
        if name != "manifest.json":
            assert (again.model_dir / name).read_bytes() == (result.model_dir / name).read_bytes(), name
    manifests = [json.loads((one.model_dir / "manifest.json").read_text()) for one in (result, again)]
    for manifest in manifests:
        del manifest["digest"], manifest["facts"]["created_at"]
    assert manifests[0] == manifests[1]
    assert (other.model_dir / "difference.json").read_bytes() != (
        result.model_dir / "difference.json"
    ).read_bytes()


@pytest.mark.slow
def test_training_again_on_the_same_data_is_a_tie_and_changes_nothing(first, tmp_path):
    _, data, _ = first
    one = trained(tmp_path, data)
    two = trained(tmp_path, data)
    assert one.promoted
    assert not two.promoted
    assert "a tie, decided by the number of problems: trained on 60 problems" in two.reason
    assert "On the 12 problems that allow a comparison" in two.reason
    assert find_champion(tmp_path, A100, "gemm") == one.model_dir
    assert [model.version[:4] for model in registry.list_models(tmp_path)] == ["0001", "0002"]


@pytest.mark.slow
def test_the_champion_is_judged_on_what_it_had_not_seen_and_by_what_was_noted(first):
    _, data, result = first
    (part,) = held_out.splits(data, 0.2)[1]

    def judged(items):
        return held_out.judge_split(Oracle(items), held_out.Split(part.train, items), "by hand")

    # Held out in its own training, unchanged: the efficiencies noted then.
    noted = standing_of(result.model_dir, judged(part.test))
    assert noted.problems == 12
    assert noted.champion.at_1 == pytest.approx(
        result.scores["rankers"]["model"]["with_default"]["1"]["geomean"], rel=1e-5
    )
    assert noted.model.at_1 == 1.0
    assert noted.trained_on == 60
    # Shapes it was fitted on, or measurements that changed since: no fair comparison.
    changed = [measured(*(size for _, size in item.problem.shape), noise=0.01) for item in part.test]
    for items in (part.train[:5], changed):
        seen = standing_of(result.model_dir, judged(items))
        assert (seen.problems, seen.champion) == (0, None)
    # New shapes: its own predictions.
    fresh = dataset(8, seed=9)
    model = RankingModel.load(result.model_dir)
    expected = held_out.judge_split(model, held_out.Split(part.train, fresh), "").scores()
    assert standing_of(result.model_dir, judged(fresh)).champion == expected
    mixed = standing_of(result.model_dir, judged([*fresh, *part.test, *part.train[:3]]))
    assert mixed.problems == 20


@pytest.mark.slow
def test_a_broken_champion_does_not_stand_in_the_way(first, tmp_path):
    _, data, _ = first
    one = trained(tmp_path, data)
    (one.model_dir / "difference.npz").write_bytes(b"")
    two = trained(tmp_path, data)
    assert two.promoted
    assert f"The champion {one.model_dir.name} is broken and cannot be compared" in two.reason


def test_a_champion_of_an_earlier_layout_or_broken_is_told_from_none(tmp_path):
    old, broken = tmp_path / "0001-3f2a9c1b", tmp_path / "0002-3f2a9c1b"
    for folder, version in ((old, 1), (broken, ARTIFACT_VERSION)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kernelcast.costmodel.artifact.ARTIFACT_VERSION", version)
            write_artifact(folder, {"operation": "gemm"}, {"level": b"{}"}, {})
    assert standing_of(tmp_path / "0003-3f2a9c1b", None) is None
    assert standing_of(old, None).unusable == "is of an earlier layout"
    assert standing_of(broken, None).unusable == "is broken"


@pytest.mark.slow
def test_one_shape_alone_gives_a_model_that_is_not_promoted(tmp_path):
    result = trained(tmp_path, [measured(64), measured(64, dtype="float32")])
    assert result.scores == {}
    assert not result.promoted
    assert "nothing can be held out" in result.reason
    assert RankingModel.load(result.model_dir).facts["held_out"].keys() == {"file", "sha256"}
    assert find_champion(tmp_path, A100, "gemm") is None


@pytest.mark.slow
def test_a_constant_model_is_not_promoted(tmp_path):
    flat = [
        ProblemData(item.problem, A100, item.table, np.full(len(item.table), 3.0), item.error_log)
        for item in dataset(30)
    ]
    constant = {"n_estimators": 10}
    result = train(flat, device=A100, models_dir=tmp_path, tracking=False, estimator_params=constant)
    assert not result.promoted
    # Where all are alike no order beats another. What the estimate adds may keep the predictions from being quite constant.
    assert "one latency for all candidates" in result.reason or "'default' is perfect" in result.reason


@pytest.mark.slow
def test_failures_are_counted_and_cost_a_place_in_the_ranking(tmp_path):
    data = [replace(item, failed=(candidate(256, 256),)) for item in dataset(30)]
    result = trained(tmp_path, data)
    facts = RankingModel.load(result.model_dir).facts
    assert (facts["candidates"], facts["failures"], facts["measurements"]) == (270, 30, 300)
    assert result.scores["candidates_per_problem"] == 10


def test_what_cannot_be_trained_on_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no measured problem"):
        trained(tmp_path, [])
    with pytest.raises(ModelError, match="which has other facts than a100"):
        trained(tmp_path, [measured(64), measured(65, on=device("h100-sxm5-80gb"))])
    toy = replace(measured(64), problem=Problem("toy", (("m", 1),), "float32"))
    with pytest.raises(ModelError, match="gemm, toy"):
        trained(tmp_path, [measured(64), toy])
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_registered_is_not_fitted(tmp_path, monkeypatch):
    monkeypatch.setattr(RankingModel, "fit", lambda *_, **__: pytest.fail("it fits"))
    models = tmp_path / "models"
    models.write_text("")
    with pytest.raises(ModelError, match=f"^Cannot write to the models folder {models}: "):
        trained(models, dataset(10))
    for options, message in (
        ({"seed": -1}, "random_state is -1; it must be a whole number from 0"),
        ({"draws": 1001}, "1001 draws in 3 folds with seed 0 are not possible"),
    ):
        with pytest.raises(ModelError, match=message):
            trained(tmp_path / "other", dataset(10), **options)


@pytest.mark.slow
@pytest.mark.parametrize("record", [b"{}", b"[]", b"null", b"", b'{"record_version": 1}', b"cut {"])
def test_a_champion_whose_record_is_no_record_yields_to_more_problems_only(first, tmp_path, record):
    _, data, result = first
    folder = shutil.copytree(result.model_dir, tmp_path / result.model_dir.name)
    rewrite(folder, lambda facts: facts["held_out"].update(sha256=hashlib.sha256(record).hexdigest()))
    (folder / "held_out.json").write_bytes(record)
    (part,) = held_out.splits(data, 0.2)[1]
    results = held_out.judge_split(Oracle(data), part, "by hand")
    standing = standing_of(folder, results)
    assert (standing.trained_on, standing.problems, standing.unusable) == (60, 0, "")
    rewrite(folder, lambda facts: facts.update(problems="60"))
    assert standing_of(folder, results).unusable == "is broken"


def rewrite(folder: Path, change) -> None:
    """Change the facts in a manifest, and write its digest anew."""
    manifest = read_manifest(folder)
    change(manifest["facts"])
    manifest["digest"] = artifact._digest(manifest)
    (folder / "manifest.json").write_bytes(artifact._text(manifest))


# Tracking


@pytest.mark.slow
def test_a_training_is_an_mlflow_run_with_its_parameters_figures_and_files(first, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    home = tmp_path / "home"
    monkeypatch.setenv("KERNELCAST_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    _, data, _ = first
    stages = []
    result = trained(tmp_path / "models", data, tracking=True, on_progress=lambda *step: stages.append(step))
    assert result.tracking_warning == ""
    client = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")
    run = client.get_run(result.run_id)
    assert client.get_experiment(run.info.experiment_id).name == "kernelcast/gemm"
    assert run.info.run_name == f"a100-sxm4-80gb {result.model_dir.name}"
    figures = result.scores["rankers"]
    metrics = run.data.metrics
    assert metrics["efficiency_at_3_with_default"] == figures["model"]["with_default"]["3"]["geomean"]
    assert metrics["baseline_random_efficiency_at_1"] == figures["random"]["without_default"]["1"]["geomean"]
    assert metrics["dataset_problems"] == 60
    assert metrics["held_out_problems"] == 12
    assert metrics["promoted"] == 1
    assert run.data.params["estimator.n_estimators"] == "40"
    assert run.data.params["dataset_hash"] == dataset_hash(data)
    assert run.data.params["seed"] == "0"
    assert run.data.tags["device"] == "a100-sxm4-80gb"
    assert run.data.tags["gate"] == result.reason
    files = {
        file.path
        for folder in ("", "model", "plots")
        for file in client.list_artifacts(result.run_id, folder)
    }
    assert {"model", "plots", "report.html", "model/manifest.json", "plots/efficiency_over_k.svg"} <= files
    assert stages[-1] == ("done", 1.0)
    assert [share for _, share in stages] == sorted(share for _, share in stages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "models"]


@pytest.mark.slow
def test_an_unreachable_server_costs_a_warning_and_not_the_model(first, tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    _, data, _ = first
    result = trained(tmp_path / "models", data, tracking=True)
    assert result.promoted
    assert result.run_id is None
    assert "kernelcast models sync" in result.tracking_warning
    assert len(list((tmp_path / "home" / "spool").glob("*.json"))) == 1
