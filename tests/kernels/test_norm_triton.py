"""The Triton variants of layernorm and rmsnorm: rules, work, results under Triton's interpreter, and offline compilation."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cases import for_each
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_lab import (
    CPU,
    DEVICES,
    T4,
    UNKNOWN,
    assert_compiles,
    compiler,  # noqa: F401
    interpret,
    on_gpu,
    refused_by,
    work_of,
)

from kernelcast.kernels import Candidate, Device, candidates, operation, problem, variant

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
#: An MI300X with its 512 KiB of vector registers stated.
MI300_REGISTERS = Device(
    "mi300x", "gpu", "amd", "gfx942", 304, warp_size=64, shared_bytes_per_block=65_536, registers_per_core=131_072
)  # fmt: skip
NAMES = ("triton_row", "triton_rows", "triton_two_pass")
OPERATIONS = ("layernorm", "rmsnorm")
DTYPES = ("float32", "float16", "bfloat16")
AFFINES = {"layernorm": ("weight_bias", "weight", "none"), "rmsnorm": ("weight", "none")}


def row(num_warps=4):
    return Candidate.of("triton_row", {"num_warps": num_warps})


def rows(rows_per_program=4, num_warps=2):
    return Candidate.of("triton_rows", {"rows_per_program": rows_per_program, "num_warps": num_warps})


def two_pass(block=1024, num_warps=4):
    return Candidate.of("triton_two_pass", {"block": block, "num_warps": num_warps})


def norm(name="layernorm", rows=4096, columns=4096, **options):
    return problem(name, rows=rows, columns=columns, **{"dtype": "float16", **options})


# Rules


@for_each("name", OPERATIONS)
@for_each(
    ("candidate", "values", "device", "rule", "seen"),
    [
        (row(), {}, CPU, "needs-gpu", "cpu is a cpu"),
        (row(), {"dtype": "bfloat16"}, T4, "dtype-supported", "bfloat16 on sm75"),
        (two_pass(num_warps=64), {"columns": 9000}, A100, "block-threads", "2048 threads"),
        (row(16), {"columns": 65537}, MI300_REGISTERS, "row-fits-a-program", "columns=65537"),
        (row(16), {"columns": 32769}, A100, "register-file", "65536 values, 65536 registers"),
        (row(16), {"columns": 65536}, MI300, "register-file", "65536 values, 65536 registers"),
        # 8192 aligned elements: 256 values for each of 32 threads.
        (row(1), {"columns": 8192}, A100, "registers", "256 > 128 values a thread"),
        # 5000 columns are padded to 8192 and loaded one at a time: 128 and their masks for each of 64 threads.
        (row(2), {"columns": 5000}, A100, "registers", "192 > 128 values a thread"),
        (row(2), {"columns": 32}, A100, "threads-busy", "32 elements for 64 threads"),
        (row(1), {"rows": 2**31, "columns": 1}, A100, "grid", f"{2**31} blocks"),
        (rows(8), {"rows": 7, "columns": 64}, A100, "rows-enough", "rows_per_program=8, rows=7"),
        (rows(32, 1), {"columns": 256}, A100, "registers", "256 > 128 values a thread"),
        (rows(2, 8), {"columns": 64}, A100, "threads-busy", "128 elements for 256 threads"),
        (rows(2, 1), {"rows": 2**33, "columns": 1}, A100, "grid", f"{2**32} blocks"),
        (two_pass(4096), {"columns": 4096}, A100, "block-is-a-part", "block=4096, columns=4096"),
        (two_pass(), {"rows": 1, "columns": 2**31 - 16}, A100, "offsets", f"columns={2**31 - 16}"),
        # Twice 16384 lanes over 128 threads.
        (two_pass(16384, 4), {"columns": 32000}, A100, "registers", "256 > 128 values a thread"),
        (two_pass(8192, 4), {"columns": 20001}, A100, "registers", "192 > 128 values a thread"),
    ],
)
def test_refusals_say_what_was_seen(name, candidate, values, device, rule, seen):
    found, said = refused_by(candidate, norm(name, **values), device)
    assert found == rule
    assert seen in said


@for_each("name", OPERATIONS)
@for_each(
    ("candidate", "values", "device"),
    [
        (row(16), {"columns": 32768}, A100),
        (row(16), {"columns": 65536}, MI300_REGISTERS),
        (row(1), {"columns": 4096}, A100),
        (row(4), {"columns": 5000}, A100),
        (row(1), {"columns": 1}, MI300),
        (row(), {"dtype": "bfloat16"}, UNKNOWN),
        (row(1), {"rows": 2**31 - 1, "columns": 1}, A100),
        (rows(8), {"rows": 8, "columns": 64}, A100),
        (rows(32, 1), {"columns": 128}, A100),
        (rows(4, 8), {"columns": 64}, A100),
        (two_pass(4096), {"columns": 4097}, A100),
        (two_pass(16384, 8), {"columns": 32000}, A100),
        (two_pass(), {"rows": 1, "columns": 2**31 - 1040}, A100),
    ],
)
def test_legal_next_to_the_limits(name, candidate, values, device):
    assert refused_by(candidate, norm(name, **values), device) == ("", "")


@settings(max_examples=examples(30), deadline=None)
@given(
    name=st.sampled_from(OPERATIONS),
    row_count=st.integers(0, 3000),
    columns=st.integers(1, 200_000),
    dtype=st.sampled_from(DTYPES),
    affine=st.sampled_from(["weight", "none"]),
    device=st.sampled_from([*DEVICES.values(), T4, UNKNOWN, MI300_REGISTERS]),
)
def test_rules_agree_with_refusals_and_keep_their_promises(name, row_count, columns, dtype, affine, device):
    described, op = norm(name, row_count, columns, dtype=dtype, affine=affine), operation(name)
    for each in NAMES:
        found = variant(name, each)
        block = found.space("default")
        legal = found.legal(described, device, block)
        reasons = found.refusals(described, device, block)
        assert len(reasons) == block.length - legal.sum()
        assert all(reason.reason and reason.seen for reason in reasons)
        kept = block.take(legal)
        work = found.work(described, kept.columns, device).columns(kept.length)
        assert (work["accumulators"] <= 128).all()
        assert (work["flops"] >= op.flops(described)).all()
        assert (work["traffic_bytes"] >= op.traffic_bytes(described)).all()
        assert not np.isnan(work["shared_bytes"]).any()
        # Every element has a place in some program.
        if each == "triton_two_pass":
            assert (work["inner_steps"] / 2 * kept.columns["block"] >= columns).all()
        if each == "triton_rows":
            assert (work["programs"] * kept.columns["rows_per_program"] >= row_count).all()


@for_each("name", OPERATIONS)
@for_each("device", [A100, H100, MI300])
@for_each(
    ("row_count", "columns"), [(1, 1), (1, 128), (4096, 4096), (65536, 128), (1, 131072), (7, 50257), (0, 64)]
)
def test_typical_problems_have_candidates(name, device, row_count, columns):
    described = norm(name, row_count, columns)
    assert len(candidates(described, device, subset="default", backends=["triton"])) >= 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_quick_subset_is_small(name):
    assert 20 <= sum(variant(name, each).space("default").length for each in NAMES) <= 60


# Work


def test_work_of_one_row_a_program():
    work = work_of(row(4), norm(rows=10, columns=1000), A100)
    assert work["flops"] == 7 * 10 * 1024
    assert work["traffic_bytes"] == 2 * (2 * 10 * 1000 + 2 * 1000)
    assert (work["programs"], work["warps"], work["calls"], work["inner_steps"]) == (10, 4, 1, 1)
    assert work["accumulators"] == 1024 / 128
    # One float32 for each of four warps, which meet to add up; one warp needs none.
    assert work["shared_bytes"] == 16
    assert work_of(row(1), norm(rows=10, columns=1000), A100)["shared_bytes"] == 0
    # Where no cache is known every program reads weight and bias.
    unknown = work_of(row(4), norm(rows=10, columns=1000), UNKNOWN)
    assert unknown["traffic_bytes"] == 2 * (2 * 10 * 1000 + 10 * 2 * 1000)
    plain = work_of(row(4), norm("rmsnorm", rows=10, columns=1000, affine="none"), UNKNOWN)
    assert (plain["flops"], plain["traffic_bytes"]) == (3 * 10 * 1024, 2 * 2 * 10 * 1000)


def test_work_of_several_rows_a_program():
    described = norm(rows=10, columns=100, dtype="float32", affine="weight")
    work = work_of(rows(8, 2), described, UNKNOWN)
    # Two programs of 8 x 128.
    assert work["flops"] == 6 * 2 * 8 * 128
    assert work["traffic_bytes"] == 4 * (2 * 10 * 100 + 2 * 100)
    assert work["programs"] == 2
    assert work["accumulators"] == 8 * 128 / 64
    # Two warps share each of 8 rows.
    assert work["shared_bytes"] == 4 * 8 * 2
    # Rows of 128 aligned elements are covered by one warp each, which meets no other.
    assert work_of(rows(8, 2), norm(columns=128), A100)["shared_bytes"] == 0
    # Eight warps share 8 rows, and exchange 32 values at a time.
    assert work_of(rows(8, 8), norm(columns=4096), A100)["shared_bytes"] == 128
    assert work_of(rows(8, 8), norm(columns=4096), DEVICES["gfx950"])["shared_bytes"] == 256


def test_work_of_two_passes():
    described = norm(rows=4, columns=5008)
    work = work_of(two_pass(1024, 4), described, A100)
    assert work["flops"] == 10 * 4 * 5 * 1024
    assert work["inner_steps"] == 10
    assert work["accumulators"] == 2 * 1024 / 128
    # The rows stay in the level-2 cache between the passes; where there is none, they are read twice.
    assert work["traffic_bytes"] == 2 * (2 * 4 * 5008 + 2 * 5008)
    assert work_of(two_pass(1024, 4), described, UNKNOWN)["traffic_bytes"] == 2 * (
        3 * 4 * 5008 + 4 * 2 * 5008
    )
    # 40 rows at once, each of 2**17 two-byte elements, are beyond T4's 4 MiB; the weight is not.
    long = norm("rmsnorm", rows=64, columns=2**17)
    assert work_of(two_pass(1024, 4), long, T4)["traffic_bytes"] == 2 * (3 * 64 + 1) * 2**17
    assert work_of(two_pass(1024, 4), long, A100)["traffic_bytes"] == 2 * (2 * 64 + 1) * 2**17
    assert work_of(two_pass(1024, 4), long, A100)["flops"] == 4 * 64 * 2**17
    assert work_of(two_pass(1024, 4), long, A100)["accumulators"] == 1024 / 128


# Results

QUICK = {
    "layernorm": [
        (row(), {"rows": 3, "columns": 131, "dtype": "bfloat16"}),
        (row(), {"rows": 2, "columns": 64, "affine": "weight"}),
        (rows(), {"rows": 7, "columns": 33, "dtype": "float16"}),
        (rows(), {"rows": 8, "columns": 32, "affine": "none"}),
        (two_pass(), {"rows": 3, "columns": 2500}),
        (two_pass(), {"rows": 2, "columns": 2048, "dtype": "float16"}),
    ],
    "rmsnorm": [
        (row(), {"rows": 3, "columns": 131}),
        (rows(), {"rows": 7, "columns": 33, "affine": "none"}),
        (two_pass(), {"rows": 3, "columns": 2500, "dtype": "bfloat16"}),
    ],
}


def test_results_of_layernorm_quickly():
    interpret("layernorm", QUICK["layernorm"])


@pytest.mark.slow
def test_results_of_rmsnorm_quickly():
    interpret("rmsnorm", QUICK["rmsnorm"])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_every_size(name, dtype):
    sizes = [(1, 1), (5, 1), (6, 2), (1, 17), (3, 64), (2, 127), (3, 1031), (0, 33)]
    described = [
        *((row(), *size) for size in sizes),
        *((rows(count), *size) for size in [*sizes, (33, 65), (64, 32), (33, 16)] for count in (2, 16)),
        *((two_pass(), *size) for size in [(1, 1025), (3, 2048), (2, 3001), (0, 2048)]),
        (two_pass(16384, 16), 1, 20011),
        (row(16), 1, 20_001),
    ]
    interpret(
        name,
        [
            (candidate, {"rows": row_count, "columns": columns, "dtype": dtype, "affine": affine})
            for number, (candidate, row_count, columns) in enumerate(described)
            # Small problems with every vector, large ones with one choice of them.
            for affine in (AFFINES[name] if row_count * columns < 500 else [AFFINES[name][number % 2]])
        ],
    )


PROPERTIES = """
import json, math, sys
import torch
from kernelcast.kernels import Candidate, operation, problem, variant

failures = []
for name in ("layernorm", "rmsnorm"):
    op = operation(name)
    for key in json.load(open(sys.argv[1])):
        candidate = Candidate.from_key(key)
        described = problem(name, rows=6, columns=3001, affine="none")
        build = variant(name, candidate.variant).build(described, candidate.parameters)
        (x,) = op.make_inputs(described, seed=3, device="cpu")

        # A large mean: what it shares with the elements must not be lost.
        shifted = x + 100
        error = (build(shifted) - op.reference(described, shifted)).abs().max()
        if not error < 5e-5:
            failures.append([name, key, "mean of 100", float(error)])

        # A drift, so that no single element stands for the mean.
        drifting = x + torch.linspace(-1000, 1000, 3001)
        error = (build(drifting) - op.reference(described, drifting)).abs().max()
        if not error < 1e-5:
            failures.append([name, key, "drift", float(error)])

        constant = build(torch.full_like(x, 3.0))
        expected = 0.0 if name == "layernorm" else 1.0
        if not (constant - expected).abs().max() < 1e-4:
            failures.append([name, key, "constant rows", float(constant.abs().max())])

        broken = x.clone()
        broken[2, 5], broken[3, 7] = math.inf, math.nan
        nan = build(broken).isnan().sum(1).tolist()
        if nan != [0, 0, 3001 if name == "layernorm" else 1, 3001, 0, 0]:
            failures.append([name, key, "rows that are not finite", nan])

        wide = build(x, eps=3.0)
        shifted = x.double() - (x.double().mean(1, keepdim=True) if name == "layernorm" else 0)
        expected = shifted / (shifted.square().mean(1, keepdim=True) + 3.0).sqrt()
        if not (wide - expected).abs().max() < 1e-5:
            failures.append([name, key, "another eps", float((wide - expected).abs().max())])
        again = build(x)
        if op.check(described, op.reference(described, x), again):
            failures.append([name, key, "its own eps, after another", op.check(described, op.reference(described, x), again)])
json.dump(failures, sys.stdout)
"""  # fmt: skip


@pytest.mark.slow
def test_large_means_drifts_constants_infinities_and_eps(tmp_path):
    pytest.importorskip("triton")
    request = tmp_path / "candidates.json"
    request.write_text(json.dumps([each.key for each in (row(), rows(), two_pass())]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROPERTIES, str(request)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_on_a_gpu(name):
    on_gpu(name, QUICK[name])
    on_gpu(
        name,
        [
            (candidate, {"rows": 40, "columns": 4096, "dtype": dtype})
            for candidate in (row(8), rows(4, 8), two_pass(1024, 4))
            for dtype in DTYPES
        ],
    )


# Offline compilation


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(
    ("candidate", "values"),
    [
        (row(1), {"columns": 1}),
        (row(4), {"columns": 4096}),
        (row(16), {"columns": 32768, "dtype": "float32"}),
        (row(8), {"columns": 5001}),
        (rows(8, 2), {"columns": 64}),
        (rows(4, 8), {"columns": 1024}),
        (rows(16, 4), {"columns": 100, "rows": 4099}),
        (two_pass(1024, 4), {"columns": 131072}),
        (two_pass(8192, 8), {"columns": 128257}),
    ],
)
def test_what_is_legal_compiles_as_its_work_says(compiler, target, candidate, values):  # noqa: F811
    name = "rmsnorm" if values["columns"] == 4096 else "layernorm"
    described = norm(name, **{"dtype": "bfloat16", **values})
    assert_compiles(compiler, candidate, described, target, tensor_cores=False)


@pytest.mark.slow
def test_gfx950_exchanges_more_at_once(compiler):  # noqa: F811
    for columns in (1000, 1024):
        assert_compiles(compiler, rows(8, 8), norm(columns=columns), "gfx950")


@pytest.mark.slow
def test_a_row_and_its_vectors_are_read_sixteen_bytes_at_a_time(compiler):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    for target in ("sm80", "sm90"):
        spec = variant("layernorm", "triton_row").compile_spec(norm(), row(4).parameters, target)
        code = compile_spec_for(spec, target).asm["sass"]
        # Four times 16 bytes of a row of 4096 two-byte elements for each of 128 threads, and as many of both vectors.
        assert code.count("LDG.E.128") == 12
        assert "STG.E.128" in code
        assert "LDG.E.U16" not in code
