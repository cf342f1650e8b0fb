"""No fault of a file, a folder or a disk reaches the caller of the cache: a miss, a warning, and the right answer."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from cache_stress_files import damaged_files

from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.detect import detect
from kernelcast.runtime import CacheKey, CacheWarning, Selection, SelectionCache
from kernelcast.runtime import cache as cache_module
from kernelcast.runtime.cache_files import MAX_ENTRY_BYTES, canonical, entry_path, read_entry
from kernelcast.runtime.cache_files import _digest as digest

HERE = detect("cpu")
PROBLEM = problem("gemm", m=3, n=4, k=5, threads=2)
KEY = CacheKey.of(PROBLEM, HERE, 3)
SELECTION = Selection(PROBLEM, HERE.name, Candidate.of("linear"), "verified", measured_us=2.0, default_us=3.0)


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    """Of each fault a process warns once; each test is as a process of its own."""
    monkeypatch.setattr(cache_module, "_said", set())


def sure(cache, key=KEY):
    """What the cache has, and that it does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cache.get(key)


# --- Files ---


def spoil(content):
    """Ways in which an entry's file may be broken: name -> bytes. Those with a fitting digest are as if they were written so."""
    whole = json.loads(content)
    body = whole["entry"]
    selection = body["selection"]

    def signed(**values):
        changed = {**body, **values}
        return canonical({**whole, "entry": changed, "check": digest(changed)}).encode()

    def chosen(**values):
        return signed(selection={**selection, **values})

    return {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "without its end": content[:-2],
        "binary": bytes(range(256)),
        "null": b"null",
        "list": b"[]",
        "no keys": b"{}",
        "nested": b"[" * 100_000,
        "large": content + b" " * MAX_ENTRY_BYTES,
        "one digit": content.replace(b'"measured_us":2.0', b'"measured_us":1.0'),
        "older": canonical({**whole, "version": 1}).encode(),
        "newer": canonical({**whole, "version": cache_module.CACHE_VERSION + 1}).encode(),
        "of the first layout": canonical({"version": 1, "key": {}, "selection": selection}).encode(),
        "foreign key": signed(key={**body["key"], "top_k": 9}, digest=replace(KEY, top_k=9).digest),
        "another digest": signed(digest="0" * 64),
        "no key": signed(key=None),
        "foreign problem": chosen(problem={**selection["problem"], "dtype": "float16"}),
        "not a problem": chosen(problem={"operation": "gemm"}),
        "unknown operation": chosen(problem={**selection["problem"], "operation": "nothing"}),
        "unknown variant": chosen(candidate={"variant": "nothing", "config": {}}),
        "no selection": signed(selection=None),
        "another type": chosen(measured_us="fast"),
        "an endless number": chosen(measured_us=10**400),
        "a fraction of a candidate": chosen(measured=1.5),
        "an unknown source": chosen(source="guessed"),
        "no time": signed(verified_at="yesterday"),
        "one more field": signed(more=1),
    }


SPOILED = (
    "empty", "truncated", "without its end", "binary", "null", "list", "no keys", "nested", "large", "one digit", "older",
    "newer", "of the first layout", "foreign key", "another digest", "no key", "foreign problem", "not a problem",
    "unknown operation", "unknown variant", "no selection", "another type", "an endless number",
    "a fraction of a candidate", "an unknown source", "no time", "one more field",
)  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_a_broken_or_foreign_entry_is_a_miss_with_a_warning_and_is_replaced(tmp_path, how):
    SelectionCache(tmp_path).put(KEY, SELECTION)
    path = entry_path(tmp_path, KEY)
    ways = spoil(path.read_bytes())
    assert set(ways) == set(SPOILED)
    assert ways[how] != path.read_bytes()
    path.write_bytes(ways[how])
    cache = SelectionCache(tmp_path)
    with pytest.warns(CacheWarning, match="ignored"):
        assert cache.get(KEY) is None
    cache_module._said.clear()
    if how not in ("unknown variant",):
        with pytest.warns(CacheWarning, match="ignored"):
            assert list(cache.entries()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.priors(PROBLEM, HERE) == []
    cache.put(KEY, SELECTION)
    assert sure(SelectionCache(tmp_path)) is not None


def test_what_is_written_is_what_is_read(tmp_path):
    SelectionCache(tmp_path).put(KEY, SELECTION)
    entry = read_entry(entry_path(tmp_path, KEY))
    assert entry.key == KEY
    assert entry.selection.to_dict() == SELECTION.to_dict()


def put_in_place(path, kind):
    path.unlink(missing_ok=True)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    else:
        path.symlink_to("nothing")


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device", "a link to itself", "a link to nothing"])
def test_what_is_no_file_in_the_place_of_an_entry_is_a_miss(tmp_path, kind):
    path = entry_path(tmp_path, KEY)
    path.parent.mkdir(parents=True)
    put_in_place(path, kind)
    cache = SelectionCache(tmp_path)
    if kind == "a link to nothing":
        assert sure(cache) is None
    else:
        said = {"a folder": "Is a directory|no file", "a link to itself": "symbolic links"}.get(
            kind, "no file"
        )
        with pytest.warns(CacheWarning, match=f"ignored .*({said})"):
            assert cache.get(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(cache.entries()) == []
        assert cache.priors(PROBLEM, HERE) == []
    if kind == "a folder":
        with pytest.warns(CacheWarning, match="cannot be written"):
            cache.put(KEY, SELECTION)
        assert cache.remove(KEY) is False
        cache.put(KEY, SELECTION, on_disk=False)
    else:
        cache.put(KEY, SELECTION)  # in the place of the link or pipe, never through it
        assert sure(SelectionCache(tmp_path)) is not None
        assert not path.is_symlink()
    assert cache.get(KEY) is SELECTION


def test_an_entry_under_another_place_is_ignored(tmp_path):
    other = replace(PROBLEM, threads=1)
    SelectionCache(tmp_path).put(KEY, replace(SELECTION, candidate=Candidate.of("transposed")))
    entry_path(tmp_path, KEY).parent.rename(tmp_path / CacheKey.of(other, HERE, 3).place)
    cache = SelectionCache(tmp_path)
    for look in (lambda: list(cache.entries()), lambda: cache.priors(other, HERE)):
        cache_module._said.clear()
        with pytest.warns(CacheWarning, match="of another key"):
            assert look() == []


def test_an_entry_behind_a_link_is_read(tmp_path):
    SelectionCache(tmp_path / "there").put(KEY, SELECTION)
    path = entry_path(tmp_path / "here", KEY)
    path.parent.mkdir(parents=True)
    path.symlink_to(entry_path(tmp_path / "there", KEY))
    assert sure(SelectionCache(tmp_path / "here")) is not None


# --- Folders and disks ---


@pytest.mark.parametrize("kind", ["below a file", "a link to itself", "a link to nothing"])
def test_a_folder_that_cannot_be_made_warns_and_memory_serves(tmp_path, kind):
    put_in_place(tmp_path / "x", kind)
    cache = SelectionCache(tmp_path / "x" / "cache" if kind == "below a file" else tmp_path / "x")
    if kind == "below a file":
        (tmp_path / "x").unlink()
        (tmp_path / "x").write_text("")
    with pytest.warns(CacheWarning, match="cannot be locked"), cache.lock(KEY):
        pass
    with pytest.warns(CacheWarning, match="cannot be written"):
        cache.put(KEY, SELECTION)
    assert sure(cache) is SELECTION
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cache.priors(PROBLEM, HERE) == []
        assert list(cache.entries()) == []
        assert cache.clear() == 0


@pytest.mark.parametrize(
    "kind", ["a file for the folder of locks", "a folder for a lock", "a link to itself for a lock"]
)
def test_what_is_no_lock_is_a_warning(tmp_path, kind):
    locks = tmp_path / "locks"
    path = locks / f"{KEY.digest}.lock"
    if kind.startswith("a file"):
        locks.write_text("")
    else:
        locks.mkdir()
        path.mkdir() if kind.startswith("a folder") else path.symlink_to(path.name)
    cache = SelectionCache(tmp_path, lock_seconds=0.2)
    with pytest.warns(CacheWarning, match="cannot be locked"), cache.lock(KEY):
        cache.put(KEY, SELECTION)
    assert sure(SelectionCache(tmp_path)) is not None


def test_without_the_library_of_locks_only_threads_are_held_off(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    cache = SelectionCache(tmp_path)
    with pytest.warns(CacheWarning, match="cannot be locked"), cache.lock(KEY):
        cache.put(KEY, SELECTION)
    assert sure(SelectionCache(tmp_path)) is not None


#: Uses a cache in a process of its own: under other rights, or where files may not grow.
CHILD = """
import json, os, resource, sys, warnings
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.detect import detect
from kernelcast.runtime import CacheKey, Selection, SelectionCache
from pathlib import Path
import filelock  # before the rights are gone

folder, user, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
here, described = detect("cpu"), problem("gemm", m=3, n=4, k=5, threads=2)
keys = [CacheKey.of(described, here, k) for k in (3, 5)]
selection = Selection(described, here.name, Candidate.of("linear"), "verified", measured_us=2.0, default_us=3.0)
if user:
    os.chdir(folder.parent)  # the folders above may be closed to others
    folder = Path(folder.name)
    os.setgid(user), os.setuid(user)
if size >= 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
cache = SelectionCache(folder)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    found = [cache.get(key) is not None for key in keys]
    with cache.lock(keys[1]):
        cache.put(keys[1], selection)
    again = [cache.get(key) is not None for key in keys]
    priors = [str(each) for each in cache.priors(described, here)]
    listed = len(list(cache.entries()))
    cache.evict(keys[0])
    removed = cache.clear()
print(json.dumps({"found": found, "again": again, "priors": priors, "listed": listed, "removed": removed,
                  "warned": sorted({str(w.message).split(" (")[1].split(")")[0] for w in seen})}))
"""


def in_child(folder, *, user=0, size=-1):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(user), str(size)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_disk_without_room_costs_warnings_and_harms_no_entry(tmp_path):
    SelectionCache(tmp_path).put(KEY, SELECTION)
    found = in_child(tmp_path, size=1000)
    assert found["found"] == [True, False]
    assert found["again"] == [True, True]  # from memory
    assert found["warned"] == ["File too large"]
    assert found["priors"] == ["linear"]
    assert found["listed"] == 1
    assert list(tmp_path.rglob("*.json*")) == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, who may not write")
@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_folder_without_the_right_to_write_or_read_costs_warnings(tmp_path, mode):
    tmp_path.chmod(0o755)
    folder = tmp_path / "cache"
    SelectionCache(folder).put(KEY, SELECTION)
    for each in sorted([folder, *folder.rglob("*")], reverse=True):
        each.chmod(mode)
    found = in_child(folder, user=pwd.getpwnam("nobody").pw_uid)
    readable = mode == 0o555
    assert found["found"] == [readable, False]
    assert found["again"] == [readable, True]
    assert found["warned"] == ["Permission denied"]
    assert found["priors"] == (["linear"] if readable else [])
    assert found["listed"] == int(readable)
    assert found["removed"] == 0
    assert sure(SelectionCache(folder)) is not None


def test_of_each_fault_of_a_folder_a_process_warns_once(tmp_path):
    def seen(folder):
        cache = SelectionCache(folder)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for top_k in (3, 5, 7):
                key = CacheKey.of(PROBLEM, HERE, top_k)
                with cache.lock(key):
                    cache.put(key, SELECTION)
        return [str(each.message).removeprefix(f"The selection cache {folder} ") for each in found]

    for name in ("a", "b"):
        (tmp_path / name).write_text("")
    first = seen(tmp_path / "a")
    assert len(first) == 2
    assert [message.split(" (")[0] for message in first] == ["cannot be locked", "cannot be written"]
    assert seen(tmp_path / "a") == []
    assert len(seen(tmp_path / "b")) == 2


def test_what_cannot_be_removed_is_told_and_the_rest_is_gone(tmp_path):
    keys = [CacheKey.of(PROBLEM, HERE, top_k) for top_k in (3, 5)]
    cache = SelectionCache(tmp_path)
    for key in keys:
        cache.put(key, SELECTION)
    stuck = entry_path(tmp_path, keys[0])
    put_in_place(stuck, "a folder")
    with pytest.warns(CacheWarning, match=f"{stuck} cannot be removed"):
        assert cache.clear() == 1
    found = cache.forget(keys)
    assert (found.removed, [path for path, _ in found.left]) == (0, [stuck])
    assert not entry_path(tmp_path, keys[1]).exists()


# --- Many damaged files ---


def test_damaged_files_throw_nothing_and_answer_nothing_wrong(tmp_path):
    found = damaged_files(tmp_path, 30, seed=1)
    assert (found.exceptions, found.wrong, found.unrepaired) == ([], 0, 0)
    assert found.misses > 8


@pytest.mark.slow
def test_a_thousand_damaged_files_throw_nothing_and_answer_nothing_wrong(tmp_path):
    found = damaged_files(tmp_path, 1000, seed=2)
    assert (found.exceptions, found.wrong, found.unrepaired) == ([], 0, 0)
    assert found.files == 1000
    assert found.misses > 400
    assert found.forged > 100
