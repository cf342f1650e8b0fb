"""Measuring for a selection: a few candidates or a search, on the device that is here, every sample to the store."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast.datasets.journal import Journal
from kernelcast.datasets.record import Measurement
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, StoreError, warn
from kernelcast.kernels import Device, Problem, operation
from kernelcast.kernels.detect import detect, torch_device
from kernelcast.runtime.compile_ahead import compile_ahead
from kernelcast.runtime.ranking import Ranking
from kernelcast.runtime.selection import Selection
from kernelcast.runtime.verify import Verdict, verify

if TYPE_CHECKING:
    from kernelcast.costmodel.search import PriorRecords


class Measurer:
    """Measures on one device and turns what it found into selections.

    Args:
        device: the hardware facts.
        plan: how much a verification measures.
        budget_seconds: time for one search.
        workload: written into the records.
        store: folder that they go to; None keeps none.
    """

    def __init__(
        self, device: Device, *, plan: TimingPlan, budget_seconds: float, workload: str, store: Path | None
    ) -> None:
        self.device = device
        self.plan = plan
        self.budget_seconds = budget_seconds
        self.workload = workload
        self._store = store
        self._journal: Journal | None = None
        self._here: bool | None = None
        self._guard = threading.Lock()

    def verify(self, problem: Problem, ranking: Ranking, rows: Sequence[int]) -> Selection:
        """Measure some rows of a ranking against one another, in the order that breaks ties, and select."""
        chosen = [ranking.table[row] for row in rows]
        harmful = compile_ahead(problem, chosen, self.device, time_limit_s=self.budget_seconds)
        rows = [row for row, candidate in zip(rows, chosen, strict=True) if candidate not in harmful]
        with unobserved():
            verdict = verify(
                problem,
                [ranking.table[row] for row in rows],
                self.device,
                plan=self.plan,
                workload=self.workload,
            )
        self.record(verdict.trial.measurements)
        return self._decided(problem, ranking, rows, verdict, measured=len(rows))

    def tune(
        self, problem: Problem, ranking: Ranking, *, prior: PriorRecords | None = None, seed: int = 0
    ) -> Selection:
        """Search the candidates of a ranking until nothing more is promised or the budget ends, and select.

        Args:
            problem: what to compute.
            ranking: every candidate.
            prior: records of them from another device, in place of the prediction.
            seed: of the search.
        """
        from kernelcast.runtime.tuning import tune

        with unobserved():
            tuned = tune(
                problem,
                ranking,
                self.device,
                budget_seconds=self.budget_seconds,
                plan=self.plan,
                workload=self.workload,
                record=self.record,
                prior=prior,
                seed=seed,
            )
        selection = self._decided(problem, ranking, tuned.rows, tuned.verdict, measured=tuned.measured)
        return replace(selection, reason=selection.reason + tuned.note(self.budget_seconds))

    def _decided(
        self, problem: Problem, ranking: Ranking, rows: Sequence[int], verdict: Verdict, *, measured: int
    ) -> Selection:
        measurements = verdict.trial.measurements
        if verdict.winner is None:
            why = f"None of the {measured} measured worked ({measurements[0].outcome}: {measurements[0].detail})."
            return replace(
                default_selection(problem, self.device, why), measured=measured, candidates=len(ranking.table)
            )
        winner = rows[verdict.winner]
        default = ranking.default
        default_us = measurements[rows.index(default)].latency_us if default in rows else math.nan
        if verdict.busy and rows[0] == default:
            # The medians hold the interruptions of one candidate, not those of the other.
            gap = float(verdict.paired_log[0] - verdict.paired_log[verdict.winner])
            default_us = measurements[verdict.winner].latency_us * math.exp(gap)
        failed = [m for m in measurements if m.outcome != "ok"]
        notes = [f"the fastest of {measured} measured"]
        if winner == default:
            notes = [f"none of the {measured} measured beats the default beyond noise"]
        notes += [f"{len(failed)} failed ({failed[0].outcome})"] if failed else []
        notes += [ranking.reason, verdict.note]
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
            reason=sentence(notes),
            busy=verdict.busy,
        )

    def hindrance(self) -> str:
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

    def record(self, measurements: Sequence[Measurement]) -> None:
        """Send measurements to the store. A store that cannot be written costs the records, not the call."""
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
                warn(f"{error} The measurements of this selection are not kept.")
                self._store = None


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Outside of every mode that the caller has entered: a counter of FLOPs, ``with torch.device(...)``, a tracer.

    What is measured is none of the caller's calls, and must run as it does without them.
    """
    import torch
    from torch.utils import _python_dispatch

    without_modes = getattr(_python_dispatch, "_disable_current_modes", contextlib.nullcontext)
    with torch._C.DisableTorchFunction(), without_modes():
        yield


def default_selection(problem: Problem, device: Device, reason: str) -> Selection:
    """The default, with nothing measured or predicted."""
    return Selection(
        problem=problem,
        device=device.name,
        candidate=operation(problem.operation).default,
        source="default",
        reason=reason,
    )


def sentence(parts: Iterable[str]) -> str:
    """Parts, the empty ones left out, as one sentence."""
    text = "; ".join(part.rstrip(".") for part in parts if part)
    return text[:1].upper() + text[1:] + "."
