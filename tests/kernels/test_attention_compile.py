"""What Triton's compiler makes of the Triton variants of attention, against what their rules and work say of it.

The cases are the ends of what was compiled: estimates that were hardest to hit, the longest rows, most registers, and what
each architecture does in a way of its own.
"""

from __future__ import annotations

import pytest
from triton_lab import assert_compiles, compiler  # noqa: F401

from kernelcast.kernels import Candidate, problem, variant

# The fixture is an argument of the tests.
# ruff: noqa: F811


def flash(block_m, block_n, num_warps, num_stages):
    return Candidate.of(
        "triton_flash",
        {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages},
    )


def split(block_m, block_n, num_warps, num_stages):
    config = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
    return Candidate.of("triton_split_kv", {**config, "split": 4})


def short(block_m, heads_per_program, num_warps, num_stages):
    return Candidate.of(
        "triton_short",
        {
            "block_m": block_m,
            "heads_per_program": heads_per_program,
            "num_warps": num_warps,
            "num_stages": num_stages,
        },
    )


def prefill(**changes):
    sizes = {"batch": 2, "heads": 8, "q_len": 2048, "kv_len": 2048, "head_dim": 64, "dtype": "float16"}
    return problem("attention", **{**sizes, **changes})


def decode(**changes):
    return prefill(**{"kv_heads": 2, "q_len": 1, "kv_len": 8192, "head_dim": 128, **changes})


def brief(length=128, **changes):
    return prefill(**{"batch": 64, "q_len": length, "kv_len": length, **changes})


#: name: (candidate, problem, most registers that spill on any target)
EVERYWHERE = {
    "flash, causal": (flash(64, 32, 4, 3), prefill(head_dim=128, causal=True, dtype="bfloat16"), 0),
    "flash, four stages": (flash(64, 64, 4, 4), prefill(), 0),
    "flash, odd head": (flash(64, 32, 4, 3), prefill(head_dim=33), 0),
    "flash, float32": (flash(64, 32, 8, 2), prefill(dtype="float32", head_dim=128, causal=True), 150),
    "split, four stages": (split(16, 32, 2, 4), decode(), 0),
    "split, float32": (split(16, 32, 4, 2), decode(dtype="float32"), 100),
    "short, several heads": (short(64, 4, 4, 2), brief(64, causal=True, dtype="bfloat16"), 0),
    "short, tiny": (short(16, 4, 1, 3), brief(16, head_dim=32), 0),
    "short, float32": (short(16, 1, 8, 1), brief(dtype="float32"), 20),
}
#: (targets, name): the same.
SOMEWHERE = {
    (("sm80", "sm90", "sm100"), "flash, large"): (
        flash(128, 64, 8, 3),
        prefill(head_dim=128, causal=True),
        0,
    ),
    (("sm80",), "flash, TF32"): (
        flash(32, 64, 4, 3),
        prefill(dtype="float32", allow_tf32=True, head_dim=128),
        0,
    ),
    (("sm80", "sm90"), "short, longest row"): (short(128, 1, 8, 1), brief(256, head_dim=128), 120),
    (("sm90", "sm100"), "short, wide queries"): (short(128, 2, 4, 2), brief(77, causal=True), 120),
    (("gfx942",), "short, longest row"): (short(64, 1, 4, 1), brief(256), 0),
    (("gfx942",), "short, ragged"): (short(32, 4, 4, 2), brief(77), 0),
}
CASES = {
    **{
        f"{target} {name}": (target, case)
        for target in ("sm80", "sm90", "sm100", "gfx942")
        for name, case in EVERYWHERE.items()
    },
    **{
        f"{target} {name}": (target, case)
        for (targets, name), case in SOMEWHERE.items()
        for target in targets
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "case"), CASES.values(), ids=CASES.keys())
def test_what_is_legal_compiles_as_estimated(compiler, target, case):
    candidate, described, spills = case
    matrix_units = described.dtype != "float32" or described.allow_tf32 or target.startswith("gfx")
    assert_compiles(compiler, candidate, described, target, tensor_cores=matrix_units, spills=spills)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm86", "sm89", "sm120", "gfx950"])
def test_the_other_targets_compile(compiler, target):
    for candidate, described in (
        (flash(64, 64, 4, 4), prefill(causal=True)),
        (split(16, 32, 4, 2), decode()),
        (short(64, 4, 4, 2), brief(64, causal=True)),
    ):
        assert_compiles(compiler, candidate, described, target, tensor_cores=True, spills=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "instruction", "candidate", "described"),
    [
        ("sm80", "HMMA", flash(64, 64, 4, 2), prefill(causal=True)),
        ("sm90", "HGMMA", flash(64, 64, 4, 2), prefill(dtype="bfloat16", causal=True)),
        ("sm80", "HMMA", short(64, 4, 4, 2), brief(dtype="bfloat16")),
        ("sm90", "HGMMA", short(64, 4, 4, 2), brief()),
    ],
)
def test_16_bit_attention_runs_on_tensor_cores(compiler, target, instruction, candidate, described):
    from kernelcast.kernels.compile import compile_spec_for

    found = variant("attention", candidate.variant)
    spec = found.compile_spec(described, candidate.parameters, target)
    code = compile_spec_for(spec, target).asm["sass"]
    assert instruction in code
    # Keys and values are copied to shared memory while earlier ones are multiplied.
    assert "LDGSTS" in code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        ("sm80", {"q_len": 1, "kv_len": 1, "head_dim": 1}),
        ("gfx942", {"q_len": 1, "kv_len": 1, "causal": True, "kv_heads": 1}),
        ("sm80", {"q_len": 16, "kv_len": 16, "head_dim": 16, "causal": True}),
        ("gfx942", {"q_len": 2**17, "kv_len": 2**23, "batch": 4096}),
        ("sm80", {"q_len": 200, "kv_len": 200, "batch": 2**20, "kv_heads": 2}),
    ],
)
def test_degenerate_and_huge_problems_compile(compiler, target, sizes):
    described = prefill(**sizes)
    wanted = [flash(16, 32, 2, 2), split(16, 32, 2, 2)]
    if described["kv_len"] <= 256:
        wanted.append(short(16, 2, 1, 2))
    for candidate in wanted:
        facts = compiler(described, candidate, target)
        assert facts.outcome == "ok", facts.detail
