"""conv2d: every variant against the reference, its rules, and what it says of its own work."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import for_each
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelcast.errors import IllegalCandidateError, InvalidProblemError
from kernelcast.kernels import Candidate, Device, operation, problem, registry, variant, variants
from kernelcast.kernels.memory import poisoned
from kernelcast.kernels.ops.conv2d.fft import fast_length, transform_sizes
from kernelcast.kernels.ops.conv2d.schema import WINOGRAD_AMPLIFICATION, Geometry
from kernelcast.kernels.ops.conv2d.winograd import TRANSFORMS, transforms_2d

CPU = Device(name="cpu", kind="cpu", vendor="amd", architecture="x86_64-avx512", cores=2, warp_size=1)
GPU = Device(name="gpu", kind="gpu", vendor="nvidia", architecture="sm90", cores=132)
CONV = operation("conv2d")

#: Rules about speed and memory alone: what they refuse is slow or redundant, and still right.
COST_RULES = {
    "few-operations",
    "few-taps",
    "few-groups",
    "few-channels",
    "tile-below-image",
    "passes-differ",
    "patches-reused",
    "not-a-plain-product",
    "scratch-fits",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small tensors: a pool of threads would spend its time waiting for a shared core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def conv(**values):
    return problem("conv2d", **{"n": 1, "c": 1, "h": 8, "w": 8, "k": 1, "r": 3, "s": 3, **values})


def right_candidates(of, device=CPU):
    """Every candidate that is legal, or that only rules about cost refuse."""
    found = []
    for each in variants("conv2d").values():
        block = each.space()
        rows = np.ones(block.length, dtype=bool)
        for rule in each.rules:
            if rule.name not in COST_RULES:
                rows &= rule.met(of, block.columns, device, block.length)
        found += [block.at(int(row)) for row in np.flatnonzero(rows)]
    return found


def bits(tensor):
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def fault(of, candidate, inputs, reference):
    """What is wrong with a candidate's output, or None."""
    before = [tensor.clone() for tensor in inputs]
    launch = variant("conv2d", candidate.variant).build(of, candidate.parameters)
    with poisoned():
        output = launch(*inputs)
    wrong = CONV.check(of, reference, output)
    if wrong:
        return wrong
    layout = torch.channels_last if of["layout"] == "nhwc" else torch.contiguous_format
    if not output.is_contiguous(memory_format=layout):
        return f"strides {output.stride()} are not those of {of['layout']}"
    if any(not torch.equal(bits(old), bits(new)) for old, new in zip(before, inputs, strict=True)):
        return "an input has changed"
    return None


def faults(of):
    """What is wrong with any candidate on a problem, and how many candidates ran."""
    inputs = CONV.make_inputs(of, seed=3, device="cpu")
    reference = CONV.reference(of, *inputs)
    found = right_candidates(of)
    wrong = {str(candidate): fault(of, candidate, inputs, reference) for candidate in found}
    return {name: what for name, what in wrong.items() if what}, {candidate.variant for candidate in found}


@st.composite
def conv_problems(draw):
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    depthwise = draw(st.booleans()) and groups > 1
    r, s = draw(st.one_of(st.sampled_from([(3, 3), (1, 1)]), st.tuples(st.integers(1, 5), st.integers(1, 5))))
    plain = draw(st.booleans())
    stride = (1, 1) if plain else draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = (1, 1) if plain else draw(st.tuples(st.integers(1, 3), st.integers(1, 2)))
    pad = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    smallest = [max(1, dilation[i] * ((r, s)[i] - 1) + 1 - 2 * pad[i]) for i in range(2)]
    strides = {"stride_h": stride[0], "stride_w": stride[1], "dil_h": dilation[0], "dil_w": dilation[1]}
    return conv(
        n=draw(st.integers(0, 3)),
        c=groups if depthwise else groups * draw(st.integers(1, 5)),
        h=smallest[0] + draw(st.integers(0, 12)),
        w=smallest[1] + draw(st.integers(0, 12)),
        k=groups * draw(st.integers(1, 4)),
        **{"r": r, "s": s, "pad_h": pad[0], "pad_w": pad[1], "groups": groups, **strides},
        layout=draw(st.sampled_from(["nchw", "nhwc"])),
        dtype=draw(st.sampled_from(["float32", "float32", "float32", "float16", "bfloat16"])),
    )


@given(conv_problems())
@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_candidate_is_right(of):
    assert faults(of)[0] == {}


@pytest.mark.slow
@given(conv_problems())
@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_candidate_is_right_on_many_problems(of):
    assert faults(of)[0] == {}


EVERYWHERE = {"vendor", "native", "im2col", "shifted"}


def case(*further, **values):
    """A problem's values, and the variants that must compute it."""
    return values, EVERYWHERE | set(further)


CASES = {
    "1x1": case("fft", "matmul_1x1", n=2, c=5, h=6, w=7, k=3, r=1, s=1),
    "1x1 strided": case(n=2, c=5, h=6, w=7, k=3, r=1, s=1, stride_h=2, stride_w=3),
    "1x1 padded": case("fft", n=2, c=5, h=6, w=7, k=3, r=1, s=1, pad_h=1),
    "3x3": case("fft", "winograd", n=3, c=6, h=9, w=11, k=4, pad_h=1, pad_w=1),
    "3x3 whole tiles": case("fft", "winograd", n=1, c=2, h=10, w=14, k=4),
    "3x3 to one pixel": case("fft", "winograd", c=2, h=3, w=3, k=2),
    "3x3 strided": case(n=2, c=3, h=9, w=12, k=4, stride_h=2, stride_w=2, pad_h=1, pad_w=1),
    "stride above kernel": case(n=2, c=3, h=13, w=12, k=4, r=2, s=2, stride_h=5, stride_w=4),
    "dilated": case("fft", n=2, c=3, h=12, w=13, k=4, dil_h=3, dil_w=2, pad_h=2, pad_w=3),
    "strided, dilated": case(n=2, c=3, h=15, w=14, k=2, stride_h=2, stride_w=3, dil_h=3, dil_w=2),
    "groups": (
        {"n": 2, "c": 6, "h": 7, "w": 9, "k": 4, "groups": 2, "pad_h": 1},
        {"vendor", "native", "im2col", "fft"},
    ),
    "depthwise": case("fft", n=2, c=6, h=7, w=9, k=12, groups=6, pad_h=1),
    "depthwise strided": case(n=2, c=6, h=7, w=9, k=6, groups=6, stride_h=2, stride_w=2),
    "padding above kernel": case("fft", n=1, c=2, h=2, w=1, k=3, r=2, s=2, pad_h=4, pad_w=5),
    "all ones": case("fft", "matmul_1x1", c=1, h=1, w=1, k=1, r=1, s=1),
    "one column": case("fft", n=2, c=3, h=9, w=1, k=2, r=4, s=1),
    "large batch": case("fft", "winograd", n=17, c=8, h=9, w=8, k=4, pad_h=1, pad_w=1),
    "large kernel": case("fft", n=2, c=2, h=40, w=33, k=2, r=15, s=15, pad_h=7, pad_w=7),
    "no images": ({"n": 0, "c": 4, "k": 2}, {"vendor"}),
}


@for_each("layout", ["nchw", "nhwc"])
@for_each("case", CASES)
def test_each_variant_computes_what_it_should(case, layout):
    values, expected = CASES[case]
    wrong, ran = faults(conv(**values, layout=layout))
    assert wrong == {}
    assert ran == expected | ({"channels_last"} if layout == "nchw" and case != "no images" else set())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_variants_of_16_bits(dtype, kernel):
    wrong, ran = faults(conv(n=2, c=40, h=7, w=9, k=6, r=kernel, s=kernel, dtype=dtype))
    assert wrong == {}
    assert ran == {"vendor", "native", "channels_last", "im2col"} | ({"matmul_1x1"} if kernel == 1 else set())


def test_winograd_meets_the_tolerance_with_many_channels():
    of = conv(n=1, c=512, h=14, w=14, k=32, pad_h=1, pad_w=1)
    inputs = CONV.make_inputs(of, seed=0, device="cpu")
    reference = CONV.reference(of, *inputs)
    tiled = [candidate for candidate in right_candidates(of) if candidate.variant == "winograd"]
    assert len(tiled) == 8
    assert [fault(of, candidate, inputs, reference) for candidate in tiled] == [None] * 8


@for_each(
    "values",
    [
        {"c": 1, "h": 9, "w": 9, "k": 1},
        {"c": 64, "h": 9, "w": 9, "k": 8, "pad_h": 1, "pad_w": 1},
        {"c": 512, "h": 9, "w": 9, "k": 8, "pad_h": 1, "pad_w": 1},
        {"c": 8, "h": 9, "w": 9, "k": 8, "groups": 8},
        {"c": 2, "h": 40, "w": 40, "k": 2, "r": 31, "s": 31},
        {"c": 64, "h": 9, "w": 9, "k": 8, "dtype": "float16"},
        {"c": 64, "h": 9, "w": 9, "k": 8, "dtype": "bfloat16"},
        {"c": 64, "h": 9, "w": 9, "k": 8, "allow_tf32": True},
    ],
)
def test_a_missing_tap_is_caught(values):
    of = conv(**values)
    x, weight = CONV.make_inputs(of, seed=5, device="cpu")
    reference = CONV.reference(of, x, weight)
    launch = variant("conv2d", "vendor").build(of, {})
    assert CONV.check(of, reference, launch(x, weight)) is None
    short = weight.clone()
    short[:, :, -1, 0] = 0
    assert "differ from the reference" in CONV.check(of, reference, launch(x, short))


def test_inputs_have_the_layout_even_where_it_is_ambiguous():
    x, weight = CONV.make_inputs(conv(n=2, c=1, h=4, w=5, k=3, layout="nhwc"), seed=0, device="cpu")
    assert x.stride() == (20, 1, 5, 1)
    assert weight.stride() == (9, 1, 3, 1)
    x, _ = CONV.make_inputs(conv(n=2, c=1, h=4, w=5, k=3), seed=0, device="cpu")
    assert x.stride() == (20, 20, 5, 1)


def test_inputs_are_the_same_values_in_both_layouts_and_follow_the_seed():
    first = CONV.make_inputs(conv(n=2, c=3, k=4), seed=1, device="cpu")
    last = CONV.make_inputs(conv(n=2, c=3, k=4, layout="nhwc"), seed=1, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
    assert not torch.equal(first[0], CONV.make_inputs(conv(n=2, c=3, k=4), seed=2, device="cpu")[0])


def test_reference_is_the_sum_written_out():
    of = conv(n=1, c=2, h=6, w=5, k=4, r=2, s=3, stride_h=2, pad_w=1, dil_h=2, groups=2)
    x, weight = CONV.make_inputs(of, seed=0, device="cpu")
    out = CONV.reference(of, x, weight)
    assert out.dtype == torch.float64
    assert out.shape == (1, 4, 2, 5)
    expected = 0.0
    for i in range(2):
        for j in range(3):
            row, column = 1 * 2 + i * 2, 4 + j - 1
            if 0 <= column < 5:
                expected += x[0, 1, row, column].double() * weight[3, 0, i, j].double()
    assert out[0, 3, 1, 4].item() == pytest.approx(float(expected), abs=1e-12)


@for_each(
    ("values", "sentence"),
    [
        ({"c": 6, "k": 4, "groups": 4}, r"groups is 4, which does not divide c = 6 \(input channels\)"),
        ({"c": 6, "k": 4, "groups": 3}, r"groups is 3, which does not divide k = 4 \(output channels\)"),
        ({"h": 4, "r": 3, "dil_h": 2}, r"spans 5 rows .*padded input has 4 .*Enlarge h or pad_h"),
        ({"w": 1, "s": 6, "pad_w": 2}, r"spans 6 columns .*padded input has 5 .*Enlarge w or pad_w"),
        ({"stride_h": 0}, "stride_h is 0"),
        ({"groups": 0}, "groups is 0"),
        ({"c": 0}, "c is 0"),
        ({"layout": "chwn"}, "layout is 'chwn'"),
        ({"dtype": "int8"}, "does not take dtype 'int8'"),
        ({"stride": 2}, "no dimension or option 'stride'"),
    ],
)
def test_impossible_problems_are_explained(values, sentence):
    with pytest.raises(InvalidProblemError, match=sentence):
        conv(**values)


def test_output_size_is_torchs():
    of = conv(n=2, c=4, h=17, w=12, k=6, r=4, s=3, stride_h=3, stride_w=2, pad_h=2, pad_w=1, dil_h=2, dil_w=3)
    geometry = Geometry.of(of)
    x, weight = CONV.make_inputs(of, seed=0, device="cpu")
    assert (geometry.p, geometry.q) == CONV.reference(of, x, weight).shape[2:] == (5, 4)


def broken_rule(of, name, config=None, device=CPU):
    each = variant("conv2d", name)
    block = each.space()
    rows = [
        i for i in range(block.length) if all(block.columns[p][i] == v for p, v in (config or {}).items())
    ]
    assert rows
    found = each.refusals(of, device, block.take(np.array(rows)))
    assert len(found) in (0, len(rows))
    return found[0] if found else None


BIG = {"n": 64, "c": 512, "h": 64, "w": 64, "k": 512, "pad_h": 1, "pad_w": 1}


def refused(name, rule, seen, config=None, **values):
    """A variant, some of its config, a problem's values, and the rule that must refuse it with what it saw."""
    return name, config, values, rule, seen


REFUSED = [
    refused("channels_last", "caller-is-nchw", "layout=nhwc", layout="nhwc"),
    refused("channels_last", "has-images", "n=0", n=0),
    refused("native", "few-groups", "65 > 64", c=65, k=65, groups=65),
    refused("native", "scratch-fits", "4.83e+09 bytes", **BIG),
    refused("matmul_1x1", "one-tap", "3x3"),
    refused("matmul_1x1", "all-pixels", "stride 1x2", r=1, s=1, stride_w=2),
    refused("matmul_1x1", "all-pixels", "padding 2x0", r=1, s=1, pad_h=2),
    refused("matmul_1x1", "dense", "groups=2", r=1, s=1, c=2, k=2, groups=2),
    refused("im2col", "not-a-plain-product", "1x1", {"images": 0}, r=1, s=1),
    refused("im2col", "passes-differ", "n=1", {"images": 1}),
    refused("im2col", "patches-reused", "groups=4", {"images": 0}, c=4, k=4, groups=4),
    refused("im2col", "scratch-fits", "bytes", {"images": 0}, **BIG),
    refused("winograd", "kernel-3x3", "5x5", {"images": 0}, r=5, s=5),
    refused("winograd", "kernel-3x3", "dilation 2x1", {"images": 0}, dil_h=2),
    refused("winograd", "unit-stride", "2x1", {"images": 0}, stride_h=2),
    refused("winograd", "dense", "groups=2", {"images": 0}, c=2, k=2, groups=2),
    refused("winograd", "full-float32", "bfloat16", {"images": 0}, dtype="bfloat16"),
    refused("winograd", "full-float32", "tf32", {"images": 0}, c=64, k=64, allow_tf32=True),
    refused("winograd", "few-operations", "against", {"images": 0}, c=2, k=2),
    refused("winograd", "scratch-fits", "bytes", {"images": 0, "tile": 4}, **BIG),
    refused("fft", "unit-stride", "1x2", {"tile": 0}, stride_w=2),
    refused("fft", "float32", "float16", {"tile": 0}, dtype="float16"),
    refused("fft", "tile-above-kernel", "16 < 2 * 9", {"tile": 16}, h=90, r=9),
    refused("fft", "tile-below-image", "32 >= 30", {"tile": 32}, h=30, r=9),
    refused("fft", "sum-of-channels", "c=1", {"tile": 0, "product": "bmm"}, r=7, s=7),
    refused("fft", "few-channels", "257", {"tile": 0, "product": "accumulate"}, c=257),
    refused("fft", "few-operations", "against", {"tile": 0}, r=1, s=1, c=3),
    refused("fft", "scratch-fits", "bytes", {"tile": 0}, **{**BIG, "c": 256, "k": 256, "r": 9, "s": 9}),
    refused("shifted", "not-a-plain-product", "1x1", r=1, s=1),
    refused("shifted", "dense-or-depthwise", "c=4, groups=2", c=4, k=4, groups=2),
    refused("shifted", "float32", "bfloat16", dtype="bfloat16"),
    refused("shifted", "few-taps", "132 > 121", h=20, w=20, r=11, s=12),
    refused("shifted", "scratch-fits", "bytes", **{**BIG, "n": 512}),
]


@for_each(("name", "config", "values", "rule", "seen"), REFUSED)
def test_rules_refuse_with_a_reason(name, config, values, rule, seen):
    refusal = broken_rule(conv(**values), name, config)
    assert refusal.rule == rule
    assert seen in refusal.seen
    assert len(refusal.reason) > 30


def test_every_rule_is_refused_by_some_case():
    tested = {(name, rule) for name, _, _, rule, _ in REFUSED} | {("native", "cpu")}
    shared = {"has-images", "passes-differ"}
    rules = {
        (name, rule.name)
        for name, each in variants("conv2d").items()
        if each.backend != "triton"
        for rule in each.rules
    }
    assert {pair for pair in rules - tested if pair[1] not in shared} == set()


def test_native_serves_the_cpu_alone():
    assert broken_rule(conv(), "native", device=CPU) is None
    assert broken_rule(conv(), "native", device=GPU).rule == "cpu"
    with pytest.raises(IllegalCandidateError, match="oneDNN"):
        registry.require_legal(conv(), GPU, Candidate.of("native"))


def test_native_switches_onednn_off_for_its_call_alone(monkeypatch):
    switch = torch.backends.mkldnn

    def switches():
        return switch.enabled, switch.deterministic, switch.allow_tf32

    seen = []
    plain = torch.nn.functional.conv2d
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *args: seen.append(switches()) or plain(*args))
    # Not what torch's own context manager would set.
    monkeypatch.setattr(switch, "deterministic", True)
    of, before = conv(n=2, c=8, k=8), switches()
    variant("conv2d", "native").build(of, {})(*CONV.make_inputs(of, seed=0, device="cpu"))
    assert before[:2] == (True, True)
    assert seen == [(False, *before[1:])]
    assert switches() == before


def test_default_comes_first_and_is_always_legal():
    for values in ({}, {"n": 0}, BIG, {"dtype": "float16", "c": 4, "k": 4, "groups": 4}):
        for device in (CPU, GPU):
            assert registry.candidates(conv(**values), device)[0] == CONV.default == Candidate.of("vendor")


def test_candidates_and_refusals_make_up_the_space():
    of = conv(n=4, c=64, h=56, w=56, k=64, pad_h=1, pad_w=1)
    legal, refused = registry.candidates(of, CPU), registry.refusals(of, CPU)
    found = variants("conv2d").values()
    assert len(legal) + len(refused) == sum(each.space().length for each in found)
    assert sum(each.space().length for each in found if each.backend != "triton") == 31
    assert {candidate.variant for candidate in legal} == {
        *("vendor", "channels_last", "fft", "im2col", "native", "shifted", "winograd")
    }


def work(of, name, **config):
    columns = {parameter: np.array([value]) for parameter, value in config.items()}
    return {
        key: float(column[0])
        for key, column in variant("conv2d", name).work(of, columns, CPU).columns(1).items()
    }


def test_vendor_work_is_the_textbooks():
    # 4x4 outputs of 6 channels in 2 images, each a sum over 2 channels and 9 taps.
    of = conv(n=2, c=4, h=8, w=8, k=6, stride_h=2, stride_w=2, pad_h=1, pad_w=1, groups=2)
    amounts = work(of, "vendor")
    assert amounts["flops"] == 2 * (2 * 6 * 4 * 4) * (2 * 9) == 6912
    assert amounts["traffic_bytes"] == 4 * (2 * 4 * 8 * 8 + 6 * 2 * 9 + 2 * 6 * 4 * 4) == 3248
    assert (CONV.flops(of), CONV.traffic_bytes(of)) == (6912, 3248)
    assert work(conv(n=0, c=4, k=2), "vendor")["flops"] == 0


def test_winograd_work_by_hand():
    # One image, 8x8 outputs: four tiles of 4x4, each 36 points.
    of = conv(n=1, c=3, h=8, w=8, k=5, pad_h=1, pad_w=1)
    amounts = work(of, "winograd", tile=4, channels="first", images=0)
    assert amounts["flops"] == 2 * 36 * (9 * 15 + 4 * 36 * 3 + 4 * 15 + 4 * 16 * 5)
    assert amounts["scratch_bytes"] == 4 * (36 * 15 + 3 * 10 * 10 + 4 * (36 * (2 * 3 + 5) + 16 * 5))


def test_winograd_multiplies_less():
    of = conv(n=1, c=256, h=56, w=56, k=256, pad_h=1, pad_w=1)
    two = work(of, "winograd", tile=2, channels="first", images=0)["flops"]
    four = work(of, "winograd", tile=4, channels="first", images=0)["flops"]
    # The products alone take 16 / 36 and 36 / 144 of the definition's; the transforms come on top.
    assert 16 / 36 < two / CONV.flops(of) < 0.6
    assert 36 / 144 < four / CONV.flops(of) < 0.4


def test_padding_waste_is_counted():
    of = conv(n=1, c=64, h=9, w=9, k=64, pad_h=1, pad_w=1)
    whole = conv(n=1, c=64, h=12, w=12, k=64, pad_h=1, pad_w=1)
    config = {"tile": 4, "channels": "first", "images": 0}
    assert work(of, "winograd", **config)["flops"] == work(whole, "winograd", **config)["flops"]
    # 9 output rows of 9 lie 11 apart in the padded input: all but the last are computed with their gaps.
    assert work(of, "shifted", channels="first")["flops"] == 2 * 64 * 64 * 9 * (8 * 11 + 9)


def test_fft_gains_on_large_kernels():
    small = conv(n=1, c=4, h=256, w=256, k=4, pad_h=1, pad_w=1)
    large = conv(n=1, c=4, h=256, w=256, k=4, r=31, s=31, pad_h=15, pad_w=15)
    ratios = [
        work(of, "fft", tile=0, product="accumulate")["flops"] / CONV.flops(of) for of in (small, large)
    ]
    assert ratios[0] > 1
    assert ratios[1] < 0.05
    narrow = Geometry.of(conv(h=7, w=300, r=5, s=5))
    assert [transform_sizes(narrow, tile) for tile in (0, 64)] == [(8, 300), (8, 64)]


def test_chunks_move_what_one_pass_moves():
    of = conv(n=8, c=16, h=20, w=20, k=16, r=5, s=5)
    for channels in ("first", "last"):
        one, every = (work(of, "im2col", channels=channels, images=images) for images in (1, 0))
        assert one["scratch_bytes"] == every["scratch_bytes"] >= 4 * 8 * 16 * 25 * 16 * 16
        assert one["calls"] == every["calls"] + 14


@given(st.integers(1, 100_000))
def test_fast_length_is_the_next_5_smooth_number(length):
    def smooth(number):
        for prime in (2, 3, 5):
            while number % prime == 0:
                number //= prime
        return number == 1

    found = fast_length(length)
    assert found >= length
    assert smooth(found)
    assert not any(smooth(number) for number in range(length, found))


@pytest.mark.parametrize("tile", TRANSFORMS)
def test_winograd_transforms_are_exact(tile):
    rng = np.random.default_rng(0)
    patch, kernel = rng.standard_normal((tile + 2, tile + 2)), rng.standard_normal((3, 3))
    b, g, a = transforms_2d(tile)
    found = a @ ((b @ patch.ravel()) * (g @ kernel.ravel()))
    expected = [(patch[i : i + 3, j : j + 3] * kernel).sum() for i in range(tile) for j in range(tile)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_winograd_amplification_follows_from_the_transforms():
    worst = {}
    for tile in TRANSFORMS:
        b, g, a = transforms_2d(tile)
        terms = a * np.linalg.norm(b, axis=1) * np.linalg.norm(g, axis=1)
        worst[tile] = np.linalg.norm(terms, axis=1).max() / 3.0
    assert worst[4] == pytest.approx(WINOGRAD_AMPLIFICATION, abs=0.1)
    assert worst[2] == pytest.approx(1.7, abs=0.05)


def test_tolerance_is_wider_only_where_winograd_applies():
    def absolute(**values):
        return CONV.tolerance(conv(c=64, k=64, **values)).absolute

    assert absolute() > 3 * absolute(stride_h=2)
    assert absolute(stride_h=2) == absolute(dil_w=2)
    assert absolute(stride_h=2) == pytest.approx(2.0**-24 * (8 * 576 + 48 * 24))
    assert absolute(dtype="bfloat16") > absolute(dtype="float16") > absolute()


def test_candidates_are_listed_without_torch():
    code = (
        "import sys; from kernelcast.kernels import Device, candidates, problem; "
        "of = problem('conv2d', n=1, c=64, h=56, w=56, k=64, r=3, s=3); "
        "device = Device(name='x', kind='cpu', vendor='x', architecture='x', cores=2); "
        "assert len(candidates(of, device)) > 5; assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
