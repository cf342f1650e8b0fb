"""``kernelcast kernels``: the catalogue, which candidates are legal for a problem, and what the compiler makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from kernelcast.cli.common import DefinitionArgument, DeviceOption, JsonOption
from kernelcast.cli.kernels_compile import compile_

if TYPE_CHECKING:
    from kernelcast.kernels import Device, Problem


class _ListByDefault(TyperGroup):
    """A group whose first word may be left out: then it lists."""

    #: The command of words that begin with no command's name.
    default_command: ClassVar[str] = "list"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


def attach(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(
        cls=_ListByDefault,
        help="List operations and variants, or the legal candidates of a problem; or compile candidates.\n\n"
        "The word list may be left out. Examples:\n\n"
        "  kernelcast kernels\n\n"
        "  kernelcast kernels gemm m=4096 n=4096 k=4096 --device h100 --why\n\n"
        "  kernelcast kernels compile --op gemm --target sm90",
    )
    group.command("list")(list_)
    group.command("compile")(compile_)
    app.add_typer(group, name="kernels")


def list_(
    operation: Annotated[str | None, typer.Argument(help="An operation; every one where left out.")] = None,
    definition: DefinitionArgument = None,
    device: DeviceOption = None,
    why: Annotated[
        bool, typer.Option("--why", help="List what is refused for the problem, and why.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List operations and variants, or the legal candidates of a problem. The word list may be left out.

    Examples:

      kernelcast kernels list

      kernelcast kernels gemm m=4096 n=4096 k=4096 --device h100 --why
    """
    from rich.markup import escape
    from rich.table import Table

    from kernelcast.cli.common import console, parse_problem, print_json, resolve_device, resolve_operation
    from kernelcast.errors import InvalidProblemError
    from kernelcast.kernels import operation_names, variants

    if not definition and (why or device is not None):
        raise InvalidProblemError(
            "Name a problem for --why and --device, such as: kernelcast kernels gemm m=64 n=64 k=64"
        )
    names = operation_names() if operation is None else [resolve_operation(operation).name]
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
    refused = _refused(problem, hardware) if why else []
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


def _refused(problem: Problem, device: Device) -> list[dict[str, Any]]:
    """One row a variant and rule, with the first candidate that it refuses: a space may hold tens of thousands."""
    import numpy as np

    from kernelcast.kernels import variants

    rows: list[dict[str, Any]] = []
    for found in variants(problem.operation).values():
        block = found.space()
        left = np.ones(block.length, dtype=bool)
        for rule in found.rules:
            broken = left & ~rule.met(problem, block.columns, device, block.length)
            if broken.any():
                (first,) = found.refusals(problem, device, block.take(np.flatnonzero(broken)[:1]))
                rows.append(
                    {
                        "variant": found.name,
                        "rule": first.rule,
                        "reason": first.reason,
                        "count": int(broken.sum()),
                        "example": str(first.candidate),
                        "seen": first.seen,
                    }
                )
                left &= ~broken
    return rows
