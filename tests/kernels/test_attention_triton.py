"""The Triton variants of attention in blocks of keys: rules, work, and results under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import CPU, DEVICES, T4, UNKNOWN, interpret, on_gpu, refused_by, work_of

from kernelcast.kernels import Candidate, candidates, operation, problem, variant
from kernelcast.kernels.registry import require_legal

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
GPUS = (A100, H100, T4, MI300, UNKNOWN)
NAMES = ("triton_flash", "triton_split_kv")
OP = operation("attention")

TILE = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
SMALL = {"block_m": 16, "block_n": 32, "num_warps": 2, "num_stages": 2}


def flash(**changes):
    return Candidate.of("triton_flash", {**TILE, **changes})


def split(**changes):
    return Candidate.of("triton_split_kv", {**SMALL, "split": 4, **changes})


def prefill(**changes):
    sizes = {"batch": 2, "heads": 8, "q_len": 2048, "kv_len": 2048, "head_dim": 64, "dtype": "float16"}
    return problem("attention", **{**sizes, **changes})


def decode(**changes):
    return prefill(**{"kv_heads": 2, "q_len": 1, "kv_len": 8192, "head_dim": 128, **changes})


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (flash(), prefill(), CPU, "needs-gpu", "cpu is a cpu"),
        (flash(), prefill(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (flash(), prefill(head_dim=257), A100, "head-fits", "head_dim=257"),
        (
            flash(),
            prefill(batch=1, heads=1, q_len=1, kv_len=2**25, head_dim=64),
            A100,
            "offsets",
            f"{2**25} rows of head_dim=64",
        ),
        (flash(num_warps=64), prefill(), A100, "block-threads", "2048 threads"),
        (flash(), prefill(kv_len=16), A100, "keys-fit", "block_n=64, keys that are seen: 16"),
        (flash(), prefill(q_len=16, causal=True), A100, "keys-fit", "keys that are seen: 16"),
        (
            flash(block_m=128),
            prefill(head_dim=256),
            A100,
            "accumulators",
            "128 x 256 values for 128 threads",
        ),
        # 128 of the output, half as much again as 128 scores, and 64 of queries.
        (
            flash(block_m=128, block_n=128),
            prefill(head_dim=128),
            A100,
            "registers",
            "about 384 > 320 registers",
        ),
        (flash(), prefill(dtype="float32", head_dim=128), A100, "registers", "about 672 > 320"),
        (flash(block_m=16, block_n=16, num_warps=4), prefill(), A100, "threads-busy", "16 x 16 scores"),
        # 32 KiB of queries, and three of four buffers of 64 KiB of keys and values.
        (
            flash(block_m=128, block_n=128, num_warps=8, num_stages=4),
            prefill(head_dim=128),
            A100,
            "shared-memory",
            "229376 > 165888 bytes",
        ),
        (flash(), prefill(q_len=16), A100, "queries-fit", "block_m=64 for 16 queries"),
        (flash(num_stages=4), prefill(kv_len=64), A100, "stages-filled", "4 stages, 1 steps"),
        (
            flash(block_m=16, block_n=32, num_warps=2),
            prefill(batch=2**25, q_len=1024),
            A100,
            "grid",
            f"{2**34} blocks",
        ),
        (split(), decode(causal=True, q_len=8192), A100, "no-mask", "causal=True"),
        (split(), decode(q_len=33), A100, "few-queries", "132 query rows"),
        (split(block_m=64), decode(), A100, "queries-fit", "block_m=64 for 4 queries"),
        (split(split=8), decode(kv_len=320), A100, "slices-work", "10 blocks of keys in 8 slices"),
        (split(num_stages=4), decode(kv_len=128), A100, "stages-filled", "4 stages, 1 steps"),
        (split(), decode(batch=2**14, q_len=4), A100, "parts-fit", f"{4 * 4 * 129 * 2**19} bytes"),
    ],
)
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found, message = refused_by(candidate, described, device)
    assert found == rule
    assert seen in message


@for_each(
    ("candidate", "described", "device"),
    [
        (flash(), prefill(), A100),
        (flash(block_m=128, block_n=64), prefill(head_dim=128), A100),
        (flash(block_m=16, block_n=32), prefill(q_len=1, kv_len=16), A100),
        (flash(block_m=16, block_n=32), prefill(head_dim=1), A100),
        (flash(num_stages=3), prefill(kv_len=64), A100),
        (flash(block_m=128, block_n=128, num_warps=8, num_stages=4), prefill(), UNKNOWN),
        (split(), decode(q_len=32), A100),
        (split(split=8), decode(kv_len=256), A100),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    require_legal(described, device, candidate)


lengths = st.integers(0, 3000)


@settings(max_examples=examples(40), deadline=None)
@given(
    q_len=lengths,
    kv_len=lengths.filter(bool),
    head_dim=st.integers(1, 300),
    group=st.sampled_from([1, 4]),
    causal=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    device=st.sampled_from(GPUS),
)
def test_rules_agree_with_refusals_and_keep_their_promises(
    q_len, kv_len, head_dim, group, causal, dtype, device
):
    described = prefill(
        q_len=q_len, kv_len=kv_len, head_dim=head_dim, kv_heads=8 // group, causal=causal, dtype=dtype
    )
    for name in NAMES:
        found = variant("attention", name)
        block = found.space("default")
        legal = found.legal(described, device, block)
        reasons = found.refusals(described, device, block)
        assert len(reasons) == block.length - legal.sum()
        assert all(reason.reason and reason.seen for reason in reasons)
        kept = block.take(legal)
        work = found.work(described, kept.columns, device).columns(kept.length)
        assert (work["accumulators"] <= 256).all()
        if device.shared_bytes_per_block:
            assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
        # Padding and re-reads only ever add to the definition's amounts.
        assert (work["flops"] >= OP.flops(described)).all()
        if q_len:
            assert (work["traffic_bytes"] >= OP.traffic_bytes(described)).all()


@for_each("device", [A100, H100, MI300])
@for_each("head_dim", [16, 64, 80, 128, 256])
@for_each("causal", [False, True])
def test_typical_problems_have_candidates(device, head_dim, causal):
    for described in (prefill(head_dim=head_dim, causal=causal), prefill(q_len=1, head_dim=head_dim)):
        found = candidates(described, device, subset="default", backends=["triton"])
        assert sum(each.variant == "triton_flash" for each in found) >= 4
    found = candidates(decode(head_dim=head_dim), device, subset="default", backends=["triton"])
    assert sum(each.variant == "triton_split_kv" for each in found) >= 2


def test_the_quick_subset():
    blocks = [variant("attention", name).space("default") for name in NAMES]
    assert [block.length for block in blocks] == [36, 24]
    for block in blocks:
        assert len({block.at(row) for row in range(block.length)}) == block.length
        assert list(block.columns) == [each.name for each in variant("attention", block.variant).parameters]


# Work


def test_work_counts_padding_and_rereads():
    described = prefill(batch=1, heads=4, kv_heads=2, q_len=100, kv_len=150, head_dim=40)
    work = work_of(flash(block_n=32), described, A100)
    # Two tiles of 64 queries, each against five blocks of 32 keys, heads padded to 64.
    assert work["programs"] == 4 * 2
    assert work["inner_steps"] == 5
    assert work["flops"] == 4 * 2 * 5 * (64 * 32 * (4 * 64 + 5) + 64 * 64)
    # Both tiles of every head of q read k and v.
    assert work["traffic_bytes"] == 2 * 4 * 40 * (2 * 100 + 2 * 2 * 150)
    assert work["accumulators"] == 64 * (64 + 32) / 128
    # Queries, one buffer of keys and values: two stages, of which one is in registers.
    assert work["shared_bytes"] == 2 * 64 * (64 + 2 * 32)
    assert (work["warps"], work["calls"], work["scratch_bytes"]) == (4, 1, 0)


def test_work_of_a_causal_mask():
    described = prefill(batch=1, heads=1, q_len=256, kv_len=200, head_dim=64, causal=True)
    work = work_of(flash(block_m=64, block_n=32), described, A100)
    # Tiles end at keys 64, 128, 192 and, past the last key, 200.
    assert work["inner_steps"] == (2 + 4 + 6 + 7) / 4
    assert work["flops"] == 19 * (64 * 32 * (4 * 64 + 5) + 64 * 64)
    assert work["traffic_bytes"] == 2 * 64 * (2 * 256 + 2 * (64 + 128 + 192 + 200))


@given(
    q_len=st.integers(0, 700),
    kv_len=st.integers(1, 700),
    causal=st.booleans(),
    block_m=st.sampled_from([16, 32, 64, 128]),
    block_n=st.sampled_from([16, 32, 64, 128]),
)
def test_steps_and_keys_are_those_of_the_loops(q_len, kv_len, causal, block_m, block_n):
    from kernelcast.kernels.ops.attention.triton_flash import keys_of_a_head, steps_of_a_head

    described = prefill(q_len=q_len, kv_len=kv_len, causal=causal)
    ends = [
        min(kv_len, first + block_m) if causal else kv_len  # as the kernel has it
        for first in range(0, q_len, block_m)
    ]
    cells = {"block_m": np.array([block_m]), "block_n": np.array([block_n])}
    assert steps_of_a_head(described, cells)[0] == sum(-(-end // block_n) for end in ends)
    assert keys_of_a_head(described, cells)[0] == sum(ends)


def test_work_of_split_keys():
    described = decode(batch=1, kv_len=1000)
    work = work_of(split(block_n=32, split=4), described, A100)
    # Two heads of k and v, one tile of 4 rows each, 32 blocks of keys in 4 slices.
    assert work["programs"] == 2 * 4
    assert work["inner_steps"] == 8
    assert work["calls"] == 2
    assert work["flops"] == 2 * 32 * (16 * 32 * (4 * 128 + 5) + 16 * 128) + 2 * 2 * 4 * 4 * 128
    assert work["traffic_bytes"] == 2 * 128 * (2 * 8 + 2 * 2 * 1000)
    assert work["scratch_bytes"] == 4 * 8 * (128 + 1) * 4


# Results, under Triton's interpreter


def case(q_len, kv_len, head_dim=16, name="triton_flash", config=None, **values):
    extra = {"split": 2} if name == "triton_split_kv" else {}
    sizes = {"batch": 2, "heads": 2, "q_len": q_len, "kv_len": kv_len, "head_dim": head_dim}
    candidate = Candidate.of(name, {**SMALL, **extra, **(config or {})})
    return candidate, {**sizes, "dtype": "float32", **values}


def test_results_quickly():
    interpret("attention", [case(3, 20, 24, "triton_split_kv", heads=2, kv_heads=1, dtype="float16")])


@pytest.mark.slow
def test_results_of_every_variant():
    """Of ``triton_short`` too."""
    few = {"block_m": 16, "num_warps": 2}
    one = Candidate.of("triton_short", {**few, "heads_per_program": 1, "num_stages": 1})
    several = Candidate.of("triton_short", {**few, "heads_per_program": 2, "num_stages": 2})
    interpret(
        "attention",
        [
            (one, case(13, 19, 24, batch=1, heads=4, kv_heads=2, causal=True, dtype="float16")[1]),
            (several, case(9, 33, 8, batch=1, heads=4, dtype="bfloat16")[1]),
            case(17, 37, 24, batch=1, heads=4, kv_heads=2, causal=True, dtype="bfloat16"),
            case(3, 70, 40, "triton_split_kv", batch=1, heads=4, kv_heads=2, dtype="float16"),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_flash_attention(dtype, causal):
    options = {"dtype": dtype, "causal": causal}
    interpret(
        "attention",
        [
            case(q_len, kv_len, head_dim, **options)
            for q_len, kv_len, head_dim in (
                (1, 1, 1),
                (1, 31, 5),
                (16, 32, 16),
                (33, 1, 16),
                (31, 67, 40),
                (67, 31, 16),
                (48, 96, 32),
                (5, 3, 256),
                (0, 7, 16),
            )
        ]
        + [case(37, 45, heads=6, kv_heads=kv_heads, **options) for kv_heads in (1, 2, 3)]
        + [
            case(50, 70, config={"block_m": block_m, "block_n": block_n}, **options)
            for block_m, block_n in ((64, 16), (16, 64), (32, 32), (128, 128))
        ]
        + [case(5, 7, batch=0, **options)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_split_keys(dtype):
    interpret(
        "attention",
        [
            case(q_len, kv_len, head_dim, "triton_split_kv", {"split": parts}, dtype=dtype)
            for q_len, kv_len, head_dim, parts in (
                (1, 64, 16, 2),
                (1, 33, 5, 2),
                (3, 97, 40, 4),
                (17, 128, 16, 2),
                (1, 500, 16, 16),
                (0, 64, 16, 2),
            )
        ]
        + [case(1, 200, 16, "triton_split_kv", heads=6, kv_heads=each, dtype=dtype) for each in (1, 2, 3)]
        + [case(5, 200, 16, "triton_split_kv", {"split": 4}, heads=6, kv_heads=1, dtype=dtype)],
    )


HUGE = """
import torch
from kernelcast.kernels import operation, problem, variant

described = problem("attention", batch=2, heads=2, q_len=5, kv_len=70, head_dim=16)
q, k, v = operation("attention").make_inputs(described, seed=0, device="cpu")
q, k = torch.full_like(q, 40.0), k.abs().clamp(max=1.0) * 40.0
config = dict(block_m=16, num_warps=2, num_stages=1)
for name, more in (
    ("triton_flash", {"block_n": 32}),
    ("triton_split_kv", {"block_n": 32, "split": 2}),
    ("triton_short", {"heads_per_program": 2}),
):
    output = variant("attention", name).build(described, {**config, **more})(q, k, v)
    print(output.isfinite().all().item(), (output.abs().max() <= v.abs().max()).item(), output.is_contiguous())
"""


@pytest.mark.slow
def test_huge_scores_do_not_overflow_and_outputs_are_contiguous():
    """Scores in the thousands, whose exponentials are beyond float32. ``triton_short`` too."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == ["True"] * 9


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    sizes = {"batch": 2, "heads": 8, "head_dim": 64, "dtype": dtype}
    on_gpu(
        "attention",
        [
            (flash(block_n=32), {**sizes, "q_len": 200, "kv_len": 333, "head_dim": 80}),
            (
                flash(block_m=32, block_n=32),
                {**sizes, "q_len": 200, "kv_len": 200, "kv_heads": 2, "causal": True},
            ),
            (split(), {**sizes, "q_len": 1, "kv_len": 1000, "kv_heads": 2, "head_dim": 128}),
        ],
    )
