"""Limits, and the strategies without a model: how many, which, and the same ones after an interruption."""

from __future__ import annotations

import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets.jobs import Exhaustive, Job, Result
from kernelcast.datasets.strategy import Limit, Limited, Random, default_of
from kernelcast.errors import SettingsError
from kernelcast.kernels import Candidate, Problem, problem

VENDOR = Candidate.of("vendor")


def tile(size: int) -> Candidate:
    return Candidate.of("triton_toy", {"tile": size})


def of_size(m: int) -> Problem:
    return Problem("toy", (("m", m),), "float32")


def space(*sizes: int) -> tuple[list[Problem], list[list[Candidate]]]:
    """Problems with so many candidates each, the default in the middle."""
    tables = []
    for size in sizes:
        table = [tile(each) for each in range(size - 1)]
        table.insert(size // 2, VENDOR)
        tables.append(table)
    return [of_size(m) for m in range(1, len(sizes) + 1)], tables


def run(strategy, problems, tables, known=(), stop=10**9) -> list[tuple[Problem, Candidate]]:
    """What a strategy asks for, up to so many candidates, in its order."""
    strategy.start(problems, tables, dict.fromkeys(known))
    asked: list[tuple[Problem, Candidate]] = []
    while jobs := strategy.propose():
        for job in jobs:
            asked += [(job.problem, candidate) for candidate in job.candidates]
            strategy.tell(Result(job, ()))
            if len(asked) >= stop:
                return asked[:stop]
    return asked


def everything(problems, tables):
    return [(p, c) for p, table in zip(problems, tables, strict=True) for c in table]


@for_each(
    ("text", "candidates", "expected"),
    [
        ("25%", 105_051, 26_262),
        ("25%", 3, 1),
        ("7%", 100, 7),
        ("12.5%", 80, 10),
        ("100%", 9, 9),
        ("5000", 105_051, 5000),
        ("5000", 12, 12),
        ("1", 12, 1),
        ("25%", 0, 0),
    ],
)
def test_a_limit_is_a_number_or_a_share_rounded_down(text, candidates, expected):
    assert Limit.parse(text).of(candidates) == expected


@for_each("text", ["0", "-3", "0%", "101%", "-5%", "nan%", "inf%", "many", "", "%", "2.5"])
def test_other_limits_are_refused(text):
    with pytest.raises(SettingsError, match="whole number, such as 5000, or a share"):
        Limit.parse(text)


def test_a_limit_is_one_of_the_two():
    with pytest.raises(SettingsError, match="either"):
        Limit()
    with pytest.raises(SettingsError, match="either"):
        Limit(count=3, share=0.5)


def test_the_default_of_an_operation():
    assert default_of("softmax") == VENDOR
    assert default_of("no_such_operation") == VENDOR


# --- random ---


@settings(deadline=None, derandomize=True, max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    count=st.integers(1, 80),
    seed=st.integers(0, 5),
)
def test_random_takes_exactly_the_limit_and_nothing_twice(sizes, count, seed):
    problems, tables = space(*sizes)
    strategy = Random(Limit(count=count), seed=seed)
    asked = run(strategy, problems, tables)
    assert len(asked) == len(set(asked)) <= min(count, sum(sizes))
    assert set(asked) <= set(everything(problems, tables))
    assert strategy.total == len(asked)
    # Less only where a single candidate would be left, with nothing of its problem to compare it with.
    assert len(asked) >= min(count, sum(sizes)) - 1
    for each in problems:
        of_one = [candidate for at, candidate in asked if at == each]
        assert not of_one or of_one[0] == VENDOR


def test_every_problem_gets_its_share_the_default_among_them():
    problems, tables = space(*[20] * 40, *[8] * 5)
    asked = run(Random(Limit.parse("25%"), seed=3), problems, tables)
    counts = [sum(at == each for at, _ in asked) for each in problems]
    assert sum(counts) == 210
    assert set(counts[:40]) <= {4, 5, 6}
    assert set(counts[40:]) <= {2, 3, 4}
    assert {each for each in problems if (each, VENDOR) in asked} == set(problems)
    # Problems come in random order, so that a budget of time ends in the middle of no sorted list.
    order = list(dict.fromkeys(at for at, _ in asked))
    assert order != problems
    assert sorted(order, key=problems.index) == problems


def test_the_others_are_drawn_alike():
    problems, tables = space(*[10] * 300)
    asked = run(Random(Limit.parse("30%")), problems, tables)
    counts = [sum(candidate == tile(size) for _, candidate in asked) for size in range(9)]
    # 300 problems, 2 of 9 each: 67 expected, standard deviation 7.
    assert 40 < min(counts) <= max(counts) < 95


def test_a_small_limit_gives_few_problems_something_to_compare():
    problems, tables = space(*[10] * 50)
    asked = run(Random(Limit(count=20)), problems, tables)
    counts = [sum(at == each for at, _ in asked) for each in problems]
    assert sorted(counts, reverse=True) == [2] * 10 + [0] * 40


def test_the_seed_decides():
    problems, tables = space(*[10] * 20)
    first, again, other = (run(Random(Limit.parse("50%"), seed=seed), problems, tables) for seed in (0, 0, 1))
    assert first == again
    assert set(first) != set(other)


@pytest.mark.parametrize("stop", [1, 17, 40])
def test_an_ended_random_collection_goes_on_to_the_same_end(stop):
    problems, tables = space(*[10] * 20)
    whole = run(Random(Limit.parse("25%"), seed=4), problems, tables)
    done = run(Random(Limit.parse("25%"), seed=4), problems, tables, stop=stop)
    rest = run(Random(Limit.parse("25%"), seed=4), problems, tables, known=done)
    assert len(rest) == len(whole) - stop
    assert set(done) | set(rest) == set(whole)
    assert run(Random(Limit.parse("25%"), seed=4), problems, tables, known=whole) == []


def test_without_a_limit_random_takes_everything():
    problems, tables = space(3, 5, 4)
    asked = run(Random(seed=1), problems, tables)
    assert len(asked) == 12
    assert set(asked) == set(everything(problems, tables))


def test_known_candidates_beyond_the_limit_leave_nothing_to_do():
    problems, tables = space(10, 10)
    strategy = Random(Limit(count=4))
    known = everything(problems, tables)[:7]
    assert run(strategy, problems, tables, known=known) == []
    assert strategy.total == 7


# --- limited ---


def test_a_limited_strategy_ends_in_the_middle_of_a_job():
    problems, tables = space(4, 4, 4)
    strategy = Limited(Exhaustive(), Limit(count=6))
    assert run(strategy, problems, tables) == everything(problems, tables)[:6]
    assert strategy.total == 6
    again = Limited(Exhaustive(), Limit(count=8))
    known = everything(problems, tables)[:6]
    assert run(again, problems, tables, known=known) == everything(problems, tables)[6:8]
    assert again.total == 8


def test_a_limited_strategy_hears_what_came_of_its_jobs():
    heard = []

    class Listening(Exhaustive):
        needs_known = True

        def tell(self, result):
            heard.append(result)

    strategy = Limited(Listening(), Limit(count=3))
    assert strategy.needs_known
    result = Result(Job(problem("softmax", rows=1, columns=1), (VENDOR,)), ())
    strategy.tell(result)
    assert heard == [result]


def test_a_limit_above_everything_changes_nothing():
    problems, tables = space(2, 3)
    strategy = Limited(Exhaustive(), Limit(count=99))
    assert run(strategy, problems, tables) == everything(problems, tables)
    assert strategy.total == 5
