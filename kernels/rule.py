"""Rules: what makes a candidate legal, each stated once, with its hardware reason."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from kernelcast.kernels.candidate import Candidate, Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.problem import Problem

Check = Callable[[Problem, Columns, Device], "np.ndarray | bool"]
Explain = Callable[[Problem, Columns, Device], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition that a legal candidate meets.

    Attributes:
        name: a short slug.
        reason: one sentence: why the hardware (or the algorithm) demands it.
        check: (problem, columns, device) -> True where met: a bool array over the rows, or one bool for all.
        explain: (problem, columns of one row, device) -> what was seen against what is allowed.
        of_problem: whether it looks at the problem and the device alone. Such a rule is asked before a space is listed,
            with no columns.
        class_of: (problem, device) -> everything of the two that ``check`` looks at. Many problems share a class, and the
            answers for a listed space are remembered by class. None: asked for every problem.
    """

    name: str
    reason: str
    check: Check
    explain: Explain | None = None
    of_problem: bool = False
    class_of: Callable[[Problem, Device], Hashable] | None = None

    def met(self, problem: Problem, columns: Columns, device: Device, length: int) -> np.ndarray:
        """Whether each of ``length`` rows meets the rule."""
        answer = np.asarray(self.check(problem, columns, device), dtype=bool)
        return answer if answer.shape == (length,) else np.broadcast_to(answer, (length,))


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one candidate is not legal: the first rule that it breaks."""

    candidate: Candidate
    rule: str
    reason: str
    seen: str

    def __str__(self) -> str:
        seen = f" ({self.seen})" if self.seen else ""
        return f"{self.candidate}: {self.reason}{seen}"
