"""What the compiler made of candidates, looked up for many at once: registers, spills and shared memory as features."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kernelcast.errors import ArtifactError, InvalidRecordError
from kernelcast.kernels import Block, Candidate, Problem
from kernelcast.kernels.candidate import column_of
from kernelcast.kernels.compile_classes import class_key

#: What is known of a candidate, in this order.
FACTS = ("registers", "spills", "shared_bytes")


@dataclass(frozen=True)
class CompiledRow:
    """The facts of one config of a variant, for all problems of one class."""

    problem_class: str
    candidate: Candidate
    registers: int
    spills: int
    shared_bytes: int


class CompiledFacts:
    """Facts of compiled candidates on one architecture, found by class of problem and config.

    Args:
        target: the architecture that they were compiled for.
        levels: of each variant, how each size of a problem counts
            (:func:`kernelcast.kernels.compile_classes.find_levels`).
        rows: in any order; the configs of one variant have the same parameters.

    Raises:
        InvalidRecordError: a variant has no levels, or its configs have different parameters.
    """

    def __init__(
        self, target: str, levels: Mapping[str, Mapping[str, int]], rows: Iterable[CompiledRow]
    ) -> None:
        self.target = target
        self.levels = {name: dict(each) for name, each in levels.items()}
        grouped: dict[str, list[CompiledRow]] = {name: [] for name in self.levels}
        for row in rows:
            if row.candidate.variant not in grouped:
                raise InvalidRecordError(f"There are no levels of {row.candidate.variant}.")
            grouped[row.candidate.variant].append(row)
        self._indices = {name: _index_of(found) for name, found in grouped.items() if found}

    def __len__(self) -> int:
        return sum(len(index.classes) for index in self._indices.values())

    def lookup(self, problem: Problem, block: Block) -> np.ndarray:
        """float64 [rows of the block, :data:`FACTS`]; NaN where a candidate was not compiled."""
        index = self._indices.get(block.variant)
        if index is None:
            return np.full((block.length, len(FACTS)), np.nan)
        return index.lookup(class_key(problem, self.levels[block.variant]), block)

    def to_json(self) -> bytes:
        """The facts as JSON; :meth:`from_json` is its inverse. The same facts give the same bytes."""
        variants = {}
        for name, index in sorted(self._indices.items()):
            columns = [index.columns[parameter].tolist() for parameter in index.parameters]
            # One list a row: class, values of the parameters, facts.
            known = sorted(set(index.classes))
            place = {key: at for at, key in enumerate(known)}
            lines = zip((place[key] for key in index.classes), *columns, *index.facts.T.tolist(), strict=True)
            variants[name] = {
                "levels": self.levels[name],
                "parameters": list(index.parameters),
                "classes": known,
                "rows": sorted(map(list, lines)),
            }
        text = json.dumps(
            {"target": self.target, "variants": variants}, separators=(",", ":"), sort_keys=True
        )
        return text.encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes) -> CompiledFacts:
        """Read what :meth:`to_json` wrote.

        Raises:
            ArtifactError: it is something else.
        """
        try:
            data = json.loads(content)
            facts = cls(str(data["target"]), {}, [])
            for name, found in data["variants"].items():
                facts.levels[str(name)] = {str(size): int(level) for size, level in found["levels"].items()}
                place, *columns = (list(column) for column in zip(*found["rows"], strict=True))
                parameters = [str(each) for each in found["parameters"]]
                values, counts = columns[: len(parameters)], columns[len(parameters) :]
                if len(counts) != len(FACTS):
                    raise ValueError(f"rows of {name} have {len(columns)} values")
                facts._indices[str(name)] = _Index(
                    [str(found["classes"][at]) for at in place],
                    {each: column_of(each, column) for each, column in zip(parameters, values, strict=True)},
                    np.array(counts, dtype=np.int64).T,
                )
            return facts
        # numpy and the index of a list raise more kinds than these, all of them LookupErrors or ValueErrors.
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
            OverflowError,
            InvalidRecordError,
        ) as error:
            raise ArtifactError(
                f"Not facts of compiled kernels ({type(error).__name__}: {error})."
            ) from error


def _index_of(rows: list[CompiledRow]) -> _Index:
    parameters = [name for name, _ in rows[0].candidate.config]
    for row in rows:
        if [name for name, _ in row.candidate.config] != parameters:
            raise InvalidRecordError(f"{row.candidate} does not have the parameters of {rows[0].candidate}.")
    columns = {
        name: column_of(name, [row.candidate.config[place][1] for row in rows])
        for place, name in enumerate(parameters)
    }
    facts = np.array([[getattr(row, name) for name in FACTS] for row in rows], dtype=np.int64)
    return _Index([row.problem_class for row in rows], columns, facts)


class _Index:
    """The rows of one variant. A config is one whole number: its parameters' places among the values that occur."""

    def __init__(self, classes: list[str], columns: dict[str, np.ndarray], facts: np.ndarray) -> None:
        self.classes = classes
        self.columns = columns
        self.facts = facts
        self.parameters = tuple(sorted(columns))
        self._values = {name: np.unique(column) for name, column in columns.items()}
        codes = self._encode(columns, len(classes))
        places: dict[str, list[int]] = {}
        for place, key in enumerate(classes):
            places.setdefault(key, []).append(place)
        self._classes = {}
        for key, chosen in places.items():
            order = np.array(chosen)[np.argsort(codes[chosen], kind="stable")]
            self._classes[key] = (codes[order], facts[order].astype(np.float64))

    def lookup(self, key: str, block: Block) -> np.ndarray:
        out = np.full((block.length, len(FACTS)), np.nan)
        if key not in self._classes or sorted(block.columns) != list(self.parameters):
            return out
        codes, facts = self._classes[key]
        wanted = self._encode(block.columns, block.length)
        at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        found = codes[at] == wanted
        out[found] = facts[at[found]]
        return out

    def _encode(self, columns: Mapping[str, np.ndarray], length: int) -> np.ndarray:
        """The number of each config, -1 where a value never occurs."""
        code = np.zeros(length, dtype=np.int64)
        known = np.ones(length, dtype=bool)
        for name in self.parameters:
            values, column = self._values[name], columns[name]
            # Texts and numbers compare with nothing of the other kind, and True is not 1.
            if (values.dtype.kind in "iu") != (column.dtype.kind in "iu") or (values.dtype.kind == "U") != (
                column.dtype.kind == "U"
            ):
                return np.full(length, -1)
            at = np.minimum(np.searchsorted(values, column), len(values) - 1)
            known &= values[at] == column
            code = code * len(values) + at
        return np.where(known, code, -1)
