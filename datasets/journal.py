"""The write side of the store: one append-only file a writer, each record durable before the next is measured.

Standard library only, so that the run time can record what it verifies. A store is a folder::

    store.json               {"schema": 1}
    devices/<fingerprint>.json    the hardware facts of every device that records name
    journal/<writer>.jsonl        one record a line, appended and synced
    parquet/<segment>.parquet     what compaction and imports wrote (kernelcast.datasets.store)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernelcast.datasets.migrations import SCHEMA_VERSION, require_readable
from kernelcast.datasets.record import Measurement
from kernelcast.errors import InvalidRecordError, StoreError
from kernelcast.kernels import Device

#: Characters of a file's content in a message.
_LONGEST_QUOTE = 400


def prepare_store(root: Path) -> None:
    """Create the store's folders and its version file, or check the version of one that is there.

    What is written from now on has the present version; an older store is marked so, and an older kernelcast refuses it.

    Raises:
        StoreError: the folder cannot be written, is no store, or is of a newer schema.
    """
    marker = root / "store.json"
    try:
        outdated = not marker.exists() or check_schema(root) < SCHEMA_VERSION
        # Also where the marker is there already: tools that copy a store may leave its empty folders out.
        for name in ("devices", "journal", "parquet"):
            (root / name).mkdir(parents=True, exist_ok=True)
        if outdated:
            write_durably(marker, json.dumps({"schema": SCHEMA_VERSION}) + "\n")
    except OSError as error:
        raise StoreError(
            f"The store {root} cannot be created: {error.strerror or error}. "
            "Choose a folder that can be written with KERNELCAST_HOME or --store."
        ) from error


def require_writable(root: Path) -> None:
    """Create or check a store as :func:`prepare_store`, and write to its folder of journals: to be called before measuring.

    Raises:
        StoreError: records could not be kept.
    """
    import tempfile

    prepare_store(root)
    try:
        # Without a name where the system can: whatever ends this process, nothing is left.
        with tempfile.TemporaryFile(dir=root / "journal") as file:
            file.write(b"\n")
            file.flush()
    except OSError as error:
        raise StoreError(
            f"Cannot write to the store {root}: {error.strerror or error}. "
            "Choose a folder that can be written with KERNELCAST_HOME or --store."
        ) from error


def check_schema(root: Path) -> int:
    """The schema of a store, which this version can read.

    Raises:
        StoreError: the version file is broken, or names a newer schema, or one from which no migration leads here.
    """
    marker = root / "store.json"
    try:
        schema = json.loads(marker.read_text())["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{marker} is not a store's version file ({type(error).__name__}: {quoted(error)})."
        ) from error
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 0:
        raise StoreError(f"{marker} names schema {quoted(repr(schema))}; it must be a whole number.")
    require_readable(schema, f"The store {root} (store.json)", StoreError)
    return schema


def quoted(said: object) -> str:
    """What a message says of a file's content: on one line, of a bounded length."""
    text = str(said)
    line = "".join(char if char.isprintable() else "?" for char in text[:_LONGEST_QUOTE])
    return line if len(text) <= _LONGEST_QUOTE else f"{line}..."


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that after a power loss it holds the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a new or renamed entry of a folder survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems refuse to sync a folder; the file's own sync has been done.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Journal:
    """Appends measurements to a file of its own in a store. Use as a context manager, from any number of threads.

    The file is created with the first record. A process that is killed leaves a file whose complete lines are all
    valid; a last line without its end is ignored by readers. A journal holds a lock on its file until it is closed or
    its process ends, however it ends: who gets the lock (:func:`lock_journal`) knows that the file will not grow.

    Raises:
        StoreError: the store cannot be written, or is of a newer schema.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._pid = 0
        self._devices: set[str] = set()
        require_writable(root)

    def append(self, measurement: Measurement) -> None:
        """Write one record; it is on the disk when this returns.

        Raises:
            StoreError: the disk is full, or the folder cannot be written.
        """
        line = (json.dumps(measurement.to_dict(), separators=(",", ":")) + "\n").encode()
        with self._lock:
            try:
                descriptor = self._open()
                # One write a line: a reader, or a kill, never sees two records interleaved.
                if os.write(descriptor, line) != len(line):
                    raise StoreError(
                        f"The disk of {self.root} is full: a record was cut short. Free some space."
                    )
                os.fsync(descriptor)
            except BaseException as error:
                # A record that was cut short may only be the last of its file: the next one starts another file.
                self._release()
                if isinstance(error, OSError):
                    reason = error.strerror or error
                    raise StoreError(f"Cannot append to the store {self.root}: {reason}.") from error
                raise

    def record_device(self, device: Device) -> None:
        """Keep the device's hardware facts, once."""
        if device.fingerprint in self._devices:
            return
        path = self.root / "devices" / f"{device.fingerprint}.json"
        try:
            if not path.exists():
                write_durably(path, json.dumps(device.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise StoreError(f"Cannot write to the store {self.root}: {error.strerror or error}.") from error
        self._devices.add(device.fingerprint)

    def close(self) -> None:
        """Close the file. Appending again opens a new one."""
        with self._lock:
            self._release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> None:
        # Also in a forked child: its copy of the parent's descriptor would hold the parent's lock.
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> int:
        # A forked child must not share its parent's file: each writer has its own.
        if self._descriptor is not None and self._pid != os.getpid():
            self._release()
        while self._descriptor is None:
            self._pid = os.getpid()
            name = f"{socket.gethostname()}-{self._pid}-{secrets.token_hex(4)}.jsonl"
            path = self.root / "journal" / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o644)
            # Between these two lines a compaction may have locked, or removed, what it saw as an empty, abandoned file.
            if not _try_lock(descriptor) or os.fstat(descriptor).st_nlink == 0:
                os.close(descriptor)
                continue
            self._descriptor = descriptor
            sync_folder(path.parent)
        return self._descriptor


def lock_journal(path: Path) -> int | None:
    """Lock a journal whose writer is gone: a descriptor, to be closed by the caller, or None if it is in use.

    The lock is the kernel's (``flock``): it ends with the process that holds it, whatever kills that, on this host and,
    where the file system shares locks, on others. Where the file system has none, every journal counts as in use.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _try_lock(descriptor: int) -> bool:
    """Lock a writer's own file; False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # No locks on this file system: lock_journal fails there too, so nothing is taken from this writer.
        return True
    return True


def read_journal(path: Path) -> Iterator[Measurement]:
    """The complete records of one journal file, in order.

    Raises:
        StoreError: a complete line is not a record: the file was changed by something else.
    """
    for number, data in read_lines(path):
        try:
            yield Measurement.from_dict(data)
        except InvalidRecordError as error:
            raise StoreError(f"{path}, line {number}: {quoted(error)}") from error


def _require_text(data: dict[str, Any], where: str) -> None:
    """Refuse half a character, which no column can hold, but in what an error said."""
    try:
        json.dumps({**data, "detail": ""}, ensure_ascii=False).encode()
    except ValueError as error:
        raise StoreError(f"{where}: not a record (it holds half a character).") from error


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, JSON object) of each complete line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return  # compacted by another process since the folder was listed
    except OSError as error:
        raise StoreError(f"Cannot read {path}: {error.strerror or error}.") from error
    lines = content.split(b"\n")
    # What follows the last line end was cut off by a kill: never a complete record.
    for number, line in enumerate(lines[:-1], start=1):
        if not line:
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{path}, line {number}: not JSON ({quoted(error)}).") from error
        if not isinstance(data, dict):
            raise StoreError(f"{path}, line {number}: not a record.")
        if b"\\ud" in line.lower():
            _require_text(data, f"{path}, line {number}")
        yield number, data
