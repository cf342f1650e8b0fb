"""What options of selectors must be."""

from __future__ import annotations

import math

from kernelcast import settings
from kernelcast.errors import SettingsError


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
