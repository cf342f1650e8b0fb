"""Problems that nobody measured, for the student to learn what its teachers say of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kernelcast.featurizer import Featurizer
from kernelcast.kernels import CandidateTable, Problem

if TYPE_CHECKING:
    from kernelcast.costmodel.model import ProblemData

#: Operations whose sizes may be any three numbers.
_FREE_SIZES = frozenset({"gemm", "mixed_gemm"})
#: With fewer measured problems the teachers know too little to be asked beyond them.
LEAST_PROBLEMS = 100
#: Synthetic problems for each measured one, and the most.
_SHARE, _MOST = 3.0, 10000
#: log2 of the sizes: of the two that are channels, and of the one that is tokens, pixels or a batch of them.
_CHANNELS, _LONG = (2.0, 13.0), (4.0, 21.0)
#: Shares of the sizes that are multiples of 1, 2, 4, ... and no more.
_MULTIPLES = (0.06, 0.06, 0.08, 0.2, 0.15, 0.15, 0.15, 0.15)


def synthetic_rows(
    data: Sequence[ProblemData], featurizer: Featurizer, seed: int, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Features of candidates of drawn problems: (float32 [rows, features], number of the problem [rows]).

    Networks have products of two channel sizes and one long one, at any of the three places; so do these. What is no size
    (dtype, layout, device) and the candidates are those of measured problems at random, each as likely as its weight says. None where there are too few
    measured problems, or the operation's sizes are not free.
    """
    if len(data) < LEAST_PROBLEMS or data[0].problem.operation not in _FREE_SIZES:
        return None
    count = int(min(_SHARE * len(data), _MOST))
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.uniform(*_CHANNELS, (count, 3))
    sizes[np.arange(count), rng.integers(0, 3, count)] = 2.0 ** rng.uniform(*_LONG, count)
    multiple = 2.0 ** rng.choice(len(_MULTIPLES), (count, 3), p=_MULTIPLES)
    multiple = np.minimum(multiple, 2.0 ** np.floor(np.log2(sizes)))
    sizes = np.maximum(np.round(sizes / multiple), 1.0) * multiple
    share = None if weights is None else np.asarray(weights) / np.sum(weights)
    chosen = rng.integers(0, len(data), count) if share is None else rng.choice(len(data), count, p=share)
    blocks, groups = [], []
    kept: dict[int, CandidateTable] = {}
    for number, (place, dims) in enumerate(
        zip(chosen.tolist(), sizes.astype(np.int64).tolist(), strict=True)
    ):
        item = data[place]
        if place not in kept:
            kept[place] = CandidateTable(block.keep() for block in item.table.blocks)
        blocks.append(featurizer(_resized(item.problem, dims), kept[place], item.device))
        groups.append(np.full(len(item.table), number))
    return np.concatenate(blocks), np.concatenate(groups)


def _resized(problem: Problem, sizes: Sequence[int]) -> Problem:
    """The same problem of other sizes, its rows adjacent in memory."""
    names = [name for name, _ in problem.dims]
    options = tuple((name, 0 if name in ("lda", "ldb") else value) for name, value in problem.options)
    return dataclasses.replace(
        problem, dims=tuple(zip(names, (int(size) for size in sizes), strict=True)), options=options
    )
