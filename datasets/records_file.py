"""Import of kernelcast's own exports, Parquet or CSV: the same records, under the same ids.

A file has the columns of the store (:data:`kernelcast.datasets.segments.COLUMNS`). Every row is read as a record and
written anew, so that what is derived (the id, the latency, the hashes) cannot contradict what was measured. A Parquet
export brings the facts of its devices along; those of a CSV file must be of the table of devices, or of this machine.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernelcast.datasets import segments
from kernelcast.datasets.imported import shortened, text_of
from kernelcast.datasets.importing import (
    PARQUET,
    Content,
    Importer,
    Parsed,
    read_content,
    register_importer,
)
from kernelcast.datasets.record import Measurement
from kernelcast.errors import ImportFileError, InvalidRecordError, KernelcastError, StoreError
from kernelcast.kernels import Device
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device as table_device

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are objects at once.
_CHUNK_ROWS = 8192

#: Repeated values take no room in a Parquet file: its size does not limit what comes out.
_MAX_ROWS = 20_000_000

#: What is read of a row; the rest follows from it.
_READ = ("id", *segments.MEASUREMENT_COLUMNS)

#: A year that no clock shows.
_LATEST = 4e11


@register_importer
class RecordsFile(Importer):
    """Files that ``kernelcast data export`` wrote."""

    name = "records"
    doc = "Exports of kernelcast's own (.parquet, .csv), of any operations: the same records, under the same ids."
    example = "gemm.parquet"
    self_describing = True

    def parse(
        self, file: str, *, device: Device | None, workload: str, on_bytes: Callable[[int], None]
    ) -> Parsed:
        content = read_content(file, on_bytes=on_bytes, max_bytes=self.max_bytes, nul=True)
        # A line, or a row, as messages name it.
        if content.data.startswith(PARQUET):
            rows, brought = _parquet(file, content)
            lines = None
        else:
            rows, lines = _csv(file, content)
            brought = []
        known = _Devices(file, device, brought)
        tables: list[pa.Table] = []
        problems: set[str] = set()
        for start in range(0, rows.num_rows, _CHUNK_ROWS):
            chunk: list[Measurement] = []
            refuse = _Refuse(file, lines, start)
            for record in _records(rows.slice(start, _CHUNK_ROWS), chunk, refuse):
                known.check(record, refuse, len(chunk))
                problems.add(record.problem.key)
                chunk.append(replace(record, workload=workload) if workload else record)
            try:
                tables.append(segments.table_of(chunk))
            except (TypeError, ValueError, segments.require_arrow().ArrowException) as error:
                raise ImportFileError(file, f"its rows cannot be kept ({shortened(str(error))}).") from error
        if not tables:
            raise ImportFileError(file, "it holds no record.")
        return Parsed(
            source=content.name,
            table=segments.require_arrow().concat_tables(tables),
            rows=rows.num_rows,
            problems=len(problems),
            dropped=0,
            identity=file,
            devices=known.used(),
        )


class _Refuse:
    """Makes the error that names a row of a part of a file."""

    def __init__(self, file: str, lines: Sequence[int] | None, start: int) -> None:
        self._file, self._lines, self._start = file, lines, start

    def __call__(self, row: int, problem: str) -> ImportFileError:
        number = self._start + row
        if self._lines is None:
            return ImportFileError(self._file, f"row {number + 1}: {problem}")
        return ImportFileError(self._file, problem, line=self._lines[number])


class _Devices:
    """The devices that rows may name: those that the file brings, the one that the user named, the table's, and this
    machine's.
    """

    def __init__(self, file: str, given: Device | None, brought: Sequence[Device]) -> None:
        self._file = file
        self._given = given
        self._known = {each.fingerprint: each for each in (*brought, *([given] if given else []))}
        self._used: dict[str, Device] = {}

    def check(self, record: Measurement, refuse: _Refuse, row: int) -> None:
        """Raises ImportFileError if a record's device is another than the one named, or its facts are not known."""
        fingerprint = record.device_fingerprint
        if fingerprint in self._used:
            return
        if self._given is not None and fingerprint != self._given.fingerprint:
            raise refuse(
                row,
                f"the record is of the device {shortened(record.device)} with the fingerprint "
                f"{shortened(fingerprint)}, but --device is {self._given.name} ({self._given.fingerprint}).",
            )
        if fingerprint not in self._known:
            for find in (lambda: table_device(record.device), lambda: detect("cpu")):
                try:
                    found = find()
                except KernelcastError:
                    continue
                self._known.setdefault(found.fingerprint, found)
        if fingerprint not in self._known:
            raise refuse(
                row,
                f"the record is of the device {shortened(record.device)} with the fingerprint "
                f"{shortened(fingerprint)}, whose facts are neither here nor in the file. Export to .parquet, which "
                "brings them along, or merge the stores.",
            )
        self._used[fingerprint] = self._known[fingerprint]

    def used(self) -> tuple[Device, ...]:
        """The devices that records named."""
        return tuple(self._used.values())


def _records(rows: pa.Table, taken: Sequence[Measurement], refuse: _Refuse) -> Iterator[Measurement]:
    """The rows as records, each compared with its id. ``taken`` is as long as the rows that were yielded before."""
    ids = rows.column("id").to_pylist()
    found = segments.measurements_of(rows)
    while True:
        row = len(taken)
        try:
            record = next(found, None)
            fault = "" if record is None else record_fault(record)
        except InvalidRecordError as error:
            raise refuse(row, shortened(str(error))[1:-1]) from error
        if record is None:
            return
        if fault:
            raise refuse(row, fault)
        if record.id != ids[row]:
            raise refuse(
                row, f"the id {shortened(ids[row])} is not that of the record. The file was changed."
            )
        yield record


def record_fault(record: Measurement) -> str:
    """What no record of a store holds and the columns' types let through; empty where there is nothing."""
    if not 0 <= record.created_at <= _LATEST:
        return f"created_at is {record.created_at!r}; it must be seconds since the epoch."
    return ""


def _parquet(file: str, content: Content) -> tuple[pa.Table, list[Device]]:
    """The columns that are read, and the devices that the file brings."""
    pa = segments.require_arrow()
    try:
        source = pa.BufferReader(content.data)
        opened = pa.parquet.ParquetFile(source, page_checksum_verification=True)
        _check_columns(file, opened.schema_arrow.names)
        if opened.metadata.num_rows > _MAX_ROWS:
            raise ImportFileError(file, f"it has more than {_MAX_ROWS:,} rows. Split it.")
        metadata = opened.schema_arrow.metadata or {}
        segments.check_schema_version(file, metadata)
        devices = segments.devices_of(metadata)
        rows = segments.plain(opened.read(columns=list(_READ)))
        schema = segments.plain(segments.segment_schema().empty_table().select(list(_READ))).schema
        rows = rows.select(list(_READ)).cast(schema.remove_metadata())
        rows.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, KeyError, InvalidRecordError) as error:
        raise ImportFileError(
            file, f"its Parquet cannot be read ({shortened(str(error))}). Export it again."
        ) from error
    except StoreError as error:
        raise ImportFileError(file, str(error)) from error
    for name in _READ:
        if rows.column(name).null_count:
            raise ImportFileError(file, f"the column {name} has gaps. Export it again.")
    return rows, devices


def _csv(file: str, content: Content) -> tuple[pa.Table, list[int]]:
    """The columns that are read, and the last line of each row."""
    pa = segments.require_arrow()
    # A text of a record may be longer than the csv module expects of a field.
    csv.field_size_limit(max(csv.field_size_limit(), len(content.data)))
    reader = csv.reader(io.StringIO(text_of(file, content), newline=""), strict=True)
    columns: dict[str, list[Any]] = {name: [] for name in _READ}
    lines: list[int] = []
    try:
        header = next(reader, [])
        _check_columns(file, header)
        places = [(name, header.index(name)) for name in _READ]
        for fields in reader:
            if len(fields) != len(header):
                raise ImportFileError(
                    file,
                    f"the line has {len(fields)} fields; it must have {len(header)}.",
                    line=reader.line_num,
                )
            for name, place in places:
                value: Any = fields[place]
                try:
                    if name == "created_at":
                        value = float(value)
                    elif name == "samples_us":
                        value = _samples(value)
                except (ValueError, RecursionError) as error:
                    raise ImportFileError(
                        file, f"{name} is {shortened(value)}; it must be numbers.", line=reader.line_num
                    ) from error
                columns[name].append(value)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise ImportFileError(file, f"it is no CSV file ({error}).", line=reader.line_num) from error
    schema = segments.plain(segments.segment_schema().empty_table().select(list(_READ))).schema
    try:
        return pa.table(columns, schema=schema.remove_metadata()), lines
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ImportFileError(file, f"its rows cannot be read ({shortened(str(error))}).") from error


def _samples(text: str) -> list[float]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(type(value) in (int, float) for value in found):
        raise ValueError(text)
    try:
        return [float(value) for value in found]
    except OverflowError as error:
        raise ValueError(text) from error


def _check_columns(file: str, header: Sequence[str]) -> None:
    missing = [name for name in segments.COLUMNS if list(header).count(name) != 1]
    if missing:
        raise ImportFileError(
            file,
            f"it is no export of kernelcast: the columns {shortened(', '.join(missing))} are not there once. A table of "
            "another origin is read by kernelcast import table.",
            line=1,
        )
