"""The GPU check: its problems, what it makes of its children's lines, and a run on a CPU as on a bare machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import for_each

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_problems
import gpu_report
import gpu_runtime
import gpu_timing
from gpu_check import check_tasks
from gpu_tasks import Reporter, Task, TaskResult

from kernelcast.kernels import Block, Candidate, operation_names, problem, variant
from kernelcast.kernels.detect import detect
from kernelcast.kernels.devices import device

BENCHMARKS = Path(gpu_report.__file__).parent
H200 = device("h200")

# What a bare GPU machine lacks. Also taken away: the editable installation, so that only the link farm is left.
BARE = """
import sys

BLOCKED = {"xgboost", "mlflow", "filelock", "typer", "rich", "matplotlib", "hypothesis", "pytest"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path[:] = [found for found in sys.meta_path if "editable" not in repr(found).lower()]
sys.meta_path.insert(0, Blocker())
"""

# A package of another project with an operation of its own, one of whose variants is wrong.
WRONG = """
import torch
from kernelcast.kernels import Operation, Tolerance, Variant, Work, register_operation, register_variant
from kernelcast.kernels.problem import Dim, ProblemSchema

@register_operation
class Doubling(Operation):
    name = "doubling"
    doc = "2 x"
    schema = ProblemSchema("doubling", (Dim("rows", "rows"), Dim("columns", "columns")), ("float32",))

    def make_inputs(self, problem, *, seed, device):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(problem["rows"], problem["columns"], generator=generator).to(device),)

    def reference(self, problem, x):
        return 2.0 * x.double()

    def tolerance(self, problem):
        return Tolerance(1e-6, 0.0)

    def flops(self, problem):
        return float(problem["rows"] * problem["columns"])

    def traffic_bytes(self, problem):
        return 8.0 * problem["rows"] * problem["columns"]

class Base(Variant):
    backend = "torch"
    doc = "x + x"

    def work(self, problem, columns, device):
        return Work(flops=1.0, traffic_bytes=8.0)

@register_variant("doubling")
class Vendor(Base):
    name = "vendor"

    def build(self, problem, config):
        return lambda x: x + x

@register_variant("doubling")
class Careless(Base):
    name = "careless"

    def build(self, problem, config):
        return lambda x: x + x.abs()
"""


def run_check(
    tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """The command as a user gives it, on a bare machine."""
    bare = tmp_path / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "sitecustomize.py").write_text(BARE)
    path = os.pathsep.join([str(bare), *(environment or {}).pop("path", "").split(os.pathsep)]).rstrip(
        os.pathsep
    )
    own = {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "HOME": str(tmp_path),
        **(environment or {}),
    }
    own.pop("OUT", None)
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--output", str(tmp_path / "out"), *arguments],
        env=own,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
def test_on_a_bare_machine_a_cpu_run_checks_gemm_and_passes(tmp_path: Path) -> None:
    found = run_check(tmp_path, "--device", "cpu", "--quick", "--only", "gemm")
    assert found.returncode == 0, found.stdout + found.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["complete"], summary["exit_status"], summary["failures"]) == (True, 0, [])
    rows = {row["variant"]: row for row in summary["checks"]}
    assert set(rows) == {*variants_of("gemm")}
    # Three problems, three dtypes, and torch.mm has one config.
    assert (rows["vendor"]["checked"], rows["vendor"]["ok"], rows["vendor"]["failed"]) == (9, 9, 0)
    assert rows["vendor"]["dtypes"] == ["float32", "float16", "bfloat16"]
    assert rows["triton_tiled"]["checked"] == 0
    assert "Triton compiles for GPUs" in rows["triton_tiled"]["note"]
    assert {row["name"]: row["held"] for row in summary["runtime"]} == {
        "verified selection": True,
        "drop-in gemm": True,
        "drop-in conv2d": True,
        "drop-in attention": True,
        "drop-in softmax": True,
    }
    assert len(summary["calibration"]) == 3
    (timed,) = summary["timings"]
    assert timed["problem"].startswith("gemm(m=32, n=32, k=256")
    assert timed["speedup"] > 0
    left_out = " ".join(summary["left_out"])
    assert "filelock is not installed" in left_out
    assert "xgboost not installed" in left_out

    files = sorted(
        path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
    assert len(files) <= 8
    assert max(len(path.parts) for path in files) <= 3
    journal = [path for path in files if path.parts[:2] == ("store", "journal")]
    assert len(journal) == 1
    records = [json.loads(line) for line in (tmp_path / "out" / journal[0]).read_text().splitlines()]
    assert len(records) == timed["candidates"]
    assert {record["workload"] for record in records} == {"gpu-check"}
    assert all(record["samples_us"] for record in records)
    assert "| gemm: vendor | 9 | 9 | 0 |" in (tmp_path / "out" / "summary.md").read_text()


@pytest.mark.slow
def test_a_wrong_candidate_makes_the_exit_status_1(tmp_path: Path) -> None:
    package = tmp_path / "package"
    info = package / "doubling_ops-1.dist-info"
    info.mkdir(parents=True)
    (package / "doubling_ops.py").write_text(WRONG)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling-ops\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kernelcast.operations]\ndoubling = doubling_ops\n")
    found = run_check(
        tmp_path, "--device", "cpu", "--quick", "--only", "doubling", environment={"path": str(package)}
    )
    assert found.returncode == 1, found.stdout + found.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    # Two made-up problems of one dtype; the operation has no list of its own.
    rows = {row["variant"]: (row["checked"], row["ok"], row["failed"]) for row in summary["checks"]}
    assert rows == {"vendor": (2, 2, 0), "careless": (2, 0, 2)}
    assert {(each["candidate"], each["outcome"]) for each in summary["failures"]} == {
        ("careless", "wrong_result")
    }
    assert "elements differ from the reference" in summary["failures"][0]["detail"]
    assert "careless on doubling" in found.stdout


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    found = run_check(tmp_path, "--quick", environment=hidden)
    assert found.returncode == 2
    assert found.stderr.startswith("No GPU check: A GPU was asked for, and torch sees none.")
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def variants_of(name: str) -> list[str]:
    from kernelcast.kernels import variants

    return list(variants(name))


# --- Problems and configs ---


def test_corners_hold_the_extremes_of_every_parameter() -> None:
    block = Block("v", {"tile": np.array([16, 16, 32, 64]), "mode": np.array(["a", "b", "b", "c"])}, 4)
    rows = gpu_problems.corners(block, 8)
    assert set(block.columns["tile"][rows]) >= {16, 64}
    assert set(block.columns["mode"][rows]) == {"a", "b", "c"}
    assert gpu_problems.corners(block, 2).tolist() == [0, 3]
    assert gpu_problems.corners(Block("v", {}, 1), 8).tolist() == [0]


@pytest.mark.parametrize("quick", [True, False])
def test_every_operation_has_problems_of_every_dtype_on_a_gpu(quick: bool) -> None:
    for name in operation_names():
        found = gpu_problems.check_problems(name, H200, quick=quick)
        assert {each.dtype for each in found} == set(gpu_problems.DTYPES)
        assert any(each.allow_tf32 for each in found)
        assert {each.threads for each in found} == {0}
        assert len(set(found)) == len(found)


def test_both_triton_kernels_are_checked_on_a_gpu_with_ragged_tiles() -> None:
    for name in ("triton_tiled", "triton_split_k"):
        found = variant("gemm", name)
        legal = {
            str(each): bool(found.legal(each, H200, found.space("default")).any())
            for each in gpu_problems.check_problems("gemm", H200, quick=True)
        }
        assert any(works for each, works in legal.items() if "k=2048" in each)
    ragged = problem("gemm", m=17, n=33, k=65, layout="nt", dtype="bfloat16")
    tiled = variant("gemm", "triton_tiled")
    assert tiled.legal(ragged, H200, tiled.space("default")).any()


def test_timing_begins_with_long_sums_and_llama_layers_and_reaches_every_operation() -> None:
    found = gpu_problems.timing_problems(H200, quick=False, operations=operation_names())
    first = [each for each in found if each.tier == 0]
    assert {each.problem["m"] for each in first if each.label == "Llama-3-8B"} == {1, 16, 64, 512, 4096}
    assert found[: len(first)] == first
    assert {each.problem.operation for each in found if each.tier <= 1} == {*operation_names()}
    assert len({each.problem for each in found}) == len(found)
    quick = gpu_problems.timing_problems(H200, quick=True, operations=["gemm", "softmax"])
    assert [each.problem.operation for each in quick].count("gemm") == 4
    assert len(quick) == 5


def test_on_a_gpu_each_triton_variant_and_dtype_has_a_process_and_ours_come_first() -> None:
    tasks = check_tasks(["gemm", "softmax"], {"device": "gpu", "quick": False})
    names = [task.name for task in tasks]
    assert len(names) == len(set(names))
    ours = [name for name in names if "-triton_" in name]
    assert names[: len(ours)] == ours
    # Each kernel in one dtype before any in another.
    third = len(ours) // 3
    assert all(name.endswith("-float16") for name in ours[:third])
    assert {f"check-gemm-triton_{kind}-float16" for kind in ("tiled", "split_k")} < set(ours[:third])
    covered = {
        (task.spec["operation"], dtype, name)
        for task in tasks
        for dtype in task.spec["dtypes"]
        for name in task.spec["variants"]
    }
    for name in ("gemm", "softmax"):
        for dtype in gpu_problems.DTYPES:
            assert {key for op, kind, key in covered if (op, kind) == (name, dtype)} == {*variants_of(name)}


# --- What is made of the lines ---

GEMM = problem("gemm", m=64, n=64, k=64, dtype="float16")
TILED = Candidate.of(
    "triton_tiled",
    {"block_m": 16, "block_n": 32, "block_k": 16, "group_m": 8, "num_stages": 3, "num_warps": 2},
)


def record(candidate: Candidate, samples_us: list[float], outcome: str = "ok") -> dict[str, Any]:
    return {
        "candidate": {"variant": candidate.variant, "config": candidate.parameters},
        "samples_us": samples_us,
        "outcome": outcome,
        "detail": "" if outcome == "ok" else "why",
    }


def test_even_rounds_choose_and_odd_rounds_judge() -> None:
    default, linear = Candidate.of("vendor"), Candidate.of("linear")
    found = gpu_timing.compare(
        GEMM,
        [
            record(default, [10.0, 10.0, 20.0, 10.0]),
            # Fastest in the even rounds (ratio 2.5 and 5), a little slower in the odd ones.
            record(TILED, [4.0, 12.5, 4.0, 12.5]),
            # Twice as fast in every round.
            record(linear, [5.0, 5.0, 10.0, 5.0]),
            record(Candidate.of("transposed", {"x": 1}), [], "crash"),
        ],
    )
    assert found["best"] == str(TILED)
    assert found["speedup"] == pytest.approx(0.8)
    assert (found["default_us"], found["best_us"]) == (10.0, 8.25)
    assert (found["candidates"], found["failures"]) == (4, {"crash": 1})
    assert [(each["outcome"], each["detail"]) for each in found["failed"]] == [("crash", "why")]


def test_drift_between_rounds_does_not_choose() -> None:
    # The default left the race after two rounds; later samples, when the machine was fast, count for nothing.
    found = gpu_timing.compare(
        GEMM, [record(Candidate.of("vendor"), [30.0, 30.0]), record(TILED, [15.0, 10.0, 1.0, 1.0])]
    )
    assert found["speedup"] == pytest.approx(3.0)


def test_without_a_working_default_or_candidate_there_is_no_speedup() -> None:
    alone = gpu_timing.compare(
        GEMM, [record(Candidate.of("vendor"), [5.0]), record(TILED, [], "wrong_result")]
    )
    assert (alone["best"], alone["speedup"], alone["default_us"]) == (None, None, 5.0)
    no_default = gpu_timing.compare(GEMM, [record(Candidate.of("vendor"), [], "crash"), record(TILED, [5.0])])
    assert (no_default["best"], no_default["speedup"], no_default["default_us"]) == (None, None, None)


def test_calibration_judges_a_tie_and_a_twofold_call() -> None:
    rng = np.random.default_rng(0)
    first = 100 * np.exp(rng.normal(0, 0.2, 40))
    wobble = np.exp(rng.normal(0, 0.01, (3, 40)))
    good = gpu_runtime.judge_calibration(
        np.stack([first * wobble[0], first * wobble[1], 2 * first * wobble[2]], 1)
    )
    assert (good["tie"], good["differs"], good["rounds"]) == (True, True, 40)
    assert good["equal_ratio"] == pytest.approx(1.0, abs=0.01)
    assert good["twofold_ratio"] == pytest.approx(2.0, abs=0.02)
    # A clock that reads 0.5% more for the second of two equal calls, however surely, is good enough.
    close = gpu_runtime.judge_calibration(np.stack([first, 1.005 * first, 2 * first], 1))
    assert close["tie"]
    bad = gpu_runtime.judge_calibration(
        np.stack([first * wobble[0], 1.1 * first * wobble[1], first * wobble[2]], 1)
    )
    assert (bad["tie"], bad["differs"]) == (False, False)


@pytest.mark.slow
def test_a_candidate_that_took_its_process_along_is_recorded_and_not_tried_again(tmp_path: Path) -> None:
    progress = tmp_path / "progress.jsonl"
    (timed,) = gpu_problems.timing_problems(detect("cpu"), quick=True, operations=["softmax"])
    lost = Candidate.of("exp_log")
    died = {
        "kind": "died",
        "item": [timed.problem.key, lost.key],
        "outcome": "timeout",
        "detail": "no answer for 60 s",
    }
    progress.write_text(json.dumps(died) + "\n")
    spec = {"device": "cpu", "quick": True, "operations": ["softmax"], "end_at": time.time() + 100}
    gpu_timing.timing(spec, Reporter(progress))
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    begun = [line["item"][1] for line in lines if line["kind"] == "start"]
    assert lost.key not in begun
    assert begun[-1] == "race"
    records = [line["record"] for line in lines if line["kind"] == "measurement"]
    found = {each["candidate"]["variant"]: (each["outcome"], each["detail"]) for each in records}
    assert found.pop("exp_log") == ("timeout", "no answer for 60 s")
    assert set(found.values()) == {("ok", "")}
    (summary,) = [line for line in lines if line["kind"] == "problem"]
    assert (summary["candidates"], summary["failures"]) == (len(records), {"timeout": 1})
    # Told of all that, a further life has nothing left to do.
    again = Reporter(progress)
    gpu_timing.timing(spec, again)
    assert len(progress.read_text().splitlines()) == len(lines)


def summary_of(**changes: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "quick": False,
        "budget_s": 420.0,
        "seconds": 61.0,
        "verdict": "fine",
        "facts": {
            "device": H200.to_dict(),
            "in_table": True,
            "gpu": "NVIDIA H200",
            "runtime": "CUDA 12.8",
            "versions": {"torch": "2.9"},
            "clocks": {"clocks.sm": "1980 MHz"},
        },
        "checks": [
            {
                "operation": "gemm",
                "variant": "vendor",
                "checked": 9,
                "ok": 9,
                "failed": 0,
                "dtypes": ["float16"],
                "note": "",
            }
        ],
        "failures": [],
        "runtime": [{"name": "verified selection", "held": True, "detail": "x"}],
        "calibration": [],
        "timings": [],
        "fit": [],
        "left_out": [],
        "steps": [{"name": "facts", "state": "done", "seconds": 1.0, "restarts": 0, "detail": ""}],
        **changes,
    }


def failure(outcome: str) -> dict[str, str]:
    return {"step": "check", "problem": "gemm(...)", "candidate": "c", "outcome": outcome, "detail": "d|e"}


@for_each(
    ("changes", "status", "words"),
    [
        ({}, 0, "9 results were compared"),
        ({"failures": [failure("wrong_result")]}, 1, "c on gemm(...): wrong_result"),
        ({"failures": [failure("crash")]}, 1, "crash"),
        ({"failures": [failure("timeout")]}, 1, "timeout"),
        ({"failures": [failure("compile_error")]}, 1, "compile_error"),
        # What a device has left is not always known before.
        ({"failures": [failure("out_of_resources")]}, 0, "9 results"),
        ({"checks": []}, 1, "Nothing was checked"),
        ({"runtime": [{"name": "drop-in gemm", "held": False, "detail": ""}]}, 1, "drop-in gemm"),
        ({"steps": [{"name": "check-x", "state": "failed"}]}, 1, "check-x"),
        ({"steps": [{"name": "timing", "state": "out of time"}]}, 0, "Not finished in time: timing"),
    ],
)
def test_the_verdict_follows_what_was_found(changes: dict[str, Any], status: int, words: str) -> None:
    found, sentence = gpu_report.verdict(summary_of(**changes))
    assert found == status
    assert words in sentence


def test_checks_are_counted_by_variant_with_the_children_that_died() -> None:
    spec = {"operation": "gemm", "variants": ["vendor", "triton_tiled", "linear"], "dtypes": ["float16"]}
    vendor = Candidate.of("vendor")
    lines = [
        {"kind": "begin"},
        {"kind": "refused", "variant": "linear", "problem": "p", "detail": "only on a CPU"},
        {"kind": "refused", "variant": "vendor", "problem": "p", "detail": "on this one not"},
        {"kind": "start", "item": [GEMM.key, vendor.key]},
        {"kind": "result", "item": [GEMM.key, vendor.key], "outcome": "ok", "detail": ""},
        {"kind": "died", "item": [GEMM.key, TILED.key], "outcome": "timeout", "detail": "no answer for 60 s"},
    ]
    rows, failures = gpu_report.gather_checks(
        [TaskResult(Task("t", "check", spec, 1.0), state="done", lines=lines)]
    )
    assert [(row["variant"], row["checked"], row["ok"], row["failed"], row["note"]) for row in rows] == [
        ("vendor", 1, 1, 0, ""),
        ("triton_tiled", 1, 0, 1, ""),
        ("linear", 0, 0, 0, "only on a CPU"),
    ]
    assert failures == [
        {
            "step": "check",
            "problem": str(GEMM),
            "candidate": str(TILED),
            "outcome": "timeout",
            "detail": "no answer for 60 s",
        }
    ]


def test_timings_keep_the_failures_and_the_rounds_that_broke() -> None:
    figures = gpu_timing.compare(GEMM, [record(Candidate.of("vendor"), [8.0]), record(TILED, [], "crash")])
    lines = [
        {"kind": "start", "item": [GEMM.key, TILED.key]},
        {
            "kind": "problem",
            "item": [GEMM.key, "race"],
            "problem": GEMM.key,
            "label": "Llama-3-8B",
            **figures,
        },
        {"kind": "died", "item": [GEMM.key, "race"], "outcome": "timeout", "detail": "no answer"},
    ]
    rows, failures = gpu_report.gather_timings(lines)
    assert [(row["operation"], row["label"], row["failed"], row["default_us"]) for row in rows] == [
        ("gemm", "Llama-3-8B", 1, 8.0)
    ]
    assert [(each["candidate"], each["outcome"]) for each in failures] == [
        (str(TILED), "crash"),
        ("the rounds", "timeout"),
    ]


def test_geometric_means_of_ours_and_of_the_faster_of_both() -> None:
    rows = [
        {"operation": "gemm", "speedup": 2.0},
        {"operation": "gemm", "speedup": 0.5},
        {"operation": "gemm", "speedup": None},
        {"operation": "softmax", "speedup": 1.0},
    ]
    gemm, softmax = gpu_report.geometric_means(rows)
    assert (gemm["problems"], gemm["faster"], gemm["ours"]) == (2, 1, pytest.approx(1.0))
    assert gemm["selected"] == pytest.approx(2**0.5)
    assert (softmax["problems"], softmax["faster"], softmax["selected"]) == (1, 0, 1.0)


def test_the_summary_shows_date_gpu_versions_figures_and_what_was_left_out(tmp_path: Path) -> None:
    timing = {
        "problem": "gemm(m=1)",
        "operation": "gemm",
        "label": "Llama-3-8B",
        "default_us": 12.5,
        "best_us": 10.0,
        "speedup": 1.25,
        "candidates": 53,
        "failed": 1,
        "best": "triton_tiled(block_m=16)",
    }
    summary = summary_of(
        failures=[failure("crash")],
        timings=[timing],
        left_out=["Fitting: xgboost not installed."],
        calibration=[
            {
                "name": "mm",
                "equal_ratio": 1.001,
                "tie": True,
                "twofold_ratio": float("nan"),
                "differs": False,
                "rounds": 30,
            }
        ],
    )
    gpu_report.write_summary(tmp_path, summary)
    text = (tmp_path / "summary.md").read_text()
    for expected in (
        "- date: 2026-01-02T03:04:05+00:00",
        "- device: NVIDIA H200 (sm90, 132 cores; in the table)",
        "- versions: torch 2.9, CUDA 12.8",
        "- state: clocks.sm 1980 MHz",
        "| gemm: vendor | 9 | 9 | 0 | float16 |",
        "| c | gemm(...) | check | crash | d\\|e |",
        "| mm | 1.00 | yes | - | no | 30 |",
        "| gemm(m=1) | Llama-3-8B | 12.5 | 10.0 | 1.25 | 53 | 1 | triton_tiled(block_m=16) |",
        "| gemm | 1 | 1 | 1.25 | 1.25 |",
        "- Fitting: xgboost not installed.",
    ):
        assert expected in text
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert kept["timings"] == [timing]
    assert kept["calibration"][0]["twofold_ratio"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json", "summary.md"]
