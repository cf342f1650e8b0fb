"""Records as columns: the store's Parquet segments, and the way from measurements to rows and back.

pyarrow is imported when a function is called; ``pip install 'kernelcast[train]'`` brings it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast.datasets.journal import sync_folder
from kernelcast.datasets.migrations import SCHEMA_VERSION, migrate_rows, require_readable
from kernelcast.datasets.record import (
    Environment,
    Measurement,
    Protocol,
    problem_id,
    shape_id,
)
from kernelcast.errors import InvalidProblemError, InvalidRecordError, MissingExtraError, StoreError
from kernelcast.kernels import Candidate, Device, Problem

if TYPE_CHECKING:
    import pyarrow as pa

#: The columns of a segment, in order, and how each is held.
COLUMNS = {
    "id": "text",
    "operation": "repeated",
    "workload": "repeated",
    "device": "repeated",
    "device_fingerprint": "repeated",
    "variant": "repeated",
    "config": "repeated",
    "candidate_key": "repeated",
    "problem": "repeated",
    "problem_id": "repeated",
    "shape_id": "repeated",
    "dtype": "repeated",
    "latency_us": "number",
    "samples_us": "numbers",
    "sample_count": "count",
    "outcome": "repeated",
    "detail": "text",
    "source": "repeated",
    "environment": "repeated",
    "protocol": "text",
    "created_at": "number",
}

#: From which columns a measurement is read.
MEASUREMENT_COLUMNS = [
    "problem",
    "candidate_key",
    "device",
    "device_fingerprint",
    "environment",
    "protocol",
    "samples_us",
    "outcome",
    "detail",
    "workload",
    "created_at",
]

#: Rows of a segment that are compressed, and skipped, together.
_GROUP_ROWS = 1 << 18

#: Parts in which a table is put in order.
_PARTS = 8

#: Keys in a Parquet file's own metadata: the version of the fields, and in an export the facts of its devices.
_VERSION_KEY = b"kernelcast.schema"
_DEVICES_KEY = b"kernelcast.devices"


def require_arrow() -> Any:
    """The pyarrow module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train", "The measurement store") from error
    return pa


def require_pandas() -> Any:
    """The pandas module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError("pandas", "train", "Working with measurements as a frame") from error
    return pd


@lru_cache(maxsize=1)
def segment_schema() -> pa.Schema:
    """The Arrow schema of a segment. What repeats from row to row is held as a dictionary."""
    pa = require_arrow()
    types = {
        "text": pa.string(),
        "repeated": pa.dictionary(pa.int32(), pa.string()),
        "number": pa.float64(),
        "numbers": pa.list_(pa.float64()),
        "count": pa.int64(),
    }
    return pa.schema(
        [pa.field(name, types[kind], nullable=False) for name, kind in COLUMNS.items()],
        metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
    )


def config_json(candidate: Candidate) -> str:
    """The config as canonical JSON."""
    return json.dumps(candidate.parameters, separators=(",", ":"), sort_keys=True)


def facts_json(facts: Environment | Protocol) -> str:
    """An environment or a protocol as canonical JSON."""
    return json.dumps(facts.to_dict(), separators=(",", ":"), sort_keys=True)


def table_of(measurements: Iterable[Measurement]) -> pa.Table:
    """Measurements as rows of a segment, in the order given."""
    pa = require_arrow()
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    # Many records share a problem and an environment; hashing those again for each would take most of the time.
    hashes: dict[str, tuple[str, str]] = {}
    environment_json = lru_cache(maxsize=256)(facts_json)
    for measurement in measurements:
        problem = measurement.problem
        if problem.key not in hashes:
            hashes[problem.key] = problem_id(problem), shape_id(problem)
        row = _row(measurement, *hashes[problem.key], environment_json(measurement.environment))
        for name, value in row.items():
            columns[name].append(value)
    return pa.table(columns, schema=segment_schema())


def _row(measurement: Measurement, problem_hash: str, shape_hash: str, environment: str) -> dict[str, Any]:
    problem, candidate = measurement.problem, measurement.candidate
    return {
        "id": measurement.id,
        "operation": problem.operation,
        "workload": measurement.workload,
        "device": measurement.device,
        "device_fingerprint": measurement.device_fingerprint,
        "variant": candidate.variant,
        "config": config_json(candidate),
        "candidate_key": candidate.key,
        "problem": problem.key,
        "problem_id": problem_hash,
        "shape_id": shape_hash,
        "dtype": problem.dtype,
        "latency_us": measurement.latency_us,
        "samples_us": measurement.samples_us,
        "sample_count": len(measurement.samples_us),
        "outcome": measurement.outcome,
        # What an error said may hold bytes that are no text; they must not keep the record out of the segment.
        "detail": measurement.detail.encode("utf-8", "replace").decode(),
        "source": measurement.environment.source,
        "environment": environment,
        "protocol": facts_json(measurement.protocol),
        "created_at": measurement.created_at,
    }


def measurements_of(table: pa.Table) -> Iterator[Measurement]:
    """The rows of a table as measurements, in order.

    Raises:
        InvalidRecordError: a row is not a record.
    """
    problem_of = lru_cache(maxsize=None)(lambda text: Problem.from_dict(json.loads(text)))
    candidate_of = lru_cache(maxsize=None)(Candidate.from_key)
    environment_of = lru_cache(maxsize=None)(lambda text: Environment(**json.loads(text)))
    protocol_of = lru_cache(maxsize=1024)(lambda text: Protocol.from_dict(json.loads(text)))
    needed = table.select(MEASUREMENT_COLUMNS)
    for batch in needed.to_batches(max_chunksize=8192):
        columns = (batch.column(i).to_pylist() for i in range(batch.num_columns))
        for row in zip(*columns, strict=True):
            problem, candidate, device, fingerprint, environment, protocol, samples, *rest = row
            outcome, detail, workload, created_at = rest
            try:
                yield Measurement(
                    problem=problem_of(problem),
                    candidate=candidate_of(candidate),
                    device=device,
                    device_fingerprint=fingerprint,
                    environment=environment_of(environment),
                    protocol=protocol_of(protocol),
                    samples_us=tuple(samples),
                    outcome=outcome,
                    detail=detail,
                    workload=workload,
                    created_at=created_at,
                )
            except (
                KeyError,
                TypeError,
                ValueError,
                AttributeError,
                OverflowError,
                RecursionError,
                InvalidProblemError,
            ) as error:
                raise InvalidRecordError(f"Not a record ({type(error).__name__}: {error}).") from error


def conform(table: pa.Table) -> pa.Table:
    """A table with exactly the columns and types of a segment; more columns are dropped, strings become dictionaries.

    Raises:
        InvalidRecordError: a column is missing, has another type, or holds nulls.
    """
    pa = require_arrow()
    schema = segment_schema()
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise InvalidRecordError(f"A table of records lacks the columns {', '.join(missing)}.")
    for name in COLUMNS:
        if table.column(name).null_count:
            raise InvalidRecordError(f"Column {name} of a table of records holds nulls.")
    try:
        cast = (
            table.select(list(COLUMNS))
            .cast(schema.remove_metadata())
            .replace_schema_metadata(schema.metadata)
        )
    except (pa.ArrowException, ValueError) as error:
        raise InvalidRecordError(f"A table of records has a column of another type: {error}.") from error
    return cast


def plain(table: pa.Table) -> pa.Table:
    """The table with its dictionary columns as plain strings, so that tables of several segments agree."""
    pa = require_arrow()
    fields = [
        field.with_type(pa.string()) if pa.types.is_dictionary(field.type) else field
        for field in table.schema
    ]
    return table.cast(pa.schema(fields))


def segment_name() -> str:
    """A new segment's file name. Names sort by time of writing."""
    return f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}.parquet"


def write_parquet(table: pa.Table, path: Path, order: pa.Array | None = None) -> None:
    """Write a table durably: after a power loss the file is there whole, or not at all.

    Args:
        table: what to write.
        path: where.
        order: positions of the rows in the order wanted; as they are where None. A part of the rows at a time is put in
            order, so that no second copy of a large table is made.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    pa = require_arrow()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            with pa.parquet.ParquetWriter(
                file,
                table.schema,
                compression="zstd",
                # Ids and samples hardly repeat: a dictionary of them would be built and thrown away.
                use_dictionary=[
                    n for n in table.column_names if COLUMNS.get(n) in ("repeated", "text") and n != "id"
                ],
                write_page_checksum=True,
            ) as writer:
                # Whole row groups in few parts: to take some rows costs a pass over the table.
                groups = -(-table.num_rows // _GROUP_ROWS)
                part = max(-(-groups // _PARTS), 1) * _GROUP_ROWS
                # At least once: a table without rows has columns too.
                for start in range(0, max(table.num_rows, 1), part):
                    rows = table.slice(start, part) if order is None else table.take(order.slice(start, part))
                    writer.write_table(rows, row_group_size=_GROUP_ROWS)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_segment(path: Path, columns: Sequence[str] | None = None, filters: Any = None) -> pa.Table:
    """Some columns and rows of a segment; what a row group's statistics rule out is not read.

    A segment of an older version is read whole and migrated.

    Raises:
        FileNotFoundError: it was compacted away.
        StoreError: the file is broken, is no segment, or was written by a newer kernelcast.
    """
    pa = require_arrow()
    try:
        version = check_segment_schema(path, pa.parquet.read_schema(path))
        old = version < SCHEMA_VERSION
        table = pa.parquet.read_table(
            path,
            columns=None if columns is None or old else list(columns),
            filters=None if old else filters,
            page_checksum_verification=True,
            partitioning=None,
        )
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(
            f"The segment {path} cannot be read ({_first_line(error)}). "
            "It was cut short or changed: restore it from a copy, or delete it and import or collect its records again."
        ) from error
    if old:
        table = _migrated(path, table, version)
        table = (table if filters is None else table.filter(filters)).select(columns or list(COLUMNS))
    return table.replace_schema_metadata(None)


def is_outdated(path: Path) -> bool:
    """Whether a segment is of an older version."""
    schema = require_arrow().parquet.read_schema(path)
    return check_segment_schema(path, schema) < SCHEMA_VERSION


def _migrated(path: Path, table: pa.Table, version: int) -> pa.Table:
    """The rows of an older segment as one of the present version would hold them: each record once, in order."""
    from kernelcast.datasets.rows import drop_repeats, sort_rows

    try:
        return sort_rows(drop_repeats(conform(migrate_rows(table, version))))
    except (InvalidRecordError, require_arrow().ArrowException, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"The segment {path} cannot be brought from schema {version} to {SCHEMA_VERSION} ({_first_line(error)})."
        ) from error


def export_metadata(devices: Iterable[Device]) -> dict[bytes, bytes]:
    """The metadata of an export: the version of the fields, and the facts of the devices that its rows name."""
    facts = json.dumps([device.to_dict() for device in devices])
    return {_VERSION_KEY: str(SCHEMA_VERSION).encode(), _DEVICES_KEY: facts.encode()}


def devices_of(metadata: Mapping[bytes, bytes]) -> list[Device]:
    """The devices in the metadata of an export; none where it has none.

    Raises:
        ValueError, InvalidRecordError: it holds something else.
    """
    facts = json.loads(metadata.get(_DEVICES_KEY, b"[]"))
    if not isinstance(facts, list):
        raise ValueError("the devices are no list")
    return [Device.from_dict(each) for each in facts]


def check_schema_version(path: Path | str, metadata: Mapping[bytes, bytes]) -> bool:
    """Whether a Parquet file's metadata name a version of the fields.

    Raises:
        StoreError: it is a newer one.
    """
    text = metadata.get(_VERSION_KEY)
    # No more digits than any version has: thousands of them are no number to Python.
    if text is None or not text.isdigit() or len(text) > 9:
        return False
    require_readable(int(text), f"The segment {path}", StoreError)
    return True


def check_segment_schema(path: Path, schema: pa.Schema) -> int:
    """The version of a segment. Refuses a Parquet file that is none, or one of a newer version.

    Raises:
        StoreError: as said.
    """
    if not check_schema_version(path, schema.metadata or {}):
        raise StoreError(f"{path} is no segment of a store: it does not say its schema. Move it elsewhere.")
    version = int(schema.metadata[_VERSION_KEY])
    if version == SCHEMA_VERSION and not schema.remove_metadata().equals(segment_schema().remove_metadata()):
        raise StoreError(f"The columns of {path} are not those of a segment. Move it elsewhere.")
    return version


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return "".join(char if char.isprintable() else "?" for char in lines[0].rstrip(".")[:300])
