"""How good the ranking is by folds over shapes: mixed products, padding, flex attention, and the A100's matrix products."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_data import A100_FILE, DEVICE, recorded_store

if TYPE_CHECKING:
    from kernelcast.costmodel import ProblemData
    from kernelcast.training.data import MeasuredProblem

#: Operation -> (file, its member).
FILES = {
    "mixed_gemm": "mixedmm_a100_data.zip",
    "flex_attention": "flexattention_a100_data.zip",
    "pad_mm": "pad_mm_a100_data.zip",
}
#: The matrix products of all three workloads, tiles alone.
PRODUCTS = "gemm, Triton only"
FOLDS, SEEDS = 5, 5
#: A choice this much slower than the best is right.
TOLERANCE = 0.02
_KS = (1, 2, 3, 5)


def main(quick: bool) -> dict[str, Any]:
    """Five folds by shape of each kind. Quick: one seed."""
    title = "Ranking of recorded A100 mixed products, flex attention and padding, by folds over shapes"
    present = {name: A100_FILE.parent / file for name, file in FILES.items()}
    present = {name: path for name, path in present.items() if path.is_file()}
    if not present:
        names = ", ".join(FILES.values())
        return {
            "title": title,
            "skipped": f"the recorded measurements are absent: {names} in {A100_FILE.parent}",
        }
    seeds = 1 if quick else SEEDS
    figures = {name: judge(recorded(name, path), seeds) for name, path in present.items()}
    if A100_FILE.is_file() and not quick:
        figures[PRODUCTS] = judge(recorded_products(), seeds)
    return {
        "title": title,
        "figures": figures,
        "tables": [
            {
                "title": "Problems that the model did not see",
                "columns": [
                    "operation",
                    "problems",
                    *(f"@{k}" for k in _KS),
                    "right at 1",
                    "chosen fails",
                    "noise floor",
                ],
                "rows": [
                    [
                        name,
                        found["problems"],
                        *(found["efficiency"][str(k)] for k in _KS),
                        found["right"],
                        found["failing"],
                        found["noise_floor"],
                    ]
                    for name, found in figures.items()
                ],
            }
        ],
        "notes": [
            f"efficiency@k as geometric mean over problems, {FOLDS} folds by shape, mean of {seeds} seed{'s' if seeds > 1 else ''}. "
            f"Right: within {TOLERANCE:.0%} of the best. A first choice that fails is charged with the default's time, or "
            "where there is none with the slowest that worked.",
        ],
    }


def recorded(operation: str, path: Path) -> list[MeasuredProblem]:
    """The problems of one file."""
    from kernelcast.datasets import Store, import_files
    from kernelcast.kernels.devices import device
    from kernelcast.training.data import read_problems

    with tempfile.TemporaryDirectory() as folder:
        import_files(
            "autoheuristic", [str(path)], device=device(DEVICE), workload="recorded", store=Path(folder)
        )
        return read_problems(Store(Path(folder)), operation, device=DEVICE).problems


def recorded_products() -> list[MeasuredProblem]:
    """The matrix products of all workloads, candidates of Triton alone."""
    from kernelcast.training.data import read_problems

    with tempfile.TemporaryDirectory() as folder:
        store = recorded_store(Path(folder))
        return read_problems(store, "gemm", device=DEVICE, backends=("triton",)).problems


def judge(problems: Sequence[ProblemData], seeds: int) -> dict[str, Any]:
    """The figures of one kind of records."""
    import numpy as np

    from kernelcast.training.evaluate import noise_floor

    curves, failing = [], []
    for seed in range(seeds):
        found, failed = fold_curves(problems, seed)
        curves.append(found)
        failing.append(failed)
    every = np.array(curves)
    return {
        "problems": len(problems),
        "efficiency": {
            str(k): float(np.exp(np.log(every[:, :, place]).mean(axis=1)).mean())
            for place, k in enumerate(_KS)
        },
        "right": float((every[:, :, 0] >= 1.0 / (1.0 + TOLERANCE)).mean()),
        "failing": float(np.mean(failing)),
        "noise_floor": noise_floor(problems)[0],
    }


def fold_curves(problems: Sequence[ProblemData], seed: int) -> tuple[Any, float]:
    """(efficiency [problems, ks], share of problems whose first choice fails), each problem left out once."""
    import numpy as np

    from kernelcast.costmodel import CostModel, RankingModel
    from kernelcast.training.data import folds_by_shape, full_table
    from kernelcast.training.evaluate import rankable
    from kernelcast.training.metrics import efficiency_curve
    from kernelcast.training.recipe import hyperparameters

    curves, failed = [], 0
    for train, test in folds_by_shape(problems, FOLDS, 0):
        parameters = hyperparameters(len(train), {"error_folds": 0}, seed=seed)
        model = RankingModel.fit(train, CostModel(**parameters))
        for item in test:
            case = rankable(full_table(item))
            order = model.predict(case.problem, case.table, case.device, uncertainty=False).order()
            curves.append(efficiency_curve(case.latency_us, order, default=case.default, ks=_KS))
            failed += not np.isfinite(case.latency_us[order[0]])
    return np.array(curves), failed / len(curves)
