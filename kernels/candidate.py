"""Candidates: a variant with its config. One is an object; many travel as columns."""

from __future__ import annotations

import itertools
import json
import operator
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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

#: Answers that kept columns remember at a time, their bytes together, and those of the largest.
_MOST_REMEMBERED = 64
_MOST_BYTES = 2**23
_LARGEST_BYTES = 2**22


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
        at = np.flatnonzero(rows) if rows.dtype == bool else rows
        if isinstance(self.columns, KeptColumns):
            return _unchecked(self.variant, self.columns.take(at), len(at))
        return _unchecked(self.variant, {name: column[at] for name, column in self.columns.items()}, len(at))

    def keep(self) -> Block:
        """The same candidates, to be asked about again and again: see :func:`remembered`. No column can be written to."""
        for column in self.columns.values():
            column.setflags(write=False)
        return _unchecked(self.variant, KeptColumns(self.columns), self.length)


def _unchecked(variant: str, columns: dict[str, np.ndarray], length: int) -> Block:
    """A block of columns that come from a block, so that there is nothing to check again."""
    block = object.__new__(Block)
    object.__setattr__(block, "variant", variant)
    object.__setattr__(block, "columns", columns)
    object.__setattr__(block, "length", length)
    return block


class KeptColumns(dict[str, np.ndarray]):
    """Columns that outlive a problem, or some rows of them; :func:`remembered` keeps answers with them.

    Attributes:
        memo: the answers, by key, or None of one that is too large to keep; of columns that are some rows of others, those
            of the others.
        memo_bytes: of the answers, if these are whole.
        whole: the columns that these are rows of; None where they are whole.
        rows: which rows of them.
    """

    __slots__ = ("memo", "memo_bytes", "rows", "whole")

    def __init__(
        self, columns: Columns, whole: KeptColumns | None = None, rows: np.ndarray | None = None
    ) -> None:
        super().__init__(columns)
        self.whole = whole
        self.rows = rows
        self.memo: dict[Hashable, np.ndarray | None] = {} if whole is None else whole.memo
        self.memo_bytes = 0

    def take(self, rows: np.ndarray) -> KeptColumns:
        """The given rows (integer indices)."""
        whole, at = self, rows
        if self.whole is not None and self.rows is not None:
            whole, at = self.whole, self.rows.take(rows)
        return KeptColumns({name: column.take(at) for name, column in whole.items()}, whole, at)

    def remember(self, key: Hashable, answer: np.ndarray) -> None:
        """Keep an answer with whole columns; all others are forgotten where there would be too many."""
        kept = answer if answer.nbytes <= _LARGEST_BYTES else None
        size = 0 if kept is None else kept.nbytes
        if len(self.memo) >= _MOST_REMEMBERED or self.memo_bytes + size > _MOST_BYTES:
            self.memo.clear()
            self.memo_bytes = 0
        self.memo[key] = kept
        self.memo_bytes += size

    def __reduce__(self) -> tuple[Any, ...]:
        # Answers are for this process: a copy elsewhere starts without them.
        return dict, (dict(self),)


def remembered(columns: Columns, key: Hashable, compute: Callable[[Columns], np.ndarray]) -> np.ndarray:
    """``compute(columns)``, from memory where the columns are kept (:meth:`Block.keep`) or some rows of such.

    Args:
        columns: of the candidates.
        key: names everything but the columns that ``compute`` looks at.
        compute: columns -> array [..., rows] whose values each depend on their own row alone. It is called with all rows
            of kept columns, so that its answer serves every choice of rows.

    Returns:
        The answer for these columns; not to be written to.
    """
    if not isinstance(columns, KeptColumns):
        return compute(columns)
    answer = columns.memo.get(key)
    if answer is None:
        if key in columns.memo:
            return compute(columns)
        whole = columns if columns.whole is None else columns.whole
        answer = np.asarray(compute(whole))
        answer.setflags(write=False)
        whole.remember(key, answer)
    return answer if columns.rows is None else answer.take(columns.rows, axis=-1)


class CandidateTable(Sequence[Candidate]):
    """Many candidates, as one block of columns a variant. Row numbers run through the blocks in order."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks: tuple[Block, ...] = tuple(block for block in blocks if block.length)
        self._ends = list(itertools.accumulate(block.length for block in self.blocks))

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
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} candidates")
        row = index % len(self)
        which = bisect_right(self._ends, row)
        return self.blocks[which].at(row - (self._ends[which - 1] if which else 0))

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
