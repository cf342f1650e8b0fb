"""torch.compile: let Inductor time fewer GEMM choices, and keep its timings.

>>> import kernelcast as kc
>>> with kc.inductor.enable(top_k=3) as session:            # doctest: +SKIP
...     compiled = torch.compile(network, mode="max-autotune")
...     compiled(example)

Each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelcast.runtime.inductor import (
        InductorWarning,
        Pruning,
        Session,
        disable,
        enable,
        in_force,
    )

__all__ = ["InductorWarning", "Pruning", "Session", "disable", "enable", "in_force"]


def __getattr__(name: str) -> object:
    if name in __all__:
        value = getattr(import_module("kernelcast.runtime.inductor"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
