"""``kernelcast cache``: what is remembered, whether it still wins, and packs."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from kernelcast.cli import app as application
from kernelcast.cli import cache as commands
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.detect import detect
from kernelcast.runtime import CacheKey, Selection, SelectionCache
from kernelcast.runtime.cache import CacheEntry
from kernelcast.runtime.cache_files import entry_path
from kernelcast.runtime.selection import selections_hash

HERE = detect("cpu")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs ``kernelcast cache``: (exit status, standard output, standard error)."""
    app = typer.Typer(no_args_is_help=True)
    app.callback()(application._options)
    commands.attach(app)
    monkeypatch.setattr(application, "app", app)
    monkeypatch.setattr("kernelcast.cli.commands.attach", lambda app: None)
    monkeypatch.setenv("KERNELCAST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "250")

    def call(*arguments):
        status = application._run(["cache", *(str(each) for each in arguments)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def cache(tmp_path):
    return SelectionCache(tmp_path / "home" / "cache")


@pytest.fixture
def lab():
    """The operation of the tests of selection, whose variants take as long as the test says."""
    name = "kernelcast_test_lab"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[1] / "runtime" / "lab.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    module = sys.modules[name]
    module.STATE.reset()
    module.install()
    yield module
    module.remove()


def entry(described, candidate, *, age_s=100.0, device=HERE, **environment):
    key = CacheKey.of(described, device, 3)
    key = replace(key, environment=replace(key.environment, **environment))
    selection = Selection(described, device.name, candidate, "verified", measured_us=50.0, default_us=100.0)
    return CacheEntry(key, selection, round(time.time() - age_s, 3))


GEMM = problem("gemm", m=3, n=4, k=5, threads=2)


def test_an_empty_cache_says_how_to_fill_it(run, tmp_path):
    assert run("show") == (
        0,
        f"No such selections in {tmp_path / 'home' / 'cache'}. Make some with: kernelcast select\n",
        "",
    )
    status, out, _ = run("show", "--json")
    assert (status, json.loads(out)["selections"]) == (0, [])
    assert not (tmp_path / "home").exists()


def test_show_lists_choices_speedups_environments_and_ages(run, cache):
    linear, split = Candidate.of("linear"), Candidate.of("split_k", {"split": 2})
    cache.add(entry(GEMM, linear, age_s=7200.0))
    cache.add(entry(GEMM, split, age_s=3 * 86400.0, torch="1.0"))
    bigger = replace(HERE, name="bigger", cores=HERE.cores + 1)
    cache.add(entry(GEMM, linear, device=bigger))
    status, out, err = run("show")
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(" gemm(")]
    assert len(rows) == 3
    assert "2.00x" in rows[0]
    assert [("prior" if "prior" in row else "current") for row in rows].count("prior") == 1
    assert any(row[-2:] == ["2", "h"] for row in rows)
    assert any(row[-2:] == ["3", "d"] for row in rows)
    assert "2 current, 1 of other environments" in out
    status, out, _ = run("show", "--json", "--device", HERE.fingerprint)
    found = json.loads(out)
    assert {row["candidate"]: row["environment"] for row in found["selections"]} == {
        "linear": "current",
        "split_k(split=2)": "prior",
    }
    first = next(row for row in found["selections"] if row["candidate"] == "linear")
    assert (first["measured_us"], first["default_us"], first["speedup"], first["top_k"]) == (
        50.0,
        100.0,
        2.0,
        3,
    )
    assert 7200 <= first["age_s"] < 7300
    assert found["hash"] == selections_hash(
        e.selection for e in cache.entries() if e.key.device == HERE.fingerprint
    )
    assert len(json.loads(run("show", "--json", "--op", "gemm")[1])["selections"]) == 3
    assert json.loads(run("show", "--json", "--op", "softmax")[1])["selections"] == []
    assert len(json.loads(run("show", "--json", "--device", "bigger")[1])["selections"]) == 1


def test_show_tells_apart_what_was_asked_for(run, cache):
    """One problem and candidate in three searches: of the first three, of the whole space, and down to a regret."""
    first = entry(GEMM, Candidate.of("linear"))
    for key in (
        first.key,
        CacheKey.of(GEMM, HERE, 0),
        CacheKey.of(GEMM, HERE, 0, target_regret=0.02),
    ):
        cache.add(CacheEntry(key, first.selection, first.verified_at))
    status, out, err = run("show")
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith(" gemm(")]
    assert len(lines) == len(set(lines)) == 3
    for search in ("top 3", "tune", "regret 0.02"):
        assert [search in line for line in lines].count(True) == 1
    rows = json.loads(run("show", "--json")[1])["selections"]
    assert sorted(row["search"] for row in rows) == ["regret 0.02", "top 3", "tune"]


@pytest.mark.parametrize("options", [[], ["--op", "gemm"]])
def test_what_cannot_be_forgotten_is_an_error(run, cache, monkeypatch, options):
    entries = [entry(replace(GEMM, threads=threads), Candidate.of("linear")) for threads in (1, 2, 3)]
    for each in entries:
        cache.add(each)
    stuck = [entry_path(cache.folder, each.key) for each in entries[1:]]
    unlink = Path.unlink

    def refused(path, missing_ok=False):
        if path in stuck:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    status, out, err = run("clear", *options, "--yes")
    assert (status, out) == (2, "1 selection forgotten.\n")
    assert err.startswith("Error: 2 files could not be removed: ")
    assert all(f"{path} (Read-only file system)" in err for path in stuck)
    status, out, err = run("clear", *options, "--yes", "--json")
    assert (status, json.loads(out)["removed"]) == (2, 0)
    assert {row["path"] for row in json.loads(out)["left"]} == set(map(str, stuck))
    monkeypatch.undo()
    assert cache.forget().removed == 2


def test_a_broken_entry_is_a_warning(run, cache, tmp_path):
    cache.add(entry(GEMM, Candidate.of("linear")))
    (path,) = (tmp_path / "home" / "cache").glob("*/*.json")
    path.write_text("{}")
    status, _, err = run("show")
    assert status == 0
    assert err.startswith("Warning: The cache entry")


def test_verify_finds_and_replaces_what_no_longer_wins(run, cache, lab, tmp_path):
    names = ("quick", "slow", "twin", "vendor")
    entries = [entry(lab.a_problem(n=16 + at), Candidate.of(name)) for at, name in enumerate(names)]
    prior = entry(lab.a_problem(n=99), Candidate.of("slow"), torch="1.0")
    for each in (*entries, prior):
        cache.add(each)
    status, out, err = run("verify", "--dry-run")
    assert (status, err) == (1, "")
    assert "slow: loses. 400.0 us, the default 100.0 us." in out
    assert "quick: wins. 50.0 us, the default 100.0 us." in out
    assert "4 selections: 1 wins, 1 loses, 1 ties, 1 default; nothing was changed." in out
    assert {e.selection.candidate.variant for e in cache.entries()} == set(names)
    status, out, _ = run("verify", "--json")
    found = json.loads(out)
    assert (status, found["lost"], found["replaced"]) == (1, 1, 1)
    assert {row["candidate"]: row["outcome"] for row in found["verified"]} == {
        "quick": "wins", "slow": "loses", "twin": "ties", "vendor": "default",
    }  # fmt: skip
    stands = {e.selection.problem["n"]: e.selection for e in cache.entries()}
    assert [stands[n].candidate.variant for n in (16, 17, 18, 19, 99)] == [
        "quick",
        "vendor",
        "twin",
        "vendor",
        "slow",
    ]
    assert "slow no longer wins" in stands[17].reason
    assert run("verify")[0] == 0
    # What was measured is in the store.
    lines = [line for p in (tmp_path / "home" / "store" / "journal").glob("*.jsonl") for line in p.open()]
    assert len(lines) == 2 * 3 + 2 * 3 + 2 * 2
    status, out, _ = run("verify", "--op", "gemm")
    assert (status, out) == (
        0,
        f"Nothing in {tmp_path / 'home' / 'cache'} was verified on this machine in its present environment.\n",
    )


def test_what_was_decided_on_a_busy_machine_is_marked_and_selected_anew(run, cache, lab, tmp_path):
    told = [
        entry(lab.a_problem(n=16 + at), Candidate.of(name)) for at, name in enumerate(("vendor", "quick"))
    ]
    quiet = entry(lab.a_problem(n=99), Candidate.of("vendor"))
    for each in told:
        cache.add(replace(each, selection=replace(each.selection, busy=True)))
    cache.add(quiet)
    status, out, _ = run("show")
    assert [("verified, busy" in line) for line in out.splitlines() if "n=" in line] == [True, True, False]
    assert (
        "2 selections decided on a busy machine. Select anew on a quiet one with: kernelcast cache verify"
        in out
    )
    assert [row["busy"] for row in json.loads(run("show", "--json")[1])["selections"]] == [True, True, False]
    status, out, err = run("verify", "--dry-run")
    assert (status, err) == (1, "")
    assert (
        ": vendor: changed. Decided on a busy machine; selected anew: quick, 50.0 us, the default 100.0 us."
        in out
    )
    assert (
        ": quick: confirmed. Decided on a busy machine; selected anew: quick, 50.0 us, the default 100.0 us."
        in out
    )
    assert "3 selections: 1 changed, 1 confirmed, 1 default; nothing was changed." in out
    assert sum(each.selection.busy for each in cache.entries()) == 2
    status, out, _ = run("verify", "--json")
    found = json.loads(out)
    assert (status, found["lost"], found["replaced"]) == (1, 1, 1)
    assert [(row["outcome"], row["selected"], row["still_busy"]) for row in found["verified"]] == [
        ("changed", "quick", False),
        ("confirmed", "quick", False),
        ("default", "vendor", False),
    ]
    stands = {e.selection.problem["n"]: e.selection for e in cache.entries()}
    assert {n: (s.candidate.variant, s.measured_us, s.busy) for n, s in stands.items()} == {
        16: ("quick", 50.0, False),
        17: ("quick", 50.0, False),
        99: ("vendor", 50.0, False),
    }
    assert run("verify")[0] == 0
    # Each time the default and two more, of both; and of what was confirmed no more than is measured of any entry.
    records = [
        json.loads(line)
        for path in (tmp_path / "home" / "store" / "journal").glob("*.jsonl")
        for line in path.open()
    ]
    assert {each["workload"] for each in records} == {"recheck"}
    assert len(records) == 2 * 2 * 3 + 2 * 2


def test_clear_asks_and_forgets_what_meets_the_conditions(run, cache):
    old, new = (
        entry(GEMM, Candidate.of("linear"), age_s=86400.0),
        entry(replace(GEMM, threads=1), Candidate.of("linear")),
    )
    other = entry(problem("batched_gemm", batch=2, m=3, n=4, k=5, threads=2), Candidate.of("vendor"))
    for each in (old, new, other):
        cache.add(each)
    status, out, err = run("clear", "--op", "gemm")
    assert (status, out) == (2, "")
    assert err == "Error: 2 selections would be forgotten. Add --yes to do it.\n"
    assert run("clear", "--older-than", "soon", "--yes")[0] == 2
    assert run("clear", "--op", "gemm", "--older-than", "2h", "--yes")[:2] == (0, "1 selection forgotten.\n")
    assert {e.key for e in cache.entries()} == {new.key, other.key}
    assert json.loads(run("clear", "--op", "gemm", "--yes", "--json")[1]) == {"removed": 1, "left": []}
    assert json.loads(run("clear", "--op", "gemm", "--yes", "--json")[1]) == {"removed": 0}
    assert run("clear", "--yes")[:2] == (0, "1 selection forgotten.\n")
    assert list(cache.entries()) == []


def test_a_pack_takes_selections_to_another_cache(run, cache, tmp_path):
    cache.add(entry(GEMM, Candidate.of("linear")))
    cache.add(entry(replace(GEMM, threads=1), Candidate.of("vendor")))
    status, out, _ = run("export", tmp_path / "all.zip", "--json")
    told = json.loads(out)
    assert (status, told["selections"]) == (0, 2)
    assert Path(told["file"]).name.startswith("all-")
    _, out, _ = run("export", tmp_path / "all.zip")
    assert f"Wrote {told['file']}: 2 selections. Import it with: kernelcast cache import" in out
    cache.add(entry(replace(GEMM, threads=3), Candidate.of("vendor"), torch="1.0"))
    assert json.loads(run("export", tmp_path / "all.zip", "--json")[1])["selections"] == 3
    assert json.loads(run("export", tmp_path / "all.zip", "--json", "--current")[1]) == told
    cache.remove(entry(replace(GEMM, threads=3), Candidate.of("vendor"), torch="1.0").key)
    elsewhere = tmp_path / "elsewhere"
    assert run("import", told["file"], "--cache", elsewhere)[:2] == (
        0,
        "2 selections new, 0 replaced, 0 kept.\n",
    )
    assert json.loads(run("import", told["file"], "--cache", elsewhere, "--json")[1]) == {
        "added": 0, "replaced": 0, "kept": 2, "failed": 0,
    }  # fmt: skip
    assert {e.key for e in SelectionCache(elsewhere).entries()} == {e.key for e in cache.entries()}


@pytest.mark.parametrize("name", ["none.zip", "broken.zip"])
def test_a_pack_that_is_none_is_one_sentence_and_status_2(run, tmp_path, name):
    (tmp_path / "broken.zip").write_bytes(b"PK")
    status, out, err = run("import", tmp_path / name)
    assert (status, out) == (2, "")
    assert err.startswith(f"Error: {tmp_path / name}: ")
    assert not (tmp_path / "home").exists()


def test_a_folder_is_no_pack(run, tmp_path):
    assert run("import", tmp_path) == (
        2,
        "",
        f"Error: {tmp_path}: it is a folder; a pack is one file, which `kernelcast cache export` writes\n",
    )


def test_a_full_disk_is_one_sentence_that_names_the_pack(run, cache, tmp_path, monkeypatch):
    cache.add(entry(GEMM, Candidate.of("linear")))

    def full(archive, *arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    status, out, err = run("export", tmp_path / "x.zip")
    assert (status, out) == (2, "")
    assert re.fullmatch(
        rf"Error: The pack {tmp_path}/x-[0-9a-f]{{16}}\.zip cannot be written \(No space left on device\)\. "
        r"Choose another place for it\.\n",
        err,
    )


def test_nothing_to_export_is_one_sentence_and_status_2(run, tmp_path):
    status, out, err = run("export", tmp_path / "x.zip")
    assert (status, out) == (2, "")
    assert err.startswith("Error: There is no verified selection to pack.")


def test_an_operation_that_nothing_is_of_is_an_error(run, cache):
    cache.add(entry(GEMM, Candidate.of("linear")))
    for command in (["clear", "--yes"], ["show"]):
        status, out, err = run(*command, "--op", "nope")
        assert (status, out) == (2, "")
        assert err.startswith("Error: Unknown operation 'nope'.")
    assert len(list(cache.entries())) == 1
    assert run("clear", "--op", "softmax", "--yes")[0] == 0
