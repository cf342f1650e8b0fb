"""Processes that are killed while they write a store, and many that write one at once.

Children are forked from one process that has imported everything, so that each begins at once. A child announces on a
pipe what it has been promised, after the call that promises has returned; the parent kills it at a seeded random moment
and then holds the store to every announcement.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_fork = multiprocessing.get_context("fork")

#: Candidates of the operation that is collected.
CANDIDATES = 5
#: Records of one batch of the process that imports, merges and compacts.
BATCH = 20
#: Records that one of many writers appends before it takes a new journal, and its pause between two.
_A_JOURNAL = 200
_PAUSE_S = 0.001


@dataclass
class Kills:
    """What came of some kills.

    Attributes:
        kills: processes killed.
        announced: records that were announced as durable.
        lost: of these, missing after a kill.
        twice: records announced, or found in the files, more than once.
        parts: batches of which a part was there.
        faults: sentences of ``Store.check`` after all kills.
        moments: what the killed processes were doing.
    """

    kills: int = 0
    announced: int = 0
    lost: int = 0
    twice: int = 0
    parts: int = 0
    faults: list[str] = field(default_factory=list)
    moments: dict[str, int] = field(default_factory=dict)

    def came(self, moment: str) -> None:
        """Count a kill at such a moment."""
        self.moments[moment] = self.moments.get(moment, 0) + 1


class _Child:
    """A forked process, and the lines that it announces."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._reader, writer = os.pipe()
        self.process = _fork.Process(target=work, args=(writer, *arguments))
        self.process.start()
        os.close(writer)
        self._text = b""

    def lines(self, count: int) -> list[str]:
        """The lines so far, once there are so many or the process has ended."""
        while self._text.count(b"\n") < count:
            more = os.read(self._reader, 65536)
            if not more:
                break
            self._text += more
        return self._text.decode().split("\n")[:-1]

    def kill(self) -> list[str]:
        """End it at once. Returns every line that it announced, which may be more than were waited for."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        found = self.lines(1 << 60)
        os.close(self._reader)
        return found


def killed_collections(root: Path, kills: int, *, seed: int = 0) -> Kills:
    """Kill ``collect`` again and again, on one store: each goes on where the one before was killed."""
    from kernelcast.datasets import Store

    _register()
    moments = random.Random(seed)
    found = Kills()
    promised: Counter[str] = Counter()
    # Enough that none runs to its end: a kill waits for at most 12 records and some milliseconds.
    problems = 8 * kills + 40
    for _ in range(kills):
        child = _Child(_collect, root, problems)
        child.lines(moments.randrange(13))
        time.sleep(moments.random() * 0.02)
        announced = child.kill()
        found.kills += 1
        promised.update(announced)
        inside = len(promised) % CANDIDATES
        found.came("within the records of a problem" if inside else "between problems")
        ids = Store(root).ids() if (root / "store.json").exists() else set()
        found.lost += len(promised.keys() - ids)
        found.faults += Store(root).check() if ids else []
    found.announced = len(promised)
    found.twice = sum(count - 1 for count in promised.values()) + _repeats(root)
    return found


def _collect(pipe: int, root: Path, problems: int) -> None:
    from kernelcast.datasets import Journal
    from kernelcast.datasets.collect import collect
    from kernelcast.datasets.timing import TimingPlan
    from kernelcast.kernels import problem
    from kernelcast.kernels.detect import detect

    append = Journal.append

    def announced(journal: Journal, measurement: Any) -> None:
        append(journal, measurement)
        os.write(pipe, measurement.id.encode() + b"\n")

    Journal.append = announced  # type: ignore[method-assign]
    wanted = [problem("killed", n=n) for n in range(1, problems + 1)]
    collect(wanted, detect("cpu"), root, plan=TimingPlan(rounds=2, seconds=0.1, sample_us=10.0))


def _register() -> None:
    """An operation that takes no time, with a few candidates."""
    from kernelcast.kernels import (
        Dim,
        Operation,
        Parameter,
        ProblemSchema,
        Tolerance,
        Variant,
        Work,
        operation_names,
        register_operation,
        register_variant,
    )

    if "killed" in operation_names():
        return

    class Killed(Operation):
        name = "killed"
        doc = "2 x"
        schema = ProblemSchema("killed", (Dim("n", "elements"),), ("float32",))

        def make_inputs(self, problem: Any, *, seed: int, device: str) -> tuple[Any, ...]:
            import torch

            return (torch.ones(problem["n"]),)

        def reference(self, problem: Any, *inputs: Any) -> Any:
            return 2 * inputs[0].double()

        def tolerance(self, problem: Any) -> Tolerance:
            return Tolerance(1e-3, 1e-6)

        def flops(self, problem: Any) -> float:
            return 1.0

        def traffic_bytes(self, problem: Any) -> float:
            return 8.0 * problem["n"]

    class Vendor(Variant):
        name = "vendor"
        backend = "vendor"
        doc = "2 x"
        parameters = (Parameter("which", tuple(range(CANDIDATES)), "copies of one"),)

        def work(self, problem: Any, columns: Any, device: Any) -> Work:
            return Work(1.0, 1.0)

        def build(self, problem: Any, config: Any) -> Callable[..., Any]:
            return lambda x: 2 * x

    register_operation(Killed)
    register_variant("killed")(Vendor)


def killed_rewrites(root: Path, kills: int, *, seed: int = 0) -> Kills:
    """Kill a process that appends, imports, merges and compacts in turn, on one store."""
    from kernelcast.datasets import Store

    moments = random.Random(seed)
    found = Kills()
    promised: set[str] = set()
    for number in range(kills):
        child = _Child(_rewrite, root, number)
        child.lines(moments.randrange(1, 8))
        time.sleep(moments.random() * 0.03)
        announced = child.kill()
        found.kills += 1
        doing = announced[-1].split()[0] if announced else "beginning"
        found.came("between two steps" if doing == "kept" else doing)
        for line in announced:
            word, *rest = line.split()
            if word == "kept":
                promised |= {each.id for each in batch(int(rest[0]), int(rest[1]))}
        ids = Store(root).ids()
        found.lost += len(promised - ids)
        found.faults += Store(root).check()
        # An import and a merge are there whole or not at all: step 1 and 2 of every round.
        for rounds in range(len(announced) + 1):
            for step in (3 * rounds + 1, 3 * rounds + 2):
                there = sum(each.id in ids for each in batch(number, step))
                found.parts += 0 < there < BATCH
    Store(root).compact()
    found.lost += len(promised - Store(root).ids())
    found.faults += Store(root).check()
    found.announced = len(promised)
    found.twice = _repeats(root)
    return found


def _rewrite(pipe: int, root: Path, number: int) -> None:
    from kernelcast.datasets import Journal, Store

    def say(*words: object) -> None:
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    store = Store(root)
    store.add_device(made_up_device())
    for first in range(0, 1 << 20, 3):
        say("appending")
        with Journal(root) as journal:
            for each in batch(number, first):
                journal.append(each)
        say("kept", number, first)
        say("importing")
        store.add_many(batch(number, first + 1))
        say("kept", number, first + 1)
        other = root.with_name(f"{root.name}-{number}-{first}")
        Store(other).add_many(batch(number, first + 2))
        say("merging")
        store.merge(other)
        say("kept", number, first + 2)
        say("compacting")
        store.compact()


def batch(number: int, step: int) -> list[Any]:
    """The records of one step of one process: equal arguments give equal records."""
    return [record(number, step * BATCH + i) for i in range(BATCH)]


def record(writer: int, number: int) -> Any:
    """One made-up record."""
    from kernelcast.datasets import Environment, Measurement, Protocol
    from kernelcast.kernels import Candidate, problem

    return Measurement(
        problem=problem("gemm", m=1 + number % 1000, n=32, k=16),
        candidate=Candidate.of("split_k", {"split": writer, "number": number}),
        device=made_up_device().name,
        device_fingerprint=made_up_device().fingerprint,
        environment=Environment(),
        protocol=Protocol("test", error_log=0.01),
        samples_us=(1.0 + writer, 1.5, 2.0),
        created_at=1.7e9,
    )


def made_up_device() -> Any:
    """The device of made-up records."""
    from kernelcast.kernels.devices import device

    return device("a100-sxm4-80gb")


def _repeats(root: Path) -> int:
    """Records that the files of a store hold more than once, journals and segments together."""
    from kernelcast.datasets import segments
    from kernelcast.datasets.checking import files_in
    from kernelcast.datasets.journal import read_journal

    held: Counter[str] = Counter()
    for path in files_in(root / "journal", ".jsonl"):
        held.update(each.id for each in read_journal(path))
    for path in files_in(root / "parquet", ".parquet"):
        held.update(segments.read_segment(path, ["id"]).column("id").to_pylist())
    return sum(count - 1 for count in held.values())


@dataclass
class Crowd:
    """What came of many writers of one store.

    Attributes:
        writers: processes that appended.
        seconds: for how long.
        written: records whose ``append`` had returned.
        missing: of these, not in the store at the end.
        more: records in the store that nobody wrote, or that it holds twice.
        reads: complete reads by two readers meanwhile.
        wrong_reads: reads that had fewer records than one before, or one twice.
        compactions: compactions meanwhile.
        faults: sentences of ``Store.check`` at the end.
    """

    writers: int
    seconds: float
    written: int
    missing: int
    more: int
    reads: int
    wrong_reads: int
    compactions: int
    faults: list[str]


def crowd(root: Path, writers: int, seconds: float) -> Crowd:
    """Let so many processes write one store, two read it, and one compact it."""
    from kernelcast.datasets import Store

    store = Store(root)
    store.add_device(made_up_device())
    ended = _fork.Event()
    results = _fork.SimpleQueue()
    tasks = [(_write, number) for number in range(writers)] + [(_read, 0), (_read, 1), (_compact, 0)]
    processes = [
        _fork.Process(target=_task, args=(task, root, number, ended, results)) for task, number in tasks
    ]
    for process in processes:
        process.start()
    time.sleep(seconds)
    ended.set()
    answers: dict[str, list[Any]] = {"_write": [], "_read": [], "_compact": []}
    for _ in processes:
        name, answer = results.get()
        if isinstance(answer, str):
            raise RuntimeError(f"{name}: {answer}")
        answers[name].append(answer)
    for process in processes:
        process.join()
    expected = {record(number, i).id for number, count in answers["_write"] for i in range(count)}
    store.compact()
    ids = store.table(["id"]).column("id").to_pylist()
    return Crowd(
        writers=writers,
        seconds=seconds,
        written=len(expected),
        missing=len(expected - set(ids)),
        more=len(ids) - len(expected & set(ids)),
        reads=sum(reads for reads, _ in answers["_read"]),
        wrong_reads=sum(wrong for _, wrong in answers["_read"]),
        compactions=sum(answers["_compact"]),
        faults=store.check(),
    )


def _task(work: Callable[..., Any], root: Path, number: int, ended: Any, results: Any) -> None:
    try:
        answer = work(root, number, _until(ended))
    except Exception as error:  # noqa: BLE001 - the parent waits for an answer of everyone
        answer = f"{type(error).__name__}: {error}"
    results.put((work.__name__, answer))


def _until(ended: Any) -> Iterator[int]:
    """0, 1, 2 ... until the end is announced; at least 0."""
    number = 0
    while not number or not ended.is_set():
        yield number
        number += 1


def _write(root: Path, number: int, turns: Iterator[int]) -> tuple[int, int]:
    from kernelcast.datasets import Journal

    count = 0
    journal = Journal(root)
    for count in turns:
        journal.append(record(number, count))
        if (count + 1) % _A_JOURNAL == 0:
            journal.close()  # appending again takes a new file, and this one can be compacted
        time.sleep(_PAUSE_S)
    journal.close()
    return number, count + 1


def _read(root: Path, number: int, turns: Iterator[int]) -> tuple[int, int]:
    from kernelcast.datasets import Store

    before = wrong = reads = 0
    for _ in turns:
        ids = Store(root).table(["id"]).column("id").to_pylist()
        wrong += len(ids) < before or len(set(ids)) < len(ids)
        before = len(ids)
        reads += 1
    return reads, wrong


def _compact(root: Path, number: int, turns: Iterator[int]) -> int:
    from kernelcast.datasets import Store

    compactions = 0
    for _ in turns:
        Store(root).compact()
        compactions += 1
    return compactions
