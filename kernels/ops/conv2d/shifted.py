"""The kernel's taps one after the other: each adds a product of shifted input and one slice of the weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import (
    HAS_IMAGES,
    NOT_A_PLAIN_PRODUCT,
    ORDERS,
    SHARED_MODULES,
    empty_images,
    in_order,
    padded,
    scratch_rule,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch

MAX_TAPS = 121


def _grid(geometry: Geometry) -> tuple[int, int]:
    """Rows and columns of the padded input in one phase of the stride."""
    return -(-geometry.padded[0] // geometry.stride[0]), -(-geometry.padded[1] // geometry.stride[1])


def _phases(geometry: Geometry) -> list[tuple[int, int]]:
    """The phases of the stride that some tap reads: its row and column, modulo the stride."""
    rows, columns = (
        # After this many taps the phases repeat.
        sorted({tap * dilation % stride for tap in range(min(taps, stride // math.gcd(stride, dilation)))})
        for taps, dilation, stride in zip(
            (geometry.r, geometry.s), geometry.dilation, geometry.stride, strict=True
        )
    )
    return [(row, column) for row in rows for column in columns]


def _computed_rows(geometry: Geometry, columns: Columns) -> Amount:
    """Output pixels that each tap's product computes, with those between the output's rows and images."""
    if geometry.depthwise:
        return float(geometry.n) * geometry.p * geometry.q
    height, width = _grid(geometry)
    image = (geometry.p - 1.0) * width + geometry.q
    flat = max(geometry.n - 1.0, 0.0) * height * width + image
    return (columns["channels"] == "last") * (flat - geometry.n * image) + geometry.n * image


def _held_bytes(geometry: Geometry, columns: Columns) -> Amount:
    height, width = _grid(geometry)
    if geometry.depthwise:
        return (
            geometry.element_bytes * geometry.n * geometry.c * float(geometry.padded[0]) * geometry.padded[1]
        )
    phases = len(_phases(geometry)) + (geometry.stride != (1, 1)) * geometry.stride[0] * geometry.stride[1]
    pixels = float(geometry.n) * height * width
    return geometry.element_bytes * (
        pixels * (geometry.c * phases + geometry.k) + geometry.k * geometry.reduction
    )


@register_variant("conv2d")
class Shifted(Variant):
    """A sum over the taps, without unfolding.

    The padded input is split once into the phases of the stride. In a phase, every tap reads one run of pixels that
    starts at the tap's offset, so that its product with the weight's slice needs no copy; the price is the pixels
    between the end of an output row and the start of the next, computed and dropped. Depthwise, the products are
    element by element, on views that need no phases.
    """

    name = "shifted"
    backend = "torch"
    doc = "one torch.baddbmm, torch.addmm or torch.addcmul a tap"
    parameters = (Parameter("channels", ORDERS, "memory order of input and sum: channels first or last"),)
    source_modules = SHARED_MODULES
    rules = (
        HAS_IMAGES,
        NOT_A_PLAIN_PRODUCT,
        Rule(
            "dense-or-depthwise",
            "between one group and one channel a group, each tap would be a batch of small products",
            check=lambda problem, columns, device: problem["groups"] in (1, problem["c"]),
            explain=lambda problem, columns, device: f"c={problem['c']}, groups={problem['groups']}",
        ),
        Rule(
            "float32",
            "the sum is kept in the output's dtype; rounded to 16 bits after every tap it would lose accuracy that the "
            "operation promises",
            check=lambda problem, columns, device: problem.dtype == "float32",
            explain=lambda problem, columns, device: problem.dtype,
        ),
        Rule(
            "few-taps",
            "each tap reads and writes the whole sum: over more than 121 taps that costs more than any other way",
            check=lambda problem, columns, device: problem["r"] * problem["s"] <= MAX_TAPS,
            explain=lambda problem, columns, device: f"{problem['r'] * problem['s']} > {MAX_TAPS} taps",
        ),
        scratch_rule(_held_bytes),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        pixels = _computed_rows(geometry, columns)
        # Every tap but the first reads and writes the sum again.
        again = geometry.element_bytes * (geometry.taps - 1.0) * geometry.k * pixels
        return Work(
            flops=2.0 * geometry.reduction * geometry.k * pixels,
            traffic_bytes=geometry.traffic_bytes,
            scratch_bytes=_held_bytes(geometry, columns) + again,
            calls=2.0 + geometry.taps + (not geometry.depthwise) * (1.0 + len(_phases(geometry))),
            inner_steps=float(geometry.taps),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        g = Geometry.of(problem)
        last = config["channels"] == "last"
        if g.depthwise:
            return _depthwise(g, last)
        return _dense_last(g) if last else _dense_first(g)


def _depthwise(g: Geometry, last: bool) -> Launcher:
    import torch

    rows, columns = (g.p - 1) * g.stride[0] + 1, (g.q - 1) * g.stride[1] + 1

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        image = padded(x, *g.pad, *g.padded, channels_last=last)
        sums = empty_images(g.n, g.k, g.p, g.q, channels_last=last, like=x)
        out = sums.unflatten(1, (g.c, g.k // g.c))
        factors = weight.view(g.c, g.k // g.c, g.r, g.s, 1, 1)
        for i in range(g.r):
            for j in range(g.s):
                top, left = i * g.dilation[0], j * g.dilation[1]
                seen = image[
                    :, :, top : top + rows : g.stride[0], left : left + columns : g.stride[1]
                ].unsqueeze(2)
                if i == j == 0:
                    torch.mul(seen, factors[:, :, i, j], out=out)
                else:
                    out.addcmul_(seen, factors[:, :, i, j])
        return in_order(sums, g.channels_last)

    return run


def _taps(g: Geometry) -> list[tuple[int, int, int]]:
    """Of each tap, in the order of the weight: the index of its phase, and its row and column there."""
    phases = _phases(g)
    found = []
    for i in range(g.r):
        for j in range(g.s):
            row, row_phase = divmod(i * g.dilation[0], g.stride[0])
            column, column_phase = divmod(j * g.dilation[1], g.stride[1])
            found.append((phases.index((row_phase, column_phase)), row, column))
    return found


def _split(x: torch.Tensor, g: Geometry, channels_last: bool) -> list[torch.Tensor]:
    """The padded input's phases, each dense in the memory order."""
    height, width = _grid(g)
    image = padded(x, *g.pad, height * g.stride[0], width * g.stride[1], channels_last=channels_last)
    if g.stride == (1, 1):
        return [image]
    return [in_order(image[:, :, a :: g.stride[0], b :: g.stride[1]], channels_last) for a, b in _phases(g)]


def _dense_first(g: Geometry) -> Launcher:
    import torch

    height, width = _grid(g)
    run_length = (g.p - 1) * width + g.q
    taps = _taps(g)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        slices = (
            weight.permute(2, 3, 0, 1).contiguous().view(g.taps, 1, g.k, g.c).expand(g.taps, g.n, g.k, g.c)
        )
        phases = [phase.view(g.n, g.c, height * width) for phase in _split(x, g, channels_last=False)]
        sums = empty_images(g.n, g.k, g.p, width, channels_last=False, like=x)
        run_of_sums = sums.view(g.n, g.k, g.p * width)[:, :, :run_length]
        for tap, (phase, row, column) in enumerate(taps):
            start = row * width + column
            seen = phases[phase][:, :, start : start + run_length]
            if tap == 0:
                torch.bmm(slices[tap], seen, out=run_of_sums)
            else:
                run_of_sums.baddbmm_(slices[tap], seen)
        return in_order(sums[..., : g.q], g.channels_last)

    return run


def _dense_last(g: Geometry) -> Launcher:
    import torch

    from kernelcast.kernels.memory import empty

    height, width = _grid(g)
    run_length = (g.n - 1) * height * width + (g.p - 1) * width + g.q
    taps = _taps(g)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        slices = weight.permute(2, 3, 1, 0).contiguous().view(g.taps, g.c, g.k)
        phases = [phase.permute(0, 2, 3, 1).view(-1, g.c) for phase in _split(x, g, channels_last=True)]
        sums = empty((g.n * height * width, g.k), dtype=x.dtype, device=x.device)
        run_of_sums = sums[:run_length]
        for tap, (phase, row, column) in enumerate(taps):
            start = row * width + column
            seen = phases[phase][start : start + run_length]
            if tap == 0:
                torch.mm(seen, slices[tap], out=run_of_sums)
            else:
                run_of_sums.addmm_(seen, slices[tap])
        images = sums.view(g.n, height, width, g.k).permute(0, 3, 1, 2)
        return in_order(images[:, :, : g.p, : g.q], g.channels_last)

    return run
