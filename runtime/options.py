"""What options of selectors must be, and what they stand for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast import settings
from kernelcast.errors import SettingsError

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


def folder_of(given: Path | bool | None, default: Path) -> Path | None:
    """The folder that an option of a path, True, False or None stands for; None keeps nothing on disk."""
    if given is False:
        return None
    return default if given is None or given is True else Path(given)


def book_of(plans: Iterable[Plan]) -> PlanBook | None:
    """The plans, found by the facts that they hold fixed; None without any, which costs no import."""
    given = list(plans)
    if not given:
        return None
    from kernelcast.runtime.plan import PlanBook

    book = PlanBook()
    for each in given:
        book.add(each)
    return book
