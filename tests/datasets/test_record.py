from __future__ import annotations

import hashlib
import json
import math
from dataclasses import fields, replace

import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.datasets import OUTCOMES, Environment, Measurement, Protocol, problem_id, shape_id
from kernelcast.datasets.record import SCHEMA_VERSION
from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Candidate, Problem, problem

names = st.text(min_size=1, max_size=8)
values = st.one_of(
    st.integers(-(2**62), 2**62), names.filter(lambda text: not text.endswith("\0")), st.booleans()
)
positive = st.floats(min_value=1e-9, max_value=1e12)

problems = st.builds(
    Problem,
    operation=names,
    dims=st.dictionaries(names.map("d{}".format), st.integers(0, 2**40 - 1), max_size=4).map(
        lambda d: tuple(d.items())
    ),
    dtype=names,
    options=st.dictionaries(names.map("o{}".format), values, max_size=3).map(lambda d: tuple(d.items())),
    allow_tf32=st.booleans(),
    threads=st.integers(0, 256),
)
candidates = st.builds(Candidate.of, names, st.dictionaries(names, values, max_size=4))
environments = st.builds(Environment, *[st.text(max_size=8) for _ in fields(Environment)])
protocols = st.builds(
    Protocol,
    name=names,
    cache=st.sampled_from(["warm", "cold", "unknown"]),
    dispatch=names,
    flush_bytes=st.integers(0, 2**40),
    inputs=names,
    seed=st.integers(0, 2**31),
    error_log=st.one_of(st.just(math.nan), st.floats(0, 10)),
)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    outcome = draw(st.sampled_from(OUTCOMES))
    return Measurement(
        problem=draw(problems),
        candidate=draw(candidates),
        device=draw(names),
        device_fingerprint=draw(names),
        environment=draw(environments),
        protocol=draw(protocols),
        samples_us=tuple(draw(st.lists(positive, min_size=1, max_size=5))) if outcome == "ok" else (),
        outcome=outcome,
        detail=draw(st.text(max_size=20)),
        workload=draw(names),
        created_at=draw(st.floats(0, 2e9)),
    )


def example(**changes: object) -> Measurement:
    base = Measurement(
        problem=problem("gemm", m=64, n=32, k=16, dtype="float16"),
        candidate=Candidate.of("triton_tiled", {"block_m": 16, "num_warps": 4}),
        device="a100",
        device_fingerprint="0123456789abcdef",
        environment=Environment(
            torch="2.6", triton="3.2", runtime="cuda-12", system="linux", variant_hash="ab"
        ),
        protocol=Protocol("interleaved-rounds-1"),
        samples_us=(3.0, 1.0, 2.5),
    )
    return replace(base, **changes)


@given(measurements())
def test_a_record_survives_json(record: Measurement) -> None:
    again = Measurement.from_dict(json.loads(json.dumps(record.to_dict())))
    assert again == record
    assert again.id == record.id == record.to_dict()["id"]


def test_an_unknown_error_is_null_in_json() -> None:
    assert example().to_dict()["protocol"]["error_log"] is None
    known = example(protocol=Protocol("p", error_log=0.25))
    assert Measurement.from_dict(known.to_dict()).protocol.error_log == 0.25


identity_changes = {
    "m": {"problem": problem("gemm", m=65, n=32, k=16, dtype="float16")},
    "dtype": {"problem": problem("gemm", m=64, n=32, k=16, dtype="bfloat16")},
    "layout": {"problem": problem("gemm", m=64, n=32, k=16, dtype="float16", layout="nt")},
    "lda": {"problem": problem("gemm", m=64, n=32, k=16, dtype="float16", lda=24)},
    "threads": {"problem": problem("gemm", m=64, n=32, k=16, dtype="float16", threads=2)},
    "variant": {"candidate": Candidate.of("split_k", {"block_m": 16, "num_warps": 4})},
    "config": {"candidate": Candidate.of("triton_tiled", {"block_m": 16, "num_warps": 8})},
    "config value's type": {"candidate": Candidate.of("triton_tiled", {"block_m": 16, "num_warps": "4"})},
    "device": {"device_fingerprint": "0123456789abcdee"},
} | {
    field.name: {"environment": replace(example().environment, **{field.name: "other"})}
    for field in fields(Environment)
}


@for_each("fact", identity_changes)
def test_each_identity_fact_changes_the_id(fact: str) -> None:
    assert example(**identity_changes[fact]).id != example().id


def test_tf32_changes_the_id() -> None:
    off, on = (problem("gemm", m=8, n=8, k=8, dtype="float32", allow_tf32=switch) for switch in (False, True))
    assert example(problem=off).id != example(problem=on).id


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": "w"},
        {"created_at": 5.0},
        {"samples_us": (9.0,)},
        {"samples_us": (), "outcome": "crash", "detail": "segmentation fault"},
        {"device": "another name for the same hardware"},
        {"protocol": Protocol("other", cache="cold", seed=3)},
    ],
)
def test_what_is_no_identity_keeps_the_id(changes: dict[str, object]) -> None:
    assert example(**changes).id == example().id


def test_the_id_of_a_known_record_stays() -> None:
    # Ids are on people's disks: if this text changed, every stored record would be new.
    problem_key = (
        '{"operation":"gemm","dims":{"m":64,"n":32,"k":16},"dtype":"float16",'
        '"options":{"layout":"nn","lda":0,"ldb":0},"allow_tf32":false,"threads":0}'
    )
    candidate_key = '["triton_tiled",{"block_m":16,"num_warps":4}]'
    environment = (
        '{"runtime": "cuda-12", "source": "kernelcast", "system": "linux", "torch": "2.6", "triton": "3.2", '
        '"variant_hash": "ab"}'
    )
    text = f'[{json.dumps(problem_key)}, {json.dumps(candidate_key)}, "0123456789abcdef", {environment}]'
    assert example().id == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_the_latency_is_the_median() -> None:
    assert example().latency_us == 2.5
    assert example(samples_us=(4.0, 1.0)).latency_us == 2.5
    assert math.isnan(example(samples_us=(), outcome="timeout").latency_us)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome": "slow"}, "Outcome 'slow' is none of"),
        ({"samples_us": ()}, "has 0 samples"),
        ({"outcome": "crash"}, "has 3 samples"),
        ({"samples_us": (1.0, 0.0)}, "0.0 us"),
        ({"samples_us": (-1.0,)}, "-1.0 us"),
        ({"samples_us": (math.inf,)}, "inf us"),
        ({"samples_us": (math.nan,)}, "nan us"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRecordError, match=message):
        example(**changes)


@for_each(
    ("field", "value", "message"),
    [
        ("schema", SCHEMA_VERSION + 1, "Upgrade kernelcast"),
        ("schema", "one", "ValueError"),
        ("problem", {"operation": "gemm"}, "Not a problem"),
        ("candidate", {"variant": "vendor"}, "KeyError"),
        ("candidate", {"variant": "vendor", "config": {"a": 1.5}}, "a is 1.5"),
        ("environment", {"compiler": "x"}, "TypeError"),
        ("protocol", {"name": "p"}, "error_log"),
        ("samples_us", ["fast"], "ValueError"),
        ("samples_us", None, "TypeError"),
    ],
)
def test_a_broken_field_is_refused(field: str, value: object, message: str) -> None:
    data = {**example().to_dict(), field: value}
    with pytest.raises(InvalidRecordError, match=message):
        Measurement.from_dict(data)


@for_each("field", [name for name in example().to_dict() if name != "id"])
def test_a_missing_field_is_refused(field: str) -> None:
    data = example().to_dict()
    del data[field]
    with pytest.raises(InvalidRecordError, match=field):
        Measurement.from_dict(data)


def test_dtypes_and_layouts_of_one_shape_share_the_shape_id() -> None:
    first = problem("gemm", m=64, n=32, k=16, dtype="float16")
    same_shape = problem("gemm", m=64, n=32, k=16, dtype="float32", layout="tn", allow_tf32=True)
    assert shape_id(first) == shape_id(same_shape)
    assert problem_id(first) != problem_id(same_shape)
    assert shape_id(first) != shape_id(problem("gemm", m=32, n=64, k=16))
    assert shape_id(first) != shape_id(replace(first, operation="batched_gemm"))
