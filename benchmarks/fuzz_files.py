"""Mutated import files and store files: none may crash, hang, be kept in part, or be refused in words that do not help.

Usage: python benchmarks/fuzz_files.py [--count N] [--seed S] [--output DIR]

Four of five cases import a mutated file into a store; the fifth mutates one file of a store and reads and rewrites it.
Every case follows from the seed and its number. A child process runs them one after the other; the parent ends it where
a case takes too long, and goes on with the next. Writes ``fuzz.md`` and ``fuzz.json`` in DIR (docs/results).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_tables import write_result
from fuzz_mutations import PACKINGS, SOUND_PACKINGS, bomb, mutate, pack

COUNT = 5000

#: A case that gives no sign for so long hangs.
LIMIT_SECONDS = 60.0

#: Address space of the child: a file that takes more fails with an error instead of taking the machine along.
LIMIT_BYTES = 6 * 2**30

#: Longest message that still is a sentence.
_LONGEST_MESSAGE = 1500

#: What must not occur.
FAULTS = ("crash", "hang", "kept in part", "unclear")

_STORE_SHARE = 0.2


def run(
    count: int, seed: int = 0, *, limit_seconds: float = LIMIT_SECONDS, folder: Path | None = None
) -> list[dict[str, Any]]:
    """Run cases 0 to ``count`` - 1.

    Returns:
        For each: ``case``, ``what`` (the importer, or the kind of store file), ``how`` (mutation and packing),
        ``outcome``, ``detail`` (the message) and ``seconds`` of CPU time.
    """
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        while len(found) < count:
            found += _child(len(found), count, seed, limit_seconds, Path(scratch) / f"from{len(found)}")
    return found


def _child(start: int, count: int, seed: int, limit_seconds: float, folder: Path) -> list[dict[str, Any]]:
    """The cases that one child gets through; the last of them may be the one that ended it."""
    folder.mkdir()
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        str(start),
        str(count),
        str(seed),
        str(folder),
    ]
    found: list[dict[str, Any]] = []
    lines: queue.Queue[str | None] = queue.Queue()
    with (folder / "stderr.txt").open("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            ended = ""
            while True:
                try:
                    line = lines.get(timeout=limit_seconds)
                except queue.Empty:
                    process.kill()
                    ended = "hang"
                    break
                if line is None:
                    break
                found.append(json.loads(line))
        finally:
            process.kill()
            status = process.wait()
            reader.join()
        if start + len(found) < count:
            errors.seek(0)
            said = errors.read()[-2000:]
            if not found and not ended and "Traceback" in said:
                raise RuntimeError(f"The child could not begin: {said}")
            detail = (
                f"no answer within {limit_seconds:g} s" if ended else f"ended with status {status}: {said}"
            )
            found.append(
                {
                    "case": start + len(found),
                    "what": "unknown",
                    "how": "unknown",
                    "outcome": ended or "crash",
                    "detail": detail,
                    "seconds": 0.0,
                }
            )
    shutil.rmtree(folder, ignore_errors=True)
    return found


def child(start: int, count: int, seed: int, folder: Path) -> None:
    """Run cases and print each as a line of JSON."""
    from fuzz_seeds import make_store, seeds

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    warnings.simplefilter("ignore")
    files = seeds(folder)
    sound = folder / "sound"
    make_store(sound)
    for case in range(start, count):
        rng = random.Random(f"{seed}:{case}")
        began = time.process_time()
        work = folder / "work"
        shutil.copytree(sound, work / "store")
        is_store = rng.random() < _STORE_SHARE
        try:
            found = _store_case(work, rng) if is_store else _import_case(work, rng, files)
        finally:
            shutil.rmtree(work)
        found = {"case": case, **found, "seconds": time.process_time() - began}
        print(json.dumps(found, default=str), flush=True)


def _import_case(work: Path, rng: random.Random, files: Sequence[Any]) -> dict[str, Any]:
    from fuzz_seeds import A100

    from kernelcast.datasets import Store, import_files

    seed, kind = rng.choice(files), rng.choice(PACKINGS)
    content, how = seed.content, ""
    options = dict(seed.options)
    named = []
    if seed.beside:
        beside, how = mutate(seed.beside, rng)
        path = work / "beside.json"
        path.write_bytes(beside)
        options = {name: value.replace("{beside}", str(path)) for name, value in options.items()}
        named.append(str(path))
        kind = "plain"
    elif kind in SOUND_PACKINGS:
        content, how = mutate(content, rng)
    if kind.endswith("bomb"):
        content = bomb(content)
    name, packed = pack(seed.name, content, kind, rng)
    path = work / name
    path.write_bytes(packed)
    named.append(str(path))
    store = work / "store"
    before, ids = _snapshot(store), Store(store).ids()

    def call() -> str:
        summary = import_files(
            seed.importer, named[-1:], device=A100, workload="fuzz", store=store, options=options
        )
        return f"{summary.added} new"

    outcome, detail = _judged(call, named)
    if outcome == "refused" and _snapshot(store) != before:
        outcome, detail = "kept in part", f"refused with {detail!r}, and the store has changed"
    if outcome == "accepted":
        faults = Store(store).check()
        lost = ids - Store(store).ids()
        if faults or lost:
            outcome, detail = "kept in part", f"accepted, and then {len(lost)} records lost, {faults}"
    what = f"{seed.importer} {Path(seed.name).suffix[1:]}{' and a second file' if seed.beside else ''}"
    return {"what": what, "how": " ".join(filter(None, (how, kind))), "outcome": outcome, "detail": detail}


def _store_case(work: Path, rng: random.Random) -> dict[str, Any]:
    from fuzz_seeds import measurements

    from kernelcast.datasets import Store

    root = work / "store"
    store = Store(root)
    chosen = rng.choice(sorted(path for path in root.rglob("*") if path.is_file() and path.name != ".lock"))
    what = {"parquet": "a segment", "journal": "a journal", "devices": "a device's facts"}.get(
        chosen.parent.name, "the schema marker"
    )
    how = _damage(chosen, rng)
    before = _snapshot(root)
    outcomes: list[tuple[str, str]] = []

    def attempt(call: Callable[[], Any], *, writes: bool = False) -> None:
        state = _snapshot(root)
        found = _judged(lambda: str(call()), [str(root)])
        if found[0] == "refused" and writes and _snapshot(root) != state:
            found = "kept in part", f"refused with {found[1]!r}, and the store has changed"
        outcomes.append(found)

    faults: list[str] = []
    attempt(lambda: faults.extend(store.check()))
    for read in (
        store.ids,
        store.frame,
        store.summary,
        store.devices,
        store.problems,
        lambda: list(store.measurements()),
        lambda: store.export(work / "out.csv"),
        lambda: store.export(work / "out.parquet"),
    ):
        attempt(read)
    if _snapshot(root) != before:
        outcomes.append(("kept in part", "reading changed the store"))
    attempt(lambda: store.add_many(measurements(14)[-1:]), writes=True)
    attempt(lambda: Store(work / "other").merge(root))
    attempt(store.compact, writes=True)
    if any(not _is_sentence(fault, [str(root)]) for fault in faults):
        outcomes.append(("unclear", f"check says {faults!r}"))
    by_kind = dict(reversed(outcomes))
    for outcome in (*FAULTS, "refused"):
        if outcome in by_kind:
            return {"what": what, "how": how, "outcome": outcome, "detail": by_kind[outcome]}
    outcome = "found by check" if faults else "accepted"
    return {"what": what, "how": how, "outcome": outcome, "detail": "; ".join(faults)}


def _damage(path: Path, rng: random.Random) -> str:
    """Mutate a file of a store, or put something else in its place."""
    if rng.random() < 0.8:
        content, how = mutate(path.read_bytes(), rng)
        path.write_bytes(content)
        return how
    action = rng.choice(("absent", "a folder", "a link to itself", "empty", "renamed", "another's content"))
    content = path.read_bytes()
    path.unlink()
    if action == "a folder":
        path.mkdir()
    elif action == "a link to itself":
        path.symlink_to(path)
    elif action == "empty":
        path.touch()
    elif action == "renamed":
        path.with_name(f"x{path.name}").write_bytes(content)
    elif action == "another's content":
        others = sorted(each for each in path.parents[1].rglob("*.*") if each.is_file())
        path.write_bytes(rng.choice(others).read_bytes() if others else b"")
    return action


def _judged(call: Callable[[], str], named: Sequence[str]) -> tuple[str, str]:
    """(outcome, what was said) of a call that must succeed, or be refused in a sentence that names a file."""
    from kernelcast.errors import KernelcastError

    try:
        return "accepted", call()
    except KernelcastError as error:
        return ("refused" if _is_sentence(str(error), named) else "unclear"), str(error)
    except Exception:  # noqa: BLE001 - finding these is what this is for
        return "crash", traceback.format_exc()[-3000:]


def _is_sentence(message: str, named: Sequence[str]) -> bool:
    """One line of a bounded length that names one of the files."""
    return (
        bool(message.strip())
        and len(message.splitlines()) == 1
        and message.isprintable()
        and len(message) <= _LONGEST_MESSAGE
        and any(name in message for name in named)
    )


def _snapshot(root: Path) -> dict[str, bytes]:
    """Every file of a store but the lock."""

    def files() -> Iterator[tuple[str, bytes]]:
        for path in sorted(root.rglob("*")):
            if path.name != ".lock" and not path.is_dir():
                content = b""
                with contextlib.suppress(OSError):
                    content = path.read_bytes()
                yield str(path), content

    return dict(files())


def result(found: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """The page."""
    outcomes = ("accepted", "found by check", "refused", *FAULTS)
    rows = []
    for what in sorted({each["what"] for each in found}):
        counts = Counter(each["outcome"] for each in found if each["what"] == what)
        rows.append([what, sum(counts.values()), *(counts[outcome] for outcome in outcomes)])
    total = Counter(each["outcome"] for each in found)
    rows.append(["all", len(found), *(total[outcome] for outcome in outcomes)])
    slowest = max(found, key=lambda each: each["seconds"])
    return {
        "title": "Mutated import files and store files",
        "seed": seed,
        "counts": dict(total),
        "faults": [each for each in found if each["outcome"] in FAULTS],
        "slowest": slowest,
        "tables": [{"title": "Cases by outcome", "columns": ["file", "cases", *outcomes], "rows": rows}],
        "notes": [
            "accepted: what was changed does not matter, or is another measurement (a time, a size, a comment). After an "
            "import the store was checked: no fault, and no record lost.",
            "found by check: of a store's file, everything reads and `kernelcast data check` names the fault.",
            f"refused: an error of kernelcast's own, on one line of at most {_LONGEST_MESSAGE} characters that names the "
            "file; every byte of the store is as it was.",
            f"hang: no answer within {LIMIT_SECONDS:g} s. The slowest case took {slowest['seconds']:.1f} s of CPU time "
            f"({slowest['what']}, {slowest['how']}).",
            "Mutations: flipped bits, cut and repeated pieces, lines and fields, extreme numbers, values of other types in "
            "JSON and Parquet, deep nesting, invalid UTF-8, NUL bytes, other encodings and line ends; packings that are "
            "damaged, twice packed, bombs, or hold members twice or under names that lead out.",
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and write the page. Returns the exit status: 1 if one shows a fault."""
    from run import RESULTS, header

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT, help="cases; 5000 if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=RESULTS, metavar="DIR", help="docs/results if left out"
    )
    options = parser.parse_args(arguments)
    found = run(options.count, options.seed)
    facts = {
        **header("fuzz", quick=options.count < COUNT),
        "command": f"python benchmarks/fuzz_files.py --count {options.count} --seed {options.seed}",
    }
    page = result(found, options.seed)
    written, _ = write_result(options.output, "fuzz", facts, page)
    print(written.read_text())
    for each in page["faults"]:
        print(
            f"{each['outcome']}: case {each['case']}, {each['what']}, {each['how']}: {each['detail']}",
            file=sys.stderr,
        )
    return int(bool(page["faults"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*map(int, sys.argv[2:5]), Path(sys.argv[5]))
    else:
        sys.exit(main())
