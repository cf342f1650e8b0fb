"""The Triton variants of gemm: rules, work, the quick subset, and results under Triton's interpreter."""

from __future__ import annotations

import csv
import io
import math
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import interpret_script

from kernelcast.kernels import (
    Block,
    Candidate,
    CandidateTable,
    Device,
    candidates,
    memory,
    operation,
    problem,
    variant,
)
from kernelcast.kernels.registry import require_legal
from kernelcast.kernels.triton_rules import input_precision, needs_wide_offsets, operands

A100 = Device("a100", "gpu", "nvidia", "sm80", 108, shared_bytes_per_block=166_912)
H100 = Device("h100", "gpu", "nvidia", "sm90", 132, shared_bytes_per_block=232_448)
T4 = Device("t4", "gpu", "nvidia", "sm75", 40, shared_bytes_per_block=65_536)
MI300 = Device("mi300x", "gpu", "amd", "gfx942", 304, warp_size=64, shared_bytes_per_block=65_536)
UNKNOWN = Device("new", "gpu", "nvidia", "sm80", 10)
CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)
GPUS = (A100, H100, T4, MI300, UNKNOWN)

TILE = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "autoheuristic"


def tiled(**changes):
    return Candidate.of("triton_tiled", {**TILE, **changes})


def split(**changes):
    return Candidate.of("triton_split_k", {**TILE, "split_k": 4, **changes})


def columns(**changes):
    return {name: np.array([value]) for name, value in {**TILE, **changes}.items()}


def refused(candidate, described, device):
    block = CandidateTable.of([candidate]).blocks[0]
    (refusal,) = variant("gemm", candidate.variant).refusals(described, device, block)
    return str(refusal)


def half(m=4096, n=4096, k=4096, **options):
    return problem("gemm", m=m, n=n, k=k, **{"dtype": "float16", **options})


# Rules


@for_each(
    ("candidate", "described", "device", "seen"),
    [
        (tiled(), half(), CPU, "cpu is a cpu"),
        (tiled(), half(dtype="bfloat16"), T4, "bfloat16 on sm75"),
        (tiled(num_warps=64), half(), A100, "2048 threads"),
        (tiled(), half(m=2**31), A100, f"m={2**31}"),
        (tiled(block_m=16, block_n=16), half(m=2**28, n=2**26, k=64), A100, f"{2**46} blocks"),
        (tiled(block_m=64, num_warps=2), half(m=16), A100, "block_m=64 for m=16"),
        (tiled(block_k=128), half(k=17, lda=32), A100, "block_k=128 for k=17"),
        # Four of five stages of (128 + 128) x 128 two-byte elements.
        (
            tiled(block_m=128, block_n=128, block_k=128, num_stages=5, num_warps=8),
            half(),
            A100,
            "262144 > 166912 bytes",
        ),
        (tiled(block_m=256, block_n=128, num_warps=4), half(), A100, "256 > 128 accumulators"),
        (
            tiled(block_m=128, block_n=32, block_k=128, num_warps=1, num_stages=1),
            half(),
            A100,
            "about 448 > 320",
        ),
        (tiled(block_m=16, block_n=16, block_k=16, num_warps=8), half(), A100, "512 bytes for 256 threads"),
        (tiled(num_stages=5), half(k=64), A100, "5 stages, 2 steps"),
        (tiled(group_m=16), half(m=256), A100, "group_m=16, 4 x 64 tiles"),
        (split(split_k=16), half(k=256), A100, "8 steps of block_k in 16 slices"),
        (split(split_k=8), half(k=320), A100, "10 steps of block_k in 8 slices"),
        (split(num_stages=4), half(k=128), A100, "4 stages, 1 steps a slice"),
        (split(split_k=16), half(m=2**13, n=2**13), A100, f"{2**32} bytes"),
        (split(), half(k=0), A100, "0 steps of block_k in 4 slices"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, seen):
    assert seen in refused(candidate, described, device)


@pytest.mark.parametrize(
    ("candidate", "described", "device"),
    [
        (tiled(), half(), A100),
        (tiled(block_m=32), half(m=16), A100),
        (tiled(num_stages=4), half(k=64), A100),
        (tiled(group_m=16), half(m=64 * 9), A100),
        (tiled(block_m=128, block_n=128, block_k=128, num_stages=5, num_warps=8), half(), UNKNOWN),
        (split(split_k=8), half(k=256), A100),
        (tiled(block_k=16, num_stages=1), half(m=37, n=45, k=0), A100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    require_legal(described, device, candidate)


def test_stages_of_shared_memory_by_architecture():
    """sm80 holds one tile less than stages, sm90's warp groups all of them: four of (128 + 128) x 64 at the limit."""
    candidate = tiled(block_m=128, block_n=128, block_k=64, num_stages=5, num_warps=8)
    work = variant("gemm", "triton_tiled").work
    cells = columns(**candidate.parameters)
    assert work(half(), cells, A100).shared_bytes == 4 * 256 * 64 * 2
    assert work(half(), cells, H100).shared_bytes == 5 * 256 * 64 * 2
    require_legal(half(), A100, candidate)
    assert "163840" not in refused(candidate, half(), MI300)
    # float32 products without TF32 read registers on every architecture.
    assert work(half(dtype="float32"), cells, H100).shared_bytes == 4 * 256 * 64 * 4


def test_precision_follows_permission_and_hardware():
    allowed, denied = half(dtype="float32", allow_tf32=True), half(dtype="float32")
    assert [input_precision(allowed, name) for name in ("sm80", "sm75", "gfx942", "gfx950", "")] == [
        "tf32",
        "ieee",
        "tf32",
        "ieee",
        "tf32",
    ]
    assert input_precision(denied, "sm80") == "ieee"


def test_offsets_widen_before_they_overflow():
    assert not needs_wide_offsets(half(m=32768, n=1024, k=32768))
    assert needs_wide_offsets(half(m=65536, n=64, k=32768))
    # A large leading dimension counts, whatever the dimension itself.
    assert needs_wide_offsets(half(m=4096, n=64, k=64, lda=2**20))
    assert needs_wide_offsets(half(m=65536, n=65536, k=64))


def test_strides_of_the_four_layouts():
    strides = {
        layout: [operand.strides for operand in operands(half(m=3, n=5, k=7, layout=layout, lda=11, ldb=13))]
        for layout in ("nn", "nt", "tn", "tt")
    }
    assert strides == {
        "nn": [(11, 1), (13, 1)],
        "nt": [(11, 1), (1, 13)],
        "tn": [(1, 11), (13, 1)],
        "tt": [(1, 11), (1, 13)],
    }


sizes = st.integers(min_value=0, max_value=3000)


@settings(max_examples=examples(40), deadline=None)
@given(
    m=sizes,
    n=sizes,
    k=sizes,
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    device=st.sampled_from(GPUS),
    name=st.sampled_from(["triton_tiled", "triton_split_k"]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(m, n, k, dtype, device, name):
    described = problem("gemm", m=m, n=n, k=k, dtype=dtype)
    found = variant("gemm", name)
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
    assert (work["flops"] >= 2.0 * m * n * k).all()
    assert (work["traffic_bytes"] >= described.element_bytes * min(m * n, 1)).all()
    if name == "triton_split_k":
        assert (work["inner_steps"] * kept.columns["block_k"] * (kept.columns["split_k"] - 1) < k).all()


# Spaces


def test_the_quick_subset():
    block = variant("gemm", "triton_tiled").space("default")
    rows = set(zip(*(column.tolist() for column in block.columns.values()), strict=True))
    assert 20 <= block.length <= 60
    assert len(rows) == block.length
    assert list(block.columns) == ["block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages"]
    assert set(block.columns["group_m"]) == {8}
    for parameter in variant("gemm", "triton_tiled").parameters:
        assert set(block.columns[parameter.name].tolist()) <= set(parameter.values)
    split_block = variant("gemm", "triton_split_k").space("default")
    small = block.columns["block_m"] * block.columns["block_n"] <= 64 * 64
    assert split_block.length == 2 * small.sum() == 54
    assert sorted(set(split_block.columns["split_k"].tolist())) == [4, 8]


def test_the_full_space_is_the_product():
    assert variant("gemm", "triton_tiled").space().length == 5 * 5 * 4 * 4 * 4 * 5
    assert variant("gemm", "triton_split_k").space().length == 5 * 5 * 4 * 4 * 4 * 5 * 4


@for_each("device", [A100, H100, MI300])
@for_each("described", [half(), half(m=1), half(n=1), half(m=17, n=33, k=64), half(k=32)])
def test_every_problem_has_quick_candidates(device, described):
    assert len(candidates(described, device, subset="default", backends=["triton"])) >= 4


# Work


def test_work_counts_padding_and_rereads():
    described = half(m=100, n=200, k=50)
    work = variant("gemm", "triton_tiled").work(described, columns(), A100)
    # 2 x 4 tiles of 64 x 64 over two steps of 32.
    assert work.programs == 8
    assert work.inner_steps == 2
    assert work.flops == 2 * 128 * 256 * 64
    # A is read for each of 4 columns of tiles, B for each of 2 rows.
    assert work.traffic_bytes == 2 * (100 * 50 * 4 + 50 * 200 * 2 + 100 * 200)
    assert (work.warps, work.calls, work.scratch_bytes) == (4, 1.0, 0.0)
    assert work.accumulators == 64 * 64 / 128
    # The operands are not aligned, so one tile of each is held: the output's tile is as large.
    assert work.shared_bytes == max(128 * 32 * 2, 64 * 64 * 2)


def test_work_of_split_k():
    described = half(m=64, n=64, k=1024)
    work = variant("gemm", "triton_split_k").work(described, columns(split_k=4), A100)
    assert work.programs == 4
    assert work.inner_steps == 8
    assert work.calls == 2.0
    assert work.scratch_bytes == 4 * 4 * 64 * 64
    assert work.flops == 2 * 64 * 64 * 1024 + 4 * 64 * 64
    assert work.shared_bytes == max(2 * 128 * 32 * 2, 64 * 64 * 4)


# Recorded measurements


@pytest.mark.data
@pytest.mark.slow
def test_recorded_failures_are_refused_and_recorded_winners_kept():
    """H100, random shapes: what failed to launch there is refused here, and of the best latency next to none is lost."""
    archive = DATA / "h100_mm_random.zip"
    if not archive.is_file():
        pytest.skip(f"no recorded measurements at {archive}")
    pattern = re.compile(r"triton_BLOCK-M=(\d+)_BLOCK-K=(\d+)_BLOCK-N=(\d+)_numstages=(\d+)_numwarps=(\d+)")
    latencies: dict[tuple, dict[tuple, list[float]]] = {}
    with zipfile.ZipFile(archive) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".txt")]
        text = files.read(name).decode()
    for row in csv.DictReader(io.StringIO(text.split("\n", 1)[1])):
        if match := pattern.search(row.pop("choice")):
            feedback = float(row.pop("feedback"))
            latencies.setdefault(tuple(row.items()), {}).setdefault(match.groups(), []).append(feedback)
    found = variant("gemm", "triton_tiled")
    kept_failures, kept = 0, []
    for facts, configs in latencies.items():
        row = dict(facts)
        described = problem(
            "gemm",
            m=int(row["m"]),
            n=int(row["n"]),
            k=int(row["k"]),
            dtype=row["mat1_dtype"].removeprefix("torch."),
            allow_tf32=row["using_tf32"] == "True",
            layout="".join("n" if row[f"mat{i}_stride_1"] == "1" else "t" for i in (1, 2)),
        )
        values = np.array(list(configs), dtype=int)
        names = ("block_m", "block_k", "block_n", "num_stages", "num_warps")
        block = Block(
            found.name,
            {**dict(zip(names, values.T, strict=True)), "group_m": np.full(len(values), 8)},
            len(values),
        )
        legal = found.legal(described, H100, block)
        medians = np.array([np.median(samples) for samples in configs.values()])
        kept_failures += int((np.isinf(medians) & legal).sum())
        kept.append(medians.min() / medians[legal].min())
    assert len(kept) == 322
    assert kept_failures == 0
    assert math.exp(np.mean(np.log(kept))) > 0.999
    assert min(kept) > 0.98


@pytest.mark.data
@pytest.mark.slow
def test_the_quick_subset_has_inductors_configs():
    """Every config that PyTorch tried on most problems of the A100 collection is in the quick subset."""
    archive = DATA / "a100_mm.zip"
    if not archive.is_file():
        pytest.skip(f"no recorded measurements at {archive}")
    pattern = re.compile(rb"triton_BLOCK-M=(\d+)_BLOCK-K=(\d+)_BLOCK-N=(\d+)_numstages=(\d+)_numwarps=(\d+)")
    with zipfile.ZipFile(archive) as files:
        found = pattern.findall(files.read("a100/a100_mm.txt"))
    counts: dict[tuple[bytes, ...], int] = {}
    for config in found:
        counts[config] = counts.get(config, 0) + 1
    common = {tuple(map(int, config)) for config, count in counts.items() if count > max(counts.values()) / 2}
    block = variant("gemm", "triton_tiled").space("default")
    names = ("block_m", "block_k", "block_n", "num_stages", "num_warps")
    assert len(common) == 29
    assert common <= set(zip(*(block.columns[name].tolist() for name in names), strict=True))


# Results. The interpreter is chosen when triton is imported, so it runs in a process of its own.

CHECK = """
import torch
from kernelcast.kernels import memory, operation, problem, variant

for name, config, values in cases:
    described = problem("gemm", **values)
    gemm = operation("gemm")
    inputs = gemm.make_inputs(described, seed=7, device="cpu")
    originals = [tensor.clone() for tensor in inputs]
    launch = variant("gemm", name).build(described, config)
    with memory.poisoned():
        first, second = launch(*inputs), launch(*inputs)
    wrong = gemm.check(described, gemm.reference(described, *inputs), first)
    if not torch.equal(first, second):
        wrong = "two runs differ"
    if not all(torch.equal(*pair) for pair in zip(inputs, originals)):
        wrong = "the inputs were changed"
    if not first.is_contiguous():
        wrong = "the output is not row-major"
    if wrong:
        failures.append([name, config, values, wrong])
"""


def interpret(cases):
    interpret_script(CHECK, cases)


def case(name="triton_tiled", config=None, *, m, n, k, **values):
    small = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 2}
    extra = {"split_k": 2} if name == "triton_split_k" else {}
    return [
        name,
        {**small, **extra, **(config or {})},
        {"m": m, "n": n, "k": k, "dtype": "float32", **values},
    ]


def test_results_quickly():
    interpret(
        [
            case(m=19, n=33, k=21, layout="tn", lda=24),
            case("triton_split_k", m=17, n=5, k=37, dtype="float16"),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton_tiled", "triton_split_k"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(name, dtype):
    interpret(
        [
            case(name, m=37, n=29, k=41, dtype=dtype, layout=layout, **leading)
            for layout in ("nn", "nt", "tn", "tt")
            for leading in ({}, {"lda": 48, "ldb": 53})
        ]
    )


@pytest.mark.slow
def test_results_of_degenerate_shapes():
    shapes = [(1, 1, 1), (1, 33, 17), (33, 1, 17), (16, 16, 16), (3, 5, 2), (31, 17, 1), (64, 32, 48)]
    empty = [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0)]
    interpret(
        [case(m=m, n=n, k=k) for m, n, k in shapes + empty]
        + [case("triton_split_k", m=m, n=n, k=k) for m, n, k in [*shapes, (5, 7, 0), (0, 5, 7)]]
    )


@pytest.mark.slow
def test_results_of_every_kind_of_config():
    interpret(
        [
            case(config={"block_m": 32, "block_n": 64, "block_k": 32}, m=45, n=70, k=50),
            case(config={"block_m": 64, "block_n": 16, "num_stages": 5, "num_warps": 1}, m=70, n=20, k=33),
            case(config={"group_m": 1}, m=100, n=40, k=16),
            case(config={"group_m": 4}, m=100, n=40, k=16),
            case(config={"group_m": 2}, m=80, n=40, k=16),
            case("triton_split_k", {"split_k": 4}, m=20, n=20, k=100),
            # Seven steps in four slices: the last is short. Three in sixteen: most are empty.
            case("triton_split_k", {"split_k": 4}, m=20, n=20, k=97),
            case("triton_split_k", {"split_k": 16}, m=20, n=20, k=40),
            # More elements than one program of the sum.
            case("triton_split_k", {"block_m": 64, "block_n": 64}, m=50, n=70, k=40),
        ]
    )


WIDE = (
    """
import kernelcast.kernels.triton_rules as rules
rules.MAX_INT32 = 100
"""
    + CHECK
)


@pytest.mark.slow
def test_results_with_64_bit_offsets():
    """The kernels for matrices of 2**31 elements, on small ones."""
    cases = [
        case(m=19, n=33, k=40, layout="tn", lda=24),
        case(m=1, n=33, k=40),
        case("triton_split_k", m=19, n=33, k=40, layout="nt"),
    ]
    interpret_script(WIDE, cases, alone=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_results_on_a_gpu(dtype, layout):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    gemm = operation("gemm")
    described = problem("gemm", m=200, n=136, k=1000, dtype=dtype, layout=layout)
    inputs = gemm.make_inputs(described, seed=7, device="cuda")
    reference = gemm.reference(described, *inputs)
    for candidate in (tiled(), tiled(block_m=32, num_stages=4), split(), split(split_k=2)):
        launch = variant("gemm", candidate.variant).build(described, candidate.parameters)
        with memory.poisoned():
            assert gemm.check(described, reference, launch(*inputs)) is None, candidate


@pytest.mark.parametrize(
    ("dtype", "rule"), [("float16", "sixteen-bit-tiles"), ("bfloat16", "dtype-supported")]
)
def test_tiles_of_16_bits_need_tensor_cores(dtype, rule):
    from triton_lab import T4, refused_by

    described = problem("gemm", m=4096, n=4096, k=4096, dtype=dtype)
    config = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
    found, said = refused_by(Candidate.of("triton_tiled", config), described, T4)
    assert found == rule
    assert f"{dtype} on sm75" in said
    # Multiply-adds in float32 need none.
    assert len(candidates(replace(described, dtype="float16"), T4, backends=["triton"])) > 0
