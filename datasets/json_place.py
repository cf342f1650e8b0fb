"""Where in a JSON text something lies, as a path such as ``results[3].times``: for messages about texts that cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

#: Strings (the last one perhaps without its end), marks, and whatever else stands between them.
_TOKEN = re.compile(r'"(?:[^"\\]+|\\.)*"?|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_]\w*")
#: Steps and characters of a path that a message shows.
_MOST_STEPS, _MOST_CHARACTERS = 8, 160
_MOST_NAME = 60
#: Digits of a number that Python still reads.
_MOST_DIGITS = 4300
#: No file of measurements is nested so deeply.
_MOST_DEPTH = 200

#: A name of an object, a place in a list, or None within an object before its first name.
Step = str | int | None


class _Walk:
    """Goes through the tokens of a text, sound or not, and keeps where it is."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.path: list[Step] = []
        self.depth = 0

    def tokens(self) -> Iterator[tuple[str, int, bool]]:
        """(token, where it begins, whether it is a name) of each; :attr:`path` is that of the token."""
        names = False  # whether a text that comes now is a name
        for found in _TOKEN.finditer(self._text):
            token = found[0]
            is_name = names and token[0] == '"'
            if token in "}]" and self.path:
                self.path.pop()
                self.depth -= 1
            if is_name:
                self.path[-1] = _text_of(token)
            yield token, found.start(), is_name
            if token in "{[":
                self.path.append(None if token == "{" else 0)
                self.depth += 1
            elif token == "," and self.path and isinstance(self.path[-1], int):
                self.path[-1] += 1
            names = token == "{" or (token == "," and bool(self.path) and not isinstance(self.path[-1], int))


def place_at(text: str, position: int) -> str:
    """The path of what stands at a position, or before it."""
    walk = _Walk(text)
    path: list[Step] = []
    for _, start, _ in walk.tokens():
        if start > position:
            break
        path = walk.path[:]
    return _shown(path)


def place_of_twice(text: str) -> str:
    """The path of the first object that closes and has held one name twice."""
    walk = _Walk(text)
    seen: list[set[str]] = []
    twice: list[bool] = []
    for token, _, is_name in walk.tokens():
        if token == "{":
            seen.append(set())
            twice.append(False)
        elif is_name:
            name = str(walk.path[-1])
            twice[-1] = twice[-1] or name in seen[-1]
            seen[-1].add(name)
        elif token == "}" and seen:
            seen.pop()
            if twice.pop():
                return _shown(walk.path)
    return ""


def place_of_unreadable(text: str) -> str:
    """The path of the first number that is too long, text that holds half a character, or bracket that is nested too deeply."""
    return _first(text, _is_unreadable)


def _first(text: str, wanted: Callable[[str, int], bool]) -> str:
    walk = _Walk(text)
    for token, _, _ in walk.tokens():
        if wanted(token, walk.depth):
            return _shown(walk.path)
    return ""


def _is_unreadable(token: str, depth: int) -> bool:
    if depth > _MOST_DEPTH:
        return True
    if token[0] != '"':
        return len(token) > _MOST_DIGITS and token.lstrip("-").isdecimal()
    return "\\u" in token and not _is_text(_text_of(token))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_of(token: str) -> str:
    """What a string of JSON says; as it stands where it is none."""
    try:
        return str(json.loads(token))
    except ValueError:
        return token.strip('"')


def _shown(path: list[Step]) -> str:
    """A path as a message shows it; empty for the whole text."""
    parts: list[str] = []
    for step in path[:_MOST_STEPS]:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        elif step is not None and _PLAIN.fullmatch(step) and len(step) <= _MOST_NAME:
            parts.append(f".{step}")
        elif step is not None:
            name = ascii(step)
            parts.append(f"[{name if len(name) <= _MOST_NAME else f'{name[:_MOST_NAME]}...'}]")
    more = "..." if len(path) > _MOST_STEPS else ""
    return ("".join(parts).removeprefix(".")[:_MOST_CHARACTERS] + more) if parts else ""
