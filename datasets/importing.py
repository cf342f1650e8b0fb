"""Import of measurements that other tools made: the importers, what they share, and that a command keeps all or nothing.

An importer turns one file into rows of the store's columns. :func:`import_files` reads every file before it writes one
segment, so a fault in any of them leaves the store as it was.
"""

from __future__ import annotations

import gzip
import importlib
import lzma
import struct
import time
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, ClassVar, TypeVar, cast

from kernelcast.errors import ImportFileError, KernelcastError, SettingsError, UnknownNameError
from kernelcast.kernels import Device

if TYPE_CHECKING:
    import pyarrow as pa

#: A file that unpacks to more than this is refused.
MAX_BYTES = 4 * 2**30

#: So is one that unpacks to more than this many times its size: measurements written as text reach 30, an attack 1000.
MAX_RATIO = 200

#: Small files may have any ratio.
_RATIO_FREE_BYTES = 2**20

_CHUNK_BYTES = 2**20

_GZIP, _ZIPS = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06")

#: How a Parquet file begins, the one format here that is no text.
PARQUET = b"PAR1"

#: Marks with which other encodings of text begin; that of UTF-8 is passed over.
_UTF8_MARK, _UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")

#: Characters of a message of which parts are a file's.
_LONGEST_MESSAGE = 600

#: Members of an archive that a message lists.
_LISTED = 8

#: (bytes parsed, bytes of the files known so far).
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Parsed:
    """One file's measurements.

    Attributes:
        source: the value of the column ``source`` in every row.
        table: rows of :data:`kernelcast.datasets.segments.COLUMNS`.
        rows: lines of measurements in the file.
        problems: distinct problems in the file.
        dropped: repeats that failed while others of the same candidate worked: they are in no record.
        identity: what no two files of one command may share, or the records of one would be taken for those of the
            other; the source where it is empty.
        devices: facts of devices that the file brings along.
    """

    source: str
    table: pa.Table
    rows: int
    problems: int
    dropped: int
    identity: str = ""
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class ImportSummary:
    """What one import did.

    Attributes:
        files: files read.
        rows: lines of measurements in them.
        problems: distinct problems, summed over the files.
        added: records that are new in the store.
        known: records that the store had already.
        dropped: see :class:`Parsed`.
        seconds: wall-clock time.
    """

    files: int
    rows: int
    problems: int
    added: int
    known: int
    dropped: int
    seconds: float


@dataclass(frozen=True)
class ImportOption:
    """A fact that an importer must or may be told because its files do not hold it; an option of its command.

    Attributes:
        name: such as ``"operation"``, for ``--operation``.
        doc: one sentence.
        required: whether the importer cannot do without.
    """

    name: str
    doc: str
    required: bool = False


class Importer(ABC):
    """Reads one tool's files. Subclasses are registered with :func:`register_importer`, and then are commands.

    One is made for each command; ``parse`` is called once for each file, in the order given, before anything is written.

    Args:
        given: values of :attr:`options` by name.

    Raises:
        SettingsError: an option is unknown, or a required one is missing.
    """

    name: ClassVar[str]
    #: One sentence: what the files are and where they come from.
    doc: ClassVar[str]
    #: Files, device and workload of the example in the command's help.
    example: ClassVar[str]
    options: ClassVar[tuple[ImportOption, ...]] = ()
    #: Whether the files say device and workload themselves, so that the command need not.
    self_describing: ClassVar[bool] = False
    #: A file that unpacks to more than this is refused, unless the command allows more.
    max_bytes: int = MAX_BYTES

    def __init__(self, given: Mapping[str, str]) -> None:
        known = [option.name for option in self.options]
        for name in given:
            if name not in known:
                raise SettingsError(
                    f"The importer {self.name} has no option {name!r}. It has: {', '.join(known) or 'none'}."
                )
        for option in self.options:
            if option.required and option.name not in given:
                raise SettingsError(
                    f"The importer {self.name} needs the option {option.name!r}: {option.doc}"
                )
        self.given = dict(given)

    @abstractmethod
    def parse(self, file: str, *, device: Device, workload: str, on_bytes: Callable[[int], None]) -> Parsed:
        """Read a file.

        Args:
            file: as the user wrote it: a path, or ``FILE.zip:member``.
            device: where the file was measured, as the user says; for a self-describing file perhaps None.
            workload: the column ``workload`` of every row; for a self-describing file perhaps empty: as it says.
            on_bytes: called with the number of bytes unpacked or parsed since the last call.

        Raises:
            ImportFileError: the file is broken, or contradicts the device.
        """


_importers: dict[str, type[Importer]] = {}

#: Modules of this package that register an importer: one line each.
_MODULES = (
    "autoheuristic",
    "kernel_tuner",
    "records_file",
    "t4",
    "table_file",
    "triton_autotune",
    "tunableop",
)

ImporterT = TypeVar("ImporterT", bound=type[Importer])


def register_importer(cls: ImporterT) -> ImporterT:
    """Class decorator: add an importer.

    Raises:
        KernelcastError: another importer has that name.
    """
    if cls.name in _importers:
        raise KernelcastError(f"The importer {cls.name!r} is registered twice; names are unique.")
    _importers[cls.name] = cls
    return cls


def importers() -> dict[str, type[Importer]]:
    """All importers by name."""
    for module in _MODULES:
        importlib.import_module(f"kernelcast.datasets.{module}")
    return dict(sorted(_importers.items()))


def importer(name: str) -> type[Importer]:
    """The importer of that name.

    Raises:
        UnknownNameError: there is none; the message lists those there are.
    """
    known = importers()
    if name not in known:
        raise UnknownNameError("importer", name, known)
    return known[name]


def import_files(
    name: str,
    files: Sequence[str],
    *,
    device: Device | None = None,
    workload: str = "",
    store: Path,
    options: Mapping[str, str] | None = None,
    max_bytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> ImportSummary:
    """Read files of measurements and add them to a store: all of them, or nothing.

    Args:
        name: of the importer.
        files: paths; a member of a zip file is ``FILE.zip:member``.
        device: where they were measured; may be left out where the files say so (:attr:`Importer.self_describing`).
        workload: the set of problems that they hold, such as ``"hf-train"``; likewise.
        store: folder of the store; created if there is none.
        options: what the importer must or may be told: :attr:`Importer.options`.
        max_bytes: a file that unpacks to more is refused; :attr:`Importer.max_bytes` where None.
        on_progress: called now and then.

    Raises:
        UnknownNameError: no such importer.
        SettingsError: the device or the workload's name is missing, or an option is unknown, missing or wrong.
        ImportFileError: a file is broken or contradicts the device, or two have one name. Nothing was kept.
        StoreError: the store cannot be written.
    """
    from kernelcast.datasets.segments import require_arrow
    from kernelcast.datasets.store import Store

    pa = require_arrow()
    reader = importer(name)(options or {})
    if max_bytes is not None:
        reader.max_bytes = max_bytes
    if not reader.self_describing:
        if not workload.strip():
            raise SettingsError("The workload has no name. Name the set of problems, such as hf-train.")
        if device is None:
            raise SettingsError(
                f"The files of {name} do not say on which device they were measured. Name it."
            )
    started = time.monotonic()
    done = 0
    total = sum(_size(file) for file in files)

    def report(count: int) -> None:
        nonlocal done, total
        done += count
        total = max(total, done)
        if on_progress is not None:
            on_progress(done, total)

    parsed: list[Parsed] = []
    seen: dict[str, str] = {}
    for file in files:
        # Only an importer of self-describing files, which takes None, is given it.
        found = reader.parse(file, device=cast(Device, device), workload=workload, on_bytes=report)
        identity = found.identity or found.source
        if identity in seen:
            raise ImportFileError(
                file,
                f"its records would be taken for those of {seen[identity]}: both come from {identity!r}. "
                "Name each file once; rename one if they differ.",
            )
        seen[identity] = file
        parsed.append(found)
    if not parsed:
        raise SettingsError("No file is named. Name at least one.")
    target = Store(store)
    devices = {each.fingerprint: each for found in parsed for each in found.devices}
    for each in devices.values() if reader.self_describing or device is None else [device]:
        target.add_device(each)
    result = target.add_table(pa.concat_tables([found.table for found in parsed]))
    return ImportSummary(
        files=len(parsed),
        rows=sum(found.rows for found in parsed),
        problems=sum(found.problems for found in parsed),
        added=result.added,
        known=result.known,
        dropped=sum(found.dropped for found in parsed),
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class Content:
    """An unpacked file: its own name without folders and packing, and its bytes."""

    name: str
    data: bytes


def read_content(
    file: str,
    *,
    on_bytes: Callable[[int], None],
    max_bytes: int = MAX_BYTES,
    max_ratio: int = MAX_RATIO,
    nul: bool = False,
) -> Content:
    """Unpack a plain file, a ``.gz``, a zip of one file, or ``FILE.zip:member``.

    What is no Parquet file is text in UTF-8: a byte-order mark is left out. ``nul`` says whether it may hold NUL bytes,
    as no tool but ours writes.

    Raises:
        ImportFileError: there is no such file or member; the zip holds several and none is named; the packing is
            broken, or within another one; more than ``max_bytes``, or more than ``max_ratio`` times the packed size,
            comes out; or a text is in UTF-16, or holds a NUL byte.
    """
    try:
        content = _unpacked(file, on_bytes, max_bytes, max_ratio)
    except OSError as error:
        raise ImportFileError(file, f"it cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        # A path that holds a NUL byte.
        raise ImportFileError(repr(file), f"it cannot be read: {error}.") from error
    data = content.data
    if data.startswith(PARQUET):
        return content
    if data.startswith(_UTF16_MARKS):
        raise ImportFileError(file, "it is text in UTF-16, not in UTF-8. Save it as UTF-8.", line=1)
    at = -1 if nul else data.find(b"\0")
    if at >= 0:
        raise ImportFileError(
            file,
            f"it is no text: byte {at} is NUL. It was changed, or is of another format.",
            line=data.count(b"\n", 0, at) + 1,
        )
    return Content(content.name, data.removeprefix(_UTF8_MARK))


def _unpacked(file: str, on_bytes: Callable[[int], None], max_bytes: int, max_ratio: int) -> Content:
    path, member = Path(file), ""
    if not path.exists() and ".zip:" in file:
        archive, _, member = file.partition(".zip:")
        path = Path(f"{archive}.zip")
    with path.open("rb") as packed:
        magic = packed.read(4)
        packed.seek(0)
        size = path.stat().st_size
        if magic in _ZIPS or member:
            content = _read_zip(file, packed, member, on_bytes, max_bytes, max_ratio)
        elif magic.startswith(_GZIP):
            with gzip.GzipFile(fileobj=packed) as stream, _broken(file, "gzip"):
                data = _read_limited(stream, file, size, on_bytes, max_bytes, max_ratio)
            content = Content(path.name.removesuffix(".gz"), data)
        else:
            return Content(path.name, _read_limited(packed, file, size, on_bytes, max_bytes, max_ratio))
    if content.data.startswith((_GZIP, *_ZIPS)):
        raise ImportFileError(
            file, f"what it unpacks to, {content.name!r}, is packed again. Unpack it once first."
        )
    return content


def _read_zip(
    file: str,
    packed: IO[bytes],
    member: str,
    on_bytes: Callable[[int], None],
    max_bytes: int,
    max_ratio: int,
) -> Content:
    with _broken(file, "zip"), zipfile.ZipFile(packed) as archive:
        # Archives made on a Mac hold a hidden twin of each file.
        found = [
            info
            for info in archive.infolist()
            if not info.is_dir() and not info.filename.startswith("__MACOSX/")
        ]
        info = _chosen(file, found, member)
        with archive.open(info) as stream:
            data = _read_limited(stream, file, info.compress_size, on_bytes, max_bytes, max_ratio)
        return Content(PurePosixPath(info.filename).name, data)


def _chosen(file: str, found: Sequence[zipfile.ZipInfo], member: str) -> zipfile.ZipInfo:
    """The one member of an archive that is meant: by its whole name, or else by its name without folders."""
    chosen = list(found)
    if member:
        chosen = [info for info in found if info.filename == member] or [
            info for info in found if PurePosixPath(info.filename).name == member
        ]
    names = [info.filename for info in chosen]
    if len(chosen) > 1 and len(set(names)) == 1:
        raise ImportFileError(
            file, f"it holds {len(chosen)} members of the name {names[0]!r}. It was damaged: pack it again."
        )
    if len(chosen) != 1:
        listed = ", ".join(repr(info.filename)[1:-1] for info in found[:_LISTED]) or "no files"
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        wrong = "it is not clear which member is meant"
        if member and not chosen:
            wrong = f"it has no member {member!r}"
        raise ImportFileError(file, f"{wrong}. It holds {listed}{more}. Name one: FILE.zip:MEMBER.")
    name = names[0]
    # Nothing is written where a name says. But no tool packs such names, so the archive is not what it seems.
    if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts or not name.isprintable():
        raise ImportFileError(
            file, f"its member {name!r} has a name that leads out of the archive, or is none. Pack it again."
        )
    return chosen[0]


def _read_limited(
    stream: IO[bytes] | gzip.GzipFile,
    file: str,
    packed_bytes: int,
    on_bytes: Callable[[int], None],
    max_bytes: int,
    max_ratio: int,
) -> bytes:
    """Read to the end, but never much past the limits: a size that an archive states is no promise."""
    chunks: list[bytes] = []
    count = 0
    while chunk := stream.read(_CHUNK_BYTES):
        chunks.append(chunk)
        count += len(chunk)
        on_bytes(len(chunk))
        if count > max_bytes:
            raise ImportFileError(
                file,
                f"it holds more than {max_bytes:,} bytes unpacked. Split it, or allow more with --max-size.",
            )
        if count > _RATIO_FREE_BYTES and count > max_ratio * packed_bytes:
            raise ImportFileError(
                file,
                f"it unpacks to more than {max_ratio} times its size, as no file of measurements does. "
                "If it is sound, unpack it first.",
            )
    return b"".join(chunks)


def shortened(value: object) -> str:
    """A value of a file as a message quotes it: of a bounded length, on one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def bounded(text: str) -> str:
    """What a message says of a file's content: on one line, and no longer than a few."""
    line = "".join(char if char.isprintable() else "?" for char in text[: _LONGEST_MESSAGE + 1])
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."


_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, gzip.BadGzipFile, OverflowError)


@contextmanager
def _broken(file: str, packing: str) -> Iterator[None]:
    """Turn what the standard library says of a broken archive into one sentence."""
    try:
        yield
    except (*_DAMAGE, struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
        # Of damaged headers zipfile lets errors of every kind through. Its messages may quote a name of any bytes.
        said = shortened(str(error) or type(error).__name__)
        raise ImportFileError(file, f"the {packing} file is broken ({said}). Fetch it again.") from error
    except (RuntimeError, NotImplementedError) as error:
        raise ImportFileError(file, f"the {packing} file cannot be unpacked here: {error}.") from error


def _size(file: str) -> int:
    """Bytes of a file before it is unpacked; 0 if it is a member or missing."""
    try:
        return Path(file).stat().st_size
    except (OSError, ValueError):
        return 0
