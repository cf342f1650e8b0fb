"""Every error that kernelcast raises on purpose.

Each message says what was wrong, what was seen and what to do next; the command line prints that sentence and exits
with status 2. What is no error is said by :func:`warn`. A leaf module: it imports nothing of kernelcast, and every room may import it.

::

    KernelcastError
    ├── SettingsError          a setting has a value that cannot be used
    ├── UnknownNameError       no operation, variant, device, ... of that name
    ├── InvalidProblemError    a problem's dimensions, dtype or options are wrong
    ├── InvalidRecordError     a record's fields contradict each other
    ├── IllegalCandidateError  a candidate that breaks a rule was asked for
    ├── StoreError             the measurement store cannot be read or written
    ├── ImportFileError        a file of measurements is broken or contradicts what was said of it
    ├── ModelError             a model cannot be fitted or is missing
    │   └── ArtifactError      a model's folder is broken, or was made for something else
    │       └── EarlierLayoutError  it was written by an earlier kernelcast
    └── MissingExtraError      an optional library is needed and not installed
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

#: Packages whose frames are not the caller's: ours, and those through which ours may have been called.
_NOT_THE_CALLER = frozenset({__name__.partition(".")[0], "torch", "triton"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line of the call stack that is neither ours nor of a framework that called us."""
    level, frame = 2, sys._getframe(1)
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLER
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class KernelcastError(Exception):
    """Base of every error that kernelcast raises on purpose."""


class SettingsError(KernelcastError):
    """A setting (environment variable or argument) has a value that cannot be used."""


class UnknownNameError(KernelcastError):
    """Nothing is registered under a name; the message lists the names that are."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(known)
        close = difflib.get_close_matches(str(name), self.known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        listed = ", ".join(self.known) or "none"
        super().__init__(f"Unknown {kind} {name!r}.{hint} Known: {listed}.")

    # Python pickles an exception as its class called with its message: these have other arguments, and cross processes.
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.kind, self.name, self.known)


class InvalidProblemError(KernelcastError):
    """A problem's dimensions, dtype or options do not fit its operation."""


class InvalidRecordError(KernelcastError):
    """A record's fields contradict each other."""


class IllegalCandidateError(KernelcastError):
    """A candidate was asked for that breaks a rule on this problem and device."""


class StoreError(KernelcastError):
    """The measurement store cannot be read or written."""


class ImportFileError(KernelcastError):
    """A file of measurements is broken, or contradicts what was said of it. Nothing of it was kept."""

    def __init__(self, path: object, problem: str, *, line: int | None = None) -> None:
        self.path = str(path)
        self.problem = problem
        self.line = line
        where = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(f"{where}: {problem}")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial(type(self), line=self.line), (self.path, self.problem)


class ModelError(KernelcastError):
    """A cost model cannot be fitted on these data, or there is none."""


class ArtifactError(ModelError):
    """A model's folder is broken, was changed, or was made for something else."""


class EarlierLayoutError(ArtifactError):
    """A model's folder is of a layout that an earlier kernelcast wrote: the model must be trained again."""


class MissingExtraError(KernelcastError):
    """An optional library is needed and not installed; the message names the extra to install."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        self.library = library
        self.extra = extra
        self.purpose = purpose
        super().__init__(
            f"{purpose} needs {library}, which is not installed. Install it with: pip install 'kernelcast[{extra}]'"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(self), (self.library, self.extra, self.purpose)
