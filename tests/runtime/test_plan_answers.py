"""What plans answer, the tables they hold, and the books they are found in."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kernelcast.errors import InvalidProblemError, InvalidRecordError
from kernelcast.kernels import Candidate, problem
from kernelcast.runtime import Selector
from kernelcast.runtime.plan import Plan, PlanBook, plan
from kernelcast.runtime.plan_table import Interval


def load_lab():
    name = "kernelcast_plan_lab"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("plan_lab.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


lab = load_lab()
STATE = lab.STATE
VENDOR = Candidate.of("vendor")


@pytest.fixture(autouse=True)
def _installed():
    with lab.installed():
        yield


@pytest.fixture
def make(tmp_path):
    """Makes plans with a selector of the lab."""

    def build(mode="predict", selector=None, **values):
        chosen = selector or lab.oracle(tmp_path)
        return plan(lab.NAME, mode=mode, selector=chosen, **{"threads": 1, **values})

    return build


def chosen(found, **sizes):
    return found.candidate(**sizes).variant


def spans(found):
    return [(each.first[0], each.last[0], each.candidate.variant) for each in found.intervals]


def crossing(at=300):
    """Below ``at`` low is the fastest, from there on high."""
    STATE.takes_us["low"] = lambda n, m: 50.0 if n < at else 90.0
    STATE.takes_us["high"] = lambda n, m: 90.0 if n < at else 50.0


# --- answers ---


@pytest.fixture
def odd_plan(make):
    """A plan of two dimensions with classes of alignment."""
    STATE.takes_us["even"] = lambda n, m: 50.0 if m > 40 else 300.0
    STATE.legal["even"] = lambda n, m: n % 8 == 0
    STATE.takes_us["low"] = lambda n, m: 60.0 if n < 33 else 300.0
    return make(n="1..128", m="1..128")


def test_every_size_lies_in_the_interval_that_holds_it(odd_plan):
    kinds = set()
    for n in range(1, 129):
        for m in range(1, 129, 3):
            holding = [each for each in odd_plan.intervals if each.holds((n, m))]
            assert [odd_plan.interval(n=n, m=m)] == holding
            kinds.add(holding[0].candidate.variant)
    assert kinds == {"vendor", "even", "low"}


def test_the_order_of_calls_changes_nothing(make):
    crossing(60)
    lengths = [random.Random(1).randint(1, 512) for _ in range(200)]
    one, other = make("verify", n="1..512"), make("verify", n="1..512")
    forwards = [one.select(n=n) for n in lengths]
    backwards = [other.select(n=n) for n in reversed(lengths)][::-1]
    assert [s.candidate for s in forwards] == [s.candidate for s in backwards]
    assert one.digest == other.digest


@pytest.mark.parametrize(("at", "factor"), [(3, 0.5), (170, 1.1)])
def test_equal_questions_have_equal_plans(make, at, factor):
    crossing(at)
    STATE.takes_us["odd"] = lambda n, m: 60.0 * factor * (1 + n / 512)
    found = []
    for values in (
        {"n": "1..512", "threads": 1, "dtype": "float32"},
        {"dtype": "float32", "threads": 1, "n": range(1, 513)},
    ):
        STATE.now_us = 0.0  # the clock's rounding is no part of the question
        found.append(make("verify", **values))
    assert found[0].to_json() == found[1].to_json()
    for one, other in pairwise(found[0].intervals):
        assert one.last[0] + 1 == other.first[0]


def test_selections_say_where_they_come_from(make):
    crossing(60)
    verified, forecast = make("verify", n="1..512"), make(n="1..512")
    selection = verified.select(n=400)
    assert (selection.source, selection.candidate) == ("cached", Candidate.of("high"))
    assert selection.problem == problem(lab.NAME, n=400, threads=1)
    assert "plan's interval n 6" in selection.reason
    assert "..512" in selection.reason
    assert forecast.select(n=400).source == "predicted"
    assert forecast.select(n=400).model_version == "0001-3f2a9c1b"
    assert verified.select(verified.problem(n=400)) == selection
    assert math.isnan(selection.measured_us)


def test_outside_the_plan_is_the_default(make):
    STATE.takes_us["low"] = lambda n, m: 50.0
    found = make(n="16..64..16")
    for n in (1, 15, 17, 65, 80, 10**9):
        assert found.candidate(n=n) == VENDOR
        assert found.interval(n=n) is None
        selection = found.select(n=n)
        assert (selection.source, selection.candidate) == ("default", VENDOR)
        assert "outside the plan's sizes" in selection.reason
        assert not found.covers(found.problem(n=n))
    assert chosen(found, n=48) == "low"


def test_questions_that_it_cannot_answer_are_refused(make):
    found = make(n="1..64")
    for sizes in ({}, {"m": 3}, {"n": 3, "m": 3}):
        with pytest.raises(InvalidProblemError, match="asks for n"):
            found.candidate(**sizes)
        with pytest.raises(InvalidProblemError, match="asks for n"):
            found.problem(**sizes)
    for size in (3.5, "3", None, True):
        with pytest.raises(InvalidProblemError, match=f"n is {size!r}; sizes must be integers"):
            found.candidate(n=size)
    for call in (found.candidate, found.interval):
        with pytest.raises(
            InvalidProblemError, match=r"asks for n; 3\.5 without a name was given\. Name each size: n="
        ):
            call(3.5)
    for call in (found.select, found.covers):
        with pytest.raises(InvalidProblemError, match=r"3 is no problem\. Make one with kernelcast\.problem"):
            call(3)
    with pytest.raises(InvalidProblemError, match="family"):
        found.select(problem(lab.NAME, n=3, threads=1, dtype="float16"))
    with pytest.raises(InvalidProblemError, match="both were given"):
        found.select(found.problem(n=3), n=3)
    assert not found.covers(problem(lab.NAME, n=3, threads=2))
    assert not found.covers(problem(lab.NAME, n=3, threads=1, layout="b"))
    assert not found.covers(problem(lab.NAME, n=3, m=2, threads=1))
    assert not found.covers(problem("gemm", m=1, n=1, k=1))


def test_there_is_a_problem_for_each_interval(make):
    crossing(60)
    found = make("verify", n="1..512")
    problems = found.problems()
    assert len(problems) == len(found.intervals)
    assert set(problems) <= set(STATE.measured)
    for each, interval in zip(problems, found.intervals, strict=True):
        assert interval.holds((each["n"],))


# --- the table itself ---


def interval(first, last, alignment=(1, 0), variant="vendor"):
    return Interval((first,), (last,), (alignment,), Candidate.of(variant), "default", (first,))


def table(*intervals, sizes=range(1, 65)):
    fixed = (("m", 1), ("k", 1), ("layout", "a"), ("dtype", "float32"), ("allow_tf32", False), ("threads", 1))
    return Plan(lab.NAME, fixed, (("n", sizes),), (), intervals, lab.HERE)


@pytest.mark.parametrize(
    "intervals",
    [
        [],
        [interval(1, 63)],
        [interval(2, 64)],
        [interval(1, 32), interval(32, 64)],
        [interval(1, 31), interval(33, 64)],
        [interval(1, 64, (16, 0))],
        [interval(1, 64, (1, 16)), interval(1, 63, (16, 0))],
        [interval(1, 64, (1, 16)), interval(1, 64, (8, 0))],
        [interval(1, 64, (1, 4)), interval(1, 64, (4, 0)), interval(1, 64, (6, 0))],
        [interval(1, 64), interval(65, 70)],
    ],
)
def test_a_table_with_gaps_or_overlaps_is_refused(intervals):
    with pytest.raises(InvalidRecordError):
        table(*intervals)


def test_a_table_without_faults_is_accepted():
    found = table(interval(1, 31), interval(32, 64, (1, 16)), interval(32, 64, (16, 0), "low"))
    assert [chosen(found, n=n) for n in (16, 32, 33, 64)] == ["vendor", "low", "vendor", "low"]
    # Between 33 and 48 there is no multiple of 16.
    assert table(interval(16, 33), interval(48, 64), sizes=range(16, 65, 16)).candidate(n=48) == VENDOR


@pytest.mark.parametrize(
    "fields",
    [
        {"last": (0,)}, {"last": (4, 4)}, {"first": ()}, {"first": (True,)}, {"alignment": ((0, 0),)},
        {"alignment": ((16, 8),)}, {"alignment": ((16, 24),)}, {"source": "guess"}, {"point": ()},
    ],
)  # fmt: skip
def test_an_interval_with_faults_is_refused(fields):
    whole = {
        "first": (1,), "last": (4,), "alignment": ((1, 0),), "candidate": VENDOR, "source": "default", "point": (1,),
    }  # fmt: skip
    with pytest.raises(InvalidRecordError):
        Interval(**{**whole, **fields})


# --- books ---


def test_a_book_finds_the_plan_of_a_problem(make):
    crossing(30)
    by_n, by_m = make(n="1..64"), make(m="1..64", n=100)
    both, half = make(n="1..64", m="n"), make(n="1..64", dtype="float16")
    book = PlanBook()
    for each in (by_n, by_m, both, half):
        book.add(each)
    assert len(book) == 4
    assert set(map(id, book)) == set(map(id, (by_n, by_m, both, half)))
    assert book.find(problem(lab.NAME, n=3, threads=1)) is by_n
    assert book.find(problem(lab.NAME, n=100, m=3, threads=1)) is by_m
    assert book.find(problem(lab.NAME, n=3, m=3, threads=1)) is both
    assert book.find(problem(lab.NAME, n=3, threads=1, dtype="float16")) is half
    for other in (
        problem(lab.NAME, n=65, threads=1), problem(lab.NAME, n=3, m=2, threads=1), problem(lab.NAME, n=3, threads=2),
        problem(lab.NAME, n=3, threads=1, layout="b"), problem("gemm", m=3, n=3, k=3),
    ):  # fmt: skip
        assert book.find(other) is None
    again, wider = make(n="1..64"), make(n="1..128")
    book.add(again)
    assert (len(book), book.find(problem(lab.NAME, n=3, threads=1))) == (4, again)
    book.add(wider)
    assert (len(book), book.find(problem(lab.NAME, n=3, threads=1))) == (5, wider)
    book.clear()
    assert (len(book), book.find(problem(lab.NAME, n=3, threads=1))) == (0, None)


def test_facts_that_a_schema_rewrites_belong_to_the_family():
    # A gemm of one row has no leading dimension of A: another canonical problem, and still the plan's.
    selector = Selector(lab.HERE, cache=False, store=False, mode="predict")
    found = plan("gemm", selector=selector, m="1..64", n=32, k=32, lda=64, threads=1)
    for m in (1, 2, 64):
        described = problem("gemm", m=m, n=32, k=32, lda=64, threads=1)
        assert found.covers(described)
        assert found.select(described).problem == described
    assert not found.covers(problem("gemm", m=2, n=32, k=32, threads=1))
