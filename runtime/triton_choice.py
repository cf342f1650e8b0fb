"""Choosing the config of one key of a tuned kernel: what is remembered, or the fastest of the few that are timed."""

from __future__ import annotations

import builtins
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from kernelcast.kernels import Candidate, Problem
from kernelcast.runtime import Selector
from kernelcast.runtime.triton_configs import MeasuredKey, candidates_of, config_key
from kernelcast.runtime.triton_key import Call, TunedKey, environment_of, source_hash
from kernelcast.runtime.triton_memory import Entry, Timings, TunedMemory
from kernelcast.runtime.triton_ranking import ConfigOrder, rank
from kernelcast.runtime.triton_records import Timing, measurement, protocol_of, send

if TYPE_CHECKING:
    from kernelcast.runtime.triton_autotune import TunedKernel

#: Configs whose medians are this close are a tie, which the fixed order decides: Triton's benchmark gives medians, whose
#: repetitions on an idle card differ by about a hundredth.
TIE = 0.01

#: Keys whose timings are kept for the ranking by the nearest: a server of ever new lengths must not grow without end.
_MOST_MEASURED = 1000


#: The choice of an entry whose timings are not complete.
_UNDECIDED = ""


class Choice:
    """One choice of a config for one key. Lives for one call, under the lock."""

    def __init__(
        self,
        tuner: TunedKernel,
        selector: Selector,
        call: Call,
        where: torch.device,
        kwargs: Mapping[str, Any],
        args: Sequence[Any],
        failed: list[str],
    ) -> None:
        self.tuner = tuner
        self.selector = selector
        self.call = call
        self.where = where
        self.args = args
        self.kwargs = dict(kwargs)
        self.device = selector.device
        self.mode = tuner._mode or selector.mode
        self.threads = torch.get_num_threads() if self.device.kind == "cpu" else 0
        self.problem: Problem = call.problem(tuner._operation, threads=self.threads)
        self.configs = [config for config in self._pruned() if config_key(config) not in failed]
        self.keys = [config_key(config) for config in self.configs]
        self.candidates: list[Candidate] = candidates_of(self.configs, tuner._variant)
        self.timings: dict[str, Timing] = {}
        self.new: list[str] = []
        self.failed = failed

    def config(self, key: tuple[Any, ...]) -> Any:
        """The config to run, kept in the tuner's memory unless nothing may be remembered now."""
        tuner = self.tuner
        # As Triton has it, a single config needs no timing.
        if len(self.configs) == 1 or self.mode == "off":
            return self._keep(key, self._default())
        memory, tuned_key, among = self._memory(), self._tuned_key(), self._among()
        wanted = 0 if self.mode == "tune" else tuner.top_k
        if self.failed:
            memory.evict(tuned_key)
        place = self._remembered(memory.get(tuned_key), among, wanted)
        if place is not None:
            return self._keep(key, place)
        if self.mode == "cached":
            return self._keep(key, self._default())
        if self._capturing():
            # A measurement would break the capture. What is not measured is not remembered: the next call may tune.
            return self.configs[self._rank().places[0]]
        if self.mode == "predict":
            return self._keep(key, self._rank().places[0])
        with memory.lock(tuned_key):
            entry = memory.get(tuned_key)  # another process may have been first
            place = self._remembered(entry, among, wanted)
            if place is not None:
                return self._keep(key, place)
            known = dict(entry.timings_ms) if entry is not None else {}

            def keep(choice: str) -> None:
                timed = {name: timing.ms for name, timing in self.timings.items()}
                memory.put(tuned_key, Entry(among, choice, wanted, {**known, **timed}))

            # After each timing, so that who is killed in the middle of many has not timed in vain.
            place = self._measure(known, on_timed=lambda: keep(_UNDECIDED))
            if place is None:
                # Nothing works: the launch says why, as Triton's would, and that is the end.
                self.failed.extend(self.keys)
                return self.configs[0]
            keep(self.keys[place])
        return self._keep(key, place)

    def _keep(self, key: tuple[Any, ...], place: int) -> Any:
        self.tuner.cache[key] = self.configs[place]
        return self.configs[place]

    def _pruned(self) -> list[Any]:
        """The configs that the kernel's own pruning leaves; older versions of Triton may round a share down to none."""
        return list(self.tuner.prune_configs(self.kwargs)) or self.tuner.configs[:1]

    def _among(self) -> str:
        """A hash of what is chosen among."""
        return hashlib.sha256("\n".join(sorted(self.keys)).encode()).hexdigest()[:16]

    def _memory(self) -> TunedMemory:
        folder = self.selector.cache.folder
        return TunedMemory(None if folder is None else folder / "triton")

    def _tuned_key(self) -> TunedKey:
        tuner = self.tuner
        if not tuner._source:
            tuner._source = source_hash(tuner.fn)
        if self.where not in tuner._environments:
            tuner._environments[self.where] = environment_of(self.device, tuner._kernel)
        return TunedKey(
            operation=tuner._operation,
            source=tuner._source,
            problem=self.call.rounded(tuner._rounding).problem(tuner._operation, threads=self.threads).key,
            device=self.device.fingerprint,
            environment=(*tuner._environments[self.where], str(protocol_of(tuner).dispatch)),
        )

    def _remembered(self, entry: Entry | None, among: str, wanted: int) -> int | None:
        """The place of the config that an entry names, if its choice stands here; what it measured serves the ranking of other keys."""
        if entry is None or not entry.answers(among, wanted) or entry.choice not in self.keys:
            return None
        self._learn({key: ms[0] for key, ms in entry.timings_ms.items() if ms})
        return self.keys.index(entry.choice)

    def _learn(self, latency: Mapping[str, float]) -> None:
        if latency:
            measured = self.tuner._measured.setdefault(self.where, deque(maxlen=_MOST_MEASURED))
            measured.append(MeasuredKey(self.problem, dict(latency)))

    def _capturing(self) -> bool:
        return self.device.kind == "gpu" and torch.cuda.is_current_stream_capturing()

    def _rank(self) -> ConfigOrder:
        tuner = self.tuner
        own = None
        if tuner.perf_model is not None:
            given = {**tuner.nargs, **self.kwargs}
            own = [tuner.perf_model(**given, **config.all_kwargs()) for config in self.configs]
        tuner.ranked = rank(
            self.configs,
            self.problem,
            self.device,
            variant=tuner._variant,
            model=self.selector.rankers.model(tuner._operation)[0],
            own=own,
            measured=tuner._measured.get(self.where, ()),
        )
        return tuner.ranked

    def _default(self) -> int:
        """The place of the first config as declared, of those that are left."""
        places = {id(config): place for place, config in enumerate(self.configs)}
        return next((places[id(config)] for config in self.tuner.configs if id(config) in places), 0)

    def _measure(self, known: Timings, *, on_timed: Callable[[], None]) -> int | None:
        """Time the first few of the ranking and the default; the place of the fastest. None if no config works at all.

        Where none of those works, the next few are timed, and so on: what runs under Triton runs here.
        """
        tuner, started = self.tuner, time.time()
        if self.mode == "tune":
            ahead = list(range(len(self.configs)))
            batch = len(ahead)
            tuner.ranked = None
        else:
            order, default = self._rank().places, self._default()
            batch = tuner.top_k if default in order[: tuner.top_k] else tuner.top_k + 1
            ahead = [default, *(place for place in order if place != default)]
        while ahead and not any(timing.ms for timing in self.timings.values()):
            for place in ahead[:batch]:
                self._time(place, known)
                on_timed()
            ahead = ahead[batch:]
        worked = {key: timing.ms for key, timing in self.timings.items() if timing.ms}
        if not worked:
            return None
        place = self.keys.index(self._fastest(worked))
        tuner.bench_time = time.time() - started
        tuner.configs_timings = {
            self.configs[self.keys.index(key)]: list(timing.ms) or [float("inf")] * 3
            for key, timing in self.timings.items()
        }
        if self.new:
            # As Triton does after timing, so that the launch begins as the first one would have.
            given = {**tuner.nargs, **self.kwargs, **self.configs[place].all_kwargs()}
            tuner.pre_hook(given, reset_only=True)
        self._learn({key: ms[0] for key, ms in worked.items()})
        self._tell(self.configs[place])
        return place

    def _time(self, place: int, known: Timings) -> None:
        """Time one config and send the record, unless it was timed before in the same environment."""
        key, config = self.keys[place], self.configs[place]
        if known.get(key):
            self.timings[key] = Timing(known[key])
            return
        self.new.append(key)
        seen: list[BaseException] = []
        try:
            with self.tuner._observed(seen):
                result = self.tuner._bench(*self.args, config=config, **self.kwargs)
        except Exception as error:
            self._record(place, Timing.of(float("inf"), error))
            raise
        self.timings[key] = Timing.of(result, seen[-1] if seen else None)
        self._record(place, self.timings[key])

    def _fastest(self, worked: Mapping[str, tuple[float, ...]]) -> str:
        if self.mode == "tune":
            return builtins.min(worked, key=lambda key: worked[key])
        limit = min(ms[0] for ms in worked.values()) * (1.0 + TIE)
        # In the order in which they were timed: the default first, then as ranked.
        return next(key for key, ms in worked.items() if ms[0] <= limit)

    def _record(self, place: int, timing: Timing) -> None:
        """Send a new timing to the store."""
        record = measurement(
            self.problem,
            self.candidates[place],
            timing,
            self.device,
            source=self.tuner._source,
            protocol=protocol_of(self.tuner),
            workload=self.selector.measurer.workload,
        )
        send(self.selector, [record])

    def _tell(self, chosen: Any) -> None:
        """Say what Triton's autotuner says: to its listener, and to whoever set TRITON_PRINT_AUTOTUNING."""
        tuner = self.tuner
        listener = getattr(knobs.autotuning, "listener", None)
        if listener is not None and isinstance(tuner._kernel, JITFunction):
            listener(
                fn=tuner._kernel,
                key=tuple(value for _, value in self.call.values) + self.call.dtypes,
                best_config=chosen,
                configs_timings=tuner.configs_timings,
                duration=tuner.bench_time,
                cache_hit=not self.new,
            )
        if knobs.autotuning.print and self.new:
            print(
                f"kernelcast timed {len(self.new)} of {len(self.configs)} configs of {tuner.base_fn.__name__} for "
                f"{self.problem} in {tuner.bench_time:.2f} s; the fastest: {chosen}"
            )
