"""Thousands of damaged artifacts: each is refused by an ArtifactError, none with another error, and none is believed."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import random
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest

from kernelcast.costmodel import CostModel, ProblemData, RankingModel, verify_files
from kernelcast.errors import ArtifactError
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem

pytest.importorskip("sklearn")
pytest.importorskip("xgboost")

GPU = Device("toy-gpu", "gpu", "nvidia", "sm80", 108)
TABLE = CandidateTable.of([Candidate("vendor"), *(Candidate.of("tiled", {"tile": t}) for t in (16, 32, 64))])


def fitted(shift):
    data = [
        ProblemData(
            Problem("toy", (("m", m),), "float32"),
            GPU,
            TABLE,
            np.log(m + shift + np.abs(np.arange(4.0) - m % 4)),
            np.full(4, np.nan),
        )
        for m in range(4, 30)
    ]
    model = RankingModel.fit(data, CostModel(n_estimators=3, max_depth=3, error_folds=0, n_jobs=1))
    model.facts = {"device": GPU.to_dict(), "held_out": {"efficiency@1": 0.9375, "note": "caf\u00e9"}}
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two artifacts of the same features, as {name: content}."""
    found = []
    for shift in (0.0, 3.0):
        folder = tmp_path_factory.mktemp("kept") / "model"
        fitted(shift).save(folder)
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    return found


def flipped(rng, files, other):
    name = rng.choice(sorted(files))
    content = bytearray(files[name])
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= rng.choice([1 << rng.randrange(8), rng.randint(1, 255)])
    return {**files, name: bytes(content)}


def cut(rng, files, other):
    name = rng.choice(sorted(files))
    return {**files, name: files[name][: rng.randrange(len(files[name]))]}


def spliced(rng, files, other):
    name = rng.choice(sorted(files))
    content = files[name]
    at = rng.randrange(len(content))
    inserted = rng.choice(
        [rng.randbytes(rng.randint(1, 9)), b" ", b"\n", b"\0", content[at : at + rng.randint(1, 99)]]
    )
    return {**files, name: content[:at] + inserted + content[at + rng.choice([0, 0, 1, 5, 400]) :]}


def swapped_within(rng, files, other):
    one, two = rng.sample(sorted(files), 2)
    return {**files, one: files[two], two: files[one]}


def swapped_between(rng, files, other):
    differing = [name for name in sorted(files) if files[name] != other[name]]
    chosen = rng.sample(differing, rng.randint(1, len(differing) - 1))
    return {**files, **{name: other[name] for name in chosen}}


def gone(rng, files, other):
    name = rng.choice(sorted(files))
    return {
        **{each: content for each, content in files.items() if each != name},
        name: rng.choice([None, b""]),
    }


#: What no field of a manifest is, whatever it is about.
WRONG = [
    None, True, -1, 10**400, "x", "", [], {}, [[]], {"a": None}, math.nan, math.inf, 1e308, -1e308, 2**63,
    "0" * 64, ["x"] * 3, [10**400], "\ud800",
]  # fmt: skip


def wrong_values(rng, files, other):
    """A manifest with a field that cannot be, under a digest that does not fit."""
    manifest = json.loads(files["manifest.json"])
    place, name = rng.choice(list(fields_of(manifest)))
    value = rng.choice([value for value in WRONG if not same(value, place[name])])
    place[name] = value
    return {**files, "manifest.json": json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"}


def wrong_values_sealed(rng, files, other):
    """The same where the model would use the field, under a digest that fits: as a careless writer leaves it."""
    manifest = json.loads(files["manifest.json"])
    del manifest["digest"]
    choices = [
        ("artifact_version", [None, "x", [], {}, 10**400, math.inf, 1, 3, 10**9]),
        ("operation", [None, 5, "", "gemm", []]),
        ("schema", [None, 5, [], {}, "x"]),
        ("schema_hash", [None, 5, "0" * 16]),
        ("feature_names", [None, 5, [], ["x"], {}]),
        ("level_mean", [None, "x", "1.5", True, [], {}, 10**400, math.nan, math.inf]),
        ("error_mean", [None, "x", [], {}, 10**400, math.nan, -math.inf]),
        ("facts", [None, 5, [5], "x", [["a", 1]]]),
        ("adaptive", [None, 5, [], {}, "x", {"reach": None, "calibration": None}]),
        ("files", [None, 5, [], {}, "x", {"level.npz": 5}, {"../level.npz": "0" * 64}]),
    ]
    if rng.random() < 0.5:
        name, values = rng.choice(choices)
        manifest[name] = copy.deepcopy(rng.choice(values))
    elif rng.random() < 0.5:
        # Without what it knows of its limits a model is one all the same.
        del manifest[rng.choice([name for name, _ in choices if name != "adaptive"])]
    else:
        # Within the schema, where any change shows in the hash, and in the list of files.
        place, name = rng.choice(
            [*fields_of(manifest["schema"]), *fields_of(manifest["files"]), (manifest["files"], "level.npz")]
        )
        value = rng.choice([value for value in WRONG if not same(value, place[name])])
        place[name] = copy.deepcopy(value)
    manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return {**files, "manifest.json": json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"}


def sealed_arrays(rng, files, other):
    """Arrays whose bytes were damaged before the manifest was written over them: the digest fits."""
    name = rng.choice(["difference.npz", "slowdown.npz", "level.npz", "error.npz"])
    with zipfile.ZipFile(io.BytesIO(files[name])) as archive:
        arrays = {each: archive.read(each) for each in archive.namelist()}
    which = rng.choice(sorted(arrays))
    content = arrays[which]
    # The header of an array, of which each byte counts; a changed value is another tree, which nobody can tell.
    header = content.index(b"\n")
    how = rng.choice(["cut", "gone", "text", "shape", "kind"])
    if how == "cut":
        content = content[: rng.randrange(len(content))]
    elif how == "text":
        content = b"not an array"
    elif how == "shape":
        content = (
            b"\x93NUMPY\x01\x00"
            + content[8:10]
            + content[10:header].replace(b"'shape': (", b"'shape': (9")
            + content[header:]
        )
    elif how == "kind":
        content = (
            content[:10] + content[10:header].replace(b"<", rng.choice([b"x", b"<<"])) + content[header:]
        )
    with io.BytesIO() as buffer:
        with zipfile.ZipFile(buffer, "w") as archive:
            for each, old in arrays.items():
                if each != which or how != "gone":
                    archive.writestr(each, content if each == which else old)
        packed = buffer.getvalue()
    manifest = json.loads(files["manifest.json"])
    del manifest["digest"]
    manifest["files"][name] = hashlib.sha256(packed).hexdigest()
    manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    text = json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
    changed = {**files, name: packed, "manifest.json": text}
    # Without the means a model predicts all the same; it only cannot explain itself.
    return None if which == "mean.npy" and how == "gone" else changed


def fields_of(value):
    """(holder, key) of everything in a tree of dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from fields_of(inner)


def same(one, other):
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


MUTATORS = [
    flipped, flipped, cut, spliced, swapped_within, swapped_between, gone, wrong_values, wrong_values_sealed,
    wrong_values_sealed, sealed_arrays,
]  # fmt: skip


def try_many(pair, folder, count):
    """How many of ``count`` damaged artifacts were refused, by kind of damage."""
    refused = dict.fromkeys((mutate.__name__ for mutate in MUTATORS), 0)
    for seed in range(count):
        rng = random.Random(seed)
        one, other = pair if rng.random() < 0.5 else pair[::-1]
        mutate = MUTATORS[seed % len(MUTATORS)]
        changed = None
        while changed is None or changed == one:
            changed = mutate(rng, one, other)
        for name in one:
            path = folder / name
            path.unlink(missing_ok=True)
            if changed[name] is not None:
                path.write_bytes(changed[name])
        said = []
        for read in (verify_files, RankingModel.load):
            try:
                read(folder)
            except ArtifactError as error:
                said.append(str(error))
        # Files that only xgboost reads are left to `verify_files`; a model is asked both before it is used.
        assert said, (seed, mutate.__name__)
        assert all(len(text) > 20 for text in said), said
        refused[mutate.__name__] += 1
    return refused


def test_a_hundred_damaged_artifacts_are_refused(pair, tmp_path):
    refused = try_many(pair, tmp_path, 110)
    assert sum(refused.values()) == 110
    assert min(refused.values()) >= 10


@pytest.mark.slow
def test_two_thousand_damaged_artifacts_are_refused(pair, tmp_path):
    assert sum(try_many(pair, tmp_path, 2000).values()) == 2000


@pytest.mark.slow
def test_two_processes_save_the_same_bytes(tmp_path):
    code = """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        from test_artifact_mutations import fitted
        fitted(0.0).save(Path(sys.argv[2]))
    """
    for name, seed in (("one", "1"), ("two", "2")):
        # Sets and dicts of texts come in another order in each.
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), __file__.rpartition("/")[0], str(tmp_path / name)],
            env={"PYTHONHASHSEED": seed, "PATH": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert "manifest.json" in names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
