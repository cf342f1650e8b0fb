"""Packings and encodings of import files: what is read, and what is refused in which words."""

from __future__ import annotations

import gzip
import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelcast.datasets.importing import MAX_BYTES, import_files, importers, read_content
from kernelcast.errors import ImportFileError, SettingsError
from kernelcast.kernels.devices import device

TEXT = b"one\ntwo\n"


def packed(content: bytes) -> bytes:
    """The same bytes whenever it is called: they are part of a test's name, which must be the same in every process."""
    return gzip.compress(content, mtime=0)


def zipped(*members: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # of a name that comes twice
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def read(file: str, **limits: int) -> tuple[str, bytes]:
    found = read_content(file, on_bytes=lambda _: None, **limits)
    return found.name, found.data


@pytest.mark.parametrize(
    ("name", "member", "content"),
    [
        ("a.txt", "", TEXT),
        ("a.txt", "", b"\xef\xbb\xbf" + TEXT),
        ("a.txt.gz", "", packed(TEXT)),
        ("a.txt.gz", "", packed(b"\xef\xbb\xbf" + TEXT)),
        ("a.txt.gz", "", packed(TEXT[:4]) + packed(TEXT[4:])),
        ("x.zip", "", zipped(("some/a.txt", TEXT))),
        ("x.zip", "", zipped(("__MACOSX/a.txt", b"hidden"), ("folder/", b""), ("a.txt", TEXT))),
        ("x.zip", ":a.txt", zipped(("b.txt", b"other"), ("some/a.txt", TEXT))),
        ("x.zip", ":a.txt", zipped(("a.txt", TEXT), ("some/a.txt", b"other"))),
        ("x.zip", ":some/a.txt", zipped(("a.txt", b"other"), ("some/a.txt", TEXT))),
    ],
)
def test_what_is_read(tmp_path: Path, name: str, member: str, content: bytes) -> None:
    file = write(tmp_path / name, content)
    assert read(file + member) == ("a.txt", TEXT)


def test_parquet_is_no_text(tmp_path: Path) -> None:
    content = b"PAR1\0\0PAR1"
    assert read(write(tmp_path / "a", content)) == ("a", content)


refused: dict[str, tuple[str, bytes, str]] = {
    "NUL": ("", TEXT + b"a\0", ", line 3: it is no text: byte 9 is NUL"),
    "UTF-16": ("", TEXT.decode().encode("utf-16"), ", line 1: it is text in UTF-16, not in UTF-8"),
    "UTF-16, big end first": ("", b"\xfe\xff\0a", ", line 1: it is text in UTF-16"),
    "UTF-32": ("", TEXT.decode().encode("utf-32"), ", line 1: it is text in UTF-16"),
    "no member": ("", zipped(), "it is not clear which member is meant. It holds no files"),
    "two members": ("", zipped(("a", TEXT), ("b", TEXT)), "not clear which member is meant. It holds a, b. Name one"),
    "many members": ("", zipped(*((f"{n}", TEXT) for n in range(20))), "It holds 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    "no such member": (":c", zipped(("a", TEXT)), "it has no member 'c'. It holds a"),
    "a member in two folders": (":a", zipped(("x/a", TEXT), ("y/a", TEXT)), "not clear which.*x/a, y/a"),
    "a member twice": (":a", zipped(("a", TEXT), ("a", b"")), "it holds 2 members of the name 'a'"),
    "the only member twice": ("", zipped(("a", TEXT), ("a", b"")), "it holds 2 members of the name 'a'"),
    "a name that climbs": ("", zipped(("../../a", TEXT)), "member '../../a' has a name that leads out"),
    "a name from the root": ("", zipped(("/etc/a", TEXT)), "member '/etc/a' has a name that leads out"),
    "a name of another system": ("", zipped(("a\\..\\b", TEXT)), "has a name that leads out"),
    "a name of two lines": ("", zipped(("a\nb", TEXT)), r"member 'a\\nb' has a name that leads out of .*, or is none"),
    "a zip in a zip": ("", zipped(("b.zip", zipped(("a", TEXT)))), "'b.zip', is packed again. Unpack it once"),
    "gzip in a zip": ("", zipped(("b.gz", gzip.compress(TEXT))), "'b.gz', is packed again"),
    "gzip twice": ("", gzip.compress(gzip.compress(TEXT)), "is packed again"),
    "a zip in gzip": ("", gzip.compress(zipped(("a", TEXT))), "is packed again"),
    "a bomb in gzip": ("", gzip.compress(b" " * (64 << 20)), "more than 200 times its size"),
    "a bomb in a zip": ("", zipped(("a", b" " * (64 << 20))), "more than 200 times its size"),
    "a zip cut short": ("", zipped(("a", TEXT))[:-9], "the zip file is broken"),
    "gzip cut short": ("", gzip.compress(TEXT)[:-3], "the gzip file is broken"),
    "gzip with more behind it": ("", gzip.compress(TEXT) + b"x", "the gzip file is broken"),
}  # fmt: skip


@pytest.mark.parametrize("fault", refused)
def test_what_is_refused(tmp_path: Path, fault: str) -> None:
    member, content, message = refused[fault]
    file = write(tmp_path / "x.zip", content) + member
    with pytest.raises(ImportFileError, match=message) as caught:
        read(file)
    assert str(caught.value).startswith(file)
    assert str(caught.value).isprintable()


def test_a_member_that_says_another_size_than_it_has(tmp_path: Path) -> None:
    packed = bytearray(zipped(("a", b" " * (64 << 20))))
    size = (64 << 20).to_bytes(4, "little")
    for _ in range(packed.count(size)):
        at = packed.index(size)
        packed[at : at + 4] = (10).to_bytes(4, "little")
    with pytest.raises(ImportFileError):
        read(write(tmp_path / "x.zip", bytes(packed)), max_bytes=1 << 20)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda content: zipped(("a", content))])
def test_the_limit_is_stated_and_can_be_given(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    file = write(tmp_path / "x.zip", pack(bytes(range(1, 120)) * 100))
    with pytest.raises(ImportFileError, match=r"more than 11,899 bytes unpacked.*allow more with --max-size"):
        read(file, max_bytes=11_899)
    assert len(read(file, max_bytes=11_900)[1]) == 11_900


def test_every_importer_keeps_to_the_limit_of_a_command(tmp_path: Path) -> None:
    needed = {"table": {"operation": "sort", "map": "latency_us=t"}}
    file = write(tmp_path / "a", b"x" * 100)
    for name, importer in importers().items():
        assert 0 < importer.max_bytes <= MAX_BYTES
        with pytest.raises(ImportFileError, match="holds more than 99 bytes"):
            import_files(
                name,
                [file],
                device=device("a100"),
                workload="w",
                store=tmp_path / "store",
                options=needed.get(name),
                max_bytes=99,
            )


def test_what_no_path_can_be(tmp_path: Path) -> None:
    for file in ("a\0b", "x" * 5000, str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(ImportFileError, match="it cannot be read"):
            read(file)


def test_a_command_must_name_files_device_and_workload(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with pytest.raises(SettingsError, match="No file is named"):
        import_files("tunableop", [], device=device("a100"), workload="w", store=store)
    with pytest.raises(SettingsError, match="do not say on which device"):
        import_files("tunableop", ["a"], workload="w", store=store)
    with pytest.raises(SettingsError, match="The workload has no name"):
        import_files("tunableop", ["a"], device=device("a100"), workload=" ", store=store)
    assert not store.exists()
