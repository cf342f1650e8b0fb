"""What a batched_gemm problem is made of, and helpers that its variants share."""

from __future__ import annotations

from dataclasses import replace

from kernelcast.kernels.ops.gemm.schema import GEMM, GemmSchema, operand_dims
from kernelcast.kernels.problem import Dim, Option, OptionValue, Problem

#: Which operand is one matrix for the whole batch.
BROADCASTS = ("none", "a", "b")


class BatchedGemmSchema(GemmSchema):
    """The schema of batched_gemm: as gemm's, and a batch of at most one matrix broadcasts nothing."""

    __slots__ = ()

    def problem(
        self, *, dtype: str = "float32", allow_tf32: bool = False, threads: int = 0, **values: OptionValue
    ) -> Problem:
        """As :meth:`GemmSchema.problem`; with ``batch`` of 0 or 1, ``broadcast`` becomes ``"none"``.

        Raises:
            InvalidProblemError: also where a leading dimension is smaller than the row that it must hold.
        """
        built = super().problem(dtype=dtype, allow_tf32=allow_tf32, threads=threads, **values)
        if built["batch"] > 1 or built["broadcast"] == "none":
            return built
        return replace(built, options=tuple({**dict(built.options), "broadcast": "none"}.items()))


BATCHED_GEMM = BatchedGemmSchema(
    operation="batched_gemm",
    dims=(Dim("batch", "products"), *GEMM.dims),
    dtypes=GEMM.dtypes,
    options=(
        *GEMM.options,
        Option(
            "broadcast",
            "the operand that is one matrix for the whole batch (an expanded view), if any",
            default="none",
            choices=BROADCASTS,
        ),
    ),
)


def copies(problem: Problem) -> tuple[int, int]:
    """Matrices that are stored of A and of B: one where an operand is broadcast."""
    batch, broadcast = int(problem["batch"]), problem["broadcast"]
    return (1 if broadcast == "a" else batch), (1 if broadcast == "b" else batch)


def batch_strides(problem: Problem) -> tuple[int, int]:
    """Elements from one matrix to the next, of A and of B; 0 where an operand is broadcast.

    The matrices of a batch lie one after the other, each with as many elements as its leading dimension makes.
    """
    strides = []
    for (rows, columns, transposed, leading), name in zip(operand_dims(problem), "ab", strict=True):
        stored_rows = columns if transposed else rows
        strides.append(0 if problem["broadcast"] == name else stored_rows * leading)
    return strides[0], strides[1]


def output_elements(problem: Problem) -> int:
    """Elements of the output."""
    return int(problem["batch"]) * int(problem["m"]) * int(problem["n"])
