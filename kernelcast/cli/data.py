"""``kernelcast data``: look after the store of measurements."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kernelcast.cli.common import JsonOption, StoreOption, console, print_json, resolve_store, split_names

if TYPE_CHECKING:
    from kernelcast.datasets.query import Conditions
    from kernelcast.datasets.store import RewriteResult

OperationOption = Annotated[
    str | None, typer.Option("--op", "--operation", help="Records of this operation.")
]
RecordedDeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Records of this device: its name or fingerprint."),
]
WorkloadsOption = Annotated[
    str | None, typer.Option("--workload", help="Records of these workloads: A,B,...")
]
OutcomeOption = Annotated[
    str | None, typer.Option("--outcome", help="Records with this outcome: ok, crash, ...")
]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="Records of this source, as the summary names it.")
]
VariantOption = Annotated[str | None, typer.Option("--variant", help="Records of this variant.")]

#: Seconds of the units of an age.
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def attach(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Look after the store of measurements.", no_args_is_help=True)
    for function in (summary, check, export, merge, prune, compact):
        group.command(function.__name__)(function)
    app.add_typer(group, name="data")


def summary(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Count what the store holds.

    Example: kernelcast data summary --json
    """
    from kernelcast.datasets.store import Store

    found = Store(resolve_store(store)).summary()
    if as_json:
        print_json(found)
        return
    _print_summary(found)


def _print_summary(found: dict[str, Any]) -> None:
    from rich.table import Table

    candidates = found["candidates_per_problem"]
    print(
        f"{found['store']}: {found['records']:,} records with {found['samples']:,} samples of {found['problems']:,} "
        f"problems, {found['size_bytes'] / 2**20:.1f} MiB in {_count(found['segments'], 'segment')} and "
        f"{_count(found['journals'], 'journal')}; {candidates['min']} to {candidates['max']} candidates per problem and device, median "
        f"{candidates['median']:g}."
    )
    table = Table(box=None)
    for title in ("operation", "device", "workload", "source", "outcomes"):
        # Fold: a name that is cut short cannot be copied into the next command.
        table.add_column(title, overflow="fold")
    for title in ("problems", "records", "samples"):
        table.add_column(title, justify="right")
    for group in found["groups"]:
        outcomes = ", ".join(f"{name} {count:,}" for name, count in group["outcomes"].items())
        figures = (f"{group[title]:,}" for title in ("problems", "records", "samples"))
        names = (group[title] for title in ("operation", "device", "workload", "source"))
        table.add_row(*names, outcomes, *figures)
    console().print(table)


def check(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Read every record and say what is broken. Exit status 1 if anything is.

    Example: kernelcast data check
    """
    from kernelcast.datasets.store import Store

    root = resolve_store(store)
    faults = Store(root).check()
    if as_json:
        print_json({"store": str(root), "faults": faults})
    elif faults:
        for fault in faults:
            print(fault)
    else:
        print(f"{root}: no faults.")
    if faults:
        raise typer.Exit(1)


def export(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .parquet or a .csv file; a .json file for t4.")
    ],
    store: StoreOption = None,
    operation: OperationOption = None,
    device: RecordedDeviceOption = None,
    workload: WorkloadsOption = None,
    outcome: OutcomeOption = None,
    source: SourceOption = None,
    variant: VariantOption = None,
    file_format: Annotated[
        Literal["t4"] | None,
        typer.Option(
            "--format",
            help="t4: one problem on one device for other auto-tuners. \\[default: by the file's ending]",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Write records to one file for other tools.

    Example: kernelcast data export gemm.parquet --op gemm --outcome ok
    """
    from kernelcast.datasets.store import Store

    conditions = _conditions(operation, device, workload, outcome, source, variant)
    found = Store(resolve_store(store))
    if file_format == "t4":
        from kernelcast.datasets.t4 import export_t4

        count = export_t4(found, path, overwrite=overwrite, **conditions)
    else:
        count = found.export(path, overwrite=overwrite, **conditions)
    print(f"{path}: {count:,} records.")


def merge(
    other: Annotated[Path, typer.Argument(metavar="FOLDER", help="Another store; it stays as it is.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add the records and devices of another store to this one.

    Example: kernelcast data merge /mnt/worker-3/store
    """
    from kernelcast.datasets.store import Store

    result = Store(resolve_store(store)).merge(other)
    if as_json:
        print_json(asdict(result))
    else:
        print(f"{result.added:,} records new, {result.known:,} known.")


def prune(
    store: StoreOption = None,
    operation: OperationOption = None,
    device: RecordedDeviceOption = None,
    workload: WorkloadsOption = None,
    outcome: OutcomeOption = None,
    source: SourceOption = None,
    variant: VariantOption = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            help="Records measured longer ago than this: 90d, 12h, 4w. Those whose time is unknown stay.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the records that meet every condition given.

    Example: kernelcast data prune --op gemm --outcome crash --dry-run
    """
    import time

    from kernelcast.datasets.store import Store

    target = Store(resolve_store(store))
    conditions = _conditions(operation, device, workload, outcome, source, variant)
    if older_than is not None:
        conditions["before"] = time.time() - _age_s(older_than)
    if dry_run:
        count = target.count_to_prune(**conditions)
        if as_json:
            print_json({"removed": 0, "matching": count})
        else:
            print(f"{count:,} records meet the conditions. Nothing was deleted.")
        return
    _print_rewrite(target.prune(**conditions), as_json)


def compact(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Turn all segments and finished journals into one segment, which reads faster.

    Example: kernelcast data compact
    """
    from kernelcast.datasets.store import Store

    _print_rewrite(Store(resolve_store(store)).compact(), as_json)


def _print_rewrite(result: RewriteResult, as_json: bool) -> None:
    if as_json:
        print_json(asdict(result))
        return
    left = (
        f"; {_count(result.journals_in_use, 'journal')} in use left alone" if result.journals_in_use else ""
    )
    print(
        f"{_count(result.removed, 'record')} deleted, {_count(result.records, 'record')} kept, from "
        f"{_count(result.segments, 'segment')} and {_count(result.journals, 'journal')}{left}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _age_s(text: str) -> float:
    """``"90d"`` -> seconds; the units are s, m, h, d and w.

    Raises:
        SettingsError: the text is not of this form.
    """
    from kernelcast.errors import SettingsError

    try:
        seconds = float(text[:-1]) * _UNITS_S[text[-1:]]
    except (KeyError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SettingsError(f"The age {text!r} is no number with s, m, h, d or w behind it, such as 90d.")
    return seconds


def _conditions(
    operation: str | None,
    device: str | None,
    workload: str | None,
    outcome: str | None,
    source: str | None,
    variant: str | None,
) -> Conditions:
    from kernelcast.datasets.record import OUTCOMES
    from kernelcast.errors import UnknownNameError

    if outcome is not None and outcome not in OUTCOMES:
        raise UnknownNameError("outcome", outcome, OUTCOMES)
    return {
        "operation": operation,
        "device": _recorded_name(device),
        "workloads": split_names(workload),
        "outcome": outcome,
        "source": source,
        "variant": variant,
    }


def _recorded_name(device: str | None) -> str | None:
    """The name under which records hold a device: an alias's own name; what is not in the table stays as it is."""
    from kernelcast.errors import UnknownNameError
    from kernelcast.kernels.devices import device as known_device

    if device is None:
        return None
    try:
        return known_device(device).name
    except UnknownNameError:
        return device
