"""The selector: problem -> candidates -> rank -> verify the top k -> select -> remember."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kernelcast import settings
from kernelcast.costmodel import AnalyticModel, Prediction, RankingModel
from kernelcast.costmodel.locate import find_champion
from kernelcast.datasets.journal import Journal
from kernelcast.datasets.record import Measurement
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, ModelError, SettingsError, StoreError
from kernelcast.kernels import CandidateTable, Device, Problem, candidates, operation
from kernelcast.kernels.detect import detect, torch_device
from kernelcast.runtime.cache import CacheKey, SelectionCache
from kernelcast.runtime.selection import Selection
from kernelcast.runtime.verify import VERIFY_PLAN, Verdict, confidence, verify

#: Candidates measured at a time in mode ``tune``.
_TUNE_BATCH = 8


class ModelWarning(UserWarning):
    """A model could not be used; selection fell back to the analytic ranking."""


@dataclass(frozen=True)
class Ranking:
    """A problem's legal candidates with what the ranker says of them.

    Attributes:
        table: the candidates, the default first.
        prediction: one row a candidate.
        source: ``"predicted"`` (a model) or ``"analytic"``.
        model_version: empty without a model.
        reason: why this ranker.
    """

    table: CandidateTable
    prediction: Prediction
    source: str
    model_version: str
    reason: str

    def order(self) -> np.ndarray:
        """Row numbers, the fastest first."""
        return self.prediction.order()


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
        budget_seconds: time for one ``tune``.
        plan: how much a verification measures.
        workload: written into the records.

    Raises:
        SettingsError: an unknown mode, a ``top_k`` below 1, or a budget that is not a positive number of seconds.
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
        budget_seconds: float = 60.0,
        plan: TimingPlan = VERIFY_PLAN,
        workload: str = "runtime",
    ) -> None:
        if mode is not None and mode not in settings.MODES:
            raise SettingsError(f"The mode is {mode!r}; it must be one of {', '.join(settings.MODES)}.")
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise SettingsError(f"top_k is {top_k!r}; it must be an integer of at least 1.")
        if not isinstance(budget_seconds, int | float) or not 0 < budget_seconds < math.inf:
            raise SettingsError(f"budget_seconds is {budget_seconds!r}; it must be a positive number.")
        self.device = detect() if device is None else device
        self.models = settings.models_dir() if models is None else Path(models)
        self.top_k = top_k
        self.budget_seconds = budget_seconds
        self.plan = plan
        self.workload = workload
        self._mode = mode
        self.cache = SelectionCache(_folder(cache, settings.cache_dir()))
        self._store = _folder(store, settings.store_dir())
        self._journal: Journal | None = None
        self._rankers: dict[str, tuple[RankingModel | None, str]] = {}
        self._here: bool | None = None
        self._guard = threading.Lock()

    @property
    def mode(self) -> str:
        """The mode in force where a call names none."""
        return self._mode or settings.mode()

    def select(self, problem: Problem, *, mode: str | None = None) -> Selection:
        """Select a candidate for a problem.

        Measures at most in modes ``verify`` and ``tune``, never during CUDA-graph capture, and never on a device that
        is not this machine's: then it answers as ``predict`` does, and the reason says so.

        Raises:
            SettingsError: an unknown mode.
        """
        mode = self.mode if mode is None else mode
        if mode not in settings.MODES:
            raise SettingsError(f"The mode is {mode!r}; it must be one of {', '.join(settings.MODES)}.")
        if mode == "off":
            return self._default(problem, "Mode off: the default, nothing else runs.")
        found = self._remembered(problem, mode)
        if found is not None:
            return found
        if mode == "cached":
            return self._default(
                problem, "Mode cached, and nothing is remembered of this problem: the default."
            )
        if mode == "predict":
            return self.predict(problem)
        hindrance = self._hindrance()
        if hindrance:
            return self.predict(problem, why=hindrance)
        key = CacheKey.of(problem, self.device, 0 if mode == "tune" else self.top_k)
        with self.cache.lock(key):
            found = self._remembered(problem, mode)  # another thread or process may have been first
            if found is not None:
                return found
            try:
                selection = self._tune(problem) if mode == "tune" else self._verify(problem)
            except KernelcastError as error:
                selection = self.predict(problem, why=str(error))
            # What was not measured may be measured by the next process, which may have more memory or a sound device.
            self.cache.put(key, selection, on_disk=selection.source == "verified")
        return selection

    def _remembered(self, problem: Problem, mode: str) -> Selection | None:
        """What the cache has: of a search through the whole space, or else (not for ``tune``) of the first few."""
        for top_k in (0,) if mode == "tune" else (0, self.top_k):
            found = self.cache.get(CacheKey.of(problem, self.device, top_k))
            if found is not None:
                return replace(found, source="cached") if found.source == "verified" else found
        return None

    def select_many(self, problems: Iterable[Problem], *, mode: str | None = None) -> list[Selection]:
        """:meth:`select` for each problem, in order."""
        return [self.select(problem, mode=mode) for problem in problems]

    def rank(self, problem: Problem, *, whole: bool = False) -> Ranking:
        """Legal candidates with their predictions, from the device's model or else the roofline.

        The model ranks the candidates whose like it was fitted on. The roofline, which cannot tell thousands of tile sizes
        apart, ranks the quick subset of those variants that have so many. With ``whole`` every legal candidate is there.
        """
        model, reason = self._model(problem.operation)
        if model is not None:
            try:
                table = candidates(problem, self.device, spaces=None if whole else model.spaces())
                prediction = model.predict(problem, table, self.device)
                if prediction.covered.any():
                    return Ranking(
                        table, prediction, "predicted", str(model.facts.get("version", "")), reason
                    )
                reason = "the model covers none of the legal candidates"
            except ModelError as error:
                reason = str(error)
        table = candidates(problem, self.device, subset="full" if whole else "auto")
        return Ranking(table, AnalyticModel().predict(problem, table, self.device), "analytic", "", reason)

    def predict(self, problem: Problem, *, why: str = "") -> Selection:
        """The first of the ranking, without any measurement."""
        ranking = self.rank(problem)
        if not len(ranking.table):
            return self._default(problem, "No candidate is legal here; the default is left.")
        prediction, order = ranking.prediction, ranking.order()
        best = int(order[0])
        gap = prediction.log_latency - prediction.log_latency[best]
        gap[~prediction.covered] = np.nan
        latency_us = prediction.latency_us
        default = self._default_row(ranking.table, problem)
        return Selection(
            problem=problem,
            device=self.device.name,
            candidate=ranking.table[best],
            source=ranking.source,
            predicted_us=float(latency_us[best]),
            default_us=float(latency_us[default])
            if default is not None and prediction.covered[default]
            else math.nan,
            confidence=confidence(gap, prediction.error_log, best),
            candidates=len(ranking.table),
            model_version=ranking.model_version,
            reason=_sentence([why, ranking.reason]),
        )

    def shortlist(self, ranking: Ranking, problem: Problem, k: int) -> list[int]:
        """Rows to measure: the default, then the first k - 1 others of the ranking. Also the order that breaks ties."""
        default = self._default_row(ranking.table, problem)
        others = [int(row) for row in ranking.order() if row != default]
        return others[:k] if default is None else [default, *others[: k - 1]]

    def forget(self, problem: Problem) -> None:
        """Drop what is remembered of a problem, in memory and on disk: its candidate no longer works."""
        for top_k in {0, self.top_k}:
            self.cache.evict(CacheKey.of(problem, self.device, top_k))

    def warmup(self, problems: Iterable[Problem]) -> list[Selection]:
        """Select for problems ahead of time: a later call on one of them compiles and measures nothing."""
        return self.select_many(problems)

    def _verify(self, problem: Problem) -> Selection:
        ranking = self.rank(problem)
        rows = self.shortlist(ranking, problem, self.top_k)
        if not rows:
            return self._default(problem, "No candidate is legal here; the default is left.")
        chosen = [ranking.table[row] for row in rows]
        verdict = verify(problem, chosen, self.device, plan=self.plan, workload=self.workload)
        self._record(verdict.trial.measurements)
        return self._decided(problem, ranking, rows, verdict, measured=len(rows))

    def _tune(self, problem: Problem) -> Selection:
        """Measure the whole space in predicted order, in batches, until the budget ends; the winner so far races on."""
        ranking = self.rank(problem, whole=True)
        rows = self.shortlist(ranking, problem, len(ranking.table))
        if not rows:
            return self._default(problem, "No candidate is legal here; the default is left.")
        deadline = time.monotonic() + self.budget_seconds
        tried: set[int] = set()
        batch = rows[:_TUNE_BATCH]
        while True:
            plan = replace(self.plan, seconds=max(min(self.plan.seconds, deadline - time.monotonic()), 0.1))
            verdict = verify(
                problem, [ranking.table[r] for r in batch], self.device, plan=plan, workload=self.workload
            )
            self._record(verdict.trial.measurements)
            tried.update(batch)
            ahead = [row for row in rows if row not in tried]
            if not ahead or time.monotonic() > deadline:
                break
            champion = [] if verdict.winner is None else [batch[verdict.winner]]
            default = rows[:1]
            batch = [*default, *(row for row in champion if row not in default), *ahead[: _TUNE_BATCH - 2]]
        selection = self._decided(problem, ranking, batch, verdict, measured=len(tried))
        rest = len(rows) - len(tried)
        if not rest:
            return selection
        note = f" Incomplete: the budget of {self.budget_seconds:g} s ended with {rest} not tried."
        return replace(selection, reason=selection.reason + note)

    def _decided(
        self, problem: Problem, ranking: Ranking, rows: Sequence[int], verdict: Verdict, *, measured: int
    ) -> Selection:
        measurements = verdict.trial.measurements
        if verdict.winner is None:
            why = f"None of the {measured} measured worked ({measurements[0].outcome}: {measurements[0].detail})."
            return replace(self._default(problem, why), measured=measured, candidates=len(ranking.table))
        winner = rows[verdict.winner]
        default = self._default_row(ranking.table, problem)
        default_us = measurements[rows.index(default)].latency_us if default in rows else math.nan
        failed = [m for m in measurements if m.outcome != "ok"]
        notes = [f"the fastest of {measured} measured"]
        if winner == default:
            notes = [f"none of the {measured} measured beats the default beyond noise"]
        notes += [f"{len(failed)} failed ({failed[0].outcome})"] if failed else []
        notes.append(ranking.reason)
        return Selection(
            problem=problem,
            device=self.device.name,
            candidate=ranking.table[winner],
            source="verified",
            predicted_us=float(ranking.prediction.latency_us[winner]),
            measured_us=measurements[verdict.winner].latency_us,
            default_us=default_us,
            confidence=verdict.confidence,
            measured=measured,
            candidates=len(ranking.table),
            model_version=ranking.model_version,
            reason=_sentence(notes),
        )

    def _default(self, problem: Problem, reason: str) -> Selection:
        return Selection(
            problem=problem,
            device=self.device.name,
            candidate=operation(problem.operation).default,
            source="default",
            reason=reason,
        )

    def _default_row(self, table: CandidateTable, problem: Problem) -> int | None:
        default = operation(problem.operation).default
        return next((row for row in range(min(len(table), 64)) if table[row] == default), None)

    def _model(self, operation_name: str) -> tuple[RankingModel | None, str]:
        if operation_name not in self._rankers:
            self._rankers[operation_name] = self._load(operation_name)
        return self._rankers[operation_name]

    def _load(self, operation_name: str) -> tuple[RankingModel | None, str]:
        try:
            folder = find_champion(self.models, self.device, operation_name)
            if folder is None:
                return None, f"no model of {operation_name} for {self.device.name}: ranked by the roofline"
            model = RankingModel.load(folder)
            model.facts.setdefault("version", folder.name)
            return model, f"ranked by model {folder.name}"
        except (KernelcastError, KeyError) as error:
            warnings.warn(f"{error} Ranking by the roofline instead.", ModelWarning, stacklevel=4)
            return None, f"the model of {operation_name} cannot be used ({error})"

    def _hindrance(self) -> str:
        """Why nothing can be measured now, or an empty text."""
        if self._here is None:
            self._here = self._is_here()
        if not self._here:
            return f"{self.device.name} is not here to measure on"
        if self.device.kind == "gpu":
            import torch

            if torch.cuda.is_current_stream_capturing():
                return "a CUDA graph is being captured, so nothing is measured"
        return ""

    def _is_here(self) -> bool:
        """Whether this machine has a device of these hardware facts."""
        if self.device.kind == "cpu":
            return self.device.fingerprint == detect("cpu").fingerprint
        try:
            torch_device(self.device)
        except KernelcastError:
            return False
        return True

    def _record(self, measurements: Sequence[Measurement]) -> None:
        """Send what was measured to the store. A store that cannot be written costs the records, not the call."""
        with self._guard:
            if self._store is None:
                return
            try:
                if self._journal is None:
                    self._journal = Journal(self._store)
                    self._journal.record_device(self.device)
                for measurement in measurements:
                    self._journal.append(measurement)
            except StoreError as error:
                warnings.warn(f"{error} The measurements of this selection are not kept.", stacklevel=5)
                self._store = None


def _sentence(parts: Iterable[str]) -> str:
    """Parts, the empty ones left out, as one sentence."""
    text = "; ".join(part.rstrip(".") for part in parts if part)
    return text[:1].upper() + text[1:] + "."


def _folder(given: Path | bool | None, default: Path) -> Path | None:
    if given is False:
        return None
    return default if given is None or given is True else Path(given)
