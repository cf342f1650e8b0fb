"""The cache of selections under damage, crowds and kills.

Thousands of damaged files are read; sixteen processes of eight threads each ask for the same cold keys; processes that
hold a key are killed while they verify; and processes are killed at seeded random moments while they write entries.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cache_stress_files import Damage, damaged_files
from cache_stress_processes import Crowd, Holders, Writers, crowd, dead_holders, killed_writers, register


def main(quick: bool) -> dict[str, Any]:
    """Everything. Quick: 100 damaged files, 4 processes of 4 threads, 3 dead holders, 20 kills."""
    import torch  # before the forks: children then begin at once

    torch.set_num_threads(1)  # a forked child cannot use the threads of its parent
    files, processes, threads, keys, holders, kills = (
        (100, 4, 4, 4, 3, 20) if quick else (5000, 16, 8, 12, 50, 1000)
    )
    register()
    # In memory where there is such a folder: what a file holds does not depend on the disk, which takes most of the time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        damage = damaged_files(Path(folder), files)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        many = crowd(root / "crowd", processes, threads, keys)
        dead = dead_holders(root / "holders", holders)
        killed = killed_writers(root / "killed", kills)
    return page(damage, many, dead, killed)


def page(damage: Damage, many: Crowd, dead: Holders, killed: Writers) -> dict[str, Any]:
    """The tables of the figures."""
    seconds = sorted(dead.seconds)
    return {
        "title": "The cache of selections under damage, crowds and kills",
        "tables": [
            {
                "title": "Damaged files",
                "columns": ["files", "exceptions", "wrong answers", "misses", "hits", "signed anew", "not repaired"],
                "rows": [
                    [
                        damage.files, len(damage.exceptions), damage.wrong, damage.misses, damage.hits, damage.forged,
                        damage.unrepaired,
                    ]
                ],
            },
            {
                "title": "Processes and threads on the same cold keys",
                "columns": [
                    "processes", "threads each", "keys", "answers", "verifications", "most of one key",
                    "different choices", "faults", "seconds",
                ],
                "rows": [
                    [
                        many.processes, many.threads, many.keys, many.answers, many.tunes, many.most_tunes, many.choices,
                        len(many.faults), many.seconds,
                    ]
                ],
            },
            {
                "title": "Killed while they verified a key that another waited for",
                "columns": ["kills", "taken over", "answered early", "median s to the answer", "longest s"],
                "rows": [[dead.killed, dead.taken, dead.early, seconds[len(seconds) // 2], seconds[-1]]],
            },
            {
                "title": "Killed while they wrote entries",
                "columns": ["kills", "entries written", "lost", "faults", "unfinished files"],
                "rows": [[killed.kills, killed.written, killed.lost, len(killed.faults), killed.unfinished]],
            },
        ],
        "damage": asdict(damage),
        "crowd": asdict(many),
        "holders": asdict(dead),
        "writers": asdict(killed),
        "notes": [
            "Each damaged file is looked up, listed, asked for priors, and written anew by a fresh cache. Files signed anew "
            "hold a changed record with a fitting digest, as no accident makes them.",
            "Verifications are counted by the records that they left in the store.",
            "The time to the answer of a key whose holder was killed includes the verification by the one that waited.",
            "An entry is written when `put` has returned; the process then announces it. After each kill every key is read, "
            "with warnings as errors, and compared with the last announcement.",
        ],
    }  # fmt: skip
