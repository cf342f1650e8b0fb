"""The measurements that benchmarks fit on: PyTorch's A100 records where they are, else made-up ones of the same shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kernelcast.costmodel import ProblemData
    from kernelcast.datasets import Store

DEVICE = "a100-sxm4-80gb"
#: Beside the repository, as the records are not part of it.
A100_FILE = Path(__file__).resolve().parents[2] / "shared" / "data" / "autoheuristic" / "a100_mm.zip"
#: Workload -> member of the file.
A100_WORKLOADS = {
    "hf": "a100/a100_hf_train_mm.txt",
    "timm": "a100/a100_timm_train_mm.txt",
    "random": "a100/a100_mm.txt",
}
ABSENT = (
    "the recorded measurements are absent: PyTorch's AutoHeuristic file a100_mm.zip is looked for in "
    "../shared/data/autoheuristic, beside the repository"
)


def recorded_store(folder: Path) -> Store:
    """Import the A100 records into a new store, each file as a workload of its own."""
    from kernelcast.datasets import Store, import_files
    from kernelcast.kernels.devices import device

    for workload, member in A100_WORKLOADS.items():
        import_files(
            "autoheuristic",
            [f"{A100_FILE}:{member}"],
            device=device(DEVICE),
            workload=workload,
            store=folder,
        )
    return Store(folder)


def synthetic_problems(count: int, seed: int = 0) -> list[ProblemData]:
    """Problems with the real candidates and features, and latencies from the roofline with noise: for speed alone."""
    from kernelcast.costmodel import AnalyticModel, ProblemData
    from kernelcast.kernels import candidates, problem
    from kernelcast.kernels.devices import device

    where = device(DEVICE)
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        m, n, k = (int(2**exponent) for exponent in rng.uniform(4, 13, 3))
        described = problem("gemm", m=m, n=n, k=k, dtype="float16")
        table = candidates(described, where, subset="default")
        roofline = AnalyticModel().predict(described, table, where).log_latency
        latency = roofline + rng.normal(0.0, 0.3, len(table))
        found.append(ProblemData(described, where, table, latency, np.full(len(table), 0.01)))
    return found
