"""The measurement store: what was measured, read as columns or as records, and written in bulk.

Single records are appended by :class:`kernelcast.datasets.journal.Journal`, which also describes the folder. Here a
whole set becomes one Parquet segment, and journals and segments are read as one: once for each record, whichever files
hold it.

Writers of segments take turns through a file lock (``.lock``); journals need none, and readers only where files keep being
replaced under them. A file is deleted only after the segment that replaces it is on the disk, and a journal only once its writer's own lock is free, so a process
may be killed at any point: what follows reads a record twice rather than not at all, and keeps one.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from kernelcast.datasets import checking, rows, segments
from kernelcast.datasets.checking import files_in
from kernelcast.datasets.journal import (
    check_schema,
    lock_journal,
    prepare_store,
    quoted,
    read_journal,
    sync_folder,
    write_durably,
)
from kernelcast.datasets.query import Conditions, Query
from kernelcast.datasets.record import Measurement
from kernelcast.datasets.summary import SUMMARY_COLUMNS, summary_of
from kernelcast.errors import InvalidProblemError, InvalidRecordError, StoreError
from kernelcast.kernels import Device, Problem

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

#: How long a writer waits for another one, in seconds.
LOCK_TIMEOUT_S = 600.0

#: How often a read starts again because files were compacted under it, before it keeps the compactions off.
_READ_ATTEMPTS = 5

#: How often a read asks for the lock then, in seconds: one compaction after another leaves it free for moments only.
_READ_POLL_S = 0.001

_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class AddResult:
    """What became of records that were handed in: ``added`` are new, ``known`` were there (or came twice)."""

    added: int
    known: int


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """What a compaction or a pruning did.

    Attributes:
        records: in the one segment that is left.
        removed: records that were pruned.
        segments: old segments that it replaces.
        journals: journals that it replaces.
        journals_in_use: journals left alone, because their writers still run.
    """

    records: int
    removed: int
    segments: int
    journals: int
    journals_in_use: int


class Store:
    """A folder of measurements.

    Reading creates nothing, and raises :class:`StoreError` where there is no store, where a file of it is broken, or
    where a newer kernelcast wrote it. A journal's last line that a kill cut short is no fault.

    Args:
        root: the folder. It need not exist before something is added.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    # Reading

    def ids(self) -> set[str]:
        """The id of every record."""
        return set(self._ids().to_pylist())

    def _ids(self) -> pa.ChunkedArray:
        return self._table(Query(), ["id"], ordered=False).column("id")

    def table(self, columns: Sequence[str] | None = None, **conditions: Unpack[Conditions]) -> pa.Table:
        """Records as an Arrow table; arguments, order and errors as in :meth:`frame`."""
        return self._table(Query(**conditions), columns)

    def frame(self, columns: Sequence[str] | None = None, **conditions: Unpack[Conditions]) -> pd.DataFrame:
        """Records as rows, in an order that depends on the records alone: those of one problem are neighbours.

        Args:
            columns: names from :data:`kernelcast.datasets.segments.COLUMNS`, in the order wanted; all where left out.
                Only they, and what the choice needs, are read. ``latency_us`` is NaN for a failure; ``samples_us``
                holds float64 arrays; ``config``, ``problem``, ``environment`` and ``protocol`` are JSON.
            conditions: which records; all where none is given.

        Raises:
            StoreError: see the class; or a column is unknown.
        """
        segments.require_pandas()
        found = self._table(Query(**conditions), columns)
        with self._readable():
            return segments.plain(found).to_pandas()

    def measurements(self, **conditions: Unpack[Conditions]) -> Iterator[Measurement]:
        """Records as objects, in the order of :meth:`frame`."""
        found = self._table(Query(**conditions))
        with self._readable():
            yield from segments.measurements_of(found)

    def problems(self, **conditions: Unpack[Conditions]) -> dict[str, Problem]:
        """Every problem that records name, by ``problem_id``."""
        found = segments.plain(self._table(Query(**conditions), ["problem_id", "problem"]))
        with self._readable():
            texts = dict(
                zip(found.column("problem_id").to_pylist(), found.column("problem").to_pylist(), strict=True)
            )
            return {name: Problem.from_dict(json.loads(text)) for name, text in texts.items()}

    def devices(self) -> dict[str, Device]:
        """The hardware facts that were kept, by fingerprint.

        Raises:
            StoreError: a file is broken, or its name is not the fingerprint of what it holds.
        """
        self._require()
        found = {}
        for path in files_in(self.root / "devices", ".json"):
            found[path.stem] = checking.read_device(path)
        return found

    def summary(self) -> dict[str, Any]:
        """What the store holds, as plain values: totals, size, and counts by
        operation, device, workload, source and outcome.
        """
        found = self._table(Query(), SUMMARY_COLUMNS, ordered=False)
        journals, parquet = (
            files_in(self.root / "journal", ".jsonl"),
            files_in(self.root / "parquet", ".parquet"),
        )
        return {
            "store": str(self.root),
            **summary_of(found),
            "segments": len(parquet),
            "journals": len(journals),
            "size_bytes": sum(
                _size(p) for p in (*parquet, *journals, *files_in(self.root / "devices", ".json"))
            ),
        }

    def check(self) -> list[str]:
        """Read everything and compare each record with what its id promises.

        Returns:
            One sentence for each fault; empty if there is none.

        Raises:
            StoreError: there is no store.
        """
        self._require(schema=False)
        return checking.faults(self.root)

    def export(self, path: Path, *, overwrite: bool = False, **conditions: Unpack[Conditions]) -> int:
        """Write records to one file for other tools: ``.parquet``, or ``.csv`` (samples as a JSON list).

        Returns:
            The number of records written.

        Raises:
            StoreError: another ending, or the file is there and ``overwrite`` is false.
        """
        path = Path(path)
        if path.suffix not in (".parquet", ".csv"):
            raise StoreError(
                f"{path} ends in {path.suffix or 'nothing'}; an export is a .parquet or a .csv file."
            )
        if path.resolve().is_relative_to(self.root.resolve()):
            raise StoreError(
                f"{path} is inside the store, whose files are its own. Write the export elsewhere."
            )
        if path.exists() and not overwrite:
            raise StoreError(f"{path} is there already. Choose another name, or allow it to be overwritten.")
        found = segments.plain(self._table(Query(**conditions)))
        try:
            if path.suffix == ".parquet":
                named = set(found.column("device_fingerprint").unique().to_pylist())
                devices = [each for name, each in self.devices().items() if name in named]
                found = found.replace_schema_metadata(segments.export_metadata(devices))
                segments.write_parquet(found, path)
            else:
                with self._readable():
                    frame = found.to_pandas()
                frame["samples_us"] = [
                    json.dumps(samples) for samples in found.column("samples_us").to_pylist()
                ]
                write_durably(path, frame.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC))
        except OSError as error:
            raise StoreError(f"Cannot write {path}: {error.strerror or error}.") from error
        return found.num_rows

    # Writing

    def add_device(self, device: Device) -> None:
        """Keep a device's hardware facts."""
        prepare_store(self.root)
        path = self.root / "devices" / f"{device.fingerprint}.json"
        try:
            if not path.exists():
                write_durably(path, json.dumps(device.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise StoreError(f"Cannot write to the store {self.root}: {error.strerror or error}.") from error

    def add_many(
        self, measurements: Iterable[Measurement], on_progress: Callable[[int], None] | None = None
    ) -> AddResult:
        """Add records as one new segment, durably and all or none; those whose id is there already are left out.

        Args:
            measurements: records in any order; of several with one id the latest is added.
            on_progress: called with the number of records taken so far.
        """
        rest = iter(measurements)
        tables: list[pa.Table] = []
        taken = 0
        while chunk := list(islice(rest, _CHUNK_ROWS)):
            tables.append(segments.table_of(chunk))
            taken += len(chunk)
            if on_progress is not None:
                on_progress(taken)
        if not tables:
            return AddResult(0, 0)
        return self.add_table(_concatenate(tables))

    def add_table(self, table: pa.Table) -> AddResult:
        """Add records that are columns already, as :meth:`add_many` does.

        Args:
            table: the columns of :data:`kernelcast.datasets.segments.COLUMNS`; strings may be plain or dictionaries.

        Raises:
            InvalidRecordError: a column is missing or has another type.
            StoreError: the store cannot be written.
        """
        compute = segments.require_arrow().compute
        found = rows.drop_repeats(segments.conform(table).unify_dictionaries())
        with self._writing():
            # The hash table is of the new ids, which are fewer than those of a large store.
            known = self._ids()
            known = known.filter(compute.is_in(known, found.column("id").combine_chunks()))
            if len(known):
                found = found.filter(
                    compute.invert(compute.is_in(found.column("id"), known.combine_chunks()))
                )
            if found.num_rows:
                self._write_segment(found)
        return AddResult(found.num_rows, table.num_rows - found.num_rows)

    def merge(self, other: Path) -> AddResult:
        """Add every record and device of another store; that one stays as it is.

        Raises:
            StoreError: there is no store at ``other``, or it is this one.
        """
        source = Store(other)
        source._require()
        if self.root.exists() and source.root.samefile(self.root):
            raise StoreError(f"{other} is this store itself. Name another one.")
        table, devices = source.table(), source.devices()
        for device in devices.values():
            self.add_device(device)
        return self.add_table(table)

    def compact(self) -> RewriteResult:
        """Turn all segments and all journals whose writers are gone into one segment. Doing it again changes nothing."""
        return self._rewrite(None)

    def prune(self, **conditions: Unpack[Conditions]) -> RewriteResult:
        """Delete the records that meet all conditions, and compact what is left.

        Records in a journal whose writer still runs stay: ``journals_in_use`` counts such journals.

        Raises:
            StoreError: no condition is given.
        """
        return self._rewrite(_pruned(conditions))

    def count_to_prune(self, **conditions: Unpack[Conditions]) -> int:
        """How many records meet all conditions, those in journals whose writers run included.

        Raises:
            StoreError: no condition is given.
        """
        query = _pruned(conditions)
        return int(self._table(query, ["id"], ordered=False).num_rows)

    def _rewrite(self, drop: Query | None) -> RewriteResult:
        self._require()
        with self._writing(), contextlib.ExitStack() as stack:
            self._remove_temporaries()
            old = files_in(self.root / "parquet", ".parquet")
            journals, in_use = [], 0
            for path in files_in(self.root / "journal", ".jsonl"):
                descriptor = lock_journal(path)
                if descriptor is None:
                    in_use += 1
                    continue
                stack.callback(os.close, descriptor)
                journals.append(path)
            tables = [segments.read_segment(path) for path in old]
            journaled = segments.table_of(record for path in journals for record in read_journal(path))
            found = rows.drop_repeats(_concatenate([*tables, journaled.replace_schema_metadata(None)]))
            dropped = None if drop is None else drop.expression()
            kept = found if dropped is None else found.filter(~dropped)
            unchanged = (
                len(old) == 1
                and kept.num_rows == tables[0].num_rows
                and not journaled.num_rows
                and not segments.is_outdated(old[0])
            )
            del tables
            if not unchanged:
                if kept.num_rows:
                    self._write_segment(kept)
                for path in old:
                    path.unlink()
            for path in journals:
                path.unlink()
            for name in ("parquet", "journal"):
                sync_folder(self.root / name)
        return RewriteResult(kept.num_rows, found.num_rows - kept.num_rows, len(old), len(journals), in_use)

    def _write_segment(self, table: pa.Table) -> None:
        segments.write_parquet(
            table.replace_schema_metadata(segments.segment_schema().metadata),
            self.root / "parquet" / segments.segment_name(),
            rows.row_order(table),
        )

    # Files

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Say which store it is that holds a row which is no record."""
        try:
            yield
        except (InvalidRecordError, InvalidProblemError, ValueError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{self.root} holds a row that is no record ({quoted(error)}). kernelcast data check says where it is."
            ) from error

    def _require(self, *, schema: bool = True) -> None:
        """Refuse to read where there is no store, or one of a newer schema."""
        if not (self.root / "store.json").is_file():
            raise StoreError(
                f"There is no store at {self.root}. Fill one with kernelcast import or kernelcast collect, "
                "or name another folder with --store or KERNELCAST_HOME."
            )
        if schema:
            check_schema(self.root)

    @contextlib.contextmanager
    def _writing(self, *, poll_s: float = 0.05) -> Iterator[None]:
        """Hold the lock that writers of segments share, asking for it every ``poll_s`` seconds."""
        from filelock import FileLock, Timeout

        prepare_store(self.root)
        try:
            with FileLock(self.root / ".lock", timeout=LOCK_TIMEOUT_S, poll_interval=poll_s):
                yield
        except Timeout as error:
            raise StoreError(
                f"Another process has been writing to {self.root} for {LOCK_TIMEOUT_S:.0f} s. Wait for it, or end it."
            ) from error
        except OSError as error:
            raise StoreError(f"Cannot write to the store {self.root}: {error.strerror or error}.") from error

    def _remove_temporaries(self) -> None:
        """Delete what killed writers of segments left behind. Call with the lock held: no such writer then runs."""
        for path in (self.root / "parquet").glob(".*.parquet.*"):
            path.unlink(missing_ok=True)

    def _table(self, query: Query, columns: Sequence[str] | None = None, *, ordered: bool = True) -> pa.Table:
        """What a query asks for: each record once, in order unless ``ordered`` is false."""
        wanted = list(segments.COLUMNS) if columns is None else list(columns)
        for name in wanted:
            if name not in segments.COLUMNS:
                raise StoreError(
                    f"Records have no column {name!r}. They have: {', '.join(segments.COLUMNS)}."
                )
        self._require()
        for _ in range(_READ_ATTEMPTS):
            found = self._read_unless_changed(query, wanted, ordered)
            if found is not None:
                return found
        with self._writing(poll_s=_READ_POLL_S):
            found = self._read_unless_changed(query, wanted, ordered)
        if found is None:
            raise StoreError(
                f"Files of {self.root} vanished while they were read, and not by kernelcast. Try again."
            )
        return found

    def _read_unless_changed(self, query: Query, wanted: list[str], ordered: bool) -> pa.Table | None:
        """What a query asks for; None where files were compacted away meanwhile."""
        # Journals first: a compaction puts its segment there before it removes a journal.
        journals = files_in(self.root / "journal", ".jsonl")
        parquet = files_in(self.root / "parquet", ".parquet")
        try:
            found = self._read(journals, parquet, query, wanted, ordered)
        except FileNotFoundError:
            return None
        # What was compacted away while it was read may have been missed. Segments that came since may wait for the next read.
        unchanged = all(path.exists() for path in (*parquet, *journals))
        return found if unchanged else None

    def _read(
        self, journals: list[Path], parquet: list[Path], query: Query, wanted: list[str], ordered: bool
    ) -> pa.Table:
        journaled = segments.table_of(record for path in journals for record in read_journal(path))
        if len(parquet) == 1 and not journaled.num_rows:
            # A segment holds each record once, in order.
            return segments.read_segment(parquet[0], wanted, query.expression())
        needed = {
            *wanted,
            *rows.REPEAT_COLUMNS,
            *query.columns(),
            *(rows.SORT_COLUMNS if ordered else ()),
        }
        read = [name for name in segments.COLUMNS if name in needed]
        tables = [segments.read_segment(path, read, query.identity()) for path in parquet]
        tables.append(journaled.select(read).replace_schema_metadata(None))
        found = rows.drop_repeats(_concatenate(tables))
        condition = query.expression()
        if condition is not None:
            found = found.filter(condition)
        order = rows.row_order(found) if ordered else None
        # Only now, as a row's id and other keys are not moved with it where nobody asked for them.
        found = found.select(wanted)
        return found if order is None else found.take(order)


def _pruned(conditions: Conditions) -> Query:
    query = Query(**conditions)
    if query == Query():
        raise StoreError("Pruning without a condition would delete every record. Name what is to go.")
    return query


def _concatenate(tables: list[pa.Table]) -> pa.Table:
    return segments.require_arrow().concat_tables(tables).unify_dictionaries()


def _size(path: Path) -> int:
    # A compaction may remove the file between the listing and this line; a link may lead nowhere.
    try:
        return path.stat().st_size
    except OSError:
        return 0
