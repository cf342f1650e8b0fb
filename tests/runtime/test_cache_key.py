"""Keys of the cache: every fact that can change the winner changes them, and no tensor's values do."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import fields, replace

import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets import record
from kernelcast.errors import InvalidProblemError, InvalidRecordError
from kernelcast.kernels import Parameter, Problem, problem, register_variant
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device as known_device
from kernelcast.runtime import CacheKey, cache_key
from kernelcast.runtime.cache_key import SWITCHES, CacheEnvironment, forget_keys, place_of

HERE = detect("cpu")
PROBLEM = problem("gemm", m=3, n=4, k=5, threads=2)
KEY = CacheKey.of(PROBLEM, HERE, 3)


@pytest.fixture
def afresh():
    """Keys are built anew, before and after."""
    forget_keys()
    yield
    forget_keys()


# --- Problems ---

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
    "operation": lambda p: replace(p, operation="batched_gemm"),
}


@given(problems, st.sampled_from(sorted(CHANGES)))
@settings(max_examples=examples(100))
def test_every_fact_of_a_problem_changes_the_key(one, what):
    key = CacheKey.of(one, HERE, 3)
    assert CacheKey.of(Problem.from_dict(one.to_dict()), HERE, 3).digest == key.digest
    other = CacheKey.of(CHANGES[what](one), HERE, 3)
    assert other != key
    assert other.digest != key.digest
    assert other.place != key.place


def test_a_problem_cannot_hold_tensors_so_no_value_of_one_is_in_a_key():
    facts = json.loads(KEY.problem)
    assert list(facts) == ["operation", "dims", "dtype", "options", "allow_tf32", "threads"]
    for group in (facts["dims"], facts["options"]):
        assert all(type(value) in (int, str, bool) for value in group.values())
    for change in ({"dims": (("m", 1.5),)}, {"options": (("lda", [1.0, 2.0]),)}, {"threads": 0.5}):
        with pytest.raises(InvalidProblemError):
            replace(PROBLEM, **change)


# --- Devices ---


@for_each("name", [f.name for f in fields(HERE)])
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
    assert (one.place == two.place) == (name == "name")


# --- The environment ---

ENVIRONMENT_FACTS = [f.name for f in fields(CacheEnvironment)]


@for_each("name", ENVIRONMENT_FACTS)
def test_every_fact_of_the_environment_changes_the_digest_and_not_the_place(name):
    value = (("a", "b"),) if name in ("switches", "variants") else "other"
    other = replace(KEY, environment=replace(KEY.environment, **{name: value}))
    assert other != KEY
    assert other.digest != KEY.digest
    assert other.place == KEY.place


def test_the_environment_is_that_of_this_process(afresh):
    here = record.Environment.current("", device_kind="cpu")
    found = CacheKey.of(PROBLEM, HERE, 3).environment
    assert (found.torch, found.triton, found.runtime, found.system) == (
        here.torch,
        here.triton,
        "cpu",
        here.system,
    )
    assert found.driver == "none"
    assert found.protocol == "interleaved-rounds-1 eager"
    assert "vendor" in dict(found.variants)


@pytest.mark.parametrize("name", SWITCHES[:1])
def test_a_switch_of_the_libraries_changes_the_key(monkeypatch, afresh, name):
    monkeypatch.delenv(name, raising=False)
    without = CacheKey.of(PROBLEM, HERE, 3)
    monkeypatch.setenv(name, "x")
    forget_keys("gemm")
    found = CacheKey.of(PROBLEM, HERE, 3)
    assert found.environment == replace(without.environment, switches=((name, "x"),))
    assert found != without


def test_the_runtime_and_the_driver_of_a_gpu_are_read_from_files(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch-2.9.dist-info").mkdir()
    (tmp_path / "torch-2.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9\n"
    )
    version = tmp_path / "torch" / "version.py"
    driver = tmp_path / "driver"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(cache_key.sys.modules, "torch", raising=False)
    monkeypatch.setattr(cache_key, "_NVIDIA_DRIVER", driver)
    monkeypatch.setattr(cache_key, "_AMD_DRIVER", tmp_path / "none")
    runtime, kernel = cache_key._gpu_runtime, cache_key._gpu_driver
    assert runtime() == "unknown"
    version.write_text("__version__ = '2.9'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    assert (runtime(), kernel()) == ("cuda-12.8", "535.104.05")
    version.write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.1'\n")
    driver.unlink()
    (tmp_path / "none").write_text("6.12.12\n")
    assert (runtime(), kernel()) == ("rocm-6.4.1", "6.12.12")
    (tmp_path / "none").unlink()
    assert kernel() == "unknown"


def test_a_new_and_a_changed_variant_change_the_key_at_once(lab):
    described = lab.a_problem()
    key = CacheKey.of(described, HERE, 3)
    assert sorted(name for name, _ in key.environment.variants) == sorted(lab.VARIANTS)

    class New(type(lab.registry.variant(lab.NAME, "quick"))):
        name = "new"

        @classmethod
        def source_hash(cls):
            return "0123"

    register_variant(lab.NAME)(New)
    new = CacheKey.of(described, HERE, 3)
    assert dict(new.environment.variants).keys() - dict(key.environment.variants).keys() == {"new"}
    # Other operations' keys say the same as before.
    assert CacheKey.of(PROBLEM, HERE, 3) == KEY
    found = {key, new}
    for attribute, value in (
        ("source_hash", classmethod(lambda cls: "4567")),
        ("parameters", (Parameter("chunk", (1, 2), "a space"),)),
        ("parameters", (Parameter("chunk", (1, 2, 4), "a wider space"),)),
    ):
        setattr(New, attribute, value)
        forget_keys(lab.NAME)
        found.add(CacheKey.of(described, HERE, 3))
    assert len(found) == 5


def test_a_variant_that_is_registered_while_a_key_is_built_is_in_the_next(lab, monkeypatch):
    real = cache_key._variant_hash
    waiting, go_on = threading.Event(), threading.Event()

    def slow(variant):
        waiting.set()
        assert go_on.wait(30)
        return real(variant)

    monkeypatch.setattr(cache_key, "_variant_hash", slow)
    forget_keys(lab.NAME)
    found = []
    thread = threading.Thread(target=lambda: found.append(CacheKey.of(lab.a_problem(), HERE, 3)))
    thread.start()
    assert waiting.wait(30)

    class New(type(lab.registry.variant(lab.NAME, "quick"))):
        name = "new"

    register_variant(lab.NAME)(New)
    go_on.set()
    thread.join()
    assert "new" not in dict(found[0].environment.variants)
    assert "new" in dict(CacheKey.of(lab.a_problem(), HERE, 3).environment.variants)


# --- How much was measured ---


def test_how_much_was_measured_changes_the_digest_and_not_the_place():
    asked = [(0, None), (1, None), (3, None), (3, 0.0), (3, 0.01), (3, 0.02), (3, 1)]
    keys = [CacheKey.of(PROBLEM, HERE, *each) for each in asked]
    assert len({key.digest for key in keys}) == len(set(keys)) == len(asked)
    assert {key.place for key in keys} == {place_of(PROBLEM.key, HERE.fingerprint)}


# --- Keys as records ---

texts = st.text(max_size=3)
pairs = st.lists(st.tuples(texts, texts), max_size=2).map(tuple)
environments = st.builds(CacheEnvironment, *[texts] * 8, pairs, pairs)
keys = st.builds(
    CacheKey, texts, texts, environments, st.integers(0, 3), st.none() | st.sampled_from([0.0, 0.01, 1.0])
)


@given(keys, keys)
def test_keys_are_equal_exactly_if_their_digests_are_and_round_trip_through_json(one, other):
    assert (one == other) == (one.digest == other.digest)
    assert len(one.digest) == 64
    again = CacheKey.from_dict(json.loads(json.dumps(one.to_dict())))
    assert (again, hash(again), again.digest) == (one, hash(one), one.digest)


def test_equal_questions_give_the_same_key():
    again = problem("gemm", m=3, n=4, k=5, threads=2)
    assert CacheKey.of(again, replace(HERE, name="another"), 3) is CacheKey.of(PROBLEM, HERE, 3)


def test_keys_are_kept_for_a_bounded_number_of_problems(monkeypatch, afresh):
    monkeypatch.setattr(cache_key, "_MOST_KEYS", 10)
    found = [CacheKey.of(problem("gemm", m=m, n=1, k=1), HERE, 3) for m in range(25)]
    assert len(set(found)) == 25
    assert len(cache_key._keys) <= 10


@for_each(
    ("values", "said"),
    [
        ({"problem": 3}, "problem of a key is 3"),
        ({"device": None}, "device of a key is None"),
        ({"environment": "2.9"}, "environment of a key is '2.9'"),
        ({"top_k": -1}, "top_k of a key is -1"),
        ({"top_k": True}, "top_k of a key is True"),
        ({"target_regret": math.nan}, "target_regret of a key is nan"),
        ({"target_regret": 2}, "target_regret of a key is 2"),
        ({"environment": replace(KEY.environment)}, ""),
    ],
)
def test_a_key_of_the_wrong_types_is_refused(values, said):
    if not said:
        assert replace(KEY, **values) == KEY
        return
    with pytest.raises(InvalidRecordError, match=said):
        replace(KEY, **values)


@pytest.mark.parametrize("change", [{"torch": 2}, {"variants": [["a"]]}, {"switches": None}, {"more": "x"}])
def test_an_environment_of_the_wrong_types_is_refused(change):
    data = {**KEY.to_dict(), "environment": {**KEY.environment.to_dict(), **change}}
    with pytest.raises(InvalidRecordError):
        CacheKey.from_dict(data)
    for name in ("problem", "environment", "top_k"):
        with pytest.raises(InvalidRecordError, match="Not a key"):
            CacheKey.from_dict({n: v for n, v in KEY.to_dict().items() if n != name})
