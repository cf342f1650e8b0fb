"""Selections as records."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Candidate, problem
from kernelcast.runtime import SOURCES, Selection

PROBLEM = problem("gemm", m=3, n=4, k=5, layout="nt", threads=2)
PLAIN = Selection(PROBLEM, "a-device", Candidate.of("split_k", {"split": 4}), "verified", reason="So.")

latencies = st.one_of(st.just(math.nan), st.floats(1e-3, 1e9))


def same(one, other):
    return all(
        a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
        for a, b in zip(vars(one).values(), vars(other).values(), strict=True)
    )


@given(
    st.sampled_from(SOURCES),
    latencies,
    latencies,
    latencies,
    st.one_of(st.just(math.nan), st.floats(0, 1)),
    st.integers(0, 100),
    st.text(),
)
def test_round_trip_through_json(source, predicted, measured, default, confidence, count, text):
    selection = replace(
        PLAIN,
        source=source,
        predicted_us=predicted,
        measured_us=measured,
        default_us=default,
        confidence=confidence,
        measured=count,
        candidates=count,
        model_version=text,
        reason=text,
    )
    written = json.dumps(selection.to_dict(), allow_nan=False)
    assert same(Selection.from_dict(json.loads(written)), selection)


def test_latency_is_measured_before_predicted_and_speedup_is_over_the_default():
    predicted = replace(PLAIN, predicted_us=20.0, default_us=30.0)
    assert (predicted.latency_us, predicted.speedup) == (20.0, 1.5)
    measured = replace(predicted, measured_us=60.0)
    assert (measured.latency_us, measured.speedup) == (60.0, 0.5)
    assert math.isnan(PLAIN.speedup)


@for_each(
    ("field", "value"),
    [
        ("problem", None),
        ("problem", {"operation": "gemm"}),
        ("candidate", "vendor"),
        ("candidate", {"variant": "vendor"}),
        ("source", "guessed"),
        ("source", None),
        ("measured_us", "fast"),
        ("measured", None),
        ("measured", "many"),
        ("reason", 5),
        ("device", None),
        ("model_version", ["1"]),
        ("colour", "blue"),
    ],
)
def test_what_is_no_selection_is_refused(field, value):
    with pytest.raises(InvalidRecordError):
        Selection.from_dict({**PLAIN.to_dict(), field: value})


@for_each("field", PLAIN.to_dict())
def test_a_missing_field_is_refused(field):
    data = PLAIN.to_dict()
    del data[field]
    if field in ("device", "problem", "candidate", "source"):
        with pytest.raises(InvalidRecordError):
            Selection.from_dict(data)
    else:
        with pytest.raises(InvalidRecordError, match="KeyError"):
            Selection.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_other_json_is_refused(data):
    with pytest.raises(InvalidRecordError):
        Selection.from_dict(data)
