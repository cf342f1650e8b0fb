"""Attention from torch calls: the pieces that several variants are composed of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernelcast.kernels.problem import Problem

if TYPE_CHECKING:
    import torch


def reach(problem: Problem) -> int:
    """The keys that some query sees: with a causal mask none beyond the last query; at least 1."""
    if problem["causal"]:
        return max(1, min(problem["q_len"], problem["kv_len"]))
    return int(problem["kv_len"])


def fold(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: int) -> tuple[torch.Tensor, ...]:
    """Views of q as [batch * kv_heads, group, q_len, head_dim], and of the first ``keys`` of k and v without a group.

    A group of heads that share k and v becomes more rows of one product, so that k and v are never repeated.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    products = batch * kv_heads
    return (
        q.reshape(products, heads // kv_heads, q_len, head_dim),
        k.reshape(products, kv_len, head_dim)[:, :keys],
        v.reshape(products, kv_len, head_dim)[:, :keys],
    )


def scores_into(scores: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    """Fill ``scores`` [n, rows, keys] with q k^T / sqrt(head_dim), scaled inside the product."""
    import torch

    torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=1.0 / math.sqrt(q.shape[-1]), out=scores)


def future(rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """A bool mask [rows, keys], True above the diagonal: where query i must not see key j > i."""
    import torch

    return torch.ones((rows, keys), dtype=torch.bool, device=device).triu_(1)
