"""``kernelcast kernels compile``: what the compiler makes of an operation's Triton candidates, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kernelcast.cli.common import DefinitionArgument, JsonOption

if TYPE_CHECKING:
    from kernelcast.kernels.compile_plan import Plan

#: Seconds for one compile where none are given: most take one or two.
TIME_LIMIT_S = 60.0


def compile_(
    operation: Annotated[str, typer.Option("--op", "--operation", help="Operation, such as gemm.")],
    target: Annotated[str, typer.Option("--target", help="Architecture, such as sm90 or gfx942.")],
    definition: DefinitionArgument = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Of the problem. \\[default: float16 where the operation takes it]",
            show_default=False,
        ),
    ] = None,
    subset: Annotated[
        Literal["default", "full"],
        typer.Option("--subset", help="Each variant's quick subset, or every candidate."),
    ] = "default",
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="This variant alone; may be given again.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Compilers at a time.", show_default="one a CPU")
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="For one compile.")
    ] = TIME_LIMIT_S,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Start no further compile after this long: 90s, 10m, 2h.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.parquet", help="Also write the rows to this file.")
    ] = None,
    use_cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Take and keep facts of earlier compiles.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Compile the legal candidates of an operation's Triton variants for a target. No GPU and no driver is needed.

    Where no problem is named, each variant is compiled for a problem that is usual for it. Values that are given replace
    those of the operation's first usual problem.

    Examples:

      kernelcast kernels compile --op gemm --target sm90

      kernelcast kernels compile --op gemm --target gfx942 m=1024 layout=nt --dtype bfloat16 --out gemm.parquet
    """
    from kernelcast import settings
    from kernelcast.cli.collect import parse_duration
    from kernelcast.cli.common import parse_values, print_json
    from kernelcast.errors import InvalidProblemError
    from kernelcast.kernels import operation as get_operation
    from kernelcast.kernels.compile_cache import CompileCache
    from kernelcast.kernels.compile_many import compile_many, default_workers
    from kernelcast.kernels.compile_plan import plan, problems_to_compile, row_of, summary_of, target_device

    name = get_operation(operation).name
    target_device(target)  # says what is wrong with it before the problem is looked at
    values = parse_values(definition or [])
    if dtype is not None and values.setdefault("dtype", dtype) != dtype:
        raise InvalidProblemError(f"The dtype is given twice: {values['dtype']} and {dtype}.")
    budget_s = parse_duration(budget)
    if out is not None:
        _check_file(out)
    planned = plan(problems_to_compile(name, values), target, subset=subset, names=variant)

    versions = {"target": target, "device": planned.device.name, "triton": _triton_version()}
    places = {id(row.request): place for place, row in enumerate(planned.rows)}
    rows: dict[int, dict[str, Any]] = {}
    answers = compile_many(
        [row.request for row in planned.rows],
        target,
        workers=default_workers() if workers is None else workers,
        time_limit_s=time_limit,
        cache=CompileCache(settings.compile_cache_dir()) if use_cache else None,
        budget_s=budget_s,
    )
    interrupted = False
    try:
        with _Bar(len(planned.rows)) as bar:
            for request, facts in answers:
                place = places[id(request)]
                rows[place] = {**versions, **row_of(planned.rows[place], facts, planned.device)}
                bar.advance(str(request.candidate))
    except KeyboardInterrupt:  # what was compiled is shown and written all the same
        interrupted = True
    found = [rows[place] for place in sorted(rows)]
    summary = summary_of(found)
    unstarted = len(planned.rows) - len(found)
    if out is not None:
        write_parquet(out, found)
    if as_json:
        print_json(
            {
                **versions,
                "shared_bytes_per_block": planned.device.shared_bytes_per_block,
                "summary": summary,
                "not_started": unstarted,
                "variants_without_candidates": list(planned.left_out),
                "file": None if out is None else str(out),
                "rows": found,
            }
        )
    else:
        _show(planned, found, summary, versions["triton"], unstarted, out)
    if interrupted:
        raise typer.Exit(130)
    if not found or summary["over_limit"] or any(row["outcome"] != "ok" for row in found):
        raise typer.Exit(1)


def _show(
    planned: Plan,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    triton: str,
    unstarted: int,
    out: Path | None,
) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kernelcast.cli.common import console
    from kernelcast.kernels import Candidate, Problem

    screen = console()
    problems = {row.request.problem.key: row.request.problem for row in planned.rows}
    for key, problem in problems.items():
        assert isinstance(problem, Problem)
        table = Table(title=f"{problem} for {planned.target}, triton {triton}", title_justify="left")
        for heading in ("variant", "config"):
            table.add_column(heading, overflow="fold")
        for heading in (
            "registers",
            "spills",
            "shared bytes",
            "estimate",
            "ratio",
            "tensor cores",
            "seconds",
        ):
            table.add_column(heading, justify="right")
        table.add_column("outcome")
        for row in rows:
            if row["problem"] != key:
                continue
            config = Candidate.from_key(row["candidate"]).config
            over = " [red]over[/red]" if row["over_limit"] else ""
            table.add_row(
                row["variant"],
                " ".join(f"{name}={value}" for name, value in config),
                _text(row["registers"]),
                _text(row["spills"]),
                _text(row["shared_bytes"]) + over,
                _text(row["estimated_shared_bytes"]),
                _text(row["estimate_ratio"], 2),
                {None: "-", True: "yes", False: "no"}[row["uses_tensor_cores"]],
                _text(row["compile_seconds"], 2),
                row["outcome"],
            )
        if table.row_count:
            screen.print(table)
    for sentence in _sentences(planned, rows, summary, unstarted):
        screen.print(escape(sentence), soft_wrap=True)
    if out is not None:
        screen.print(escape(f"{out}: {len(rows)} rows."), soft_wrap=True)


def _sentences(
    planned: Plan, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], unstarted: int
) -> list[str]:
    from kernelcast.kernels import Candidate

    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items()) or "none compiled"
    found = [f"{summary['candidates']} candidates: {outcomes}."]
    if summary["ratio_min"] is not None:
        found.append(
            f"The rules' estimate is {summary['ratio_min']:.2f} to {summary['ratio_max']:.2f} of the compiler's shared memory."
        )
    if summary["most_spills"] is not None:
        found.append(
            f"{summary['spilling']} spill, at most {summary['most_spills']} words a thread; {summary['over_limit']} "
            f"exceed the {planned.device.shared_bytes_per_block} bytes of shared memory of {planned.device.name}."
        )
    failed = next((row for row in rows if row["outcome"] != "ok" and row["detail"]), None)
    if failed is not None:
        detail = " ".join(failed["detail"].split())[:300]
        found.append(f"The first that failed, {Candidate.from_key(failed['candidate'])}: {detail}")
    if planned.left_out:
        found.append(
            f"No legal candidate: {', '.join(planned.left_out)}. Why, says: kernelcast kernels OPERATION NAME=VALUE ... "
            f"--device {planned.device.name} --why"
        )
    if unstarted:
        found.append(f"{unstarted} candidates were not started; the same command goes on from here.")
    return found


def _text(value: float | None, digits: int | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits or 0}f}"


class _Bar:
    """A progress bar on standard error, gone at the end; nothing where that is not a terminal."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from kernelcast.cli.common import console

        errors = console(stderr=True)
        self._progress = Progress(
            TextColumn("compiling"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=errors,
            transient=True,
            disable=not errors.is_terminal,
        )
        self._task = self._progress.add_task("", total=total, now="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, now: str) -> None:
        """One more is done."""
        self._progress.update(self._task, advance=1, now=now[:60])


def _triton_version() -> str:
    from kernelcast.errors import KernelcastError

    try:
        import triton
    except ImportError as error:
        raise KernelcastError(
            "triton is not installed here, and it is the compiler. It exists for Linux: pip install triton."
        ) from error
    return str(triton.__version__)


def _check_file(path: Path) -> None:
    """Refuse a file that could not be written, before hours of compiling."""
    from kernelcast.errors import MissingExtraError, SettingsError

    if path.suffix != ".parquet":
        raise SettingsError(f"--out is {path}; it must end in .parquet.")
    if not path.parent.is_dir():
        raise SettingsError(f"--out is {path}, but there is no folder {path.parent}.")
    if path.is_dir():
        raise SettingsError(f"--out is {path}, which is a folder; name a file in it.")
    trial = path.with_name(f".{path.name}.partial")
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise SettingsError(f"--out is {path}, which cannot be written ({error.strerror}).") from error
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train", "Writing a Parquet file") from error


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of :func:`kernelcast.kernels.compile_plan.row_of`, with target, device and version, to one file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, whole, real, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    types = {
        **dict.fromkeys(("target", "device", "triton", "operation", "problem", "dtype"), text),
        **dict.fromkeys(("variant", "candidate"), text),
        **dict.fromkeys(("registers", "spills", "shared_bytes"), whole),
        **dict.fromkeys(("estimated_shared_bytes", "estimate_ratio"), real),
        **dict.fromkeys(("over_limit", "uses_tensor_cores"), flag),
        "compile_seconds": real,
        **dict.fromkeys(("outcome", "detail"), text),
    }
    # Named types: a column of nothing but None has none of its own.
    table = pa.Table.from_pylist(list(rows), schema=pa.schema(list(types.items())))
    partial = path.with_name(f".{path.name}.partial")
    try:
        pq.write_table(table, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
