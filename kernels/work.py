"""Work: what a candidate makes the hardware do, stated by its variant. The featurizer turns it into times."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

Amount = np.ndarray | float


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
    programs: Amount = float("nan")
    warps: Amount = float("nan")
    shared_bytes: Amount = float("nan")
    accumulators: Amount = float("nan")
    inner_steps: Amount = float("nan")

    def columns(self, length: int) -> dict[str, np.ndarray]:
        """Every amount as a float64 array of ``length`` rows."""
        return {
            field.name: np.broadcast_to(np.asarray(getattr(self, field.name), dtype=np.float64), (length,))
            for field in fields(self)
        }
