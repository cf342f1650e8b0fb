"""The hash of a choice: of the problem and the candidate, and of nothing that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Candidate, problem
from kernelcast.runtime import Selection
from kernelcast.runtime.selection import selections_hash

PROBLEM = problem("gemm", m=3, n=4, k=5, layout="nt", threads=2)
PLAIN = Selection(PROBLEM, "a-device", Candidate.of("split_k", {"split": 4}), "verified", reason="So.")
OTHERS = [
    replace(PLAIN, candidate=Candidate.of("split_k", {"split": 2})),
    replace(PLAIN, candidate=Candidate.of("split_k", {"split": True})),
    replace(PLAIN, candidate=Candidate.of("linear")),
    replace(PLAIN, problem=replace(PROBLEM, threads=1)),
]


@given(st.floats(1e-3, 1e9), st.sampled_from(["cached", "predicted"]), st.text(), st.integers(0, 9))
def test_what_was_measured_does_not_count(latency_us, source, text, count):
    other = replace(
        PLAIN,
        measured_us=latency_us,
        source=source,
        device=text,
        reason=text,
        model_version=text,
        measured=count,
    )
    assert other.hash == PLAIN.hash
    assert len(PLAIN.hash) == 16


def test_every_other_choice_has_another_hash():
    assert len({each.hash for each in (PLAIN, *OTHERS)}) == 5


@given(st.lists(st.sampled_from([PLAIN, *OTHERS]), max_size=6), st.randoms(use_true_random=False))
def test_several_are_hashed_in_any_order(chosen, rng):
    turned = list(chosen)
    rng.shuffle(turned)
    assert selections_hash(iter(turned)) == selections_hash(chosen)
    missing = [each for each in (PLAIN, *OTHERS) if each not in chosen]
    if missing:
        assert selections_hash([*chosen, missing[0]]) != selections_hash(chosen)
    if chosen:
        assert selections_hash([*chosen, chosen[0]]) == selections_hash(chosen)


@pytest.mark.parametrize(
    "change",
    [
        {"measured_us": "3"},
        {"measured_us": True},
        {"measured_us": 10**400},
        {"measured": 1.0},
        {"measured": True},
        {"candidates": -1},
        {"candidates": float("inf")},
    ],
)
def test_a_selection_with_numbers_of_another_type_is_refused(change):
    with pytest.raises(InvalidRecordError):
        Selection.from_dict({**PLAIN.to_dict(), **change})
