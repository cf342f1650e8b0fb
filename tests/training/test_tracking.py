"""Tracking: what reaches the server, and what is kept for later where nothing does."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from kernelcast.training.tracking import Run, TrackedFile, spooled_runs, sync, track, upload

#: Nothing listens there: the discard port of this machine.
UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("KERNELCAST_HOME", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


@pytest.fixture
def run(tmp_path) -> Run:
    model = tmp_path / "model-0001"
    model.mkdir()
    (model / "manifest.json").write_text("{}")
    (tmp_path / "plot.svg").write_text("<svg/>")
    return Run(
        experiment="kernelcast/gemm",
        name="a100-sxm4-80gb 0001-3f2a9c1b",
        parameters={"estimator.max_depth": 8, "dataset_hash": "3f2a9c1b77aa0011"},
        metrics={"efficiency_at_3_with_default": 0.9875, "unknown": float("nan")},
        tags={"device": "a100-sxm4-80gb", "promoted": "true"},
        files=(TrackedFile(str(model), "model"), TrackedFile(str(tmp_path / "plot.svg"), "plots")),
    )


def client(home: Path):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}")


def the_run(home: Path):
    found = client(home)
    experiment = found.get_experiment_by_name("kernelcast/gemm")
    (only,) = found.search_runs([experiment.experiment_id])
    return found, experiment, only


def check_uploaded(home: Path, run_id: str) -> None:
    found, experiment, only = the_run(home)
    assert only.info.run_id == run_id
    assert only.info.run_name == "a100-sxm4-80gb 0001-3f2a9c1b"
    assert only.info.status == "FINISHED"
    assert only.data.params == {"estimator.max_depth": "8", "dataset_hash": "3f2a9c1b77aa0011"}
    assert only.data.metrics == {"efficiency_at_3_with_default": 0.9875}
    assert only.data.tags["device"] == "a100-sxm4-80gb"
    assert experiment.artifact_location == (home / "mlartifacts").as_uri()
    assert [file.path for file in found.list_artifacts(run_id)] == ["model", "plots"]
    assert (home / "mlartifacts" / run_id / "artifacts" / "model" / "manifest.json").read_text() == "{}"
    assert (home / "mlartifacts" / run_id / "artifacts" / "plots" / "plot.svg").read_text() == "<svg/>"


@pytest.mark.slow
def test_a_run_reaches_a_sqlite_file_under_the_home_whole_and_once(home, run, capfd):
    tracked = track(run)
    assert tracked.warning == ""
    assert tracked.spooled is None
    check_uploaded(home, tracked.run_id)
    assert capfd.readouterr().err == ""  # no word of tables and migrations
    assert list(Path.cwd().iterdir()) == []
    # The same run again, as after an upload that was cut off, is completed and not doubled.
    assert upload(run) == tracked.run_id
    check_uploaded(home, tracked.run_id)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.slow
def test_an_unreachable_server_spools_and_a_later_sync_uploads(home, run, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", UNREACHABLE)
    with caplog.at_level(logging.WARNING, "kernelcast.tracking"):
        tracked = track(run)
    assert tracked.run_id is None
    assert tracked.spooled == home / "spool" / f"{run.id}.json"
    assert "kernelcast models sync" in caplog.text
    assert tracked.warning in caplog.text
    # The files are copies: the originals may go meanwhile.
    (tmp_path / "plot.svg").unlink()

    still = sync()
    assert still.uploaded == ()
    assert [name for name, _ in still.waiting] == [run.id]
    assert spooled_runs() == [tracked.spooled]

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    done = sync()
    assert done.waiting == ()
    ((name, run_id),) = done.uploaded
    assert name == run.id
    check_uploaded(home, run_id)
    assert list((home / "spool").iterdir()) == []
    assert sync().uploaded == ()


@pytest.mark.slow
def test_variables_set_for_the_upload_do_not_stay(home, run, monkeypatch):
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", UNREACHABLE)
    track(run)
    assert "MLFLOW_HTTP_REQUEST_TIMEOUT" not in os.environ
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"  # the user's own value is kept


def test_without_mlflow_the_run_is_kept_with_the_name_of_the_extra(home, run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    tracked = track(run)
    assert tracked.run_id is None
    assert "kernelcast[train]" in tracked.warning
    data = json.loads(tracked.spooled.read_text())
    assert data["metrics"] == {"efficiency_at_3_with_default": 0.9875}
    assert data["parameters"] == {"estimator.max_depth": "8", "dataset_hash": "3f2a9c1b77aa0011"}
    folder = tracked.spooled.with_suffix("")
    assert [(folder / file["path"]).name for file in data["files"]] == ["model-0001", "plot.svg"]
    assert all((folder / file["path"]).exists() for file in data["files"])


def test_a_home_that_cannot_be_written_loses_the_run_and_never_raises(run, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked = track(run)
    assert (tracked.run_id, tracked.spooled) == (None, None)
    assert "could not be kept" in tracked.warning
    assert tracked.warning in caplog.text


def test_a_broken_description_in_the_spool_keeps_back_no_other(home, run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    kept = track(run).spooled
    (home / "spool" / "broken.json").write_text("{")
    os.utime(home / "spool" / "broken.json", (0, 0))
    waiting = dict(sync().waiting)
    assert "not a run that waits" in waiting["broken"]
    assert "kernelcast[train]" in waiting[kept.stem]


@pytest.mark.slow
def test_a_database_whose_creation_was_cut_short_is_set_aside(home, run):
    import sqlite3

    home.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(home / "mlflow.db") as database:
        database.execute("CREATE TABLE issues (id INTEGER)")
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
    tracked = track(run)
    assert tracked.warning == ""
    check_uploaded(home, tracked.run_id)
    (aside,) = home.glob("mlflow.db.unfinished-*")
    with sqlite3.connect(aside) as database:
        assert ("issues",) in database.execute("SELECT name FROM sqlite_master").fetchall()
    # A database that is whole is never touched.
    assert track(run).run_id == tracked.run_id
    assert len(list(home.glob("mlflow.db.unfinished-*"))) == 1
