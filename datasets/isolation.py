"""Measuring in a process of its own, so that whatever a candidate does is its outcome and ends nothing else.

A child is replaced when a candidate ends it, hangs, or spoils the GPU for it; :mod:`kernelcast.datasets.isolation_job` says
what is kept then. Children are forked by a process that has imported torch, which takes longer than most measurements, so a
replacement costs little. They end with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import IO, Any

from kernelcast.datasets.isolation_job import JobState, Message
from kernelcast.datasets.jobs import Executor, InProcess, Job, Result, refuse_in_child
from kernelcast.datasets.precompile import precompile
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, SettingsError
from kernelcast.kernels import Candidate, Device, Problem, variant

#: Seconds for a child to import torch, on a busy machine with a cold disk.
START_LIMIT_S = 180.0
#: Seconds between candidates, in which the inputs and the reference are made and results compared.
SETUP_LIMIT_S = 600.0
#: Seconds by which preparing may exceed a budget before it is ended: a compile cannot be told to stop.
BUDGET_GRACE_S = 5.0

#: Backends whose kernels may end a process, or spoil its device.
UNTRUSTED = ("user", "triton")

# Of isolation_child, which imports what measures.
_HAND_BYTES, _NOBODY, _SPOILED, _NO_STATUS = 16, -1, 77, 2**32
_ORDER = struct.Struct("q")
#: Seconds for the process that forks to say how a child has ended.
_STATUS_LIMIT_S = 10.0


@dataclass(frozen=True)
class Limits:
    """What one candidate may take.

    Attributes:
        seconds: to compile, run and check it, and again for each visit in the rounds.
        memory_bytes: of the process that measures, beyond what it has at its start; on a GPU, of device memory. Infinite
            for no limit.

    Raises:
        SettingsError: a limit is not positive.
    """

    seconds: float = 120.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf and self.memory_bytes > 0):
            raise SettingsError(f"Limits must be positive, and the time finite; these are {self}.")


def trusted(problem: Problem, candidate: Candidate) -> bool:
    """Whether a candidate may be measured in the process that collects."""
    found = variant(problem.operation, candidate.variant)
    return found.backend not in UNTRUSTED if found.trusted is None else found.trusted


class Isolated(Executor):
    """Measures on this machine's device in a child process.

    Args:
        device: this machine's.
        limits: of each candidate.
        only_untrusted: measure jobs whose candidates are all trusted in this process.
    """

    def __init__(self, device: Device, *, limits: Limits | None = None, only_untrusted: bool = False) -> None:
        self._supervisor = Supervisor(device, limits or Limits())
        self._here = InProcess(device)
        self._only_untrusted = only_untrusted

    def run(
        self,
        jobs: Iterable[Job],
        *,
        plan: TimingPlan,
        workload: str,
        on_candidate: Callable[[Job, int], None] | None = None,
    ) -> Iterator[Result]:
        for job in jobs:
            one_each = {candidate.variant: candidate for candidate in job.candidates}.values()
            here = self._only_untrusted and all(trusted(job.problem, each) for each in one_each)
            run = self._here.run if here else self._run_outside
            yield from run([job], plan=plan, workload=workload, on_candidate=on_candidate)

    def _run_outside(self, jobs: Iterable[Job], **options: Any) -> Iterator[Result]:
        return run_jobs([self._supervisor], jobs, **options)

    def close(self) -> None:
        self._supervisor.close()


def run_jobs(
    supervisors: Sequence[Supervisor],
    jobs: Iterable[Job],
    *,
    plan: TimingPlan,
    workload: str,
    on_candidate: Callable[[Job, int], None] | None = None,
) -> Iterator[Result]:
    """Hand out jobs to supervisors as they become free, and give each result as soon as it is there.

    On Ctrl-C what was measured of the jobs in hand comes first, and then the interrupt.
    """
    waiting = iter(jobs)
    more = True
    try:
        while True:
            for idle in [each for each in supervisors if each.state is None] if more else ():
                job = next(waiting, None)
                if job is None:
                    more = False
                    break
                idle.begin(JobState(job, idle.device, plan, workload))
            busy = [each for each in supervisors if each.state is not None]
            if not busy:
                return
            open_ends = [each for each in busy if each.pending]
            if open_ends:
                patience_s = min(each.patience_s for each in open_ends)
                wait([each.fileno() for each in open_ends], timeout=patience_s)
            for each in busy:
                told = each.attend()
                state = each.state
                assert state is not None
                if told and state.checked and on_candidate is not None:
                    on_candidate(state.job, state.checked)
                if state.ended:
                    yield each.finish()
    except KeyboardInterrupt:
        for each in supervisors:
            if each.state is not None:
                each.close_child()
                each.state.interrupt()
                result = each.finish()
                if result.measurements:
                    yield result
        raise
    finally:
        for each in supervisors:
            if each.state is not None:
                each.close_child()
                each.finish()


class Supervisor:
    """Has jobs measured by a child, one at a time, and replaces it when it dies. Nothing here waits, but to compile.

    Args:
        device: what the child measures on.
        limits: of each candidate.
        environment: variables of the child's that differ from this process's.
    """

    def __init__(self, device: Device, limits: Limits, environment: Mapping[str, str] | None = None) -> None:
        self.device = device
        self.state: JobState | None = None
        self._limits = limits
        self._source = Source(limits, environment or {})
        self._child: Child | None = None

    def begin(self, state: JobState) -> list[Message]:
        """Begin a job. Returns what is known of it at once."""
        self.state = state
        told: list[Message] = []
        compiled = precompile(state.job, self.device, time_limit_s=self._limits.seconds)
        if compiled is not None:
            told.append(compiled)
            state.take(compiled)
        self._ask()
        return told

    def _ask(self) -> None:
        """Have the child measure what is left of the job."""
        assert self.state is not None
        if self.state.ended:
            return
        if self._child is None:
            self._child = Child(self._source)
        self._child.ask(self.state.request())

    def fileno(self) -> int:
        """What can be read when the child has told something."""
        assert self._child is not None
        return self._child.fileno()

    @property
    def pending(self) -> bool:
        """Whether a child has something to tell still."""
        return self._child is not None and self.state is not None and not self.state.ended

    @property
    def patience_s(self) -> float:
        """Seconds after which to look for a child that tells nothing."""
        return min(max(self._limits.seconds / 10, 0.02), 1.0)

    def attend(self) -> list[Message]:
        """Take in what the child has told, and replace it if it died or must end. Returns the messages."""
        told: list[Message] = []
        state, child = self.state, self._child
        if state is None or child is None or state.ended:
            return told
        for message in child.receive():
            if message["kind"] != "ready":
                state.take(message)
                told.append(message)
        if state.ended:
            return told
        last: Message | None = None
        number = child.in_hand
        if child.gone:
            last = child.lost(number)
        elif not child.ready:
            if child.idle_s > START_LIMIT_S:
                said = child.said()
                self.close_child()
                raise KernelcastError(
                    f"The process that measures did not start within {START_LIMIT_S:g} s: {said}"
                )
        elif child.idle_s > (self._limits.seconds if number is not None else SETUP_LIMIT_S):
            last = self._too_long(number)
        elif state.preparing and state.seconds_left < -BUDGET_GRACE_S:
            last = {"kind": "over"}
        if last is not None:
            if child.gone and not child.ready:
                self.close_child()
                raise KernelcastError(f"The process that measures cannot start: {last['detail']}")
            self.close_child()
            state.take(last)
            told.append(last)
            if not state.ended and state.seconds_left <= 0:
                over = {"kind": "over"}
                state.take(over)
                told.append(over)
            self._ask()
        return told

    def _too_long(self, number: int | None) -> Message:
        assert self.state is not None
        if number is None:
            return {
                "kind": "refused",
                "detail": f"The inputs and the reference of {self.state.job.problem} did not come in {SETUP_LIMIT_S:g} s.",
            }
        detail = f"over {self._limits.seconds:g} s"
        return {"kind": "lost", "number": number, "outcome": "timeout", "detail": detail, "outside": False}

    def finish(self) -> Result:
        """Take the job away, with what came of it."""
        assert self.state is not None
        result, self.state = self.state.result(), None
        return result

    def close_child(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child; the job in hand, if any, is lost."""
        self.state = None
        self.close_child()
        self._source.close()


class Source:
    """Where children come from: a process that has torch, and forks.

    It is started when the first child is asked for.

    Args:
        limits: of the children.
        environment: variables that differ from this process's.
    """

    def __init__(self, limits: Limits, environment: Mapping[str, str]) -> None:
        self._limits, self._environment = limits, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, files: Sequence[int]) -> None:
        """Have a child made that takes these descriptors. It says itself that it is there."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._start()
        assert self._control is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [_ORDER.pack(0)], list(files))

    def _start(self) -> None:
        refuse_in_child()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_STATUS_LIMIT_S)
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close
        limit = 0 if self._limits.memory_bytes == math.inf else self._limits.memory_bytes
        folders = [folder or os.getcwd() for folder in sys.path]  # noqa: PTH109 - texts, as Python has them
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "kernelcast.datasets.isolation_child"]
        with theirs:
            # A session of its own: Ctrl-C reaches this process alone.
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(limit), json.dumps(folders)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **self._environment},
            )

    def status(self, pid: int) -> int | None:
        """The exit status of a child that has ended; None where it cannot be had."""
        if self._control is None:
            return None
        try:
            self._control.sendall(_ORDER.pack(pid))
            answer = self._control.recv(_ORDER.size)
        except OSError:
            self.close()  # it does not answer, and its next answer would be taken for another one
            return None
        status = int(_ORDER.unpack(answer)[0]) if len(answer) == _ORDER.size else _NO_STATUS
        return None if status == _NO_STATUS else status

    def said(self) -> str:
        """The last of what the process wrote to its standard streams."""
        return "" if self._log is None else _tail(self._log)

    def close(self) -> None:
        """End the process; its children end with it."""
        if self._process is None:
            return
        assert self._control is not None
        assert self._log is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()
        self._log.close()
        self._process = self._control = self._log = None


class Child:
    """One process that measures what it is asked."""

    def __init__(self, source: Source) -> None:
        self.ready = self.gone = self._reaped = False
        self.pid = 0
        self._source = source
        self._log: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by kill
        self._page_file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill
        self._page_file.truncate(_HAND_BYTES)
        self._page = mmap.mmap(self._page_file.fileno(), _HAND_BYTES)
        self._hand = memoryview(self._page).cast("q")
        self._hand[1] = _NOBODY
        self._seen = (0, time.monotonic())
        self._buffer = b""
        reading, self._requests = os.pipe()
        # Not the standard streams, which candidates write to.
        self._answers, writing = os.pipe()
        os.set_blocking(self._answers, False)
        try:
            source.fork([reading, writing, self._page_file.fileno(), self._log.fileno()])
        finally:
            os.close(reading)
            os.close(writing)

    def fileno(self) -> int:
        """The pipe's end."""
        return self._answers

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request. A child that has died in the meantime shows at the other pipe."""
        self._log.truncate(0)
        self._log.seek(0)
        self._seen = (self._hand[0], time.monotonic())
        rest = json.dumps(request).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._requests, rest) :]

    def receive(self) -> list[dict[str, Any]]:
        """Every message that has come."""
        while True:
            try:
                data = os.read(self._answers, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.gone = True
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if lines:
            self.ready = True
            self._seen = (self._hand[0], time.monotonic())
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if message["kind"] == "ready":
                self.pid = int(message["pid"])
        return messages

    @property
    def in_hand(self) -> int | None:
        """The number of the candidate that runs."""
        number = self._hand[1]
        return None if number == _NOBODY else number

    @property
    def idle_s(self) -> float:
        """Seconds since something began or was told."""
        count, at = self._seen
        if self._hand[0] != count:
            self._seen = (self._hand[0], time.monotonic())
            return 0.0
        return time.monotonic() - at

    def lost(self, number: int | None) -> Message:
        """What is known of a process that has ended by itself."""
        status = self._source.status(self.pid) if self.pid else None
        self._reaped = True
        said = self.said()
        short = re.search(r"bad_alloc|out of memory|cannot allocate", _tail(self._log), re.IGNORECASE)
        if status == _SPOILED:
            number = None  # the failure has been told
        return {
            "kind": "lost",
            "number": number,
            "outcome": "out_of_resources" if short else "crash",
            "detail": f"the process that measured ended {_ending(status)}: {said}"[:500],
            # A candidate can hardly do this to its process; the system does it, when memory is short, and so do people.
            "outside": status == -signal.SIGKILL,
        }

    def said(self) -> str:
        """The last of what the process wrote to its standard streams; of a fatal error, where it was."""
        text = _tail(self._log) or self._source.said()
        _, fatal, rest = text.rpartition("Fatal Python error")
        if not fatal:
            return text[-400:]
        what, _, threads = rest.partition("\n")
        _, _, current = threads.partition("Current thread")
        where = current.partition("\n")[2].partition("\n\n")[0]
        return f"{fatal}{what}\n{where}"[:400]

    def kill(self) -> None:
        """End the process and what it started."""
        if not self.pid:
            # It has not said who it is: it ends with the process that makes it.
            self._source.close()
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            if not self._reaped:
                self._source.status(self.pid)
        os.close(self._requests)
        os.close(self._answers)
        self._hand.release()
        self._page.close()
        self._page_file.close()
        self._log.close()


def _tail(log: IO[bytes]) -> str:
    log.seek(max(os.fstat(log.fileno()).st_size - 2**16, 0))
    return log.read().decode(errors="replace").strip()


def _ending(status: int | None) -> str:
    if status is None:
        return "its answers"
    if status >= 0:
        return f"with exit status {status}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-status).name}"
    return f"by signal {-status}"
