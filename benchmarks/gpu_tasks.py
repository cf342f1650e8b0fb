"""Child processes under supervision: a crash, a hang or a long compilation costs one item, and never the run.

A child writes one JSON object a line to its progress file. ``{"kind": "start", "item": [...]}`` says what it begins, any
other line with the same ``item`` that it is done. Where a child dies or falls silent in the middle of an item, the
supervisor appends ``{"kind": "died", "item": [...], "outcome": "crash" or "timeout", "detail": ...}`` and starts it again; it
reads the file and goes on behind that item.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: A child ends with this status to be started again, after it noted a failure that broke its device context.
RESTART_STATUS = 75
MOST_RESTARTS = 25

#: No child is started with less time than this, in seconds: it would not get past its imports.
_LEAST_SECONDS = 4.0
_POLL_SECONDS = 0.05
_KILL_SECONDS = 2.0
_DETAIL_CHARACTERS = 600

Line = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What one child is to do.

    Attributes:
        name: unique among the tasks; letters, digits, ``.``, ``_`` and ``-``.
        step: the child's function.
        spec: its arguments, as JSON values.
        limit_s: wall-clock time for the task with all its restarts.
        silence_s: time without a line after which the child counts as hung.
    """

    name: str
    step: str
    spec: Mapping[str, Any]
    limit_s: float
    silence_s: float = 60.0


@dataclass
class TaskResult:
    """What became of a task.

    Attributes:
        state: ``"done"``, ``"failed"``, ``"out of time"`` or ``"not started"``.
        detail: why it is not done.
        lines: everything that it reported, in order.
        restarts: how often it was started again.
    """

    task: Task
    state: str = "not started"
    detail: str = "no time was left"
    seconds: float = 0.0
    lines: list[Line] = field(default_factory=list)
    restarts: int = 0


class Reporter:
    """A child's side of the progress file.

    Attributes:
        earlier: the lines of the child's earlier lives.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.earlier = _lines(path.read_bytes())

    def __call__(self, kind: str, **values: Any) -> None:
        """Write one line, at once."""
        os.write(self._descriptor, (json.dumps({"kind": kind, **values}) + "\n").encode())

    def finished(self) -> dict[tuple[str, ...], Line]:
        """Items that are done, or in which an earlier life died, with their last line."""
        return {
            tuple(line["item"]): line for line in self.earlier if "item" in line and line["kind"] != "start"
        }


def run_tasks(
    tasks: Sequence[Task],
    command: Sequence[str],
    folder: Path,
    *,
    deadline: float,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[Task, Line], None] | None = None,
) -> list[TaskResult]:
    """Run tasks in child processes, some at a time, in order.

    Args:
        tasks: what to do.
        command: the child's command; ``--step``, ``--spec`` and ``--progress`` with their values are appended.
        folder: for their files.
        deadline: moment of :func:`time.monotonic` at which every child is ended.
        workers: children at a time.
        environment: the children's; this process's where None.
        on_line: told of every line soon after it was written.
    """
    results = [TaskResult(task) for task in tasks]
    waiting = [_Child(result, command, folder, environment, on_line) for result in results]
    running: list[_Child] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers and deadline - time.monotonic() > _LEAST_SECONDS:
                child = waiting.pop(0)
                child.start()
                running.append(child)
            if not running:
                break
            time.sleep(_POLL_SECONDS)
            running = [child for child in running if not child.settled(deadline)]
    finally:
        for child in running:
            child.kill()
    return results


class _Child:
    def __init__(
        self,
        result: TaskResult,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None,
        on_line: Callable[[Task, Line], None] | None,
    ) -> None:
        self._result, self._task = result, result.task
        self._environment, self._on_line = environment, on_line
        self._progress = folder / f"{self._task.name}.progress.jsonl"
        self._log = folder / f"{self._task.name}.log"
        spec = folder / f"{self._task.name}.spec.json"
        spec.write_text(json.dumps(self._task.spec))
        files = ("--spec", str(spec), "--progress", str(self._progress))
        self._command = [*command, "--step", self._task.step, *files]
        self._read_to = 0
        self._began = 0.0
        self._news = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._news = time.monotonic()
        self._began = self._began or self._news
        with self._log.open("ab") as log:
            # A group of its own, so that a compiler that the child started ends with it.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=None if self._environment is None else dict(self._environment),
                process_group=0,
            )

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process that hangs in the driver may not even end so, and must not keep this one.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_KILL_SECONDS)

    def settled(self, deadline: float) -> bool:
        """Look after the child; True once it needs no more looking after."""
        assert self._process is not None
        status = self._process.poll()
        if self._read():
            self._news = time.monotonic()
        now = time.monotonic()
        self._result.seconds = now - self._began
        if status is None:
            if now >= min(deadline, self._began + self._task.limit_s):
                self.kill()
                self._read()
                return self._end("out of time", "its time limit was reached")
            if now - self._news < self._task.silence_s:
                return False
            self.kill()
            why = f"no answer for {self._task.silence_s:.0f} s"
            return self._again("timeout", why, deadline)
        if status == 0:
            return self._end("done", "")
        if status == RESTART_STATUS:
            return self._restart(deadline, "it asked to be started again")
        return self._again("crash", f"exit status {status}: {self._last_words()}", deadline)

    def _again(self, outcome: str, detail: str, deadline: float) -> bool:
        """Note the item in which the child ended, and start it again behind that item."""
        self._read()
        item = self._open_item()
        if item is None:
            return self._end("failed", detail)
        line = {"kind": "died", "item": item, "outcome": outcome, "detail": detail}
        whole = not self._progress.exists() or self._progress.read_bytes().endswith(b"\n")
        with self._progress.open("a") as file:
            file.write(("" if whole else "\n") + json.dumps(line) + "\n")
        self._read()
        return self._restart(deadline, detail)

    def _restart(self, deadline: float, detail: str) -> bool:
        self._result.restarts += 1
        if self._result.restarts > MOST_RESTARTS:
            return self._end("failed", f"started again {MOST_RESTARTS} times; the last time: {detail}")
        left = min(deadline, self._began + self._task.limit_s) - time.monotonic()
        if left < _LEAST_SECONDS:
            return self._end("out of time", "its time limit was reached")
        self.start()
        return False

    def _end(self, state: str, detail: str) -> bool:
        self._result.state, self._result.detail = state, detail
        return True

    def _open_item(self) -> list[str] | None:
        """The last item begun, unless it was done."""
        open_item = None
        for line in self._result.lines:
            if line["kind"] == "start":
                open_item = line["item"]
            elif line.get("item") == open_item:
                open_item = None
        return open_item

    def _read(self) -> bool:
        """Take in what the child has written; True if that is anything."""
        if not self._progress.exists():
            return False
        with self._progress.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        end = new.rfind(b"\n") + 1
        self._read_to += end
        for line in _lines(new[:end]):
            self._result.lines.append(line)
            if self._on_line is not None:
                self._on_line(self._task, line)
        return end > 0

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-_DETAIL_CHARACTERS:] or "it said nothing"


def _lines(content: bytes) -> list[Line]:
    """The complete lines; one that a kill cut off is no line."""
    found = []
    for text in content.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found
