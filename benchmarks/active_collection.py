"""What a quarter of the measurements is worth: the recorded A100 products are collected again by several strategies,
and models fitted on what each took are judged on a workload that none of them saw."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_data import A100_FILE, ABSENT, DEVICE, recorded_store

if TYPE_CHECKING:
    from kernelcast.costmodel import ProblemData
    from kernelcast.datasets import Store
    from kernelcast.datasets.jobs import Strategy
    from kernelcast.datasets.replay import Recording
    from kernelcast.training.evaluate import Figures

SEEDS = 5
TRAIN, TEST = ("timm", "random"), "hf"
SHARE = "25%"
#: How much worse than the full one the model may be, in efficiency@3.
GOAL = 0.002
#: Candidates judged -> the backends they are of.
CANDIDATES: dict[str, tuple[str, ...] | None] = {"all candidates": None, "Triton only": ("triton",)}
FULL, ACTIVE = "everything", "active"
RANDOM, PROBLEMS = "random candidates of every problem", "random problems, all candidates"
_KS = ("1", "2", "3", "5")


def main(quick: bool) -> dict[str, Any]:
    """Collect and fit for each seed. Quick: one seed, a fifth of the problems, small models."""
    title = f"Active collection on recorded A100 matrix products: {SHARE} of the measurements"
    if not A100_FILE.is_file():
        return {"title": title, "skipped": ABSENT}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        recorded = recorded_store(Path(folder) / "recorded")
        for seed in range(1 if quick else SEEDS):
            runs += runs_of(recorded, seed, Path(folder), quick=quick)
    return {"title": title, **page(runs)}


def runs_of(recorded: Store, seed: int, folder: Path, *, quick: bool = False) -> list[dict[str, Any]]:
    """Collect by each strategy and judge what was collected, with one seed."""
    from kernelcast.datasets import Store
    from kernelcast.datasets.replay import Recording, replay

    recording = Recording.read(recorded.root, "gemm", device=DEVICE, workloads=TRAIN)
    if quick:
        recording = some_problems(recording, 5)
    tests = {kind: _problems(recorded, [TEST], backends) for kind, backends in CANDIDATES.items()}
    runs = []
    for name, strategy in strategies(recording, seed).items():
        store, began = folder / f"{name} {seed}", time.monotonic()
        summary = replay(recording, store, strategy=strategy)
        seconds = time.monotonic() - began
        efficiency = {}
        for kind, backends in CANDIDATES.items():
            train = _problems(Store(store), None, backends)
            efficiency[kind] = _judged(train, tests[kind], seed, {"n_estimators": 40} if quick else {})
        runs.append(
            {
                "strategy": name,
                "seed": seed,
                "recorded": len(recording.measurements),
                "measurements": summary.measured,
                "problems": summary.problems,
                "failures": summary.measured - summary.outcomes["ok"],
                "seconds": seconds,
                "efficiency": efficiency,
            }
        )
    return runs


def page(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything but the title."""
    seeds = len({run["seed"] for run in runs})
    goals = [goal(runs, kind, form) for kind, form in FORMS]
    active_s = _mean([run["seconds"] for run in by_strategy(runs)[ACTIVE]])
    return {
        "runs": list(runs),
        "tables": [table(runs, kind) for kind in CANDIDATES],
        "goals": goals,
        "notes": [
            f"Fitted on {' and '.join(TRAIN)}, judged on {TEST}, whose shapes leave the training side; efficiency@k as "
            f"geometric mean over its problems; mean of {seeds} seed{'s' if seeds > 1 else ''} (standard deviation). The "
            "seed is that of the strategy and of the model.",
            f"A measurement is a candidate on a problem, failures included: {runs[0]['recorded']:,} in all. What was "
            "collected once is judged twice: with all candidates, and with its Triton candidates alone.",
            "The model that each strategy is judged by is that of kernelcast train; the active strategy chooses by a "
            "smaller one.",
            *map(goal_note, goals),
            f"The active strategy took {active_s:.0f} s a collection, reading and writing included, on one thread of a "
            "machine that others used at the same time.",
        ],
    }


#: What the goal is held against: candidates, and whether the default is one of the three.
FORMS = (("all candidates", "with_default"), ("all candidates", "plain"), ("Triton only", "plain"))
_FORM_LABELS = {"with_default": "the default among the three", "plain": "the first three of the ranking"}


def strategies(recording: Recording, seed: int) -> dict[str, Strategy]:
    """What is compared, by name."""
    from kernelcast.datasets.jobs import Exhaustive
    from kernelcast.datasets.strategy import Limit, Limited, Random
    from kernelcast.training.active import Active

    limit = Limit.parse(SHARE)
    return {
        FULL: Exhaustive(),
        ACTIVE: Active(recording.device, limit=limit, seed=seed),
        RANDOM: Random(limit, seed=seed),
        # In random order, problem by problem, until the limit ends it.
        PROBLEMS: Limited(Random(seed=seed), limit),
    }


def some_problems(recording: Recording, every: int) -> Recording:
    """One problem of so many."""
    from dataclasses import replace

    problems = recording.problems[::every]
    kept = set(problems)
    return replace(
        recording,
        problems=problems,
        tables=recording.tables[::every],
        measurements={place: each for place, each in recording.measurements.items() if place[0] in kept},
    )


def table(runs: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Means and standard deviations over the seeds, a row a strategy, @3 with its difference from everything."""
    found = by_strategy(runs)
    forms = ("plain", "with_default") if kind == "all candidates" else ("plain",)
    rows = []
    for name, of_one in found.items():
        for form in forms:
            cells = [_cell([run["efficiency"][kind][form][k] for run in of_one]) for k in _KS]
            label = f"{name}, default among the k" if form == "with_default" else name
            against = difference(found[FULL], of_one, kind, form)
            rows.append(
                [
                    label,
                    round(_mean([run["measurements"] for run in of_one])),
                    round(_mean([run["problems"] for run in of_one])),
                    *cells,
                    "" if name == FULL else f"{against:+.4f}",
                ]
            )
    return {
        "title": f"{kind}, {TEST} judged",
        "columns": ["collected", "measurements", "problems", *(f"@{k}" for k in _KS), "@3 - everything"],
        "rows": rows,
    }


def goal(runs: Sequence[Mapping[str, Any]], kind: str, form: str) -> dict[str, Any]:
    """Whether the active model is within :data:`GOAL` of the full one in efficiency@3."""
    found = by_strategy(runs)
    against = {name: difference(found[FULL], found[name], kind, form) for name in (ACTIVE, RANDOM, PROBLEMS)}
    return {"candidates": kind, "form": form, "difference": against, "met": against[ACTIVE] >= -GOAL}


def goal_note(found: Mapping[str, Any]) -> str:
    """One sentence on a goal."""
    others = ", ".join(
        f"{name} {value:+.4f}" for name, value in found["difference"].items() if name != ACTIVE
    )
    return (
        f"{found['candidates']}, {_FORM_LABELS[found['form']]}: efficiency@3 after active collection is "
        f"{found['difference'][ACTIVE]:+.4f} from everything (goal: at least {-GOAL:+.3f}, "
        f"{'met' if found['met'] else 'missed'}); {others}."
    )


def by_strategy(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of each strategy, in the order of its first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["strategy"], []).append(run)
    return found


def difference(
    full: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], kind: str, form: str
) -> float:
    """Of the mean efficiency@3."""
    return _mean([run["efficiency"][kind][form]["3"] for run in other]) - _mean(
        [run["efficiency"][kind][form]["3"] for run in full]
    )


def _judged(
    train: Sequence[ProblemData], test: Sequence[ProblemData], seed: int, params: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Geometric-mean efficiency by form and k of a model fitted on what was collected."""
    from kernelcast.training.data import split_workloads
    from kernelcast.training.evaluate import evaluate

    fitted, held_out = split_workloads([*train, *test], TRAIN, [TEST])
    # The error head does not take part in the order; more threads help nobody on a shared machine.
    fixed = {"error_folds": 1, "random_state": seed, "n_jobs": 1}
    found = evaluate(fitted, held_out, seeds=1, estimator_params={**params, **fixed})
    forms: dict[str, Figures] = {"plain": found.efficiency, "with_default": found.efficiency_with_default}
    return {form: {k: float(values[k]["geomean"] or np.nan) for k in _KS} for form, values in forms.items()}


def _problems(
    store: Store, workloads: Sequence[str] | None, backends: tuple[str, ...] | None
) -> list[ProblemData]:
    from kernelcast.training.data import read_problems

    return read_problems(store, "gemm", device=DEVICE, workloads=workloads, backends=backends).problems


def _cell(values: Sequence[float]) -> str:
    spread = f" ({np.std(values, ddof=1):.4f})" if len(values) > 1 else ""
    return f"{_mean(values):.4f}{spread}"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
