"""Records as columns: the store's Parquet segments, and the way from measurements to rows and back.

pyarrow is imported when a function is called; ``pip install 'kernelcast[train]'`` brings it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast.datasets.journal import sync_folder
from kernelcast.datasets.record import (
    SCHEMA_VERSION,
    Environment,
    Measurement,
    Protocol,
    problem_id,
    shape_id,
)
from kernelcast.errors import InvalidProblemError, InvalidRecordError, MissingExtraError, StoreError
from kernelcast.kernels import Candidate, Problem

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

#: The order of rows, within a segment and in what a store returns. The id makes it total.
SORT_COLUMNS = ("operation", "device_fingerprint", "problem_id", "candidate_key", "id")

#: What decides which of two records with one id is kept.
REPEAT_COLUMNS = ("id", "created_at", "sample_count", "latency_us")

#: From which columns a measurement is read.
_MEASUREMENT_COLUMNS = [
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

#: Key of the version in a Parquet file's own metadata.
_VERSION_KEY = b"kernelcast.schema"


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
    needed = table.select(_MEASUREMENT_COLUMNS)
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
            except (KeyError, TypeError, ValueError, InvalidProblemError) as error:
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


def sort_rows(table: pa.Table) -> pa.Table:
    """Rows in the order of :data:`SORT_COLUMNS`."""
    pa = require_arrow()
    keys = plain(table.select(list(SORT_COLUMNS)))
    return table.take(pa.compute.sort_indices(keys, sort_keys=[(name, "ascending") for name in SORT_COLUMNS]))


def drop_repeats(table: pa.Table) -> pa.Table:
    """One row of each id: the latest by ``created_at``; of equally late ones the one with more samples, then the larger
    latency, so that what is kept does not depend on which file it was read from.
    """
    pa = require_arrow()
    ids = table.column("id")
    if pa.compute.count_distinct(ids).as_py() == table.num_rows:
        return table
    order = pa.compute.sort_indices(
        table.select(list(REPEAT_COLUMNS)),
        sort_keys=[
            ("id", "ascending"),
            ("created_at", "descending"),
            ("sample_count", "descending"),
            ("latency_us", "descending"),
        ],
    )
    names = ids.take(order).combine_chunks()
    first = pa.compute.not_equal(names[1:], names[:-1])
    keep = pa.concat_arrays([pa.array([True]), first])
    # Positions in ascending order: the rows that stay keep their order.
    positions = order.filter(keep)
    return table.take(positions.take(pa.compute.sort_indices(positions)))


def segment_name() -> str:
    """A new segment's file name. Names sort by time of writing."""
    return f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}.parquet"


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write a table durably: after a power loss the file is there whole, or not at all.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    pa = require_arrow()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            pa.parquet.write_table(
                table,
                file,
                compression="zstd",
                # Ids and samples hardly repeat: a dictionary of them would be built and thrown away.
                use_dictionary=[
                    n for n in table.column_names if COLUMNS.get(n) in ("repeated", "text") and n != "id"
                ],
                write_page_checksum=True,
                row_group_size=1 << 18,
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_segment(path: Path, columns: Sequence[str] | None = None, filters: Any = None) -> pa.Table:
    """Some columns and rows of a segment; what a row group's statistics rule out is not read.

    Raises:
        FileNotFoundError: it was compacted away.
        StoreError: the file is broken, is no segment, or was written by a newer kernelcast.
    """
    pa = require_arrow()
    try:
        check_segment_schema(path, pa.parquet.read_schema(path))
        table = pa.parquet.read_table(
            path,
            columns=None if columns is None else list(columns),
            filters=filters,
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
    return table.replace_schema_metadata(None)


def check_segment_schema(path: Path, schema: pa.Schema) -> None:
    """Refuse a Parquet file that is no segment, or one of a newer version.

    Raises:
        StoreError: as said.
    """
    text = (schema.metadata or {}).get(_VERSION_KEY)
    if text is None or not text.isdigit():
        raise StoreError(f"{path} is no segment of a store: it does not say its schema. Move it elsewhere.")
    if int(text) > SCHEMA_VERSION:
        raise StoreError(
            f"The segment {path} has schema {int(text)}; this kernelcast reads up to {SCHEMA_VERSION}. "
            "Upgrade kernelcast."
        )
    if not schema.remove_metadata().equals(segment_schema().remove_metadata()):
        raise StoreError(f"The columns of {path} are not those of a segment. Move it elsewhere.")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
