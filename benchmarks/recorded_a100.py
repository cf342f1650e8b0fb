"""How good the ranking is on PyTorch's recorded A100 matrix products, on a workload that the model has not seen."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_data import A100_FILE, A100_WORKLOADS, ABSENT, DEVICE, recorded_store

if TYPE_CHECKING:
    from kernelcast.training.evaluate import Evaluation

SEEDS = 5
_KS = ("1", "2", "3", "5", "10")
_BASELINES = {
    "default": "default alone",
    "best_fixed": "best fixed candidate",
    "analytic": "analytic roofline",
    "random": "random order",
}

#: Triton candidates only, A100, efficiency at k = 1, 3, 5.
PEERS = {
    "PyTorch AutoHeuristic (seen in its training)": (0.933, 0.980, 0.987),
    "nvMatmulHeuristics": (0.901, 0.961, 0.983),
    "torch-diode": (0.903, 0.963, 0.981),
}
PEERS_NOTE = (
    "The peers' figures were measured by others on the same records, not by this run: Triton candidates only, on A100; "
    "one figure each, where ours are by the workload left out."
)
#: Candidates judged -> the backends they are of.
CANDIDATES: dict[str, tuple[str, ...] | None] = {"all candidates": None, "Triton only": ("triton",)}


def main(quick: bool) -> dict[str, Any]:
    """Leave each workload out in turn. Quick: one seed."""
    title = "Ranking of recorded A100 matrix products, each workload left out in turn"
    if not A100_FILE.is_file():
        return {"title": title, "skipped": ABSENT}
    from kernelcast.training.data import read_problems, split_workloads
    from kernelcast.training.evaluate import evaluate

    seeds = 1 if quick else SEEDS
    results: dict[str, dict[str, Evaluation]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = recorded_store(Path(folder))
        for kind, backends in CANDIDATES.items():
            found = read_problems(store, "gemm", device=DEVICE, backends=backends)
            results[kind] = {}
            for held_out in A100_WORKLOADS:
                others = [name for name in A100_WORKLOADS if name != held_out]
                train, test = split_workloads(found.problems, others, [held_out])
                # The head that predicts errors takes half of a fit, and no part in the order.
                results[kind][held_out] = evaluate(
                    train, test, seeds=seeds, estimator_params={"error_folds": 0}
                )
    figures = {
        kind: {name: each.to_json() for name, each in found.items()} for kind, found in results.items()
    }
    return {
        "title": title,
        "figures": figures,
        "peers": {name: dict(zip(("1", "3", "5"), values, strict=True)) for name, values in PEERS.items()},
        "tables": [*quality_tables(figures), peers_table(figures["Triton only"])],
        "notes": [
            f"efficiency@k as geometric mean (5th percentile, worst) over the problems of the workload left out; mean of "
            f"{seeds} seed{'s' if seeds > 1 else ''}. Shapes of both sides leave the training side.",
            *noise_notes(figures),
            PEERS_NOTE,
        ],
    }


def quality_tables(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A table for each kind of candidates and workload left out, from evaluations as plain JSON values."""
    tables = []
    for kind, workloads in figures.items():
        for name, found in workloads.items():
            rows: dict[str, Mapping[str, Any] | None] = {"model": found["efficiency"]}
            if found["baselines"]["default"] is not None:
                rows["model, with the default among the k"] = found["efficiency_with_default"]
            rows |= {label: found["baselines"][key] for key, label in _BASELINES.items()}
            tables.append(
                {
                    "title": f"{kind}, {name} left out: {found['test_problems']:,} problems, "
                    f"{found['candidates_per_problem']:.1f} candidates each, {found['train_problems']:,} to fit on",
                    "columns": ["ranking", *(f"@{k}" for k in _KS)],
                    "rows": [
                        [label, *(_cell(values[k]) for k in _KS)] for label, values in rows.items() if values
                    ],
                }
            )
    return tables


def peers_table(workloads: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The geometric means on Triton candidates beside those that are published of others."""
    rows = [
        [f"kernelcast, {name} left out", *(found["efficiency"][k]["geomean"] for k in ("1", "3", "5"))]
        for name, found in workloads.items()
    ]
    rows += [[name, *values] for name, values in PEERS.items()]
    return {
        "title": "Beside published figures: Triton candidates only, geometric mean",
        "columns": ["ranking", "@1", "@3", "@5"],
        "rows": rows,
    }


def noise_notes(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """What repeats say of the best that can be reached, and how much the seed moves @1."""
    notes = []
    for kind, workloads in figures.items():
        floors = [
            f"{name} {each['noise_floor']:.4f}" for name, each in workloads.items() if each["noise_floor"]
        ]
        if floors:
            notes.append(f"Noise floor of efficiency@1, {kind}: {', '.join(floors)}.")
        spreads = [
            f"{name} {each['efficiency_std']['1']['geomean']:.4f}"
            for name, each in workloads.items()
            if each["efficiency_std"]["1"]["geomean"] is not None
        ]
        if spreads:
            notes.append(f"Standard deviation of efficiency@1 over seeds, {kind}: {', '.join(spreads)}.")
    return notes


def _cell(statistics: Mapping[str, float]) -> str:
    return f"{statistics['geomean']:.3f} ({statistics['p5']:.2f}, {statistics['worst']:.2f})"
