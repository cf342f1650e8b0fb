"""The gemm variants that are composed of torch calls: rules, work, and results."""

from __future__ import annotations

import numpy as np
import pytest
from cases import for_each

from kernelcast.kernels import CandidateTable, Device, candidates, memory, operation, problem, variant

CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)
GPU = Device("a100", "gpu", "nvidia", "sm80", 108, shared_bytes_per_block=166_912)

SHAPES = [(1, 1, 1), (1, 67, 33), (67, 1, 33), (5, 70, 40), (37, 41, 43), (64, 64, 256), (130, 33, 65)]
EMPTY = [(0, 5, 7), (5, 0, 7), (5, 7, 0), (40, 40, 0)]


def check_all(described):
    """Run every legal candidate of a CPU problem that needs no GPU, into poisoned outputs. Returns how many."""
    gemm = operation("gemm")
    inputs = gemm.make_inputs(described, seed=3, device="cpu")
    originals = [tensor.clone() for tensor in inputs]
    reference = gemm.reference(described, *inputs)
    table = candidates(described, CPU, backends=["vendor", "torch"])
    for candidate in table:
        launch = variant("gemm", candidate.variant).build(described, candidate.parameters)
        with memory.poisoned():
            output = launch(*inputs)
        assert gemm.check(described, reference, output) is None, candidate
        assert output.is_contiguous(), candidate
        assert all((now == before).all() for now, before in zip(inputs, originals, strict=True)), candidate
    return len(table)


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each("shape", SHAPES + EMPTY)
def test_every_candidate_is_right(shape, dtype):
    m, n, k = shape
    assert check_all(problem("gemm", m=m, n=n, k=k, dtype=dtype, threads=2)) >= 4


@for_each("dtype", ["float32", "bfloat16"])
@for_each("layout", ["nn", "nt", "tn", "tt"])
@for_each("leading", [{}, {"lda": 80, "ldb": 81}])
@for_each("shape", [(48, 40, 64), (1, 40, 64), (6, 40, 64), (48, 1, 64)])
def test_every_candidate_is_right_in_every_layout(shape, layout, leading, dtype):
    m, n, k = shape
    check_all(problem("gemm", m=m, n=n, k=k, dtype=dtype, layout=layout, threads=2, **leading))


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each(("m", "n", "k"), [(512, 512, 512), (32, 4096, 1024), (4096, 64, 64)])
def test_ten_candidates_on_a_cpu(m, n, k, dtype):
    assert len(candidates(problem("gemm", m=m, n=n, k=k, dtype=dtype, threads=2), CPU)) >= 10


def legal(name, **values):
    found = variant("gemm", name)
    described = problem("gemm", **values)
    block = found.space()
    return [c.parameters for c in CandidateTable([block.take(found.legal(described, CPU, block))])]


def test_chunks_hold_four_rows_or_columns():
    assert legal("row_chunked", m=16, n=100, k=100) == [{"chunks": 2}, {"chunks": 4}]
    assert legal("column_chunked", m=100, n=31, k=100) == [{"chunks": 2}, {"chunks": 4}]
    assert legal("row_chunked", m=7, n=100, k=100) == []


def test_gemv_takes_one_column_or_few_rows():
    assert legal("gemv", m=8, n=100, k=100) == legal("gemv", m=100, n=1, k=100) == [{}]
    assert legal("gemv", m=9, n=2, k=100) == []


def test_onednn_takes_float32_that_is_not_empty():
    assert legal("onednn", m=9, n=2, k=1) == [{}]
    assert legal("onednn", m=9, n=2, k=0) == legal("onednn", m=9, n=2, k=4, dtype="bfloat16") == []


@for_each(
    ("values", "copied"),
    [
        ({"layout": "nn"}, []),
        ({"layout": "tn"}, ["a"]),
        ({"layout": "nt"}, ["b"]),
        ({"layout": "tt"}, ["a", "b", "both"]),
        ({"lda": 11}, ["a"]),
        # One row is dense whatever the distance to the next would be.
        ({"lda": 11, "m": 1}, []),
        ({"layout": "nt", "n": 1}, []),
        ({"layout": "nt", "n": 1, "ldb": 9}, []),
        ({"layout": "tn", "m": 1, "lda": 9}, ["a"]),
    ],
)
def test_copies_of_operands_that_are_not_dense(values, copied):
    assert [c["copied"] for c in legal("contiguous_operands", **{"m": 5, "n": 6, "k": 7, **values})] == copied


@for_each("layout", ["nn", "nt", "tn", "tt"])
@for_each("shape", [(1, 6, 7), (5, 1, 7), (5, 6, 1), (1, 1, 1), (5, 6, 7)])
@for_each("leading", [{}, {"lda": 9, "ldb": 10}])
def test_copies_agree_with_torch(layout, shape, leading):
    """What the rule calls dense is what torch would not copy."""
    m, n, k = shape
    values = {"m": m, "n": n, "k": k, "layout": layout, **leading}
    a, b = operation("gemm").make_inputs(problem("gemm", **values), seed=0, device="cpu")
    copied = {c["copied"] for c in legal("contiguous_operands", **values)}
    assert ("a" in copied, "b" in copied) == (not a.is_contiguous(), not b.is_contiguous())


@pytest.mark.parametrize("name", ["row_chunked", "column_chunked", "linear", "onednn"])
def test_cpu_variants_are_refused_on_gpus(name):
    found = variant("gemm", name)
    block = found.space()
    reasons = found.refusals(problem("gemm", m=64, n=64, k=64), GPU, block)
    assert {reason.rule for reason in reasons} == {"cpu"}
    assert len(reasons) == block.length


def test_work_counts_what_is_read_again():
    described = problem("gemm", m=40, n=80, k=10)
    once = 4 * (40 * 10 + 10 * 80 + 40 * 80)
    chunks = {"chunks": np.array([2, 8])}
    rows = variant("gemm", "row_chunked").work(described, chunks, CPU)
    assert rows.traffic_bytes.tolist() == [once + 4 * 800, once + 7 * 4 * 800]
    assert rows.calls.tolist() == [2, 8]
    columns = variant("gemm", "column_chunked").work(described, chunks, CPU)
    assert columns.traffic_bytes.tolist() == [once + 4 * 400, once + 7 * 4 * 400]
    copies = variant("gemm", "contiguous_operands").work(
        described, {"copied": np.array(["a", "b", "both"])}, CPU
    )
    assert copies.scratch_bytes.tolist() == [4 * 400, 4 * 800, 4 * 1200]
    assert copies.calls.tolist() == [2, 2, 3]
    few = problem("gemm", m=3, n=80, k=10)
    vectors = variant("gemm", "gemv").work(few, {}, CPU)
    assert (vectors.calls, vectors.traffic_bytes) == (3.0, 4 * (30 + 3 * 800 + 240))
