"""The tables of faults: each names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("measuring.md", "data.md", "selecting.md")


def rows(page: str) -> list[list[str]]:
    """The cells of the table of faults."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = lines.index("| fault elsewhere | what holds here | test |") + 2
    found = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_each_fault_has_tests_that_exist(page: str) -> None:
    table = rows(page)
    assert len(table) >= 9
    for fault, answer, tests in table:
        assert fault
        assert answer
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named, fault
        assert ", ".join(f"`{file}::{test}`" for file, test in named) == tests
        for file, test in named:
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"
