"""Modules that are compiled where there was a C compiler at installation. All are optional: numpy does the same, more slowly."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def load_extension(name: str, version: int) -> tuple[Any, str]:
    """The compiled module of a name, or None and why there is none to use, such as ``not compiled``.

    Args:
        name: in full, such as ``"kernelcast.costmodel._walk"``.
        version: what its ``VERSION`` must be: one that was built from older sources may take something else.
    """
    try:
        module = import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, numpy does the same
        # Without a compiler kernelcast is installed without it; one that is there and cannot be loaded is a fault to mend.
        if find_spec(name) is None:
            return None, "not compiled"
        return None, f"import failed: {type(error).__name__}: {error}"
    if getattr(module, "VERSION", None) != version:
        return None, "compiled from other sources; install kernelcast again"
    return module, ""
