"""``kernelcast plan``: which candidate runs at every size of some dimensions, as a table, a drawing or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.cli.common import DefinitionArgument, DeviceOption, JsonOption

if TYPE_CHECKING:
    from kernelcast.runtime.plan import Plan


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(plan)


def plan(
    definition: DefinitionArgument = None,
    operation: Annotated[
        str | None,
        typer.Option("--op", "--operation", help="An operation, such as attention.", show_default=False),
    ] = None,
    dimensions: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="NAME=FIRST..LAST",
            help="A dynamic dimension and its sizes, such as q_len=1..4096 or m=64..4096..64. May be repeated.",
        ),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option(
            "--read", metavar="FILE.json", help="Show or export a plan made before, instead of making one."
        ),
    ] = None,
    device: DeviceOption = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Measure once in each interval, where the device is this machine's."),
    ] = False,
    least_gain: Annotated[
        float, typer.Option("--least-gain", help="A new interval begins only for a gain above this ratio.")
    ] = 0.02,
    draw: Annotated[bool, typer.Option("--draw", help="Draw the intervals over their sizes too.")] = False,
    export: Annotated[
        list[Path] | None,
        typer.Option(
            "--export", metavar="FILE", help="Write it to a file: .json, .py or .svg. May be repeated."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan an operation over a range of sizes: in which intervals which candidate runs.

    The other dimensions and options are given as for select; one may be given the name of a dynamic dimension, and equals it
    then.

    Examples:

      kernelcast plan --op attention --dim q_len=1..4096 kv_len=q_len batch=1 heads=8 head_dim=64 --verify

      kernelcast plan --op gemm --dim m=1..8192 n=4096 k=4096 dtype=float16 --device a100 --export plan.py
    """
    from kernelcast.errors import InvalidRecordError
    from kernelcast.runtime import plan as plans
    from kernelcast.runtime import plan_file

    kinds = (".json", ".py", ".svg")
    for path in export or []:
        if path.suffix not in kinds:
            raise InvalidRecordError(f"{path} is no name for a plan; it must end in {', '.join(kinds)}.")
        plan_file.require_writable(path)  # before anything is measured, and lost
    if read is not None:
        if operation is not None or dimensions or definition:
            raise typer.BadParameter(
                "A plan is read or made: leave --op, --dim and NAME=VALUE out with --read."
            )
        text = plan_file.read(read)
        try:
            found = plans.Plan.from_json(text)
        except InvalidRecordError as error:
            raise InvalidRecordError(f"{read}: {error}") from error
    else:
        found = _made(
            operation, dimensions or [], definition or [], device, verify=verify, least_gain=least_gain
        )
    for path in export or []:
        if path.suffix == ".svg":
            plan_file.write_text(path, found.to_svg())
        else:
            found.save(path)
    if as_json:
        print(json.dumps(json.loads(found.to_json()), indent=2))
        return
    print(found)
    if draw:
        print(f"\n{found.draw()}")


def _made(
    operation: str | None,
    dimensions: list[str],
    definition: list[str],
    device: str | None,
    *,
    verify: bool,
    least_gain: float,
) -> Plan:
    from kernelcast.cli.common import parse_values, resolve_device
    from kernelcast.errors import InvalidProblemError
    from kernelcast.runtime import Selector
    from kernelcast.runtime import plan as plans
    from kernelcast.runtime.plan_axes import sizes_of

    if operation is None or not dimensions:
        raise typer.BadParameter(
            "A plan needs --op and at least one --dim, such as --op gemm --dim m=1..4096."
        )
    values = parse_values(definition)
    for name, sizes in parse_values(dimensions).items():
        if sizes_of(sizes, name) is None:
            raise InvalidProblemError(
                f"--dim {name}={sizes} names no sizes; write {name}=1..4096, both ends included, or {name}=64..4096..64. A single "
                f"size is given without --dim: {name}=4096."
            )
        if name in values:
            raise InvalidProblemError(f"{name} is given twice.")
        values[name] = sizes
    for taken in (
        "self",
        "operation",
        "mode",
        "least_gain",
        "selector",
    ):  # no schema's names, and in Python's way
        if taken in values:
            raise InvalidProblemError(f"{operation} has no dimension or option {taken!r}.")
    selector = Selector(resolve_device(device))
    return plans.plan(
        operation, mode="verify" if verify else "predict", least_gain=least_gain, selector=selector, **values
    )
