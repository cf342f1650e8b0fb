"""Attention by chunks of keys, with the online softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.attention import pieces
from kernelcast.kernels.ops.attention.schema import folded, pair_flops, scratch_rule, steps_rule
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def _steps(problem: Problem, columns: Columns) -> np.ndarray:
    return -(-pieces.reach(problem) // columns["chunk"])


def _scores_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """The float32 scores of all queries against one chunk: one buffer, which every step uses."""
    products, rows = folded(problem)
    return 4.0 * products * rows * columns["chunk"]


def _kept_bytes(problem: Problem) -> float:
    """The float32 accumulator and each row's maximum and sum; q in float32 where it is not."""
    products, rows = folded(problem)
    widened = problem["head_dim"] if problem.element_bytes < 4 else 0
    return 4.0 * products * rows * (problem["head_dim"] + 2 + widened)


def _scratch_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    keys = 2.0 * problem["batch"] * problem["kv_heads"] * columns["chunk"] * problem["head_dim"]
    widened = 4.0 * keys if problem.element_bytes < 4 else 0.0
    return _scores_bytes(problem, columns) + _kept_bytes(problem) + widened


@register_variant("attention")
class OnlineChunked(Variant):
    """All queries against one chunk of keys after another; sums are rescaled whenever a row's maximum grows.

    The online softmax of Milakov and Gimelshein (arXiv:1805.02867), as flash attention uses it. Only the scores of one
    chunk are ever held. Everything is in float32: sums that are rescaled at every chunk would lose accuracy in 16 bits.
    With a causal mask, queries before a chunk's first key skip it.
    """

    name = "online_chunked"
    backend = "torch"
    doc = "online softmax over one chunk of keys after another, in float32"
    parameters = (Parameter("chunk", (64, 128, 256, 512, 1024), "keys a step", quick=(128, 512)),)
    rules = (
        Rule(
            "chunk-is-a-part",
            "a chunk of all keys is the materialised variant",
            check=lambda problem, columns, device: columns["chunk"] < pieces.reach(problem),
            explain=lambda problem, columns, device: (
                f"chunk={columns['chunk'][0]}, keys that are seen: {pieces.reach(problem)}"
            ),
        ),
        steps_rule(_steps),
        scratch_rule(_scratch_bytes),
    )
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        steps = _steps(problem, columns)
        causal, queries, keys = problem["causal"], problem["q_len"], pieces.reach(problem)
        # Rows that meet each chunk, summed over the chunks: with a causal mask, those from the chunk's first key on.
        skipped = columns["chunk"] * (steps * (steps - 1) // 2) if causal else 0
        met = steps * queries - skipped
        last = keys - (steps - 1) * columns["chunk"]
        met_last = queries - (steps - 1) * columns["chunk"] * causal
        pairs = met * columns["chunk"] - met_last * (columns["chunk"] - last)
        row_elements = float(problem["batch"]) * problem["heads"] * problem["head_dim"]
        narrow, grouped = problem.element_bytes < 4, problem["heads"] != problem["kv_heads"]
        return Work(
            # Rescaling the accumulator: one multiplication an element and chunk.
            flops=pair_flops(problem, pairs) + row_elements * met,
            # Queries are read by every chunk that they meet.
            traffic_bytes=operation("attention").traffic_bytes(problem)
            + problem.element_bytes * row_elements * (met - queries),
            # The product, the subtraction and the exponential each write the scores.
            scratch_bytes=_scratch_bytes(problem, columns) + 2.0 * _scores_bytes(problem, columns),
            # A step: two products, a mask, eleven calls of the softmax; casts of k and v; a group's rows gathered and added.
            calls=steps * (13.0 + causal + 2.0 * narrow + grouped * (1.0 + causal))
            + 4.0
            + 2.0 * causal
            + narrow,
            programs=folded(problem)[0],
            inner_steps=steps,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        causal, keys = problem["causal"], pieces.reach(problem)
        chunk = int(config["chunk"])

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            queries, k, v = pieces.fold(q, k, v, keys)
            queries = queries.float()
            products, group, q_len, head_dim = queries.shape
            total = torch.zeros((products, group, q_len, 1), dtype=torch.float32, device=q.device)
            peak = torch.full_like(total, -math.inf)
            sums = torch.zeros_like(queries)
            buffer = empty((products * group * q_len * chunk,), dtype=torch.float32, device=q.device)
            diagonal = pieces.future(chunk, chunk, q.device) if causal else None
            for start in range(0, keys, chunk):
                end = min(start + chunk, keys)
                # Earlier queries see none of these keys, so every row that is left sees at least the first of them.
                first = start if causal else 0
                rows = group * (q_len - first)
                flat = buffer[: products * rows * (end - start)].view(products, rows, end - start)
                pieces.scores_into(
                    flat, queries[:, :, first:].reshape(products, rows, head_dim), k[:, start:end].float()
                )
                scores = flat.view(products, group, q_len - first, end - start)
                if diagonal is not None:
                    scores[:, :, : end - start].masked_fill_(
                        diagonal[: end - start, : end - start], -math.inf
                    )
                old_peak, row_total, row_sums = peak[:, :, first:], total[:, :, first:], sums[:, :, first:]
                new_peak = torch.maximum(old_peak, scores.amax(-1, keepdim=True))
                scores.sub_(new_peak).exp_()
                decay = torch.sub(old_peak, new_peak).exp_()
                row_total.mul_(decay).add_(scores.sum(-1, keepdim=True))
                row_sums.mul_(decay)
                old_peak.copy_(new_peak)
                if group == 1:
                    torch.baddbmm(row_sums[:, 0], flat, v[:, start:end].float(), out=row_sums[:, 0])
                else:
                    row_sums.add_(torch.bmm(flat, v[:, start:end].float()).view(row_sums.shape))
            out = empty(q.shape, dtype=q.dtype, device=q.device)
            torch.div(sums, total, out=out.view(sums.shape))
            return out

        return run
