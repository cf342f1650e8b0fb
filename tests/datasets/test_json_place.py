"""Where a fault lies in a JSON text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.datasets.imported import read_json
from kernelcast.datasets.json_place import place_at
from kernelcast.errors import ImportFileError

DOCUMENT: dict[str, Any] = {
    "cache": {"8,1": {"block": 8, "times": [1.0, 2.0]}, "16,1": {"block": 16, "times": [1.5]}},
    "results": [{"configuration": {"a b": 1}}, {"configuration": {"a b": 2}, "note": 'a "}" {,[ \\'}],
}


def read(tmp_path: Path, text: str) -> str:
    """What is said of a text that cannot be read."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ImportFileError) as seen:
        read_json(str(path), on_bytes=lambda _: None)
    return str(seen.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"block": 16', '"block": 1x6', ", line 1: it is not JSON (Expecting ',' delimiter, column 73, in cache['16,1'].block)."),
        ("[1.5]", "[1.5 2]", ", line 1: it is not JSON (Expecting ',' delimiter, column 90, in cache['16,1'].times[0])."),
        ('"a b": 2', '"a b": 2, "a b": 3', ": results[1].configuration holds the name 'a b' twice."),
        ('"cache"', '"results": 1, "cache"', ": the object of all holds the name 'results' twice."),
        ('"block": 16', '"block": ' + "6" * 5000, ": its JSON cannot be read in cache['16,1'].block ('Exceeds the limit"),
        ('"a b": 1', '"a b": "\\ud800"', ": its JSON cannot be read in results[0].configuration['a b'] (\"'utf-8' codec"),
        ("[1.5]", "[1.5, " + "[" * 100_000, ": its JSON cannot be read in cache['16,1'].times[1][0][0][0][0]... (nested too deeply)."),
    ],
)  # fmt: skip
def test_a_fault_deep_in_a_file_is_named_by_its_path(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = json.dumps(DOCUMENT)
    assert text.count(old) == 1
    assert read(tmp_path, text.replace(old, new)).startswith(said)


def test_a_text_that_is_cut_short_says_how_far_it_goes(tmp_path: Path) -> None:
    text = json.dumps(DOCUMENT, indent=1)
    end = text.index('"a b": 2') + len('"a b"')
    said = read(tmp_path, text[:end])
    assert said.startswith(
        f", line {text[:end].count(chr(10)) + 1}: it is not JSON (Expecting ':' delimiter, column "
    )
    assert "in results[1].configuration['a b'])" in said


names = st.text(st.characters(codec="utf-8"), max_size=4)
documents = st.recursive(
    st.integers() | st.text(max_size=4) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


def leaves(value: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(path, container, its key) of every leaf."""
    if not isinstance(value, dict | list):
        return []
    found = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        plain = isinstance(key, str) and key.isascii() and key.isidentifier()
        step = f"[{key}]" if isinstance(key, int) else f".{key}" if plain else f"[{key!a}]"
        below = leaves(inner, path + step)
        found += below if isinstance(inner, dict | list) else [(path + step, value, key)]
    return found


@settings(max_examples=60, deadline=None)
@given(documents, st.randoms())
def test_every_leaf_is_found(document: Any, chance: Any) -> None:
    found = leaves(document)
    if not found or max(path.count("[") + path.count(".") for path, *_ in found) > 6:
        return
    path, container, key = chance.choice(found)
    container[key] = "the leaf that is none"
    text = json.dumps(document, indent=chance.choice([None, 2])).replace('"the leaf that is none"', "3x2")
    with pytest.raises(json.JSONDecodeError) as seen:
        json.loads(text)
    assert place_at(text, seen.value.pos) == path.removeprefix(".")[:160]
