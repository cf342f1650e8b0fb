"""How long a fit on the recorded A100 matrix products takes."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_data import A100_FILE, ABSENT, DEVICE, recorded_store


def main(quick: bool) -> dict[str, Any]:
    """Import, read and fit. Quick: one round, on a tenth of the problems."""
    title = "Speed of a fit on the recorded A100 matrix products"
    if not A100_FILE.is_file():
        return {"title": title, "skipped": ABSENT}
    from kernelcast.costmodel import CostModel, RankingModel
    from kernelcast.costmodel.model import design, schema_of
    from kernelcast.kernels.detect import usable_cpus
    from kernelcast.training.data import load_problems

    cores = len(usable_cpus())
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Any) -> Any:
        began = time.perf_counter()
        found = call()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return found

    many = f"fit, {cores} threads"
    with tempfile.TemporaryDirectory() as folder:
        store = timed("import of the three files", lambda: recorded_store(Path(folder)))
        data = timed("records to problems", lambda: load_problems(store, "gemm", device=DEVICE))
    data = data[::10] if quick else data
    for _ in range(1 if quick else 3):
        timed("features", lambda: design(data, schema_of(data)))
        for name, threads in {"fit, 1 thread": 1, many: cores}.items():
            timed(name, lambda threads=threads: RankingModel.fit(data, CostModel(n_jobs=threads)))  # type: ignore[misc]
    rows = sum(len(item.table) for item in data)
    return {
        "title": title,
        "problems": len(data),
        "rows": rows,
        "seconds": seconds,
        "tables": [seconds_table(seconds)],
        "notes": [
            f"{len(data):,} problems, {rows:,} rows, the default parameters: three forests for the order, and the "
            "folds behind the predicted error. A fit includes the features.",
            "Times are wall clock, in turn; smallest and largest show the noise.",
        ],
    }


def seconds_table(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians with the smallest and the largest."""
    return {
        "title": "Seconds",
        "columns": ["what", "median", "smallest", "largest", "rounds"],
        "rows": [
            [name, statistics.median(each), min(each), max(each), len(each)] for name, each in seconds.items()
        ],
    }
