"""Attention one head after another."""

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
    steps_rule,
    widened_bytes,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _steps(problem: Problem, columns: Columns) -> int:
    return folded(problem)[0]


def _scores_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """The scores of one head of k: one buffer, which every step uses."""
    return compute_bytes(problem, columns) * folded(problem)[1] * pieces.reach(problem)


def _scratch_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    mask = problem["q_len"] * pieces.reach(problem) if problem["causal"] else 0
    # The float32 copies are made head by head too.
    widened = widened_bytes(problem, columns) / max(1, folded(problem)[0])
    return _scores_bytes(problem, columns) + mask + widened


@register_variant("attention")
class PerHead(Variant):
    """The materialised variant on one head of k and v after another, each product by all threads.

    The scores of one head may stay in cache where those of all do not, and a plain matrix product may use the threads
    better than a batched one where heads are few.
    """

    name = "per_head"
    backend = "torch"
    doc = "addmm, softmax in place, mm for one head after another"
    parameters = (COMPUTE,)
    rules = (
        Rule(
            "several-heads",
            "with one head of k and v in all, this is the materialised variant",
            check=lambda problem, columns, device: folded(problem)[0] >= 2,
            explain=lambda problem, columns, device: (
                f"batch={problem['batch']}, kv_heads={problem['kv_heads']}"
            ),
        ),
        COMPUTE_RULE,
        steps_rule(_steps),
        scratch_rule(_scratch_bytes),
    )
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        steps = folded(problem)[0]
        widened = widened_bytes(problem, columns) > 0
        return Work(
            flops=pair_flops(problem, problem["q_len"] * pieces.reach(problem)),
            traffic_bytes=operation("attention").traffic_bytes(problem),
            # As in the materialised variant: the scores are written and read twice.
            scratch_bytes=_scratch_bytes(problem, columns) + _scores_bytes(problem, columns),
            calls=steps * (3.0 + problem["causal"] + 4.0 * widened) + 2.0 * problem["causal"],
            programs=1.0,
            inner_steps=steps,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        causal, keys = problem["causal"], pieces.reach(problem)
        scale = 1.0 / math.sqrt(problem["head_dim"])
        dtype = torch.float32 if config["compute"] == "float32" else getattr(torch, problem.dtype)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            queries, k, v = pieces.fold(q, k, v, keys)
            products, group, q_len, _ = queries.shape
            rows = queries.flatten(1, 2)
            out = empty(q.shape, dtype=q.dtype, device=q.device)
            results = out.view(rows.shape)
            scores = empty((group * q_len, keys), dtype=dtype, device=q.device)
            masked = scores.view(group, q_len, keys)
            hidden = pieces.future(q_len, keys, q.device) if causal else None
            for head in range(products):
                torch.addmm(
                    scores, rows[head].to(dtype), k[head].to(dtype).t(), beta=0, alpha=scale, out=scores
                )
                if hidden is not None:
                    masked.masked_fill_(hidden, -math.inf)
                torch.softmax(scores, -1, out=scores)
                if dtype == q.dtype:
                    torch.mm(scores, v[head], out=results[head])
                else:
                    results[head].copy_(torch.mm(scores, v[head].to(dtype)))
            return out

        return run
