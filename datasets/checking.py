"""Reading every file of a store, to find those that are broken or contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast.datasets import segments
from kernelcast.datasets.journal import check_schema, quoted, read_lines
from kernelcast.datasets.migrations import migrate_record
from kernelcast.datasets.record import Measurement
from kernelcast.errors import InvalidRecordError, StoreError
from kernelcast.kernels import Device

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are compared at once.
_CHUNK_ROWS = 8192


def files_in(folder: Path, suffix: str) -> list[Path]:
    """The folder's files of one kind, by name. Temporary files (a leading dot) are none; neither is a missing folder's."""
    try:
        found = [path for path in folder.iterdir() if path.suffix == suffix and not path.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"Cannot list {folder}: {error.strerror or error}.") from error
    return sorted(found)


def read_device(path: Path) -> Device:
    """A device's facts from its file in a store.

    Raises:
        StoreError: the file is broken, or its name is not the fingerprint of what it holds.
    """
    try:
        device = Device.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError, InvalidRecordError) as error:
        raise StoreError(
            f"{path} does not hold a device's facts ({type(error).__name__}: {quoted(error)})."
        ) from error
    if device.fingerprint != path.stem:
        raise StoreError(
            f"{path} holds a device with the fingerprint {device.fingerprint}: the file was renamed or changed."
        )
    return device


def faults(root: Path) -> list[str]:
    """One sentence for each fault of a store's files; empty if there is none."""
    found: list[str] = []
    unnamed: dict[str, Path] = {}
    known: set[str] = set()

    def attempt(step: Callable[[Path], set[str]], path: Path) -> set[str]:
        try:
            return step(path)
        except (StoreError, InvalidRecordError) as error:
            found.append(str(error))
        except (ValueError, TypeError, RecursionError) as error:
            found.append(f"{path} holds a row that is no record ({quoted(error)}).")
        return set()

    attempt(_check_version, root)
    for path in files_in(root / "devices", ".json"):
        known.add(path.stem)
        attempt(_check_device, path)
    for folder, suffix, step in (
        ("parquet", ".parquet", _check_segment),
        ("journal", ".jsonl", _check_journal),
    ):
        for path in files_in(root / folder, suffix):
            for fingerprint in attempt(step, path):
                unnamed.setdefault(fingerprint, path)
    for fingerprint, path in sorted(unnamed.items()):
        if fingerprint not in known:
            found.append(f"{path} names the device {fingerprint}, whose facts are not in {root / 'devices'}.")
    return found


def _check_version(root: Path) -> set[str]:
    check_schema(root)
    return set()


def _check_device(path: Path) -> set[str]:
    read_device(path)
    return set()


def _check_segment(path: Path) -> set[str]:
    """The fingerprints that a segment names, after comparing every row with the record that it stands for."""
    table = segments.read_segment(path)
    if table.num_rows != len(set(table.column("id").to_pylist())):
        raise StoreError(f"{path} holds a record twice.")
    for start in range(0, table.num_rows, _CHUNK_ROWS):
        rows = segments.plain(table.slice(start, _CHUNK_ROWS))
        try:
            again = segments.plain(segments.table_of(segments.measurements_of(rows)))
        except InvalidRecordError as error:
            raise StoreError(
                f"{path}, rows {start + 1} to {start + rows.num_rows}: {quoted(error)}"
            ) from error
        for name in segments.COLUMNS:
            row = _first_difference(rows.column(name), again.column(name))
            if row is not None:
                raise StoreError(
                    f"{path}, row {start + row + 1}: {name} is not that of the record: the file was changed."
                )
    return set(segments.plain(table.select(["device_fingerprint"])).column(0).unique().to_pylist())


def _first_difference(one: pa.ChunkedArray, other: pa.ChunkedArray) -> int | None:
    left, right = _comparable(one), _comparable(other)
    if left.equals(right):
        return None
    pairs = zip(left.to_pylist(), right.to_pylist(), strict=True)
    return next(row for row, (before, after) in enumerate(pairs) if before != after)


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with a number for NaN (the latency of a failure), which would not equal itself."""
    compute = segments.require_arrow().compute
    return compute.if_else(compute.is_nan(column), -1.0, column) if column.type == "double" else column


def _check_journal(path: Path) -> set[str]:
    fingerprints = set()
    for number, data in read_lines(path):
        try:
            record = Measurement.from_dict(data)
            present = migrate_record(data, int(data["schema"]))
        except InvalidRecordError as error:
            raise StoreError(f"{path}, line {number}: {quoted(error)}") from error
        if present.get("id") != record.id:
            raise StoreError(
                f"{path}, line {number}: the id is not that of the record: the line was changed."
            )
        fingerprints.add(record.device_fingerprint)
    return fingerprints
