"""How near a few timings come to timing every config of a Triton kernel: a replay of PyTorch's recorded A100 products.

Each recorded product is a key of one kernel whose configs are the recorded Triton configs; keys come in a random order, as a
program meets them. For each the default and the first three of a ranking are "timed". No GPU is needed.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_data import A100_FILE, A100_WORKLOADS, ABSENT, DEVICE, recorded_store

if TYPE_CHECKING:
    from kernelcast.kernels import Candidate, Problem

#: Timed beside the default.
_TOP_K = 3
_RANKINGS = ("default alone", "random", "spread", "nearest")


class _Config:
    """What a ranking asks of a ``triton.Config``."""

    pre_hook = None

    def __init__(self, candidate: Candidate) -> None:
        self._values = candidate.parameters

    def all_kwargs(self) -> dict[str, Any]:
        return dict(self._values)


class _Key:
    """One product: its configs and their log latencies."""

    def __init__(self, problem: Problem, configs: list[_Config], log_latency: np.ndarray) -> None:
        from kernelcast.runtime.triton_configs import config_key

        self.problem, self.configs, self.log_latency = problem, configs, log_latency
        self.names = [config_key(config) for config in configs]

    def with_default(self, name: str) -> _Key:
        """The same with a config of that name declared first, if there is one."""
        first = self.names.index(name) if name in self.names else 0
        order = [first, *(place for place in range(len(self.configs)) if place != first)]
        return _Key(self.problem, [self.configs[place] for place in order], self.log_latency[order])


def main(quick: bool) -> dict[str, Any]:
    """Replay everything. Quick: fewer keys."""
    if not A100_FILE.is_file():
        raise SystemExit(ABSENT)
    count, orders = (40, 1) if quick else (150, 3)
    with tempfile.TemporaryDirectory() as folder:
        keys = _keys(Path(folder))
    rows, figures = [], {}
    for workload in A100_WORKLOADS:
        for default, what in zip(_defaults(keys[workload]), ("the best", "a middling"), strict=True):
            regret: dict[str, list[float]] = {name: [] for name in _RANKINGS}
            for seed in range(orders):
                _replay([key.with_default(default) for key in keys[workload]], count, seed, regret)
            found = {name: float(np.exp(-np.mean(values))) for name, values in regret.items()}
            figures[f"{workload}, {what} config declared first"] = found
            rows.append([workload, what, *found.values()])
    configs = float(np.mean([len(key.configs) for found in keys.values() for key in found]))
    return {
        "title": "A few timings of a Triton kernel's configs, beside timing all",
        "figures": figures,
        "configs": configs,
        "tables": [
            {
                "title": f"Efficiency of the fastest among the default and {_TOP_K} others, by how these are chosen",
                "columns": ["products of", "config declared first", *_RANKINGS],
                "rows": rows,
            }
        ],
        "notes": [
            f"Geometric means over the first {count} keys of {orders} random orders, the first key of all included; 1 is the "
            f"fastest of all {configs:.0f} configs (on average), which Triton's own autotuner would time.",
            "The config declared first is the best or a middling one of those that nearly every product has, by the geometric mean "
            "over all products of a workload.",
            "The constants of `nearest` were chosen on these records, among a few dozen combinations that differ by about a "
            "hundredth.",
        ],
    }


def _replay(keys: list[_Key], count: int, seed: int, regret: dict[str, list[float]]) -> None:
    from kernelcast.runtime.triton_configs import MeasuredKey, nearest, spread

    chance = random.Random(seed)
    chance.shuffle(keys)
    measured: list[MeasuredKey] = []
    for key in keys[:count]:
        others = list(range(1, len(key.configs)))
        by_spread = spread(key.configs)
        by_nearest = nearest(key.configs, key.problem, measured) or by_spread
        timed = {
            "default alone": [0],
            "random": [0, *chance.sample(others, _TOP_K)],
            "spread": by_spread[: _TOP_K + 1],
            "nearest": sorted({0, *by_nearest[:_TOP_K]}),
        }
        fastest = key.log_latency.min()
        for name, places in timed.items():
            regret[name].append(float(key.log_latency[places].min() - fastest))
        latency = {key.names[place]: float(np.exp(key.log_latency[place])) for place in timed["nearest"]}
        measured.append(MeasuredKey(key.problem, latency))


def _defaults(keys: list[_Key]) -> tuple[str, str]:
    """The best and the middling of the configs that nine of ten products have."""
    regrets: dict[str, list[float]] = {}
    for key in keys:
        for name, value in zip(key.names, key.log_latency - key.log_latency.min(), strict=True):
            regrets.setdefault(name, []).append(float(value))
    common = [name for name, values in regrets.items() if len(values) >= 0.9 * len(keys)]
    common.sort(key=lambda name: float(np.mean(regrets[name])))
    return common[0], common[len(common) // 2]


def _keys(folder: Path) -> dict[str, list[_Key]]:
    from kernelcast.training.data import load_problems

    found: dict[str, list[_Key]] = {workload: [] for workload in A100_WORKLOADS}
    for item in load_problems(recorded_store(folder), "gemm", device=DEVICE):
        rows = [row for row, candidate in enumerate(item.table) if candidate.variant.startswith("triton")]
        if len(rows) > _TOP_K + 1:
            configs = [_Config(item.table[row]) for row in rows]
            found[item.workload].append(_Key(item.problem, configs, item.log_latency[rows]))
    return found
