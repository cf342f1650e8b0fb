"""Exports come back as the records they were: Parquet, CSV and T4, whatever the records hold."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernelcast.datasets import OUTCOMES, Environment, Measurement, Protocol, Store, import_files
from kernelcast.datasets.t4 import export_t4
from kernelcast.errors import ImportFileError
from kernelcast.kernels import Candidate, Device, Problem, problem
from kernelcast.kernels.devices import device

A100, H100 = device("a100"), device("h100")
#: One that no table has.
OWN = replace(A100, name="own card", cores=7)

texts = st.text(
    st.one_of(st.sampled_from("\"',;\\\n\r\t\0 =#{}[]\ufeff\u2028é😀"), st.characters(codec="utf-8")),
    max_size=12,
)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
values = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.booleans(), texts.filter(lambda text: not text.endswith("\0"))
)
times = st.floats(1e-6, 1e16, allow_nan=False)

problems = st.one_of(
    st.builds(
        lambda m, n, dtype, layout: problem("gemm", m=m, n=n, k=32, dtype=dtype, layout=layout),
        st.integers(1, 2**20),
        st.integers(1, 2**20),
        st.sampled_from(("float16", "float32")),
        st.sampled_from(("nn", "nt", "tn", "tt")),
    ),
    # Of an operation that the catalogue lacks, with names and texts of any kind.
    st.builds(
        lambda dims, options, dtype: Problem("of_others", tuple(dims.items()), dtype, tuple(options.items())),
        st.dictionaries(names.map(lambda name: f"d{name}"), st.integers(0, 2**40 - 1), max_size=3),
        st.dictionaries(names.map(lambda name: f"o{name}"), st.one_of(values, texts), max_size=3),
        texts,
    ),
)


@st.composite
def measurements(draw: st.DrawFn, on: Device = A100) -> Measurement:
    outcome = draw(st.sampled_from(("ok", *OUTCOMES)))
    samples = tuple(draw(st.lists(times, min_size=1, max_size=5))) if outcome == "ok" else ()
    return Measurement(
        problem=draw(problems),
        candidate=Candidate.of(draw(texts), draw(st.dictionaries(names, values, max_size=3))),
        device=on.name,
        device_fingerprint=on.fingerprint,
        environment=Environment(source=draw(texts), torch=draw(texts)),
        protocol=Protocol(
            draw(texts),
            cache=draw(texts),
            flush_bytes=draw(st.integers(0, 2**50)),
            seed=draw(st.integers(0, 2**31)),
            error_log=draw(st.one_of(st.just(float("nan")), st.floats(0, 10))),
        ),
        samples_us=samples,
        outcome=outcome,
        detail="" if outcome == "ok" else draw(texts),
        workload=draw(texts),
        created_at=draw(st.one_of(st.just(0.0), st.floats(0, 4e9))),
    )


def facts(store: Path, without: Sequence[str] = ()) -> list[Any]:
    """Every record as text, in order: equal only if every field is, NaN among them."""
    found = [record.to_dict() for record in Store(store).measurements()]
    return [json.dumps({k: v for k, v in each.items() if k not in without}) for each in found]


def comes_back(
    root: Path, records: Sequence[Measurement], ending: str, devices: Sequence[Device] = (A100,)
) -> None:
    store, again, file = Store(root / "store"), root / "again", root / f"out{ending}"
    for each in devices:
        store.add_device(each)
    store.add_many(records)
    count = store.export(file)
    summary = import_files("records", [str(file)], store=again)
    assert (summary.rows, summary.added, summary.known) == (count, count, 0)
    assert facts(again) == facts(store.root)
    assert Store(again).devices() == store.devices()
    assert Store(again).check() == []
    # Twice is once, and a merge of what is there adds nothing.
    files = sorted((again / "parquet").iterdir())
    assert import_files("records", [str(file)], store=again).known == count
    assert store.merge(again).added == 0
    assert sorted((again / "parquet").iterdir()) == files


# A failing example is shown as it was found: each step of shrinking it would write stores, for minutes in all.
few = settings(
    max_examples=examples(8),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
many = settings(few, max_examples=examples(60))


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
@few
@given(records=st.lists(measurements(), min_size=1, max_size=6))
def test_a_few_exports_come_back_equal(ending: str, records: list[Measurement]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        comes_back(Path(folder), records, ending)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".parquet", ".csv"])
@many
@given(records=st.lists(measurements(), min_size=1, max_size=12))
def test_exports_come_back_equal(ending: str, records: list[Measurement]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        comes_back(Path(folder), records, ending)


def t4_comes_back(records: list[Measurement]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store, again = Store(root / "store"), root / "again"
        same = [replace(each, problem=records[0].problem) for each in records]
        store.add_device(A100)
        store.add_many(same)
        count = export_t4(store, root / "out.json")
        for _ in range(2):
            summary = import_files("t4", [str(root / "out.json")], device=A100, workload="again", store=again)
            assert summary.added + summary.known == count == summary.rows
        # The command names the workload.
        assert facts(again, ["workload"]) == facts(store.root, ["workload"])
        assert {each.workload for each in Store(again).measurements()} == {"again"}
        assert Store(again).check() == []
        assert store.merge(again).added == 0


@few
@given(records=st.lists(measurements(), min_size=1, max_size=6))
def test_a_few_t4_exports_come_back_equal(records: list[Measurement]) -> None:
    t4_comes_back(records)


@pytest.mark.slow
@many
@given(records=st.lists(measurements(), min_size=1, max_size=12))
def test_t4_exports_come_back_equal(records: list[Measurement]) -> None:
    t4_comes_back(records)


def made(number: int, on: Device = A100, **changes: Any) -> Measurement:
    record = Measurement(
        problem=problem("gemm", m=64, n=48, k=32),
        candidate=Candidate.of("split_k", {"splits": number}),
        device=on.name,
        device_fingerprint=on.fingerprint,
        environment=Environment(),
        protocol=Protocol("a"),
        samples_us=(1.5, 2.5),
        workload="mine",
        created_at=1.0,
    )
    return replace(record, **changes)


def test_parquet_brings_the_facts_of_every_device_along(tmp_path: Path) -> None:
    comes_back(tmp_path, [made(1), made(1, H100), made(2, OWN)], ".parquet", (A100, H100, OWN))


def test_csv_needs_devices_that_are_known(tmp_path: Path) -> None:
    comes_back(tmp_path / "two", [made(1), made(1, H100)], ".csv", (A100, H100))
    store, file = Store(tmp_path / "store"), tmp_path / "out.csv"
    store.add_device(OWN)
    store.add_many([made(1), made(2, OWN)])
    store.export(file)
    with pytest.raises(ImportFileError, match=r"out.csv, line [23]: .*'own card'.*Export to \.parquet"):
        import_files("records", [str(file)], store=tmp_path / "again")
    with pytest.raises(ImportFileError, match=r"line [23]: .*but --device is h100"):
        import_files("records", [str(file)], device=H100, store=tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "text", ["a\rb", "a\nb", "a\r\nb", "a\0b", 'a"b,', "", " a ", "\ufeffa", "NA", "nan", "1.0", "#a"]
)
def test_texts_of_csv_come_back(tmp_path: Path, text: str) -> None:
    record = made(
        1, workload=text, environment=Environment(torch=text), candidate=Candidate.of(text, {"a": f"{text}b"})
    )
    comes_back(tmp_path, [record, made(2, samples_us=(), outcome="crash", detail=text)], ".csv")


def test_another_workload_may_be_given(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.add_many([made(1)])
    store.add_device(A100)
    for ending in (".csv", ".parquet"):
        store.export(tmp_path / f"out{ending}")
        again = tmp_path / f"again{ending}"
        import_files("records", [str(tmp_path / f"out{ending}")], workload="theirs", device=A100, store=again)
        assert facts(again) == [facts(store.root)[0].replace('"mine"', '"theirs"')]


def header_and_row(tmp_path: Path) -> tuple[list[str], list[str]]:
    store, file = Store(tmp_path / "sound"), tmp_path / "sound.csv"
    store.add_many([made(1)])
    store.export(file)
    with file.open(newline="") as lines:
        header, row = csv.reader(lines)
    return header, row


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("id", "0" * 32, "line 2: the id '0+' is not that of the record"),
        ("samples_us", "[1.5, 2.0, -1]", "line 2: .*-1.0 us is not a positive"),
        ("samples_us", "[1.5, NaN]", "line 2: .*nan us is not a positive"),
        ("samples_us", "1.5", "line 2: samples_us is '1.5'; it must be numbers"),
        ("samples_us", "[" * 100_000, "line 2: samples_us is '"),
        ("samples_us", "[true]", "line 2: samples_us is"),
        ("created_at", "soon", "line 2: created_at is 'soon'"),
        ("created_at", "nan", "line 2: created_at is nan"),
        ("created_at", "-1", "line 2: created_at is -1.0"),
        ("outcome", "sad", "line 2: .*Outcome 'sad' is none of"),
        ("outcome", "crash", "line 2: .*has 2 samples"),
        ("problem", "{}", "line 2: .*Not a problem"),
        ("problem", "[" * 100_000, "line 2: .*RecursionError"),
        ("candidate_key", '["split_k",{"splits":2}]', "line 2: the id"),
        ("candidate_key", "x", "line 2: .*Not a candidate"),
        ("environment", '{"torch":3}', "line 2: torch of an environment is 3"),
        ("environment", '{"tourch":"3"}', "line 2: .*unexpected keyword"),
        ("protocol", '{"name":3,"error_log":null}', "line 2: .*name of the protocol is 3; it must be str"),
        ("protocol", '{"name":"a","error_log":-1}', "line 2: .*error_log of the protocol is -1"),
        ("protocol", '{"name":"a","error_log":1e999}', "line 2: .*error_log of the protocol is inf"),
        ("device_fingerprint", "x", "line 2: the id"),
    ],
)  # fmt: skip
def test_a_row_that_was_changed_is_named(tmp_path: Path, column: str, value: str, message: str) -> None:
    header, row = header_and_row(tmp_path)
    row[header.index(column)] = value
    bad = tmp_path / "bad.csv"
    with bad.open("w", newline="") as file:
        csv.writer(file).writerows([header, row])
    with pytest.raises(ImportFileError, match=message) as caught:
        import_files("records", [str(bad)], store=tmp_path / "again")
    assert str(caught.value).startswith(str(bad))
    assert len(str(caught.value)) < 600
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: it is no export of kernelcast"),
        (b"a,b\n1,2\n", "line 1: it is no export of kernelcast: .*kernelcast import table"),
        (b"PAR1" + bytes(100), "its Parquet cannot be read"),
    ],
)
def test_another_file_is_no_export(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ImportFileError, match=message):
        import_files("records", [str(tmp_path / "bad")], store=tmp_path / "again")


def test_rows_of_the_wrong_length_and_none_at_all(tmp_path: Path) -> None:
    header, row = header_and_row(tmp_path)
    for rows, message in (
        ([header, row[:-1]], "line 2: the line has 20 fields; it must have 21"),
        ([header], "it holds no record"),
        ([[*header, "id"], [*row, "x"]], "the columns 'id' are not there once"),
    ):
        with (tmp_path / "bad.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        with pytest.raises(ImportFileError, match=message):
            import_files("records", [str(tmp_path / "bad.csv")], store=tmp_path / "again")


def test_a_newer_export_is_refused(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    store = Store(tmp_path / "store")
    store.add_many([made(1)])
    store.export(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    pq.write_table(table.replace_schema_metadata({b"kernelcast.schema": b"2"}), tmp_path / "a.parquet")
    with pytest.raises(ImportFileError, match="has schema 2; this kernelcast reads up to 1"):
        import_files("records", [str(tmp_path / "a.parquet")], store=tmp_path / "again")


def test_a_t4_export_that_was_changed_or_is_of_another_device(tmp_path: Path) -> None:
    store, file = Store(tmp_path / "store"), tmp_path / "out.json"
    store.add_many([made(1)])
    export_t4(store, file)

    def again(on: Device = A100) -> None:
        import_files("t4", [str(file)], device=on, workload="w", store=tmp_path / "again")

    with pytest.raises(
        ImportFileError, match=r"results\[0\]: it was measured on 'a100-sxm4-80gb' .* --device is h100"
    ):
        again(H100)
    text = file.read_text()
    file.write_text(text.replace('"splits": 1', '"splits": 2'))
    with pytest.raises(ImportFileError, match=r"results\[0\]: the id '\w+' is not that of the record"):
        again()
    file.write_text(text.replace('"outcome": "ok"', '"outcome": "sad"'))
    with pytest.raises(ImportFileError, match=r"results\[0\] is no record: .*sad"):
        again()
    assert not (tmp_path / "again").exists()
