"""The steps of the GPU check, each of which runs in a child process (see ``gpu_tasks``).

A step takes its spec and a reporter, and says everything through the reporter.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_problems import MOST_CONFIGS, MOST_CONFIGS_QUICK, check_problems, corners, timing_problems
from gpu_runtime import calibrate, runtime
from gpu_steps import DETAIL_CHARACTERS, Broken, device_of, require_sound
from gpu_tasks import RESTART_STATUS, Reporter
from gpu_timing import fit, timing

if TYPE_CHECKING:
    from kernelcast.kernels import Candidate, Device, Problem
    from kernelcast.kernels.compile import KernelSpec

#: What nvidia-smi is asked for. Questions only: settings stay as they are.
_SMI_FACTS = (
    "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu", "utilization.gpu",
)  # fmt: skip


def run_step(name: str, spec_file: Path, progress_file: Path) -> int:
    """Run one step. Returns the exit status."""
    report = Reporter(progress_file)
    spec = json.loads(spec_file.read_text())
    report("begin")
    try:
        STEPS[name](spec, report)
    except Broken:
        sys.stdout.flush()
        # Tearing a broken context down in order may hang.
        os._exit(RESTART_STATUS)
    return 0


def facts(spec: Mapping[str, Any], report: Reporter) -> None:
    """What this machine is: one line ``facts``, or ``no_gpu`` with a sentence."""
    try:
        import torch
    except ImportError as error:
        report("no_gpu", detail=f"This Python ({sys.executable}) has no torch: {error}.")
        return
    from importlib.metadata import PackageNotFoundError, version

    import kernelcast
    from kernelcast.errors import KernelcastError
    from kernelcast.kernels.detect import detect
    from kernelcast.kernels.devices import device_names

    try:
        device = detect(spec["device"])
    except KernelcastError as error:
        report("no_gpu", detail=str(error))
        return
    versions = {"kernelcast": kernelcast.__version__, "python": platform.python_version()}
    for library in ("torch", "triton", "numpy"):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "absent"
    found: dict[str, Any] = {
        "device": device.to_dict(),
        "fingerprint": device.fingerprint,
        "in_table": device.name in device_names(),
        "versions": versions,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    if device.kind == "gpu":
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found |= {
            "gpu": properties.name,
            "runtime": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
            "memory_bytes": total,
            "free_bytes": free,
            "clocks": _smi(),
        }
    report("facts", facts=found)


def check(spec: Mapping[str, Any], report: Reporter) -> None:
    """Compare candidates with the reference: a line ``result`` for each, ``refused`` for a variant that is not legal."""
    from kernelcast.datasets.timing import TimingPlan
    from kernelcast.errors import KernelcastError
    from kernelcast.kernels import variant

    device = device_of(spec)
    finished = report.finished()
    plan = TimingPlan(rounds=1, least_rounds=1, seconds=0.01, candidate_seconds=1.0, repeats=1)
    most = MOST_CONFIGS_QUICK if spec["quick"] else MOST_CONFIGS
    try:
        problems = check_problems(spec["operation"], device, quick=spec["quick"])
    except KernelcastError as error:
        report("unlisted", detail=str(error))
        return
    wanted: list[tuple[int, Problem, Candidate]] = []
    for problem in problems:
        if problem.dtype not in spec["dtypes"]:
            continue
        for name in spec["variants"]:
            found = variant(problem.operation, name)
            space = found.space("default")
            block = space.take(found.legal(problem, device, space))
            if not block.length:
                refused = found.refusals(problem, device, space)
                report(
                    "refused",
                    variant=name,
                    problem=str(problem),
                    detail=f"{refused[0].reason} ({refused[0].seen})" if refused else "",
                )
                continue
            rows = corners(block, most)
            wanted += [(number, problem, block.at(int(row))) for number, row in enumerate(rows)]
    # Every problem with one config before any with another: the time may end before the last.
    for _, problem, candidate in sorted(wanted, key=lambda each: each[0]):
        item = [problem.key, candidate.key]
        if tuple(item) in finished:
            continue
        report("start", item=item)
        outcome, detail = _outcome_of(problem, candidate, device, plan)
        report("result", item=item, outcome=outcome, detail=detail)
        require_sound(device)


def warm(spec: Mapping[str, Any], report: Reporter) -> None:
    """Compile one share of the Triton kernels that are to be timed, into the compiler's cache on disk."""
    from kernelcast.kernels import candidates, variant
    from kernelcast.kernels.compile import TARGETS

    device = device_of(spec)
    finished = report.finished()
    seen: set[str] = set()
    for each in timing_problems(device, quick=spec["quick"], operations=spec["operations"]):
        problem = each.problem
        for candidate in candidates(problem, device, subset="default", backends=("triton",)):
            describe = getattr(variant(problem.operation, candidate.variant), "compile_spec", None)
            if describe is None:
                continue
            kernel: KernelSpec = describe(problem, candidate.parameters, device.architecture)
            # Problems of one divisibility share their machine code.
            same = kernel.specialise(device.architecture) if device.architecture in TARGETS else problem.key
            key = repr((candidate.variant, same, sorted(kernel.options.items())))
            if key in seen:
                continue
            seen.add(key)
            item = [problem.key, candidate.key]
            if len(seen) % spec["shards"] != spec["shard"] or tuple(item) in finished:
                continue
            report("start", item=item)
            outcome, detail = _compiled(kernel)
            report("result", item=item, outcome=outcome, detail=detail)


STEPS: dict[str, Callable[[Mapping[str, Any], Reporter], None]] = {
    "facts": facts,
    "check": check,
    "warm": warm,
    "calibrate": calibrate,
    "runtime": runtime,
    "timing": timing,
    "fit": fit,
}


def _outcome_of(problem: Problem, candidate: Candidate, device: Device, plan: Any) -> tuple[str, str]:
    from kernelcast.datasets.timing import measure

    try:
        (found,) = measure(problem, [candidate], device, plan=plan).measurements
    except Exception as error:  # noqa: BLE001 - the inputs or the reference: no candidate could be judged
        return "crash", f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]
    return found.outcome, found.detail[:DETAIL_CHARACTERS]


def _compiled(kernel: KernelSpec) -> tuple[str, str]:
    """Compile as a launch would, without one. What goes wrong will be the candidate's outcome when it is timed."""
    import torch

    arguments = [getattr(torch, pointer.dtype) for pointer in kernel.tensors.values()]
    try:
        kernel.kernel.warmup(
            *arguments, *kernel.integers.values(), *kernel.constants.values(), grid=(1,), **kernel.options
        )
    except Exception as error:  # noqa: BLE001 - the compiler's failures share no base class
        return "compile_error", f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]
    return "ok", ""


def _smi() -> dict[str, str]:
    """Clocks and the like, where there is a tool that tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [f"--query-gpu={','.join(_SMI_FACTS)}", "--format=csv,noheader"]
        answer = subprocess.run([tool, *asked], capture_output=True, text=True, timeout=15, check=True).stdout
        values = answer.splitlines()[0].split(", ")
        return dict(zip(_SMI_FACTS, values, strict=False))
    return {}
