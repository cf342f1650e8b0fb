"""``kernelcast train``, ``models`` and ``report`` on a small store."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from kernelcast.cli import main
from kernelcast.costmodel import Forest, ProblemData, RankingModel
from kernelcast.costmodel.artifact import write_artifact
from kernelcast.costmodel.model import schema_of
from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.featurizer import Featurizer
from kernelcast.kernels import Candidate, CandidateTable, Problem
from kernelcast.kernels.devices import device
from kernelcast.training import registry
from kernelcast.training.drawing import MOST_DRAWS

A100 = device("a100")
TILES = (16, 32, 64, 128, 256)


def measurements(m: int, workload: str) -> list[Measurement]:
    """The tile nearest to sqrt(m) is the fastest; the vendor is never better than the second."""
    problem = Problem("toy", (("m", m),), "float32")
    latency_us = {Candidate.of("vendor"): m * 1.5}
    for tile in TILES:
        latency_us[Candidate.of("triton_toy", {"tile": tile})] = m * 1.4 ** abs(
            math.log2(tile) - math.log2(m) / 2
        )
    return [
        Measurement(
            problem=problem,
            candidate=candidate,
            device=A100.name,
            device_fingerprint=A100.fingerprint,
            environment=Environment(),
            protocol=Protocol("test"),
            samples_us=(latency,),
            workload=workload,
        )
        for candidate, latency in latency_us.items()
    ]


def fill(home: Path, steps: range, workload: str) -> None:
    store = Store(home / "store")
    store.add_device(A100)
    store.add_many(one for step in steps for one in measurements(round(2 ** (8 + step / 6)), workload))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> tuple[Path, str]:
    """(home with 40 problems and one trained model, what the training printed as JSON)."""
    home = tmp_path_factory.mktemp("prepared") / "home"
    fill(home, range(40), "alpha")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNELCAST_HOME", str(home))
        patch.setenv("COLUMNS", "100")
        printed = run_train(home, "--json")
    return home, printed


def run_train(home: Path, *arguments: str) -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run("train", "--op", "toy", "--device", "a100", "--no-track", *arguments) == 0
    return out.getvalue()


@pytest.fixture
def home(prepared, tmp_path, monkeypatch) -> Path:
    """A copy of its own, and an empty working directory."""
    shutil.copytree(prepared[0], tmp_path / "home")
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture
def empty(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path / "home"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(list(arguments))
    return exit.value.code


def version(home: Path, number: int) -> str:
    (found,) = (home / "models" / "a100-sxm4-80gb" / "toy").glob(f"{number:04d}-*")
    return found.name


# train


@pytest.mark.slow
def test_train_prints_its_figures_as_json(prepared):
    home, printed = prepared
    data = json.loads(printed)
    assert Path(data["model_dir"]) == home / "models" / "a100-sxm4-80gb" / "toy" / version(home, 1)
    assert data["promoted"] is True
    assert data["reason"].startswith("Efficiency ")
    assert data["problems"] == 40
    assert data["run_id"] is None
    assert data["held_out"]["how"] == "5 folds by shape, each problem judged once"
    model = data["held_out"]["rankers"]["model"]["with_default"]["3"]["geomean"]
    default = data["held_out"]["rankers"]["default"]["with_default"]["3"]["geomean"]
    assert default < model <= 1


@pytest.mark.slow
def test_train_says_where_the_model_lies_how_good_it_is_and_why_it_does_not_stand(home, capsys):
    assert (
        run("train", "--op", "toy", "--device", "a100-sxm4-80gb", "--train-workloads", "alpha", "--no-track")
        == 0
    )
    out = capsys.readouterr().out
    assert str(home / "models" / "a100-sxm4-80gb" / "toy" / version(home, 2)) in out
    assert "@3" in out
    assert "best fixed" in out
    assert "Not promoted." in out
    assert "a tie, decided by the number of problems" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train-workloads", "alhpa"), "no records of toy on a100-sxm4-80gb of the workload alhpa"),
        (("--holdout", "1.5"), "The held-out share is 1.5"),
        (("--store", "nowhere"), "nowhere"),
    ],
)
def test_train_refuses_with_one_sentence(home, capsys, arguments, message):
    assert run("train", "--op", "toy", "--device", "a100", "--no-track", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("Error: ")
    assert captured.err.count("\n") == 1


def test_train_refuses_a_registry_that_cannot_be_written_before_it_fits(empty, capsys, monkeypatch):
    fill(empty, range(4), "alpha")
    (empty / "models").write_text("")
    monkeypatch.setattr("kernelcast.costmodel.RankingModel.fit", lambda *_, **__: pytest.fail("it fits"))
    assert run("train", "--op", "toy", "--device", "a100", "--no-track") == 2
    assert capsys.readouterr().err == (
        f"Error: Cannot write to the models folder {empty / 'models'}: File exists. "
        "Choose a folder that can be written with KERNELCAST_HOME.\n"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seed", "-1"), ("--seed", str(2**32)), ("--draws", "-1"), ("--draws", str(MOST_DRAWS + 1))],
)
def test_train_bounds_its_numbers(empty, capsys, option, value):
    assert run("train", "--op", "toy", option, value) == 2
    assert f"Invalid value for '{option}'" in capsys.readouterr().err


# models


@pytest.mark.slow
def test_list_and_show_give_the_figures_of_training(prepared, home, capsys):
    trained = json.loads(prepared[1])
    figures = trained["held_out"]["rankers"]["model"]["with_default"]
    assert run("models", "list", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["version"] == version(home, 1)
    assert row["champion"] is True
    assert row["efficiency_at_1"] == figures["1"]["geomean"]
    assert row["efficiency_at_3"] == figures["3"]["geomean"]
    assert run("models", "list", "--device", "a100") == 0
    out = capsys.readouterr().out
    assert f"a100-sxm4-80gb/toy/{version(home, 1)}" in out
    assert f"{figures['3']['geomean']:.4f}" in out
    assert run("models", "show", "1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["facts"]["held_out"]["rankers"]["model"]["with_default"] == figures
    assert run("models", "show") == 0
    out = capsys.readouterr().out
    assert "40 problems, 240 measurements" in out
    assert "alpha (40)" in out
    assert trained["reason"] in out


@pytest.mark.slow
def test_promote_rollback_export_import(home, capsys):
    assert run("models", "export", "--op", "toy", "--device", "a100") == 0
    file = Path(f"a100-sxm4-80gb-toy-{version(home, 1)}.zip")
    assert file.is_file()
    assert str(file) in capsys.readouterr().out
    assert run("models", "import", str(file)) == 2
    assert "registered already" in capsys.readouterr().err

    fill(home, range(41, 45), "beta")
    run_train(home)
    second = version(home, 2)
    assert run("models", "promote", "1") == 0
    assert run("models", "promote", "2") == 0
    assert f"{second} is the champion of toy on a100-sxm4-80gb. Before it stood {version(home, 1)}." in (
        capsys.readouterr().out.replace("\n", " ")
    )
    assert run("models", "rollback") == 0
    assert f"{version(home, 1)} is the champion" in capsys.readouterr().out
    alias = json.loads((home / "models" / "a100-sxm4-80gb" / "toy" / "champion.json").read_text())
    assert alias["version"] == version(home, 1)

    shutil.rmtree(home / "models")
    assert run("models", "import", str(file), "--promote") == 0
    assert "Imported and promoted a100-sxm4-80gb/toy/0001-" in capsys.readouterr().out


def test_an_empty_registry_is_said_and_is_no_error(empty, capsys):
    assert run("models", "list") == 0
    assert "kernelcast train" in capsys.readouterr().out
    assert run("models", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show",), "holds no champion"),
        (("promote", "3"), "Unknown model version '3'"),
        (("rollback", "--op", "toy", "--device", "a100"), "nothing to go back to"),
        (("rollback",), "holds no champion"),
        (("export", "--op", "gemm"), "Unknown operation with models 'gemm'"),
        (("import", "absent.zip"), "absent.zip is not a file"),
    ],
)
def test_models_refuses_with_one_sentence(empty, capsys, arguments, message):
    assert run("models", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def register_by_hand(models: Path, **facts) -> Path:
    """A model that has every digest right and no tree; with some of its facts changed."""
    facts = {
        "created_at": "2026-01-02T03:04:05+00:00",
        "device": A100.to_dict(),
        "dataset_hash": "3f2a9c1b",
        **dict.fromkeys(("problems", "shapes", "measurements", "failures", "seed"), 1),
        **{name: {} for name in ("workloads", "dtypes", "hyperparameters", "libraries")},
        "held_out": {"sha256": ""},
        "gate": {"promoted": False, "reason": "By hand."},
        **facts,
    }
    table = CandidateTable.of([Candidate("vendor"), Candidate.of("toy", {"tile": 16})])
    item = ProblemData(Problem("toy", (("m", 8),), "float32"), A100, table, np.zeros(2), np.full(2, np.nan))
    schema = schema_of([item])
    width = len(Featurizer(schema).names)
    forest = Forest(np.zeros((0, 0), np.int32), np.zeros((0, 0)), np.zeros((0, 1)), base=0.0, width=width)
    heads = dict.fromkeys(("difference", "slowdown", "level", "error"), forest)
    manifest = {**RankingModel(schema, heads, 0.0, -2.0)._stated(), "facts": facts}
    return registry.register(
        models,
        lambda folder: write_artifact(folder, manifest, {"level": b"{}"}, heads),
        device=A100,
        operation="toy",
        dataset_hash="3f2a9c1b",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("workloads", []), ("held_out", None), ("gate", "x"), ("device", 1), ("libraries", -1)],
)
def test_a_model_of_wrong_facts_is_listed_as_broken_and_the_others_go_on(
    empty, tmp_path, capsys, monkeypatch, field, value
):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    path, _ = register_by_hand(empty / "models", **{field: value}), register_by_hand(empty / "models")
    said = f"{path / 'manifest.json'}: facts.{field} has "
    assert run("models", "list") == 0
    out = capsys.readouterr().out
    assert f"Cannot be used: {said}" in out
    assert out.count("broken") == 1
    assert run("models", "list", "--json") == 0
    assert [row["problems"] for row in json.loads(capsys.readouterr().out)] == [None, 1]
    assert run("models", "show", "1") == 1
    assert said in capsys.readouterr().out
    for words in (["promote", "1"], ["export", "1"]):
        assert run("models", *words) == 2
        assert said in capsys.readouterr().err
    assert run("report") == 0
    assert "By hand." in Path("kernelcast-report.html").read_text()


def test_a_model_without_its_record_says_so_and_can_stand(empty, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path = register_by_hand(empty / "models")
    said = f"Of use to selections, but without its record of held-out problems: {path} has no record"
    assert run("models", "list") == 0
    out = capsys.readouterr().out
    assert said in out
    assert "broken" not in out
    assert run("models", "list", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["unrecorded"].startswith(f"{path} has no record of held-out problems")
    assert run("models", "show", "1") == 0
    assert f"record:       {path} has no record" in capsys.readouterr().out
    assert run("models", "promote", "1") == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"Warning: {said}")
    assert f"{path.name} is the champion" in captured.out


@pytest.mark.parametrize("kind", ["earlier layout", "broken"])
def test_a_model_that_cannot_be_used_is_said_and_never_a_sound_champion(
    empty, tmp_path, capsys, monkeypatch, kind
):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    models = empty / "models"

    with monkeypatch.context() as patch:
        if kind == "earlier layout":
            patch.setattr("kernelcast.costmodel.artifact.ARTIFACT_VERSION", 1)
        path = register_by_hand(models)
        registry.set_champion(path)
    if kind == "broken":
        (path / "level.json").write_bytes(b"")
    said = "train it again" if kind == "earlier layout" else "its digest does not match"
    assert run("models", "list") == 0
    out = capsys.readouterr().out
    for each in ("unusable", kind, f"Cannot be used: {path}", said):
        assert each in out
    for words in ([], ["--json"]):
        assert run("models", "show", *words) == 1
        assert said in capsys.readouterr().out
    assert run("models", "export") == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.glob("*.zip")) == []
    assert run("report") == 0
    assert said in Path("kernelcast-report.html").read_text()


def test_sync_exits_with_1_while_a_run_still_waits(empty, capsys, monkeypatch):
    from kernelcast.training.tracking import Run, track

    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    assert run("models", "sync", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"uploaded": [], "waiting": []}
    waiting = Run("kernelcast/toy", "a run")
    track(waiting)
    capsys.readouterr()
    assert run("models", "sync", "--json") == 1
    assert [one["run"] for one in json.loads(capsys.readouterr().out)["waiting"]] == [waiting.id]
    assert run("models", "sync") == 1
    assert f"{waiting.id} still waits" in capsys.readouterr().out


# report


@pytest.mark.slow
def test_report_is_written_where_asked_and_says_how_to_open_it(home, tmp_path, capsys):
    target = tmp_path / "out.html"
    assert run("report", "--op", "toy", "--device", "a100", "--output", str(target)) == 0
    assert target.as_uri() in capsys.readouterr().out
    text = target.read_text()
    assert "toy on a100-sxm4-80gb" in text
    assert "exactly the measurements that the model was trained on" in text
    assert text.count("<svg") == 4
    fill(home, range(50, 52), "alpha")
    assert run("report") == 0
    assert "it now holds 42 problems" in Path("kernelcast-report.html").read_text()


def test_report_without_models_or_folder_refuses(empty, tmp_path, capsys):
    assert run("report", "--output", str(tmp_path / "r.html")) == 2
    assert "no trained model" in capsys.readouterr().err
    register_by_hand(empty / "models")
    assert run("report", "--output", str(tmp_path)) == 2
    err = capsys.readouterr().err
    assert err == (
        f"Error: The report {tmp_path} cannot be written: Is a directory. Name another file with --output.\n"
    )
    assert run("report", "--output", str(tmp_path / "absent" / "r.html")) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ("train",),
        ("report",),
        *(("models", name) for name in ("list", "show", "promote", "rollback", "export", "import", "sync")),
    ],
    ids=" ".join,
)
def test_help_has_an_example_of_the_command(command, capsys):
    assert run(*command, "--help") == 0
    _, _, example = capsys.readouterr().out.partition("Example:")
    assert f"kernelcast {' '.join(command)}" in example
