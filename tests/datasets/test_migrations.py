"""An artificial older version of the record, which had one time in milliseconds and no workload."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kernelcast.datasets import Environment, Journal, Measurement, Protocol, Store, migrations
from kernelcast.datasets.migrations import Migration, oldest_readable, register_migration
from kernelcast.datasets.segments import plain, table_of
from kernelcast.errors import InvalidRecordError, KernelcastError, StoreError
from kernelcast.kernels import Candidate, Device, problem

DEVICE = Device(name="test-gpu", kind="gpu", vendor="nvidia", architecture="sm80", cores=8)


def record(number: int) -> Measurement:
    return Measurement(
        problem=problem("gemm", m=number + 1, n=32, k=16),
        candidate=Candidate.of("split_k", {"split": 2}),
        device=DEVICE.name,
        device_fingerprint=DEVICE.fingerprint,
        environment=Environment(),
        protocol=Protocol("test"),
        samples_us=(1500.0 + number,),
    )


def older(measurement: Measurement) -> dict[str, Any]:
    """The record as version 0 wrote it."""
    data = measurement.to_dict()
    del data["workload"], data["samples_us"]
    return {**data, "schema": 0, "time_ms": measurement.samples_us[0] / 1000.0}


def newer_record(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "samples_us": [data.pop("time_ms") * 1000.0], "workload": ""}


def older_table(records: list[Measurement]) -> pa.Table:
    table = plain(table_of(records))
    times = pa.array([each.samples_us[0] / 1000.0 for each in records])
    kept = table.drop_columns(["workload", "samples_us", "sample_count", "latency_us"])
    return kept.append_column("time_ms", times).replace_schema_metadata({"kernelcast.schema": "0"})


def newer_rows(table: pa.Table) -> pa.Table:
    times = [1000.0 * value for value in table.column("time_ms").to_pylist()]
    return (
        table.drop_columns(["time_ms"])
        .append_column("workload", pa.array([""] * len(times)))
        .append_column("samples_us", pa.array([[value] for value in times]))
        .append_column("sample_count", pa.array([1] * len(times)))
        .append_column("latency_us", pa.array(times))
    )


STEP = Migration(0, newer_record, newer_rows)


@pytest.fixture
def step() -> Iterator[None]:
    register_migration(STEP)
    yield
    migrations._migrations.pop(0)


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    """Records 0 to 2 in a segment that is in no order, 3 and 4 in a journal, all of version 0."""
    root = tmp_path / "store"
    for name in ("devices", "journal", "parquet"):
        (root / name).mkdir(parents=True)
    (root / "store.json").write_text('{"schema": 0}')
    (root / "devices" / f"{DEVICE.fingerprint}.json").write_text(json.dumps(DEVICE.to_dict()))
    pq.write_table(older_table([record(2), record(0), record(1)]), root / "parquet" / "1.parquet")
    lines = [json.dumps(older(record(number))) + "\n" for number in (3, 4)]
    (root / "journal" / "host-1.jsonl").write_text("".join(lines))
    return root


def content(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*.*")) if path.name != ".lock"}


def everything() -> dict[str, Measurement]:
    return {record(number).id: record(number) for number in range(5)}


def test_an_older_store_is_read_as_a_present_one_and_left_as_it_is(step: None, old_store: Path) -> None:
    before = content(old_store)
    store = Store(old_store)
    assert {each.id: each for each in store.measurements()} == everything()
    assert store.ids() == everything().keys()
    assert store.frame(["latency_us"], workloads=[""])["latency_us"].min() == 1500.0
    assert len(store.frame(workloads=["other"])) == 0
    assert store.check() == []
    assert content(old_store) == before


def test_a_segment_alone_is_in_order_after_its_migration(step: None, old_store: Path) -> None:
    (old_store / "journal" / "host-1.jsonl").unlink()
    found = Store(old_store).frame(["problem_id", "latency_us"])
    assert found["problem_id"].is_monotonic_increasing
    assert sorted(found["latency_us"]) == [1500.0, 1501.0, 1502.0]


def test_writing_marks_the_store_and_compaction_brings_its_files_up_to_date(
    step: None, old_store: Path
) -> None:
    with Journal(old_store) as journal:
        journal.append(replace(record(9), workload="new"))
    assert json.loads((old_store / "store.json").read_text()) == {"schema": 1}
    store = Store(old_store)
    assert len(store.ids()) == 6
    store.compact()
    migrations._migrations.clear()
    try:
        assert {each.id: each for each in store.measurements() if not each.workload} == everything()
        assert store.check() == []
    finally:
        register_migration(STEP)


def test_one_older_segment_is_compacted_though_there_is_nothing_to_join(step: None, old_store: Path) -> None:
    (old_store / "journal" / "host-1.jsonl").unlink()
    Store(old_store).compact()
    (path,) = (old_store / "parquet").iterdir()
    assert pq.read_schema(path).metadata[b"kernelcast.schema"] == b"1"


def test_a_version_from_which_no_step_leads_here_is_refused(old_store: Path) -> None:
    before = content(old_store)
    assert oldest_readable() == 1
    store = Store(old_store)
    for use in (store.frame, store.compact, lambda: Journal(old_store)):
        with pytest.raises(StoreError, match=r"has schema 0; this kernelcast reads from 1 on\. Export it"):
            use()
    assert any("schema 0" in fault for fault in store.check())
    assert content(old_store) == before
    # The same for each file of a store that says it is of the present version.
    (old_store / "store.json").write_text('{"schema": 1}')
    with pytest.raises(StoreError, match=r"line 1: The record has schema 0"):
        store.frame()
    (old_store / "journal" / "host-1.jsonl").unlink()
    with pytest.raises(StoreError, match=r"The segment .* has schema 0"):
        store.frame()


def test_what_a_step_cannot_read_is_named(step: None, old_store: Path) -> None:
    table = older_table([record(0)])
    broken = table.drop_columns(["time_ms"]).replace_schema_metadata(table.schema.metadata)
    pq.write_table(broken, old_store / "parquet" / "2.parquet")
    with pytest.raises(StoreError, match=r"2\.parquet cannot be brought from schema 0 to 1"):
        Store(old_store).frame()
    data = older(record(0))
    del data["time_ms"]
    with pytest.raises(InvalidRecordError, match=r"Not a measurement \(KeyError: 'time_ms'\)"):
        Measurement.from_dict(data)


def test_a_step_is_registered_once_and_leads_to_a_version_that_there_is(step: None) -> None:
    assert oldest_readable() == 0
    with pytest.raises(KernelcastError, match="is a migration from schema 0 already"):
        register_migration(STEP)
    for version in (-1, 1, 2):
        with pytest.raises(KernelcastError, match=r"must be between 0 and 0"):
            register_migration(replace(STEP, version=version))
