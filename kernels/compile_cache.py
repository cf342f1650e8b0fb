"""What the compiler made of kernels, kept on disk by what decides the machine code.

One file of JSON lines a target, only ever appended to, so that any number of processes may write at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from kernelcast.errors import warn
from kernelcast.kernels.compile import CompileFacts

#: How every line begins: one that begins so and does not end is what a killed writer left.
_START = b'{"key":'


class CompileCacheWarning(UserWarning):
    """The cache of compiles cannot be read or written; what it lacks is compiled again."""


class CompileCache:
    """The facts of compiles by :func:`kernelcast.kernels.compile.code_key`.

    A file is read when its target is first asked for. No fault of the disk is an error: it costs a compile.

    Args:
        folder: made with the first fact that is kept; see :func:`kernelcast.settings.compile_cache_dir`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, dict[str, tuple[CompileFacts, float]]] = {}
        self._writable = True

    def get(self, target: str, key: str, time_limit_s: float = 0.0) -> CompileFacts | None:
        """The facts of some machine code, or None where they are not known.

        A timeout is known only for those who would wait no longer than was waited.
        """
        facts, waited_s = self._of(target).get(key, (None, 0.0))
        if facts is not None and facts.outcome == "timeout" and time_limit_s > waited_s:
            return None
        return facts

    def put(self, target: str, key: str, facts: CompileFacts, time_limit_s: float = 0.0) -> None:
        """Keep the facts of some machine code, here and on disk."""
        self._of(target)[key] = (facts, time_limit_s)
        record = {"key": key, "time_limit_s": time_limit_s, **dataclasses.asdict(facts)}
        # Line ends on both sides: a line that another writer was killed in must not swallow this one.
        line = b"\n" + json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if not self._writable:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path(target), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._writable = False
            self._warn(f"{self._path(target)} cannot be written ({error.strerror or error})")

    def count(self, target: str) -> int:
        """How many facts of a target there are."""
        return len(self._of(target))

    def _path(self, target: str) -> Path:
        return self.folder / f"{target}.jsonl"

    def _of(self, target: str) -> dict[str, tuple[CompileFacts, float]]:
        if target not in self._held:
            self._held[target] = self._read(target)
        return self._held[target]

    def _read(self, target: str) -> dict[str, tuple[CompileFacts, float]]:
        path = self._path(target)
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn(f"{path} cannot be read ({error.strerror or error})")
            return {}
        held: dict[str, tuple[CompileFacts, float]] = {}
        broken = 0
        for line in lines:
            if not line:
                continue
            try:
                key, facts, limit = _parse(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                broken += not (line.startswith(_START) and not line.endswith(b"}"))
            else:
                held[key] = (facts, limit)
        if broken:
            self._warn(f"{path} holds {broken} that are not facts of a compile, of {len(lines)} lines")
        return held

    def _warn(self, fault: str) -> None:
        warn(f"{fault}; what is missing is compiled again.", CompileCacheWarning)


def _parse(line: bytes) -> tuple[str, CompileFacts, float]:
    record: dict[str, Any] = json.loads(line)
    key, limit = record.pop("key"), record.pop("time_limit_s")
    facts = CompileFacts(**record)
    numbers = (facts.registers, facts.spills, facts.shared_bytes)
    if (
        type(key) is not str
        or not all(type(number) is int and number >= 0 for number in numbers)
        or type(facts.uses_tensor_cores) is not bool
        or type(facts.compile_seconds) not in (int, float)
        or facts.outcome not in ("ok", "compile_error", "timeout")
        or type(facts.detail) is not str
        or type(limit) not in (int, float)
    ):
        raise ValueError("not facts of a compile")
    return key, facts, float(limit)
