"""Candidates and tables of them: keys, order, types that come back as they went in."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Block, Candidate, CandidateTable

names = st.text(min_size=1, max_size=5)
integers = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=5).filter(lambda text: not text.endswith("\0"))
values = st.one_of(integers, st.booleans(), texts)
candidates = st.builds(Candidate.of, names, st.dictionaries(names, values, max_size=4))


def exact(one: Candidate) -> tuple[object, ...]:
    """The candidate with the type of each value: True equals 1 to Python."""
    return (one.variant, tuple((name, type(value), value) for name, value in one.config))


@st.composite
def runs(draw):
    """Candidates of one variant with the same parameters, each parameter of one type."""
    variant = draw(names)
    types = draw(st.dictionaries(names, st.sampled_from([integers, st.booleans(), texts]), max_size=3))
    rows = draw(st.integers(1, 4))
    return [
        Candidate.of(variant, {name: draw(strategy) for name, strategy in types.items()}) for _ in range(rows)
    ]


@given(candidates)
def test_a_candidate_survives_its_key_and_pickle(one):
    read = Candidate.from_key(one.key)
    assert exact(read) == exact(one)
    assert read == one
    assert hash(read) == hash(one)
    assert exact(pickle.loads(pickle.dumps(one))) == exact(one)


@given(candidates, candidates)
def test_candidates_are_equal_exactly_if_their_keys_are(one, other):
    assert (one == other) == (exact(one) == exact(other)) == (one.key == other.key)


@given(st.dictionaries(names, values, min_size=2, max_size=5))
def test_the_order_of_the_parameters_does_not_count(config):
    backwards = dict(reversed(config.items()))
    assert Candidate.of("v", config) == Candidate.of("v", backwards)
    assert Candidate.of("v", config).key == Candidate.of("v", backwards).key
    assert Candidate.of("v", config).parameters == config


def test_true_one_and_the_text_are_different_configs():
    found = {Candidate.of("v", {"a": value}) for value in (True, 1, "1", "True", False, 0)}
    assert len(found) == 6


def test_how_a_candidate_is_shown():
    one = Candidate.of("tiled", {"b": "x", "a": 3})
    assert one.key == '["tiled",{"a":3,"b":"x"}]'
    assert str(one) == "tiled(a=3, b=x)"
    assert str(Candidate.of("vendor")) == "vendor"


@pytest.mark.parametrize(
    ("value", "kind"), [(np.int64(4), int), (np.uint8(4), int), (np.bool_(True), bool), (np.str_("a"), str)]
)
def test_numpy_scalars_become_pythons(value, kind):
    one = Candidate.of("v", {"a": value})
    assert type(one.parameters["a"]) is kind
    assert one == Candidate.of("v", {"a": value.item()})


@for_each("value", [1.0, None, (1,), [1], 2**63, -(2**63) - 1, b"x", np.float32(1), "a\0"])
def test_a_value_that_a_config_cannot_hold_is_refused(value):
    with pytest.raises(InvalidRecordError, match="a is"):
        Candidate.of("v", {"a": value})


@pytest.mark.parametrize(
    "config", [(("b", 1), ("a", 2)), (("a", 1), ("a", 1)), ((1, 1),), (("a", 1), (2, 1))], ids=str
)
def test_a_config_is_sorted_and_names_each_parameter_once(config):
    with pytest.raises(InvalidRecordError, match="sorted, each once"):
        Candidate("v", config)


@for_each(
    "key",
    [
        "", "null", "5", "[]", '["v"]', '["v",{},1]', '["v",[]]', '["v",[["a",1]]]', '["v",""]', '{"a":1,"b":2}',
        '[null,{}]', '[["v"],{}]', '["v",{"a":1.0}]', '["v",{"a":null}]', '["v",{"a":[1]}]', '["v",{"a":NaN}]',
        '["v",{"a":99999999999999999999}]', "[" * 100_000, None, 7,
    ],
    ids=lambda key: repr(key)[:30],
)  # fmt: skip
def test_what_is_no_key_is_refused(key):
    with pytest.raises(InvalidRecordError):
        Candidate.from_key(key)


@given(st.text(max_size=30))
def test_any_text_is_a_key_or_refused(text):
    try:
        read = Candidate.from_key(text)
    except InvalidRecordError:
        return
    assert Candidate.from_key(read.key) == read


@given(st.lists(runs(), max_size=4))
def test_a_table_gives_back_what_it_was_made_of(drawn):
    wanted = [one for run in drawn for one in run]
    # Neighbouring runs of one variant are one block, which must agree in its parameters.
    table = CandidateTable(block for run in drawn for block in CandidateTable.of(run).blocks)
    assert len(table) == len(wanted)
    assert [exact(one) for one in table] == [exact(one) for one in wanted]
    assert [exact(table[row]) for row in range(len(table))] == [exact(one) for one in wanted]
    assert [table[row - len(table)] for row in range(len(table))] == wanted
    assert table[1:-1] == wanted[1:-1]
    assert table[::-2] == wanted[::-2]
    assert list(reversed(table)) == wanted[::-1]
    assert [one.key for one in table] == [one.key for one in wanted]


@given(runs(), st.data())
def test_rows_are_taken_by_mask_and_by_index(run, data):
    block = CandidateTable.of(run).blocks[0]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(run), max_size=len(run))))
    kept = block.take(mask)
    assert kept.length == mask.sum()
    assert [kept.at(row) for row in range(kept.length)] == [
        one for one, keep in zip(run, mask, strict=True) if keep
    ]
    order = np.array(data.draw(st.lists(st.integers(0, len(run) - 1), max_size=5)), dtype=int)
    taken = block.take(order)
    assert [taken.at(row) for row in range(taken.length)] == [run[row] for row in order]


def test_rows_run_through_the_blocks_and_empty_ones_do_not_count():
    def block(name, *tiles):
        return Block(name, {"tile": np.array(tiles, dtype=int)}, len(tiles))

    table = CandidateTable([block("a"), block("b", 1, 2), block("c"), block("d", 3), block("e")])
    assert [one.variant for one in table.blocks] == ["b", "d"]
    assert [str(one) for one in table] == ["b(tile=1)", "b(tile=2)", "d(tile=3)"]
    assert str(table[-1]) == "d(tile=3)"
    assert str(table[np.int64(1)]) == "b(tile=2)"
    assert table.index(Candidate.of("d", {"tile": 3})) == 2
    assert Candidate.of("d", {"tile": 4}) not in table
    for row in (3, -4):
        with pytest.raises(IndexError, match="of a table of 3"):
            table[row]
    with pytest.raises(TypeError):
        table[1.0]


def test_an_empty_table():
    for table in (CandidateTable([]), CandidateTable.of([]), CandidateTable([Block("a", {}, 0)])):
        assert len(table) == 0
        assert list(table) == []
        assert table[:] == []
        with pytest.raises(IndexError):
            table[0]


def test_a_variant_without_parameters_has_a_length_all_the_same():
    table = CandidateTable.of([Candidate("vendor"), Candidate.of("tiled", {"a": 1}), Candidate("vendor")])
    assert [one.variant for one in table] == ["vendor", "tiled", "vendor"]
    assert len(table.blocks) == 3


def test_one_parameter_has_one_type():
    for one, other in ((1, True), (1, "1"), (False, "a")):
        with pytest.raises(InvalidRecordError, match="several types"):
            CandidateTable.of([Candidate.of("v", {"a": one}), Candidate.of("v", {"a": other})])


def test_neighbours_of_one_variant_have_the_same_parameters():
    with pytest.raises(InvalidRecordError, match="does not have the parameters"):
        CandidateTable.of([Candidate.of("v", {"a": 1}), Candidate.of("v", {"b": 1})])


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (np.zeros(3, int), r"shape \(3,\)"),
        (np.zeros((2, 1), int), r"shape \(2, 1\)"),
        (np.zeros(2), "float64"),
        (np.array([1, None]), "object"),
        (np.array([b"a", b"b"]), "S1"),
    ],
)
def test_a_column_of_another_length_or_type_is_refused(column, said):
    with pytest.raises(InvalidRecordError, match=said):
        Block("v", {"a": column}, 2)
