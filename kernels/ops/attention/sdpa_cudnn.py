"""cuDNN's attention, through torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.ops.attention import sdpa_pieces as pieces
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule

if TYPE_CHECKING:
    import torch


@register_variant("attention")
class SdpaCudnn(pieces.FusedVariant):
    """The CUDNN_ATTENTION backend of ``scaled_dot_product_attention``.

    Which plans there are depends on the installed cuDNN too: where it has none, the call raises its error.
    """

    name = "sdpa_cudnn"
    doc = "scaled_dot_product_attention with the CUDNN_ATTENTION backend"
    rules = (
        pieces.gpu_rule("torch has this kernel on GPUs alone"),
        # torch lets later chips pass too, for which not every version of cuDNN has plans.
        pieces.architecture_rule(80, 109, amd=False),
        pieces.SIXTEEN_BITS,
        # Later versions take up to 256, on compute capability 9.0 and 10.x.
        pieces.head_dim_rule(128),
        pieces.SQUARE_MASK,
        Rule(
            "several-keys",
            "cuDNN has no plan for a single key",
            check=lambda problem, columns, device: problem["kv_len"] > 1,
            explain=lambda problem, columns, device: f"kv_len={problem['kv_len']}",
        ),
        pieces.NOT_EMPTY,
        pieces.GRID,
    )
    source_modules = (pieces.__name__,)

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.backends.cuda import can_use_cudnn_attention

        return pieces.checked(problem, "cuDNN's attention", can_use_cudnn_attention, operator(problem))


def operator(problem: Problem) -> Launcher:
    """The operator behind the backend, without the sums of exponentials that only training needs.

    It takes grouped heads as they are.
    """
    import torch

    causal = problem["causal"]
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(q, k, v, None, False, is_causal=causal)[0]
        return out

    return run
