"""The problems of the demonstration: layers that people run, scaled to the machine.

Sizes are those of published networks. On a CPU, linear layers are divided by four and batches are small, so that no
candidate takes more than a few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernelcast.kernels import Device, Problem, problem
from kernelcast.kernels.detect import default_threads

OPERATIONS = ("gemm", "conv2d", "attention", "softmax")

#: (n, k) of linear layers.
_LINEAR_TRAIN = {
    "Llama-3-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (3584, 18944)),
    "Qwen2.5-32B": ((7168, 5120), (5120, 5120)),
}
_LINEAR_HELD_OUT = {"Llama-2-7B": ((12288, 4096), (4096, 11008)), "DeepSeek-V3": ((2112, 7168), (7168, 2048))}
#: (m, n, k): a small output over a long sum.
_SKINNY_TRAIN = (
    (16, 16, 4096),
    (64, 64, 4096),
    (32, 32, 16384),
    (64, 64, 16384),
    (16, 16, 32768),
    (128, 32, 8192),
)
_SKINNY_HELD_OUT = ((48, 48, 8192), (32, 64, 16384), (64, 16, 32768))

#: (batch, c, height, k, kernel, stride, groups); the padding keeps the size.
_CONV_TRAIN = (
    (1, 3, 224, 64, 7, 2, 1),
    (1, 64, 56, 64, 1, 1, 1),
    (1, 64, 56, 64, 3, 1, 1),
    (1, 64, 56, 256, 1, 1, 1),
    (1, 128, 56, 128, 3, 2, 1),
    (1, 128, 28, 128, 3, 1, 1),
    (1, 256, 14, 256, 3, 1, 1),
    (1, 1024, 14, 2048, 1, 2, 1),
    (1, 320, 32, 320, 3, 1, 1),
    (1, 640, 16, 640, 3, 1, 1),
    (4, 64, 28, 64, 3, 1, 1),
    (1, 96, 56, 96, 7, 1, 96),
    (1, 192, 28, 192, 7, 1, 192),
    (1, 144, 56, 144, 3, 1, 144),
    (1, 128, 56, 128, 31, 1, 128),
    (1, 256, 28, 256, 13, 1, 256),
    (1, 4, 128, 4, 31, 1, 1),
    (1, 4, 256, 4, 15, 1, 1),
    (1, 1, 256, 1, 31, 1, 1),
    (2, 16, 64, 16, 5, 1, 1),
    (1, 64, 112, 64, 3, 1, 1),
    (1, 128, 56, 128, 3, 1, 1),
    (1, 512, 14, 512, 3, 1, 1),
    (1, 256, 56, 512, 1, 2, 1),
    (1, 2048, 7, 512, 1, 1, 1),
    (4, 256, 14, 1024, 1, 1, 1),
    (1, 320, 64, 320, 3, 1, 1),
    (1, 1280, 16, 1280, 3, 1, 1),
    (1, 32, 112, 32, 3, 1, 32),
    (4, 192, 28, 192, 3, 1, 192),
    (1, 256, 14, 256, 5, 1, 256),
    (1, 96, 56, 96, 31, 1, 96),
    (1, 384, 28, 384, 27, 1, 384),
    (1, 32, 64, 32, 21, 1, 32),
    (1, 8, 128, 8, 21, 1, 1),
    (1, 4, 192, 4, 31, 1, 1),
    (1, 2, 256, 2, 45, 1, 1),
    (1, 1, 512, 1, 15, 1, 1),
    (2, 8, 96, 8, 11, 1, 1),
    (1, 16, 128, 16, 9, 1, 1),
    (4, 32, 32, 64, 5, 2, 1),
)
_CONV_HELD_OUT = (
    (1, 256, 56, 64, 1, 1, 1),
    (1, 512, 7, 512, 3, 1, 1),
    (1, 640, 32, 640, 3, 1, 1),
    (1, 384, 14, 384, 7, 1, 384),
    (1, 64, 56, 64, 31, 1, 64),
    (1, 4, 256, 4, 31, 1, 1),
)

#: (batch, heads, kv_heads, q_len, kv_len, head_dim, causal)
_ATTENTION_TRAIN = (
    (16, 8, 8, 16, 16, 64, False),
    (32, 8, 8, 32, 32, 64, False),
    (8, 8, 8, 64, 64, 64, True),
    (4, 8, 8, 128, 128, 64, False),
    (4, 8, 8, 128, 128, 128, True),
    (2, 8, 8, 256, 256, 64, False),
    (1, 8, 8, 256, 256, 128, True),
    (1, 8, 8, 512, 512, 64, False),
    (1, 8, 8, 512, 512, 64, True),
    (1, 8, 8, 1024, 1024, 64, False),
    (1, 8, 8, 1024, 1024, 64, True),
    (1, 32, 8, 256, 256, 64, True),
    (1, 8, 8, 1, 512, 64, False),
    (4, 8, 8, 1, 1024, 128, False),
    (1, 8, 8, 1, 4096, 64, False),
    (1, 32, 8, 1, 2048, 128, False),
    (1, 8, 8, 2048, 2048, 64, True),
    (64, 8, 8, 16, 16, 64, True),
    (8, 12, 12, 48, 48, 64, False),
    (16, 4, 4, 64, 64, 32, False),
    (2, 16, 16, 128, 128, 64, True),
    (1, 16, 16, 384, 384, 64, False),
    (1, 8, 8, 640, 640, 128, True),
    (2, 8, 8, 512, 512, 64, True),
    (1, 4, 4, 1536, 1536, 64, False),
    (1, 16, 4, 512, 512, 128, False),
    (1, 32, 8, 128, 128, 64, True),
    (8, 8, 8, 1, 256, 64, False),
    (2, 16, 16, 1, 2048, 64, False),
    (1, 8, 8, 1, 16384, 64, False),
    (1, 32, 8, 1, 8192, 128, False),
    (1, 8, 8, 128, 1024, 64, False),
)
_ATTENTION_HELD_OUT = (
    (64, 8, 8, 24, 24, 64, False),
    (2, 8, 8, 384, 384, 64, True),
    (1, 12, 12, 768, 768, 64, False),
    (1, 8, 8, 1536, 1536, 64, True),
    (1, 8, 8, 1, 8192, 64, False),
    (1, 32, 8, 512, 512, 64, True),
)

#: (rows, columns)
_SOFTMAX_TRAIN = (
    (1, 128),
    (1, 4096),
    (1, 32000),
    (1, 131072),
    (16, 1024),
    (16, 50257),
    (64, 256),
    (64, 32000),
    (128, 8192),
    (256, 1024),
    (256, 128256),
    (1024, 128),
    (1024, 4096),
    (4096, 512),
    (4096, 2048),
    (16384, 128),
    (65536, 128),
    (32, 131072),
    (4, 8192),
    (8, 128256),
    (32, 4096),
    (256, 32000),
    (512, 512),
    (2048, 256),
    (8192, 1024),
    (16384, 512),
)
_SOFTMAX_HELD_OUT = ((1, 65536), (8, 32000), (128, 50257), (512, 2048), (2048, 1024), (32768, 256))


def training_problems(operation: str, device: Device) -> list[Problem]:
    """The problems that a device's model is trained on."""
    return _unique(_values(operation, device, held_out=False), operation, device)


def held_out_problems(operation: str, device: Device) -> list[Problem]:
    """Problems of other networks and sizes, which the model never sees."""
    trained = {found.shape for found in training_problems(operation, device)}
    return [
        found
        for found in _unique(_values(operation, device, held_out=True), operation, device)
        if found.shape not in trained
    ]


def _unique(values: Iterator[dict[str, Any]], operation: str, device: Device) -> list[Problem]:
    on_gpu = device.kind == "gpu"
    facts = {"dtype": "float16" if on_gpu else "float32", "threads": 0 if on_gpu else default_threads()}
    return list(dict.fromkeys(problem(operation, **facts, **found) for found in values))


def _values(operation: str, device: Device, *, held_out: bool) -> Iterator[dict[str, Any]]:
    builders = {"gemm": _gemm, "conv2d": _conv2d, "attention": _attention, "softmax": _softmax}
    return builders[operation](held_out, device.kind == "gpu")


def _gemm(held_out: bool, on_gpu: bool) -> Iterator[dict[str, Any]]:
    scale = 1 if on_gpu else 4
    rows = (
        ((16, 512, 4096) if on_gpu else (8, 96)) if held_out else ((1, 64, 2048) if on_gpu else (1, 32, 256))
    )
    networks: dict[str, tuple[tuple[int, int], ...]] = {**(_LINEAR_HELD_OUT if held_out else _LINEAR_TRAIN)}
    skinny: tuple[tuple[int, int, int], ...] = _SKINNY_HELD_OUT if held_out else _SKINNY_TRAIN
    for layers in networks.values():
        for n, k in layers:
            for m in rows:
                # A linear layer multiplies by the transpose of its weight.
                yield {"m": m, "n": n // scale, "k": k // scale, "layout": "nt"}
    for m, n, k in skinny:
        yield {"m": m, "n": n, "k": k}


def _conv2d(held_out: bool, on_gpu: bool) -> Iterator[dict[str, Any]]:
    for batch, c, size, k, kernel, stride, groups in _CONV_HELD_OUT if held_out else _CONV_TRAIN:
        yield {
            "n": batch * (16 if on_gpu else 1), "c": c, "h": size, "w": size, "k": k, "r": kernel, "s": kernel,
            "stride_h": stride, "stride_w": stride, "pad_h": kernel // 2, "pad_w": kernel // 2, "groups": groups,
        }  # fmt: skip


def _attention(held_out: bool, on_gpu: bool) -> Iterator[dict[str, Any]]:
    for batch, heads, kv_heads, q_len, kv_len, head_dim, causal in (
        _ATTENTION_HELD_OUT if held_out else _ATTENTION_TRAIN
    ):
        yield {
            "batch": batch * (8 if on_gpu else 1), "heads": heads, "kv_heads": kv_heads, "q_len": q_len,
            "kv_len": kv_len, "head_dim": head_dim, "causal": causal,
        }  # fmt: skip


def _softmax(held_out: bool, on_gpu: bool) -> Iterator[dict[str, Any]]:
    for rows, columns in _SOFTMAX_HELD_OUT if held_out else _SOFTMAX_TRAIN:
        yield {"rows": rows, "columns": columns}
