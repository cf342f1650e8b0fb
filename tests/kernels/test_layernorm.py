"""The layernorm operation: every torch variant against the reference, large means, what a check must catch, rules, work."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

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
    Problem,
    candidates,
    operation,
    problem,
    refusals,
    variant,
    variants,
)
from kernelcast.kernels.memory import poisoned
from kernelcast.kernels.ops.layernorm.schema import least_variance

if TYPE_CHECKING:
    import torch

CPU = Device("cpu", "cpu", "amd", "x86_64-avx512", cores=2, warp_size=1, llc_bytes=32 * 2**20)
GPU = Device("gpu", "gpu", "nvidia", "sm90", cores=132, llc_bytes=50 * 2**20)
OP = operation("layernorm")
DTYPES = ("float32", "float16", "bfloat16")
AFFINES = ("weight_bias", "weight", "none")

SHAPES = {
    "one element": (1, 1),
    "one column": (70, 1),
    "two columns": (300, 2),
    "one row": (1, 1000),
    "no rows": (0, 33),
    "odd": (67, 131),
    "every chunk": (1030, 3),
    "long rows": (3, 5000),
}


def layernorm(rows: int, columns: int, **options: str) -> Problem:
    return problem("layernorm", rows=rows, columns=columns, **options)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many tiny kernels: threads that wait for each other would take most of the time on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def torch_candidates(case: Problem) -> list[Candidate]:
    """Every config of the variants made of torch calls that is legal on some device."""
    return [found for found in candidates(case, GPU) if not found.variant.startswith("triton")]


def first_failure(case: Problem, inputs: tuple[torch.Tensor, ...]) -> str | None:
    """Run every candidate alone into poisoned memory; what is wrong with the first that is wrong."""
    import torch

    before = [each.clone() for each in inputs]
    reference = OP.reference(case, *inputs)
    for candidate in torch_candidates(case):
        run = variant("layernorm", candidate.variant).build(case, candidate.parameters)
        with poisoned():
            output = run(*inputs)
        wrong = OP.check(case, reference, output)
        if wrong:
            return f"{candidate} on {case}: {wrong}"
        if not output.is_contiguous() or (output.numel() and output.data_ptr() == inputs[0].data_ptr()):
            return f"{candidate} on {case}: the output is not a contiguous tensor of its own"
        if not all(torch.equal(*pair) for pair in zip(inputs, before, strict=True)):
            return f"{candidate} on {case}: the inputs were changed"
    return None


@for_each("dtype", DTYPES)
@for_each("affine", AFFINES)
@for_each("shape", SHAPES)
def test_every_candidate_matches_the_reference(shape: str, affine: str, dtype: str) -> None:
    case = layernorm(*SHAPES[shape], affine=affine, dtype=dtype)
    assert first_failure(case, OP.make_inputs(case, seed=0, device="cpu")) is None


def test_the_shapes_reach_every_config() -> None:
    reached = {found for shape in SHAPES.values() for found in torch_candidates(layernorm(*shape))}
    every = {
        each.space().at(row)
        for each in variants("layernorm").values()
        if each.backend != "triton"
        for row in range(each.space().length)
    }
    assert len(every) == 1 + 3 + 3 * 4
    assert reached == every


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.integers(0, 90),
    columns=st.integers(1, 300),
    affine=st.sampled_from(AFFINES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_small_problem(rows: int, columns: int, affine: str, dtype: str, seed: int) -> None:
    case = layernorm(rows, columns, affine=affine, dtype=dtype)
    assert first_failure(case, OP.make_inputs(case, seed=seed, device="cpu")) is None


def test_the_inputs_are_as_stated() -> None:
    import torch

    for affine, count in (("weight_bias", 3), ("weight", 2), ("none", 1)):
        inputs = OP.make_inputs(layernorm(40, 4000, affine=affine), seed=3, device="cpu")
        assert [tuple(each.shape) for each in inputs] == [(40, 4000), (4000,), (4000,)][:count]
        for each, mean, spread in zip(inputs, (0.0, 1.0, 0.0), (1.0, 0.1, 0.1), strict=False):
            assert float(each.mean()) == pytest.approx(mean, abs=0.02)
            assert float(each.std()) == pytest.approx(spread, rel=0.05)
    case = layernorm(2, 3, dtype="float16")
    same = zip(*(OP.make_inputs(case, seed=5, device="cpu") for _ in range(2)), strict=True)
    assert all(torch.equal(*pair) for pair in same)


def test_a_hand_computed_output_and_another_eps() -> None:
    import torch

    x = torch.tensor([[1.0, 3.0, 5.0, 7.0], [2.0, 2.0, 2.0, 2.0]])
    weight, bias = torch.tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    case = layernorm(2, 4)
    # The first row has mean 4 and variance 5; with eps = 4 its scale is 1/3.
    expected = torch.tensor([[-1.0, 1 - 1 / 3, 2 / 3, 3.0], [0.0, 1.0, 0.0, 1.0]])
    for candidate in torch_candidates(case):
        run = variant("layernorm", candidate.variant).build(case, candidate.parameters)
        assert torch.allclose(run(x, weight, bias, eps=4.0), expected, rtol=1e-6, atol=1e-6), candidate
        assert torch.equal(run(x, weight, bias), run(x, weight, bias, eps=1e-5)), candidate
    library = torch.nn.functional.layer_norm(x.double(), (4,), weight.double(), bias.double())
    assert torch.allclose(OP.reference(case, x, weight, bias), library, rtol=1e-14, atol=1e-14)


def test_a_large_mean_costs_no_more_than_its_own_rounding() -> None:
    """Rows of mean 100 and deviation 1: sums of x and of its squares would be off by 1e-3 and more."""
    case = layernorm(40, 3001, affine="none")
    (x,) = OP.make_inputs(case, seed=2, device="cpu")
    x += 100
    reference = OP.reference(case, x)
    for candidate in torch_candidates(case):
        output = variant("layernorm", candidate.variant).build(case, candidate.parameters)(x)
        # A mean of 100 is rounded by up to 4e-6 in float32, and so are differences from it.
        assert float((output - reference).abs().max()) < 5e-5, candidate


def test_rows_that_are_not_finite_stay_alone() -> None:
    case = layernorm(70, 100)
    inputs = OP.make_inputs(case, seed=0, device="cpu")
    inputs[0][3, 5], inputs[0][4, 6] = math.inf, math.nan
    for candidate in torch_candidates(case):
        output = variant("layernorm", candidate.variant).build(case, candidate.parameters)(*inputs)
        assert output[3:5].isnan().all(), candidate
        assert int(output.isnan().sum()) == 200, candidate


# What the check must catch.


@for_each(
    ("fault", "dtype", "columns"),
    [
        ("no bias", "float32", 8192),
        ("no bias", "float16", 256),
        ("no bias", "bfloat16", 64),
        ("mean of all but one", "float32", 8192),
        ("mean of all but one", "float16", 256),
        ("mean of all but one", "bfloat16", 64),
        ("divided by n - 1", "float32", 1024),
        ("divided by n - 1", "float16", 256),
        ("divided by n - 1", "bfloat16", 32),
        ("no eps", "float32", 64),
    ],
)
def test_small_faults_are_caught(fault: str, dtype: str, columns: int) -> None:
    case = layernorm(64, columns, dtype=dtype)
    inputs = OP.make_inputs(case, seed=0, device="cpu")
    x, weight, bias = (each.double() for each in inputs)
    reference = OP.reference(case, *inputs)
    assert OP.check(case, reference, reference.to(inputs[0].dtype)) is None
    mean = (x[:, :-1] if fault == "mean of all but one" else x).mean(1, keepdim=True)
    divisor = columns - 1 if fault == "divided by n - 1" else columns
    variance = (x - mean).square().sum(1, keepdim=True) / divisor
    scale = (variance + (0.0 if fault == "no eps" else 1e-5)).rsqrt()
    wrong = (x - mean) * scale * weight + (0.0 if fault == "no bias" else bias)
    assert "differ from the reference" in str(OP.check(case, reference, wrong.to(inputs[0].dtype)))


def test_sixteen_bit_statistics_are_caught() -> None:
    """Why the composed variants widen."""
    for dtype in ("float16", "bfloat16"):
        case = layernorm(64, 4096, dtype=dtype)
        x, weight, bias = OP.make_inputs(case, seed=0, device="cpu")
        centred = x - x.mean(1, keepdim=True)
        careless = centred * (centred.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight + bias
        assert "differ" in str(OP.check(case, OP.reference(case, x, weight, bias), careless))


def test_the_least_variance_holds_for_short_rows() -> None:
    import numpy as np

    generator = np.random.default_rng(0)
    for columns in (2, 3, 10, 100):
        found = generator.standard_normal((20_000, columns)).var(axis=1)
        assert least_variance(columns) < found.min()
    assert least_variance(1) == 0.0
    # Long rows have variances near 1, and the bound is within a factor of e.
    assert 0.36 < least_variance(100_000) < 1.0


# Problems and rules.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 0}, "columns is 0; it must be at least 1"),
        ({"affine": "bias"}, "affine is 'bias'; it must be one of weight_bias, weight, none"),
        ({"dtype": "int8"}, "does not take dtype 'int8'"),
        ({"eps": 1}, "no dimension or option 'eps'"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict, message: str) -> None:
    with pytest.raises(InvalidProblemError, match=message):
        problem("layernorm", **{"rows": 4, "columns": 4, **change})


def refused(case: Problem, device: Device = CPU) -> dict[Candidate, tuple[str, str]]:
    return {each.candidate: (each.rule, str(each)) for each in refusals(case, device)}


def composed(statistics: str) -> Candidate:
    return Candidate.of("composed", {"statistics": statistics})


def chunked(chunk: int, statistics: str = "norm") -> Candidate:
    return Candidate.of("row_chunked", {"chunk": chunk, "statistics": statistics})


def test_var_mean_is_refused_on_a_cpu_alone() -> None:
    found = refused(layernorm(640, 64))
    for candidate in (composed("var_mean"), chunked(64, "var_mean")):
        assert found[candidate][0] == "var-mean-on-gpus"
        assert "statistics=var_mean on a cpu" in found[candidate][1]
        assert candidate not in refused(layernorm(640, 64), GPU)
    assert composed("norm") not in found


def test_chunks_are_parts_and_steps_are_bounded() -> None:
    found = refused(layernorm(64, 4096))
    assert found[chunked(64)][0] == "chunk-is-a-part"
    assert "a chunk of all rows is the composed variant (chunk=64, rows=64)" in found[chunked(64)][1]
    assert chunked(16) not in found
    assert chunked(16) not in refused(layernorm(16 * 512, 8))
    rule, message = refused(layernorm(16 * 512 + 1, 8))[chunked(16)]
    assert (rule, "513 steps" in message) == ("steps-bounded", True)


def test_temporaries_above_2_gib_are_refused_at_the_byte() -> None:
    # float32 squares; nothing where the norm is taken; 16 bits need a copy either way.
    assert composed("mean") not in refused(layernorm(65536, 8192))
    rule, message = refused(layernorm(65537, 8192))[composed("mean")]
    assert (rule, f"{4 * 65537 * 8192} bytes" in message) == ("scratch-fits", True)
    assert composed("norm") not in refused(layernorm(65537, 8192))
    assert refused(layernorm(65537, 8192, dtype="float16"))[composed("norm")][0] == "scratch-fits"
    assert refused(layernorm(40000, 8192, dtype="float16"))[composed("mean")][0] == "scratch-fits"
    assert chunked(1024) not in refused(layernorm(65537, 8192, dtype="float16"))


def test_typical_problems_have_candidates_and_the_default_first() -> None:
    for dtype in DTYPES:
        found = list(candidates(layernorm(4096, 4096, dtype=dtype), CPU))
        assert len(found) == len(set(found)) >= 9
        assert found[0] == OP.default == Candidate.of("vendor")


# Work.


def work_of(case: Problem, *wanted: Candidate) -> dict:
    (block,) = CandidateTable.of(wanted).blocks
    return variant("layernorm", block.variant).work(case, block.columns, GPU).columns(block.length)


def test_flops_and_traffic_by_hand() -> None:
    assert [OP.flops(layernorm(3, 7, affine=affine)) for affine in AFFINES] == [7 * 21, 6 * 21, 5 * 21]
    traffic = [OP.traffic_bytes(layernorm(3, 7, affine=affine, dtype="float16")) for affine in AFFINES]
    assert traffic == [2 * (42 + 14), 2 * (42 + 7), 2 * 42]


def test_the_work_of_single_calls_by_hand() -> None:
    all_three = [composed(how) for how in ("mean", "norm", "var_mean")]
    # Input and output are within the cache of 50 MiB, or beyond it.
    inside = work_of(layernorm(4096, 1024), *all_three)
    assert inside["traffic_bytes"].tolist() == [2 * 4096 * 1024 * 4 + 2 * 1024 * 4] * 3
    case = layernorm(4096, 4096)
    outside = work_of(case, *all_three)
    matrix, vectors = 4 * 4096 * 4096, 2 * 4096 * 4
    assert outside["traffic_bytes"].tolist() == [
        8 * matrix + vectors,
        8 * matrix + vectors,
        7 * matrix + vectors,
    ]
    assert outside["scratch_bytes"].tolist() == [matrix, 0, 0]
    # mean, sub; square, mean or norm, square, div or var_mean, sub; add, rsqrt, mul; addcmul.
    assert outside["calls"].tolist() == [8, 9, 6]
    half = work_of(layernorm(4096, 4096, dtype="float16", affine="none"), *all_three)
    assert half["scratch_bytes"].tolist() == [2 * matrix, matrix, matrix]
    assert half["calls"].tolist() == [8, 9, 6]
    assert half["traffic_bytes"].tolist() == [6 * matrix / 2, 6 * matrix / 2, 5 * matrix / 2]


@pytest.mark.slow
def test_the_calls_counted_are_those_made() -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if not any(name in str(function) for name in ("empty", "split", "view", "detach")):
                self.calls += 1
            return function(*arguments, **(keywords or {}))

    for affine in AFFINES:
        for dtype in ("float32", "float16"):
            case = layernorm(40, 8, affine=affine, dtype=dtype)
            inputs = OP.make_inputs(case, seed=0, device="cpu")
            for candidate in [composed("mean"), composed("norm"), composed("var_mean"), chunked(16)]:
                run = variant("layernorm", candidate.variant).build(case, candidate.parameters)
                with Count() as count, torch.no_grad():
                    run(*inputs)
                assert count.calls == work_of(case, candidate)["calls"][0], (candidate, affine, dtype)


def test_the_work_of_chunks_by_hand() -> None:
    case = layernorm(65537, 8192, dtype="bfloat16", affine="none")
    work = work_of(case, chunked(256), chunked(1024))
    matrix = 2 * 65537 * 8192
    assert work["inner_steps"].tolist() == [257, 65]
    assert work["calls"].tolist() == [9 * 257, 9 * 65]
    # A chunk of input and output is 8 MiB or 32 MiB: both within the cache.
    assert work["traffic_bytes"].tolist() == [2 * matrix, 2 * matrix]
    assert work["scratch_bytes"].tolist() == [4 * 256 * 8192, 4 * 1024 * 8192]
    assert work["programs"].tolist() == [256, 1024]


@settings(deadline=None)
@given(
    rows=st.integers(0, 70000),
    columns=st.integers(1, 200000),
    affine=st.sampled_from(AFFINES),
    dtype=st.sampled_from(DTYPES),
    device=st.sampled_from([CPU, GPU]),
)
def test_no_candidate_claims_less_than_the_definition(
    rows: int, columns: int, affine: str, dtype: str, device: Device
) -> None:
    case = layernorm(rows, columns, affine=affine, dtype=dtype)
    for block in candidates(case, device).blocks:
        work = variant("layernorm", block.variant).work(case, block.columns, device).columns(block.length)
        assert (work["flops"] >= OP.flops(case)).all(), block.variant
        assert (work["traffic_bytes"] >= OP.traffic_bytes(case)).all(), block.variant
        assert (work["scratch_bytes"] >= 0).all(), block.variant
        assert (work["calls"] >= 1).all(), block.variant


def test_listing_candidates_imports_no_torch() -> None:
    code = (
        "import sys; from kernelcast.kernels import Device, candidates, problem; "
        "p = problem('layernorm', rows=4096, columns=1024); "
        "print(len(candidates(p, Device('c', 'cpu', 'amd', 'x86_64', cores=2))), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["11", "False"]
