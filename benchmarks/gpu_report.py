"""What the GPU check found: gathered from the children's lines, judged, and written as ``summary.json`` and ``summary.md``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_tables import markdown_table, plain, replace_text, shown
from gpu_tasks import Line, TaskResult

#: Outcomes that mean a kernel or its rules are wrong. ``out_of_resources`` is not among them: what a device has left is
#: not always known before, and a candidate that does not load is never selected.
FAULTS = ("wrong_result", "crash", "timeout", "compile_error")

_FAILURES_SHOWN = 40

Summary = dict[str, Any]


def gather_checks(results: Sequence[TaskResult]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(one dict a variant, one dict a failure) of the tasks that compare with the reference.

    A variant has ``operation``, ``variant``, ``checked``, ``ok``, ``failed``, ``dtypes`` (those checked) and ``note``: why
    it was never legal, if so.
    """
    from kernelcast.kernels import Candidate, Problem

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    failures = []
    for result in results:
        spec = result.task.spec
        for name in spec["variants"]:
            rows.setdefault(
                (spec["operation"], name),
                {
                    "operation": spec["operation"],
                    "variant": name,
                    "checked": 0,
                    "ok": 0,
                    "failed": 0,
                    "dtypes": [],
                    "note": "",
                },
            )
        for line in result.lines:
            if line["kind"] == "refused":
                row = rows[spec["operation"], line["variant"]]
                row["note"] = row["note"] or line["detail"]
            if line["kind"] not in ("result", "died"):
                continue
            problem = Problem.from_dict(json.loads(line["item"][0]))
            candidate = Candidate.from_key(line["item"][1])
            row = rows[problem.operation, candidate.variant]
            row["checked"] += 1
            row["ok" if line["outcome"] == "ok" else "failed"] += 1
            if problem.dtype not in row["dtypes"]:
                row["dtypes"].append(problem.dtype)
            if line["outcome"] != "ok":
                failures.append(_failure("check", problem, candidate, line))
    for row in rows.values():
        row["note"] = "" if row["checked"] else row["note"]
    return list(rows.values()), failures


def gather_timings(lines: Sequence[Line]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(one dict a problem, one dict a failure) of the timing's lines."""
    from kernelcast.kernels import Candidate, Problem

    rows, failures = [], []
    for line in lines:
        if line["kind"] == "problem":
            problem = Problem.from_dict(json.loads(line["problem"]))
            row = {name: value for name, value in line.items() if name not in ("kind", "item", "failed")}
            rows.append(
                {
                    **row,
                    "problem": str(problem),
                    "operation": problem.operation,
                    "failed": len(line["failed"]),
                }
            )
            failures += [
                _failure("timing", problem, Candidate.from_key(each["candidate"]), each)
                for each in line["failed"]
            ]
        elif line["kind"] in ("died", "result") and line["item"][1] == "race":
            problem = Problem.from_dict(json.loads(line["item"][0]))
            failures.append(_failure("timing", problem, "the rounds", line))
    return rows, failures


def geometric_means(timings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each operation's speed-ups: the geometric mean of the best of ours over the default, and of ours where faster.

    The second is what a selection gives that keeps the default where that is faster: no speed-up counts below 1.
    """
    found = []
    for name in dict.fromkeys(row["operation"] for row in timings):
        logs = [
            math.log(row["speedup"])
            for row in timings
            if row["operation"] == name and row["speedup"] is not None
        ]
        if logs:
            found.append(
                {
                    "operation": name,
                    "problems": len(logs),
                    "faster": sum(value > 0 for value in logs),
                    "ours": math.exp(sum(logs) / len(logs)),
                    "selected": math.exp(sum(max(value, 0.0) for value in logs) / len(logs)),
                }
            )
    return found


def verdict(summary: Summary) -> tuple[int, str]:
    """The exit status and a sentence: 0 if all that was checked is right, 1 if a candidate was wrong or crashed."""
    faults = [failure for failure in summary["failures"] if failure["outcome"] in FAULTS]
    checked = sum(row["checked"] for row in summary["checks"])
    broken = [step["name"] for step in summary["steps"] if step["state"] == "failed"]
    if faults:
        first = faults[0]
        return 1, (
            f"{len(faults)} failures; the first: {first['candidate']} on {first['problem']}: {first['outcome']}, "
            f"{first['detail']}"
        )
    if broken:
        return 1, f"{len(broken)} steps could not be run: {', '.join(broken)}."
    if not checked:
        return 1, "Nothing was checked: the time was too short. Give a larger --budget."
    wrong = [row["name"] for row in summary["runtime"] if not row["held"]]
    if wrong:
        return 1, f"The run time does not hold: {', '.join(wrong)}."
    late = [step["name"] for step in summary["steps"] if step["state"] != "done"]
    rest = f" Not finished in time: {', '.join(late)}." if late else ""
    return 0, f"{checked:,} results were compared with the reference, and none is wrong.{rest}"


def write_summary(folder: Path, summary: Summary) -> None:
    """Write both files; each is whole at any moment."""
    replace_text(folder / "summary.json", json.dumps(plain(summary), indent=1, allow_nan=False) + "\n")
    replace_text(folder / "summary.md", as_markdown(summary))


def as_markdown(summary: Summary) -> str:
    """The summary as tables."""
    facts = summary["facts"]
    device = facts["device"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    clocks = ", ".join(f"{name} {value}" for name, value in facts.get("clocks", {}).items())
    parts = [
        f"# GPU check of {device['name']}\n",
        "\n".join(
            [
                f"- date: {summary['date']}",
                f"- device: {facts.get('gpu', device['name'])} ({device['architecture']}, {device['cores']} cores; "
                f"{'in the table' if facts['in_table'] else 'not in the table'})",
                f"- versions: {versions}" + (f", {facts['runtime']}" if "runtime" in facts else ""),
                *([f"- state: {clocks}"] if clocks else []),
                f"- time: {summary['seconds']:.0f} s of {summary['budget_s']:.0f} s{', quick' if summary['quick'] else ''}",
                f"- verdict: {shown(summary['verdict'])}",
            ]
        )
        + "\n",
        "## Results compared with the reference\n",
        markdown_table(
            ("operation: variant", "checked", "ok", "failed", "dtypes", "note"),
            [
                (
                    f"{row['operation']}: {row['variant']}",
                    row["checked"],
                    row["ok"],
                    row["failed"],
                    " ".join(row["dtypes"]),
                    row["note"],
                )
                for row in summary["checks"]
            ],
        ),
    ]
    failures = summary["failures"]
    if failures:
        parts += [
            f"## Failures ({len(failures)}; the first {min(len(failures), _FAILURES_SHOWN)})\n",
            markdown_table(
                ("candidate", "problem", "step", "outcome", "detail"),
                [
                    [each[name] for name in ("candidate", "problem", "step", "outcome", "detail")]
                    for each in failures[:_FAILURES_SHOWN]
                ],
            ),
        ]
    if summary["runtime"]:
        parts += [
            "## Run time\n",
            markdown_table(
                ("what", "holds", "detail"),
                [(row["name"], row["held"], row["detail"]) for row in summary["runtime"]],
            ),
        ]
    if summary["calibration"]:
        parts += [
            "## Calibration of the clock: a call, the same again, and a call that does it twice\n",
            markdown_table(
                ("work", "same / first", "a tie", "twice / first", "differs", "rounds"),
                [
                    [
                        row[name]
                        for name in ("name", "equal_ratio", "tie", "twofold_ratio", "differs", "rounds")
                    ]
                    for row in summary["calibration"]
                ],
            ),
        ]
    if summary["timings"]:
        parts += [
            "## The best of ours beside torch's default\n",
            "Chosen in the even rounds, judged in the odd ones. Above 1 ours is faster.\n",
            markdown_table(
                ("problem", "from", "torch us", "best us", "speed-up", "candidates", "failed", "best"),
                [
                    [
                        row[name]
                        for name in (
                            "problem",
                            "label",
                            "default_us",
                            "best_us",
                            "speedup",
                            "candidates",
                            "failed",
                            "best",
                        )
                    ]
                    for row in summary["timings"]
                ],
            ),
            markdown_table(
                ("geometric means", "problems", "ours faster", "best of ours", "the faster of both"),
                [
                    [row[name] for name in ("operation", "problems", "faster", "ours", "selected")]
                    for row in geometric_means(summary["timings"])
                ],
            ),
        ]
    if summary["fit"]:
        parts += [
            "## A model fitted on these measurements, on shapes that it did not see (efficiency, the default among the k)\n",
            markdown_table(
                ("operation", "problems", "candidates", "@1", "@3", "@5", "default alone", "note"),
                [
                    (
                        row["operation"],
                        row.get("problems"),
                        row.get("candidates"),
                        *(row.get("model", {}).get(k) for k in ("1", "3", "5")),
                        row.get("default"),
                        row.get("detail", ""),
                    )
                    for row in summary["fit"]
                ],
            ),
        ]
    if summary["left_out"]:
        parts += ["## Left out\n", "\n".join(f"- {shown(reason)}" for reason in summary["left_out"]) + "\n"]
    parts += [
        "## Steps\n",
        markdown_table(
            ("step", "state", "seconds", "started again", "detail"),
            [
                [step[name] for name in ("name", "state", "seconds", "restarts", "detail")]
                for step in summary["steps"]
            ],
        ),
    ]
    return "\n".join(parts)


def _failure(step: str, problem: Any, candidate: Any, line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "problem": str(problem),
        "candidate": str(candidate),
        "outcome": line["outcome"],
        "detail": line["detail"],
    }
