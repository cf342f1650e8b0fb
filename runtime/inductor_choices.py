"""What Inductor is about to time, as a problem and candidates.

Only what choices and nodes of a graph say is read here (names, sizes, strides, dtypes, the device), never a tensor. Nothing
here imports torch's compiler: it hands its objects over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kernelcast.datasets.timing import tf32_allowed
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.detect import default_threads
from kernelcast.kernels.inductor_names import GROUP_M, PRODUCTS, Product, candidate_of, template_of
from kernelcast.kernels.ops.batched_gemm.schema import BATCHED_GEMM
from kernelcast.kernels.ops.gemm.schema import GEMM, matrix_layout
from kernelcast.kernels.ops.mixed_gemm.schema import MIXED_GEMM

_SCHEMAS = {"gemm": GEMM, "batched_gemm": BATCHED_GEMM, "mixed_gemm": MIXED_GEMM}
_GROUP = re.compile(r"\bGROUP_M=(\d{1,9})\b")


@dataclass(frozen=True)
class Choices:
    """The choices of one matrix product.

    Attributes:
        product: which.
        problem: of the catalogue; a bias is left out, which adds as much to every choice.
        recorded: what timings are recorded under: ``problem``, or one of an operation of its own where there is a bias.
        device: where it runs, as torch names it: ``"cuda:0"``.
        candidates: of each choice, in Inductor's order; None where it is not known.
        library: which of them call torch's own operator.
    """

    product: Product
    problem: Problem
    recorded: Problem
    device: Any
    candidates: tuple[Candidate | None, ...]
    library: tuple[bool, ...]


def describe(choices: Sequence[Any]) -> Choices | None:
    """The matrix product that choices of Inductor's compute, and the candidates that they are.

    Returns:
        None where they compute something else, or on operands that no problem of the catalogue describes.
    """
    identities = [str(choice.autoheuristic_id()) for choice in choices]
    product = _product(choices, identities)
    if product is None:
        return None
    nodes = list(choices[0].input_nodes)
    try:
        problem = _problem(product, nodes[-2:], choices[0].layout)
    except KernelcastError:  # sizes or dtypes that the catalogue does not have
        return None
    if problem is None:
        return None
    return Choices(
        product=product,
        problem=problem,
        recorded=_recorded(product, problem),
        device=choices[0].layout.device,
        candidates=tuple(
            candidate_of(product, identity, str(choice.name), _group_m(choice))
            for choice, identity in zip(choices, identities, strict=True)
        ),
        library=tuple(identity in product.library for identity in identities),
    )


def _product(choices: Sequence[Any], identities: Sequence[str]) -> Product | None:
    """By the library's choice if there is one, else by the templates and the number of operands."""
    named = [product for product in PRODUCTS if not set(product.library).isdisjoint(identities)]
    if not named:
        templates = {template_of(str(choice.name)) for choice in choices} - {""}
        operands = len(choices[0].input_nodes) if choices else 0
        # With a bias there are three operands.
        wanted = {("mm", 2): "mm", ("mm", 3): "addmm", ("bmm", 2): "bmm", ("bmm", 3): "baddbmm"}
        names = {wanted.get((template, operands)) for template in templates & {"mm", "bmm"}}
        named = [product for product in PRODUCTS if product.name in names]
    return named[0] if len(named) == 1 else None


def _group_m(choice: Any) -> int:
    """Rows of tiles in a group of a Triton template; it is in what the choice says of itself, since PyTorch 2.6."""
    said = choice.info_dict().get("GROUP_M")
    if type(said) is int and said > 0:
        return said
    found = _GROUP.search(str(choice.description))
    return int(found[1]) if found and int(found[1]) else GROUP_M


def _problem(product: Product, matrices: Sequence[Any], layout: Any) -> Problem | None:
    if len(matrices) != 2:
        return None
    schema = _SCHEMAS[product.operation]
    shapes = [numbers(matrix.get_size()) for matrix in matrices]
    strides = [numbers(matrix.get_stride()) for matrix in matrices]
    dtypes = [str(matrix.get_dtype()).removeprefix("torch.") for matrix in matrices]
    batched = product.operation == "batched_gemm"
    if {len(each) for each in (*shapes, *strides)} != {3 if batched else 2}:
        return None
    mixed = product.operation == "mixed_gemm"
    if (not mixed and dtypes[0] != dtypes[1]) or str(layout.dtype).removeprefix("torch.") != dtypes[0]:
        return None
    (*lead, m, k), (*lead_b, k_b, n) = shapes
    if k != k_b or lead != lead_b:
        return None
    values: dict[str, Any] = {"m": m, "n": n, "k": k}
    layouts = [
        matrix_layout(shape[-2], shape[-1], stride[-2], stride[-1])
        for shape, stride in zip(shapes, strides, strict=True)
    ]
    if layouts[0] is None or layouts[1] is None:
        return None
    values |= {"layout": layouts[0][0] + layouts[1][0], "lda": layouts[0][1], "ldb": layouts[1][1]}
    if batched:
        shared = [
            _shared(shape, stride, found)
            for shape, stride, found in zip(shapes, strides, layouts, strict=True)
        ]
        if None in shared or all(shared):
            return None
        values |= {"batch": lead[0], "broadcast": "a" if shared[0] else "b" if shared[1] else "none"}
    if mixed:
        values["weight_dtype"] = dtypes[1]
    on_cpu = layout.device.type == "cpu"
    return schema.problem(
        dtype=dtypes[0],
        allow_tf32=not on_cpu and tf32_allowed("matmul"),
        threads=default_threads() if on_cpu else 0,
        **values,
    )


def _shared(shape: Sequence[int], stride: Sequence[int], layout: tuple[str, int] | None) -> bool | None:
    """Whether a batch is one matrix over and over; None where its matrices do not lie one after the other."""
    if layout is None:
        return None
    letter, leading = layout
    rows, adjacent = (shape[2], shape[1]) if letter == "t" else (shape[1], shape[2])
    if shape[0] == 1 or stride[0] == rows * (leading or adjacent):
        return False
    return True if stride[0] == 0 else None


def _recorded(product: Product, problem: Problem) -> Problem:
    """A timing with a bias is none of the product alone: it is recorded under the name that Inductor has for it."""
    if product.name not in ("addmm", "baddbmm"):
        return problem
    return Problem(
        operation=product.name,
        dims=problem.dims,
        dtype=problem.dtype,
        options=problem.options,
        allow_tf32=problem.allow_tf32,
        threads=problem.threads,
    )


def numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Sizes or strides as numbers: symbols of a dynamic shape get the values that Inductor times with.

    Raises:
        Exception: whatever Inductor raises for a symbol without a value.
    """
    values = tuple(values)
    if all(type(value) is int for value in values):
        return values
    from torch._inductor.virtualized import V

    sizes = V.graph.sizevars
    # One name since PyTorch 2.10, the other before.
    hints = getattr(sizes, "optimization_hints", None) or sizes.size_hints
    return tuple(int(value) for value in hints(values))
