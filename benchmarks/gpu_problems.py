"""The problems of the GPU check: small and ragged ones to compare with the reference, and layers that people run to time.

kernelcast is imported inside the functions, as the GPU check first has to make it importable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from kernelcast.kernels import Block, Device, Problem, ProblemSchema

DTYPES = ("float16", "bfloat16", "float32")

#: Every kind of thing that a kernel can get wrong, as small as it can be. The first ones are the quick set.
_CHECKS: dict[str, tuple[dict[str, Any], ...]] = {
    "gemm": (
        {"m": 64, "n": 64, "k": 64},
        {"m": 17, "n": 33, "k": 65, "layout": "nt"},
        {"m": 16, "n": 16, "k": 2048},
        # More tiles than an H200 runs at once, for the kernels that walk over them.
        {"m": 1500, "n": 1104, "k": 200},
        {"m": 1, "n": 128, "k": 256, "layout": "nt"},
        {"m": 33, "n": 70, "k": 512, "layout": "tt"},
        {"m": 128, "n": 96, "k": 160, "layout": "tn"},
        {"m": 256, "n": 512, "k": 256},
        {"m": 64, "n": 48, "k": 80, "lda": 88, "ldb": 56},
        {"m": 130, "n": 258, "k": 1030, "layout": "nt"},
        {"m": 7, "n": 5, "k": 3},
    ),
    "mixed_gemm": (
        {"m": 16, "n": 128, "k": 512, "layout": "nt"},
        {"m": 17, "n": 33, "k": 65, "layout": "nt", "weight_dtype": "uint8"},
        {"m": 64, "n": 64, "k": 1024},
        {"m": 1, "n": 256, "k": 512, "layout": "nt"},
        {"m": 128, "n": 96, "k": 160, "layout": "tn"},
        {"m": 256, "n": 512, "k": 256, "layout": "nt"},
        {"m": 64, "n": 48, "k": 80, "layout": "nt", "lda": 88, "ldb": 96},
        {"m": 33, "n": 70, "k": 512, "layout": "tt", "weight_dtype": "uint8"},
        {"m": 130, "n": 258, "k": 1030, "layout": "nt"},
        {"m": 7, "n": 5, "k": 3},
    ),
    "conv2d": (
        {"n": 2, "c": 8, "h": 12, "w": 12, "k": 8, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1},
        {"n": 1, "c": 5, "h": 11, "w": 9, "k": 7, "r": 1, "s": 1},
        {"n": 1, "c": 8, "h": 14, "w": 13, "k": 8, "r": 7, "s": 7, "pad_h": 3, "pad_w": 3, "groups": 8},
        {"n": 1, "c": 6, "h": 13, "w": 13, "k": 8, "r": 5, "s": 5, "pad_h": 2, "pad_w": 2, "stride_h": 2, "stride_w": 2},
        {"n": 2, "c": 16, "h": 15, "w": 10, "k": 12, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1, "layout": "nhwc"},
        {"n": 1, "c": 2, "h": 40, "w": 40, "k": 2, "r": 21, "s": 21, "pad_h": 10, "pad_w": 10},
        {"n": 1, "c": 4, "h": 17, "w": 17, "k": 6, "r": 3, "s": 3, "dil_h": 2, "dil_w": 2, "groups": 2},
        {"n": 2, "c": 48, "h": 15, "w": 17, "k": 48, "r": 5, "s": 5, "pad_h": 2, "pad_w": 2, "groups": 48, "layout": "nhwc"},
        {"n": 1, "c": 6, "h": 14, "w": 15, "k": 12, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1, "groups": 6},
        {"n": 2, "c": 64, "h": 19, "w": 18, "k": 40, "r": 3, "s": 3, "stride_h": 2, "stride_w": 2, "dil_h": 2, "dil_w": 2, "pad_h": 2, "pad_w": 2, "layout": "nhwc"},
    ),
    "attention": (
        {"batch": 1, "heads": 2, "q_len": 16, "kv_len": 16, "head_dim": 32},
        {"batch": 2, "heads": 3, "q_len": 17, "kv_len": 33, "head_dim": 40},
        {"batch": 1, "heads": 4, "q_len": 65, "kv_len": 65, "head_dim": 64, "causal": True},
        {"batch": 2, "heads": 8, "kv_heads": 2, "q_len": 1, "kv_len": 300, "head_dim": 64},
        {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 200, "kv_len": 200, "head_dim": 128, "causal": True},
        {"batch": 1, "heads": 2, "q_len": 600, "kv_len": 600, "head_dim": 64},
    ),
    "softmax": (
        {"rows": 17, "columns": 1000},
        {"rows": 1, "columns": 128},
        {"rows": 33, "columns": 65, "layout": "column"},
        {"rows": 5, "columns": 4097},
        {"rows": 600, "columns": 40},
        {"rows": 2, "columns": 40000},
    ),
    "layernorm": (
        {"rows": 17, "columns": 1000},
        {"rows": 5, "columns": 4096, "affine": "weight"},
        {"rows": 600, "columns": 40, "affine": "none"},
        {"rows": 3, "columns": 5001},
        {"rows": 2, "columns": 40000},
        {"rows": 64, "columns": 64},
        {"rows": 70, "columns": 1},
    ),
    "rmsnorm": (
        {"rows": 17, "columns": 1000},
        {"rows": 5, "columns": 4096, "affine": "none"},
        {"rows": 600, "columns": 40},
        {"rows": 3, "columns": 5001},
        {"rows": 2, "columns": 40000},
        {"rows": 64, "columns": 64},
    ),
    "batched_gemm": (
        {"batch": 3, "m": 64, "n": 64, "k": 64},
        {"batch": 5, "m": 17, "n": 33, "k": 65, "layout": "nt", "broadcast": "b"},
        {"batch": 2, "m": 16, "n": 16, "k": 2048},
        {"batch": 8, "m": 1, "n": 128, "k": 256, "layout": "nt"},
        {"batch": 4, "m": 48, "n": 70, "k": 160, "layout": "tt", "broadcast": "a"},
        {"batch": 3, "m": 64, "n": 48, "k": 80, "layout": "tn", "lda": 88, "ldb": 56},
        {"batch": 2, "m": 130, "n": 258, "k": 530, "layout": "nt"},
        {"batch": 300, "m": 8, "n": 8, "k": 8},
        {"batch": 16, "m": 70, "n": 3, "k": 200},
        {"batch": 70000, "m": 2, "n": 5, "k": 3},
    ),
    "grouped_gemm": (
        {"groups": 4, "m": 64, "n": 64, "k": 64},
        {"groups": 3, "m": 50, "n": 33, "k": 65, "layout": "nt", "distribution": "skewed"},
        {"groups": 40, "m": 12, "n": 128, "k": 512, "layout": "nt"},
        {"groups": 8, "m": 1100, "n": 512, "k": 256, "layout": "nt", "distribution": "skewed"},
        {"groups": 5, "m": 333, "n": 70, "k": 160},
        {"groups": 1, "m": 70, "n": 96, "k": 64, "distribution": "balanced"},
        {"groups": 130, "m": 400, "n": 80, "k": 96, "layout": "nt", "distribution": "balanced"},
        {"groups": 2, "m": 1, "n": 5, "k": 3},
    ),
}  # fmt: skip

#: Sizes for an operation without a list of its own, given to its dimensions in turn.
_GENERIC = ((32, 32, 32, 32, 32, 32, 32), (3, 5, 17, 33, 9, 7, 2))

#: Configs of one variant that are tried on one problem.
MOST_CONFIGS = 8
MOST_CONFIGS_QUICK = 3

#: (n, k) of linear layers, whose weight is stored [n, k]: layout "nt".
_LAYERS = {
    "Llama-3-8B": ((28672, 4096), (4096, 4096), (6144, 4096), (4096, 14336)),
    "Qwen2.5-7B": ((37888, 3584), (3584, 18944), (4608, 3584)),
    "Llama-2-7B": ((22016, 4096), (4096, 11008)),
    "DeepSeek-V3": ((2112, 7168), (7168, 2048), (32768, 512)),
}
_ROWS = (1, 16, 64, 512, 4096)
#: (m, n, k): a small output over a long sum.
_SKINNY = (
    (64, 64, 16384), (16, 16, 32768), (32, 32, 4096), (64, 64, 4096), (48, 48, 8192), (16, 64, 32768),
)  # fmt: skip

#: (name, n, c, size, k, kernel, stride, groups); the padding keeps the size.
_CONVOLUTIONS = (
    ("ResNet-50 3x3", 32, 128, 28, 128, 3, 1, 1),
    ("ResNet-50 1x1", 32, 64, 56, 256, 1, 1, 1),
    ("ConvNeXt depthwise 7x7", 32, 96, 56, 96, 7, 1, 96),
    ("ResNet-50 stem", 32, 3, 224, 64, 7, 2, 1),
    ("UNet 3x3", 4, 320, 64, 320, 3, 1, 1),
    ("depthwise 31x31", 8, 128, 56, 128, 31, 1, 128),
    ("ResNet-50 1x1 / 2", 32, 1024, 14, 2048, 1, 2, 1),
    ("ResNet-50 3x3, late", 32, 512, 7, 512, 3, 1, 1),
    ("strided 5x5", 32, 32, 64, 64, 5, 2, 1),
)
#: (name, batch, heads, kv_heads, q_len, kv_len, head_dim, causal)
_ATTENTION = (
    ("prefill", 1, 32, 8, 2048, 2048, 128, True),
    ("decode", 16, 32, 8, 1, 8192, 128, False),
    ("short", 128, 16, 16, 64, 64, 64, False),
    ("encoder", 32, 16, 16, 512, 512, 64, False),
    ("decode, long", 1, 32, 32, 1, 32768, 128, False),
    ("causal", 16, 16, 16, 1024, 1024, 64, True),
)
#: (rows, columns)
_SOFTMAX = ((4096, 4096), (1, 131072), (65536, 128), (256, 128256), (32, 131072), (16384, 1024))
#: (layer, rows, columns): tokens and hidden sizes, and the ends of what is asked for.
_LAYERNORM = (
    ("BERT-base", 16384, 768),
    ("GPT-2 XL, decode", 16, 1600),
    ("ConvNeXt", 65536, 128),
    ("Falcon-40B", 4096, 8192),
    ("one long row", 1, 131072),
    ("long rows", 1024, 65536),
)
_RMSNORM = (
    ("Llama-3-8B, prefill", 4096, 4096),
    ("Llama-3-8B, decode", 1, 4096),
    ("query and key norm", 65536, 128),
    ("DeepSeek-V3", 1024, 7168),
    ("Llama-3.1-405B", 8192, 16384),
    ("long rows", 64, 131072),
)

#: (layer, groups, m, n, k): experts, whose weights are stored [n, k]; m is tokens times the experts of each. The gate and
#: up projections are one matrix, and DeepSeek-R1's experts are split over eight devices.
_EXPERTS = (
    ("Qwen3-30B-A3B, up", 128, 256, 1536, 2048),
    ("Mixtral-8x7B, up", 8, 4096, 28672, 4096),
    ("Mixtral-8x7B, down", 8, 8, 4096, 14336),
    ("DeepSeek-R1, up", 256, 8, 512, 7168),
    ("Qwen3-30B-A3B, up", 128, 16384, 1536, 2048),
    ("DeepSeek-R1, down", 256, 1024, 7168, 256),
    ("Qwen3-30B-A3B, down", 128, 64, 2048, 768),
    ("Qwen3-30B-A3B, up", 128, 8, 1536, 2048),
    ("Mixtral-8x7B, up", 8, 64, 28672, 4096),
    ("Qwen3-30B-A3B, down", 128, 2048, 2048, 768),
    ("DeepSeek-R1, up", 256, 8192, 512, 7168),
    ("Mixtral-8x7B, down", 8, 512, 4096, 14336),
)

#: (name, batch, m, n, k, layout, broadcast): the products inside attention, head by head, and many small ones.
_BATCHES = (
    ("attention scores, 16 x 32 heads", 512, 512, 512, 64, "nt", "none"),
    ("DeepSeek-V3 latent attention, decode", 128, 16, 512, 128, "nn", "none"),
    ("many 16 x 16", 65536, 16, 16, 16, "nn", "none"),
    ("decode scores, 32 heads", 32, 1, 8192, 128, "nt", "none"),
    ("decode values, 32 heads", 32, 1, 128, 8192, "nn", "none"),
    ("attention values, 16 x 32 heads", 512, 512, 64, 512, "nn", "none"),
    ("one weight, 64 sequences", 64, 77, 3072, 768, "nt", "b"),
    ("small outputs, long sum", 8, 64, 64, 16384, "tn", "none"),
    ("DeepSeek-V3 latent attention, prefill", 128, 1024, 512, 128, "nn", "none"),
)

#: The first problems of a list that a quick run times.
_QUICK_TIMINGS = {"gemm": 4}
_QUICK_TIMINGS_OTHERS = 1
#: Of a CPU's list, taken at even distances.
_CPU_TIMINGS = 6


@dataclass(frozen=True)
class Timing:
    """A problem to time.

    Attributes:
        label: where it comes from, such as ``"Llama-3-8B"``.
        tier: lower ones are timed first.
    """

    label: str
    problem: Problem
    tier: int


def check_problems(operation: str, device: Device, *, quick: bool) -> list[Problem]:
    """Problems on which every variant is compared with the reference, of every dtype that the operation takes.

    An operation without a list here gets two made from its schema.

    Raises:
        InvalidProblemError: the made-up sizes do not fit the operation: it needs a list here.
    """
    from kernelcast.kernels import operation as operation_of

    schema = operation_of(operation).schema
    values = _CHECKS[operation] if operation in _CHECKS else _generic(schema)
    common = {"threads": _threads(device)}
    kept = values[: 3 if quick else None]
    found = [
        schema.problem(dtype=dtype, **common, **each)
        for dtype, each in product(schema.dtypes, kept)
        if dtype in DTYPES or not set(schema.dtypes) & set(DTYPES)
    ]
    if device.kind == "gpu" and "float32" in schema.dtypes:
        # The same float32 kernels with other products inside.
        found += [schema.problem(dtype="float32", allow_tf32=True, **common, **each) for each in kept[:4]]
    return list(dict.fromkeys(found))


def timing_problems(device: Device, *, quick: bool, operations: Sequence[str]) -> list[Timing]:
    """Problems to time, the most telling ones first."""
    found = list(_gpu_timings() if device.kind == "gpu" else _cpu_timings(device, quick=quick))
    found = [each for each in found if each.problem.operation in operations]
    if quick:
        kept = {name: _QUICK_TIMINGS.get(name, _QUICK_TIMINGS_OTHERS) for name in operations}
        found = [
            each
            for name, count in kept.items()
            for each in [one for one in found if one.problem.operation == name][:count]
        ]
    return sorted(found, key=lambda each: each.tier)


def corners(block: Block, most: int) -> np.ndarray:
    """Row numbers of a few configs that differ as much as can be: for each parameter a row with its smallest value and
    one with its largest (of texts and flags, one with each), then rows at even distances, ``most`` in all.
    """
    import numpy as np

    chosen: list[int] = []
    for column in block.columns.values():
        values = np.unique(column)
        if column.dtype.kind in "iu" and len(values):
            values = values[[0, -1]]
        # Counted from both ends, so that the first rows do not serve for every parameter.
        for place, value in enumerate(values):
            rows = np.flatnonzero(column == value)
            chosen.append(int(rows[-1 if place % 2 else 0]))
    chosen += np.linspace(0, block.length - 1, min(most, block.length)).astype(int).tolist()
    distinct = list(dict.fromkeys(chosen))
    return np.array(sorted(distinct[:most]), dtype=np.intp)


def _gpu_timings() -> Iterator[Timing]:
    from kernelcast.kernels import problem

    for number, (m, n, k) in enumerate(_SKINNY):
        found = problem("gemm", m=m, n=n, k=k, dtype="float16")
        yield Timing("small output, long sum", found, 0 if number < 3 else 2)
    for network, layers in _LAYERS.items():
        for (number, (n, k)), m in product(enumerate(layers), _ROWS):
            main = network == "Llama-3-8B"
            tier = (0 if number < 2 else 2) if main else 4
            found = problem("gemm", m=m, n=n, k=k, layout="nt", dtype="bfloat16")
            yield Timing(network, found, tier)
    for network, dtype in (("Llama-3-8B", "bfloat16"), ("Llama-2-7B", "float16")):
        main = network == "Llama-3-8B"
        for (number, (n, k)), m in product(enumerate(_LAYERS[network]), _ROWS[:-1]):
            # Weights of 8 bits: where they are what takes the time, not where there are many rows.
            found = problem("mixed_gemm", m=m, n=n, k=k, layout="nt", dtype=dtype)
            yield Timing(f"{network}, int8", found, (1 if number == 0 else 3) if main else 4)
    yield Timing("float32", problem("gemm", m=1024, n=1024, k=1024, dtype="float32"), 3)
    yield Timing("TF32", problem("gemm", m=1024, n=1024, k=1024, dtype="float32", allow_tf32=True), 3)
    for number, (name, batch, c, size, k, kernel, stride, groups) in enumerate(_CONVOLUTIONS):
        for layout in ("nchw", "nhwc"):
            found = problem(
                "conv2d", n=batch, c=c, h=size, w=size, k=k, r=kernel, s=kernel, stride_h=stride, stride_w=stride,
                pad_h=kernel // 2, pad_w=kernel // 2, groups=groups, layout=layout, dtype="float16",
            )  # fmt: skip
            yield Timing(name, found, _tier(number) + (layout == "nhwc"))
    for number, (name, batch, heads, kv_heads, q_len, kv_len, head_dim, causal) in enumerate(_ATTENTION):
        found = problem(
            "attention", batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
            causal=causal, dtype="bfloat16",
        )  # fmt: skip
        yield Timing(name, found, _tier(number))
    for number, (rows, columns) in enumerate(_SOFTMAX):
        yield Timing(
            "softmax", problem("softmax", rows=rows, columns=columns, dtype="float16"), _tier(number)
        )
    for operation, layers in (("layernorm", _LAYERNORM), ("rmsnorm", _RMSNORM)):
        for number, (name, rows, columns) in enumerate(layers):
            yield Timing(
                name, problem(operation, rows=rows, columns=columns, dtype="bfloat16"), _tier(number)
            )
    for number, (name, batch, m, n, k, layout, broadcast) in enumerate(_BATCHES):
        found = problem(
            "batched_gemm", batch=batch, m=m, n=n, k=k, layout=layout, broadcast=broadcast, dtype="bfloat16"
        )
        yield Timing(name, found, _tier(number))
    for number, (name, groups, m, n, k) in enumerate(_EXPERTS):
        found = problem(
            "grouped_gemm", groups=groups, m=m, n=n, k=k, layout="nt", distribution="skewed", dtype="bfloat16"
        )  # fmt: skip
        yield Timing(name, found, _tier(number))


def _tier(number: int) -> int:
    """Of an operation's list: the first three come with the first linear layers."""
    return 1 if number < 3 else 3


def _cpu_timings(device: Device, *, quick: bool) -> Iterator[Timing]:
    """To try the check out on a CPU: some of the demonstration's problems, which are scaled for that."""
    from kernelcast.demo_problems import OPERATIONS, training_problems
    from kernelcast.kernels import problem

    if quick:
        values: Mapping[str, dict[str, int]] = {
            "gemm": {"m": 32, "n": 32, "k": 256},
            "softmax": {"rows": 32, "columns": 512},
        }
        for name, sizes in values.items():
            yield Timing("small", problem(name, threads=_threads(device), **sizes), 0)
        return
    for name in OPERATIONS:
        problems = training_problems(name, device)
        step = max(len(problems) // _CPU_TIMINGS, 1)
        for tier, found in enumerate(problems[::step][:_CPU_TIMINGS]):
            yield Timing("demonstration", found, tier)


def _generic(schema: ProblemSchema) -> tuple[dict[str, Any], ...]:
    names = [dim.name for dim in schema.dims if dim.default is None]
    return tuple({name: sizes[i % len(sizes)] for i, name in enumerate(names)} for sizes in _GENERIC)


def _threads(device: Device) -> int:
    from kernelcast.kernels.detect import default_threads

    return default_threads() if device.kind == "cpu" else 0
