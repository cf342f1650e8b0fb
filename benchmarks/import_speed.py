"""How long imports of recorded files take, and how much memory: each in a process of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_data import A100_FILE, A100_WORKLOADS, ABSENT

HUB = A100_FILE.parents[1] / "kernel_tuner"

#: Files of the benchmark hub: importer, file, device.
HUB_FILES = (
    ("kernel-tuner", "convolution_milo_A100.json.gz", "a100"),
    ("kernel-tuner", "convolution_milo_MI250X.json.gz", "mi250x"),
    ("kernel-tuner", "gemm_RTX_3090.json.gz", "rtx-3090"),
    ("t4", "convolution_milo_A100_T4.json.gz", "a100"),
    ("t4", "convolution_milo_A4000_T4.json.gz", "rtx-a4000"),
    ("t4", "convolution_milo_MI250X_T4.json.gz", "mi250x"),
)

#: AutoHeuristic's other files: file, device.
OTHER_FILES = (
    ("h100_mm_random.zip", "h100"),
    ("mixedmm_a100_data.zip", "a100"),
    ("flexattention_a100_data.zip", "a100"),
    ("pad_mm_a100_data.zip", "a100"),
)

#: What may be taken, in seconds and GiB: name of the import -> limits.
LIMITS = {"A100 mm, three files": (30.0, 2.0), "Kernel Tuner caches, three files": (20.0, 2.0)}


def main(quick: bool) -> dict[str, Any]:
    """Import each set of files into a new store. Quick: those of Kernel Tuner's A100 alone."""
    title = "Speed and memory of imports"
    if not A100_FILE.is_file() or not HUB.is_dir():
        return {"title": title, "skipped": ABSENT}
    sets = _sets()
    if quick:
        sets = {"Kernel Tuner caches, three files": sets["Kernel Tuner caches, three files"][:1]}
    rows, figures = [], {}
    for name, imports in sets.items():
        found = _measured(imports)
        seconds, gibibytes = LIMITS.get(name, (None, None))
        met = None if seconds is None else found["cpu_s"] <= seconds and found["peak_gib"] <= gibibytes
        figures[name] = {**found, "limit_s": seconds, "limit_gib": gibibytes, "met": met}
        facts = (found[each] for each in ("rows", "records", "cpu_s", "wall_s", "peak_gib"))
        rows.append([name, *facts, seconds, gibibytes, met])
    columns = ["files", "rows", "records", "CPU s", "wall s", "peak GiB", "limit s", "limit GiB", "met"]
    return {
        "title": title,
        "imports": figures,
        "tables": [{"title": "Imports into a new store", "columns": columns, "rows": rows}],
        "notes": [
            "Each row is one process that reads the files, checks them and writes their segments durably; Python's start "
            "and the import of the libraries are in the CPU time.",
            "CPU time (user and system) and the largest resident set are those of the process, from getrusage. The wall "
            "clock is that of this machine with whatever else ran on it: `met` goes by the CPU time.",
        ],
    }


def _sets() -> dict[str, list[dict[str, Any]]]:
    folder = A100_FILE.parent
    return {
        "A100 mm, three files": [
            {
                "name": "autoheuristic",
                "files": [f"{A100_FILE}:{member}"],
                "device": "a100",
                "workload": workload,
            }
            for workload, member in A100_WORKLOADS.items()
        ],
        "AutoHeuristic's others, four files": [
            {"name": "autoheuristic", "files": [str(folder / file)], "device": device, "workload": "others"}
            for file, device in OTHER_FILES
        ],
        "Kernel Tuner caches, three files": _hub("kernel-tuner"),
        "T4, three files": _hub("t4"),
    }


def _hub(importer: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "files": [str(HUB / file)], "device": device, "workload": "hub"}
        for name, file, device in HUB_FILES
        if name == importer
    ]


def _measured(imports: list[dict[str, Any]]) -> dict[str, Any]:
    """What a process that does some imports took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(imports), folder]
        began = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        return {**json.loads(done.stdout), "wall_s": time.monotonic() - began}


def _child(imports: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    from kernelcast.datasets import import_files
    from kernelcast.kernels.devices import device

    rows = records = 0
    for each in imports:
        summary = import_files(**{**each, "device": device(each["device"])}, store=folder / "store")
        rows, records = rows + summary.rows, records + summary.added
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "rows": rows,
        "records": records,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_gib": used.ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    print(json.dumps(_child(json.loads(sys.argv[1]), Path(sys.argv[2]))))
