"""Many cases in one test: all of them are run, and each that fails is named."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from cases import CasesFailed, for_each


def test_every_case_is_run_whatever_fails_before_it():
    seen = []

    @for_each(("a", "b"), [(1, 2), (3, 4), (5, 6)])
    def check(a, b):
        seen.append((a, b))
        assert a == 3, f"{a} is no three"

    with pytest.raises(CasesFailed) as failed:
        check()
    assert seen == [(1, 2), (3, 4), (5, 6)]
    first, *others = str(failed.value).splitlines()
    assert first == "2 of 3 cases:"
    named = [line for line in others if line.startswith("[")]
    assert [line.partition(" line ")[0] for line in named] == ["[1-2]", "[5-6]"]
    assert "AssertionError: 1 is no three" in named[0]
    assert "AssertionError: 5 is no three" in named[1]
    assert "1 is no three" in str(failed.value.__cause__)


def test_cases_that_hold_say_nothing():
    seen = []

    @for_each("n", range(3))
    def check(n):
        seen.append(n)

    assert check() is None
    assert seen == [0, 1, 2]


def test_an_error_and_an_expected_error_that_was_not_raised_fail_a_case():
    @for_each("value", [0, 1])
    def check(value):
        with pytest.raises(ZeroDivisionError):
            1 / value

    with pytest.raises(CasesFailed, match=r"(?s)^1 of 2 cases:\n\[1\] line \d+: Failed: DID NOT RAISE"):
        check()


def test_decorators_above_each_other_make_all_combinations():
    seen = []

    @for_each("a", [1, 2], ids=["one", "two"])
    @for_each("b", "xy", ids=str.upper)
    def check(a, b):
        seen.append((a, b))
        assert (a, b) != (2, "y")

    with pytest.raises(CasesFailed) as failed:
        check()
    assert seen == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert str(failed.value).splitlines()[:2] == ["1 of 2 cases:", "[two] 1 of 2 cases:"]
    assert str(failed.value).splitlines()[2].startswith("[Y] line ")


@for_each("n", [pytest.param(1, id="one"), 2])
def test_fixtures_are_given_to_every_case(tmp_path: Path, n):
    assert tmp_path.is_dir()
    assert n in (1, 2)


def test_a_fixture_is_all_that_pytest_sees():
    assert list(inspect.signature(test_fixtures_are_given_to_every_case).parameters) == ["tmp_path"]


def test_a_parameter_names_its_own_case():
    @for_each("n", [pytest.param(1, id="one")])
    def check(n):
        raise OSError(n)

    with pytest.raises(CasesFailed, match=r"\[one\] line \d+: OSError: 1"):
        check()


def test_what_would_hide_a_case_is_refused():
    def check(n):
        if n:
            pytest.skip("not here")

    with pytest.raises(
        CasesFailed, match=r"1 of 2 cases:\n\[1\] RuntimeError: a case alone must not skip: not here"
    ):
        for_each("n", [0, 1])(check)()
    with pytest.raises(pytest.skip.Exception, match="not here"):
        for_each("n", [1, 2])(check)()
    with pytest.raises(ValueError, match="no case of n"):
        for_each("n", [])
    with pytest.raises(ValueError, match="check has no argument m"):
        for_each("m", [1])(check)
    with pytest.raises(ValueError, match="marks of one case are not possible"):
        for_each("n", [pytest.param(1, marks=pytest.mark.slow)])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        for_each("m, n", [(1, 2, 3)])
