"""Import of PyTorch AutoHeuristic collections: text files of measured choices.

A file is a line of JSON (``shared_memory``, ``device_capa``, ``name``, ``numerical_features``,
``categorical_features``), a CSV header, and one line a measurement: the features, ``choice`` and ``feedback``, which is
the latency in milliseconds, or ``inf`` for a failure. Source of the format: torch/_inductor/autoheuristic in PyTorch 2.5.

All lines of one problem and choice become one record with all samples in their order. Rows are read and grouped as
columns; line by line only where something is wrong, to say where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.datasets import segments
from kernelcast.datasets.autoheuristic_kinds import KINDS, Kind, RowError
from kernelcast.datasets.importing import (
    Content,
    Importer,
    Parsed,
    bounded,
    read_content,
    register_importer,
    shortened,
)
from kernelcast.datasets.record import Environment, Protocol, problem_id, record_id, shape_id
from kernelcast.errors import ImportFileError, InvalidProblemError, InvalidRecordError
from kernelcast.kernels import Candidate, Device, Problem

if TYPE_CHECKING:
    import pyarrow as pa

#: Lines before the first measurement.
_HEADER_LINES = 2

_TARGETS = ("choice", "feedback")

#: A thousand years. Nothing that was measured took longer.
_MAX_MS = 3.2e13


@register_importer
class AutoHeuristic(Importer):
    """Files that ``torch._inductor.config.collect_autoheuristic`` wrote."""

    name = "autoheuristic"
    doc = "Text files of PyTorch AutoHeuristic: mm, mixed_mm, pad_mm and flex_attention; plain, .gz or in a .zip."
    example = "a100_mm.zip:a100_mm.txt --device a100 --workload random"

    def parse(self, file: str, *, device: Device, workload: str, on_bytes: Callable[[int], None]) -> Parsed:
        content = read_content(file, on_bytes=on_bytes, max_bytes=self.max_bytes)
        source = _read_header(file, content, device)
        return _records(source, _read_rows(source), device, workload)


@dataclass(frozen=True)
class _Source:
    """A file, and what its first two lines say: its kind, its columns in order, and where the rows begin."""

    file: str
    name: str
    data: bytes
    kind: Kind
    columns: tuple[str, ...]
    start: int

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number, line) of each measurement. Collections that were broken off and resumed hold empty lines."""
        for number, line in enumerate(self.data[self.start :].split(b"\n"), start=_HEADER_LINES + 1):
            line = line.removesuffix(b"\r")
            if line:
                yield number, line

    def refusal(self, row: int, problem: str) -> ImportFileError:
        """The error that names the line of a row."""
        number, _ = next(islice(self.lines(), row, None))
        return ImportFileError(self.file, bounded(problem), line=number)


def _read_header(file: str, content: Content, device: Device) -> _Source:
    data = content.data
    if not data.strip():
        raise ImportFileError(file, "it is empty.")
    first_end = data.find(b"\n")
    second_end = data.find(b"\n", first_end + 1)
    if first_end < 0 or second_end < 0:
        raise ImportFileError(file, "it ends within its header. It was cut short: fetch it again.")
    try:
        header = json.loads(data[:first_end])
        columns = tuple(data[first_end + 1 : second_end].decode().strip().split(","))
    except (ValueError, RecursionError) as error:
        said = bounded(str(error) or "nested too deeply")
        raise ImportFileError(file, f"it does not begin with a line of JSON ({said}).", line=1) from error
    kind = _read_kind(file, header)
    _check_device(file, header, device)
    expected = {*kind.numerical, *kind.categorical}
    if columns[-2:] != _TARGETS or len(columns) != len(expected) + 2 or set(columns[:-2]) != expected:
        raise ImportFileError(
            file,
            f"the columns are {bounded(','.join(columns))}; they must be "
            f"{','.join((*kind.numerical, *kind.categorical, *_TARGETS))} (features in any order).",
            line=2,
        )
    return _Source(file, content.name, data, kind, columns, second_end + 1)


def _read_kind(file: str, header: Any) -> Kind:
    if not isinstance(header, dict) or not isinstance(header.get("name"), str):
        raise ImportFileError(file, "the header does not name what was measured.", line=1)
    kind = KINDS.get(header["name"])
    if kind is None:
        raise ImportFileError(
            file, f"it holds {shortened(header['name'])}; what can be read is {', '.join(KINDS)}.", line=1
        )
    for key, expected in (("numerical_features", kind.numerical), ("categorical_features", kind.categorical)):
        listed = header.get(key)
        if not isinstance(listed, list) or sorted(map(str, listed)) != sorted(expected):
            raise ImportFileError(file, f"{key} is {shortened(listed)}; it must be {list(expected)}.", line=1)
    return kind


def _check_device(file: str, header: dict[str, Any], device: Device) -> None:
    capability, shared = header.get("device_capa"), header.get("shared_memory")
    pair = capability if isinstance(capability, list) and len(capability) == 2 else [None, None]
    if not all(type(value) is int for value in (*pair, shared)):
        raise ImportFileError(
            file,
            f"device_capa is {shortened(capability)} and shared_memory {shortened(shared)}; they must be numbers.",
            line=1,
        )
    major, minor = pair
    prefix = "gfx" if device.vendor == "amd" else "sm"
    architecture = f"{prefix}{major}{minor}"
    # A letter may follow: sm90a, gfx942 (of 9.4), gfx90a.
    if not device.architecture.startswith(architecture) or (
        device.vendor != "amd" and device.architecture.removeprefix(architecture) not in ("", "a")
    ):
        raise ImportFileError(
            file,
            f"it was measured on a device of compute capability {major}.{minor} ({architecture}), "
            f"but {device.name} is {device.architecture}. Give the right --device.",
            line=1,
        )
    # The driver's max_shared_mem: what one block may opt in to.
    if device.shared_bytes_per_block and shared != device.shared_bytes_per_block:
        raise ImportFileError(
            file,
            f"it was measured on a device with {shared} bytes of shared memory a block, "
            f"but {device.name} has {device.shared_bytes_per_block}. Give the right --device.",
            line=1,
        )


def _read_rows(source: _Source) -> pa.Table:
    """The rows as columns: numbers as int64, texts as dictionaries, feedback as float64."""
    pa = segments.require_arrow()
    import pyarrow.csv

    text = pa.dictionary(pa.int32(), pa.string())
    types = {name: pa.int64() for name in source.kind.numerical}
    types |= dict.fromkeys((*source.kind.categorical, "choice"), text)
    types["feedback"] = pa.float64()
    if not source.data[source.start :].strip():
        raise ImportFileError(source.file, "it holds no measurement. It was cut short: fetch it again.")
    if not source.data.endswith(b"\n"):
        _raise_first_fault(source)
    try:
        rows = pyarrow.csv.read_csv(
            pa.BufferReader(pa.py_buffer(source.data).slice(source.start)),
            read_options=pyarrow.csv.ReadOptions(column_names=list(source.columns), use_threads=False),
            parse_options=pyarrow.csv.ParseOptions(
                quote_char=False, escape_char=False, ignore_empty_lines=True
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types, null_values=[], strings_can_be_null=False, check_utf8=True
            ),
        )
    except pa.ArrowException as error:
        _raise_first_fault(source)
        # Reached only if pyarrow is stricter than the line-by-line reading.
        raise ImportFileError(source.file, f"its rows cannot be read: {bounded(str(error))}.") from error
    rows = rows.unify_dictionaries().combine_chunks()
    feedback_ms = rows.column("feedback").to_numpy()
    # Not a number, zero, negative; or too large for anything but a fault.
    bad = ~(feedback_ms > 0) | ((feedback_ms > _MAX_MS) & ~np.isinf(feedback_ms))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise source.refusal(
            row,
            f"the feedback is {float(feedback_ms[row])!r}; it must be a positive number of milliseconds, "
            f"at most {_MAX_MS:.3g}, or inf for a failure.",
        )
    return rows


def _raise_first_fault(source: _Source) -> None:
    """Read line by line until one is wrong, and say which."""
    lines = list(source.lines())
    unfinished = None if source.data.endswith(b"\n") else lines.pop()
    for number, line in lines:
        problem = _fault(line, source)
        if problem:
            raise ImportFileError(source.file, bounded(problem), line=number)
    if unfinished is not None:
        raise ImportFileError(
            source.file,
            "the last line does not end. The file was cut short: fetch it again.",
            line=unfinished[0],
        )


def _fault(line: bytes, source: _Source) -> str | None:
    try:
        fields = line.decode().split(",")
    except UnicodeDecodeError:
        return "the line is not text."
    if len(fields) != len(source.columns):
        return f"the line has {len(fields)} fields; it must have {len(source.columns)}."
    for name, value in zip(source.columns, fields, strict=True):
        if name in source.kind.numerical:
            digits = value.strip().removeprefix("-")
            if not digits.isdecimal() or len(digits) > 19 or abs(int(value)) >= 2**63:
                return f"{name} is {value!r}; it must be a whole number."
        elif name == "feedback":
            try:
                float(value)
            except ValueError:
                return (
                    f"the feedback is {value!r}; it must be a number of milliseconds, or inf for a failure."
                )
    return None


def _records(source: _Source, rows: pa.Table, device: Device, workload: str) -> Parsed:
    """Group the rows by problem and candidate, and write each group as one row of the store's columns."""
    problems, problem_of_row = _problems(source, rows)
    candidates, candidate_of_row = _candidates(source, rows)
    group_of_row = problem_of_row.astype(np.int64) * len(candidates) + candidate_of_row
    # Stable: repeats keep the order in which they were taken.
    order = np.argsort(group_of_row, kind="stable")
    groups, starts, counts = np.unique(group_of_row[order], return_index=True, return_counts=True)
    feedback_us = rows.column("feedback").to_numpy()[order] * 1e3
    finite = np.isfinite(feedback_us)
    sample_counts = np.add.reduceat(finite.astype(np.int64), starts)
    samples_us = feedback_us[finite]
    environment = Environment(source=f"autoheuristic:{source.name}")
    table = _table(
        problems,
        groups // len(candidates),
        candidates,
        groups % len(candidates),
        samples_us,
        sample_counts,
        environment,
        device,
        workload,
    )
    # A choice that failed always is a failure; one that failed at times has those repeats left out.
    dropped = int((counts - sample_counts)[sample_counts > 0].sum())
    return Parsed(environment.source, table, rows.num_rows, len(problems), dropped)


def _problems(source: _Source, rows: pa.Table) -> tuple[list[Problem], np.ndarray]:
    """The distinct problems in order of first appearance, and the number of each row's."""
    pd = segments.require_pandas()
    features = source.columns[:-2]
    numbers = {name: rows.column(name).to_numpy() for name in source.kind.numerical}
    texts = {name: rows.column(name).chunk(0) for name in source.kind.categorical}
    codes = {**numbers, **{name: column.indices.to_numpy() for name, column in texts.items()}}
    frame = pd.DataFrame({name: codes[name] for name in features}, copy=False)
    raw_of_row = frame.groupby(list(features), sort=False).ngroup().to_numpy()
    _, first_rows = np.unique(raw_of_row, return_index=True)
    words = {name: column.dictionary.to_pylist() for name, column in texts.items()}
    distinct: dict[str, int] = {}
    problems: list[Problem] = []
    number_of_raw = np.empty(len(first_rows), dtype=np.int64)
    for raw, row in enumerate(first_rows):
        facts: dict[str, Any] = {name: int(column[row]) for name, column in numbers.items()}
        facts |= {name: words[name][int(codes[name][row])] for name in texts}
        try:
            problem = source.kind.problem(facts)
        except (RowError, InvalidProblemError) as error:
            raise source.refusal(int(row), str(error)) from error
        number = distinct.setdefault(problem.key, len(problems))
        if number == len(problems):
            problems.append(problem)
        number_of_raw[raw] = number
    return problems, number_of_raw[raw_of_row]


def _candidates(source: _Source, rows: pa.Table) -> tuple[list[Candidate], np.ndarray]:
    """The distinct candidates, and the number of each row's."""
    column = rows.column("choice").chunk(0)
    codes = column.indices.to_numpy()
    candidates: dict[Candidate, int] = {}
    number_of_code = np.empty(len(column.dictionary), dtype=np.int64)
    for code, choice in enumerate(column.dictionary.to_pylist()):
        try:
            candidate = source.kind.candidate(choice)
        except (InvalidRecordError, ValueError):
            # A number that no config holds.
            candidate = None
        if candidate is None:
            row = int(np.flatnonzero(codes == code)[0])
            raise source.refusal(
                row, f"the choice {shortened(choice)} is not known; it must be {source.kind.choices}."
            )
        number_of_code[code] = candidates.setdefault(candidate, len(candidates))
    return list(candidates), number_of_code[codes]


def _table(
    problems: list[Problem],
    problem_numbers: np.ndarray,
    candidates: list[Candidate],
    candidate_numbers: np.ndarray,
    samples_us: np.ndarray,
    sample_counts: np.ndarray,
    environment: Environment,
    device: Device,
    workload: str,
) -> pa.Table:
    """Rows of the store's columns: one a group, ``sample_counts`` of the samples each, none for a failure."""
    arrow = segments.require_arrow()
    length = len(sample_counts)
    fingerprint = device.fingerprint
    ids = [
        record_id(problems[p].key, candidates[c].key, fingerprint, environment)
        for p, c in zip(problem_numbers, candidate_numbers, strict=True)
    ]
    failed = sample_counts == 0
    offsets = np.concatenate([[0], np.cumsum(sample_counts)])
    medians = _medians(samples_us, sample_counts)

    def of_problem(value: Callable[[Problem], str]) -> pa.Array:
        return _repeat([value(problem) for problem in problems], problem_numbers)

    def of_candidate(value: Callable[[Candidate], str]) -> pa.Array:
        return _repeat([value(candidate) for candidate in candidates], candidate_numbers)

    def same(value: str) -> pa.Array:
        return _repeat([value], np.zeros(length, dtype=np.int64))

    columns = {
        "id": arrow.array(ids, arrow.string()),
        "operation": of_problem(lambda problem: problem.operation),
        "workload": same(workload),
        "device": same(device.name),
        "device_fingerprint": same(fingerprint),
        "variant": of_candidate(lambda candidate: candidate.variant),
        "config": of_candidate(segments.config_json),
        "candidate_key": of_candidate(lambda candidate: candidate.key),
        "problem": of_problem(lambda problem: problem.key),
        "problem_id": of_problem(problem_id),
        "shape_id": of_problem(shape_id),
        "dtype": of_problem(lambda problem: problem.dtype),
        "latency_us": arrow.array(medians),
        "samples_us": arrow.ListArray.from_arrays(
            arrow.array(offsets, arrow.int32()), arrow.array(samples_us)
        ),
        "sample_count": arrow.array(sample_counts),
        # The file says inf whatever went wrong; what a tile that does not fit raises is by far the commonest.
        "outcome": _repeat(["ok", "out_of_resources"], failed.astype(np.int64)),
        "detail": arrow.array(np.where(failed, "recorded as inf", "").tolist(), arrow.string()),
        "source": same(environment.source),
        "environment": same(segments.facts_json(environment)),
        "protocol": arrow.array(_protocols(samples_us, sample_counts, medians), arrow.string()),
        "created_at": arrow.array(np.zeros(length)),
    }
    return segments.conform(arrow.table(columns))


def _repeat(values: list[str], numbers: np.ndarray) -> pa.Array:
    """``values[numbers]`` as a dictionary array; values may come more than once."""
    pa = segments.require_arrow()
    distinct = {value: i for i, value in enumerate(dict.fromkeys(values))}
    codes = np.array([distinct[value] for value in values], dtype=np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(codes[numbers]), pa.array(list(distinct), pa.string()))


def _medians(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The median of each run of ``counts`` values; NaN for an empty run."""
    runs = np.repeat(np.arange(len(counts)), counts)
    ordered = values[np.lexsort((values, runs))]
    starts = np.cumsum(counts) - counts
    some = counts > 0
    medians = np.full(len(counts), np.nan)
    lower = ordered[(starts + (counts - 1) // 2)[some]]
    upper = ordered[(starts + counts // 2)[some]]
    medians[some] = (lower + upper) / 2
    return medians


def _protocols(samples_us: np.ndarray, counts: np.ndarray, medians: np.ndarray) -> list[str]:
    """The protocol of each record as JSON, with the standard error of its log latency.

    As for our own measurements: 1.4826 turns the median absolute deviation of a normal distribution into its standard
    deviation, and 1.2533 = sqrt(pi / 2) is the standard error of a median over that of a mean.
    """
    deviations = np.abs(np.log(samples_us / np.repeat(medians, counts)))
    errors = 1.2533 * 1.4826 * _medians(deviations, counts) / np.sqrt(np.maximum(counts, 1))
    errors[counts < 2] = np.nan
    return [segments.facts_json(Protocol("autoheuristic", error_log=error)) for error in errors.tolist()]
