"""The configs of a tuned Triton kernel as candidates, and the ranking of them where no model was trained.

What is known of a kernel that nothing was measured of is its configs alone. A ranking then is no forecast: it spreads over the
space, the config that is declared first before all others. From the first key on that was measured in this process, what was
fast on near keys comes first, and then what is worth finding out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.kernels import Candidate, CandidateTable, Problem
from kernelcast.kernels.candidate import ConfigValue
from kernelcast.runtime.triton_key import code_hash

#: So many keys must have been measured before the nearest of them rank; ...
LEAST_KEYS = 1
#: ... and so many of the nearest are asked.
_NEAREST = 64

#: Distance, in doublings of a dimension, between keys that differ in their dtypes or in another option.
_DTYPE_DISTANCE = 2.0
_OPTION_DISTANCE = 0.5

# The numbers below are from replaying PyTorch's recorded A100 products (benchmarks/triton_ranking.py), where anything within a
# factor of two of each was as good within noise.
#: Distances, of keys in doublings and of configs in shares of each parameter's range, at which a measurement counts 1/e.
_KEY_REACH = 3.0
_CONFIG_REACH = 0.3
#: Measurements that a guess counts for, ...
_GUESS_WEIGHT = 0.1
#: ... and how wrong it may be, in log latency: what is not known is tried where it might be so much better.
_DOUBT = 0.3
#: So many configs are chosen one by one; the others follow by their expected time.
_ONE_BY_ONE = 32


def config_key(config: Any) -> str:
    """A text that tells a ``triton.Config`` from others of its tuner, in every process alike."""
    facts = {name: value if _is_plain(value) else str(value) for name, value in config.all_kwargs().items()}
    hook = getattr(config, "pre_hook", None)
    if hook is not None:
        facts["pre_hook"] = code_hash(hook)
    return json.dumps(facts, sort_keys=True)


def candidates_of(configs: Sequence[Any], variant: str) -> list[Candidate]:
    """Configs as candidates of one variant, all with the same parameters, each of one type.

    A number that some configs leave out is 0 there (``maxnreg``: no limit). Values of several types, and those that are
    neither whole numbers, texts nor flags, become text throughout.
    """
    rows = [config.all_kwargs() for config in configs]
    names = sorted({name for row in rows for name in row})
    columns: dict[str, list[ConfigValue]] = {}
    for name in names:
        given = [row[name] for row in rows if name in row]
        kinds = {type(value) for value in given}
        if kinds == {int} and all(-(2**63) <= value < 2**63 for value in given):
            columns[name] = [row.get(name, 0) for row in rows]
        elif kinds <= {bool} and len(given) == len(rows):
            columns[name] = [row[name] for row in rows]
        else:
            columns[name] = [str(row.get(name, "")).rstrip("\0") for row in rows]
    return [
        Candidate.of(variant, {name: columns[name][place] for name in names}) for place in range(len(rows))
    ]


def table_of(configs: Sequence[Any], variant: str) -> CandidateTable:
    """Configs as one table, in their order."""
    return CandidateTable.of(candidates_of(configs, variant))


def spread(configs: Sequence[Any]) -> list[int]:
    """Every config's place, the first declared first, then always the one that is furthest from all before it.

    Numbers are compared by their logarithm, each parameter by its own range; ties keep the order of declaration.
    """
    if not configs:
        return []
    points = _points(configs)
    order = [0]
    nearest = _distances(points, 0)
    nearest[0] = -1.0
    while len(order) < len(configs):
        found = int(np.argmax(nearest))
        order.append(found)
        nearest = np.minimum(nearest, _distances(points, found))
        nearest[order] = -1.0
    return order


def _points(configs: Sequence[Any]) -> np.ndarray:
    """float64 [configs, columns]: each parameter in the unit interval, a text as one column a value."""
    columns: list[list[float]] = []
    parts = [candidate.parameters for candidate in candidates_of(configs, "")]
    for name in parts[0]:
        values: list[Any] = [part[name] for part in parts]
        if isinstance(values[0], str):
            columns += [[float(value == each) for value in values] for each in sorted(set(values))]
            continue
        logs = [math.copysign(math.log2(1 + abs(value)), value) for value in values]
        low, high = min(logs), max(logs)
        columns.append([(value - low) / (high - low) if high > low else 0.0 for value in logs])
    return np.array(columns).T.reshape(len(configs), -1)


def _distances(points: np.ndarray, place: int) -> np.ndarray:
    return np.asarray(np.abs(points - points[place]).sum(axis=1), dtype=np.float64)


@dataclass(frozen=True)
class MeasuredKey:
    """What was measured for one key of a kernel.

    Attributes:
        problem: of the call.
        latency: of each config that worked, by :func:`config_key`; in any one unit.
    """

    problem: Problem
    latency: Mapping[str, float]

    @property
    def winner(self) -> str:
        """The key of the fastest config."""
        return min(self.latency, key=lambda key: self.latency[key])


def distance(one: Problem, other: Problem) -> float:
    """How far two keys of a kernel lie apart, in doublings of a dimension."""
    sizes = dict(other.dims)
    total = sum(abs(math.log2((1 + size) / (1 + sizes.get(name, 0)))) for name, size in one.dims)
    options = dict(other.options)
    for name, value in one.options:
        if options.get(name) != value:
            total += _DTYPE_DISTANCE if name == "dtypes" else _OPTION_DISTANCE
    return total


def nearest(configs: Sequence[Any], problem: Problem, measured: Iterable[MeasuredKey]) -> list[int] | None:
    """Every config's place by what was measured for the nearest keys; None if too few were.

    A measurement is the log latency over that of the fastest config that was measured for its key. Its weight falls with the
    distance of the key and that of the config. First comes the config that is expected to be the fastest. The next ones are
    those that might be: the expected time less the doubt that is left of it, which shrinks near what is measured and near what
    comes before. Ties keep the order of declaration.
    """
    found = sorted(
        (
            (distance(problem, each.problem), place, each)
            for place, each in enumerate(measured)
            if each.latency
        ),
        key=lambda item: item[:2],
    )[:_NEAREST]
    if len(found) < LEAST_KEYS:
        return None
    places = {config_key(config): place for place, config in enumerate(configs)}
    rows = [
        (places[key], math.exp(-far / _KEY_REACH), math.log(latency / each.latency[each.winner]))
        for far, _, each in found
        for key, latency in each.latency.items()
        if key in places
    ]
    if not rows:
        return None
    at, near, slower = (np.array(column) for column in zip(*rows, strict=True))
    points = _points(configs)
    alike = np.exp(-np.stack([_distances(points, place) for place in range(len(configs))]) / _CONFIG_REACH)
    weights = alike[:, at] * near
    total, weighted = weights.sum(axis=1), weights @ slower
    expected = (weighted + _GUESS_WEIGHT * slower.mean()) / (total + _GUESS_WEIGHT)
    hoped = weighted / (total + _GUESS_WEIGHT)
    order = [int(np.argmin(expected))]
    while len(order) < min(len(configs), _ONE_BY_ONE):
        total = total + alike[order[-1]]
        score = hoped - _DOUBT / np.sqrt(1.0 + total / _GUESS_WEIGHT)
        score[order] = math.inf
        order.append(int(np.argmin(score)))
    chosen = set(order)
    return order + [int(place) for place in np.argsort(expected, kind="stable") if int(place) not in chosen]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str | bool)
