"""The Triton variants of grouped_gemm: rules, work, results under the interpreter, and what the compiler makes of them."""

from __future__ import annotations

import os
import subprocess
import sys

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

from kernelcast.kernels import Candidate, CandidateTable, candidates, operation, problem, variant
from kernelcast.kernels.ops.grouped_gemm.schema import DISTRIBUTIONS, expected_row_tiles, row_tiles_bound
from kernelcast.kernels.registry import require_legal

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
OP = operation("grouped_gemm")
NAMES = ("triton_grouped", "triton_grouped_persistent", "triton_grouped_split_k")


def tiled(block_m=64, block_n=64, block_k=32, group_m=8, num_warps=4, num_stages=3):
    config = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    options = {"group_m": group_m, "num_warps": num_warps, "num_stages": num_stages}
    return Candidate.of("triton_grouped", {**config, **options})


def persistent(*sizes, programs_per_core=1, **options):
    config = {**tiled(*sizes, **options).parameters, "programs_per_core": programs_per_core}
    return Candidate.of("triton_grouped_persistent", config)


def split_k(*sizes, split=4, **options):
    config = {**tiled(*sizes, **options).parameters, "split_k": split}
    return Candidate.of("triton_grouped_split_k", config)


def grouped(groups=8, m=4096, n=4096, k=4096, **options):
    return problem("grouped_gemm", groups=groups, m=m, n=n, k=k, **{"dtype": "float16", **options})


BALANCED = {"distribution": "balanced"}


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (tiled(), grouped(), CPU, "needs-gpu", "cpu is a cpu"),
        (tiled(), grouped(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (tiled(), grouped(m=2**31 - 256), A100, "dimensions", f"m={2**31 - 256}"),
        (tiled(), grouped(groups=1025), A100, "groups-fit", "groups=1025"),
        # 8 warps of 64 are as many threads as 16 of 32.
        (
            tiled(16, 64, 32, num_warps=8),
            grouped(n=32, k=32),
            MI300,
            "threads-busy",
            "1024 bytes for 512 threads",
        ),
        # 4096 rows in 128 groups: 32 in each, of which a tile of 128 would hold one.
        (tiled(128), grouped(groups=128, **BALANCED), A100, "blocks-fit", "block_m=128 for m=32"),
        # One group of a quarter of the rows makes tall tiles useful, but not where rows are few.
        (
            tiled(256, 64),
            grouped(groups=128, m=512, distribution="skewed"),
            A100,
            "blocks-fit",
            "block_m=256",
        ),
        (tiled(64, 256), grouped(n=64), A100, "blocks-fit", "block_n=256 for n=64"),
        (
            tiled(16, 16, 16, num_warps=1),
            grouped(groups=1, m=2**26, n=2**14),
            A100,
            "grid",
            f"{2**32} blocks",
        ),
        (tiled(256, 128), grouped(), A100, "accumulators", "256 > 128 accumulators"),
        (
            tiled(128, 128, 64, num_warps=4, num_stages=1),
            grouped(dtype="float32"),
            A100,
            "registers",
            "> 320 registers",
        ),
        (
            tiled(128, 128, 128, num_warps=8, num_stages=4),
            grouped(),
            A100,
            "shared-memory",
            "196608 > 166912 bytes",
        ),
        (tiled(num_stages=5), grouped(k=64), A100, "stages-filled", "5 stages, 2 steps"),
        # At most (20 + 4 * 15) // 16 = 5 rows of tiles, whatever the offsets.
        (tiled(16, group_m=16, num_warps=2), grouped(4, 20), A100, "group-differs", "at most 5 x 64 tiles"),
        (
            persistent(),
            grouped(1, 64, 132 * 64),
            H100,
            "several-tiles-a-program",
            "132 tiles expected, 132 programs",
        ),
        (
            persistent(programs_per_core=2),
            grouped(1, 64, 264 * 64),
            H100,
            "several-tiles-a-program",
            "264 tiles expected, 264 programs",
        ),
        (split_k(), grouped(1, 64, 529 * 64), H100, "tiles-too-few", "529 tiles expected, 132 cores"),
        (split_k(split=16), grouped(1, 64, 64, 480), H100, "slices-work", "15 steps of block_k in 16 slices"),
        (split_k(split=16), grouped(1, 64, 64, 544), H100, "slices-work", "17 steps of block_k in 16 slices"),
        (
            split_k(split=16, num_stages=4),
            grouped(1, 64, 64, 512),
            H100,
            "slices-fill-stages",
            "4 stages, 1 steps a slice",
        ),
        (split_k(split=2), grouped(1, 2**21, 65), UNKNOWN, "parts-fit", f"{4 * 2**22 * 65} bytes"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found, said = refused_by(candidate, described, device)
    assert found == rule
    assert seen in said


@for_each(
    ("candidate", "described", "device"),
    [
        (tiled(), grouped(dtype="bfloat16"), UNKNOWN),
        (tiled(), grouped(m=2**31 - 1 - 16 * 256, n=64), A100),
        (tiled(16, num_warps=2), grouped(groups=1024, **BALANCED), A100),
        (tiled(64), grouped(groups=128, **BALANCED), A100),
        (tiled(128), grouped(groups=128, distribution="skewed"), A100),
        (tiled(128, 128, num_warps=8), grouped(groups=1), A100),
        (tiled(128, 128, 128, num_warps=8, num_stages=3), grouped(), A100),
        (tiled(num_stages=4), grouped(k=64), A100),
        (tiled(16, group_m=4, num_warps=2), grouped(4, 20), A100),
        (persistent(), grouped(1, 65, 67 * 64), H100),
        (persistent(programs_per_core=2), grouped(1, 64, 265 * 64), H100),
        (split_k(), grouped(1, 64, 528 * 64), H100),
        (split_k(split=16), grouped(1, 64, 64, 512), H100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    require_legal(described, device, candidate)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    groups=st.integers(1, 1100),
    m=st.integers(0, 40_000),
    n=st.integers(0, 5000),
    k=st.integers(0, 5000),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    layout=st.sampled_from(["nn", "nt"]),
    distribution=st.sampled_from(DISTRIBUTIONS),
    device=st.sampled_from([A100, H100, MI300, T4, UNKNOWN]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(
    groups, m, n, k, dtype, layout, distribution, device
):
    described = grouped(groups, m, n, k, dtype=dtype, layout=layout, distribution=distribution)
    for name in NAMES:
        found = variant("grouped_gemm", name)
        block = found.space("default")
        legal = found.legal(described, device, block)
        reasons = found.refusals(described, device, block)
        assert len(reasons) == block.length - legal.sum()
        assert all(reason.reason and reason.seen for reason in reasons)
        kept = block.take(legal)
        work = found.work(described, kept.columns, device).columns(kept.length)
        assert (work["accumulators"] <= 128).all()
        assert (work["flops"] >= OP.flops(described) * (1 - 1e-9)).all()
        assert (work["traffic_bytes"] >= OP.traffic_bytes(described) * (1 - 1e-9)).all()
        assert (
            work["programs"] * kept.columns["block_m"] * kept.columns["block_n"] >= m * n * (1 - 1e-9)
        ).all()
        if device.shared_bytes_per_block:
            assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
        # The grid holds every tile that is expected.
        most = row_tiles_bound(described, kept.columns["block_m"])
        assert (expected_row_tiles(described, kept.columns["block_m"]) <= most * (1 + 1e-9)).all()


@for_each("device", [A100, H100, MI300])
@for_each("distribution", DISTRIBUTIONS)
@for_each(("groups", "n", "k"), [(8, 28672, 4096), (8, 4096, 14336), (128, 1536, 2048), (256, 512, 7168)])
@for_each("m", [1, 16, 256, 4096, 32768])
def test_typical_problems_have_candidates(device, distribution, groups, n, k, m):
    described = grouped(groups, m, n, k, layout="nt", dtype="bfloat16", distribution=distribution)
    table = candidates(described, device, subset="default", backends=["triton"])
    counts = {block.variant: block.length for block in table.blocks}
    assert counts["triton_grouped"] >= 10
    if m >= 256:
        assert counts["triton_grouped_persistent"] >= 5
    # Splitting is for few tiles.
    if m * n <= 8 * 4096:
        assert counts["triton_grouped_split_k"] >= 3
    if m * n > 2**25:
        assert "triton_grouped_split_k" not in counts


def test_the_quick_subsets_are_of_a_quick_size():
    assert [variant("grouped_gemm", name).space("default").length for name in NAMES] == [55, 55, 55]
    assert [variant("grouped_gemm", name).space().length for name in NAMES] == [8000, 24000, 32000]


# Work


def test_work_of_balanced_groups():
    # 25 rows in each of 4 groups: two tiles of 16; 100 columns: four tiles of 32; k of 70: three steps of 32.
    described = grouped(4, 100, 100, 70, **BALANCED)
    work = work_of(tiled(16, 32, 32, num_warps=2), described, A100)
    assert work["programs"] == 4 * 2 * 4
    assert work["inner_steps"] == 3
    assert work["flops"] == 2 * (8 * 16) * (4 * 32) * (3 * 32)
    # A is read for every column of tiles, the weights of a group for each of its rows of tiles.
    assert work["traffic_bytes"] == 2 * (100 * 70 * 4 + 8 * 70 * 100 + 100 * 100)
    assert work["accumulators"] == 16 * 32 / 64
    assert (work["warps"], work["calls"], work["scratch_bytes"]) == (2, 1, 0)
    assert work_of(persistent(16, 32, 32, num_warps=2), described, A100) == work


def test_work_of_slices():
    # As above; 3 steps in 2 slices are padded to 4.
    described = grouped(4, 100, 100, 70, **BALANCED)
    work = work_of(split_k(16, 32, 32, num_warps=2, split=2), described, A100)
    assert (work["programs"], work["inner_steps"], work["calls"]) == (2 * 4 * 2 * 4, 2, 2)
    assert work["flops"] == 2 * (8 * 16) * (4 * 32) * (4 * 32) + 2 * 100 * 100
    assert work["scratch_bytes"] == 4 * 2 * 100 * 100
    whole = work_of(tiled(16, 32, 32, num_warps=2), described, A100)
    assert work["traffic_bytes"] == whole["traffic_bytes"]


def test_work_follows_the_distribution():
    # 4096 rows: one tile of 32 for each of 128 balanced groups; by chance every second group has more than 32.
    counts = {}
    for distribution in DISTRIBUTIONS:
        described = grouped(128, 4096, 32, 4096, distribution=distribution)
        counts[distribution] = work_of(tiled(32, 32), described, A100)["programs"]
    assert counts["balanced"] == 128
    assert counts["random"] == pytest.approx(128 * 1.46, rel=0.02)
    assert counts["skewed"] == pytest.approx(179, rel=0.03)


def test_shared_memory_is_that_of_the_product():
    gemm = problem("gemm", m=512, n=4096, k=4096, dtype="float16")
    sizes = (128, 128, 16)
    plain = Candidate.of("triton_tiled", tiled(*sizes).parameters)
    sliced = Candidate.of("triton_split_k", split_k(*sizes).parameters)
    for target in ("sm80", "sm90", "sm100", "gfx942"):
        device = DEVICES[target]
        for candidate, alike in (
            (tiled(*sizes), plain),
            (persistent(*sizes), plain),
            (split_k(*sizes), sliced),
        ):
            found, expected = work_of(candidate, grouped(), device), work_of(alike, gemm, device)
            assert found["shared_bytes"] == expected["shared_bytes"] > 0


def test_two_thousand_candidates_are_checked_at_once():
    """No rule may loop over candidates: a block of 24000 gives what its rows give one at a time."""
    described = grouped(groups=60, m=700, n=200, k=300, distribution="skewed")
    found = variant("grouped_gemm", "triton_grouped_persistent")
    block = found.space()
    legal = found.legal(described, A100, block)
    work = found.work(described, block.columns, A100).columns(block.length)
    for row in range(0, block.length, 1777):
        candidate = block.at(row)
        single = CandidateTable.of([candidate]).blocks[0]
        assert found.legal(described, A100, single)[0] == legal[row]
        alone = work_of(candidate, described, A100)
        assert alone == {name: pytest.approx(column[row], nan_ok=True) for name, column in work.items()}


# Results, under the interpreter

SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "num_stages": 2}


def test_results_quickly():
    values = {"groups": 4, "m": 20, "n": 15, "k": 18, "dtype": "bfloat16", "distribution": "skewed"}
    interpret(
        "grouped_gemm",
        [
            (tiled(**SMALL), values),
            (persistent(**SMALL), {**values, "n": 17, "layout": "nt", "dtype": "float32"}),
            (split_k(**SMALL, split=2), {**values, "k": 33, "dtype": "float16"}),
        ],
    )


SHAPES = (
    {"groups": 3, "m": 40, "n": 33, "k": 37},
    {"groups": 5, "m": 64, "n": 32, "k": 32},
    {"groups": 40, "m": 5, "n": 16, "k": 7},  # more groups than rows, and than slots of the next power of two
    {"groups": 1, "m": 17, "n": 5, "k": 16},
    {"groups": 2, "m": 1, "n": 1, "k": 1},
    {"groups": 4, "m": 0, "n": 16, "k": 16},
    {"groups": 4, "m": 9, "n": 0, "k": 16},
    {"groups": 4, "m": 9, "n": 3, "k": 0},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "of_nn", "of_nt"),
    [("float32", "skewed", "balanced"), ("float16", "balanced", "random"), ("bfloat16", "random", "skewed")],
)
def test_results_of_every_shape(dtype, of_nn, of_nt):
    cases = []
    for layout, distribution in (("nn", of_nn), ("nt", of_nt)):
        for shape in SHAPES:
            values = {**shape, "dtype": dtype, "layout": layout, "distribution": distribution}
            cases += [(tiled(**SMALL), values), (persistent(**SMALL), values)]
            if shape["k"] > 16:
                cases.append((split_k(**SMALL, split=2), values))
    interpret("grouped_gemm", cases)


@pytest.mark.slow
def test_results_of_config_corners():
    values = {"groups": 3, "m": 150, "n": 40, "k": 40, "dtype": "float16"}
    corners = [
        (16, 64, 32),
        (64, 16, 32),
        (32, 32, 64),
        (128, 32, 16),
    ]
    cases = []
    for sizes in corners:
        for group_m in (1, 16):
            cases.append((tiled(*sizes, group_m=group_m), values))
        cases.append((persistent(*sizes, group_m=4, programs_per_core=2), {**values, "layout": "nt"}))
    cases.append((tiled(), {**values, "dtype": "float32", "allow_tf32": True}))
    for split, k in ((2, 33), (4, 128), (16, 260)):
        cases.append((split_k(16, 32, 16, num_warps=1, split=split), {**values, "m": 20, "k": k}))
    interpret("grouped_gemm", cases)


_CONTAINED = """
import torch
from kernelcast.kernels import operation, problem, variant

described = problem("grouped_gemm", groups=4, m=24, n=16, k=32)
a, b, _ = operation("grouped_gemm").make_inputs(described, seed=0, device="cpu")
offsets = torch.tensor([0, 9, 9, 24], dtype=torch.int32)
a[8], b[0], b[2] = torch.nan, torch.inf, torch.nan
config = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "num_warps": 1, "num_stages": 2}
for name, more in (("triton_grouped", {}), ("triton_grouped_persistent", {"programs_per_core": 1}),
                   ("triton_grouped_split_k", {"split_k": 2})):
    out = variant("grouped_gemm", name).build(described, {**config, **more})(a, b, offsets)
    assert out[8].isnan().all(), name
    assert torch.cat([out[:8], out[9:]]).isfinite().all(), name
    expected = operation("grouped_gemm").reference(described, a, b, offsets)
    assert operation("grouped_gemm").check(described, expected, out) is None, name
    # Offsets that move rows to other groups change nothing in what was built.
    moved = torch.tensor([1, 1, 2, 24], dtype=torch.int32)
    launch = variant("grouped_gemm", name).build(described, {**config, **more})
    launch(a, b, offsets)
    expected = operation("grouped_gemm").reference(described, a, b, moved)
    assert operation("grouped_gemm").check(described, expected, launch(a, b, moved)) is None, name
"""

# Three programs make the tiles in the order 0, 3, 1, 4, 2, 5. Tile 2 holds the five rows of a group, so what it wrote beyond
# them would be found in tile 3; the last group ends with its tile.
_OVERWRITTEN = """
import torch
from kernelcast.kernels import memory, operation, problem, variant

described = problem("grouped_gemm", groups=4, m=85, n=16, k=16)
a, b, _ = operation("grouped_gemm").make_inputs(described, seed=0, device="cpu")
offsets = torch.tensor([32, 37, 53, 85], dtype=torch.int32)
config = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 1, "num_stages": 2}
with memory.poisoned():
    out = variant("grouped_gemm", "triton_grouped_persistent").build(described, {**config, "programs_per_core": 1})(
        a, b, offsets
    )
expected = operation("grouped_gemm").reference(described, a, b, offsets)
assert operation("grouped_gemm").check(described, expected, out) is None
"""


def run_interpreted(code):
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_empty_groups_are_not_read_and_one_launcher_serves_all_offsets():
    run_interpreted(_CONTAINED)


@pytest.mark.slow
def test_a_tile_writes_no_rows_of_the_next_group():
    run_interpreted(_OVERWRITTEN)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    cases = []
    for distribution in DISTRIBUTIONS:
        for shape in (
            *SHAPES,
            {"groups": 8, "m": 3000, "n": 640, "k": 512},
            {"groups": 128, "m": 300, "n": 96, "k": 256},
        ):
            for layout in ("nn", "nt"):
                values = {**shape, "dtype": dtype, "layout": layout, "distribution": distribution}
                cases += [(tiled(16, 32, 32, num_warps=2), values), (persistent(), values)]
                if shape["k"] >= 256:
                    cases.append((split_k(split=4), values))
    on_gpu("grouped_gemm", cases)


# Offline compilation


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(
    ("candidate", "values"),
    [
        (tiled(16, 64, 128, num_warps=4, num_stages=4), {"layout": "nt"}),
        (tiled(64, 128, 32, num_warps=4, num_stages=4), {"dtype": "bfloat16"}),
        (persistent(128, 128, 32, num_warps=8, num_stages=3), {"layout": "nt", "dtype": "bfloat16"}),
        (tiled(32, 64, 64, num_warps=4, num_stages=3), {"n": 4097, "k": 4099, "groups": 3}),
        (split_k(16, 64, 64, num_warps=4, num_stages=4), {"layout": "nt", "m": 8, "dtype": "bfloat16"}),
    ],
)
def test_what_is_legal_compiles_as_stated(compiler, target, candidate, values):  # noqa: F811
    assert_compiles(compiler, candidate, grouped(**values), target, tensor_cores=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm89", "sm120", "gfx950"])
def test_other_targets_compile(compiler, target):  # noqa: F811
    assert_compiles(compiler, persistent(32, 64, 64), grouped(layout="nt"), target, tensor_cores=True)


@pytest.mark.slow
def test_float32_runs_without_tensor_cores_unless_tf32_is_allowed(compiler):  # noqa: F811
    for allow_tf32 in (False, True):
        described = grouped(dtype="float32", allow_tf32=allow_tf32)
        assert_compiles(compiler, tiled(64, 64, 16), described, "sm80", tensor_cores=allow_tf32)
