"""The Triton variants of mixed_gemm: rules, work, the quick subset, and results under the interpreter."""

from __future__ import annotations

import csv
import io
import math
import re
import zipfile
from pathlib import Path

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
    interpret,
    on_gpu,
    refused_by,
    work_of,
)

from kernelcast.kernels import Block, Candidate, candidates, operation, problem, variant
from kernelcast.kernels.registry import require_legal
from kernelcast.kernels.triton_rules import needs_wide_offsets, operands

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
NAMES = ("triton_tiled", "triton_split_k")
OP = operation("mixed_gemm")
TILE = {"block_m": 16, "block_n": 64, "block_k": 128, "group_m": 8, "num_warps": 4, "num_stages": 3}
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 1, "num_stages": 2}
DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "autoheuristic"


def tiled(**changes):
    return Candidate.of("triton_tiled", {**TILE, **changes})


def split(**changes):
    return Candidate.of("triton_split_k", {**TILE, "split_k": 4, **changes})


def mixed(m=16, n=4096, k=4096, **values):
    return problem("mixed_gemm", m=m, n=n, k=k, **{"dtype": "float16", "layout": "nt", **values})


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (tiled(), mixed(), CPU, "needs-gpu", "cpu is a cpu"),
        (tiled(), mixed(dtype="float32"), A100, "16-bit", "float32"),
        (split(), mixed(dtype="float32", allow_tf32=True), A100, "16-bit", "float32"),
        (tiled(), mixed(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (tiled(num_warps=64), mixed(), A100, "block-threads", "2048 threads"),
        (tiled(), mixed(m=2**31), A100, "dimensions", f"m={2**31}"),
        (tiled(block_n=16), mixed(m=2**29, n=2**26, k=128), A100, "grid", f"{2**47} blocks"),
        (tiled(block_k=128), mixed(k=17), A100, "blocks-fit", "block_k=128 for k=17"),
        (tiled(block_m=128, block_n=256), mixed(m=512), A100, "accumulators", "256 > 128 accumulators"),
        (
            tiled(block_m=128, block_n=32, block_k=256, num_warps=1, num_stages=1),
            mixed(m=512),
            A100,
            "registers",
            "about 704 > 320",
        ),
        # The weight's tile has 16 x 16 bytes, four for each of 64 threads.
        (
            tiled(block_n=16, block_k=16, num_warps=4, num_stages=2),
            mixed(),
            A100,
            "threads-busy",
            "256 bytes for 128 threads",
        ),
        # Four tiles of A (128 x 256 x 2 bytes) and of B (128 x 256 bytes).
        (
            tiled(block_m=128, block_n=128, block_k=256, num_warps=8, num_stages=5),
            mixed(m=512),
            A100,
            "shared-memory",
            f"{4 * (128 * 256 * 2 + 128 * 256)} > 166912 bytes",
        ),
        # Three of A, two of B, and one of B in 16 bits.
        (
            tiled(block_m=128, block_n=128, block_k=256, num_warps=8, num_stages=3),
            mixed(m=512),
            H100,
            "shared-memory",
            f"{3 * 128 * 256 * 2 + 2 * 128 * 256 + 128 * 256 * 2} > 232448 bytes",
        ),
        (tiled(num_stages=5), mixed(k=256), A100, "stages-filled", "5 stages, 2 steps"),
        (tiled(group_m=16), mixed(m=64), A100, "group-differs", "group_m=16, 4 x 64 tiles"),
        (split(split_k=16), mixed(k=1024), A100, "slices-work", "8 steps of block_k in 16 slices"),
        (split(num_stages=4), mixed(k=512), A100, "slices-fill-stages", "4 stages, 1 steps a slice"),
        (split(split_k=16), mixed(m=2**13, n=2**13), A100, "parts-fit", f"{2**32} bytes"),
        (split(block_k=32), mixed(k=0), A100, "slices-work", "0 steps of block_k in 4 slices"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found, said = refused_by(candidate, described, device)
    assert found == rule
    assert seen in said


@for_each(
    ("candidate", "described", "device"),
    [
        (tiled(), mixed(), A100),
        (tiled(), mixed(dtype="bfloat16"), UNKNOWN),
        (tiled(), mixed(weight_dtype="uint8", layout="nn"), MI300),
        (tiled(block_n=16, block_k=16, num_warps=2, num_stages=2), mixed(), A100),
        (tiled(block_k=32), mixed(k=17), A100),
        (tiled(block_m=128, block_n=128, block_k=256, num_warps=8, num_stages=2), mixed(m=512), A100),
        (tiled(block_m=128, block_n=128, block_k=256, num_warps=8, num_stages=5), mixed(m=512), UNKNOWN),
        (tiled(num_stages=4), mixed(k=256), A100),
        (tiled(group_m=16), mixed(m=16 * 9), A100),
        (tiled(block_k=16, num_stages=1), mixed(k=0), A100),
        (split(split_k=8), mixed(k=1024), A100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    require_legal(described, device, candidate)


def test_the_weight_has_elements_of_its_own_size():
    a, b = operands(mixed(n=48, k=64, ldb=72))
    assert (a.element_bytes, b.element_bytes) == (2, 1)
    assert (b.rows, b.columns, b.strides) == (64, 48, (1, 72))
    # Four single bytes go by one copy only where rows are known to be aligned.
    assert not b.vectorised
    assert operands(mixed(n=48, k=64, ldb=80))[1].vectorised
    assert [each.element_bytes for each in operands(problem("gemm", m=2, n=3, k=4, dtype="float16"))] == [
        2,
        2,
    ]


def test_shared_memory_by_architecture():
    """Products from registers hold S - 1 stages; warp groups S of A, S - 1 of B, and one tile of widened B."""
    a, b = 64 * 128 * 2, 64 * 128
    candidate = tiled(block_m=64)
    found = {
        name: work_of(candidate, mixed(m=64), DEVICES[name])["shared_bytes"]
        for name in ("sm80", "sm90", "sm100", "gfx942")
    }
    assert found == {
        "sm80": 2 * (a + b),
        "sm90": 3 * a + 2 * b + 2 * b,
        "sm100": 3 * a + 2 * b + 2 * b,
        "gfx942": 2 * (a + b),
    }
    # Tiles of 16 rows are too small for warp groups.
    assert work_of(tiled(), mixed(), H100)["shared_bytes"] == 2 * (a / 4 + b)


sizes = st.integers(min_value=0, max_value=3000)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    m=sizes,
    n=sizes,
    k=sizes,
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    weight_dtype=st.sampled_from(["int8", "uint8"]),
    layout=st.sampled_from(["nn", "nt"]),
    device=st.sampled_from([*DEVICES.values(), T4, UNKNOWN, CPU]),
    name=st.sampled_from(NAMES),
)
def test_rules_agree_with_refusals_and_keep_their_promises(
    m, n, k, dtype, weight_dtype, layout, device, name
):
    described = mixed(m, n, k, dtype=dtype, weight_dtype=weight_dtype, layout=layout)
    found = variant("mixed_gemm", name)
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
    # Padding and re-reads only ever add to the definition's amounts.
    assert (work["flops"] >= OP.flops(described)).all()
    if min(m, n) > 0:
        assert (work["traffic_bytes"] >= OP.traffic_bytes(described)).all()
    if name == "triton_split_k":
        assert (work["inner_steps"] * kept.columns["block_k"] * (kept.columns["split_k"] - 1) < k).all()


# Spaces


def test_the_quick_subset():
    found = variant("mixed_gemm", "triton_tiled")
    block = found.space("default")
    rows = set(zip(*(column.tolist() for column in block.columns.values()), strict=True))
    assert 20 <= block.length <= 60
    assert len(rows) == block.length
    assert list(block.columns) == ["block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages"]
    for parameter in found.parameters:
        assert set(block.columns[parameter.name].tolist()) <= set(parameter.values)
    assert found.space().length == 5 * 5 * 5 * 4 * 4 * 5
    split_block = variant("mixed_gemm", "triton_split_k").space("default")
    assert split_block.length == 2 * (block.columns["block_m"] <= 64).sum() == 66
    assert sorted(set(split_block.columns["split_k"].tolist())) == [4, 8]


@for_each("device", list(DEVICES.values()), ids=lambda device: device.name)
@for_each(
    "described",
    [mixed(), mixed(m=1), mixed(m=512), mixed(m=17, n=33, k=65), mixed(m=1, n=1, k=1), mixed(layout="nn")],
    ids=str,
)
def test_every_problem_has_quick_candidates(device, described):
    assert len(candidates(described, device, subset="default", backends=["triton"])) >= 1


# Work


def test_work_counts_padding_and_rereads():
    described = mixed(m=20, n=100, k=200, layout="nn", lda=208, ldb=112)
    work = work_of(tiled(), described, A100)
    # 2 x 2 tiles of 16 x 64 over two steps of 128.
    assert (work["programs"], work["inner_steps"], work["warps"], work["calls"]) == (4, 2, 4, 1)
    assert work["flops"] == 2 * 32 * 128 * 256 + 32 * 128
    # A in two bytes for each of 2 columns of tiles, B in one for each of 2 rows, scales with it, and C.
    assert work["traffic_bytes"] == 2 * 20 * 200 * 2 + 100 * 200 * 2 + 2 * (100 * 2 + 20 * 100)
    assert work["accumulators"] == 16 * 64 / 128
    assert work["scratch_bytes"] == 0


def test_work_of_split_k():
    work = work_of(split(), mixed(m=16, n=64, k=1024), A100)
    assert (work["programs"], work["inner_steps"], work["calls"]) == (4, 2, 2)
    assert work["scratch_bytes"] == 4 * 4 * 16 * 64
    # Four parts are added, and the sum is scaled.
    assert work["flops"] == 2 * 16 * 64 * 1024 + 5 * 16 * 64
    assert work["shared_bytes"] == 2 * (16 * 128 * 2 + 64 * 128)


# Recorded measurements


@pytest.mark.data
@pytest.mark.slow
def test_recorded_winners_are_kept():
    """A100: the rules refuse next to nothing of what won, and all of it is in the quick subset."""
    archive = DATA / "mixedmm_a100_data.zip"
    if not archive.is_file():
        pytest.skip(f"no recorded measurements at {archive}")
    pattern = re.compile(r"triton_BLOCK-M=(\d+)_BLOCK-K=(\d+)_BLOCK-N=(\d+)_numstages=(\d+)_numwarps=(\d+)")
    with zipfile.ZipFile(archive) as files:
        text = files.read("mixedmm_a100_data.txt").decode()
    latencies: dict[tuple, dict[tuple, list[float]]] = {}
    for row in csv.DictReader(io.StringIO(text.split("\n", 1)[1])):
        if match := pattern.search(row.pop("choice")):
            feedback = float(row.pop("feedback"))
            latencies.setdefault(tuple(row.items()), {}).setdefault(match.groups(), []).append(feedback)
    found = variant("mixed_gemm", "triton_tiled")
    names = ("block_m", "block_k", "block_n", "num_stages", "num_warps")
    refused, kept, winners = 0, [], set()
    for facts, configs in latencies.items():
        row = dict(facts)
        described = mixed(
            int(row["m"]),
            int(row["n"]),
            int(row["k"]),
            dtype=row["mat1_dtype"].removeprefix("torch."),
            weight_dtype=row["mat2_dtype"].removeprefix("torch."),
        )
        values = np.array(list(configs), dtype=int)
        block = Block(
            found.name,
            {**dict(zip(names, values.T, strict=True)), "group_m": np.full(len(values), 8)},
            len(values),
        )
        legal = found.legal(described, A100, block)
        medians = np.array([np.median(samples) for samples in configs.values()])
        winner = int(medians.argmin())
        winners.add(tuple(values[winner].tolist()))
        refused += not legal[winner]
        kept.append(medians[winner] / medians[legal].min())
    assert len(kept) == 4299
    assert refused == 0
    assert math.exp(np.mean(np.log(kept))) == 1.0
    quick = found.space("default").columns
    assert winners <= set(zip(*(quick[name].tolist() for name in names), strict=True))


# Results


def case(name="triton_tiled", config=None, *, m, n, k, **values):
    extra = {"split_k": 2} if name == "triton_split_k" else {}
    return (
        Candidate.of(name, {**SMALL, **extra, **(config or {})}),
        {"m": m, "n": n, "k": k, "dtype": "float16", **values},
    )


def test_results_quickly():
    interpret(
        "mixed_gemm",
        [
            case(m=19, n=33, k=21, layout="nt", weight_dtype="uint8"),
            case("triton_split_k", m=17, n=5, k=37, dtype="bfloat16", ldb=9),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_of_every_layout(name, dtype):
    interpret(
        "mixed_gemm",
        [
            case(name, m=21, n=29, k=41, dtype=dtype, layout=layout, weight_dtype=weight, **leading)
            for layout in ("nn", "nt", "tn", "tt")
            for weight in ("int8", "uint8")
            for leading in ({}, {"lda": 48, "ldb": 53})
        ],
    )


@pytest.mark.slow
def test_results_of_degenerate_shapes():
    shapes = [(1, 1, 1), (1, 33, 17), (33, 1, 17), (16, 16, 16), (3, 5, 2), (31, 17, 1), (32, 48, 32)]
    empty = [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)]
    interpret(
        "mixed_gemm",
        [case(m=m, n=n, k=k) for m, n, k in shapes + empty]
        + [case("triton_split_k", m=m, n=n, k=k) for m, n, k in shapes + empty],
    )


@pytest.mark.slow
def test_results_with_64_bit_offsets():
    """Rows so far apart that elements are counted in 64 bits."""
    a_far, b_far = {"m": 2, "n": 20, "k": 17, "lda": 2**23}, {"m": 3, "n": 2, "k": 37, "ldb": 2**23}
    assert needs_wide_offsets(mixed(**a_far))
    assert needs_wide_offsets(mixed(**b_far))
    interpret("mixed_gemm", [case(**a_far), case("triton_split_k", **b_far, layout="nt")])


@pytest.mark.slow
def test_results_of_every_kind_of_config():
    interpret(
        "mixed_gemm",
        [
            case(config={"block_m": 32, "block_n": 64, "block_k": 32}, m=45, n=70, k=50),
            case(config={"block_m": 64, "num_stages": 5, "num_warps": 8}, m=70, n=20, k=33),
            case(config={"block_k": 256}, m=3, n=20, k=300),
            case(config={"group_m": 1}, m=100, n=40, k=16),
            case(config={"group_m": 4}, m=100, n=40, k=16),
            case("triton_split_k", {"split_k": 4}, m=20, n=20, k=100),
            # Seven steps in four slices: the last is short. Three in sixteen: most are empty.
            case("triton_split_k", {"split_k": 4}, m=20, n=20, k=97),
            case("triton_split_k", {"split_k": 16}, m=20, n=20, k=40),
            # More elements than one program of the sum, which ends within a row.
            case("triton_split_k", {"block_m": 64, "block_n": 64}, m=50, n=70, k=40),
        ],
    )


@pytest.mark.gpu
@pytest.mark.slow
def test_results_on_a_gpu():
    on_gpu(
        "mixed_gemm",
        [
            (
                candidate,
                {"m": m, "n": 136, "k": 1000, "dtype": dtype, "layout": layout, "weight_dtype": weight},
            )
            for candidate in (tiled(), tiled(block_m=64), split(), split(split_k=2))
            for dtype, weight in (("float16", "int8"), ("bfloat16", "uint8"))
            for m, layout in ((7, "nt"), (200, "nn"))
        ],
    )
