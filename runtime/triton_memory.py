"""What was chosen for a tuned Triton kernel's keys, on disk. No fault of the disk ever reaches the caller.

One file an entry, beside the cache of selections. An entry keeps every timing, so that a new config, or a larger ``top_k``,
times only what is new.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelcast.datasets.journal import write_durably
from kernelcast.errors import warn
from kernelcast.runtime import CacheWarning
from kernelcast.runtime.cache import LOCK_SECONDS, warn_once
from kernelcast.runtime.triton_key import TunedKey

#: Version of an entry's layout; entries of another are misses.
ENTRY_VERSION = 1

#: An entry with more configs than any kernel has is none that was written here.
_MOST_BYTES = 16 * 2**20

#: Milliseconds: median, then the quantiles 0.2 and 0.8 where the benchmark gave them. Empty for a config that failed.
Timings = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Entry:
    """What is remembered of one key.

    Attributes:
        configs: hash of the configs that the choice was made among.
        choice: :func:`kernelcast.runtime.triton_configs.config_key` of the chosen one; empty before all are timed.
        top_k: how many the ranking was to measure; 0 for all.
        timings_ms: of each config that was timed, by its key.
    """

    configs: str
    choice: str
    top_k: int
    timings_ms: Timings = field(default_factory=dict)

    def answers(self, configs: str, top_k: int) -> bool:
        """Whether the choice stands for these configs and at least so many measured; 0 is all."""
        return self.configs == configs and (self.top_k == 0 or 0 < top_k <= self.top_k)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """Read what ``dataclasses.asdict`` made, through JSON.

        Raises:
            KeyError, TypeError, ValueError: a field is missing or of another type, or a timing is no positive number.
        """
        timings = {
            str(key): tuple(float(value) for value in values) for key, values in data["timings_ms"].items()
        }
        if not all(0 < value < math.inf for values in timings.values() for value in values):
            raise ValueError("a timing is no positive number")
        if type(data["top_k"]) is not int or data["top_k"] < 0:
            raise ValueError(f"top_k is {data['top_k']!r}")
        for name in ("configs", "choice"):
            if type(data[name]) is not str:
                raise TypeError(f"{name} is {data[name]!r}")
        return cls(data["configs"], data["choice"], data["top_k"], timings)


class TunedMemory:
    """Entries by key in a folder that threads and processes may share; None keeps nothing."""

    def __init__(self, folder: Path | None, *, lock_seconds: float = LOCK_SECONDS) -> None:
        self.folder = folder
        self._lock_seconds = lock_seconds

    def get(self, key: TunedKey) -> Entry | None:
        """The entry of a key, or None. A broken or foreign one is a miss and a warning."""
        if self.folder is None:
            return None
        path = self._path(key)
        try:
            data = json.loads(_read(path))
            if data["version"] != ENTRY_VERSION:
                raise ValueError(f"it has layout {data['version']!r}, not {ENTRY_VERSION}")
            if data["digest"] != _digest(data["key"], data["entry"]):
                raise ValueError("it was changed")
            if data["key"] != json.loads(json.dumps(asdict(key))):
                raise ValueError("it is of another key")
            return Entry.from_dict(data["entry"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _warn(f"The tuned config {path} is broken and was ignored ({type(error).__name__}: {error})")
            return None

    def put(self, key: TunedKey, entry: Entry) -> None:
        """Keep an entry. A disk that cannot be written is a warning."""
        if self.folder is None:
            return
        path = self._path(key)
        facts, kept = asdict(key), asdict(entry)
        text = json.dumps(
            {"version": ENTRY_VERSION, "digest": _digest(facts, kept), "key": facts, "entry": kept}
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text + "\n")
        except OSError as error:
            _warn_of_folder(f"{self.folder} cannot be written ({error.strerror or error})")

    def evict(self, key: TunedKey) -> None:
        """Forget a key."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self._path(key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self, key: TunedKey) -> Iterator[None]:
        """Hold a key against other processes, so that it is measured once; it ends with its holder, however that dies.

        Where the folder cannot be written or locked, or another holds the key for too long, nothing is held, with a warning.
        """
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                from filelock import FileLock

                path = self.folder / "locks" / f"{key.digest}.lock"
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(path, timeout=self._lock_seconds))
                except (OSError, NotImplementedError) as error:
                    reason = getattr(error, "strerror", None) or error
                    _warn_of_folder(f"{self.folder} cannot be locked ({reason})")
            yield

    def _path(self, key: TunedKey) -> Path:
        assert self.folder is not None
        return self.folder / key.digest[:2] / f"{key.digest}.json"


def _read(path: Path) -> bytes:
    """The content of a file. What is no file, such as a pipe that nobody writes to, must not be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no file")
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError("it is larger than any entry")
    return content


def _digest(key: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """64 hexadecimal digits over what an entry says."""
    return hashlib.sha256(json.dumps([key, entry], sort_keys=True).encode()).hexdigest()


def _warn_of_folder(fault: str) -> None:
    warn_once(f"The tuned configs in {fault}; tuning goes on without it.")


def _warn(message: str) -> None:
    warn(f"{message}; tuning goes on without it.", CacheWarning)
