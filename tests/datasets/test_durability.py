"""The store under kills, many writers and many rows: the benchmark of them, in small; and what makes large stores quick."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_store

from kernelcast.datasets import Environment, Measurement, Protocol, Store
from kernelcast.datasets.rows import SORT_COLUMNS, all_distinct, drop_repeats, row_order, sort_rows
from kernelcast.datasets.segments import measurements_of, plain, table_of
from kernelcast.kernels import Candidate, problem

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def in_a_process(expression: str) -> Any:
    """The value of an expression over the benchmark's modules; a process of its own, as it forks with torch imported."""
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import pyarrow.parquet, torch, durability_kills, store_speed\n"
        f"print(json.dumps({expression}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(BENCHMARKS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["killed_collections", "killed_rewrites"])
def test_kill_9_loses_nothing_and_measures_nothing_twice(tmp_path: Path, work: str) -> None:
    found = in_a_process(f"asdict(durability_kills.{work}(Path({str(tmp_path / 'store')!r}), 5))")
    assert found["kills"] == 5
    assert found["announced"] >= 15
    assert (found["lost"], found["twice"], found["parts"], found["faults"]) == (0, 0, 0, [])


@pytest.mark.slow
def test_many_writers_two_readers_and_a_compaction_share_a_store(tmp_path: Path) -> None:
    found = in_a_process(f"asdict(durability_kills.crowd(Path({str(tmp_path / 'store')!r}), 3, 2.0))")
    assert found["written"] >= 3
    assert found["reads"] >= 2
    assert found["compactions"] >= 1
    assert (found["missing"], found["more"], found["wrong_reads"], found["faults"]) == (0, 0, 0, [])


@pytest.mark.slow
def test_fifty_thousand_rows_take_little_memory(tmp_path: Path) -> None:
    found = in_a_process(f"store_speed.large_store(Path({str(tmp_path / 'store')!r}), 50, repeats=1)")
    assert found["rows"] == 50_000
    assert {each["rows"] for each in found["reads"] if each["work"] != "compact"} == {50_000}
    assert found["check"]["faults"] == []
    # Most of it is pandas and pyarrow themselves.
    assert all(each["peak_gib"] < 0.5 for each in found["reads"])


def test_made_up_rows_are_valid_records(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert bench_store.fill(tmp_path, 5, 7, a_segment=2) == 35
    assert store.check() == []
    assert len(list((tmp_path / "parquet").iterdir())) == 3
    assert (len(store.ids()), len(store.problems())) == (35, 5)
    assert store.summary()["candidates_per_problem"] == {"min": 7, "median": 7.0, "max": 7}


# What makes large stores quick, against the plain way


def record(m: int, split: int, environment: str, created_at: float = 0.0, samples: int = 1) -> Measurement:
    return Measurement(
        problem=problem("gemm", m=m, n=32, k=16),
        candidate=Candidate.of("split_k", {"split": split}),
        device="test",
        device_fingerprint="f" * 16,
        environment=Environment(torch=environment),
        protocol=Protocol("test"),
        samples_us=(1.0,) * samples,
        created_at=created_at,
    )


RECORDS = st.lists(
    st.builds(
        record,
        m=st.integers(1, 4),
        split=st.sampled_from([2, 4, 16]),
        environment=st.sampled_from(["1", "2"]),
        created_at=st.sampled_from([0.0, 1.0, 2.0]),
        samples=st.integers(1, 3),
    ),
    max_size=30,
)


@given(RECORDS, st.integers(1, 5))
@settings(max_examples=examples(40), deadline=None)
def test_rows_are_ordered_by_their_texts(records: list[Measurement], parts: int) -> None:
    # Several tables, whose dictionaries differ, as those of several segments do.
    tables = [table_of(records[part::parts]) for part in range(parts)]
    table = pa.concat_tables(tables).unify_dictionaries()
    found = plain(sort_rows(table).select(list(SORT_COLUMNS))).to_pylist()
    assert found == sorted(
        plain(table.select(list(SORT_COLUMNS))).to_pylist(), key=lambda row: [*row.values()]
    )
    assert row_order(sort_rows(drop_repeats(table))) is None


def test_the_ids_decide_between_environments_of_one_candidate() -> None:
    records = sorted((record(1, 2, str(environment)) for environment in range(6)), key=lambda each: each.id)
    around = [record(2, 2, "1"), record(3, 2, "1")]
    table = table_of([around[0], *reversed(records), around[1]])
    found = sort_rows(table).column("id").to_pylist()
    assert [each for each in found if each in {one.id for one in records}] == [each.id for each in records]
    assert row_order(sort_rows(table)) is None


@given(RECORDS)
@settings(max_examples=examples(40), deadline=None)
def test_of_each_id_the_latest_with_the_most_samples_is_kept(records: list[Measurement]) -> None:
    kept: dict[str, Measurement] = {}
    for each in records:
        best = kept.get(each.id, each)
        kept[each.id] = max(best, each, key=lambda x: (x.created_at, len(x.samples_us)))
    found = list(measurements_of(drop_repeats(table_of(records))))
    assert {each.id: each for each in found} == kept
    assert len(found) == len(kept)
    assert all_distinct(table_of(records).column("id")) == (len(kept) == len(records))


def test_ids_are_told_apart_by_every_character() -> None:
    base = "0123456789abcdef" * 2
    one_off = [base[:i] + "z" + base[i + 1 :] for i in range(32)]
    assert all_distinct(pa.chunked_array([[base], one_off]))
    assert not all_distinct(pa.chunked_array([[base, *one_off], [one_off[17]]]))
    # A slice begins in the middle of its buffer; other lengths are compared as texts.
    assert all_distinct(pa.chunked_array([pa.array([base, base, *one_off])[1:]]))
    assert not all_distinct(pa.chunked_array([["a", "b", "a"]]))
    assert all_distinct(pa.chunked_array([[]], pa.string()))


def test_too_many_texts_for_one_number_are_ordered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelcast.datasets import rows

    table = table_of([record(m, 2, "1") for m in (3, 1, 2)])
    expected = sort_rows(table)
    ranks = rows._ranks
    monkeypatch.setattr(rows, "_ranks", lambda column: (ranks(column)[0], 2**20))
    assert sort_rows(table).equals(expected)


def test_a_large_table_is_written_in_order_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernelcast.datasets import segments

    monkeypatch.setattr(segments, "_GROUP_ROWS", 3)
    monkeypatch.setattr(segments, "_PARTS", 2)
    records = [record(m, split, "1") for m in (5, 2, 9, 1) for split in (2, 4, 16)]
    store = Store(tmp_path)
    store.add_many(records[:7])
    store.add_many(records[7:])
    expected = store.table()
    store.compact()
    (path,) = (tmp_path / "parquet").iterdir()
    assert pa.parquet.ParquetFile(path).metadata.num_row_groups == 4
    assert plain(store.table()).equals(plain(expected))


def test_adding_takes_only_what_is_new(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = [record(m, 2, "1") for m in range(1, 6)]
    store.add_many(old)
    again = [replace(each, created_at=9.0) for each in old]
    assert store.add_many([*again, record(9, 2, "1")]).added == 1
    assert store.add_many(again).added == 0
    assert np.max(store.frame(["created_at"])["created_at"]) == 0.0
