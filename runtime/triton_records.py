"""What Triton's benchmark says of a config, as records of the store."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.errors import KernelcastError, warn
from kernelcast.kernels import Candidate, Device, Problem
from kernelcast.runtime import Selector

#: The protocol of what Triton's autotuner times, whoever kept it: also that of ``kernelcast import triton-autotune``.
PROTOCOL = "triton-autotune"

_US_PER_MS = 1e3


@dataclass(frozen=True)
class Timing:
    """What came of timing one config.

    Attributes:
        ms: the median and the quantiles 0.2 and 0.8, or what else the benchmark gave; empty for a failure.
        outcome: one of :data:`kernelcast.datasets.OUTCOMES`.
        detail: for a failure, what the error said.
    """

    ms: tuple[float, ...] = ()
    outcome: str = "ok"
    detail: str = ""

    @property
    def latency_ms(self) -> float:
        """The median; infinite for a failure."""
        return self.ms[0] if self.ms else math.inf

    @classmethod
    def of(cls, result: Any, error: BaseException | None = None) -> Timing:
        """What ``Autotuner._bench`` gave: one time or a list of them, infinite for a config that did not compile or fit.

        A time that is no positive number (a clock too coarse for the kernel) is kept as the least float: there is no other
        way to say how fast it was, and it is not recorded.
        """
        values = list(result) if isinstance(result, list | tuple) else [result]
        times = [float(value) for value in values]
        if error is not None or not times or not math.isfinite(times[0]):
            return cls((), _outcome(error), _said(error))
        return cls(tuple(value if value > 0 else _LEAST_MS for value in times if math.isfinite(value)))


_LEAST_MS = 1e-9


def _outcome(error: BaseException | None) -> str:
    # Of what Triton swallows, shared memory or registers that do not fit are by far the commonest.
    if error is None or type(error).__name__ == "OutOfResources":
        return "out_of_resources"
    return (
        "compile_error" if type(error).__name__ in ("CompileTimeAssertionFailure", "PTXASError") else "crash"
    )


def _said(error: BaseException | None) -> str:
    return "timed as inf" if error is None else f"{type(error).__name__}: {error}"[:400]


def measurement(
    problem: Problem,
    candidate: Candidate,
    timing: Timing,
    device: Device,
    *,
    source: str,
    protocol: Protocol,
    workload: str,
) -> Measurement | None:
    """The record of one timing; None where the clock was too coarse to give one.

    Args:
        problem: of the call.
        candidate: the config.
        timing: what came of it.
        device: where.
        source: hash of the kernel.
        protocol: how it was timed.
        workload: written into the record.
    """
    if timing.outcome == "ok" and min(timing.ms) <= _LEAST_MS:
        return None
    return Measurement(
        problem=problem,
        candidate=candidate,
        device=device.name,
        device_fingerprint=device.fingerprint,
        environment=Environment.current(source, device_kind=device.kind),
        protocol=protocol,
        samples_us=tuple(value * _US_PER_MS for value in timing.ms),
        outcome=timing.outcome,
        detail=timing.detail,
        workload=workload,
        created_at=time.time(),
    )


def protocol_of(tuner: Any) -> Protocol:
    """How a tuner times: Triton's ``do_bench`` empties the cache before each run, a replayed graph does not."""
    if getattr(tuner, "use_cuda_graph", False):
        return Protocol(PROTOCOL, cache="warm", dispatch="graph")
    own = getattr(tuner, "_do_bench", None) is not None and getattr(tuner, "num_reps", None) is None
    if own and getattr(tuner, "num_warmups", None) is None:
        return Protocol(PROTOCOL)
    return Protocol(PROTOCOL, cache="cold", dispatch="eager")


def send(selector: Selector, measurements: Sequence[Measurement | None]) -> None:
    """Give records to a selector's store. A fault costs the records, not the call."""
    found = [each for each in measurements if each is not None]
    if not found:
        return
    try:
        selector.measurer.record(found)
    except (KernelcastError, OSError) as error:
        warn(f"{error} The timings of this kernel are not kept.")
