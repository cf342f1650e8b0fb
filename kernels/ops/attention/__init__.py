"""attention: out = softmax(q k^T / sqrt(head_dim)) v, for every head of every sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.ops.attention.pieces import reach
from kernelcast.kernels.ops.attention.schema import (
    ATTENTION,
    attention_tolerance,
    pair_flops,
    visible_pairs,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_operation

if TYPE_CHECKING:
    import torch


@register_operation
class Attention(Operation):
    """Scaled dot-product attention, as ``torch.nn.functional.scaled_dot_product_attention`` defines it.

    q is [batch, heads, q_len, head_dim]; k and v are [batch, kv_heads, kv_len, head_dim]; the output has q's shape. All
    are contiguous. Head h of q reads head h // (heads / kv_heads) of k and v.
    """

    name = "attention"
    doc = "softmax(q k^T / sqrt(head_dim)) v, grouped-query and causal where asked"
    schema = ATTENTION

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """q, k and v, contiguous and standard normal."""
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)
        batch, head_dim = problem["batch"], problem["head_dim"]
        query = (batch, problem["heads"], problem["q_len"], head_dim)
        key = (batch, problem["kv_heads"], problem["kv_len"], head_dim)
        dtype = getattr(torch, problem.dtype)
        return tuple(
            torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype=dtype, device=device)
            for shape in (query, key, key)
        )

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        import torch

        q, k, v = (tensor.double() for tensor in inputs)
        out = torch.empty_like(q)
        group = problem["heads"] // problem["kv_heads"]
        rows = torch.arange(problem["q_len"], device=q.device)[:, None]
        hidden = torch.arange(problem["kv_len"], device=q.device)[None, :] > rows
        # Head by head: the scores of all at once in float64 may not fit in memory.
        for sequence in range(problem["batch"]):
            for head in range(problem["heads"]):
                scores = q[sequence, head] @ k[sequence, head // group].t() / math.sqrt(problem["head_dim"])
                if problem["causal"]:
                    scores = scores.masked_fill(hidden, -math.inf)
                out[sequence, head] = torch.softmax(scores, -1) @ v[sequence, head // group]
        return out

    def tolerance(self, problem: Problem) -> Tolerance:
        """Of the row that sees the fewest keys; :meth:`check` is stricter where more are seen."""
        return attention_tolerance(problem, 1 if problem["causal"] else problem["kv_len"])

    def check(self, problem: Problem, reference: torch.Tensor, output: torch.Tensor) -> str | None:
        """As :meth:`Operation.check`, and causal rows once more, each band by the keys that it sees.

        An average over many keys is small, so what the first row may be off by would hide lost keys in a later one.
        """
        wrong = super().check(problem, reference, output)
        if wrong or not problem["causal"]:
            return wrong
        first = 1
        while first < problem["q_len"]:
            end = min(2 * first, problem["q_len"])
            # Row `first` is the band's earliest and sees first + 1 keys: as many as an unmasked problem of that length.
            keys = min(first + 1, problem["kv_len"])
            dims = {**dict(problem.dims), "q_len": end - first, "kv_len": keys}
            band = self.schema.problem(dtype=problem.dtype, allow_tf32=problem.allow_tf32, **dims)
            wrong = super().check(band, reference[:, :, first:end], output[:, :, first:end])
            if wrong:
                return f"in query rows {first} to {end - 1}: {wrong}"
            first = end
        return None

    def flops(self, problem: Problem) -> float:
        """4 head_dim + 5 for each pair of query and key that the mask leaves: two products and the softmax."""
        return float(pair_flops(problem, visible_pairs(problem)))

    def traffic_bytes(self, problem: Problem) -> float:
        """q and the output once, and of k and v the keys that some query sees."""
        queries = problem["heads"] * problem["q_len"]
        keys = problem["kv_heads"] * reach(problem)
        return 2.0 * problem.element_bytes * problem["batch"] * (queries + keys) * problem["head_dim"]


# One line a variant.
from kernelcast.kernels.ops.attention import (  # noqa: E402
    materialised,  # noqa: F401
    math_backend,  # noqa: F401
    online_chunked,  # noqa: F401
    per_head,  # noqa: F401
    query_chunked,  # noqa: F401
    sdpa_cudnn,  # noqa: F401
    sdpa_efficient,  # noqa: F401
    sdpa_flash,  # noqa: F401
    split_kv,  # noqa: F401
    triton_flash,  # noqa: F401
    triton_short,  # noqa: F401
    triton_split_kv,  # noqa: F401
    vendor,  # noqa: F401
)
