"""triton_stream_k of gemm: rules, work, results under Triton's interpreter, and what the compiler makes of it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import (
    CPU,
    DEVICES,
    T4,
    UNKNOWN,
    assert_compiles,
    compiler,  # noqa: F401
    interpret,
    on_gpu,
    refused_by,
    work_of,
)

from kernelcast.kernels import Candidate, Device, candidates, problem, variant
from kernelcast.kernels.compile import compile_spec_for
from kernelcast.kernels.ops.gemm.triton_stream_k import LEAST_SAVING, division

A100, H100 = DEVICES["sm80"], DEVICES["sm90"]
TILE = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 2}


def stream(**changes):
    return Candidate.of("triton_stream_k", {**TILE, "programs_per_core": 1, **changes})


def half(m=4096, n=4096, k=4096, **options):
    return problem("gemm", m=m, n=n, k=k, **{"dtype": "float16", **options})


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (stream(), half(), CPU, "needs-gpu", "cpu is a cpu"),
        (stream(), half(k=0), A100, "sum-not-empty", "k=0"),
        (stream(), half(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (stream(), half(m=27 * 64, n=8 * 64), A100, "tiles-left-over", "216 tiles, 108 programs"),
        (stream(block_m=32), half(m=0, n=8 * 64), A100, "tiles-left-over", "0 tiles, 108 programs"),
        # 107 of 108 programs busy: shares of 127 of 128 steps.
        (stream(), half(m=107 * 64, n=64), A100, "sharing-saves", "saves 0.8% of the steps"),
        # 37 whole rounds before 100 tiles: 28 of 38 * 128 steps at most.
        (stream(), half(), A100, "sharing-saves", "saves 0.2% of the steps"),
        # One tile of 128 steps for 108 programs: 2 steps each, of 2 * 64 * 32 two-byte elements.
        (stream(), half(m=64, n=64), A100, "shares-pay", "16384 < 32768 bytes"),
        (
            stream(block_m=128, block_n=128, block_k=128, num_stages=5, num_warps=8),
            half(m=2048, n=2048),
            A100,
            "shared-memory",
            "262144 > 166912 bytes",
        ),
        (
            stream(programs_per_core=4),
            half(m=2048, n=2048),
            Device("a100", "gpu", "nvidia", "sm80", 108, max_threads_per_core=256),
            "programs-resident",
            "4 programs of 4 warps",
        ),
        (
            stream(num_stages=5, block_k=128, num_warps=2),
            half(m=512, n=768, k=384),
            DEVICES["sm100"],
            "shares-fill-stages",
            "5 stages, 2 steps a share",
        ),
        (stream(group_m=16), half(m=256, n=1024), A100, "group-differs", "group_m=16, 4 x 16 tiles"),
        (
            stream(block_m=128, block_n=128, num_warps=8),
            half(m=2**14, n=2**15, k=2**14),
            Device("huge", "gpu", "nvidia", "sm80", 20_000),
            "parts-fit",
            f"{(19_992 + 12_767) * 4 * 128 * 128} bytes",
        ),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    name, text = refused_by(candidate, described, device)
    assert (name, seen in text) == (rule, True), text


@pytest.mark.parametrize(
    ("candidate", "described", "device"),
    [
        # 217 tiles for 108 programs: two rounds, and one tile shared.
        (stream(), half(m=217 * 64, n=64, k=16384), A100),
        (stream(), half(m=80 * 64, n=64), A100),
        (stream(), half(m=64, n=64, k=2**14), A100),
        (stream(num_stages=5, block_k=64), half(m=512, n=2048, k=512), DEVICES["sm100"]),
        (stream(block_m=128, block_n=128, num_warps=8), half(m=2**11, n=2**10, k=2**14), DEVICES["sm100"]),
        (stream(), half(m=64 * 3, n=64, k=256), Device("new", "gpu", "nvidia", "sm80", 2)),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    assert refused_by(candidate, described, device) == ("", "")


sizes = st.integers(1, 6000)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    m=sizes,
    n=sizes,
    k=st.integers(1, 8000),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    device=st.sampled_from([A100, H100, T4, DEVICES["sm100"], DEVICES["gfx942"], UNKNOWN]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(m, n, k, dtype, device):
    described = half(m, n, k, dtype=dtype)
    found = variant("gemm", "triton_stream_k")
    block = found.space("default")
    legal = found.legal(described, device, block)
    reasons = found.refusals(described, device, block)
    assert len(reasons) == block.length - legal.sum()
    assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    work = found.work(described, kept.columns, device).columns(kept.length)
    if device.shared_bytes_per_block:
        assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
    assert (work["flops"] >= 2.0 * m * n * k).all()
    assert (work["scratch_bytes"] > 0).all()
    # An even share is all steps over all programs, rounded up.
    tile_steps = (
        -(-m // kept.columns["block_m"]) * -(-n // kept.columns["block_n"]) * -(-k // kept.columns["block_k"])
    )
    even = tile_steps / work["programs"]
    assert (work["inner_steps"] >= even).all()
    assert (work["inner_steps"] <= even + 1).all()
    whole, _, steps, share = division(described, kept.columns, device)
    assert (share < steps).all()
    assert ((steps - share) >= LEAST_SAVING * (whole + 1) * steps).all()


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(m=st.integers(1, 900), n=st.integers(1, 900), k=st.integers(1, 900), cores=st.integers(1, 40))
def test_parts_have_places_of_their_own_and_cover_every_step_once(m, n, k, cores):
    """The kernels' arithmetic, one step after the other."""
    described = half(m, n, k)
    device = Device("new", "gpu", "nvidia", "sm80", cores)
    columns = {name: np.array([value]) for name, value in {**TILE, "programs_per_core": 1}.items()}
    _, left, steps, share = (int(each[0]) for each in division(described, columns, device))
    parts: dict[int, tuple[int, list[int]]] = {}
    for step in range(left * steps):
        program, tile = step // share, step // steps
        owner, held = parts.setdefault(program + tile, (tile, []))
        assert owner == tile
        held.append(step)
    assert sorted(step for _, held in parts.values() for step in held) == list(range(left * steps))
    assert all(slot < cores + left - 1 for slot in parts) or left == 0
    for tile in range(left):
        slots = range(tile * steps // share + tile, ((tile + 1) * steps - 1) // share + tile + 1)
        assert [parts[slot][0] for slot in slots] == [tile] * len(slots)
        assert sum(len(parts[slot][1]) for slot in slots) == steps
    work = variant("gemm", "triton_stream_k").work(described, columns, device).columns(1)
    assert work["scratch_bytes"][0] >= len(parts) * 4 * 64 * 64


def test_the_quick_subset():
    block = variant("gemm", "triton_stream_k").space("default")
    rows = set(zip(*(column.tolist() for column in block.columns.values()), strict=True))
    assert (block.length, len(rows)) == (28, 28)


@pytest.mark.parametrize("device", [A100, H100, DEVICES["sm100"], DEVICES["gfx942"]])
def test_typical_problems_have_candidates(device):
    described = half(m=1536, n=1152, k=8192, layout="nt")
    found = candidates(described, device, subset="default")
    assert sum(each.variant == "triton_stream_k" for each in found) >= 2


def test_work():
    # 80 tiles of 128 steps for 108 programs: shares of 94.8, so 95 steps.
    described = half(m=80 * 64, n=64)
    assert 95 == -(-80 * 128 // 108)
    work = work_of(stream(), described, A100)
    assert (work["programs"], work["inner_steps"], work["calls"]) == (108, 95, 2)
    # 108 programs have a share, and 79 tiles begin within one.
    assert work["scratch_bytes"] == (108 + 79) * 4 * 64 * 64
    assert work["flops"] == 2.0 * 80 * 64 * 64 * 4096 + work["scratch_bytes"] / 4
    # 217 tiles: two whole rounds, then one tile of 512 steps in shares of 5, which 103 programs have.
    work = work_of(stream(), half(m=217 * 64, n=64, k=16384), A100)
    assert work["inner_steps"] == 2 * 512 + 5
    assert work["scratch_bytes"] == 103 * 4 * 64 * 64
    assert Fraction(512 - 5, 3 * 512) > LEAST_SAVING


# Results. The interpreter stands for three cores.


def case(config=None, *, m, n, k, **values):
    candidate = stream(**{**SMALL, **(config or {})})
    return candidate, {"m": m, "n": n, "k": k, "dtype": "float32", **values}


@pytest.mark.slow
def test_results_of_shared_tiles():
    # Eight tiles for three programs leave two to share; four of 64 x 64 leave one, summed by several programs.
    wide = {"block_m": 64, "block_n": 64, "block_k": 32}
    interpret("gemm", [case(m=20, n=61, k=90, layout="tn", lda=40), case(wide, m=120, n=70, k=100)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(dtype):
    interpret(
        "gemm",
        [
            case(m=20, n=29, k=70, dtype=dtype, layout=layout, **leading)
            for layout in ("nn", "nt", "tn", "tt")
            for leading in ({}, {"lda": 72, "ldb": 73})
        ],
    )


@pytest.mark.slow
def test_results_of_every_way_to_divide():
    interpret(
        "gemm",
        [
            # Tiles in all of 1 to 7 for three programs, with one and with many steps.
            *(case(m=16, n=16 * count - 3, k=k) for count in range(1, 8) for k in (5, 16, 70, 130)),
            # More programs than steps: some have no share.
            *(case({"programs_per_core": 4}, m=16, n=20, k=k) for k in (16, 33, 100)),
            *(case({"programs_per_core": 2}, m=m, n=20, k=200) for m in (16, 70)),
        ],
    )


@pytest.mark.slow
def test_results_of_degenerate_shapes_and_every_kind_of_config():
    interpret(
        "gemm",
        [
            *(case(m=m, n=n, k=k) for m, n, k in ((1, 1, 1), (1, 70, 17), (70, 1, 17), (3, 5, 2), (1, 1, 300))),
            *(case(m=m, n=n, k=k) for m, n, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0), (70, 17, 0), (0, 0, 0))),
            case({"group_m": 1}, m=100, n=20, k=40),
            case({"group_m": 4}, m=100, n=20, k=40),
            # Tiles of more elements than one program of the sum takes.
            case({"block_m": 64, "block_n": 64, "block_k": 32}, m=120, n=70, k=100),
            case({"block_m": 16, "block_n": 256}, m=20, n=300, k=50),
            case({"block_m": 256, "block_n": 16}, m=300, n=20, k=50),
        ],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_compiles_as_the_work_says(compiler, target):  # noqa: F811
    for candidate, described in (
        (stream(block_m=128, block_n=128, block_k=32, num_warps=8), half(m=1600, n=1152, layout="nt")),
        (stream(block_m=64, block_n=64, programs_per_core=2), half(m=1600, n=1152, dtype="bfloat16")),
    ):
        # Kernels that read tensor memory hold a few words on the stack.
        spills = 16 if target == "sm100" else 0
        assert_compiles(compiler, candidate, described, target, tensor_cores=True, spills=spills)


@pytest.mark.slow
def test_the_summing_kernel_compiles(compiler, monkeypatch):  # noqa: F811
    """What ``bind`` would launch, compiled for four targets."""
    from kernelcast.kernels.compile import KernelSpec
    from kernelcast.kernels.ops.gemm import triton_stream_k

    specs = []
    monkeypatch.setattr(KernelSpec, "bind", lambda spec, grid: specs.append((spec, grid)))
    described = half(m=1536, n=1152)
    multiply = variant("gemm", "triton_stream_k").compile_spec(described, stream().parameters, "sm80")
    triton_stream_k._bind_sum(multiply, 108, 5)
    ((spec, grid),) = specs
    assert grid == (5, 4)
    for target in ("sm80", "sm90", "sm100", "gfx942"):
        assert compile_spec_for(spec, target).metadata.shared <= 16384


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    on_gpu(
        "gemm",
        [
            (stream(**config), {"m": m, "n": n, "k": 3000, "dtype": dtype, "layout": layout})
            for config in ({}, {"programs_per_core": 2}, {"block_m": 128, "num_warps": 8})
            for m, n in ((130, 200), (1500, 1100))
            for layout in ("nn", "tt")
        ],
    )  # fmt: skip
