"""What it is worth to choose for each problem how many candidates are measured: recorded A100 matrix products, each workload
left out in turn, at several target regrets, beside one k for all problems."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from bench_data import A100_FILE, A100_WORKLOADS, ABSENT, DEVICE, recorded_store

SEEDS = 5
#: The target that the goal is about, and the most candidates measured a problem.
TARGET, MOST_MEASURED = "0.005", 3.0
BOUNDS = ("mean", "problem")
#: Of the problems of all workloads left out.
WHOLE = "all together"


def main(quick: bool) -> dict[str, Any]:
    """Leave each workload out in turn. Quick: one seed, small models."""
    title = (
        "Candidates measured by target regret: recorded A100 matrix products, each workload left out in turn"
    )
    if not A100_FILE.is_file():
        return {"title": title, "skipped": ABSENT}
    from kernelcast.training.data import read_problems, split_workloads
    from kernelcast.training.evaluate import evaluate

    seeds = 1 if quick else SEEDS
    small = {"n_estimators": 40, "learning_rate": 0.25} if quick else None
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = read_problems(recorded_store(Path(folder)), "gemm", device=DEVICE)
        for held_out in A100_WORKLOADS:
            others = [name for name in A100_WORKLOADS if name != held_out]
            train, test = split_workloads(found.problems, others, [held_out])
            result = evaluate(train, test, seeds=seeds, estimator_params=small)
            figures[held_out] = {
                "problems": result.test_problems,
                "candidates_per_problem": result.candidates_per_problem,
                "calibration": dict(result.calibration),
                **result.regret_over_measured,
            }
    return {"title": title, "figures": figures, **page(figures, seeds)}


def page(figures: Mapping[str, Mapping[str, Any]], seeds: int) -> dict[str, Any]:
    """Tables, the goal and notes, from the figures of each workload left out."""
    together = pooled(figures)
    shown = {**figures, WHOLE: together}
    met = goals(shown)
    return {
        "together": together,
        "tables": [
            *(adaptive_table(name, found) for name, found in shown.items()),
            fixed_table(shown),
            coverage_table(figures),
        ],
        "goals": met,
        "notes": [
            "Regret is 1 less the geometric mean of best / selected over the problems; measured candidates include the "
            f"default, which is always one of them. Mean of {seeds} seed{'s' if seeds > 1 else ''}.",
            "One k for all: the smallest k whose regret is not larger; in brackets its regret.",
            "Errors and the map from expected to true regrets are fitted on training problems that were left out in turn; "
            "nothing of the workload left out was seen.",
            "Bound on the mean: the regret is to be the target over problems like those in training. Bound on the problem: the "
            "expected regret of each problem is to be under it.",
            *goal_notes(met),
        ],
    }


def pooled(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same figures over the problems of all workloads left out: each problem counts once."""
    weights = np.array([found["problems"] for found in figures.values()], dtype=np.float64)
    weights /= weights.sum()

    def regret(values: list[float]) -> float:
        return float(-np.expm1(weights @ np.log1p(-np.array(values))))

    first = next(iter(figures.values()))
    fixed = {k: regret([found["fixed"][k] for found in figures.values()]) for k in first["fixed"]}
    whole: dict[str, Any] = {"problems": sum(found["problems"] for found in figures.values()), "fixed": fixed}
    for bound in BOUNDS:
        whole[bound] = {}
        for target in first[bound]:
            rows = [found[bound][target] for found in figures.values()]
            lost = regret([row["regret"] for row in rows])
            whole[bound][target] = {
                "regret": lost,
                "measured": float(weights @ [row["measured"] for row in rows]),
                "fixed_k": next((int(k) for k, value in fixed.items() if value <= lost), None),
            }
    return whole


def goals(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Whether each part of the goal is met, by the bound, for each workload left out and for all together."""
    met: dict[str, dict[str, dict[str, Any]]] = {}
    for bound in BOUNDS:
        met[bound] = {}
        for name, found in figures.items():
            row = found[bound][TARGET]
            met[bound][name] = {
                "regret": row["regret"],
                "measured": row["measured"],
                "held": row["regret"] <= float(TARGET),
                "few": row["measured"] <= MOST_MEASURED,
                "fewer_than_fixed": row["fixed_k"] is None or row["measured"] < row["fixed_k"],
            }
    return met


def goal_notes(met: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The goal in a sentence for each bound."""
    notes = []
    for bound, workloads in met.items():
        parts = []
        for name, one in workloads.items():
            held = "held" if one["held"] else "not held"
            few = f"{'at most' if one['few'] else 'more than'} {MOST_MEASURED:g} measured"
            fewer = f"{'fewer' if one['fewer_than_fixed'] else 'no fewer'} than one k for all"
            parts.append(
                f"{name} {one['regret']:.2%} with {one['measured']:.2f} measured ({held}, {few}, {fewer})"
            )
        notes.append(f"Target regret {float(TARGET):.1%}, bound on the {bound}: {'; '.join(parts)}.")
    return notes


def adaptive_table(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Target regret, what came of it, and the k for all that does as well."""
    rows = []
    for bound in BOUNDS:
        for target, row in found[bound].items():
            k = row["fixed_k"]
            same = "more than 10" if k is None else f"{k} ({found['fixed'][str(k)]:.2%})"
            regret, measured = f"{row['regret']:.2%}", f"{row['measured']:.2f}"
            rows.append([bound, f"{float(target):.1%}", regret, measured, same])
    return {
        "title": f"{name}{'' if name == WHOLE else ' left out'}: {found['problems']:,} problems",
        "columns": ["bound on", "target", "regret", "measured", "one k for all"],
        "rows": rows,
    }


def fixed_table(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Regret with one k for all problems."""
    ks = list(next(iter(figures.values()))["fixed"])
    return {
        "title": "Regret with one k for all problems, the default among the k (k = 1: the first of the ranking)",
        "columns": ["workload left out", *(f"@{k}" for k in ks)],
        "rows": [[name, *(f"{found['fixed'][k]:.2%}" for k in ks)] for name, found in figures.items()],
    }


def coverage_table(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Shares of the differences to the best that are within one and two predicted deviations."""
    rows = [
        [name, *(f"{found['calibration'][f'within_{n}']:.2f}" for n in (1, 2))]
        for name, found in figures.items()
    ]
    return {
        "title": "Differences to the best within predicted deviations (normal errors: 0.68 and 0.95)",
        "columns": ["workload left out", "within 1", "within 2"],
        "rows": rows,
    }
