"""``kernelcast evaluate``: how good the forecasts are on problems that the model has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.cli.common import (
    DeviceOption,
    StoreOption,
    console,
    print_json,
    resolve_device,
    resolve_store,
    split_names,
    write_json,
)
from kernelcast.errors import ModelError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from kernelcast.training.data import ProblemSet
    from kernelcast.training.evaluate import Evaluation, Figures

_LABELS = {
    "default": "default alone",
    "best_fixed": "best fixed",
    "analytic": "analytic roofline",
    "random": "random order",
}


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("evaluate")(evaluate)


def evaluate(
    operation: Annotated[str, typer.Option("--op", "--operation", help="Operation, such as gemm.")],
    device: DeviceOption = None,
    train_workloads: Annotated[
        str | None,
        typer.Option(
            "--train-workloads", help="Workloads to fit on, by commas; all but the test ones if left out."
        ),
    ] = None,
    test_workloads: Annotated[
        str | None,
        typer.Option(
            "--test-workloads", help="Workloads to judge by, by commas; folds by shape if left out."
        ),
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(
            "--folds",
            help="Folds by shape: 5 (or as many as there are shapes) without test workloads; with them, also cross-validate the training side.",
        ),
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="Only candidates of these backends, by commas: triton")
    ] = None,
    train_devices: Annotated[
        str | None,
        typer.Option("--train-devices", help="Judge a new device: other devices to learn from, by commas."),
    ] = None,
    test_device: Annotated[
        str | None, typer.Option("--test-device", help="The new device; with --train-devices.")
    ] = None,
    target_problems: Annotated[
        str | None,
        typer.Option(
            "--target-problems",
            help="Problems measured on the new device, by commas: 0,10,30,100 if left out. The others are judged.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Models fitted; the figures are their mean.")] = 5,
    store: StoreOption = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Also write the figures as JSON; - is standard output."),
    ] = None,
) -> None:
    """Fit on some measured problems, rank others, and print efficiency@k beside the baselines.

    efficiency@k is the best measured latency over the best among the first k of the ranking: 1 is perfect.

    Example:

      kernelcast evaluate --op gemm --device a100-sxm4-80gb --train-workloads timm,random --test-workloads hf

      kernelcast evaluate --op gemm --train-devices a100-sxm4-80gb --test-device h100-sxm5-80gb --target-problems 30
    """
    from kernelcast.datasets import Store
    from kernelcast.training.data import nothing_to_compare, read_problems, shape_id, split_workloads
    from kernelcast.training.evaluate import evaluate as evaluate_split
    from kernelcast.training.evaluate import evaluate_folds

    train, test = split_names(train_workloads), split_names(test_workloads)
    if json_file not in (None, "-") and not Path(json_file).parent.is_dir():
        raise SettingsError(
            f"--json {json_file}: there is no folder {Path(json_file).parent}; make it first."
        )
    # With JSON on standard output, nothing else may go there.
    out = console(stderr=json_file == "-")
    if train_devices or test_device:
        unused: dict[str, object] = {
            "--device": device,
            "--train-workloads": train,
            "--test-workloads": test,
            "--folds": folds,
        }
        _evaluate_transfer(
            operation,
            train_devices,
            test_device,
            target_problems,
            split_names(backend),
            seeds,
            store,
            json_file,
            out,
            unused,
        )
        return
    if target_problems:
        raise SettingsError("--target-problems belongs to --train-devices and --test-device.")
    found = read_problems(
        Store(resolve_store(store)),
        operation,
        device=device or resolve_device(None),
        workloads=[*train, *(test or [])] if train else None,
        backends=split_names(backend),
    )
    if not found.problems:
        raise ModelError(nothing_to_compare(found.left_out))
    # As training does: few shapes make fewer folds.
    shapes = len({shape_id(item.problem) for item in found.problems})
    within = None
    with _progress() as on_progress:
        if test:
            others = sorted({item.workload for item in found.problems} - set(test))
            fitted, held_out = split_workloads(found.problems, train or others, test)
            result = evaluate_split(fitted, held_out, seeds=seeds, on_progress=on_progress)
            if folds is not None:
                within = evaluate_folds(fitted, folds, seeds=seeds, on_progress=on_progress)
        else:
            result = evaluate_folds(
                found.problems,
                max(min(5, shapes), 2) if folds is None else folds,
                seeds=seeds,
                on_progress=on_progress,
            )
    figures = result.to_json()
    if within is not None:
        figures["within_training"] = within.to_json()
    if json_file == "-":
        print_json(figures)
    elif json_file is not None:
        write_json(Path(json_file), figures)
    _show(out, result, found)
    if within is not None:
        _show(out, within, found)


def _evaluate_transfer(
    operation: str,
    train_devices: str | None,
    test_device: str | None,
    target_problems: str | None,
    backends: list[str] | None,
    seeds: int,
    store: Path | None,
    json_file: str | None,
    out: Console,
    others: dict[str, object],
) -> None:
    from kernelcast.cli import evaluate_transfer

    if not train_devices or not test_device:
        raise SettingsError(
            "Name both --train-devices and --test-device: a transfer is from the one to the other."
        )
    named = [name for name, value in others.items() if value not in (None, [], ())]
    if named:
        raise SettingsError(f"{', '.join(named)} cannot be used with --train-devices.")
    with _progress() as on_progress:
        result = evaluate_transfer.evaluate(
            resolve_store(store),
            operation,
            train_devices=split_names(train_devices) or [],
            test_device=test_device,
            measured=evaluate_transfer.numbers(target_problems),
            backends=backends,
            seeds=seeds,
            on_progress=on_progress,
        )
    if json_file == "-":
        print_json(result.to_json())
    elif json_file is not None:
        write_json(Path(json_file), result.to_json())
    evaluate_transfer.show(out, result)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, gone at the end; nothing where that is not a terminal."""
    from rich.progress import Progress

    errors = console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("Fitting", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(out: Console, result: Evaluation, found: ProblemSet) -> None:
    trained = ", ".join(result.train_workloads)
    split = f"{result.folds} folds by shape of {trained}" if result.folds else f"fitted on {trained}"
    judged = "" if result.folds else f", judged on {', '.join(result.test_workloads)}"
    out.print(f"[bold]{result.operation}[/bold] on [bold]{result.device}[/bold]: {split}{judged}")
    out.print(
        f"{result.train_problems} training and {result.test_problems} test problems; "
        f"{result.candidates_per_problem:.1f} candidates each "
        f"({result.candidates_per_problem_min} to {result.candidates_per_problem_max}); "
        f"mean of {result.seeds} seed{'s' if result.seeds > 1 else ''}"
    )
    if found.left_out:
        out.print(f"{found.left_out} problems with fewer than two working candidates are left out.")
    out.print(_table(result))
    floor = "unknown (too few repeats)"
    if result.noise_floor is not None:
        floor = f"{result.noise_floor:.4f} on {result.noise_floor_problems} problems with repeats"
    out.print(f"Noise floor of efficiency@1: {floor}")
    one, two = result.calibration["within_1"], result.calibration["within_2"]
    if one is not None and two is not None:
        out.print(f"Differences to the best within 1 and 2 predicted deviations: {one:.0%} and {two:.0%}")
    out.print(_adaptive_table(result))


def _table(result: Evaluation) -> Table:
    from rich.table import Table

    table = Table(title="efficiency@k: geometric mean (5th percentile, worst)", title_justify="left")
    table.add_column("ranking", no_wrap=True)
    for k in result.efficiency:
        table.add_column(f"@{k}", justify="right")
    rows: dict[str, Figures | None] = {
        "model": result.efficiency,
        "model, with the default": result.efficiency_with_default,
    }
    rows |= {label: result.baselines[name] for name, label in _LABELS.items()}
    for label, figures in rows.items():
        if figures is None:
            table.add_row(label, *["-" for _ in result.efficiency])
        else:
            table.add_row(
                label, *[f"{f['geomean']:.3f}\n({f['p5']:.2f}, {f['worst']:.2f})" for f in figures.values()]
            )
    return table


def _adaptive_table(result: Evaluation) -> Table:
    from rich.table import Table

    found = result.regret_over_measured
    table = Table(
        title="Candidates measured for each problem, the default among them, by target regret",
        title_justify="left",
    )
    for column in ("bound on", "target", "regret", "measured", "one k for all"):
        table.add_column(column, justify="right")
    for bound in ("mean", "problem"):
        for target, figures in found[bound].items():
            k = figures["fixed_k"]
            same = "more than 10" if k is None else f"{k} ({found['fixed'][str(k)]:.2%})"
            regret, measured = f"{figures['regret']:.2%}", f"{figures['measured']:.2f}"
            table.add_row(bound, f"{float(target):.1%}", regret, measured, same)
    return table
