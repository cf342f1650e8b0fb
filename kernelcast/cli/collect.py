"""``kernelcast collect``: measure candidates on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kernelcast.cli.common import DefinitionArgument, JsonOption, StoreOption
from kernelcast.cli.executors import (
    ExecutorOption,
    IsolateOption,
    MaxMemoryOption,
    RayAddressOption,
    TimeLimitOption,
    WorkerDeviceOption,
)
from kernelcast.cli.strategies import (
    FromWorkloadsOption,
    MeasurementsOption,
    ReplayOption,
    StrategyOption,
)


def attach(app: typer.Typer) -> None:
    """Add the command."""
    app.command("collect")(collect)


def collect(
    context: typer.Context,
    operation: Annotated[str | None, typer.Argument(help="An operation; leave out with --problems.")] = None,
    definition: DefinitionArgument = None,
    problems: Annotated[
        Path | None, typer.Option("--problems", help="A file with one problem a line: gemm m=64 n=64 k=4096")
    ] = None,
    workload: Annotated[str, typer.Option("--workload", help="A name for this set of problems.")] = "default",
    subset: Annotated[
        str,
        typer.Option(
            "--subset",
            help="full, default (each variant's quick subset), or auto: the quick subset of large spaces.",
        ),
    ] = "auto",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of timing at most.")] = 20,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.01, help="Time for one problem's rounds.")
    ] = 10.0,
    budget: Annotated[
        str | None, typer.Option("--budget", help="End after this long, compiling included: 90s, 10m, 2h.")
    ] = None,
    isolate: IsolateOption = "auto",
    max_memory: MaxMemoryOption = None,
    time_limit: TimeLimitOption = None,
    executor: ExecutorOption = "local",
    ray_address: RayAddressOption = None,
    device: WorkerDeviceOption = None,
    strategy: StrategyOption = "exhaustive",
    measurements: MeasurementsOption = None,
    replay: ReplayOption = None,
    from_workloads: FromWorkloadsOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs, the order and the strategy.")] = 0,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the legal candidates of some problems on this machine, and keep the measurements.

    What the store holds already is not measured again, so an interrupted run goes on where it was.

    Examples:

      kernelcast collect gemm m=64 n=64 k=4096

      kernelcast collect --problems shapes.txt --workload resnet --budget 10m

      kernelcast collect --problems shapes.txt --executor ray --ray-address auto --max-memory 8GiB

      kernelcast collect --problems shapes.txt --strategy active --measurements 25%

      kernelcast collect gemm --replay recorded --device a100 --strategy active --measurements 25% --store quarter
    """
    from kernelcast.cli.common import console, print_json, resolve_store, warn_if_noisy
    from kernelcast.cli.executors import ExecutorChoice
    from kernelcast.cli.strategies import StrategyChoice, refuse_without_replay, replayed
    from kernelcast.datasets.collect import collect as run
    from kernelcast.datasets.journal import require_writable
    from kernelcast.datasets.timing import TimingPlan
    from kernelcast.errors import SettingsError

    if subset not in ("full", "default", "auto"):
        raise SettingsError(f"--subset is {subset!r}; it must be full, default or auto.")
    budget_seconds = parse_duration(budget)
    chosen = StrategyChoice(strategy, measurements, seed)
    folder = resolve_store(store)
    if replay is not None:
        with progress_bar("replaying") as on_progress:
            summary, hardware = replayed(
                context, replay, folder, chosen, budget_seconds=budget_seconds, on_progress=on_progress
            )
    else:
        refuse_without_replay(from_workloads)
        choice = ExecutorChoice(executor, isolate, max_memory, time_limit, ray_address, device)
        plan = TimingPlan(rounds=rounds, seconds=seconds, seed=seed)
        with choice.open() as (measuring, hardware, idle):
            wanted = _problems(operation, definition, problems, hardware)
            choosing = chosen.open(hardware)
            require_writable(folder)  # says what is wrong with it before anything is measured
            if idle:
                console(stderr=True).print(
                    f"Not measured on, as records are of one device ({hardware.name}): {', '.join(idle)}",
                    markup=False,
                    soft_wrap=True,
                )
            if executor != "ray":
                warn_if_noisy(hardware)
            with progress_bar("collecting") as on_progress:
                summary = run(
                    wanted,
                    hardware,
                    folder,
                    workload=workload,
                    subset=subset,
                    plan=plan,
                    budget_seconds=budget_seconds,
                    on_progress=on_progress,
                    strategy=choosing,
                    executor=measuring,
                )
    if as_json:
        print_json(
            {
                **vars(summary),
                "outcomes": dict(summary.outcomes),
                "unfinished": [vars(each) for each in summary.unfinished],
                "store": str(folder),
                "device": hardware.name,
            }
        )
        if summary.interrupted:
            raise typer.Exit(130)
        return
    ended = "Done" if summary.complete else "Stopped before the end; the same command goes on from here"
    outcomes = ", ".join(f"{count} {name}" for name, count in summary.outcomes.most_common()) or "none"
    # Text, not markup: a folder's name may hold brackets.
    out = console()
    out.print(
        f"{ended}: {summary.problems} problems, {summary.measured} candidates "
        f"{'measured' if replay is None else 'taken'} ({outcomes}), "
        f"{summary.known} known already, {summary.seconds:.1f} s. Store: {folder}",
        markup=False,
        soft_wrap=True,
    )
    for sentence in summary.failures:
        out.print(f"Failed: {sentence}", markup=False, soft_wrap=True)
    for sentence in summary.skipped:
        out.print(f"Skipped: {sentence}", markup=False, soft_wrap=True)
    for each in summary.unfinished:
        best = "none worked" if each.best is None else f"best so far: {each.best}, {each.latency_us:.1f} us"
        out.print(
            f"Incomplete: {each.problem}: {each.measured} of {each.candidates} candidates; {best}",
            markup=False,
            soft_wrap=True,
        )
    if summary.interrupted:
        raise typer.Exit(130)


def _problems(
    operation: str | None, definition: list[str] | None, path: Path | None, hardware: Any
) -> list[Any]:
    from kernelcast.cli.common import parse_problem
    from kernelcast.errors import InvalidProblemError, KernelcastError

    if (operation is None) == (path is None):
        raise InvalidProblemError("Give either an operation with its dimensions, or --problems FILE.")
    if operation is not None:
        return [parse_problem(operation, definition or [], hardware)]
    assert path is not None
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidProblemError(
            f"{path} is not a text file ({error.reason} at byte {error.start})."
        ) from error
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            found.append(parse_problem(words[0], words[1:], hardware))
        except KernelcastError as error:
            raise InvalidProblemError(f"{path}, line {number}: {error}") from error
    if not found:
        raise InvalidProblemError(
            f"{path} holds no problem. Write one a line, such as: gemm m=64 n=64 k=4096"
        )
    return found


def parse_duration(text: str | None) -> float | None:
    """``"90s"``, ``"10m"``, ``"2h"`` or plain seconds -> seconds.

    Raises:
        SettingsError: the text is none of these, or not positive.
    """
    from kernelcast.errors import SettingsError

    if text is None:
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SettingsError(
            f"The duration {text!r} is not a positive number with s, m or h behind it, such as 10m."
        )
    return seconds


class progress_bar:
    """A bar on standard error that shows how many candidates are done, how long is left, and the problem in hand."""

    def __init__(self, label: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from kernelcast.cli.common import console

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[problem]}"),
            console=console(stderr=True),
        )
        self._task = self._progress.add_task(label, total=None, problem="")

    def __enter__(self) -> Any:
        return self._update

    def __exit__(self, *_: object) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def _update(self, progress: Any) -> None:
        self._progress.start()  # now, not before: what is refused at once shows no bar
        self._progress.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            problem="" if progress.problem is None else str(progress.problem)[:60],
        )
