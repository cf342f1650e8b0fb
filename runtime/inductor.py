"""torch.compile's choice among GEMM kernels, narrowed by the device's model; Inductor's timings, into the store.

With ``max_autotune`` Inductor times every kernel that it could use for a matrix product. Here it is told to time fewer: the
first few that the model names, and the library's. The graph is Inductor's own, and so is the measuring and the choice.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast import settings
from kernelcast.costmodel import AnalyticModel, Prediction
from kernelcast.datasets.journal import Journal
from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.errors import ModelError, SettingsError, warn
from kernelcast.kernels import CandidateTable, Problem
from kernelcast.runtime.inductor_choices import Choices, describe
from kernelcast.runtime.selector import Selector

#: Written into the records as the set of problems that they come from.
WORKLOAD = "inductor"

#: Prunings that a session remembers.
_MOST_REMEMBERED = 1000

_guard = threading.RLock()
#: The sessions that :func:`enable` began and nothing ended, the one in force last.
_sessions: list[Session] = []


class InductorWarning(UserWarning):
    """Inductor does what it does without kernelcast, as something is missing or failed; the text says what."""


@dataclass(frozen=True)
class Pruning:
    """What became of the choices of one matrix product.

    Attributes:
        problem: of the catalogue, with the sizes that Inductor times with where they are dynamic.
        product: Inductor's own name: ``"addmm"``.
        choices: how many there were.
        kept: names of those that were left to be timed, in Inductor's order.
        reason: one sentence.
    """

    problem: Problem
    product: str
    choices: int
    kept: tuple[str, ...]
    reason: str


class Session:
    """What :func:`enable` returns, whose options it has: what was pruned and recorded, and a context manager that ends it.

    ``benchmarks`` says how often Inductor has timed choices; by default it is asked.

    Attributes:
        active: whether it is in force; one that is not prunes and records nothing.
        prunings: the latest 1,000, of every matrix product that had a choice, in order.
        recorded: timings that went to the store.
    """

    def __init__(
        self,
        *,
        top_k: int,
        record: bool | Path,
        mode: str | None,
        without_model: str,
        selector: Selector | None,
        benchmarks: Callable[[], int] | None = None,
    ) -> None:
        self.active = False
        self.top_k = top_k
        self.without_model = without_model
        self.prunings: deque[Pruning] = deque(maxlen=_MOST_REMEMBERED)
        self.recorded = 0
        self._mode = mode
        self._selector = selector
        self._store = None if record is False else settings.store_dir() if record is True else Path(record)
        self._journal: Journal | None = None
        self._count = _benchmarks if benchmarks is None else benchmarks
        self._seen = 0
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self)

    def start(self) -> None:
        """Take effect. What Inductor has timed until now is none of this session's."""
        self._seen = self._count()
        self.active = True

    # --- Inductor's hooks: whatever fails here must not end a compilation ---

    def prune(self, choices: list[Any]) -> list[Any]:
        """Inductor's preprocessing function: the choices that are left to be timed, in their order."""
        if not self.active:
            return choices
        try:
            return self._prune(choices)
        except Exception as error:  # noqa: BLE001 - see above
            self._warn("prune", "The choices of a matrix product could not be ranked", error)
            return choices

    def save(self, timings: Mapping[Any, float], _name: str, _nodes: Any, _choices: Any, *_more: Any) -> None:
        """Inductor's feedback function: the time of each choice in milliseconds, infinity for a failure."""
        if not self.active or self._store is None:
            return
        try:
            self._save(timings)
        except Exception as error:  # noqa: BLE001 - see above
            self._warn("record", "Inductor's timings could not be recorded", error)

    def _prune(self, choices: list[Any]) -> list[Any]:
        if len(choices) < 2 or settings.disabled():
            return choices
        described = describe(choices)
        if described is None:
            return choices
        selector = self._selector_for(described.device)
        mode = self._mode or selector.mode
        if mode == "off":
            return choices
        if mode == "tune":
            kept, reason = np.ones(len(choices), dtype=bool), "mode tune: all are timed"
        else:
            kept, reason = self._kept(described, selector, 1 if mode in ("cached", "predict") else self.top_k)
        left = [choice for choice, stays in zip(choices, kept, strict=True) if stays]
        self.prunings.append(
            Pruning(
                problem=described.problem,
                product=described.product.name,
                choices=len(choices),
                kept=tuple(str(choice.name) for choice in left),
                reason=reason[:1].upper() + reason[1:].rstrip(".") + ".",
            )
        )
        return left

    def _kept(self, described: Choices, selector: Selector, most: int) -> tuple[np.ndarray, str]:
        """Which choices stay: the library's, the first of the ranking, and all of which nothing is known."""
        kept = np.array([candidate is None for candidate in described.candidates], dtype=bool) | np.array(
            described.library, dtype=bool
        )
        places = [place for place, each in enumerate(described.candidates) if each is not None]
        # Of equal predictions the default comes first, then Inductor's order.
        places.sort(key=lambda place: not described.library[place])
        if not places:
            return np.ones_like(kept), "none of the choices is known"
        table = CandidateTable.of(each for each in map(described.candidates.__getitem__, places) if each)
        prediction, reason = self._predict(described, selector, table)
        if prediction is None:
            return np.ones_like(kept), reason
        for place, covered in zip(places, prediction.covered, strict=True):
            kept[place] |= not covered
        first = [row for row in prediction.order().tolist() if prediction.covered[row]][:most]
        for row in first:
            kept[places[row]] = True
        return kept, reason

    def _predict(
        self, described: Choices, selector: Selector, table: CandidateTable
    ) -> tuple[Prediction | None, str]:
        reason = ""
        for problem in dict.fromkeys((described.recorded, described.problem)):
            model, reason = selector.rankers.model(problem.operation)
            if model is None:
                continue
            try:
                prediction = model.predict(problem, table, selector.device)
            except ModelError as error:
                reason = str(error)
                continue
            if prediction.covered.any():
                return prediction, reason
            reason = f"{reason}, which covers none of the choices"
        if self.without_model == "roofline":
            return AnalyticModel().predict(described.problem, table, selector.device), reason
        self._warn(
            f"model {described.problem.operation}",
            f"There is no model of {described.problem.operation} for {selector.device.name} that knows Inductor's choices, "
            "so all of them are timed. Train one on what is recorded: kernelcast train",
        )
        return None, f"all are timed, as there is no model of {described.problem.operation} that knows them"

    def _save(self, timings: Mapping[Any, float]) -> None:
        count = self._count()
        with self._lock:
            fresh, self._seen = count != self._seen, count
        # Timings from Inductor's cache were taken earlier, in an environment that is not known.
        if not fresh or not timings or settings.disabled():
            return
        choices = list(timings)
        described = describe(choices)
        if described is None:
            return
        selector = self._selector_for(described.device)
        if (self._mode or selector.mode) == "off":
            return
        samples: dict[Any, list[float]] = {}
        for choice, candidate in zip(choices, described.candidates, strict=True):
            if candidate is not None:
                samples.setdefault(candidate, []).append(float(timings[choice]) * 1e3)
        kind = selector.device.kind
        known = Environment.current("unknown", device_kind=kind)
        environment = Environment(**{**known.to_dict(), "source": WORKLOAD})
        with self._lock:
            if self._journal is None and self._store is not None:
                self._journal = Journal(self._store)
            journal = self._journal
        if journal is None:
            return
        journal.record_device(selector.device)
        for candidate, latencies_us in samples.items():
            taken = tuple(value for value in latencies_us if math.isfinite(value) and value > 0)
            journal.append(
                Measurement(
                    problem=described.recorded,
                    candidate=candidate,
                    device=selector.device.name,
                    device_fingerprint=selector.device.fingerprint,
                    environment=environment,
                    protocol=_PROTOCOLS[kind],
                    samples_us=taken,
                    # Inductor says infinity whatever went wrong; a tile that does not fit is by far the commonest.
                    outcome="ok" if taken else "out_of_resources",
                    detail="" if taken else "Inductor gave no time",
                    workload=WORKLOAD,
                    created_at=time.time(),
                )
            )
            self.recorded += 1

    def _selector_for(self, device: Any) -> Selector:
        if self._selector is not None:
            return self._selector
        from kernelcast.runtime.dispatch import selector_for

        return selector_for(device)

    def _warn(self, about: str, what: str, error: Exception | None = None) -> None:
        """Once a session and subject: a network has hundreds of products."""
        with self._lock:
            if about in self._warned:
                return
            self._warned.add(about)
        if error is not None:
            what = f"{what} ({type(error).__name__}: {error}); Inductor goes on as without kernelcast"
        warn(f"{what}.", InductorWarning)

    def close(self) -> None:
        """Close the journal; a later timing opens another."""
        with self._lock:
            journal, self._journal = self._journal, None
        if journal is not None:
            journal.close()


#: How Inductor 2.13 times: on a CPU the median of calls back to back, on a GPU the least of launches each after a write that
#: empties the L2. Its inputs are normal. Source: torch/_inductor/runtime/benchmarking.py.
_PROTOCOLS = {
    "cpu": Protocol("inductor-median", cache="warm", dispatch="eager", inputs="normal"),
    "gpu": Protocol("inductor-min", cache="cold", dispatch="eager", inputs="normal"),
}


def enable(
    top_k: int = 3,
    record: bool | Path = True,
    *,
    mode: str | None = None,
    without_model: str = "all",
    selector: Selector | None = None,
) -> Session:
    """From now on let Inductor time fewer GEMM choices, and keep its timings.

    It is Inductor's ``max_autotune`` (or ``max_autotune_gemm``) that makes it time choices at all. Choices that kernelcast
    does not know, and those that the model was not fitted on, are always timed; so is the library's. In mode ``off``, and
    with ``KERNELCAST_DISABLE=1``, nothing is pruned or recorded; in ``cached`` and ``predict`` the first of the ranking is
    left beside the library's, in ``verify`` the first ``top_k``, in ``tune`` all.

    Args:
        top_k: how many of the model's ranking stay in mode ``verify``, the library's among them or not.
        record: whether Inductor's timings go to the store, or to which folder.
        mode: the configured mode where None.
        without_model: where no model knows the choices: ``"all"`` leaves them all, ``"roofline"`` ranks by the analytic
            estimate.
        selector: ranks with its device, models and mode; by default the one of each graph's own device.

    Returns:
        The session. Used as a context manager it ends with the block, and what was in force before is again.

    Raises:
        SettingsError: an option has a value that cannot be used.
    """
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise SettingsError(f"top_k is {top_k!r}; it must be an integer of at least 1.")
    if mode is not None and mode not in settings.MODES:
        raise SettingsError(f"The mode is {mode!r}; it must be one of {', '.join(settings.MODES)}.")
    if without_model not in ("all", "roofline"):
        raise SettingsError(f"without_model is {without_model!r}; it must be all or roofline.")
    session = Session(top_k=top_k, record=record, mode=mode, without_model=without_model, selector=selector)
    with _guard:
        if _sessions:
            _unhook(_sessions[-1])
        _hook(session)
        _sessions.append(session)
    return session


def disable() -> None:
    """End every session: Inductor's lists of hooks are what they were, and it times all choices. Not enabled: nothing."""
    with _guard:
        if _sessions:
            _unhook(_sessions[-1])
        for session in _sessions:
            session.close()
        _sessions.clear()


def _end(session: Session) -> None:
    with _guard:
        if session not in _sessions:
            return
        in_force = _sessions[-1] is session
        _sessions.remove(session)
        session.close()
        if in_force:
            _unhook(session)
            if _sessions:
                _hook(_sessions[-1])


def _hook(session: Session) -> None:
    """Put a session's functions behind those that are there. What this torch does not have is left out, with a warning."""
    import torch
    from torch._inductor import select_algorithm

    session.start()
    for name, function, lost in (
        ("add_preprocessing_fn", session.prune, "its choices are not pruned"),
        ("add_feedback_saver", session.save, "its timings are not recorded"),
    ):
        add: Callable[[Any], None] | None = getattr(select_algorithm, name, None)
        if add is None:
            warn(f"Inductor of torch {torch.__version__} has no {name}, so {lost}.", InductorWarning)
        else:
            add(function)


def _unhook(session: Session) -> None:
    """Take a session's functions, and nothing else, out of Inductor's lists."""
    session.active = False
    from torch._inductor import select_algorithm

    cache = getattr(select_algorithm, "_ALGORITHM_SELECTOR_CACHE", None)
    if cache is None and hasattr(select_algorithm, "get_algorithm_selector_cache"):
        cache = select_algorithm.get_algorithm_selector_cache()
    for name, function in (("preprocessing_fns", session.prune), ("feedback_saver_fns", session.save)):
        # Somebody may have cleared the list, or replaced it.
        listed: list[Any] = getattr(cache, name, [])
        if function in listed:
            listed.remove(function)


def _benchmarks() -> int:
    """How often Inductor has timed choices in this process, as it counts."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["select_algorithm_autotune"])


def in_force() -> Session | None:
    """The session that prunes now; None where there is none."""
    with _guard:
        return _sessions[-1] if _sessions else None
