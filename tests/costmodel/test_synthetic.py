"""Problems that nobody measured: what they are drawn from, and where none are."""

from __future__ import annotations

import numpy as np
import pytest

from kernelcast import kernels
from kernelcast.costmodel import ProblemData
from kernelcast.costmodel.model import schema_of
from kernelcast.costmodel.synthetic import LEAST_PROBLEMS, synthetic_rows
from kernelcast.featurizer import Featurizer
from kernelcast.kernels import Candidate, CandidateTable
from kernelcast.kernels.devices import device

A100 = device("a100-sxm4-80gb")
TILE = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_stages": 3, "num_warps": 4}
TABLE = CandidateTable.of([Candidate("vendor"), Candidate.of("triton_tiled", TILE)])


def measured(count, operation="gemm", **more):
    problems = [
        kernels.problem(operation, m=64 + number, n=128, k=64, dtype="float16", lda=256, **more)
        for number in range(count)
    ]
    return [ProblemData(each, A100, TABLE, np.zeros(2), np.full(2, np.nan)) for each in problems]


def test_three_problems_are_drawn_for_each_that_was_measured():
    data = measured(LEAST_PROBLEMS)
    featurizer = Featurizer(schema_of(data))
    X, groups = synthetic_rows(data, featurizer, seed=0)
    assert groups.tolist() == np.repeat(np.arange(3 * LEAST_PROBLEMS), 2).tolist()
    assert X.shape == (len(groups), len(featurizer.names))
    x = dict(zip(featurizer.names, X.T, strict=True))
    assert x["variant_vendor"].tolist() == [1.0, 0.0] * (3 * LEAST_PROBLEMS)
    # Much wider than what was measured, in size and in shape.
    assert np.ptp(x["needed_flops"]) > 15
    assert np.ptp(x["tall"]) > 15
    assert len(np.unique(x["row_alignment_a"])) > 4
    assert np.isfinite(x["tile_estimate"][1::2]).all()
    again, _ = synthetic_rows(measured(LEAST_PROBLEMS), featurizer, seed=0)
    np.testing.assert_array_equal(again, X)
    other, _ = synthetic_rows(data, featurizer, seed=1)
    assert not np.array_equal(other, X, equal_nan=True)


def test_too_few_problems_and_sizes_that_are_bound_draw_none():
    few = measured(LEAST_PROBLEMS - 1)
    assert synthetic_rows(few, Featurizer(schema_of(few)), 0) is None
    softmax = kernels.problem("softmax", rows=8, columns=8)
    table = CandidateTable.of([Candidate("vendor"), Candidate.of("triton_rows", {"num_warps": 4})])
    rows = [ProblemData(softmax, A100, table, np.zeros(2), np.full(2, np.nan))] * LEAST_PROBLEMS
    assert synthetic_rows(rows, Featurizer(schema_of(rows)), 0) is None


@pytest.mark.parametrize(
    ("candidates", "spares"),
    [
        (["vendor", "triton_tiled"], True),
        (["triton_tiled"], True),
        (["vendor"], False),  # nothing says more of a library
        (["vendor", "triton_tiled", "gemv"], True),  # closed too
    ],
)
def test_the_general_columns_are_spared_where_tiles_say_more(candidates, spares):
    from kernelcast.featurizer.extra import spared

    table = CandidateTable.of(
        Candidate.of(name, TILE if name == "triton_tiled" else {}) for name in candidates
    )
    described = kernels.problem("gemm", m=64, n=128, k=64, dtype="float16")
    data = [ProblemData(described, A100, table, np.zeros(len(table)), np.full(len(table), np.nan))]
    featurizer = Featurizer(schema_of(data))
    found = [featurizer.names[at] for at in spared(featurizer.names, featurizer(described, table, A100))]
    assert ("roofline_us" in found) == spares
    assert not {"needed_flops", "tile_estimate", "row_alignment"} & set(found)
    assert spared(["log2_m"], np.zeros((3, 1))) == []
