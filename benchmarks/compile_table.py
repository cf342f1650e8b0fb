"""Compile every operation's Triton candidates for some GPUs, offline, and write the table of what the compiler made.

Usage: python benchmarks/compile_table.py --targets sm80,sm90,sm100,gfx942 [--ops gemm,softmax] [--output DIR]

Leaves ``compile.md`` (a row a variant and target), ``compile.json`` (the same numbers in full) and ``compile.parquet`` (a
row a candidate) in DIR (docs/results). What was compiled is remembered under KERNELCAST_HOME, so that a command that was
ended goes on where it was; rows of operations and targets that are not named stay as they are in the files.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_tables import write_result

TARGETS = ("sm80", "sm90", "sm100", "gfx942")
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
#: Share of the compiler's shared memory that an estimate of the rules may be: below, a kernel that does not load passes;
#: far above, good tiles are refused.
BAND = (0.95, 1.25)
#: Candidates that are listed by name on the page, at most.
_MOST_LISTED = 60

Row = dict[str, Any]
#: Rows of one variant on one target in one dtype stand and go together.
Group = tuple[str, str, str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, and write the files. Returns the exit status: 2 on bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="architectures, by commas")
    parser.add_argument("--ops", help="operations, by commas; all that have Triton variants where left out")
    parser.add_argument("--variants", help="variants, by commas; all where left out")
    parser.add_argument("--dtypes", default="float16", help="of the problems, by commas")
    parser.add_argument("--subset", choices=("default", "full"), default="default")
    parser.add_argument("--limit", type=int, help="candidates of a variant, at most: to see that it works")
    parser.add_argument("--workers", type=int, help="compilers at a time; one a CPU where left out")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="for one compile")
    parser.add_argument("--budget", help="start no further compile after this long: 90s, 10m, 2h")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args(arguments)
    from kernelcast.errors import KernelcastError

    try:
        rows, notes = compile_rows(options)
        write_page(options.output, rows, notes, _command(sys.argv[1:] if arguments is None else arguments))
    except KernelcastError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def compile_rows(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Rows of what was asked for, and a note for each group that the budget left unfinished."""
    import triton

    from kernelcast import settings
    from kernelcast.cli.collect import parse_duration
    from kernelcast.kernels import operation, operation_names, variants
    from kernelcast.kernels.compile_cache import CompileCache
    from kernelcast.kernels.compile_many import compile_many, default_workers
    from kernelcast.kernels.compile_plan import plan, problems_to_compile, row_of, target_device

    budget_s = parse_duration(options.budget)
    stop_at = time.monotonic() + (budget_s or math.inf)
    cache = CompileCache(settings.compile_cache_dir())
    names = _names(options.ops) or [
        name
        for name in operation_names()
        if any(hasattr(found, "compile_spec") for found in variants(name).values())
    ]
    targets = _names(options.targets) or list(TARGETS)
    for target in targets:
        target_device(target)
    rows: list[Row] = []
    notes: list[str] = []
    for name in names:
        for target in targets:
            for dtype in _names(options.dtypes) or ["float16"]:
                if dtype not in operation(name).schema.dtypes:
                    continue
                problems = problems_to_compile(name, {"dtype": dtype})
                found = plan(problems, target, subset=options.subset, names=_names(options.variants))
                chosen = list(_first(found.rows, options.limit))
                places = {id(each.request): each for each in chosen}
                before = len(rows)
                for request, facts in compile_many(
                    [each.request for each in chosen],
                    target,
                    workers=options.workers or default_workers(),
                    time_limit_s=options.time_limit,
                    cache=cache,
                    # Once it is spent, what is known is still taken.
                    budget_s=None if budget_s is None else max(stop_at - time.monotonic(), 1e-9),
                ):
                    versions = {"target": target, "device": found.device.name, "triton": triton.__version__}
                    rows.append({**versions, **row_of(places[id(request)], facts, found.device)})
                done = len(rows) - before
                print(f"{name} {dtype} for {target}: {done} of {len(chosen)} candidates", flush=True)
                if done < len(chosen):
                    notes.append(f"{len(chosen) - done} candidates of {name} for {target} were not started.")
                if options.limit is not None:
                    notes.append(
                        f"{name} for {target}: the first {options.limit} candidates of each variant alone."
                    )
                notes += [
                    f"{variant} of {name} has no legal candidate on {target}." for variant in found.left_out
                ]
    return rows, notes


def write_page(output: Path, rows: Sequence[Row], notes: Sequence[str], command: str) -> None:
    """Put rows among those of the files in a folder, in place of those of the same groups, and write the page."""
    from kernelcast.cli.kernels_compile import write_parquet

    output.mkdir(parents=True, exist_ok=True)
    path = output / "compile.parquet"
    kept = merge(read_rows(path), rows)
    write_parquet(path, kept)
    header = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "triton": ", ".join(sorted({row["triton"] for row in kept})),
        "command": command,
    }
    write_result(output, "compile", header, page(kept, notes))
    print(f"{path}: {len(kept)} rows.")


def read_rows(path: Path) -> list[Row]:
    """The rows of an earlier run; none where there is no such file."""
    if not path.exists():
        return []
    import pyarrow.parquet as pq

    rows: list[Row] = pq.read_table(path).to_pylist()
    return rows


def merge(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """The old rows of groups of which there are no new ones, and the new ones; in a fixed order."""
    replaced = {group_of(row) for row in new}
    rows = [row for row in old if group_of(row) not in replaced] + list(new)
    return sorted(rows, key=lambda row: (group_of(row), row["problem"], row["candidate"]))


def group_of(row: Mapping[str, Any]) -> Group:
    """What rows belong together."""
    return row["operation"], row["variant"], row["target"], row["dtype"]


def page(rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """The page as :func:`bench_tables.write_result` takes it."""
    from kernelcast.kernels.compile_plan import summary_of

    grouped: dict[str, dict[Group, list[Row]]] = {}
    for row in rows:
        grouped.setdefault(row["operation"], {}).setdefault(group_of(row), []).append(row)
    columns = [
        "variant", "target", "dtype", "candidates", "failed", "estimate, least", "estimate, most", "over the limit",
        "spilling", "most spilled", "tensor cores", "seconds",
    ]  # fmt: skip
    tables = []
    for name, groups in grouped.items():
        lines = []
        for (_, variant, target, dtype), found in groups.items():
            figures = summary_of(found)
            failed = {key: count for key, count in figures["outcomes"].items() if key != "ok"}
            lines.append([
                variant, target, dtype, figures["candidates"],
                ", ".join(f"{count} {key}" for key, count in failed.items()) or 0,
                figures["ratio_min"], figures["ratio_max"], figures["over_limit"], figures["spilling"],
                figures["most_spills"], _percent(figures["tensor_core_share_16_bit"]), figures["median_compile_seconds"],
            ])  # fmt: skip
        tables.append({"title": name, "columns": columns, "rows": lines})
    tables += _exceptions(rows)
    return {
        "title": "What the compiler makes of the Triton candidates",
        "tables": tables,
        "notes": [
            "Compiled offline for each target, without a GPU, on problems that are usual for the operation; the legal "
            "candidates of each variant's quick subset, unless the command says otherwise. Every row is in compile.parquet.",
            "Estimate: the shared memory that the rules estimate, over what the compiler allots, least and most; infinite "
            "where it allots none.",
            "Over the limit: candidates with more shared memory than a block of the architecture has; they would not load.",
            "Spilled: 32-bit registers of one thread that live in memory.",
            "Tensor cores: share of the compiled 16-bit candidates whose code has matrix instructions. Seconds: median of "
            "one compile.",
            *notes,
        ],
    }


def _exceptions(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A table of the candidates that a reader must know by name; none where there are none."""
    lines = []
    for row in rows:
        ratio = row["estimate_ratio"]
        reasons = [] if row["outcome"] == "ok" else [row["outcome"]]
        if ratio is not None and not BAND[0] <= ratio <= BAND[1]:
            reasons.append(f"estimate {ratio:.2f}")
        if row["over_limit"]:
            reasons.append("over the limit")
        if reasons:
            detail = " ".join((row["detail"] or "").split())[:80]
            lines.append(
                [
                    row["operation"],
                    row["target"],
                    row["candidate"],
                    row["shared_bytes"],
                    ", ".join(reasons),
                    detail,
                ]
            )
    if not lines:
        return []
    title = f"Outside {BAND[0]} to {BAND[1]}, over the limit, or failed: {len(lines)}"
    if len(lines) > _MOST_LISTED:
        title += f", of which the first {_MOST_LISTED}"
    columns = ["operation", "target", "candidate", "shared bytes", "why", "detail"]
    return [{"title": title, "columns": columns, "rows": lines[:_MOST_LISTED]}]


def _first(rows: Iterable[Any], limit: int | None) -> Iterable[Any]:
    """At most so many of each variant."""
    seen: dict[str, int] = {}
    for row in rows:
        name = row.request.candidate.variant
        seen[name] = seen.get(name, 0) + 1
        if limit is None or seen[name] <= limit:
            yield row


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] if text else None


def _command(arguments: Sequence[str]) -> str:
    return " ".join(["python benchmarks/compile_table.py", *arguments])


if __name__ == "__main__":
    sys.exit(main())
