"""``kernelcast report``: one HTML page on trained models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.cli.common import StoreOption, console, resolve_store
from kernelcast.errors import KernelcastError, SettingsError

if TYPE_CHECKING:
    from kernelcast.training.registry import RegisteredModel


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report")(report)


def report(
    operation: Annotated[
        str | None, typer.Option("--op", "--operation", help="Only models of this operation.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Only models of this device.")] = None,
    output: Annotated[Path, typer.Option("--output", help="The file to write.")] = Path(
        "kernelcast-report.html"
    ),
    store: StoreOption = None,
) -> None:
    """Write one HTML page on the models that stand: what they were trained on, and how good they are.

    Where no model of an operation stands on a device, the newest is reported on. The page needs no network and no
    script.

    Example:

      kernelcast report --op gemm --output gemm.html
    """
    from kernelcast import settings
    from kernelcast.cli.models import device_name
    from kernelcast.training import registry
    from kernelcast.training.report import write_report

    if not output.parent.is_dir():
        raise SettingsError(f"--output {output}: there is no folder {output.parent}; make it first.")
    chosen: dict[tuple[str, str], RegisteredModel] = {}
    for model in registry.list_models(settings.models_dir(), device=device_name(device), operation=operation):
        place = (model.operation, model.device)
        standing = chosen.get(place)
        if standing is None or not standing.champion:
            chosen[place] = model
    found = [chosen[place] for place in sorted(chosen)]
    folder = resolve_store(store)
    notes = {model.path: note for model in found if (note := _store_note(folder, model))}
    path = write_report(output, found, notes=notes)
    console().print(
        f"Wrote {path}. Open it in a browser: {path.resolve().as_uri()}", soft_wrap=True, markup=False
    )


def _store_note(folder: Path, model: RegisteredModel) -> str:
    """Whether the store still holds what a model was trained on; empty where that cannot be told."""
    from kernelcast.datasets.store import Store
    from kernelcast.kernels import Device
    from kernelcast.training.data import dataset_hash, load_problems

    if model.broken or not folder.is_dir():
        return ""
    facts = model.facts
    try:
        hardware = Device.from_dict(facts["device"])
        data = load_problems(
            Store(folder), model.operation, device=hardware.fingerprint, workloads=facts["workloads"]
        )
    except KernelcastError:
        # The store is a matter apart: the report is on the model, and stands without it.
        return ""
    if dataset_hash(data) == facts["dataset_hash"]:
        return "The store holds exactly the measurements that the model was trained on."
    return (
        f"The store has changed since the model was trained: it now holds {len(data)} problems of these workloads. "
        "Train again to use them."
    )
