"""The demonstration: collect, train, select and report on this machine, end to end. ``kernelcast demo`` runs it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelcast import settings
from kernelcast.costmodel import ProblemData, RankingModel
from kernelcast.datasets.collect import CollectSummary, Progress, collect
from kernelcast.datasets.store import Store
from kernelcast.datasets.timing import TimingPlan
from kernelcast.demo_problems import OPERATIONS, held_out_problems, training_problems
from kernelcast.kernels import Device
from kernelcast.runtime import Selection, Selector
from kernelcast.training.data import load_problems
from kernelcast.training.evaluate import evaluate_ranker
from kernelcast.training.registry import list_models
from kernelcast.training.report import write_report
from kernelcast.training.train import TrainResult, train

TRAIN_WORKLOAD = "demo"
HELD_OUT_WORKLOAD = "demo-held-out"

#: Time for the rounds of all training problems, and of all held-out ones: on a machine that is busy with other things
#: every problem gets its share, and no more.
TRAIN_SECONDS = 270.0
HELD_OUT_SECONDS = 110.0
_LEAST_SECONDS = 0.2

#: Time given to one problem's rounds, and to one candidate, on a quiet machine.
TRAIN_PLAN = TimingPlan(rounds=16, seconds=3.0, candidate_seconds=2.0)
HELD_OUT_PLAN = TimingPlan(rounds=30, least_rounds=10, seconds=6.0, candidate_seconds=2.0)


@dataclass(frozen=True)
class Row:
    """One held-out problem: what was selected, and what measuring everything says.

    Attributes:
        selection: made with k = 3, by measuring.
        efficiency: best latency of all candidates over the selection's, both from the exhaustive measurement; None if
            the selected candidate was not measured there.
    """

    selection: Selection
    efficiency: float | None


@dataclass
class OperationResult:
    """What the demonstration did for one operation.

    Attributes:
        collected: the training side's collection.
        trained: the training's result.
        problems: held-out problems.
        efficiency: efficiency@k of the model's ranking on the held-out problems, with the default among the k.
        rows: one a held-out problem.
    """

    operation: str
    collected: CollectSummary | None = None
    trained: TrainResult | None = None
    problems: int = 0
    efficiency: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def achieved(self) -> float | None:
        """Geometric mean of the selections' efficiencies; None without any."""
        found = [row.efficiency for row in self.rows if row.efficiency is not None]
        return statistics.geometric_mean(found) if found else None


@dataclass
class DemoResult:
    """Everything that the demonstration did, and where it lies."""

    device: Device
    operations: list[OperationResult]
    store: Path
    models: Path
    report: Path
    tracking_uri: str
    seconds: float
    complete: bool = True


@dataclass(frozen=True)
class Listener:
    """Whom to tell what is happening.

    Attributes:
        stage: called with a heading at the start of each stage.
        collecting: called with the progress of a collection.
        training: called with what a training does and its share done.
    """

    stage: Callable[[str], None]
    collecting: Callable[[Progress], None]
    training: Callable[[str, float], None]


def run(
    device: Device, *, operations: Sequence[str] = OPERATIONS, tracking: bool = True, listener: Listener
) -> DemoResult:
    """Run every stage on this machine's device.

    Collects the training problems and the held-out problems (every candidate of both), trains one model an operation on
    the former, and selects for the latter with k = 3 as a program would, remembering nothing of earlier runs.

    Args:
        device: this machine's.
        operations: which ones.
        tracking: whether to write MLflow runs.
        listener: whom to tell what is happening.
    """
    started = time.monotonic()
    store = settings.store_dir()
    results = [OperationResult(name) for name in operations]
    complete = True
    for number, (workload, plan, seconds) in enumerate(
        (
            (TRAIN_WORKLOAD, TRAIN_PLAN, TRAIN_SECONDS),
            (HELD_OUT_WORKLOAD, HELD_OUT_PLAN, HELD_OUT_SECONDS),
        )
    ):
        problems_of = held_out_problems if number else training_problems
        deadline = time.monotonic() + seconds
        left = sum(len(problems_of(result.operation, device)) for result in results)
        for result in results:
            problems = problems_of(result.operation, device)
            share = (deadline - time.monotonic()) / left
            left -= len(problems)
            listener.stage(
                f"measuring {len(problems)} {'held-out' if number else 'training'} problems of {result.operation}"
            )
            summary = collect(
                problems,
                device,
                store,
                workload=workload,
                subset="default" if device.kind == "gpu" else "full",
                plan=replace(plan, seconds=min(max(share, _LEAST_SECONDS), plan.seconds)),
                on_progress=listener.collecting,
            )
            complete &= summary.complete
            if not number:
                result.collected = summary
            if not complete:
                return _finish(device, results, store, started, complete=False)

    for result in results:
        listener.stage(f"training {result.operation}")
        data = load_problems(Store(store), result.operation, device=device, workloads=[TRAIN_WORKLOAD])
        result.trained = train(
            data,
            device=device,
            models_dir=settings.models_dir(),
            tracking=tracking,
            on_progress=listener.training,
        )
    for result in results:
        listener.stage(f"selecting for problems of {result.operation} that the model never saw")
        _select(result, device, store)
    return _finish(device, results, store, started, complete=True)


def forget(device: Device) -> None:
    """Delete what earlier demonstrations measured on a device, so that everything is measured again."""
    if (settings.store_dir() / "store.json").exists():
        Store(settings.store_dir()).prune(
            device=device.fingerprint, workloads=[TRAIN_WORKLOAD, HELD_OUT_WORKLOAD]
        )


def _select(result: OperationResult, device: Device, store: Path) -> None:
    assert result.trained is not None
    held_out = load_problems(Store(store), result.operation, device=device, workloads=[HELD_OUT_WORKLOAD])
    wanted = set(held_out_problems(result.operation, device))
    held_out = [item for item in held_out if item.problem in wanted]
    model = RankingModel.load(result.trained.model_dir)
    result.problems = len(held_out)
    result.efficiency = dict(evaluate_ranker(model, held_out).efficiency_with_default)
    # Nothing remembered and nothing kept: the table shows what a first call does, and a second run shows it again.
    selector = Selector(device, cache=False, store=False, mode="verify", top_k=3)
    for item in held_out:
        selection = selector.select(item.problem)
        result.rows.append(Row(selection, _efficiency_of(selection, item)))


def _efficiency_of(selection: Selection, item: ProblemData) -> float | None:
    import numpy as np

    for row, candidate in enumerate(item.table):
        if candidate == selection.candidate:
            return float(np.exp(item.log_latency.min() - item.log_latency[row]))
    return None


def _finish(
    device: Device, results: list[OperationResult], store: Path, started: float, *, complete: bool
) -> DemoResult:
    report = settings.home() / "report.html"
    trained = {result.trained.model_dir for result in results if result.trained is not None}
    if trained:
        models = [found for found in list_models(settings.models_dir()) if found.path in trained]
        write_report(report, models, title=f"kernelcast on {device.name}")
    return DemoResult(
        device=device,
        operations=results,
        store=store,
        models=settings.models_dir(),
        report=report,
        tracking_uri=settings.tracking_uri(),
        seconds=time.monotonic() - started,
        complete=complete,
    )
