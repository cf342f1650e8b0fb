"""The selector: problem -> candidates -> rank -> verify the top k -> select -> remember."""

from __future__ import annotations

import math
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
from kernelcast.errors import ArtifactError, KernelcastError, ModelError, SettingsError, StoreError
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, candidates, operation
from kernelcast.kernels.detect import detect
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
        workload: written into the records.

    Raises:
        SettingsError: an unknown mode, or a ``top_k`` below 1.
    """

    def __init__(
        self,
        device: Device | None = None,
        *,
        models: Path | None = None,
        cache: Path | None | bool = None,
        store: Path | None | bool = None,
        mode: str | None = None,
        top_k: int = 3,
        budget_seconds: float = 60.0,
        workload: str = "runtime",
    ) -> None:
        if mode is not None and mode not in settings.MODES:
            raise SettingsError(f"The mode is {mode!r}; it must be one of {', '.join(settings.MODES)}.")
        if not isinstance(top_k, int) or top_k < 1:
            raise SettingsError(f"top_k is {top_k!r}; it must be an integer of at least 1.")
        self.device = detect() if device is None else device
        self.models = settings.models_dir() if models is None else models
        self.top_k = top_k
        self.budget_seconds = budget_seconds
        self.workload = workload
        self._mode = mode
        self.cache = SelectionCache(_folder(cache, settings.cache_dir()))
        self._store = _folder(store, settings.store_dir())
        self._journal: Journal | None = None
        self._rankers: dict[str, tuple[RankingModel | None, str]] = {}
        self._here: bool | None = None

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
        key = CacheKey.of(problem, self.device, 0 if mode == "tune" else self.top_k)
        found = self.cache.get(key)
        if found is not None:
            return found if found.source == "cached" else replace(found, source="cached")
        if mode == "cached":
            return self._default(problem, "Mode cached, and nothing is remembered of this problem: the default.")
        if mode == "predict":
            return self.predict(problem)
        hindrance = self._hindrance()
        if hindrance:
            return self.predict(problem, why=hindrance)
        with self.cache.lock(key):
            found = self.cache.get(key)  # another thread or process may have been first
            if found is not None:
                return replace(found, source="cached")
            selection = self._tune(problem) if mode == "tune" else self._verify(problem)
            self.cache.put(key, selection)
        return selection

    def select_many(self, problems: Iterable[Problem], *, mode: str | None = None) -> list[Selection]:
        """:meth:`select` for each problem, in order."""
        return [self.select(problem, mode=mode) for problem in problems]

    def rank(self, problem: Problem) -> Ranking:
        """Every legal candidate with its prediction, from the device's model or else the roofline."""
        table = candidates(problem, self.device)
        model, reason = self._model(problem.operation)
        if model is not None:
            try:
                prediction = model.predict(problem, table, self.device)
                if prediction.covered.any():
                    return Ranking(table, prediction, "predicted", str(model.facts.get("version", "")), reason)
                reason = "the model covers none of the legal candidates"
            except ModelError as error:
                reason = str(error)
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
            default_us=float(latency_us[default]) if default is not None else math.nan,
            confidence=confidence(gap, prediction.error_log, best),
            candidates=len(ranking.table),
            model_version=ranking.model_version,
            reason=". ".join(part.rstrip(".") for part in (why, ranking.reason) if part) + ".",
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
        chosen = [ranking.table[row] for row in rows]
        verdict = verify(problem, chosen, self.device, workload=self.workload)
        self._record(verdict.trial.measurements)
        return self._decided(problem, ranking, rows, verdict)

    def _tune(self, problem: Problem) -> Selection:
        """Measure the whole space in predicted order, in batches, until the budget ends; the winner so far races on."""
        ranking = self.rank(problem)
        rows = self.shortlist(ranking, problem, len(ranking.table))
        deadline = time.monotonic() + self.budget_seconds
        tried: set[int] = set()
        batch = rows[:_TUNE_BATCH]
        while True:
            plan = replace(VERIFY_PLAN, seconds=max(min(VERIFY_PLAN.seconds, deadline - time.monotonic()), 0.1))
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
        selection = self._decided(problem, ranking, batch, verdict)
        rest = len(rows) - len(tried)
        note = f" Incomplete: the budget of {self.budget_seconds:g} s ended with {rest} not tried." if rest else ""
        return replace(selection, measured=len(tried), reason=selection.reason + note)

    def _decided(self, problem: Problem, ranking: Ranking, rows: Sequence[int], verdict: Verdict) -> Selection:
        measurements = verdict.trial.measurements
        if verdict.winner is None:
            return self._default(problem, f"None of the {len(rows)} measured worked: {measurements[0].detail}.")
        winner = rows[verdict.winner]
        default = self._default_row(ranking.table, problem)
        default_us = measurements[rows.index(default)].latency_us if default in rows else math.nan
        failed = [m for m in measurements if m.outcome != "ok"]
        notes = [f"the fastest of {len(rows)} measured"]
        if winner == default:
            notes = [f"none of the {len(rows)} measured beats the default beyond noise"]
        notes += [f"{len(failed)} failed ({failed[0].outcome})"] if failed else []
        notes += [ranking.reason.rstrip(".")] if ranking.reason else []
        return Selection(
            problem=problem,
            device=self.device.name,
            candidate=ranking.table[winner],
            source="verified",
            predicted_us=float(ranking.prediction.latency_us[winner]),
            measured_us=measurements[verdict.winner].latency_us,
            default_us=default_us,
            confidence=verdict.confidence,
            measured=len(rows),
            candidates=len(ranking.table),
            model_version=ranking.model_version,
            reason="; ".join(notes).capitalize() + ".",
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
            self._here = self.device.fingerprint == detect(self.device.kind).fingerprint
        if not self._here:
            return f"{self.device.name} is not here to measure on"
        if self.device.kind == "gpu":
            import torch

            if torch.cuda.is_current_stream_capturing():
                return "a CUDA graph is being captured, so nothing is measured"
        return ""

    def _record(self, measurements: Sequence[Measurement]) -> None:
        """Send what was measured to the store. A store that cannot be written costs the records, not the call."""
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


def _folder(given: Path | None | bool, default: Path) -> Path | None:
    if given is False:
        return None
    return default if given is None or given is True else Path(given)
