"""``kernelcast models``: the registry of trained models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.cli.common import JsonOption, console, print_json
from kernelcast.errors import UnknownNameError

if TYPE_CHECKING:
    from kernelcast.training.registry import RegisteredModel

models = typer.Typer(help="List, inspect, promote, exchange and track trained models.", no_args_is_help=True)

VersionArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[VERSION]",
        help="Such as 0003-1a2b3c4d, or its number alone; the champion where left out.",
    ),
]
OperationOption = Annotated[str | None, typer.Option("--op", "--operation", help="Operation, such as gemm.")]
#: Not the DeviceOption of other commands: a model may be of a device that is neither this one nor in the table.
ModelDeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="Device of the model; may be left out where only one has models."),
]


def attach(app: typer.Typer) -> None:
    """Add the group of commands."""
    app.add_typer(models, name="models")


@models.command("list")
def list_(
    operation: OperationOption = None, device: ModelDeviceOption = None, as_json: JsonOption = False
) -> None:
    """List the registered models; the champion of each device and operation is the one that selections use.

    Example:

      kernelcast models list --op gemm
    """
    from rich.markup import escape
    from rich.table import Table

    from kernelcast import settings
    from kernelcast.training import registry

    found = registry.list_models(settings.models_dir(), device=device_name(device), operation=operation)
    if as_json:
        print_json([_summary(model) for model in found])
        return
    if not found:
        console().print(
            f"No such models in {escape(str(settings.models_dir()))}. Train one with: kernelcast train",
            soft_wrap=True,
        )
        return
    table = Table("model", "champion", "problems", "@1", "@3")
    for model in found:
        row = _summary(model)
        figures = [str(row["problems"]), _figure(row["efficiency_at_1"]), _figure(row["efficiency_at_3"])]
        if model.broken:
            figures = ["earlier layout" if model.outdated else "broken", "", ""]
        standing = ("unusable" if model.broken else "yes") if model.champion else ""
        label = f"{model.device}/{model.operation}/{model.version}"
        table.add_row(*map(escape, [label, standing, *figures]))
    console().print(table)
    for model in found:
        if model.broken:
            console().print(f"Cannot be used: {model.broken}", soft_wrap=True, markup=False)
        if model.unrecorded:
            console().print(_record_fault(model), soft_wrap=True, markup=False)
    console().print("@1 and @3: efficiency on held-out problems, with the default among the 3.")


@models.command()
def show(
    version: VersionArgument = None,
    operation: OperationOption = None,
    device: ModelDeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a model was trained on, how it did on held-out problems, and what the gate said.

    Exits 1 if the model cannot be used.

    Example:

      kernelcast models show 2 --op gemm --device a100-sxm4-80gb
    """
    from rich.markup import escape

    model = find(version, operation, device)
    if as_json:
        print_json({**_summary(model), "facts": model.facts})
        if model.broken:
            raise typer.Exit(1)
        return
    out = console()
    facts = model.facts
    out.print(f"[bold]{escape(f'{model.device}/{model.operation}/{model.version}')}[/bold]", soft_wrap=True)
    if model.broken:
        out.print(f"Cannot be used: {escape(model.broken)}", soft_wrap=True)
        raise typer.Exit(1)
    workloads = ", ".join(f"{name or 'no workload'} ({count})" for name, count in facts["workloads"].items())
    gate = facts["gate"]
    row = _summary(model)
    for name, value in {
        "champion": "yes" if model.champion else "no",
        "folder": model.path,
        "trained at": facts["created_at"],
        "trained on": f"{facts['problems']} problems, {facts['measurements']} measurements",
        "workloads": workloads,
        "dataset hash": facts["dataset_hash"],
        "held out": facts["held_out"].get("how", "nothing"),
        "efficiency": f"{_figure(row['efficiency_at_1'])} at 1, {_figure(row['efficiency_at_3'])} at 3",
        "record": model.unrecorded or "sound",
        "gate": f"{'passed' if gate['promoted'] else 'not passed'}: {gate['reason']}",
    }.items():
        out.print(f"{name + ':':14}{escape(str(value))}", soft_wrap=True)


@models.command()
def promote(
    version: Annotated[str, typer.Argument(help="Such as 0003-1a2b3c4d, or its number alone.")],
    operation: OperationOption = None,
    device: ModelDeviceOption = None,
) -> None:
    """Make a version the champion of its device and operation, whatever the gate said.

    Example:

      kernelcast models promote 3 --op gemm
    """
    from kernelcast import settings
    from kernelcast.training import registry

    model = find(version, operation, device)
    alias = registry.promote(settings.models_dir(), model)
    before = f" Before it stood {alias.previous[-1]}." if alias.previous else ""
    console().print(
        f"{model.version} is the champion of {model.operation} on {model.device}.{before}", soft_wrap=True
    )
    if model.unrecorded:
        console(stderr=True).print(f"Warning: {_record_fault(model)}", soft_wrap=True, markup=False)
    _tell_tracking(model.device, model.operation, model.version)


@models.command()
def rollback(operation: OperationOption = None, device: ModelDeviceOption = None) -> None:
    """Go back to the champion that stood before.

    Example:

      kernelcast models rollback --op gemm --device a100-sxm4-80gb
    """
    from kernelcast import settings
    from kernelcast.training import registry

    where = device_name(device)
    if operation is None or where is None:
        standing = find(None, operation, device)
        operation, where = standing.operation, standing.device
    alias = registry.rollback(settings.models_dir(), device=where, operation=operation)
    console().print(f"{alias.version} is the champion of {operation} on {where} again.", soft_wrap=True)
    _tell_tracking(where, operation, alias.version)


@models.command()
def export(
    version: VersionArgument = None,
    operation: OperationOption = None,
    device: ModelDeviceOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="The file. [default: DEVICE-OPERATION-VERSION.zip]")
    ] = None,
) -> None:
    """Write a model as one file, for another machine.

    Example:

      kernelcast models export --op gemm --device a100-sxm4-80gb --output gemm.zip
    """
    from kernelcast.training import registry

    model = find(version, operation, device)
    file = registry.export(model, output or Path(f"{model.device}-{model.operation}-{model.version}.zip"))
    console().print(
        f"Wrote {file}. Import it with: kernelcast models import {file.name}", soft_wrap=True, markup=False
    )


@models.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `kernelcast models export` wrote.")],
    promote: Annotated[bool, typer.Option("--promote", help="Make it the champion.")] = False,
) -> None:
    """Check a model that was exported elsewhere, and add it to the registry.

    Example:

      kernelcast models import gemm.zip --promote
    """
    from kernelcast import settings
    from kernelcast.training import registry

    model = registry.import_(settings.models_dir(), file)
    label = f"{model.device}/{model.operation}/{model.version}"
    if promote:
        registry.promote(settings.models_dir(), model)
        console().print(f"Imported and promoted {label}.", soft_wrap=True)
    else:
        console().print(
            f"Imported {label}. Promote it with: kernelcast models promote {model.version} --op {model.operation} "
            f"--device {model.device}",
            soft_wrap=True,
        )


@models.command()
def sync(as_json: JsonOption = False) -> None:
    """Upload the MLflow runs that could not be tracked when they happened. Exits with 1 if some still wait.

    Example:

      kernelcast models sync
    """
    from kernelcast import settings
    from kernelcast.training import tracking

    result = tracking.sync()
    if as_json:
        print_json(
            {
                "uploaded": [{"run": run, "run_id": run_id} for run, run_id in result.uploaded],
                "waiting": [{"run": run, "reason": reason} for run, reason in result.waiting],
            }
        )
    else:
        out = console()
        out.print(
            f"{len(result.uploaded)} runs uploaded to {settings.tracking_uri()}.",
            soft_wrap=True,
            markup=False,
        )
        for run, reason in result.waiting:
            out.print(f"{run} still waits: {reason}", soft_wrap=True, markup=False)
    if result.waiting:
        raise typer.Exit(1)


def _tell_tracking(device: str, operation: str, version: str) -> None:
    """Have the alias of MLflow's registry follow; a server that cannot be reached costs a warning."""
    from kernelcast.training import tracking

    warning = tracking.follow(device, operation, version)
    if warning:
        console(stderr=True).print(f"Warning: {warning}", soft_wrap=True, markup=False)


def find(version: str | None, operation: str | None, device: str | None) -> RegisteredModel:
    """The registered model that the words of the command line name."""
    from kernelcast import settings
    from kernelcast.training import registry

    return registry.find_model(
        settings.models_dir(), device=device_name(device), operation=operation, version=version
    )


def device_name(name: str | None) -> str | None:
    """The name that models of a device lie under: an alias such as ``a100`` in full, any other name as it is."""
    from kernelcast.kernels.devices import device

    if name is None:
        return None
    try:
        return device(name).name
    except UnknownNameError:
        return name


def _summary(model: RegisteredModel) -> dict[str, Any]:
    facts = model.facts
    rankers = facts.get("held_out", {}).get("rankers", {})
    figures = rankers["model"]["with_default"] if rankers else None
    return {
        "device": model.device,
        "operation": model.operation,
        "version": model.version,
        "champion": model.champion,
        "path": str(model.path),
        "problems": facts.get("problems"),
        "efficiency_at_1": figures["1"]["geomean"] if figures else None,
        "efficiency_at_3": figures["3"]["geomean"] if figures else None,
        "created_at": facts.get("created_at"),
        "broken": model.broken,
        "unrecorded": model.unrecorded,
    }


def _record_fault(model: RegisteredModel) -> str:
    return f"Of use to selections, but without its record of held-out problems: {model.unrecorded}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
