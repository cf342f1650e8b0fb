"""The store under kills and under many writers.

Collections, imports, merges and compactions are killed at seeded random moments; eight processes write one store for a
minute while others read and compact it.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from durability_kills import Kills, crowd, killed_collections, killed_rewrites


def main(quick: bool) -> dict[str, Any]:
    """Everything. Quick: five kills of each kind, three writers for two seconds."""
    import pyarrow.parquet  # noqa: F401 - before the forks: children then begin at once
    import torch  # noqa: F401

    kills, writers, seconds = (5, 3, 2.0) if quick else (100, 8, 60.0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        killed = {
            "collecting": killed_collections(root / "collected", kills),
            "importing, merging and compacting": killed_rewrites(root / "rewritten", kills),
        }
        many = crowd(root / "crowd", writers, seconds)
    return page(killed, asdict(many))


def page(killed: dict[str, Kills], many: dict[str, Any]) -> dict[str, Any]:
    """The tables of the figures."""
    return {
        "title": "The store under kills and many writers",
        "tables": [
            {
                "title": "Killed with SIGKILL at random moments",
                "columns": [
                    "while",
                    "kills",
                    "records promised",
                    "lost",
                    "twice",
                    "partial batches",
                    "faults",
                    "the kill came",
                ],
                "rows": [
                    [
                        name,
                        each.kills,
                        each.announced,
                        each.lost,
                        each.twice,
                        each.parts,
                        len(each.faults),
                        ", ".join(f"{moment} {count}" for moment, count in sorted(each.moments.items())),
                    ]
                    for name, each in killed.items()
                ],
            },
            {
                "title": "Many writers of one store",
                "columns": [
                    "writers",
                    "seconds",
                    "records written",
                    "missing",
                    "too many",
                    "reads meanwhile",
                    "wrong reads",
                    "compactions meanwhile",
                    "faults",
                ],
                "rows": [[*(many[name] for name in list(many)[:-1]), len(many["faults"])]],
            },
        ],
        "killed": {name: asdict(each) for name, each in killed.items()},
        "crowd": many,
        "notes": [
            "A record is promised when the call that writes it has returned; the process then announces it. After each kill "
            "every promise so far is looked up, and `Store.check` reads every file. Imports and merges are batches: a part of "
            "one would be counted.",
            "Each of the many writers appends a record a millisecond or so and takes a new journal after 200; two processes "
            "read all ids, and one compacts without a pause.",
        ],
    }
