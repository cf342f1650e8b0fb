"""The functions behind ``kernelcast.select`` and its neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from kernelcast import kernels
from kernelcast.kernels import Device, Problem
from kernelcast.kernels.detect import check_threads, default_threads, detect
from kernelcast.kernels.devices import device as named_device
from kernelcast.runtime import Selection


def device(name: str | None = None) -> Device:
    """The hardware facts of a device by name, or of this machine's.

    Raises:
        UnknownNameError: no device of that name; the message lists those there are.
    """
    return _here() if name is None else named_device(name)


def problem(operation: str, **values: Any) -> Problem:
    """A problem from dimensions, dtype and options by name.

    On a machine without a GPU ``threads`` defaults to the CPU threads that torch uses.

    Raises:
        UnknownNameError: no such operation.
        InvalidProblemError: an unknown, missing or impossible value.
    """
    if "threads" not in values and _here().kind == "cpu":
        values["threads"] = default_threads()
    if "threads" in values:
        check_threads(values["threads"], _here())
    return kernels.problem(operation, **values)


def select(operation: str, *, mode: str | None = None, **values: Any) -> Selection:
    """Select a candidate for a problem on this machine's device.

    Args:
        operation: such as ``"gemm"``.
        mode: ``off``, ``cached``, ``predict``, ``verify`` or ``tune``; the configured mode where None.
        values: dimensions, ``dtype`` and options of the problem.

    Raises:
        UnknownNameError: no such operation.
        InvalidProblemError: an unknown, missing or impossible value.
    """
    return _selector().select(problem(operation, **values), mode=mode)


def warmup(problems: Iterable[Problem]) -> list[Selection]:
    """Select for problems ahead of time, so that later calls on them compile and measure nothing."""
    return _selector().warmup(problems)


def _selector() -> Any:
    import torch

    from kernelcast.runtime.dispatch import selector_for

    return selector_for(torch.device("cuda" if _here().kind == "gpu" else "cpu"))


@lru_cache(maxsize=1)
def _here() -> Device:
    """This machine's device, detected once: reading its facts takes milliseconds."""
    return detect()
