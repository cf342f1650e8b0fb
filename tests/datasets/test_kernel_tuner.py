from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from kernelcast.datasets import ImportSummary, Measurement, Store, import_files
from kernelcast.errors import ImportFileError, SettingsError
from kernelcast.kernels import Candidate, Device
from kernelcast.kernels.devices import device

A100 = device("a100")

DATA = Path(__file__).parents[3] / "shared" / "data" / "kernel_tuner"
recorded = pytest.mark.skipif(not DATA.is_dir(), reason="no recorded measurements in ../shared/data")


def entry(block: int, pad: Any, **facts: Any) -> dict[str, Any]:
    return {"block": block, "pad": pad, "compile_time": 3.5, **facts}


CACHE = {
    "16,0": entry(
        16, 0, time=2.5, times=[2.0, 4.0, 1.5], timestamp="2023-12-22 09:54:05.500000+00:00", GFLOPs=7
    ),
    "16,1": entry(16, 1, time=0.5),
    "32,0": entry(32, 0, time="CompilationFailedConfig"),
    "32,1": entry(32, 1, time="RuntimeFailedConfig"),
    "64,1": entry(64, 1, time="InvalidConfig"),
}
FILE = {
    "device_name": "NVIDIA A100-PCIE-40GB",
    "kernel_name": "convolution_kernel",
    "problem_size": [4096, 2048],
    "tune_params_keys": ["block", "pad"],
    "tune_params": {"block": [16, 32, 64], "pad": [0, 1]},
    "objective": "time",
    "cache": CACHE,
}


def changed(**facts: Any) -> bytes:
    return json.dumps(
        {name: value for name, value in {**FILE, **facts}.items() if value is not None}
    ).encode()


def write(path: Path, content: bytes | None = None) -> str:
    path.write_bytes(changed() if content is None else content)
    return str(path)


def run(store: Path, *files: str, on: Device = A100, **options: str) -> ImportSummary:
    return import_files("kernel-tuner", files, device=on, workload="hub", store=store, options=options)


def records(store: Path) -> dict[Candidate, Measurement]:
    return {each.candidate: each for each in Store(store).measurements()}


def of(block: Any, pad: Any) -> Candidate:
    return Candidate.of("kernel_tuner", {"block": block, "pad": pad})


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*.parquet"))}


def test_a_file_becomes_one_problem_with_every_config(tmp_path: Path) -> None:
    summary = run(tmp_path / "store", write(tmp_path / "a.json"))
    assert (summary.rows, summary.problems, summary.added, summary.known) == (5, 1, 5, 0)
    found = records(tmp_path / "store")
    assert {key: (each.outcome, each.samples_us, each.detail) for key, each in found.items()} == {
        of(16, 0): ("ok", (2000.0, 4000.0, 1500.0), ""),
        of(16, 1): ("ok", (500.0,), ""),
        of(32, 0): ("compile_error", (), "CompilationFailedConfig"),
        of(32, 1): ("out_of_resources", (), "RuntimeFailedConfig"),
        of(64, 1): ("out_of_resources", (), "InvalidConfig"),
    }
    first = found[of(16, 0)]
    assert (first.problem.operation, first.problem.dims) == ("kt_convolution", (("x", 4096), ("y", 2048)))
    assert (first.latency_us, first.created_at) == (2000.0, 1703238845.5)
    assert (first.environment.source, first.protocol.name) == ("kernel-tuner:a.json", "kernel-tuner")
    assert first.protocol.error_log > 0
    assert (first.device, first.workload) == (A100.name, "hub")
    assert Store(tmp_path / "store").check() == []


def test_packed_unclosed_and_repeated_imports_add_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    run(store, write(tmp_path / "a.json"))
    before = snapshot(store)
    whole = changed()
    assert whole.endswith(b"}}}")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(whole))
    assert run(store, str(tmp_path / "a.json.gz")).known == 5
    # Kernel Tuner leaves the two last brackets to the end of the tuning, with a comma or without.
    for unclosed in (whole[:-2], whole[:-2] + b",", whole[:-2] + b",\n"):
        assert run(store, write(tmp_path / "a.json", unclosed)).known == 5
    assert snapshot(store) == before


@pytest.mark.parametrize(
    ("size", "dims", "options"),
    [
        (512, (("x", 512),), ()),
        ("512", (("x", 512),), ()),
        ([1, 2, "3"], (("x", 1), ("y", 2), ("z", 3)), ()),
        (None, (("x", 1),), ()),
        ([], (("x", 1),), ()),
        ("callable", (("x", 1),), (("problem_size", "callable"),)),
        (["n", 4], (("x", 1),), (("problem_size", "n,4"),)),
    ],
)
def test_the_problem_size(tmp_path: Path, size: Any, dims: Any, options: Any) -> None:
    run(tmp_path / "store", write(tmp_path / "a.json", changed(problem_size=size)))
    (problem,) = Store(tmp_path / "store").problems().values()
    assert (problem.dims, problem.options) == (dims, options)


def test_parameters_that_no_candidate_holds_become_text(tmp_path: Path) -> None:
    cache = {
        "a": entry(16, 0.5, time=1.0),
        "b": entry(16, None, time=2.0),
        "c": entry(16, True, time=3.0),
        "d": entry(16, "x", time=4.0),
    }
    run(tmp_path / "store", write(tmp_path / "a.json", changed(cache=cache)))
    assert {key: each.latency_us for key, each in records(tmp_path / "store").items()} == {
        of(16, "0.5"): 1000.0,
        of(16, "null"): 2000.0,
        of(16, "true"): 3000.0,
        of(16, "x"): 4000.0,
    }


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [("Xgemm", "kt_xgemm"), ("vector_add<float, 4>", "kt_vector_add_float_4"), ("_kernel_", "kt_kernel")],
)
def test_the_operation_is_a_plain_name(tmp_path: Path, kernel: str, operation: str) -> None:
    run(tmp_path / "store", write(tmp_path / "a.json", changed(kernel_name=kernel)))
    assert Store(tmp_path / "store").frame(["operation"])["operation"].unique().tolist() == [operation]


def test_the_operation_can_be_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json")
    run(tmp_path / "store", file, operation="blur")
    assert {each.problem.operation for each in records(tmp_path / "store").values()} == {"blur"}
    for name, message in (("Blur 2", "lower-case letters"), ("gemm", "an operation of the catalogue")):
        with pytest.raises(SettingsError, match=message):
            run(tmp_path / "store", file, operation=name)
    with pytest.raises(SettingsError, match=r"has no option 'colour'\. It has: operation"):
        run(tmp_path / "store", file, colour="red")


def with_entry(**facts: Any) -> bytes:
    return changed(cache={**CACHE, "32,0": entry(32, 0, **facts)})


broken = {
    "empty": (b"", "it is empty"),
    "binary": (bytes(range(1, 256)), "line 2: it is not text in UTF-8"),
    "a NUL byte": (b"{\n" + bytes(3), "line 2: it is no text: byte 2 is NUL"),
    "no JSON": (b"time,1\n", "line 1: it is not JSON"),
    "cut in an entry": (changed()[:-20], "line 1: it is not JSON"),
    "cut in the header": (changed()[:80], "it is not JSON"),
    "cut before the entries": (changed(cache={})[:-2], "holds no measurement"),
    "cut after a closed part of the header": (
        changed()[: changed().index(b', "tune_params_keys"')] + b"}",
        "cache is None",
    ),
    "three brackets absent": (changed()[:-3], "it is not JSON"),
    "a list": (b"[1]", "its JSON is no object"),
    "nested": (b"[" * 100_000, "cannot be read"),
    "a huge number": (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
    "half a character": (changed(kernel_name="\ud800"), "cannot be read"),
    "one name twice": (changed()[:-3] + b', "16,0": {}}}}'.replace(b"}}}}", b"}}}"), "not JSON|twice"),
    "a config twice": (b'{"cache": {"16,0": {}, "16,0": {}}}', "cache holds the name '16,0' twice"),
    "no kernel": (changed(kernel_name=None), "kernel_name is None; it must be a text"),
    "no cache": (changed(cache=None), "cache is None; it must be an object"),
    "no entries": (changed(cache={}), "it holds no measurement"),
    "no parameters": (changed(tune_params_keys=[]), "tune_params_keys is \\[\\]"),
    "a parameter twice": (changed(tune_params_keys=["pad", "pad"]), "each once"),
    "a size of 0": (changed(problem_size=[4096, 0]), "the problem size is"),
    "four sizes": (changed(problem_size=[1, 2, 3, 4]), "one to three whole numbers"),
    "a size that is none": (changed(problem_size={"x": 1}), "one to three whole numbers"),
    "a huge size": (changed(problem_size=2**50), "the problem size is"),
    "an entry that is none": (changed(cache={"16,0": 3}), "cache\\['16,0'\\] lacks 'block', 'pad'"),
    "an entry without a parameter": (changed(cache={"16,0": {"block": 1, "time": 1}}), "lacks 'pad'"),
    "a list for a parameter": (changed(cache={"k": entry(1, [2], time=1)}), "'pad' is \\[2\\]"),
    "a huge parameter": (changed(cache={"k": entry(2**70, 2, time=1)}), "whole number of 64 bits"),
    "no time": (with_entry(), "cache\\['32,0'\\] has no time"),
    "an unknown word": (with_entry(time="Lost"), "cache\\['32,0'\\]: time is 'Lost'"),
    "no number": (with_entry(time=None), "cache\\['32,0'\\].time\\[0\\] is None"),
    "a flag": (with_entry(time=True), "is True; a latency"),
    "zero": (with_entry(time=1.0, times=[1.0, 0.0]), "cache\\['32,0'\\].times\\[1\\] is 0.0"),
    "negative": (with_entry(time=-1.0), "is -1.0"),
    "not a number": (with_entry(time=float("nan")), "is nan"),
    "infinite": (with_entry(time=1.0, times=[float("inf")]), "is inf"),
    "out of range": (with_entry(time=1e300), "is 1e\\+300"),
    "times that are no list": (with_entry(time=1.0, times=3), "it must be a list"),
    "no timestamp": (with_entry(time=1.0, timestamp="soon"), "the timestamp is 'soon'"),
    "another device": (changed(device_name="NVIDIA GeForce RTX 3090"), "Give the right --device"),
}


@pytest.mark.parametrize("fault", broken)
def test_a_broken_file_is_named_and_nothing_is_kept(tmp_path: Path, fault: str) -> None:
    content, message = broken[fault]
    good, bad = write(tmp_path / "good.json"), write(tmp_path / "bad.json", content)
    for files in ((good, bad), (bad, good)):
        with pytest.raises(ImportFileError, match=message) as caught:
            run(tmp_path / "store", *files)
        assert str(caught.value).startswith(bad)
    assert not (tmp_path / "store").exists()


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "a.json.gz"
    bomb.write_bytes(gzip.compress(b" " * (64 * 2**20)))
    with pytest.raises(ImportFileError, match="more than 200 times its size"):
        run(tmp_path / "store", str(bomb))


@recorded
@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "on", "operation", "size", "failed"),
    [
        ("convolution_milo_A100.json.gz", "a100", "kt_convolution", 4362, 161),
        ("convolution_milo_MI250X.json.gz", "mi250x", "kt_convolution", 4362, 0),
        ("gemm_RTX_3090.json.gz", "rtx-3090", "kt_xgemm", 17956, 0),
    ],
)
def test_recorded_files_agree_with_a_plain_reading(
    tmp_path: Path, name: str, on: str, operation: str, size: int, failed: int
) -> None:
    summary = run(tmp_path / "store", str(DATA / name), on=device(on))
    assert (summary.added, summary.problems) == (size, 1)
    frame = Store(tmp_path / "store").frame(["operation", "config", "latency_us", "outcome"])
    cache = json.loads(gzip.decompress((DATA / name).read_bytes()))["cache"].values()
    expected = {
        statistics.median(time * 1e3 for time in each["times"])
        for each in cache
        if not isinstance(each["time"], str)
    }
    assert set(frame["latency_us"].dropna()) == expected
    assert (frame["outcome"] != "ok").sum() == failed
    assert frame["operation"].unique().tolist() == [operation]
    fastest = min(
        (each for each in cache if "times" in each), key=lambda each: statistics.median(each["times"])
    )
    best = json.loads(frame.loc[frame["latency_us"].idxmin(), "config"])
    assert best == {parameter: fastest[parameter] for parameter in best}
