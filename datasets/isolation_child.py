"""The processes that measure for another one: ``python -m kernelcast.datasets.isolation_child``.

The one that is started imports torch and measures nothing. At each order it forks a worker, which has torch at once; it never
touches a GPU, so a worker may. What it is told by a socket is at :func:`main`.

A worker's requests come on a pipe, one a line; what they say is in :mod:`kernelcast.datasets.isolation_job`, as is what it
answers on another pipe. Which candidate runs is written to a page of memory that both processes have: to send a message for
each sample would wake the other process in the middle of the rounds. When the process that asked ends, so do these, whatever
they are doing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import mmap
import os
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelcast.datasets.jobs import enter_child
from kernelcast.datasets.observing import Facts, Observer
from kernelcast.datasets.record import Environment
from kernelcast.datasets.timing import TimingPlan, measure
from kernelcast.errors import KernelcastError, UnknownNameError
from kernelcast.kernels import Candidate, Device, Problem, variant
from kernelcast.kernels.detect import detect, torch_device
from kernelcast.kernels.registry import import_file

#: The page: how often something began, and the number of the candidate that runs; NOBODY between candidates.
HAND = struct.Struct("qq")
NOBODY = -1

#: An order, or its answer.
ORDER = struct.Struct("q")

#: Exit status of a process whose GPU can no longer be used.
SPOILED = 77

#: Answer for a process that is no child, as of one before this process.
NO_STATUS = 2**32

_PR_SET_PDEATHSIG = 1


class Reporter(Observer):
    """Sends what a measurement does to the parent. Candidates go by the parent's numbers.

    Args:
        answers: descriptor of the pipe.
        page: the shared page.
        gpu: whether a failure may have spoiled the device for this process.
    """

    def __init__(self, answers: int, page: mmap.mmap, *, gpu: bool) -> None:
        self.numbers: list[int] = []
        self._answers, self._page, self._gpu = answers, page, gpu
        self._count = 0

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message."""
        rest = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        while rest:
            rest = rest[os.write(self._answers, rest) :]

    def _hand(self, number: int) -> None:
        self._count += 1
        HAND.pack_into(self._page, 0, self._count, number)

    def begun(self, facts: Facts) -> None:
        self.send("begun", facts=facts.to_dict())

    def preparing(self, number: int) -> None:
        self._hand(self.numbers[number])

    def prepared(self, number: int) -> None:
        self._hand(NOBODY)
        self.send("prepared", number=self.numbers[number])

    def failed(self, number: int, outcome: str, detail: str) -> None:
        self.send("failed", number=self.numbers[number], outcome=outcome, detail=detail)
        self._hand(NOBODY)
        if self._gpu and not _gpu_works():
            # Whatever runs on this device in this process fails from now on; what was told is with the parent.
            os._exit(SPOILED)

    def timing(self) -> None:
        self.send("timing")

    def visiting(self, number: int) -> None:
        self._hand(self.numbers[number])

    def round(self, samples_us: Mapping[int, float]) -> None:
        self._hand(NOBODY)
        self.send("round", samples={self.numbers[number]: value for number, value in samples_us.items()})


def main() -> None:
    """Fork workers until the socket is closed.

    The command line has the socket's descriptor, the limit of memory in bytes (0 for none), and a list of folders to import
    from, as JSON. An order on the socket is one number. 0 asks for a worker, and comes with descriptors: the pipes of requests
    and answers, the page, and the file of its standard streams. Another number is the process id of a worker that has ended or
    was killed, and is answered with its exit status.
    """
    number, limit, folders = sys.argv[1:]
    enter_child()
    # Interrupts are the parent's: it ends a worker when it has taken what there is.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path += [folder for folder in json.loads(folders) if folder not in sys.path]
    # What a first measurement imports and looks up, so that workers need not.
    import torch  # noqa: F401

    detect("cpu")
    Environment.current("", device_kind="cpu")
    with socket.socket(fileno=int(number)) as control:
        while True:
            order, files, _, _ = socket.recv_fds(control, ORDER.size, 4)
            if len(order) < ORDER.size:
                return
            (pid,) = ORDER.unpack(order)
            if pid:
                control.sendall(ORDER.pack(_status(pid)))
                continue
            above = os.getpid()
            if os.fork() == 0:
                try:
                    control.close()
                    _work(list(files), float(limit) or math.inf, above)
                except BaseException:  # noqa: BLE001 - whatever it is, the loop above is the parent's
                    traceback.print_exc()
                finally:
                    os._exit(1)
            for file in files:
                os.close(file)


def _status(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return NO_STATUS


def _work(files: Sequence[int], memory_bytes: float, parent: int) -> None:
    """Measure what is asked for, until nobody asks any more."""
    requests_file, answers, page_file, log = files
    _end_with(parent)
    os.setsid()  # what a candidate starts ends with this process
    os.dup2(log, 1)
    os.dup2(log, 2)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests_file, requests), daemon=True).start()
    limits = _Limits(memory_bytes)
    with mmap.mmap(page_file, HAND.size) as page:
        Reporter(answers, page, gpu=False).send("ready", pid=os.getpid())
        while True:
            request = json.loads(requests.get())
            device = Device.from_dict(request["device"])
            reporter = Reporter(answers, page, gpu=device.kind == "gpu")
            reporter.numbers = [number for number, _ in request["candidates"]]
            try:
                problem, candidates = described(request)
                _require(device)
                limits.set(device)
                measure(
                    problem,
                    candidates,
                    device,
                    plan=TimingPlan(**request["plan"]),
                    observer=reporter,
                    memory_bytes=memory_bytes,
                    budget_seconds=math.inf if request["seconds"] is None else request["seconds"],
                )
            except KernelcastError as error:
                if device.kind == "gpu" and not _gpu_works():
                    os._exit(SPOILED)
                reporter.send("refused", detail=str(error))
            else:
                reporter.send("done")
            if device.kind == "gpu":
                import torch

                torch.cuda.empty_cache()


def _read(requests_file: int, requests: queue.SimpleQueue[str]) -> None:
    with os.fdopen(requests_file) as lines:
        for line in lines:
            requests.put(line)
    os._exit(0)


def _end_with(parent: int) -> None:
    """End when the parent does, even in the middle of a call that never lets a thread of Python's run."""
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(0)


def described(request: Mapping[str, Any]) -> tuple[Problem, list[Candidate]]:
    """The problem and the candidates of a request, with what describes them imported.

    Raises:
        KernelcastError: it cannot be imported, or does not describe them.
    """
    problem = Problem.from_dict(request["problem"])
    candidates = [Candidate.from_key(key) for _, key in request["candidates"]]

    def missing() -> str:
        try:
            for name in {candidate.variant for candidate in candidates}:
                variant(problem.operation, name)
        except UnknownNameError as error:
            return str(error)
        return ""

    if missing():
        for module, file in request["imports"]:
            _import(module, file)
    if said := missing():
        raise KernelcastError(
            f"The process that measures does not have {problem.operation} as this one does: {said} Define kernels in a "
            "module or a file, and name it in KERNELCAST_IMPORT."
        )
    return problem, candidates


def _import(module: str, file: str) -> None:
    """Import a module by its name, or from its file where it is a script or lies in no folder that is searched."""
    try:
        if module != "__main__":
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
                return
        if file and Path(file).is_file():
            # The name that multiprocessing gives a script's module: what it does as a program is not done again.
            import_file(Path(file), "__mp_main__" if module == "__main__" else module)
    except KernelcastError:
        raise
    except Exception as error:
        raise KernelcastError(
            f"The process that measures cannot import {file or module} ({type(error).__name__}: {error})."
        ) from error


def _require(device: Device) -> None:
    """Refuse to measure for another device: the records would be this one's under a false name."""
    if device.kind == "gpu":
        torch_device(device)
    elif device.fingerprint != (here := detect("cpu")).fingerprint:
        raise KernelcastError(
            f"{device.name} is not here to measure on; the CPU of this worker is {here.name}."
        )


def _gpu_works() -> bool:
    """Whether the GPU still takes work from this process: after an illegal access it does not."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).cpu()
    except Exception:  # noqa: BLE001 - whatever it raises says the same
        return False
    return True


class _Limits:
    """What this process may take: more than that fails, instead of making the system choose whom to end."""

    def __init__(self, memory_bytes: float) -> None:
        self._memory_bytes = memory_bytes
        self._set: set[str] = set()
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            resource.setrlimit(
                resource.RLIMIT_CORE, (0, 0)
            )  # a crash is an outcome, and needs no gigabytes of dump

    def set(self, device: Device) -> None:
        """Limit memory, of the GPU or of the process."""
        if self._memory_bytes == math.inf or device.kind in self._set:
            return
        self._set.add(device.kind)
        if device.kind == "gpu":
            import torch

            _, total = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(min(self._memory_bytes / total, 1.0))
            return
        with contextlib.suppress(ImportError, OSError, ValueError):
            import resource

            # Not the address space, of which allocators and threads reserve much that they never touch.
            used = _data_bytes()
            resource.setrlimit(resource.RLIMIT_DATA, (used + int(self._memory_bytes),) * 2)


def _data_bytes() -> int:
    """What counts for RLIMIT_DATA now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
