"""``kernelcast select``: the ranking, or a verified selection, for one problem."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from kernelcast.cli.common import DefinitionArgument, DeviceOption, JsonOption


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("select")(select)


def select(
    operation: Annotated[str, typer.Argument(help="An operation, such as gemm.")],
    definition: DefinitionArgument = None,
    device: DeviceOption = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode", help="off, cached, predict, verify or tune. \\[default: $KERNELCAST_MODE, or verify]"
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many of the ranking to print.")] = 10,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="How many candidates a verification measures: 3.")
    ] = None,
    target_regret: Annotated[
        float | None,
        typer.Option(
            "--target-regret",
            help="Instead of --top-k: measure as few as keep the expected regret under this share, such as 0.005.",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="What the model saw, and why the runners-up lost.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Rank the candidates of a problem, verify the first few where the device is here, and select.

    For another device than this machine's it ranks by that device's model alone.

    Examples:

      kernelcast select gemm m=64 n=64 k=4096

      kernelcast select gemm m=4096 n=4096 k=11008 dtype=float16 --device a100

      kernelcast select softmax rows=64 columns=4096 --mode predict --explain
    """
    import numpy as np

    from kernelcast.cli.common import parse_problem, print_json, resolve_device
    from kernelcast.errors import ModelError, SettingsError
    from kernelcast.runtime import Selector
    from kernelcast.runtime.ranking import promotion

    hardware = resolve_device(device)
    problem = parse_problem(operation, definition or [], hardware)
    if top_k is not None and target_regret is not None:
        raise SettingsError(
            "--top-k and --target-regret exclude each other: the one or the other says how many."
        )
    selector = Selector(hardware, mode=mode, top_k=top_k or 3, target_regret=target_regret)
    selection = selector.select(problem)
    ranking = selector.rank(problem)
    latency_us = ranking.prediction.latency_us
    if len(ranking.table) and ranking.source == "analytic" and not np.isfinite(latency_us).any():
        train = f" Train a model: kernelcast train --op {operation} --device {hardware.name}"
        raise ModelError(
            f"Nothing ranks the candidates of {operation} on {hardware.name}: {ranking.reason}, which knows nothing of "
            f"their work.{'' if promotion(selector.models, hardware, operation) else train}"
        )
    rows: list[dict[str, Any]] = [
        {
            "rank": place + 1,
            "candidate": str(ranking.table[row]),
            "predicted_us": float(latency_us[row]) if ranking.prediction.covered[row] else None,
            "error_log": float(ranking.prediction.error_log[row]),
        }
        for place, row in enumerate(ranking.order()[:top].tolist())
    ]
    explained = selector.explain(selection) if explain else None
    if as_json:
        more = {} if explained is None else {"explanation": explained.to_dict()}
        print_json({"selection": selection.to_dict(), "ranking": rows, "ranked_by": ranking.source, **more})
        return
    _print(selection, rows, ranking)
    if explained is not None:
        from kernelcast.cli.common import console

        console().print(str(explained), soft_wrap=True, markup=False, highlight=False)


def _print(selection: Any, rows: list[dict[str, Any]], ranking: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kernelcast.cli.common import console

    out = console()
    by = f"model {ranking.model_version}" if ranking.source == "predicted" else "the roofline (no model)"
    table = Table(
        "rank", "candidate", "predicted us", "+-", title=f"{selection.problem} on {selection.device}, by {by}"
    )
    for row in rows:
        predicted = row["predicted_us"]
        table.add_row(
            str(row["rank"]),
            row["candidate"],
            "not covered" if predicted is None else f"{predicted:,.1f}",
            "" if predicted is None else f"{row['error_log']:.0%}",
        )
    out.print(table)
    ranked = len(ranking.table)
    out.print(f"{ranked} ranked candidate{'' if ranked == 1 else 's'}.")
    out.print(
        f"Selected: [bold]{selection.candidate}[/bold] ({selection.source}). {escape(selection.reason)}"
    )
    if not math.isnan(selection.measured_us):
        text = f"Measured {selection.measured_us:,.1f} us, among {selection.measured} candidates"
        if not math.isnan(selection.default_us):
            text += f"; the default {selection.default_us:,.1f} us: {selection.speedup:.2f}x"
        out.print(text + ".")
