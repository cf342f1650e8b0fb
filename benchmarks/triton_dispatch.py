"""What a launch of an autotuned Triton kernel costs on the host before the kernel's own launch: Triton's autotuner and ours.

The kernel is a ``JITFunction`` whose ``run`` does nothing, so what is timed is the autotuner alone, and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bench_rounds
import numpy as np
from selection_speed import speed_table

#: Of the launches, by what they are called in the table.
_BARE = "the launch alone, its config given"
_THEIRS = "triton.autotune, key seen before"
_OURS = "kernelcast.triton.autotune, key seen before"
_OFF = "kernelcast.triton.autotune, KERNELCAST_DISABLE=1, key seen before"
_NAMED = ", arguments by name"


def main(quick: bool) -> dict[str, Any]:
    """Time everything. Quick: fewer rounds."""
    import tempfile
    from pathlib import Path

    import kernelcast as kc

    count = 15 if quick else 60
    with tempfile.TemporaryDirectory() as folder:
        kc.configure(cache=Path(folder) / "cache", store=False, models=Path(folder) / "models")
        calls = _calls()
        samples = bench_rounds.rounds(calls, count)
        kc.configure()
    figures = bench_rounds.summarise(samples)
    low = {name: float(np.min(values)) for name, values in samples.items()}
    added = {
        name: low[name] - low[_BARE + (_NAMED if name.endswith(_NAMED) else "")]
        for name in (_THEIRS, _OURS, _OFF, _THEIRS + _NAMED, _OURS + _NAMED)
    }
    ratios = {named: added[_OURS + named] / added[_THEIRS + named] for named in ("", _NAMED)}
    return {
        "title": "Dispatch of autotuned Triton kernels on the host",
        "figures": figures,
        "added_us": added,
        "overhead_ratio": ratios[""],
        "overhead_ratio_named": ratios[_NAMED],
        "tables": [
            speed_table(figures),
            {
                "title": "What the autotuner adds to the launch",
                "columns": ["what", "us"],
                "rows": [[name, us] for name, us in added.items()],
            },
        ],
        "notes": [
            bench_rounds.noise_note(figures, count),
            "The kernel takes three tensors, three sizes and six strides, as the matmul of Triton's tutorial does; its run does "
            "nothing.",
            "The second table is of the fastest round of each: what else runs on the machine only ever adds. There, what ours adds "
            f"to the launch is {ratios['']:.2f} of what Triton's adds, and {ratios[_NAMED]:.2f} with arguments by name.",
        ],
    }


def matmul_kernel(
    a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, BLOCK_M, BLOCK_N, BLOCK_K,
):  # fmt: skip
    """Only its arguments matter."""


def _calls() -> dict[str, Callable[[], Any]]:
    import os

    import torch
    import triton
    from triton.runtime.jit import JITFunction

    import kernelcast as kc
    import kernelcast.triton

    class Nothing(JITFunction):  # type: ignore[type-arg]
        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            return None

    torch.set_num_threads(1)
    configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 32}, num_warps=4)
        for m in (32, 64, 128)
        for n in (32, 64, 128)
    ]
    options: dict[str, Any] = {
        "configs": configs,
        "key": ["M", "N", "K"],
        "do_bench": lambda call, quantiles: [1.0, 1.0, 1.0],
    }
    bare = Nothing(matmul_kernel)
    theirs = triton.autotune(**options)(Nothing(matmul_kernel))
    ours = kc.triton.autotune(**options)(Nothing(matmul_kernel))
    off = kc.triton.autotune(**options)(Nothing(matmul_kernel))
    a, b, c = (torch.randn(64, 64) for _ in range(3))
    arguments = (a, b, c, 64, 64, 64, 64, 1, 64, 1, 64, 1)
    named = dict(zip(bare.arg_names, arguments, strict=False))
    own = configs[0].all_kwargs()

    def disabled() -> None:
        os.environ["KERNELCAST_DISABLE"] = "1"
        try:
            off[(1,)](*arguments)
        finally:
            del os.environ["KERNELCAST_DISABLE"]

    return {
        _BARE: lambda: bare[(1,)](*arguments, **own),
        _THEIRS: lambda: theirs[(1,)](*arguments),
        _OURS: lambda: ours[(1,)](*arguments),
        _OFF: disabled,
        _BARE + _NAMED: lambda: bare[(1,)](**named, **own),
        _THEIRS + _NAMED: lambda: theirs[(1,)](**named),
        _OURS + _NAMED: lambda: ours[(1,)](**named),
    }
