"""The ranking model: fitting, predicting, coverage, level, saving and loading."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from kernelcast import kernels
from kernelcast.costmodel import CostModel, Forest, Prediction, ProblemData, RankingModel, verify_files
from kernelcast.costmodel.model import design, schema_of
from kernelcast.errors import ArtifactError, InvalidRecordError, ModelError
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem

pytest.importorskip("sklearn")
pytest.importorskip("xgboost")

GPU = Device("toy-gpu", "gpu", "nvidia", "sm80", 108, memory_bandwidth=1e12, peak_flops=(("float32", 1e13),))
QUICK = {"n_estimators": 40, "max_depth": 5, "learning_rate": 0.2, "n_jobs": 1}

TABLE = CandidateTable.of(
    [
        Candidate("vendor"),
        *(
            Candidate.of("tiled", {"tile": tile, "order": order, "fast": fast})
            for tile in (16, 32, 64, 128)
            for order in ("row", "column")
            for fast in (False, True)
        ),
    ]
)


def toy(m, n):
    return Problem("toy", (("m", m), ("n", n)), "float32", (("layout", "nn"),))


def log_latency(problem, table=TABLE):
    """The level follows the size; the tile that is best follows m."""
    level = np.log(problem["m"] * problem["n"] / 100)
    slower = []
    for one in table:
        config = one.parameters
        if one.variant == "vendor":
            slower.append(0.25)
            continue
        distance = abs(np.log2(config["tile"]) - (4 + problem["m"] % 4))
        slower.append(0.2 * distance + 0.1 * (config["order"] == "row") - 0.05 * config["fast"])
    return level + np.array(slower)


def measured(problems, *, seed=0, noise=0.02, table=TABLE):
    rng = np.random.default_rng(seed)
    return [
        ProblemData(
            problem,
            GPU,
            table,
            log_latency(problem, table) + noise * rng.normal(size=len(table)),
            np.full(len(table), noise),
        )
        for problem in problems
    ]


def sizes(count, seed):
    """Sizes whose products, and so latencies, span more than 1000."""
    rng = np.random.default_rng(seed)
    return [(int(m), int(n)) for m, n in np.exp(rng.uniform(np.log(8), np.log(1000), (count, 2)))]


SIZES = sizes(150, seed=0)


@pytest.fixture(scope="module")
def model():
    return RankingModel.fit(measured([toy(m, n) for m, n in SIZES]), CostModel(**QUICK, colsample_bytree=1.0))


@pytest.fixture
def folder(model, tmp_path):
    model.save(tmp_path / "model")
    return tmp_path / "model"


def test_what_it_says_of_itself(model):
    assert model.operation == "toy"
    assert model.feature_names[:2] == ["log2_m", "log2_n"]
    assert model.features(toy(64, 64), TABLE, GPU).shape == (17, len(model.feature_names))
    assert all(isinstance(forest, Forest) for forest in model.forests.values())


def test_the_level_is_right_over_three_orders_of_magnitude(model):
    def factors(found):
        return np.array(
            [
                abs(np.mean(model.predict(problem, TABLE, GPU).log_latency - log_latency(problem)))
                for problem in (toy(m, n) for m, n in found)
            ]
        )

    means = [log_latency(toy(m, n)).mean() for m, n in SIZES]
    assert max(means) - min(means) > np.log(1000)
    assert (factors(SIZES) < np.log(1.3)).all()
    # Of sizes that it has not seen, too, as far as trees can: they do not slope between what they have seen.
    unseen = factors(sizes(60, seed=1))
    assert np.mean(unseen < np.log(1.3)) > 0.65
    assert np.mean(unseen) < np.log(1.25)


def test_a_prediction_is_of_every_row_and_positive(model):
    found = model.predict(toy(100, 100), TABLE, GPU)
    assert isinstance(found, Prediction)
    for array in (found.log_latency, found.error_log, found.latency_us):
        assert array.dtype == np.float64
        assert array.shape == (17,)
        assert np.isfinite(array).all()
    assert (found.error_log >= 0.005).all()
    assert found.covered.all()
    np.testing.assert_array_equal(found.latency_us, np.exp(found.log_latency))


def test_without_the_uncertainty_the_rest_is_the_same(model):
    whole = model.predict(toy(100, 100), TABLE, GPU)
    part = model.predict(toy(100, 100), TABLE, GPU, uncertainty=False)
    np.testing.assert_array_equal(part.log_latency, whole.log_latency)
    np.testing.assert_array_equal(part.covered, whole.covered)
    assert np.isnan(part.error_log).all()
    assert part.order().tolist() == whole.order().tolist()


def test_an_explanation_sums_to_the_order(model, folder):
    problem = toy(100, 100)
    found = model.predict(problem, TABLE, GPU).log_latency
    explained = [RankingModel.load(folder).explain(problem, TABLE, GPU, row) for row in range(len(TABLE))]
    sums = np.array([sum(each.contribution_log for each in parts) for parts in explained])
    np.testing.assert_allclose(np.diff(sums), np.diff(found), atol=1e-5)
    features = dict(zip(model.feature_names, model.features(problem, TABLE, GPU).T, strict=True))
    units = dict(zip(model.feature_names, model._featurizer.units, strict=True))
    for row, (start, *parts) in enumerate(explained):
        assert (start.feature, start.unit) == ("", "")
        sizes = [abs(each.contribution_log) for each in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert min(sizes) > 0
        for each in parts:
            np.testing.assert_equal(each.value, float(features[each.feature][row]))
            assert each.unit == units[each.feature]
    with pytest.raises(IndexError):
        model.explain(problem, TABLE, GPU, 17)


def test_a_difference_does_not_depend_on_the_other_rows(model):
    whole = model.predict(toy(100, 100), TABLE, GPU).log_latency
    part = model.predict(toy(100, 100), CandidateTable.of(TABLE[3:9]), GPU).log_latency
    np.testing.assert_allclose(np.diff(part), np.diff(whole[3:9]), atol=1e-9)


def test_what_was_not_in_fitting_is_not_covered_and_ranks_last(model):
    new = [
        Candidate.of("new", {"tile": 16}),
        Candidate.of("tiled", {"tile": 16, "order": "zigzag", "fast": True}),
    ]
    table = CandidateTable.of([new[0], *TABLE, new[1]])
    found = model.predict(toy(100, 100), table, GPU)
    assert found.covered.tolist() == [False] + [True] * 17 + [False]
    assert found.order()[-2:].tolist() == [0, 18]
    # They do not shift the level of the others.
    np.testing.assert_allclose(found.log_latency[1:-1], model.predict(toy(100, 100), TABLE, GPU).log_latency)


def test_a_table_of_strangers_and_an_empty_one(model):
    strangers = CandidateTable.of([Candidate("b"), Candidate("a")])
    found = model.predict(toy(100, 100), strangers, GPU)
    assert found.covered.tolist() == [False, False]
    assert np.isfinite(found.log_latency).all()
    assert found.order().tolist() == [0, 1]
    empty = model.predict(toy(100, 100), CandidateTable([]), GPU)
    assert empty.order().tolist() == []


def test_ties_and_rows_that_are_not_covered_keep_the_tables_order():
    found = Prediction(
        np.array([3.0, 1.0, -9.0, 1.0, -5.0, 2.0]),
        np.ones(6),
        np.array([True, True, False, True, False, True]),
    )
    assert found.order().tolist() == [1, 3, 5, 0, 2, 4]


def test_another_operation_is_refused(model):
    with pytest.raises(ModelError, match="model is of toy"):
        model.predict(kernels.problem("gemm", m=1, n=1, k=1), TABLE, GPU)
    with pytest.raises(ModelError, match="lacks 'layout'"):
        model.predict(dataclasses.replace(toy(1, 1), options=()), TABLE, GPU)


def test_nothing_to_fit_on():
    with pytest.raises(ModelError, match="no measured problem"):
        RankingModel.fit([])
    one = CandidateTable.of([Candidate("vendor")])
    with pytest.raises(ModelError, match="nothing to compare"):
        RankingModel.fit(measured([toy(1, 1), toy(2, 2)], table=one), CostModel(**QUICK))


def test_problems_have_one_value_a_candidate():
    good = measured([toy(4, 4)])[0]
    for changes, said in (
        ({"log_latency": good.log_latency[1:]}, r"log_latency of .* shape \(16,\)"),
        ({"error_log": good.error_log[:, None]}, r"error_log of .* shape \(17, 1\)"),
        ({"table": CandidateTable.of(TABLE[:3])}, r"must be \(3,\)"),
        ({"log_latency": np.where(np.arange(17) < 2, np.inf, 1.0)}, "2 latencies .* not finite"),
    ):
        with pytest.raises(InvalidRecordError, match=said):
            dataclasses.replace(good, **changes)
    assert np.isnan(dataclasses.replace(good, error_log=np.full(17, np.nan)).error_log).all()


def test_the_design_is_the_problems_one_after_the_other():
    problems = measured([toy(40, 8), toy(100, 64)])
    X, y, groups = design(problems, schema_of(problems))
    assert X.dtype == np.float32
    assert groups.tolist() == [0] * 17 + [1] * 17
    assert y.tolist() == [*problems[0].log_latency, *problems[1].log_latency]
    assert X[:17, 0] == pytest.approx(np.log2(40))
    assert X[17:, 0] == pytest.approx(np.log2(100))


def test_two_models_fitted_with_one_estimator_keep_their_own_trees(tmp_path):
    estimator = CostModel(n_estimators=3, n_jobs=1)
    first = RankingModel.fit(measured([toy(40, 8), toy(100, 64)]), estimator)
    before = first.predict(toy(50, 50), TABLE, GPU).log_latency
    RankingModel.fit(measured([toy(800, 800), toy(900, 64)]), estimator)
    assert not hasattr(estimator, "boosters_")
    first.save(tmp_path / "first")
    np.testing.assert_array_equal(first.predict(toy(50, 50), TABLE, GPU).log_latency, before)
    for name, forest in first.forests.items():
        kept = Forest.from_xgboost_json((tmp_path / "first" / f"{name}.json").read_bytes())
        np.testing.assert_array_equal(kept.leaf, forest.leaf)


@pytest.mark.parametrize("weights", [np.ones(3), np.ones(1), np.ones((2, 1)), 1.0], ids=np.shape)
def test_weights_that_are_not_one_a_problem_are_refused(weights):
    with pytest.raises(
        ModelError, match=r"The weights are \(.*; there must be one for each of the 2 problems\."
    ):
        RankingModel.fit(measured([toy(40, 8), toy(100, 64)]), CostModel(**QUICK), weights=weights)


def test_folders_may_be_named_by_a_text(tmp_path, model):
    model.save(str(tmp_path / "kept"))
    loaded = RankingModel.load(str(tmp_path / "kept"))
    assert (loaded.schema, loaded.level_mean) == (model.schema, model.level_mean)
    with pytest.raises(ArtifactError, match="absent is not a model"):
        RankingModel.load(str(tmp_path / "absent"))


def test_a_model_that_was_saved_and_loaded_predicts_the_same(model, folder):
    loaded = RankingModel.load(folder)
    assert loaded.operation == "toy"
    assert loaded.schema == model.schema
    assert loaded.facts == model.facts
    for problem in (toy(100, 100), toy(999, 3)):
        one, other = (each.predict(problem, TABLE, GPU) for each in (model, loaded))
        np.testing.assert_array_equal(one.log_latency, other.log_latency)
        np.testing.assert_array_equal(one.error_log, other.error_log)
        np.testing.assert_array_equal(one.covered, other.covered)
    verify_files(folder)
    with pytest.raises(ModelError, match="copy its folder"):
        loaded.save(folder.with_name("again"))


@pytest.mark.slow
def test_the_same_data_save_the_same_bytes(folder, tmp_path):
    again = RankingModel.fit(
        measured([toy(m, n) for m, n in SIZES]), CostModel(**QUICK, colsample_bytree=1.0)
    )
    again.save(tmp_path / "again")
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_xgboost_reads_what_was_saved(model, folder):
    import xgboost

    booster = xgboost.Booster()
    booster.load_model(folder / "level.json")
    X = model.features(toy(100, 100), TABLE, GPU)
    np.testing.assert_allclose(booster.inplace_predict(X), model.forests["level"].predict(X), atol=1e-5)


def test_facts_that_are_no_json_are_refused_and_leave_nothing(model, tmp_path):
    for facts in ({"score": float("nan")}, {"score": np.float32(1)}, {"when": object()}):
        with pytest.raises(ArtifactError, match="not plain JSON"):
            dataclasses.replace(model, facts=facts).save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["level_mean", "error_mean"])
def test_a_level_or_error_that_is_not_finite_is_refused(model, name):
    with pytest.raises(ArtifactError, match="must be finite"):
        dataclasses.replace(model, **{name: float("nan")})


def test_heads_that_do_not_fit_the_features_are_refused(model):
    for name, forest in model.forests.items():
        others = {other: each for other, each in model.forests.items() if other != name}
        with pytest.raises(ArtifactError, match=f"no head '{name}'"):
            dataclasses.replace(model, forests=others)
        narrow = Forest(forest.feature[:0], forest.threshold[:0], forest.leaf[:0], base=0.0, width=3)
        with pytest.raises(ArtifactError, match="take 3 features; its schema"):
            dataclasses.replace(model, forests={**others, name: narrow})


def test_a_model_of_a_catalogued_operation_takes_part_in_the_physics():
    table = CandidateTable.of(
        [Candidate("vendor"), *(Candidate.of("split_k", {"split": s}) for s in (2, 4, 8))]
    )
    problems = [kernels.problem("gemm", m=m, n=64, k=2048, threads=2) for m in (8, 64, 512, 4096)]
    data = [
        ProblemData(problem, GPU, table, np.log(problem["m"] + np.arange(4.0)), np.full(4, np.nan))
        for problem in problems
    ]
    fitted = RankingModel.fit(data, CostModel(n_estimators=3, n_jobs=1))
    assert "roofline_us" in fitted.feature_names
    assert np.isfinite(fitted.predict(problems[0], table, GPU).log_latency).all()


@pytest.mark.slow
def test_loading_and_predicting_need_numpy_alone(model, folder):
    wanted = model.predict(toy(100, 100), TABLE, GPU)
    code = f"""
        import json, sys
        from pathlib import Path
        for name in ("xgboost", "sklearn", "pandas", "pyarrow", "mlflow", "scipy", "torch", "triton"):
            sys.modules[name] = None
        from kernelcast.costmodel import RankingModel
        from kernelcast.kernels import CandidateTable, Candidate, Device, Problem
        model = RankingModel.load(Path({str(folder)!r}))
        table = CandidateTable.of(Candidate.from_key(key) for key in {[one.key for one in TABLE]!r})
        problem = Problem.from_dict(json.loads({toy(100, 100).key!r}))
        found = model.predict(problem, table, Device.from_dict({GPU.to_dict()!r}))
        print(json.dumps([found.log_latency.tolist(), found.error_log.tolist()]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [wanted.log_latency.tolist(), wanted.error_log.tolist()]


def test_the_spaces_of_a_model_are_what_it_covers_and_the_default():
    described = kernels.problem("gemm", m=4096, n=4096, k=4096, dtype="float16")
    config = {"block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
    table = CandidateTable.of(
        Candidate.of("triton_tiled", {**config, "block_m": block, "num_warps": warps})
        for block, warps in ((32, 4), (64, 4), (64, 8))
    )
    data = [
        ProblemData(
            dataclasses.replace(described, dims=(("m", m), ("n", 4096), ("k", 4096))),
            GPU,
            table,
            np.log([1.0, 2.0, 3.0]) + 0.01 * m,
            np.full(3, 0.01),
        )
        for m in range(64, 80)
    ]
    spaces = RankingModel.fit(data, CostModel(**QUICK, error_folds=0)).spaces()
    assert set(spaces) == {"triton_tiled", "vendor"}
    # Every mixture of the values that occurred, and no other.
    assert {(c.parameters["block_m"], c.parameters["num_warps"]) for c in CandidateTable([spaces["triton_tiled"]])} == {
        (32, 4), (32, 8), (64, 4), (64, 8),
    }  # fmt: skip
    assert spaces["triton_tiled"].length == 4
