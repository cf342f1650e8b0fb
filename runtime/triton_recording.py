"""``kernelcast.triton.record``: keep every timing that autotuned kernels take, without touching their code.

Triton tells a listener (``triton.knobs.autotuning.listener``, since 3.8) of each key that it has tuned. Where there is none
(older versions), and for the interpreter's kernels, of which Triton cannot tell a listener, the timing of each config
(``Autotuner._bench``) is watched instead.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from triton import knobs
from triton.runtime.autotuner import Autotuner

from kernelcast import settings
from kernelcast.errors import warn
from kernelcast.kernels import Device
from kernelcast.runtime import Selector
from kernelcast.runtime.dispatch import selector_for
from kernelcast.runtime.triton_autotune import TunedKernel
from kernelcast.runtime.triton_configs import candidates_of
from kernelcast.runtime.triton_key import (
    Call,
    Signature,
    kernel_of,
    operation_name,
    source_hash,
    variant_name,
)
from kernelcast.runtime.triton_records import Timing, measurement, protocol_of, send

#: Frames above a listener among which the autotuner that called it is looked for; other listeners may lie between.
_MOST_FRAMES = 12

_guard = threading.RLock()
_active: list[Recording] = []
_unwatched_bench = Autotuner._bench


class Recording:
    """Keeps timings from when it is made until :meth:`stop`, or the end of its ``with`` block.

    Attributes:
        count: records sent to the store so far.
    """

    def __init__(self, store: Path | None, workload: str) -> None:
        self.count = 0
        self._workload = workload
        self._store = store
        self._selectors: dict[Any, Selector] = {}
        self._sources: dict[int, tuple[Any, str]] = {}
        with _guard:
            _active.append(self)
            if len(_active) == 1:
                _install()

    def stop(self) -> None:
        """Keep no more. A second call does nothing."""
        with _guard:
            if self in _active:
                _active.remove(self)
                if not _active:
                    _remove()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _keep(self, tuner: Any, call: Call, timings: Mapping[Any, Timing]) -> None:
        """Send the timings of one key, each by its config."""
        selector = self._selector(call.device)
        device: Device = selector.device
        problem = call.problem(
            operation_name(tuner.fn), threads=torch.get_num_threads() if device.kind == "cpu" else 0
        )
        # All configs of the kernel, so that a config is written alike whichever are timed together.
        among = list(tuner.configs)
        among += [config for config in timings if not any(config is each for each in among)]
        found = {
            id(config): candidate
            for config, candidate in zip(among, candidates_of(among, variant_name(tuner.fn)), strict=True)
        }
        records = [
            measurement(
                problem,
                found[id(config)],
                timing,
                device,
                source=self._source(tuner),
                protocol=protocol_of(tuner),
                workload=self._workload,
            )
            for config, timing in timings.items()
        ]
        kept = [each for each in records if each is not None]
        send(selector, kept)
        self.count += len(kept)

    def _source(self, tuner: Any) -> str:
        known = self._sources.get(id(tuner))
        if known is None or known[0] is not tuner:
            known = self._sources[id(tuner)] = (tuner, source_hash(tuner.fn))
        return known[1]

    def _selector(self, where: Any) -> Selector:
        """Whose store the records go to."""
        where = where or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._store is None:
            return selector_for(where)
        if where not in self._selectors:
            self._selectors[where] = Selector(
                selector_for(where).device, store=self._store, cache=False, workload=self._workload
            )
        return self._selectors[where]


def record(store: str | Path | None = None, *, workload: str = "triton") -> Recording:
    """Keep every timing of autotuned kernels, from now on, in the store.

    ``with kernelcast.triton.record(): ...`` ends with its block, ``recording = kernelcast.triton.record()`` with
    ``recording.stop()``. A listener that is there already keeps being called. Kernels of
    :func:`kernelcast.triton.autotune` record themselves and are passed over, and so are keys that Triton's own disk cache
    answers: nothing is timed then. With ``KERNELCAST_DISABLE=1`` nothing is kept.

    Args:
        store: folder of the store; that of ``kernelcast.configure`` or the home's where None.
        workload: written into the records.
    """
    return Recording(None if store is None else Path(store), workload)


class _Listener:
    """What Triton calls; passes on to the listener that was there before."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, **told: Any) -> None:
        try:
            # One that another listener was put over cannot be taken out: it only passes on.
            if self is _listener and not told.get("cache_hit"):
                _heard(told)
        finally:
            if self.before is not None:
                self.before(**told)


_listener: _Listener | None = None


def _has_listener() -> bool:
    return hasattr(knobs.autotuning, "listener") and not knobs.runtime.interpret


def _install() -> None:
    global _listener
    if _has_listener():
        _listener = knobs.autotuning.listener = _Listener(knobs.autotuning.listener)
    else:
        Autotuner._bench = _watched_bench


def _remove() -> None:
    global _listener
    if _listener is not None and knobs.autotuning.listener is _listener:
        knobs.autotuning.listener = _listener.before
    _listener = None
    if Autotuner._bench is _watched_bench:
        Autotuner._bench = _unwatched_bench


@functools.wraps(_unwatched_bench)
def _watched_bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
    result = _unwatched_bench(self, *args, config=config, **meta)
    if not isinstance(self, TunedKernel):
        _told(self, args, meta, {config: result})
    return result


def _heard(told: Mapping[str, Any]) -> None:
    """Keep what a listener was told. The names of the key's values are known to the autotuner that called alone."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        tuner = frame.f_locals.get("self")
        if isinstance(tuner, Autotuner):
            if not isinstance(tuner, TunedKernel):
                given = {**(getattr(tuner, "nargs", None) or {}), **frame.f_locals.get("kwargs", {})}
                _told(tuner, (), given, told["configs_timings"])
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def _told(tuner: Any, args: Sequence[Any], given: Mapping[str, Any], results: Mapping[Any, Any]) -> None:
    """Give the timings of one key to every recording. Whatever goes wrong here costs the records, not the kernel."""
    try:
        if not _active or settings.disabled():
            return
        call = Signature(tuner.arg_names, tuner.keys, kernel_of(tuner.fn)).describe(args, given)
        timings = {config: Timing.of(result) for config, result in results.items()}
        with _guard:
            for recording in list(_active):
                recording._keep(tuner, call, timings)
    except Exception as error:  # noqa: BLE001 - a kernel must not fail for what is kept of it
        warn(f"The timings of a kernel are not kept ({type(error).__name__}: {error}).")
