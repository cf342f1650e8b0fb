"""The cache under damage, crowds and kills, with small counts: the same program as the benchmark, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelcast.runtime.cache import LOCK_SECONDS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import cache_stress
print(json.dumps(cache_stress.main(True)))
"""


@pytest.mark.slow
def test_nothing_is_lost_measured_twice_or_thrown(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(BENCHMARKS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "KERNELCAST_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    damage, many, dead, killed = (found[name] for name in ("damage", "crowd", "holders", "writers"))
    assert (damage["files"], damage["exceptions"], damage["wrong"], damage["unrepaired"]) == (100, [], 0, 0)
    # Sixteen threads asked for four keys: one measured each, and all chose alike.
    assert (many["answers"], many["faults"], many["choices"]) == (64, [], 1)
    assert (many["verified"], many["tunes"], many["most_tunes"]) == (4, 4, 1)
    assert (dead["killed"], dead["taken"], dead["early"]) == (3, 3, 0)
    assert max(dead["seconds"]) < LOCK_SECONDS / 10  # by the lock that ended with its holder, not by patience
    assert (killed["kills"], killed["lost"], killed["faults"]) == (20, 0, [])
    assert killed["written"] > 20
    for table in found["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
