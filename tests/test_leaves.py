"""The two leaf modules: errors that cross processes, and settings read from the environment."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
from cases import for_each

from kernelcast import errors, settings
from kernelcast.errors import ImportFileError, MissingExtraError, SettingsError, UnknownNameError

RAISED = [
    UnknownNameError("operation", "gem", ["gemm", "softmax"]),
    UnknownNameError("device", "x", []),
    ImportFileError("a/file.csv", "has no header"),
    ImportFileError(Path("a/file.csv"), "has 3 fields", line=7),
    MissingExtraError("xgboost", "train", "Fitting a model"),
    *(
        cls("a message")
        for cls in (errors.StoreError, errors.ModelError, errors.ArtifactError, SettingsError)
    ),
]


@for_each("error", RAISED, ids=str)
def test_errors_survive_the_way_to_another_process(error):
    for read in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(read) is type(error)
        assert str(read) == str(error)
        assert vars(read) == vars(error)


def test_messages_say_what_to_do():
    assert str(RAISED[0]) == "Unknown operation 'gem'. Did you mean 'gemm'? Known: gemm, softmax."
    assert str(RAISED[1]) == "Unknown device 'x'. Known: none."
    assert str(RAISED[3]) == "a/file.csv, line 7: has 3 fields"
    assert str(RAISED[4]).endswith("Install it with: pip install 'kernelcast[train]'")
    assert RAISED[3].line == 7
    assert isinstance(errors.ArtifactError("x"), errors.ModelError)


def test_a_name_that_is_no_text_is_unknown_too():
    assert "Unknown operation None" in str(UnknownNameError("operation", None, ["gemm"]))


def test_folders_lie_under_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert settings.home() == tmp_path
    assert settings.store_dir() == tmp_path / "store"
    assert settings.models_dir() == tmp_path / "models"
    assert settings.cache_dir() == tmp_path / "cache"
    assert settings.tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert settings.tracking_uri() == "http://tracking:5000"


def test_the_home_is_the_users_unless_it_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, wanted in (
        (None, tmp_path / ".kernelcast"),
        ("", tmp_path / ".kernelcast"),
        ("~/k", tmp_path / "k"),
    ):
        if value is None:
            monkeypatch.delenv("KERNELCAST_HOME", raising=False)
        else:
            monkeypatch.setenv("KERNELCAST_HOME", value)
        assert settings.home() == wanted
    monkeypatch.setenv("KERNELCAST_HOME", "~no-such-user/k")
    with pytest.raises(SettingsError, match="Set KERNELCAST_HOME"):
        settings.home()


def test_modes_and_the_kill_switch(monkeypatch):
    monkeypatch.delenv("KERNELCAST_MODE", raising=False)
    monkeypatch.delenv("KERNELCAST_DISABLE", raising=False)
    assert settings.mode() == "verify"
    assert not settings.disabled()
    for mode in ("off", "cached", "predict", "verify", "tune"):
        monkeypatch.setenv("KERNELCAST_MODE", mode)
        assert settings.mode() == mode
    monkeypatch.setenv("KERNELCAST_MODE", "fast")
    with pytest.raises(SettingsError, match=r"'fast'; it must be one of off, cached, predict, verify, tune"):
        settings.mode()
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("KERNELCAST_DISABLE", value)
        assert settings.disabled() is wanted


def test_a_kill_switch_of_another_value_counts_as_on_and_warns_once(monkeypatch):
    monkeypatch.setattr(settings, "_warned_of", set())
    monkeypatch.setenv("KERNELCAST_DISABLE", "yes")
    with pytest.warns(UserWarning, match="'yes'; it must be 0 or 1. It counts as 1") as given:
        assert settings.disabled()
    assert [each.filename for each in given] == [__file__]  # our own frames are passed over
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings.disabled()
