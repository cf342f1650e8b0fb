"""Attention by chunks of queries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
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


def _steps(problem: Problem, columns: Columns) -> np.ndarray:
    return -(-problem["q_len"] // columns["chunk"])


def _scores_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """The scores of one chunk against all keys: one buffer, which every step uses."""
    rows = float(problem["batch"]) * problem["heads"] * columns["chunk"]
    return compute_bytes(problem, columns) * rows * pieces.reach(problem)


def _scratch_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    mask = columns["chunk"] ** 2 if problem["causal"] else 0
    return _scores_bytes(problem, columns) + mask + widened_bytes(problem, columns)


def _swept(problem: Problem, chunk: int) -> tuple[int, int]:
    """(query, key) pairs that one head multiplies, and keys that it reads, over all chunks: each against the keys that
    its last query sees."""
    queries, keys = problem["q_len"], pieces.reach(problem)
    ends = np.minimum(np.arange(0, queries, chunk) + chunk, queries)
    read = np.minimum(ends, keys) if problem["causal"] else np.full_like(ends, keys)
    return int((np.diff(ends, prepend=0) * read).sum()), int(read.sum())


@register_variant("attention")
class QueryChunked(Variant):
    """The materialised variant on one chunk of queries after another, so that the scores of a chunk stay in cache.

    With a causal mask a chunk is multiplied with the keys that it sees alone, which saves up to half of the work.
    """

    name = "query_chunked"
    backend = "torch"
    doc = "baddbmm, softmax in place, bmm for one chunk of queries after another"
    parameters = (
        Parameter("chunk", (16, 32, 64, 128, 256, 512), "queries a step", quick=(32, 128, 512)),
        COMPUTE,
    )
    rules = (
        Rule(
            "chunk-is-a-part",
            "a chunk of all queries is the materialised variant",
            check=lambda problem, columns, device: columns["chunk"] < problem["q_len"],
            explain=lambda problem, columns, device: f"chunk={columns['chunk'][0]}, q_len={problem['q_len']}",
        ),
        COMPUTE_RULE,
        steps_rule(_steps),
        scratch_rule(_scratch_bytes),
    )
    source_modules = (pieces.__name__,)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        steps = _steps(problem, columns)
        swept = np.array([_swept(problem, int(chunk)) for chunk in columns["chunk"]], dtype=np.float64)
        pairs, read = swept.reshape(-1, 2).T
        key_bytes = 2.0 * problem.element_bytes * problem["batch"] * problem["kv_heads"] * problem["head_dim"]
        grouped = problem["heads"] != problem["kv_heads"]
        widened = widened_bytes(problem, columns)
        return Work(
            flops=pair_flops(problem, pairs),
            # Every chunk of queries reads the keys and values that it sees once more.
            traffic_bytes=operation("attention").traffic_bytes(problem)
            + key_bytes * (read - pieces.reach(problem)),
            # As in the materialised variant: the scores are written and read twice.
            scratch_bytes=_scratch_bytes(problem, columns) + _scores_bytes(problem, columns),
            # A group's queries are gathered into rows and scattered back; casts of k and v, and of each chunk.
            calls=steps * (3.0 + problem["causal"] + 2.0 * (grouped | (widened > 0)))
            + 2.0 * (widened > 0)
            + 2.0 * problem["causal"],
            programs=folded(problem)[0],
            inner_steps=steps,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        causal, keys, q_len = problem["causal"], pieces.reach(problem), problem["q_len"]
        chunk = int(config["chunk"])
        dtype = torch.float32 if config["compute"] == "float32" else getattr(torch, problem.dtype)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            queries, k, v = pieces.fold(q, k, v, keys)
            k, v = k.to(dtype), v.to(dtype)
            products, group, _, head_dim = queries.shape
            out = empty(q.shape, dtype=q.dtype, device=q.device)
            results = out.view(queries.shape)
            # The same for every chunk, so it is made once: the chunk's own keys are those on its diagonal.
            diagonal = pieces.future(chunk, chunk, q.device) if causal else None
            buffer = empty((products * group * chunk * keys,), dtype=dtype, device=q.device)
            for start in range(0, q_len, chunk):
                end = min(start + chunk, q_len)
                rows = group * (end - start)
                seen = min(end, keys) if causal else keys
                part = queries[:, :, start:end].to(dtype).reshape(products, rows, head_dim)
                scores = buffer[: products * rows * seen].view(products, rows, seen)
                pieces.scores_into(scores, part, k[:, :seen])
                if diagonal is not None and start < seen:
                    own = scores.view(products, group, end - start, seen)[..., start:]
                    own.masked_fill_(diagonal[: end - start, : seen - start], -math.inf)
                torch.softmax(scores, -1, out=scores)
                result = results[:, :, start:end]
                if group == 1 and dtype == q.dtype:
                    torch.bmm(scores, v[:, :seen], out=result[:, 0])
                else:
                    result.copy_(torch.bmm(scores, v[:, :seen]).view(result.shape))
            return out

        return run
