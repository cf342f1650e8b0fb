"""gemm: its schema, inputs, reference and tolerance, and the work of the variants beside the Triton ones."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from cases import for_each

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Device, candidates, operation, problem, refusals, variant, variants
from kernelcast.kernels.devices import device
from kernelcast.kernels.ops.gemm.schema import operand_dims
from kernelcast.kernels.registry import require_legal

CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)
A100 = device("a100")
GEMM = operation("gemm")


def gemm(m, n, k, **values):
    return problem("gemm", m=m, n=n, k=k, **values)


def test_the_schema_demands_all_three_sizes():
    for missing in "mnk":
        sizes = {name: 4 for name in "mnk" if name != missing}
        with pytest.raises(
            InvalidProblemError, match=rf"needs the dimension '{missing}' .* It needs: m, n, k\."
        ):
            problem("gemm", **sizes)
    with pytest.raises(InvalidProblemError, match="float32, float16, bfloat16"):
        gemm(1, 1, 1, dtype="float64")


@pytest.mark.parametrize(
    ("layout", "lda", "ldb"),
    [("nn", 7, 5), ("nt", 7, 7), ("tn", 3, 5), ("tt", 3, 7)],
)
def test_one_memory_layout_is_one_problem(layout, lda, ldb):
    plain = gemm(3, 5, 7, layout=layout)
    assert gemm(3, 5, 7, layout=layout, lda=lda, ldb=ldb) == plain
    assert gemm(3, 5, 7, layout=layout, lda=lda + 1) != plain
    assert gemm(3, 5, 7, layout=layout, lda=lda + 1)["lda"] == lda + 1
    for name, least in (("lda", lda), ("ldb", ldb)):
        with pytest.raises(InvalidProblemError, match=f"{name} is {least - 1}, but {least} elements"):
            gemm(3, 5, 7, layout=layout, **{name: least - 1})


def test_the_leading_dimension_of_a_single_row_does_not_count():
    assert gemm(1, 5, 7, lda=4096) == gemm(1, 5, 7)
    assert gemm(5, 1, 7, layout="nt", ldb=4096) == gemm(5, 1, 7, layout="nt")
    assert gemm(5, 1, 7, ldb=4096) != gemm(5, 1, 7)


@pytest.mark.parametrize(
    ("values", "strides_a", "strides_b"),
    [
        ({}, (7, 1), (5, 1)),
        ({"layout": "nt"}, (7, 1), (1, 7)),
        ({"layout": "tn"}, (1, 3), (5, 1)),
        ({"layout": "tt", "lda": 10, "ldb": 11}, (1, 10), (1, 11)),
        ({"lda": 10, "ldb": 11}, (10, 1), (11, 1)),
    ],
    ids=str,
)
def test_inputs_have_the_strides_of_the_problem(values, strides_a, strides_b):
    a, b = GEMM.make_inputs(gemm(3, 5, 7, **values), seed=0, device="cpu")
    assert (tuple(a.shape), a.stride()) == ((3, 7), strides_a)
    assert (tuple(b.shape), b.stride()) == ((7, 5), strides_b)


def test_inputs_are_standard_normal_and_follow_the_seed():
    import torch

    described = gemm(200, 200, 300, dtype="bfloat16", lda=320)
    a, b = GEMM.make_inputs(described, seed=7, device="cpu")
    again = GEMM.make_inputs(described, seed=7, device="cpu")
    other = GEMM.make_inputs(described, seed=8, device="cpu")
    assert a.dtype == b.dtype == torch.bfloat16
    assert all(torch.equal(x, y) for x, y in zip((a, b), again, strict=True))
    assert not torch.equal(a, other[0])
    assert not torch.equal(b, other[1])
    for values in (a.float(), b.float()):
        assert abs(values.mean().item()) < 0.02
        assert abs(values.std().item() - 1.0) < 0.02


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_the_reference_is_the_definition(layout):
    import torch

    a, b = GEMM.make_inputs(gemm(3, 4, 5, layout=layout), seed=1, device="cpu")
    found = GEMM.reference(gemm(3, 4, 5, layout=layout), a, b)
    assert found.dtype == torch.float64
    wanted = [[sum(float(a[i, x]) * float(b[x, j]) for x in range(5)) for j in range(4)] for i in range(3)]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-14)


def test_flops_and_compulsory_traffic():
    described = gemm(64, 32, 1024, dtype="float16")
    assert GEMM.flops(described) == 2 * 64 * 32 * 1024
    assert GEMM.traffic_bytes(described) == 2 * (64 * 1024 + 1024 * 32 + 64 * 32)
    assert GEMM.flops(gemm(0, 5, 5)) == 0
    # Beyond what int64 holds.
    assert GEMM.flops(gemm(2**39, 2**39, 2**39)) == 2.0**118


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each("k", [1, 64, 4096])
def test_the_tolerance_passes_torch_and_fails_a_lost_term(dtype, k):
    described = gemm(48, 40, k, dtype=dtype)
    a, b = GEMM.make_inputs(described, seed=2, device="cpu")
    reference = GEMM.reference(described, a, b)
    assert GEMM.check(described, reference, a @ b) is None
    lost = (a[:, 1:].double() @ b[1:].double()).to(a.dtype)
    found = GEMM.check(described, reference, lost)
    assert found is not None
    assert "elements differ" in found


def test_the_tolerance_grows_with_the_sum_and_with_tf32():
    exact = GEMM.tolerance(gemm(8, 8, 1024))
    assert exact.relative == 4 * 2.0**-24
    assert exact.absolute == pytest.approx(8 * 2.0**-24 * 1024)
    rounded = GEMM.tolerance(gemm(8, 8, 1024, allow_tf32=True))
    assert rounded.absolute == pytest.approx(8 * 2.0**-11 * 32)
    half = GEMM.tolerance(gemm(8, 8, 1024, dtype="float16"))
    assert half.relative == 4 * 2.0**-11
    assert half.absolute == pytest.approx(8 * 2.0**-24 * 1024 + 8 * 2.0**-11 * 32)


def test_operand_dims():
    assert operand_dims(gemm(3, 5, 7)) == [(3, 7, False, 7), (7, 5, False, 5)]
    assert operand_dims(gemm(3, 5, 7, layout="tt", lda=9)) == [(3, 7, True, 9), (7, 5, True, 7)]


def splits(**values):
    block = variant("gemm", "split_k").space()
    legal = variant("gemm", "split_k").legal(gemm(**values), CPU, block)
    return block.columns["split"][legal].tolist()


def test_split_k_divides_k_into_slices_of_64():
    assert splits(m=8, n=8, k=4096) == [2, 4, 8, 16, 32]
    assert splits(m=8, n=8, k=512) == [2, 4, 8]
    assert splits(m=8, n=8, k=510) == [2]
    assert splits(m=8, n=8, k=127) == []
    assert splits(m=8, n=8, k=0) == []
    assert splits(m=8, n=8, k=4096, dtype="float16") == []
    assert splits(m=8192, n=8192, k=4096) == [2, 4]  # 256 MiB a part


def test_split_k_says_why_not():
    found = {
        refusal.candidate.parameters["split"]: str(refusal)
        for refusal in refusals(gemm(2**14, 2**14, 192), CPU, subset="default")
        if refusal.candidate.variant == "split_k"
    }
    assert found[2].endswith("more than 1 GiB of them costs more than it saves (2147483648 bytes)")
    assert found[4].endswith("(48 < 64)")
    assert found[32].endswith("(6 < 64)")


def test_work_of_split_k():
    described = gemm(8, 16, 512)
    split = variant("gemm", "split_k")
    work = split.work(described, {"split": np.array([2, 8])}, CPU).columns(2)
    assert work["flops"].tolist() == [2 * 8 * 16 * 512 + 2 * 128, 2 * 8 * 16 * 512 + 8 * 128]
    assert work["traffic_bytes"].tolist() == [4 * (8 * 512 + 512 * 16 + 128)] * 2
    assert work["scratch_bytes"].tolist() == [4 * 2 * 128, 4 * 8 * 128]
    assert work["calls"].tolist() == [2, 2]
    assert work["inner_steps"].tolist() == [256, 64]
    # A library decides how it divides a batched product.
    assert np.isnan(work["programs"]).all()


def test_work_of_vendor_and_transposed():
    described = gemm(8, 16, 512, dtype="bfloat16")
    flops, traffic = 2 * 8 * 16 * 512, 2 * (8 * 512 + 512 * 16 + 128)
    vendor = variant("gemm", "vendor").work(described, {}, A100).columns(1)
    assert (vendor["flops"][0], vendor["traffic_bytes"][0], vendor["calls"][0]) == (flops, traffic, 1)
    assert vendor["scratch_bytes"].tolist() == [0]
    turned = variant("gemm", "transposed")
    block = turned.space()
    work = turned.work(described, block.columns, A100).columns(block.length)
    assert block.columns["output"].tolist() == ["view", "copy"]
    assert work["flops"].tolist() == [flops] * 2
    assert work["scratch_bytes"].tolist() == [0, 2 * 128]
    assert work["calls"].tolist() == [1, 2]


@for_each("layout", ["nn", "nt", "tn", "tt"])
@for_each("name", ["vendor", "transposed", "split_k"])
def test_results_are_right_and_row_major_in_every_layout(name, layout):
    import torch

    from kernelcast.kernels.memory import poisoned

    described = gemm(6, 9, 256, layout=layout, lda=300, ldb=301)
    inputs = GEMM.make_inputs(described, seed=5, device="cpu")
    reference = GEMM.reference(described, *inputs)
    found = variant("gemm", name)
    block = found.space()
    for row in np.flatnonzero(found.legal(described, CPU, block)):
        with poisoned():
            out = found.build(described, block.at(int(row)).parameters)(*inputs)
        assert GEMM.check(described, reference, out) is None, block.at(int(row))
        assert out.is_contiguous()
        torch.testing.assert_close(out, inputs[0] @ inputs[1], rtol=1e-4, atol=1e-4)


@for_each("sizes", [(0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0)])
@for_each("name", ["vendor", "transposed"])
def test_empty_products(name, sizes):
    described = gemm(*sizes)
    inputs = GEMM.make_inputs(described, seed=5, device="cpu")
    reference = GEMM.reference(described, *inputs)
    found = variant("gemm", name)
    for row in range(found.space().length):
        out = found.build(described, found.space().at(row).parameters)(*inputs)
        assert GEMM.check(described, reference, out) is None
        assert out.tolist() == [[0.0] * sizes[1]] * sizes[0]


@for_each("sizes", [(2**39, 3, 64), (64, 2**40 - 1, 64), (2**39,) * 3, (2**31, 2**31, 2**40 - 1)])
@for_each("where", [CPU, A100], ids=lambda each: each.name)
def test_sizes_beyond_int64_neither_warn_nor_turn_legal(sizes, where):
    described = gemm(*sizes, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        legal = candidates(described, where, subset="default")
        refused = refusals(described, where, subset="default")
        for block in legal.blocks:
            work = variant("gemm", block.variant).work(described, block.columns, where).columns(block.length)
            assert (work["flops"] >= 2.0 * math.prod(sizes)).all(), block.variant
    assert {one.variant for one in legal}.isdisjoint({"triton_tiled", "triton_split_k"})
    assert len(legal) + len(refused) == sum(
        found.space("default").length for found in variants("gemm").values()
    )
    assert require_legal(described, where, legal[0]).name == "vendor"
