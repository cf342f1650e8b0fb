"""The estimate of a tiled product's time: its parts by hand, what it must follow, and where it says nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from cases import for_each

from kernelcast import kernels
from kernelcast.featurizer import tiles
from kernelcast.featurizer.tiles import TILE_UNITS, balance, tile_features
from kernelcast.kernels import Candidate, CandidateTable
from kernelcast.kernels.devices import device

A100 = device("a100-sxm4-80gb")
TILE = {"block_m": 64, "block_n": 128, "block_k": 32, "group_m": 8, "num_stages": 4, "num_warps": 4}


def found(problem, *changes, where=A100, variant="triton_tiled"):
    """Column -> its values for TILE with each of the changes."""
    (block,) = CandidateTable.of(Candidate.of(variant, TILE | change) for change in changes or ({},)).blocks
    out = np.full((len(TILE_UNITS), block.length), np.nan)
    tile_features(problem, block, where, out)
    return dict(zip(TILE_UNITS, out, strict=True))


def gemm(m, n, k, **more):
    return kernels.problem("gemm", m=m, n=n, k=k, **{"dtype": "float16", "layout": "nt", **more})


def test_the_parts_of_one_tile_by_hand():
    x = found(gemm(256, 512, 1024))
    macs = 312e12 / 2 / 108 / 1.41e9
    multiply = 64 * 128 * 32 / macs
    assert x["tile_turns"] == [1]  # 16 tiles on 108 cores
    assert x["tile_last_turn"] == pytest.approx([16 / 108])
    assert [x[f"tile_waste_{side}"][0] for side in "mnk"] == [1, 1, 1]
    assert x["tile_load"] == pytest.approx([math.log2(108 / 16)])
    assert x["tile_traffic"] == pytest.approx([0])  # both operands stay in the cache
    assert x["tile_fill"] == pytest.approx([math.log2(32 / 3)])
    assert (x["tile_segment_a"], x["tile_segment_b"]) == ([6], [6])  # 32 steps of k in 2 bytes each
    loads = (64 * 32 + 32 * 128) / 8 / 32  # of a whole warp, 16 bytes a thread
    assert x["tile_warp_loads"] == pytest.approx([math.log2(loads / 4)])
    assert x["tile_load_density"] == pytest.approx([math.log2(loads / (64 * 128 * 32) * 1024)])
    assert x["tile_issue_share"] == pytest.approx([math.log2(8 * loads / multiply)])
    assert x["tile_shared_share"] == pytest.approx([math.log2((64 * 2 + 128 * 2) * 32 * 2 / 128 / multiply)])
    assert x["tile_page_share"] == pytest.approx([math.log2(0.01)])
    # One block of four warps on a core; its tile waits for memory, with three loads ahead.
    assert x["tile_active_warps"] == [0]
    assert x["tile_bound"] == pytest.approx([math.log2(max(multiply, 8 * loads, 192, 700 / 3) / multiply)])


def test_shared_memory_and_registers_bound_the_blocks_of_a_core():
    few = found(gemm(4096, 4096, 4096), {}, {"block_m": 128, "num_stages": 5, "block_k": 64})
    shared = np.array([3 * (64 + 128) * 32 * 2, 4 * (128 + 128) * 64 * 2])
    registers = np.array([64 + 40 + 12, 128 + 40 + 32])  # accumulators, addresses, operands
    by_hand = np.minimum(164 * 1024 // (shared + 1024), 65536 // (128 * registers))
    np.testing.assert_array_equal(few["tile_resident"], by_hand)


def test_a_ragged_size_is_padded_and_the_last_turn_is_not_full():
    x = found(gemm(65, 128 * 108, 33))
    assert x["tile_waste_m"] == pytest.approx([128 / 65])
    assert x["tile_waste_k"] == pytest.approx([64 / 33])
    assert (x["tile_turns"], x["tile_last_turn"]) == ([2], [1])
    assert found(gemm(65, 128 * 109, 32))["tile_last_turn"] == pytest.approx([218 / 108 / 3])


def test_narrow_rows_load_more_often():
    wide, narrow = (found(gemm(1024, 1024, k))["tile_warp_loads"] for k in (1024, 1025))
    assert narrow - wide == pytest.approx(math.log2(8))  # 2 bytes at a time instead of 16


def test_pages_count_where_rows_of_k_lie_far_apart():
    tiles = {"block_k": 32}, {"block_k": 64}
    short, long = (found(gemm(4096, 4096, k), *tiles) for k in (4096, 65536))
    assert (short["tile_page_share"] == math.log2(0.01)).all()
    assert long["tile_page_share"][0] - long["tile_page_share"][1] == pytest.approx(1, abs=0.02)
    assert long["tile_estimate"][0] > long["tile_estimate"][1] + 0.3
    # Where k is not what lies together, its length does not matter.
    assert found(gemm(4096, 4096, 65536, layout="tn"))["tile_page_share"] == math.log2(0.01)


def test_without_tensor_cores_a_fuller_core_is_faster():
    many, few = found(
        gemm(8192, 8192, 4096, dtype="float32"), {"num_stages": 3, "block_m": 128}, {"block_m": 128}
    )["tile_estimate"]
    assert many < few  # one block of four warps a core cannot hide what two can


@for_each("layout", ["nn", "nt", "tn", "tt"])
@for_each("sizes", [(1, 1, 1), (3, 2**20, 7), (2**20, 16, 2**20), (8192, 8192, 8192)], ids=str)
def test_it_is_finite_and_never_beats_the_least_time(layout, sizes):
    x = found(
        gemm(*sizes, layout=layout), {}, {"num_stages": 1}, {"block_m": 16, "block_k": 128, "num_warps": 1}
    )
    assert all(np.isfinite(column).all() for column in x.values())
    assert (x["tile_estimate"] > -0.01).all()
    assert (x["tile_load"] >= -1e-9).all()
    assert (x["tile_traffic"] >= -1e-9).all()


def test_padded_rows_and_the_two_sides_swapped():
    assert (
        found(gemm(512, 512, 500, lda=4096))["tile_warp_loads"]
        == found(gemm(512, 512, 500))["tile_warp_loads"]
    )
    one = found(gemm(1024, 4096, 512, layout="nt"))
    other = found(gemm(4096, 1024, 512, layout="nt"), {"block_m": 128, "block_n": 64})
    for name in ("tile_load", "tile_turns", "tile_issue_share", "tile_shared_share"):
        assert one[name] == pytest.approx(other[name]), name


def test_where_nothing_is_known_nothing_is_said():
    unknown = dataclasses.replace(A100, clock_hz=0.0)
    cpu = dataclasses.replace(A100, kind="cpu")
    for where in (unknown, cpu):
        assert all(np.isnan(column).all() for column in found(gemm(64, 64, 64), where=where).values())
        assert math.isnan(balance(gemm(64, 64, 64), where))
    out = np.full((len(TILE_UNITS), 1), np.nan)
    (vendor,) = CandidateTable.of([Candidate("vendor")]).blocks
    tile_features(gemm(64, 64, 64), vendor, A100, out)
    assert np.isnan(out).all()


def test_balance_is_the_time_of_arithmetic_over_that_of_traffic():
    flops, moved = 2.0 * 1024 * 2048 * 4096, 2.0 * (1024 * 4096 + 4096 * 2048 + 1024 * 2048)
    assert balance(gemm(1024, 2048, 4096), A100) == pytest.approx(math.log2(flops / 312e12 * 2039e9 / moved))


@pytest.mark.skipif(not tiles._COMPILED, reason="kernelcast was installed without a C compiler")
@pytest.mark.parametrize("where", ["a100-sxm4-80gb", "h100-sxm5-80gb", "t4"])
def test_the_compiled_estimate_is_that_of_numpy(where, monkeypatch):
    rng = np.random.default_rng(0)
    changes = [
        {"block_m": int(m), "block_n": int(n), "block_k": int(k), "num_stages": int(s), "num_warps": int(w)}
        for m, n, k, s, w in zip(
            *(
                rng.choice(sides, 40)
                for sides in ([16, 32, 128, 256], [16, 64, 256], [16, 32, 128], [1, 2, 5], [1, 4, 8])
            ),
            strict=True,
        )
    ]
    kinds = set()
    for number in range(60):
        m, n, k = (int(2 ** rng.uniform(0, 14)) for _ in range(3))
        # Rows that allow wide loads, narrow ones, and ones that cost pages; products with and without tensor cores.
        m, n, k = (size * (1, 1, 8)[number % 3] for size in (m, n, k))
        described = gemm(
            m, n, k,
            dtype=("float16", "float32", "bfloat16")[number % 3],
            allow_tf32=number % 2 == 0,
            layout=("nn", "nt", "tn", "tt")[number % 4],
        )  # fmt: skip
        compiled = found(described, *changes, where=device(where))
        sizes = tiles._sizes(described, device(where))
        kinds.add((sizes.simt, sizes.paged, sizes.narrow, *sizes.cached))
        monkeypatch.setattr(tiles, "_COMPILED", False)
        by_numpy = found(described, *changes, where=device(where))
        monkeypatch.setattr(tiles, "_COMPILED", True)
        for name in TILE_UNITS:
            np.testing.assert_allclose(compiled[name], by_numpy[name], rtol=1e-12, atol=1e-12, err_msg=name)
    assert len(kinds) >= 8


@pytest.mark.skipif(not tiles._COMPILED, reason="kernelcast was installed without a C compiler")
def test_the_compiled_estimate_stays_within_its_arrays():
    sizes = tiles._sizes(gemm(64, 64, 64), A100)
    numbers, facts, out = sizes.numbers, np.ones((25, 3)), np.full((24, 5), 7.0)
    tiles._tiles.estimate(numbers, facts, out[:, 1:4])
    assert (out[:, [0, 4]] == 7.0).all()
    assert not (out[:, 1:4] == 7.0).any()
    for bad in (
        (numbers[:, :-1], facts, out[:, :3]),
        (numbers[0], facts, out[:, :3]),
        (numbers, facts[:-1], out[:, :3]),
        (numbers, facts, out),
        (numbers, facts, out[:-1, :3]),
        (numbers, facts.astype(np.float32), out[:, :3]),
        (numbers, np.ones((3, 25)).T, out[:, :3]),
        (numbers, facts, out[:, ::2]),
    ):
        with pytest.raises(ValueError, match="expected"):
            tiles._tiles.estimate(*bad)
    fixed = np.zeros((24, 3))
    fixed.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        tiles._tiles.estimate(numbers, facts, fixed)
    with pytest.raises(TypeError, match="3 arguments"):
        tiles._tiles.estimate(numbers, facts)
