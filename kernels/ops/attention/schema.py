"""What an attention problem is made of, and the counts and rules that its variants share.

Variants that loop reuse one buffer at every step. Their ``scratch_bytes`` counts it once, with the passes of one step:
it is meant to stay in cache, and ``inner_steps`` says how often it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.operation import Parameter, Tolerance
from kernelcast.kernels.ops.attention.pieces import reach
from kernelcast.kernels.ops.gemm.schema import UNIT_ROUNDOFF
from kernelcast.kernels.problem import Dim, Option, Problem, ProblemSchema
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount

#: Floating-point operations of the softmax for one score: maximum, subtraction, exponential, addition, division.
SOFTMAX_FLOPS = 5.0

#: Temporaries beyond this may not fit beside the model that a process serves.
MAX_SCRATCH_BYTES = 2**31

#: Steps of a loop in Python; each launches four calls or more of some microseconds.
MAX_STEPS = 512


class AttentionSchema(ProblemSchema):
    """The schema of attention: fills ``kv_heads`` and checks that it divides ``heads``."""

    __slots__ = ()

    def problem(
        self, *, dtype: str = "float32", allow_tf32: bool = False, threads: int = 0, **values: Any
    ) -> Problem:
        """As :meth:`ProblemSchema.problem`; ``kv_heads`` of 0, or none, becomes ``heads``.

        Raises:
            InvalidProblemError: also where ``kv_heads`` does not divide ``heads``.
        """
        if values.get("kv_heads", 0) == 0 and "heads" in values:
            values = {**values, "kv_heads": values["heads"]}
        problem = super().problem(dtype=dtype, allow_tf32=allow_tf32, threads=threads, **values)
        heads, kv_heads = problem["heads"], problem["kv_heads"]
        if heads % kv_heads:
            raise InvalidProblemError(
                f"attention: heads is {heads} and kv_heads is {kv_heads}; every head of k and v serves an equal group "
                "of q's, so kv_heads must divide heads."
            )
        return problem


ATTENTION = AttentionSchema(
    operation="attention",
    dims=(
        Dim("batch", "sequences"),
        Dim("heads", "heads of q", minimum=1),
        Dim("kv_heads", "heads of k and v, which divide heads; 0 means as many as heads", default=0),
        Dim("q_len", "queries a sequence"),
        Dim("kv_len", "keys a sequence", minimum=1),
        Dim("head_dim", "elements of a query, key or value", minimum=1),
    ),
    dtypes=("float32", "float16", "bfloat16"),
    options=(
        Option(
            "causal",
            "whether query i sees keys 0 to i alone (torch's is_causal: aligned at the top left)",
            default=False,
            choices=(False, True),
        ),
    ),
)

#: The dtype of products and softmax; ``input`` rounds 16-bit scores to 16 bits, as eager attention does.
COMPUTE = Parameter("compute", ("input", "float32"), "dtype of the scores and of both products")

COMPUTE_RULE = Rule(
    "compute-widens",
    "float32 inputs are computed in float32 already, so the candidate would be the same as compute=input",
    check=lambda problem, columns, device: (problem.element_bytes == 2) | (columns["compute"] == "input"),
    explain=lambda problem, columns, device: problem.dtype,
)


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


def steps_rule(steps: Callable[[Problem, Columns], np.ndarray | int]) -> Rule:
    """At most :data:`MAX_STEPS` turns of the loop in Python."""
    return Rule(
        "steps-bounded",
        "each step launches several calls from Python, so more than 512 of them cost more than they save",
        check=lambda problem, columns, device: steps(problem, columns) <= MAX_STEPS,
        explain=lambda problem, columns, device: f"{int(np.asarray(steps(problem, columns)).flat[0])} steps",
    )


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of one head that the mask leaves."""
    queries, keys = problem["q_len"], problem["kv_len"]
    if not problem["causal"]:
        return queries * keys
    triangle = min(queries, keys)
    return triangle * (triangle + 1) // 2 + (queries - triangle) * keys


def folded(problem: Problem) -> tuple[int, int]:
    """(independent products, query rows of each): a group of heads that share k and v is one product of more rows."""
    products = problem["batch"] * problem["kv_heads"]
    return products, problem["heads"] // problem["kv_heads"] * problem["q_len"]


def pair_flops(problem: Problem, pairs: Amount) -> Amount:
    """FLOPs over ``pairs`` (query, key) pairs of one head, for all heads: two products and the softmax."""
    return problem["batch"] * problem["heads"] * pairs * (4.0 * problem["head_dim"] + SOFTMAX_FLOPS)


def compute_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Bytes of one score, by the ``compute`` column."""
    return np.where(columns["compute"] == "float32", 4.0, float(problem.element_bytes))


def widened_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Bytes of the float32 copies of q, k, v and the output where ``compute`` asks for them; 0 elsewhere."""
    products, rows = folded(problem)
    elements = 2.0 * products * (rows + reach(problem)) * problem["head_dim"]
    widen = (columns["compute"] == "float32") & (problem.element_bytes < 4)
    return np.where(widen, 4.0 * elements, 0.0)


def attention_tolerance(problem: Problem, keys: int) -> Tolerance:
    """The tolerance of rows that see at least ``keys`` keys, on standard normal q, k and v.

    With weights p (which sum to 1), d = head_dim, u the unit roundoff of the narrowest dtype that an intermediate may
    have and w that of float32, which sums are accumulated in:

    - A score s is rounded to u, its weight is rounded to u, and the sum of d products in s adds up to sqrt(d) roundings
      to w: a weight is off by about (|s| + 1) u + sqrt(d) w, relatively. The output's error is the sum over the keys of
      p times that times v, of either sign, so its size is that times sqrt(sum of p^2). The constants cover the largest
      of millions of elements. Rounding scores to the input's dtype is what eager attention does, which the tests of
      flash attention take as their yardstick (Dao-AILab/flash-attention, tests/test_flash_attn.py: at most twice the
      error of the reference in the same precision).
    - The scores of one query are normal with variance |q|^2 / d, so p is log-normal, and sum of p^2 is about
      exp(|q|^2 / d) / keys, never above 1. |q|^2 is chi-squared with d degrees of freedom: at most
      d + 2 sqrt(12 d) + 24 but for a probability of exp(-12) (Laurent and Massart, Annals of Statistics 28, 2000,
      lemma 1).
    - Accumulating p v takes ``keys`` roundings to w of partial sums whose size is the output's, 1 / sqrt(keys), of
      either sign; rounding errors add like square roots (Higham and Mary, SIAM J. Sci. Comput. 41, 2019), which leaves
      w times a constant.
    - The output is rounded once: the relative part.
    """
    unit = UNIT_ROUNDOFF["tf32" if problem.allow_tf32 else problem.dtype]
    single = UNIT_ROUNDOFF["float32"]
    head_dim = problem["head_dim"]
    peakedness = math.exp(1.0 + 2.0 * math.sqrt(12.0 / head_dim) + 24.0 / head_dim)
    concentration = math.sqrt(peakedness / (keys + peakedness))
    weights = (16.0 * unit + 4.0 * math.sqrt(head_dim) * single) * concentration
    return Tolerance(relative=4.0 * unit, absolute=weights + 32.0 * single)
