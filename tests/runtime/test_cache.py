"""The cache of selections: what is kept is found, priors of other environments, and keys that are held."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace

import pytest

from kernelcast.errors import InvalidRecordError, KernelcastError
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device as known_device
from kernelcast.runtime import CacheKey, CacheWarning, Selection, SelectionCache, cache_files
from kernelcast.runtime import cache as cache_module
from kernelcast.runtime.cache import CacheEntry

HERE = detect("cpu")
PROBLEM = problem("gemm", m=3, n=4, k=5, threads=2)
KEY = CacheKey.of(PROBLEM, HERE, 3)
SELECTION = Selection(PROBLEM, HERE.name, Candidate.of("linear"), "verified", measured_us=2.0, default_us=3.0)


def sure(cache, key=KEY):
    """What the cache has, and that it does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cache.get(key)


# --- Entries ---


def test_what_is_kept_is_found_again_also_by_another_process(tmp_path):
    cache = SelectionCache(tmp_path)
    assert sure(cache) is None
    cache.put(KEY, SELECTION)
    assert sure(cache) is SELECTION
    found = sure(SelectionCache(tmp_path))
    assert found.to_dict() == SELECTION.to_dict()
    assert sure(SelectionCache(tmp_path), replace(KEY, top_k=5)) is None


def test_memory_alone_writes_nothing(tmp_path):
    cache = SelectionCache(None)
    with cache.lock(KEY):
        cache.put(KEY, SELECTION)
    assert sure(cache) is SELECTION
    cache.evict(KEY)
    assert sure(cache) is None
    cache.put(KEY, SELECTION)
    assert cache.clear() == 0
    assert sure(cache) is None
    disk = SelectionCache(tmp_path / "cache")
    disk.put(KEY, SELECTION, on_disk=False)
    assert sure(disk) is SELECTION
    assert not (tmp_path / "cache").exists()


def test_evicted_and_cleared_are_gone_from_the_disk(tmp_path):
    cache = SelectionCache(tmp_path)
    keys = [replace(KEY, top_k=k) for k in range(4)]
    for key in keys:
        cache.put(key, SELECTION)
    cache.evict(keys[0])
    cache.evict(keys[0])
    assert sure(cache, keys[0]) is None
    assert sure(SelectionCache(tmp_path), keys[0]) is None
    assert sure(SelectionCache(tmp_path), keys[1]) is not None
    # Also what an earlier layout and writers that died have left; not what is no entry.
    old = tmp_path / "ab" / f"{'ab' * 32}.json"
    (place,) = (path for path in tmp_path.iterdir())
    unfinished = place / f".{'cd' * 32}.json.1234-ab12"
    recent = place / f".{'ef' * 32}.json.1234-ab12"
    own = tmp_path / "ab" / "notes.txt"
    for path in (old, unfinished, recent, own):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    os.utime(unfinished, (1.0, 1.0))
    assert cache.clear() == 4
    assert [sure(SelectionCache(tmp_path), key) for key in keys] == [None] * 4
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted([recent, own])


def test_an_entry_says_when_it_was_verified_and_lies_by_problem_and_device(tmp_path):
    cache = SelectionCache(tmp_path)
    before = time.time()
    cache.put(KEY, SELECTION)
    cache.put(replace(KEY, top_k=5), SELECTION)
    entries = list(cache.entries())
    assert [entry.key.top_k for entry in entries] == [
        k for k, _ in sorted(((k, replace(KEY, top_k=k).digest) for k in (3, 5)), key=lambda pair: pair[1])
    ]
    assert all(before - 0.001 <= entry.verified_at <= time.time() + 0.001 for entry in entries)
    assert {path.parent.name for path in tmp_path.glob("*/*.json")} == {KEY.place}
    assert CacheEntry.from_dict(entries[0].to_dict()).to_dict() == entries[0].to_dict()
    for change, said in (
        ({"verified_at": -1.0}, "verified_at"),
        ({"verified_at": True}, "verified_at"),
        ({"key": replace(KEY, problem="{}")}, "its key of"),
    ):
        with pytest.raises(InvalidRecordError, match=said):
            replace(entries[0], **change)
    with pytest.raises(InvalidRecordError, match="does not have the digest"):
        CacheEntry.from_dict({**entries[0].to_dict(), "digest": "0" * 64})


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(cache_module, "MOST_IN_MEMORY", 10)
    cache = SelectionCache(None)
    for k in range(25):
        cache.put(replace(KEY, top_k=k), SELECTION)
        assert cache.get(replace(KEY, top_k=k)) is SELECTION
    assert 5 <= len(cache._memory) <= 10


def test_an_entry_is_written_although_another_process_clears_its_folder_meanwhile(tmp_path, monkeypatch):
    real, times = cache_files.write_durably, []

    def cleared_just_before(path, text):
        times.append(path)
        if len(times) < 3:
            assert SelectionCache(tmp_path).clear() == 0
            assert not path.parent.exists()
        real(path, text)

    monkeypatch.setattr(cache_files, "write_durably", cleared_just_before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SelectionCache(tmp_path).put(KEY, SELECTION)
    assert len(times) == 3
    assert sure(SelectionCache(tmp_path)) is not None


# --- Priors ---

ELSEWHERE = replace(KEY, environment=replace(KEY.environment, torch="1.0"))


def won(split, **values):
    return replace(SELECTION, candidate=Candidate.of("split_k", {"split": split}), **values)


def test_entries_of_another_environment_are_misses_and_priors(tmp_path):
    cache = SelectionCache(tmp_path)
    large = problem("gemm", m=64, n=64, k=4096, threads=2)
    keys = [
        replace(CacheKey.of(large, HERE, 3), environment=replace(KEY.environment, **{name: "other"}))
        for name in ("torch", "triton", "driver", "runtime", "kernelcast")
    ]
    aged = replace(KEY.environment, variants=(("vendor", "of another source"),))
    keys.append(replace(CacheKey.of(large, HERE, 3), environment=aged))
    names = [won(2), won(4), won(2), replace(SELECTION, candidate=Candidate.of("vendor")), won(3), won(8)]
    for at, (key, selection) in enumerate(zip(keys, names, strict=True)):
        cache.add(CacheEntry(key, replace(selection, problem=large), 100.0 + at))
    fresh = SelectionCache(tmp_path)
    assert sure(fresh, CacheKey.of(large, HERE, 3)) is None
    # The newest first, each once, without the default and without split=3, which is not in the space.
    expected = [Candidate.of("split_k", {"split": split}) for split in (8, 2, 4)]
    assert fresh.priors(large, HERE) == expected
    assert fresh.priors(large, replace(HERE, name="the same under another name")) == expected
    assert fresh.priors(large, replace(HERE, cores=HERE.cores + 1)) == []
    assert fresh.priors(replace(large, threads=1), HERE) == []
    assert SelectionCache(None).priors(large, HERE) == []


def test_priors_that_are_not_legal_there_are_left_out(tmp_path):
    cache = SelectionCache(tmp_path)
    gpu = known_device("h100")
    described = problem("gemm", m=64, n=64, k=4096)
    key = replace(CacheKey.of(described, gpu, 3), environment=ELSEWHERE.environment)
    cache.put(key, replace(SELECTION, problem=described, candidate=Candidate.of("linear")))
    legal = cache.priors(described, gpu)
    cache.put(key, replace(SELECTION, problem=described, candidate=Candidate.of("of my own")))
    assert cache.priors(described, gpu) == []
    assert legal in ([], [Candidate.of("linear")])


# --- Merging ---


def test_of_two_entries_of_one_key_the_later_verified_one_stays(tmp_path):
    cache = SelectionCache(tmp_path)

    def stands():
        (entry,) = SelectionCache(tmp_path).entries()
        return entry.selection.measured, entry.verified_at

    def entry(measured, at, source="verified"):
        return CacheEntry(KEY, replace(SELECTION, measured=measured, source=source), at)

    assert cache.add(entry(1, 100.0)) == "added"
    assert cache.add(entry(2, 99.0)) == "kept"
    assert cache.add(entry(3, 100.0)) == "kept"
    assert stands() == (1, 100.0)
    assert sure(cache).measured == 1
    assert cache.add(entry(4, 101.0)) == "replaced"
    assert sure(cache).measured == 4
    assert cache.add(entry(5, 102.0, "predicted")) == "kept"
    assert stands() == (4, 101.0)
    with pytest.raises(KernelcastError, match="this cache has none"):
        SelectionCache(None).add(entry(1, 1.0))


def test_entries_that_are_removed_are_gone(tmp_path):
    cache = SelectionCache(tmp_path)
    cache.put(KEY, SELECTION)
    assert [cache.remove(KEY), cache.remove(KEY)] == [True, False]
    assert sure(cache) is None
    assert list(cache.entries()) == []


def test_errors_inside_the_lock_are_the_callers(tmp_path):
    cache = SelectionCache(tmp_path)
    with pytest.raises(OSError, match="mine"), cache.lock(KEY):
        raise OSError("mine")
    with cache.lock(KEY):
        pass


def test_sixteen_writers_and_readers_of_one_key(tmp_path):
    faults = []

    def work(number):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                cache = SelectionCache(tmp_path)
                for _ in range(10):
                    cache.put(KEY, replace(SELECTION, measured=number))
                    found = SelectionCache(tmp_path).get(KEY)
                    assert found is not None
                    assert 0 <= found.measured < 16
        except Exception as error:  # noqa: BLE001 - asserted on below
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(list(tmp_path.glob("*/*"))) == 1


# --- Locks ---


def test_locks_of_keys_that_nobody_holds_take_no_memory_and_are_cleared_after_a_day(tmp_path):
    cache = SelectionCache(tmp_path)
    for k in range(3):
        with cache.lock(replace(KEY, top_k=k)):
            assert len(cache._locks) == 1
    assert len(cache._locks) == 0
    old, *others = sorted((tmp_path / "locks").iterdir())
    os.utime(old, (1.0, 1.0))
    cache.clear()
    assert sorted((tmp_path / "locks").iterdir()) == others


def test_a_child_forked_while_a_key_is_held_can_hold_it_after_its_parent(tmp_path):
    cache = SelectionCache(tmp_path)
    holding, go_on = threading.Event(), threading.Event()

    def hold():
        with cache.lock(KEY):
            holding.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(30)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)  # a child that waits for ever must not stay
        os.write(writer, b"1")
        with SelectionCache(tmp_path).lock(KEY), cache.lock(replace(KEY, top_k=9)):
            os.write(writer, b"2")
        with cache.lock(KEY):
            os.write(writer, b"3")
        os._exit(0)
    assert os.read(reader, 1) == b"1"
    time.sleep(0.1)
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    go_on.set()
    thread.join()
    os.waitpid(child, 0)
    assert os.read(reader, 2) == b"23"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("kind", ["one cache", "two caches", "memory alone"])
def test_threads_take_turns_on_a_key_and_not_on_others(tmp_path, kind):
    first = SelectionCache(None if kind == "memory alone" else tmp_path)
    second = SelectionCache(tmp_path) if kind == "two caches" else first
    entered = threading.Event()

    def enter():
        with second.lock(KEY):
            entered.set()

    thread = threading.Thread(target=enter)
    with first.lock(KEY):
        thread.start()
        assert not entered.wait(0.1)
        with second.lock(replace(KEY, top_k=7)):
            pass
    assert entered.wait(30)
    thread.join()


HOLDER = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the key."""
    cache = SelectionCache(tmp_path)
    with cache.lock(KEY):
        pass
    (path,) = (tmp_path / "locks").glob("*.lock")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_holder_that_died_does_not_block(tmp_path, holder):
    holder.kill()
    holder.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with SelectionCache(tmp_path, lock_seconds=60.0).lock(KEY):
            pass


def test_another_process_that_holds_the_key_is_waited_for(tmp_path, holder):
    entered = threading.Event()

    def enter():
        with SelectionCache(tmp_path).lock(KEY):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.2)
    holder.kill()
    assert entered.wait(30)
    thread.join()


def test_a_holder_that_hangs_is_not_waited_for_for_ever(tmp_path, holder):
    started = time.monotonic()
    with (
        pytest.warns(CacheWarning, match="cannot be locked"),
        SelectionCache(tmp_path, lock_seconds=0.1).lock(KEY),
    ):
        assert time.monotonic() - started >= 0.1
    assert holder.poll() is None
