"""Made-up measurements by the million, as a store's segments: to see how fast a large store reads."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

#: Values of each parameter: 1,280 candidates, more than PyTorch records for one matrix product.
_TILES = (16, 32, 64, 128, 256)
_SPACE = {
    "block_k": (16, 32, 64, 128),
    "block_m": _TILES,
    "block_n": _TILES[1:],
    "num_stages": (2, 3, 4, 5),
    "num_warps": (1, 2, 4, 8),
}
_SAMPLES = 3


def candidate_keys(count: int) -> list[tuple[str, str]]:
    """(key, config as JSON) of so many candidates of one variant."""
    from kernelcast.datasets.segments import config_json
    from kernelcast.kernels import Candidate

    found = []
    for values in product(*_SPACE.values()):
        candidate = Candidate.of("triton_tiled", dict(zip(_SPACE, values, strict=True)))
        found.append((candidate.key, config_json(candidate)))
    if count > len(found):
        raise ValueError(f"There are {len(found)} made-up candidates, fewer than {count}.")
    return found[:count]


def made_up_rows(
    first: int, problems: int, candidates: int, *, seed: int = 0, workload: str = ""
) -> pa.Table:
    """A measurement of every candidate on some problems: the columns of a segment, each row a valid record.

    Args:
        first: number of the first problem; equal numbers are equal problems.
        problems: how many.
        candidates: of each problem.
        seed: of the latencies.
        workload: written into the records.
    """
    import pyarrow as pa

    from kernelcast.datasets.record import Environment, Protocol, problem_id, shape_id
    from kernelcast.datasets.segments import facts_json, segment_schema
    from kernelcast.kernels import problem
    from kernelcast.kernels.devices import device

    where = device("a100-sxm4-80gb")
    environment = Environment(torch="2.9", triton="3.5", runtime="cuda-12.8", system="linux-x86_64")
    protocol = Protocol("interleaved-rounds-1", cache="cold", dispatch="eager", inputs="normal")
    keys = candidate_keys(candidates)
    every = [
        problem("gemm", m=16 + number, n=4096, k=4096, dtype="float16")
        for number in range(first, first + problems)
    ]
    rows = problems * candidates
    # The text that record_id hashes, put together from parts that repeat: two microseconds a row instead of fifty.
    ending = (
        ", " + json.dumps(where.fingerprint) + ", " + json.dumps(environment.to_dict(), sort_keys=True) + "]"
    )
    middles = [", " + json.dumps(key) + ending for key, _ in keys]
    ids = [
        hashlib.sha256((start + middle).encode()).hexdigest()[:32]
        for start in ("[" + json.dumps(each.key) for each in every)
        for middle in middles
    ]
    samples = np.exp(np.random.default_rng([seed, first]).normal(4.0, 1.0, (rows, _SAMPLES)))

    def repeated(values: list[str], positions: np.ndarray) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(
            pa.array(positions.astype(np.int32)), pa.array(values, pa.string())
        )

    def same(value: str) -> pa.DictionaryArray:
        return repeated([value], np.zeros(rows))

    of_problem = np.repeat(np.arange(problems), candidates)
    of_candidate = np.tile(np.arange(candidates), problems)
    columns = {
        "id": pa.array(ids, pa.string()),
        "operation": same("gemm"),
        "workload": same(workload),
        "device": same(where.name),
        "device_fingerprint": same(where.fingerprint),
        "variant": same("triton_tiled"),
        "config": repeated([config for _, config in keys], of_candidate),
        "candidate_key": repeated([key for key, _ in keys], of_candidate),
        "problem": repeated([each.key for each in every], of_problem),
        "problem_id": repeated([problem_id(each) for each in every], of_problem),
        "shape_id": repeated([shape_id(each) for each in every], of_problem),
        "dtype": same("float16"),
        "latency_us": pa.array(np.median(samples, axis=1)),
        "samples_us": pa.ListArray.from_arrays(
            np.arange(0, samples.size + 1, _SAMPLES, dtype=np.int32), pa.array(samples.ravel())
        ),
        "sample_count": pa.array(np.full(rows, _SAMPLES)),
        "outcome": same("ok"),
        "detail": pa.array([""] * rows, pa.string()),
        "source": same(environment.source),
        "environment": same(facts_json(environment)),
        "protocol": pa.array(
            [
                facts_json(protocol).replace("null", repr(value))
                for value in samples.std(axis=1).round(5).tolist()
            ],
            pa.string(),
        ),
        "created_at": pa.array(np.full(rows, 1.7e9)),
    }
    return pa.table(columns, schema=segment_schema())


def fill(root: Path, problems: int, candidates: int, *, a_segment: int = 250, seed: int = 0) -> int:
    """Write so many made-up measurements into a store, as segments of some problems each. Returns the rows."""
    from kernelcast.datasets import Store
    from kernelcast.kernels.devices import device

    store = Store(root)
    store.add_device(device("a100-sxm4-80gb"))
    for first in range(0, problems, a_segment):
        rows = made_up_rows(
            first, min(a_segment, problems - first), candidates, seed=seed, workload=f"part-{first}"
        )
        store.add_table(rows)
    return problems * candidates
