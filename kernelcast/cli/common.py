"""What the commands share: options, parsing of problems and devices, and output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.errors import InvalidProblemError

if TYPE_CHECKING:
    from rich.console import Console

    from kernelcast.kernels import Device, Operation, Problem

JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON on standard output.")]
StoreOption = Annotated[
    Path | None,
    # The bracket is escaped: rich would take it for markup.
    typer.Option(
        "--store", help="Folder of measurements. \\[default: $KERNELCAST_HOME/store]", show_default=False
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Name of a device in the table; this machine's where left out."),
]
DefinitionArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="The problem: m=4096 n=4096 k=11008 dtype=float16"),
]


def console(*, stderr: bool = False) -> Console:
    """A rich console; as wide as the terminal, or 140 columns into a file or a pipe."""
    import os
    import sys

    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, width=None if terminal else 140)


def print_json(data: Any) -> None:
    """Print JSON on standard output; numbers that JSON lacks (NaN, infinities) become null."""
    print(json.dumps(_plain(data), indent=2, allow_nan=False))


def write_json(path: Path, data: Any) -> None:
    """Write JSON to a file; numbers that JSON lacks become null."""
    path.write_text(json.dumps(_plain(data), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def split_names(text: str | None) -> list[str] | None:
    """``"timm,random"`` -> ``["timm", "random"]``; None stays None."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_values(words: Iterable[str]) -> dict[str, int | str | bool]:
    """``["m=64", "layout=nt", "causal=true"]`` -> typed values.

    Raises:
        InvalidProblemError: a word is not of the form NAME=VALUE, or a name comes twice.
    """
    values: dict[str, int | str | bool] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name or not text:
            raise InvalidProblemError(f"{word!r} is not of the form NAME=VALUE, such as m=4096.")
        if name in values:
            raise InvalidProblemError(f"{name} is given twice.")
        values[name] = _typed(text)
    return values


def _typed(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text


def resolve_operation(name: str) -> Operation:
    """The operation of that name in the catalogue, or else built from the home store's records of it."""
    from kernelcast import settings
    from kernelcast.errors import UnknownNameError
    from kernelcast.kernels import operation

    try:
        return operation(name)
    except UnknownNameError:
        from kernelcast.datasets.recorded import register_recorded

        return register_recorded(settings.store_dir(), name)


def parse_problem(operation: str, words: Sequence[str], device: Device) -> Problem:
    """A problem from the words of the command line, for a device: the thread count is filled in on a CPU."""
    from kernelcast.kernels.detect import check_threads, default_threads

    values = parse_values(words)
    if "self" in values:  # no schema's name, and in Python's way below
        raise InvalidProblemError(f"{operation} has no dimension or option 'self'.")
    if device.kind == "cpu" and "threads" not in values:
        values["threads"] = default_threads()
    if "threads" in values:
        check_threads(values["threads"], device)
    return resolve_operation(operation).schema.problem(**values)  # type: ignore[arg-type]


def resolve_device(name: str | None) -> Device:
    """The device of that name in the table, or this machine's own."""
    from kernelcast.kernels.detect import detect
    from kernelcast.kernels.devices import device

    return detect() if name is None else device(name)


def resolve_store(path: Path | None) -> Path:
    """The store's folder: the one given, or the home's."""
    from kernelcast import settings

    return settings.store_dir() if path is None else path


def warn_if_noisy(device: Device) -> bool:
    """Say on standard error if timings of this machine cannot be trusted now. Returns whether they can."""
    from kernelcast.datasets.calibration import calibrate

    found = calibrate(device, rounds=16)
    if not found.trustworthy:
        console(stderr=True).print(
            f"[yellow]Warning:[/yellow] this machine is busy: two equal products differ by {found.noise:.0%} of noise, and "
            f"twice the work takes {found.twice:.2f} times as long. What is measured now is kept, and may mislead; "
            "see kernelcast doctor.",
            soft_wrap=True,
        )
    return found.trustworthy
