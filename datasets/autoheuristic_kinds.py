"""What AutoHeuristic files measure: the features of each kind, as a problem, and its choices, as candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelcast.kernels import Candidate, Problem
from kernelcast.kernels.inductor_names import tile
from kernelcast.kernels.ops.gemm.schema import GEMM, matrix_layout
from kernelcast.kernels.ops.mixed_gemm.schema import MIXED_GEMM
from kernelcast.kernels.problem import DTYPE_BYTES, MAX_DIMENSION, OptionValue

_STRIDES = ("mat1_stride_0", "mat1_stride_1", "mat2_stride_0", "mat2_stride_1")
_DTYPES = ("mat1_dtype", "mat2_dtype")
_CONTIGUOUS = ("mat1_iscontig", "mat2_iscontig")
_PADDING = ("m_padded_length", "k_padded_length", "n_padded_length", "mat1_align_size", "mat2_align_size")
_PREPADDED = ("prepadded_mat1", "prepadded_mat2")


class RowError(ValueError):
    """A row's features cannot be what was measured; the text says why."""


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        numerical: features that are whole numbers.
        categorical: features that are words.
        problem: the features of a row -> its problem. Raises :class:`RowError`.
        candidate: a choice -> its candidate, or None if it is not known.
        choices: the choices that are known, in words.
    """

    numerical: tuple[str, ...]
    categorical: tuple[str, ...]
    problem: Callable[[Mapping[str, Any]], Problem]
    candidate: Callable[[str], Candidate | None]
    choices: str


def _layouts(facts: Mapping[str, Any]) -> dict[str, OptionValue]:
    """``layout``, ``lda`` and ``ldb`` of the two matrices of a row."""
    letters, leading = "", []
    for matrix, rows, columns in (("mat1", "m", "k"), ("mat2", "k", "n")):
        size = facts[rows], facts[columns]
        strides = facts[f"{matrix}_stride_0"], facts[f"{matrix}_stride_1"]
        layout = matrix_layout(*size, *strides)
        if layout is None:
            raise RowError(
                f"a matrix of {size[0]} x {size[1]} has the strides {strides}: neither its rows nor its columns are one "
                "after the other."
            )
        letter, stride = layout
        letters += letter
        leading.append(stride)
        name = f"{matrix}_iscontig"
        if name in facts:
            # As torch says it: the strides of a row-major matrix, whatever those of dimensions of size 1.
            contiguous = (strides[1] == 1 or size[1] == 1) and (strides[0] == size[1] or size[0] == 1)
            if _flag(facts, name) != contiguous:
                raise RowError(
                    f"{name} is {facts[name]}, but a matrix of {size[0]} x {size[1]} with the strides {strides} is"
                    f"{'' if contiguous else ' not'} contiguous."
                )
    return {"layout": letters, "lda": leading[0], "ldb": leading[1]}


def _dims(facts: Mapping[str, Any], names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    for name in names:
        if not 0 < facts[name] < MAX_DIMENSION:
            raise RowError(f"{name} is {facts[name]}; it must be at least 1 and below 2**40.")
    return tuple((name, facts[name]) for name in names)


def _dtype(facts: Mapping[str, Any], name: str) -> str:
    dtype = facts[name].removeprefix("torch.")
    if dtype == facts[name] or dtype not in DTYPE_BYTES:
        known = ", ".join(f"torch.{known}" for known in DTYPE_BYTES)
        raise RowError(f"{name} is {facts[name]!r}; it must be one of {known}.")
    return dtype


def _one_dtype(facts: Mapping[str, Any]) -> str:
    first, second = (_dtype(facts, name) for name in _DTYPES)
    if first != second:
        raise RowError(f"mat1_dtype is {first} and mat2_dtype {second}; they must be one dtype.")
    return first


def _flag(facts: Mapping[str, Any], name: str) -> bool:
    if facts[name] not in ("True", "False"):
        raise RowError(f"{name} is {facts[name]!r}; it must be True or False.")
    return bool(facts[name] == "True")


def _tf32(facts: Mapping[str, Any], dtype: str) -> bool:
    value = facts["using_tf32"]
    allowed = ("True", "False") if dtype == "float32" else ("not_float_32",)
    if value not in allowed:
        raise RowError(
            f"using_tf32 is {value!r} where the dtype is {dtype}; it must be {' or '.join(allowed)}."
        )
    return bool(value == "True")


def _mm(facts: Mapping[str, Any]) -> Problem:
    dtype = _one_dtype(facts)
    values: dict[str, Any] = {**dict(_dims(facts, ("m", "n", "k"))), **_layouts(facts)}
    return GEMM.problem(dtype=dtype, allow_tf32=_tf32(facts, dtype), **values)


def _mixed_mm(facts: Mapping[str, Any]) -> Problem:
    """The kernels that were measured have no scales: n numbers and one product for each element of C less than ours."""
    weight_dtype = _dtype(facts, "mat2_dtype")
    values: dict[str, Any] = {**dict(_dims(facts, ("m", "n", "k"))), **_layouts(facts)}
    return MIXED_GEMM.problem(dtype=_dtype(facts, "mat1_dtype"), weight_dtype=weight_dtype, **values)


def _pad_mm(facts: Mapping[str, Any]) -> Problem:
    dtype = _one_dtype(facts)
    return Problem(
        operation="pad_mm",
        dims=_dims(facts, ("m", "n", "k")),
        dtype=dtype,
        options=(
            *_layouts(facts).items(),
            *((name, facts[name]) for name in _PADDING),
            *((name, _flag(facts, name)) for name in _PREPADDED),
        ),
        allow_tf32=_tf32(facts, dtype),
    )


_FLEX_DIMS = ("b", "h", "m", "n", "kv_seq_length")
_FLEX_OPTIONS = (
    "q_stride_0",
    "q_stride_1",
    "q_stride_2",
    "q_stride_3",
    "subgraph_num_nodes",
    "subgraph_num_args_used",
)


def _flex_attention(facts: Mapping[str, Any]) -> Problem:
    return Problem(
        operation="flex_attention",
        dims=_dims(facts, _FLEX_DIMS),
        dtype=_dtype(facts, "dtype"),
        options=tuple((name, facts[name]) for name in _FLEX_OPTIONS),
    )


def _matmul_choice(extern: str) -> Callable[[str], Candidate | None]:
    def candidate(choice: str) -> Candidate | None:
        if choice == extern:
            return Candidate.of("vendor")
        config = tile(choice, over_k=True)
        return None if config is None else Candidate.of("triton_tiled", config)

    return candidate


def _flex_choice(choice: str) -> Candidate | None:
    config = tile(choice, over_k=False)
    return None if config is None else Candidate.of("triton_flex", config)


def _pad_choice(choice: str) -> Candidate | None:
    return {"orig": Candidate.of("vendor"), "pad": Candidate.of("pad")}.get(choice)


_TRITON_WORDS = "type=triton_BLOCK-M=.._BLOCK-K=.._BLOCK-N=.._numstages=.._numwarps=.."

KINDS = {
    "mm": Kind(
        ("m", "k", "n", *_STRIDES),
        (*_DTYPES, *_CONTIGUOUS, "using_tf32"),
        _mm,
        _matmul_choice("extern_mm"),
        f"extern_mm or {_TRITON_WORDS}",
    ),
    "mixed_mm": Kind(
        ("m", "k", "n", *_STRIDES),
        (*_DTYPES, *_CONTIGUOUS),
        _mixed_mm,
        _matmul_choice("extern_fallback_mixed_mm"),
        f"extern_fallback_mixed_mm or {_TRITON_WORDS}",
    ),
    "pad_mm": Kind(
        ("m", "k", "n", *_STRIDES, *_PADDING),
        (*_DTYPES, *_PREPADDED, "using_tf32"),
        _pad_mm,
        _pad_choice,
        "orig or pad",
    ),
    "flex_attention": Kind(
        (*_FLEX_DIMS, *_FLEX_OPTIONS),
        ("dtype",),
        _flex_attention,
        _flex_choice,
        f"{_TRITON_WORDS} with BLOCK-K=-1",
    ),
}
