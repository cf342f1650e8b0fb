"""Compiled facts in training: what is gathered, when it is used, and that the model carries it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kernelcast.costmodel import ProblemData, RankingModel, read_manifest, verify_files
from kernelcast.costmodel.model import COMPILED_FILE
from kernelcast.errors import ArtifactError
from kernelcast.kernels import Candidate, CandidateTable, Problem, problem
from kernelcast.kernels.compile import CompileFacts, candidate_spec, code_key
from kernelcast.kernels.compile_cache import CompileCache
from kernelcast.kernels.devices import device
from kernelcast.training.compiled import LEAST_SHARE, gather
from kernelcast.training.train import train

pytest.importorskip("triton")
pytest.importorskip("sklearn")
pytest.importorskip("xgboost")

A100 = device("a100")
TILES = [(rows, columns) for rows in (16, 32, 64, 128) for columns in (32, 128)]
SMALL = {"n_estimators": 20, "max_depth": 3, "error_folds": 1, "n_jobs": 1}


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def tiled(rows, columns):
    config = {
        "block_m": rows,
        "block_n": columns,
        "block_k": 32,
        "group_m": 8,
        "num_stages": 3,
        "num_warps": 4,
    }
    return Candidate.of("triton_tiled", config)


TABLE = CandidateTable.of([Candidate("vendor"), *(tiled(*tile) for tile in TILES)])


def measured(m, n=512, k=512, table=TABLE, on=A100):
    latency = np.log(10.0 + (np.arange(len(table)) + m % 7) % 5)
    return ProblemData(
        problem("gemm", m=m, n=n, k=k, dtype="float16"), on, table, latency, np.full(len(table), math.nan)
    )


DATA = [measured(m, n) for m in (256, 512, 768, 1024, 1536, 2048) for n in (512, 1024)]


def fill(cache, candidates, described=DATA[0].problem, target="sm80"):
    """Facts whose registers are rows plus columns of the tile."""
    for candidate in candidates:
        config = candidate.parameters
        facts = CompileFacts(registers=config["block_m"] + config["block_n"], shared_bytes=4096)
        cache.put(target, code_key(candidate_spec(described, candidate, target), target), facts)
    return cache


@pytest.fixture
def full(tmp_path):
    return fill(CompileCache(tmp_path / "compile"), [tiled(*tile) for tile in TILES])


def test_what_was_compiled_for_one_problem_is_known_of_its_like(full):
    found = gather(DATA, full)
    assert found.share == 1.0
    assert found.compiled.target == "sm80"
    for described in (DATA[0].problem, problem("gemm", m=8192, n=768, k=1024, dtype="float16")):
        facts = found.compiled.lookup(described, TABLE.blocks[1])
        np.testing.assert_array_equal(facts[:, 0], [rows + columns for rows, columns in TILES])
    ragged = found.compiled.lookup(problem("gemm", m=1000, n=512, k=512, dtype="float16"), TABLE.blocks[1])
    assert np.isnan(ragged).all()
    assert found.to_json() == {
        "used": True, "share": 1.0, "rows": len(found.compiled),
        "reason": "100% of the measured Triton candidates were compiled; 80% are needed.",
    }  # fmt: skip


def test_the_quick_subset_is_looked_up_as_well(tmp_path):
    from kernelcast.kernels import variant

    quick = list(CandidateTable([variant("gemm", "triton_tiled").space("default")]))
    cache = fill(CompileCache(tmp_path), [*quick, *(tiled(*tile) for tile in TILES)])
    found = gather(DATA, cache).compiled
    (block,) = CandidateTable.of(quick).blocks
    assert np.isfinite(found.lookup(DATA[3].problem, block)).all()


def test_too_few_compiled_candidates_are_not_used(tmp_path):
    few = fill(CompileCache(tmp_path / "few"), [tiled(*tile) for tile in TILES[:6]])
    found = gather(DATA, few)
    assert (found.compiled, found.share) == (None, 6 / 8)
    assert found.reason == "75% of the measured Triton candidates were compiled; 80% are needed."
    assert 6 / 8 < LEAST_SHARE < 7 / 8
    assert gather(DATA, fill(few, [tiled(*TILES[6])])).compiled is not None


def test_failures_are_not_facts(full):
    for tile in TILES[:4]:
        spec = candidate_spec(DATA[0].problem, tiled(*tile), "sm80")
        full.put("sm80", code_key(spec, "sm80"), CompileFacts(outcome="timeout"))
    assert gather(DATA, full).share == 0.5


def test_why_there_are_none(full, tmp_path, monkeypatch):
    def reason(data, cache):
        found = gather(data, cache)
        assert (found.compiled, found.to_json()["used"]) == (None, False)
        return found.reason

    assert reason(DATA, None) == "They were not asked for."
    assert "Nothing is compiled for sm80" in reason(DATA, CompileCache(tmp_path / "empty"))
    assert "Nothing is compiled for sm90" in reason([measured(64, on=device("h100"))], full)
    assert "no target of the compiler" in reason([measured(64, on=device("t4"))], full)
    toy = ProblemData(
        Problem("toy", (("m", 1),), "float32"),
        A100,
        CandidateTable.of([tiled(16, 32)]),
        np.zeros(1),
        np.zeros(1),
    )
    assert "0% of the measured" in reason([toy], full)
    old = CandidateTable.of([Candidate("vendor"), Candidate.of("triton_tiled", {"tile": 3})])
    assert "0% of the measured" in reason([measured(64, table=old)], full)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" in reason(DATA, full)


def test_a_config_whose_code_differs_within_a_class_is_left_out(full, monkeypatch):
    from kernelcast.training import compiled as module

    # Levels that are too coarse: all sizes that are multiples of 16 alike.
    coarse = dict.fromkeys(("m", "n", "k", "lda", "ldb"), 0)
    monkeypatch.setattr(module, "find_levels", lambda *_: coarse)
    data = [*DATA, measured(16 * 3)]
    found = module.gather(data, full)
    # 48 rows are no multiple of 32, 64 or 128: only the tiles of 16 have one code.
    assert found.share == 2 / 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    cache = fill(CompileCache(folder / "compile"), [tiled(*tile) for tile in TILES])
    options = {"device": A100, "tracking": False, "estimator_params": SMALL}
    with_facts = train(DATA, models_dir=folder / "a", compile_cache=cache, **options)
    without = train(DATA, models_dir=folder / "b", **options)
    return with_facts.model_dir, without.model_dir


@pytest.mark.slow
def test_the_model_carries_its_facts_and_says_so(trained):
    with_facts, without = trained
    manifest = read_manifest(with_facts)
    assert manifest["schema"]["compile_facts"] is True
    assert manifest["facts"]["compile_facts"]["used"] is True
    assert COMPILED_FILE in manifest["files"]
    model = RankingModel.load(with_facts)
    features = model.features(DATA[0].problem, TABLE, A100)
    at = model.feature_names.index("compiled_registers")
    np.testing.assert_array_equal(
        features[:, at], np.float32([math.nan, *(rows + columns for rows, columns in TILES)])
    )
    verify_files(with_facts)

    plain = read_manifest(without)
    assert "compile_facts" not in plain["schema"]
    assert plain["facts"]["compile_facts"] == {
        "used": False, "share": 0.0, "rows": 0, "reason": "They were not asked for.",
    }  # fmt: skip
    assert not (without / COMPILED_FILE).exists()
    assert not any(name.startswith("compiled_") for name in RankingModel.load(without).feature_names)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["changed", "missing", "not listed"])
def test_facts_that_are_gone_or_changed_are_an_error_on_load(trained, tmp_path, harm):
    import hashlib
    import shutil

    folder = shutil.copytree(trained[0], tmp_path / "model")
    if harm == "changed":
        (folder / COMPILED_FILE).write_bytes((folder / COMPILED_FILE).read_bytes().replace(b"4096", b"8192"))
    elif harm == "missing":
        (folder / COMPILED_FILE).unlink()
    else:
        manifest = read_manifest(folder)
        del manifest["files"][COMPILED_FILE]
        manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    with pytest.raises(ArtifactError, match=COMPILED_FILE):
        RankingModel.load(folder)


@pytest.mark.slow
def test_an_exported_model_brings_its_facts(trained, tmp_path):
    from kernelcast.training import registry

    model = registry.model_at(trained[0])
    file = registry.export(model, tmp_path / "model.zip")
    found = registry.import_(tmp_path / "models", file)
    assert (found.path / COMPILED_FILE).read_bytes() == (trained[0] / COMPILED_FILE).read_bytes()
