"""triton_descriptor of gemm: rules, work, launching, results under Triton's interpreter, and what the compiler makes of it."""

from __future__ import annotations

import threading

import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import (
    CPU,
    DEVICES,
    assert_compiles,
    compiler,  # noqa: F401
    interpret,
    on_gpu,
    refused_by,
    work_of,
)

from kernelcast.errors import IllegalCandidateError
from kernelcast.kernels import Candidate, Device, candidates, operation, problem, variant

A100, H100, B200 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["sm100"]
TILE = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
PLAIN = {"programs_per_core": 1, "flatten": False, "described_store": False}
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 2}


def described(**changes):
    return Candidate.of("triton_descriptor", {**TILE, **PLAIN, **changes})


def half(m=4096, n=4096, k=4096, **options):
    return problem("gemm", m=m, n=n, k=k, **{"dtype": "float16", **options})


# Rules


@for_each(
    ("candidate", "given", "device", "rule", "seen"),
    [
        (described(), half(), A100, "has-tma", "sm80"),
        (described(), half(), DEVICES["gfx950"], "has-tma", "gfx950"),
        (described(), half(), CPU, "has-tma", "x86_64"),
        (described(), half(dtype="float32"), H100, "tensor-cores", "float32, allow_tf32=False"),
        (described(), half(k=4100), H100, "rows-aligned", "A's rows are 8200 bytes apart"),
        (described(), half(n=4100), H100, "rows-aligned", "B's rows are 8200 bytes apart"),
        (described(), half(m=4100, layout="tn"), H100, "rows-aligned", "A's rows are 8200 bytes apart"),
        (described(), half(k=4100, layout="nt"), H100, "rows-aligned", "A's rows are 8200 bytes apart and B's"),
        (described(), half(lda=4100), H100, "rows-aligned", "A's rows are 8200 bytes apart"),
        (described(), half(m=1, n=8, k=8, lda=0, ldb=2**39), H100, "rows-aligned", f"{2**40} bytes apart"),
        (described(), half(k=0), H100, "sum-not-empty", "k=0"),
        (described(block_k=4, block_n=32, num_warps=1), half(), H100, "boxes-fit", "64 x 32 x 4"),
        (described(block_m=512, block_n=32, num_warps=8), half(), H100, "boxes-fit", "512 x 32 x 32"),
        (described(described_store=True), half(n=4098, layout="nt"), H100, "stored-rows-aligned", "8196 bytes"),
        (described(flatten=True), half(m=512, n=512), H100, "programs-differ", "64 tiles, 132 programs"),
        (described(programs_per_core=2), half(m=512, n=512), H100, "programs-differ", "64 tiles, 264 programs"),
        (described(flatten=True, programs_per_core=2), half(m=1024, n=1024), H100, "programs-differ", "256 tiles"),
        # Four stages of (128 + 256) x 64, and the tile that is stored, and barriers.
        (
            described(block_m=128, block_n=256, block_k=64, num_stages=4, num_warps=8, described_store=True),
            half(),
            H100,
            "shared-memory",
            f"{4 * 384 * 64 * 2 + 128 * 256 * 2 + 64} > 232448 bytes",
        ),
        (
            described(programs_per_core=2),
            half(),
            Device("h", "gpu", "nvidia", "sm90", 132, shared_bytes_per_core=50_000),
            "programs-resident",
            "2 programs of 4 warps",
        ),
        (described(num_stages=5), half(k=64), H100, "stages-filled", "5 stages, 2 steps"),
        (described(group_m=16), half(m=256, n=2**15), H100, "group-differs", "group_m=16, 4 x 512 tiles"),
    ],
)  # fmt: skip
def test_refusals_say_what_was_seen(candidate, given, device, rule, seen):
    name, text = refused_by(candidate, given, device)
    assert (name, seen in text) == (rule, True), text


@for_each(
    ("candidate", "given", "device"),
    [
        (described(), half(k=4104), H100),
        (described(), half(n=4104), DEVICES["sm120"]),
        (described(), half(n=4099, layout="nt"), H100),
        (described(), half(m=4099, k=4096), B200),
        (described(), half(lda=4104), H100),
        (described(), half(dtype="float32", allow_tf32=True, n=4100), H100),
        (described(described_store=True), half(n=4104, layout="nt"), H100),
        (described(), half(m=512, n=512), H100),
        (described(programs_per_core=2), half(m=1024, n=1024), H100),
        (described(flatten=True, programs_per_core=2), half(m=2048, n=1024), H100),
        (described(num_stages=5, flatten=True), half(k=64), H100),
        (described(block_m=128, block_n=256, block_k=64, num_stages=4, num_warps=8), half(), H100),
        (
            described(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, described_store=True),
            half(),
            H100,
        ),
    ],
)
def test_legal_next_to_the_limits(candidate, given, device):
    assert refused_by(candidate, given, device) == ("", "")


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    m=st.integers(0, 6000),
    n=st.integers(0, 750).map(lambda eighth: 8 * eighth),
    k=st.integers(0, 400).map(lambda eighth: 8 * eighth),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    device=st.sampled_from([H100, B200, DEVICES["sm120"], A100, DEVICES["gfx942"]]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(m, n, k, dtype, layout, device):
    given = half(m, n, k, dtype=dtype, layout=layout, allow_tf32=dtype == "float32")
    found = variant("gemm", "triton_descriptor")
    block = found.space("default")
    legal = found.legal(given, device, block)
    reasons = found.refusals(given, device, block)
    assert len(reasons) == block.length - legal.sum()
    assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    if device in (A100, DEVICES["gfx942"]) or (layout[0] == "t" and m * given.element_bytes % 16):
        assert kept.length == 0
    work = found.work(given, kept.columns, device).columns(kept.length)
    assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
    # At least one tile of each operand.
    tiles = (kept.columns["block_m"] + kept.columns["block_n"]) * kept.columns["block_k"]
    assert (work["shared_bytes"] >= given.element_bytes * tiles).all()
    assert (work["flops"] >= 2.0 * m * n * k).all()
    assert (work["programs"] <= device.cores).all()


def test_the_quick_subset():
    block = variant("gemm", "triton_descriptor").space("default")
    rows = set(zip(*(column.tolist() for column in block.columns.values()), strict=True))
    assert (block.length, len(rows)) == (56, 56)


@for_each("device", [H100, B200, DEVICES["sm120"]])
@for_each("given", [half(), half(m=16, n=28672, layout="nt"), half(m=300, n=512, k=512)])
def test_typical_problems_have_candidates(device, given):
    found = candidates(given, device, subset="default")
    assert sum(each.variant == "triton_descriptor" for each in found) >= 4


def test_work():
    # 64 x 64 tiles of 128 steps for 264 programs: 16 rounds.
    work = work_of(described(programs_per_core=2), half(), H100)
    assert (work["programs"], work["inner_steps"], work["accumulators"]) == (264, 16 * 128, 32)
    assert work["traffic_bytes"] == 2 * (2 * 4096**2 * 64 + 4096**2)
    assert work["shared_bytes"] == 3 * 128 * 32 * 2 + 48
    # Every tile is loaded ahead, whatever its alignment, and TF32 on sm100 transposes what does not lie along k.
    assert work_of(described(), half(k=4104), H100)["shared_bytes"] == 3 * 128 * 32 * 2 + 48
    tf32 = {
        layout: work_of(described(), half(dtype="float32", allow_tf32=True, layout=layout), B200)[
            "shared_bytes"
        ]
        for layout in ("nt", "nn", "tt", "tn")
    }
    one = 64 * 32 * 4
    assert {layout: each - 48 for layout, each in tf32.items()} == {
        "nt": 6 * one, "nn": 8 * one, "tt": 8 * one, "tn": 10 * one,
    }  # fmt: skip


# Launching


@pytest.mark.parametrize(
    ("given", "config", "seen"),
    [
        (half(m=32, n=32, k=36), {}, "A's rows are 72 bytes apart"),
        (half(m=32, n=36, k=32, layout="nt"), {"described_store": True}, "C's rows are 72 bytes apart"),
    ],
)
def test_rows_that_cannot_be_described_are_an_error(given, config, seen):
    pytest.importorskip("triton")
    with pytest.raises(IllegalCandidateError, match=seen):
        variant("gemm", "triton_descriptor").build(given, described(**config).parameters)


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_tensor_that_starts_between_addresses_is_an_error(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    given = half(m=32, n=32, k=32)
    launch = variant("gemm", "triton_descriptor").build(given, described(block_k=16).parameters)
    inputs = dict(zip("AB", operation("gemm").make_inputs(given, seed=1, device="cpu"), strict=True))
    inputs[name] = torch.zeros(32 * 32 + 1, dtype=torch.float16)[1:].view(32, 32)
    with pytest.raises(IllegalCandidateError, match=f"{name} begins at 0x"):
        launch(*inputs.values())


def test_the_callers_allocator_stays():
    """Triton's allocator is set for the launch alone: the caller's remains, and no other thread sees one."""
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    from triton.runtime import _allocation

    from kernelcast.kernels.ops.gemm.triton_descriptor import with_scratch

    def mine(size, alignment, stream):
        raise AssertionError("not for this launch")

    seen, others = [], []

    def launch(tensor):
        allocator = _allocation._allocator.get()
        other = threading.Thread(target=lambda: others.append(_allocation._allocator.get()))
        other.start()
        other.join()
        seen.append(allocator(384, 128, None))

    before = _allocation._allocator.get()
    try:
        triton.set_allocator(mine)
        with_scratch(launch, torch.zeros(3))
        assert _allocation._allocator.get() is mine
    finally:
        triton.set_allocator(before)
    (scratch,) = seen
    assert (scratch.numel(), scratch.element_size(), scratch.data_ptr() % 64) == (384, 1, 0)
    assert isinstance(others[0], _allocation.NullAllocator)


# Results


def case(config=None, *, m, n, k, **values):
    candidate = described(**{**SMALL, "described_store": True, **(config or {})})
    return candidate, {"m": m, "n": n, "k": k, "dtype": "float32", **values}


def test_results_quickly():
    interpret("gemm", [case(m=36, n=36, k=20, layout="tn", lda=40), case(m=17, n=40, k=24, dtype="bfloat16")])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(dtype):
    interpret(
        "gemm",
        [
            case({"flatten": store, "described_store": store}, m=40, n=24, k=40, dtype=dtype, layout=layout, **leading)
            for layout in ("nn", "nt", "tn", "tt")
            for leading in ({}, {"lda": 48, "ldb": 56})
            for store in (False, True)
        ],
    )  # fmt: skip


@pytest.mark.slow
def test_results_of_degenerate_shapes_and_every_kind_of_config():
    plain = {"described_store": False}
    interpret(
        "gemm",
        [
            *(case(m=m, n=n, k=k) for m, n, k in ((1, 4, 4), (1, 68, 20), (37, 4, 4), (3, 8, 100))),
            *(case(plain, m=m, n=n, k=k, layout="nt") for m, n, k in ((1, 1, 4), (7, 1, 20), (37, 5, 4))),
            *(case(m=m, n=n, k=k) for m, n, k in ((0, 4, 8), (8, 0, 8), (5, 8, 0), (0, 0, 0))),
            case({"programs_per_core": 2, "flatten": True}, m=100, n=40, k=16),
            case({"group_m": 1}, m=100, n=40, k=16),
            case({"group_m": 4, "block_m": 32, "block_n": 64, "block_k": 32}, m=130, n=152, k=52),
        ],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_compiles_as_the_work_says(compiler, target):  # noqa: F811
    for candidate, values in (
        (described(block_m=128, block_n=128, block_k=64, num_warps=8, described_store=True, flatten=True), half(layout="nt")),
        (described(block_m=128, block_n=64, flatten=True), half(layout="tt", dtype="bfloat16")),
        (described(block_m=16, block_n=64, block_k=64), half(m=16, n=28672, layout="nt")),
        (described(described_store=True), half(dtype="float32", allow_tf32=True)),
    ):  # fmt: skip
        assert_compiles(compiler, candidate, values, target, tensor_cores=True)


@pytest.mark.slow
def test_tiles_come_through_the_accelerator(compiler):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    config = described(described_store=True).parameters
    code = compile_spec_for(
        variant("gemm", "triton_descriptor").compile_spec(half(), config, "sm90"), "sm90"
    ).asm["ptx"]
    assert "cp.async.bulk.tensor.2d.shared" in code
    assert "cp.async.bulk.tensor.2d.global" in code
    assert "ld.global" not in code


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no tensor memory accelerator")
    on_gpu(
        "gemm",
        [
            (described(**config), {"m": 1504, "n": 1104, "k": 200, "dtype": dtype, "layout": layout})
            for config in ({}, {"flatten": True, "described_store": True}, {"block_m": 128, "num_warps": 8, "described_store": True})
            for layout in ("nn", "nt", "tn", "tt")
        ],
    )  # fmt: skip
