"""What Inductor's choices are: the matrix product, its problem, and the candidates, from names and sizes alone."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from cases import for_each

from kernelcast.kernels import Candidate, problem
from kernelcast.kernels.detect import default_threads
from kernelcast.kernels.inductor_names import PRODUCTS, candidate_of, template_of, tile
from kernelcast.runtime.inductor_choices import describe

DATA = Path(__file__).parents[3] / "shared" / "data" / "autoheuristic"
MM, ADDMM, BMM, BADDBMM, MIXED = PRODUCTS
IDENTITY = "type=triton_BLOCK-M=64_BLOCK-K=32_BLOCK-N=128_numstages=3_numwarps=4"
CONFIG = {"block_m": 64, "block_n": 128, "block_k": 32, "group_m": 8, "num_stages": 3, "num_warps": 4}


class Node:
    """A tensor of a graph, as Inductor's nodes say what they are."""

    def __init__(self, size, stride=None, dtype=torch.float16):
        self.size, self.dtype = size, dtype
        self.stride = stride or torch.empty(size, device="meta").stride()

    def get_size(self):
        return list(self.size)

    def get_stride(self):
        return list(self.stride)

    def get_dtype(self):
        return self.dtype


class Layout:
    def __init__(self, dtype=torch.float16, device="cuda:0"):
        self.dtype, self.device = dtype, torch.device(device)


class Choice:
    """A choice, as Inductor's callers say what they are."""

    def __init__(self, name, identity, nodes, layout, info=None, description=""):
        self.name, self.identity, self.input_nodes, self.layout = name, identity, nodes, layout
        self.info, self.description = info or {}, description

    def autoheuristic_id(self):
        return self.identity

    def info_dict(self):
        return self.info


def library(name, nodes, layout=None):
    return Choice(name, f"extern_{name}", nodes, layout or Layout())


def triton(nodes, *, name="triton_mm_3", identity=IDENTITY, layout=None, **more):
    return Choice(name, identity, nodes, layout or Layout(), **more)


def matrices(m=48, n=80, k=64, dtype=torch.float16):
    return [Node((m, k), dtype=dtype), Node((k, n), dtype=dtype)]


# --- names ---


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("triton_mm_12", "mm"),
        ("triton_mm_persistent_tma_0", "mm_persistent_tma"),
        ("triton_bmm_7", "bmm"),
        ("triton_mm", ""),
        ("mm_3", ""),
        ("triton_mm_3_x", ""),
    ],
)
def test_the_template_is_in_the_name(name, template):
    assert template_of(name) == template


@for_each(
    ("identity", "name", "expected"),
    [
        ("extern_mm", "mm", Candidate.of("vendor")),
        (IDENTITY, "triton_mm_0", Candidate.of("triton_tiled", CONFIG)),
        (IDENTITY, "triton_mm_persistent_tma_4", Candidate.of("inductor_mm_persistent_tma", CONFIG)),
        ("subgraph_x", "decompose_k_mm_12_split_3", Candidate.of("inductor_decompose_k", {"split": 12})),
        ("subgraph_x", "contiguous_mm_2", Candidate.of("inductor_contiguous")),
        ("unsupported_choice", "cpp_CppMicroGemmAMX_0", Candidate.of("inductor_cpp", {"micro_gemm": "CppMicroGemmAMX"})),
        ("extern_my_matmul", "my_matmul", None),
        ("unsupported_choice", "cutlass_gemm_1a2b", None),
        (IDENTITY.replace("K=32", "K=-1"), "triton_mm_0", None),
        (IDENTITY.replace("M=64", "M=0"), "triton_mm_0", None),
    ],
)  # fmt: skip
def test_a_choice_of_mm_is_this_candidate(identity, name, expected):
    assert candidate_of(MM, identity, name) == expected


def test_a_second_call_of_the_library_is_no_candidate_of_its_own():
    assert candidate_of(ADDMM, "extern_addmm", "addmm") == Candidate.of("vendor")
    assert candidate_of(ADDMM, "extern_bias_addmm", "bias_addmm") is None
    # Of another product the library's call is a choice like any other.
    assert candidate_of(BMM, "extern_mm", "mm") is None


def test_the_order_of_tiles_is_that_which_the_choice_says():
    assert tile(IDENTITY, over_k=True, group_m=4) == {**CONFIG, "group_m": 4}
    nodes = matrices()
    said = triton(nodes, info={"GROUP_M": 16})
    described = triton(nodes, description="ACC_TYPE='tl.float32', GROUP_M=4, num_warps=4")
    silent = triton(nodes, info={"GROUP_M": -1})
    found = describe([library("mm", nodes), said, described, silent])
    assert [each.parameters["group_m"] for each in found.candidates[1:]] == [16, 4, 8]


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("product", [MM, MIXED], ids=lambda product: product.name)
def test_every_recorded_choice_is_known(product):
    """All choices that the collections of AutoHeuristic hold for these products."""
    names = {"mm": ("a100_mm.zip", "h100_mm_random.zip"), "mixed_mm": ("mixedmm_a100_data.zip",)}[
        product.name
    ]
    if not all((DATA / name).exists() for name in names):
        pytest.skip(f"{DATA} has no recorded choices")
    found = set()
    for name in names:
        with zipfile.ZipFile(DATA / name) as archive:
            for entry in archive.namelist():
                if entry.endswith(".txt"):
                    with archive.open(entry) as file:
                        lines = file.read().split(b"\n")[2:]
                        found |= {line.rsplit(b",", 2)[-2].decode() for line in lines if b"," in line}
    assert len(found) > 15
    candidates = {name: candidate_of(product, name, "triton_mm_0") for name in found}
    assert not [name for name, candidate in candidates.items() if candidate is None]
    assert {each.variant for each in candidates.values()} == {"vendor", "triton_tiled"}
    assert len(set(candidates.values())) == len(found)


# --- problems ---


def test_a_product_of_two_matrices():
    # A by columns; B's rows padded to 96.
    nodes = [Node((48, 64), (1, 48)), Node((64, 80), (96, 1))]
    found = describe([library("mm", nodes), triton(nodes)])
    assert found.problem == problem("gemm", m=48, n=80, k=64, dtype="float16", layout="tn", ldb=96)
    assert found.recorded == found.problem
    assert found.library == (True, False)
    assert found.candidates == (Candidate.of("vendor"), Candidate.of("triton_tiled", CONFIG))
    assert found.product is MM
    assert found.device == torch.device("cuda:0")


def test_a_bias_is_ranked_as_the_product_and_recorded_as_itself():
    nodes = [Node((80,)), *matrices()]
    found = describe([library("addmm", nodes), library("bias_addmm", nodes), triton(nodes)])
    assert found.problem == problem("gemm", m=48, n=80, k=64, dtype="float16")
    assert found.recorded.operation == "addmm"
    assert (found.recorded.dims, found.recorded.options) == (found.problem.dims, found.problem.options)
    assert found.library == (True, True, False)
    assert found.candidates[1] is None


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        (((48 * 64, 64, 1), (64 * 80, 80, 1)), {}),
        (((48 * 64, 1, 48), (64 * 80, 80, 1)), {"layout": "tn"}),
        (((0, 64, 1), (64 * 80, 80, 1)), {"broadcast": "a"}),
        (((48 * 64, 64, 1), (0, 80, 1)), {"broadcast": "b"}),
        (((64, 4 * 64, 1), (64 * 80, 80, 1)), None),
        (((0, 64, 1), (0, 80, 1)), None),
    ],
)
def test_a_batch_of_products(strides, expected):
    nodes = [Node((4, 48, 64), strides[0]), Node((4, 64, 80), strides[1])]
    found = describe([library("bmm", nodes), triton(nodes, name="triton_bmm_1")])
    if expected is None:
        assert found is None
    else:
        wanted = problem("batched_gemm", batch=4, m=48, n=80, k=64, dtype="float16", **expected)
        assert found.problem == wanted
        assert found.candidates[1] == Candidate.of("triton_tiled", CONFIG)


def test_weights_of_8_bits():
    nodes = [Node((48, 64)), Node((64, 80), (1, 64), dtype=torch.int8)]
    found = describe([library("fallback_mixed_mm", nodes), triton(nodes)])
    assert found.problem == problem(
        "mixed_gemm", m=48, n=80, k=64, dtype="float16", weight_dtype="int8", layout="nt"
    )


def test_on_a_cpu_the_threads_are_part_of_the_problem():
    nodes = matrices(dtype=torch.float32)
    layout = Layout(torch.float32, "cpu")
    found = describe([library("mm", nodes, layout), Choice("cpp_Vec_0", "unsupported_choice", nodes, layout)])
    assert found.problem == problem("gemm", m=48, n=80, k=64, threads=default_threads())


def test_without_the_library_the_templates_name_the_product():
    nodes = matrices()
    assert describe([triton(nodes)]).product is MM
    assert describe([triton([Node((48, 80)), *nodes])]).product is ADDMM
    batch = [Node((4, 48, 64)), Node((4, 64, 80))]
    assert describe([triton(batch, name="triton_bmm_1")]).product is BMM
    assert describe([triton(batch[:1] * 2, name="triton_convolution2d_1")]) is None


@for_each(
    ("name", "nodes", "layout"),
    [
        ("convolution", [Node((8, 3, 9, 9)), Node((4, 3, 3, 3))], Layout()),
        ("_scaled_mm", [*matrices(), Node((1,)), Node((1,))], Layout()),
        ("_int_mm", matrices(dtype=torch.int8), Layout(torch.int32)),
        ("mm", matrices(dtype=torch.float64), Layout(torch.float64)),
        ("mm", matrices(), Layout(torch.float32)),
        ("mm", [Node((48, 64)), Node((64, 80), dtype=torch.bfloat16)], Layout()),
        ("mm", [Node((48, 64), (2, 96)), Node((64, 80))], Layout()),
        ("mm", [Node((48, 64)), Node((63, 80))], Layout()),
        ("mm", [Node((48, 64))], Layout()),
        ("bmm", matrices(), Layout()),
    ],
)
def test_what_the_catalogue_does_not_have_is_left_alone(name, nodes, layout):
    assert describe([library(name, nodes, layout), triton(nodes, layout=layout)]) is None


def test_choices_of_two_products_are_left_alone():
    nodes = matrices()
    assert describe([library("mm", nodes), library("addmm", nodes)]) is None
