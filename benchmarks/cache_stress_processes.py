"""Processes that ask for the same keys at once, that die while they hold one, and that die while they write entries.

Children are forked from one process that has imported everything, so that each begins at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cache_stress_files import made_up_entry
from durability_kills import _Child

_fork = multiprocessing.get_context("fork")

#: Name of the operation that takes no time, and of its variants.
NAME = "stressed"
VARIANTS = ("vendor", "twice")
#: Keys that a killed writer writes in turn.
_KEYS = 20


# --- Many processes and threads on the same keys ---


@dataclass
class Crowd:
    """What came of many processes and threads that asked for the same cold keys.

    Attributes:
        processes, threads, keys: threads of each process; every thread asks for every key, in an order of its own.
        answers: given.
        verified: of these, by the thread that measured.
        tunes: verifications measured, by the records of them.
        most_tunes: of one key.
        choices: different hashes of the choices of one thread; 1 if all threads chose alike.
        seconds: until the last one was done.
        faults: exceptions and warnings.
    """

    processes: int
    threads: int
    keys: int
    answers: int = 0
    verified: int = 0
    tunes: int = 0
    most_tunes: int = 0
    choices: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def crowd(root: Path, processes: int, threads: int, keys: int) -> Crowd:
    """Let so many processes of so many threads select for the same keys at once, with nothing in the cache."""
    register()
    begin = _fork.Event()
    results = _fork.SimpleQueue()
    children = [
        _fork.Process(target=_ask, args=(root, number, threads, keys, begin, results))
        for number in range(processes)
    ]
    for child in children:
        child.start()
    started = time.perf_counter()
    begin.set()
    found = Crowd(processes, threads, keys)
    hashes: set[str] = set()
    for _ in children:
        answer = results.get()
        found.answers += answer["answers"]
        found.verified += answer["verified"]
        found.faults += answer["faults"]
        hashes.update(answer["hashes"])
    found.seconds = time.perf_counter() - started
    for child in children:
        child.join()
    found.choices = len(hashes)
    tunes = _tunes(root / "store")
    found.tunes, found.most_tunes = sum(tunes.values()), max(tunes.values(), default=0)
    return found


def _ask(root: Path, number: int, threads: int, keys: int, begin: Any, results: Any) -> None:
    from kernelcast.runtime.selection import selections_hash
    from kernelcast.runtime.verify import BusyWarning

    answer: dict[str, Any] = {"answers": 0, "verified": 0, "hashes": [], "faults": []}
    guard = threading.Lock()

    def work(place: int) -> None:
        order = [a_problem(n) for n in range(1, keys + 1)]
        random.Random(place).shuffle(order)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # Sixteen processes that measure at once are a busy machine: to say so is no fault.
                warnings.simplefilter("ignore", BusyWarning)
                found = [selector.select(problem) for problem in order]
        except Exception as error:  # noqa: BLE001 - told to the parent
            with guard:
                answer["faults"].append(f"{type(error).__name__}: {error}")
            return
        with guard:
            answer["answers"] += len(found)
            answer["verified"] += sum(each.source == "verified" for each in found)
            answer["hashes"].append(selections_hash(found))

    selector = make_selector(root)
    workers = [threading.Thread(target=work, args=(number * threads + i,)) for i in range(threads)]
    begin.wait()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results.put(answer)


def _tunes(store: Path) -> Counter[str]:
    """How often each problem was measured: the records of its default."""
    found: Counter[str] = Counter()
    for path in (store / "journal").glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["candidate"]["variant"] == "vendor":
                found[json.dumps(record["problem"])] += 1
    return found


# --- Holders that die ---


@dataclass
class Holders:
    """What came of processes that were killed while they verified a key that another process waited for.

    Attributes:
        killed: holders.
        taken: keys that the waiting process then verified.
        early: answers that came while the holder lived.
        seconds: from each kill to the answer, verification included.
    """

    killed: int = 0
    taken: int = 0
    early: int = 0
    seconds: list[float] = field(default_factory=list)


def dead_holders(root: Path, count: int) -> Holders:
    """Kill processes in the middle of a verification; this process waits for each of their keys."""
    register()
    found = Holders()
    selector = make_selector(root)
    for number in range(count):
        child = _Child(_hold, root, number + 1)
        child.lines(1)  # it measures, and holds the key
        answers: list[Any] = []
        waiting = threading.Thread(target=_select_into, args=(answers, selector, number + 1))
        waiting.start()
        time.sleep(0.05)
        found.early += len(answers)
        child.kill()
        killed = time.perf_counter()
        waiting.join()
        found.seconds.append(time.perf_counter() - killed)
        found.killed += 1
        found.taken += len(answers) == 1 and answers[0].source == "verified"
    return found


def _select_into(answers: list[Any], selector: Any, n: int) -> None:
    answers.append(selector.select(a_problem(n)))


def _hold(pipe: int, root: Path, n: int) -> None:
    _STATE.hold = pipe
    make_selector(root).select(a_problem(n))


# --- Writers that die ---


@dataclass
class Writers:
    """What came of processes that were killed while they wrote entries.

    Attributes:
        kills: processes killed.
        written: entries whose ``put`` had returned.
        lost: of these, missing after a kill, or older than promised.
        faults: warnings and exceptions of reading the cache after a kill.
        unfinished: files that killed writers left, which no reader looks at.
    """

    kills: int = 0
    written: int = 0
    lost: int = 0
    faults: list[str] = field(default_factory=list)
    unfinished: int = 0


def killed_writers(root: Path, kills: int, *, seed: int = 0) -> Writers:
    """Kill processes that write a few keys again and again; after each kill read every key."""
    from kernelcast.runtime.cache import SelectionCache

    moments = random.Random(seed)
    found = Writers()
    keys = [made_up_entry(number)[2].key for number in range(_KEYS)]
    promised = [0] * _KEYS
    for number in range(kills):
        child = _Child(_write, root, number)
        child.lines(moments.randrange(6))
        time.sleep(moments.random() * 0.004)
        for line in child.kill():
            place, value = map(int, line.split())
            promised[place] = value
            found.written += 1
        found.kills += 1
        cache = SelectionCache(root)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                there = [cache.get(key) for key in keys]
                listed = sum(1 for _ in cache.entries())
        except Exception as error:  # noqa: BLE001 - counted
            found.faults.append(f"{type(error).__name__}: {error}")
            continue
        for answer, value in zip(there, promised, strict=True):
            # A kill between the write and its announcement leaves a later one than was promised.
            found.lost += value > (0 if answer is None else answer.measured)
        found.lost += listed < sum(value > 0 for value in promised)
    found.unfinished = sum(1 for _ in root.glob("*/.*"))
    return found


def _write(pipe: int, root: Path, number: int) -> None:
    from kernelcast.runtime.cache import SelectionCache

    cache = SelectionCache(root)
    for count in range(1, 1 << 30):
        place = count % _KEYS
        entry = made_up_entry(place)[2]
        value = (number + 1) * 1_000_000 + count
        cache.put(entry.key, replace(entry.selection, measured=value))
        os.write(pipe, f"{place} {value}\n".encode())


# --- What is selected ---


class _State:
    """``hold``: where the next verification says that it has begun, to wait for its end for ever."""

    hold: int | None = None


_STATE = _State()


def register() -> None:
    """An operation that takes no time, with two variants."""
    from kernelcast.kernels import (
        Dim,
        Operation,
        ProblemSchema,
        Tolerance,
        Variant,
        Work,
        operation_names,
        register_operation,
        register_variant,
    )

    if NAME in operation_names():
        return

    class Stressed(Operation):
        name = NAME
        doc = "2 x"
        schema = ProblemSchema(NAME, (Dim("n", "elements"),), ("float32",))

        def make_inputs(self, problem: Any, *, seed: int, device: str) -> tuple[Any, ...]:
            import torch

            if _STATE.hold is not None:
                os.write(_STATE.hold, b"measuring\n")
                time.sleep(600)
            return (torch.ones(problem["n"]),)

        def reference(self, problem: Any, *inputs: Any) -> Any:
            return 2 * inputs[0].double()

        def tolerance(self, problem: Any) -> Tolerance:
            return Tolerance(1e-3, 1e-6)

        def flops(self, problem: Any) -> float:
            return 1.0

        def traffic_bytes(self, problem: Any) -> float:
            return 8.0 * problem["n"]

    def variant_of(word: str) -> type[Variant]:
        class Doubled(Variant):
            name = word
            backend = "vendor" if word == "vendor" else "torch"
            doc = "2 x"

            def work(self, problem: Any, columns: Any, device: Any) -> Work:
                return Work(1.0, 1.0)

            def build(self, problem: Any, config: Any) -> Callable[..., Any]:
                return lambda x: 2 * x

        return Doubled

    register_operation(Stressed)
    for word in VARIANTS:
        register_variant(NAME)(variant_of(word))


def a_problem(n: int) -> Any:
    """A problem of the operation."""
    from kernelcast.kernels import problem

    return problem(NAME, n=n, threads=1)


def make_selector(root: Path) -> Any:
    """A selector that measures quickly, with cache and store under a folder."""
    from kernelcast.datasets.timing import TimingPlan
    from kernelcast.kernels.detect import detect
    from kernelcast.runtime import Selector

    plan = TimingPlan(rounds=3, least_rounds=2, seconds=0.05, candidate_seconds=0.05, sample_us=50.0)
    return Selector(
        detect("cpu"),
        models=root / "models",
        cache=root / "cache",
        store=root / "store",
        mode="verify",
        top_k=2,
        plan=plan,
    )
