"""Everything that needs a GPU, in one command, on a machine that has torch, triton and numpy and nothing of kernelcast's.

Usage: python benchmarks/gpu_check.py [--output DIR] [--budget SECONDS] [--device gpu|cpu] [--only OPERATIONS] [--quick]

Compares every variant with its reference, checks the run time and the clock, and times the quick subset of the space on
layers that people run. In DIR it leaves ``summary.md``, ``summary.json`` and ``store``, whose measurements can be merged
into another store. The exit status is 0 if the checks pass, 1 if a candidate was wrong or crashed, 2 if there is no GPU
(or an argument is wrong).
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "tools"))

import gpu_child
import gpu_report
import link_farm
from gpu_tasks import Line, Task, TaskResult, run_tasks

if TYPE_CHECKING:
    from kernelcast.datasets.journal import Journal

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[1]

#: Kept back from the budget, for ending children and writing files.
_RESERVE_S = 6.0
#: The part of the budget after which no result is compared any more, so that some is left for the timing.
_CHECK_SHARE = 0.5
#: One task's share: there are a hundred of them, and some must not starve the others.
_CHECK_TASK_S = 100.0
#: Kept for fitting a model at the end, where that can be done.
_FIT_S = 40.0
#: Children that compile and compare at a time: each holds a device context of some 500 MB.
_MOST_WORKERS = 12

#: What fitting a model needs beside the libraries of a bare machine.
_FIT_LIBRARIES = ("xgboost", "sklearn", "pandas", "pyarrow")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, or, in a child, one step of it. Returns the exit status."""
    options = _parse(arguments)
    if options.step:
        return gpu_child.run_step(options.step, Path(options.spec), Path(options.progress))
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    output = Path(options.output or os.environ.get("OUT") or "gpu-check")
    with tempfile.TemporaryDirectory(prefix="kernelcast-gpu-check-") as name:
        scratch = Path(name)
        farm = scratch / "farm"
        link_farm.build(farm, ROOT)
        sys.path.insert(0, str(farm))
        check = _Check(options, output, scratch, farm, started)
        return check.run()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", metavar="DIR", help="folder for what is found; default: $OUT, else ./gpu-check"
    )
    parser.add_argument(
        "--budget", type=float, default=420.0, metavar="SECONDS", help="time for all of it (420)"
    )
    parser.add_argument(
        "--device", choices=("gpu", "cpu"), default="gpu", help="cpu tries the check itself out"
    )
    parser.add_argument(
        "--only", metavar="OPERATIONS", help="these operations, by commas; all where left out"
    )
    parser.add_argument("--quick", action="store_true", help="fewer problems and configs")
    for name in ("--step", "--spec", "--progress"):  # a child's
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.budget > 0:
        parser.error(f"--budget is {options.budget}; it must be a positive number of seconds")
    return options


class _Check:
    """One run: its steps in order, the most valuable first, and what they found."""

    def __init__(
        self, options: argparse.Namespace, output: Path, scratch: Path, farm: Path, started: float
    ) -> None:
        self._options, self._output, self._scratch = options, output, scratch
        self._started, self._deadline = started, started + options.budget - _RESERVE_S
        self._command = [sys.executable, str(SCRIPT)]
        old = os.environ.get("PYTHONPATH")
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{farm}{os.pathsep}{old}" if old else str(farm),
            # Nothing of the user's models or selections may show here.
            "KERNELCAST_HOME": str(scratch / "home"),
            "KERNELCAST_MODE": "verify",
            "KERNELCAST_DISABLE": "0",
        }
        if options.device == "cpu":
            # Several threads on a machine that others use too would drown every ratio in noise.
            self._environment["OMP_NUM_THREADS"] = "1"
        self._spec: dict[str, Any] = {"device": options.device, "quick": options.quick}
        self._journal: Journal | None = None
        self.summary: gpu_report.Summary = {
            "schema": 1,
            "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "quick": options.quick,
            "budget_s": options.budget,
            "seconds": 0.0,
            "complete": False,
            "verdict": "unfinished",
            "facts": {},
            "checks": [],
            "failures": [],
            "runtime": [],
            "calibration": [],
            "timings": [],
            "fit": [],
            "left_out": [],
            "steps": [],
        }

    def run(self) -> int:
        from kernelcast.datasets.journal import Journal
        from kernelcast.kernels import Device, operation_names

        unknown = sorted(set(self._operations) - set(operation_names()))
        if unknown:
            print(
                f"--only: no operation {', '.join(unknown)}; there are: {', '.join(operation_names())}.",
                file=sys.stderr,
            )
            return 2
        facts = self._tasks([Task("facts", "facts", self._spec, limit_s=90)])[0]
        told = {line["kind"]: line for line in facts.lines}
        if "no_gpu" in told:
            print(f"No GPU check: {told['no_gpu']['detail']}", file=sys.stderr)
            return 2
        if "facts" not in told:
            print(f"The GPU check could not look at this machine: {facts.detail}", file=sys.stderr)
            return 1
        self.summary["facts"] = told["facts"]["facts"]
        self._output.mkdir(parents=True, exist_ok=True)
        with Journal(self._output / "store") as self._journal:
            self._journal.record_device(Device.from_dict(self.summary["facts"]["device"]))
            self._save()
            self._check()
            self._small_steps()
            self._time()
        self._fit()
        self.summary["complete"] = True
        status = self._save()
        print(self.summary["verdict"])
        print(f"{self._output / 'summary.md'} has the tables, {self._output / 'store'} the measurements.")
        return status

    @property
    def _operations(self) -> list[str]:
        from kernelcast.kernels import operation_names

        return self._options.only.split(",") if self._options.only else operation_names()

    def _check(self) -> None:
        """Compare with the reference. On a GPU several processes at a time, and kernels to be timed are compiled beside."""
        tasks = check_tasks(self._operations, self._spec)
        count = len(tasks)
        on_gpu = self._options.device == "gpu"
        workers = min(_MOST_WORKERS, max((os.cpu_count() or 2) * 3 // 4, 1)) if on_gpu else 1
        if on_gpu:
            shares = {"operations": self._operations, "shards": workers}
            tasks += [
                Task(f"warm-{shard}", "warm", {**self._spec, **shares, "shard": shard}, limit_s=100)
                for shard in range(workers)
            ]
        deadline = min(self._deadline, self._started + _CHECK_SHARE * self._options.budget)
        results = self._tasks(tasks, workers=workers, deadline=deadline)
        self.summary["checks"], failures = gpu_report.gather_checks(results[:count])
        self.summary["failures"] += failures
        unlisted = {
            line["detail"] for result in results for line in result.lines if line["kind"] == "unlisted"
        }
        self.summary["left_out"] += [f"An operation without a list of problems: {each}" for each in unlisted]
        self._save()

    def _small_steps(self) -> None:
        if "gemm" not in self._operations:
            return
        has_filelock = _installed("filelock")
        if not has_filelock:
            self.summary["left_out"].append(
                "The cache of selections on disk: filelock is not installed. Selections in memory are checked."
            )
        spec = {**self._spec, "has_filelock": has_filelock}
        for result in self._tasks(
            [
                Task("runtime", "runtime", spec, limit_s=60, silence_s=45),
                Task("calibrate", "calibrate", self._spec, limit_s=60, silence_s=45),
            ]
        ):
            for line in result.lines:
                if line["kind"] == "calibration":
                    self.summary["calibration"].append(line)
                elif line["kind"] == "runtime":
                    self.summary["runtime"].append(line)
                elif line["kind"] == "died" and result.task.step == "runtime":
                    self.summary["runtime"].append({**line, "name": line["item"][0], "held": False})
        self._save()

    def _time(self) -> None:
        left = self._deadline - time.monotonic() - (0.0 if _missing_for_fit() else _FIT_S)
        spec = {**self._spec, "operations": self._operations, "end_at": time.time() + left}
        (result,) = self._tasks([Task("timing", "timing", spec, limit_s=left)])
        timings, failures = gpu_report.gather_timings(result.lines)
        self.summary["timings"] = timings
        self.summary["failures"] += failures
        for line in result.lines:
            if line["kind"] == "skipped":
                self.summary["left_out"].append(line["detail"])
        late = {line["problem"] for line in result.lines if line["kind"] == "late"}
        if late:
            self.summary["left_out"].append(f"{len(late)} problems to time: the budget was spent.")
        self._save()

    def _fit(self) -> None:
        missing = _missing_for_fit()
        if missing:
            self.summary["left_out"].append(
                f"Fitting a model on the measurements: {', '.join(missing)} not installed. Merge the store into another "
                "where kernelcast[train] is installed, and train there."
            )
            return
        timed = [row["operation"] for row in self.summary["timings"]]
        spec = {
            **self._spec,
            "store": str(self._output / "store"),
            # Three folds by shape need a few problems each.
            "operations": [name for name in dict.fromkeys(timed) if timed.count(name) >= 6],
        }
        if spec["operations"]:
            (result,) = self._tasks([Task("fit", "fit", spec, limit_s=90, silence_s=90)])
            self.summary["fit"] = [line for line in result.lines if line["kind"] == "fit"]

    def _tasks(
        self, tasks: Sequence[Task], *, workers: int = 1, deadline: float | None = None
    ) -> list[TaskResult]:
        results = run_tasks(
            tasks,
            self._command,
            self._scratch,
            deadline=self._deadline if deadline is None else deadline,
            workers=workers,
            environment=self._environment,
            on_line=self._heard,
        )
        for result in results:
            self.summary["steps"].append(
                {
                    "name": result.task.name,
                    "state": result.state,
                    "seconds": round(result.seconds, 1),
                    "restarts": result.restarts,
                    "detail": result.detail,
                }
            )
        return results

    def _heard(self, task: Task, line: Line) -> None:
        """Keep a measurement as soon as it is known: whatever ends this run, it is on the disk."""
        if line["kind"] == "measurement" and self._journal is not None:
            from kernelcast.datasets.record import Measurement

            self._journal.append(Measurement.from_dict(line["record"]))

    def _save(self) -> int:
        """Write the summary so far. Returns the exit status that it stands for."""
        status, sentence = gpu_report.verdict(self.summary)
        self.summary["verdict"] = sentence if self.summary["complete"] else f"Unfinished. So far: {sentence}"
        self.summary["exit_status"] = status
        self.summary["seconds"] = time.monotonic() - self._started
        gpu_report.write_summary(self._output, self.summary)
        return status


def check_tasks(operations: Sequence[str], spec: Mapping[str, Any]) -> list[Task]:
    """One task for each operation on a CPU; on a GPU one for each dtype with each Triton variant, and with all others."""
    from kernelcast.kernels import operation, variants

    tasks = []
    for name in operations:
        known = variants(name)
        dtypes = list(operation(name).schema.dtypes)
        if spec["device"] == "cpu":
            parts = [("all", dtypes, list(known))]
        else:
            triton = [key for key, found in known.items() if found.backend == "triton"]
            others = [key for key in known if key not in triton]
            groups = [(key, [key]) for key in triton] + [("others", others)]
            parts = [
                (f"{label}-{dtype}", [dtype], group) for dtype in dtypes for label, group in groups if group
            ]
        tasks += [
            Task(
                f"check-{name}-{label}",
                "check",
                {**spec, "operation": name, "dtypes": some, "variants": group},
                limit_s=_CHECK_TASK_S,
            )
            for label, some, group in parts
        ]
    # Kernels of our own first: what they are made of cannot be tried without a GPU. Each in one dtype before any in another,
    # as the budget may end before the last.
    return sorted(
        tasks,
        key=lambda task: (
            not task.spec["variants"][0].startswith("triton"),
            _dtype_rank(task.spec["dtypes"][0]),
        ),
    )


def _dtype_rank(dtype: str) -> int:
    order = ("float16", "float32", "bfloat16")
    return order.index(dtype) if dtype in order else len(order)


def _missing_for_fit() -> list[str]:
    return [name for name in _FIT_LIBRARIES if not _installed(name)]


def _installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ImportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
