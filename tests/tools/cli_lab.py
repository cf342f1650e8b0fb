"""What tests of the command line share: all of its commands, built once."""

from __future__ import annotations

import functools
from typing import Any

import typer

from kernelcast.cli import app as application
from kernelcast.cli import commands


class BuiltOnce(typer.Typer):
    """An application whose commands are built at its first call.

    typer builds every command at every call of an application, which takes longer than most of the tests here. A command
    that is added after the first call is not seen.
    """

    _built: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._built is None:
            self._built = typer.main.get_command(self)
        return self._built(*args, **kwargs)


@functools.cache
def command_line() -> BuiltOnce:
    """The command line with all of its commands, to stand for ``kernelcast.cli.app.app`` in any number of tests."""
    app = BuiltOnce(no_args_is_help=True)
    app.callback()(application._options)
    commands.attach(app)
    return app
