"""What other devices took for the candidates that a search chooses from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelcast.costmodel.search import PriorRecords
    from kernelcast.datasets.record import Measurement
    from kernelcast.kernels import Candidate, CandidateTable, Problem


@dataclass(frozen=True)
class Match:
    """How far one device's records match a table.

    Attributes:
        device: as it was named.
        candidates: of the table.
        matched: candidates that were recorded there.
        renamed: (variant in the table, the variant of its records there), where the two have different names and their
            candidates were matched by config.
    """

    device: str
    candidates: int
    matched: int
    renamed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        names = ", ".join(f"{own} with {theirs}" for own, theirs in self.renamed)
        by_config = f" by config, as the variants have other names there: {names}" if names else ""
        return f"{self.matched:,} of {self.candidates:,} candidates were matched with the records of {self.device}{by_config}."

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "device": self.device,
            "candidates": self.candidates,
            "matched": self.matched,
            "renamed": dict(self.renamed),
        }


def read_prior(
    root: Path, operation: str, devices: Sequence[str], problem: Problem, table: CandidateTable
) -> tuple[PriorRecords, list[Match]]:
    """What other devices took for the candidates of a table, and how many of them were matched.

    Raises:
        StoreError: the store has no records of a device, or none of the problem there that match and worked.
    """
    import numpy as np

    from kernelcast.costmodel.search import PriorRecords
    from kernelcast.datasets.replay import Recording
    from kernelcast.errors import StoreError

    candidates = list(table)
    latency = np.full((len(devices), len(table)), np.nan)
    failed = np.zeros(latency.shape, dtype=bool)
    matches: list[Match] = []
    for place, name in enumerate(devices):
        recording = Recording.read(root, operation, device=name)
        held = {candidate: each for (of, candidate), each in recording.measurements.items() if of == problem}
        found, renamed = matched(candidates, held)
        for row, measurement in found.items():
            latency[place, row] = log_latency(measurement)
            failed[place, row] = measurement.outcome != "ok"
        matches.append(Match(name, len(candidates), len(found), tuple(sorted(renamed.items()))))
        if not np.isfinite(latency[place]).any():
            raise StoreError(
                f"{root} holds no records of {problem} on {name} that worked: {_what_is_there(recording.problems, held)}. "
                "Leave it out of --prior-device."
            )
    return PriorRecords(latency, failed), matches


def matched(
    candidates: Sequence[Candidate], held: Mapping[Candidate, Measurement]
) -> tuple[dict[int, Measurement], dict[str, str]]:
    """The records of candidates, and which variants were matched with one of another name.

    A tool's results and another tool's of the same kernel are recorded under different variants. So a variant that the
    records lack altogether is taken for the one among those that the candidates lack which shares most of its configs
    (parameters and values). Configs without parameters say nothing and are not matched.

    Returns:
        Place among the candidates -> record; variant -> name of its records.
    """
    own = {each.variant for each in candidates}
    theirs: dict[str, dict[Any, Measurement]] = {}
    for candidate, measurement in held.items():
        theirs.setdefault(candidate.variant, {})[candidate.config] = measurement
    shared: dict[str, Counter[str]] = {}
    for each in candidates:
        if each.variant not in theirs and each.config:
            counts = shared.setdefault(each.variant, Counter())
            counts.update(name for name, of in theirs.items() if name not in own and each.config in of)
    # Of equally many the first by name, whatever order the records came in.
    renamed = {
        variant: min(counts, key=lambda name: (-counts[name], name))
        for variant, counts in shared.items()
        if counts
    }
    found: dict[int, Measurement] = {}
    for row, each in enumerate(candidates):
        name = renamed.get(each.variant, each.variant) if each.config else each.variant
        record = theirs.get(name, {}).get(each.config)
        if record is not None:
            found[row] = record
    return found, renamed


def log_latency(measurement: Measurement) -> float:
    """Of a measurement; NaN where it failed."""
    return math.log(measurement.latency_us) if measurement.outcome == "ok" else math.nan


def _what_is_there(problems: Sequence[Problem], held: Mapping[Candidate, Measurement]) -> str:
    """Why nothing was matched, in a few words."""
    if not held:
        some = "; ".join(map(str, problems[:3]))
        return f"it was recorded there on {some}{' and others' if len(problems) > 3 else ''}"
    if all(each.outcome != "ok" for each in held.values()):
        return "all records failed"
    example = next(iter(held))
    return f"its candidates there are others, such as {example}"
