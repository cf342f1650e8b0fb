"""Where the candidates of a space lie: coordinates that a search measures distances in.

A parameter is a coordinate of its logarithm, as a step from 1 to 2 changes a kernel more than one from 31 to 32. Values
that are not all powers of two have two more: how often 2 divides them, and whether they are a power of two, on which
alignment, bank conflicts and divisions by shifts depend. Words and flags have a coordinate a value, and so, with less weight, have numbers of
few values: a kernel may like one tile size alone. Other numbers of a candidate (features) are coordinates by their rank. What does not apply, such as another variant's parameter, lies in
the middle, so that it brings no two candidates together or apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Block, CandidateTable

#: A coordinate that separates candidates by a word counts as much as one step over the whole range of a number.
_WORD = 1.0 / np.sqrt(2.0)

#: Numbers of so few values have an axis for each besides, of this weight.
_FEW_LEVELS, _LEVEL = 6, 0.5

#: Axes with less standard deviation than this tell nothing apart.
_LEAST_SPREAD = 1e-9

#: So many different values make a number's alignment worth a coordinate: with fewer its levels say the same.
_LEAST_LEVELS = 5


def coordinates(table: CandidateTable, features: np.ndarray | None = None) -> np.ndarray:
    """Where candidates lie: float64 [candidates, axes], each axis with standard deviation 1 over the table.

    Args:
        table: the candidates.
        features: further numbers of each, [candidates, features]; NaN is a missing one.

    Raises:
        InvalidRecordError: the features do not have a row a candidate.
    """
    columns = list(_parameter_axes(table))
    if features is not None:
        features = np.asarray(features, dtype=np.float64)
        if features.ndim != 2 or len(features) != len(table):
            raise InvalidRecordError(
                f"The features have the shape {features.shape}; they must have one row for each of the {len(table)} candidates."
            )
        columns += [_ranked(column) for column in features.T]
    whole = len(columns)
    columns += list(_level_axes(table))
    if not columns:
        return np.zeros((len(table), 0))
    stacked = np.stack(columns, axis=1)
    spread = stacked.std(axis=0)
    _, first = np.unique(stacked.round(9), axis=1, return_index=True)
    kept = np.sort(first[spread[first] > _LEAST_SPREAD])
    return stacked[:, kept] / spread[kept] * np.where(kept < whole, 1.0, _LEVEL)


def levels(table: CandidateTable) -> np.ndarray:
    """The number of each parameter's value, int32 [candidates, parameters], the variant as the first; -1 where there is none.

    Two candidates that differ in one column are neighbours.
    """
    names = sorted({name for block in table.blocks for name in block.columns})
    found = np.full((len(table), len(names) + 1), -1, dtype=np.int32)
    variants = {name: number for number, name in enumerate(sorted({b.variant for b in table.blocks}))}
    for rows, block in _slices(table):
        found[rows, 0] = variants[block.variant]
    for place, name in enumerate(names, 1):
        held, values = _values(table, name)
        _, found[held, place] = np.unique(values, return_inverse=True)
    return found


def _parameter_axes(table: CandidateTable) -> Iterator[np.ndarray]:
    count = len(table)
    variants = sorted({block.variant for block in table.blocks})
    if len(variants) > 1:
        for name in variants:
            axis = np.zeros(count)
            for rows, block in _slices(table):
                if block.variant == name:
                    axis[rows] = _WORD
            yield axis
    for name in sorted({name for block in table.blocks for name in block.columns}):
        held, values = _values(table, name)
        for column in _axes_of(values):
            axis = np.full(count, 0.5 * (column.min() + column.max()))
            axis[held] = column
            yield axis


def _level_axes(table: CandidateTable) -> Iterator[np.ndarray]:
    """An axis for each value of the numbers that have few."""
    for name in sorted({name for block in table.blocks for name in block.columns}):
        rows, values = _values(table, name)
        unique = np.unique(values)
        if values.dtype.kind != "U" and 2 < len(unique) <= _FEW_LEVELS:
            for value in unique:
                axis = np.zeros(len(table))
                axis[rows] = values == value
                yield axis


def _axes_of(values: np.ndarray) -> Iterator[np.ndarray]:
    """The axes of one parameter, each within 0 and 1."""
    unique = np.unique(values)
    if len(unique) < 2:
        return
    if values.dtype.kind == "U":
        for word in unique:
            yield _WORD * (values == word)
        return
    numbers = values.astype(np.float64)
    least = numbers.min()
    if least < 0:
        yield np.searchsorted(unique, values) / (len(unique) - 1)
        return
    logs = np.log2(numbers) if least > 0 else np.log2(1.0 + numbers)
    yield _scaled(logs)
    if least > 0 and len(unique) >= _LEAST_LEVELS:
        whole = values.astype(np.int64)
        twos = np.log2((whole & -whole).astype(np.float64))
        odd = logs - twos > 1e-9
        if odd.any():
            yield _scaled(twos)
            yield odd.astype(np.float64)


def _scaled(values: np.ndarray) -> np.ndarray:
    spread = float(np.ptp(values))
    return (values - values.min()) / spread if spread else np.zeros(len(values))


def _ranked(column: np.ndarray) -> np.ndarray:
    """Ranks of numbers within 0 and 1, equal numbers alike; missing ones in the middle."""
    known = np.isfinite(column)
    found = np.full(len(column), 0.5)
    if known.any():
        unique, place = np.unique(column[known], return_inverse=True)
        found[known] = place / max(len(unique) - 1, 1)
    return found


def _slices(table: CandidateTable) -> Iterator[tuple[slice, Block]]:
    start = 0
    for block in table.blocks:
        yield slice(start, start + block.length), block
        start += block.length


def _values(table: CandidateTable, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(the rows that have a parameter, its values; as texts where blocks have several types of it)."""
    rows, parts = [], []
    for where, block in _slices(table):
        if name in block.columns:
            rows.append(np.arange(where.start, where.stop))
            parts.append(block.columns[name])
    kinds = {part.dtype.kind for part in parts}
    if len(kinds) > 1:
        parts = [part.astype(str) for part in parts]
    return np.concatenate(rows), np.concatenate(parts)
