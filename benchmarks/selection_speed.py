"""How long a selection takes on the host: features, trees, rules, the remembered answer, the drop-in, the import."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_rounds
import numpy as np
from bench_data import A100_FILE, DEVICE, recorded_store, synthetic_problems

if TYPE_CHECKING:
    from kernelcast.costmodel import ProblemData, RankingModel
    from kernelcast.kernels import CandidateTable

ROWS = (32, 512, 2000)
_PROBLEM = {"m": 1024, "n": 4096, "k": 4096, "dtype": "float16", "layout": "nt"}
#: Problems fitted on: the trees' number and depth, which decide the speed, do not depend on it.
_FITTED_PROBLEMS = 300


def main(quick: bool) -> dict[str, Any]:
    """Time everything. Quick: fewer rounds, and a model of fewer trees on made-up data."""
    count = 15 if quick else 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, source = _model(folder, quick)
        calls, facts = _calls(model, folder)
        samples = bench_rounds.rounds(calls, count)
        overhead = samples[_DROP_IN] - samples[_TORCH]
    figures = bench_rounds.summarise(samples)
    imports = import_times(5 if quick else 20)
    forest = model.forests["relative"]
    return {
        "title": "Speed of a selection on the host",
        "figures": figures,
        "drop_in_overhead_us": float(np.median(overhead)),
        "import": imports,
        "model": {
            "trees": forest.trees,
            "depth": forest.depth,
            "features": len(model.feature_names),
            "fitted_on": source,
        },
        **facts,
        "tables": [
            speed_table(figures),
            {
                "title": "Import, in a new process",
                "columns": ["what", "ms"],
                "rows": [
                    ["python alone", imports["bare_ms"]],
                    ["import kernelcast, on top of it", imports["extra_ms"]],
                ],
            },
        ],
        "notes": [
            bench_rounds.noise_note(figures, count),
            f"Selecting for {DEVICE}, {facts['problem']}: {forest.trees} trees of depth {forest.depth} and "
            f"{len(model.feature_names)} features, fitted on {source}.",
            f"The drop-in adds {np.median(overhead):.2f} us to torch.mm (median over rounds of the difference; quartiles "
            f"{np.percentile(overhead, 25):.2f} and {np.percentile(overhead, 75):.2f}).",
            f"The whole space has {facts['space']:,} configs, of which {facts['legal']:,} are legal here.",
            f"Import times are medians of {imports['pairs']} pairs of processes, one after the other; quartiles of the "
            f"difference: {imports['quartiles_ms'][0]:.1f} and {imports['quartiles_ms'][1]:.1f} ms.",
        ],
    }


_DROP_IN = "kernelcast.matmul, 64 x 64 x 64, seen before"
_TORCH = "torch.mm, 64 x 64 x 64"


def speed_table(figures: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The table of what :func:`bench_rounds.summarise` gave."""
    return {
        "title": "Median time of one call",
        "columns": ["what", "us", "in reference loops", "interquartile range"],
        "rows": [
            [name, each["us"], each["loops"], f"{each['spread']:.1%}"] for name, each in figures.items()
        ],
    }


def import_times(pairs: int) -> dict[str, Any]:
    """What ``import kernelcast`` adds to a Python that does nothing else, from processes in turn."""
    bare, full = [], []
    for _ in range(pairs):
        bare.append(_process_ms("pass"))
        full.append(_process_ms("import kernelcast"))
    extra = [one - other for one, other in zip(full, bare, strict=True)]
    return {
        "pairs": pairs,
        "bare_ms": statistics.median(bare),
        "extra_ms": statistics.median(extra),
        "quartiles_ms": [float(each) for each in np.percentile(extra, [25, 75])],
    }


def _process_ms(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return (time.perf_counter() - began) * 1e3


def _model(folder: Path, quick: bool) -> tuple[RankingModel, str]:
    """A model as selection uses it: saved, and loaded without the library that fitted it; and what it was fitted on."""
    from kernelcast.costmodel import CostModel, RankingModel
    from kernelcast.training.data import load_problems

    data: list[ProblemData]
    if quick or not A100_FILE.is_file():
        count = 20 if quick else _FITTED_PROBLEMS
        data, source = synthetic_problems(count), f"{count} made-up problems"
    else:
        data = load_problems(recorded_store(folder / "store"), "gemm", device=DEVICE)[:_FITTED_PROBLEMS]
        source = f"{len(data)} recorded problems"
    estimator = CostModel(
        n_estimators=100 if quick else 400, max_depth=8, error_folds=0 if quick else 3, n_jobs=1
    )
    RankingModel.fit(data, estimator).save(folder / "model")
    return RankingModel.load(folder / "model"), source


def _calls(model: RankingModel, folder: Path) -> tuple[dict[str, Callable[[], Any]], dict[str, Any]]:
    import torch

    import kernelcast as kc
    from kernelcast.kernels import candidates, problem, variant, variants
    from kernelcast.kernels.detect import detect
    from kernelcast.kernels.devices import device
    from kernelcast.runtime import Selector

    torch.set_num_threads(1)
    where = device(DEVICE)
    described = problem("gemm", **_PROBLEM)
    legal = candidates(described, where)
    forests = list(model.forests.values())
    calls: dict[str, Callable[[], Any]] = {}
    for rows in ROWS:
        table = some_rows(legal, rows)
        features = model.features(described, table, where)
        calls[f"features, {rows:,} candidates"] = lambda table=table: model.features(described, table, where)  # type: ignore[misc]
        calls[f"trees, {rows:,} candidates"] = lambda features=features: [
            f.predict(features) for f in forests
        ]  # type: ignore[misc]
        calls[f"features + prediction + ranking, {rows:,} candidates"] = (
            lambda table=table: model.predict(described, table, where).order()  # type: ignore[misc]
        )

    tiled = variant("gemm", "triton_tiled")
    space = tiled.space()
    some = space.take(np.linspace(0, space.length - 1, 2000).astype(int))
    calls["rules of triton_tiled, 2,000 configs"] = lambda: some.take(tiled.legal(described, where, some))
    calls["all legal candidates of the problem"] = lambda: candidates(described, where)
    calls["quick subset of the problem"] = lambda: candidates(described, where, subset="default")

    here = Selector(detect("cpu"), cache=folder / "cache", store=False, models=folder / "none", mode="verify")
    small = problem("gemm", m=64, n=64, k=64, threads=1)
    here.select(small)
    calls["Selector.select, remembered"] = lambda: here.select(small)

    # Mode off remembers torch's own for the key, so what is left of the difference is the drop-in itself.
    kc.configure(mode="off", cache=False, store=False)
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    kc.matmul(a, b)
    calls[_DROP_IN] = lambda: kc.matmul(a, b)
    calls[_TORCH] = lambda: torch.mm(a, b)
    whole = sum(each.space().length for each in variants("gemm").values())
    return calls, {"problem": str(described), "space": whole, "legal": len(legal)}


def some_rows(table: CandidateTable, count: int) -> CandidateTable:
    """``count`` candidates of a table at even distances.

    Raises:
        ValueError: the table has fewer.
    """
    from kernelcast.kernels import CandidateTable

    if len(table) < count:
        raise ValueError(f"There are {len(table)} legal candidates; {count} were asked for.")
    chosen = np.linspace(0, len(table) - 1, count).astype(int)
    blocks, start = [], 0
    for block in table.blocks:
        inside = chosen[(chosen >= start) & (chosen < start + block.length)] - start
        blocks.append(block.take(inside))
        start += block.length
    return CandidateTable(blocks)
