"""The selector: problem -> candidates -> rank -> verify the top k -> select -> remember."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast import settings
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, warn
from kernelcast.kernels import Candidate, Device, Problem
from kernelcast.kernels.detect import detect
from kernelcast.kernels.registry import on_change
from kernelcast.runtime import options
from kernelcast.runtime.background import Background
from kernelcast.runtime.break_even import break_even
from kernelcast.runtime.cache import CacheKey, SelectionCache, is_legal
from kernelcast.runtime.measuring import Measurer, default_selection, sentence
from kernelcast.runtime.pack import PackedSelections
from kernelcast.runtime.ranking import ModelWarning, Rankers, Ranking
from kernelcast.runtime.selection import Selection
from kernelcast.runtime.verify import VERIFY_PLAN

if TYPE_CHECKING:
    from kernelcast.costmodel.search import PriorRecords
    from kernelcast.runtime.explain import Explanation
    from kernelcast.runtime.plan import Plan

__all__ = ["ModelWarning", "Ranking", "Selector"]

#: Winners under another environment that are measured again along with the first of the ranking, at most.
_MOST_PRIORS = 2

#: Candidates of one problem that may fail before the default is left to run.
MOST_REJECTED = 3

#: What is remembered ready to be given is dropped beyond this many problems.
_MOST_READY = 100_000

_environment = settings.raw_environment
_MODE = b"KERNELCAST_MODE"

#: Told a problem whose selection has changed.
Listener = Callable[[Problem], None]

_selectors: weakref.WeakSet[Selector] = weakref.WeakSet()


@on_change
def _forget_ready(_operation: str) -> None:
    """A new variant may be faster: what was selected without it is asked for again."""
    for each in list(_selectors):
        each.clear_ready()


class Selector:
    """Selects candidates for one device.

    Args:
        device: the hardware facts; this machine's where None. For another device only modes without measurement
            work: there is nothing here to measure on.
        models: folder of registered models.
        cache: folder of remembered selections; False keeps them in memory alone.
        store: folder that the measurements of verifications go to; False keeps none.
        mode: ``off``, ``cached``, ``predict``, ``verify`` or ``tune``; ``KERNELCAST_MODE`` where None.
        top_k: candidates that a verification measures, the default among them.
        target_regret: instead of a fixed ``top_k``: measure as few as keep the expected regret under this share of the
            time, such as 0.005, by the model's own uncertainty. At most :data:`kernelcast.runtime.ranking.MOST_MEASURED`.
        budget_seconds: time for one ``tune``, and for one verification where that is less than the plan's.
        plan: how much a verification measures.
        workload: written into the records.
        background: verify in a thread, and answer with the default until that is done. On a GPU the caller's own work
            is then part of what is timed beside the candidates, in equal shares.
        expected_calls: how often each problem will be called. Where a verification cannot pay back within so many calls
            it is not started: the default runs, and the reason says so. None: always verify.
        drift_every: after so many answers from memory for a problem, verify it again, and select anew if the winner is no
            longer one; 0 never does.
        priors: gives candidates that are worth measuring for a problem, from elsewhere: they are measured along.
        pack: a file that ``kernelcast cache export`` wrote: its selections come before those of the cache.
        plans: tables of :func:`kernelcast.plan`: what one covers is answered by it, and measured no more.

    Raises:
        SettingsError: an unknown mode, or a number that cannot be used.
        ImportFileError: the pack cannot be read, or was changed.
    """

    def __init__(
        self,
        device: Device | None = None,
        *,
        models: Path | None = None,
        cache: Path | bool | None = None,
        store: Path | bool | None = None,
        mode: str | None = None,
        top_k: int = 3,
        target_regret: float | None = None,
        budget_seconds: float = 60.0,
        plan: TimingPlan = VERIFY_PLAN,
        workload: str = "runtime",
        background: bool = False,
        expected_calls: float | None = None,
        drift_every: int = 0,
        priors: Callable[[Problem], Iterable[Candidate]] | None = None,
        pack: Path | None = None,
        plans: Iterable[Plan] = (),
    ) -> None:
        options.check_numbers(top_k, target_regret, budget_seconds, expected_calls, drift_every)
        options.check_others(device, mode, workload, background, priors)
        self.device = detect() if device is None else device
        self.models = settings.models_dir() if models is None else options.path_of("models", models)
        self.top_k = top_k
        self.target_regret = target_regret
        self.plan = options.timing_of(plan, budget_seconds)
        self.background = background
        self.expected_calls = expected_calls
        self.drift_every = drift_every
        self._mode = mode
        packed = None if pack is None else PackedSelections(options.path_of("pack", pack))
        self.cache = SelectionCache(options.folder_of("cache", cache, settings.cache_dir()), pack=packed)
        self.rankers = Rankers(self.device, self.models)
        self.measurer = Measurer(
            self.device,
            plan=self.plan,
            budget_seconds=budget_seconds,
            workload=workload,
            store=options.folder_of("store", store, settings.store_dir()),
        )
        self._priors = priors
        self._guard = threading.Lock()
        self._ready: dict[Problem, Selection] = {}
        self._ready_mode = _environment.get(_MODE)
        self._answers: dict[Problem, int] = {}
        self._pending: set[Problem] = set()
        self._rejected: dict[Problem, set[Candidate]] = {}
        self._listeners: list[Listener] = []
        self._later = Background()
        self._plans = options.book_of(plans)
        _selectors.add(self)

    @property
    def mode(self) -> str:
        """The mode in force where a call names none."""
        return self._mode or settings.mode()

    def select(
        self, problem: Problem, *, mode: str | None = None, expected_calls: float | None = None
    ) -> Selection:
        """Select a candidate for a problem.

        Measures at most in modes ``verify`` and ``tune``, never during CUDA-graph capture, and never on a device that
        is not this machine's: then it answers as ``predict`` does, and the reason says so.

        Args:
            problem: what is to be computed.
            mode: for this call; the selector's where None.
            expected_calls: of this problem; the selector's where None.

        Raises:
            SettingsError: an unknown mode, or a number of calls that is not positive.
        """
        if expected_calls is not None:
            options.check_number("expected_calls", expected_calls, math.inf)
        if mode is None and (self._mode is not None or _environment.get(_MODE) == self._ready_mode):
            found = self._ready.get(problem)
            if found is not None:
                return found
        return self._select(problem, mode, expected_calls)

    def _select(self, problem: Problem, wanted: str | None, expected_calls: float | None) -> Selection:
        if self._mode is None and _environment.get(_MODE) != self._ready_mode:
            self.clear_ready()
            self._ready_mode = _environment.get(_MODE)
        mode = self.mode if wanted is None else wanted
        options.check_mode(mode)
        options.check_problem(problem)
        selection, settled = self._answer(problem, mode, expected_calls or self.expected_calls)
        if settled and wanted is None and not self.drift_every:
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            self._ready[problem] = (
                replace(selection, source="cached") if selection.source == "verified" else selection
            )
        return selection

    def _answer(self, problem: Problem, mode: str, expected_calls: float | None) -> tuple[Selection, bool]:
        """(the selection, whether the next call may have the same without asking)."""
        if mode == "off":
            return self._default(problem, "Mode off: the default, nothing else runs."), True
        planned = self._plans.find(problem) if self._plans else None
        if planned is not None:
            return planned.select(problem), True
        found = self._remembered(problem, mode)
        if found is not None:
            return self._watched(problem, mode, found), True
        if mode == "cached":
            why = "Mode cached, and nothing is remembered of this problem: the default."
            return self._default(problem, why), False
        if mode == "predict":
            return self.predict(problem), True
        hindrance = self.measurer.hindrance()
        if hindrance:
            return self.predict(problem, why=hindrance), False
        if mode == "verify" and expected_calls is not None:
            too_dear = self._too_dear(problem, expected_calls)
            if too_dear:
                return self._default(problem, too_dear), False
        if self.background:
            return self._default(problem, self._start(problem, mode)), False
        return self._settle(problem, mode), True

    def select_many(self, problems: Iterable[Problem], *, mode: str | None = None) -> list[Selection]:
        """:meth:`select` for each problem, in order."""
        return [self.select(problem, mode=mode) for problem in options.problems_of(problems)]

    def rank(self, problem: Problem, *, whole: bool = False) -> Ranking:
        """Legal candidates with their predictions; see :meth:`kernelcast.runtime.ranking.Rankers.rank`."""
        ranking = self.rankers.rank(problem, whole=whole)
        rejected = self._rejected.get(problem)
        return ranking if rejected is None else ranking.rejecting(rejected)

    def predict(self, problem: Problem, *, why: str = "") -> Selection:
        """The first of the ranking, without any measurement."""
        ranking = self.rank(problem)
        if not len(ranking.table):
            return self._default(problem, "No candidate is legal here; the default is left.")
        prediction, default = ranking.prediction, ranking.default
        best = int(ranking.order()[0])
        known_default = default is not None and prediction.covered[default]
        return Selection(
            problem=problem,
            device=self.device.name,
            candidate=ranking.table[best],
            source=ranking.source,
            predicted_us=math.exp(prediction.log_latency[best]),
            default_us=math.exp(prediction.log_latency[default]) if known_default else math.nan,
            confidence=ranking.confidence(best),
            candidates=len(ranking.table),
            model_version=ranking.model_version,
            reason=sentence([why, ranking.reason]),
        )

    def explain(self, selection: Selection, *, rivals: int = 4) -> Explanation:
        """Why a selection is as it is: what the model saw of the candidate, and why the runners-up lost.

        Args:
            selection: of this selector's device.
            rivals: how many others of the ranking to explain.

        Raises:
            SettingsError: it is no selection, or no number.
        """
        from kernelcast.runtime.explain import explain

        options.check_kind("selection", selection, Selection, "what kernelcast.select gives")
        options.check_integer("rivals", rivals, 0)
        model, _ = self.rankers.model(selection.problem.operation)
        return explain(selection, self.rank(selection.problem), self.device, model, rivals=rivals)

    def warmup(self, problems: Iterable[Problem]) -> list[Selection]:
        """Select for problems ahead of time: a later call on one of them compiles and measures nothing.

        Returns when all is done, whether or not the selector verifies in the background.
        """
        selections = self.select_many(problems)
        if self.background:
            self.wait()
            selections = self.select_many([each.problem for each in selections])
        return selections

    def pending(self, problem: Problem) -> bool:
        """Whether a verification of this problem waits or runs in the background."""
        return problem in self._pending

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for what goes on in the background. Returns whether nothing is left."""
        return self._later.wait(timeout_s)

    def listen(self, listener: Listener) -> None:
        """Have a function called with each problem whose selection has changed behind the caller's back."""
        self._listeners.append(listener)

    def tune(self, problem: Problem, *, prior: PriorRecords | None = None, seed: int = 0) -> Selection:
        """Search the whole space now, whatever is remembered of the problem, and remember what is found.

        Args:
            problem: what is to be computed.
            prior: records of its candidates from another device, to begin with.
            seed: of the search.

        Raises:
            KernelcastError: it cannot be measured here.
        """
        hindrance = self.measurer.hindrance()
        if hindrance:
            raise KernelcastError(f"Nothing can be tuned: {hindrance}.")
        key = self._key(problem, "tune")
        with self.cache.lock(key):
            standing = self.cache.get(key)
            selection = self._tune(problem, prior, seed)
            if standing and selection.measured < standing.measured and standing.busy <= selection.busy:
                # A search that was cut short does not replace one that saw more, unless that was on a busy machine.
                note = f" The search of {standing.measured} before stays what is remembered: {standing.candidate}."
                return replace(selection, reason=selection.reason + note)
            self.cache.put(key, selection, on_disk=selection.source == "verified")
        self._changed(problem)
        return selection

    def recheck(self, problem: Problem) -> Selection:
        """Verify a remembered problem again, its winner among those measured, and remember what is found.

        Where the winner still wins, its selection stays as it is, unless it was decided on a busy machine.
        """
        key = self._key(problem, "verify")
        hindrance = self.measurer.hindrance()
        standing = self._remembered(problem, "verify")
        if hindrance or standing is None:
            return standing if standing is not None else self.predict(problem, why=hindrance)
        with self.cache.lock(key):
            try:
                found = self._verify(problem, also=[standing.candidate])
            except KernelcastError:
                return standing
            same = found.candidate == standing.candidate
            if found.source != "verified" or (same and not standing.busy):
                return standing
            if not same:
                note = f" It replaces {standing.candidate}, which no longer wins."
                found = replace(found, reason=found.reason + note)
            self._evict(problem)
            self.cache.put(key, found, on_disk=True)
        self._changed(problem)
        return found

    def select_anew(
        self, problem: Problem, mode: str = "verify", *, also: Iterable[Candidate] = ()
    ) -> Selection:
        """Rank and measure as a first selection does, whatever is remembered of the problem, and remember nothing.

        Mode ``verify`` measures the candidates ``also`` along; mode ``tune`` searches the whole space.

        Raises:
            KernelcastError: it cannot be measured here.
        """
        hindrance = self.measurer.hindrance()
        if hindrance:
            raise KernelcastError(f"Nothing can be measured: {hindrance}.")
        return self._tune(problem) if mode == "tune" else self._verify(problem, also)

    def reject(self, problem: Problem, candidate: Candidate) -> bool:
        """Take note that a selected candidate failed at a call: what is remembered is dropped, on disk too.

        Returns:
            Whether to select anew, among the others. After :data:`MOST_REJECTED` failures of a problem in this process the
            default is left to run: something else than the candidates is at fault.
        """
        with self._guard:
            rejected = self._rejected.setdefault(problem, set())
            rejected.add(candidate)
            again = len(rejected) <= MOST_REJECTED
        self.forget(problem)
        return again

    def forget(self, problem: Problem) -> None:
        """Drop what is remembered of a problem, in memory and on disk."""
        self._evict(problem)
        self._ready.pop(problem, None)

    def clear_ready(self) -> None:
        """Have each problem looked up anew; nothing that was verified is lost."""
        self._ready.clear()

    # Remembering

    def _key(self, problem: Problem, mode: str) -> CacheKey:
        if mode == "tune":
            return CacheKey.of(problem, self.device, 0)
        if self.target_regret is not None:
            return CacheKey.of(problem, self.device, 0, target_regret=self.target_regret)
        return CacheKey.of(problem, self.device, self.top_k)

    def _remembered(self, problem: Problem, mode: str) -> Selection | None:
        """What the cache has: of a search through the whole space, or else (not for ``tune``) of the first few."""
        if self.cache.idle:
            return None
        for kind in ("tune",) if mode == "tune" else ("tune", "verify"):
            found = self.cache.get(self._key(problem, kind))
            if found is not None:
                return replace(found, source="cached") if found.source == "verified" else found
        return None

    def _evict(self, problem: Problem) -> None:
        for kind in ("tune", "verify"):
            self.cache.evict(self._key(problem, kind))

    def _watched(self, problem: Problem, mode: str, found: Selection) -> Selection:
        """What is remembered, measured again every so many answers if that was asked for."""
        if not self.drift_every or mode not in ("verify", "tune") or found.source != "cached":
            return found
        with self._guard:
            count = self._answers[problem] = self._answers.get(problem, 0) + 1
        return self.recheck(problem) if count % self.drift_every == 0 else found

    def _changed(self, problem: Problem) -> None:
        self._ready.pop(problem, None)
        for listener in list(self._listeners):
            listener(problem)

    # Measuring

    def _settle(self, problem: Problem, mode: str) -> Selection:
        """Measure and remember, unless another thread or process was first."""
        key = self._key(problem, mode)
        with self.cache.lock(key):
            found = self._remembered(problem, mode)
            if found is not None:
                return found
            try:
                selection = self._tune(problem) if mode == "tune" else self._verify(problem)
            except KernelcastError as error:
                selection = self.predict(problem, why=str(error))
            # What was not measured may be measured by the next process, which may have more memory or a sound device.
            self.cache.put(key, selection, on_disk=selection.source == "verified")
        return selection

    def _start(self, problem: Problem, mode: str) -> str:
        """Have a problem settled in the background. Returns what to say meanwhile."""
        with self._guard:
            new = problem not in self._pending
            self._pending.add(problem)
        if new:

            def settle() -> None:
                try:
                    self._settle(problem, mode)
                except Exception as error:  # noqa: BLE001 - nobody waits for this thread
                    warn(f"{problem} could not be verified ({error!r}).")
                    self.cache.put(
                        self._key(problem, mode), self._default(problem, f"{error!r}."), on_disk=False
                    )
                finally:
                    self._pending.discard(problem)
                    self._changed(problem)

            self._later.submit(settle)
        return "Verification goes on in the background: the default until it is done."

    def _too_dear(self, problem: Problem, expected_calls: float) -> str:
        """Why a verification cannot pay back; empty if it may."""
        ranking = self.rank(problem)
        found = break_even(ranking, self._rows(ranking), problem, self.device, self.plan, expected_calls)
        if found is None or found.pays:
            return ""
        return (
            f"Not verified: {expected_calls:g} calls can save at most {found.saving_s:.3g} s, and verifying takes about "
            f"{found.cost_s:.3g} s; the default."
        )

    def _rows(self, ranking: Ranking) -> list[int]:
        """What to measure: as few as the target regret needs, or the first k."""
        if self.target_regret is not None:
            return ranking.fewest(self.target_regret)
        return ranking.shortlist(self.top_k)

    def _given(self, problem: Problem) -> list[Candidate]:
        """Candidates that the caller's function names and that are legal; a function that fails costs a warning."""
        if self._priors is None:
            return []
        try:
            return [each for each in self._priors(problem) if is_legal(problem, self.device, each)]
        except Exception as error:  # noqa: BLE001 - it is the caller's, and a selection does without
            warn(f"The priors of {problem} could not be had ({error!r}); selecting without.")
            return []

    def _default(self, problem: Problem, reason: str) -> Selection:
        return default_selection(problem, self.device, reason)

    def _tune(self, problem: Problem, prior: PriorRecords | None = None, seed: int = 0) -> Selection:
        ranking = self.rank(problem, whole=True)
        if not len(ranking.table):
            return self._default(problem, "No candidate is legal here; the default is left.")
        return self.measurer.tune(problem, ranking, prior=prior, seed=seed)

    def _verify(self, problem: Problem, also: Iterable[Candidate] = ()) -> Selection:
        ranking = self.rank(problem)
        rows = self._rows(ranking)
        if not rows:
            return self._default(problem, "No candidate is legal here; the default is left.")
        priors = self.cache.priors(problem, self.device)[:_MOST_PRIORS]
        given = self._given(problem)
        ranking = ranking.including(given)
        for candidate in (*also, *priors, *given):
            row = ranking.row_of(candidate)
            if row is not None and row not in rows:
                rows.append(row)
        return self.measurer.verify(problem, ranking, rows)
