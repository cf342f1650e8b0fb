"""triton_persistent of gemm: rules, work, results under Triton's interpreter, and what the compiler makes of it."""

from __future__ import annotations

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
from kernelcast.kernels.ops.gemm.triton_persistent_pieces import INTERPRETED_CORES, core_count

A100, H100 = DEVICES["sm80"], DEVICES["sm90"]
#: An A100 with what the residency of programs depends on.
KNOWN = Device(
    "a100", "gpu", "nvidia", "sm80", 108, max_threads_per_core=2048, registers_per_core=65_536,
    shared_bytes_per_block=166_912, shared_bytes_per_core=167_936,
)  # fmt: skip
TILE = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 2}


def persistent(**changes):
    return Candidate.of("triton_persistent", {**TILE, "programs_per_core": 1, "flatten": False, **changes})


def half(m=4096, n=4096, k=4096, **options):
    return problem("gemm", m=m, n=n, k=k, **{"dtype": "float16", **options})


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (persistent(), half(), CPU, "needs-gpu", "cpu is a cpu"),
        (persistent(), half(k=0), A100, "sum-not-empty", "k=0"),
        (persistent(), half(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        # 27 x 4 tiles for 108 programs: one each.
        (
            persistent(),
            half(m=27 * 64, n=4 * 64),
            A100,
            "tiles-outnumber-programs",
            "108 tiles, 108 programs",
        ),
        (
            persistent(programs_per_core=4),
            half(m=27 * 64, n=16 * 64),
            A100,
            "tiles-outnumber-programs",
            "432 tiles, 432 programs",
        ),
        (
            persistent(programs_per_core=4, num_warps=8, block_m=128, num_stages=2),
            half(),
            Device("a100", "gpu", "nvidia", "sm80", 108, max_threads_per_core=512),
            "programs-resident",
            "4 programs of 8 warps",
        ),
        (
            persistent(programs_per_core=4, block_m=128, block_n=256, num_warps=8),
            half(),
            KNOWN,
            "programs-resident",
            "32768 accumulators",
        ),
        # Two programs of 81,920 bytes take more than one core has with the driver's kilobyte each.
        (
            persistent(programs_per_core=2, block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=4),
            half(),
            KNOWN,
            "programs-resident",
            "98304 bytes",
        ),
        (persistent(num_stages=5), half(k=64), A100, "stages-filled", "5 stages, 2 steps"),
        (persistent(group_m=16), half(m=256, n=2**15), A100, "group-differs", "group_m=16, 4 x 512 tiles"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    name, text = refused_by(candidate, described, device)
    assert (name, seen in text) == (rule, True), text


@pytest.mark.parametrize(
    ("candidate", "described", "device"),
    [
        (persistent(), half(m=27 * 64 + 1, n=4 * 64), A100),
        (persistent(programs_per_core=4), half(m=27 * 64, n=16 * 64 + 1), A100),
        (persistent(programs_per_core=2, block_m=128, block_n=128, num_warps=4), half(), KNOWN),
        # The pipeline runs on over the many tiles of a program.
        (persistent(num_stages=5, flatten=True), half(k=64), A100),
        (persistent(), half(m=100, n=100), UNKNOWN),
        (persistent(flatten=True), half(), DEVICES["gfx942"]),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    assert refused_by(candidate, described, device) == ("", "")


def test_running_on_takes_the_output_besides():
    """128 x 128 x 64 in 5 stages: 4 x 32 KiB of operands fit alone, and not with 32 KiB of output besides."""
    config = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 5}
    assert refused_by(persistent(**config), half(), A100) == ("", "")
    assert work_of(persistent(**config), half(), A100)["shared_bytes"] == 4 * 32768
    assert work_of(persistent(**config, flatten=True), half(), A100)["shared_bytes"] == 5 * 32768
    deeper = {**config, "block_n": 256, "num_stages": 4}
    assert refused_by(persistent(**deeper), half(), A100) == ("", "")
    name, text = refused_by(persistent(**deeper, flatten=True), half(), A100)
    assert name == "shared-memory"
    assert f"{3 * 384 * 64 * 2 + 128 * 256} > 166912 bytes" in text


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    m=st.integers(0, 6000),
    n=st.integers(0, 6000),
    k=st.integers(0, 3000),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    device=st.sampled_from([A100, H100, KNOWN, T4, DEVICES["sm100"], DEVICES["gfx942"], UNKNOWN]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(m, n, k, dtype, device):
    described = half(m, n, k, dtype=dtype)
    found = variant("gemm", "triton_persistent")
    block = found.space("default")
    legal = found.legal(described, device, block)
    reasons = found.refusals(described, device, block)
    assert len(reasons) == block.length - legal.sum()
    assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    work = found.work(described, kept.columns, device).columns(kept.length)
    assert (work["accumulators"] <= 128).all()
    if device.shared_bytes_per_block:
        assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
    assert (work["flops"] >= 2.0 * m * n * k).all()
    assert (work["traffic_bytes"] >= described.element_bytes * (m * k + k * n + m * n)).all()
    assert (work["programs"] == kept.columns["programs_per_core"] * device.cores).all()
    # The steps of the longest program, times the programs, cover those of every tile.
    tile_steps = work["flops"] / (2.0 * kept.columns["block_m"] * kept.columns["block_n"])
    assert (work["inner_steps"] * work["programs"] * kept.columns["block_k"] >= tile_steps).all()
    # Each program has at least two tiles, or the last round would be the first.
    assert (work["inner_steps"] * kept.columns["block_k"] >= 2 * k).all()


def test_the_quick_subset():
    block = variant("gemm", "triton_persistent").space("default")
    rows = set(zip(*(column.tolist() for column in block.columns.values()), strict=True))
    assert (block.length, len(rows)) == (56, 56)
    for parameter in variant("gemm", "triton_persistent").parameters:
        assert set(block.columns[parameter.name].tolist()) <= set(parameter.values)


@for_each("device", [A100, H100, DEVICES["sm100"], DEVICES["gfx942"]])
@for_each("described", [half(), half(m=16, n=28672, layout="nt"), half(dtype="float32")])
def test_large_problems_have_candidates(device, described):
    found = candidates(described, device, subset="default")
    assert sum(each.variant == "triton_persistent" for each in found) >= 4


def test_work():
    # 64 x 64 tiles of 128 steps for 216 programs: 19 rounds.
    work = work_of(persistent(programs_per_core=2), half(), A100)
    assert work["programs"] == 216
    assert work["inner_steps"] == 19 * 128
    assert work["flops"] == 2.0 * 4096**3
    assert work["traffic_bytes"] == 2 * (2 * 4096**2 * 64 + 4096**2)
    assert (work["calls"], work["scratch_bytes"], work["accumulators"]) == (1, 0, 32)


def test_the_interpreter_has_a_few_cores():
    assert core_count(-1) == INTERPRETED_CORES


# Results


def case(config=None, *, m, n, k, **values):
    candidate = persistent(**{**SMALL, **(config or {})})
    return candidate, {"m": m, "n": n, "k": k, "dtype": "float32", **values}


def test_results_quickly():
    interpret("gemm", [case(m=37, n=33, k=21, layout="tn", lda=40)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(dtype):
    interpret(
        "gemm",
        [
            case({"flatten": layout[0] == "n"}, m=37, n=29, k=41, dtype=dtype, layout=layout, **leading)
            for layout in ("nn", "nt", "tn", "tt")
            for leading in ({}, {"lda": 48, "ldb": 53})
        ],
    )


@pytest.mark.slow
def test_results_of_degenerate_shapes_and_every_kind_of_config():
    interpret(
        "gemm",
        [
            *(case(m=m, n=n, k=k) for m, n, k in ((1, 1, 1), (1, 70, 17), (70, 1, 17), (16, 64, 16), (3, 5, 2))),
            *(case(m=m, n=n, k=k) for m, n, k in ((0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0))),
            case({"programs_per_core": 2, "flatten": True}, m=100, n=40, k=16),
            case({"programs_per_core": 4}, m=70, n=70, k=20),
            case({"group_m": 1}, m=100, n=40, k=16),
            case({"group_m": 4, "block_m": 32, "block_n": 64, "block_k": 32}, m=130, n=150, k=50),
        ],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_compiles_as_the_work_says(compiler, target):  # noqa: F811
    for candidate, described in (
        (persistent(block_m=128, block_n=128, block_k=32, num_warps=4, flatten=True), half(layout="nt")),
        (persistent(block_m=64, block_n=128, num_stages=4, flatten=True, programs_per_core=2), half(dtype="bfloat16")),
        (persistent(block_m=16, block_n=32, block_k=128), half(m=16, n=28672, layout="nt")),
    ):  # fmt: skip
        assert_compiles(compiler, candidate, described, target, tensor_cores=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    on_gpu(
        "gemm",
        [
            (persistent(flatten=flatten, programs_per_core=count, **tile), {"m": 1500, "n": 1100, "k": 200, "dtype": dtype, "layout": layout})
            for flatten, count, tile in ((False, 1, {}), (True, 2, {}), (True, 1, {"block_m": 32, "num_stages": 4}))
            for layout in ("nn", "tt")
        ],
    )  # fmt: skip
