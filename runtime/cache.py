"""The cache of verified selections: memory, then disk. No fault of the disk ever reaches the caller."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from kernelcast.datasets.journal import write_durably
from kernelcast.datasets.record import Environment
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Device, Problem, variant, variants
from kernelcast.runtime.selection import Selection

#: Version of an entry's layout; entries of another are misses.
CACHE_VERSION = 1

#: How long a live process may hold a key before others verify it themselves: a stopped one must not stop them all.
LOCK_SECONDS = 300.0


class CacheWarning(UserWarning):
    """The cache on disk could not be read or written; selection went on without it."""


@dataclass(frozen=True)
class CacheKey:
    """Every fact that can change which candidate is fastest.

    Attributes:
        problem: :attr:`kernelcast.kernels.Problem.key`: operation, dimensions, dtypes, layouts, precision, threads.
        device: the hardware's fingerprint.
        environment: torch, triton, the runtime and the system.
        variants: (name, source hash) of every variant of the operation: a new or changed one may be faster.
        top_k: how many were measured; 0 for the whole space (mode ``tune``).
    """

    problem: str
    device: str
    environment: tuple[str, ...]
    variants: tuple[tuple[str, str], ...]
    top_k: int

    @classmethod
    def of(cls, problem: Problem, device: Device, top_k: int) -> CacheKey:
        """The key of a problem on a device in this process's environment."""
        here = Environment.current("", device_kind=device.kind)
        return cls(
            problem=problem.key,
            device=device.fingerprint,
            environment=(here.torch, here.triton, here.runtime, here.system),
            variants=tuple(
                sorted((name, v.source_hash()) for name, v in variants(problem.operation).items())
            ),
            top_k=top_k,
        )

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits: the entry's file name."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class SelectionCache:
    """Verified selections by key. Threads and processes may share one folder.

    Args:
        folder: where entries lie, one file each; None keeps them in memory alone.
        lock_seconds: how long to wait for another process that holds a key.
    """

    def __init__(self, folder: Path | None, *, lock_seconds: float = LOCK_SECONDS) -> None:
        self.folder = folder
        self._lock_seconds = lock_seconds
        self._memory: dict[CacheKey, Selection] = {}
        self._locks: dict[CacheKey, threading.Lock] = {}
        self._guard = threading.Lock()

    def get(self, key: CacheKey) -> Selection | None:
        """The selection of a key, or None. A broken or foreign entry is a miss and a warning."""
        found = self._memory.get(key)
        if found is None and self.folder is not None:
            found = self._read(key)
            if found is not None:
                self._memory[key] = found
        return found

    def put(self, key: CacheKey, selection: Selection, *, on_disk: bool = True) -> None:
        """Keep a selection: in memory, and on disk if ``on_disk``. A disk that cannot be written is a warning."""
        self._memory[key] = selection
        if self.folder is None or not on_disk:
            return
        entry = {"version": CACHE_VERSION, "key": asdict(key), "selection": selection.to_dict()}
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, json.dumps(entry) + "\n")
        except OSError as error:
            _warn(f"The selection cache {self.folder} cannot be written ({error.strerror or error})")

    def evict(self, key: CacheKey) -> None:
        """Forget a key, in memory and on disk."""
        self._memory.pop(key, None)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    def clear(self) -> int:
        """Forget everything. Returns the number of entries removed from the disk."""
        self._memory.clear()
        removed = 0
        for path in self._entries():
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    @contextlib.contextmanager
    def lock(self, key: CacheKey) -> Iterator[None]:
        """Hold a key against other threads and processes, so that it is verified once.

        The lock is the operating system's, on an open file: it ends with its holder, however that dies. Where the
        folder cannot be written or locked, or another process holds the key for too long, only this process's threads
        are held off, with a warning.
        """
        with self._guard:
            thread_lock = self._locks.setdefault(key, threading.Lock())
        with thread_lock, contextlib.ExitStack() as stack:
            if self.folder is not None:
                from filelock import FileLock

                path = self.folder / "locks" / f"{key.digest}.lock"
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(path, timeout=self._lock_seconds))
                # A time-out is an OSError too; the other says that the file system knows no locks.
                except (OSError, NotImplementedError) as error:
                    reason = getattr(error, "strerror", None) or error
                    _warn(f"The selection cache {self.folder} cannot be locked ({reason})")
            yield

    def _path(self, key: CacheKey) -> Path:
        assert self.folder is not None
        return self.folder / key.digest[:2] / f"{key.digest}.json"

    def _entries(self) -> list[Path]:
        return sorted(self.folder.glob("??/*.json")) if self.folder is not None else []

    def _read(self, key: CacheKey) -> Selection | None:
        path = self._path(key)
        try:
            entry = json.loads(path.read_bytes())
            if entry["version"] != CACHE_VERSION:
                _warn(
                    f"The cache entry {path} has layout {entry['version']!r}, not {CACHE_VERSION}, and was ignored"
                )
                return None
            selection = Selection.from_dict(entry["selection"])
            same_key = json.dumps(entry["key"], sort_keys=True) == json.dumps(asdict(key), sort_keys=True)
            if not same_key or selection.problem.key != key.problem:
                _warn(f"The cache entry {path} is of another key and was ignored")
                return None
            variant(selection.problem.operation, selection.candidate.variant)  # known here, or an error
            return selection
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, KernelcastError) as error:
            _warn(f"The cache entry {path} is broken and was ignored ({type(error).__name__}: {error})")
            return None


def _warn(message: str) -> None:
    warnings.warn(f"{message}; selecting without it.", CacheWarning, stacklevel=3)
