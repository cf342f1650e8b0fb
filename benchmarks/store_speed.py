"""A store of five million measurements: read into pandas, summarised, compacted and checked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_store

#: What is promised of a read of four columns.
MOST_SECONDS, MOST_GIB = 1.0, 2.0

#: Columns that are read: what a plot, a table of choices, and a fit ask for.
READS = (
    ("problem_id", "candidate_key", "latency_us", "outcome"),
    ("operation", "device", "workload", "latency_us"),
    ("problem", "candidate_key", "latency_us", "created_at"),
)

#: Runs one call on a store and says what it took. A process of its own, as the peak of memory is that of a process;
#: from the kernel's status, since what getrusage tells may be that of the parent.
_MEASURED = """
import json, sys, time
from pathlib import Path
import pandas, pyarrow.parquet
from kernelcast.datasets import Store
store, work, columns = Store(Path(sys.argv[1])), sys.argv[2], sys.argv[3].split(",")
wall, cpu = time.perf_counter(), time.process_time()
found = store.frame(columns) if work == "frame" else getattr(store, work)()
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
rows = len(found) if work == "frame" else found["records"] if work == "summary" else -1
print(json.dumps({"wall_s": wall, "cpu_s": cpu, "peak_gib": int(peak.split()[1]) / 2**20, "rows": rows,
                  "faults": found if work == "check" else []}))
"""


def main(quick: bool) -> dict[str, Any]:
    """Five million rows. Quick: 50,000."""
    with tempfile.TemporaryDirectory() as folder:
        return page(large_store(Path(folder) / "large", 50 if quick else 5000))


def large_store(root: Path, problems: int, repeats: int = 3) -> dict[str, Any]:
    """Fill a store, and read it as it is after imports and after a compaction; the fastest of some repeats."""
    rows = bench_store.fill(root, problems, 1000, a_segment=max(problems // 20, 1))
    found: list[dict[str, Any]] = []

    def note(state: str, work: str, columns: tuple[str, ...] = (), times: int = repeats) -> None:
        runs = [_measured(root, work, columns) for _ in range(times)]
        best = min(runs, key=lambda run: run["wall_s"])
        found.append({**best, "state": state, "work": work, "columns": ", ".join(columns)})

    note("20 segments", "frame", READS[0])
    note("20 segments", "compact", times=1)
    for columns in READS:
        note("compacted", "frame", columns)
    note("compacted", "summary")
    # A check looks at every record by itself: a tenth of them tells how long all would take.
    part = root.with_name("part")
    bench_store.fill(part, max(problems // 10, 1), 1000)
    checked = _measured(part, "check")
    size_bytes = sum(path.stat().st_size for path in root.rglob("*.parquet"))
    for folder in (root, part):
        shutil.rmtree(folder)
    return {
        "rows": rows,
        "size_bytes": size_bytes,
        "reads": found,
        "check": checked,
        "checked_rows": rows // 10,
    }


def _measured(root: Path, work: str, columns: tuple[str, ...] = ()) -> dict[str, Any]:
    command = [sys.executable, "-c", _MEASURED, str(root), work, ",".join(columns)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{work} of {root} failed: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def page(reads: dict[str, Any]) -> dict[str, Any]:
    """The table of the figures."""
    checked = reads["check"]
    return {
        "title": "A store of many rows",
        "tables": [
            {
                "title": f"A store of {reads['rows']:,} rows, {reads['size_bytes'] / 2**20:,.0f} MiB",
                "columns": ["what", "files", "wall s", "CPU s", "peak GiB"],
                "rows": [
                    [
                        f"to pandas: {each['columns']}" if each["columns"] else each["work"],
                        each["state"],
                        each["wall_s"],
                        each["cpu_s"],
                        each["peak_gib"],
                    ]
                    for each in reads["reads"]
                ]
                + [
                    [
                        f"check of {reads['checked_rows']:,} rows",
                        "as imported",
                        checked["wall_s"],
                        checked["cpu_s"],
                        checked["peak_gib"],
                    ]
                ],
            },
        ],
        "large": reads,
        "notes": [
            f"Wanted of four columns to pandas: at most {MOST_SECONDS:g} s and {MOST_GIB:g} GiB. Each read is in a process "
            "of its own, its imports not counted in the time and counted in the peak; the fastest of three.",
        ],
    }
