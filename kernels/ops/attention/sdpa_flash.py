"""torch's flash attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.ops.attention import sdpa_pieces as pieces
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant

if TYPE_CHECKING:
    import torch


@register_variant("attention")
class SdpaFlash(pieces.FusedVariant):
    """The FLASH_ATTENTION backend of ``scaled_dot_product_attention``: FlashAttention-2, on AMD's chips AOTriton's."""

    name = "sdpa_flash"
    doc = "scaled_dot_product_attention with the FLASH_ATTENTION backend"
    rules = (
        pieces.gpu_rule(
            "on a CPU torch's default is its flash kernel already, wherever that works: the same candidate twice"
        ),
        pieces.architecture_rule(80, 121, amd=True),
        pieces.SIXTEEN_BITS,
        pieces.head_dim_rule(256),
        pieces.SQUARE_MASK,
        pieces.NOT_EMPTY,
        pieces.GRID,
    )
    source_modules = (pieces.__name__,)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.backends.cuda import can_use_flash_attention

        return pieces.checked(problem, "flash attention", can_use_flash_attention, operator(problem))


def operator(problem: Problem) -> Launcher:
    """The operator behind the backend. It takes grouped heads as they are."""
    import torch

    causal = problem["causal"]
    attend = torch.ops.aten._scaled_dot_product_flash_attention

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(q, k, v, is_causal=causal)[0]
        return out

    return run
