"""Softmax from torch calls: the pieces that several variants are composed of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stored(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, int]:
    """The contiguous tensor that holds ``x`` [rows, columns], and the dimension of it along which rows run."""
    return (x, 1) if layout == "row" else (x.t(), 0)


def compose_into(out: torch.Tensor, x: torch.Tensor, dim: int, *, multiply: bool = False) -> None:
    """Write the softmax of ``x`` along ``dim`` into ``out`` of its shape and dtype, from single torch calls.

    float32 works in ``out`` itself; 16 bits in a float32 copy, for differences and exponentials rounded to 16 bits would
    each cost the accuracy that the output has.
    """
    import torch

    peak = x.amax(dim, keepdim=True)
    if x.dtype == torch.float32:
        weights = torch.sub(x, peak, out=out)
    else:
        weights = x - peak.float()
    weights.exp_()
    total = weights.sum(dim, keepdim=True)
    if multiply:
        torch.mul(weights, total.reciprocal_(), out=out)
    else:
        torch.div(weights, total, out=out)
