"""``kernelcast kernels``: the catalogue, and which candidates are legal for a problem."""

from __future__ import annotations

from typing import Annotated

import typer

from kernelcast.cli.common import DefinitionArgument, DeviceOption, JsonOption


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("kernels")(kernels)


def kernels(
    operation: Annotated[str | None, typer.Argument(help="An operation; every one where left out.")] = None,
    definition: DefinitionArgument = None,
    device: DeviceOption = None,
    why: Annotated[bool, typer.Option("--why", help="List what is refused for the problem, and why.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List operations and variants, or the legal candidates of a problem.

    Examples:

      kernelcast kernels

      kernelcast kernels gemm m=4096 n=4096 k=4096 dtype=float16 --device h100-sxm5-80gb --why
    """
    from rich.table import Table

    from kernelcast.cli.common import console, parse_problem, print_json, resolve_device
    from kernelcast.kernels import operation as get_operation
    from kernelcast.kernels import operation_names, refusals, variants

    names = operation_names() if operation is None else [get_operation(operation).name]
    if not definition:
        rows = [
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
                row["operation"], row["variant"], row["backend"], str(row["configs"]), str(row["quick_configs"]), row["doc"]
            )  # fmt: skip
        console().print(table)
        return

    hardware = resolve_device(device)
    problem = parse_problem(names[0], definition, hardware)
    counts = []
    for found in variants(names[0]).values():
        block = found.space()
        legal = found.legal(problem, hardware, block)
        counts.append({"variant": found.name, "backend": found.backend, "legal": int(legal.sum()), "of": block.length})
    refused = refusals(problem, hardware) if why else []
    if as_json:
        listed = [
            {"candidate": str(r.candidate), "rule": r.rule, "reason": r.reason, "seen": r.seen} for r in refused
        ]
        print_json({"problem": problem.to_dict(), "device": hardware.name, "variants": counts, "refused": listed})
        return
    table = Table("variant", "backend", "legal", "of", title=f"{problem} on {hardware.name}")
    for row in counts:
        table.add_row(row["variant"], row["backend"], str(row["legal"]), str(row["of"]))
    console().print(table)
    if why:
        table = Table("refused", "because", "seen", title=f"{len(refused)} refused")
        for refusal in refused:
            table.add_row(str(refusal.candidate), refusal.reason, refusal.seen)
        console().print(table)
