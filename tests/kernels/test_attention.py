"""The attention operation: every variant against the reference, its rules, its work and its problems."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import (
    Candidate,
    CandidateTable,
    Device,
    Operation,
    Problem,
    candidates,
    operation,
    problem,
    refusals,
    variant,
    variants,
)
from kernelcast.kernels.memory import poisoned
from kernelcast.kernels.ops.attention.schema import attention_tolerance, visible_pairs

CPU = Device("cpu", "cpu", "amd", "x86_64-avx512", cores=2, warp_size=1, llc_bytes=32 * 2**20)
OP = operation("attention")
DTYPES = ("float32", "float16", "bfloat16")

DIMS = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")

SHAPES = {
    "one of each": (1, 1, 1, 1, 1, 1),
    "length 1, many keys": (2, 4, 4, 1, 257, 16),
    "decode, grouped": (1, 8, 2, 1, 1088, 32),
    "decode, all heads one group": (2, 6, 1, 1, 256, 8),
    "odd lengths": (1, 3, 3, 67, 131, 5),
    "odd lengths, grouped": (2, 6, 2, 67, 131, 5),
    "more queries than keys": (1, 2, 2, 150, 70, 8),
    "widest head": (1, 2, 2, 20, 70, 256),
    "head of 1": (1, 2, 2, 40, 70, 1),
    "one key": (1, 2, 2, 40, 1, 16),
    "no queries": (2, 2, 2, 0, 70, 8),
    "no sequences": (0, 2, 2, 20, 70, 8),
    "long": (1, 2, 2, 513, 1025, 4),
    "square, longer than every chunk": (1, 2, 1, 1030, 1030, 4),
}


def attention(*dims: int, **options: Any) -> Problem:
    """A problem by its dimensions in the order of DIMS."""
    return problem("attention", **dict(zip(DIMS, dims, strict=True)), **options)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many tiny kernels: threads that wait for each other would take most of the time on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first_failure(case: Problem, seed: int = 0) -> str | None:
    """Run every legal candidate alone into poisoned memory; what is wrong with the first that is wrong."""
    import torch

    inputs = OP.make_inputs(case, seed=seed, device="cpu")
    before = [tensor.clone() for tensor in inputs]
    reference = OP.reference(case, *inputs)
    for candidate in candidates(case, CPU):
        run = variant("attention", candidate.variant).build(case, candidate.parameters)
        with poisoned():
            output = run(*inputs)
        wrong = OP.check(case, reference, output)
        if wrong:
            return f"{candidate} on {case}: {wrong}"
        if not output.is_contiguous() or output.requires_grad:
            return f"{candidate} on {case}: strides {output.stride()}"
        if any(output.numel() and output.data_ptr() == tensor.data_ptr() for tensor in inputs):
            return f"{candidate} on {case}: the output is an input"
        if not all(torch.equal(old, new) for old, new in zip(before, inputs, strict=True)):
            return f"{candidate} on {case}: an input was changed"
    return None


LONG = ("long", "square, longer than every chunk")


@for_each("shape", [shape for shape in SHAPES if shape not in LONG])
@for_each("causal", [False, True])
@for_each("dtype", DTYPES)
def test_every_candidate_matches_the_reference(shape: str, causal: bool, dtype: str) -> None:
    assert first_failure(attention(*SHAPES[shape], dtype=dtype, causal=causal)) is None


@pytest.mark.parametrize("shape", LONG)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])]
)
def test_every_candidate_matches_the_reference_on_long_rows(shape: str, causal: bool, dtype: str) -> None:
    assert first_failure(attention(*SHAPES[shape], dtype=dtype, causal=causal)) is None


def test_the_shapes_reach_every_config() -> None:
    reached = set()
    for dims in SHAPES.values():
        for causal in (False, True):
            for dtype in DTYPES:
                case = attention(*dims, dtype=dtype, causal=causal)
                reached |= set(candidates(case, CPU))
    every = {
        found.space().at(row)
        for found in variants("attention").values()
        if found.backend != "triton" and not found.name.startswith("sdpa_")  # those need a GPU
        for row in range(found.space().length)
    }
    assert len(every) == 27
    assert reached == every


@settings(max_examples=examples(40), deadline=None)
@given(
    batch=st.integers(0, 2),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    q_len=st.integers(0, 90),
    kv_len=st.integers(1, 140),
    head_dim=st.integers(1, 33),
    causal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_small_problem(
    batch: int,
    kv_heads: int,
    group: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    causal: bool,
    dtype: str,
    seed: int,
) -> None:
    case = attention(batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, dtype=dtype, causal=causal)
    assert first_failure(case, seed) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (9, 14), (14, 9)])
def test_the_reference_is_what_torch_defines(q_len: int, kv_len: int, causal: bool) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    case = attention(2, 6, 2, q_len, kv_len, 7, causal=causal)
    inputs = OP.make_inputs(case, seed=3, device="cpu")
    assert [tuple(tensor.shape) for tensor in inputs] == [
        (2, 6, q_len, 7),
        (2, 2, kv_len, 7),
        (2, 2, kv_len, 7),
    ]
    expected = scaled_dot_product_attention(*(t.double() for t in inputs), is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(OP.reference(case, *inputs), expected, rtol=1e-12, atol=1e-13)


def test_a_hand_computed_output() -> None:
    """Scores 0 and log 3 give weights 1/4 and 3/4."""
    import math

    import torch

    case = attention(1, 1, 1, 1, 2, 1)
    q, k, v = (
        torch.tensor(values).reshape(1, 1, -1, 1) for values in ([1.0], [0.0, math.log(3.0)], [4.0, 8.0])
    )
    assert OP.reference(case, q, k, v).item() == pytest.approx(7.0, rel=1e-6)
    for candidate in candidates(case, CPU):
        run = variant("attention", candidate.variant).build(case, candidate.parameters)
        assert run(q, k, v).item() == pytest.approx(7.0, rel=1e-6)


def test_math_is_the_backend_of_that_name_and_leaves_the_switches_alone() -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    case = attention(1, 4, 2, 9, 12, 8, dtype="bfloat16", causal=True)
    inputs = OP.make_inputs(case, seed=0, device="cpu")
    output = variant("attention", "math").build(case, {})(*inputs)
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    assert torch.equal(output, expected)


def test_huge_scores_do_not_overflow() -> None:
    """Scores in the thousands, whose exponentials are beyond every dtype; q k^T before scaling is beyond float16."""
    import torch

    for dtype in DTYPES:
        case = attention(1, 2, 2, 70, 140, 64, dtype=dtype)
        q, k, v = OP.make_inputs(case, seed=0, device="cpu")
        q, k = torch.full_like(q, 40.0), k.abs().clamp(max=1.0) * 40.0
        assert (q.double() @ k.double().transpose(2, 3)).max() > 70_000
        for candidate in candidates(case, CPU):
            output = variant("attention", candidate.variant).build(case, candidate.parameters)(q, k, v)
            assert output.isfinite().all(), candidate
            assert output.abs().max() <= v.abs().max(), candidate


# What the check must catch.


def attend(q, k, v, hidden):
    import torch

    scores = (q.double() @ k.double().transpose(2, 3)) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_off_by_one_is_caught(dtype: str, shift: int) -> None:
    import torch

    case = attention(1, 2, 2, 64, 64, 32, dtype=dtype, causal=True)
    inputs = OP.make_inputs(case, seed=0, device="cpu")
    reference = OP.reference(case, *inputs)
    right = torch.ones(64, 64, dtype=torch.bool).triu(1)
    assert OP.check(case, reference, attend(*inputs, right).to(inputs[0].dtype)) is None
    wrong = torch.ones(64, 64, dtype=torch.bool).triu(1 + shift)
    output = attend(*inputs, wrong).nan_to_num().to(inputs[0].dtype)
    assert "differ from the reference" in OP.check(case, reference, output)


@pytest.mark.parametrize(("dtype", "kv_len"), [("float32", 4096), ("float16", 256), ("bfloat16", 64)])
def test_one_missing_key_is_caught(dtype: str, kv_len: int) -> None:
    import torch

    case = attention(1, 8, 8, 16, kv_len, 64, dtype=dtype)
    q, k, v = OP.make_inputs(case, seed=0, device="cpu")
    reference = OP.reference(case, q, k, v)
    hidden = torch.zeros(16, kv_len, dtype=torch.bool)
    assert OP.check(case, reference, attend(q, k, v, hidden).to(q.dtype)) is None
    hidden[:, -1] = True
    assert "differ from the reference" in OP.check(case, reference, attend(q, k, v, hidden).to(q.dtype))


def test_keys_lost_from_late_causal_rows_are_caught_by_the_bands_alone() -> None:
    """The first row sees one key, so its tolerance is wide; without bands it would hide what the last rows lose."""
    import torch

    case = attention(1, 4, 4, 1024, 1024, 64, dtype="bfloat16", causal=True)
    q, k, v = OP.make_inputs(case, seed=0, device="cpu")
    reference = OP.reference(case, q, k, v)
    hidden = torch.ones(1024, 1024, dtype=torch.bool).triu(1)
    assert OP.check(case, reference, attend(q, k, v, hidden).to(q.dtype)) is None
    hidden[1000:, 960:992] = True
    output = attend(q, k, v, hidden).to(q.dtype)
    assert Operation.check(OP, case, reference, output) is None
    assert OP.check(case, reference, output).startswith("in query rows 512 to 1023: ")


# Problems.


def test_kv_heads_is_as_many_as_heads_unless_named() -> None:
    dims = {"batch": 1, "heads": 8, "q_len": 4, "kv_len": 4, "head_dim": 8}
    assert problem("attention", **dims)["kv_heads"] == 8
    assert problem("attention", **dims) == problem("attention", kv_heads=0, **dims)
    assert problem("attention", **dims) == problem("attention", kv_heads=8, **dims)
    assert problem("attention", kv_heads=2, **dims).key != problem("attention", **dims).key


@for_each(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "heads is 8 and kv_heads is 3.*kv_heads must divide heads"),
        ({"kv_heads": 16}, "heads is 8 and kv_heads is 16"),
        ({"kv_heads": -1}, "kv_heads is -1"),
        ({"heads": 0}, "heads is 0; it must be at least 1"),
        ({"kv_len": 0}, "kv_len is 0; it must be at least 1"),
        ({"head_dim": 0}, "head_dim is 0; it must be at least 1"),
        ({"heads": 2.5}, "heads is 2.5; it must be an integer"),
        ({"causal": 1}, "causal is 1; it must be one of False, True"),
        ({"window": 4}, "no dimension or option 'window'"),
        ({"dtype": "int8"}, "does not take dtype 'int8'"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict, message: str) -> None:
    dims = {"batch": 1, "heads": 8, "q_len": 4, "kv_len": 4, "head_dim": 8, **change}
    with pytest.raises(InvalidProblemError, match=message):
        problem("attention", **dims)


def test_a_missing_dimension_is_named() -> None:
    with pytest.raises(
        InvalidProblemError, match=r"needs the dimension 'heads'.*It needs: batch, heads, q_len"
    ):
        problem("attention", batch=1, q_len=4, kv_len=4, head_dim=8)


# Rules.


def refused(case: Problem) -> dict[Candidate, tuple[str, str]]:
    return {each.candidate: (each.rule, str(each)) for each in refusals(case, CPU)}


def test_a_chunk_of_everything_is_refused() -> None:
    case = attention(1, 2, 2, 64, 128, 8)
    found = refused(case)
    rule, message = found[Candidate.of("query_chunked", {"chunk": 64, "compute": "input"})]
    assert rule == "chunk-is-a-part"
    assert "a chunk of all queries is the materialised variant (chunk=64, q_len=64)" in message
    rule, message = found[Candidate.of("online_chunked", {"chunk": 128})]
    assert (rule, "keys that are seen: 128" in message) == ("chunk-is-a-part", True)
    assert Candidate.of("online_chunked", {"chunk": 64}) not in found
    assert Candidate.of("query_chunked", {"chunk": 32, "compute": "input"}) not in found


def test_causal_chunks_of_keys_are_held_against_the_keys_that_are_seen() -> None:
    case = attention(1, 2, 2, 64, 128, 8, causal=True)
    assert refused(case)[Candidate.of("online_chunked", {"chunk": 64})][0] == "chunk-is-a-part"


def test_widening_float32_is_refused_and_16_bits_allowed() -> None:
    dims = {"batch": 1, "heads": 2, "q_len": 64, "kv_len": 128, "head_dim": 8}
    widened = Candidate.of("materialised", {"compute": "float32"})
    assert refused(problem("attention", **dims))[widened][0] == "compute-widens"
    assert widened not in refused(problem("attention", dtype="float16", **dims))


def test_scratch_above_2_gib_is_refused_at_the_byte() -> None:
    dims = {"batch": 1, "heads": 32, "head_dim": 64, "kv_len": 4096}
    materialised = Candidate.of("materialised", {"compute": "input"})
    # 32 heads * 4096 * 4096 * 4 bytes are 2 GiB.
    assert materialised not in refused(problem("attention", q_len=4096, **dims))
    rule, message = refused(problem("attention", q_len=4097, **dims))[materialised]
    assert (rule, f"{32 * 4097 * 4096 * 4} bytes" in message) == ("scratch-fits", True)
    found = refused(problem("attention", q_len=16384, **dims))
    assert found[Candidate.of("math")][0] == "scratch-fits"
    assert found[Candidate.of("online_chunked", {"chunk": 1024})][0] == "scratch-fits"
    assert Candidate.of("query_chunked", {"chunk": 128, "compute": "input"}) not in found


def test_steps_are_bounded() -> None:
    case = attention(1, 1, 1, 16 * 512 + 1, 64, 8)
    rule, message = refused(case)[Candidate.of("query_chunked", {"chunk": 16, "compute": "input"})]
    assert (rule, "513 steps" in message) == ("steps-bounded", True)
    case = attention(1, 1, 1, 1, 64 * 512 + 1, 8)
    assert refused(case)[Candidate.of("online_chunked", {"chunk": 64})][0] == "steps-bounded"
    per_head = Candidate.of("per_head", {"compute": "input"})
    dims = {"heads": 32, "kv_heads": 16, "q_len": 4, "kv_len": 4, "head_dim": 8}
    assert refused(problem("attention", batch=33, **dims))[per_head][0] == "steps-bounded"
    assert per_head not in refused(problem("attention", batch=32, **dims))
    dims["kv_heads"] = 1
    assert refused(problem("attention", batch=1, **dims))[per_head][0] == "several-heads"


def test_splitting_keys_needs_whole_parts_few_queries_and_no_mask() -> None:
    split = Candidate.of("split_kv", {"split": 4})
    dims = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": 1, "kv_len": 512, "head_dim": 8}
    assert split not in refused(problem("attention", **dims))
    for change, rule in (
        ({"kv_len": 514}, "split-divides-keys"),
        ({"kv_len": 252}, "parts-long-enough"),
        ({"q_len": 17}, "few-queries"),
        ({"causal": True}, "no-mask"),
    ):
        assert refused(problem("attention", **{**dims, **change}))[split][0] == rule


def test_typical_problems_have_ten_candidates_and_the_default_first() -> None:
    for dtype in DTYPES:
        for causal in (False, True):
            case = attention(1, 32, 8, 1024, 1024, 128, dtype=dtype, causal=causal)
            found = list(candidates(case, CPU))
            assert len(found) == len(set(found)) >= 10
            assert found[0] == OP.default == Candidate.of("vendor")


# Work.


def work_of(case: Problem, *wanted: Candidate) -> dict:
    table = CandidateTable.of(wanted)
    (block,) = table.blocks
    return variant("attention", block.variant).work(case, block.columns, CPU).columns(block.length)


def test_flops_and_traffic_by_hand() -> None:
    dims = {"batch": 2, "heads": 6, "kv_heads": 3, "q_len": 3, "kv_len": 5, "head_dim": 10}
    case = problem("attention", dtype="bfloat16", **dims)
    assert OP.flops(case) == 2 * 6 * 15 * (4 * 10 + 5)
    # q and out: 2 * 6 * 3 * 10 each; k and v: 2 * 3 * 5 * 10 each; 2 bytes.
    assert OP.traffic_bytes(case) == 2 * (2 * 360 + 2 * 300)
    causal = problem("attention", dtype="bfloat16", causal=True, **dims)
    # Queries see 1, 2 and 3 keys; keys 4 and 5 are seen by none.
    assert OP.flops(causal) == 2 * 6 * 6 * 45
    assert OP.traffic_bytes(causal) == 2 * (2 * 360 + 2 * 180)


@given(q_len=st.integers(0, 40), kv_len=st.integers(1, 40))
def test_visible_pairs_are_those_the_mask_leaves(q_len: int, kv_len: int) -> None:
    case = attention(1, 1, 1, q_len, kv_len, 1, causal=True)
    assert visible_pairs(case) == sum(min(row + 1, kv_len) for row in range(q_len))


def test_the_work_of_materialised_and_per_head_by_hand() -> None:
    case = attention(2, 4, 2, 100, 60, 8)
    work = work_of(case, Candidate.of("materialised", {"compute": "input"}))
    scores = 2 * 4 * 100 * 60 * 4
    assert work["flops"].tolist() == [2 * 4 * 100 * 60 * 37]
    assert work["scratch_bytes"].tolist() == [2 * scores]
    assert (work["calls"][0], work["programs"][0], work["inner_steps"][0]) == (3, 4, 1)
    work = work_of(case, Candidate.of("per_head", {"compute": "input"}))
    assert work["scratch_bytes"].tolist() == [2 * scores / 4]
    assert (work["calls"][0], work["programs"][0], work["inner_steps"][0]) == (12, 1, 4)


def test_widening_costs_copies_and_wider_scores() -> None:
    case = attention(1, 2, 2, 10, 20, 8, dtype="float16")
    both = [Candidate.of("materialised", {"compute": compute}) for compute in ("input", "float32")]
    work = work_of(case, *both)
    copies = 4 * 8 * 2 * (10 + 20 + 20 + 10)
    assert work["scratch_bytes"].tolist() == [2 * 2 * 10 * 20 * 2, 2 * 2 * 10 * 20 * 4 + copies]
    assert work["calls"].tolist() == [3, 7]


def test_causal_chunks_of_queries_multiply_and_read_what_they_see() -> None:
    case = attention(1, 1, 1, 100, 80, 8, causal=True)
    work = work_of(case, *(Candidate.of("query_chunked", {"chunk": c, "compute": "input"}) for c in (64, 32)))
    # Chunks end at 64 and 100, or at 32, 64, 96 and 100; no key is beyond 80.
    assert work["flops"].tolist() == [(64 * 64 + 36 * 80) * 37, (32 * 32 + 32 * 64 + 32 * 80 + 4 * 80) * 37]
    compulsory = OP.traffic_bytes(case)
    assert work["traffic_bytes"].tolist() == [
        compulsory + 2 * 4 * 8 * (64 + 80 - 80),
        compulsory + 2 * 4 * 8 * (32 + 64 + 80 + 80 - 80),
    ]
    assert work["inner_steps"].tolist() == [2, 4]
    assert work["calls"].tolist() == [2 * 4 + 2, 4 * 4 + 2]


@given(
    q_len=st.integers(1, 400),
    kv_len=st.integers(65, 400),
    causal=st.booleans(),
    chunk=st.sampled_from([64, 128]),
)
def test_online_chunks_meet_the_rows_that_see_them(q_len: int, kv_len: int, causal: bool, chunk: int) -> None:
    case = attention(1, 1, 1, q_len, kv_len, 3, causal=causal)
    candidate = Candidate.of("online_chunked", {"chunk": chunk})
    if candidate not in candidates(case, CPU):
        return
    keys = min(q_len, kv_len) if causal else kv_len
    pairs = met = 0
    for start in range(0, keys, chunk):
        rows = q_len - start if causal else q_len
        pairs += rows * (min(start + chunk, keys) - start)
        met += rows
    assert work_of(case, candidate)["flops"].tolist() == [pairs * (4 * 3 + 5) + met * 3]


@settings(max_examples=examples(30))
@given(
    batch=st.integers(0, 3),
    group=st.integers(1, 4),
    q_len=st.integers(0, 2000),
    kv_len=st.integers(1, 5000),
    causal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_no_candidate_claims_less_than_the_definition(
    batch: int, group: int, q_len: int, kv_len: int, causal: bool, dtype: str
) -> None:
    case = attention(batch, 2 * group, 2, q_len, kv_len, 16, dtype=dtype, causal=causal)
    for block in candidates(case, CPU).blocks:
        work = variant("attention", block.variant).work(case, block.columns, CPU).columns(block.length)
        assert (work["flops"] >= OP.flops(case)).all(), block.variant
        assert (work["traffic_bytes"] >= OP.traffic_bytes(case)).all(), block.variant
        assert (work["scratch_bytes"] >= 0).all()
        assert (work["calls"] >= 1).all()


def test_the_tolerance_narrows_with_the_keys_and_widens_with_the_dtype() -> None:
    cases = {dtype: attention(1, 1, 1, 1, 4096, 64, dtype=dtype) for dtype in DTYPES}
    widths = [attention_tolerance(cases["bfloat16"], keys).absolute for keys in (1, 16, 256, 4096)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < widths[0] / 10
    by_dtype = [attention_tolerance(cases[dtype], 64).absolute for dtype in DTYPES]
    assert by_dtype == sorted(by_dtype)
    tf32 = attention(1, 1, 1, 1, 4096, 64, allow_tf32=True)
    half = OP.tolerance(cases["float16"])
    assert OP.tolerance(tf32).absolute == pytest.approx(half.absolute)


def test_listing_candidates_imports_no_torch() -> None:
    code = (
        "import sys; from kernelcast.kernels import Device, candidates, problem; "
        "p = problem('attention', batch=1, heads=8, q_len=512, kv_len=512, head_dim=64); "
        "print(len(candidates(p, Device('c', 'cpu', 'amd', 'x86_64', cores=2))), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["12", "False"]
