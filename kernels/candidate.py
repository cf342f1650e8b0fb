"""Candidates: a variant with its config. One is an object; many travel as columns."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.errors import InvalidRecordError

ConfigValue = int | str | bool
#: Whole numbers of a config are held in 64 bits where many travel as a column.
_INT64 = range(-(2**63), 2**63)

#: The config parameters of many candidates of one variant: name -> array of one length.
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Candidate:
    """One variant with one config.

    Attributes:
        variant: registered name, such as ``"triton_tiled"``.
        config: (parameter, value), sorted by parameter.

    Raises:
        InvalidRecordError: the config is not sorted, names a parameter twice, or has a value that is no whole number
            of 64 bits, text or flag.
    """

    variant: str
    config: tuple[tuple[str, ConfigValue], ...] = ()

    def __post_init__(self) -> None:
        if type(self.variant) is not str:
            raise InvalidRecordError(f"A candidate's variant is {self.variant!r}; it must be a text.")
        previous = ""
        for position, (name, value) in enumerate(self.config):
            if type(name) is not str or (position and name <= previous):
                raise InvalidRecordError(
                    f"The config of {self.variant} is {self.config!r}; its parameters must be texts, sorted, each once."
                )
            previous = name
            # A text that ends in NUL would lose it in a numpy column.
            if not (
                type(value) is bool
                or (type(value) is int and value in _INT64)
                or (type(value) is str and not value.endswith("\0"))
            ):
                raise InvalidRecordError(
                    f"{self.variant}: {name} is {value!r}; it must be a whole number of 64 bits, a text or a flag."
                )

    # True equals 1 to Python, and the two are different configs: only the keys tell them apart.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Candidate):
            return NotImplemented
        return self.variant == other.variant and self.config == other.config and self.key == other.key

    def __hash__(self) -> int:
        return hash((self.variant, self.config))

    @classmethod
    def of(cls, variant: str, config: Mapping[str, ConfigValue] | None = None) -> Candidate:
        """Build a candidate from a mapping, in any order; numpy's scalars become Python's.

        Raises:
            InvalidRecordError: a value is no whole number, text or flag.
        """
        items = [
            (name, value.item() if isinstance(value, np.generic) else value)
            for name, value in (config or {}).items()
        ]
        return cls(variant, tuple(sorted(items, key=operator.itemgetter(0))))

    @property
    def parameters(self) -> dict[str, ConfigValue]:
        """The config as a dict."""
        return dict(self.config)

    @cached_property
    def key(self) -> str:
        """A canonical text; two candidates are equal exactly if their keys are."""
        return json.dumps([self.variant, dict(self.config)], separators=(",", ":"))

    @classmethod
    def from_key(cls, key: str) -> Candidate:
        """Read what :attr:`key` wrote.

        Raises:
            InvalidRecordError: the text is not a candidate's key.
        """
        try:
            variant, config = json.loads(key)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRecordError(f"Not a candidate: {key!r} ({error}).") from error
        if not isinstance(config, dict):
            raise InvalidRecordError(f"Not a candidate: {key!r} (the config is no mapping).")
        return cls.of(variant, config)

    def __str__(self) -> str:
        if not self.config:
            return self.variant
        return f"{self.variant}({', '.join(f'{name}={value}' for name, value in self.config)})"


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Candidates of one variant: ``columns`` hold one array a parameter, all ``length`` long: int, str or bool.

    Raises:
        InvalidRecordError: a column has another length or dtype.
    """

    variant: str
    columns: dict[str, np.ndarray]
    length: int

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if column.shape != (self.length,):
                raise InvalidRecordError(
                    f"Column {name!r} of {self.variant} has shape {column.shape}; it must be ({self.length},)."
                )
            if column.dtype.kind not in "biuU":
                raise InvalidRecordError(
                    f"Column {name!r} of {self.variant} is {column.dtype}; it must hold integers, texts or flags."
                )

    def at(self, index: int) -> Candidate:
        """The candidate in one row."""
        return Candidate.of(
            self.variant, {name: column[index].item() for name, column in self.columns.items()}
        )

    def take(self, rows: np.ndarray) -> Block:
        """The given rows (integer indices or a bool mask), in that order."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        length = int(np.count_nonzero(rows)) if rows.dtype == bool else len(rows)
        return Block(self.variant, columns, length)


class CandidateTable(Sequence[Candidate]):
    """Many candidates, as one block of columns a variant. Row numbers run through the blocks in order."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks: tuple[Block, ...] = tuple(block for block in blocks if block.length)
        self._ends = np.cumsum([block.length for block in self.blocks]) if self.blocks else np.zeros(0, int)

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> CandidateTable:
        """Gather single candidates in their order. Neighbours of one variant become one block.

        Raises:
            InvalidRecordError: neighbours of one variant have different parameters, or values of different types.
        """
        blocks: list[Block] = []
        run: list[Candidate] = []

        def close() -> None:
            if not run:
                return
            names = [name for name, _ in run[0].config]
            for candidate in run:
                if [name for name, _ in candidate.config] != names:
                    raise InvalidRecordError(f"{candidate} does not have the parameters of {run[0]}.")
            columns = {name: column_of(name, [c.config[i][1] for c in run]) for i, name in enumerate(names)}
            blocks.append(Block(run[0].variant, columns, len(run)))
            run.clear()

        for candidate in candidates:
            if run and candidate.variant != run[0].variant:
                close()
            run.append(candidate)
        close()
        return cls(blocks)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} candidates")
        row = index % len(self)
        which = int(np.searchsorted(self._ends, row, side="right"))
        return self.blocks[which].at(row - (int(self._ends[which - 1]) if which else 0))

    def __iter__(self) -> Iterator[Candidate]:
        for block in self.blocks:
            for row in range(block.length):
                yield block.at(row)


def column_of(name: str, values: Sequence[ConfigValue]) -> np.ndarray:
    """The values of one parameter as a column from which :meth:`Block.at` gets them back, types included.

    Raises:
        InvalidRecordError: the values are of several types, which an array would make one, or of a type or size that
            a config cannot hold.
    """
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        raise InvalidRecordError(f"The parameter {name!r} has values of several types: {', '.join(kinds)}.")
    column = np.array(values, dtype=None if values else np.int64)
    if column.dtype.kind not in "biU":
        raise InvalidRecordError(
            f"The parameter {name!r} has the values {values!r}; they must be whole numbers of 64 bits, texts or flags."
        )
    return column
