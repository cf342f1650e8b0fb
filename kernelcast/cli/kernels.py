"""``kernelcast kernels``: the catalogue, and which candidates are legal for a problem."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.cli.common import DefinitionArgument, DeviceOption, JsonOption

if TYPE_CHECKING:
    from kernelcast.kernels import Refusal


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("kernels")(kernels)


def kernels(
    operation: Annotated[str | None, typer.Argument(help="An operation; every one where left out.")] = None,
    definition: DefinitionArgument = None,
    device: DeviceOption = None,
    why: Annotated[
        bool, typer.Option("--why", help="List what is refused for the problem, and why.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List operations and variants, or the legal candidates of a problem.

    Examples:

      kernelcast kernels

      kernelcast kernels gemm m=4096 n=4096 k=4096 --device h100 --why
    """
    from rich.markup import escape
    from rich.table import Table

    from kernelcast.cli.common import console, parse_problem, print_json, resolve_device
    from kernelcast.errors import InvalidProblemError
    from kernelcast.kernels import operation as get_operation
    from kernelcast.kernels import operation_names, refusals, variants

    if not definition and (why or device is not None):
        raise InvalidProblemError(
            "Name a problem for --why and --device, such as: kernelcast kernels gemm m=64 n=64 k=64"
        )
    names = operation_names() if operation is None else [get_operation(operation).name]
    if not definition:
        rows: list[dict[str, Any]] = [
            {
                "operation": name,
                "variant": found.name,
                "backend": found.backend,
                "configs": found.space().length,
                "quick_configs": found.space("default").length,
                "doc": found.doc,
            }
            for name in names
            for found in variants(name).values()
        ]
        if as_json:
            print_json(rows)
            return
        table = Table("operation", "variant", "backend", "configs", "quick", "what it is")
        for row in rows:
            table.add_row(
                row["operation"], row["variant"], row["backend"], str(row["configs"]), str(row["quick_configs"]),
                escape(row["doc"]),
            )  # fmt: skip
        console().print(table)
        return

    hardware = resolve_device(device)
    problem = parse_problem(names[0], definition, hardware)
    counts: list[dict[str, Any]] = []
    for found in variants(names[0]).values():
        block = found.space()
        legal = found.legal(problem, hardware, block)
        counts.append(
            {"variant": found.name, "backend": found.backend, "legal": int(legal.sum()), "of": block.length}
        )
    refused = _grouped(refusals(problem, hardware)) if why else []
    if as_json:
        print_json(
            {"problem": problem.to_dict(), "device": hardware.name, "variants": counts, "refused": refused}
        )
        return
    table = Table("variant", "backend", "legal", "of", title=f"{problem} on {hardware.name}")
    for row in counts:
        table.add_row(row["variant"], row["backend"], str(row["legal"]), str(row["of"]))
    console().print(table)
    if why:
        table = Table("variant", "refused", "because", "seen, for example")
        for row in refused:
            table.add_row(row["variant"], str(row["count"]), escape(row["reason"]), escape(row["seen"]))
        console().print(table)


def _grouped(refused: Iterable[Refusal]) -> list[dict[str, Any]]:
    """One row a variant and rule, with the first candidate that it refused: a space may hold tens of thousands."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for each in refused:
        row = rows.setdefault(
            (each.candidate.variant, each.rule),
            {
                "variant": each.candidate.variant,
                "rule": each.rule,
                "reason": each.reason,
                "count": 0,
                "example": str(each.candidate),
                "seen": each.seen,
            },
        )
        row["count"] += 1
    return list(rows.values())
