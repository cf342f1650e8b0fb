"""The Triton variants of conv2d: rules, work, results under Triton's interpreter, and what the compiler makes of them."""

from __future__ import annotations

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

from kernelcast.kernels import Candidate, candidates, operation, problem, variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.triton_pieces import needs_wide_offsets

A100, H100, MI300 = DEVICES["sm80"], DEVICES["sm90"], DEVICES["gfx942"]
NAMES = ("triton_implicit_gemm", "triton_depthwise")
CONV = operation("conv2d")


def gemm(block_m=64, block_n=64, block_k=32, *, group_m=8, num_warps=4, num_stages=3):
    config = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "group_m": group_m}
    return Candidate.of("triton_implicit_gemm", {**config, "num_warps": num_warps, "num_stages": num_stages})


def depth(block_h=4, block_w=8, block_c=32, *, num_warps=4, weight="by_channel"):
    config = {"block_h": block_h, "block_w": block_w, "block_c": block_c, "weight": weight}
    return Candidate.of("triton_depthwise", {**config, "num_warps": num_warps})


def conv(**values):
    """A 3x3 layer of ResNet-50, with what the test changes."""
    base = {"n": 32, "c": 128, "h": 28, "w": 28, "k": 128, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1}
    return problem("conv2d", **{**base, "layout": "nhwc", "dtype": "float16", **values})


def dw(channels=96, **values):
    return conv(**{"c": channels, "k": channels, "groups": channels, **values})


ODD = {"n": 1, "c": 3, "h": 65, "w": 63, "k": 512, "r": 7, "s": 7}


# Rules


@for_each(
    ("candidate", "described", "device", "rule", "seen"),
    [
        (gemm(), conv(), CPU, "needs-gpu", "cpu is a cpu"),
        (gemm(), conv(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (gemm(), dw(), A100, "matrix-product", "c=96, groups=96, k=96"),
        (gemm(), conv(w=2**31 - 2, n=1, h=1), A100, "positions", f"3 rows, {2**31} columns"),
        (gemm(), conv(n=2**22), A100, "dimensions", f"m={784 * 2**22}"),
        (gemm(num_warps=64), conv(), A100, "block-threads", "2048 threads"),
        (gemm(block_n=256), conv(k=64), A100, "blocks-fit", "block_n=256 for n=64"),
        # Filters are counted a group at a time.
        (gemm(block_n=128), conv(groups=4), A100, "blocks-fit", "block_n=128 for n=32"),
        (gemm(block_k=64), conv(c=3, r=1, s=1), A100, "blocks-fit", "block_k=64 for k=3"),
        (gemm(16, 16, 16), conv(n=2**21, k=2**18, c=2), A100, "grid", f"{784 * 2**17 * 2**14} blocks"),
        (gemm(256, 128), conv(), A100, "accumulators", "256 > 128 accumulators"),
        (gemm(128, 64, 128), conv(dtype="float32"), A100, "registers", "about 448 > 320 registers"),
        # 64 sums, and 64 + 64 elements that are loaded one at a time, as 147 is no multiple of 16.
        (gemm(128, 128, 64), conv(**ODD), A100, "single-loads", "about 512 > 320 registers"),
        (gemm(16, 16, 16, num_warps=8), conv(), A100, "threads-busy", "512 bytes for 256 threads"),
        (gemm(128, 128, 128, num_warps=8, num_stages=5), conv(), A100, "shared-memory", "262144 > 166912 bytes"),
        (gemm(num_stages=5), conv(c=32, r=1, s=1), A100, "stages-filled", "5 stages, 1 steps"),
        (gemm(group_m=16), conv(n=1, h=8, w=8), A100, "group-differs", "group_m=16, 1 x 2 tiles"),
        (depth(), dw(), CPU, "needs-gpu", "cpu is a cpu"),
        (depth(), dw(dtype="bfloat16"), T4, "dtype-supported", "bfloat16 on sm75"),
        (depth(), conv(groups=64), A100, "depthwise", "c=128, groups=64"),
        (depth(), dw(h=2**31 - 2, w=1, n=1), A100, "positions", f"{2**31} rows, 3 columns"),
        (depth(num_warps=64), dw(), A100, "block-threads", "2048 threads"),
        (depth(16), dw(h=8), A100, "tile-fits", "block_h=16 for 8"),
        (depth(1, 8, 128), dw(32), A100, "tile-fits", "block_c=128 for 32"),
        (depth(1, 4, 32), dw(n=2**26, h=14, w=14), A100, "grid", f"{2**26 * 14 * 4 * 3} blocks"),
        (depth(8, 8, 128), dw(128), A100, "sums", "64 > 32 sums"),
        # 95 channels: rows of them are not aligned.
        (depth(8, 8, 64), dw(95), A100, "sums", "32 > 16 sums"),
        (depth(8, 8, 64), dw(k=192), A100, "sums", "32 > 16 sums"),
        (depth(1, 4, 16), dw(), A100, "threads-busy", "64 elements for 128 threads"),
        (depth(8, 8, 8), dw(), A100, "fills-sectors", "block_c=8 of 2-byte elements"),
        (depth(8, 8, 8), dw(layout="nchw"), A100, "fills-sectors", "block_w=8 of 2-byte elements"),
        (depth(8, 16, 4, weight="by_tap"), dw(layout="nchw"), A100, "weight-as-stored", "layout=nchw"),
    ],
)  # fmt: skip
def test_refusals_say_what_was_seen(candidate, described, device, rule, seen):
    found, text = refused_by(candidate, described, device)
    assert found == rule
    assert seen in text


@for_each(
    ("candidate", "described", "device"),
    [
        (gemm(), conv(dtype="bfloat16"), UNKNOWN),
        (gemm(block_n=16), dw(k=96 * 16), A100),
        (gemm(), conv(c=1, groups=1), A100),
        (gemm(block_n=128), conv(k=64), A100),
        (gemm(block_n=64), conv(groups=4), A100),
        (gemm(block_k=32), conv(c=3, r=1, s=1, pad_h=0), A100),
        (gemm(128, 128, 64, num_warps=8), conv(**ODD), A100),
        (gemm(num_stages=3), conv(c=32, r=1, s=1), A100),
        (gemm(group_m=1), conv(n=1, h=16, w=16), A100),
        (gemm(128, 128, 64, num_stages=3, num_warps=8), conv(), MI300),
        (depth(8, 8, 64), dw(), A100),
        (depth(8), dw(h=8), A100),
        (depth(8, 8, 8), dw(layout="nchw", h=7, w=7), A100),
        (depth(8, 8, 8), dw(layout="nchw", dtype="float32"), A100),
        (depth(weight="by_tap"), dw(), UNKNOWN),
    ],
)
def test_legal_next_to_the_limits(candidate, described, device):
    assert refused_by(candidate, described, device) == ("", "")


@st.composite
def problems(draw):
    kind = draw(st.sampled_from(["dense", "grouped", "depthwise"]))
    groups = {"dense": 1, "grouped": draw(st.integers(2, 4)), "depthwise": draw(st.integers(2, 130))}[kind]
    r, s, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 2))
    return conv(
        n=draw(st.integers(0, 40)),
        c=groups if kind == "depthwise" else groups * draw(st.integers(1, 70)),
        h=dilation * r + draw(st.integers(0, 60)),
        w=dilation * s + draw(st.integers(0, 60)),
        k=groups * draw(st.integers(1, 3 if kind == "depthwise" else 200)),
        r=r,
        s=s,
        stride_h=draw(st.integers(1, 3)),
        stride_w=draw(st.integers(1, 3)),
        dil_h=dilation,
        groups=groups,
        layout=draw(st.sampled_from(["nchw", "nhwc"])),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    )


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(described=problems(), device=st.sampled_from([*DEVICES.values(), T4, UNKNOWN]))
def test_rules_agree_with_refusals_and_keep_their_promises(described, device):
    g = Geometry.of(described)
    for name in NAMES:
        found = variant("conv2d", name)
        block = found.space("default")
        legal = found.legal(described, device, block)
        reasons = found.refusals(described, device, block)
        assert len(reasons) == block.length - legal.sum()
        assert all(reason.reason and reason.seen for reason in reasons)
        kept = block.take(legal)
        work = found.work(described, kept.columns, device).columns(kept.length)
        assert (work["accumulators"] <= 128).all()
        assert (work["flops"] >= CONV.flops(described)).all()
        if g.n:
            assert (work["traffic_bytes"] >= CONV.traffic_bytes(described)).all()
        if device.shared_bytes_per_block:
            assert (work["shared_bytes"] <= device.shared_bytes_per_block).all()
        sides = ("block_m", "block_n") if name == NAMES[0] else ("block_h", "block_w", "block_c")
        places = work["programs"]
        for side in sides:
            places = places * kept.columns[side]
        assert (places >= g.n * g.p * g.q * g.k).all()
        assert (work["inner_steps"] * kept.columns.get("block_k", 1) >= g.reduction).all()


@for_each("target", list(DEVICES))
@for_each("layout", ["nchw", "nhwc"])
def test_typical_layers_have_candidates(target, layout):
    stem = {"c": 3, "h": 224, "w": 224, "k": 64, "r": 7, "s": 7, "stride_h": 2, "stride_w": 2, "pad_h": 3}
    for described in (
        conv(layout=layout),
        conv(layout=layout, c=64, h=56, w=56, k=256, r=1, s=1, pad_h=0, pad_w=0),
        conv(layout=layout, **stem),
        conv(layout=layout, dtype="float32"),
        dw(layout=layout, h=56, w=56, r=7, s=7),
        dw(128, layout=layout, h=56, w=56, r=31, s=31, pad_h=15, pad_w=15),
        dw(512, layout=layout, h=7, w=7),
    ):
        found = candidates(described, DEVICES[target], subset="default", backends=["triton"])
        assert 10 <= len(found) <= 40


def test_the_quick_subsets_are_small_parts_of_the_spaces():
    for name, quick, full in zip(NAMES, (38, 44), (8000, 1600), strict=True):
        found = variant("conv2d", name)
        block = found.space("default")
        assert (block.length, found.space().length) == (quick, full)
        named, everything = (
            set(zip(*(each.columns[parameter.name].tolist() for parameter in found.parameters), strict=True))
            for each in (block, found.space())
        )
        assert len(named) == quick
        assert named < everything


# Work


def test_work_of_implicit_gemm():
    described = conv(n=2, c=24, h=9, w=7, k=40, groups=2)
    work = work_of(gemm(32, 16, 64), described, A100)
    # 126 pixels in 4 tiles, 20 filters in 2, 108 products in 2 steps, of two groups.
    assert work["flops"] == 2 * 128 * 32 * 128 * 2
    assert (work["programs"], work["inner_steps"], work["warps"]) == (16, 2, 4)
    assert work["accumulators"] == 32 * 16 / 128
    x, weight, out = 2 * 2 * 24 * 63, 2 * 40 * 108, 2 * 2 * 40 * 63
    assert work["traffic_bytes"] == 2 * x + 4 * weight + out
    assert (work["scratch_bytes"], work["calls"]) == (0, 1)


def test_shared_memory_follows_what_can_be_copied_asynchronously():
    def shared(device=A100, **values):
        return work_of(gemm(64, 128, 64), conv(**values), device)["shared_bytes"]

    # Three stages on sm80 are two buffers of 64 x 64 inputs and 128 x 64 weights.
    assert shared() == 2 * 2 * (64 + 128) * 64
    # Three inputs a tap, and single pixels of channels-first rows, are not copied ahead; that weight is (9 * 128).
    assert shared(layout="nchw") == 2 * (64 + 2 * 128) * 64
    assert shared(c=3, k=128) == 2 * (64 + 128) * 64
    # A 1x1 kernel leaves the pixels of a row where they are.
    plain = {"r": 1, "s": 1, "pad_h": 0, "pad_w": 0}
    assert shared(layout="nchw", **plain) == 2 * 2 * (64 + 128) * 64
    assert shared(layout="nchw", stride_w=2, **plain) == 2 * (64 + 2 * 128) * 64
    # Warp groups multiply three buffers where they lie.
    assert shared(H100) == 3 * 2 * (64 + 128) * 64


def test_work_of_depthwise():
    described = dw(40, n=3, h=10, w=11, k=80, stride_h=2, dil_w=2)
    work = work_of(depth(2, 4, 32, num_warps=2), described, A100)
    # 5 x 9 outputs in 3 x 3 tiles, 80 channels in 3.
    assert work["programs"] == 3 * 3 * 3 * 3
    assert work["flops"] == 2 * 9 * 81 * 256
    assert work["accumulators"] == 4
    assert (work["inner_steps"], work["shared_bytes"], work["calls"], work["scratch_bytes"]) == (9, 0, 1, 0)
    # Each tile reads 5 rows (of 3 outputs every second one) and 8 columns (of 4 outputs with taps 4 apart).
    out, weight = 2 * 3 * 80 * 45, 2 * 80 * 9
    assert work["traffic_bytes"] == out + 2 * 3 * 40 * (3 * 5) * (3 * 8) + weight * 3 * 9
    turned = work_of(depth(2, 4, 32, num_warps=2, weight="by_tap"), described, A100)
    assert (turned["calls"], turned["scratch_bytes"]) == (2, weight)


def test_large_tensors_are_counted_in_64_bits():
    for values in ({"n": 2**31 // (128 * 784) + 1}, {"k": 2**31 // (9 * 128) + 1, "n": 0}):
        described = conv(**values)
        assert needs_wide_offsets(Geometry.of(described))
        less = conv(**{name: max(value - 1, 0) for name, value in values.items()})
        assert not needs_wide_offsets(Geometry.of(less))


def test_the_taps_are_unrolled_where_they_are_few():
    pytest.importorskip("triton")

    def unrolled(r, s):
        spec = variant("conv2d", "triton_depthwise").compile_spec(
            dw(r=r, s=s, h=40, w=40), depth().parameters
        )
        return spec.constants["UNROLL_ROWS"], spec.constants["UNROLL_COLUMNS"]

    assert unrolled(3, 3) == (True, True)
    assert unrolled(5, 5) == unrolled(31, 7) == (False, True)
    assert unrolled(31, 31) == unrolled(2, 9) == (False, False)


# Results


def case(candidate, **values):
    base = {"n": 2, "c": 6, "h": 6, "w": 5, "k": 10, "r": 3, "s": 3, "dtype": "float32"}
    return candidate, {**base, **values}


def depth_case(candidate, channels=5, multiplier=1, **values):
    sizes = {"n": 1, "c": channels, "groups": channels, "k": channels * multiplier}
    return case(candidate, **{**sizes, **values})


#: Small tiles, so that every tensor has several, the last ones ragged.
SMALL = gemm(32, 16, 32, group_m=1, num_stages=2)
WIDE_STEPS = {"h": 8, "w": 10, "stride_h": 2, "stride_w": 3, "dil_h": 2, "dil_w": 3, "pad_h": 2, "pad_w": 1}


def test_results_quickly():
    interpret("conv2d", [case(SMALL, n=1, pad_h=1, pad_w=2, dtype="bfloat16")])


@pytest.mark.slow
def test_results_of_every_variant():
    interpret(
        "conv2d",
        [
            case(SMALL, n=1, layout="nhwc", groups=2, **WIDE_STEPS),
            case(gemm(32, 16, 16), n=1, c=32, layout="nhwc", pad_h=1),
            depth_case(depth(2, 4, 4), channels=2, multiplier=2, **WIDE_STEPS),
            depth_case(depth(8, 4, 4, weight="by_tap"), layout="nhwc", pad_w=1, dtype="bfloat16"),
        ],
    )


#: The first ones are for every dtype, the others for one: they differ in what is read and written alone.
DENSE_VALUES = (
    {"pad_h": 1, "groups": 2},
    WIDE_STEPS,
    {"c": 64, "groups": 2, "k": 34, "pad_h": 1, "r": 2, "s": 2},
    {"r": 1, "s": 1},
    {},
    {"pad_w": 2},
    {"groups": 2, "pad_h": 1, "pad_w": 1, "k": 4},
    {"r": 1, "s": 1, "groups": 2},
    {"r": 1, "s": 1, "stride_h": 2, "stride_w": 2},
    {"r": 1, "s": 1, "pad_h": 1},
    {"r": 2, "s": 5, "pad_w": 1, "k": 17},
    {"n": 0},
    {"n": 1, "c": 1, "h": 1, "w": 1, "k": 1, "r": 1, "s": 1},
    {"n": 1, "h": 1, "w": 1, "pad_h": 1, "pad_w": 1},
    {"n": 4, "c": 16, "h": 4, "w": 4, "k": 16, "r": 1, "s": 1},
    {"n": 2, "c": 3, "groups": 3, "k": 48, "r": 2, "s": 2},
)
DEPTHWISE_VALUES = (
    {"pad_h": 1, "n": 2},
    WIDE_STEPS,
    {"multiplier": 2, "pad_h": 1, "pad_w": 1},
    {"r": 5, "s": 7, "pad_h": 2, "pad_w": 3},
    {},
    {"pad_w": 2},
    {"multiplier": 3, "channels": 3},
    {"r": 1, "s": 1},
    {"r": 4, "s": 9, "pad_h": 2, "pad_w": 4},
    {"n": 0},
    {"channels": 1, "h": 1, "w": 1, "r": 1, "s": 1},
    {"channels": 1, "multiplier": 5},
    {"channels": 2, "h": 1, "w": 1, "pad_h": 1, "pad_w": 1},
    {"channels": 16, "h": 4, "w": 4, "pad_h": 1, "pad_w": 1},
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_results_of_implicit_gemm(layout):
    interpret(
        "conv2d",
        [
            case(SMALL, dtype=dtype, layout=layout, **each)
            for dtype, count in (("float32", None), ("float16", 3), ("bfloat16", 3))
            for each in DENSE_VALUES[:count]
        ],
    )


@pytest.mark.slow
def test_results_of_implicit_gemm_with_every_kind_of_tile():
    corners = [
        gemm(16, 16, 16, group_m=1, num_warps=1, num_stages=1),
        gemm(256, 16, 16),
        gemm(16, 256, 16),
        gemm(16, 16, 128),
        gemm(16, 16, 32, group_m=4),
        gemm(16, 16, 64, group_m=16, num_stages=5),
    ]
    values = {"n": 1, "h": 9, "w": 9, "k": 40, "pad_h": 1, "pad_w": 1, "stride_h": 2, "stride_w": 2}
    interpret(
        "conv2d",
        [
            case(each, layout=layout, **values, **more)
            for each in corners
            for layout, more in (
                ("nchw", {"c": 32}),
                ("nhwc", {"c": 32}),
                ("nhwc", {"c": 7, "allow_tf32": True}),
            )
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_results_of_depthwise(layout):
    turned = "by_tap" if layout == "nhwc" else "by_channel"
    interpret(
        "conv2d",
        [
            depth_case(depth(8, 4, 4, weight=order), dtype=dtype, layout=layout, **each)
            for order, dtype, values in (
                ("by_channel", "float32", DEPTHWISE_VALUES),
                (turned, "float16", DEPTHWISE_VALUES[:4]),
                (turned, "bfloat16", DEPTHWISE_VALUES[:2]),
            )
            for each in values
        ],
    )


@pytest.mark.slow
def test_results_of_depthwise_with_every_kind_of_tile():
    tiles = [(1, 4, 1), (16, 4, 2), (1, 64, 1), (2, 8, 128), (16, 64, 1), (1, 4, 16), (2, 16, 8)]
    large = {"channels": 2, "h": 9, "w": 9, "r": 13, "s": 13, "pad_h": 6, "pad_w": 6}
    interpret(
        "conv2d",
        [
            depth_case(depth(*tile), layout=layout, **values)
            for layout in ("nchw", "nhwc")
            for tile, values in [
                *((tile, {"channels": 3, "h": 4, "w": 5, "pad_w": 1}) for tile in tiles),
                ((16, 16, 2), large),
            ]
        ],
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_results_on_a_gpu(dtype, layout):
    sizes = {
        "n": 3,
        "c": 96,
        "h": 29,
        "w": 31,
        "k": 96,
        "pad_h": 1,
        "pad_w": 1,
        "layout": layout,
        "dtype": dtype,
    }
    on_gpu(
        "conv2d",
        [
            case(gemm(), **sizes),
            case(gemm(), **{**sizes, "c": 3, "r": 7, "s": 7, "stride_h": 2, "stride_w": 2}),
            case(gemm(128, 64, 32), **{**sizes, "groups": 3, "dil_h": 2}),
            case(gemm(128, 32, 32), **{**sizes, "h": 32, "w": 32, "r": 1, "s": 1, "pad_h": 0, "pad_w": 0}),
            case(depth(4, 16, 16), **{**sizes, "groups": 96}),
            case(depth(4, 16, 16), **{**sizes, "groups": 96, "r": 31, "s": 31, "pad_h": 15, "pad_w": 15}),
        ],
    )


# Offline compilation

PLAIN = {"c": 64, "h": 56, "w": 56, "k": 256, "r": 1, "s": 1, "pad_h": 0, "pad_w": 0}
STEM = {"c": 3, "h": 224, "w": 224, "k": 64, "r": 7, "s": 7, "stride_h": 2, "stride_w": 2, "pad_h": 3}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(
    ("candidate", "values"),
    [
        (gemm(64, 64, 64, num_stages=3), {}),
        (gemm(64, 64, 32, num_stages=3), {"layout": "nchw"}),
        (gemm(128, 64, 64, num_warps=8), {"groups": 2, "dtype": "bfloat16"}),
        (gemm(64, 64, 32, num_stages=4), STEM),
        (gemm(64, 64, 32, num_stages=2), {"layout": "nchw", **PLAIN}),
    ],
)
def test_implicit_gemm_compiles_as_its_work_says(compiler, target, candidate, values):  # noqa: F811
    assert_compiles(compiler, candidate, conv(**values), target, tensor_cores=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize(
    ("candidate", "values"),
    [
        (depth(8, 8, 64), {}),
        (depth(4, 8, 64, weight="by_tap"), {"r": 31, "s": 31, "pad_h": 15, "pad_w": 15, "h": 56, "w": 56}),
        (depth(16, 32, 1, num_warps=2), {"layout": "nchw", "r": 7, "s": 7}),
        (depth(4, 8, 32), {"k": 192, "dtype": "float32"}),
    ],
)
def test_depthwise_compiles_as_its_work_says(compiler, target, candidate, values):  # noqa: F811
    assert_compiles(compiler, candidate, dw(**values), target, tensor_cores=False)


@pytest.mark.slow
def test_float32_is_rounded_only_where_the_problem_allows_it(compiler):  # noqa: F811
    for allowed in (False, True):
        described = conv(dtype="float32", allow_tf32=allowed)
        assert_compiles(compiler, gemm(32, 32, 32), described, "sm80", tensor_cores=allowed)


@pytest.mark.slow
def test_neighbouring_channels_are_loaded_sixteen_bytes_at_a_time(compiler):  # noqa: F811
    from kernelcast.kernels.compile import compile_spec_for

    for candidate, described, copy in (
        (gemm(), conv(), "LDGSTS.E.BYPASS"),
        (depth(weight="by_tap"), dw(), "LDG.E.128"),
    ):
        spec = variant("conv2d", candidate.variant).compile_spec(described, candidate.parameters, "sm80")
        code = compile_spec_for(spec, "sm80").asm["sass"]
        assert copy in code
        assert "LDG.E.U16" not in code
