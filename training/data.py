"""From the store to problems: what a model is fitted on and judged by, and how the two are kept apart."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.costmodel import ProblemData
from kernelcast.datasets import ShapeKFold, by_workload, shape_id
from kernelcast.errors import ModelError, UnknownNameError
from kernelcast.kernels import (
    Candidate,
    CandidateTable,
    Device,
    Problem,
    operation,
    operation_names,
    variants,
)
from kernelcast.kernels.devices import device as known_device

if TYPE_CHECKING:
    import pandas as pd

    from kernelcast.datasets import Store

_COLUMNS = (
    "id",
    "workload",
    "variant",
    "candidate_key",
    "problem",
    "latency_us",
    "samples_us",
    "outcome",
    "protocol",
    "created_at",
)


@dataclass(frozen=True)
class MeasuredProblem(ProblemData):
    """A problem as the store holds it: with what its repeated samples say of the noise.

    Attributes:
        halves: float64 [2, candidates], rows as in ``table``: natural logarithm of the median of the first half of the
            samples and of the rest, in the order taken; NaN where a candidate has one sample only.
    """

    halves: np.ndarray | None = None


@dataclass(frozen=True)
class ProblemSet:
    """What :func:`read_problems` found.

    Attributes:
        problems: one item for each problem and workload with at least two working candidates.
        left_out: how many problems had fewer, and so nothing to compare.
        records: records behind ``problems``, failures included.
    """

    problems: list[ProblemData]
    left_out: int
    records: int


def nothing_to_compare(left_out: int) -> str:
    """What to say where no problem of a :class:`ProblemSet` is left."""
    return (
        f"None of the {left_out} measured problems has two candidates that worked, so there is nothing to compare. "
        "Collect more."
    )


@dataclass(frozen=True)
class FullTable:
    """Every candidate that was tried on one problem, those included that did not work.

    Attributes:
        problem: what was computed.
        device: where.
        table: the candidates, the default first, the others by variant and key.
        latency_us: float64 [candidates]; infinite where the candidate failed.
        default: the default's row; None where the data have no default.
    """

    problem: Problem
    device: Device
    table: CandidateTable
    latency_us: np.ndarray
    default: int | None


def load_problems(
    store: Store,
    operation_name: str,
    *,
    device: str | Device,
    workloads: Collection[str] | None = None,
    backends: Collection[str] | None = None,
) -> list[ProblemData]:
    """The problems of :func:`read_problems`, without its counts."""
    return read_problems(
        store, operation_name, device=device, workloads=workloads, backends=backends
    ).problems


def read_problems(
    store: Store,
    operation_name: str,
    *,
    device: str | Device,
    workloads: Collection[str] | None = None,
    backends: Collection[str] | None = None,
) -> ProblemSet:
    """Read the measured problems of an operation on a device.

    There is one item for each problem and workload. Its candidates are in a fixed order: the default, then the others
    by variant and key. Where one candidate was measured in several environments or by several sources, its newest
    record counts, a failure like any other; of equally new ones the one with the largest id.

    Args:
        store: measurements.
        operation_name: the operation; it need not be in the catalogue.
        device: a device, its name or its fingerprint.
        workloads: only these; all where None.
        backends: only variants of these backends, such as ``("triton",)``. A variant that is not in the catalogue has
            the backend that its name begins with: ``"vendor"`` or ``"triton"``.

    Raises:
        ModelError: the store holds nothing of the kind; the message lists what it holds.
    """
    found = _find_device(store, operation_name, device)
    frame = store.frame(
        list(_COLUMNS), operation=operation_name, device=found.fingerprint, workloads=workloads
    )
    missing = sorted(set(workloads or ()) - set(frame["workload"].unique()))
    if missing or frame.empty:
        wanted = f" of the workload {', '.join(missing)}" if missing else ""
        raise ModelError(
            f"There are no records of {operation_name} on {found.name}{wanted}. {_holdings(store)}"
        )
    if backends is not None:
        backend_of = {name: backend_of_variant(operation_name, name) for name in frame["variant"].unique()}
        frame = frame[frame["variant"].astype(object).map(backend_of).isin(set(backends))]
        if frame.empty:
            raise ModelError(
                f"No record of {operation_name} on {found.name} is of the backend {', '.join(backends)}; "
                f"those there are: {', '.join(sorted(set(backend_of.values())))}."
            )
    frame = frame.sort_values(["created_at", "id"]).drop_duplicates(
        ["problem", "workload", "candidate_key"], keep="last"
    )
    return _problem_set(frame, operation_name, found)


def default_candidate(operation_name: str) -> Candidate:
    """The candidate that a user has without kernelcast; ``vendor`` for an operation that is not in the catalogue."""
    return (
        operation(operation_name).default if operation_name in operation_names() else Candidate.of("vendor")
    )


def backend_of_variant(operation_name: str, variant_name: str) -> str:
    """The backend of a variant, by the catalogue or else by its name; ``"unknown"`` where neither tells."""
    known = variants(operation_name) if operation_name in operation_names() else {}
    if variant_name in known:
        return known[variant_name].backend
    if variant_name.startswith("triton"):
        return "triton"
    return "vendor" if variant_name.startswith("vendor") else "unknown"


def full_table(item: ProblemData) -> FullTable:
    """An item with its failed candidates among the others."""
    default = default_candidate(item.problem.operation)
    latency_us = np.exp(item.log_latency)
    table = item.table
    if item.failed:
        tried = [*item.table, *item.failed]
        latency_us = np.concatenate([latency_us, np.full(len(item.failed), np.inf)])
        order = sorted(range(len(tried)), key=lambda row: _place(tried[row], default))
        table, latency_us = _table_of([tried[row] for row in order]), latency_us[order]
    return FullTable(item.problem, item.device, table, latency_us, _row_of(table, default))


def dataset_hash(data: Iterable[ProblemData]) -> str:
    """16 hexadecimal digits over the problems, devices, workloads, candidates, latencies and failures of some data.

    The order of the items does not matter.
    """
    digests = []
    for item in data:
        columns = [
            [block.variant, {name: column.tolist() for name, column in block.columns.items()}, block.length]
            for block in item.table.blocks
        ]
        failed = [candidate.key for candidate in item.failed]
        facts = [item.problem.key, item.device.fingerprint, item.workload, columns, failed]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(np.asarray(item.log_latency, dtype="<f8").tobytes())
        digests.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


def split_workloads(
    data: Sequence[ProblemData], train: Collection[str], test: Collection[str]
) -> tuple[list[ProblemData], list[ProblemData]]:
    """(training, test) by workload. Shapes that occur in both leave the training side.

    Raises:
        UnknownNameError: no item is of a named workload; the message lists those there are.
        ModelError: a side names no workload.
        KernelcastError: a workload is on both sides, or nothing is left to train on.
    """
    columns = {
        "workload": [item.workload for item in data],
        "shape_id": [shape_id(item.problem) for item in data],
    }
    if not train or not test:
        raise ModelError(
            f"The {'test' if train else 'training'} side names no workload. "
            f"There are: {', '.join(sorted(set(columns['workload'])))}."
        )
    fitted, held_out = by_workload(columns, train, test)
    return [data[i] for i in fitted], [data[i] for i in held_out]


def folds_by_shape(
    data: Sequence[ProblemData], folds: int, seed: int
) -> list[tuple[list[ProblemData], list[ProblemData]]]:
    """(training, test) of each fold. Problems of one shape, whatever their dtype or layout, are in one fold.

    Raises:
        KernelcastError: fewer than two folds, or fewer shapes than folds.
    """
    splitter = ShapeKFold(folds, seed=seed)
    split = splitter.split(groups=[shape_id(item.problem) for item in data])
    return [([data[i] for i in train], [data[i] for i in test]) for train, test in split]


def _find_device(store: Store, operation_name: str, device: str | Device) -> Device:
    held = store.devices()
    if isinstance(device, Device):
        if device.fingerprint in held:
            return held[device.fingerprint]
        raise ModelError(f"There are no records of {device.name} with these facts. {_holdings(store)}")
    found = [each for each in held.values() if device in (each.name, each.fingerprint)]
    if not found:
        try:
            name = known_device(device).name
        except UnknownNameError:
            name = device
        found = [each for each in held.values() if each.name == name]
    if not found:
        raise ModelError(f"There are no records of {operation_name} on {device}. {_holdings(store)}")
    if len(found) > 1:
        prints = ", ".join(sorted(each.fingerprint for each in found))
        raise ModelError(
            f"{len(found)} devices with different facts are called {device}; name one by: {prints}."
        )
    return found[0]


def _holdings(store: Store) -> str:
    frame = store.frame(["operation", "device", "workload"]).astype(object).drop_duplicates()
    if frame.empty:
        return "The store is empty: collect measurements or import some."
    rows = sorted(zip(frame["operation"], frame["device"], frame["workload"], strict=True))
    listed = [
        f"{name} on {on} ({', '.join(workload or 'no workload' for *_, workload in group)})"
        for (name, on), group in groupby(rows, key=lambda row: row[:2])
    ]
    return f"The store holds: {'; '.join(listed)}."


def _problem_set(frame: pd.DataFrame, operation_name: str, device: Device) -> ProblemSet:
    import pandas as pd

    default = default_candidate(operation_name)
    # Each distinct text is parsed once: there are tens of candidates and thousands of problems in 100,000 records.
    problem_code, problem_texts = pd.factorize(frame["problem"].astype(object), sort=True)
    workload_code, workload_names = pd.factorize(frame["workload"].astype(object), sort=True)
    candidate_code, candidate_texts = pd.factorize(frame["candidate_key"].astype(object))
    candidates = [Candidate.from_key(text) for text in candidate_texts]
    place = np.empty(len(candidates), dtype=np.intp)
    place[sorted(range(len(candidates)), key=lambda i: _place(candidates[i], default))] = np.arange(
        len(candidates)
    )

    order = np.lexsort((place[candidate_code], problem_code, workload_code))
    problem_code, workload_code, candidate_code = (
        codes[order] for codes in (problem_code, workload_code, candidate_code)
    )
    worked = (frame["outcome"] == "ok").to_numpy()[order]
    with np.errstate(divide="ignore", invalid="ignore"):
        log_latency = np.log(frame["latency_us"].to_numpy(dtype=np.float64)[order])
    error_log = _error_logs(frame["protocol"])[order]
    samples = frame["samples_us"].to_numpy()
    halves = half_medians([samples[row] for row in order])

    changed = (np.diff(problem_code) != 0) | (np.diff(workload_code) != 0)
    bounds = np.concatenate([[0], np.flatnonzero(changed) + 1, [len(order)]])
    problems: list[ProblemData] = []
    records = left_out = 0
    parsed: dict[int, Problem] = {}
    for start, end in pairwise(bounds):
        rows = np.arange(start, end)
        good = rows[worked[start:end]]
        if len(good) < 2:
            left_out += 1
            continue
        code = int(problem_code[start])
        if code not in parsed:
            parsed[code] = Problem.from_dict(json.loads(problem_texts[code]))
        failed = rows[~worked[start:end]]
        records += len(rows)
        problems.append(
            MeasuredProblem(
                problem=parsed[code],
                device=device,
                table=_table_of([candidates[i] for i in candidate_code[good]]),
                log_latency=log_latency[good],
                error_log=error_log[good],
                failed=tuple(candidates[i] for i in candidate_code[failed]),
                workload=workload_names[workload_code[start]],
                halves=np.log(halves[:, good]),
            )
        )
    return ProblemSet(problems, left_out, records)


def half_medians(samples: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    """Medians of the first half of each row's samples and of the rest: float64 [2, rows]; NaN with fewer than two."""
    counts = np.array([len(row) for row in samples], dtype=np.intp)
    if not counts.sum():
        return np.full((2, len(counts)), np.nan)
    values = np.concatenate([np.asarray(row, dtype=np.float64) for row in samples])
    first = np.cumsum(counts) - counts
    position = np.arange(len(values)) - np.repeat(first, counts)
    later = position >= np.repeat(counts // 2, counts)
    group = 2 * np.repeat(np.arange(len(counts)), counts) + later
    values = values[np.lexsort((values, group))]
    size = np.bincount(group, minlength=2 * len(counts))
    start = np.cumsum(size) - size
    last = len(values) - 1
    low = values[np.minimum(start + np.maximum(size - 1, 0) // 2, last)]
    high = values[np.minimum(start + size // 2, last)]
    medians = ((low + high) / 2).reshape(len(counts), 2).T.copy()
    medians[:, counts < 2] = np.nan
    return medians


def _error_logs(protocols: pd.Series) -> np.ndarray:
    values = [json.loads(text).get("error_log") for text in protocols]
    return np.array([math.nan if value is None else float(value) for value in values])


def _place(candidate: Candidate, default: Candidate) -> tuple[Any, ...]:
    """Sorts the default first, and candidates that share a block beside each other."""
    return (candidate != default, candidate.variant, [name for name, _ in candidate.config], candidate.key)


def _table_of(candidates: Iterable[Candidate]) -> CandidateTable:
    """A table of candidates in the order given; a variant that changed its parameters has a block for each set."""
    runs = groupby(candidates, key=lambda one: (one.variant, [name for name, _ in one.config]))
    return CandidateTable(block for _, run in runs for block in CandidateTable.of(run).blocks)


def _row_of(table: CandidateTable, candidate: Candidate) -> int | None:
    start = 0
    for block in table.blocks:
        if block.variant == candidate.variant and tuple(sorted(block.columns)) == tuple(
            n for n, _ in candidate.config
        ):
            for row in range(block.length):
                if block.at(row) == candidate:
                    return start + row
        start += block.length
    return None
