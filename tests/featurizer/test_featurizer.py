"""The featurizer: columns, units, hand-computed values, and what is covered."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernelcast import kernels
from kernelcast.errors import InvalidProblemError, ModelError
from kernelcast.featurizer import FeatureSchema, Featurizer
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem
from kernelcast.kernels.devices import device

A100 = device("a100")
CPU = Device(
    "cpu", "cpu", "intel", "x86", 2, warp_size=1, memory_bandwidth=2e10, peak_flops=(("float32", 1e11),)
)
DEVICES = [CPU, A100, device("mi300x"), Device("unknown", "gpu", "nvidia", "sm80", 1)]

TILE = {"block_m": 64, "block_n": 128, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 4}
CANDIDATES = CandidateTable.of(
    [
        Candidate("vendor"),
        Candidate.of("split_k", {"split": 4}),
        Candidate.of("transposed", {"output": "view"}),
        Candidate.of("transposed", {"output": "copy"}),
        Candidate.of("triton_tiled", TILE),
    ]
)
VENDOR, SPLIT, VIEW, COPY, TRITON = range(5)


def featurizer_of(problems, *tables, with_work=True):
    return Featurizer(FeatureSchema.infer(problems, tables, with_work=with_work))


def named(featurizer, problem, table, where=A100):
    found = featurizer(problem, table, where)
    assert found.dtype == np.float32
    assert found.shape == (len(table), len(featurizer.names))
    return dict(zip(featurizer.names, found.T, strict=True))


def test_the_features_of_one_gemm_by_hand():
    described = kernels.problem("gemm", m=256, n=512, k=1024, dtype="float16", layout="nt")
    x = named(featurizer_of([described], CANDIDATES), described, CANDIDATES)

    def check(name, *values):
        np.testing.assert_allclose(
            x[name], np.array(values if len(values) > 1 else values * 5), rtol=1e-5, err_msg=name
        )

    nan = math.nan
    check("log2_m", 8)
    check("log2_n", 9)
    check("log2_k", 10)
    assert not {"alignment_k", "option_lda"} & set(x)  # the alignment of rows stands for both
    check("dtype_bytes", 2)
    check("allow_tf32", 0)
    check("threads", 0)
    check("needed_flops", 28)  # 2 * 2^8 * 2^9 * 2^10
    traffic = 2 * (256 * 1024 + 1024 * 512 + 256 * 512)  # 1,835,008 bytes
    check("needed_bytes", math.log2(traffic))
    check("intensity", 28 - math.log2(traffic))
    check("variant_vendor", 1, 0, 0, 0, 0)
    check("variant_transposed", 0, 0, 1, 1, 0)
    check("parameter_split", nan, 4, nan, nan, nan)
    check("parameter_block_n", nan, nan, nan, nan, 128)
    check("parameter_output", nan, nan, 1, 0, nan)  # copy, view
    check("flops_waste", 0, math.log2((2**28 + 256 * 512 * 4) / 2**28), 0, 0, 0)
    # Four columns of tiles read all of A, four rows of tiles all of B.
    tiled = 2 * (256 * 1024 * 4 + 1024 * 512 * 4 + 256 * 512)
    check("traffic_reuse", 0, 0, 0, 0, math.log2(tiled / traffic))
    check("scratch_share", 0, 4 * 2 * 256 * 512 / traffic, 0, 2 * 256 * 512 / traffic, 0)
    check("calls", 1, 2, 1, 2, 1)
    check("programs", nan, nan, nan, nan, 4)  # log2 of 4 x 4 tiles
    check("warps", nan, nan, nan, nan, 4)
    check("accumulators", nan, nan, nan, nan, 64 * 128 / 128)
    check("inner_steps", nan, 8, nan, nan, 5)  # log2 of 1024 / 4 and 1024 / 32
    # 312 TFLOP/s and 2,039 GB/s.
    compute_us, memory_us = 2**28 / 312e12 * 1e6, traffic / 2039e9 * 1e6
    check(
        "compute_us", *(math.log2(compute_us * factor) for factor in (1, 1 + 4 * 256 * 512 / 2**28, 1, 1, 1))
    )
    check("memory_us", *(math.log2(memory_us * factor) for factor in (1, 1, 1, 1, tiled / traffic)))
    scratch_us = 2 * 4 * 2 * 256 * 512 / 2039e9 * 1e6
    check("scratch_us", -1e30, math.log2(scratch_us), -1e30, math.log2(scratch_us / 4), -1e30)
    check("launch_us", 2, 3, 2, 3, 2)  # log2 of 4 us a call
    check("busy_share", nan, nan, nan, nan, 16 / 108)
    check("waves", nan, nan, nan, nan, 16 / (108 * x["blocks_per_core"][TRITON]))
    check("tail", nan, nan, nan, nan, 108 * x["blocks_per_core"][TRITON] / 16)
    slowest = max(compute_us * 108 / 16, tiled / 2039e9 * 1e6)
    check(
        "roofline_us",
        math.log2(memory_us + 4),
        math.log2(memory_us + scratch_us + 8),
        math.log2(memory_us + 4),
        math.log2(memory_us + scratch_us / 4 + 8),
        math.log2(slowest + 4),
    )
    check("tall", -1)
    check("library_tail_128x128", 108 * 128 * 128 / (256 * 512))  # 8 tiles on 108 cores


def test_problem_columns_of_an_operation_that_is_not_in_the_catalogue():
    def toy(m, n, dtype, **options):
        return Problem("toy", (("m", m), ("n", n)), dtype, tuple(options.items()), allow_tf32=True, threads=3)

    problems = [toy(96, 0, "float32", layout="nt", stride=8), toy(1, 2**20, "int8", layout="nn", stride=0)]
    featurizer = featurizer_of(problems, CANDIDATES, with_work=False)
    one = CandidateTable.of([Candidate("vendor")])
    first, second = (named(featurizer, problem, one) for problem in problems)
    shared = [name for name in featurizer.names if not name.startswith(("variant_", "parameter_"))]
    assert {name: (first[name][0], second[name][0]) for name in shared} == {
        "log2_m": (np.float32(math.log2(96)), 0),
        "log2_n": (-1, 20),  # nothing at all lies below one
        "alignment_m": (5, 0),
        "alignment_n": (8, 8),
        "option_layout": (1, 0),
        "option_stride": (3, -1),
        "dtype": (0, 1),
        "dtype_bytes": (4, 1),
        "allow_tf32": (1, 1),
        "threads": (3, 3),
    }
    assert dict(zip(featurizer.names, featurizer.units, strict=True))["option_layout"] == "code"
    unseen = toy(4, 4, "float64", layout="tt", stride=1)
    found = named(featurizer, unseen, one)
    assert np.isnan([found["dtype"][0], found["option_layout"][0]]).all()
    assert found["dtype_bytes"][0] == 8


@pytest.mark.parametrize("name", ["flops", "bytes", "intensity", "waste", "m"])
def test_a_dimension_may_have_any_name(name):
    described = Problem("toy", ((name, 4),), "float32", (("dtype_bytes", 3),))
    featurizer = featurizer_of([described], CANDIDATES, with_work=False)
    assert len(set(featurizer.names)) == len(featurizer.names)
    assert named(featurizer, described, CANDIDATES)[f"log2_{name}"].tolist() == [2] * 5


def problems_of(name):
    """Problems of an operation from its schema alone, so that a new one joins by existing."""
    schema = kernels.operation(name).schema

    @st.composite
    def build(draw):
        values = {dim.name: draw(st.sampled_from([64, 1, 3, 128, 1000, 17, 0])) for dim in schema.dims}
        alike = draw(st.sampled_from([64, 1, 17]))
        for option in schema.options:
            values[option.name] = draw(st.sampled_from(option.choices or (option.default, 1, 2)))
        dtype = draw(st.sampled_from(schema.dtypes))
        try:
            built = schema.problem(dtype=dtype, threads=2, **values)
        except InvalidProblemError:
            built = schema.problem(dtype=dtype, **{dim.name: alike for dim in schema.dims})
        assume(kernels.operation(name).flops(built) < 2**50)
        return built

    return build()


@pytest.mark.parametrize("name", kernels.operation_names())
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_features_of_every_operation_and_variant(name, data):
    described = data.draw(problems_of(name))
    where = data.draw(st.sampled_from(DEVICES))
    table = kernels.candidates(described, where, subset="default")
    featurizer = featurizer_of([described], table)
    assert len(set(featurizer.names)) == len(featurizer.names) == len(featurizer.units)
    assert all(featurizer.units)
    assert featurizer.covers(table).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = named(featurizer, described, table, where)
    assert not any(np.isinf(column).any() for column in x.values())
    start = 0
    for block in table.blocks:
        rows = slice(start, start + block.length)
        start += block.length
        for column, values in x.items():
            kind, _, what = column.partition("_")
            if kind == "parameter":
                assert np.isnan(values[rows]).all() == (what not in block.columns), column
                assert np.isnan(values[rows]).any() == (what not in block.columns), column
            elif kind == "variant":
                assert (values[rows] == (what == block.variant)).all(), column
        work = (
            kernels.variant(name, block.variant).work(described, block.columns, where).columns(block.length)
        )
        for column in ("programs", "warps", "shared_bytes", "accumulators", "inner_steps"):
            np.testing.assert_array_equal(np.isnan(x[column][rows]), np.isnan(work[column]), err_msg=column)
        for column in ("needed_bytes", "flops_waste", "calls", "launch_us", "roofline_us"):
            assert not np.isnan(x[column][rows]).any(), column


def test_a_row_does_not_depend_on_its_neighbours():
    described = kernels.problem("gemm", m=100, n=300, k=512)
    featurizer = featurizer_of([described], CANDIDATES)
    together = featurizer(described, CANDIDATES, A100)
    for row, candidate in enumerate(CANDIDATES):
        alone = featurizer(described, CandidateTable.of([candidate]), A100)
        np.testing.assert_array_equal(alone[0], together[row])
    assert featurizer(described, CandidateTable([]), A100).shape == (0, len(featurizer.names))


def test_what_was_not_there_in_fitting_is_not_covered():
    described = kernels.problem("gemm", m=100, n=300, k=512)
    featurizer = featurizer_of([described], CandidateTable(CANDIDATES.blocks[:3]))

    def covered(*candidates):
        return featurizer.covers(CandidateTable.of(candidates)).tolist()

    assert featurizer.covers(CANDIDATES).tolist() == [True, True, True, True, False]
    assert covered(Candidate.of("split_k", {"split": 64})) == [False]  # a choice that was never measured
    assert covered(Candidate.of("split_k", {"split": "4"})) == [False]
    assert covered(Candidate("split_k")) == [False]
    assert covered(Candidate.of("vendor", {"split": 4})) == [False]
    assert covered(*(Candidate.of("transposed", {"output": how}) for how in ("copy", "other", "view"))) == [
        True, False, True,
    ]  # fmt: skip
    assert covered() == []
    # They have features all the same: those of the problem, and NaN for what is not known of them.
    x = named(featurizer, described, CANDIDATES)
    assert x["needed_flops"][TRITON] == pytest.approx(math.log2(2 * 100 * 300 * 512))
    assert not any(x[name][TRITON] for name in featurizer.names if name.startswith("variant_"))
    odd = CandidateTable.of([Candidate.of("transposed", {"output": "other"})])
    assert np.isnan(named(featurizer, described, odd)["parameter_output"][0])


def test_a_quantity_of_very_many_values_is_covered_in_between_and_beyond():
    described = kernels.problem("gemm", m=100, n=300, k=512)
    many = CandidateTable.of([Candidate.of("split_k", {"split": 2 * split}) for split in range(1, 67)])
    featurizer = featurizer_of([described], many)
    assert featurizer.schema.seen == ()
    assert featurizer.covers(CandidateTable.of([Candidate.of("split_k", {"split": 3})])).tolist() == [True]


def test_a_variant_that_is_gone_from_the_catalogue_keeps_its_parameters():
    described = kernels.problem("gemm", m=100, n=300, k=512)
    gone = CandidateTable.of([Candidate.of("recorded_long_ago", {"tile": 8}), Candidate("vendor")])
    featurizer = featurizer_of([described], gone)
    assert featurizer.covers(gone).all()
    x = named(featurizer, described, gone)
    assert x["parameter_tile"][0] == 8
    assert np.isnan(x["roofline_us"][0])
    assert np.isfinite(x["roofline_us"][1])


def test_a_variant_that_changed_its_parameters_is_one_variant():
    described = Problem("toy", (("m", 4),), "float32")
    old = CandidateTable.of([Candidate.of("tiled", {"a": 1})])
    new = CandidateTable.of([Candidate.of("tiled", {"a": 1, "b": 2})])
    other = CandidateTable.of([Candidate.of("tiled", {"b": 2})])
    featurizer = featurizer_of([described], old, new, with_work=False)
    assert featurizer.names.count("variant_tiled") == 1
    assert [featurizer.covers(each).item() for each in (old, new, other)] == [True, True, False]
    assert np.isnan(named(featurizer, described, old)["parameter_b"][0])
    assert named(featurizer, described, new)["parameter_b"][0] == 2


def test_another_operation_or_a_missing_fact_is_a_clear_error():
    described = kernels.problem("gemm", m=100, n=300, k=512)
    featurizer = featurizer_of([described], CANDIDATES)
    with pytest.raises(ModelError, match=r"model is of gemm; the problem is softmax"):
        featurizer(kernels.problem("softmax", rows=1, columns=1), CANDIDATES, A100)
    with pytest.raises(ModelError, match="lacks 'k'"):
        featurizer(Problem("gemm", described.dims[:2], "float32", described.options), CANDIDATES, A100)
    with pytest.raises(ModelError, match="lacks 'lda'"):
        featurizer(dataclasses.replace(described, options=(("layout", "nn"),)), CANDIDATES, A100)
    # An option that is not among the features may still be one that a variant counts with.
    bare = dataclasses.replace(described, options=())
    with pytest.raises(ModelError, match="lacks"):
        featurizer_of([bare], CANDIDATES)(bare, CANDIDATES, A100)


@pytest.mark.parametrize("name", ["gemm", "batched_gemm", "softmax", "attention", "conv2d"])
def test_features_and_coverage_of_listed_candidates_are_those_of_the_same_candidates_one_by_one(name):
    sizes = {dim.name: 64 for dim in kernels.operation(name).schema.dims}
    dtype = "float16" if "float16" in kernels.operation(name).schema.dtypes else "float32"
    listed, featurizer = [], None
    for size in (64, 32, 96):
        described = kernels.problem(name, dtype=dtype, **{**sizes, next(iter(sizes)): size})
        listed.append((described, kernels.candidates(described, A100, subset="default")))
    featurizer = featurizer_of([described for described, _ in listed], *(table for _, table in listed[:2]))
    if name == "gemm":
        # Rows of the same width of loads, and of another alignment.
        for k in (4096, 4104, 4112, 4120):
            described = kernels.problem(name, dtype=dtype, m=1024, n=4096, k=k, layout="nt")
            listed.append((described, kernels.candidates(described, A100, subset="default")))
    for described, table in listed:
        # Not the same problem object either: nothing that was worked out of it is at hand.
        again = Problem.from_dict(described.to_dict())
        single = CandidateTable.of(table)
        np.testing.assert_array_equal(featurizer(described, table, A100), featurizer(again, single, A100))
        np.testing.assert_array_equal(featurizer.covers(table), featurizer.covers(single))


@pytest.mark.parametrize(
    "needed",
    [
        ["needed_flops"],
        ["tile_estimate"],
        ["programs", "library_tail_64x64"],
        ["roofline_us"],
        ["row_alignment", "variant_vendor"],
        [],
    ],
    ids=str,
)
def test_columns_that_are_needed_are_there_whatever_else_is_not(needed):
    described = kernels.problem("gemm", m=100, n=300, k=512)
    whole = featurizer_of([described], CANDIDATES)
    some = Featurizer(whole.schema, needed=needed)
    assert some.names == whole.names
    wanted, found = named(whole, described, CANDIDATES), named(some, described, CANDIDATES)
    for name in needed:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    # Of the others each is as it is, or missing.
    for name, column in found.items():
        same = (column == wanted[name]) | np.isnan(column)
        assert same.all(), name
    np.testing.assert_array_equal(some.covers(CANDIDATES), whole.covers(CANDIDATES))
