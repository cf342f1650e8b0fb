"""The Triton variants of attention: rules, work, results under Triton's interpreter, and what the compiler makes of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelcast.kernels import (
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

A100 = Device("a100", "gpu", "nvidia", "sm80", 108, shared_bytes_per_block=166_912)
H100 = Device("h100", "gpu", "nvidia", "sm90", 132, shared_bytes_per_block=232_448)
T4 = Device("t4", "gpu", "nvidia", "sm75", 40, shared_bytes_per_block=65_536)
MI300 = Device("mi300x", "gpu", "amd", "gfx942", 304, warp_size=64, shared_bytes_per_block=65_536)
UNKNOWN = Device("new", "gpu", "nvidia", "sm80", 10)
CPU = Device("cpu", "cpu", "intel", "x86_64-avx512", 2, warp_size=1)
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


def work_of(candidate, described, device=A100):
    block = CandidateTable.of([candidate]).blocks[0]
    work = variant("attention", candidate.variant).work(described, block.columns, device).columns(1)
    return {name: float(values[0]) for name, values in work.items()}


# Rules


@pytest.mark.parametrize(
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
    block = CandidateTable.of([candidate]).blocks[0]
    (refusal,) = variant("attention", candidate.variant).refusals(described, device, block)
    assert refusal.rule == rule
    assert seen in str(refusal)


@pytest.mark.parametrize(
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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.parametrize("device", [A100, H100, MI300])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
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
    work = work_of(flash(block_n=32), described)
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
    work = work_of(flash(block_m=64, block_n=32), described)
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
    work = work_of(split(block_n=32, split=4), described)
    # Two heads of k and v, one tile of 4 rows each, 32 blocks of keys in 4 slices.
    assert work["programs"] == 2 * 4
    assert work["inner_steps"] == 8
    assert work["calls"] == 2
    assert work["flops"] == 2 * 32 * (16 * 32 * (4 * 128 + 5) + 16 * 128) + 2 * 2 * 4 * 4 * 128
    assert work["traffic_bytes"] == 2 * 128 * (2 * 8 + 2 * 2 * 1000)
    assert work["scratch_bytes"] == 4 * 8 * (128 + 1) * 4


# Results. The interpreter is chosen when triton is imported, so it runs in a process of its own.

CHECK = """
import json, sys
import torch
from kernelcast.kernels import memory, operation, problem, variant

failures = []
for name, config, values in json.load(sys.stdin):
    described = problem("attention", **values)
    op = operation("attention")
    inputs = op.make_inputs(described, seed=7, device="cpu")
    originals = [tensor.clone() for tensor in inputs]
    launch = variant("attention", name).build(described, config)
    with memory.poisoned():
        first, second = launch(*inputs), launch(*inputs)
    wrong = op.check(described, op.reference(described, *inputs), first)
    if not torch.equal(first, second):
        wrong = "two runs differ"
    if not all(torch.equal(*pair) for pair in zip(inputs, originals)):
        wrong = "the inputs were changed"
    if not first.is_contiguous():
        wrong = "the output is not contiguous"
    if wrong:
        failures.append([name, config, values, wrong])
json.dump(failures, sys.stdout)
"""


def interpret(cases):
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == []


def case(q_len, kv_len, head_dim=16, name="triton_flash", config=None, **values):
    extra = {"split": 2} if name == "triton_split_kv" else {}
    sizes = {"batch": 2, "heads": 2, "q_len": q_len, "kv_len": kv_len, "head_dim": head_dim}
    return [name, {**SMALL, **extra, **(config or {})}, {**sizes, "dtype": "float32", **values}]


def test_results_quickly():
    interpret(
        [
            case(17, 37, 24, batch=1, heads=4, kv_heads=2, causal=True, dtype="bfloat16"),
            case(3, 70, 40, "triton_split_kv", batch=1, heads=4, kv_heads=2, dtype="float16"),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_flash_attention(dtype, causal):
    options = {"dtype": dtype, "causal": causal}
    interpret(
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
        + [case(5, 7, batch=0, **options)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_split_keys(dtype):
    interpret(
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
        + [case(5, 200, 16, "triton_split_kv", {"split": 4}, heads=6, kv_heads=1, dtype=dtype)]
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for described, candidate in (
        (prefill(q_len=200, kv_len=333, head_dim=80, dtype=dtype), flash(block_n=32)),
        (prefill(q_len=200, kv_len=200, kv_heads=2, causal=True, dtype=dtype), flash(block_m=32, block_n=32)),
        (decode(kv_len=1000, dtype=dtype), split()),
    ):
        inputs = OP.make_inputs(described, seed=7, device="cuda")
        launch = variant("attention", candidate.variant).build(described, candidate.parameters)
        with memory.poisoned():
            output = launch(*inputs)
        assert OP.check(described, OP.reference(described, *inputs), output) is None, candidate


# Offline compilation


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from kernelcast.kernels.compile import compile_facts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return compile_facts


@pytest.mark.slow
@pytest.mark.parametrize(("device", "instruction"), [(A100, "HMMA"), (H100, "HGMMA")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_attention_runs_on_tensor_cores(compiler, device, instruction, dtype):
    from kernelcast.kernels.compile import compile_spec_for

    described = prefill(dtype=dtype, causal=True)
    spec = variant("attention", "triton_flash").compile_spec(described, TILE, device.architecture)
    code = compile_spec_for(spec, device.architecture).asm["sass"]
    assert instruction in code
    # Keys and values are copied to shared memory while earlier ones are multiplied.
    assert "LDGSTS" in code


@pytest.mark.slow
@pytest.mark.parametrize("device", [A100, H100])
@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("triton_flash", prefill()),
        ("triton_flash", prefill(head_dim=128, causal=True, dtype="bfloat16")),
        ("triton_flash", prefill(head_dim=80, q_len=1000, kv_len=777)),
        ("triton_flash", prefill(head_dim=33)),
        ("triton_flash", prefill(head_dim=256, dtype="bfloat16")),
        ("triton_flash", prefill(dtype="float32")),
        ("triton_flash", prefill(dtype="float32", head_dim=128)),
        ("triton_flash", prefill(dtype="float32", allow_tf32=True)),
        ("triton_split_kv", decode()),
        ("triton_split_kv", decode(dtype="float32", head_dim=64)),
    ],
)
def test_shared_memory_estimates(compiler, device, name, described):
    """From 5% below to 25% above what the compiler allots, and few registers spilled in what the rules let pass."""
    found = variant("attention", name)
    block = found.space("default")
    block = block.take(found.legal(described, device, block))
    for row in random.Random(str(described)).sample(range(block.length), 2):
        candidate = block.at(row)
        facts = compiler(described, candidate, device.architecture)
        assert facts.outcome == "ok", facts.detail
        ratio = work_of(candidate, described, device)["shared_bytes"] / facts.shared_bytes
        assert 0.95 <= ratio <= 1.25, (candidate, ratio, facts)
        assert facts.shared_bytes <= device.shared_bytes_per_block
        assert facts.spills <= 200, (candidate, facts)
        assert facts.uses_tensor_cores == (described.dtype != "float32" or described.allow_tf32)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm86", "sm89", "sm100", "sm120", "gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("described", "candidate"),
    [
        (prefill(causal=True), flash()),
        (prefill(head_dim=128, causal=True), flash(block_m=128, num_warps=8, num_stages=3)),
        (decode(), split(block_n=64, num_warps=4, num_stages=3)),
    ],
)
def test_every_other_target_compiles(compiler, target, described, candidate):
    wide = 64 if target.startswith("gfx") else 32
    device = Device("any", "gpu", "amd" if wide == 64 else "nvidia", target, 100, warp_size=wide)
    facts = compiler(described, candidate, target)
    assert facts.outcome == "ok", facts.detail
    assert facts.uses_tensor_cores
    assert 0.95 <= work_of(candidate, described, device)["shared_bytes"] / facts.shared_bytes <= 1.25


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "gfx942"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 1, "kv_len": 1, "head_dim": 1},
        {"q_len": 1, "kv_len": 1, "causal": True, "kv_heads": 1},
        {"q_len": 16, "kv_len": 16, "head_dim": 16, "causal": True},
        {"q_len": 2**17, "kv_len": 2**23, "batch": 4096},
    ],
)
def test_degenerate_and_huge_problems_compile(compiler, target, sizes):
    described = prefill(**sizes)
    for candidate in (flash(**SMALL), split(split=2)):
        facts = compiler(described, candidate, target)
        assert facts.outcome == "ok", facts.detail
