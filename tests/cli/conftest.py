"""Commands are built once for all tests of the command line: what ``kernelcast.cli.app._run`` runs is that application."""

import pytest
from cli_lab import command_line

from kernelcast.cli import app as application


@pytest.fixture(autouse=True)
def _built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "app", command_line())
