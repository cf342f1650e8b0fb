"""Tile sizes for the fused mixture-of-experts kernel of vLLM and SGLang.

>>> import kernelcast as kc
>>> kc.fused_moe.write("configs", 8, 14336, 4096, experts_per_token=2)      # doctest: +SKIP

Each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelcast.runtime.fused_moe import TOKENS, Plan, PlanWarning, plan, write
    from kernelcast.runtime.fused_moe_file import FileName, candidate_of, config_of
    from kernelcast.runtime.fused_moe_priors import Priors, read

_HOMES = {
    "FileName": "kernelcast.runtime.fused_moe_file",
    "Plan": "kernelcast.runtime.fused_moe",
    "PlanWarning": "kernelcast.runtime.fused_moe",
    "Priors": "kernelcast.runtime.fused_moe_priors",
    "TOKENS": "kernelcast.runtime.fused_moe",
    "candidate_of": "kernelcast.runtime.fused_moe_file",
    "config_of": "kernelcast.runtime.fused_moe_file",
    "plan": "kernelcast.runtime.fused_moe",
    "read": "kernelcast.runtime.fused_moe_priors",
    "write": "kernelcast.runtime.fused_moe",
}

__all__ = [
    "TOKENS",
    "FileName",
    "Plan",
    "PlanWarning",
    "Priors",
    "candidate_of",
    "config_of",
    "plan",
    "read",
    "write",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
