"""MLflow's registry: a real model, loaded and asked through MLflow's own interface."""

from __future__ import annotations

import importlib
import sys
from unittest.mock import MagicMock

import numpy as np
import pytest

from kernelcast.costmodel import AnalyticModel, ProblemData, RankingModel
from kernelcast.errors import MissingExtraError
from kernelcast.kernels import CandidateTable, candidates, problem
from kernelcast.kernels.devices import device
from kernelcast.training import mlflow_registry, registry, tracking
from kernelcast.training.mlflow_registry import CHAMPION, VERSION_TAG, model_name
from kernelcast.training.train import train

A100 = device("a100-sxm4-80gb")
SMALL = {"n_estimators": 10, "max_depth": 3, "error_folds": 0, "n_jobs": 1}
pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def problems(count):
    found = []
    for number in range(count):
        each = problem("gemm", m=256 * (number + 1), n=512, k=512, dtype="float16")
        table = candidates(each, A100, subset="default")
        log = AnalyticModel().predict(each, table, A100).log_latency
        found.append(ProblemData(each, A100, table, log, np.full(len(table), 0.01)))
    return found


def test_a_training_is_registered_with_a_signature_and_predicts_as_the_artifact(home):
    import mlflow
    import pandas as pd
    from mlflow import MlflowClient

    from kernelcast import settings

    data = problems(4)
    result = train(data, device=A100, models_dir=home / "models", estimator_params=SMALL)
    assert result.tracking_warning == ""
    client = MlflowClient(tracking_uri=settings.tracking_uri())
    name = model_name(A100.name, "gemm")
    (version,) = client.search_model_versions(f"name = '{name}'")
    assert (version.run_id, version.tags[VERSION_TAG]) == (result.run_id, result.model_dir.name)
    assert bool(client.get_registered_model(name).aliases) == result.promoted

    mlflow.set_tracking_uri(settings.tracking_uri())
    served = mlflow.pyfunc.load_model(f"models:/{name}/{version.version}")
    assert served.metadata.signature.inputs.input_names() == ["problem", "candidate"]
    assert served.metadata.signature.outputs.input_names() == ["log_latency", "error_log"]
    asked = data[1]
    keys = [each.key for each in asked.table]
    shuffled = np.random.default_rng(0).permutation(len(keys))
    frame = pd.DataFrame({"problem": asked.problem.key, "candidate": [keys[at] for at in shuffled]})
    expected = RankingModel.load(result.model_dir).predict(asked.problem, asked.table, A100)
    got = served.predict(frame)
    np.testing.assert_allclose(got["log_latency"], expected.log_latency[shuffled], rtol=1e-6)
    np.testing.assert_allclose(got["error_log"], expected.error_log[shuffled], rtol=1e-6)
    assert isinstance(asked.table, CandidateTable)


def test_the_alias_follows_a_promotion_by_hand(home, monkeypatch):
    from mlflow import MlflowClient

    from kernelcast import settings

    first, second = (
        train(problems(count), device=A100, models_dir=home / "models", estimator_params=SMALL)
        for count in (3, 4)
    )
    client = MlflowClient(tracking_uri=settings.tracking_uri())
    name = model_name(A100.name, "gemm")
    versions = {
        each.tags[VERSION_TAG]: each.version for each in client.search_model_versions(f"name = '{name}'")
    }
    assert set(versions) == {first.model_dir.name, second.model_dir.name}
    for found in (first, second):
        registry.promote(home / "models", registry.model_at(found.model_dir))
        assert tracking.follow(A100.name, "gemm", found.model_dir.name) == ""
        standing = client.get_model_version_by_alias(name, CHAMPION)
        assert standing.version == versions[found.model_dir.name]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert "was not moved" in tracking.follow(A100.name, "gemm", first.model_dir.name)


def test_without_pandas_the_extra_to_install_is_named(home, monkeypatch):
    # Whole, before pandas is gone: what MLflow leaves out without it would be missing in the tests after this one.
    importlib.import_module("mlflow.models")
    monkeypatch.setitem(sys.modules, "pandas", None)
    client = MagicMock(**{"search_model_versions.return_value": []})
    with pytest.raises(MissingExtraError) as caught:
        mlflow_registry.register(
            client, "run", home, mlflow_registry.Registration("a100", "gemm", "0001-00000000", False)
        )
    assert str(caught.value) == (
        "Registering a model with MLflow needs pandas, which is not installed. Install it with: pip install 'kernelcast[train]'"
    )
