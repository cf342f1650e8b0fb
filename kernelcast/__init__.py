"""kernelcast forecasts which kernel will be fastest for an operation, a shape and a device, measures only the few
candidates that the forecast cannot tell apart, and remembers the answer.

>>> import kernelcast as kc
>>> selection = kc.select("gemm", m=64, n=64, k=4096)      # doctest: +SKIP
>>> c = kc.matmul(a, b)                                     # doctest: +SKIP

Importing this package imports no other library and touches no GPU; each name below is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernelcast import fused_moe, inductor, triton
    from kernelcast.api import device, explain, problem, select, warmup
    from kernelcast.errors import KernelcastError
    from kernelcast.kernels import Candidate, Device, Problem
    from kernelcast.kernels.user import TensorSpec, kernel
    from kernelcast.runtime import Selection, Selector
    from kernelcast.runtime.dispatch import configure
    from kernelcast.runtime.dropins import attention, conv2d, matmul, softmax
    from kernelcast.runtime.dropins_matmul import bmm, grouped_matmul, mixed_matmul
    from kernelcast.runtime.dropins_norm import layer_norm, rms_norm
    from kernelcast.runtime.plan import plan
    from kernelcast.runtime.run import run

__version__ = "0.1.0"

_HOMES = {
    "Candidate": "kernelcast.kernels",
    "Device": "kernelcast.kernels",
    "KernelcastError": "kernelcast.errors",
    "Problem": "kernelcast.kernels",
    "Selection": "kernelcast.runtime",
    "Selector": "kernelcast.runtime",
    "TensorSpec": "kernelcast.kernels.user",
    "attention": "kernelcast.runtime.dropins",
    "bmm": "kernelcast.runtime.dropins_matmul",
    "configure": "kernelcast.runtime.dispatch",
    "conv2d": "kernelcast.runtime.dropins",
    "device": "kernelcast.api",
    "explain": "kernelcast.api",
    "grouped_matmul": "kernelcast.runtime.dropins_matmul",
    "kernel": "kernelcast.kernels.user",
    "layer_norm": "kernelcast.runtime.dropins_norm",
    "matmul": "kernelcast.runtime.dropins",
    "mixed_matmul": "kernelcast.runtime.dropins_matmul",
    "plan": "kernelcast.runtime.plan",
    "problem": "kernelcast.api",
    "rms_norm": "kernelcast.runtime.dropins_norm",
    "run": "kernelcast.runtime.run",
    "select": "kernelcast.api",
    "softmax": "kernelcast.runtime.dropins",
    "warmup": "kernelcast.api",
}

#: Submodules that are public names: integrations with what they are called after.
_MODULES = ("fused_moe", "inductor", "triton")

__all__ = [
    "Candidate",
    "Device",
    "KernelcastError",
    "Problem",
    "Selection",
    "Selector",
    "TensorSpec",
    "attention",
    "bmm",
    "configure",
    "conv2d",
    "device",
    "explain",
    "fused_moe",
    "grouped_matmul",
    "inductor",
    "kernel",
    "layer_norm",
    "matmul",
    "mixed_matmul",
    "plan",
    "problem",
    "rms_norm",
    "run",
    "select",
    "softmax",
    "triton",
    "warmup",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"kernelcast.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
