"""``kernelcast demo``: the main job on this machine, end to end."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kernelcast.cli.common import JsonOption


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    operations: Annotated[
        str | None,
        typer.Option(
            "--op", "--operation", help="Only these operations, separated by commas. [default: all four]"
        ),
    ] = None,
    track: Annotated[bool, typer.Option("--track/--no-track", help="Write MLflow runs.")] = True,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Measure everything again: delete what an earlier demonstration kept."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure, train and select on this machine: four minutes on two quiet cores, at most about ten.

    What it measured is kept under KERNELCAST_HOME; a second run measures only what is missing, and trains again.

    Example:

      kernelcast demo --op gemm,softmax
    """
    from kernelcast import settings
    from kernelcast.cli.common import console, print_json, resolve_device, split_names, warn_if_noisy
    from kernelcast.datasets.journal import require_writable
    from kernelcast.demo import forget, run
    from kernelcast.demo_problems import OPERATIONS
    from kernelcast.errors import UnknownNameError

    chosen = split_names(operations) or list(OPERATIONS)
    for name in chosen:
        if name not in OPERATIONS:
            raise UnknownNameError("operation of the demonstration", name, OPERATIONS)
    device = resolve_device(None)
    if not as_json:
        console().print(
            f"[bold]kernelcast[/bold] on {device.name} ({device.architecture}, {device.cores} cores)"
        )
    require_writable(settings.store_dir())  # says what is wrong with it before anything is measured
    quiet = warn_if_noisy(device)
    if fresh:
        forget(device)
    with _Bars() as bars:
        result = run(device, operations=chosen, tracking=track, listener=bars.listener)
    if as_json:
        print_json(_plain(result))
    else:
        _print(result)
        if not quiet:
            console().print(
                "This machine was busy when the demonstration began, so these figures may mislead. When it is quiet, measure "
                "again with: kernelcast demo --fresh",
                style="yellow",
                soft_wrap=True,
            )
    if not result.complete:
        raise typer.Exit(130)


class _Bars:
    """One bar on standard error, restarted at each stage."""

    def __init__(self) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        from kernelcast.cli.common import console
        from kernelcast.demo import Listener

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=console(stderr=True),
        )
        self._console = console(stderr=True)
        self._task: Any = None
        self.listener = Listener(self._stage, self._collecting, self._training)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
        self._progress.stop()

    def _stage(self, heading: str) -> None:
        self._finish()
        if not self._console.is_terminal:
            self._console.print(heading)  # bars are drawn at the end alone where nobody watches
        self._task = self._progress.add_task(heading, total=None, now="")

    def _finish(self) -> None:
        if self._task is not None:
            task = self._progress.tasks[-1]
            total = task.total or 1
            self._progress.update(self._task, total=total, completed=total, now="")

    def _collecting(self, progress: Any) -> None:
        now = "" if progress.problem is None else str(progress.problem)[:48]
        self._progress.update(self._task, completed=progress.done, total=max(progress.total, 1), now=now)

    def _training(self, doing: str, share: float) -> None:
        self._progress.update(self._task, completed=share, total=1.0, now=doing)


def _print(result: Any) -> None:
    from rich.table import Table

    from kernelcast.cli.common import console

    out = console()
    for found in result.operations:
        if found.trained is None:
            continue
        title = f"{found.operation}: {found.problems} problems that the model never saw, k = 3"
        table = Table(title=title, title_justify="left")
        for name in (
            "problem",
            "selection",
            "predicted us",
            "measured us",
            "default us",
            "speed-up",
            "measured",
            "of best",
        ):
            table.add_column(
                name, justify="left" if name in ("problem", "selection") else "right", overflow="fold"
            )
        for row in found.rows:
            chosen = row.selection
            table.add_row(
                shape_text(chosen.problem),
                str(chosen.candidate),
                f"{chosen.predicted_us:,.0f}",
                f"{chosen.measured_us:,.0f}",
                f"{chosen.default_us:,.0f}",
                f"{chosen.speedup:.2f}x",
                f"{chosen.measured} of {chosen.candidates}",
                "" if row.efficiency is None else f"{row.efficiency:.1%}",
            )
        out.print(table)
        shown = "  ".join(f"@{k} {values['geomean']:.3f}" for k, values in found.efficiency.items())
        out.print(f"  the model's ranking, with the default among the k: efficiency {shown}")
        if found.achieved is not None:
            out.print(
                f"  the selections reach {found.achieved:.1%} of the best of every candidate measured (geometric mean)"
            )
        ranker = next((row.selection.model_version for row in found.rows), "")
        ranked_by = f"model {ranker}" if ranker else "the roofline"
        state = "promoted" if found.trained.promoted else f"not promoted; {ranked_by} ranked"
        out.print(f"  model {found.trained.model_dir.name}: {state}. {found.trained.reason}\n", style="dim")
    if not result.complete:
        out.print("Interrupted. The same command goes on from here.")
        return
    out.print(f"Done in {result.seconds / 60:.1f} minutes.")
    for name, where, how in (
        ("store", result.store, "kernelcast data summary"),
        ("models", result.models, "kernelcast models list"),
        (
            "tracking",
            result.tracking_uri,
            f"mlflow ui --backend-store-uri {result.tracking_uri} --host 127.0.0.1",
        ),
        ("report", result.report, "open it in a browser"),
    ):
        out.print(f"  {name:9} {where}", soft_wrap=True)
        out.print(f"  {'':9} {how}", style="dim", soft_wrap=True)


def shape_text(problem: Any) -> str:
    """A problem in short: its dimensions, and the options that are not the operation's defaults."""
    from kernelcast.kernels import operation

    defaults = {option.name: option.default for option in operation(problem.operation).schema.options}
    shown = [f"{name}={size}" for name, size in problem.dims]
    shown += [
        name if value is True else f"{name}={value}"
        for name, value in problem.options
        if value != defaults.get(name)
    ]
    return " ".join(shown)


def _plain(result: Any) -> dict[str, Any]:
    return {
        "device": result.device.name,
        "seconds": result.seconds,
        "complete": result.complete,
        "store": str(result.store),
        "models": str(result.models),
        "report": str(result.report),
        "tracking_uri": result.tracking_uri,
        "operations": [
            {
                "operation": found.operation,
                "held_out_problems": found.problems,
                "efficiency_with_default": found.efficiency,
                "selections_efficiency": found.achieved,
                "model": None if found.trained is None else str(found.trained.model_dir),
                "promoted": found.trained is not None and found.trained.promoted,
                "reason": "" if found.trained is None else found.trained.reason,
                "selections": [
                    {
                        **row.selection.to_dict(),
                        "speedup": row.selection.speedup,
                        "efficiency": row.efficiency,
                    }
                    for row in found.rows
                ],
            }
            for found in result.operations
        ],
    }
