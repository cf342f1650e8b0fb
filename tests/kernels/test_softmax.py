"""The softmax operation: every variant against the reference, large and infinite values, its rules and its work."""

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

if TYPE_CHECKING:
    import torch

CPU = Device("cpu", "cpu", "amd", "x86_64-avx512", cores=2, warp_size=1, llc_bytes=32 * 2**20)
OP = operation("softmax")
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("row", "column")

SHAPES = {
    "one element": (1, 1),
    "one column": (70, 1),
    "one row": (1, 1000),
    "no rows": (0, 33),
    "odd": (67, 131),
    "power of two": (64, 256),
    "every chunk of rows": (1030, 3),
    "every chunk of columns": (2, 16390),
    "long rows": (3, 5000),
}


def softmax(rows: int, columns: int, **options: str) -> Problem:
    return problem("softmax", rows=rows, columns=columns, **options)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many tiny kernels: threads that wait for each other would take most of the time on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first_failure(case: Problem, x: torch.Tensor) -> str | None:
    """Run every legal candidate alone into poisoned memory; what is wrong with the first that is wrong."""
    import torch

    before = x.clone()
    reference = OP.reference(case, x)
    for candidate in candidates(case, CPU):
        run = variant("softmax", candidate.variant).build(case, candidate.parameters)
        with poisoned():
            output = run(x)
        wrong = OP.check(case, reference, output)
        if wrong:
            return f"{candidate} on {case}: {wrong}"
        if output.stride() != x.stride():
            return f"{candidate} on {case}: strides {output.stride()}, not {x.stride()}"
        if output.numel() and output.data_ptr() == x.data_ptr():
            return f"{candidate} on {case}: the output is the input"
        if not torch.equal(before.nan_to_num(), x.nan_to_num()) or x.isnan().any():
            return f"{candidate} on {case}: the input was changed"
    return None


def inputs_of(case: Problem, seed: int = 0) -> torch.Tensor:
    (x,) = OP.make_inputs(case, seed=seed, device="cpu")
    return x


@for_each("dtype", DTYPES)
@for_each("layout", LAYOUTS)
@for_each("shape", SHAPES)
def test_every_candidate_matches_the_reference(shape: str, layout: str, dtype: str) -> None:
    case = softmax(*SHAPES[shape], layout=layout, dtype=dtype)
    assert first_failure(case, inputs_of(case)) is None


def test_the_shapes_reach_every_config() -> None:
    reached = {
        candidate
        for shape in SHAPES.values()
        for layout in LAYOUTS
        for candidate in candidates(softmax(*shape, layout=layout), CPU)
    }
    every = {
        each.space().at(row)
        for each in variants("softmax").values()
        if each.backend != "triton"
        for row in range(each.space().length)
    }
    assert len(every) == 16
    assert reached == every


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(0, 90),
    columns=st.integers(1, 300),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1e-4, 1.0, 100.0, 1e4]),
    offset=st.sampled_from([0.0, -1e4, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_any_small_problem_at_any_magnitude(
    rows: int, columns: int, layout: str, dtype: str, scale: float, offset: float, seed: int
) -> None:
    case = softmax(rows, columns, layout=layout, dtype=dtype)
    x = inputs_of(case, seed).mul_(scale).add_(offset)
    assert x.isfinite().all()
    assert first_failure(case, x) is None


def test_the_reference_is_what_torch_defines() -> None:
    import torch

    for layout in LAYOUTS:
        case = softmax(40, 77, layout=layout)
        x = inputs_of(case, seed=5) * 30
        assert x.stride() == ((77, 1) if layout == "row" else (1, 40))
        torch.testing.assert_close(OP.reference(case, x), torch.softmax(x.double(), 1), rtol=1e-13, atol=0)


def test_a_hand_computed_output() -> None:
    import torch

    case = softmax(2, 3)
    x = torch.tensor([[0.0, math.log(2.0), math.log(5.0)], [7.0, 7.0, -math.inf]])
    expected = torch.tensor([[0.125, 0.25, 0.625], [0.5, 0.5, 0.0]])
    torch.testing.assert_close(OP.reference(case, x).float(), expected)
    for candidate in candidates(case, CPU):
        output = variant("softmax", candidate.variant).build(case, candidate.parameters)(x)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_magnitudes_do_not_overflow(layout: str, dtype: str) -> None:
    """exp(1e4) is beyond every dtype; the largest element of a row must still come out as its share of 1."""
    import torch

    case = softmax(70, 2050, layout=layout, dtype=dtype)
    x = (inputs_of(case).float().sign() * 1e4).to(inputs_of(case).dtype)
    assert first_failure(case, x) is None
    for candidate in candidates(case, CPU):
        output = variant("softmax", candidate.variant).build(case, candidate.parameters)(x)
        assert output.isfinite().all(), candidate
        torch.testing.assert_close(output.double().sum(1), torch.ones(70).double(), rtol=5e-3, atol=0)
        assert (output[x < 0] == 0).all(), candidate


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_parts_of_rows_are_zero(layout: str, dtype: str) -> None:
    """Whole chunks of rows and of columns that hold nothing but -inf: no difference of infinities may appear."""
    case = softmax(70, 2050, layout=layout, dtype=dtype)
    x = inputs_of(case)
    x[:, :1030] = -math.inf
    x[::2, 1500:] = -math.inf
    x[5, :-1] = -math.inf
    assert first_failure(case, x) is None
    for candidate in candidates(case, CPU):
        output = variant("softmax", candidate.variant).build(case, candidate.parameters)(x)
        assert (output[x == -math.inf] == 0).all(), candidate
        assert output[5, -1] == 1, candidate


def test_a_row_of_minus_infinity_is_nan_alone_as_in_torch() -> None:
    import torch

    case = softmax(70, 1100)
    x = inputs_of(case)
    x[7] = -math.inf
    assert torch.softmax(x, 1)[7].isnan().all()
    for candidate in candidates(case, CPU):
        output = variant("softmax", candidate.variant).build(case, candidate.parameters)(x)
        assert output[7].isnan().all(), candidate
        assert int(output.isnan().sum()) == 1100, candidate
    assert first_failure(case, x) is None


# What the check must catch.


@pytest.mark.parametrize(("dtype", "columns"), [("float32", 8192), ("float16", 256), ("bfloat16", 32)])
def test_one_column_missing_from_the_sum_is_caught(dtype: str, columns: int) -> None:
    case = softmax(64, columns, dtype=dtype)
    x = inputs_of(case)
    reference = OP.reference(case, x)
    assert OP.check(case, reference, reference.to(x.dtype)) is None
    weights = x.double().exp()
    wrong = weights / weights[:, :-1].sum(1, keepdim=True)
    assert "differ from the reference" in OP.check(case, reference, wrong.to(x.dtype))


def test_exponents_rounded_to_16_bits_are_caught() -> None:
    """Why the composed variants widen: a difference of 16-bit numbers, rounded to 16 bits, is too coarse."""
    for dtype in ("float16", "bfloat16"):
        case = softmax(64, 4096, dtype=dtype)
        x = inputs_of(case)
        careless = (x - x.amax(1, keepdim=True)).exp()
        careless /= careless.sum(1, keepdim=True)
        assert "differ from the reference" in OP.check(case, OP.reference(case, x), careless)


def test_an_unwritten_part_is_caught() -> None:
    case = softmax(64, 32)
    x = inputs_of(case)
    reference = OP.reference(case, x)
    output = reference.float()
    output[63] = math.nan
    assert "32 are NaN" in OP.check(case, reference, output)


# Problems and rules.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 0}, "columns is 0; it must be at least 1"),
        ({"rows": -1}, "rows is -1; it must be at least 0"),
        ({"layout": "diagonal"}, "layout is 'diagonal'; it must be one of row, column"),
        ({"dtype": "int8"}, "does not take dtype 'int8'"),
        ({"dim": 1}, "no dimension or option 'dim'"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict, message: str) -> None:
    with pytest.raises(InvalidProblemError, match=message):
        problem("softmax", **{"rows": 4, "columns": 4, **change})


def refused(case: Problem) -> dict[Candidate, tuple[str, str]]:
    return {each.candidate: (each.rule, str(each)) for each in refusals(case, CPU)}


def test_a_chunk_of_everything_is_refused() -> None:
    found = refused(softmax(64, 4096))
    for name, whole in (("row_chunked", "composed"), ("vendor_chunked", "vendor")):
        rule, message = found[Candidate.of(name, {"chunk": 64})]
        assert rule == "chunk-is-a-part"
        assert f"a chunk of all rows is the {whole} variant (chunk=64, rows=64)" in message
        assert Candidate.of(name, {"chunk": 16}) not in found
    assert found[Candidate.of("column_chunked", {"chunk": 4096})][0] == "chunk-is-a-part"
    assert Candidate.of("column_chunked", {"chunk": 1024}) not in found


def test_steps_are_bounded() -> None:
    chunk = Candidate.of("row_chunked", {"chunk": 16})
    assert chunk not in refused(softmax(16 * 512, 8))
    rule, message = refused(softmax(16 * 512 + 1, 8))[chunk]
    assert (rule, "513 steps" in message) == ("steps-bounded", True)
    columns = Candidate.of("column_chunked", {"chunk": 1024})
    assert refused(softmax(1, 1024 * 512 + 1))[columns][0] == "steps-bounded"


def test_a_transposed_output_is_not_written_through_slices_by_torch() -> None:
    chunk = Candidate.of("vendor_chunked", {"chunk": 16})
    assert refused(softmax(64, 64, layout="column"))[chunk][0] == "rows-adjacent"
    assert chunk not in refused(softmax(64, 64))


def test_float32_copies_above_2_gib_are_refused_at_the_byte() -> None:
    composed = Candidate.of("composed", {"normalise": "divide"})
    assert composed not in refused(softmax(65536, 8192, dtype="float16"))
    rule, message = refused(softmax(65537, 8192, dtype="float16"))[composed]
    assert (rule, f"{4 * 65537 * 8192} bytes" in message) == ("scratch-fits", True)
    assert composed not in refused(softmax(65537, 8192))
    assert refused(softmax(65536, 8192, dtype="float16"))[Candidate.of("exp_log")][0] == "scratch-fits"
    chunk = Candidate.of("row_chunked", {"chunk": 1024})
    assert chunk not in refused(softmax(65537, 8192, dtype="float16"))


def test_a_product_in_tf32_is_refused() -> None:
    case = problem("softmax", rows=4, columns=4, allow_tf32=True)
    assert refused(case)[Candidate.of("matmul_sum")][0] == "no-tf32"


def test_typical_problems_have_ten_candidates_and_the_default_first() -> None:
    for dtype in DTYPES:
        found = list(candidates(softmax(4096, 4096, dtype=dtype), CPU))
        assert len(found) == len(set(found)) >= 10
        assert found[0] == OP.default == Candidate.of("vendor")


# Work.


def work_of(case: Problem, *wanted: Candidate) -> dict:
    (block,) = CandidateTable.of(wanted).blocks
    return variant("softmax", block.variant).work(case, block.columns, CPU).columns(block.length)


def test_flops_and_traffic_by_hand() -> None:
    case = softmax(3, 7, dtype="bfloat16")
    assert OP.flops(case) == 5 * 21
    assert OP.traffic_bytes(case) == 2 * 21 * 2


def test_composed_passes_reach_memory_where_the_matrices_do_not_stay_in_cache() -> None:
    both = [Candidate.of("composed", {"normalise": how}) for how in ("divide", "multiply")]
    # Input and output are 32 MiB together, as large as the cache; one row more is beyond it.
    inside = work_of(softmax(4096, 1024), *both)
    assert inside["traffic_bytes"].tolist() == [2 * 4096 * 1024 * 4] * 2
    outside = work_of(softmax(4097, 1024), *both)
    assert outside["traffic_bytes"].tolist() == [8 * 4097 * 1024 * 4] * 2
    assert inside["calls"].tolist() == [5, 6]
    assert inside["scratch_bytes"].tolist() == [0, 0]
    assert work_of(softmax(10, 10, dtype="float16"), *both)["scratch_bytes"].tolist() == [400, 400]


def test_the_work_of_chunks_of_rows_by_hand() -> None:
    case = softmax(65537, 8192, dtype="bfloat16")
    work = work_of(case, *(Candidate.of("row_chunked", {"chunk": chunk}) for chunk in (256, 1024)))
    matrix = 2 * 65537 * 8192
    assert work["inner_steps"].tolist() == [257, 65]
    assert work["calls"].tolist() == [5 * 257, 5 * 65]
    # A chunk of input and output is 8 MiB or 32 MiB: both within the cache.
    assert work["traffic_bytes"].tolist() == [2 * matrix, 2 * matrix]
    assert work["scratch_bytes"].tolist() == [4 * 256 * 8192, 4 * 1024 * 8192]
    longer = work_of(softmax(65537, 8193), Candidate.of("row_chunked", {"chunk": 1024}))
    assert longer["traffic_bytes"].tolist() == [8 * 4 * 65537 * 8193]


def test_the_work_of_chunks_of_columns_by_hand() -> None:
    case = softmax(16, 131072)
    work = work_of(case, *(Candidate.of("column_chunked", {"chunk": chunk}) for chunk in (1024, 16384)))
    assert work["inner_steps"].tolist() == [128, 8]
    assert work["calls"].tolist() == [4 * 128 + 2, 4 * 8 + 2]
    assert work["flops"].tolist() == [5 * 16 * 131072 + 16 * 128, 5 * 16 * 131072 + 16 * 8]
    assert work["traffic_bytes"].tolist() == [5 * 4 * 16 * 131072] * 2


@given(
    rows=st.integers(0, 70000),
    columns=st.integers(1, 200000),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
)
def test_no_candidate_claims_less_than_the_definition(
    rows: int, columns: int, layout: str, dtype: str
) -> None:
    case = softmax(rows, columns, layout=layout, dtype=dtype)
    for block in candidates(case, CPU).blocks:
        work = variant("softmax", block.variant).work(case, block.columns, CPU).columns(block.length)
        assert (work["flops"] >= OP.flops(case)).all(), block.variant
        assert (work["traffic_bytes"] >= OP.traffic_bytes(case)).all(), block.variant
        assert (work["scratch_bytes"] >= 0).all(), block.variant
        assert (work["calls"] >= 1).all(), block.variant


def test_listing_candidates_imports_no_torch() -> None:
    code = (
        "import sys; from kernelcast.kernels import Device, candidates, problem; "
        "p = problem('softmax', rows=4096, columns=1024); "
        "print(len(candidates(p, Device('c', 'cpu', 'amd', 'x86_64', cores=2))), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["13", "False"]
