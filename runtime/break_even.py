"""Whether a verification can pay back: what it may save over the calls to come, against what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernelcast.datasets.timing import TimingPlan
from kernelcast.kernels import Device, Problem, variants
from kernelcast.runtime.ranking import Ranking

#: Seconds that compiling a Triton kernel takes: 0.3 to 1.5 for most configs (Triton 3.9, one process).
COMPILE_S = 1.0
#: Seconds for the inputs, the reference in float64 and the checks of a problem, beside what the candidates take.
CHECK_S = 0.005
#: Calls of a candidate before its rounds: the check, the warm-up, the estimate.
_CALLS_BEFORE = 3
#: Of the predicted error, how far a candidate may be faster than predicted.
_ERRORS = 2.0
#: Nothing is faster than this share of the default's time, whatever the error.
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class BreakEven:
    """What a verification would cost, and what it may save.

    Attributes:
        cost_s: seconds that it takes, as far as the predictions tell.
        saving_s: seconds that the fastest candidate may save over the default in all calls, if the prediction errs by two
            standard deviations in its favour.
    """

    cost_s: float
    saving_s: float

    @property
    def pays(self) -> bool:
        """Whether the saving may exceed the cost."""
        return self.saving_s > self.cost_s


def break_even(
    ranking: Ranking,
    rows: Sequence[int],
    problem: Problem,
    device: Device,
    plan: TimingPlan,
    expected_calls: float,
) -> BreakEven | None:
    """Compare a verification's cost with what it may save; None where the default has no predicted time.

    Args:
        ranking: of the problem.
        rows: what would be measured.
        problem: what is to be computed.
        device: where.
        plan: how much would be measured.
        expected_calls: calls of this problem that are still to come.
    """
    prediction, default = ranking.prediction, ranking.default
    if default is None or not prediction.covered[default] or not len(rows):
        return None
    chosen = np.asarray(rows)
    latency_us = np.where(
        prediction.covered[chosen], prediction.latency_us[chosen], prediction.latency_us[default]
    )
    sample_us = np.minimum(np.maximum(latency_us, plan.sample_us), latency_us * plan.repeats)
    racing_us = np.minimum(plan.rounds * sample_us, plan.candidate_seconds * 1e6)
    cost_us = float(min(racing_us.sum(), plan.seconds * 1e6) + _CALLS_BEFORE * latency_us.sum())
    compiled = 0
    if device.kind == "gpu":
        known = variants(problem.operation)
        compiled = sum(known[ranking.table[row].variant].backend == "triton" for row in rows)
    gap = prediction.log_latency[chosen] - prediction.log_latency[default]
    optimistic = float(np.min(gap - _ERRORS * prediction.error_log[chosen] * (chosen != default)))
    share = max(min(np.exp(optimistic), 1.0), _LEAST_SHARE)
    saving_us = expected_calls * float(prediction.latency_us[default]) * (1.0 - share)
    return BreakEven(cost_us / 1e6 + COMPILE_S * compiled + CHECK_S, saving_us / 1e6)
