from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelcast.datasets import ImportSummary, Measurement, Store, import_files
from kernelcast.errors import ImportFileError, KernelcastError, SettingsError
from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.devices import device

HALF = "torch.float16"


def config(block: int, **facts: Any) -> dict[str, Any]:
    return {
        "kwargs": {"BLOCK_M": block, "EVEN": True},
        "num_warps": 4,
        "num_ctas": 1,
        "num_stages": 3,
        "maxnreg": None,
        "pre_hook": None,
        "ir_override": None,
        **facts,
    }


KEY = [64, 48, 32, HALF, HALF, HALF]
TIMINGS = [
    [config(16), [0.25, 0.125, 0.5]],
    [config(32), [float("inf")] * 3],
    [config(64, maxnreg=128), 0.75],
    [config(128), [2.0]],
]


def write(path: Path, key: Any = None, timings: Any = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"key": KEY if key is None else key, "configs_timings": TIMINGS if timings is None else timings}
    path.write_text(json.dumps(data))
    return path


def run(store: Path, *files: Path, **options: str) -> ImportSummary:
    return import_files(
        "triton-autotune",
        [str(file) for file in files],
        device=device("a100"),
        workload="mine",
        store=store,
        options=options,
    )


def records(store: Path) -> dict[Candidate, Measurement]:
    return {each.candidate: each for each in Store(store).measurements()}


def of(block: int, variant: str = "triton_matmul_kernel", **facts: int) -> Candidate:
    common = {"BLOCK_M": block, "EVEN": True, "num_warps": 4, "num_ctas": 1, "num_stages": 3}
    return Candidate.of(variant, {**common, **facts})


def test_a_file_becomes_one_problem_of_the_operation_named(tmp_path: Path) -> None:
    file = write(tmp_path / "matmul_kernel.autotune.json")
    summary = run(tmp_path / "store", file, operation="gemm", key="m,n,k")
    assert (summary.rows, summary.problems, summary.added) == (4, 1, 4)
    found = records(tmp_path / "store")
    assert {key: (each.outcome, each.samples_us, each.latency_us) for key, each in found.items()} == {
        of(16): ("ok", (250.0, 125.0, 500.0), 250.0),
        of(32): ("out_of_resources", (), pytest.approx(float("nan"), nan_ok=True)),
        of(64, maxnreg=128): ("ok", (750.0,), 750.0),
        of(128): ("ok", (2000.0,), 2000.0),
    }
    assert {each.problem for each in found.values()} == {problem("gemm", m=64, n=48, k=32, dtype="float16")}
    assert {each.environment.source for each in found.values()} == {
        "triton-autotune:matmul_kernel.autotune.json"
    }
    assert Store(tmp_path / "store").check() == []
    assert run(tmp_path / "store", file, operation="gemm", key="m,n,k").known == 4


def test_files_of_one_name_are_told_apart_by_their_content(tmp_path: Path) -> None:
    name = "matmul_kernel.autotune.json"
    files = [
        write(tmp_path / "AAA" / name),
        # Another problem; and the first problem tuned again, after the kernel was changed.
        write(tmp_path / "BBB" / name, key=[128, *KEY[1:]]),
        write(tmp_path / "CCC" / name, timings=[[config(16), [0.5, 0.4, 0.6]], TIMINGS[1]]),
    ]
    summary = run(tmp_path / "store", *files, operation="gemm", key="m,n,k")
    assert (summary.files, summary.added) == (3, 10)
    assert len({each["source"] for each in Store(tmp_path / "store").summary()["groups"]}) == 1
    twin = write(tmp_path / "DDD" / name)
    with pytest.raises(ImportFileError, match="would be taken for those of"):
        run(tmp_path / "store", files[0], twin, operation="gemm", key="m,n,k")


@pytest.mark.parametrize(
    ("key", "option", "dims", "dtype", "options"),
    [
        ([7, HALF, HALF], "rows", (("rows", 7),), "float16", ()),
        ([7, 8, HALF], "rows,-", (("rows", 7),), "float16", ()),
        ([7, HALF, "torch.int8"], "rows,-,dtype", (("rows", 7),), "int8", ()),
        ([7, HALF, "torch.int8"], "rows", (("rows", 7),), "float16", (("dtypes", "float16,int8"),)),
        ([7, True, None, 0.5], "rows,option.a,option.b,option.c", (("rows", 7),), "unknown",
         (("a", True), ("b", "null"), ("c", "0.5"))),
        ([7], "rows,dtype:=bfloat16,threads:=0", (("rows", 7),), "bfloat16", ()),
        ([HALF], None, (), "float16", ()),
    ],
)  # fmt: skip
def test_the_key_by_position(
    tmp_path: Path, key: Any, option: str | None, dims: Any, dtype: str, options: Any
) -> None:
    run(
        tmp_path / "store",
        write(tmp_path / "sort_kernel.autotune.json", key),
        **({} if option is None else {"key": option}),
    )
    (found,) = Store(tmp_path / "store").problems().values()
    assert (found.operation, found.dims, found.dtype, found.options) == ("triton_sort", dims, dtype, options)


def test_facts_that_the_key_lacks_are_added(tmp_path: Path) -> None:
    file = write(tmp_path / "mm.autotune.json")
    run(tmp_path / "store", file, operation="gemm", key="m,n,k,layout:=nt", variant="mine")
    assert {each.problem["layout"] for each in records(tmp_path / "store").values()} == {"nt"}
    assert of(16, "mine") in records(tmp_path / "store")


def pair(**facts: Any) -> Any:
    return [[config(16, **facts), [0.5, 0.4, 0.6]]]


GEMM = {"operation": "gemm", "key": "m,n,k"}

refused: dict[str, tuple[Any, Any, dict[str, str], str]] = {
    "no names": (KEY, None, {"operation": "gemm"}, r"6 values, \[64, 48, 32, .*first 3 is, .*--key m,n,k"),
    "too few names": (KEY, None, {**GEMM, "key": "m,n"}, "Say with --key"),
    "too many names": ([1], None, GEMM, "its key has 1 values.*--key names 3"),
    "no dtype": ([64, 48, 32], None, GEMM, "with no dtype"),
    "two dtypes": (
        [64, 48, 32, HALF, "torch.float32"],
        None,
        GEMM,
        "with several dtypes.*name its place dtype",
    ),
    "no number": ([64, 48, None, HALF], None, GEMM, "k is None; it must be a whole number"),
    "a fraction": ([64, 48, 0.5, HALF], None, GEMM, "k is 0.5; it must be a whole number"),
    "another name": (KEY, None, {**GEMM, "key": "m,n,x"}, "gemm has no dimension or option 'x'"),
    "an unknown dtype": ([1, 2, 3, "torch.float3"], None, GEMM, "does not take dtype 'float3'"),
    "a key that is none": ("x", None, GEMM, "must have the lists key and configs_timings"),
    "timings that are none": (None, {"a": 1}, GEMM, "must have the lists key and configs_timings"),
    "nothing timed": (None, [], GEMM, "it holds no measurement"),
    "no pair": (None, [[config(16)]], GEMM, r"configs_timings\[0\] is \[{.*must be a config with its"),
    "no config": (None, [[3, [1.0]]], GEMM, "the config is 3; it must have kwargs"),
    "no kwargs": (None, pair(kwargs=None), GEMM, "must have kwargs"),
    "a list in kwargs": (None, pair(kwargs={"a": [1]}), GEMM, r"configs_timings\[0\]: 'a' is \[1\]"),
    "a parameter twice": (None, pair(kwargs={"num_warps": 8}), GEMM, "num_warps is given twice"),
    "a hook": (None, pair(pre_hook="f"), GEMM, "pre_hook is set"),
    "two timings": (None, [[config(16), [1.0, 2.0]]], GEMM, r"configs_timings\[0\] has 2 timings"),
    "no timing": (None, [[config(16), []]], GEMM, "has 0 timings"),
    "half infinite": (None, [[config(16), [1.0, float("inf"), 2.0]]], GEMM, r"timing\[1\] is inf"),
    "not a number": (None, [[config(16), [float("nan")] * 3]], GEMM, r"timing\[0\] is nan"),
    "a text": (None, [[config(16), "fast"]], GEMM, r"timing\[0\] is 'fast'"),
    "negative": (None, [[config(16), -1]], GEMM, r"timing\[0\] is -1"),
}


@pytest.mark.parametrize("fault", refused)
def test_what_the_file_cannot_tell_or_has_wrong_is_named_and_nothing_is_kept(
    tmp_path: Path, fault: str
) -> None:
    key, timings, options, message = refused[fault]
    good = write(tmp_path / "good" / "mm.autotune.json")
    bad = write(tmp_path / "bad" / "mm.autotune.json", key, timings)
    with pytest.raises(ImportFileError, match=message) as caught:
        run(tmp_path / "store", bad, **options)
    assert str(caught.value).startswith(str(bad))
    with pytest.raises(KernelcastError):
        run(tmp_path / "store", good, bad, **options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "m,m"}, "gives m twice"),
        ({"key": "m=3"}, "must be NAME, NAME:=VALUE"),
        ({"key": "m,,n"}, "must be NAME, NAME:=VALUE"),
        ({"key": "-:=3"}, "must be NAME, NAME:=VALUE"),
        ({"key": "m:="}, "must be NAME, NAME:=VALUE"),
        ({"operation": "Two Words"}, "--operation is 'Two Words'"),
        ({"variant": "Two Words"}, "--variant is 'Two Words'"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        run(tmp_path / "store", write(tmp_path / "mm.autotune.json"), **options)


def test_a_kernel_is_not_taken_for_a_variant_of_the_catalogue(tmp_path: Path) -> None:
    file = write(tmp_path / "tiled.autotune.json")
    with pytest.raises(SettingsError, match="a variant triton_tiled of its own"):
        run(tmp_path / "store", file, **GEMM)
    assert run(tmp_path / "store", file, variant="triton_tiled", **GEMM).added == 4


WRITER = """
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


driver.set_active(Hopper())


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": block, "EVEN": True}, num_warps=4, num_stages=stages)
        for block in (16, 32) for stages in (2, 3)
    ],
    key=["m", "n", "k"],
    cache_results=True,
    do_bench=lambda call, quantiles: [0.5, 0.25, 0.75],
)
@triton.jit
def matmul_kernel(a, m, n, k, BLOCK_M: tl.constexpr, EVEN: tl.constexpr):
    pass


def bench():
    times = [[0.25, 0.24, 0.27], [float("inf")] * 3, 0.5, [1.0, 0.9, 1.5]]
    matmul_kernel.configs_timings = dict(zip(matmul_kernel.configs, times))


matmul_kernel.check_disk_cache((64, 48, 32, "torch.float16"), matmul_kernel.configs, bench)
"""


@pytest.mark.slow
def test_what_triton_itself_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "tuned.py"
    script.write_text(WRITER)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "cache").glob("*/matmul_kernel.autotune.json")
    run(tmp_path / "store", file, **GEMM)
    found = {
        (key.parameters["BLOCK_M"], key.parameters["num_stages"]): (each.outcome, each.samples_us)
        for key, each in records(tmp_path / "store").items()
    }
    assert found == {
        (16, 2): ("ok", (250.0, 240.0, 270.0)),
        (16, 3): ("out_of_resources", ()),
        (32, 2): ("ok", (500.0,)),
        (32, 3): ("ok", (1000.0, 900.0, 1500.0)),
    }
