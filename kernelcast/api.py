"""The functions behind ``kernelcast.select`` and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kernelcast import kernels
from kernelcast.kernels import Device, Problem
from kernelcast.kernels.detect import check_threads, default_threads, detect
from kernelcast.kernels.devices import device as named_device
from kernelcast.runtime import Selection, Selector

if TYPE_CHECKING:
    from kernelcast.runtime.explain import Explanation


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


def select(
    operation: str, *, mode: str | None = None, expected_calls: float | None = None, **values: Any
) -> Selection:
    """Select a candidate for a problem on this machine's device.

    Args:
        operation: such as ``"gemm"``.
        mode: ``off``, ``cached``, ``predict``, ``verify`` or ``tune``; the configured mode where None.
        expected_calls: how often the problem will be called: a verification that cannot pay back is not started.
        values: dimensions, ``dtype`` and options of the problem.

    Raises:
        UnknownNameError: no such operation.
        InvalidProblemError: an unknown, missing or impossible value.
    """
    selector = _selector()
    # The types too: True equals 1 to Python, and is no size.
    key = (operation, *values.items(), *map(type, values.values()), _threads())
    try:
        described = _problems.get(key)
    except TypeError:  # a value that has no hash is none of a problem's
        described = None
    if described is None:
        described = problem(operation, **values)
        if len(_problems) >= _MOST_PROBLEMS:
            _problems.clear()
        _problems[key] = described
    if mode is None and expected_calls is None:
        return selector.select(described)
    return selector.select(described, mode=mode, expected_calls=expected_calls)


def warmup(problems: Iterable[Problem]) -> list[Selection]:
    """Select for problems ahead of time, so that later calls on them compile and measure nothing."""
    return _selector().warmup(problems)


def explain(selection: Selection, *, rivals: int = 4) -> Explanation:
    """Why a selection of this machine's device is as it is: what the model saw, and why the runners-up lost.

    Args:
        selection: what :func:`select` gave.
        rivals: how many others of the ranking to explain.
    """
    return _selector().explain(selection, rivals=rivals)


#: What :func:`select` was asked, with the thread count then -> the problem: building one takes ten times as long.
_problems: dict[tuple[Any, ...], Problem] = {}
_MOST_PROBLEMS = 100_000


def _selector() -> Selector:
    """The selector behind the functions of this module, which :func:`kernelcast.configure` replaces."""
    global _selectors, _where, _threads
    found = _selectors.get(_where)
    if found is None:
        import torch

        from kernelcast.runtime import dispatch

        on_cpu = _here().kind == "cpu"
        _threads = torch.get_num_threads if on_cpu else _no_threads
        _where = torch.device("cpu" if on_cpu else "cuda")
        _selectors = dispatch.selectors
        found = dispatch.selector_for(_where)
    return found


def _no_threads() -> int:
    return 0


# Filled at the first selection: importing this module imports no torch.
_selectors: dict[Any, Selector] = {}
_where: Any = None
_threads: Callable[[], int] = _no_threads


@lru_cache(maxsize=1)
def _here() -> Device:
    """This machine's device, detected once: reading its facts takes milliseconds."""
    return detect()
