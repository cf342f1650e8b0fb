"""torch's unfused attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.attention.schema import pair_flops, scratch_rule
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _scratch_bytes(problem: Problem, columns: Columns) -> float:
    """float32 scores before and after the softmax (and the mask), scaled q and k, k and v repeated over the group."""
    heads = float(problem["batch"]) * problem["heads"]
    scores = heads * problem["q_len"] * problem["kv_len"]
    operands = heads * (problem["q_len"] + 2 * problem["kv_len"]) * problem["head_dim"]
    return 4.0 * ((3 if problem["causal"] else 2) * scores + operands)


@register_variant("attention")
class Math(Variant):
    """The MATH backend of ``scaled_dot_product_attention``: products and softmax as separate calls, in float32.

    The operator behind ``sdpa_kernel(SDPBackend.MATH)`` is called directly: that context manager flips switches of the
    whole process, and two threads that leave it in the wrong order would leave them flipped.
    """

    name = "math"
    backend = "vendor"
    doc = "scaled_dot_product_attention with the MATH backend"
    rules = (scratch_rule(_scratch_bytes),)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        grouped = problem["heads"] != problem["kv_heads"]
        return Work(
            flops=pair_flops(problem, problem["q_len"] * problem["kv_len"]),
            traffic_bytes=operation("attention").traffic_bytes(problem),
            scratch_bytes=_scratch_bytes(problem, columns),
            # Two scalings, two products, a softmax; mask made and added; k and v repeated; three casts in, one out.
            calls=5.0 + 3.0 * problem["causal"] + 2.0 * grouped + 4.0 * (problem.element_bytes == 2),
            programs=problem["batch"] * problem["heads"],
            inner_steps=1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        causal = problem["causal"]
        grouped = problem["heads"] != problem["kv_heads"]
        attend = torch.ops.aten._scaled_dot_product_attention_math

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q, k, v, is_causal=causal, enable_gqa=grouped)[0].contiguous()

        return run
