"""Selections: the answer, and where it came from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
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
        busy: whether it was decided on a machine that other programs used too: `kernelcast cache verify` selects it anew.
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
    busy: bool = False

    @property
    def latency_us(self) -> float:
        """The measured latency if there is one, else the predicted."""
        return self.predicted_us if math.isnan(self.measured_us) else self.measured_us

    @property
    def speedup(self) -> float:
        """The default's latency over the selection's; above 1 the selection is faster. NaN where one is not known."""
        return self.default_us / self.latency_us

    @property
    def hash(self) -> str:
        """16 hexadecimal digits over the choice: problem and candidate, and nothing that was measured.

        Processes that chose alike have equal hashes.
        """
        return _hash([self])

    def to_dict(self) -> dict[str, Any]:
        """The selection as plain JSON values (NaN as None, ``busy`` only where it is); :meth:`from_dict` is its inverse."""
        # Not dataclasses.asdict, which copies each part deeply at five times the cost.
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["problem"] = self.problem.to_dict()
        data["candidate"] = {"variant": self.candidate.variant, "config": self.candidate.parameters}
        if not self.busy:  # as in entries and packs of before there was the field
            del data["busy"]
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
            values = dict(data)
            values["problem"] = Problem.from_dict(values["problem"])
            candidate = values["candidate"]
            values["candidate"] = Candidate.of(str(candidate["variant"]), candidate["config"])
            for name in ("predicted_us", "measured_us", "default_us", "confidence"):
                value = values[name]
                if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                    raise InvalidRecordError(f"A selection's {name} is {value!r}; it must be a number.")
                values[name] = math.nan if value is None else float(value)
            for name in ("measured", "candidates"):
                if type(values[name]) is not int or values[name] < 0:
                    raise InvalidRecordError(
                        f"A selection's {name} is {values[name]!r}; it must be an integer of at least 0."
                    )
            for name in ("device", "model_version", "reason"):
                if not isinstance(values[name], str):
                    raise InvalidRecordError(f"A selection's {name} is {values[name]!r}; it must be a text.")
            if type(values.get("busy", False)) is not bool:
                raise InvalidRecordError(
                    f"A selection's busy is {values['busy']!r}; it must be true or false."
                )
            if values["source"] not in SOURCES:
                raise InvalidRecordError(
                    f"A selection's source is {values['source']!r}; known: {', '.join(SOURCES)}."
                )
            return cls(**values)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            InvalidProblemError,
        ) as error:
            raise InvalidRecordError(f"Not a selection ({type(error).__name__}: {error}).") from error


def selections_hash(selections: Iterable[Selection]) -> str:
    """16 hexadecimal digits over the choices of several selections, in any order; each problem counts once a choice.

    The ranks of a job compare it: equal hashes mean that they chose alike on the same problems.
    """
    return _hash(selections)


def _hash(selections: Iterable[Selection]) -> str:
    choices = sorted({(each.problem.key, each.candidate.key) for each in selections})
    return hashlib.sha256(json.dumps(choices, separators=(",", ":")).encode()).hexdigest()[:16]
