"""``kernelcast tune``: search all candidates of one problem, on the device here or on recorded measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.cli.common import DefinitionArgument, DeviceOption, JsonOption, StoreOption
from kernelcast.cli.prior import log_latency, read_prior

if TYPE_CHECKING:
    from kernelcast.costmodel.search import Search
    from kernelcast.datasets.replay import Recording
    from kernelcast.kernels import Candidate, CandidateTable, Problem

#: After so many measurements a replay says how far it is.
_MILESTONES = (10, 20, 40, 100, 200, 400, 1000)
_MEASUREMENTS = 100


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tune")(tune)


def tune(
    operation: Annotated[str, typer.Option("--op", "--operation", help="Operation, such as gemm.")],
    definition: DefinitionArgument = None,
    device: DeviceOption = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="End after this long, compiling included: 90s, 10m, 2h. \\[default: 60s]",
            show_default=False,
        ),
    ] = None,
    prior_device: Annotated[
        str | None,
        typer.Option(
            "--prior-device",
            help="Start from the records of the same problem on these other devices, by commas.",
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="Search among the records of this store, and measure nothing."),
    ] = None,
    measurements: Annotated[
        int | None,
        typer.Option(
            "--measurements",
            min=1,
            help=f"With --replay: look up so many. \\[default: {_MEASUREMENTS}]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the search.")] = 0,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search all candidates of one problem: measure a few, learn from them, choose the next ones, until the time ends.

    Examples:

      kernelcast tune --op gemm m=64 n=64 k=4096 --budget 60s

      kernelcast tune --op kt_convolution --replay recorded --device a100-40gb --measurements 200

      kernelcast tune --op kt_convolution --replay recorded --device a100-40gb --prior-device a4000
    """
    from kernelcast.errors import SettingsError

    if replay is not None:
        for given, option in ((budget, "--budget"), (store, "--store")):
            if given is not None:
                raise SettingsError(f"With --replay nothing is measured: leave {option} out.")
        _replay(
            operation,
            definition or [],
            device,
            prior_device,
            replay,
            measurements or _MEASUREMENTS,
            seed,
            as_json,
        )
        return
    if measurements is not None:
        raise SettingsError("--measurements goes with --replay; here --budget ends the search.")
    _measure(operation, definition or [], device, prior_device, budget or "60s", store, seed, as_json)


def _measure(
    operation: str,
    definition: list[str],
    device: str | None,
    prior_device: str | None,
    budget: str,
    store: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Search on the device here."""
    from rich.markup import escape

    from kernelcast.cli.collect import parse_duration
    from kernelcast.cli.common import (
        console,
        parse_problem,
        print_json,
        resolve_device,
        resolve_store,
        split_names,
        warn_if_noisy,
    )
    from kernelcast.errors import KernelcastError
    from kernelcast.runtime import Selector

    hardware = resolve_device(device)
    problem = parse_problem(operation, definition, hardware)
    folder, others = resolve_store(store), split_names(prior_device)
    selector = Selector(hardware, mode="tune", budget_seconds=parse_duration(budget) or 0.0, store=folder)
    why = selector.measurer.hindrance()
    if why:
        raise KernelcastError(f"Nothing can be tuned: {why}. Search among records instead: --replay STORE.")
    ranking = selector.rank(problem, whole=True)
    prior, matches = read_prior(folder, operation, others, problem, ranking.table) if others else (None, [])
    warn_if_noisy(hardware)
    selection = selector.tune(problem, prior=prior, seed=seed)
    if as_json:
        print_json({"selection": selection.to_dict(), "prior": [each.to_dict() for each in matches]})
        return
    out = console()
    for each in matches:
        out.print(f"Prior: {each}", markup=False, soft_wrap=True)
    out.print(f"{selection.problem} on {selection.device}: {selection.candidates:,} legal candidates.")
    out.print(
        f"Selected: [bold]{selection.candidate}[/bold] ({selection.source}). {escape(selection.reason)}"
    )
    if not math.isnan(selection.measured_us):
        text = f"Measured {selection.measured_us:,.1f} us, among {selection.measured} candidates"
        if not math.isnan(selection.default_us):
            text += f"; the default {selection.default_us:,.1f} us: {selection.speedup:.2f}x"
        out.print(text + ".")


def _replay(
    operation: str,
    definition: list[str],
    device: str | None,
    prior_device: str | None,
    root: Path,
    measurements: int,
    seed: int,
    as_json: bool,
) -> None:
    """Search among records."""
    import numpy as np

    from kernelcast.cli.common import console, print_json, split_names
    from kernelcast.cli.models import device_name
    from kernelcast.costmodel.search import Search
    from kernelcast.datasets.replay import Recording
    from kernelcast.errors import SettingsError

    recording = Recording.read(root, operation, device=device)
    problem = _problem_of(recording, operation, definition)
    candidates = recording.tables[recording.problems.index(problem)]
    table = _table_of(candidates)
    latency = np.array([log_latency(recording.measurements[problem, each]) for each in candidates])
    others = split_names(prior_device)
    for name in others or ():
        if device_name(name) in (recording.device.name, recording.device.fingerprint):
            raise SettingsError(
                f"--prior-device {name} is the device that is replayed: its records are what the search looks for. Name "
                "other devices."
            )
    prior, matches = read_prior(root, operation, others, problem, table) if others else (None, [])
    search = Search(table, default=_default_row(operation, table), prior=prior, seed=seed)
    steps = _searched(search, latency, measurements)
    best = search.best
    report: dict[str, Any] = {
        "problem": str(problem),
        "device": recording.device.name,
        "prior_devices": others or [],
        "prior": [each.to_dict() for each in matches],
        "candidates": len(table),
        "measured": search.told,
        "failed": int(np.isnan(latency[search.rows]).sum()),
        "best": None if best is None else str(table[best]),
        "best_us": None if best is None else float(np.exp(latency[best])),
        "optimum_us": float(np.exp(np.nanmin(latency))) if np.isfinite(latency).any() else None,
        "steps": steps,
    }
    if as_json:
        print_json(report)
        return
    from rich.table import Table

    lines = Table(
        "measurements",
        "best us",
        "share of the optimum",
        title=f"{problem} on {recording.device.name}, as recorded",
    )
    for step in steps:
        lines.add_row(str(step["measurements"]), f"{step['best_us']:,.1f}", f"{step['share']:.1%}")
    out = console()
    for each in matches:
        out.print(f"Prior: {each}", markup=False, soft_wrap=True)
    out.print(lines)
    out.print(
        f"Looked up {report['measured']:,} of {report['candidates']:,} candidates, {report['failed']} of which failed. "
        f"Best: [bold]{report['best']}[/bold]."
    )


def _searched(search: Search, latency: Any, measurements: int) -> list[dict[str, Any]]:
    """Tell a search what was recorded, up to so many. Returns what had been found on the way."""
    import numpy as np

    steps: list[dict[str, Any]] = []
    while search.told < measurements:
        following = min([n for n in (*_MILESTONES, measurements) if n > search.told])
        rows = search.propose(min(search.batch, following - search.told))
        search.tell(rows, latency[rows])
        if search.best is not None and (search.told == following or not search.left):
            best_us = float(np.exp(latency[search.best]))
            share = float(np.exp(np.nanmin(latency))) / best_us
            steps.append({"measurements": search.told, "best_us": best_us, "share": share})
        if not search.left:
            break
    return steps


def _problem_of(recording: Recording, operation: str, definition: list[str]) -> Problem:
    """The problem meant: the one that the words describe, or the only one."""
    from kernelcast.cli.common import parse_values
    from kernelcast.errors import InvalidProblemError

    wanted = parse_values(definition)
    found = [
        problem
        for problem in recording.problems
        if all(_facts(problem).get(name) == value for name, value in wanted.items())
    ]
    # Of a kernel's problems some may be stated by fewer sizes than others: all of its own name it.
    found = [each for each in found if each.facts.keys() <= wanted.keys()] or found
    if len(found) != 1:
        some = "; ".join(str(problem) for problem in (found or recording.problems)[:5])
        raise InvalidProblemError(
            f"{recording.root} holds {len(found)} such problems of {operation} on {recording.device.name}; name one, by "
            f"NAME=VALUE: {some}."
        )
    return found[0]


def _facts(problem: Problem) -> dict[str, Any]:
    """All that can be said of a problem by name."""
    switches = {name: getattr(problem, name) for name in ("dtype", "allow_tf32", "threads")}
    return {**problem.facts, **switches}


def _table_of(candidates: Sequence[Candidate]) -> CandidateTable:
    """A table in the order given, in blocks of one variant and one set of parameters."""
    from kernelcast.kernels import CandidateTable

    runs = groupby(candidates, key=lambda one: (one.variant, [name for name, _ in one.config]))
    return CandidateTable(block for _, run in runs for block in CandidateTable.of(run).blocks)


def _default_row(operation: str, table: CandidateTable) -> int | None:
    """The row of the default, where the records have it. The table begins with it then."""
    from kernelcast.datasets.strategy import default_of

    return 0 if len(table) and table[0] == default_of(operation) else None
