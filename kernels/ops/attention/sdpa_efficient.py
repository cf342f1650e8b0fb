"""torch's memory-efficient attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.ops.attention import sdpa_pieces as pieces
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import DTYPE_SUPPORTED

if TYPE_CHECKING:
    import torch


def _grouped(problem: Problem) -> bool:
    return problem["heads"] != problem["kv_heads"]


@register_variant("attention")
class SdpaEfficient(pieces.FusedVariant):
    """The EFFICIENT_ATTENTION backend of ``scaled_dot_product_attention``: CUTLASS, on AMD's chips AOTriton's.

    The kernel has no grouped heads in every version of torch. Without a mask none are needed: the queries of the heads that
    share keys are more queries of one head, in the same memory.
    """

    name = "sdpa_efficient"
    doc = "scaled_dot_product_attention with the EFFICIENT_ATTENTION backend"
    rules = (
        pieces.gpu_rule("torch has this kernel on GPUs alone"),
        pieces.architecture_rule(50, 121, amd=True),
        DTYPE_SUPPORTED,
        Rule(
            "heads-alike",
            "not every version of the kernel takes grouped heads, and as more queries of one head they would not be masked "
            "right",
            check=lambda problem, columns, device: not (problem["causal"] and _grouped(problem)),
            explain=lambda problem, columns, device: (
                f"causal=True, heads={problem['heads']}, kv_heads={problem['kv_heads']}"
            ),
        ),
        Rule(
            "mask-aligned",
            "on AMD's chips a causal mask is known to be aligned at the top left only where queries and keys are as many",
            check=lambda problem, columns, device: (
                device.vendor != "amd" or not problem["causal"] or problem["q_len"] == problem["kv_len"]
            ),
            explain=lambda problem, columns, device: f"q_len={problem['q_len']}, kv_len={problem['kv_len']}",
        ),
        pieces.head_dim_rule(None),
        pieces.NOT_EMPTY,
        pieces.GRID,
    )
    source_modules = (pieces.__name__, "kernelcast.kernels.triton_rules")

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.backends.cuda import can_use_efficient_attention

        return pieces.checked(
            problem,
            "memory-efficient attention",
            can_use_efficient_attention,
            operator(problem),
            fold_groups=_grouped(problem),
        )


def operator(problem: Problem) -> Launcher:
    """The operator behind the backend, without the sums of exponentials that only training needs."""
    import torch

    causal = problem["causal"]
    attend = torch.ops.aten._scaled_dot_product_efficient_attention

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(q, k, v, None, False, is_causal=causal)[0]
        return out

    return run
