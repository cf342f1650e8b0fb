"""Whole networks with torch's operators and with the drop-ins: time, and outputs, on this CPU.

The networks have the layers of published ones and random weights. Both forms run the same Python: a network asks a table
of operators for its convolutions, products, normalisations and attention, and only that table differs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Paired rounds; the first of each form is dropped.
ROUNDS = 21

#: Largest difference of an output from torch's, over the largest output: float32 through some fifty layers.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Network:
    """A network ready to run: ``forward(operators)`` gives its output."""

    name: str
    forward: Callable[[Any], Any]


def main(quick: bool) -> dict[str, Any]:
    """Every network. Quick: two small ones, three rounds."""
    import torch

    import kernelcast as kc
    from kernelcast.kernels.detect import detect

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        root = Path(folder)
        if not quick:
            _train(detect("cpu"), root)
        kc.configure(
            models=root / "models", cache=root / "cache", store=root / "store", mode="verify", top_k=4
        )
        networks = [transformer(32, layers=1)] if quick else every()
        rows, differing = [], Counter[str]()
        for network in networks:
            rows.append(_compared(network, 3 if quick else ROUNDS, differing))
    return {
        "title": "Whole networks, torch's operators against the drop-ins",
        "tables": [
            {
                "title": "One forward pass",
                "columns": [
                    "network", "torch ms", "drop-ins ms", "torch / drop-ins", "quartiles", "first pass s", "difference",
                    "calls", "other than the default",
                ],
                "rows": rows,
            },
            {
                "title": "What ran instead of the default",
                "columns": ["candidate", "problems"],
                "rows": [[name, count] for name, count in differing.most_common()],
            },
        ],
        "notes": [
            f"One thread, float32, weights random. {ROUNDS} paired rounds, one form after the other in turns; the ratio is "
            "the median over rounds, the overhead of every call included. Above 1 the drop-ins are faster.",
            "The first pass verifies: four candidates at most for each shape that was not seen before in the run.",
            "Difference: the largest from torch's output, over the largest output. It must stay below "
            f"{TOLERANCE:g}.",
            "Where the ratio is near 1 the default wins most layers (3x3 convolutions over many channels, products over "
            "few rows): the drop-in then calls torch's own, and adds two to three microseconds a call. Where it is below 1 "
            "the calls are so short that this shows.",
        ],
    }  # fmt: skip


def every() -> list[Network]:
    """The networks of the table."""
    return [
        residual(),
        large_kernels(),
        *(transformer(length, layers=2) for length in (1, 16, 128, 512)),
    ]


def _train(device: Any, root: Path) -> None:
    """Models for the operations that the networks use, as the demonstration trains them."""
    from kernelcast.datasets.collect import collect
    from kernelcast.datasets.store import Store
    from kernelcast.datasets.timing import TimingPlan
    from kernelcast.demo_problems import OPERATIONS, training_problems
    from kernelcast.training.data import load_problems
    from kernelcast.training.train import train

    plan = TimingPlan(rounds=10, seconds=1.5, candidate_seconds=0.5)
    for name in OPERATIONS:
        collect(training_problems(name, device), device, root / "store", workload="training", plan=plan)
        data = load_problems(Store(root / "store"), name, device=device)
        train(data, device=device, models_dir=root / "models", tracking=False)


def _compared(network: Network, rounds: int, differing: Counter[str]) -> list[Any]:
    seen: list[Any] = []
    torchs, ours = operators_of_torch(), operators_of_kernelcast(seen)
    expected = network.forward(torchs)
    begin = time.perf_counter()
    out = network.forward(ours)
    first_s = time.perf_counter() - begin
    difference = float((out - expected).abs().max() / expected.abs().max())
    if not difference < TOLERANCE:
        raise RuntimeError(f"{network.name}: the outputs differ by {difference:.2g}.")
    calls = len(seen)
    others = _others() - differing
    differing.update(others)
    times: dict[str, list[float]] = {"torch": [], "ours": []}
    for number in range(rounds + 1):
        forms = [("torch", torchs), ("ours", operators_of_kernelcast(None))]
        for name, operators in forms if number % 2 else reversed(forms):
            begin = time.perf_counter()
            network.forward(operators)
            times[name].append(time.perf_counter() - begin)
    torch_s, ours_s = times["torch"][1:], times["ours"][1:]
    ratios = sorted(a / b for a, b in zip(torch_s, ours_s, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return [
        network.name,
        1e3 * statistics.median(torch_s),
        1e3 * statistics.median(ours_s),
        f"{middle:.3f}",
        f"{low:.3f} to {high:.3f}",
        first_s,
        f"{difference:.1e}",
        calls,
        sum(others.values()),
    ]


def _others() -> Counter[str]:
    """Candidates that run instead of the default, of the problems seen so far in this process."""
    from kernelcast.kernels import operation
    from kernelcast.runtime import dispatch

    found: Counter[str] = Counter()
    for selector in dispatch.selectors.values():
        for problem, selection in selector._ready.items():
            if selection.candidate != operation(problem.operation).default:
                found[f"{problem.operation}: {selection.candidate}"] += 1
    return found


def operators_of_torch() -> Any:
    """torch's own operators under the names that the networks use."""
    import torch
    import torch.nn.functional as F

    return SimpleNamespace(
        conv2d=F.conv2d, matmul=torch.matmul, attention=F.scaled_dot_product_attention, layer_norm=F.layer_norm,
        softmax=torch.softmax,
    )  # fmt: skip


def operators_of_kernelcast(seen: list[Any] | None) -> Any:
    """The drop-ins; each call is noted where there is a list."""
    import kernelcast as kc

    names = ("conv2d", "matmul", "attention", "layer_norm", "softmax")
    if seen is None:
        return SimpleNamespace(**{name: getattr(kc, name) for name in names})

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(function)
            return function(*arguments, **options)

        return call

    return SimpleNamespace(**{name: noted(getattr(kc, name)) for name in names})


def residual() -> Network:
    """The convolutions of ResNet-50 (He et al. 2016, table 1) with their strides and residuals, normalisation folded away."""
    import torch
    import torch.nn.functional as F

    def weight(k: int, c: int, size: int) -> torch.Tensor:
        return torch.randn(k, c, size, size) * (2.0 / (c * size * size)) ** 0.5 * 0.5

    stem = weight(64, 3, 7)
    blocks = []
    channels = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for number in range(count):
            stride = 2 if number == 0 and stage else 1
            shortcut = weight(4 * width, channels, 1) if number == 0 else None
            weights = (weight(width, channels, 1), weight(width, width, 3), weight(4 * width, width, 1))
            blocks.append((weights, shortcut, stride))
            channels = 4 * width
    head = torch.randn(2048, 1000) * 0.02
    image = torch.randn(1, 3, 224, 224)

    def forward(operators: Any) -> torch.Tensor:
        x = F.relu(operators.conv2d(image, stem, None, 2, 3))
        x = F.max_pool2d(x, 3, 2, 1)
        for (reduce, spread, expand), shortcut, stride in blocks:
            y = F.relu(operators.conv2d(x, reduce))
            y = F.relu(operators.conv2d(y, spread, None, stride, 1))
            y = operators.conv2d(y, expand)
            x = F.relu(y + (x if shortcut is None else operators.conv2d(x, shortcut, None, stride)))
        return operators.matmul(x.mean((2, 3)), head)

    return Network("residual network of 53 convolutions, 224 x 224", forward)


def large_kernels() -> Network:
    """Blocks of a large depthwise convolution between two of 1 x 1, as in RepLKNet (Ding et al. 2022)."""
    import torch
    import torch.nn.functional as F

    stages = []
    channels = 32
    for kernel, count in ((31, 2), (29, 2), (13, 2)):
        blocks = [
            (
                torch.randn(channels, channels, 1, 1) * (2.0 / channels) ** 0.5,
                torch.randn(channels, 1, kernel, kernel) * (1.0 / kernel),
                torch.randn(channels, channels, 1, 1) * (1.0 / channels) ** 0.5,
            )
            for _ in range(count)
        ]
        down = torch.randn(2 * channels, channels, 2, 2) * (1.0 / channels) ** 0.5
        stages.append((blocks, kernel, channels, down))
        channels *= 2
    image = torch.randn(1, 32, 56, 56)

    def forward(operators: Any) -> torch.Tensor:
        x = image
        for blocks, kernel, width, down in stages:
            for first, large, last in blocks:
                y = F.relu(operators.conv2d(x, first))
                y = F.relu(operators.conv2d(y, large, None, 1, kernel // 2, 1, width))
                x = x + operators.conv2d(y, last)
            x = operators.conv2d(x, down, None, 2)
        return x

    return Network("large-kernel network, depthwise 31 to 13", forward)


def transformer(length: int, *, layers: int) -> Network:
    """Pre-norm blocks (attention, then a feed-forward of four times the width) of width 512 with 8 heads."""
    import torch
    import torch.nn.functional as F

    width, heads = 512, 8
    weights = [
        tuple(
            torch.randn(*shape) * shape[0] ** -0.5
            for shape in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        )
        for _ in range(layers)
    ]
    scale, shift = torch.ones(width), torch.zeros(width)
    tokens = torch.randn(1, length, width)

    def forward(operators: Any) -> torch.Tensor:
        x = tokens
        for qkv, project, widen, narrow in weights:
            y = operators.layer_norm(x, (width,), scale, shift)
            parts = operators.matmul(y, qkv).view(1, length, 3, heads, width // heads)
            q, k, v = (each.contiguous() for each in parts.permute(2, 0, 3, 1, 4))
            y = operators.attention(q, k, v, is_causal=True)
            x = x + operators.matmul(y.transpose(1, 2).reshape(1, length, width), project)
            y = operators.layer_norm(x, (width,), scale, shift)
            x = x + operators.matmul(F.gelu(operators.matmul(y, widen)), narrow)
        return x

    return Network(f"transformer, {layers} block{'s' if layers > 1 else ''}, {length} tokens", forward)
