"""Attention with all scores in memory, in few temporaries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.attention import pieces
from kernelcast.kernels.ops.attention.schema import (
    COMPUTE,
    COMPUTE_RULE,
    compute_bytes,
    folded,
    pair_flops,
    scratch_rule,
    widened_bytes,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _scores_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    products, rows = folded(problem)
    return compute_bytes(problem, columns) * products * rows * pieces.reach(problem)


def _scratch_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    mask = problem["q_len"] * pieces.reach(problem) if problem["causal"] else 0
    return _scores_bytes(problem, columns) + mask + widened_bytes(problem, columns)


@register_variant("attention")
class Materialised(Variant):
    """One batched product for all scores, a softmax in place, one batched product with v.

    Fast while the scores stay in cache: short sequences, and few queries against many keys. A causal mask saves nothing.
    """

    name = "materialised"
    backend = "torch"
    doc = "baddbmm, softmax in place, bmm over all scores at once"
    parameters = (COMPUTE,)
    rules = (COMPUTE_RULE, scratch_rule(_scratch_bytes))
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        widened = widened_bytes(problem, columns)
        return Work(
            flops=pair_flops(problem, problem["q_len"] * pieces.reach(problem)),
            traffic_bytes=operation("attention").traffic_bytes(problem),
            # The product writes the scores, the softmax reads and writes them, the product reads them: twice each.
            scratch_bytes=_scratch_bytes(problem, columns) + _scores_bytes(problem, columns),
            calls=3.0 + 3.0 * problem["causal"] + 4.0 * (widened > 0),
            programs=folded(problem)[0],
            inner_steps=1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        causal, keys = problem["causal"], pieces.reach(problem)
        dtype = torch.float32 if config["compute"] == "float32" else getattr(torch, problem.dtype)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            grouped, k, v = (tensor.to(dtype) for tensor in pieces.fold(q, k, v, keys))
            rows = grouped.flatten(1, 2)
            scores = empty((*rows.shape[:2], keys), dtype=dtype, device=q.device)
            pieces.scores_into(scores, rows, k)
            if causal:
                hidden = pieces.future(problem["q_len"], keys, q.device)
                scores.view(*grouped.shape[:3], keys).masked_fill_(hidden, -math.inf)
            torch.softmax(scores, -1, out=scores)
            out = empty(rows.shape, dtype=dtype, device=q.device)
            torch.bmm(scores, v, out=out)
            return out.to(q.dtype).view(q.shape)

        return run
