"""Selections: the answer, and where it came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kernelcast.errors import InvalidProblemError, InvalidRecordError
from kernelcast.kernels import Candidate, Problem

SOURCES = ("cached", "verified", "predicted", "analytic", "default")


@dataclass(frozen=True)
class Selection:
    """Which candidate to run for a problem on a device.

    Attributes:
        problem: what is to be computed.
        device: the device's name.
        candidate: how.
        source: ``"verified"`` (measured here, now), ``"cached"`` (verified before), ``"predicted"`` (by the device's
            model), ``"analytic"`` (by the roofline alone) or ``"default"`` (torch's own).
        predicted_us: predicted latency in microseconds; NaN without a prediction.
        measured_us: measured latency in microseconds; NaN if not measured.
        default_us: the default's latency, measured if it was, else predicted; NaN if neither.
        confidence: probability that no other of the compared candidates is faster, as far as noise (measured) or the
            model's own error (predicted) tells; NaN without either.
        measured: how many candidates were measured for this selection.
        candidates: how many were legal.
        model_version: of the model that ranked; empty without one.
        reason: one sentence.
    """

    problem: Problem
    device: str
    candidate: Candidate
    source: str
    predicted_us: float = math.nan
    measured_us: float = math.nan
    default_us: float = math.nan
    confidence: float = math.nan
    measured: int = 0
    candidates: int = 0
    model_version: str = ""
    reason: str = ""

    @property
    def latency_us(self) -> float:
        """The measured latency if there is one, else the predicted."""
        return self.predicted_us if math.isnan(self.measured_us) else self.measured_us

    @property
    def speedup(self) -> float:
        """The default's latency over the selection's; above 1 the selection is faster. NaN where one is not known."""
        return self.default_us / self.latency_us

    def to_dict(self) -> dict[str, Any]:
        """The selection as plain JSON values (NaN as None); :meth:`from_dict` is its inverse."""
        data = {**asdict(self), "problem": self.problem.to_dict()}
        data["candidate"] = {"variant": self.candidate.variant, "config": self.candidate.parameters}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in data.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Selection:
        """Read what :meth:`to_dict` wrote.

        Raises:
            InvalidRecordError: a field is missing, unknown, or of another type.
        """
        try:
            fields = dict(data)
            fields["problem"] = Problem.from_dict(fields["problem"])
            candidate = fields["candidate"]
            fields["candidate"] = Candidate.of(str(candidate["variant"]), candidate["config"])
            for name in ("predicted_us", "measured_us", "default_us", "confidence"):
                fields[name] = math.nan if fields[name] is None else float(fields[name])
            for name in ("measured", "candidates"):
                fields[name] = int(fields[name])
            for name in ("device", "model_version", "reason"):
                if not isinstance(fields[name], str):
                    raise InvalidRecordError(f"A selection's {name} is {fields[name]!r}; it must be a text.")
            if fields["source"] not in SOURCES:
                raise InvalidRecordError(
                    f"A selection's source is {fields['source']!r}; known: {', '.join(SOURCES)}."
                )
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError, InvalidProblemError) as error:
            raise InvalidRecordError(f"Not a selection ({type(error).__name__}: {error}).") from error
