"""Counting what a table of records holds."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from kernelcast.datasets.segments import require_arrow

if TYPE_CHECKING:
    import pyarrow as pa

_GROUPED_BY = ("operation", "device", "workload", "source")
_REPEATED = (*_GROUPED_BY, "outcome", "device_fingerprint", "problem_id", "candidate_key")

#: The columns that a summary is made of.
SUMMARY_COLUMNS = (*_REPEATED, "sample_count")


def summary_of(table: pa.Table) -> dict[str, Any]:
    """Totals, and counts by operation, device, workload, source and outcome, as plain values.

    Args:
        table: the columns of :data:`SUMMARY_COLUMNS`, in any order of rows.
    """
    pa = require_arrow()
    texts: dict[str, list[str]] = {}
    columns: dict[str, Any] = {"samples": table.column("sample_count")}
    # Numbers instead of texts: millions of rows are counted in a second.
    for name in _REPEATED:
        encoded = table.column(name).unify_dictionaries().combine_chunks()
        texts[name], columns[name] = encoded.dictionary.to_pylist(), encoded.indices
    codes = pa.table(columns)

    by_problem = _counts(codes, ("device_fingerprint", "problem_id", "candidate_key"))
    candidates = [
        row["count"] for row in _counts(by_problem, ("device_fingerprint", "problem_id")).to_pylist()
    ]
    problems = _counts(_counts(codes, (*_GROUPED_BY, "problem_id")), _GROUPED_BY).to_pylist()
    problems_of = {tuple(row[name] for name in _GROUPED_BY): row["count"] for row in problems}
    counted = codes.group_by([*_GROUPED_BY, "outcome"]).aggregate([("samples", "sum"), ("samples", "count")])
    groups: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in counted.to_pylist():
        key = tuple(row[name] for name in _GROUPED_BY)
        group = groups.setdefault(
            key,
            {
                **{name: texts[name][row[name]] for name in _GROUPED_BY},
                "records": 0,
                "problems": problems_of[key],
                "samples": 0,
                "outcomes": {},
            },
        )
        group["records"] += row["samples_count"]
        group["samples"] += row["samples_sum"]
        group["outcomes"][texts["outcome"][row["outcome"]]] = row["samples_count"]
    for group in groups.values():
        group["outcomes"] = dict(sorted(group["outcomes"].items()))
    return {
        "records": table.num_rows,
        "samples": sum(group["samples"] for group in groups.values()),
        "problems": len(_counts(codes, ("problem_id",))),
        "candidates_per_problem": {
            "min": min(candidates, default=0),
            "median": float(statistics.median(candidates)) if candidates else 0.0,
            "max": max(candidates, default=0),
        },
        "groups": sorted(groups.values(), key=lambda group: [group[name] for name in _GROUPED_BY]),
    }


def _counts(table: pa.Table, names: tuple[str, ...]) -> pa.Table:
    """Each combination that occurs, and in how many rows: ``count``."""
    found = table.select(list(names)).group_by(list(names)).aggregate([([], "count_all")])
    return found.rename_columns([*found.column_names[:-1], "count"])
