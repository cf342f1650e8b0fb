"""Entries of the cache, damaged in seeded ways, and read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_mutations import mutate


@dataclass
class Damage:
    """What came of reading damaged entries.

    Attributes:
        files: read.
        exceptions: that reached the caller: a lookup, a listing, priors or a write threw one.
        wrong: answers that were not the entry's own.
        misses, hits: answers None, and the entry's own (the damage was undone by a later one, or hit nothing).
        unrepaired: writes of a new selection after which a fresh lookup did not find it.
        forged: of the files, damaged and then signed anew, as no accident does: the answer may be another valid one.
        kinds: files by what was done to them.
    """

    files: int = 0
    exceptions: list[str] = field(default_factory=list)
    wrong: int = 0
    misses: int = 0
    hits: int = 0
    unrepaired: int = 0
    forged: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


def damaged_files(root: Path, count: int, *, seed: int = 0) -> Damage:
    """Damage an entry in so many seeded ways; each time look it up, list all, ask for priors, and write it anew."""
    from kernelcast.runtime.cache import SelectionCache
    from kernelcast.runtime.cache_files import entry_path, write_entry

    rng = random.Random(seed)
    found = Damage()
    problem, device, entry = made_up_entry(0)
    other = replace(entry, key=replace(entry.key, environment=replace(entry.key.environment, torch="0.0")))
    keys = [each.key for each in (entry, other)]
    for each in (entry, other):
        write_entry(root / "sound", each)
    sound = {path.name: path.read_bytes() for path in (entry_path(root / "sound", key) for key in keys)}
    for number in range(count):
        folder = root / str(number)
        victim = rng.choice((entry, entry, other))
        for each in (entry, other):
            path = entry_path(folder, each.key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sound[path.name])
        path = entry_path(folder, victim.key)
        kind = _spoil(path, rng)
        found.files += 1
        found.kinds[kind] = found.kinds.get(kind, 0) + 1
        found.forged += kind.startswith("forged")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cache = SelectionCache(folder)
                answer = cache.get(entry.key)
                listed = list(cache.entries())
                priors = cache.priors(problem, device)
                cache.put(entry.key, entry.selection)
                again = SelectionCache(folder).get(entry.key)
        except Exception as error:  # noqa: BLE001 - counted: nothing may throw
            found.exceptions.append(f"{kind}: {type(error).__name__}: {error}")
            continue
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if answer is None:
            found.misses += 1
        elif _same(answer, entry.selection):
            found.hits += 1
        elif not kind.startswith("forged") or answer.problem != problem:
            found.wrong += 1
        found.wrong += any(each.key not in keys for each in listed)
        found.wrong += any(prior != entry.selection.candidate for prior in priors) and "forged" not in kind
        # What cannot be replaced (a folder in its place) costs a warning.
        found.unrepaired += again is None and kind != "a folder"
    return found


def _spoil(path: Path, rng: random.Random) -> str:
    """Damage a file, or put something else in its place. Returns what was done."""
    content = path.read_bytes()
    what = rng.random()
    if what < 0.6:
        changed, kind = mutate(content, rng)
        path.write_bytes(changed)
        return kind.split("+")[0]
    if what < 0.9:
        return _forge(path, content, rng)
    kind = rng.choice(
        ("a folder", "a link to itself", "a link to /dev/zero", "a pipe", "a large file", "unreadable")
    )
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "a link to /dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a large file":
        with path.open("wb") as file:
            file.truncate(2**33)
    else:
        path.write_bytes(content)
        path.chmod(0)
    return kind


def _forge(path: Path, content: bytes, rng: random.Random) -> str:
    """Change the inner record and sign it anew, so that every check behind the signature is met."""
    from kernelcast.runtime.cache_key import canonical

    body, _ = mutate(json.dumps(json.loads(content)["entry"]).encode(), rng)
    try:
        data = {"entry": json.loads(body)}
        data["check"] = hashlib.sha256(canonical(data["entry"]).encode()).hexdigest()
    except (ValueError, RecursionError, OverflowError):
        path.write_bytes(body)
        return "text"
    path.write_text(json.dumps({**data, "version": json.loads(content)["version"]}), encoding="utf-8")
    return "forged"


def _same(one: Any, other: Any) -> bool:
    return one.to_dict() == other.to_dict()


def made_up_entry(number: int) -> tuple[Any, Any, Any]:
    """A problem, the device it is of, and a remembered selection for it: equal numbers give equal entries."""
    from kernelcast.kernels import Candidate, problem
    from kernelcast.kernels.detect import detect
    from kernelcast.runtime import CacheKey, Selection
    from kernelcast.runtime.cache import CacheEntry

    device = detect("cpu")
    described = problem("gemm", m=64, n=8 + number, k=256, threads=1)
    selection = Selection(
        described,
        device.name,
        Candidate.of("split_k", {"split": 4}),
        "verified",
        measured_us=10.25,
        default_us=12.5,
        measured=3,
        reason="The fastest of 3 measured.",
    )
    return described, device, CacheEntry(CacheKey.of(described, device, 3), selection, 1.75e9)
