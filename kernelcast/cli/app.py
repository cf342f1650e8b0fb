"""The application: which commands there are, and how errors become one sentence and exit status 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import click
import typer

from kernelcast.errors import KernelcastError

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
) -> None:
    global _debug
    _debug = debug


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 done with a negative answer, 2 bad input, 130 interrupted."""
    from kernelcast.cli import commands

    commands.attach(app)
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        result = app(args=arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`): nothing is wrong, and Python's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KernelcastError as error:
        if _debug:
            raise
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if _debug:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"Error: {where}{error.strerror or error}.", file=sys.stderr)
        return 2
