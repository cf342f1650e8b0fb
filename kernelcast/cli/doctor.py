"""``kernelcast doctor``: what this machine is, what is installed, and whether it can be measured on now."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kernelcast.cli.common import JsonOption


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    measure: Annotated[bool, typer.Option(help="Time a pair that differs and a pair that does not.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Show the device, the software, the folders, and whether timings on this machine can be trusted now.

    Exits 1 if a check fails.

    Example:

      kernelcast doctor --json
    """
    from rich.table import Table

    from kernelcast.cli.common import console, print_json

    facts = _facts()
    checks = _folder_checks() + (_calibration() if measure else [])
    if as_json:
        print_json({**facts, "checks": checks})
    else:
        table = Table(show_header=False)
        for group in ("device", "software", "folders"):
            for name, value in facts[group].items():
                table.add_row(group, name, str(value))
        console().print(table)
        for check in checks:
            mark = "[green]ok[/green]" if check["ok"] else "[red]no[/red]"
            console().print(f"{mark}  {check['check']}: {check['seen']}")
    if not all(check["ok"] for check in checks):
        raise typer.Exit(1)


def _facts() -> dict[str, dict[str, Any]]:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from kernelcast import __version__, settings
    from kernelcast.cli.common import resolve_device
    from kernelcast.costmodel import walk
    from kernelcast.featurizer import tiles
    from kernelcast.kernels.detect import default_threads

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    device = resolve_device(None)
    return {
        "device": {**device.to_dict(), "fingerprint": device.fingerprint, "threads": default_threads()},
        "software": {
            "kernelcast": __version__,
            "python": platform.python_version(),
            **{
                name: installed(name)
                for name in ("torch", "triton", "numpy", "xgboost", "scikit-learn", "mlflow")
            },
            "tree walk": walk.described_engine(),
            "tile features": tiles.described_engine(),
        },
        "folders": {
            "home": str(settings.home()),
            "store": str(settings.store_dir()),
            "models": str(settings.models_dir()),
            "cache": str(settings.cache_dir()),
            "tracking": settings.tracking_uri(),
            "mode": settings.mode(),
        },
    }


def _folder_checks() -> list[dict[str, Any]]:
    import tempfile

    from kernelcast import settings

    home = settings.home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
        return [{"check": "the home can be written", "ok": True, "seen": str(home)}]
    except OSError as error:
        seen = f"{home}: {error.strerror or error}. Set KERNELCAST_HOME to a folder that can be written."
        return [{"check": "the home can be written", "ok": False, "seen": seen}]


def _calibration() -> list[dict[str, Any]]:
    from kernelcast.cli.common import resolve_device
    from kernelcast.datasets.calibration import MOST_NOISE, calibrate

    found = calibrate(resolve_device(None))
    busy = "" if found.noise < MOST_NOISE else ": this machine is too noisy now; close what else runs"
    return [
        {
            "check": "a product of twice the work is slower",
            "ok": found.ordered,
            "seen": f"{found.twice:.2f} times as long (2 is expected)",
        },
        {
            "check": "two equal products tie",
            "ok": found.tied,
            "seen": f"ratio {found.equal:.3f}, noise {found.noise:.1%}{busy}",
        },
    ]
