"""The cache of verified selections: memory, then a pack, then disk. No fault of the disk ever reaches the caller."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kernelcast.errors import InvalidRecordError, KernelcastError, warn
from kernelcast.kernels import Candidate, Device, Problem, operation, require_legal, variant
from kernelcast.runtime import cache_files
from kernelcast.runtime.cache_files import CACHE_VERSION, CacheEntry, Removal
from kernelcast.runtime.cache_key import CacheEnvironment, CacheKey, forget_keys, place_of
from kernelcast.runtime.selection import Selection

if TYPE_CHECKING:
    from kernelcast.runtime.pack import PackedSelections

__all__ = [
    "CACHE_VERSION",
    "CacheEntry",
    "CacheEnvironment",
    "CacheKey",
    "CacheWarning",
    "SelectionCache",
    "forget_keys",
]

#: How long a live process may hold a key before others verify it themselves: a stopped one must not stop them all.
LOCK_SECONDS = 300.0

#: How often a process that waits for another one's key looks whether it is free.
_POLL_SECONDS = 0.02

#: Selections held in memory; beyond, the older half goes. The disk still has those that were verified.
MOST_IN_MEMORY = 100_000

#: Entries of a place that are looked at for priors, the newest first.
_MOST_PRIORS = 32


class CacheWarning(UserWarning):
    """The cache on disk could not be read or written; selection went on without it. Of each fault once a process."""


class SelectionCache:
    """Verified selections by key. Threads and processes may share one folder.

    Args:
        folder: where entries lie, one file each; None keeps them in memory alone.
        lock_seconds: how long to wait for another process that holds a key.
        pack: selections that come before those on disk, so that all ranks of a job choose alike.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        lock_seconds: float = LOCK_SECONDS,
        pack: PackedSelections | None = None,
    ) -> None:
        self.folder = folder
        self.pack = pack
        self._lock_seconds = lock_seconds
        self._memory: dict[CacheKey, Selection] = {}
        #: Keys whose packed selection failed here: a pack cannot be written.
        self._failed: set[CacheKey] = set()
        self._start_locks()
        _caches.add(self)

    def _start_locks(self) -> None:
        self._locks: weakref.WeakValueDictionary[CacheKey, _ThreadLock] = weakref.WeakValueDictionary()
        self._guard = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether nothing can be found: there is neither a folder nor a pack, and nothing was put in."""
        return not self._memory and self.folder is None and self.pack is None

    def get(self, key: CacheKey) -> Selection | None:
        """The selection of a key, or None. A broken or foreign entry is a miss and a warning."""
        found = self._memory.get(key)
        if found is not None:
            return found
        if self.pack is not None and key not in self._failed:
            found = self.pack.get(key)
        if found is None and self.folder is not None:
            found = self._read(self.folder, key)
        if found is not None:
            self._remember(key, found)
        return found

    def put(self, key: CacheKey, selection: Selection, *, on_disk: bool = True) -> None:
        """Keep a selection: in memory, and on disk if ``on_disk``. A disk that cannot be written is a warning."""
        self._remember(key, selection)
        if on_disk and self.folder is not None:
            self._write(self.folder, CacheEntry(key, selection, round(time.time(), 3)))

    def evict(self, key: CacheKey) -> None:
        """Forget a key, in memory and on disk; from now on a pack does not answer it either."""
        if self.pack is not None:
            self._failed.add(key)
        self.remove(key)

    def remove(self, key: CacheKey) -> bool:
        """Take a key out of memory and off the disk. Returns whether it was on the disk."""
        self._memory.pop(key, None)
        return self.folder is not None and cache_files.remove_entry(self.folder, key)

    def clear(self) -> int:
        """Forget everything. Returns the number of entries removed from the disk; a warning if some stay there."""
        found = self.forget()
        if found.left:
            path, reason = found.left[0]
            more = f" and {len(found.left) - 1} more" if len(found.left) > 1 else ""
            warn_once(f"{path}{more} cannot be removed ({reason}).")
        return found.removed

    def forget(self, keys: Iterable[CacheKey] | None = None) -> Removal:
        """Forget some keys, or everything where None, in memory and on disk. Says what could not be removed from the disk."""
        if keys is None:
            self._memory.clear()
            return Removal(0) if self.folder is None else cache_files.remove_all(self.folder)
        named = list(keys)
        for key in named:
            self._memory.pop(key, None)
        return Removal(0) if self.folder is None else cache_files.remove_entries(self.folder, named)

    def priors(self, problem: Problem, device: Device) -> list[Candidate]:
        """What won for this problem on this hardware before, in other environments or among other candidates.

        Good guesses and no answers: they are to be measured together with the default. Newest first, those of a pack
        before those of the disk; legal here, each once, and without the default.
        """
        place = place_of(problem.key, device.fingerprint)
        entries = [] if self.pack is None else [e for e in self.pack.at(place) if e.key not in self._failed]
        if self.folder is not None:
            entries += self._newest(self.folder, place)
        found = {entry.selection.candidate: None for entry in entries}
        found.pop(operation(problem.operation).default, None)
        return [candidate for candidate in found if is_legal(problem, device, candidate)]

    def entries(self) -> Iterator[CacheEntry]:
        """Every entry on disk that can be read, in a fixed order; a warning for each that cannot."""
        if self.folder is None:
            return
        try:
            for path in cache_files.entry_paths(self.folder):
                entry = self._entry(path)
                if entry is not None:
                    yield entry
        except OSError as error:
            _warn(f"The selection cache {self.folder} cannot be read ({_reason(error)})")

    def add(self, entry: CacheEntry) -> str:
        """Merge an entry of another cache: of two of one key the later one stays, and a verified one before any other.

        Returns:
            ``"added"``, ``"replaced"``, ``"kept"`` (what is here stays), or ``"failed"`` (it cannot be written, with a
            warning).
        """
        if self.folder is None:
            raise KernelcastError("Entries are added to a folder, and this cache has none.")
        path = cache_files.entry_path(self.folder, entry.key)
        here = self._entry(path)
        if here is not None and _worth(here) >= _worth(entry):
            return "kept"
        if not self._write(self.folder, entry):
            return "failed"
        self._memory.pop(entry.key, None)
        return "added" if here is None else "replaced"

    @contextlib.contextmanager
    def lock(self, key: CacheKey) -> Iterator[None]:
        """Hold a key against other threads and processes, so that it is verified once.

        The lock is the operating system's, on an open file: it ends with its holder, however that dies. Where the
        folder cannot be written or locked, or another process holds the key for too long, only this process's threads
        are held off, with a warning.
        """
        with self._guard:
            thread_lock = self._locks.get(key)
            if thread_lock is None:
                thread_lock = self._locks[key] = _ThreadLock()
        with thread_lock.lock, contextlib.ExitStack() as stack:
            if self.folder is not None:
                path = cache_files.lock_path(self.folder, key)
                try:
                    from filelock import FileLock

                    path.parent.mkdir(parents=True, exist_ok=True)
                    held = FileLock(path, timeout=self._lock_seconds).acquire(poll_interval=_POLL_SECONDS)
                    stack.enter_context(held)
                    os.utime(path)  # in use: not to be cleared away
                except Exception as error:  # noqa: BLE001 - a lock that cannot be had must not end the caller's program
                    _warn(f"The selection cache {self.folder} cannot be locked ({_reason(error)})")
            yield

    def _remember(self, key: CacheKey, selection: Selection) -> None:
        if len(self._memory) >= MOST_IN_MEMORY:
            with self._guard:
                for old in list(self._memory)[: MOST_IN_MEMORY // 2]:
                    self._memory.pop(old, None)
        self._memory[key] = selection

    def _read(self, folder: Path, key: CacheKey) -> Selection | None:
        path = cache_files.entry_path(folder, key)
        entry = self._entry(path)
        if entry is None or entry.key != key:
            return None
        try:
            variant(entry.selection.problem.operation, entry.selection.candidate.variant)
        except KernelcastError as error:
            _warn(f"The cache entry {path} was ignored ({error})")
            return None
        return entry.selection

    def _entry(self, path: Path) -> CacheEntry | None:
        """The entry of a file, or None: with a warning, unless there is no file."""
        try:
            entry = cache_files.read_entry(path)
            if path.name != f"{entry.key.digest}.json" or path.parent.name != entry.key.place:
                raise InvalidRecordError("it is of another key")
            return entry
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:  # noqa: BLE001 - whatever a file holds, it must not end the caller's program
            _warn(f"The cache entry {path} is broken and was ignored ({_reason(error)})")
            return None

    def _write(self, folder: Path, entry: CacheEntry) -> bool:
        try:
            cache_files.write_entry(folder, entry)
        except OSError as error:
            _warn(f"The selection cache {folder} cannot be written ({_reason(error)})")
            return False
        return True

    def _newest(self, folder: Path, place: str) -> list[CacheEntry]:
        """The newest entries of a place."""
        try:
            paths = sorted(cache_files.entry_paths(folder, place), key=_modified, reverse=True)
        except OSError as error:
            _warn(f"The selection cache {folder} cannot be read ({_reason(error)})")
            return []
        found = [entry for path in paths[:_MOST_PRIORS] if (entry := self._entry(path)) is not None]
        return sorted(found, key=lambda entry: (-entry.verified_at, entry.key.digest))


class _ThreadLock:
    """A lock that a weak dictionary can hold: it is gone when no thread holds or waits for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


_caches: weakref.WeakSet[SelectionCache] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked child has no thread that could release what another thread of its parent held."""
    for cache in list(_caches):
        cache._start_locks()


os.register_at_fork(after_in_child=_after_fork)


def is_legal(problem: Problem, device: Device, candidate: Candidate) -> bool:
    """Whether a candidate of elsewhere is one here: known, in its space, and by every rule."""
    try:
        require_legal(problem, device, candidate)
    except KernelcastError:
        return False
    return True


def _worth(entry: CacheEntry) -> tuple[bool, float]:
    return entry.selection.source == "verified", entry.verified_at


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return cache_files.reason_of(error)
    return str(error) if isinstance(error, InvalidRecordError) else f"{type(error).__name__}: {error}"


#: What was warned of: a folder that cannot be written is one fault, whatever is selected.
_said: set[str] = set()


def warn_once(message: str) -> None:
    """A :class:`CacheWarning`, unless this process had the same before."""
    if message not in _said:
        warn(message, CacheWarning)
        _said.add(message)  # after it: a warning that is an error stays one


def _warn(message: str) -> None:
    warn_once(f"{message}; selecting without it.")
