"""The list of commands: one line each."""

from __future__ import annotations

from importlib import import_module
from weakref import WeakSet

import typer

#: Modules of this package. Each has ``attach(app)``, which adds its command or group of commands.
MODULES = (
    "doctor",
    "kernels",
    "collect",
    "import_",
    "data",
    "train",
    "evaluate",
    "select",
    "plan",
    "tune",
    "cache",
    "export_moe",
    "report",
    "models",
    "demo",
)

#: By the object, not its id: another application may have the id of one that is gone.
_attached: WeakSet[typer.Typer] = WeakSet()


def attach(app: typer.Typer) -> None:
    """Add every command to an application, once."""
    if app in _attached:
        return
    _attached.add(app)
    for name in MODULES:
        import_module(f"kernelcast.cli.{name}").attach(app)
