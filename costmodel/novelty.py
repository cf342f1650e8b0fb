"""What a model was trained on, in a few numbers, and which problems lie beyond it. numpy alone."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernelcast.errors import ArtifactError, ModelError
from kernelcast.kernels import Problem

#: A size is beyond training if it is more than this many times the largest, or the smallest is so many times it.
_FACTOR = 2.0
#: Share of the training problems whose distance to the nearest other one is no surprise.
_QUANTILE = 0.99
#: No shape so near to another is far, in doublings: sizes on a grid are at most a doubling from the next.
_NEAR = 1.5
#: Problems that stand for all of training.
MOST_POINTS = 512
#: Problems that distances are taken of; more would cost time and tell nothing new.
_MOST_JUDGED = 8192
#: With fewer distinct shapes a percentile of distances says nothing.
_LEAST_POINTS = 20
#: Steps of a doubling that shapes are kept in.
_STEPS = 1024.0
#: An integer option with more values than this is a quantity, such as a leading dimension, and any value is known.
_MOST_VALUES = 16


@dataclass(frozen=True, eq=False)
class Reach:
    """Ranges and representative shapes of the problems that a model was fitted on.

    Attributes:
        dims: names of the dimensions.
        least: smallest size of each.
        largest: largest size of each.
        facts: (name, values as text) of the dtype, the switches and those options that have few values.
        points: float32 [up to :data:`MOST_POINTS`, dims]: log2(size + 1) of shapes spread over training.
        limit: distance to the nearest of them, in doublings, within which 99% of the training problems lie of another;
            at least 1.5. Infinite where training had too few shapes to tell.

    Raises:
        ArtifactError: the fields contradict each other.
    """

    dims: tuple[str, ...]
    least: tuple[int, ...]
    largest: tuple[int, ...]
    facts: tuple[tuple[str, tuple[str, ...]], ...]
    points: np.ndarray
    limit: float
    _values: dict[str, frozenset[str]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if (
            not len(self.dims) == len(self.least) == len(self.largest)
            or self.points.ndim != 2
            or not 1 <= len(self.points) <= MOST_POINTS
            or self.points.shape[1] != len(self.dims)
            or not np.isfinite(self.points).all()
            or not self.limit >= 0
        ):
            raise ArtifactError("What a model says of the problems in its training contradicts itself.")
        object.__setattr__(self, "_values", {name: frozenset(values) for name, values in self.facts})

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Reach:
        """The reach of some problems of one operation.

        Raises:
            ModelError: there is none, or they have different dimensions.
        """
        if not problems:
            raise ModelError("There is no problem to take a reach from.")
        dims = tuple(name for name, _ in problems[0].dims)
        if any(tuple(name for name, _ in problem.dims) != dims for problem in problems):
            raise ModelError("The problems have different dimensions, so they have no reach in common.")
        sizes = np.array([[size for _, size in problem.dims] for problem in problems], dtype=np.int64)
        values: dict[str, set[Any]] = {}
        for problem in problems:
            for name, value in _facts(problem).items():
                values.setdefault(name, set()).add(value)
        points, limit = _representatives(np.unique(_doublings(sizes), axis=0))
        return cls(
            dims,
            tuple(sizes.min(axis=0).tolist()),
            tuple(sizes.max(axis=0).tolist()),
            tuple(
                (name, tuple(sorted({str(value) for value in found})))
                for name, found in sorted(values.items())
                if not _is_quantity(found)
            ),
            points,
            limit,
        )

    def novelty(self, problem: Problem) -> str:
        """What of a problem lies beyond training, as a sentence without a full stop; empty if nothing does."""
        for name, value in _facts(problem).items():
            known = self._values.get(name)
            if known is not None and str(value) not in known:
                return f"{name} {value} was not in training"
        sizes = dict(problem.dims)
        if tuple(sizes) != self.dims:
            return f"dimensions {', '.join(sizes)} were not in training"
        for name, least, largest in zip(self.dims, self.least, self.largest, strict=True):
            if sizes[name] > _FACTOR * largest:
                return f"{name} = {sizes[name]} is more than twice the largest in training, {largest}"
            if _FACTOR * sizes[name] < least:
                return f"{name} = {sizes[name]} is less than half the smallest in training, {least}"
        away = self.distance(problem)
        if away > self.limit:
            named = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            return (
                f"{named} is {away:.1f} doublings from the nearest shape in training, "
                f"where 99% are within {self.limit:.1f} of another"
            )
        return ""

    def distance(self, problem: Problem) -> float:
        """Euclidean distance to the nearest representative shape, in doublings."""
        if not self.dims:
            return 0.0
        at = [math.log2(size + 1) for _, size in problem.dims]
        away = self.points - np.array(at, dtype=np.float32)
        return math.sqrt(np.einsum("ij,ij->i", away, away).min())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` is the inverse."""
        return {
            "dims": list(self.dims),
            "least": list(self.least),
            "largest": list(self.largest),
            "facts": [[name, list(values)] for name, values in self.facts],
            "points": base64.b64encode(np.round(self.points * _STEPS).astype("<u2").tobytes()).decode(),
            "limit": self.limit if math.isfinite(self.limit) else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reach:
        """Read what :meth:`to_dict` gave.

        Raises:
            ArtifactError: a field is missing or of another type.
        """
        try:
            dims = tuple(map(str, data["dims"]))
            return cls(
                dims,
                tuple(map(int, data["least"])),
                tuple(map(int, data["largest"])),
                tuple((str(name), tuple(map(str, values))) for name, values in data["facts"]),
                _decoded(str(data["points"]), len(dims)),
                math.inf if data["limit"] is None else float(data["limit"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArtifactError(
                f"Not what a model says of the problems in its training ({type(error).__name__}: {error})."
            ) from error


def _facts(problem: Problem) -> dict[str, Any]:
    """What is no size: the dtype, the switches and the options."""
    facts = {"dtype": problem.dtype, "allow_tf32": problem.allow_tf32, "threads": problem.threads}
    return {**facts, **dict(problem.options)}


def _is_quantity(values: set[Any]) -> bool:
    numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return numbers and len(values) > _MOST_VALUES


def _doublings(sizes: np.ndarray) -> np.ndarray:
    # In steps, so that an artifact holds exactly what was fitted; a size may be 0.
    return (np.round(np.log2(sizes + 1.0) * _STEPS) / _STEPS).astype(np.float32)


def _decoded(text: str, dims: int) -> np.ndarray:
    steps = np.frombuffer(base64.b64decode(text, validate=True), dtype="<u2")
    return (steps.reshape(-1, max(dims, 1)) / _STEPS).astype(np.float32)[:, :dims]


def _representatives(shapes: np.ndarray) -> tuple[np.ndarray, float]:
    """(shapes spread over those given, the limit of :class:`Reach`).

    Each next representative is the shape farthest from those before it: none is far from all of them.
    """
    if len(shapes) > _MOST_JUDGED:
        shapes = shapes[np.linspace(0, len(shapes) - 1, _MOST_JUDGED).round().astype(np.intp)]
    chosen = [int(np.argmin(((shapes - shapes.mean(axis=0)) ** 2).sum(axis=1)))]
    nearest = ((shapes - shapes[chosen[0]]) ** 2).sum(axis=1)
    while len(chosen) < min(len(shapes), MOST_POINTS):
        chosen.append(int(np.argmax(nearest)))
        nearest = np.minimum(nearest, ((shapes - shapes[chosen[-1]]) ** 2).sum(axis=1))
    points = shapes[chosen]
    if len(shapes) < _LEAST_POINTS:
        return points, math.inf
    # A representative is judged by the others: it is no neighbour of itself.
    between = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    np.fill_diagonal(between, np.inf)
    nearest[chosen] = between.min(axis=1)
    return points, max(float(np.sqrt(np.quantile(nearest, _QUANTILE))), _NEAR)
