"""Artifacts on disk: whatever is done to one, loading it gives an ArtifactError or the same model."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
import zipfile

import numpy as np
import pytest

from kernelcast.costmodel import CostModel, Forest, ProblemData, RankingModel, read_manifest, verify_files
from kernelcast.costmodel.artifact import ARTIFACT_VERSION, read_artifact, write_artifact
from kernelcast.errors import ArtifactError, EarlierLayoutError
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem

pytest.importorskip("sklearn")
pytest.importorskip("xgboost")

GPU = Device("toy-gpu", "gpu", "nvidia", "sm80", 108)
TABLE = CandidateTable.of([Candidate("vendor"), *(Candidate.of("tiled", {"tile": t}) for t in (16, 32, 64))])


def toy(m):
    return Problem("toy", (("m", m),), "float32")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    data = [
        ProblemData(toy(m), GPU, TABLE, np.log(m + np.abs(np.arange(4.0) - m % 4)), np.full(4, np.nan))
        for m in range(4, 40)
    ]
    model = RankingModel.fit(data, CostModel(n_estimators=4, max_depth=3, n_jobs=1))
    model.facts = {"device": GPU.to_dict(), "held_out": {"efficiency@1": 0.9375, "note": "café"}}
    folder = tmp_path_factory.mktemp("kept") / "model"
    model.save(folder)
    return folder


@pytest.fixture
def folder(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "model")


NAMES = ["manifest.json"] + [
    f"{head}.{kind}" for head in ("difference", "slowdown", "level", "error") for kind in ("json", "npz")
]


def check_both(folder):
    """Everything that a model is asked before it is used."""
    verify_files(folder)
    return RankingModel.load(folder)


def rewritten(folder, **changes):
    """The manifest with other fields and a digest that fits them."""
    manifest = read_manifest(folder)
    for name, value in changes.items():
        if value is KeyError:
            del manifest[name]
        else:
            manifest[name] = value
    manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return folder


def test_what_is_in_the_folder(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    manifest = read_manifest(folder)
    assert set(manifest) == {
        "adaptive", "artifact_version", "error_mean", "facts", "feature_names", "files", "level_mean", "operation", "schema",
        "schema_hash",
    }  # fmt: skip
    assert manifest["artifact_version"] == ARTIFACT_VERSION
    assert manifest["operation"] == "toy"
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert check_both(folder).facts["held_out"]["note"] == "café"
    # numpy reads the arrays, and nothing of them is pickled.
    with np.load(folder / "level.npz", allow_pickle=False) as arrays:
        assert sorted(arrays.files) == ["base", "feature", "leaf", "mean", "threshold", "width"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("times", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_a_byte_that_was_changed_dropped_or_added_shows(folder, name, times):
    path = folder / name
    whole = path.read_bytes()
    rng = random.Random(name)
    for _ in range(times):
        at = rng.randrange(len(whole))
        flipped = whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        dropped = whole[:at] + whole[at + rng.randint(1, 40) :]
        added = whole[:at] + rng.randbytes(rng.randint(1, 4)) + whole[at:]
        for changed in (flipped, dropped, added, whole[:at]):
            path.write_bytes(changed)
            with pytest.raises(ArtifactError):
                check_both(folder)
    path.write_bytes(whole)
    check_both(folder)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "manifest.json"])
def test_a_file_that_only_xgboost_reads_is_left_to_verify_files(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=rf"{name} was changed"):
        verify_files(folder)
    if name.endswith(".json"):
        assert RankingModel.load(folder).operation == "toy"
    else:
        with pytest.raises(ArtifactError, match=rf"{name} was changed"):
            RankingModel.load(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_missing_or_a_folder(folder, name):
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        check_both(folder)
    (folder / name).mkdir()
    with pytest.raises(ArtifactError, match=name):
        check_both(folder)


def test_what_is_no_model_at_all(tmp_path):
    (tmp_path / "file").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "file", tmp_path / "empty"):
        with pytest.raises(ArtifactError):
            RankingModel.load(path)
        with pytest.raises(ArtifactError):
            verify_files(path)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"null", b"5", b'"text"', b"[]", b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe\x00", b"\x00" * 9,
        b"{}", b'{"digest": "x"}', b'{"digest": "x", "artifact_version": "one"}', b"NaN", b"1" * 10_000,
        b'{"digest": "x", "artifact_version": Infinity}', b'{"digest": "x", "artifact_version": NaN}',
        b'{"digest": "x", "artifact_version": 1e400}', b'{"digest": "x", "artifact_version": [1]}',
        b'{"digest": [], "artifact_version": 1}', b'{"artifact_version": 1}',
    ],
    ids=lambda text: repr(text)[:40],
)  # fmt: skip
def test_a_manifest_that_is_none(folder, text):
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        check_both(folder)


def test_a_model_of_an_earlier_layout_is_refused_by_its_folder(folder):
    rewritten(folder, artifact_version=1)
    said = f"{re.escape(str(folder))} was written by an earlier kernelcast \\(layout 1\\) .*; train it again"
    for read in (read_manifest, verify_files, RankingModel.load):
        with pytest.raises(EarlierLayoutError, match=said):
            read(folder)


def test_a_head_that_is_missing_is_named_with_the_folder(folder):
    files = {name: one for name, one in read_manifest(folder)["files"].items() if name != "slowdown.npz"}
    rewritten(folder, files=files)
    with pytest.raises(ArtifactError, match=f"{re.escape(str(folder))}: The model has no head 'slowdown'"):
        RankingModel.load(folder)


def test_a_manifest_of_a_later_version_asks_for_an_upgrade(folder):
    rewritten(folder, artifact_version=ARTIFACT_VERSION + 1)
    with pytest.raises(ArtifactError, match=f"layout {ARTIFACT_VERSION + 1}; .* Upgrade kernelcast"):
        RankingModel.load(folder)


@pytest.mark.parametrize(
    "version", [ARTIFACT_VERSION + 0.9, str(ARTIFACT_VERSION), True, None, float(ARTIFACT_VERSION)]
)
def test_a_layout_is_a_whole_number(folder, version):
    rewritten(folder, artifact_version=version)
    with pytest.raises(ArtifactError, match="not a model's manifest"):
        read_manifest(folder)


def test_a_wrong_digest(folder):
    whole = (folder / "manifest.json").read_bytes()
    manifest = json.loads(whole)
    for digest in ("0" * 64, "", None, 5, manifest["digest"].upper()):
        (folder / "manifest.json").write_text(json.dumps({**manifest, "digest": digest}, indent=1) + "\n")
        with pytest.raises(ArtifactError, match="digest does not match"):
            read_manifest(folder)
    # The same words in another order or with other spaces are not what was written either.
    for text in (json.dumps(manifest), whole.decode().rstrip(), whole.decode().replace("caf\\u00e9", "café")):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ArtifactError, match="digest does not match"):
            read_manifest(folder)
    (folder / "manifest.json").write_bytes(whole)
    assert read_manifest(folder)["operation"] == "toy"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_manifest_with_nan_is_no_json(folder, value):
    rewritten(folder, facts={"score": value})
    with pytest.raises(ArtifactError, match="not a model's manifest"):
        RankingModel.load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.npz", "/etc/passwd", "..", ".", "", "a/b.npz", "..\\b.npz", "level.npz/", "a\0.npz", "level.pkl",
        "level.npz\n", "x" * 300 + ".npz", "manifest",
    ],
    ids=repr,
)  # fmt: skip
def test_a_manifest_that_names_other_files(folder, name):
    (folder.parent / "outside.npz").write_bytes((folder / "level.npz").read_bytes())
    rewritten(folder, files={**read_manifest(folder)["files"], name: "0" * 64})
    for read in (RankingModel.load, verify_files):
        with pytest.raises(ArtifactError, match="none of a model's"):
            read(folder)


@pytest.mark.parametrize(
    "files", [None, [], {}, 5, "level.npz", [["level.npz", "x"]], {"level.npz": 5}, KeyError]
)
def test_a_manifest_that_lists_no_files(folder, files):
    rewritten(folder, files=files)
    for read in (RankingModel.load, verify_files):
        with pytest.raises(ArtifactError):
            read(folder)


@pytest.mark.parametrize("head", ["difference", "slowdown", "level", "error"])
def test_a_manifest_that_leaves_a_head_out(folder, head):
    files = read_manifest(folder)["files"]
    rewritten(folder, files={name: digest for name, digest in files.items() if name != f"{head}.npz"})
    for read in (RankingModel.load, verify_files):
        with pytest.raises(ArtifactError, match=f"no head '{head}'"):
            read(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": None}, {"schema": []}, {"schema": {}}, {"schema_hash": "0" * 16}, {"schema_hash": KeyError},
        {"level_mean": "high"}, {"level_mean": None}, {"level_mean": 10**400}, {"level_mean": KeyError},
        {"error_mean": [1]}, {"facts": None}, {"facts": 5}, {"facts": [1]}, {"facts": KeyError},
        {"operation": "gemm"}, {"operation": KeyError}, {"feature_names": []}, {"feature_names": KeyError},
        {"feature_names": ["x"] * 9},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_whose_fields_do_not_fit(folder, changes):
    rewritten(folder, **changes)
    with pytest.raises(ArtifactError):
        RankingModel.load(folder)


def test_other_features_than_this_version_computes(folder):
    manifest = read_manifest(folder)
    rewritten(folder, feature_names=manifest["feature_names"][::-1])
    with pytest.raises(ArtifactError, match=r"fitted on other features .* Train it again"):
        RankingModel.load(folder)


def zipped(entries, **kinds):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **kinds) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def arrays_of(folder):
    with zipfile.ZipFile(folder / "level.npz") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize(
    "make",
    [
        lambda entries: b"",
        lambda entries: b"PK\x05\x06",
        lambda entries: npy(np.zeros(3)),
        lambda entries: zipped({}),
        lambda entries: zipped({"base.npy": entries["base.npy"]}),
        lambda entries: zipped({**entries, "leaf.npy": b"not an array"}),
        lambda entries: zipped({**entries, "leaf.npy": entries["leaf.npy"][:-5]}),
        lambda entries: zipped({**entries, "leaf.npy": entries["leaf.npy"].replace(b"f4", b"O8")}),
        lambda entries: zipped({**entries, "leaf.npy": npy(np.array([None]), allow_pickle=True)}),
        lambda entries: zipped(
            {
                **entries,
                "leaf.npy": npy(np.zeros((2, 2), np.float32)).replace(b"(2, 2)", b"(2, 999999999999)"),
            }
        ),
        lambda entries: zipped({**entries, "leaf.npy": b"\x93NUMPY\x01\x00\x10\x00" + b"{" * 16}),
        lambda entries: zipped(entries)[:-30],
        lambda entries: zipped(entries).replace(b"PK\x01\x02", b"PK\x09\x09"),
    ],
    ids=range(13),
)
def test_arrays_that_are_none_under_a_digest_that_fits(folder, make):
    """What a careless or hostile writer may have written: the digest fits, and nothing but an ArtifactError comes."""
    content = make(arrays_of(folder))
    (folder / "level.npz").write_bytes(content)
    files = {**read_manifest(folder)["files"], "level.npz": hashlib.sha256(content).hexdigest()}
    rewritten(folder, files=files)
    with pytest.raises(ArtifactError):
        RankingModel.load(folder)


def test_arrays_that_were_packed_by_others_are_read(folder):
    content = zipped(arrays_of(folder), compression=zipfile.ZIP_DEFLATED)
    (folder / "level.npz").write_bytes(content)
    rewritten(
        folder, files={**read_manifest(folder)["files"], "level.npz": hashlib.sha256(content).hexdigest()}
    )
    assert check_both(folder).operation == "toy"


def test_random_damage_under_a_digest_that_fits(folder):
    whole = (folder / "level.npz").read_bytes()
    rng = random.Random(4)
    manifest = read_manifest(folder)
    read = 0
    for _ in range(150):
        at = rng.randrange(len(whole))
        content = whole[:at] + rng.randbytes(rng.randint(1, 3)) + whole[at + rng.randint(0, 3) :]
        (folder / "level.npz").write_bytes(content)
        rewritten(
            folder,
            **{**manifest, "files": {**manifest["files"], "level.npz": hashlib.sha256(content).hexdigest()}},
        )
        try:
            _, forests = read_artifact(folder)
        except ArtifactError:
            continue
        assert np.isfinite(forests["level"].predict(np.zeros((2, forests["level"].width), np.float32))).all()
        read += 1
    # The archive's own checksums refuse nearly all of it.
    assert read < 50


def forest():
    return Forest(
        np.zeros((1, 1), np.int32),
        np.zeros((1, 1), np.float32),
        np.ones((1, 2), np.float32),
        base=0.0,
        width=2,
    )


def write(folder, manifest=None):
    write_artifact(
        folder, {"operation": "toy"} if manifest is None else manifest, {"level": b"{}"}, {"level": forest()}
    )


def test_models_are_never_overwritten(tmp_path):
    write(tmp_path / "deep" / "er" / "model")
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["model"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "deep" / "er" / "model", tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(ArtifactError, match="never overwritten"):
            write(path)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_model_is_written_whole_or_not_at_all(tmp_path):
    for manifest in ({"a": float("nan")}, {"a": {1, 2}}, {"a": b"x"}, {("a", "b"): 1}):
        with pytest.raises(ArtifactError, match="not plain JSON"):
            write(tmp_path / "model", manifest)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        write(tmp_path / "file" / "model")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ArtifactError, match="cannot be written"):
            write(tmp_path / "model")
    finally:
        tmp_path.chmod(0o700)


def test_writing_twice_gives_the_same_bytes(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_two_writers_of_one_model_do_not_meet(tmp_path):
    import threading

    outcomes = []

    def attempt():
        try:
            write(tmp_path / "model")
            outcomes.append("written")
        except ArtifactError:
            outcomes.append("refused")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("written") == 1
    assert outcomes.count("refused") == 7
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    read_artifact(tmp_path / "model")
