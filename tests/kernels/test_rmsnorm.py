"""The rmsnorm operation: every torch variant against the reference, what a check must catch, its rules and its work."""

from __future__ import annotations

import math
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

if TYPE_CHECKING:
    import torch

CPU = Device("cpu", "cpu", "amd", "x86_64-avx512", cores=2, warp_size=1, llc_bytes=32 * 2**20)
OP = operation("rmsnorm")
DTYPES = ("float32", "float16", "bfloat16")
AFFINES = ("weight", "none")

SHAPES = {
    "one element": (1, 1),
    "one column": (70, 1),
    "one row": (1, 1000),
    "no rows": (0, 33),
    "odd": (67, 131),
    "every chunk": (1030, 3),
    "long rows": (3, 5000),
}


def rmsnorm(rows: int, columns: int, **options: str) -> Problem:
    return problem("rmsnorm", rows=rows, columns=columns, **options)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many tiny kernels: threads that wait for each other would take most of the time on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first_failure(case: Problem, inputs: tuple[torch.Tensor, ...]) -> str | None:
    """Run every legal candidate alone into poisoned memory; what is wrong with the first that is wrong."""
    import torch

    before = [each.clone() for each in inputs]
    reference = OP.reference(case, *inputs)
    for candidate in candidates(case, CPU):
        run = variant("rmsnorm", candidate.variant).build(case, candidate.parameters)
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
    case = rmsnorm(*SHAPES[shape], affine=affine, dtype=dtype)
    assert first_failure(case, OP.make_inputs(case, seed=0, device="cpu")) is None


def test_the_shapes_reach_every_config() -> None:
    reached = {found for shape in SHAPES.values() for found in candidates(rmsnorm(*shape), CPU)}
    every = {
        each.space().at(row)
        for each in variants("rmsnorm").values()
        if each.backend != "triton"
        for row in range(each.space().length)
    }
    assert len(every) == 1 + 2 + 2 * 4
    assert reached == every


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.integers(0, 90),
    columns=st.integers(1, 300),
    affine=st.sampled_from(AFFINES),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_any_small_problem_at_any_magnitude(
    rows: int, columns: int, affine: str, dtype: str, scale: float, seed: int
) -> None:
    """Every error is relative, so magnitudes change nothing but what eps is to them."""
    case = rmsnorm(rows, columns, affine=affine, dtype=dtype)
    x, *vectors = OP.make_inputs(case, seed=seed, device="cpu")
    assert first_failure(case, (x.mul_(scale), *vectors)) is None


def test_a_hand_computed_output_and_another_eps() -> None:
    import torch

    case = rmsnorm(2, 2)
    x, weight = torch.tensor([[1.0, 7.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0])
    # The mean of the squares is 25; with eps = 11 the root is 6.
    expected = torch.tensor([[1 / 6, 7 / 3], [0.0, 0.0]])
    for candidate in candidates(case, CPU):
        run = variant("rmsnorm", candidate.variant).build(case, candidate.parameters)
        assert torch.allclose(run(x, weight, eps=11.0), expected, rtol=1e-6, atol=0), candidate
        assert torch.equal(run(x, weight), run(x, weight, eps=1e-6)), candidate
    library = torch.nn.functional.rms_norm(x.double(), (2,), weight.double(), 1e-6)
    assert torch.allclose(OP.reference(case, x, weight), library, rtol=1e-14, atol=0)


def test_rows_that_are_not_finite_stay_alone() -> None:
    case = rmsnorm(70, 100)
    x, weight = OP.make_inputs(case, seed=0, device="cpu")
    x[3, 5], x[4, 6] = math.inf, math.nan
    for candidate in candidates(case, CPU):
        output = variant("rmsnorm", candidate.variant).build(case, candidate.parameters)(x, weight)
        # Everything else of a row with an infinity is divided by it.
        assert int(output.isnan().sum()) == 101, candidate
        assert float(output[3].nan_to_num().abs().max()) == 0, candidate


# What the check must catch.


@for_each(("dtype", "columns"), [("float32", 8192), ("float16", 256), ("bfloat16", 64)])
@for_each("fault", ["one column missing", "no weight", "mean subtracted"])
def test_small_faults_are_caught(dtype: str, columns: int, fault: str) -> None:
    case = rmsnorm(64, columns, dtype=dtype)
    inputs = OP.make_inputs(case, seed=0, device="cpu")
    x, weight = (each.double() for each in inputs)
    reference = OP.reference(case, *inputs)
    assert OP.check(case, reference, reference.to(inputs[0].dtype)) is None
    squares = (x[:, :-1] if fault == "one column missing" else x).square().sum(1, keepdim=True)
    if fault == "mean subtracted":
        x = x - x.mean(1, keepdim=True)
    wrong = x * (squares / columns + 1e-6).rsqrt() * (1.0 if fault == "no weight" else weight)
    assert "differ from the reference" in str(OP.check(case, reference, wrong.to(inputs[0].dtype)))


def test_a_product_rounded_once_more_is_within_the_tolerance() -> None:
    """As torch's own rms_norm does in some versions: the normalised row is rounded before the weight."""
    for dtype in ("float16", "bfloat16"):
        case = rmsnorm(64, 512, dtype=dtype)
        x, weight = OP.make_inputs(case, seed=0, device="cpu")
        wide = x.float()
        rounded = (wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * weight
        assert OP.check(case, OP.reference(case, x, weight), rounded) is None


# Problems, rules and work.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 0}, "columns is 0; it must be at least 1"),
        ({"affine": "weight_bias"}, "affine is 'weight_bias'; it must be one of weight, none"),
        ({"eps": 1}, "no dimension or option 'eps'"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict, message: str) -> None:
    with pytest.raises(InvalidProblemError, match=message):
        problem("rmsnorm", **{"rows": 4, "columns": 4, **change})


def composed(statistics: str) -> Candidate:
    return Candidate.of("composed", {"statistics": statistics})


def chunked(chunk: int, statistics: str = "norm") -> Candidate:
    return Candidate.of("row_chunked", {"chunk": chunk, "statistics": statistics})


def test_rules_next_to_their_limits() -> None:
    def refused(rows: int, columns: int, **options: str) -> dict[Candidate, str]:
        return {each.candidate: each.rule for each in refusals(rmsnorm(rows, columns, **options), CPU)}

    assert refused(64, 8)[chunked(64)] == "chunk-is-a-part"
    assert chunked(16) not in refused(64, 8)
    assert refused(16 * 512 + 1, 8)[chunked(16)] == "steps-bounded"
    assert chunked(16) not in refused(16 * 512, 8)
    assert refused(65537, 8192)[composed("mean")] == "scratch-fits"
    assert composed("mean") not in refused(65536, 8192)
    assert composed("norm") not in refused(65537, 8192)
    assert refused(65537, 8192, dtype="float16")[composed("norm")] == "scratch-fits"


def work_of(case: Problem, *wanted: Candidate) -> dict:
    (block,) = CandidateTable.of(wanted).blocks
    return variant("rmsnorm", block.variant).work(case, block.columns, CPU).columns(block.length)


def test_work_by_hand() -> None:
    assert [OP.flops(rmsnorm(3, 7, affine=affine)) for affine in AFFINES] == [4 * 21, 3 * 21]
    assert OP.traffic_bytes(rmsnorm(3, 7, dtype="float16")) == 2 * (42 + 7)
    both = [composed("mean"), composed("norm")]
    work = work_of(rmsnorm(4096, 4096), *both)
    matrix = 4 * 4096 * 4096
    # The squares read x; the products with scale and weight read and write a matrix each.
    assert work["traffic_bytes"].tolist() == [5 * matrix + 4 * 4096] * 2
    assert work["scratch_bytes"].tolist() == [matrix, 0]
    # square, mean or norm, square, div; add, rsqrt, mul; mul.
    assert work["calls"].tolist() == [6, 7]
    chunks = work_of(rmsnorm(4100, 4096, dtype="float16", affine="none"), chunked(256), chunked(1024))
    assert chunks["inner_steps"].tolist() == [17, 5]
    assert chunks["calls"].tolist() == [7 * 17, 7 * 5]
    assert chunks["traffic_bytes"].tolist() == [2 * 2 * 4100 * 4096] * 2
    assert chunks["scratch_bytes"].tolist() == [4 * 256 * 4096, 4 * 1024 * 4096]


def test_typical_problems_have_candidates_and_the_default_first() -> None:
    found = list(candidates(rmsnorm(4096, 4096), CPU))
    assert len(found) == len(set(found)) == 1 + 2 + 2 * 4
    assert found[0] == OP.default == Candidate.of("vendor")


def test_variants_of_one_class_age_by_themselves() -> None:
    """The variants that derive from layernorm's hash the text of both."""
    for name in ("composed", "row_chunked", "triton_row", "triton_rows", "triton_two_pass"):
        own, base = variant("rmsnorm", name), variant("layernorm", name)
        assert own.source_hash() != base.source_hash()
        assert {type(base).__module__, *base.source_modules} <= set(own.source_modules)
