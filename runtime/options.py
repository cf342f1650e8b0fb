"""What options of selectors must be, and what they stand for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast import settings
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import InvalidProblemError, SettingsError
from kernelcast.kernels import Device, Problem

if TYPE_CHECKING:
    from kernelcast.runtime.plan import Plan, PlanBook


def check_mode(mode: str) -> None:
    """Refuse a mode that there is not."""
    if mode not in settings.MODES:
        raise SettingsError(f"The mode is {mode!r}; it must be one of {', '.join(settings.MODES)}.")


def check_integer(name: str, value: object, least: int) -> None:
    """Refuse what is not an integer of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingsError(f"{name} is {value!r}; it must be an integer of at least {least}.")


def check_number(name: str, value: object, below: float) -> None:
    """Refuse what is not a number above 0 and below a limit."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < below:
        limit = "" if below == math.inf else f" below {below:g}"
        raise SettingsError(f"{name} is {value!r}; it must be a positive number{limit}.")


def check_numbers(
    top_k: int,
    target_regret: float | None,
    budget_seconds: float,
    expected_calls: float | None,
    drift_every: int,
) -> None:
    """Refuse numbers that a selector cannot use."""
    check_integer("top_k", top_k, 1)
    check_integer("drift_every", drift_every, 0)
    check_number("budget_seconds", budget_seconds, math.inf)
    if target_regret is not None:
        check_number("target_regret", target_regret, 1.0)
    if expected_calls is not None:
        check_number("expected_calls", expected_calls, math.inf)


def check_others(
    device: object, mode: str | None, workload: object, background: object, priors: object
) -> None:
    """Refuse what else a selector cannot use."""
    if device is not None:
        check_device(device)
    if mode is not None:
        check_mode(mode)
    check_kind("workload", workload, str, "a name for these problems")
    check_flag("background", background)
    if priors is not None and not callable(priors):
        raise SettingsError(
            f"priors is {_shown(priors)}; it must be a function of a problem that gives candidates."
        )


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False: ``"no"`` is true to Python."""
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}; it must be True or False.")


def check_kind(name: str, value: object, kind: type, what: str) -> None:
    """Refuse what is not of a class; ``what`` says what is accepted."""
    if not isinstance(value, kind):
        raise SettingsError(f"{name} is {_shown(value)}; it must be {what}.")


def check_device(device: object) -> None:
    """Refuse what is not a device's facts."""
    check_kind("device", device, Device, "a Device, such as kernelcast.device('a100')")


def check_problem(problem: object) -> None:
    """Refuse what is not a problem."""
    if not isinstance(problem, Problem):
        raise InvalidProblemError(
            f"{_shown(problem)} is no problem. Make one with kernelcast.problem, such as "
            "kernelcast.problem('gemm', m=64, n=64, k=64)."
        )


def problems_of(problems: object) -> list[Problem]:
    """The problems of a list, or of whatever else can be gone through.

    Raises:
        InvalidProblemError: it is none, or holds something else.
    """
    if isinstance(problems, Problem):
        raise InvalidProblemError(
            f"{problems} is one problem, and a list of problems is expected: write [problem]."
        )
    if isinstance(problems, str) or not isinstance(problems, Iterable):
        raise InvalidProblemError(f"{_shown(problems)} is no list of problems.")
    found = list(problems)
    for each in found:
        check_problem(each)
    return found


def path_of(name: str, value: object) -> Path:
    """A path from what names one.

    Raises:
        SettingsError: it is no text and no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise SettingsError(f"{name} is {_shown(value)}; it must be a path.")
    return Path(value)


def folder_of(name: str, given: Path | bool | None, default: Path) -> Path | None:
    """The folder that an option of a path, True, False or None stands for; None keeps nothing on disk.

    Raises:
        SettingsError: it is none of these.
    """
    if given is False:
        return None
    if given is None or given is True:
        return default
    if not isinstance(given, str | os.PathLike):
        raise SettingsError(f"{name} is {_shown(given)}; it must be a path, True or False.")
    return Path(given)


def timing_of(plan: TimingPlan, budget_seconds: float) -> TimingPlan:
    """How much a verification measures, within a budget.

    Raises:
        SettingsError: it is no timing plan.
    """
    if not isinstance(plan, TimingPlan):
        more = " Tables of kernelcast.plan go into plans=[...]." if hasattr(plan, "intervals") else ""
        raise SettingsError(f"plan is {_shown(plan)}; it must be a TimingPlan.{more}")
    return replace(plan, seconds=min(plan.seconds, budget_seconds))


def book_of(plans: Iterable[Plan]) -> PlanBook | None:
    """The plans, found by the facts that they hold fixed; None without any, which costs no import.

    Raises:
        SettingsError: they are no plans.
    """
    if not isinstance(plans, Iterable) or isinstance(plans, str):
        raise SettingsError(
            f"plans is {_shown(plans)}; it must be a list of plans, such as [kernelcast.plan(...)]."
        )
    given = list(plans)
    if not given:
        return None
    from kernelcast.runtime.plan import Plan, PlanBook

    book = PlanBook()
    for each in given:
        check_kind("One of plans", each, Plan, "what kernelcast.plan gives, or Plan.load of a file")
        book.add(each)
    return book


def _shown(value: object) -> str:
    """A value as a message quotes it: of a bounded length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
