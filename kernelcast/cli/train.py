"""``kernelcast train``: from measurements to a judged, registered and tracked model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kernelcast.cli.common import (
    DeviceOption,
    JsonOption,
    StoreOption,
    console,
    print_json,
    resolve_device,
    resolve_store,
    split_names,
)
from kernelcast.errors import ModelError

if TYPE_CHECKING:
    from kernelcast.training.train import OnProgress, TrainResult


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    operation: Annotated[str, typer.Option("--op", "--operation", help="Operation, such as gemm.")],
    device: DeviceOption = None,
    train_workloads: Annotated[
        str | None,
        typer.Option("--train-workloads", help="Workloads to train on, by commas; all if left out."),
    ] = None,
    from_devices: Annotated[
        str | None,
        typer.Option(
            "--from-devices",
            help="Other devices whose records to learn from as well, by commas: a100-sxm4-80gb",
        ),
    ] = None,
    holdout: Annotated[
        float, typer.Option("--holdout", help="Share of the shapes to hold out, for the scores.")
    ] = 0.2,
    draws: Annotated[
        int,
        typer.Option(
            "--draws",
            min=0,
            max=1000,
            help="Other hyperparameters to try, by cross-validation on the training problems. Each takes three fits, twice.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of the trees.")] = 0,
    track: Annotated[bool, typer.Option("--track/--no-track", help="Write an MLflow run.")] = True,
    compile_facts: Annotated[
        Literal["auto", "off"],
        typer.Option(
            "--compile-facts",
            help="auto: what the compiler made of candidates is among the features, where enough of them are compiled.",
        ),
    ] = "auto",
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model on measurements, judge it on held-out shapes, and promote it if it is better than what stands.

    Example:

      kernelcast train --op gemm --device a100-sxm4-80gb --train-workloads timm,random

      kernelcast train --op gemm --device h100-sxm5-80gb --from-devices a100-sxm4-80gb
    """
    from kernelcast import settings
    from kernelcast.datasets.store import Store
    from kernelcast.kernels.compile_cache import CompileCache
    from kernelcast.training.data import ProblemSet, nothing_to_compare, read_problems
    from kernelcast.training.train import train as train_model

    held = Store(resolve_store(store))
    others = [
        item
        for name in split_names(from_devices) or ()
        for item in read_problems(held, operation, device=name).problems
    ]
    try:
        found = read_problems(
            held, operation, device=device or resolve_device(None), workloads=split_names(train_workloads)
        )
    except ModelError:
        if not others:
            raise
        found = ProblemSet([], 0, 0)  # nothing was measured on the new device yet
    if not found.problems and not others:
        raise ModelError(nothing_to_compare(found.left_out))
    with _progress() as on_progress:
        result = train_model(
            found.problems,
            device=found.problems[0].device if found.problems else resolve_device(device),
            seed=seed,
            holdout=holdout,
            models_dir=settings.models_dir(),
            tracking=track,
            compile_cache=CompileCache(settings.compile_cache_dir()) if compile_facts == "auto" else None,
            others=others,
            draws=draws,
            on_progress=on_progress,
        )
    if as_json:
        print_json(
            {
                "model_dir": str(result.model_dir),
                "run_id": result.run_id,
                "problems": len(found.problems),
                "left_out": found.left_out,
                "held_out": result.scores,
                "promoted": result.promoted,
                "reason": result.reason,
                "drawn": result.drawn,
                "tracking_warning": result.tracking_warning,
            }
        )
    else:
        _show(result, len(found.problems), found.left_out, len(others))


def _show(result: TrainResult, problems: int, left_out: int, others: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    out = console()
    out.print(
        f"Trained on {problems} problems{f' and {others} of other devices' if others else ''}; the model lies in {escape(str(result.model_dir))}",
        soft_wrap=True,
    )
    if left_out:
        out.print(f"{left_out} problems with fewer than two working candidates are left out.")
    if result.scores:
        scores = result.scores
        ks = list(scores["rankers"]["model"]["with_default"])
        table = Table(
            "ranking",
            *(f"@{k}" for k in ks),
            title=f"Efficiency with the default among the k, on {scores['problems']} problems ({scores['how']})",
            title_justify="left",
        )
        for name, kinds in scores["rankers"].items():
            table.add_row(name.replace("_", " "), *(f"{kinds['with_default'][k]['geomean']:.4f}" for k in ks))
        out.print(table)
    if result.drawn:
        out.print(escape(result.drawn["reason"]), soft_wrap=True)
    verdict = "[green]Promoted.[/green]" if result.promoted else "[yellow]Not promoted.[/yellow]"
    out.print(f"{verdict} {escape(result.reason)}", soft_wrap=True)
    if result.run_id:
        out.print(f"Tracked as MLflow run {result.run_id}.")


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A progress bar on standard error, gone at the end; nothing where that is not a terminal."""
    from rich.progress import Progress

    errors = console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("Reading", total=1.0)
        yield lambda stage, share: bar.update(task, description=stage.capitalize(), completed=share)
