"""Markdown tables, and the two files that each benchmark leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table, columns of numbers to the right and others to the left; ends with a line end.

    Raises:
        ValueError: a row is not as long as the heading.
    """
    cells = [list(row) for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"A row has {len(row)} cells and the table {len(columns)} columns: {row}.")
    sides = [
        "---:" if all(value is None or isinstance(value, int | float) for value in column) else ":---"
        for column in zip(*cells, strict=True)
    ] or [":---"] * len(columns)
    lines = [_row(columns), f"|{'|'.join(sides)}|", *map(_row, cells)]
    return "\n".join(lines) + "\n"


def shown(value: Any, digits: int = 3) -> str:
    """A cell: numbers with so many significant digits, ``-`` for what is not known, text on one line."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        # Significant digits, but never 1.2e+03 where 1,234 can be read.
        return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".rstrip(".")
    return " ".join(str(value).split()).replace("|", "\\|")


def write_result(
    folder: Path, name: str, header: Mapping[str, Any], result: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Write ``<name>.md`` and ``<name>.json``.

    Args:
        folder: made if there is none.
        name: of the benchmark.
        header: facts of the run: date, device, versions, command.
        result: what a benchmark's ``main`` returned: ``title``, and ``tables`` (each ``title``, ``columns``, ``rows``)
            with ``notes``, or ``skipped`` with the reason; further keys go into the JSON alone.

    Returns:
        The two paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {result['title']}\n"]
    parts.append("\n".join(f"- {key}: {shown(value)}" for key, value in header.items()) + "\n")
    if "skipped" in result:
        parts.append(f"Skipped: {result['skipped']}\n")
    for table in result.get("tables", ()):
        parts.append(f"## {table['title']}\n")
        parts.append(markdown_table(table["columns"], table["rows"]))
    if result.get("notes"):
        parts.append("\n".join(f"- {note}" for note in result["notes"]) + "\n")
    paths = folder / f"{name}.md", folder / f"{name}.json"
    replace_text(paths[0], "\n".join(parts))
    replace_text(paths[1], json.dumps(plain({**header, **result}), indent=1, allow_nan=False) + "\n")
    return paths


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def plain(value: Any) -> Any:
    """The same as plain JSON values: numpy's numbers as Python's, and None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(shown(cell) for cell in cells) + " |"
