"""Mutations of files: of bytes, lines, fields, numbers, JSON values and Parquet tables. All from one seeded generator."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

#: What stands where a number was.
_NUMBERS = (
    b"0", b"-1", b"-0", b"1e308", b"1e400", b"1e-400", b"NaN", b"inf", b"-Infinity", b"0.5", b"9" * 30, b"9" * 400,
    b"9" * 5000, b"18446744073709551616", b"9223372036854775807", b"0x10", b"1_000", "\u0663".encode(), b"",
    b"1" * 100_000, b" 7 ", b"+7", b"null", b"true", b"[]", b"{}", b'"7"', b"1e999999999",
)  # fmt: skip

#: What stands where a value of JSON was.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**63, 2**70, -(2**70), 1e308, float("nan"), float("inf"), "", "x" * 10_000, "\0",
    "a\0", "\ud800", "\n", "../../x", "\u202e", [], {}, [[]], {"": None}, [None] * 1000, "1", "ok", [1, 2], {"a": {"b": []}},
    10**400, "torch.float16", "NaN", [float("inf")] * 3,
)  # fmt: skip

_PIECES = (
    b"\0", b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x92\xa9", b'"', b"'", b",", b"\n", b"\r\n", b"\r", b"{", b"[",
    b"}", b"]", b":", b"\\", b"\\ud800", b"[" * 100_000, b'{"a":' * 20_000, b"x" * 200_000, b"\x1f\x8b", b"PK\x03\x04", b"PAR1",
    b"\xef\xbb\xbf", b"#", b" " * 100_000, b"\x1a",
)  # fmt: skip

_TOKEN = re.compile(rb"-?\d+(?:\.\d+)?")


def mutate(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A file with one to three faults, and what was done."""
    if content[:4] == b"PAR1" and rng.random() < 0.4:
        return _parquet(content, rng), "parquet"
    if content[:1] in (b"{", b"[") and rng.random() < 0.45:
        # What is no JSON any more gets other faults.
        with contextlib.suppress(ValueError):
            return _json(content, rng), "json"
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        step = rng.choice(_STEPS)
        content = step(content, rng)
        done.append(step.__name__.strip("_"))
    return content, "+".join(sorted(set(done)))


def pack(name: str, content: bytes, kind: str, rng: random.Random) -> tuple[str, bytes]:
    """A file in a packing: (name, bytes). ``kind`` is plain, gzip or zip, or a fault of the packing."""
    if kind == "plain":
        return name, content
    if kind.startswith("gzip"):
        packed = gzip.compress(content, mtime=0)
        name += ".gz"
    else:
        packed, name = _zip(name, content, kind, rng), f"{name}.zip"
    if kind.endswith("damaged"):
        for _ in range(rng.randint(1, 3)):
            packed = rng.choice(_BINARY)(packed, rng)
    if kind == "gzip twice":
        packed = gzip.compress(packed, mtime=0)
    return name, packed


PACKINGS = (
    "plain", "plain", "plain", "plain", "plain", "gzip", "gzip damaged", "gzip twice", "gzip bomb", "zip", "zip damaged",
    "zip twice", "zip names", "zip nested", "zip bomb", "zip empty",
)  # fmt: skip

#: Packings that hold the content as it is, apart from a fault of their own.
SOUND_PACKINGS = ("plain", "gzip", "zip")


def bomb(content: bytes) -> bytes:
    """A file that unpacks to a thousand times its size."""
    return content + b"\n" * (24 * 2**20)


def _zip(name: str, content: bytes, kind: str, rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    method = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        members = {"zip empty": [], "zip twice": [name, name]}.get(kind, [name])
        if kind == "zip names":
            members = [
                rng.choice(
                    ("../../etc/x", "/etc/x", "a\\..\\x", "a/../../x", "x\n", "a/", "C:\\x", "\u202ex")
                )
            ]
        for member in members:
            inner = _zip(name, content, "zip", rng) if kind == "zip nested" else content
            # zipfile warns of two members of one name.
            archive.writestr(zipfile.ZipInfo(member, (2024, 1, 2, 3, 4, 6)), inner, method)
    return buffer.getvalue()


def _flip(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _byte(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + bytes([rng.randrange(256)]) + content[at + rng.randrange(2) :]


def _truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _cut(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    return content[:start] + content[start + rng.randrange(1, 40) :]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    piece = content[start : start + rng.randrange(1, 200)]
    return content[:start] + piece * rng.choice((2, 2, 3, 50)) + content[start:]


def _insert(content: bytes, rng: random.Random) -> bytes:
    at = rng.choice((0, len(content), rng.randrange(len(content) + 1)))
    return content[:at] + rng.choice(_PIECES) + content[at:]


def _number(content: bytes, rng: random.Random) -> bytes:
    found = list(_TOKEN.finditer(content))
    if not found:
        return _byte(content, rng)
    chosen = rng.choice(found)
    return content[: chosen.start()] + rng.choice(_NUMBERS) + content[chosen.end() :]


def _line(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    action = rng.randrange(5)
    if action == 0:
        del lines[at]
    elif action == 1:
        lines.insert(at, lines[at])
    elif action == 2:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif action == 3:
        lines[at] = b""
    else:
        lines[at] += lines[rng.randrange(len(lines))]
    return b"\n".join(lines)


def _field(content: bytes, rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    fields = lines[at].split(b",")
    place = rng.randrange(len(fields))
    action = rng.randrange(4)
    if action == 0:
        del fields[place]
    elif action == 1:
        fields.insert(place, fields[place])
    elif action == 2:
        fields[place] = rng.choice((*_NUMBERS, *_PIECES, b"ok", b"torch.float32", b"True"))
    else:
        fields.reverse()
    lines[at] = b",".join(fields)
    return b"\n".join(lines)


def _encode(content: bytes, rng: random.Random) -> bytes:
    text = content.decode("latin-1")
    return rng.choice(
        (
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content.replace(b"\n", b"\r\n"),
            lambda: content.replace(b"\n", b"\r"),
            lambda: text.encode("utf-16"),
            lambda: text.encode("utf-16-be"),
            lambda: text.encode("utf-32"),
            lambda: text.translate(str.maketrans("aeo", "äéö")).encode("latin-1"),
            lambda: content + content,
            lambda: b"",
            lambda: rng.randbytes(rng.randrange(2000)),
        )
    )()


_BINARY: tuple[Callable[[bytes, random.Random], bytes], ...] = (_flip, _byte, _truncate, _cut, _repeat)
_STEPS = (*_BINARY, _insert, _number, _number, _number, _line, _field, _field, _encode)


def _json(content: bytes, rng: random.Random) -> bytes:
    """One value of the JSON, or of one of its lines, is replaced, removed, renamed or said twice."""
    lines = [content]
    at = 0
    try:
        data = json.loads(content)
    except ValueError:
        lines = content.split(b"\n")
        at = rng.randrange(len(lines))
        data = json.loads(lines[at] or b"{}")
    nodes: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            nodes.append((node, key))
            walk(value)

    walk(data)
    twice = ""
    for _ in range(rng.choice((1, 1, 2))):
        if not nodes:
            break
        node, key = rng.choice(nodes)
        action = rng.randrange(6)
        if action == 0:
            node.pop(key, None) if isinstance(node, dict) else node.clear()
        elif action == 1 and isinstance(node, dict) and key in node:
            node[rng.choice(("", "x", "self", "\ud800", "dtype", "m", str(key).upper()))] = node[key]
        elif action == 2 and isinstance(node, dict):
            twice = json.dumps(key)
        elif isinstance(node, dict) or key < len(node):
            node[key] = rng.choice(_VALUES)
    text = json.dumps(data)
    if twice:
        text = text.replace(f"{twice}:", f"{twice}: 1, {twice}:", 1)
    lines[at] = text.encode()
    return b"\n".join(lines)


def _parquet(content: bytes, rng: random.Random) -> bytes:
    """A column of the table gets another type, gaps, other values or another name; or the metadata are changed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content))
    at = rng.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at)
    count = table.num_rows
    texts = [
        "",
        "x",
        "\0",
        "{}",
        "[]",
        "null",
        "NaN",
        "[" * 50_000,
        '["a",{}]',
        '{"error_log":1e999}',
        "9" * 5000,
    ]
    made: Callable[[], Any] = rng.choice(
        (
            lambda: pa.array([rng.choice(texts)] * count),
            lambda: pa.array([None] * count, column.type),
            lambda: pa.array([rng.choice((0, -1, 2**63 - 1))] * count, pa.int64()),
            lambda: pa.array([rng.choice((float("nan"), float("inf"), -1.0, 1e308, 0.0))] * count),
            lambda: pa.array([[1.0, float("nan")]] * count),
            lambda: pa.array([{"a": 1}] * count),
            lambda: pa.array([b"\xff\xfe"] * count, pa.binary()),
            lambda: pa.array([True] * count),
            lambda: column.take(pa.array(list(reversed(range(count))))),
            lambda: pa.Array.from_buffers(
                pa.string(), count, [None, pa.py_buffer(b"".join((i).to_bytes(4, "little") for i in range(count + 1))),
                                     pa.py_buffer(b"\xff" * count)]
            ),
        )
    )  # fmt: skip
    action = rng.randrange(8)
    if action == 0:
        table = table.drop_columns([name])
    elif action == 1:
        table = table.rename_columns([f"{each}2" if each == name else each for each in table.column_names])
    elif action == 2:
        table = table.append_column(name, column)
    elif action == 3:
        table = table.slice(0, 0)
    elif action == 4:
        table = pa.concat_tables([table] * 3)
    elif action == 5:
        keys = (b"kernelcast.schema", b"kernelcast.devices", b"x")
        values = (b"2", b"x", b"9" * 5000, b"[]", b"[1]", b"{}", b"[" * 50_000, b"\xff")
        table = table.replace_schema_metadata({rng.choice(keys): rng.choice(values)})
    else:
        table = table.set_column(at, name, made())
    out = io.BytesIO()
    pq.write_table(table, out, compression=rng.choice(("zstd", "snappy", "none")))
    return out.getvalue()
