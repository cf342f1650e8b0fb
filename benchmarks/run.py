"""Run the benchmarks and write their figures.

Usage: python benchmarks/run.py [--only NAME] [--quick] [--output DIR]

Each benchmark runs in a process of its own and leaves ``<name>.md`` and ``<name>.json`` in DIR (docs/results).
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_tables import plain, write_result

BENCHMARKS = (
    "selection_speed",
    "recorded_a100",
    "active_collection",
    "training_speed",
    "import_speed",
    "durability",
    "store_speed",
    "racing",
    "adaptive_k",
    "recorded_more",
    "tune_search",
    "transfer",
    "plans",
    "cache_stress",
    "triton_dispatch",
    "triton_ranking",
    "runtime_quality",
    "networks",
    "demonstration",
)
#: Those that are timed on one thread, whatever a library would take.
_ONE_THREAD = ("selection_speed", "racing", "triton_dispatch", "plans", "runtime_quality", "networks")
_LIBRARIES = ("kernelcast", "torch", "numpy", "xgboost", "scikit-learn", "pandas", "pyarrow")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks asked for. Returns the exit status: 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BENCHMARKS, help="this one alone")
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it works")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="docs/results if left out"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        result = importlib.import_module(options.only).main(options.quick)
        options.child.write_text(json.dumps(plain(result)))
        return 0
    failed = []
    for name in [options.only] if options.only else BENCHMARKS:
        result = _in_child(name, options.quick)
        if result is None:
            failed.append(name)
            continue
        written, _ = write_result(options.output, name, header(name, options.quick), result)
        print(written.read_text())
    if failed:
        print(f"Failed: {', '.join(failed)}. What they said is above.", file=sys.stderr)
    return int(bool(failed))


def header(name: str, quick: bool) -> dict[str, Any]:
    """Facts of this run: date, this machine's CPU, versions, command."""
    from kernelcast.kernels.detect import detect

    versions = []
    for library in _LIBRARIES:
        try:
            versions.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            continue
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": detect("cpu").name,
        "versions": ", ".join([f"python {sys.version.split()[0]}", *versions]),
        "command": f"python benchmarks/run.py --only {name}{' --quick' if quick else ''}",
        **({"quick": "less of everything, to see that it works: not for quotation"} if quick else {}),
    }


def _in_child(name: str, quick: bool) -> dict[str, Any] | None:
    """What a benchmark's ``main`` returned; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--only", name, "--child", str(answer)]
        threads = dict.fromkeys(_THREADS, "1") if name in _ONE_THREAD else {}
        own = {"KERNELCAST_HOME": str(Path(folder) / "home"), "KERNELCAST_DISABLE": "0"}
        environment = {**os.environ, **own, **threads}
        status = subprocess.run([*command, *(["--quick"] if quick else [])], env=environment, check=False)
        return json.loads(answer.read_text()) if status.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
