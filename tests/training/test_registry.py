"""The registry: numbers, promotion, rollback, exchange, and that nothing lands outside its place."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import multiprocessing
import re
import shutil
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.costmodel import Forest, ProblemData, RankingModel, read_manifest
from kernelcast.costmodel.artifact import write_artifact
from kernelcast.costmodel.locate import find_champion, read_alias
from kernelcast.costmodel.model import schema_of
from kernelcast.errors import ArtifactError, EarlierLayoutError, ModelError, UnknownNameError
from kernelcast.featurizer import Featurizer
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem
from kernelcast.training import held_out, registry
from kernelcast.training.structure import check_facts

GPU = Device("toy-gpu", "gpu", "nvidia", "sm80", 108, memory_bytes=80 * 2**30, clock_hz=1.41e9)
HASH = "3f2a9c1b77aa0011"


#: A training's record where nothing could be held out.
RECORD = {
    "record_version": 1,
    "ks": [1, 2, 3, 5, 10],
    "trained_shapes": ["0123456789ab"],
    "importance": {},
    "problems": [],
    "curves": {},
    "curves_with_default": {},
    "points": {"predicted_us": [], "measured_us": []},
}


def save_model(
    folder: Path,
    *,
    device: Device = GPU,
    level: float = 1.0,
    dataset_hash: str = HASH,
    record: bytes = json.dumps(RECORD).encode(),
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write an artifact that loads: one tree, which puts the vendor behind the others. ``facts`` are put over its own."""
    table = CandidateTable.of([Candidate.of("vendor"), Candidate.of("triton_toy", {"tile": 16})])
    item = ProblemData(Problem("toy", (("m", 8),), "float32"), device, table, np.zeros(2), np.full(2, np.nan))
    schema = schema_of([item])
    names = Featurizer(schema).names
    at = np.array([[names.index("variant_vendor")]], dtype=np.int32)
    forest = Forest(at, np.array([[0.5]]), np.array([[0.0, 1.0]]), base=0.0, width=len(names))
    heads = ("difference", "slowdown", "level", "error")
    manifest = {
        "operation": "toy",
        "schema": schema.to_dict(),
        "schema_hash": schema.hash,
        "feature_names": names,
        "level_mean": level,
        "error_mean": -2.0,
        "facts": {
            "created_at": "2026-01-02T03:04:05+00:00",
            "device": device.to_dict(),
            "dataset_hash": dataset_hash,
            **dict.fromkeys(("problems", "shapes", "measurements", "failures", "seed"), 1),
            "workloads": {"": 1},
            "dtypes": {"float32": 1},
            "hyperparameters": {"n_estimators": 4, "n_jobs": None},
            "libraries": {"xgboost": "3.2.0"},
            "held_out": {"sha256": hashlib.sha256(record).hexdigest()},
            "gate": {"promoted": False, "reason": "Written by hand."},
            **(facts or {}),
        },
    }
    write_artifact(folder, manifest, dict.fromkeys(heads, b"{}"), dict.fromkeys(heads, forest))
    (folder / "held_out.json").write_bytes(record)


def add(models: Path, *, device: Device = GPU, operation: str = "toy", dataset_hash=HASH, **what) -> Path:
    return registry.register(
        models,
        lambda folder: save_model(folder, device=device, dataset_hash=dataset_hash, **what),
        device=device,
        operation=operation,
        dataset_hash=dataset_hash,
    )


def champion(models: Path, operation: str = "toy") -> str | None:
    found = find_champion(models, GPU, operation)
    return None if found is None else found.name


# Numbers


def test_versions_count_up_within_a_device_and_operation(tmp_path):
    assert add(tmp_path) == tmp_path / "toy-gpu" / "toy" / "0001-3f2a9c1b"
    assert add(tmp_path, dataset_hash="ABCDEF0123").name == "0002-abcdef01"
    assert add(tmp_path, operation="other").name == "0001-3f2a9c1b"
    assert add(tmp_path).name == "0003-3f2a9c1b"
    found = registry.list_models(tmp_path)
    assert [(model.operation, model.version[:4]) for model in found] == [
        ("other", "0001"),
        ("toy", "0001"),
        ("toy", "0002"),
        ("toy", "0003"),
    ]


def test_the_number_of_a_deleted_model_that_once_stood_is_not_given_again(tmp_path):
    add(tmp_path)
    second = add(tmp_path)
    registry.set_champion(second)
    shutil.rmtree(second)
    assert add(tmp_path).name == "0003-3f2a9c1b"


def test_a_save_that_fails_leaves_nothing_and_takes_no_number(tmp_path):
    def broken(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        registry.register(tmp_path, broken, device=GPU, operation="toy", dataset_hash=HASH)
    assert [path.name for path in (tmp_path / "toy-gpu" / "toy").iterdir()] == []
    assert add(tmp_path).name == "0001-3f2a9c1b"


@pytest.mark.parametrize("operation", ["../evil", "a/b", "", ".hidden", "a" * 200])
def test_an_operation_that_cannot_be_a_folder_is_refused(tmp_path, operation):
    with pytest.raises(ModelError, match="cannot be registered"):
        add(tmp_path, operation=operation)


def test_a_hash_that_is_not_hexadecimal_is_refused(tmp_path):
    with pytest.raises(ModelError, match="hexadecimal"):
        add(tmp_path, dataset_hash="../../..")


def register_many(models: str, level: float) -> None:
    for _ in range(5):
        registry.set_champion(add(Path(models), level=level))


@pytest.mark.slow
def test_two_processes_that_register_at_once_do_not_collide(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=register_many, args=(str(tmp_path), level)) for level in (1.0, 2.0)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    found = registry.list_models(tmp_path)
    assert [model.version for model in found] == [f"{number:04d}-3f2a9c1b" for number in range(1, 11)]
    assert sorted(model.manifest["level_mean"] for model in found) == [1.0] * 5 + [2.0] * 5
    assert sum(model.champion for model in found) == 1


# Promotion


def test_promote_and_rollback_write_what_stands_and_what_stood(tmp_path):
    first, second, third = (add(tmp_path) for _ in range(3))
    assert champion(tmp_path) is None
    for path in (first, second, third):
        registry.set_champion(path)
    assert json.loads((first.parent / "champion.json").read_text()) == {
        "version": third.name,
        "previous": [first.name, second.name],
    }
    registry.set_champion(third)  # promoting what stands changes nothing
    assert read_alias(first.parent).previous == (first.name, second.name)
    assert registry.rollback(tmp_path, device="toy-gpu", operation="toy").version == second.name
    assert champion(tmp_path) == second.name
    assert registry.rollback(tmp_path, device="toy-gpu", operation="toy").version == first.name
    with pytest.raises(ModelError, match="nothing to go back to"):
        registry.rollback(tmp_path, device="toy-gpu", operation="toy")
    assert champion(tmp_path) == first.name


@pytest.mark.parametrize("field", ["feature_names", "schema", "level_mean", "operation"])
def test_what_selections_cannot_load_does_not_stand(tmp_path, field):
    path = add(tmp_path)
    manifest = {**read_manifest(path), field: "x"}
    heads = dict.fromkeys(
        ("difference", "slowdown", "level", "error"), Forest.from_arrays(dict(np.load(path / "level.npz")))
    )
    shutil.move(path, tmp_path / "before")
    del manifest["files"], manifest["artifact_version"]
    write_artifact(path, manifest, dict.fromkeys(heads, b"{}"), heads)
    (model,) = registry.list_models(tmp_path)
    assert str(path) in model.broken
    with pytest.raises(ArtifactError):
        registry.promote(tmp_path, model)
    assert champion(tmp_path) is None


def test_rollback_passes_over_a_version_that_is_gone(tmp_path):
    first, second, third = (add(tmp_path) for _ in range(3))
    for path in (first, second, third):
        registry.set_champion(path)
    shutil.rmtree(second)
    assert registry.rollback(tmp_path, device="toy-gpu", operation="toy").version == first.name


def test_a_model_that_was_changed_is_not_promoted(tmp_path):
    first, second = add(tmp_path), add(tmp_path)
    registry.set_champion(first)
    (second / "level.npz").write_bytes(b"other")
    with pytest.raises(ArtifactError, match="was changed"):
        registry.set_champion(second)
    assert champion(tmp_path) == first.name


def test_promoting_mends_a_broken_alias(tmp_path):
    path = add(tmp_path)
    (path.parent / "champion.json").write_text("{")
    with pytest.raises(ArtifactError, match="not an alias file"):
        champion(tmp_path)
    assert [model.champion for model in registry.list_models(tmp_path)] == [False]
    registry.promote(tmp_path, registry.find_model(tmp_path, version="1"))
    assert champion(tmp_path) == path.name


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-1, 2), max_size=10))
def test_promotions_and_rollbacks_are_a_stack(tmp_path_factory, steps):
    """-1 rolls back, 0 to 2 promote that model: what stands is what a list used as a stack has on top."""
    models = tmp_path_factory.mktemp("stack")
    paths = [add(models) for _ in range(3)]
    stack: list[str] = []
    for step in steps:
        if step >= 0:
            registry.set_champion(paths[step])
            if not stack or stack[-1] != paths[step].name:
                stack.append(paths[step].name)
        elif len(stack) > 1:
            registry.rollback(models, device="toy-gpu", operation="toy")
            stack.pop()
        else:
            with pytest.raises(ModelError):
                registry.rollback(models, device="toy-gpu", operation="toy")
        assert champion(models) == (stack[-1] if stack else None)


# Looking up


def test_a_champion_is_found_by_hardware_facts_whatever_the_name(tmp_path):
    path = add(tmp_path)
    registry.set_champion(path)
    renamed = dataclasses.replace(GPU, name="another-name")
    corrected = dataclasses.replace(GPU, clock_hz=1.5e9, memory_bytes=79 * 2**30)
    assert find_champion(tmp_path, renamed, "toy") == path
    assert find_champion(tmp_path, corrected, "toy") == path
    assert find_champion(tmp_path, dataclasses.replace(GPU, cores=98), "toy") is None
    assert find_champion(tmp_path, dataclasses.replace(GPU, memory_bytes=40 * 2**30), "toy") is None
    assert find_champion(tmp_path, GPU, "gemm") is None
    assert find_champion(tmp_path, GPU, "../toy") is None
    assert find_champion(tmp_path / "absent", GPU, "toy") is None


def test_equal_facts_come_before_the_same_hardware(tmp_path):
    near = dataclasses.replace(GPU, name="a-near-one", clock_hz=1.5e9)
    for device in (near, GPU):
        registry.set_champion(add(tmp_path, device=device))
    assert find_champion(tmp_path, GPU, "toy").parent.parent.name == "toy-gpu"
    assert find_champion(tmp_path, near, "toy").parent.parent.name == "a-near-one"
    renamed = dataclasses.replace(GPU, name="a-near-one")
    assert find_champion(tmp_path, renamed, "toy").parent.parent.name == "toy-gpu"


def test_other_hardware_of_one_name_has_a_folder_of_its_own(tmp_path):
    other = dataclasses.replace(GPU, cores=98)
    first, second = add(tmp_path), add(tmp_path, device=other)
    assert first.parent.parent.name == "toy-gpu"
    assert second.parent.parent.name == f"toy-gpu-{other.fingerprint[:8]}"
    assert second.name == "0001-3f2a9c1b"
    registry.set_champion(second)
    assert champion(tmp_path) is None
    assert find_champion(tmp_path, other, "toy") == second


def test_a_device_name_cannot_lead_out_of_the_registry(tmp_path):
    path = add(tmp_path / "models", device=dataclasses.replace(GPU, name="../../évil name"))
    assert path.parent.parent.parent == tmp_path / "models"
    assert [entry.name for entry in tmp_path.iterdir()] == ["models"]


def test_one_broken_device_file_does_not_hide_the_others(tmp_path):
    registry.set_champion(add(tmp_path))
    (tmp_path / "aaa").mkdir()
    (tmp_path / "aaa" / "device.json").write_text("[]")
    assert champion(tmp_path) == "0001-3f2a9c1b"


@pytest.mark.parametrize(
    "text",
    [
        '{"version": "../../../etc", "previous": []}',
        '{"version": "0001-3f2a9c1b", "previous": ["/etc"]}',
        '{"version": 1, "previous": []}',
        '{"previous": []}',
        "[" * 5000,
        "",
    ],
)
def test_an_alias_that_names_no_version_is_refused(tmp_path, text):
    path = add(tmp_path)
    (path.parent / "champion.json").write_text(text)
    with pytest.raises(ArtifactError):
        champion(tmp_path)


def test_an_alias_whose_folder_is_gone_says_what_to_do(tmp_path):
    path = add(tmp_path)
    registry.set_champion(path)
    shutil.rmtree(path)
    with pytest.raises(ArtifactError, match="kernelcast models promote"):
        champion(tmp_path)


def test_find_model_by_number_and_what_it_says_where_it_cannot(tmp_path):
    add(tmp_path)
    second = add(tmp_path, dataset_hash="abcdef0123")
    assert registry.find_model(tmp_path, version="2").path == second
    assert registry.find_model(tmp_path, version="0002-abcdef01").path == second
    with pytest.raises(ModelError, match="no champion"):
        registry.find_model(tmp_path, device="toy-gpu", operation="toy")
    registry.set_champion(second)
    assert registry.find_model(tmp_path).path == second
    with pytest.raises(UnknownNameError, match=r"'9'.*0001-3f2a9c1b"):
        registry.find_model(tmp_path, version="9")
    with pytest.raises(UnknownNameError, match=r"Known: toy-gpu\."):
        registry.find_model(tmp_path, device="toy-gpx")
    add(tmp_path, operation="other")
    with pytest.raises(ModelError, match="Several models fit"):
        registry.find_model(tmp_path, version="1")


def test_a_broken_model_is_listed_with_what_is_wrong(tmp_path):
    path = add(tmp_path)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"level_mean": 1.0', '"level_mean": 2.0'))
    (model,) = registry.list_models(tmp_path)
    assert "was changed" in model.broken
    assert model.facts == {}


# Exchange


def exported(tmp_path: Path, **what) -> Path:
    path = add(tmp_path / "there", **what)
    return registry.export(registry.model_at(path), tmp_path / "model.zip")


def test_an_exported_model_is_imported_whole_and_does_not_stand(tmp_path):
    file = exported(tmp_path, level=7.0)
    here = tmp_path / "here"
    add(here)
    model = registry.import_(here, file)
    assert (model.device, model.operation, model.version) == ("toy-gpu", "toy", "0002-3f2a9c1b")
    assert model.manifest["level_mean"] == 7.0
    assert not model.champion
    original = tmp_path / "there" / "toy-gpu" / "toy" / "0001-3f2a9c1b"
    for source in original.iterdir():
        assert (model.path / source.name).read_bytes() == source.read_bytes()
    assert RankingModel.load(model.path).level_mean == 7.0
    with pytest.raises(ModelError, match="registered already"):
        registry.import_(here, file)


def test_exporting_twice_gives_the_same_bytes_and_never_overwrites(tmp_path):
    file = exported(tmp_path)
    model = registry.find_model(tmp_path / "there", version="1")
    again = registry.export(model, tmp_path / "again.zip")
    assert again.read_bytes() == file.read_bytes()
    with pytest.raises(ModelError, match="exists already"):
        registry.export(model, file)


def rewritten(file: Path, *, change=None, extra=()) -> Path:
    """The zip with one file's content changed, or with more entries."""
    target = file.with_name("changed.zip")
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(target, "w") as archive:
        for entry in source.infolist():
            content = source.read(entry)
            archive.writestr(entry, content + b" " if entry.filename == change else content)
        for entry in extra:
            archive.writestr(entry, b"evil")
    return target


def symlink(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


@pytest.mark.parametrize(
    "entry",
    [
        "../evil",
        "../../evil",
        "/tmp/evil",
        "sub/evil",
        "..",
        ".hidden",
        "a\\..\\evil",
        "C:evil",
        symlink("link"),
    ],
    ids=str,
)
def test_an_entry_that_is_not_a_plain_file_is_refused_and_nothing_is_kept(tmp_path, entry):
    file = rewritten(exported(tmp_path), extra=[entry])
    here = tmp_path / "deep" / "er" / "here"
    with pytest.raises(ArtifactError, match="not a plain file"):
        registry.import_(here, file)
    assert [path.name for path in here.iterdir() if path.name != ".lock"] == []
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("change", ["level.npz", "level.json", "manifest.json", "held_out.json"])
def test_a_model_that_was_changed_on_the_way_is_refused(tmp_path, change):
    file = rewritten(exported(tmp_path), change=change)
    with pytest.raises(ArtifactError, match="was changed"):
        registry.import_(tmp_path / "here", file)
    assert registry.list_models(tmp_path / "here") == []


def test_what_is_no_export_is_refused(tmp_path):
    (tmp_path / "text.zip").write_text("hello")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(100):
            archive.writestr(f"file{number}", b"")
    for name in ("text.zip", "empty.zip", "many.zip", "absent.zip"):
        with pytest.raises(ArtifactError):
            registry.import_(tmp_path / "here", tmp_path / name)


def test_the_manifest_says_where_an_import_goes(tmp_path):
    other = dataclasses.replace(GPU, name="far-gpu", cores=64)
    model = registry.import_(tmp_path / "here", exported(tmp_path, device=other))
    assert model.device == "far-gpu"
    assert read_manifest(model.path)["facts"]["device"]["cores"] == 64


# Models of an earlier layout


def test_a_model_of_an_earlier_layout_is_listed_and_nothing_else(tmp_path, monkeypatch):
    models = tmp_path / "models"
    with monkeypatch.context() as patch:
        patch.setattr("kernelcast.costmodel.artifact.ARTIFACT_VERSION", 1)
        path = add(models)
        registry.set_champion(path)
        exported = registry.export(registry.find_model(models), tmp_path / "old.zip")
    sound = add(models)
    (model, other) = registry.list_models(models)
    assert (model.path, model.champion, model.outdated) == (path, True, True)
    assert model.broken == (
        f"{path} was written by an earlier kernelcast (layout 1) and cannot be used; train it again."
    )
    assert (other.path, other.broken, other.outdated) == (sound, "", False)
    with pytest.raises(EarlierLayoutError, match="train it again"):
        registry.export(model, tmp_path / "again.zip")
    assert not (tmp_path / "again.zip").exists()
    with pytest.raises(EarlierLayoutError, match="train it again"):
        registry.promote(models, model)
    with pytest.raises(EarlierLayoutError) as caught:
        registry.import_(models, exported)
    assert str(caught.value).startswith(f"{exported} was written by an earlier kernelcast")


def test_an_import_of_what_is_registered_says_how_to_promote_it(tmp_path):
    path = add(tmp_path / "models")
    file = registry.export(registry.find_model(tmp_path / "models", version="1"), tmp_path / "toy.zip")
    with pytest.raises(ModelError) as caught:
        registry.import_(tmp_path / "models", file)
    assert str(caught.value).endswith(f"kernelcast models promote {path.name} --op toy --device toy-gpu")


# Writing


@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_a_models_folder_that_cannot_be_made_is_named(tmp_path, kind):
    (tmp_path / "file").write_text("")
    models = tmp_path / "file" if kind == "a file" else tmp_path / "file" / "models"
    for change in (
        lambda: registry.require_writable(models, GPU, "toy"),
        lambda: add(models),
        lambda: registry.rollback(models, device="toy-gpu", operation="toy"),
    ):
        with pytest.raises(ModelError) as caught:
            change()
        assert str(caught.value).startswith(f"Cannot write to the models folder {models}: ")
        assert str(caught.value).endswith(". Choose a folder that can be written with KERNELCAST_HOME.")


def test_every_folder_that_a_model_goes_into_is_tried(tmp_path, monkeypatch):
    path = add(tmp_path)
    tried = []

    def refused(*, dir):
        tried.append(dir)
        if dir == path.parent:
            raise OSError(errno.EROFS, "Read-only file system")
        return contextlib.closing(io.BytesIO())

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(ModelError, match=rf"models folder {path.parent}: Read-only file system\."):
        registry.require_writable(tmp_path, GPU, "toy")
    assert tried == [tmp_path, path.parent.parent, path.parent]
    tried.clear()
    registry.require_writable(tmp_path, GPU, "other")
    assert tried == [tmp_path, path.parent.parent]


# Facts and records that no training writes, their digests right


WRONG_FACTS = [
    ("workloads", []),
    ("workloads", {"timm": "9"}),
    ("held_out", None),
    ("held_out", {"sha256": "0", "rankers": {"model": {"with_default": {"1": {"geomean": "x"}}}}}),
    ("device", {"name": "toy-gpu"}),
    ("device", "toy-gpu"),
    ("dtypes", ["float32"]),
    ("libraries", {"xgboost": 3}),
    ("hyperparameters", [4]),
    ("hyperparameters", {"n_estimators": "4"}),
    ("gate", "passed"),
    ("gate", {"promoted": "yes", "reason": ""}),
    ("problems", -1),
    ("problems", True),
    ("failures", 10**400),
    ("seed", 0.5),
    ("created_at", None),
    ("dataset_hash", 7),
]


@pytest.mark.parametrize(("field", "value"), WRONG_FACTS, ids=str)
def test_facts_of_wrong_kinds_are_named_wherever_a_model_is_read(tmp_path, field, value):
    models = tmp_path / "models"
    path, sound = add(models, facts={field: value}), add(models)
    broken, other = registry.list_models(models)
    assert broken.broken.startswith(f"{path / 'manifest.json'}: facts.{field}")
    assert broken.broken.endswith(" must be. Train the model again.") or " has no " in broken.broken
    assert (broken.manifest, other.path, other.broken) == ({}, sound, "")
    file = tmp_path / "model.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for each in path.iterdir():
            archive.write(each, each.name)
    for use in (
        lambda: registry.set_champion(path),
        lambda: registry.export(broken, tmp_path / "out.zip"),
        lambda: registry.import_(models, file),
    ):
        with pytest.raises(ArtifactError, match=rf"facts\.{field}"):
            use()
    assert not (tmp_path / "out.zip").exists()
    assert len(registry.list_models(models)) == 2
    assert champion(models) is None


@pytest.mark.parametrize("facts", [None, "text", -1, [], {}])
def test_facts_that_are_none_are_refused(tmp_path, facts):
    with pytest.raises(ArtifactError, match=r"facts has "):
        check_facts(tmp_path, {"facts": facts})


def problem_record(**changes):
    """A record of one held-out problem, with some of its fields changed."""
    names = dict.fromkeys(("evidence", "problem", "workload", "best", "first", "verified"), "x")
    times = dict.fromkeys(("best_us", "default_us", "first_us", "verified_us"), 2.0)
    return {**names, **times, "sizes": {"m": 8}, "candidates": 3, "flops": None, **changes}


ONE = {
    **RECORD,
    "problems": [problem_record()],
    "curves": {"model": [[0.5, 0.5, 1.0, 1.0, 1.0]]},
    "curves_with_default": {"model": [[0.5, 1, 1, 1, 1]]},
    "points": {"predicted_us": [1.0], "measured_us": [2.0]},
}
WRONG_RECORDS = [
    *(
        b"{}",
        b"[]",
        b"null",
        b"",
        b'{"record_version": 1',
        b'{"record_version": 1}',
        b"[" * 5000,
        b"\xff",
        b"1",
    ),
    *(
        {**ONE, **changes}
        for changes in (
            {"record_version": "1"},
            {"record_version": 2},
            {"ks": [1, 3]},
            {"trained_shapes": [1]},
            {"trained_shapes": "abc"},
            {"importance": {"log2_m": None}},
            {"problems": {}},
            {"problems": [[]]},
            {"problems": [problem_record(best_us=-1)]},
            {"problems": [problem_record(sizes=[8])]},
            {"problems": [problem_record(evidence=None)]},
            {"curves": []},
            {"curves_with_default": {}},
            {"curves_with_default": {"model": [[0.5] * 5] * 2}},
            {"curves_with_default": {"model": [[0.5]]}},
            {"curves_with_default": {"model": [[0.5] * 5, [0.5]]}},
            {"curves_with_default": {"model": [["1"] * 5]}},
            {"curves_with_default": {"model": [[0.5, 0, 1, 1, 1]]}},
            {"curves_with_default": {"model": [[0.5, 1.5, 1, 1, 1]]}},
            {"curves_with_default": {"model": None}},
            {"points": {"predicted_us": [1.0], "measured_us": []}},
            {"points": {"predicted_us": [0], "measured_us": [1]}},
        )
    ),
]


@pytest.mark.parametrize("record", WRONG_RECORDS, ids=lambda record: str(record)[-60:])
def test_a_record_of_another_structure_is_told_and_the_model_is_of_use(tmp_path, record):
    content = record if isinstance(record, bytes) else json.dumps(record).encode()
    path = add(tmp_path, record=content)
    with pytest.raises(ArtifactError, match=re.escape(f"{path / 'held_out.json'}")):
        held_out.read_record(path, read_manifest(path))
    (model,) = registry.list_models(tmp_path)
    assert model.broken == ""
    assert model.unrecorded.startswith(str(path / "held_out.json"))
    with pytest.raises(ArtifactError, match=re.escape(model.unrecorded)):
        registry.export(model, tmp_path / "out.zip")
    registry.set_champion(path)
    assert champion(tmp_path) == path.name


@pytest.mark.parametrize("record", [RECORD, ONE], ids=["none held out", "one"])
def test_a_sound_record_is_read_as_it_was_written(tmp_path, record):
    path = add(tmp_path, record=json.dumps(record).encode())
    assert held_out.read_record(path, read_manifest(path)) == record
    assert registry.model_at(path).unrecorded == ""


def test_a_record_that_is_gone_or_changed_is_told(tmp_path):
    gone, changed = add(tmp_path), add(tmp_path)
    (gone / "held_out.json").unlink()
    (changed / "held_out.json").write_text("{}")
    first, second = registry.list_models(tmp_path)
    assert (first.broken, second.broken) == ("", "")
    assert first.unrecorded.startswith(f"{gone} has no record of held-out problems")
    assert second.unrecorded == (
        f"{changed / 'held_out.json'} was changed after it was written: its digest does not match."
    )
    # Without a record a model can be handed on; with a changed one it cannot.
    assert registry.import_(tmp_path / "here", registry.export(first, tmp_path / "out.zip")).unrecorded
    with pytest.raises(ArtifactError, match="was changed"):
        registry.export(second, tmp_path / "other.zip")
