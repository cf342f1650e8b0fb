"""The application: which commands there are, and how errors become one sentence and exit status 2."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from typing import Annotated, Any

import typer

from kernelcast.errors import KernelcastError

#: Base of the errors of arguments: click's ClickException. Newer versions of typer carry a click of their own, so it
#: is found through the one error that typer gives out.
_UsageError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="kernelcast",
    help="Forecast the fastest kernel for an operation, a shape and a device; measure only the few that matter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_debug = False


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE|FILE",
            help="Kernels of your own: a module, or a file such as ./my_kernels.py. Also $KERNELCAST_IMPORT.",
        ),
    ] = None,
) -> None:
    global _debug
    _debug = debug
    if imports:
        # By the environment, as processes that a command starts need them too.
        both = [*filter(None, [os.environ.get("KERNELCAST_IMPORT")]), *imports]
        os.environ["KERNELCAST_IMPORT"] = ",".join(both)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 done with a negative answer, 2 bad input, 130 interrupted."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    global _debug
    _debug = False
    try:
        from kernelcast.cli import commands

        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            commands.attach(app)
            result = app(args=arguments, prog_name="kernelcast", standalone_mode=False)
        sys.stdout.flush()
        if result == 130:
            print("Interrupted.", file=sys.stderr)
        return result if isinstance(result, int) else 0
    except _UsageError as error:
        error.show()
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`): nothing is wrong, and Python's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:
        # So does typer end a program whose reader went away in the middle.
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except KernelcastError as error:
        return _bad_input(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _bad_input(f"{where}{error.strerror or error}.")


def _bad_input(message: str) -> int:
    if _debug:
        traceback.print_exc()
    print(f"Error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_warning(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
    """A warning as one sentence; where in the code it arose is of no use to who typed a command."""
    if issubclass(category, UserWarning):
        print(f"Warning: {message}", file=sys.stderr)
