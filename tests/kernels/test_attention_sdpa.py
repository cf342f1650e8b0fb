"""The variants of attention that call one fused kernel of torch: rules, work, and what a launcher asks and refuses.

Their results need a GPU. What torch itself can say without one is tested: the operators' signatures and output shapes on
the meta device, and what its default is on a CPU.
"""

from __future__ import annotations

import warnings

import pytest
from cases import for_each
from triton_lab import CPU, DEVICES, T4, on_gpu, refused_by, work_of

from kernelcast.errors import IllegalCandidateError
from kernelcast.kernels import Candidate, Device, operation, problem, variant
from kernelcast.kernels.ops.attention import sdpa_cudnn, sdpa_efficient, sdpa_flash, sdpa_pieces

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
RADEON = Device("radeon", "gpu", "amd", "gfx1100", 96)
ARC = Device("arc", "gpu", "intel", "xe2", 20)
KEPLER = Device("k80", "gpu", "nvidia", "sm37", 13)
FLASH, EFFICIENT, CUDNN = (Candidate.of(f"sdpa_{name}") for name in ("flash", "efficient", "cudnn"))
MODULES = {FLASH: sdpa_flash, EFFICIENT: sdpa_efficient, CUDNN: sdpa_cudnn}


def values(**changes):
    return {"batch": 2, "heads": 8, "q_len": 64, "kv_len": 64, "head_dim": 64, "dtype": "float16", **changes}


def attention(**changes):
    return problem("attention", **values(**changes))


@for_each(
    ("candidate", "changes", "device", "rule", "seen"),
    [
        (FLASH, {}, CPU, "needs-gpu", "on a CPU torch's default is its flash kernel already"),
        (EFFICIENT, {}, CPU, "needs-gpu", "cpu is a cpu"),
        (CUDNN, {}, CPU, "needs-gpu", "cpu is a cpu"),
        (FLASH, {}, T4, "architecture", "nvidia sm75"),
        (FLASH, {}, RADEON, "architecture", "amd gfx1100"),
        (FLASH, {}, ARC, "architecture", "intel xe2"),
        (EFFICIENT, {}, KEPLER, "architecture", "nvidia sm37"),
        (CUDNN, {}, MI300, "architecture", "amd gfx942"),
        (CUDNN, {}, DEVICES["sm120"], "architecture", "nvidia sm120"),
        (EFFICIENT, {"dtype": "bfloat16"}, T4, "dtype-supported", "bfloat16 on sm75"),
        (FLASH, {"dtype": "float32"}, H100, "16-bit", "float32"),
        (CUDNN, {"dtype": "float32"}, H100, "16-bit", "float32"),
        (FLASH, {"head_dim": 20}, H100, "head-dim", "head_dim=20; multiples of 8 up to 256"),
        (FLASH, {"head_dim": 264}, H100, "head-dim", "head_dim=264"),
        (CUDNN, {"head_dim": 136}, H100, "head-dim", "head_dim=136; multiples of 8 up to 128"),
        (EFFICIENT, {"head_dim": 6, "dtype": "float32"}, H100, "head-dim", "head_dim=6; multiples of 4"),
        (
            EFFICIENT,
            {"head_dim": 4, "dtype": "float32"},
            MI300,
            "head-dim",
            "head_dim=4; multiples of 8 up to 256",
        ),
        (EFFICIENT, {"head_dim": 264}, MI300, "head-dim", "head_dim=264"),
        (FLASH, {"causal": True, "kv_len": 65}, H100, "square-mask", "q_len=64, kv_len=65"),
        (CUDNN, {"causal": True, "q_len": 65}, H100, "square-mask", "q_len=65, kv_len=64"),
        (EFFICIENT, {"causal": True, "kv_len": 65}, MI300, "mask-aligned", "q_len=64, kv_len=65"),
        (EFFICIENT, {"causal": True, "kv_heads": 2}, H100, "heads-alike", "causal=True, heads=8, kv_heads=2"),
        (CUDNN, {"kv_len": 1}, H100, "several-keys", "kv_len=1"),
        (FLASH, {"q_len": 0}, H100, "not-empty", "batch=2, q_len=0"),
        (EFFICIENT, {"batch": 0}, H100, "not-empty", "batch=0, q_len=64"),
        (CUDNN, {"batch": 65536}, H100, "grid", "batch=65536, heads=8"),
        (FLASH, {"heads": 65536}, H100, "grid", "batch=2, heads=65536"),
    ],
)
def test_refusals_say_what_was_seen(candidate, changes, device, rule, seen):
    found, message = refused_by(candidate, attention(**changes), device)
    assert found == rule
    assert seen in message


@for_each(
    ("candidate", "changes", "device"),
    [
        *((each, {"causal": True}, H100) for each in MODULES),
        *((each, {"kv_heads": 2, "q_len": 1, "kv_len": 1000}, A100) for each in MODULES),
        (FLASH, {"head_dim": 256, "dtype": "bfloat16"}, DEVICES["sm120"]),
        (FLASH, {"head_dim": 8, "kv_heads": 1}, MI300),
        (EFFICIENT, {}, T4),
        (EFFICIENT, {"head_dim": 264}, H100),
        (EFFICIENT, {"head_dim": 4, "dtype": "float32"}, A100),
        (EFFICIENT, {"causal": True, "kv_len": 65}, A100),
        (EFFICIENT, {"causal": True}, DEVICES["gfx950"]),
        (CUDNN, {"kv_len": 2, "head_dim": 128}, DEVICES["sm100"]),
        (CUDNN, {"batch": 65535}, DEVICES["sm89"]),
    ],
)
def test_legal_next_to_the_limits(candidate, changes, device):
    assert refused_by(candidate, attention(**changes), device) == ("", "")


@pytest.mark.parametrize("candidate", MODULES)
def test_work_is_the_definitions(candidate):
    described = attention(causal=True)
    op = operation("attention")
    work = work_of(candidate, described, H100)
    assert (work["flops"], work["traffic_bytes"], work["calls"]) == (
        op.flops(described),
        op.traffic_bytes(described),
        1,
    )


# What torch says


@for_each("dtype", ["float32", "float16", "bfloat16"])
@for_each(
    "changes",
    [
        {},
        {"causal": True},
        {"causal": True, "kv_len": 65},
        {"kv_heads": 2},
        {"head_dim": 7},
        {"head_dim": 300},
    ],
)
def test_on_a_cpu_the_default_is_flash(dtype, changes):
    """The reason for which ``sdpa_flash`` is refused there."""
    import torch
    from torch.nn.attention import SDPBackend

    described = attention(**changes, dtype=dtype)
    q, k, v = operation("attention").make_inputs(described, seed=0, device="cpu")
    grouped = described["heads"] != described["kv_heads"]
    chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, described["causal"], enable_gqa=grouped)
    assert chosen == SDPBackend.FLASH_ATTENTION.value


@for_each("candidate", MODULES)
@for_each("causal", [False, True])
@for_each("kv_heads", [8, 2])
def test_the_operators_take_these_arguments(candidate, causal, kv_heads):
    """On the meta device: shapes and dtypes without values, from the operators' own definitions."""
    import torch

    described = attention(causal=causal, kv_heads=kv_heads, kv_len=96)
    q = torch.empty(2, 8, 64, 64, dtype=torch.float16, device="meta")
    k = torch.empty(2, kv_heads, 96, 64, dtype=torch.float16, device="meta")
    output = MODULES[candidate].operator(described)(q, k, k)
    assert (output.shape, output.dtype) == (q.shape, q.dtype)


@pytest.mark.parametrize("candidate", MODULES)
def test_without_its_kernel_a_launcher_raises(candidate):
    """No other backend steps in: torch's own check says no to tensors on a CPU."""
    described = attention()
    inputs = operation("attention").make_inputs(described, seed=0, device="cpu")
    launch = variant("attention", candidate.variant).build(described, {})
    with pytest.raises(
        IllegalCandidateError, match=r"torch cannot run .*attention.* on attention\(batch=2.*vendor"
    ):
        launch(*inputs)


# The launcher, with a kernel and a check made up here


def attend_plainly(q, k, v):
    import torch

    weights = torch.softmax(q.double() @ k.double().transpose(2, 3) / q.shape[-1] ** 0.5, -1)
    # As CUTLASS stores it: the heads of one query side by side.
    return (weights @ v.double()).to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(("kv_heads", "fold"), [(8, False), (2, True), (1, True)])
def test_a_launcher_asks_once_and_returns_contiguous_memory(kv_heads, fold):
    described = attention(kv_heads=kv_heads, q_len=5, kv_len=9)
    op = operation("attention")
    inputs = op.make_inputs(described, seed=0, device="cpu")
    asked = []

    def usable(parameters, debug):
        asked.append((tuple(parameters.query.shape), parameters.is_causal, parameters.enable_gqa, debug))
        return True

    launch = sdpa_pieces.checked(described, "a kernel", usable, attend_plainly, fold_groups=fold)
    outputs = [launch(*inputs) for _ in range(2)]
    seen = (2, kv_heads, 8 // kv_heads * 5, 64)
    assert asked == [(seen, False, False, False)]
    for output in outputs:
        assert output.is_contiguous()
        assert op.check(described, op.reference(described, *inputs), output) is None


def test_a_launcher_says_what_torch_says():
    described = attention(kv_heads=2, causal=True)
    inputs = operation("attention").make_inputs(described, seed=0, device="cpu")
    calls = []

    def usable(parameters, debug):
        assert parameters.enable_gqa
        assert parameters.is_causal
        if debug:
            warnings.warn("The kernel wants more. (Triggered internally at a.cpp:1.)", stacklevel=1)
        return False

    launch = sdpa_pieces.checked(described, "a kernel", usable, lambda *tensors: calls.append(tensors))
    with pytest.raises(IllegalCandidateError, match=r"here: The kernel wants more\. Use another candidate"):
        launch(*inputs)
    assert calls == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype):
    from kernelcast.kernels.detect import detect

    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    here = detect("gpu")
    changes = [
        {},
        {"causal": True},
        {"kv_heads": 2},
        {"kv_heads": 2, "causal": True},
        {"q_len": 1, "kv_len": 333},
    ]
    changes += [{"causal": True, "q_len": 40}, {"head_dim": 256}, {"head_dim": 40, "q_len": 77, "kv_len": 50}]
    cases = [
        (candidate, values(**each, dtype=dtype))
        for candidate in MODULES
        for each in changes
        if refused_by(candidate, attention(**each, dtype=dtype), here) == ("", "")
    ]
    assert cases
    on_gpu("attention", cases)
