"""Kept blocks: what was computed of them once is what would be computed again, for whatever rows."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernelcast import kernels
from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Block, CandidateTable, Device, Problem
from kernelcast.kernels.candidate import KeptColumns, remembered
from kernelcast.kernels.devices import device
from kernelcast.kernels.registry import space_of
from kernelcast.kernels.triton_operands import LARGEST_BLOCK

DEVICES = [
    device("a100"),
    device("h100"),
    device("b200"),
    device("mi300x"),
    Device("unknown", "gpu", "nvidia", "sm80", 1),
    Device("cpu", "cpu", "intel", "x86", 2, warp_size=1),
]


def block():
    return Block("toy", {"a": np.arange(6), "b": np.array(list("xyzxyz"))}, 6)


def counting(calls):
    def compute(columns):
        calls.append(len(columns["a"]))
        return np.stack([columns["a"] * 10, columns["a"] * 100])

    return compute


def test_an_answer_is_computed_once_of_all_rows():
    calls = []
    kept = block().keep()
    some = kept.take(np.array([4, 1]))
    assert remembered(some.columns, "key", counting(calls)).tolist() == [[40, 10], [400, 100]]
    assert remembered(kept.columns, "key", counting(calls)).tolist() == [
        [0, 10, 20, 30, 40, 50],
        [0, 100, 200, 300, 400, 500],
    ]
    masked = some.take(np.array([False, True]))
    assert masked.at(0) == kept.at(1)
    assert remembered(masked.columns, "key", counting(calls)).tolist() == [[10], [100]]
    assert remembered(some.take(np.array([], dtype=int)).columns, "key", counting(calls)).shape == (2, 0)
    assert calls == [6]
    assert remembered(some.columns, "another key", counting(calls)).tolist() == [[40, 10], [400, 100]]
    assert calls == [6, 6]


def test_of_other_columns_nothing_is_remembered():
    calls = []
    for _ in range(2):
        assert remembered(block().columns, "key", counting(calls)).shape == (2, 6)
        assert remembered(block().take(np.array([1])).columns, "key", counting(calls)).tolist() == [
            [10],
            [100],
        ]
    assert calls == [6, 1, 6, 1]


def test_neither_columns_nor_answers_can_be_written_to():
    kept = block().keep()
    with pytest.raises(ValueError, match="read-only"):
        kept.columns["a"][0] = 9
    with pytest.raises(ValueError, match="read-only"):
        remembered(kept.columns, "key", counting([]))[0, 0] = 9


def test_the_memory_of_a_block_is_bounded():
    calls = []
    kept = block().keep()
    for number in range(1000):
        remembered(kept.columns, number, counting(calls))
    assert len(calls) == 1000
    assert len(kept.columns.memo) <= 64
    large = Block("toy", {"a": np.arange(100_000)}, 100_000).keep()
    for number in range(40):
        remembered(large.columns, number, lambda columns: columns["a"] * 2.0)
    assert 4 * 800_000 < sum(answer.nbytes for answer in large.columns.memo.values()) <= 2**23
    # What is too large for it is worked out of the rows that are asked for, from the second time on.
    asked = []

    def huge(columns):
        asked.append(len(columns["a"]))
        return np.tile(columns["a"], (6, 1))

    some = large.take(np.array([7, 3]))
    for _ in range(3):
        assert remembered(some.columns, "huge", huge)[5].tolist() == [7, 3]
    assert asked == [100_000, 2, 2]


def test_a_copy_starts_without_answers():
    kept = block().keep()
    remembered(kept.columns, "key", lambda columns: columns["a"])
    for one in (
        pickle.loads(pickle.dumps(kept)),
        copy.deepcopy(kept),
        pickle.loads(pickle.dumps(kept.take(np.arange(6)))),
    ):
        assert not isinstance(one.columns, KeptColumns)
        assert list(CandidateTable([one])) == list(CandidateTable([kept]))


def test_no_tile_is_larger_than_classes_of_problems_allow():
    """Sizes beyond the largest tile are of one class: a larger tile would be refused for none of them."""
    for name in kernels.operation_names():
        for found in kernels.variants(name).values():
            if "matmul_class" in {getattr(rule.class_of, "__name__", "") for rule in found.rules}:
                sides = [p for p in found.parameters if p.name in ("block_m", "block_n", "block_k")]
                assert len(sides) == 3
                assert max(max(side.values) for side in sides) <= LARGEST_BLOCK


SIZES = [64, 1, 3, 128, 1000, 17, 0, 16, 32, 65, 4096, 100_000]


@st.composite
def problems(draw):
    name = draw(st.sampled_from(["gemm", "gemm", "batched_gemm", "mixed_gemm", "grouped_gemm"]))
    schema = kernels.operation(name).schema
    values = {dim.name: draw(st.sampled_from(SIZES)) for dim in schema.dims}
    values |= {o.name: draw(st.sampled_from(o.choices or (o.default,))) for o in schema.options}
    try:
        return schema.problem(
            dtype=draw(st.sampled_from(schema.dtypes)), allow_tf32=draw(st.booleans()), **values
        )
    except InvalidProblemError:
        assume(False)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.sampled_from(DEVICES))
def test_what_is_remembered_changes_no_rule_and_no_amount_of_work(described, where):
    again = Problem.from_dict(described.to_dict())
    for found in kernels.variants(described.operation).values():
        kept = space_of(found, "default")
        plain = Block(kept.variant, dict(kept.columns), kept.length)
        met = np.ones(plain.length, dtype=bool)
        with np.errstate(all="ignore"):
            for rule in found.rules:
                if not met.any():
                    break
                met &= rule.met(again, plain.columns, where, plain.length)
            np.testing.assert_array_equal(found.legal(described, where, kept), met, err_msg=found.name)
            np.testing.assert_array_equal(found.legal(described, where, plain), met, err_msg=found.name)
            some, other = kept.take(met), plain.take(met)
            one = found.work(described, some.columns, where).columns(some.length)
            two = found.work(again, other.columns, where).columns(other.length)
        for name in one:
            np.testing.assert_array_equal(one[name], two[name], err_msg=f"{found.name}: {name}")


def test_a_new_variant_is_in_the_catalogue_at_once(monkeypatch):
    before = kernels.variants("softmax")
    before.clear()  # a copy: nobody changes the catalogue by accident
    assert "vendor" in kernels.variants("softmax")
    from kernelcast.kernels import registry

    monkeypatch.setitem(registry._variants["softmax"], "a_new_one", kernels.variant("softmax", "vendor"))
    assert list(kernels.variants("softmax"))[:2] == ["vendor", "a_new_one"]
    monkeypatch.undo()
    assert "a_new_one" not in kernels.variants("softmax")
