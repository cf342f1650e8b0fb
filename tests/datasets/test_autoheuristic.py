from __future__ import annotations

import gzip
import json
import math
import statistics
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import for_each

from kernelcast.datasets import ImportSummary, Measurement, Store, import_files, importers
from kernelcast.datasets.importing import importer, read_content
from kernelcast.errors import ImportFileError, SettingsError, StoreError, UnknownNameError
from kernelcast.kernels import Candidate, Device, Problem, problem

A100 = Device(
    name="an-a100",
    kind="gpu",
    vendor="nvidia",
    architecture="sm80",
    cores=108,
    shared_bytes_per_block=163 * 1024,
    shared_bytes_per_core=164 * 1024,
)
H100 = Device(
    name="an-h100",
    kind="gpu",
    vendor="nvidia",
    architecture="sm90",
    cores=132,
    shared_bytes_per_block=227 * 1024,
)

MM_HEADER = {
    "shared_memory": 166912,
    "device_capa": [8, 0],
    "name": "mm",
    "numerical_features": ["m", "k", "n", "mat1_stride_0", "mat1_stride_1", "mat2_stride_0", "mat2_stride_1"],
    "categorical_features": ["mat1_dtype", "mat2_dtype", "mat1_iscontig", "mat2_iscontig", "using_tf32"],
}
MM_COLUMNS = (
    "m,k,n,mat1_dtype,mat2_dtype,mat1_stride_0,mat1_stride_1,mat2_stride_0,mat2_stride_1,"
    "mat1_iscontig,mat2_iscontig,using_tf32,choice,feedback"
)
TILE = "type=triton_BLOCK-M=16_BLOCK-K=32_BLOCK-N=64_numstages=4_numwarps=2"
HALF = "64,32,48,torch.float16,torch.float16,32,1,1,32,True,False,not_float_32"
FLOAT = "64,32,48,torch.float32,torch.float32,32,1,48,1,True,True,True"
MM_ROWS = [
    f"{HALF},extern_mm,0.25",
    f"{HALF},{TILE},0.5",
    f"{HALF},{TILE},0.125",
    f"{HALF},{TILE},1.0",
    f"{FLOAT},extern_mm,2",
    f"{HALF},extern_mm,0.75",
    f"{FLOAT},{TILE},inf",
    f"{FLOAT},{TILE},inf",
]


def text_of(header: object = None, columns: str = MM_COLUMNS, rows: list[str] | None = None) -> bytes:
    lines = [
        json.dumps(MM_HEADER if header is None else header),
        columns,
        *(MM_ROWS if rows is None else rows),
    ]
    return ("\n".join(lines) + "\n").encode()


def write(path: Path, content: bytes | None = None) -> str:
    path.write_bytes(text_of() if content is None else content)
    return str(path)


def run(store: Path, *files: str, device: Device = A100, workload: str = "test") -> ImportSummary:
    return import_files("autoheuristic", files, device=device, workload=workload, store=store)


def snapshot(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def records(store: Path) -> dict[tuple[Problem, Candidate], Measurement]:
    return {(each.problem, each.candidate): each for each in Store(store).measurements()}


def test_repeats_of_one_candidate_are_one_record(tmp_path: Path) -> None:
    summary = run(tmp_path / "store", write(tmp_path / "a.txt"))
    assert (summary.files, summary.rows, summary.problems) == (1, 8, 2)
    assert (summary.added, summary.known, summary.dropped) == (4, 0, 0)
    half = problem("gemm", m=64, n=48, k=32, dtype="float16", layout="nt")
    full = problem("gemm", m=64, n=48, k=32, dtype="float32", layout="nn", allow_tf32=True)
    vendor = Candidate.of("vendor")
    tile = Candidate.of(
        "triton_tiled",
        {"block_m": 16, "block_n": 64, "block_k": 32, "group_m": 8, "num_stages": 4, "num_warps": 2},
    )
    found = records(tmp_path / "store")
    # In the order of the file, in microseconds.
    assert {key: each.samples_us for key, each in found.items()} == {
        (half, vendor): (250.0, 750.0),
        (half, tile): (500.0, 125.0, 1000.0),
        (full, vendor): (2000.0,),
        (full, tile): (),
    }
    assert found[half, tile].latency_us == 500.0
    assert found[full, tile].outcome == "out_of_resources"
    assert {each.outcome for key, each in found.items() if key != (full, tile)} == {"ok"}
    for each in found.values():
        assert each.environment.source == "autoheuristic:a.txt"
        assert (each.protocol.name, each.protocol.inputs) == ("autoheuristic", "unknown")
        assert (each.device, each.device_fingerprint) == ("an-a100", A100.fingerprint)
        assert (each.workload, each.created_at) == ("test", 0.0)
    # Median absolute deviation of log(0.5, 0.125, 1) is log 2; one sample has no spread.
    expected = 1.2533 * 1.4826 * math.log(2) / math.sqrt(3)
    assert found[half, tile].protocol.error_log == pytest.approx(expected)
    assert math.isnan(found[full, vendor].protocol.error_log)
    assert Store(tmp_path / "store").devices() == {A100.fingerprint: A100}
    # The columns that were written are those that the records stand for.
    assert Store(tmp_path / "store").check() == []


def test_importing_twice_changes_nothing(tmp_path: Path) -> None:
    file, store = write(tmp_path / "a.txt"), tmp_path / "store"
    run(store, file)
    before = snapshot(store)
    summary = run(store, file, workload="another name")
    assert (summary.added, summary.known) == (0, 4)
    assert snapshot(store) == before


def test_failed_repeats_of_a_candidate_that_works_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [f"{HALF},{TILE},inf", f"{HALF},{TILE},0.5", f"{HALF},{TILE},inf", f"{HALF},extern_mm,inf"]
    summary = run(tmp_path / "store", write(tmp_path / "a.txt", text_of(rows=rows)))
    assert (summary.rows, summary.dropped, summary.added) == (4, 2, 2)
    assert sorted((each.outcome, each.samples_us) for each in records(tmp_path / "store").values()) == [
        ("ok", (500.0,)),
        ("out_of_resources", ()),
    ]


def test_empty_lines_and_carriage_returns_are_skipped(tmp_path: Path) -> None:
    plain, store = text_of(), tmp_path / "store"
    lines = plain.split(b"\n")
    spaced = b"\n".join([*lines[:4], b"", *lines[4:7], b"", b"", *lines[7:]])
    run(store, write(tmp_path / "a.txt", plain))
    for content in (spaced, plain.replace(b"\n", b"\r\n")):
        assert run(store, write(tmp_path / "a.txt", content)).known == 4
    broken = spaced.replace(b"1.0\n", b"-1.0\n")
    with pytest.raises(ImportFileError, match=r"line 7: the feedback is -1\.0"):
        run(store, write(tmp_path / "a.txt", broken))


# Other kinds of file


def import_one(
    tmp_path: Path, header: dict[str, object], columns: str, rows: list[str]
) -> dict[tuple, Measurement]:
    header = {"shared_memory": 166912, "device_capa": [8, 0], **header}
    run(tmp_path / "store", write(tmp_path / "a.txt", text_of(header, columns, rows)))
    assert Store(tmp_path / "store").check() == []
    return records(tmp_path / "store")


def test_mixed_mm(tmp_path: Path) -> None:
    header = {**MM_HEADER, "name": "mixed_mm", "categorical_features": MM_HEADER["categorical_features"][:-1]}
    columns = MM_COLUMNS.replace("using_tf32,", "")
    facts = "2,64,48,torch.float16,torch.int8,64,1,1,72,True,False"
    found = import_one(
        tmp_path, header, columns, [f"{facts},extern_fallback_mixed_mm,1", f"{facts},{TILE},2"]
    )
    expected = problem("mixed_gemm", m=2, n=48, k=64, dtype="float16", layout="nt", ldb=72)
    # The key of the records that are in stores already.
    assert expected == Problem(
        operation="mixed_gemm",
        dims=(("m", 2), ("n", 48), ("k", 64)),
        dtype="float16",
        options=(("weight_dtype", "int8"), ("layout", "nt"), ("lda", 0), ("ldb", 72)),
    )
    assert {key: each.latency_us for key, each in found.items()} == {
        (expected, Candidate.of("vendor")): 1000.0,
        (
            expected,
            Candidate.of(
                "triton_tiled",
                {"block_m": 16, "block_n": 64, "block_k": 32, "group_m": 8, "num_stages": 4, "num_warps": 2},
            ),
        ): 2000.0,
    }


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ("torch.int8,torch.int8", "line 3: mixed_gemm does not take dtype 'int8'"),
        (
            "torch.float16,torch.int32",
            "line 3: mixed_gemm: weight_dtype is 'int32'; it must be one of int8, uint8",
        ),
        ("torch.float16,torch.int7", "line 3: mat2_dtype is 'torch.int7'"),
    ],
)
def test_a_mixed_mm_of_other_dtypes_is_refused(tmp_path: Path, dtypes: str, message: str) -> None:
    header = {**MM_HEADER, "name": "mixed_mm", "categorical_features": MM_HEADER["categorical_features"][:-1]}
    rows = [f"2,64,48,{dtypes},64,1,1,64,True,False,extern_fallback_mixed_mm,1"]
    content = text_of(header, MM_COLUMNS.replace("using_tf32,", ""), rows)
    with pytest.raises(ImportFileError, match=message):
        run(tmp_path / "store", write(tmp_path / "a.txt", content))
    assert not (tmp_path / "store").exists()


def test_pad_mm(tmp_path: Path) -> None:
    numerical = [*MM_HEADER["numerical_features"], "m_padded_length", "k_padded_length", "n_padded_length"]
    numerical += ["mat1_align_size", "mat2_align_size"]
    categorical = ["mat1_dtype", "mat2_dtype", "prepadded_mat1", "prepadded_mat2", "using_tf32"]
    header = {"name": "pad_mm", "numerical_features": numerical, "categorical_features": categorical}
    columns = ",".join([*numerical, *categorical, "choice", "feedback"])
    facts = "7,9,5,1,7,5,1,1,7,3,8,8,torch.bfloat16,torch.bfloat16,False,True,not_float_32"
    found = import_one(tmp_path, header, columns, [f"{facts},orig,1", f"{facts},pad,3"])
    expected = Problem(
        operation="pad_mm",
        dims=(("m", 7), ("n", 5), ("k", 9)),
        dtype="bfloat16",
        options=(
            ("layout", "tn"),
            ("lda", 0),
            ("ldb", 0),
            ("m_padded_length", 1),
            ("k_padded_length", 7),
            ("n_padded_length", 3),
            ("mat1_align_size", 8),
            ("mat2_align_size", 8),
            ("prepadded_mat1", False),
            ("prepadded_mat2", True),
        ),
    )
    assert {key: each.latency_us for key, each in found.items()} == {
        (expected, Candidate.of("vendor")): 1000.0,
        (expected, Candidate.of("pad")): 3000.0,
    }


def test_flex_attention(tmp_path: Path) -> None:
    numerical = ["b", "h", "m", "n", "kv_seq_length", *(f"q_stride_{i}" for i in range(4))]
    numerical += ["subgraph_num_nodes", "subgraph_num_args_used"]
    header = {"name": "flex_attention", "numerical_features": numerical, "categorical_features": ["dtype"]}
    columns = "b,h,m,n,kv_seq_length,dtype," + ",".join([*numerical[5:], "choice", "feedback"])
    facts = "2,8,128,64,256,torch.float16,65536,64,512,1,6,1"
    tile = "type=triton_BLOCK-M=128_BLOCK-K=-1_BLOCK-N=32_numstages=3_numwarps=4"
    found = import_one(tmp_path, header, columns, [f"{facts},{tile},0.5"])
    expected = Problem(
        operation="flex_attention",
        dims=(("b", 2), ("h", 8), ("m", 128), ("n", 64), ("kv_seq_length", 256)),
        dtype="float16",
        options=tuple(zip(numerical[5:], (65536, 64, 512, 1, 6, 1), strict=True)),
    )
    config = {"block_m": 128, "block_n": 32, "num_stages": 3, "num_warps": 4}
    assert {key: each.latency_us for key, each in found.items()} == {
        (expected, Candidate.of("triton_flex", config)): 500.0
    }


# Faults: the message, and the store byte for byte as it was


def swapped(line: int, old: str, new: str) -> bytes:
    """The file with a text replaced in one line, counted from 1."""
    lines = text_of().decode().split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    return "\n".join(lines).encode()


broken = {
    "empty": (b"", "it is empty"),
    "blank": (b"\n\n", "it is empty"),
    "binary": (bytes(range(1, 256)) * 20, "line 1: it does not begin with a line of JSON"),
    "binary rows": (text_of(rows=[])[:-1] + b"\n\x01\xff\xfe,1\n", "line 3: the line is not text"),
    "a number of no config": (
        text_of().replace(b"numwarps=", b"numwarps=99999999999999999999", 1),
        "line [0-9]+: the choice 'type=triton.* is not known",
    ),
    "a number of no digits that Python reads": (
        text_of().replace(b"numwarps=", b"numwarps=" + b"9" * 5000, 1),
        "line [0-9]+: the choice 'type=triton.* is not known",
    ),
    "a huge number": (text_of().replace(b"64,32,48", b"9" * 5000 + b",32,48", 1), "line 3: m is '9+"),
    "a NUL byte": (text_of() + b"\x00,1\n", "line 11: it is no text: byte"),
    "no JSON": (text_of().split(b"\n", 1)[1], "line 1: it does not begin with a line of JSON"),
    "JSON that is no header": (text_of([1]), "line 1: the header does not name"),
    "unknown kind": (
        text_of({**MM_HEADER, "name": "conv"}),
        "line 1: it holds 'conv'; what can be read is mm",
    ),
    "other features": (
        text_of({**MM_HEADER, "numerical_features": ["m", "k", "n"]}),
        r"line 1: numerical_features is \['m', 'k', 'n'\]; it must be \['m'",
    ),
    "no features": (text_of({k: v for k, v in MM_HEADER.items() if k != "categorical_features"}), "is None"),
    "cut in line 1": (text_of()[:100], "ends within its header"),
    "cut in line 2": (text_of()[: len(json.dumps(MM_HEADER)) + 20], "ends within its header"),
    "no rows": (text_of(rows=[]), "it holds no measurement"),
    "no rows but empty lines": (text_of(rows=["", ""]), "it holds no measurement"),
    "columns missing": (swapped(2, "m,k,n,", "m,k,"), "line 2: the columns are m,k,mat1_dtype"),
    "columns doubled": (swapped(2, "m,k,n,", "m,k,k,"), "line 2: the columns are m,k,k,"),
    "columns swapped": (swapped(2, "choice,feedback", "feedback,choice"), "line 2: the columns are"),
    "short row": (swapped(5, "64,32,48", "64,32"), "line 5: the line has 13 fields; it must have 14"),
    "long row": (swapped(5, "64,32,48", "64,32,48,1"), "line 5: the line has 15 fields; it must have 14"),
    "first row short": (swapped(3, ",0.25", ""), "line 3: the line has 13 fields"),
    "quoted field": (swapped(5, "64,32,48", '"64,32",48'), "line 5: m is '\"64'"),
    "word for a number": (swapped(5, "64,32,48", "64,x,48"), "line 5: k is 'x'; it must be a whole number"),
    "fraction": (swapped(5, "64,32,48", "64,32.5,48"), "line 5: k is '32.5'; it must be a whole number"),
    "missing number": (swapped(5, "64,32,48", "64,,48"), "line 5: k is ''; it must be a whole number"),
    "huge number": (swapped(5, "64,32,48", f"64,{2**64},48"), f"line 5: k is '{2**64}'"),
    "huge dimension": (swapped(5, "64,32,48", f"{2**41},32,48"), f"line 5: m is {2**41}; it must be"),
    "zero dimension": (swapped(5, "64,32,48", "0,32,48"), "line 5: m is 0; it must be at least 1"),
    "word for feedback": (swapped(5, "0.125", "fast"), "line 5: the feedback is 'fast'"),
    "missing feedback": (swapped(5, "0.125", ""), "line 5: the feedback is ''"),
    "zero feedback": (
        swapped(5, "0.125", "0.0"),
        "line 5: the feedback is 0.0; it must be a positive number",
    ),
    "negative feedback": (swapped(5, "0.125", "-0.125"), "line 5: the feedback is -0.125; it must be"),
    "negative infinity": (swapped(5, "0.125", "-inf"), "line 5: the feedback is -inf; it must be"),
    "feedback not a number": (swapped(5, "0.125", "nan"), "line 5: the feedback is nan; it must be"),
    "feedback out of range": (swapped(5, "0.125", "1e308"), "line 5: the feedback is 1e\\+308; it must be"),
    "unknown choice": (swapped(5, TILE, "cutlass"), "line 5: the choice 'cutlass' is not known"),
    "choice of another kind": (
        swapped(5, TILE, "orig"),
        "line 5: the choice 'orig' is not known; it must be extern",
    ),
    "choice with a tile of 0": (
        swapped(5, "BLOCK-M=16", "BLOCK-M=0"),
        "line 5: the choice 'type=triton_BLOCK-M=0_",
    ),
    "choice without k": (swapped(5, "BLOCK-K=32", "BLOCK-K=-1"), "line 5: the choice .*BLOCK-K=-1"),
    "choice cut short": (swapped(5, "_numwarps=2", "_numwarps="), "line 5: the choice .* is not known"),
    "unknown dtype": (
        swapped(5, "torch.float16,torch", "torch.float17,torch"),
        "line 5: mat1_dtype is 'torch.float17'",
    ),
    "two dtypes": (
        swapped(5, "torch.float16,torch.float16", "torch.float16,torch.bfloat16"),
        "line 5: .*one dtype",
    ),
    "dtype that gemm lacks": (
        swapped(5, "torch.float16,torch.float16", "torch.int8,torch.int8"),
        "line 5: gemm does not",
    ),
    "impossible strides": (
        swapped(5, ",32,1,1,32,", ",32,2,1,32,"),
        r"line 5: .*64 x 32 has the strides \(32, 2\)",
    ),
    "overlapping rows": (
        swapped(5, ",32,1,1,32,", ",16,1,1,32,"),
        r"line 5: .*64 x 32 has the strides \(16, 1\)",
    ),
    "contradicting flag": (
        swapped(5, ",True,False,not", ",True,True,not"),
        "line 5: mat2_iscontig is True, but",
    ),
    "no flag": (swapped(5, ",True,False,not", ",yes,False,not"), "line 5: mat1_iscontig is 'yes'"),
    "tf32 of a half": (
        swapped(5, "not_float_32", "True"),
        "line 5: using_tf32 is 'True' where the dtype is float16",
    ),
    "no tf32 of a float": (swapped(7, "1,True,True,True", "1,True,True,not_float_32"), "line 7: using_tf32"),
    "last line without end": (text_of()[:-1], "line 10: the last line does not end"),
    "cut in the last number": (
        text_of(rows=[*MM_ROWS, f"{HALF},extern_mm,0.25"])[:-2],
        "line 11: the last line does",
    ),
    "cut in the last line": (text_of()[:-60], "line 10: the last line does not end"),
    "cut after a line that is wrong": (swapped(5, "0.125", "fast")[:-1], "line 5: the feedback is 'fast'"),
}


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, dict[str, bytes], str]:
    """A store with records, what it holds, and a file that would add to it."""
    store = tmp_path / "store"
    run(store, write(tmp_path / "good.txt"))
    better = write(
        tmp_path / "better.txt", text_of(rows=[row.replace("64,32,48", "65,32,48", 1) for row in MM_ROWS])
    )
    return store, snapshot(store), better


@for_each("fault", broken)
def test_a_broken_file_is_named_and_leaves_the_store_as_it_was(
    tmp_path: Path, kept: tuple[Path, dict[str, bytes], str], fault: str
) -> None:
    content, message = broken[fault]
    store, before, better = kept
    bad = write(tmp_path / "bad.txt", content)
    # Whether the broken file comes first, last, or into no store at all.
    for target, files in ((store, (better, bad)), (store, (bad, better)), (tmp_path / "new", (better, bad))):
        with pytest.raises(ImportFileError, match=message) as caught:
            run(target, *files)
        assert str(caught.value).startswith(bad)
    assert snapshot(store) == before
    assert not (tmp_path / "new").exists()


def test_every_cut_of_a_file_is_refused_or_ends_with_a_line(tmp_path: Path) -> None:
    whole = text_of()
    for length in range(len(whole) - 200, len(whole)):
        file = write(tmp_path / "cut.txt", whole[:length])
        if whole[:length].endswith(b"\n"):
            continue
        with pytest.raises(ImportFileError, match=r"line \d+: "):
            run(tmp_path / "store", file)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("header", "device", "message"),
    [
        ({}, H100, r"capability 8\.0 \(sm80\), but an-h100 is sm90"),
        ({"device_capa": [9, 0]}, A100, r"capability 9\.0 \(sm90\), but an-a100 is sm80"),
        ({"shared_memory": 232448}, A100, "232448 bytes of shared memory a block, but an-a100 has 166912"),
        ({"device_capa": [9, 0]}, H100, "166912 bytes of shared memory a block, but an-h100 has 232448"),
        ({"device_capa": "80"}, A100, "device_capa is '80'"),
        ({"device_capa": [8]}, A100, r"device_capa is \[8\]"),
        ({"shared_memory": None}, A100, "shared_memory None"),
        (
            {},
            Device(name="a-cpu", kind="cpu", vendor="intel", architecture="x86_64", cores=4),
            "but a-cpu is x86_64",
        ),
        (
            {"device_capa": [9, 4]},
            Device(name="amd", kind="gpu", vendor="amd", architecture="gfx90a", cores=104),
            r"\(gfx94\), but amd is gfx90a",
        ),
    ],
)
def test_a_header_that_contradicts_the_device_is_refused(
    tmp_path: Path, header: dict[str, object], device: Device, message: str
) -> None:
    file = write(tmp_path / "a.txt", text_of({**MM_HEADER, **header}))
    with pytest.raises(ImportFileError, match=message):
        run(tmp_path / "store", file, device=device)
    assert not (tmp_path / "store").exists()


def test_a_device_whose_shared_memory_is_unknown_is_taken_by_its_architecture(tmp_path: Path) -> None:
    device = Device(name="d", kind="gpu", vendor="nvidia", architecture="sm80", cores=108)
    assert run(tmp_path / "store", write(tmp_path / "a.txt"), device=device).added == 4


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = write(tmp_path / "a.txt"), write(tmp_path / "b" / "a.txt")
    with pytest.raises(ImportFileError, match=r"both come from 'autoheuristic:a.txt'"):
        run(tmp_path / "store", first, second)
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be created: Not a directory"):
        run(tmp_path / "file" / "store", write(tmp_path / "a.txt"))


def test_names(tmp_path: Path) -> None:
    assert "autoheuristic" in importers()
    with pytest.raises(UnknownNameError, match="Did you mean 'autoheuristic'"):
        importer("autoheuristik")
    with pytest.raises(SettingsError, match="no name"):
        run(tmp_path / "store", write(tmp_path / "a.txt"), workload=" ")


# Packing


def zipped(path: Path, members: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return str(path)


def test_packed_files_are_the_files_in_them(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    run(tmp_path / "store", str(tmp_path / "a.txt"))
    many = zipped(
        tmp_path / "many.zip",
        {"folder/": b"", "folder/a.txt": text_of(), "b.txt": b"", "__MACOSX/folder/._a.txt": b"x"},
    )
    one = zipped(tmp_path / "one.zip", {"folder/": b"", "folder/a.txt": text_of(), "__MACOSX/._a.txt": b"x"})
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text_of()))
    # One record whatever it was packed in.
    for file in (f"{many}:folder/a.txt", f"{many}:a.txt", one, str(tmp_path / "a.txt.gz")):
        assert run(tmp_path / "store", file).known == 4


def damaged(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


archives: dict[str, tuple[Callable[[Path], str], str]] = {
    "several members": (
        lambda root: zipped(root / "x.zip", {"a.txt": b"", "b.txt": b""}),
        "not clear which member is meant. It holds a.txt, b.txt. Name one: FILE.zip:MEMBER",
    ),
    "no such member": (
        lambda root: zipped(root / "x.zip", {"a.txt": b""}) + ":c.txt",
        "no member 'c.txt'. It holds a.txt",
    ),
    "no members": (
        lambda root: zipped(root / "x.zip", {"d/": b""}),
        "It holds no files",
    ),
    "truncated zip": (
        lambda root: write(
            root / "y.zip", Path(zipped(root / "x.zip", {"a.txt": text_of()})).read_bytes()[:-30]
        ),
        "the zip file is broken",
    ),
    "damaged zip": (
        lambda root: write(
            root / "y.zip", damaged(Path(zipped(root / "x.zip", {"a.txt": text_of()})).read_bytes())
        ),
        "the zip file is broken",
    ),
    "truncated gzip": (
        lambda root: write(root / "x.gz", gzip.compress(text_of())[:-20]),
        "the gzip file is broken",
    ),
    "damaged gzip": (
        lambda root: write(root / "x.gz", damaged(gzip.compress(text_of()))),
        "the gzip file is broken",
    ),
    "no such file": (lambda root: str(root / "none.txt"), "cannot be read: No such file"),
    "no such zip": (lambda root: str(root / "none.zip:a.txt"), "cannot be read: No such file"),
    "a folder": (lambda root: str(root), "cannot be read: Is a directory"),
}


@pytest.mark.parametrize("fault", archives)
def test_broken_packing_is_named(tmp_path: Path, fault: str) -> None:
    make, message = archives[fault]
    with pytest.raises(ImportFileError, match=message):
        run(tmp_path / "store", make(tmp_path))
    assert not (tmp_path / "store").exists()


def test_what_unpacks_to_too_much_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    counts: list[int] = []
    bomb = bytes(64 * 2**20)
    for file in (zipped(tmp_path / "x.zip", {"a.txt": bomb}), write(tmp_path / "x.gz", gzip.compress(bomb))):
        counts.clear()
        with pytest.raises(ImportFileError, match="more than 200 times its size"):
            read_content(file, on_bytes=counts.append)
        assert sum(counts) < 20 * 2**20
    plain = write(tmp_path / "plain.txt", b" " * (4 * 2**20))
    with pytest.raises(ImportFileError, match=r"more than 3,000,000 bytes unpacked.* with --max-size"):
        read_content(plain, on_bytes=counts.append, max_bytes=3_000_000)
    assert read_content(plain, on_bytes=counts.append).data == b" " * (4 * 2**20)


# The recorded files

DATA = Path(__file__).parents[3] / "shared" / "data" / "autoheuristic"

recorded = pytest.mark.skipif(not DATA.is_dir(), reason="no recorded measurements in ../shared/data")


def count_plainly(file: Path, member: str) -> tuple[int, int, dict[tuple[str, ...], list[float]]]:
    """Rows, problems, and the samples in microseconds of each (features, choice), read line by line."""
    with zipfile.ZipFile(file) as archive, archive.open(member) as stream:
        lines = stream.read().decode().split("\n")[2:]
    samples: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for line in filter(None, lines):
        *key, feedback = line.split(",")
        samples[tuple(key)].append(float(feedback) * 1e3)
    return sum(map(len, samples.values())), len({key[:-1] for key in samples}), samples


@recorded
@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("archive", "members", "device", "problems"),
    [
        (
            "a100_mm.zip",
            {"a100/a100_hf_train_mm.txt": 276, "a100/a100_mm.txt": 2641, "a100/a100_timm_train_mm.txt": 915},
            A100,
            3822,
        ),
        ("h100_mm_random.zip", {"h100_mm.txt": 322}, H100, 322),
        ("mixedmm_a100_data.zip", {"mixedmm_a100_data.txt": 4299}, A100, 4299),
        ("flexattention_a100_data.zip", {"flexattention_data_a100.txt": 6195}, A100, 6195),
        ("pad_mm_a100_data.zip", {"pad_mm_a100_data.txt": 9701}, A100, 9701),
    ],
)
def test_recorded_files_agree_with_a_plain_count(
    tmp_path: Path, archive: str, members: dict[str, int], device: Device, problems: int
) -> None:
    files = [f"{DATA / archive}:{member}" for member in members]
    summary = run(tmp_path / "store", *files, device=device)
    store = Store(tmp_path / "store")
    frame = store.frame(["source", "problem_id", "latency_us", "samples_us", "sample_count", "outcome"])
    rows = 0
    for member, expected_problems in members.items():
        row_count, problem_count, samples = count_plainly(DATA / archive, member)
        rows += row_count
        assert problem_count == expected_problems
        mine = frame[frame["source"] == f"autoheuristic:{Path(member).name}"]
        assert mine["problem_id"].nunique() == expected_problems
        assert len(mine) == len(samples)
        finite = [tuple(filter(math.isfinite, each)) for each in samples.values()]
        assert Counter(map(tuple, mine["samples_us"])) == Counter(finite)
        assert (mine["outcome"] == "ok").sum() == sum(map(bool, finite))
        assert sorted(mine["latency_us"].dropna()) == sorted(map(statistics.median, filter(None, finite)))
    assert (summary.rows, summary.problems, summary.added) == (rows, sum(members.values()), len(frame))
    assert frame["problem_id"].nunique() == problems
    if archive == "a100_mm.zip":
        assert rows == 631_164
