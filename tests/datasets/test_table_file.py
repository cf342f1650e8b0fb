from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelcast.datasets import ImportSummary, Measurement, Store, import_files
from kernelcast.errors import ImportFileError, SettingsError
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.devices import device

MAP = "m=M,n=N,k=K,dtype:=float16,layout=how,variant=lib,config.tile=T,latency_ms=time,outcome=state"
TEXT = """lib,M,N,K,how,T,time,state,comment
cutlass,64,48,32,nt,16,0.5,ok,"one, two"
cutlass,64,48,32,nt,16,0.25,ok,
vendor,64,48,32,nt,0,0.125,ok,
cutlass,64,48,32,nt,32,,out_of_resources,
"""
HALF = problem("gemm", m=64, n=48, k=32, dtype="float16", layout="nt")


def run(store: Path, file: Path, mapping: str = MAP, operation: str = "gemm") -> ImportSummary:
    return import_files(
        "table",
        [str(file)],
        device=device("a100"),
        workload="mine",
        store=store,
        options={"operation": operation, "map": mapping},
    )


def write(path: Path, text: str = TEXT) -> Path:
    path.write_text(text)
    return path


def records(store: Path) -> dict[Candidate, Measurement]:
    return {each.candidate: each for each in Store(store).measurements()}


EXPECTED: dict[Candidate, tuple[str, tuple[float, ...]]] = {
    Candidate.of("cutlass", {"tile": 16}): ("ok", (500.0, 250.0)),
    Candidate.of("vendor", {"tile": 0}): ("ok", (125.0,)),
    Candidate.of("cutlass", {"tile": 32}): ("out_of_resources", ()),
}


def test_csv(tmp_path: Path) -> None:
    summary = run(tmp_path / "store", write(tmp_path / "a.csv"))
    assert (summary.rows, summary.problems, summary.added) == (4, 1, 3)
    found = records(tmp_path / "store")
    assert {key: (each.outcome, each.samples_us) for key, each in found.items()} == EXPECTED
    assert {each.problem for each in found.values()} == {HALF}
    assert Store(tmp_path / "store").check() == []
    assert run(tmp_path / "store", tmp_path / "a.csv").known == 3


def test_parquet_and_a_map_in_a_file(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.read_csv(write(tmp_path / "a.csv"))
    # A gap makes fractions of whole numbers.
    frame["M"] = frame["M"].astype(float)
    frame.to_parquet(tmp_path / "a.parquet")
    mapping = tmp_path / "map.json"
    columns = dict(word.split("=") for word in MAP.split(",") if ":=" not in word)
    mapping.write_text(json.dumps({"columns": columns, "constants": {"dtype": "float16"}}))
    run(tmp_path / "store", tmp_path / "a.parquet", str(mapping))
    found = records(tmp_path / "store")
    assert {key: (each.outcome, each.samples_us) for key, each in found.items()} == EXPECTED
    assert {each.problem for each in found.values()} == {HALF}


def test_an_operation_that_the_catalogue_lacks(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "rows,mode,us\n7,x,3\n9,3,4\n")
    run(tmp_path / "store", file, "rows=rows,option.mode=mode,latency_us=us", "sort")
    found = {each.problem.dims: each for each in Store(tmp_path / "store").measurements()}
    assert {dims: each.samples_us for dims, each in found.items()} == {
        (("rows", 7),): (3.0,),
        (("rows", 9),): (4.0,),
    }
    assert found[("rows", 9),].problem.options == (("mode", 3),)
    assert found[("rows", 7),].candidate == Candidate.of("table")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ("m=M", "must name the column of one of latency_ns"),
        ("latency_us=a,latency_ms=b", "it names latency_us, latency_ms"),
        ("latency_us", "must be NAME=COLUMN"),
        ("latency_us=", "must be NAME=COLUMN"),
        ("latency_us=a,m=b,m=c", "each name once"),
        ("latency_us=a,m=b,m:=3", "each name once"),
        ("none.json", "none.json: it cannot be read"),
    ],
)
def test_a_map_that_cannot_be(tmp_path: Path, mapping: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        run(tmp_path / "store", write(tmp_path / "a.csv"), mapping)


@pytest.mark.parametrize("data", [[], {"columns": []}, {"columns": {"m": 3}}, {"column": {}}])
def test_a_map_file_that_cannot_be(tmp_path: Path, data: Any) -> None:
    (tmp_path / "map.json").write_text(json.dumps(data))
    with pytest.raises(SettingsError, match="--map"):
        run(tmp_path / "store", write(tmp_path / "a.csv"), str(tmp_path / "map.json"))


def test_what_the_command_must_be_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs the option 'map'"):
        import_files(
            "table",
            [str(write(tmp_path / "a.csv"))],
            device=device("a100"),
            workload="mine",
            store=tmp_path / "store",
            options={"operation": "gemm"},
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: it does not begin with a line of column names"),
        (TEXT.replace("lib,M", "lib,X"), "line 1: --map names the column 'M', which is there in none of"),
        (TEXT.replace("comment", "M"), "line 1: --map names the column 'M', which is there twice"),
        (TEXT.splitlines()[0] + "\n", "holds no measurement"),
        (TEXT.replace("0.25,ok,", "0.25,ok"), "line 3: the line has 8 fields; it must have 9"),
        (TEXT.replace("0.25", "fast"), "line 3: latency_ms is 'fast'"),
        (TEXT.replace("0.25", "-1"), "line 3: latency_ms is '-1'"),
        (TEXT.replace("0.25", "inf"), "line 3: latency_ms is 'inf'"),
        (TEXT.replace("0.25", ""), "line 3: latency_ms is ''"),
        (TEXT.replace("0.25", "1e300"), r"line 3: latency_ms is '1e300'; it must be .* at most 3\.2e\+13"),
        (TEXT.replace("out_of_resources", "sad"), "line 5: outcome is 'sad'"),
        (TEXT.replace("vendor,64", "vendor,6.4"), "line 4: m is '6.4'; it must be a whole number"),
        (TEXT.replace("vendor,64", "vendor,-64"), "line 4: gemm: m is -64"),
        (TEXT.replace("vendor,64", ",64"), "line 4: variant is ''"),
        (TEXT.replace("nt,0", "up,0"), "line 4: gemm: layout is 'up'"),
        (TEXT + '"open', "it is no CSV file"),
        ("PAR1" + TEXT, "its Parquet cannot be read"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ImportFileError, match=message):
        run(tmp_path / "store", write(tmp_path / "a.csv", text))
    assert not (tmp_path / "store").exists()


def test_text_in_another_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(TEXT.encode().replace(b"two", b"\xff"))
    with pytest.raises(ImportFileError, match="line 2: it is not text in UTF-8"):
        run(tmp_path / "store", tmp_path / "a.csv")


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf", "Infinity"])
def test_a_parameter_that_is_no_number_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(
        ImportFileError, match=f"line 2: the parameter tile is '{value}'; it must be a number"
    ):
        run(tmp_path / "store", write(tmp_path / "a.csv", TEXT.replace("nt,16,0.5", f"nt,{value},0.5")))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "None"), (float("inf"), "inf")])
def test_the_same_in_parquet_with_its_row(tmp_path: Path, value: float, said: str) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.read_csv(write(tmp_path / "a.csv"))
    frame["T"] = frame["T"].astype(float)
    frame.loc[1, "T"] = value
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ImportFileError, match=f"row 2: the parameter tile is {said}; it must be a number"):
        run(tmp_path / "store", tmp_path / "a.parquet")
