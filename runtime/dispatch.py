"""What every drop-in does with a call: may the catalogue run it, which launcher was it, and what when that fails.

The choice depends on shapes, dtypes, strides, the device and torch's switches, never on values.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from kernelcast import settings
from kernelcast.datasets.timing import tf32_allowed
from kernelcast.errors import InvalidProblemError, SettingsError, warn
from kernelcast.kernels import Candidate, Problem, operation, variant
from kernelcast.kernels.detect import detect
from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.registry import on_change
from kernelcast.runtime.selector import Selector

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

#: What is remembered is dropped beyond this many keys: a server of ever new lengths must not grow without end.
_MOST_KEYS = 100_000

# Looked up once: a drop-in asks for all of these at every call. What an older torch lacks is asked for in its other way.
is_compiling = torch.compiler.is_compiling
is_grad_enabled = torch.is_grad_enabled
are_deterministic = torch.are_deterministic_algorithms_enabled
transforms_active = torch._C._are_functorch_transforms_active
is_tracing = torch._C._is_tracing
disabled = settings.disabled
get_num_threads = torch.get_num_threads
Tensor, Parameter, strided = torch.Tensor, torch.nn.Parameter, torch.strided


def _autocast_of_cpu_or_cuda() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _autocast_of_cpu_or_cuda)

launchers: dict[tuple[Any, ...], Launcher] = {}
#: Of the keys that do not run torch's own: what to do when that fails.
rescues: dict[tuple[Any, ...], Rescue] = {}
selectors: dict[torch.device, Selector] = {}
#: Problems whose selection may change behind the drop-ins, with the keys that they were resolved for.
_watching: dict[Problem, set[tuple[Any, ...]]] = {}
_guard = threading.RLock()
_configured: dict[str, Any] = {}
#: Settings that cannot be used and were warned of.
_warned_of: set[str] = set()


def _after_fork() -> None:
    """A forked child starts with selectors of its own: locks that another thread of its parent held stay locked."""
    global _guard
    _guard = threading.RLock()
    selectors.clear()


os.register_at_fork(after_in_child=_after_fork)


class Rescue(NamedTuple):
    """Whom to tell of a candidate that failed, for which problem, and torch's own."""

    selector: Selector
    problem: Problem
    candidate: Candidate
    own: Launcher


class LaunchWarning(UserWarning):
    """A selected candidate failed, or none could be selected; torch's own operator ran instead."""


def configure(**options: Any) -> None:
    """Set the options of the selectors behind :func:`select` and the drop-ins: those of :class:`Selector` but ``device``.

    Options that are not named get their defaults back. What was selected before in this process is forgotten, in memory
    only.

    Raises:
        SettingsError: there is no such option, or it has a value that cannot be used.
    """
    if "device" in options:
        raise SettingsError(
            "configure takes no device: each tensor's own is used. Build a Selector for another one."
        )
    known = [name for name in inspect.signature(Selector).parameters if name != "device"]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise SettingsError(f"configure has no option {unknown[0]!r}; it has {', '.join(known)}.")
    with _guard:
        Selector(**options)  # refuses bad values now, not at the first call
        _configured.clear()
        _configured.update(options)
        selectors.clear()
        _clear_launchers()


def _clear_launchers(_operation: str = "") -> None:
    launchers.clear()
    rescues.clear()
    _watching.clear()


# A new variant may be faster than what was selected without it.
on_change(_clear_launchers)


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
            made = Selector(hardware, **_configured)
            found = selectors.setdefault(device, made)
            if found is made:
                made.listen(_dropped)
    return found


def eligible(*tensors: torch.Tensor) -> bool:
    """Whether the catalogue may run these, so far as a key does not tell: :func:`plain` ones of one dtype."""
    if not plain(*tensors):
        return False
    dtype = tensors[0].dtype
    for tensor in tensors:  # noqa: SIM110 - a generator takes three times as long
        if tensor.dtype is not dtype:
            return False
    return True


def pair_at(a: torch.Tensor, b: torch.Tensor) -> object:
    """:func:`place` of two eligible tensors; None where they are not :func:`eligible`.

    In half the time that these two take: a small product is as short as the questions that it is asked.
    """
    if is_compiling() or disturbed():
        return None
    kind, other = type(a), type(b)
    if (
        (kind is not Tensor and kind is not Parameter)
        or (other is not Tensor and other is not Parameter)
        or a.layout is not strided
        or b.layout is not strided
        or a.is_nested
        or b.is_nested
        or a.dtype is not b.dtype
        or ((a.requires_grad or b.requires_grad) and is_grad_enabled())
    ):
        return None
    if a.is_cpu:
        return get_num_threads() if b.is_cpu else None
    return place(a) if a.device == b.device else None


def plain(*tensors: torch.Tensor) -> bool:
    """Whether these are dense tensors of one device, without gradient or anything that torch does on the side.

    What a key of shapes, dtype and device implies is not asked here but by :func:`resolve`, once for each key.
    """
    # First, so that a compiler or tracer that follows this function follows no further.
    if is_compiling() or disturbed():
        return False
    device = None
    needs_grad = is_grad_enabled()
    for tensor in tensors:
        kind = type(tensor)
        if (
            (kind is not Tensor and kind is not Parameter)
            or tensor.layout is not strided
            or tensor.is_nested
            or (needs_grad and tensor.requires_grad)
        ):
            return False
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            return False
    return True


def disturbed() -> bool:
    """Whether torch does something on the side of every call, or the kill switch is on."""
    return (
        is_tracing()
        or any_autocast()
        or are_deterministic()
        # torch.func's transforms hand in tensors that look plain; dual tensors of forward-mode need no grad.
        or transforms_active()
        or forward_ad._current_level >= 0
        or disabled()
    )


def place(tensor: torch.Tensor) -> object:
    """What of a key is not in shapes, strides and dtypes: the CPU's threads, or else the device with its use of TF32."""
    if tensor.is_cpu:
        return get_num_threads()
    # Only products of float32 are rounded to TF32.
    rounded = tensor.dtype is torch.float32 and tensor.is_cuda
    return (tensor.device, tf32_allowed("matmul"), tf32_allowed("conv")) if rounded else tensor.device


def resolve(
    key: tuple[Any, ...],
    tensors: tuple[torch.Tensor, ...],
    own: Launcher,
    describe: Callable[[], Problem | None],
    adapt: Callable[[Launcher], Launcher] | None = None,
) -> Launcher:
    """Select for a key that was not seen in this process, and remember how to launch it.

    Args:
        key: every fact that the choice depends on.
        tensors: of the call; the first one's device is selected for.
        own: torch's operator.
        describe: gives the problem; None where the catalogue cannot describe it.
        adapt: makes what the drop-in calls of a candidate's launcher.
    """
    sample = tensors[0]
    if sample.device.type not in ("cpu", "cuda") or not all(tensor.numel() for tensor in tensors):
        return _remember(key, own)
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
    try:
        selector = selector_for(sample.device)
        selection = selector.select(described)
    except SettingsError as error:
        # A mistyped variable of the environment concerns every call: said once, not for each problem.
        if str(error) not in _warned_of:
            _warned_of.add(str(error))
            warn(f"{error} Until then torch's own runs.", LaunchWarning)
        return _remember(key, own)
    except Exception as error:  # noqa: BLE001 - a drop-in must not end what torch's own would not
        _warn(f"No candidate of {described} could be selected", error)
        return _remember(key, own)
    if selector.pending(described):
        return _for_now(key, own, selector, described)
    if selection.candidate == operation(described.operation).default:
        return _remember(key, _watched(own, key, selector, described))
    try:
        found = variant(described.operation, selection.candidate.variant)
        launch = found.build(described, selection.candidate.parameters)
    except Exception as error:  # noqa: BLE001 - see rescue
        _warn(f"The selected candidate of {described} cannot be built", error)
        return own if selector.reject(described, selection.candidate) else _remember(key, own)
    if adapt is not None:
        launch = adapt(launch)
    if sample.is_cuda:
        launch = _unless_negated(launch, own)
    rescue = Rescue(selector, described, selection.candidate, own)
    return _remember(key, _watched(launch, key, selector, described), rescue)


def _for_now(key: tuple[Any, ...], own: Launcher, selector: Selector, described: Problem) -> Launcher:
    """Torch's own, until the verification that goes on in the background is done."""
    with _guard:
        _watching.setdefault(described, set()).add(key)
    launch = _remember(key, own)
    if not selector.pending(described):  # it was done before anyone listened
        _dropped(described)
    return launch


def _watched(launch: Launcher, key: tuple[Any, ...], selector: Selector, described: Problem) -> Launcher:
    """A launcher that has its selection measured again after every so many calls, where that was asked for."""
    every = selector.drift_every
    if not every:
        return launch
    with _guard:
        _watching.setdefault(described, set()).add(key)
    calls = itertools.count(1)

    def counted(*arguments: Any) -> torch.Tensor:
        if next(calls) % every == 0:
            selector.recheck(described)
        return launch(*arguments)

    return counted


def _unless_negated(launch: Launcher, own: Launcher) -> Launcher:
    """A launcher that leaves views with a pending negation, which a kernel would not see, to torch."""

    def checked(*arguments: Any) -> torch.Tensor:
        for each in arguments:
            if isinstance(each, torch.Tensor) and each.is_neg():
                return own(*arguments)
        return launch(*arguments)

    return checked


def _dropped(described: Problem) -> None:
    """Have the keys of a problem resolved anew: its selection has changed."""
    with _guard:
        for key in _watching.pop(described, ()):
            launchers.pop(key, None)
            rescues.pop(key, None)


def _remember(key: tuple[Any, ...], launch: Launcher, rescue: Rescue | None = None) -> Launcher:
    """Keep a launcher, and what to do when it fails, unless another thread was first. Returns the one that is kept."""
    with _guard:
        if len(launchers) >= _MOST_KEYS:
            launchers.clear()
            rescues.clear()
        if key not in launchers and rescue is not None:
            rescues[key] = rescue
        return launchers.setdefault(key, launch)


def rescue(key: tuple[Any, ...], failed: Launcher, error: Exception) -> Launcher:
    """What to run instead of a candidate that failed: torch's own. An error of torch's own is passed on.

    The candidate is rejected: the next call of the key selects among the others, as long as the selector sees sense in it.
    """
    found = rescues.get(key)
    if found is None or failed is found.own:
        raise error
    with _guard:  # several threads may have failed with it
        first = launchers.get(key) is failed
        launchers[key] = found.own
    if first:
        _warn(f"The selected candidate of {found.problem} failed", error)
        if found.selector.reject(found.problem, found.candidate):
            with _guard:
                launchers.pop(key, None)
                rescues.pop(key, None)
    return found.own


def _warn(what: str, error: Exception) -> None:
    warn(f"{what} ({type(error).__name__}: {error}); torch's own runs instead.", LaunchWarning)
