"""triton_persistent and triton_descriptor of batched_gemm: rules, work, launching, results under Triton's interpreter, and
what the compiler makes of them.
"""

from __future__ import annotations

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

from kernelcast.errors import IllegalCandidateError
from kernelcast.kernels import Candidate, Device, candidates, operation, problem, variant

A100, H100, B200, MI300 = (DEVICES[name] for name in ("sm80", "sm90", "sm100", "gfx942"))
OP = operation("batched_gemm")
NAMES = ("triton_persistent", "triton_descriptor")
TILE = {"block_m": 64, "block_n": 64, "block_k": 32, "group_m": 8, "num_warps": 4, "num_stages": 3}
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 8, "num_warps": 4, "num_stages": 2}
PLAIN = {"programs_per_core": 1, "flatten": False}
WIDE_TILE = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8}


def persistent(**changes):
    return Candidate.of("triton_persistent", {**TILE, **PLAIN, **changes})


def described(**changes):
    return Candidate.of("triton_descriptor", {**TILE, **PLAIN, "described_store": False, **changes})


def half(batch=32, m=512, n=512, k=512, **values):
    return problem("batched_gemm", batch=batch, m=m, n=n, k=k, **{"dtype": "float16", **values})


# Rules


@for_each(
    ("candidate", "values", "device", "rule", "seen"),
    [
        (persistent(), half(), CPU, "needs-gpu", "cpu is a cpu"),
        (persistent(), half(k=0), A100, "sum-not-empty", "k=0"),
        (persistent(), half(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (persistent(), half(n=2**31), A100, "dimensions", f"n={2**31}"),
        # Every product has fewer tiles than 32 bits count, and all together have not.
        (persistent(), half(2**11, 2**16, 2**16), A100, "grid", f"{2**31} tiles"),
        (persistent(), half(2**31 - 108, 64, 64), A100, "grid", f"{2**31 - 108} tiles"),
        # 27 products of 4 tiles for 108 programs: one each.
        (persistent(), half(27, 128, 128), A100, "tiles-outnumber-programs", "108 tiles, 108 programs"),
        (persistent(), half(0), A100, "tiles-outnumber-programs", "0 tiles"),
        (persistent(num_stages=5), half(k=64), A100, "stages-filled", "5 stages, 2 steps"),
        # One product has more tiles than programs; the order within it is what group_m changes.
        (persistent(group_m=16), half(m=256, n=256), A100, "group-differs", "group_m=16, 4 x 4 tiles"),
        (
            persistent(programs_per_core=4, num_warps=8, block_m=128, num_stages=2),
            half(),
            Device("a100", "gpu", "nvidia", "sm80", 108, max_threads_per_core=512),
            "programs-resident",
            "4 programs of 8 warps",
        ),
        (
            persistent(**WIDE_TILE | {"block_n": 256, "num_stages": 4}, flatten=True),
            half(),
            A100,
            "shared-memory",
            f"{3 * 384 * 64 * 2 + 128 * 256} > 166912 bytes",
        ),
        (described(), half(), A100, "has-tma", "sm80"),
        (described(), half(), DEVICES["gfx950"], "has-tma", "gfx950"),
        (described(), half(dtype="float32"), H100, "tensor-cores", "float32, allow_tf32=False"),
        (described(), half(k=0), H100, "sum-not-empty", "k=0"),
        (described(), half(k=516), H100, "rows-aligned", "A's rows are 1032 bytes apart"),
        (described(), half(n=516, broadcast="b"), H100, "rows-aligned", "B's rows are 1032 bytes apart"),
        (described(), half(2, 2**19, 64, 2**20), H100, "rows-aligned", f"A's matrices are {2**40} bytes apart"),
        (described(), half(2**11, 2**16, 2**16), H100, "grid", f"{2**31} tiles"),
        (described(block_m=512, block_n=32, num_warps=8), half(), H100, "boxes-fit", "512 x 32 x 32"),
        (described(described_store=True), half(n=514, layout="nt"), H100, "stored-rows-aligned", "512 rows of 1028 bytes"),
        (described(flatten=True), half(33, 128, 128), H100, "programs-differ", "132 tiles, 132 programs, 132 cores"),
        (described(programs_per_core=2), half(33, 128, 128), H100, "programs-differ", "132 tiles, 264 programs"),
        (
            described(**WIDE_TILE | {"block_n": 256, "num_stages": 4}, described_store=True),
            half(),
            H100,
            "shared-memory",
            f"{4 * 384 * 64 * 2 + 128 * 256 * 2 + 64} > 232448 bytes",
        ),
        (described(num_stages=5), half(k=64), H100, "stages-filled", "5 stages, 2 steps"),
    ],
)  # fmt: skip
def test_refusals_say_what_was_seen(candidate, values, device, rule, seen):
    name, text = refused_by(candidate, values, device)
    assert (name, seen in text) == (rule, True), text


@for_each(
    ("candidate", "values", "device"),
    [
        (persistent(), half(2**11 - 1, 2**16, 2**16), A100),
        (persistent(), half(2**31 - 109, 64, 64), A100),
        (persistent(), half(28, 128, 128), A100),
        (persistent(), half(109, 64, 64), UNKNOWN),
        (persistent(flatten=True), half(), MI300),
        # The pipeline runs on over the products of a program.
        (persistent(num_stages=5, flatten=True), half(1000, 64, 64, 64), A100),
        (persistent(), half(dtype="float32"), A100),
        (described(), half(k=520), H100),
        (described(), half(n=516, m=520, layout="nt"), H100),
        (described(), half(dtype="float32", allow_tf32=True, k=516), H100),
        # One matrix for the whole batch is not stepped over.
        (described(), half(2, 2**19, 64, 2**20, broadcast="a"), H100),
        (described(described_store=True), half(n=520), B200),
        (described(flatten=True), half(34, 128, 128), H100),
        (described(programs_per_core=2), half(34, 128, 128), H100),
        (described(), half(1, 64, 64), DEVICES["sm120"]),
    ],
)
def test_legal_next_to_the_limits(candidate, values, device):
    assert refused_by(candidate, values, device) == ("", "")


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    batch=st.integers(0, 70_000),
    m=st.integers(0, 600),
    n=st.integers(0, 80).map(lambda eighth: 8 * eighth),
    k=st.integers(0, 200).map(lambda eighth: 8 * eighth),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    broadcast=st.sampled_from(["none", "a", "b"]),
    device=st.sampled_from([*DEVICES.values(), T4, UNKNOWN, CPU]),
    name=st.sampled_from(NAMES),
)
def test_rules_agree_with_refusals_and_keep_their_promises(
    batch, m, n, k, dtype, layout, broadcast, device, name
):
    values = half(batch, m, n, k, dtype=dtype, layout=layout, broadcast=broadcast)
    found = variant("batched_gemm", name)
    block = found.space("default")
    legal = found.legal(values, device, block)
    reasons = found.refusals(values, device, block)
    assert len(reasons) == block.length - legal.sum()
    assert all(reason.reason and reason.seen for reason in reasons)
    kept = block.take(legal)
    work = found.work(values, kept.columns, device).columns(kept.length)
    assert (work["accumulators"] <= 128).all()
    assert (work["flops"] >= OP.flops(values)).all()
    assert (work["traffic_bytes"] >= OP.traffic_bytes(values) * (batch * m * n > 0)).all()
    if device.shared_bytes_per_block:
        assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
    programs = kept.columns["programs_per_core"] * device.cores
    assert (work["programs"] <= programs).all()
    # The steps of the longest program, times the programs, cover those of every tile.
    tile_steps = work["flops"] / (2.0 * kept.columns["block_m"] * kept.columns["block_n"])
    assert (work["inner_steps"] * work["programs"] * kept.columns["block_k"] >= tile_steps).all()
    if name == "triton_persistent":
        assert (work["programs"] == programs).all()
        assert (work["inner_steps"] * kept.columns["block_k"] >= 2 * k).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_a_batch_of_one_is_legal_and_worked_as_gemm(name, layout):
    """The rules and the work of one product are those of gemm's variant of the name."""
    sizes = {"m": 1000, "n": 2048, "k": 96, "dtype": "bfloat16", "layout": layout}
    for device in (A100, B200):
        one, batch = problem("gemm", **sizes), problem("batched_gemm", batch=1, **sizes)
        ours, theirs = variant("batched_gemm", name), variant("gemm", name)
        block = ours.space("default")
        legal = ours.legal(batch, device, block)
        assert legal.any() == (device is B200 or name == "triton_persistent")
        assert (legal == theirs.legal(one, device, block)).all()
        works = [
            found.work(values, block.columns, device).columns(block.length)
            for found, values in ((ours, batch), (theirs, one))
        ]
        for amount, values in works[0].items():
            np.testing.assert_allclose(values, works[1][amount], rtol=1e-12, err_msg=amount)


@pytest.mark.parametrize("name", NAMES)
def test_the_spaces_are_gemms(name):
    for subset in ("default", "full"):
        ours, theirs = (variant(op, name).space(subset) for op in ("batched_gemm", "gemm"))
        assert list(ours.columns) == list(theirs.columns)
        assert all((column == theirs.columns[key]).all() for key, column in ours.columns.items())
    assert variant("batched_gemm", name).space("default").length == 56


@for_each("device", [H100, B200, DEVICES["sm120"]])
@for_each("values", [half(), half(4096, 16, 128, 512, layout="nt"), half(400, 64, 64, 64)])
def test_typical_problems_have_candidates(device, values):
    found = candidates(values, device, subset="default")
    for name in NAMES:
        assert sum(each.variant == name for each in found) >= 4, name


def test_work():
    # 32 products of 64 tiles of 16 steps for 216 programs: 10 rounds.
    work = work_of(persistent(programs_per_core=2), half(), A100)
    assert (work["programs"], work["inner_steps"], work["accumulators"]) == (216, 10 * 16, 32)
    assert work["flops"] == 32 * 2.0 * 512**3
    assert work["traffic_bytes"] == 32 * 2 * (2 * 512**2 * 8 + 512**2)
    assert (work["calls"], work["scratch_bytes"]) == (1, 0)
    # Padding counts, and no program is without a tile.
    work = work_of(described(), half(10, 40, 100, 40), H100)
    assert (work["programs"], work["inner_steps"]) == (20, 2)
    assert work["flops"] == 10 * 2 * 64 * 128 * 64
    assert work["shared_bytes"] == 3 * 128 * 32 * 2 + 48


# Launching


@pytest.mark.parametrize(
    ("values", "config", "seen"),
    [
        (half(3, 32, 32, 36), {}, "A's rows are 72 bytes apart"),
        (half(3, 32, 36, 32, layout="nt"), {"described_store": True}, "C's rows are 72 bytes apart"),
    ],
)
def test_what_cannot_be_described_is_an_error(values, config, seen):
    pytest.importorskip("triton")
    with pytest.raises(IllegalCandidateError, match=seen):
        variant("batched_gemm", "triton_descriptor").build(values, described(**config).parameters)


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_tensor_that_starts_between_addresses_is_an_error(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    values = half(2, 32, 32, 32)
    launch = variant("batched_gemm", "triton_descriptor").build(values, described(block_k=16).parameters)
    inputs = dict(zip("AB", OP.make_inputs(values, seed=1, device="cpu"), strict=True))
    inputs[name] = torch.zeros(2 * 32 * 32 + 1, dtype=torch.float16)[1:].view(2, 32, 32)
    with pytest.raises(IllegalCandidateError, match=f"{name} begins at 0x"):
        launch(*inputs.values())


# Results


def case(candidate, batch, m, n, k, **values):
    return candidate, {"batch": batch, "m": m, "n": n, "k": k, "dtype": "float32", **values}


def small(name, **changes):
    make = persistent if name == "triton_persistent" else described
    return make(**{**SMALL, **changes})


@pytest.mark.slow
def test_results_of_ragged_tiles():
    """Ragged tiles whose neighbours in memory are another product's; more tiles than the interpreter's programs."""
    stored = small("triton_descriptor", described_store=True)
    interpret(
        "batched_gemm",
        [
            case(small("triton_persistent"), 3, 17, 5, 20, layout="tn", lda=20, broadcast="b"),
            case(small("triton_persistent", flatten=True), 3, 5, 18, 21, dtype="bfloat16", layout="nt"),
            case(stored, 3, 20, 8, 24, dtype="bfloat16"),
            case(stored, 3, 4, 20, 20, layout="tt", broadcast="a"),
            *(case(small(name), 0, 4, 4, 4) for name in NAMES),
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_of_every_layout(dtype):
    """With every kind of batch in bfloat16, and one after the other in the dtypes that take the same way."""
    cases = []
    for turn, layout in enumerate(("nn", "nt", "tn", "tt")):
        kinds = [("none", {"lda": 48, "ldb": 56}), ("a", {}), ("b", {"ldb": 48})]
        for broadcast, leading in kinds if dtype == "bfloat16" else kinds[turn % 3 :][:1]:
            values = {"dtype": dtype, "layout": layout, "broadcast": broadcast, **leading}
            cases += [
                case(small("triton_persistent", flatten=layout[0] == "n"), 3, 9, 18, 21, **values),
                case(small("triton_descriptor", described_store=True), 3, 24, 8, 24, **values),
            ]
        cases.append(case(small("triton_descriptor", flatten=True), 3, 24, 8, 24, dtype=dtype, layout=layout))
    interpret("batched_gemm", cases)


@pytest.mark.slow
def test_results_of_degenerate_shapes_and_every_kind_of_config():
    shapes = [(1, 1, 4, 4), (1, 17, 8, 20), (3, 1, 36, 16), (3, 33, 4, 20), (2, 16, 16, 32), (5, 3, 4, 4)]
    empty = [(0, 4, 4, 20), (3, 0, 8, 20), (3, 5, 0, 20), (3, 4, 8, 0), (0, 0, 0, 0)]
    configs = [
        {"group_m": 1},
        {"programs_per_core": 2, "flatten": True},
        {"block_m": 32, "block_n": 64, "block_k": 32},
    ]
    interpret(
        "batched_gemm",
        [case(small(name), *shape) for name in NAMES for shape in shapes + empty]
        + [case(small("triton_descriptor", described_store=True), *shape) for shape in shapes + empty]
        + [case(small("triton_persistent"), *shape) for shape in ((1, 1, 1, 1), (3, 7, 1, 5), (5, 3, 2, 5))]
        + [case(small("triton_descriptor"), 3, 7, 1, 20, layout="nt")]
        + [case(small(name), 1, 5, 8, 36, broadcast="b") for name in NAMES]
        + [case(small(name, **config), 3, 40, 72, 20) for name in NAMES for config in configs],
    )  # fmt: skip


# Offline compilation

COMPILED = [
    (persistent(block_n=128, num_warps=4, flatten=True), half(layout="nt")),
    (persistent(block_n=128, num_stages=4, flatten=True, programs_per_core=2), half(65, 500, dtype="bfloat16", broadcast="a")),
    (persistent(block_m=16, block_n=32, block_k=128), half(4096, 16, 128, layout="nt", broadcast="b")),
    (persistent(**WIDE_TILE | {"block_k": 32}), half(k=500, layout="tn")),
]  # fmt: skip
DESCRIBED = [
    (described(**WIDE_TILE, described_store=True, flatten=True), half(layout="nt")),
    (described(block_m=128, flatten=True), half(layout="tt", dtype="bfloat16", broadcast="b")),
    (described(block_m=16, block_k=64), half(4096, 16, 128, layout="nt", broadcast="a")),
    (described(described_store=True), half(dtype="float32", allow_tf32=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
def test_persistent_compiles_as_the_work_says(compiler, target):  # noqa: F811
    # At 56 registers of 255, the assembler for sm100 gives one of them a stack of four words.
    stack_words = 4 if target == "sm100" else 0
    for candidate, values in COMPILED:
        assert_compiles(compiler, candidate, values, target, tensor_cores=True, spills=stack_words)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm90", "sm100", "sm120"])
def test_descriptor_compiles_as_the_work_says(compiler, target):  # noqa: F811
    for candidate, values in DESCRIBED:
        assert_compiles(compiler, candidate, values, target, tensor_cores=True)


@pytest.mark.slow
def test_tiles_come_through_the_accelerator(compiler):  # noqa: F811
    """The batch is a dimension of the box; one matrix for all products has none."""
    from kernelcast.kernels.compile import compile_spec_for

    config = described(described_store=True).parameters
    describe = variant("batched_gemm", "triton_descriptor").compile_spec
    code = compile_spec_for(describe(half(broadcast="b"), config, "sm90"), "sm90").asm["ptx"]
    for mark in ("tensor.2d.shared", "tensor.3d.shared", "tensor.3d.global"):
        assert f"cp.async.bulk.{mark}" in code
    assert "ld.global" not in code


def test_all_matrices_are_behind_the_pointers():
    pytest.importorskip("triton")
    for name in NAMES:
        found = variant("batched_gemm", name)
        for broadcast, of_b in (("none", 6), ("b", 1)):
            values = half(6, 8, 24, 96, lda=104, broadcast=broadcast)
            spec = found.compile_spec(values, small(name).parameters, "sm90")
            sizes = [pointer.storage_bytes for pointer in spec.tensors.values()]
            assert sizes == [2 * 6 * 8 * 104, 2 * of_b * 96 * 24, 2 * 6 * 8 * 24]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("broadcast", ["none", "a", "b"])
def test_results_on_a_gpu(dtype, broadcast):
    torch = pytest.importorskip("torch")
    makers = [persistent]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        makers += [described, lambda **config: described(**config, described_store=True)]
    on_gpu(
        "batched_gemm",
        [
            case(make(flatten=flatten), 65, 120, 136, 200, dtype=dtype, layout=layout, broadcast=broadcast)
            for make in makers
            for flatten in (False, True)
            for layout in ("nn", "nt", "tn", "tt")
        ],
    )
