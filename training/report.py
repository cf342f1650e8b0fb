"""The report: one self-contained HTML page on registered models and what they did on held-out problems.

The page loads nothing and needs no script. All text from data is escaped.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import ArtifactError, ModelError
from kernelcast.training import report_template as html
from kernelcast.training.held_out import read_record
from kernelcast.training.metrics import geometric_mean
from kernelcast.training.registry import RegisteredModel
from kernelcast.training.report_plots import inline, plots_of

#: Rows of the table of held-out problems; the page says how many were left out.
_MAX_PROBLEMS = 400

_CAPTIONS = {
    "predicted_against_measured": "Predicted against measured latency of candidates of held-out problems; "
    "on the dashed line they are equal.",
    "efficiency_over_k": "Efficiency over the number of candidates measured, geometric mean over held-out problems.",
    "regret_by_size": "Regret of each held-out problem by its size: the share of time that the best candidate would save.",
    "winner_map": "Which candidate wins where: every held-out problem at two of its sizes. Above the candidate that was "
    "fastest, below the one that the model ranks first.",
    "feature_importance": "The features that the ranking rests on, by their share of the gain.",
}


def write_report(
    path: Path,
    models: Sequence[RegisteredModel],
    *,
    title: str = "kernelcast: trained models",
    notes: Mapping[Path, str] | None = None,
) -> Path:
    """Write the page, a section for each model.

    Args:
        path: the file; one that is there is replaced.
        models: from the registry; one that is broken gets a section that says so.
        title: heading of the page.
        notes: a sentence to add to the section of the model in a folder.

    Raises:
        ModelError: there is no model to report on, or the file cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    if not models:
        raise ModelError("There is no trained model to report on. Train one with: kernelcast train")
    sections, rows = [], []
    for number, model in enumerate(models, start=1):
        record, problem = _record_of(model)
        rows.append(_overview(model, record))
        sections.append(
            _section(model, record, problem, f"model-{number}", (notes or {}).get(model.path, ""))
        )
    contents = "".join(
        f'<li><a href="#model-{number}">{html.text(_heading(model))}</a></li>'
        for number, model in enumerate(models, start=1)
    )
    body = "\n".join(
        [
            f"<h1>{html.text(title)}</h1>",
            '<p class="soft">Every figure is of problems whose shapes the judged model had not seen. Efficiency@k is the '
            "best latency that was measured in a problem over the best among the first k of a ranking; the speed-up is "
            "the default's latency over that of the best of 3, the default among them.</p>",
            f"<nav><ul>{contents}</ul></nav>" if len(models) > 1 else "",
            html.table(
                (
                    "operation",
                    "device",
                    "version",
                    "problems held out",
                    "efficiency@1",
                    "efficiency@3",
                    "speed-up",
                ),
                rows,
                caption="Geometric means over held-out problems; @3 with the default among the three.",
                numbers_from=3,
            ),
            *sections,
        ]
    )
    # Replaced whole: a reader never sees half a page.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        partial.write_text(html.page(title, body), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ModelError(
            f"The report {path} cannot be written: {error.strerror or error}. Name another file with --output."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _record_of(model: RegisteredModel) -> tuple[dict[str, Any] | None, str]:
    if model.broken:
        return None, model.broken
    try:
        return read_record(model.path, model.manifest), ""
    except ArtifactError as error:
        return None, str(error)


def _heading(model: RegisteredModel) -> str:
    return f"{model.operation} on {model.device}, {model.version}"


def _overview(model: RegisteredModel, record: Mapping[str, Any] | None) -> tuple[str, ...]:
    names = (model.operation, model.device, model.version)
    if record is None or not record["problems"]:
        return (*names, "0", "–", "–", "–")
    curves, ks = np.array(record["curves_with_default"]["model"]), record["ks"]
    speed_ups = [value for item in record["problems"] if (value := _speed_up(item)) is not None]
    return (
        *names,
        str(len(curves)),
        f"{geometric_mean(curves[:, ks.index(1)]):.3f}",
        f"{geometric_mean(curves[:, ks.index(3)]):.3f}",
        f"{geometric_mean(np.array(speed_ups)):.2f}×" if speed_ups else "–",
    )


def _section(
    model: RegisteredModel, record: Mapping[str, Any] | None, problem: str, anchor: str, note: str
) -> str:
    parts = [f'<section id="{anchor}"><h2>{html.text(_heading(model))}</h2>']
    facts = model.facts
    gate = facts.get("gate", {})
    if gate:
        verdict = "Passed the gate." if gate["promoted"] else "Did not pass the gate."
        parts.append(f'<p class="verdict">{verdict} {html.text(gate["reason"])}</p>')
    if problem:
        parts.append(f'<p class="verdict">{html.text(problem)}</p>')
    if note:
        parts.append(f"<p>{html.text(note)}</p>")
    if facts:
        parts.append(html.facts(_facts(model)))
    if record is not None:
        if record["problems"]:
            parts.append("<h3>Efficiency against the baselines</h3>")
            parts += [_efficiencies(record, "curves_with_default"), _efficiencies(record, "curves")]
        plots = plots_of(record)
        if plots:
            figures = [
                html.figure(inline(svg, f"{anchor}-{name}"), _CAPTIONS[name]) for name, svg in plots.items()
            ]
            parts.append(f'<h3>Plots</h3><div class="plots">{"".join(figures)}</div>')
        if record["problems"]:
            parts.append("<h3>Held-out problems</h3>" + _problems(record))
    parts.append("</section>")
    return "\n".join(parts)


def _facts(model: RegisteredModel) -> list[tuple[str, object]]:
    facts = model.facts
    device = facts["device"]
    workloads = ", ".join(f"{name or 'no workload'} ({count})" for name, count in facts["workloads"].items())
    dtypes = ", ".join(f"{name} ({count})" for name, count in facts["dtypes"].items())
    return [
        ("Standing", "champion: selections use it" if model.champion else "not the champion"),
        ("Device", f"{device['name']}: {device['vendor']} {device['architecture']}, {device['cores']} cores"),
        (
            "Trained on",
            f"{facts['problems']} problems of {facts['shapes']} shapes, {facts['measurements']} measurements",
        ),
        ("Failures", f"{facts['failures']} candidates that did not work"),
        ("Workloads", workloads),
        ("Dtypes", dtypes),
        ("Held out", facts["held_out"].get("how", "nothing")),
        ("Dataset hash", facts["dataset_hash"]),
        ("Seed", facts["seed"]),
        ("Trees", _hyperparameters(facts["hyperparameters"])),
        ("Trained at", facts["created_at"]),
        ("Software", ", ".join(f"{name} {found}" for name, found in facts["libraries"].items())),
    ]


def _hyperparameters(values: Mapping[str, Any]) -> str:
    shown = ("n_estimators", "max_depth", "learning_rate", "min_child_weight", "focus")
    return ", ".join(f"{name} {values[name]:g}" for name in shown if name in values)


def _efficiencies(record: Mapping[str, Any], kind: str) -> str:
    ks = record["ks"]
    rows: list[tuple[str, ...]] = []
    for name, values in record[kind].items():
        curves = np.array(values)
        label = name.replace("_", " ")
        rows.append((label, "geometric mean", *(f"{geometric_mean(column):.4f}" for column in curves.T)))
        if name == "model":
            rows.append(
                (label, "5th percentile", *(f"{value:.4f}" for value in np.percentile(curves, 5, axis=0)))
            )
            rows.append((label, "worst", *(f"{value:.4f}" for value in curves.min(axis=0))))
    which = "with the default among the k" if kind == "curves_with_default" else "of the ranking alone"
    return html.table(
        ("ranking", "over problems", *(f"k = {k}" for k in ks)),
        rows,
        caption=f"Efficiency@k {which}, on {len(record['problems'])} held-out problems.",
        numbers_from=2,
        own=(0,),
    )


def _problems(record: Mapping[str, Any]) -> str:
    curves, ks = np.array(record["curves_with_default"]["model"]), record["ks"]
    regret = 1 - curves[:, ks.index(3)]
    order = np.argsort(-regret, kind="stable")[:_MAX_PROBLEMS]
    rows = []
    for index in order:
        item = record["problems"][index]
        speed_up = _speed_up(item)
        rows.append(
            (
                item["problem"],
                item["workload"] or "–",
                item["verified"],
                item["candidates"],
                _microseconds(item["default_us"]),
                _microseconds(item["verified_us"]),
                _microseconds(item["best_us"]),
                "–" if speed_up is None else f"{speed_up:.2f}×",
                f"{100 * regret[index]:.1f}%",
            )
        )
    left_out = len(curves) - len(rows)
    return html.table(
        (
            "problem", "workload", "selection of 3", "candidates", "default (us)", "selection (us)", "best (us)",
            "speed-up", "regret",
        ),
        rows,
        caption="The selection is the fastest of 3, the default among them; the largest regret first."
        + (f" {left_out} problems of smaller regret are left out." if left_out else ""),
        numbers_from=3,
    )  # fmt: skip


def _speed_up(item: Mapping[str, Any]) -> float | None:
    """The default's latency over the selection's; None where either did not work or the data have no default."""
    default_us, selected_us = item["default_us"], item["verified_us"]
    return default_us / selected_us if default_us and selected_us else None


def _microseconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
