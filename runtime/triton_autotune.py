"""``kernelcast.triton.autotune``: Triton's autotuner, but for which configs it times and what it remembers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from kernelcast import settings
from kernelcast.errors import KernelcastError, SettingsError, warn
from kernelcast.runtime import Selector
from kernelcast.runtime import dispatch as drop_ins
from kernelcast.runtime.triton_choice import Choice
from kernelcast.runtime.triton_configs import MeasuredKey, config_key
from kernelcast.runtime.triton_key import (
    Call,
    Signature,
    kernel_of,
    operation_name,
    variant_name,
)
from kernelcast.runtime.triton_ranking import ConfigOrder

#: What a config may fail with, at its timing or its first launch, without ending the program: as Triton has it.
_FAILURES = ("OutOfResources", "CompileTimeAssertionFailure", "PTXASError")

_environment = settings.raw_environment
_MODE = b"KERNELCAST_MODE"

#: One thread tunes at a time: tunings would disturb each other's clocks, and Triton's autotuner keeps a call's arguments in
#: itself.
_tuning = threading.RLock()


def _after_fork() -> None:
    """A lock that another thread of the parent held stays locked in the child."""
    global _tuning
    _tuning = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class TunedKernel(Autotuner):
    """What :func:`autotune` makes of a kernel: one of Triton's autotuners, with the same attributes.

    The keys of :attr:`cache` begin as Triton's do, and go on with what the compiler specialises on and the device.

    Attributes:
        ranked: how the configs of the latest key that was not remembered were ranked; None before.
    """

    #: The arguments of the call that is being tuned, by name; None between tunings.
    nargs: Any

    def __init__(
        self,
        fn: Any,
        configs: Any,
        key: Any,
        *,
        top_k: int,
        mode: str | None,
        rounding: Mapping[str, Callable[[Any], Any]],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(fn, fn.arg_names, configs, key, **options)
        self.top_k = top_k
        self.ranked: ConfigOrder | None = None
        self._mode = mode
        self._kernel = kernel_of(fn)
        self._rounding = dict(rounding)
        self._signature = Signature(self.arg_names, self.keys, self._kernel, self._rounding)
        self._operation = operation_name(fn)
        self._variant = variant_name(fn)
        self._source = ""
        self._selectors: dict[Any, Selector] = {}
        self._chosen_under = _environment.get(_MODE)
        self._environments: dict[Any, tuple[str, ...]] = {}
        self._measured: dict[Any, deque[MeasuredKey]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel with the config of its key, which is chosen first where it is not remembered.

        What kernelcast cannot describe, such as a device that it does not know, is tuned by Triton alone, with a warning; so is
        everything while ``KERNELCAST_MODE`` is none.
        """
        if len(self.configs) <= 1 or settings.disabled():
            return super().run(*args, **kwargs)
        key = self._signature.key(args, kwargs)
        config = self.cache.get(key)
        where = key[-1] or _current_device()
        # `configure` makes new selectors, and the mode may change: what was chosen before is forgotten.
        if (
            config is None
            or drop_ins.selectors.get(where) is not self._selectors.get(where)
            or _environment.get(_MODE) != self._chosen_under
        ):
            return self._first(key, where, args, kwargs)
        return self._launch(config, args, kwargs)

    def _launch(self, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.best_config = config
        options = config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **options})
        return self.fn.run(*args, **kwargs, **options)

    def _first(
        self, key: tuple[Any, ...], where: torch.device, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Choose for a key, and launch; a choice that cannot be launched is forgotten, and another one made."""
        call = self._signature.describe(args, kwargs)
        failed: list[str] = []
        latest: Exception | None = None
        while True:
            with _tuning:
                try:
                    config = self._chosen(key, where, call, args, kwargs, failed)
                except KernelcastError as error:
                    warn(f"{error} Triton alone tunes {self._operation}.", drop_ins.LaunchWarning)
                    return super().run(*args, **kwargs)
            if config is None:
                assert latest is not None
                raise latest
            try:
                return self._launch(config, args, kwargs)
            except Exception as error:
                if type(error).__name__ not in _FAILURES or config_key(config) in failed:
                    raise
                latest = error
                failed.append(config_key(config))
                self.cache.pop(key, None)

    def _chosen(
        self,
        key: tuple[Any, ...],
        where: torch.device,
        call: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        failed: list[str],
    ) -> Any:
        """The config of a key; None if all have failed."""
        selector = self._selector_of(where)
        config = self.cache.get(key)  # another thread may have been first
        if config is not None and config_key(config) not in failed:
            return config
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            choice = Choice(self, selector, call, where, kwargs, args, failed)
            return choice.config(key) if choice.configs else None
        finally:
            self.nargs = None

    def _selector_of(self, where: torch.device) -> Selector:
        """The selector of the device that a call's tensors are on; its options are those of ``configure``."""
        selector, mode = drop_ins.selector_for(where), _environment.get(_MODE)
        if self._selectors.get(where, selector) is not selector or mode != self._chosen_under:
            self.cache.clear()
        self._selectors[where] = selector
        self._chosen_under = mode
        return selector

    @contextlib.contextmanager
    def _observed(self, seen: list[BaseException]) -> Iterator[None]:
        """Keep what a benchmark raises, of which Triton's own ``_bench`` says no more than that there was something."""
        bench = self.do_bench

        def observed(*args: Any, **options: Any) -> Any:
            try:
                return bench(*args, **options)
            except Exception as error:
                seen.append(error)
                raise

        self.__dict__["do_bench"] = observed
        try:
            yield
        finally:
            self.__dict__["do_bench"] = bench


def _current_device() -> torch.device:
    """Where a kernel without tensors runs."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Iterable[str] | None = None,
    restore_value: Iterable[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    top_k: int = 3,
    mode: str | None = None,
    round_key: Mapping[str, Callable[[Any], Any]] | None = None,
    **more: Any,
) -> Callable[[Any], TunedKernel]:
    """``triton.autotune`` that times a few configs of each key instead of all, and remembers the choice on disk.

    All arguments but the last three are Triton's own, with its meanings. Configs are ranked by a model that was trained on this
    kernel's records, by the kernel's own ``perf_model``, by what was measured for the nearest keys, or, where nothing is known,
    so that they spread over the space; the first ``top_k`` and the config that is declared first are timed. The mode decides as
    for the drop-ins: ``off`` runs the config declared first, ``cached`` what is remembered or else that one, ``predict`` the
    first of the ranking, ``verify`` times, ``tune`` times all. ``KERNELCAST_DISABLE=1`` makes it Triton's own.

    Args:
        configs: of class ``triton.Config``.
        key: names of the arguments whose values decide which config is fastest.
        top_k: how many of the ranking to time.
        mode: that of ``kernelcast.configure`` or ``KERNELCAST_MODE`` where None.
        round_key: name of a key argument -> a function that makes one value of several, such as ``triton.next_power_of_2``.
            Calls whose rounded keys are equal share a choice, which the first of them makes.
        more: arguments of a newer Triton.

    Raises:
        SettingsError: ``top_k`` is below 1, the mode is unknown, or ``round_key`` names what is not in the key.
    """
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise SettingsError(f"top_k is {top_k!r}; it must be an integer of at least 1.")
    if mode is not None and mode not in settings.MODES:
        raise SettingsError(f"The mode is {mode!r}; it must be one of {', '.join(settings.MODES)}.")
    foreign = sorted(set(round_key or {}) - set(key))
    if foreign:
        raise SettingsError(
            f"round_key names {', '.join(foreign)}; the key has: {', '.join(key) or 'nothing'}."
        )
    options: dict[str, Any] = {
        "reset_to_zero": reset_to_zero,
        "restore_value": restore_value,
        "pre_hook": pre_hook,
        "post_hook": post_hook,
        "prune_configs_by": prune_configs_by,
        "warmup": warmup,
        "rep": rep,
        "use_cuda_graph": use_cuda_graph,
        "do_bench": do_bench,
        "cache_results": cache_results,
        **more,
    }

    def decorate(fn: Any) -> TunedKernel:
        return TunedKernel(
            fn, configs, key, top_k=top_k, mode=mode, rounding=round_key or {}, options=options
        )

    return decorate
