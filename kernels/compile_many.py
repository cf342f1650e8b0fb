"""Many compilations at once: worker processes, a time limit for each compile, and a cache on disk.

Workers live long, as importing triton costs as much as compiling a small kernel. Each compiles one kernel at a time; one
that takes too long, or dies, is replaced, and its candidate's outcome is ``timeout`` or ``crash``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kernelcast.errors import KernelcastError, SettingsError, UnknownNameError
from kernelcast.kernels.candidate import Candidate
from kernelcast.kernels.compile import (
    TARGETS,
    CompileFacts,
    candidate_spec,
    code_key,
    compile_facts,
    compiler_key,
    refuse_interpreter,
)
from kernelcast.kernels.compile_cache import CompileCache
from kernelcast.kernels.problem import Problem

#: Seconds for a worker to import triton, on a busy machine with a cold disk.
START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """One candidate to compile, and the problem whose sizes specialise it."""

    problem: Problem
    candidate: Candidate


def default_workers() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_many(
    requests: Iterable[CompileRequest],
    target: str,
    *,
    workers: int,
    time_limit_s: float,
    cache: CompileCache | None = None,
    budget_s: float | None = None,
    fill: bool = False,
) -> Iterator[tuple[CompileRequest, CompileFacts]]:
    """Compile the main kernels of many candidates for a target, in parallel; no GPU and no driver is needed.

    Requests whose machine code is the same are compiled once. Ending the iteration early, by an exception such as
    Ctrl-C or by ``close()``, ends the workers.

    Args:
        requests: candidates of variants that have ``compile_spec``; taken as workers become free.
        target: a key of :data:`kernelcast.kernels.compile.TARGETS`.
        workers: processes, at most.
        time_limit_s: for one compile.
        cache: facts that are in it are not compiled again; new ones are added, and what took too long.
        budget_s: start no compile later than this; requests that are neither cached nor started are left out.
        fill: leave the machine code in Triton's own cache, where launches in other processes find it. What is there
            already is not compiled again, so the seconds are not those of a compilation.

    Yields:
        (request, facts), in the order in which they are done.

    Raises:
        UnknownNameError: no such target, operation or variant.
        SettingsError: a number is not positive.
        KernelcastError: a variant has no Triton kernel, ``TRITON_INTERPRET`` is set, Triton or its tools are missing, or
            no worker can start.
    """
    if target not in TARGETS:
        raise UnknownNameError("target", target, TARGETS)
    for name, value in (("workers", workers), ("time_limit_s", time_limit_s), ("budget_s", budget_s)):
        if value is not None and not 0 < value < float("inf"):
            raise SettingsError(f"{name} is {value}; it must be a positive number.")
    refuse_interpreter()
    try:
        compiler_key(target)
    except Exception as error:  # an ImportError, or whatever a backend raises that lacks its tools
        raise KernelcastError(
            f"Triton cannot compile for {target} ({type(error).__name__}: {error}). Install triton, which has its own tools."
        ) from error
    stop_at = time.monotonic() + (budget_s or float("inf"))
    return _compile_all(iter(requests), target, workers, time_limit_s, cache, stop_at, fill)


def _compile_all(
    requests: Iterator[CompileRequest],
    target: str,
    workers: int,
    time_limit_s: float,
    cache: CompileCache | None,
    stop_at: float,
    fill: bool,
) -> Iterator[tuple[CompileRequest, CompileFacts]]:
    waiting: dict[str, list[CompileRequest]] = {}  # requests by the code that is being compiled for them
    done: dict[str, CompileFacts] = {}
    with _Pool(target, workers, time_limit_s, fill=fill) as pool:
        for request in requests:
            try:
                key = code_key(candidate_spec(request.problem, request.candidate, target), target)
            except KernelcastError:
                raise
            # A variant that cannot describe its kernel is this candidate's failure, as if the compiler had refused it.
            except Exception as error:  # noqa: BLE001
                detail = f"compile_spec: {type(error).__name__}: {error}"[:2000]
                yield request, CompileFacts(outcome="compile_error", detail=detail)
                continue
            known = done.get(key) or (cache.get(target, key, time_limit_s) if cache else None)
            if known is not None:
                done[key] = known
                yield request, known
            elif key in waiting:
                waiting[key].append(request)
            elif time.monotonic() < stop_at:
                waiting[key] = [request]
                # When every worker is at work, one has to finish first.
                for ended, facts in pool.submit(key, request):
                    yield from _answer(ended, facts, target, time_limit_s, cache, waiting, done)
        while pool.busy:
            for ended, facts in pool.wait():
                yield from _answer(ended, facts, target, time_limit_s, cache, waiting, done)


def _answer(
    key: str,
    facts: CompileFacts,
    target: str,
    time_limit_s: float,
    cache: CompileCache | None,
    waiting: dict[str, list[CompileRequest]],
    done: dict[str, CompileFacts],
) -> Iterator[tuple[CompileRequest, CompileFacts]]:
    done[key] = facts
    # Other failures may be the machine's (memory, a full disk), so they are tried again next time.
    if cache is not None and facts.outcome in ("ok", "timeout"):
        cache.put(target, key, facts, time_limit_s)
    for request in waiting.pop(key):
        yield request, facts


class _Pool:
    """Workers, started when there is something for them to do."""

    def __init__(self, target: str, size: int, time_limit_s: float, *, fill: bool = False) -> None:
        self._target = target
        self._fill = fill
        self._size = size
        self._time_limit_s = time_limit_s
        self._workers: list[_Worker] = []
        self._queue: deque[tuple[str, CompileRequest]] = deque()

    def __enter__(self) -> _Pool:
        self._folder = Path(tempfile.mkdtemp(prefix="kernelcast-compile-"))
        self._selector = selectors.DefaultSelector()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def busy(self) -> bool:
        """Whether a compile is under way or still has to begin."""
        return bool(self._queue) or any(worker.key is not None for worker in self._workers)

    def submit(self, key: str, request: CompileRequest) -> list[tuple[str, CompileFacts]]:
        """Hand over one compile. Returns what was finished while it waited for a worker."""
        finished = []
        self._queue.append((key, request))
        self._hand_out()
        # One request may wait for each worker that is starting.
        while len(self._queue) > sum(not worker.ready for worker in self._workers):
            finished += self.wait()
        return finished

    def wait(self) -> list[tuple[str, CompileFacts]]:
        """Wait until something happens. Returns what is finished, which may be nothing."""
        finished = []
        soonest = min((worker.deadline for worker in self._workers), default=0.0)
        # Not for ever: a wait of many hours would overflow.
        ready = self._selector.select(min(max(soonest - time.monotonic(), 0.0), 3600.0))
        for event, _ in ready:
            worker = event.data
            key, message = worker.key, worker.receive()
            if message is None:
                crash = worker.crash()
                self._remove(worker)
                if not worker.ready:
                    raise KernelcastError(f"A worker that compiles kernels cannot start: {crash.detail}")
                if key is not None:
                    finished.append((key, crash))
            elif "facts" in message:
                finished.append((key, CompileFacts(**message["facts"])))
        now = time.monotonic()
        for worker in [each for each in self._workers if each.deadline <= now]:
            self._remove(worker)
            if not worker.ready:
                raise KernelcastError(
                    f"A worker that compiles kernels did not start within {START_LIMIT_S:g} s. Try fewer workers."
                )
            facts = CompileFacts(
                outcome="timeout",
                detail=f"over {self._time_limit_s:g} s",
                compile_seconds=now - worker.started,
            )
            assert worker.key is not None  # only a worker that compiles has a deadline
            finished.append((worker.key, facts))
        self._hand_out()
        return finished

    def _hand_out(self) -> None:
        while self._queue:
            idle = next((each for each in self._workers if each.ready and each.key is None), None)
            if idle is None:
                break
            idle.compile(*self._queue.popleft(), self._target, self._time_limit_s)
        # One that is starting will take what waits.
        starting = sum(not worker.ready for worker in self._workers)
        if len(self._queue) > starting and len(self._workers) < self._size:
            worker = _Worker(self._folder, self._target, fill=self._fill)
            self._workers.append(worker)
            self._selector.register(worker.answers, selectors.EVENT_READ, worker)

    def _remove(self, worker: _Worker) -> None:
        self._selector.unregister(worker.answers)
        self._workers.remove(worker)
        worker.kill()


class _Worker:
    """One process that compiles what it is told, one kernel at a time."""

    def __init__(self, folder: Path, target: str, *, fill: bool = False) -> None:
        self.ready = False
        self.key: str | None = None
        self.started = time.monotonic()
        self.deadline = self.started + START_LIMIT_S
        self._log: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by kill
        # The compiler prints to both standard streams, so answers take a pipe of their own.
        reading, writing = os.pipe()
        self.answers = os.fdopen(reading, "rb")
        # Triton keeps what it compiles, even where its cache is not asked: not among the user's own kernels, unless wanted.
        environment = dict(os.environ) if fill else {**os.environ, "TRITON_CACHE_DIR": str(folder / "triton")}
        mode = "fill" if fill else "fresh"
        try:
            # A session of its own: Ctrl-C reaches this process alone, and the assembler that a compile starts ends with
            # its worker.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kernelcast.kernels.compile_many", str(writing), target, mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=(writing,),
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(writing)

    def compile(self, key: str, request: CompileRequest, target: str, time_limit_s: float) -> None:
        """Begin a compile."""
        self.key, self.started = key, time.monotonic()
        self.deadline = self.started + time_limit_s
        message = {
            "problem": request.problem.to_dict(),
            "candidate": request.candidate.key,
            "target": target,
        }
        assert self.process.stdin is not None
        # A worker that has died in the meantime shows at the other pipe.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """The next message, ``None`` where the process is gone."""
        line = self.answers.readline()
        if not line.endswith(b"\n"):
            # Its own exit status says more than that of the signal that makes sure.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            return None
        self.ready, self.key, self.deadline = True, None, float("inf")
        message: dict[str, Any] = json.loads(line)
        return message

    def crash(self) -> CompileFacts:
        """What is known of a compile in which the process died."""
        said = self.errors()[-1500:]
        return CompileFacts(
            outcome="crash",
            detail=f"exit status {self.process.returncode}: {said}",
            compile_seconds=time.monotonic() - self.started,
        )

    def errors(self) -> str:
        """What the process wrote to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.answers.close()
        self._log.close()


def _worker_main() -> None:
    """Compile the requests of standard input, one a line, and write the answers to a descriptor.

    The command line has the descriptor's number, the target, and ``fresh`` or ``fill``.
    """
    answers = os.fdopen(int(sys.argv[1]), "w")
    fill = sys.argv[3] == "fill"
    # Imports triton and its compiler before the clock of the first compile starts.
    compiler_key(sys.argv[2])
    if fill:
        import torch  # noqa: F401 - likewise: it describes arguments to Triton's launcher

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            facts = compile_facts(
                Problem.from_dict(request["problem"]),
                Candidate.from_key(request["candidate"]),
                request["target"],
                fresh=not fill,
            )
        # Not the compiler's refusal, which is among the facts: a tool that failed, or an operation that only the parent has.
        except Exception as error:  # noqa: BLE001
            facts = CompileFacts(outcome="crash", detail=f"{type(error).__name__}: {error}"[:2000])
        answer(facts=dataclasses.asdict(facts))


if __name__ == "__main__":
    _worker_main()
