"""``triton_short`` of attention: rules, work, and results under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import CPU, DEVICES, T4, UNKNOWN, interpret, on_gpu, refused_by, work_of

from kernelcast.kernels import Candidate, candidates, operation, problem, variant

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
OP = operation("attention")
SHORT = variant("attention", "triton_short")
CONFIG = {"block_m": 32, "heads_per_program": 1, "num_warps": 2, "num_stages": 1}


def short(**changes):
    return Candidate.of("triton_short", {**CONFIG, **changes})


def values(q_len=128, kv_len=128, **changes):
    return {
        "batch": 2,
        "heads": 8,
        "q_len": q_len,
        "kv_len": kv_len,
        "head_dim": 64,
        "dtype": "float16",
        **changes,
    }


def attention(*lengths, **changes):
    return problem("attention", **values(*lengths, **changes))


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (short(), attention(), CPU, "needs-gpu", "cpu is a cpu"),
        (short(), attention(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (short(), attention(128, 257), A100, "row-fits", "keys that are seen: 257"),
        (short(), attention(257, 1000, causal=True), A100, "row-fits", "keys that are seen: 257"),
        (short(), attention(head_dim=257), A100, "head-fits", "head_dim=257"),
        (short(), attention(2**25, 16), A100, "offsets", f"{2**25} rows of head_dim=64"),
        (short(num_warps=64), attention(), A100, "block-threads", "2048 threads"),
        (short(block_m=64), attention(16, 16), A100, "queries-fit", "block_m=64 for 16 queries"),
        (
            short(heads_per_program=8, num_stages=2),
            attention(batch=1, heads=12),
            A100,
            "heads-divide",
            "heads_per_program=8, 12 heads of k and v",
        ),
        (short(num_stages=2), attention(), A100, "stages-filled", "num_stages=2, heads_per_program=1"),
        (
            short(heads_per_program=2, num_stages=3),
            attention(),
            A100,
            "stages-filled",
            "num_stages=3, heads_per_program=2",
        ),
        (short(block_m=64), attention(128, 256), A100, "accumulators", "64 x 256 values for 64 threads"),
        (short(), attention(dtype="float32"), A100, "registers", "about 888 > 320 registers"),
        (short(block_m=16, num_warps=4), attention(16, 16), A100, "threads-busy", "16 x 16 scores"),
        # Queries, keys and values of two heads at once, and the output: 16 + 2 x 64, twice, and 16 KiB.
        (
            short(block_m=64, heads_per_program=4, num_warps=4, num_stages=3),
            attention(128, 256, head_dim=128),
            A100,
            "shared-memory",
            f"{2 * (16 + 128) * 1024 + 32 * 1024} > 165888 bytes",
        ),
        (short(block_m=16), attention(1024, 16, batch=2**25), A100, "grid", f"{2**34} blocks"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found, message = refused_by(candidate, described, device)
    assert found == rule
    assert seen in message


@for_each(
    ("candidate", "described", "device"),
    [
        (short(num_warps=4), attention(128, 256), A100),
        (short(num_warps=4), attention(256, 1000, causal=True), A100),
        (short(), attention(16, 16), A100),
        (short(heads_per_program=4, num_stages=2), attention(batch=1, heads=12), A100),
        (short(heads_per_program=4, num_stages=3), attention(), A100),
        (short(block_m=64, num_warps=4), attention(128, 256), A100),
        (short(block_m=16, num_warps=8), attention(dtype="float32"), A100),
        (short(), attention(dtype="bfloat16"), UNKNOWN),
        (short(block_m=16), attention(0, 1, head_dim=1), MI300),
        (short(block_m=16, heads_per_program=8), attention(1, 200, batch=0, heads=3), MI300),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    assert refused_by(candidate, described, device) == ("", "")


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    q_len=st.integers(0, 400),
    kv_len=st.integers(1, 300),
    head_dim=st.integers(1, 300),
    batch=st.integers(0, 5),
    group=st.sampled_from([1, 4]),
    causal=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    device=st.sampled_from([A100, H100, T4, MI300, UNKNOWN]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(
    q_len, kv_len, head_dim, batch, group, causal, dtype, device
):
    described = attention(
        q_len, kv_len, head_dim=head_dim, batch=batch, kv_heads=8 // group, causal=causal, dtype=dtype
    )
    block = SHORT.space("default")
    legal = SHORT.legal(described, device, block)
    reasons = SHORT.refusals(described, device, block)
    assert len(reasons) == block.length - legal.sum()
    assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    work = SHORT.work(described, kept.columns, device).columns(kept.length)
    assert (work["accumulators"] <= 256).all()
    if device.shared_bytes_per_block:
        assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
    # Padding and re-reads only ever add to the definition's amounts.
    assert (work["flops"] >= OP.flops(described)).all()
    if q_len:
        assert (work["traffic_bytes"] >= OP.traffic_bytes(described)).all()
    # Every query row of every head has a place in one program.
    rows = kept.columns["block_m"] * kept.columns["heads_per_program"] * work["programs"]
    assert (rows >= batch * 8 * q_len).all()


@for_each("device", [A100, H100, MI300])
@for_each("head_dim", [32, 64, 80, 128])
@for_each("length", [16, 50, 128, 256])
def test_typical_problems_have_candidates(device, head_dim, length):
    for causal in (False, True):
        described = attention(length, length, batch=64, head_dim=head_dim, causal=causal)
        found = candidates(described, device, subset="default", backends=["triton"])
        assert sum(each.variant == "triton_short" for each in found) >= 4
    described = attention(length, length, batch=64, head_dim=min(head_dim, 64), dtype="float32")
    found = candidates(described, device, subset="default", backends=["triton"])
    assert sum(each.variant == "triton_short" for each in found) >= 1


def test_the_quick_subset():
    block = SHORT.space("default")
    assert block.length == 34
    assert len({block.at(row) for row in range(block.length)}) == block.length
    assert list(block.columns) == [each.name for each in SHORT.parameters]
    for parameter in SHORT.parameters:
        assert set(block.columns[parameter.name].tolist()) <= set(parameter.values)
    # Each of them can be legal.
    described = [attention(length, length, batch=64) for length in (16, 64, 128)]
    described += [attention(128, 128, batch=64, dtype="float32")]
    assert np.any([SHORT.legal(each, H100, block) for each in described], axis=0).all()


# Work


def test_work_counts_padding_and_rereads():
    described = attention(50, 70, batch=3, heads=4, head_dim=40)
    work = work_of(short(heads_per_program=4, num_stages=2), described, A100)
    # Twelve heads: two tiles of 32 of 50 queries each, 70 keys padded to 128, heads to 64; four heads a program.
    assert work["programs"] == 2 * 3
    assert work["inner_steps"] == 4
    assert work["flops"] == 12 * 2 * 32 * 128 * (4 * 64 + 5)
    assert work["traffic_bytes"] == 2 * 12 * 40 * (2 * 50 + 2 * 2 * 70)
    assert work["accumulators"] == 32 * (64 + 128) / 64
    # One buffer of queries, keys and values, and the weights of 32 x 128, which outweigh the output of 32 x 64.
    assert work["shared_bytes"] == 2 * (32 * 64 + 2 * 128 * 64 + 32 * 128)
    assert (work["warps"], work["calls"], work["scratch_bytes"]) == (2, 1, 0)


def test_work_of_heads_that_share_keys_and_of_a_causal_mask():
    described = attention(20, 100, heads=8, kv_heads=2, causal=True)
    work = work_of(short(block_m=64), described, A100)
    # Four heads of 20 queries are 80 rows, two tiles; no query sees more than 20 keys, which are padded to 32.
    assert work["programs"] == 2 * 2 * 2
    assert work["flops"] == 2 * 2 * 2 * 64 * 32 * (4 * 64 + 5)
    assert work["traffic_bytes"] == 2 * 4 * 64 * (2 * 80 + 2 * 2 * 20)
    # Queries, keys and values; one head a program, so that nothing is loaded ahead.
    assert work["shared_bytes"] == 2 * 64 * (64 + 2 * 32)


# Results, under Triton's interpreter; those of the quick set are with the other variants'.


def case(q_len, kv_len, head_dim=16, config=None, **changes):
    sizes = {"heads": 2, "head_dim": head_dim, "dtype": "float32", **changes}
    return short(**{"block_m": 16, **(config or {})}), values(q_len, kv_len, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_results(causal):
    """Ragged and degenerate sizes, groups, every dtype, and corners of the config."""
    sizes = [
        (1, 1, 1),
        (1, 31, 5),
        (16, 32, 16),
        (33, 1, 16),
        (31, 67, 40),
        (67, 31, 16),
        (5, 3, 256),
        (0, 7, 16),
    ]
    sizes += [(17, 256, 8), (130, 129, 32)]
    several = {"heads_per_program": 4, "num_stages": 2}
    interpret(
        "attention",
        [
            case(*size, causal=causal, dtype=dtype)
            for size in sizes
            for dtype in ("float32", "float16", "bfloat16")
        ]
        + [case(37, 45, heads=6, kv_heads=kv_heads, causal=causal) for kv_heads in (1, 2, 3)]
        + [
            case(45, 37, config=several, batch=6, heads=6, kv_heads=2, causal=causal, dtype=dtype)
            for dtype in ("float16", "bfloat16")
        ]
        + [case(50, 70, config={"block_m": block_m}, causal=causal) for block_m in (32, 64, 128)]
        + [
            case(50, 70, config={"heads_per_program": heads, "num_stages": stages}, batch=4, causal=causal)
            for heads, stages in ((2, 2), (4, 3), (8, 1))
        ]
        + [case(5, 7, batch=0, causal=causal)],
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    few = {"block_m": 16, "num_warps": 4}
    on_gpu(
        "attention",
        [
            (short(**few), values(77, 77, dtype=dtype, causal=True)),
            (short(**few, heads_per_program=4, num_stages=3), values(50, 60, dtype=dtype, head_dim=40)),
            (short(**few, heads_per_program=4), values(20, 64, dtype=dtype, kv_heads=2, causal=True)),
        ],
    )
