"""Many cases of one check in one test: a test of its own costs each case more than most checks do.

:func:`for_each` stands where ``pytest.mark.parametrize`` would, above a function that is given no fixture which a case changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

#: What a case that fails raises: ``pytest.fail`` (and so ``pytest.raises``) raises no Exception.
FAILURES = (Exception, pytest.fail.Exception)


class CasesFailed(AssertionError):
    """Some cases of a test fail: each is named in the text, and the first is the cause."""


def for_each(
    names: str | Sequence[str],
    values: Iterable[Any],
    ids: Callable[[Any], object] | Sequence[str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test for each of its cases, all of them, and fail with the name of every case that failed.

    Args:
        names: the arguments, as for ``pytest.mark.parametrize``: "m, n" or ("m", "n").
        values: a value for each case; tuples of values where there are several names. ``pytest.param(..., id=...)`` names one.
        ids: names of the cases, or what makes a name of a value; without it, the values.

    A test without cases is an error, as it would pass whatever the code does. So are marks of a single case. A test whose cases
    all skip is skipped; a case that skips while others run fails, as its skip would be seen by nobody.
    """
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [_case(given, value) for value in values]
    if not cases:
        raise ValueError(f"no case of {', '.join(given)}")
    labels = [_label(given, arguments, own, ids, at) for at, (arguments, own) in enumerate(cases)]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function)
        unknown = [name for name in given if name not in signature.parameters]
        if unknown:
            raise ValueError(f"{function.__name__} has no argument {', '.join(unknown)}")

        @functools.wraps(function)
        def run(**fixtures: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            skipped: list[tuple[str, BaseException]] = []
            for label, (arguments, _) in zip(labels, cases, strict=True):
                try:
                    function(**arguments, **fixtures)
                except pytest.skip.Exception as error:
                    skipped.append((label, error))
                except FAILURES as error:
                    failed.append((label, error))
            if len(skipped) == len(cases):
                raise skipped[0][1]
            failed += [
                (label, RuntimeError(f"a case alone must not skip: {error}")) for label, error in skipped
            ]
            if failed:
                told = "\n".join(f"[{label}] {_told(error)}" for label, error in failed)
                raise CasesFailed(f"{len(failed)} of {len(cases)} cases:\n{told}") from failed[0][1]

        kept = [each for name, each in signature.parameters.items() if name not in given]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def _case(names: Sequence[str], value: Any) -> tuple[Mapping[str, Any], str | None]:
    """The arguments of a case and the name that it was given."""
    own = None
    values = (value,) if len(names) == 1 else value
    if isinstance(value, type(pytest.param())):
        if value.marks:
            raise ValueError(f"marks of one case are not possible: {value}")
        values, own = value.values, value.id
    return dict(zip(names, values, strict=True)), own


def _label(names: Sequence[str], arguments: Mapping[str, Any], own: Any, ids: Any, at: int) -> str:
    if own is not None:
        return str(own)
    if callable(ids):
        return "-".join(str(ids(arguments[name])) for name in names)
    if ids is not None:
        return str(list(ids)[at])
    return "-".join(f"{arguments[name]!s:.80}" for name in names)


def _told(error: BaseException) -> str:
    """The line of the test that failed and what it says; of a test within, its own cases."""
    if isinstance(error, CasesFailed):
        return str(error)
    in_test = error.__traceback__.tb_next if error.__traceback__ is not None else None
    line = f"line {in_test.tb_lineno}: " if in_test is not None else ""
    return f"{line}{type(error).__name__}: {str(error)[:2000]}"
