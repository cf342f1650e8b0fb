"""Make a folder in which the package looks as it does when installed: kernelcast/<room> is a link to each room.

Usage: python tests/tools/link_farm.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOMS = ("kernels", "featurizer", "datasets", "costmodel", "training", "runtime")


def build(folder: Path, root: Path) -> None:
    """Fill ``folder`` with links into the repository at ``root``; what is there already is replaced."""
    package = folder / "kernelcast"
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        old.unlink()
    for room in ROOMS:
        (package / room).symlink_to(root / room, target_is_directory=True)
    for entry in (root / "kernelcast").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(__file__).resolve().parents[2])
