"""``kernelcast import``: measurements that other tools made. One command an importer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from kernelcast.cli.common import JsonOption, StoreOption, console, print_json, resolve_device, resolve_store
from kernelcast.datasets.importing import (
    Importer,
    ImportOption,
    ImportSummary,
    OnProgress,
    import_files,
    importers,
)
from kernelcast.errors import SettingsError


def attach(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Import measurements that other tools made.", no_args_is_help=True)
    for importer in importers().values():
        _add(group, importer)
    app.add_typer(group, name="import")


def _add(group: typer.Typer, importer: type[Importer]) -> None:
    # Files that state device and workload need not be told.
    needed: Any = None if importer.self_describing else ...
    help_text = (
        f"{importer.doc}\n\nAll files are read before anything is kept: a broken one leaves the store as it was. "
        "Importing the same file again changes nothing.\n\n"
        f"Example: kernelcast import {importer.name} {importer.example}"
    )

    def run(
        files: Annotated[list[str], typer.Argument(metavar="FILE...", help="A path, or FILE.zip:MEMBER.")],
        device: Annotated[
            str | None, typer.Option("--device", help="The device in the table that they were measured on.")
        ] = needed,
        workload: Annotated[
            str, typer.Option("--workload", help="A name for this set of problems.")
        ] = needed,
        max_size: Annotated[
            str | None,
            typer.Option(
                "--max-size",
                help="Refuse a file that unpacks to more, such as 8GiB. \\[default: the format's own limit]",
                show_default=False,
            ),
        ] = None,
        store: StoreOption = None,
        as_json: JsonOption = False,
        **given: str | None,
    ) -> None:
        target = resolve_store(store)
        with _progress(f"Importing {importer.name}") as report:
            summary = import_files(
                importer.name,
                files,
                device=None if device is None else resolve_device(device),
                workload=workload or "",
                store=target,
                options={
                    option.name: value
                    for option in importer.options
                    if (value := given[_parameter(option)]) is not None
                },
                max_bytes=None if max_size is None else _size_bytes(max_size),
                on_progress=report,
            )
        if as_json:
            print_json({"store": str(target), **vars(summary)})
        else:
            print(_sentence(summary))

    _spell_out(run, importer)
    group.command(importer.name, help=help_text, no_args_is_help=True)(run)


def _parameter(option: ImportOption) -> str:
    # A prefix: an option may have the name of one that every importer has, or of a word of Python.
    return f"given_{option.name.replace('-', '_')}"


def _spell_out(run: Any, importer: type[Importer]) -> None:
    """Give a command the importer's own options in the place of ``**given``: typer reads a function's signature."""
    signature = inspect.signature(run, eval_str=True)
    *common, _ = signature.parameters.values()
    own = [
        inspect.Parameter(
            _parameter(option),
            inspect.Parameter.KEYWORD_ONLY,
            default=... if option.required else None,
            annotation=Annotated[
                str if option.required else str | None,
                typer.Option(*_spellings(option), help=option.doc.replace("[", "\\[")),
            ],
        )
        for option in importer.options
    ]
    run.__signature__ = signature.replace(parameters=[*common, *own])
    run.__annotations__ = {each.name: each.annotation for each in (*common, *own)}


def _spellings(option: ImportOption) -> list[str]:
    # The operation is --op and --operation to every command.
    return [*(["--op"] if option.name == "operation" else []), f"--{option.name}"]


def _size_bytes(text: str) -> int:
    """``"8GiB"`` -> bytes.

    Raises:
        SettingsError: it is no size.
    """
    found = re.fullmatch(r"(\d{1,9})\s*(B|KiB|MiB|GiB)", text.strip())
    if found is None or not int(found[1]):
        raise SettingsError(f"--max-size is {text!r}; it must be a size such as 512MiB or 8GiB.")
    return int(found[1]) << {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}[found[2]]


def _sentence(summary: ImportSummary) -> str:
    files = "1 file" if summary.files == 1 else f"{summary.files} files"
    dropped = f", {summary.dropped:,} failed repeats left out" if summary.dropped else ""
    return (
        f"{files}: {summary.rows:,} rows, {summary.problems:,} problems, {summary.added:,} records new, "
        f"{summary.known:,} known{dropped}; {summary.seconds:.1f} s."
    )


@contextmanager
def _progress(title: str) -> Iterator[OnProgress]:
    """A progress bar on standard error, where that is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    # Where standard error is a file, even an empty bar would leave a line.
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report
