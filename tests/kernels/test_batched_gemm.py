"""batched_gemm: its schema, inputs, reference and tolerance, and the variants that are composed of torch calls."""

from __future__ import annotations

import numpy as np
import pytest
from cases import for_each
from triton_lab import CPU, DEVICES, refused_by, work_of

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Candidate, CandidateTable, candidates, memory, operation, problem, variant
from kernelcast.kernels.ops.batched_gemm.schema import batch_strides, copies

GPU = DEVICES["sm80"]
OP = operation("batched_gemm")


def batched(batch=3, m=4, n=5, k=6, **values):
    return problem("batched_gemm", batch=batch, m=m, n=n, k=k, **values)


# Schema and inputs


@pytest.mark.parametrize(
    ("layout", "lda", "ldb"),
    [("nn", 7, 5), ("nt", 7, 7), ("tn", 3, 5), ("tt", 3, 7)],
)
def test_one_memory_layout_is_one_problem(layout, lda, ldb):
    plain = batched(2, 3, 5, 7, layout=layout)
    assert batched(2, 3, 5, 7, layout=layout, lda=lda, ldb=ldb) == plain
    assert batched(2, 3, 5, 7, layout=layout, lda=lda + 1)["lda"] == lda + 1
    for name, least in (("lda", lda), ("ldb", ldb)):
        with pytest.raises(
            InvalidProblemError, match=f"batched_gemm: {name} is {least - 1}, but {least} elem"
        ):
            batched(2, 3, 5, 7, layout=layout, **{name: least - 1})


@pytest.mark.parametrize("broadcast", ["a", "b"])
def test_a_batch_of_one_broadcasts_nothing(broadcast):
    assert batched(1, broadcast=broadcast) == batched(1)
    assert batched(0, broadcast=broadcast) == batched(0)
    assert batched(2, broadcast=broadcast)["broadcast"] == broadcast
    assert batched(1, broadcast=broadcast, layout="nt", ldb=9)["ldb"] == 9


def test_a_broadcast_is_of_one_operand():
    with pytest.raises(InvalidProblemError, match="none, a, b"):
        batched(broadcast="both")


@pytest.mark.parametrize(
    ("values", "strides_a", "strides_b"),
    [
        ({}, (24, 6, 1), (30, 5, 1)),
        ({"layout": "nt"}, (24, 6, 1), (30, 1, 6)),
        ({"layout": "tn", "lda": 9}, (54, 1, 9), (30, 5, 1)),
        ({"layout": "tt", "ldb": 8}, (24, 1, 4), (40, 1, 8)),
        ({"broadcast": "a"}, (0, 6, 1), (30, 5, 1)),
        ({"broadcast": "b", "layout": "tt", "lda": 9}, (54, 1, 9), (0, 1, 6)),
    ],
    ids=str,
)
def test_inputs_have_the_strides_of_the_problem(values, strides_a, strides_b):
    described = batched(**values)
    a, b = OP.make_inputs(described, seed=0, device="cpu")
    assert (tuple(a.shape), a.stride()) == ((3, 4, 6), strides_a)
    assert (tuple(b.shape), b.stride()) == ((3, 6, 5), strides_b)
    assert batch_strides(described) == (strides_a[0], strides_b[0])
    assert copies(described) == (1 if strides_a[0] == 0 else 3, 1 if strides_b[0] == 0 else 3)


def test_inputs_are_standard_normal_and_follow_the_seed():
    import torch

    described = batched(8, 60, 70, 90, dtype="bfloat16")
    a, b = OP.make_inputs(described, seed=7, device="cpu")
    again = OP.make_inputs(described, seed=7, device="cpu")
    other = OP.make_inputs(described, seed=8, device="cpu")
    assert a.dtype == b.dtype == torch.bfloat16
    assert all(torch.equal(x, y) for x, y in zip((a, b), again, strict=True))
    assert not torch.equal(a, other[0])
    assert not torch.equal(a[0], a[1])
    for values in (a.float(), b.float()):
        assert abs(values.mean().item()) < 0.03
        assert abs(values.std().item() - 1.0) < 0.03


@pytest.mark.parametrize("values", [{}, {"layout": "tt", "broadcast": "b"}, {"broadcast": "a"}], ids=str)
def test_the_reference_is_the_definition(values):
    described = batched(2, 3, 4, 5, **values)
    a, b = OP.make_inputs(described, seed=1, device="cpu")
    found = OP.reference(described, a, b)
    wanted = [
        [[sum(float(a[i, r, x]) * float(b[i, x, c]) for x in range(5)) for c in range(4)] for r in range(3)]
        for i in range(2)
    ]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-14)
    assert found.numpy().dtype == np.float64


def test_flops_and_compulsory_traffic():
    assert OP.flops(batched(10, 64, 32, 100)) == 2 * 10 * 64 * 32 * 100
    each = 64 * 100, 100 * 32, 64 * 32
    assert OP.traffic_bytes(batched(10, 64, 32, 100, dtype="float16")) == 2 * 10 * sum(each)
    assert OP.traffic_bytes(batched(10, 64, 32, 100, broadcast="a")) == 4 * (
        each[0] + 10 * each[1] + 10 * each[2]
    )
    assert OP.traffic_bytes(batched(10, 64, 32, 100, broadcast="b")) == 4 * (
        10 * each[0] + each[1] + 10 * each[2]
    )


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each("k", [1, 64, 2048])
def test_the_tolerance_passes_torch_and_fails_a_lost_term(dtype, k):
    described = batched(3, 24, 20, k, dtype=dtype)
    a, b = OP.make_inputs(described, seed=2, device="cpu")
    reference = OP.reference(described, a, b)
    assert OP.check(described, reference, a @ b) is None
    lost = (a[:, :, 1:].double() @ b[:, 1:].double()).to(a.dtype)
    assert "elements differ" in str(OP.check(described, reference, lost))
    assert "elements differ" in str(OP.check(described, reference, (a @ b).roll(1, 0)))


# Results


def check_all(described):
    """Run every legal candidate that needs no GPU into poisoned outputs. Returns the variants that were."""
    import torch

    inputs = OP.make_inputs(described, seed=3, device="cpu")
    originals = [tensor.clone() for tensor in inputs]
    reference = OP.reference(described, *inputs)
    table = candidates(described, CPU, backends=["vendor", "torch"])
    for candidate in table:
        launch = variant("batched_gemm", candidate.variant).build(described, candidate.parameters)
        with memory.poisoned():
            output = launch(*inputs)
        assert OP.check(described, reference, output) is None, candidate
        assert output.is_contiguous(), candidate
        assert all(torch.equal(*pair) for pair in zip(inputs, originals, strict=True)), candidate
    return {candidate.variant for candidate in table}


SHAPES = [(1, 1, 1, 1), (5, 1, 7, 9), (4, 9, 1, 7), (9, 6, 5, 128), (33, 3, 2, 1), (1, 17, 19, 23)]
EMPTY = [(0, 4, 5, 6), (3, 0, 5, 6), (3, 4, 0, 6), (3, 4, 5, 0), (0, 0, 0, 0)]


SLOW = pytest.param("bfloat16", marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", ["float32", "float16", SLOW])
@for_each("shape", SHAPES + EMPTY)
def test_every_candidate_is_right(shape, dtype):
    for broadcast in ("none", "a", "b"):
        found = check_all(batched(*shape, dtype=dtype, broadcast=broadcast, threads=2))
        assert {"vendor", "per_item"} <= found


@pytest.mark.parametrize("dtype", ["float32", SLOW])
@for_each("layout", ["nn", "nt", "tn", "tt"])
@for_each("leading", [{}, {"lda": 140, "ldb": 141}])
@for_each("broadcast", ["none", "a", "b"])
def test_every_candidate_is_right_in_every_layout(broadcast, leading, layout, dtype):
    for shape in ((6, 8, 10, 128), (4, 1, 10, 128), (4, 8, 1, 128)):
        found = check_all(
            batched(*shape, dtype=dtype, layout=layout, broadcast=broadcast, threads=2, **leading)
        )
        assert ("split_k" in found) == (dtype == "float32")
        rows = layout[0] == "n" or (shape[1] == 1 and not leading)
        assert ("folded" in found) == (broadcast == "b" and rows)


def test_the_folded_rows_are_not_copied(monkeypatch):
    import torch

    seen = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append(a.data_ptr()) or mm(a, b))
    for values in ({}, {"lda": 9}, {"m": 1}, {"m": 1, "layout": "tn"}):
        described = batched(broadcast="b", **values)
        a, b = OP.make_inputs(described, seed=0, device="cpu")
        variant("batched_gemm", "folded").build(described, {})(a, b)
        assert seen.pop() == a.data_ptr()


# Rules and work


def legal(name, device=CPU, **values):
    found = variant("batched_gemm", name)
    described = batched(**values)
    block = found.space()
    return [c.parameters for c in CandidateTable([block.take(found.legal(described, device, block))])]


@for_each(
    ("candidate", "values", "device", "rule", "seen"),
    [
        (Candidate("per_item"), {"batch": 513}, CPU, "calls-bounded", "batch=513"),
        (Candidate("folded"), {}, CPU, "b-broadcast", "broadcast=none, batch=3"),
        (Candidate("folded"), {"broadcast": "a"}, CPU, "b-broadcast", "broadcast=a"),
        (
            Candidate("folded"),
            {"broadcast": "b", "layout": "tn"},
            CPU,
            "rows-at-one-distance",
            "layout=tn, m=4",
        ),
        (
            Candidate("folded"),
            {"broadcast": "b", "layout": "tn", "m": 1, "lda": 3},
            CPU,
            "rows-at-one-distance",
            "lda=3",
        ),
        (Candidate.of("chunked", {"chunks": 2}), {"batch": 8}, GPU, "cpu", "a100 is a gpu"),
        (
            Candidate.of("chunked", {"chunks": 4}),
            {"batch": 7},
            CPU,
            "chunks-of-several",
            "batch=7 in 4 chunks",
        ),
        (Candidate.of("split_k", {"split": 2}), {"batch": 17, "k": 128}, GPU, "few-products", "batch=17"),
        (Candidate.of("split_k", {"split": 2}), {"k": 128, "dtype": "float16"}, GPU, "float32", "float16"),
        (Candidate.of("split_k", {"split": 4}), {"k": 258}, GPU, "split-divides-k", "k=258, split=4"),
        (Candidate.of("split_k", {"split": 4}), {"k": 128}, GPU, "slices-long-enough", "32 < 64"),
        (
            Candidate.of("split_k", {"split": 2}),
            {"batch": 16, "m": 4096, "n": 4096, "k": 128},
            GPU,
            "parts-fit",
            f"{2**31} bytes",
        ),
    ],
)
def test_refusals_say_what_was_seen(candidate, values, device, rule, seen):
    found = refused_by(candidate, batched(**values), device)
    assert found[0] == rule
    assert seen in found[1]


def test_legal_next_to_the_limits():
    assert legal("per_item", batch=512) == legal("folded", batch=1) == [{}]
    assert legal("folded", broadcast="b", layout="nt", lda=9) == [{}]
    assert legal("folded", broadcast="b", layout="tn", m=1) == [{}]
    assert legal("chunked", batch=8) == [{"chunks": 2}, {"chunks": 4}]
    assert legal("chunked", batch=3) == []
    assert legal("split_k", GPU, batch=16, k=256) == [{"split": 2}, {"split": 4}]
    assert legal("split_k", GPU, batch=16, m=2048, n=4096, k=128) == [{"split": 2}]


def test_work():
    described = batched(8, 16, 32, 256)
    flops, traffic = OP.flops(described), OP.traffic_bytes(described)
    for name in ("vendor", "per_item", "folded"):
        work = work_of(Candidate(name), described, CPU)
        assert (work["flops"], work["traffic_bytes"], work["scratch_bytes"]) == (flops, traffic, 0)
        assert work["calls"] == (8 if name == "per_item" else 1)
    chunks = work_of(Candidate.of("chunked", {"chunks": 4}), described, CPU)
    assert (chunks["flops"], chunks["calls"]) == (flops, 4)
    split = work_of(Candidate.of("split_k", {"split": 4}), described, CPU)
    assert split["flops"] == flops + 4 * 8 * 16 * 32
    assert split["scratch_bytes"] == 4 * 4 * 8 * 16 * 32
    assert (split["calls"], split["inner_steps"]) == (9, 64)
