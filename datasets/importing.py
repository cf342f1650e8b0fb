"""Import of measurements that other tools made: the importers, what they share, and that a command keeps all or nothing.

An importer turns one file into rows of the store's columns. :func:`import_files` reads every file before it writes one
segment, so a fault in any of them leaves the store as it was.
"""

from __future__ import annotations

import gzip
import importlib
import time
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, TypeVar

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
    """

    source: str
    table: pa.Table
    rows: int
    problems: int
    dropped: int


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
            device: where the file was measured, as the user says.
            workload: the column ``workload`` of every row.
            on_bytes: called with the number of bytes unpacked or parsed since the last call.

        Raises:
            ImportFileError: the file is broken, or contradicts the device.
        """


_importers: dict[str, type[Importer]] = {}

#: Modules of this package that register an importer: one line each.
_MODULES = (
    "autoheuristic",
    "kernel_tuner",
    "t4",
    "tunableop",
    "table_file",
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
    device: Device,
    workload: str,
    store: Path,
    options: Mapping[str, str] | None = None,
    on_progress: OnProgress | None = None,
) -> ImportSummary:
    """Read files of measurements and add them to a store: all of them, or nothing.

    Args:
        name: of the importer.
        files: paths; a member of a zip file is ``FILE.zip:member``.
        device: where they were measured.
        workload: the set of problems that they hold, such as ``"hf-train"``.
        store: folder of the store; created if there is none.
        options: what the importer must or may be told: :attr:`Importer.options`.
        on_progress: called now and then.

    Raises:
        UnknownNameError: no such importer.
        SettingsError: the workload's name is empty, or an option is unknown, missing or wrong.
        ImportFileError: a file is broken or contradicts the device, or two have one name. Nothing was kept.
        StoreError: the store cannot be written.
    """
    from kernelcast.datasets.segments import require_arrow
    from kernelcast.datasets.store import Store

    pa = require_arrow()
    reader = importer(name)(options or {})
    if not workload.strip():
        raise SettingsError("The workload has no name. Name the set of problems, such as hf-train.")
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
        found = reader.parse(file, device=device, workload=workload, on_bytes=report)
        if found.source in seen:
            raise ImportFileError(
                file,
                f"its records would be taken for those of {seen[found.source]}: both come from {found.source!r}. "
                "Name each file once; rename one if they differ.",
            )
        seen[found.source] = file
        parsed.append(found)
    target = Store(store)
    target.add_device(device)
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
    file: str, *, on_bytes: Callable[[int], None], max_bytes: int = MAX_BYTES, max_ratio: int = MAX_RATIO
) -> Content:
    """Unpack a plain file, a ``.gz``, a zip of one file, or ``FILE.zip:member``.

    Raises:
        ImportFileError: there is no such file or member; the zip holds several and none is named; the packing is
            broken; or more than ``max_bytes``, or more than ``max_ratio`` times the packed size, comes out.
    """
    path, member = Path(file), ""
    if not path.exists() and ".zip:" in file:
        archive, _, member = file.partition(".zip:")
        path = Path(f"{archive}.zip")
    try:
        with path.open("rb") as packed:
            magic = packed.read(4)
            packed.seek(0)
            size = path.stat().st_size
            if magic == b"PK\x03\x04" or member:
                return _read_zip(file, packed, member, on_bytes, max_bytes, max_ratio)
            if magic[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=packed) as stream, _broken(file, "gzip"):
                    data = _read_limited(stream, file, size, on_bytes, max_bytes, max_ratio)
                return Content(path.name.removesuffix(".gz"), data)
            return Content(path.name, _read_limited(packed, file, size, on_bytes, max_bytes, max_ratio))
    except OSError as error:
        raise ImportFileError(file, f"it cannot be read: {error.strerror or error}.") from error


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
        if member:
            chosen = [info for info in found if info.filename == member] or [
                info for info in found if Path(info.filename).name == member
            ]
        else:
            chosen = found
        if len(chosen) != 1:
            listed = ", ".join(info.filename for info in found) or "no files"
            wrong = f"it has no member {member!r}" if member else "it is not clear which member is meant"
            raise ImportFileError(file, f"{wrong}. It holds {listed}. Name one: FILE.zip:MEMBER.")
        info = chosen[0]
        with archive.open(info) as stream:
            data = _read_limited(stream, file, info.compress_size, on_bytes, max_bytes, max_ratio)
        return Content(Path(info.filename).name, data)


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
            raise ImportFileError(file, f"it unpacks to more than {max_bytes} bytes. Split it.")
        if count > _RATIO_FREE_BYTES and count > max_ratio * packed_bytes:
            raise ImportFileError(
                file,
                f"it unpacks to more than {max_ratio} times its size, as no file of measurements does. "
                "If it is sound, unpack it first.",
            )
    return b"".join(chunks)


@contextmanager
def _broken(file: str, packing: str) -> Iterator[None]:
    """Turn what the standard library says of a broken archive into one sentence."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise ImportFileError(
            file, f"the {packing} file is broken ({error or type(error).__name__}). Fetch it again."
        ) from error
    except (RuntimeError, NotImplementedError) as error:
        raise ImportFileError(file, f"the {packing} file cannot be unpacked here: {error}.") from error


def _size(file: str) -> int:
    """Bytes of a file before it is unpacked; 0 if it is a member or missing."""
    try:
        return Path(file).stat().st_size
    except OSError:
        return 0
