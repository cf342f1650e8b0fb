"""``kernelcast evaluate --train-devices``: how good forecasts for a new device are with few problems measured there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernelcast.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from kernelcast.training.transfer import TransferEvaluation

_LABELS = {
    "default": "default alone",
    "best_fixed": "best fixed there",
    "analytic": "analytic roofline",
    "random": "random order",
}


def numbers(text: str | None) -> tuple[int, ...]:
    """The numbers of measured problems that an option names, by commas.

    Raises:
        SettingsError: something else than numbers.
    """
    from kernelcast.training.transfer import MEASURED

    if text is None:
        return MEASURED
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise SettingsError(
            f"--target-problems is {text!r}; it must be numbers by commas, such as 0,10,30,100."
        )
    return tuple(map(int, parts))


def evaluate(
    store: Path,
    operation: str,
    *,
    train_devices: list[str],
    test_device: str,
    measured: tuple[int, ...],
    backends: list[str] | None,
    seeds: int,
    on_progress: Callable[[int, int], None],
) -> TransferEvaluation:
    """Read both sides and evaluate."""
    from kernelcast.datasets import Store
    from kernelcast.training.data import read_problems
    from kernelcast.training.transfer import evaluate_transfer

    held = Store(store)
    source = [
        item
        for name in train_devices
        for item in read_problems(held, operation, device=name, backends=backends).problems
    ]
    target = read_problems(held, operation, device=test_device, backends=backends).problems
    return evaluate_transfer(source, target, measured=measured, seeds=seeds, on_progress=on_progress)


def show(out: Console, result: TransferEvaluation) -> None:
    """Print the curve."""
    out.print(
        f"[bold]{result.operation}[/bold] on [bold]{result.test_device}[/bold], "
        f"from {', '.join(result.train_devices)} ({result.train_problems} problems)"
    )
    out.print(
        f"{result.test_problems} problems judged, the same for every number measured; mean of {result.seeds} "
        f"draw{'s' if result.seeds > 1 else ''}"
    )
    out.print(_table(result))


def _table(result: TransferEvaluation) -> Table:
    from rich.table import Table

    ks = list(result.points[0].efficiency)
    table = Table(
        title="efficiency@k with the default among the k: geometric mean (5th percentile)",
        title_justify="left",
    )
    table.add_column("ranking", no_wrap=True)
    for k in ks:
        table.add_column(f"@{k}", justify="right")
    for point in result.points:
        table.add_row(f"{point.measured} measured there", *_cells(point.efficiency_with_default))
    for point in result.points:
        if point.target_only is not None:
            table.add_row(f"{point.measured} measured, no other device", *_cells(point.target_only))
    for name, label in _LABELS.items():
        figures = result.baselines[name]
        table.add_row(label, *(_cells(figures) if figures is not None else ["-" for _ in ks]))
    return table


def _cells(figures: Any) -> list[str]:
    return [f"{each['geomean']:.4f}\n({each['p5']:.2f})" for each in figures.values()]
