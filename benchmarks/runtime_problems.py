"""Problems for the benchmarks of selection on a CPU: every operation, sizes drawn around those that networks have."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from kernelcast.kernels import Problem, problem

Draw = Callable[[random.Random], dict[str, Any]]


def draw(
    operation: str, count: int, *, seed: int, threads: int, without: frozenset[Any] = frozenset()
) -> list[Problem]:
    """So many problems of different shapes, none of them among those to leave out."""
    rng = random.Random(f"{operation} {seed}")
    found: dict[Any, Problem] = {}
    while len(found) < count:
        values = DRAWS[operation](rng)
        drawn = problem(operation, dtype="float32", threads=threads, **values)
        if drawn.shape not in without:
            found.setdefault(drawn.shape, drawn)
    return list(found.values())


def _size(rng: random.Random, low: int, high: int, multiple: int = 1) -> int:
    """Log-uniform."""
    return max(round(low * (high / low) ** rng.random() / multiple), 1) * multiple


def _gemm(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.4:  # a small output over a long sum
        return {"m": _size(rng, 8, 96, 8), "n": _size(rng, 8, 96, 8), "k": _size(rng, 2048, 32768, 64)}
    return {
        "m": _size(rng, 1, 256), "n": _size(rng, 128, 2048, 32), "k": _size(rng, 128, 2048, 32),
        "layout": rng.choice(("nn", "nt")),
    }  # fmt: skip


def _batched_gemm(rng: random.Random) -> dict[str, Any]:
    return {
        "batch": _size(rng, 2, 64), "m": _size(rng, 4, 256, 4), "n": _size(rng, 4, 256, 4), "k": _size(rng, 16, 512, 8),
        "layout": rng.choice(("nn", "nt")),
    }  # fmt: skip


def _mixed_gemm(rng: random.Random) -> dict[str, Any]:
    return {"m": _size(rng, 1, 128), "n": _size(rng, 128, 2048, 32), "k": _size(rng, 128, 2048, 32)}


def _grouped_gemm(rng: random.Random) -> dict[str, Any]:
    groups = rng.choice((4, 8, 16, 32))
    return {
        "groups": groups, "m": groups * _size(rng, 1, 64), "n": _size(rng, 64, 768, 32), "k": _size(rng, 64, 768, 32),
        "distribution": rng.choice(("balanced", "random", "skewed")),
    }  # fmt: skip


def _conv2d(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(("plain", "plain", "depthwise", "large"))
    if kind == "plain":
        kernel, side = rng.choice((1, 1, 3, 3, 5)), rng.choice((7, 14, 28, 56))
        c, k = _size(rng, 16, 12544 // side // kernel, 16), _size(rng, 16, 256, 16)
        stride, groups = rng.choice((1, 1, 2)), 1
    elif kind == "depthwise":
        kernel, side = rng.choice((3, 7, 13, 31)), rng.choice((14, 28, 56))
        c = k = groups = _size(rng, 16, 192, 16)
        stride = 1
    else:
        kernel, side = rng.choice((9, 15, 21, 31)), rng.choice((64, 96, 128, 192))
        c = k = rng.choice((1, 2, 4))
        stride, groups = 1, 1
    return {
        "n": 1, "c": c, "h": side, "w": side, "k": k, "r": kernel, "s": kernel, "stride_h": stride, "stride_w": stride,
        "pad_h": kernel // 2, "pad_w": kernel // 2, "groups": groups,
    }  # fmt: skip


def _attention(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((4, 8, 12, 16))
    kind = rng.choice(("short", "middle", "decode"))
    batch, head_dim = 1, rng.choice((32, 64, 128))
    if kind == "short":
        batch, length = _size(rng, 4, 32), _size(rng, 8, 96, 8)
        q_len = kv_len = length
    elif kind == "middle":
        q_len = kv_len = _size(rng, 128, 768, 16)
    else:
        q_len, kv_len = 1, _size(rng, 256, 8192, 64)
    return {
        "batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len, "head_dim": head_dim,
        "kv_heads": rng.choice((heads, heads, max(heads // 4, 1))), "causal": kind != "decode" and rng.random() < 0.5,
    }  # fmt: skip


def _rows(rng: random.Random) -> dict[str, Any]:
    columns = _size(rng, 128, 65536, 8)
    return {"rows": _size(rng, 1, max(2_000_000 // columns, 1)), "columns": columns}


DRAWS: Mapping[str, Draw] = {
    "gemm": _gemm,
    "batched_gemm": _batched_gemm,
    "mixed_gemm": _mixed_gemm,
    "grouped_gemm": _grouped_gemm,
    "conv2d": _conv2d,
    "attention": _attention,
    "softmax": _rows,
    "layernorm": _rows,
    "rmsnorm": _rows,
}
