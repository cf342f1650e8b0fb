"""Problems: equality, keys, round trips, and what a schema refuses."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import InvalidProblemError, InvalidRecordError
from kernelcast.kernels import Dim, Option, Problem, ProblemSchema, problem
from kernelcast.kernels.problem import MAX_DIMENSION

TOY = ProblemSchema(
    operation="toy",
    dims=(Dim("m", "rows", minimum=1), Dim("n", "columns", default=7)),
    dtypes=("float32", "float16", "int8"),
    options=(
        Option("layout", "of the input", default="nn", choices=("nn", "nt")),
        Option("flag", "a switch", default=False, choices=(False, True)),
        Option("stride", "between rows", default=2, minimum=1),
    ),
)

names = st.text(min_size=1, max_size=6)
sizes = st.integers(0, MAX_DIMENSION - 1)
values = st.one_of(st.integers(), st.booleans(), st.text(max_size=6))


@st.composite
def problems(draw):
    """Any problem that can exist, whatever its schema."""
    drawn = draw(st.lists(names, unique=True, max_size=6))
    cut = draw(st.integers(0, len(drawn)))
    return Problem(
        operation=draw(names),
        dims=tuple((name, draw(sizes)) for name in drawn[:cut]),
        dtype=draw(names),
        options=tuple((name, draw(values)) for name in drawn[cut:]),
        allow_tf32=draw(st.booleans()),
        threads=draw(st.integers(0, 64)),
    )


def exact(one: Problem) -> tuple[object, ...]:
    """Every field, with the type of each option: True equals 1 to Python."""
    typed = tuple((name, type(value), value) for name, value in one.options)
    return (one.operation, one.dims, one.dtype, typed, one.allow_tf32, one.threads)


@given(problems())
def test_a_problem_survives_json_and_pickle(one):
    read = Problem.from_dict(json.loads(one.key))
    assert exact(read) == exact(one)
    assert read == one
    assert hash(read) == hash(one)
    assert read.key == one.key
    assert exact(pickle.loads(pickle.dumps(one))) == exact(one)


@given(problems(), problems())
def test_problems_are_equal_exactly_if_every_fact_and_the_key_are(one, other):
    assert (one == other) == (exact(one) == exact(other)) == (one.key == other.key)


@given(problems(), st.data())
def test_every_fact_changes_the_key(one, data):
    changes = {
        "operation": one.operation + "x",
        "dtype": one.dtype + "x",
        "allow_tf32": not one.allow_tf32,
        "threads": one.threads + 1,
    }
    if one.dims:
        (name, size), *rest = one.dims
        changes["dims"] = ((name, (size + 1) % MAX_DIMENSION), *rest)
    if one.options:
        (name, value), *rest = one.options
        changes["options"] = ((name, data.draw(values.filter(lambda new: new != value))), *rest)
    for field, value in changes.items():
        changed = dataclasses.replace(one, **{field: value})
        assert changed.key != one.key, field
        assert changed != one, field


def test_true_and_one_are_different_options():
    flag = Problem("toy", (("m", 1),), "float32", (("flag", True),))
    number = Problem("toy", (("m", 1),), "float32", (("flag", 1),))
    assert flag.key != number.key
    assert flag != number
    assert len({flag, number}) == 2


def test_the_key_is_canonical_text():
    built = problem("gemm", m=2, n=3, k=5, dtype="float16", layout="nt", threads=4)
    assert built.key == (
        '{"operation":"gemm","dims":{"m":2,"n":3,"k":5},"dtype":"float16",'
        '"options":{"layout":"nt","lda":0,"ldb":0},"allow_tf32":false,"threads":4}'
    )
    assert str(built) == "gemm(m=2, n=3, k=5, float16, layout=nt, threads=4)"
    assert built["k"] == 5
    assert built["layout"] == "nt"
    assert built.shape == (("m", 2), ("n", 3), ("k", 5))
    assert built.element_bytes == 2


@for_each(
    "changes",
    [
        {"operation": None},
        {"dtype": 3},
        {"allow_tf32": 1},
        {"allow_tf32": "false"},
        {"threads": "2"},
        {"threads": 2.0},
        {"threads": True},
        {"threads": -1},
        {"dims": {"m": "5"}},
        {"dims": {"m": 5.5}},
        {"dims": {"m": True}},
        {"dims": {"m": -1}},
        {"dims": {"m": 2**40}},
        {"dims": [1, 2]},
        {"dims": None},
        {"options": {"layout": None}},
        {"options": {"layout": ["nn"]}},
        {"options": {"stride": 1.5}},
        {"options": {"m": 3}},
    ],
    ids=str,
)
def test_a_record_of_another_type_is_refused_not_converted(changes):
    good = TOY.problem(m=5).to_dict()
    assert Problem.from_dict(good) == TOY.problem(m=5)
    with pytest.raises(InvalidProblemError, match="Not a problem"):
        Problem.from_dict({**good, **changes})


@pytest.mark.parametrize("field", ["operation", "dims", "dtype", "options", "allow_tf32", "threads"])
def test_a_record_that_lacks_a_field_is_refused(field):
    data = TOY.problem(m=5).to_dict()
    del data[field]
    with pytest.raises(InvalidProblemError, match=field):
        Problem.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "text", 5])
def test_what_is_no_mapping_is_no_problem(data):
    with pytest.raises(InvalidProblemError):
        Problem.from_dict(data)


def test_a_schema_fills_defaults_in_its_own_order():
    built = TOY.problem(flag=True, m=3)
    assert built.dims == (("m", 3), ("n", 7))
    assert built.options == (("layout", "nn"), ("flag", True), ("stride", 2))
    assert built == TOY.problem(m=3, n=7, layout="nn", flag=True, stride=2, threads=0)


def test_tf32_is_a_matter_of_float32_alone():
    assert TOY.problem(m=1, allow_tf32=True).allow_tf32
    assert TOY.problem(m=1, dtype="float16", allow_tf32=True) == TOY.problem(m=1, dtype="float16")


@pytest.mark.parametrize("count", [np.int64(3), np.int32(3), np.uint8(3)])
def test_numpy_integers_become_python_integers(count):
    built = TOY.problem(m=count, stride=count, threads=count)
    assert built == TOY.problem(m=3, stride=3, threads=3)
    assert [type(value) for value in (built["m"], built["stride"], built.threads)] == [int] * 3


@for_each(
    ("wrong", "said"),
    [
        ({}, "needs the dimension 'm'"),
        ({"m": 0}, "m is 0; it must be at least 1"),
        ({"m": -4}, "m is -4"),
        ({"m": 2**40}, r"below 2\*\*40"),
        ({"m": 2.0}, "m is 2.0; it must be an integer"),
        ({"m": True}, "m is True; it must be an integer"),
        ({"m": np.True_}, "it must be an integer"),
        ({"m": "3"}, "m is '3'"),
        ({"m": None}, "needs the dimension"),
        ({"m": 1, "k": 2}, "no dimension or option 'k'. It has: m, n, layout, flag, stride"),
        ({"m": 1, "layout": "tn"}, "one of nn, nt"),
        ({"m": 1, "flag": 1}, "flag is 1; it must be one of False, True"),
        ({"m": 1, "stride": 0}, "at least 1"),
        ({"m": 1, "stride": True}, "stride is True"),
        ({"m": 1, "stride": "2"}, "stride is '2'"),
        ({"m": 1, "stride": 2**40}, r"below 2\*\*40"),
        ({"m": 1, "dtype": "float64"}, "It takes: float32, float16, int8"),
        ({"m": 1, "dtype": None}, "dtype None"),
        ({"m": 1, "threads": -1}, "threads is -1"),
        ({"m": 1, "threads": 2**17}, "threads is 131072"),
        ({"m": 1, "threads": 1.0}, "threads is 1.0"),
        ({"m": 1, "allow_tf32": 1}, "allow_tf32 is 1"),
    ],
    ids=str,
)
def test_wrong_values_are_named(wrong, said):
    with pytest.raises(InvalidProblemError, match=said):
        TOY.problem(**wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dims": (Dim("m", ""), Dim("m", ""))}, "a name twice: m"),
        ({"dims": (Dim("stride", ""),)}, "a name twice: stride"),
        ({"dims": (Dim("threads", ""),)}, "a name twice: threads"),
        ({"dtypes": ("float32", "float33")}, "float33; known are: float64"),
        ({"options": (Option("layout", "", default="tt", choices=("nn",)),)}, "one of nn"),
        ({"options": (Option("flag", "", default=1, choices=(True, False)),)}, "one of True, False"),
        ({"options": (Option("stride", "", default=0, minimum=1),)}, "at least 1"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(changes, said):
    with pytest.raises(InvalidRecordError, match=said):
        dataclasses.replace(TOY, **changes)


@given(st.sampled_from(TOY.dtypes), sizes.filter(bool), sizes, st.booleans(), st.integers(1, 2**40 - 1))
def test_what_a_schema_built_is_read_back(dtype, m, n, flag, stride):
    built = TOY.problem(dtype=dtype, m=m, n=n, flag=flag, stride=stride)
    assert Problem.from_dict(json.loads(built.key)) == built
    assert TOY.problem(dtype=dtype, **built.facts) == built
