"""What a softmax problem is made of, and the counts and rules that its variants share."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Tolerance
from kernelcast.kernels.ops.gemm.schema import UNIT_ROUNDOFF
from kernelcast.kernels.problem import Dim, Option, Problem, ProblemSchema
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount

SOFTMAX = ProblemSchema(
    operation="softmax",
    dims=(
        Dim("rows", "rows, each with a softmax of its own"),
        Dim("columns", "elements of a row", minimum=1),
    ),
    dtypes=("float32", "float16", "bfloat16"),
    options=(
        Option(
            "layout",
            "of input and output: row where a row's elements are adjacent, column where a column's are (transposed)",
            default="row",
            choices=("row", "column"),
        ),
    ),
)

#: Floating-point operations for one element: maximum, subtraction, exponential, addition, division.
ELEMENT_FLOPS = 5.0

#: Passes over a piece when the softmax is composed: the maximum reads it, the subtraction reads it and writes another,
#: the exponential and the division each read and write that, the sum reads it.
COMPOSED_PASSES = 8.0

#: Temporaries beyond this may not fit beside the model that a process serves.
MAX_SCRATCH_BYTES = 2**31

#: Steps of a loop in Python; each launches several calls of some microseconds.
MAX_STEPS = 512


def scratch_rule(scratch_bytes: Callable[[Problem, Columns], Amount]) -> Rule:
    """At most :data:`MAX_SCRATCH_BYTES` of temporaries alive at once."""
    return Rule(
        "scratch-fits",
        "temporaries above 2 GiB may not fit beside the model that a process serves",
        check=lambda problem, columns, device: scratch_bytes(problem, columns) <= MAX_SCRATCH_BYTES,
        explain=lambda problem, columns, device: (
            f"{int(np.asarray(scratch_bytes(problem, columns)).flat[0])} bytes"
        ),
    )


def part_rule(dimension: str, whole: str) -> Rule:
    """A chunk is smaller than the dimension that it divides; ``whole`` names the variant that it would be else."""
    return Rule(
        "chunk-is-a-part",
        f"a chunk of all {dimension} is the {whole} variant",
        check=lambda problem, columns, device: columns["chunk"] < problem[dimension],
        explain=lambda problem, columns, device: (
            f"chunk={columns['chunk'][0]}, {dimension}={problem[dimension]}"
        ),
    )


def steps_rule(dimension: str) -> Rule:
    """At most :data:`MAX_STEPS` turns of the loop in Python."""
    return Rule(
        "steps-bounded",
        "each step launches calls from Python, so more than 512 of them cost more than they save",
        check=lambda problem, columns, device: steps(problem, columns, dimension) <= MAX_STEPS,
        explain=lambda problem, columns, device: f"{int(steps(problem, columns, dimension)[0])} steps",
    )


def steps(problem: Problem, columns: Columns, dimension: str) -> np.ndarray:
    """Chunks that a dimension is cut into."""
    return -(-problem[dimension] // columns["chunk"])


def cached_passes(device: Device, piece_bytes: Amount, passes: float) -> np.ndarray:
    """Passes that reach memory: one read and one write where a piece stays in the last-level cache, else all."""
    return np.where(piece_bytes <= device.llc_bytes, 2.0, passes)


def element_bytes(problem: Problem) -> float:
    """Bytes of the input or the output."""
    return float(problem.element_bytes) * problem["rows"] * problem["columns"]


def widened_bytes(problem: Problem, elements: Amount) -> Amount:
    """Bytes of the float32 copy of so many 16-bit elements; float32 needs none, the output holds it."""
    return 4.0 * elements if problem.element_bytes < 4 else 0.0 * elements


def softmax_tolerance(problem: Problem) -> Tolerance:
    """The tolerance of a softmax in float32, rounded to the output's dtype.

    An exponential of less than -104 is 0 in float32, so rounding the exponent x - max puts an exponential off by at most
    104 units, relatively, and the exponential itself by a few. The sum's terms are positive: adding n of them one after
    another is off by about sqrt(n / 3) units, for rounding errors add like square roots (Higham and Mary, SIAM J. Sci.
    Comput. 41, 2019); libraries that keep several partial sums do better. Of 16 bits, torch's own softmax rounds
    exponentials and results where rows are strided, which is 2 units of at most 4. The absolute part is the smallest
    normal number of the computation, or the distance between float16's numbers below its smallest normal one.
    """
    rounded = 4.0 * UNIT_ROUNDOFF[problem.dtype]
    summed = (128.0 + 2.0 * math.sqrt(problem["columns"])) * UNIT_ROUNDOFF["float32"]
    return Tolerance(
        relative=rounded + summed, absolute=2.0**-24 if problem.dtype == "float16" else 2.0**-126
    )
