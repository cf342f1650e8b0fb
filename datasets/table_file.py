"""Import of plain tables, CSV or Parquet, of any operation: a map says what each column means.

A map is ``NAME=COLUMN`` and ``NAME:=VALUE`` by commas, or a JSON file ``{"columns": {...}, "constants": {...}}``. A name is

- ``latency_us`` (or ``_ns``, ``_ms``, ``_s``): the time of the row, exactly one of them;
- ``variant``, ``dtype``, ``allow_tf32``, ``threads``, ``outcome``;
- ``config.NAME``: a parameter of the candidate;
- ``option.NAME``: an option of the problem, for an operation that the catalogue lacks;
- anything else: a dimension, or an option that the catalogue's schema has.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernelcast.datasets import segments
from kernelcast.datasets.imported import (
    MAX_US,
    Records,
    RowFault,
    known_operation,
    plain_configs,
    problem_of_facts,
    read_json,
    shortened,
    slug,
    text_of,
    typed,
)
from kernelcast.datasets.importing import (
    PARQUET,
    Content,
    Importer,
    ImportOption,
    Parsed,
    bounded,
    read_content,
    register_importer,
)
from kernelcast.datasets.record import OUTCOMES, Environment
from kernelcast.errors import ImportFileError, InvalidProblemError, SettingsError
from kernelcast.kernels import Device, Problem

#: A file that says what the columns mean has one short line a column.
_MAX_MAP_BYTES = 2**20

_UNITS_US = {"latency_ns": 1e-3, "latency_us": 1.0, "latency_ms": 1e3, "latency_s": 1e6}

#: Rows are objects while they are read; more of them than this do not fit.
_MAX_ROWS = 5_000_000


@dataclass(frozen=True)
class _Map:
    """What the columns mean: name -> column, and name -> the same value in every row."""

    columns: dict[str, str]
    constants: dict[str, Any]
    latency: str


@register_importer
class Table(Importer):
    """Tables of measurements of any origin."""

    name = "table"
    doc = "A CSV file with a header, or a Parquet file, of any operation; --map says what its columns mean."
    example = (
        "times.csv --operation gemm --map m=M,n=N,k=K,dtype:=float16,variant=library,latency_ms=time "
        "--device a100 --workload mine"
    )
    options = (
        ImportOption("operation", "The operation that was measured.", required=True),
        ImportOption(
            "map", "NAME=COLUMN and NAME:=VALUE by commas, or a JSON file; see the data page.", required=True
        ),
    )

    max_bytes = 2**30

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__(given)
        self._operation = self.given["operation"]
        if known_operation(self._operation) is None and self._operation != slug(self._operation):
            raise SettingsError(
                f"--operation is {self._operation!r}; it takes lower-case letters, digits and underscores."
            )
        self._map = _read_map(self.given["map"])

    def parse(self, file: str, *, device: Device, workload: str, on_bytes: Callable[[int], None]) -> Parsed:
        content = read_content(file, on_bytes=on_bytes, max_bytes=self.max_bytes)
        wanted = sorted({*self._map.columns.values()})
        parquet = content.data.startswith(PARQUET)
        rows = list(_parquet_rows(file, content, wanted) if parquet else _csv_rows(file, content, wanted))
        numbers = [number for number, _ in rows]
        values = [
            {
                **self._map.constants,
                **{name: row[column] for name, column in self._map.columns.items()},
            }
            for _, row in rows
        ]

        def refusal(number: int, problem: str) -> ImportFileError:
            # A Parquet file has no lines.
            if parquet:
                return ImportFileError(file, f"row {numbers[number]}: {bounded(problem)}")
            return ImportFileError(file, bounded(problem), line=numbers[number])

        for number, row in enumerate(values):
            for name, value in row.items():
                if name.startswith("config.") and _is_no_value(value):
                    parameter = name.removeprefix("config.")
                    raise refusal(
                        number,
                        f"the parameter {parameter} is {shortened(value)}; it must be a number, a text or a flag.",
                    )
        configs = plain_configs(
            file,
            [
                {
                    name.removeprefix("config."): typed(value)
                    for name, value in row.items()
                    if name.startswith("config.")
                }
                for row in values
            ],
            lambda number: f"{'row' if parquet else 'line'} {numbers[number]}",
        )
        records = Records(
            file,
            environment=Environment(source=f"{self.name}:{content.name}"),
            protocol=self.name,
            device=device,
            workload=workload,
        )
        problems: dict[str, Problem] = {}
        for number, (row, config) in enumerate(zip(values, configs, strict=True)):
            try:
                facts = {
                    name: value
                    for name, value in row.items()
                    if name not in (self._map.latency, "variant", "outcome")
                    and not name.startswith("config.")
                }
                key = repr(facts)
                problem = problems.get(key) or problems.setdefault(
                    key, problem_of_facts(self._operation, facts)
                )
                variant = row.get("variant", "table")
                if not isinstance(variant, str) or not variant.strip():
                    raise RowFault(f"variant is {shortened(variant)}; it must be a text.")
                outcome, samples_us = _measured(row, self._map.latency)
            except (InvalidProblemError, RowFault) as error:
                raise refusal(number, str(error)) from error
            records.add(
                problem,
                variant.strip(),
                config,
                where=f"row {numbers[number]}" if parquet else "",
                line=None if parquet else numbers[number],
                samples_us=samples_us,
                outcome=outcome,
                detail="" if outcome == "ok" else "as the table says",
            )
        return records.parsed()


def _is_no_value(value: Any) -> bool:
    """Whether a parameter's value is nothing, not a number, or infinite. (pandas writes NaN to Parquet as nothing.)"""
    if isinstance(value, str):
        return value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity")
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def _read_map(text: str) -> _Map:
    columns: dict[str, Any]
    constants: dict[str, Any]
    said = "--map"
    if text.endswith(".json") and "=" not in text:
        said = f"--map {text}"
        try:
            _, data = read_json(text, on_bytes=lambda _: None, max_bytes=_MAX_MAP_BYTES)
        except ImportFileError as error:
            raise SettingsError(f"--map: {error}") from error
        data = data if isinstance(data, dict) else {"columns": None}
        columns, constants = data.get("columns", {}), data.get("constants", {})
        if not (
            isinstance(columns, dict)
            and isinstance(constants, dict)
            and not set(data) - {"columns", "constants"}
            and all(isinstance(column, str) for column in columns.values())
        ):
            raise SettingsError(
                f'--map: {text} must be {{"columns": {{NAME: COLUMN}}, "constants": {{NAME: VALUE}}}}.'
            )
    else:
        columns, constants = {}, {}
        for word in text.split(","):
            name, equals, value = word.strip().partition("=")
            target = constants if name.endswith(":") else columns
            name = name.removesuffix(":")
            if not equals or not name or not value or name in columns or name in constants:
                raise SettingsError(
                    f"--map: {word!r} must be NAME=COLUMN or NAME:=VALUE, such as m=M, and each name once."
                )
            target[name] = value
    twice = sorted(set(columns) & set(constants))
    if twice:
        raise SettingsError(f"{said} gives {shortened(', '.join(twice))} twice.")
    latency = [name for name in _UNITS_US if name in columns]
    if len(latency) != 1:
        raise SettingsError(
            f"{said} must name the column of one of {', '.join(_UNITS_US)}; it names {', '.join(latency) or 'none'}."
        )
    return _Map(columns, constants, latency[0])


def _csv_rows(file: str, content: Content, wanted: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, column -> text) of each row."""
    reader = csv.reader(io.StringIO(text_of(file, content), newline=""), strict=True)
    try:
        header = next(reader, None)
        if not header:
            raise ImportFileError(file, "it does not begin with a line of column names.", line=1)
        _check_columns(file, header, wanted)
        places = {column: header.index(column) for column in wanted}
        for number, fields in enumerate(reader):
            if number >= _MAX_ROWS:
                raise ImportFileError(file, f"it has more than {_MAX_ROWS} rows. Split it.")
            if not fields:
                continue
            if len(fields) != len(header):
                raise ImportFileError(
                    file,
                    f"the line has {len(fields)} fields; it must have {len(header)}.",
                    line=reader.line_num,
                )
            yield reader.line_num, {column: fields[place] for column, place in places.items()}
    except csv.Error as error:
        raise ImportFileError(file, f"it is no CSV file ({error}).", line=reader.line_num) from error


def _parquet_rows(file: str, content: Content, wanted: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row from 1, column -> value) of each row."""
    pa = segments.require_arrow()
    try:
        opened = pa.parquet.ParquetFile(pa.BufferReader(content.data))
        _check_columns(file, opened.schema_arrow.names, wanted)
        # Repeated values take no room in the file: its size does not limit what comes out.
        if opened.metadata.num_rows > _MAX_ROWS:
            raise ImportFileError(file, f"it has more than {_MAX_ROWS} rows. Split it.")
        number = 0
        for batch in opened.iter_batches(batch_size=8192, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ImportFileError(
            file, f"its Parquet cannot be read ({shortened(str(error))}). Fetch it again."
        ) from error


def _check_columns(file: str, header: list[str], wanted: list[str]) -> None:
    for column in wanted:
        if header.count(column) != 1:
            found = "twice" if column in header else f"in none of {shortened(', '.join(header))}"
            raise ImportFileError(
                file, f"--map names the column {shortened(column)}, which is there {found}.", line=1
            )


def _measured(row: Mapping[str, Any], latency: str) -> tuple[str, tuple[float, ...]]:
    """(outcome, samples in microseconds) of a row. A failure needs no time."""
    outcome = row.get("outcome", "ok")
    if outcome not in OUTCOMES:
        raise RowFault(f"outcome is {shortened(outcome)}; it must be one of {', '.join(OUTCOMES)}.")
    if outcome != "ok":
        return outcome, ()
    value = row[latency]
    try:
        latency_us = float(value) * _UNITS_US[latency]
    except (TypeError, ValueError, OverflowError):
        latency_us = math.nan
    if not 0 < latency_us <= MAX_US:
        raise RowFault(
            f"{latency} is {shortened(value)}; it must be a positive number of at most {MAX_US / _UNITS_US[latency]:.3g}."
        )
    return outcome, (latency_us,)
