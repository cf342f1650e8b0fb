"""What every drop-in does with a call: may the catalogue run it, which launcher was it, and what when that fails.

The choice depends on shapes, dtypes, strides, the device and torch's switches, never on values.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from kernelcast import settings
from kernelcast.datasets.timing import tf32_allowed
from kernelcast.errors import InvalidProblemError, SettingsError
from kernelcast.kernels import Problem, operation, variant
from kernelcast.kernels.detect import detect
from kernelcast.kernels.operation import Launcher
from kernelcast.runtime.selector import Selector

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: What is remembered is dropped beyond this many keys: a server of ever new lengths must not grow without end.
_MOST_KEYS = 100_000

launchers: dict[tuple[Any, ...], Launcher] = {}
#: Of the keys that do not run torch's own: whom to tell, of what, and torch's own.
rescues: dict[tuple[Any, ...], tuple[Selector, Problem, Launcher]] = {}
selectors: dict[torch.device, Selector] = {}
_guard = threading.RLock()
_configured: dict[str, Any] = {}


def _after_fork() -> None:
    """A forked child starts with selectors of its own: locks that another thread of its parent held stay locked."""
    global _guard
    _guard = threading.RLock()
    selectors.clear()


os.register_at_fork(after_in_child=_after_fork)


class LaunchWarning(UserWarning):
    """A selected candidate failed, or none could be selected; torch's own operator ran instead."""


def configure(**options: Any) -> None:
    """Set the options of the selectors behind :func:`select` and the drop-ins: those of :class:`Selector` but ``device``.

    Options that are not named get their defaults back. What was selected before in this process is forgotten, in memory
    only.

    Raises:
        SettingsError: an option has a value that cannot be used.
    """
    if "device" in options:
        raise SettingsError(
            "configure takes no device: each tensor's own is used. Build a Selector for another one."
        )
    with _guard:
        Selector(**options)  # refuses bad values now, not at the first call
        _configured.clear()
        _configured.update(options)
        selectors.clear()
        launchers.clear()
        rescues.clear()


def selector_for(device: torch.device) -> Selector:
    """The selector of a torch device; each device of a machine has its own."""
    found = selectors.get(device)
    if found is None:
        with _guard:
            if device.type == "cpu":
                hardware = detect("cpu")
            else:
                hardware = detect(
                    "gpu", device.index if device.index is not None else torch.cuda.current_device()
                )
            found = selectors.setdefault(device, Selector(hardware, **_configured))
    return found


def eligible(*tensors: torch.Tensor) -> bool:
    """Whether the catalogue may run these at all: :func:`plain` ones of one dtype that it knows."""
    if not plain(*tensors):
        return False
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:
            return False
    return dtype in DTYPES


def plain(*tensors: torch.Tensor) -> bool:
    """Whether these are dense tensors of one device, without gradient or anything that torch does on the side."""
    # First, so that a compiler or tracer that follows this function follows no further.
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    first = tensors[0]
    needs_grad = torch.is_grad_enabled()
    for tensor in tensors:
        if (
            type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.device != first.device
            or (needs_grad and tensor.requires_grad)
            or not tensor.numel()
            or tensor.is_neg()
        ):
            return False
    if first.device.type not in ("cpu", "cuda"):
        return False
    return not (
        torch.is_autocast_enabled(first.device.type)
        or torch.are_deterministic_algorithms_enabled()
        # torch.func's transforms hand in tensors that look plain; dual tensors of forward-mode need no grad.
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or settings.disabled()
    )


def switches(tensor: torch.Tensor) -> object:
    """Facts of the process that can change the winner: TF32 on a GPU, threads on a CPU."""
    if tensor.device.type == "cpu":
        return torch.get_num_threads()
    return (tf32_allowed("matmul"), tf32_allowed("conv"))


def resolve(
    key: tuple[Any, ...],
    sample: torch.Tensor,
    own: Launcher,
    describe: Callable[[], Problem | None],
    adapt: Callable[[Launcher], Launcher] | None = None,
) -> Launcher:
    """Select for a key that was not seen in this process, and remember how to launch it.

    Args:
        key: every fact that the choice depends on.
        sample: a tensor of the call, for its device.
        own: torch's operator.
        describe: gives the problem; None where the catalogue cannot describe it.
        adapt: makes what the drop-in calls of a candidate's launcher.
    """
    if sample.is_cuda and torch.cuda.is_current_stream_capturing():
        # A first launch may load code, which breaks the capture. Nothing is remembered: the next call may select.
        return own
    try:
        described = describe()
    except InvalidProblemError:
        # What the catalogue cannot describe (wrong sizes) is torch's to run, or to refuse.
        described = None
    if described is None:
        return _remember(key, own)
    selector = selector_for(sample.device)
    try:
        selection = selector.select(described)
    except SettingsError:
        raise
    except Exception as error:  # noqa: BLE001 - a drop-in must not end what torch's own would not
        _warn(f"No candidate of {described} could be selected", error)
        return _remember(key, own)
    if selection.candidate == operation(described.operation).default:
        return _remember(key, own)
    try:
        found = variant(described.operation, selection.candidate.variant)
        launch = found.build(described, selection.candidate.parameters)
    except Exception as error:  # noqa: BLE001 - see rescue
        _warn(f"The selected candidate of {described} cannot be built", error)
        selector.forget(described)
        return _remember(key, own)
    return _remember(key, launch if adapt is None else adapt(launch), (selector, described, own))


def _remember(
    key: tuple[Any, ...], launch: Launcher, rescue: tuple[Selector, Problem, Launcher] | None = None
) -> Launcher:
    """Keep a launcher, and what to do when it fails, unless another thread was first. Returns the one that is kept."""
    with _guard:
        if len(launchers) >= _MOST_KEYS:
            launchers.clear()
            rescues.clear()
        if key not in launchers and rescue is not None:
            rescues[key] = rescue
        return launchers.setdefault(key, launch)


def rescue(key: tuple[Any, ...], failed: Launcher, error: Exception) -> Launcher:
    """What to run instead of a candidate that failed: torch's own, from now on. An error of torch's own is passed on."""
    found = rescues.get(key)
    if found is None or failed is found[2]:
        raise error
    selector, described, own = found
    with _guard:  # several threads may have failed with it
        first = launchers.get(key) is failed
        launchers[key] = own
    if first:
        selector.forget(described)
        _warn(f"The selected candidate of {described} failed", error)
    return own


def _warn(what: str, error: Exception) -> None:
    warnings.warn(
        f"{what} ({type(error).__name__}: {error}); torch's own runs instead.", LaunchWarning, stacklevel=4
    )
