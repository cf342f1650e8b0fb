"""Work: what a candidate makes the hardware do, stated by its variant. The featurizer turns it into times."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np

Amount = np.ndarray | float

_UNKNOWN = float("nan")


@dataclass(frozen=True, slots=True)
class Work:
    """Amounts of work, one value a candidate or one for all. NaN where a variant cannot know (a closed library).

    Attributes:
        flops: floating-point operations executed, padding included.
        traffic_bytes: bytes moved to and from memory, tile re-reads included, scratch excluded.
        scratch_bytes: bytes of temporary tensors, written once and read once.
        calls: kernels or library calls that are launched, one after the other.
        programs: independent units of parallel work of the main kernel (blocks of a grid, tasks of a pool).
        warps: warps of one program; 1 on a CPU.
        shared_bytes: shared memory of one program.
        accumulators: 32-bit accumulator registers of one thread.
        inner_steps: iterations of the main loop of one program.
    """

    flops: Amount
    traffic_bytes: Amount
    scratch_bytes: Amount = 0.0
    calls: Amount = 1.0
    programs: Amount = _UNKNOWN
    warps: Amount = _UNKNOWN
    shared_bytes: Amount = _UNKNOWN
    accumulators: Amount = _UNKNOWN
    inner_steps: Amount = _UNKNOWN

    def fill(self, out: np.ndarray) -> None:
        """Write the amounts into float64 [:data:`WORK_NAMES`, rows], which holds NaN."""
        for place, amount in enumerate(_amounts(self)):
            if amount is not _UNKNOWN:
                out[place] = amount

    def columns(self, length: int) -> dict[str, np.ndarray]:
        """Every amount as a float64 array of ``length`` rows."""
        out = np.full((len(WORK_NAMES), length), np.nan)
        self.fill(out)
        return dict(zip(WORK_NAMES, out, strict=True))


#: The amounts, in order.
WORK_NAMES = tuple(field.name for field in fields(Work))
_amounts = attrgetter(*WORK_NAMES)
