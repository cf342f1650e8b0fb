"""Packs: verified selections in one file, for all ranks of a fleet to choose alike.

A pack is a zip file of two members, neither compressed::

    pack.json            {"format": ..., "selections": how many, "sha256": of selections.jsonl}
    selections.jsonl     one entry of a cache a line, in the order of the digests of the keys

Its bytes depend on the entries alone, and the first digits of their hash are in the file's name: equal names mean equal
choices. A pack is never written to after that, and is read as a whole: every digest and every entry is checked first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernelcast.datasets.journal import sync_folder
from kernelcast.errors import ImportFileError, KernelcastError
from kernelcast.runtime.cache import SelectionCache
from kernelcast.runtime.cache_files import CacheEntry
from kernelcast.runtime.cache_key import CacheKey, canonical
from kernelcast.runtime.selection import Selection

#: Raised when the layout of a pack or of its entries changes.
PACK_FORMAT = "kernelcast-selections-1"

#: What no pack exceeds: some 100,000 selections.
MAX_PACK_BYTES = 2**28

_MANIFEST, _CONTENT = "pack.json", "selections.jsonl"
#: A manifest takes 150 bytes.
_MAX_MANIFEST_BYTES = 4096
#: Digits of the content's hash in a pack's name.
_DIGITS = 16
_NAMED = re.compile(rf"-([0-9a-f]{{{_DIGITS}}})\.zip$")


@dataclass(frozen=True)
class ImportedPack:
    """What came of the entries of a pack.

    Attributes:
        added: of keys that the cache did not have.
        replaced: later than the cache's own.
        kept: the cache's own stayed.
        failed: could not be written.
    """

    added: int = 0
    replaced: int = 0
    kept: int = 0
    failed: int = 0


def write_pack(path: Path, entries: Iterable[CacheEntry]) -> Path:
    """Write entries as a pack: equal entries, in any order, give equal bytes and an equal name.

    Args:
        path: where to; the content's hash is put into the name: ``gemm.zip`` becomes ``gemm-0123456789abcdef.zip``.
        entries: only verified ones are packed; of two of one key the later one.

    Returns:
        The path of the file.

    Raises:
        KernelcastError: there is nothing to pack, or too much.
        OSError: the file cannot be written; it is named.
    """
    chosen: dict[str, CacheEntry] = {}
    for entry in entries:
        known = chosen.get(entry.key.digest)
        later = known is None or entry.verified_at > known.verified_at
        if entry.selection.source == "verified" and later:
            chosen[entry.key.digest] = entry
    if not chosen:
        raise KernelcastError(
            "There is no verified selection to pack. Make some: kernelcast select, or a warm-up."
        )
    content = "".join(f"{canonical(chosen[digest].to_dict())}\n" for digest in sorted(chosen)).encode()
    if len(content) > MAX_PACK_BYTES // 2:
        raise KernelcastError(f"{len(chosen):,} selections are too many for one pack. Pack fewer operations.")
    sha256 = hashlib.sha256(content).hexdigest()
    manifest = (
        canonical({"format": PACK_FORMAT, "selections": len(chosen), "sha256": sha256}).encode() + b"\n"
    )
    stem = _NAMED.sub("", path.name).removesuffix(".zip")
    file = path.with_name(f"{stem}-{sha256[:_DIGITS]}.zip")
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for name, data in ((_MANIFEST, manifest), (_CONTENT, content)):
                # Not compressed: what a compressor makes of one text differs between its versions.
                member = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                member.create_system = 3
                member.external_attr = 0o644 << 16
                archive.writestr(member, data)
        partial.replace(file)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise
    sync_folder(file.parent)
    return file


def read_pack(path: Path) -> list[CacheEntry]:
    """The entries of a pack, in the order of their keys' digests.

    Raises:
        ImportFileError: the file is no pack, was changed, does not have the hash that its name states, or holds more or
            other than a pack does.
    """
    return _entries(path, _content(path))


def _entries(path: Path, content: bytes) -> list[CacheEntry]:
    entries: list[CacheEntry] = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            entry = CacheEntry.from_dict(json.loads(line))
        except (ValueError, RecursionError, AttributeError, KernelcastError) as error:
            raise ImportFileError(
                path, f"{_CONTENT}, line {number}, is no selection ({error}). Nothing of the pack is used."
            ) from error
        in_order = not entries or entry.key.digest > entries[-1].key.digest
        if (
            not in_order
            or entry.selection.source != "verified"
            or canonical(entry.to_dict()).encode() != line
        ):
            raise ImportFileError(
                path, f"{_CONTENT}, line {number}, has no place in a pack. Nothing of the pack is used."
            )
        entries.append(entry)
    return entries


def import_pack(cache: SelectionCache, path: Path) -> ImportedPack:
    """Add the selections of a pack to a cache, which from then on answers as if it had verified them.

    Of two of one key the later one stays. Those of another environment become priors.

    Raises:
        ImportFileError: as :func:`read_pack`; nothing was added.
    """
    counts = {"added": 0, "replaced": 0, "kept": 0, "failed": 0}
    for entry in read_pack(path):
        counts[cache.add(entry)] += 1
    return ImportedPack(**counts)


class PackedSelections:
    """The selections of a pack, to look up. Nothing is ever written.

    Args:
        path: the pack.

    Attributes:
        path: as given.
        sha256: 64 hexadecimal digits over the content: equal for processes that read equal packs.

    Raises:
        ImportFileError: as :func:`read_pack`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        content = _content(self.path)
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._entries = {entry.key.digest: entry for entry in _entries(self.path, content)}
        self._places: dict[str, list[CacheEntry]] = {}
        for entry in self._entries.values():
            self._places.setdefault(entry.key.place, []).append(entry)
        for entries in self._places.values():
            entries.sort(key=lambda entry: (-entry.verified_at, entry.key.digest))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: CacheKey) -> Selection | None:
        """The selection of exactly this key, environment included; None where the pack has none."""
        found = self._entries.get(key.digest)
        return found.selection if found is not None and found.key == key else None

    def at(self, place: str) -> list[CacheEntry]:
        """The entries of a problem on a device (:attr:`CacheKey.place`) in whatever environment, the newest first."""
        return list(self._places.get(place, ()))


def _content(path: Path) -> bytes:
    """The checked text of a pack's entries."""
    if path.is_dir():
        raise ImportFileError(
            path, "it is a folder; a pack is one file, which `kernelcast cache export` writes"
        )
    if not path.is_file():
        raise ImportFileError(path, "there is no such file")
    size = path.stat().st_size
    if size > MAX_PACK_BYTES:
        raise ImportFileError(path, f"it has {size} bytes, more than any pack; it was not read")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            if names != [_MANIFEST, _CONTENT]:
                raise ImportFileError(path, f"it is no pack: it holds {_quoted(names)}; it was not unpacked")
            manifest, content = (_stored(path, archive, member, size) for member in members)
    except ImportFileError:
        raise
    except OSError as error:
        raise ImportFileError(path, f"it cannot be read: {error.strerror or error}") from error
    except Exception as error:  # of damaged headers zipfile lets errors of every kind through
        raise ImportFileError(
            path, f"it is no zip file of a pack ({type(error).__name__}: {_quoted(error)})"
        ) from error
    if len(manifest) > _MAX_MANIFEST_BYTES:
        raise ImportFileError(path, f"its {_MANIFEST} is larger than any pack's")
    sha256 = hashlib.sha256(content).hexdigest()
    wanted = {"format": PACK_FORMAT, "selections": content.count(b"\n"), "sha256": sha256}
    try:
        told = json.loads(manifest)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or told.get("format") != PACK_FORMAT:
        seen = told.get("format") if isinstance(told, dict) else None
        raise ImportFileError(
            path, f"it is a pack of format {_quoted(seen)}; this version reads {PACK_FORMAT}"
        )
    named = _NAMED.search(path.name)
    if told != wanted or not content.endswith(b"\n") or (named and named[1] != sha256[:_DIGITS]):
        raise ImportFileError(
            path,
            f"its content has the hash {sha256[:_DIGITS]}, which is not the one stated: the pack was changed",
        )
    return content


def _stored(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, size: int) -> bytes:
    """A member's bytes, which stand in the file as they are."""
    plain = member.compress_type == zipfile.ZIP_STORED and member.compress_size == member.file_size
    if not plain or member.file_size > size:
        raise ImportFileError(
            path, f"its {member.filename} is compressed, as no pack's is; it was not unpacked"
        )
    with archive.open(member) as source:
        # The sizes in the directory may lie; reading one byte more than stated finds out.
        content = source.read(member.file_size + 1)
    if len(content) != member.file_size:
        raise ImportFileError(path, f"its {member.filename} is not as long as stated")
    return content


def _quoted(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
