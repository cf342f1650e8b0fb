"""The command line: ``kernelcast COMMAND``. One module a command; each imports what is heavy inside its function."""

from kernelcast.cli.app import main

__all__ = ["main"]
