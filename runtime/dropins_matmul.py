"""Drop-in matrix products beside :func:`kernelcast.matmul`: batched, with 8-bit weights, and by groups of rows.

They fall back to torch as those of :mod:`kernelcast.runtime.dropins` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Problem
from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.ops.gemm.schema import matrix_layout
from kernelcast.kernels.ops.grouped_gemm.schema import DISTRIBUTIONS
from kernelcast.kernels.ops.grouped_gemm.vendor import ALIGNMENT_BYTES, MOST_GROUPS, multiply_groups
from kernelcast.runtime.dispatch import DTYPES, launchers, pair_at, place, plain, rescue, resolve
from kernelcast.runtime.dropins_compiled import operator, traced, traced_alike
from kernelcast.runtime.dropins_problem import problem_for

_WEIGHT_DTYPES = {torch.int8: "int8", torch.uint8: "uint8"}
# Absent before torch 2.10.
_grouped_mm: Any = getattr(F, "grouped_mm", None)


def bmm(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """``torch.bmm``: [batch, m, k] @ [batch, k, n] -> [batch, m, n].

    One operand may be an expanded view of one matrix. torch's own for dtypes other than float32, float16 and bfloat16,
    and where the matrices of an operand do not lie one after the other, each with rows or columns of adjacent elements.
    """
    if pair_at(input, mat2) is not None:
        if (
            input.dim() == 3
            and mat2.dim() == 3
            and input.shape[0] == mat2.shape[0]
            and input.shape[2] == mat2.shape[1]
        ):
            return batched(input, mat2)
    elif traced_alike(input, mat2) and input.dim() == 3 and mat2.dim() == 3:
        return _BMM(input, mat2)
    return torch.bmm(input, mat2)


def batched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The selected batched product of eligible tensors [batch, m, k] and [batch, k, n]."""
    key = ("batched_gemm", a.shape, b.shape, a.stride(), b.stride(), a.dtype, place(a))
    launch = launchers.get(key)
    if launch is None:
        launch = resolve(key, (a, b), torch.bmm, lambda: _batched_problem(a, b))
    try:
        return launch(a, b)
    except Exception as error:  # noqa: BLE001 - see rescue
        return rescue(key, launch, error)(a, b)


def mixed_matmul(a: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``a @ (weight.to(a.dtype) * scale)`` with a weight of int8 or uint8: [..., m, k] @ [k, n] -> [..., m, n].

    ``scale`` [n], one factor a column of the weight, has the dtype of ``a``. Leading dimensions are folded into rows
    where ``a`` is contiguous. The expression above runs in torch for other ranks and dtypes, scales whose elements are
    not adjacent, and matrices of which no dimension is adjacent in memory.
    """
    if plain(a, weight, scale):
        if (
            weight.dtype in _WEIGHT_DTYPES
            and a.dtype in DTYPES
            and scale.dtype is a.dtype
            and weight.dim() == 2
            and scale.dim() == 1
            and scale.shape[0] == weight.shape[1]
            and scale.is_contiguous()
            and a.dim() >= 2
            and a.shape[-1] == weight.shape[0]
            and (a.dim() == 2 or a.is_contiguous())
        ):
            key = (
                "mixed_gemm", a.shape, weight.shape, a.stride(), weight.stride(), a.dtype, weight.dtype, place(a),
            )  # fmt: skip
            launch = launchers.get(key)
            if launch is None:
                launch = resolve(
                    key,
                    (a, weight, scale),
                    _mixed_own,
                    lambda: _mixed_problem(a, weight),
                    folded(a.shape, weight.shape[1]),
                )
            try:
                return launch(a, weight, scale)
            except Exception as error:  # noqa: BLE001 - see rescue
                return rescue(key, launch, error)(a, weight, scale)
    elif (
        traced(a, weight, scale)
        and weight.dtype in _WEIGHT_DTYPES
        and a.dtype in DTYPES
        and scale.dtype is a.dtype
        and (weight.dim(), scale.dim()) == (2, 1)
        and a.dim() >= 2
    ):
        return _MIXED_MATMUL(a, weight, scale)
    return _mixed_own(a, weight, scale)


def grouped_matmul(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *, distribution: str = "random"
) -> torch.Tensor:
    """``torch.nn.functional.grouped_mm`` of rows sorted by group: [m, k] by [groups, k, n] -> [m, n].

    torch's own for other ranks and dtypes, ``a`` whose rows have gaps or are columns, ``b`` that is neither contiguous
    nor a contiguous tensor [groups, n, k] transposed, and offsets that are not contiguous. That is one product a group
    where torch has no ``grouped_mm`` (before 2.10), and where it does not take the operands: their rows, and those of the
    result, must be multiples of 16 bytes.

    Args:
        a: the rows, those of a group one after the other.
        b: a matrix for each group.
        offs: int32 [groups]: the row at which each group ends, never decreasing, the last equal to m. They are never
            read to choose, and not checked.
        distribution: what the choice may take for granted on the rows of the groups: ``"balanced"``, ``"random"`` (each
            row goes to any group) or ``"skewed"``. The result does not depend on it.

    Raises:
        InvalidProblemError: an unknown distribution.
    """
    if distribution not in DISTRIBUTIONS:
        raise InvalidProblemError(
            f"grouped_matmul: distribution is {distribution!r}; it must be one of {', '.join(DISTRIBUTIONS)}."
        )
    if plain(a, b, offs):
        if _well_formed(a, b, offs) and a.stride() == (a.shape[1], 1) and offs.is_contiguous():
            key = (
                "grouped_gemm", a.shape, b.shape, b.stride(), a.dtype, distribution, place(a),
            )  # fmt: skip
            launch = launchers.get(key)
            if launch is None:
                launch = resolve(
                    key, (a, b, offs), _grouped_own(a, b), lambda: _grouped_problem(a, b, distribution)
                )
            try:
                return launch(a, b, offs)
            except Exception as error:  # noqa: BLE001 - see rescue
                return rescue(key, launch, error)(a, b, offs)
    elif traced(a, b, offs) and _well_formed(a, b, offs):
        return _GROUPED_MATMUL(a, b, offs, distribution)
    return _grouped_anywhere(a, b, offs)


def folded(shape: torch.Size, columns: int) -> Callable[[Launcher], Launcher] | None:
    """An adapter for a launcher of one matrix product, whose first input has leading dimensions to fold into rows.

    Args:
        shape: of the first input; nothing is adapted if it is a matrix.
        columns: of the output.
    """
    if len(shape) == 2:
        return None
    rows, result = (math.prod(shape[:-1]), shape[-1]), (*shape[:-1], columns)

    def adapt(run: Launcher) -> Launcher:
        def launch(a: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return run(a.view(rows), *others).view(result)

        return launch

    return adapt


def rows_of(a: torch.Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Shape and strides of a tensor as the matrix that a launcher of :func:`folded` gets."""
    if not a.is_contiguous():
        return (a.shape[0], a.shape[1]), a.stride()
    # The strides of dimensions of size 1 may be anything, and mean nothing.
    return (math.prod(a.shape[:-1]), a.shape[-1]), (a.shape[-1], 1)


def _batched_problem(a: torch.Tensor, b: torch.Tensor) -> Problem | None:
    of_a, of_b = _stacked(a), _stacked(b)
    if of_a is None or of_b is None or (of_a[2] and of_b[2]):
        return None
    (letter_a, lda, shared_a), (letter_b, ldb, shared_b) = of_a, of_b
    return problem_for(
        "batched_gemm", a, batch=a.shape[0], m=a.shape[1], k=a.shape[2], n=b.shape[2], layout=letter_a + letter_b,
        lda=lda, ldb=ldb, broadcast="a" if shared_a else "b" if shared_b else "none",
    )  # fmt: skip


def _stacked(tensor: torch.Tensor) -> tuple[str, int, bool] | None:
    """Layout and leading dimension of each matrix of a batch, and whether it is the same one; None for other batches."""
    (batch, rows, columns), (distance, *strides) = tensor.shape, tensor.stride()
    found = matrix_layout(rows, columns, strides[0], strides[1])
    if found is None:
        return None
    letter, leading = found
    stored_rows, adjacent = (columns, rows) if letter == "t" else (rows, columns)
    if batch == 1 or distance == stored_rows * (leading or adjacent):
        return letter, leading, False
    return (letter, leading, True) if distance == 0 else None


def _mixed_own(a: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return a @ (weight.to(a.dtype) * scale)


def _mixed_problem(a: torch.Tensor, weight: torch.Tensor) -> Problem | None:
    (m, k), strides = rows_of(a)
    of_a, of_b = matrix_layout(m, k, *strides), matrix_layout(*weight.shape, *weight.stride())
    if of_a is None or of_b is None:
        return None
    (letter_a, lda), (letter_b, ldb) = of_a, of_b
    return problem_for(
        "mixed_gemm", a, m=m, k=k, n=weight.shape[1], weight_dtype=_WEIGHT_DTYPES[weight.dtype],
        layout=letter_a + letter_b, lda=lda, ldb=ldb,
    )  # fmt: skip


def _well_formed(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> bool:
    return (
        a.dim() == 2
        and b.dim() == 3
        and offs.dim() == 1
        and offs.dtype is torch.int32
        and b.dtype is a.dtype
        and a.dtype in DTYPES
        and a.shape[1] == b.shape[1]
        and offs.shape[0] == b.shape[0]
    )


def _grouped_problem(a: torch.Tensor, b: torch.Tensor, distribution: str) -> Problem | None:
    if b.is_contiguous():
        layout = "nn"
    elif b.transpose(1, 2).is_contiguous():
        layout = "nt"
    else:
        return None
    return problem_for(
        "grouped_gemm", a, groups=b.shape[0], m=a.shape[0], k=a.shape[1], n=b.shape[2], layout=layout,
        distribution=distribution,
    )  # fmt: skip


def _grouped_mm_takes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's grouped_mm takes the sizes and strides of well-formed operands; see the default of grouped_gemm."""
    (m, k), (groups, _, n) = a.shape, b.shape
    size = a.element_size()
    # A compiler has kernels for bfloat16 alone.
    return (
        _grouped_mm is not None
        and (a.dtype is torch.bfloat16 or not torch.compiler.is_compiling())
        and min(m, n, k) > 0
        and groups <= MOST_GROUPS
        and k * size % ALIGNMENT_BYTES == 0
        and n * size % ALIGNMENT_BYTES == 0
        and a.stride() == (k, 1)
        and b.stride() in ((k * n, n, 1), (k * n, 1, k))
    )


def _aligned(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.compiler.is_compiling():
        return True
    try:
        return (a.data_ptr() | b.data_ptr()) % ALIGNMENT_BYTES == 0
    except RuntimeError:  # what torch wraps for a tracer or a transform has no address
        return True


def _grouped_own(a: torch.Tensor, b: torch.Tensor) -> Launcher:
    """What runs without kernelcast on tensors such as these; addresses are no part of a key."""
    if not _grouped_mm_takes(a, b):
        return multiply_groups

    def run(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return _grouped_mm(a, b, offs=offs) if _aligned(a, b) else multiply_groups(a, b, offs)

    return run


def _grouped_anywhere(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What runs without kernelcast, on any tensors: it can be differentiated and transformed."""
    well_formed = all(isinstance(each, torch.Tensor) for each in (a, b, offs)) and _well_formed(a, b, offs)
    # What is not well-formed is torch's to run or to refuse.
    if _grouped_mm is not None and (not well_formed or (_grouped_mm_takes(a, b) and _aligned(a, b))):
        return _grouped_mm(a, b, offs=offs)
    start, products = 0, []
    for end, matrix in zip(offs.tolist(), b.unbind(), strict=True):
        products.append(a[start:end] @ matrix)
        start = end
    # Rows beyond the last group belong to none. Products have another dtype than a under autocast.
    rest = (products or [a])[0].new_zeros(a.shape[0] - start, b.shape[2])
    return torch.cat([*products, rest])


_BMM = operator("bmm(Tensor input, Tensor mat2) -> Tensor", bmm, torch.bmm)
_MIXED_MATMUL = operator(
    "mixed_matmul(Tensor a, Tensor weight, Tensor scale) -> Tensor", mixed_matmul, _mixed_own
)
_GROUPED_MATMUL = operator(
    "grouped_matmul(Tensor a, Tensor b, Tensor offs, str distribution) -> Tensor",
    lambda a, b, offs, distribution: grouped_matmul(a, b, offs, distribution=distribution),
    lambda a, b, offs, distribution: a.new_empty((a.shape[0], b.shape[2])),
)
