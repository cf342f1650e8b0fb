"""The order of records as rows, and which of several with one id is kept: for millions of rows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernelcast.datasets import segments

if TYPE_CHECKING:
    import pyarrow as pa

#: The order of rows, within a segment and in what a store returns. The id makes it total.
SORT_COLUMNS = ("operation", "device_fingerprint", "problem_id", "candidate_key", "id")

#: What decides which of two records with one id is kept.
REPEAT_COLUMNS = ("id", "created_at", "sample_count", "latency_us")

#: Length of an id, as :func:`kernelcast.datasets.record.record_id` makes it.
_ID_BYTES = 32


def sort_rows(table: pa.Table) -> pa.Table:
    """Rows in the order of :data:`SORT_COLUMNS`."""
    order = row_order(table)
    return table if order is None else table.take(order)


def row_order(table: pa.Table) -> pa.Array | None:
    """Positions of a table's rows in the order of :data:`SORT_COLUMNS`; None where they are in order already.

    The texts that repeat become numbers that sort as they do, and those one number a row: five million rows are sorted
    in a fraction of the time that comparing their texts takes. Segments are sorted runs, which numpy's stable sort merges.
    """
    pa = segments.require_arrow()
    key = np.zeros(table.num_rows, np.int64)
    distinct = 1
    for name in SORT_COLUMNS[:-1]:
        rank, count = _ranks(table.column(name))
        distinct *= max(count, 1)
        if distinct >= 2**63:
            keys = segments.plain(table.select(list(SORT_COLUMNS)))
            return pa.compute.sort_indices(keys, sort_keys=[(name, "ascending") for name in SORT_COLUMNS])
        key *= count
        key += rank
    if len(key) > 1 and (key[1:] > key[:-1]).all():
        return None
    order = np.argsort(key, kind="stable")
    key = key[order]
    same = key[1:] == key[:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if len(tied):
        # One candidate measured in several environments: the ids decide, among these rows alone.
        ids = table.column("id").take(pa.array(order[tied]))
        rows = pa.table({"key": key[tied], "id": ids})
        by_id = pa.compute.sort_indices(rows, sort_keys=[("key", "ascending"), ("id", "ascending")])
        order[tied] = order[tied][by_id.to_numpy()]
    if (order == np.arange(len(order))).all():
        return None
    return pa.array(order)


def _ranks(column: pa.ChunkedArray) -> tuple[np.ndarray, int]:
    """(for each row the place of its text among the column's texts, the number of texts)."""
    pa = segments.require_arrow()
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    encoded = column.unify_dictionaries().combine_chunks()
    order = pa.compute.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank[encoded.indices.to_numpy()], len(order)


def drop_repeats(table: pa.Table) -> pa.Table:
    """One row of each id: the latest by ``created_at``; of equally late ones the one with more samples, then the larger
    latency, so that what is kept does not depend on which file it was read from.
    """
    pa = segments.require_arrow()
    ids = table.column("id")
    if all_distinct(ids):
        return table
    order = pa.compute.sort_indices(
        table.select(list(REPEAT_COLUMNS)),
        sort_keys=[
            ("id", "ascending"),
            ("created_at", "descending"),
            ("sample_count", "descending"),
            ("latency_us", "descending"),
        ],
    )
    names = ids.take(order).combine_chunks()
    first = pa.compute.not_equal(names[1:], names[:-1])
    keep = pa.concat_arrays([pa.array([True]), first])
    # Positions in ascending order: the rows that stay keep their order.
    positions = order.filter(keep)
    return table.take(positions.take(pa.compute.sort_indices(positions)))


def all_distinct(ids: pa.ChunkedArray) -> bool:
    """Whether no id comes twice.

    Each id is folded to 64 bits, which sort ten times as fast as the texts: all different there is all different. Only
    where two agree are the texts compared.
    """
    folded = [_folded(chunk) for chunk in ids.chunks if len(chunk)]
    if all(each is not None for each in folded):
        values = np.sort(np.concatenate([np.zeros(0, np.uint64), *folded]))
        if not (values[1:] == values[:-1]).any():
            return True
    return bool(segments.require_arrow().compute.count_distinct(ids).as_py() == len(ids))


def _folded(ids: pa.Array) -> np.ndarray | None:
    """64 bits of each id: uint64 [ids]; None if one is not 32 characters long."""
    _, offsets, content = ids.buffers()
    ends = np.frombuffer(offsets, np.int32)[ids.offset : ids.offset + len(ids) + 1]
    if not (np.diff(ends) == _ID_BYTES).all():
        return None
    words = np.frombuffer(content, np.uint8)[ends[0] : ends[-1]].reshape(-1, _ID_BYTES).view(np.uint64)
    # Odd multipliers: every bit of every word counts, and equal ids stay equal.
    folded = np.zeros(len(ids), np.uint64)
    for place, factor in enumerate(
        (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
    ):
        folded ^= words[:, place] * np.uint64(factor)
        folded ^= folded >> np.uint64(29)
    return folded
