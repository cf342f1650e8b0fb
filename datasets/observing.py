"""What a measurement tells while it runs, and the facts that its records share.

A process that measures for another one streams this, so that whatever ends it costs one candidate and not the job.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.kernels import Candidate, Device, Problem, variant


@dataclass(frozen=True)
class Facts:
    """What the records of one problem's candidates have in common.

    Attributes:
        device: the device's name.
        device_fingerprint: what identifies it.
        protocol: how samples are taken; ``error_log`` is each record's own.
        environments: variant -> the software that it runs in.
    """

    device: str
    device_fingerprint: str
    protocol: Protocol
    environments: Mapping[str, Environment]

    @classmethod
    def here(
        cls, problem: Problem, candidates: Iterable[Candidate], device: Device, protocol: Protocol
    ) -> Facts:
        """The facts of measuring these candidates in this process."""
        found = {}
        for candidate in candidates:
            if candidate.variant not in found:
                found[candidate.variant] = Environment.current(
                    variant(problem.operation, candidate.variant).source_hash(), device_kind=device.kind
                )
        return cls(device.name, device.fingerprint, protocol, found)

    def record(
        self,
        problem: Problem,
        candidate: Candidate,
        *,
        samples_us: Sequence[float] = (),
        error_log: float = float("nan"),
        outcome: str = "ok",
        detail: str = "",
        workload: str = "",
    ) -> Measurement:
        """The record of one candidate, made now."""
        return Measurement(
            problem=problem,
            candidate=candidate,
            device=self.device,
            device_fingerprint=self.device_fingerprint,
            environment=self.environments[candidate.variant],
            protocol=replace(self.protocol, error_log=error_log),
            samples_us=tuple(samples_us),
            outcome=outcome,
            detail=detail,
            workload=workload,
            created_at=time.time(),
        )

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values; :meth:`from_dict` is its inverse."""
        return {
            "device": self.device,
            "device_fingerprint": self.device_fingerprint,
            "protocol": self.protocol.to_dict(),
            "environments": {name: each.to_dict() for name, each in self.environments.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Facts:
        """Read what :meth:`to_dict` wrote."""
        return cls(
            data["device"],
            data["device_fingerprint"],
            Protocol.from_dict(data["protocol"]),
            {name: Environment(**each) for name, each in data["environments"].items()},
        )


class Observer:
    """Told what a measurement does, as it does it; this one does nothing. Candidates go by their number in the table.

    Call order::

        begun
        preparing, then failed or not, then prepared      once a candidate
        timing
        visiting ..., round                               once a round; failed where one raises
    """

    def begun(self, facts: Facts) -> None:
        """The inputs and the reference are made."""

    def preparing(self, number: int) -> None:
        """A candidate is about to be built, run and checked."""

    def prepared(self, number: int) -> None:
        """A candidate was checked, or failed."""

    def failed(self, number: int, outcome: str, detail: str) -> None:
        """A candidate has this outcome, and is not run again."""

    def timing(self) -> None:
        """Every candidate was prepared, or there was no time for more; the rounds begin."""

    def visiting(self, number: int) -> None:
        """A candidate is about to be timed."""

    def round(self, samples_us: Mapping[int, float]) -> None:
        """A round is over, with these samples."""
