"""The order in which a tuned Triton kernel's configs are tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kernelcast.costmodel import RankingModel
from kernelcast.errors import KernelcastError, warn
from kernelcast.kernels import Device, Problem
from kernelcast.runtime import ModelWarning
from kernelcast.runtime.triton_configs import MeasuredKey, nearest, spread, table_of

#: What a ranking is by: a trained model, the kernel's own ``perf_model``, the nearest measured keys, or nothing.
RANKED_BY = ("model", "perf_model", "nearest", "spread")


@dataclass(frozen=True)
class ConfigOrder:
    """Configs in the order in which to try them.

    Attributes:
        places: of every config in the list that was ranked, the most promising first.
        by: one of :data:`RANKED_BY`.
        model_version: empty without a model.
    """

    places: tuple[int, ...]
    by: str
    model_version: str = ""


def rank(
    configs: Sequence[Any],
    problem: Problem,
    device: Device,
    *,
    variant: str,
    model: RankingModel | None,
    own: Sequence[float] | None,
    measured: Iterable[MeasuredKey],
) -> ConfigOrder:
    """Rank the configs of a kernel for one key.

    Args:
        configs: ``triton.Config`` objects, the default first.
        problem: the key.
        device: where.
        variant: the kernel's.
        model: that stands for the kernel on the device; None without one.
        own: what the kernel's own ``perf_model`` estimates for each config; None without one. It comes before all else.
        measured: what this process measured for other keys on this device.
    """
    if own is not None:
        return ConfigOrder(tuple(sorted(range(len(configs)), key=lambda at: own[at])), "perf_model")
    if model is not None:
        try:
            prediction = model.predict(problem, table_of(configs, variant), device)
            if prediction.covered.any():
                version = str(model.facts.get("version", ""))
                return ConfigOrder(tuple(prediction.order().tolist()), "model", version)
        except KernelcastError as error:
            warn(f"{error} Ranking without the model.", ModelWarning)
    near = nearest(configs, problem, measured)
    if near is not None:
        return ConfigOrder(tuple(near), "nearest")
    return ConfigOrder(tuple(spread(configs)), "spread")
