"""``kernelcast export-moe``: tile sizes for the fused mixture-of-experts kernel of vLLM and SGLang."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.cli.common import DeviceOption, JsonOption


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export-moe")(export_moe)


def export_moe(
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts on one GPU (E).")],
    intermediate: Annotated[
        int, typer.Option("--intermediate", min=1, help="Size of an expert's hidden layer on one GPU (N).")
    ],
    hidden: Annotated[int, typer.Option("--hidden", min=1, help="Size of a token.")],
    per_token: Annotated[int, typer.Option("--per-token", min=1, help="Experts that each token is sent to.")],
    output: Annotated[Path, typer.Option("--output", help="Folder that the file is written into.")],
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = "bfloat16",
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens",
            help="Numbers of tokens, by commas. \\[default: the 18 of vLLM's own tuning, 1 to 4096]",
        ),
    ] = None,
    distribution: Annotated[
        str, typer.Option("--distribution", help="Of rows over experts: balanced, random or skewed.")
    ] = "random",
    device: DeviceOption = None,
    device_name: Annotated[
        str | None,
        typer.Option("--device-name", help="What torch calls the GPU, where it is not here and not known."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", help="predict or verify. \\[default: $KERNELCAST_MODE, or verify]"),
    ] = None,
    top_k: Annotated[
        int, typer.Option("--top-k", min=1, help="How many configs are measured for each number of tokens.")
    ] = 3,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the config file of one layer for the fused mixture-of-experts kernel of vLLM and SGLang.

    For a GPU that is here the first few of the ranking are measured; for another, that device's model ranks.

    Example:

      kernelcast export-moe --experts 8 --intermediate 14336 --hidden 4096 --per-token 2 --device h100 --output configs
    """
    from rich.markup import escape

    from kernelcast.cli.common import console, print_json, resolve_device
    from kernelcast.errors import ImportFileError
    from kernelcast.runtime.fused_moe import TOKENS, PlanWarning, file_name, plan, warn_of_guesses

    hardware = resolve_device(device)
    if hardware.kind == "gpu" and not overwrite:
        target = output / str(file_name(experts, intermediate, dtype, hardware, device_name))
        if target.exists():  # before anything is measured, and lost
            raise ImportFileError(target, "it exists already. Name another folder, or add --overwrite.")
    made = plan(
        experts,
        intermediate,
        hidden,
        dtype,
        experts_per_token=per_token,
        device=hardware,
        ms=TOKENS if tokens is None else _numbers(tokens),
        distribution=distribution,
        mode=mode,
        top_k=top_k,
        device_name=device_name,
    )
    path = made.save(output)
    if made.hindrance:
        label = "[yellow]Warning:[/yellow]" if mode == "verify" else "Note:"
        console(stderr=True).print(f"{label} {escape(made.hindrance)}", soft_wrap=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        warn_of_guesses(made)
    for each in caught:
        console(stderr=True).print(f"[yellow]Warning:[/yellow] {escape(str(each.message))}", soft_wrap=True)
    if as_json:
        rows = [_row(choice) for choice in made.choices]
        print_json({"path": str(path), "configs": rows, "hindrance": made.hindrance})
        return
    _print(made, path)


def _numbers(text: str) -> list[int]:
    from kernelcast.cli.common import split_names
    from kernelcast.errors import InvalidProblemError

    words = split_names(text) or []
    if not words or not all(word.isdecimal() and len(word) <= 10 for word in words):
        raise InvalidProblemError(f"--tokens is {text!r}; it must be numbers by commas, such as 1,16,256.")
    return [int(word) for word in words]


def _row(choice: Any) -> dict[str, Any]:
    return {
        "tokens": choice.tokens,
        "config": choice.candidate.parameters,
        "source": choice.source,
        "predicted_us": choice.predicted_us,
        "measured_us": choice.measured_us,
    }


def _print(made: Any, path: Path) -> None:
    from rich.table import Table

    from kernelcast.cli.common import console

    out = console()
    table = Table(
        "tokens", "tile m x n x k", "group", "warps", "stages", "source", "us", title=made.name.device_name
    )
    for choice in made.choices:
        config = choice.candidate.parameters
        latency_us = choice.predicted_us if math.isnan(choice.measured_us) else choice.measured_us
        table.add_row(
            str(choice.tokens),
            f"{config['block_m']} x {config['block_n']} x {config['block_k']}",
            str(config["group_m"]),
            str(config["num_warps"]),
            str(config["num_stages"]),
            choice.source,
            f"{latency_us:,.1f}",
        )
    out.print(table)
    out.print(f"Wrote {path}", soft_wrap=True, markup=False)
