"""``kernelcast cache``: look after remembered selections, and take them to other machines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.cli.common import JsonOption, console, print_json
from kernelcast.cli.models import device_name

if TYPE_CHECKING:
    from kernelcast.datasets import Journal
    from kernelcast.kernels import Device
    from kernelcast.runtime.cache import CacheEntry, SelectionCache
    from kernelcast.runtime.cache_recheck import Recheck

#: Files that a message lists.
_MOST_LEFT = 5

cache = typer.Typer(help="Look after remembered selections, and exchange them.", no_args_is_help=True)

CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache", help="Folder of selections. \\[default: $KERNELCAST_HOME/cache]", show_default=False
    ),
]
OperationOption = Annotated[
    str | None, typer.Option("--op", "--operation", help="Selections of this operation.")
]
RememberedDeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Selections of this device: its name or fingerprint."),
]


def attach(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(cache, name="cache")


@cache.command()
def show(
    folder: CacheOption = None,
    operation: OperationOption = None,
    device: RememberedDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what is remembered: what was chosen, by what search, how much faster than the default it was, and whether it counts here.

    An entry of another environment (versions, driver, changed variants) is a prior: measured again before it is used.

    Example:

      kernelcast cache show --op gemm
    """
    from rich.markup import escape
    from rich.table import Table

    target = _open(folder)
    found = _chosen(target, operation, device)
    rows = [_row(entry) for entry in found]
    if as_json:
        print_json({"cache": str(target.folder), "hash": _hash_of(found), "selections": rows})
        return
    if not found:
        _print_none(target)
        return
    table = Table(box=None)
    for title in ("problem", "candidate", "device"):
        table.add_column(title, overflow="fold")
    table.add_column("source", min_width=len("verified, busy"))
    table.add_column("measured", min_width=len("regret 0.05"))
    for title in ("measured us", "default us", "speedup"):
        table.add_column(title, justify="right")
    table.add_column("environment", min_width=len("environment"))
    table.add_column("age", justify="right")
    for row in rows:
        source = f"{row['source']}, busy" if row["busy"] else row["source"]
        names = (row["problem"], row["candidate"], row["device"], source, row["search"])
        figures = (_figure(row["measured_us"]), _figure(row["default_us"]), _figure(row["speedup"], 2))
        table.add_row(*map(escape, names), *figures, row["environment"], _age(row["age_s"]))
    out = console()
    out.print(table)
    current = sum(row["environment"] == "current" for row in rows)
    out.print(
        f"{_count(len(rows), 'selection')} in {escape(str(target.folder))}: {current} current, {len(rows) - current} "
        f"of other environments. Hash of the choices: {_hash_of(found)}",
        soft_wrap=True,
    )
    busy = sum(row["busy"] for row in rows)
    if busy:
        out.print(
            f"{_count(busy, 'selection')} decided on a busy machine. Select anew on a quiet one with: kernelcast cache verify",
            soft_wrap=True,
        )


@cache.command()
def verify(
    folder: CacheOption = None,
    operation: OperationOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only measure and report; the cache stays as it is.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure each current selection of this machine against the default. Exits with 1 if some no longer win.

    What lost is replaced by the default. What was decided on a busy machine is selected anew, the default of it too, and
    replaced by what is selected. What was measured goes to the store.

    Example:

      kernelcast cache verify --op gemm
    """
    target = _open(folder)
    found: list[Recheck] = []
    for device in _devices_here():
        entries = [
            entry
            for entry in _chosen(target, operation, device.fingerprint)
            if _environment(entry) == "current"
        ]
        found += _recheck(target, device, entries, dry_run=dry_run, quiet=as_json)
    lost = [each for each in found if each.lost]
    if as_json:
        rows = [
            {
                **_row(each.entry),
                "outcome": each.outcome,
                "reason": each.reason,
                "measured_us": each.candidate_us,
                "default_us": each.default_us,
                "speedup": each.default_us / each.candidate_us,
                **_renewed(each),
            }
            for each in found
        ]
        print_json(
            {
                "cache": str(target.folder),
                "verified": rows,
                "lost": len(lost),
                "replaced": not dry_run and len(lost),
            }
        )
    elif not found:
        print(f"Nothing in {target.folder} was verified on this machine in its present environment.")
    else:
        counts = {
            name: sum(each.outcome == name for each in found)
            for name in dict.fromkeys(e.outcome for e in found)
        }
        what = ", ".join(f"{count} {name}" for name, count in counts.items())
        instead = "what won now" if any(each.outcome == "changed" for each in lost) else "the default"
        after = "; nothing was changed" if dry_run else f"; {instead} takes its place" if lost else ""
        print(f"{_count(len(found), 'selection')}: {what}{after}.")
    if lost:
        raise typer.Exit(1)


@cache.command()
def clear(
    folder: CacheOption = None,
    operation: OperationOption = None,
    device: RememberedDeviceOption = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", help="Only selections verified longer ago than this: 90d, 12h, 4w."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Forget the selections that meet every condition given; all of them where none is.

    Example:

      kernelcast cache clear --op gemm --older-than 90d --yes
    """
    import sys

    from kernelcast.cli.data import _age_s
    from kernelcast.errors import KernelcastError, SettingsError

    target = _open(folder)
    everything = operation is None and device is None and older_than is None
    found = _chosen(target, operation, device)
    if older_than is not None:
        before = time.time() - _age_s(older_than)
        found = [entry for entry in found if entry.verified_at < before]
    if not found and not everything:
        print_json({"removed": 0}) if as_json else _print_none(target)
        return
    if not yes:
        if not sys.stdin.isatty():
            raise SettingsError(f"{_count(len(found), 'selection')} would be forgotten. Add --yes to do it.")
        typer.confirm(f"Forget {_count(len(found), 'selection')} of {target.folder}?", abort=True, err=True)
    result = target.forget(None if everything else [entry.key for entry in found])
    if as_json:
        left = [{"path": str(path), "reason": reason} for path, reason in result.left]
        print_json({"removed": result.removed, "left": left})
    else:
        print(f"{_count(result.removed, 'selection')} forgotten.")
    if result.left:
        raise KernelcastError(_left(result.left))


@cache.command()
def export(
    file: Annotated[
        Path,
        typer.Argument(help="The pack, such as gemm.zip; the hash of its content is put into the name."),
    ],
    folder: CacheOption = None,
    operation: OperationOption = None,
    device: RememberedDeviceOption = None,
    current: Annotated[
        bool, typer.Option("--current", help="Only those that are answers here, and no priors.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write selections as one file, from which other machines and all ranks of a job choose alike.

    Example:

      kernelcast cache export gemm.zip --op gemm
    """
    from kernelcast.errors import KernelcastError
    from kernelcast.runtime.cache_files import reason_of
    from kernelcast.runtime.pack import write_pack

    found = _chosen(_open(folder), operation, device)
    if current:
        found = [entry for entry in found if _environment(entry) == "current"]
    try:
        written = write_pack(file, found)
    except OSError as error:
        raise KernelcastError(
            f"The pack {error.filename or file} cannot be written ({reason_of(error)}). Choose another place for it."
        ) from error
    if as_json:
        print_json({"file": str(written), "selections": len(found), "hash": _hash_of(found)})
        return
    console().print(
        f"Wrote {written}: {_count(len(found), 'selection')}. Import it with: kernelcast cache import {written.name}",
        soft_wrap=True,
        markup=False,
    )


@cache.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `kernelcast cache export` wrote.")],
    folder: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a pack and remember its selections; of two of one key the one verified later stays.

    Example:

      kernelcast cache import gemm-0123456789abcdef.zip
    """
    from dataclasses import asdict

    from kernelcast.runtime.pack import import_pack

    result = import_pack(_open(folder), file)
    if as_json:
        print_json(asdict(result))
    else:
        failed = f", {result.failed} that could not be written" if result.failed else ""
        print(
            f"{_count(result.added, 'selection')} new, {result.replaced} replaced, {result.kept} kept{failed}."
        )
    if result.failed:
        raise typer.Exit(1)


def _open(folder: Path | None) -> SelectionCache:
    from kernelcast import settings
    from kernelcast.runtime.cache import SelectionCache

    return SelectionCache(settings.cache_dir() if folder is None else folder)


def _chosen(target: SelectionCache, operation: str | None, device: str | None) -> list[CacheEntry]:
    """The entries that meet the conditions, by problem and the latest first.

    Raises:
        UnknownNameError: neither the catalogue nor a selection is of that operation.
    """
    from kernelcast.errors import UnknownNameError
    from kernelcast.kernels import operation_names

    name = device_name(device)
    entries = list(target.entries())
    # Selections of a user's own operation may be there without its module.
    known = {*operation_names(), *(entry.selection.problem.operation for entry in entries)}
    if operation is not None and operation not in known:
        raise UnknownNameError("operation", operation, sorted(known))
    found = [
        entry
        for entry in entries
        if operation in (None, entry.selection.problem.operation)
        and (name is None or name in (entry.selection.device, entry.key.device))
    ]
    return sorted(
        found, key=lambda e: (e.selection.problem.operation, str(e.selection.problem), -e.verified_at)
    )


def _devices_here() -> list[Device]:
    """The devices of this machine, each hardware once."""
    from kernelcast.kernels.detect import detect

    first = detect()
    return [first] if first.kind == "cpu" else [first, detect("cpu")]


def _recheck(
    target: SelectionCache, device: Device, entries: list[CacheEntry], *, dry_run: bool, quiet: bool
) -> list[Recheck]:
    from kernelcast import settings
    from kernelcast.datasets import Journal
    from kernelcast.runtime.cache_recheck import recheck

    if not entries:
        return []
    found = []
    store = settings.store_dir()
    with Journal(store) as journal:
        journal.record_device(device)
        for each in recheck(entries, device, cache=target.folder, store=store):
            found.append(each)
            _keep(journal, each)
            if not quiet:
                _print_recheck(each)
            if not dry_run and each.outcome not in ("unmeasured", "default"):
                renewed = each.renewed()
                if renewed is None:
                    target.evict(each.entry.key)
                else:
                    target.put(each.entry.key, renewed)
    return found


def _keep(journal: Journal, each: Recheck) -> None:
    for measurement in each.measurements:
        journal.append(measurement)


def _print_recheck(each: Recheck) -> None:
    selection, anew = each.entry.selection, each.selected
    if each.reason:
        more = f" {each.reason}."
    elif anew is not None:
        still = "; the machine was busy again" if anew.busy else ""
        figures = _against(anew.measured_us, anew.default_us)
        more = f" Decided on a busy machine; selected anew: {anew.candidate}, {figures}{still}."
    elif each.outcome == "default":
        more = ""
    else:
        more = f" {_against(each.candidate_us, each.default_us)}."
    console().print(
        f"{selection.problem}: {selection.candidate}: {each.outcome}.{more}", soft_wrap=True, markup=False
    )


def _against(us: float, default_us: float) -> str:
    return f"{us:,.1f} us, the default {default_us:,.1f} us"


def _renewed(each: Recheck) -> dict[str, Any]:
    """What is to be remembered from now on, for JSON."""
    renewed = each.renewed()
    candidate = None if renewed is None else str(renewed.candidate)
    return {"selected": candidate, "still_busy": renewed is not None and renewed.busy}


def _row(entry: CacheEntry) -> dict[str, Any]:
    selection = entry.selection
    return {
        "problem": str(selection.problem),
        "candidate": str(selection.candidate),
        "device": selection.device,
        "fingerprint": entry.key.device,
        "source": selection.source,
        "busy": selection.busy,
        "measured_us": selection.measured_us,
        "default_us": selection.default_us,
        "speedup": selection.speedup,
        "top_k": entry.key.top_k,
        "target_regret": entry.key.target_regret,
        "search": _search(entry),
        "environment": _environment(entry),
        "verified_at": entry.verified_at,
        "age_s": max(time.time() - entry.verified_at, 0.0),
        "key": entry.key.digest,
        "hash": selection.hash,
        "reason": selection.reason,
    }


def _search(entry: CacheEntry) -> str:
    """What a selector must ask for to get this answer: ``"top 3"``, ``"regret 0.02"`` or ``"tune"``."""
    key = entry.key
    if key.target_regret is not None:
        return f"regret {key.target_regret:g}"
    return f"top {key.top_k}" if key.top_k else "tune"


def _environment(entry: CacheEntry) -> str:
    """``"current"`` if it is an answer in this environment, on such a device; else ``"prior"``."""
    from kernelcast.errors import KernelcastError
    from kernelcast.runtime.cache import CacheEnvironment

    kind = "cpu" if entry.key.environment.runtime == "cpu" else "gpu"
    try:
        here = CacheEnvironment.current(entry.selection.problem.operation, kind)
    except KernelcastError:  # a kernel of the user's own that was not imported
        return "prior"
    return "current" if here == entry.key.environment else "prior"


def _hash_of(found: list[CacheEntry]) -> str:
    from kernelcast.runtime.selection import selections_hash

    return selections_hash(entry.selection for entry in found)


def _left(left: Sequence[tuple[Path, str]]) -> str:
    """What could not be removed, and what to do."""
    some = "; ".join(f"{path} ({reason})" for path, reason in left[:_MOST_LEFT])
    more = f"; and {len(left) - _MOST_LEFT:,} more" if len(left) > _MOST_LEFT else ""
    return (
        f"{_count(len(left), 'file')} could not be removed: {some}{more}. Make the folder writable, or remove them as the user "
        "who owns it."
    )


def _print_none(target: SelectionCache) -> None:
    print(f"No such selections in {target.folder}. Make some with: kernelcast select")


def _figure(value: float, digits: int = 1) -> str:
    return "-" if value != value else f"{value:,.{digits}f}{'x' if digits == 2 else ''}"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
