"""Entries of the cache as files, and how they lie in its folder.

::

    <cache>/
        <hash of problem and device>/<hash of the key>.json    one verified selection
        locks/<hash of the key>.lock                           held while a key is verified

An entry is replaced as a whole, and carries a digest over its content: what a file holds is either what was written or
recognised as damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast.datasets.journal import write_durably
from kernelcast.errors import InvalidRecordError
from kernelcast.runtime.cache_key import CacheKey, canonical
from kernelcast.runtime.selection import Selection

#: Version of an entry's layout; entries of another are misses.
CACHE_VERSION = 2

#: Entries take two kilobytes; what is larger is none, and is not read.
MAX_ENTRY_BYTES = 2**20

#: How often an entry is written whose folder others take away meanwhile.
_ATTEMPTS = 4

#: An unfinished file of a process that died is removed when it is so old; no live process takes as long for one.
_UNFINISHED_SECONDS = 3600.0
#: Nobody holds or waits for a key as long as this.
_LOCK_FILE_SECONDS = 86400.0

_PLACE = re.compile(r"[0-9a-f]{32}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.json")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.json\.\d+-[0-9a-f]+")
#: Where layout 1 kept its entries.
_OLD_PLACE = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class CacheEntry:
    """One remembered selection.

    Attributes:
        key: what it answers.
        selection: the answer.
        verified_at: seconds since 1970 when it was put into a cache.

    Raises:
        InvalidRecordError: key and selection are of different problems, or the time is none.
    """

    key: CacheKey
    selection: Selection
    verified_at: float

    def __post_init__(self) -> None:
        if self.selection.problem.key != self.key.problem:
            raise InvalidRecordError(
                f"The selection is of {self.selection.problem}, and its key of {self.key.problem}."
            )
        if type(self.verified_at) is not float or not 0.0 <= self.verified_at < math.inf:
            raise InvalidRecordError(f"verified_at is {self.verified_at!r}; it must be seconds since 1970.")

    def to_dict(self) -> dict[str, Any]:
        """The entry as plain JSON values; :meth:`from_dict` is its inverse."""
        return {
            "digest": self.key.digest,
            "key": self.key.to_dict(),
            "selection": self.selection.to_dict(),
            "verified_at": self.verified_at,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CacheEntry:
        """Read what :meth:`to_dict` wrote.

        Raises:
            InvalidRecordError: a field is missing, unknown, or of another type, or the digest is not the key's.
        """
        try:
            values = dict(data)
            digest = values.pop("digest")
            values["key"] = CacheKey.from_dict(values["key"])
            values["selection"] = Selection.from_dict(values["selection"])
            found = cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRecordError(f"Not a cache entry ({type(error).__name__}: {error}).") from error
        if digest != found.key.digest:
            raise InvalidRecordError("The entry's key does not have the digest that it states.")
        return found


def write_entry(folder: Path, entry: CacheEntry) -> None:
    """Write an entry so that every reader, and a kill at any moment, finds the old one or this.

    Raises:
        OSError: the folder cannot be made or written.
    """
    body = entry.to_dict()
    text = canonical({"check": _digest(body), "entry": body, "version": CACHE_VERSION})
    path = entry_path(folder, entry.key)
    for attempt in range(_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_durably(path, text + "\n")
            break
        except FileNotFoundError:
            # Somebody who clears the cache removed the folder between the two steps.
            if attempt == _ATTEMPTS - 1:
                raise
    _sweep(path.parent)


def read_entry(path: Path) -> CacheEntry:
    """Read one file.

    Raises:
        OSError: there is none, or it cannot be read.
        InvalidRecordError: it is damaged, of another layout, or no plain file of an entry's size.
    """
    content = _read_bounded(path)
    try:
        data = json.loads(content)
        version, body, check = data["version"], data["entry"], data["check"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRecordError(f"it is damaged: {type(error).__name__}: {error}") from error
    if type(version) is not int or version != CACHE_VERSION:
        raise InvalidRecordError(f"it has layout {version!r}, not {CACHE_VERSION}")
    if check != _digest(body):
        raise InvalidRecordError("it is damaged: its digest is not that of its content")
    return CacheEntry.from_dict(body)


def entry_path(folder: Path, key: CacheKey) -> Path:
    """Where the entry of a key lies."""
    return Path(
        f"{folder}/{key.place}/{key.digest}.json"
    )  # one path built, not three: this is asked at each miss


def lock_path(folder: Path, key: CacheKey) -> Path:
    """The file that is locked while a key is verified."""
    return folder / "locks" / f"{key.digest}.lock"


def entry_paths(folder: Path, place: str | None = None) -> Iterator[Path]:
    """The files of all entries, or of those of one place, in the order of their names.

    Raises:
        OSError: a folder cannot be read; one that is missing is empty.
    """
    for found in [folder / place] if place is not None else _folders(folder, _PLACE):
        for name in _names(found):
            if _ENTRY.fullmatch(name):
                yield found / name


@dataclass(frozen=True)
class Removal:
    """What came of removing entries.

    Attributes:
        removed: how many entries are gone.
        left: (file or folder, reason) of what could not be removed or read.
    """

    removed: int
    left: tuple[tuple[Path, str], ...] = ()


def remove_entry(folder: Path, key: CacheKey) -> bool:
    """Remove the entry of a key. Returns whether there was one that could be removed."""
    return _unlink(entry_path(folder, key))


def remove_entries(folder: Path, keys: Iterable[CacheKey]) -> Removal:
    """Remove the entries of some keys. What cannot be removed stays."""
    return _remove(entry_path(folder, key) for key in keys)


def remove_all(folder: Path) -> Removal:
    """Remove every entry, also those of layout 1, and what processes that died have left.

    What cannot be removed stays.
    """
    left: list[tuple[Path, str]] = []
    removed = 0
    try:
        places = [*_folders(folder, _PLACE), *_folders(folder, _OLD_PLACE)]
    except OSError as error:
        return Removal(0, ((folder, reason_of(error)),))
    for place in places:
        try:
            names = _names(place)
        except OSError as error:
            left.append((place, reason_of(error)))
            continue
        of_place = _remove(place / name for name in names if _ENTRY.fullmatch(name))
        removed += of_place.removed
        left += of_place.left
        _sweep(place)
        with contextlib.suppress(OSError):
            place.rmdir()  # another process may have put an entry there just now
    with contextlib.suppress(OSError):
        for name in _names(folder / "locks"):
            path = folder / "locks" / name
            # The lock of a key that somebody may hold now must stay the one that others see.
            if name.endswith(".lock") and _age_s(path) > _LOCK_FILE_SECONDS:
                _unlink(path)
    return Removal(removed, tuple(left))


def reason_of(error: OSError) -> str:
    """What the operating system says, without the path."""
    return error.strerror or str(error)


def _remove(paths: Iterable[Path]) -> Removal:
    removed, left = 0, []
    for path in paths:
        try:
            path.unlink()
            removed += 1
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            left.append((path, reason_of(error)))
    return Removal(removed, tuple(left))


def _digest(body: Any) -> str:
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def _read_bounded(path: Path) -> bytes:
    # O_NONBLOCK: to open a pipe that lies there must not wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise InvalidRecordError("it is no file")
        content = file.read(MAX_ENTRY_BYTES + 1)
    if len(content) > MAX_ENTRY_BYTES:
        raise InvalidRecordError(f"it is larger than any entry ({facts.st_size} bytes)")
    return content


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [folder / name for name in _names(folder) if pattern.fullmatch(name)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sweep(place: Path) -> None:
    """Remove unfinished files of processes that died."""
    with contextlib.suppress(OSError):
        for name in _names(place):
            if _UNFINISHED.fullmatch(name) and _age_s(place / name) > _UNFINISHED_SECONDS:
                _unlink(place / name)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
