from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock, Timeout

from kernelcast.datasets import AddResult, Environment, Journal, Measurement, Protocol, RewriteResult, Store
from kernelcast.datasets.record import problem_id, shape_id
from kernelcast.datasets.rows import SORT_COLUMNS
from kernelcast.datasets.segments import (
    COLUMNS,
    conform,
    plain,
    segment_schema,
    table_of,
    write_parquet,
)
from kernelcast.errors import InvalidRecordError, StoreError
from kernelcast.kernels import Candidate, Device, problem

DEVICE = Device(name="test-gpu", kind="gpu", vendor="nvidia", architecture="sm80", cores=8)
OTHER = Device(name="other-gpu", kind="gpu", vendor="nvidia", architecture="sm90", cores=9)


fork = multiprocessing.get_context("fork")


def record(number: int, **changes: object) -> Measurement:
    base = Measurement(
        problem=problem("gemm", m=number + 1, n=32, k=16, dtype="float16"),
        candidate=Candidate.of("triton_tiled", {"block_m": 16, "num_warps": 4}),
        device=DEVICE.name,
        device_fingerprint=DEVICE.fingerprint,
        environment=Environment(torch="2.6"),
        protocol=Protocol("test", error_log=0.125),
        samples_us=(3.0, 1.0, 2.5 + number),
        workload="train",
        created_at=100.0,
    )
    return replace(base, **changes)


def failure(number: int, outcome: str = "crash", **changes: object) -> Measurement:
    return record(number, samples_us=(), outcome=outcome, detail="it broke", **changes)


def journal(root: Path, records: Iterable[Measurement]) -> None:
    with Journal(root) as writer:
        for each in records:
            writer.append(each)


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file's content, but for the lock, which holds none."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def by_id(records: Iterable[Measurement]) -> dict[str, Measurement]:
    return {each.id: each for each in records}


def segments_of(root: Path) -> list[Path]:
    return sorted((root / "parquet").glob("*.parquet"))


def test_records_come_back_whole(tmp_path: Path) -> None:
    records = [record(0), record(1, samples_us=(1.0,)), failure(2), record(3, protocol=Protocol("other"))]
    store = Store(tmp_path / "store")
    store.add_device(DEVICE)
    taken: list[int] = []
    assert store.add_many(iter(records), taken.append) == AddResult(added=4, known=0)
    assert taken == [4]
    found = list(store.measurements())
    assert by_id(found) == by_id(records)
    assert store.ids() == {each.id for each in records}
    assert store.devices() == {DEVICE.fingerprint: DEVICE}
    assert store.check() == []


def test_adding_the_same_twice_changes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_many([record(0), record(1)])
    before = snapshot(tmp_path)
    assert store.add_many([record(0), record(1)]) == AddResult(added=0, known=2)
    assert snapshot(tmp_path) == before
    # Workload, time and samples are not what a record is: these are the same two measured again.
    assert store.add_many([record(1, workload="x", created_at=1e9), record(2), record(2)]) == AddResult(1, 2)
    assert len(store.ids()) == 3
    assert store.add_many([]) == AddResult(0, 0)
    assert len(segments_of(tmp_path)) == 2


def test_records_in_a_journal_are_known_too(tmp_path: Path) -> None:
    journal(tmp_path, [record(0)])
    assert Store(tmp_path).add_many([record(0), record(1)]) == AddResult(added=1, known=1)


def test_a_segment_holds_these_columns(tmp_path: Path) -> None:
    Store(tmp_path).add_many([record(4)])
    (path,) = segments_of(tmp_path)
    file = pq.ParquetFile(path)
    assert file.metadata.row_group(0).column(1).compression == "ZSTD"
    (row,) = plain(file.read()).to_pylist()
    subject = record(4)
    assert row == {
        "id": subject.id,
        "operation": "gemm",
        "workload": "train",
        "device": "test-gpu",
        "device_fingerprint": DEVICE.fingerprint,
        "variant": "triton_tiled",
        "config": '{"block_m":16,"num_warps":4}',
        "candidate_key": '["triton_tiled",{"block_m":16,"num_warps":4}]',
        "problem": subject.problem.key,
        "problem_id": problem_id(subject.problem),
        "shape_id": shape_id(subject.problem),
        "dtype": "float16",
        "latency_us": 3.0,
        "samples_us": [3.0, 1.0, 6.5],
        "sample_count": 3,
        "outcome": "ok",
        "detail": "",
        "source": "kernelcast",
        "environment": '{"runtime":"unknown","source":"kernelcast","system":"unknown","torch":"2.6",'
        '"triton":"unknown","variant_hash":"unknown"}',
        "protocol": '{"cache":"unknown","dispatch":"unknown","error_log":0.125,"flush_bytes":0,"inputs":"unknown",'
        '"name":"test","seed":0}',
        "created_at": 100.0,
    }


@pytest.fixture
def mixed(tmp_path: Path) -> Store:
    """Two segments and a journal, which repeat some of each other."""
    store = Store(tmp_path / "mixed")
    store.add_many([record(0), record(1), record(2, workload="test")])
    store.add_many(
        [failure(3, device="other-gpu", device_fingerprint=OTHER.fingerprint), failure(4, "timeout")]
    )
    journal(tmp_path / "mixed", [record(5, workload="live"), record(0, samples_us=(7.0,), created_at=200.0)])
    return store


def test_a_frame_reads_segments_and_journals_once(mixed: Store) -> None:
    frame = mixed.frame()
    assert list(frame.columns) == list(COLUMNS)
    assert sorted(frame["id"]) == sorted(mixed.ids())
    assert len(frame) == 6
    # The later of the two records of one id is the one that counts.
    assert frame.loc[frame["id"] == record(0).id, "latency_us"].tolist() == [7.0]
    assert frame["latency_us"].isna().sum() == 2
    assert frame.loc[frame["id"] == record(5).id, "samples_us"].iloc[0].tolist() == [3.0, 1.0, 7.5]
    sort_keys = list(frame[list(SORT_COLUMNS)].itertuples(index=False, name=None))
    assert sort_keys == sorted(sort_keys)


@pytest.mark.parametrize(
    ("conditions", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"operation": "gemm"}, [0, 1, 2, 3, 4, 5]),
        ({"operation": "conv2d"}, []),
        ({"device": "other-gpu"}, [3]),
        ({"device": OTHER.fingerprint}, [3]),
        ({"device": DEVICE.name, "outcome": "ok"}, [0, 1, 2, 5]),
        ({"workloads": ["test", "live"]}, [2, 5]),
        ({"workloads": []}, []),
        ({"outcome": "timeout"}, [4]),
        ({"source": "kernelcast"}, [0, 1, 2, 3, 4, 5]),
        ({"source": "elsewhere"}, []),
        ({"variant": "triton_tiled", "outcome": "timeout"}, [4]),
        ({"variant": "vendor"}, []),
        ({"before": 100.5}, [1, 2, 3, 4, 5]),
        ({"before": 100.0}, []),
    ],
)
def test_conditions_choose_rows(mixed: Store, conditions: dict[str, object], numbers: list[int]) -> None:
    expected = sorted(record(number).problem.key for number in numbers)

    def chosen() -> list[str]:
        assert len(mixed.table(**conditions)) == len(expected)
        found = sorted(each.problem.key for each in mixed.measurements(**conditions))
        assert mixed.frame(["latency_us"], **conditions).shape == (len(expected), 1)
        assert {each.key for each in mixed.problems(**conditions).values()} == set(expected)
        return found

    # "other-gpu" only, since the second device's record names other hardware.
    by_problem = sorted(each.problem.key for each in mixed.measurements() if each.problem.key in expected)
    assert by_problem == expected
    assert chosen() == expected
    mixed.compact()
    assert chosen() == expected


def test_an_outdated_record_is_not_found_by_what_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_many([failure(0)])
    journal(tmp_path, [record(0, created_at=300.0)])
    assert len(store.frame(outcome="crash")) == 0
    assert store.frame(["outcome"])["outcome"].tolist() == ["ok"]


def test_columns_come_in_the_order_asked_for(mixed: Store) -> None:
    for _ in range(2):
        frame = mixed.frame(["latency_us", "id"], outcome="ok")
        assert list(frame.columns) == ["latency_us", "id"]
        mixed.compact()
    with pytest.raises(StoreError, match=r"no column 'latency'. They have: id, operation"):
        mixed.frame(["latency"])


def test_the_order_does_not_depend_on_the_files(tmp_path: Path) -> None:
    records = [
        record(n, candidate=Candidate.of("split_k", {"split": 2**s})) for n in range(6) for s in range(5)
    ]
    frames = []
    for seed in range(4):
        generator = random.Random(seed)
        generator.shuffle(records)
        store = Store(tmp_path / str(seed))
        store.add_many(records[: 7 * seed])
        journal(tmp_path / str(seed), records[7 * seed :])
        frames.append(store.frame())
    for other in frames[1:]:
        pd.testing.assert_frame_equal(frames[0], other)


def test_ties_of_one_id_do_not_depend_on_the_files(tmp_path: Path) -> None:
    one, other = record(0, samples_us=(1.0, 2.0)), record(0, samples_us=(5.0, 6.0))
    for name, first, second in (("a", one, other), ("b", other, one)):
        Store(tmp_path / name).add_many([first])
        journal(tmp_path / name, [second])
        assert Store(tmp_path / name).frame()["latency_us"].tolist() == [5.5]


def test_compaction_keeps_every_record_and_can_be_repeated(mixed: Store) -> None:
    before = mixed.frame()
    assert mixed.compact() == RewriteResult(records=6, removed=0, segments=2, journals=1, journals_in_use=0)
    assert list((mixed.root / "journal").iterdir()) == []
    (segment,) = segments_of(mixed.root)
    pd.testing.assert_frame_equal(mixed.frame(), before)
    content = snapshot(mixed.root)
    assert mixed.compact() == RewriteResult(records=6, removed=0, segments=1, journals=0, journals_in_use=0)
    assert snapshot(mixed.root) == content
    assert segment.exists()


@pytest.mark.parametrize("survivors", [(), ("parquet",), ("journal",), ("parquet", "journal")])
def test_a_compaction_killed_before_it_deleted_loses_and_doubles_nothing(
    mixed: Store, tmp_path: Path, survivors: tuple[str, ...]
) -> None:
    before = mixed.frame()
    shutil.copytree(mixed.root, tmp_path / "copy")
    mixed.compact()
    # The state after a kill: the new segment is there, and so are old files.
    for name in survivors:
        shutil.copytree(tmp_path / "copy" / name, mixed.root / name, dirs_exist_ok=True)
    pd.testing.assert_frame_equal(mixed.frame(), before)
    assert mixed.compact().records == 6
    pd.testing.assert_frame_equal(mixed.frame(), before)
    assert len(segments_of(mixed.root)) == 1


def test_what_a_killed_writer_left_is_ignored_and_swept(mixed: Store) -> None:
    before = mixed.frame()
    (mixed.root / "parquet" / ".00-1-ab.parquet.1-cd").write_bytes(b"PAR1 half a file")
    pd.testing.assert_frame_equal(mixed.frame(), before)
    assert mixed.check() == [
        f"{path} names the device {fingerprint}, whose facts are not in {mixed.root / 'devices'}."
        for fingerprint, path in sorted(
            {
                OTHER.fingerprint: segments_of(mixed.root)[1],
                DEVICE.fingerprint: segments_of(mixed.root)[0],
            }.items()
        )
    ]
    mixed.compact()
    assert [path.name for path in (mixed.root / "parquet").iterdir()] == [segments_of(mixed.root)[0].name]


def test_a_journal_in_use_is_left_alone(tmp_path: Path) -> None:
    journal(tmp_path, [record(0)])
    store = Store(tmp_path)
    with Journal(tmp_path) as live:
        live.append(record(1))
        assert store.compact() == RewriteResult(
            records=1, removed=0, segments=0, journals=1, journals_in_use=1
        )
        live.append(record(2))
        assert len(store.ids()) == 3
    assert store.compact() == RewriteResult(records=3, removed=0, segments=1, journals=1, journals_in_use=0)
    assert len(store.ids()) == 3


def test_a_torn_journal_is_compacted_without_its_tail(tmp_path: Path) -> None:
    journal(tmp_path, [record(0), record(1)])
    (path,) = (tmp_path / "journal").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    store = Store(tmp_path)
    assert list(store.measurements()) == [record(0)]
    store.compact()
    assert list(store.measurements()) == [record(0)]
    assert list((tmp_path / "journal").iterdir()) == []


def test_a_compaction_deletes_nothing_if_a_file_is_broken(mixed: Store) -> None:
    (path,) = (mixed.root / "journal").iterdir()
    path.write_bytes(b"broken\n" + path.read_bytes())
    before = snapshot(mixed.root)
    with pytest.raises(StoreError, match="line 1: not JSON"):
        mixed.compact()
    assert snapshot(mixed.root) == before


def test_pruning_deletes_what_meets_every_condition(mixed: Store) -> None:
    with pytest.raises(StoreError, match="without a condition"):
        mixed.prune()
    assert mixed.prune(outcome="crash", workloads=["absent"]).removed == 0
    assert mixed.prune(outcome="crash") == RewriteResult(5, 1, segments=1, journals=0, journals_in_use=0)
    assert mixed.ids() == {record(number).id for number in (0, 1, 2, 4, 5)}
    assert mixed.prune(operation="gemm").records == 0
    assert mixed.ids() == set()
    assert segments_of(mixed.root) == []
    assert mixed.summary()["records"] == 0


def test_pruning_by_age_and_variant_leaves_unknown_times_and_counts_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    vendor = Candidate.of("vendor")
    store.add_many(
        [record(0, created_at=0.0), record(1, created_at=50.0), record(2, candidate=vendor), record(3)]
    )
    with pytest.raises(StoreError, match="without a condition"):
        store.count_to_prune()
    assert store.count_to_prune(before=99.0) == 1
    assert store.count_to_prune(before=101.0) == 3
    assert len(store.ids()) == 4
    assert store.prune(before=101.0, variant="vendor").removed == 1
    assert store.prune(before=99.0).removed == 1
    assert store.ids() == {record(0, created_at=0.0).id, record(3).id}


def test_pruning_leaves_records_whose_writer_still_runs(tmp_path: Path) -> None:
    journal(tmp_path, [record(0)])
    store = Store(tmp_path)
    with Journal(tmp_path) as live:
        live.append(record(1))
        assert store.count_to_prune(operation="gemm") == 2
        assert store.prune(operation="gemm") == RewriteResult(0, 1, segments=0, journals=1, journals_in_use=1)
        live.append(record(2))
    assert store.ids() == {record(1).id, record(2).id}


def test_merging_adds_records_and_devices(tmp_path: Path) -> None:
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    one.add_many([record(0), record(1)])
    other.add_many([record(1), record(2)])
    other.add_device(OTHER)
    journal(other.root, [record(3)])
    before = snapshot(other.root)
    assert one.merge(other.root) == AddResult(added=2, known=1)
    assert one.ids() == {record(number).id for number in range(4)}
    assert one.devices() == {OTHER.fingerprint: OTHER}
    assert snapshot(other.root) == before
    assert one.merge(other.root) == AddResult(added=0, known=3)
    with pytest.raises(StoreError, match="this store itself"):
        one.merge(tmp_path / "other" / ".." / "one")
    with pytest.raises(StoreError, match="There is no store at"):
        one.merge(tmp_path / "none")
    assert Store(tmp_path / "new").merge(one.root) == AddResult(added=4, known=0)


def test_exports_hold_what_was_asked_for(mixed: Store, tmp_path: Path) -> None:
    assert mixed.export(tmp_path / "out.parquet", outcome="ok") == 4
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out.parquet"), mixed.frame(outcome="ok"))
    assert mixed.export(tmp_path / "out.csv") == 6
    csv = pd.read_csv(tmp_path / "out.csv", keep_default_na=False, na_values={"latency_us": [""]})
    assert csv["id"].tolist() == mixed.frame()["id"].tolist()
    assert csv["latency_us"].fillna(-1).tolist() == mixed.frame()["latency_us"].fillna(-1).tolist()
    assert [json.loads(text) for text in csv["samples_us"]] == [list(x) for x in mixed.frame()["samples_us"]]
    with pytest.raises(StoreError, match="is there already"):
        mixed.export(tmp_path / "out.csv")
    assert mixed.export(tmp_path / "out.csv", outcome="crash", overwrite=True) == 1
    with pytest.raises(StoreError, match=r"ends in \.txt"):
        mixed.export(tmp_path / "out.txt")
    with pytest.raises(StoreError, match="Cannot write"):
        mixed.export(tmp_path / "none" / "out.csv")
    # There it would be taken for a segment, and make the store unreadable.
    for inside in (mixed.root / "parquet" / "out.parquet", tmp_path / "mixed" / ".." / "mixed" / "out.csv"):
        with pytest.raises(StoreError, match="is inside the store"):
            mixed.export(inside, overwrite=True)


def test_the_summary_counts(mixed: Store) -> None:
    mixed.add_device(DEVICE)
    mixed.add_many([record(0, candidate=Candidate.of("vendor"))])
    found = mixed.summary()
    assert {key: found[key] for key in ("records", "samples", "problems", "segments", "journals")} == {
        "records": 7,
        "samples": 1 + 4 * 3,
        "problems": 6,
        "segments": 3,
        "journals": 1,
    }
    assert found["candidates_per_problem"] == {"min": 1, "median": 1.0, "max": 2}
    assert found["groups"][0] == {
        "operation": "gemm",
        "device": "other-gpu",
        "workload": "train",
        "source": "kernelcast",
        "records": 1,
        "problems": 1,
        "samples": 0,
        "outcomes": {"crash": 1},
    }
    assert [(group["workload"], group["records"]) for group in found["groups"]] == [
        ("train", 1),
        ("live", 1),
        ("test", 1),
        ("train", 4),
    ]
    assert found["groups"][3]["outcomes"] == {"ok": 3, "timeout": 1}
    files = [path for path in mixed.root.rglob("*.*") if path.suffix in (".parquet", ".jsonl")]
    assert found["size_bytes"] == sum(p.stat().st_size for p in files) + sum(
        p.stat().st_size for p in (mixed.root / "devices").iterdir()
    )


def test_a_prepared_table_may_be_added(tmp_path: Path) -> None:
    store = Store(tmp_path)
    table = plain(table_of([record(0), record(1)]))
    assert store.add_table(table.append_column("note", pa.array(["", ""]))) == AddResult(2, 0)
    assert by_id(store.measurements()) == by_id([record(0), record(1)])
    with pytest.raises(InvalidRecordError, match="lacks the columns outcome"):
        store.add_table(table.drop_columns(["outcome"]))
    with pytest.raises(InvalidRecordError, match="another type"):
        store.add_table(table.set_column(12, "latency_us", pa.array(["fast", "slow"])))
    with pytest.raises(InvalidRecordError, match="id of a table of records holds nulls"):
        store.add_table(table.set_column(0, "id", pa.array(["x", None])))
    assert conform(table).schema.equals(segment_schema())


class CompactedWhileRead(Store):
    """A store that another process compacts between the listing of its files and the reading of them."""

    compacted = False

    def _read(self, *arguments: Any) -> pa.Table:
        if not self.compacted:
            self.compacted = True
            Store(self.root).compact()
        return super()._read(*arguments)


@pytest.mark.parametrize("in_segments", [0, 1, 2, 3])
def test_a_compaction_between_listing_and_reading_hides_nothing(tmp_path: Path, in_segments: int) -> None:
    for number in range(in_segments):
        Store(tmp_path).add_many([record(number)])
    journal(tmp_path, [record(number) for number in range(in_segments, 3)])
    store = CompactedWhileRead(tmp_path)
    assert store.ids() == {record(number).id for number in range(3)}
    assert store.compacted


class NeverStill(Store):
    """A store that other processes add to and compact between every listing of its files and the reading of them."""

    turns = 0

    def _read(self, *args: Any) -> pa.Table:
        free = False
        with contextlib.suppress(Timeout), FileLock(self.root / ".lock", timeout=0):
            free = True
        if free:
            self.turns += 1
            Store(self.root).add_many([record(100 + self.turns)])
            Store(self.root).compact()
        return super()._read(*args)


def test_a_read_ends_where_compactions_never_do(tmp_path: Path) -> None:
    Store(tmp_path).add_many([record(1)])
    store = NeverStill(tmp_path)
    # Each turn that another process could take added one record; then the read kept the others off.
    assert len(store.ids()) == 1 + store.turns
    assert store.turns > 1


# Faults


def test_reading_where_there_is_no_store_says_so_and_creates_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "none")
    reads: list[Callable[[], object]] = [
        store.ids,
        store.frame,
        store.table,
        store.devices,
        store.summary,
        store.check,
        store.problems,
        store.compact,
        lambda: store.prune(outcome="ok"),
        lambda: list(store.measurements()),
        lambda: store.export(tmp_path / "x.csv"),
    ]
    for read in reads:
        with pytest.raises(
            StoreError, match=r"There is no store at .*none\. Fill one with kernelcast import"
        ):
            read()
    assert list(tmp_path.iterdir()) == []


def test_reading_creates_nothing(mixed: Store) -> None:
    before = sorted(mixed.root.rglob("*"))
    mixed.frame()
    mixed.summary()
    mixed.check()
    mixed.ids()
    assert sorted(mixed.root.rglob("*")) == before


def test_a_newer_store_is_neither_read_nor_written(mixed: Store) -> None:
    (mixed.root / "store.json").write_text('{"schema": 2}')
    before = snapshot(mixed.root)
    uses: list[Callable[[], object]] = [mixed.frame, mixed.compact, lambda: mixed.add_many([record(9)])]
    for use in uses:
        with pytest.raises(StoreError, match="has schema 2; this kernelcast reads up to 1"):
            use()
    assert any("schema 2" in fault for fault in mixed.check())
    assert snapshot(mixed.root) == before


def test_a_newer_segment_is_refused(mixed: Store) -> None:
    path = segments_of(mixed.root)[0]
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"kernelcast.schema": "2"}), path)
    with pytest.raises(StoreError, match=r"has schema 2.*Upgrade kernelcast"):
        mixed.frame()


def test_a_newer_record_in_a_journal_is_refused(tmp_path: Path) -> None:
    journal(tmp_path, [record(0)])
    (path,) = (tmp_path / "journal").iterdir()
    path.write_text(path.read_text().replace('"schema":1', '"schema":2'))
    with pytest.raises(StoreError, match="line 1: The record has schema 2"):
        Store(tmp_path).frame()


def test_a_foreign_parquet_file_is_refused(mixed: Store) -> None:
    pq.write_table(pa.table({"a": [1]}), mixed.root / "parquet" / "foreign.parquet")
    with pytest.raises(StoreError, match=r"foreign\.parquet is no segment"):
        mixed.frame()
    metadata = segment_schema().metadata
    pq.write_table(
        pa.table({"a": [1]}).replace_schema_metadata(metadata), mixed.root / "parquet" / "foreign.parquet"
    )
    with pytest.raises(StoreError, match=r"columns of .*foreign"):
        mixed.frame()


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_segment_is_named(mixed: Store, kept: float) -> None:
    path = segments_of(mixed.root)[1]
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(StoreError, match=f"The segment {path} cannot be read"):
        mixed.frame()
    assert any(str(path) in fault and "cannot be read" in fault for fault in mixed.check())


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add_many([record(number) for number in range(500)])
    store.add_device(DEVICE)
    (path,) = segments_of(tmp_path)
    whole = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(list(COLUMNS).index("samples_us"))
    middle = column.data_page_offset + column.total_compressed_size // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 16]) + whole[middle + 1 :])
    with pytest.raises(StoreError, match="cannot be read"):
        store.frame(["samples_us"])
    assert len(store.check()) == 1


@pytest.mark.parametrize(
    ("column", "value"),
    [("latency_us", 5.0), ("outcome", "slow"), ("problem_id", "0" * 16), ("id", "0" * 32)],
)
def test_checking_finds_a_changed_row(tmp_path: Path, column: str, value: object) -> None:
    store = Store(tmp_path)
    store.add_device(DEVICE)
    rows = plain(table_of([record(0), record(1), record(2)]))
    index = list(COLUMNS).index(column)
    values = [*rows.column(column).to_pylist()[:2], value]
    store.add_many([record(9)])
    (path,) = segments_of(tmp_path)
    write_parquet(conform(rows.set_column(index, column, pa.array(values))), path)
    (fault,) = store.check()
    assert str(path) in fault
    assert (f"row 3: {column} is not that of the record" in fault) or (
        "rows 1 to 3" in fault and "slow" in fault
    )


def test_checking_finds_a_changed_line_and_device(tmp_path: Path) -> None:
    journal(tmp_path, [record(0)])
    store = Store(tmp_path)
    store.add_device(DEVICE)
    store.add_device(OTHER)
    assert store.check() == []
    (path,) = (tmp_path / "journal").iterdir()
    path.write_text(path.read_text().replace('"m":1', '"m":2'))
    facts = tmp_path / "devices" / f"{OTHER.fingerprint}.json"
    facts.write_text(facts.read_text().replace('"cores": 9', '"cores": 10'))
    faults = store.check()
    assert len(faults) == 2
    assert "the file was renamed or changed" in faults[0]
    assert "line 1: the id is not that of the record" in faults[1]
    with pytest.raises(StoreError, match="renamed or changed"):
        store.devices()
    facts.write_text("{")
    with pytest.raises(StoreError, match="does not hold a device's facts"):
        store.devices()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "store")
    for write in (lambda: store.add_many([record(0)]), lambda: store.add_device(DEVICE)):
        with pytest.raises(StoreError, match="cannot be created: Not a directory"):
            write()
    with pytest.raises(StoreError, match="There is no store"):
        store.frame()


def test_a_write_that_fails_leaves_the_store_as_it_was(mixed: Store) -> None:
    before = snapshot(mixed.root)
    moved = mixed.root / "parquet"
    moved.rename(mixed.root / "elsewhere")
    moved.write_text("in the way")
    with pytest.raises(StoreError):
        mixed.add_many([record(8)])
    moved.unlink()
    (mixed.root / "elsewhere").rename(moved)
    assert snapshot(mixed.root) == before


def _use_read_only(root: Path) -> None:
    """In a process of its own: as a user who may read the store and not write it."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    # By a relative path, as that user may not pass through the folders above.
    os.chdir(root)
    if os.getuid() == 0:
        os.setuid(65534)
    store = Store(Path())
    assert len(store.frame()) == store.summary()["records"] == 6
    assert store.check() is not None
    assert store.count_to_prune(outcome="ok") == 4
    uses: list[Callable[[], object]] = [
        lambda: store.add_many([record(9)]),
        lambda: store.add_device(OTHER),
        lambda: store.prune(outcome="ok"),
        store.compact,
        lambda: journal(Path(), [record(9)]),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=r"Cannot (write|append) to the store"):
            use()


def test_a_store_that_may_only_be_read_is_read_and_says_so_when_written(mixed: Store) -> None:
    before = snapshot(mixed.root)
    child = fork.Process(target=_use_read_only, args=(mixed.root,))
    child.start()
    child.join()
    for path in (mixed.root, *mixed.root.rglob("*")):
        path.chmod(0o755)
    assert child.exitcode == 0
    assert snapshot(mixed.root) == before


def test_importing_the_room_imports_nothing_heavy() -> None:
    code = (
        "import sys, kernelcast.datasets, kernelcast.datasets.autoheuristic; "
        "print(*sorted({'pandas', 'pyarrow', 'torch', 'triton', 'sklearn', 'xgboost', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# Several processes


def _append(root: Path, writer: int) -> None:
    with Journal(root) as out:
        for number in range(60):
            out.append(record(number, candidate=Candidate.of("split_k", {"split": writer})))


@pytest.mark.slow
def test_compacting_and_reading_while_four_processes_append(tmp_path: Path) -> None:
    Store(tmp_path).add_many([record(0)])
    writers = [fork.Process(target=_append, args=(tmp_path, writer)) for writer in range(4)]
    for each in writers:
        each.start()
    store = Store(tmp_path)
    seen = 0
    while any(each.is_alive() for each in writers):
        found = len(store.ids())
        assert found >= seen
        seen = found
        store.compact()
    for each in writers:
        each.join()
        assert each.exitcode == 0
    assert len(store.ids()) == 1 + 4 * 60
    store.compact()
    assert len(store.frame()) == 1 + 4 * 60
    assert list((tmp_path / "journal").iterdir()) == []


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_store
from kernelcast.datasets import Store
root, worker = Path(sys.argv[2]), int(sys.argv[3])
store = Store(root)
for round in range(10**6):
    numbers = range(20 * round, 20 * round + 20)
    records = [test_store.record(n, candidate=test_store.Candidate.of("split_k", {"split": worker})) for n in numbers]
    if round % 2:
        store.add_many(records)
    else:
        test_store.journal(root, records)
    print("\\n".join(record.id for record in records), flush=True)
    store.compact()
"""


@pytest.mark.slow
def test_kill_9_during_imports_and_compactions_loses_no_record(tmp_path: Path) -> None:
    root = tmp_path / "store"
    promised: set[str] = set()
    for worker in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(root), str(worker)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        promised.add(process.stdout.readline().strip())
        # Long enough for some rounds, and never at the same point of one.
        time.sleep(0.2 + 0.137 * worker)
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        # The last line may have been cut short.
        promised |= {line for line in rest.split("\n") if len(line) == 32}
        assert promised <= Store(root).ids()
    store = Store(root)
    store.add_device(DEVICE)
    assert store.check() == []
    store.compact()
    assert promised <= store.ids()
    assert store.check() == []
    assert len(promised) >= 5 * 20


def _add(root: Path, worker: int) -> None:
    Store(root).add_many([record(number) for number in range(worker, worker + 30)])


@pytest.mark.slow
def test_processes_that_import_the_same_records_add_each_once(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_store; "
                "test_store._add(Path(sys.argv[2]), int(sys.argv[3]))",
                str(Path(__file__).parent),
                str(tmp_path),
                str(worker),
            ]
        )
        for worker in (0, 10, 20)
    ]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    stored = [row for path in segments_of(tmp_path) for row in pq.read_table(path).column("id").to_pylist()]
    assert len(stored) == len(set(stored)) == 50
    assert np.array_equal(sorted(stored), sorted(record(number).id for number in range(50)))
    assert list((tmp_path / "journal").iterdir()) == []
