"""What ``kernelcast collect`` measures where not everything is measured, and collecting from records: its options."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelcast.errors import SettingsError

if TYPE_CHECKING:
    from kernelcast.datasets.collect import CollectSummary
    from kernelcast.datasets.jobs import Strategy
    from kernelcast.kernels import Device

STRATEGIES = ("exhaustive", "random", "active")

StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="What comes first: exhaustive (in order), random, or active (what teaches a model most).",
    ),
]
MeasurementsOption = Annotated[
    str | None,
    typer.Option("--measurements", help="End with so many candidates known, or a share of all: 5000, 25%."),
]
ReplayOption = Annotated[
    Path | None,
    typer.Option("--replay", help="Take measurements from this store, and measure nothing."),
]
FromWorkloadsOption = Annotated[
    str | None,
    typer.Option("--from-workloads", help="With --replay: only these workloads of the store, by commas."),
]

#: The parameters of the command that say something where nothing is measured.
_OF_A_REPLAY = (
    "operation", "replay", "from_workloads", "device", "strategy", "measurements", "budget", "seed", "store", "as_json",
)  # fmt: skip


@dataclass(frozen=True)
class StrategyChoice:
    """What the options say.

    Raises:
        SettingsError: an unknown strategy, or no possible limit.
    """

    strategy: str = "exhaustive"
    measurements: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        from kernelcast.datasets.strategy import Limit

        if self.strategy not in STRATEGIES:
            raise SettingsError(
                f"--strategy is {self.strategy!r}; it must be {', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}."
            )
        if self.measurements is not None:
            try:
                Limit.parse(self.measurements)
            except SettingsError as error:
                raise SettingsError(f"--measurements: {error}") from error

    def open(self, device: Device) -> Strategy:
        """The strategy, for a device.

        Raises:
            MissingExtraError: it fits a model, and the libraries for that are not installed.
        """
        from kernelcast.datasets.jobs import Exhaustive
        from kernelcast.datasets.strategy import Limit, Limited, Random

        limit = None if self.measurements is None else Limit.parse(self.measurements)
        if self.strategy == "active":
            from kernelcast.training.active import Active

            return Active(device, limit=limit, seed=self.seed)
        if self.strategy == "random":
            return Random(limit, seed=self.seed)
        return Exhaustive() if limit is None else Limited(Exhaustive(), limit)


def refuse_without_replay(from_workloads: str | None) -> None:
    """Refuse what only a replay has.

    Raises:
        SettingsError: it is given.
    """
    if from_workloads is not None:
        raise SettingsError(
            "--from-workloads goes with --replay STORE: it chooses among the records of a store."
        )


def replayed(
    context: typer.Context,
    root: Path,
    folder: Path,
    choice: StrategyChoice,
    *,
    budget_seconds: float | None,
    on_progress: Any,
) -> tuple[CollectSummary, Device]:
    """Collect from a store into another one.

    Raises:
        SettingsError: an option is given that says how to measure, or no operation.
        StoreError: the records are not there, or cannot be written.
    """
    from kernelcast.cli.common import split_names
    from kernelcast.datasets.replay import Recording, replay

    given = context.params
    _refuse_others(context, _OF_A_REPLAY)
    if given["operation"] is None:
        raise SettingsError("--replay needs an operation, such as: kernelcast collect gemm --replay STORE")
    recording = Recording.read(
        root,
        given["operation"],
        device=given["device"],
        workloads=split_names(given["from_workloads"]),
    )
    summary = replay(
        recording,
        folder,
        strategy=choice.open(recording.device),
        budget_seconds=budget_seconds,
        on_progress=on_progress,
    )
    return summary, recording.device


def _refuse_others(context: typer.Context, allowed: Collection[str]) -> None:
    """Refuse every parameter that was given on the command line and is not among the allowed ones."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name == "COMMANDLINE":
            said = parameter.opts[0] if parameter.param_type_name == "option" else "a problem (NAME=VALUE)"
            raise SettingsError(
                f"With --replay nothing is measured, and the problems are those recorded: leave {said} out."
            )
