"""The cache of selections: complete keys, and no fault of the disk that reaches the caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets.record import Environment
from kernelcast.kernels import Candidate, Problem, problem
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device as known_device
from kernelcast.runtime import CacheKey, CacheWarning, Selection, SelectionCache
from kernelcast.runtime import cache as cache_module

HERE = detect("cpu")
PROBLEM = problem("gemm", m=3, n=4, k=5, threads=2)
KEY = CacheKey.of(PROBLEM, HERE, 3)
SELECTION = Selection(PROBLEM, HERE.name, Candidate.of("linear"), "verified", measured_us=2.0, default_us=3.0)


def sure(cache, key=KEY):
    """What the cache has, and that it does not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cache.get(key)


# --- Keys ---

sizes = st.integers(0, 5000)
problems = st.builds(
    lambda m, n, k, dtype, layout, lda, allow_tf32, threads: Problem(
        "gemm", (("m", m), ("n", n), ("k", k)), dtype, (("layout", layout), ("lda", lda)), allow_tf32, threads
    ),
    sizes,
    sizes,
    sizes,
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.sampled_from(["nn", "nt", "tn", "tt"]),
    sizes,
    st.booleans(),
    st.integers(0, 64),
)
#: (dimension or option or field) -> the same problem with another value of it.
CHANGES = {
    "m": lambda p: replace(p, dims=(("m", p["m"] + 1), *p.dims[1:])),
    "n": lambda p: replace(p, dims=(p.dims[0], ("n", p["n"] + 1), p.dims[2])),
    "k": lambda p: replace(p, dims=(*p.dims[:2], ("k", p["k"] + 1))),
    "m and n": lambda p: replace(p, dims=(("m", p["n"]), ("n", p["m"] + 5001), p.dims[2])),
    "dtype": lambda p: replace(p, dtype="float16" if p.dtype != "float16" else "float32"),
    "layout": lambda p: replace(p, options=(("layout", p["layout"][::-1] + "x"), p.options[1])),
    "lda": lambda p: replace(p, options=(p.options[0], ("lda", p["lda"] + 1))),
    "tf32": lambda p: replace(p, allow_tf32=not p.allow_tf32),
    "threads": lambda p: replace(p, threads=p.threads + 1),
}


@given(problems, st.sampled_from(sorted(CHANGES)))
@settings(max_examples=100, deadline=None)
def test_every_fact_of_a_problem_changes_the_key(one, what):
    key = CacheKey.of(one, HERE, 3)
    assert CacheKey.of(Problem.from_dict(one.to_dict()), HERE, 3).digest == key.digest
    assert CacheKey.of(CHANGES[what](one), HERE, 3).digest != key.digest


@pytest.mark.parametrize("name", [f.name for f in fields(HERE)])
def test_every_fact_of_a_device_but_its_name_changes_the_key(name):
    device = known_device("h100")
    value = getattr(device, name)
    others = {
        "kind": "cpu",
        "peak_flops": (("float32", 1.0),),
    }
    changed = others.get(name, value + "x" if isinstance(value, str) else value * 2 + 1 if not isinstance(value, tuple) else ())  # fmt: skip
    other = replace(device, **{name: changed})
    one, two = CacheKey.of(PROBLEM, device, 3), CacheKey.of(PROBLEM, other, 3)
    assert (one.device == two.device) == (name == "name")
    assert (one.digest == two.digest) == (name == "name")


@pytest.mark.parametrize("name", ["torch", "triton", "runtime", "system"])
def test_every_fact_of_the_environment_changes_the_key(monkeypatch, name):
    here = Environment.current("", device_kind="cpu")
    monkeypatch.setattr(
        Environment,
        "current",
        classmethod(lambda cls, variant_hash, *, device_kind: replace(here, **{name: "other"})),
    )
    assert CacheKey.of(PROBLEM, HERE, 3).digest != KEY.digest


def test_a_changed_and_a_new_variant_change_the_key(lab, monkeypatch):
    key = CacheKey.of(lab.a_problem(), HERE, 3)
    assert sorted(name for name, _ in key.variants) == sorted(lab.VARIANTS)
    quick = type(lab.registry.variant(lab.NAME, "quick"))
    with monkeypatch.context() as patch:
        patch.setattr(quick, "source_hash", classmethod(lambda cls: "changed"))
        changed = CacheKey.of(lab.a_problem(), HERE, 3)
    assert CacheKey.of(lab.a_problem(), HERE, 3).digest == key.digest
    monkeypatch.setitem(lab.registry._variants[lab.NAME], "new", quick())
    new = CacheKey.of(lab.a_problem(), HERE, 3)
    assert len({key.digest, changed.digest, new.digest}) == 3


def test_how_many_were_measured_changes_the_key():
    assert len({CacheKey.of(PROBLEM, HERE, k).digest for k in (0, 1, 3)}) == 3


texts = st.text(max_size=3)


@given(
    *[
        st.builds(
            CacheKey, texts, texts, st.tuples(texts, texts, texts, texts),
            st.lists(st.tuples(texts, texts), max_size=2).map(tuple), st.integers(0, 3),
        )
    ]
    * 2
)  # fmt: skip
def test_keys_are_equal_exactly_if_their_digests_are(one, other):
    assert (one == other) == (one.digest == other.digest)
    assert len(one.digest) == 64


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
    assert cache.clear() == 3
    assert [sure(SelectionCache(tmp_path), key) for key in keys] == [None] * 4


def spoil(entry):
    """Ways in which an entry's file may be broken: name -> bytes."""
    text = json.dumps(entry).encode()
    selection = entry["selection"]

    def changed(**values):
        return json.dumps({**entry, **values}).encode()

    return {
        "empty": b"",
        "truncated": text[: len(text) // 2],
        "last byte": text[:-1],
        "binary": bytes(range(256)),
        "null": b"null",
        "list": b"[]",
        "no keys": b"{}",
        "nested": b"[" * 100_000,
        "older": changed(version=0),
        "newer": changed(version=cache_module.CACHE_VERSION + 1),
        "foreign key": changed(key={**entry["key"], "top_k": 9}),
        "no key": changed(key=None),
        "foreign problem": changed(
            selection={**selection, "problem": {**selection["problem"], "dtype": "float16"}}
        ),
        "not a problem": changed(selection={**selection, "problem": {"operation": "gemm"}}),
        "unknown operation": changed(
            selection={**selection, "problem": {**selection["problem"], "operation": "nothing"}}
        ),
        "unknown variant": changed(
            selection={**selection, "candidate": {"variant": "nothing", "config": {}}}
        ),
        "no selection": changed(selection=None),
        "another type": changed(selection={**selection, "measured_us": "fast"}),
    }


SPOILED = ("empty", "truncated", "last byte", "binary", "null", "list", "no keys", "nested", "older", "newer",
           "foreign key", "no key", "foreign problem", "not a problem", "unknown operation", "unknown variant",
           "no selection", "another type")  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_a_broken_or_foreign_entry_is_a_miss_with_a_warning_and_is_replaced(tmp_path, how):
    SelectionCache(tmp_path).put(KEY, SELECTION)
    (path,) = tmp_path.glob("??/*.json")
    ways = spoil(json.loads(path.read_bytes()))
    assert set(ways) == set(SPOILED)
    path.write_bytes(ways[how])
    cache = SelectionCache(tmp_path)
    with pytest.warns(CacheWarning, match="ignored"):
        assert cache.get(KEY) is None
    cache.put(KEY, SELECTION)
    assert sure(SelectionCache(tmp_path)) is not None


def test_a_folder_in_the_place_of_an_entry_is_a_miss(tmp_path):
    cache = SelectionCache(tmp_path)
    cache._path(KEY).mkdir(parents=True)
    with pytest.warns(CacheWarning, match="ignored"):
        assert cache.get(KEY) is None
    with pytest.warns(CacheWarning, match="cannot be written"):
        cache.put(KEY, SELECTION)
    assert cache.get(KEY) is SELECTION


def test_a_folder_that_cannot_be_made_warns_and_memory_serves(tmp_path):
    (tmp_path / "file").write_text("")
    cache = SelectionCache(tmp_path / "file" / "cache")
    assert sure(cache) is None
    with pytest.warns(CacheWarning, match="cannot be locked"), cache.lock(KEY):
        pass
    with pytest.warns(CacheWarning, match="cannot be written"):
        cache.put(KEY, SELECTION)
    assert sure(cache) is SELECTION
    cache.evict(KEY)
    assert cache.clear() == 0


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
    assert len(list(tmp_path.glob("??/*"))) == 1


# --- Locks ---


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
