"""Tuned Triton kernels: ``kernelcast.triton.autotune``, ``perf_model`` and ``record``.

>>> import kernelcast.triton
>>> @kernelcast.triton.autotune(configs=..., key=["M", "N", "K"])      # doctest: +SKIP
... @triton.jit
... def kernel(...): ...

Importing this module imports neither triton nor torch; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelcast.runtime.triton_autotune import autotune
    from kernelcast.runtime.triton_perf import perf_model
    from kernelcast.runtime.triton_recording import record

_HOMES = {
    "autotune": "kernelcast.runtime.triton_autotune",
    "perf_model": "kernelcast.runtime.triton_perf",
    "record": "kernelcast.runtime.triton_recording",
}

__all__ = ["autotune", "perf_model", "record"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
