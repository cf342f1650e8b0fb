"""Attention with the keys split into parts of one larger batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.attention import pieces
from kernelcast.kernels.ops.attention.schema import folded, pair_flops, scratch_rule
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _scores_bytes(problem: Problem) -> float:
    products, rows = folded(problem)
    return float(problem.element_bytes) * products * rows * problem["kv_len"]


def _scratch_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Scores by part and by row, the queries repeated for every part, and the parts of the output."""
    products, rows = folded(problem)
    repeated = 2.0 * problem.element_bytes * products * rows * problem["head_dim"] * columns["split"]
    return 3.0 * _scores_bytes(problem) + repeated


@register_variant("attention")
class SplitKv(Variant):
    """Both products over parts of the keys as one larger batch, with one softmax over all scores in between.

    Gives every thread a part where few queries (a decode step) meet many keys: the same idea as flash decoding.
    """

    name = "split_kv"
    backend = "torch"
    doc = "bmm over parts of the keys as a larger batch, then a sum over the parts"
    parameters = (Parameter("split", (2, 4, 8, 16), "parts of the keys", quick=(2, 8)),)
    rules = (
        Rule(
            "split-divides-keys",
            "parts of unequal length cannot be one batched product",
            check=lambda problem, columns, device: problem["kv_len"] % columns["split"] == 0,
            explain=lambda problem, columns, device: (
                f"kv_len={problem['kv_len']}, split={columns['split'][0]}"
            ),
        ),
        Rule(
            "parts-long-enough",
            "a part of fewer than 64 keys spends more on adding the parts up than on its products",
            check=lambda problem, columns, device: problem["kv_len"] // columns["split"] >= 64,
            explain=lambda problem, columns, device: f"{problem['kv_len'] // columns['split'][0]} < 64",
        ),
        Rule(
            "few-queries",
            "the scores are rearranged twice, which pays only where at most 64 query rows share the keys",
            check=lambda problem, columns, device: folded(problem)[1] <= 64,
            explain=lambda problem, columns, device: f"{folded(problem)[1]} query rows to a head of k",
        ),
        Rule(
            "no-mask",
            "few queries under a causal mask see few keys, so there is nothing to split",
            check=lambda problem, columns, device: not problem["causal"],
            explain=lambda problem, columns, device: "causal=True",
        ),
        scratch_rule(_scratch_bytes),
    )
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        products, rows = folded(problem)
        added = products * rows * problem["head_dim"] * (columns["split"] - 1.0)
        return Work(
            flops=pair_flops(problem, problem["q_len"] * problem["kv_len"]) + added,
            traffic_bytes=operation("attention").traffic_bytes(problem),
            scratch_bytes=_scratch_bytes(problem, columns),
            # The queries repeated, two products, the softmax between two rearrangements, the sum.
            calls=7.0,
            programs=products * columns["split"],
            inner_steps=1.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        split, keys = int(config["split"]), problem["kv_len"]
        part = keys // split

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            queries, k, v = pieces.fold(q, k, v, keys)
            rows = queries.flatten(1, 2)
            products, row_count, head_dim = rows.shape
            batch = products * split
            repeated = rows[:, None].expand(-1, split, -1, -1).reshape(batch, row_count, head_dim)
            scores = empty((batch, row_count, part), dtype=q.dtype, device=q.device)
            pieces.scores_into(scores, repeated, k.reshape(batch, part, head_dim))
            by_row = (
                scores.view(products, split, row_count, part)
                .transpose(1, 2)
                .reshape(products, row_count, keys)
            )
            weights = torch.softmax(by_row, -1).view(products, row_count, split, part).transpose(1, 2)
            parts = torch.bmm(weights.reshape(batch, row_count, part), v.reshape(batch, part, head_dim))
            # Parts of 16 bits are added in float32 and rounded once.
            total = parts.view(products, split, row_count, head_dim).sum(1, dtype=torch.float32)
            return total.to(q.dtype).view(q.shape)

        return run
