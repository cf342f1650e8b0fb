"""Convolution as a product of spectra, over the whole image or over overlapping tiles.

Sources: the convolution theorem; overlap-save, for instance Oppenheim and Schafer, "Discrete-time signal processing",
section 8.7; for convolutional networks Vasilache et al., "Fast convolutional nets with fbfft" (arXiv 1412.7580).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import (
    HAS_IMAGES,
    SHARED_MODULES,
    UNIT_STRIDE,
    empty_images,
    flops_rule,
    join_tiles,
    padded,
    scratch_rule,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch

#: Input channels up to which the spectra may be summed channel by channel.
MAX_ACCUMULATED = 256


@lru_cache(maxsize=4096)
def fast_length(length: int) -> int:
    """The smallest number of at least ``length`` without prime factors above 5: FFTs of others are slower."""
    best = 1 << max(length - 1, 0).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            # The smallest power of two that lifts this product to the length.
            best = min(best, three << max((-(-length // three) - 1).bit_length(), 0))
            three *= 3
        five *= 5
    return best


def transform_sizes(geometry: Geometry, tile: int) -> tuple[int, int]:
    """Rows and columns of each transform: the tile, or less where the whole padded image needs less."""
    whole = tuple(fast_length(size) for size in geometry.padded)
    return (min(tile, whole[0]), min(tile, whole[1])) if tile else (whole[0], whole[1])


def _each_size(geometry: Geometry, columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Of each row: elements of one transform, and tiles of one image. A tile that the kernel overfills counts as one."""
    elements, tiles = [], []
    for tile in columns["tile"].tolist():
        sizes = transform_sizes(geometry, tile)
        count = 1
        for size, extent, outputs in zip(sizes, geometry.extent, (geometry.p, geometry.q), strict=True):
            count *= -(-outputs // max(size - extent + 1, 1))
        elements.append(sizes[0] * (sizes[1] // 2 + 1) * 2.0)
        tiles.append(float(count))
    return np.array(elements), np.array(tiles)


def _flops(geometry: Geometry, columns: Columns) -> Amount:
    elements, tiles = _each_size(geometry, columns)
    # 5 N log2 N operations a complex transform of N points, half of that for real input; 8 a complex product and sum.
    planes = geometry.n * (geometry.c + geometry.k) * tiles + geometry.k * geometry.group_channels
    products = geometry.n * tiles * geometry.k * geometry.group_channels
    return planes * 2.5 * elements * np.log2(elements) + products * 4.0 * elements


def _held_bytes(geometry: Geometry, columns: Columns) -> Amount:
    elements, tiles = _each_size(geometry, columns)
    # Spectra of input, weight and output (each complex number is two elements), the tiles cut out before, those that
    # come back after; the batched product needs the three spectra a second time, frequency by frequency.
    tiled = geometry.n * tiles * (geometry.c + geometry.k)
    spectra = (tiled + geometry.k * geometry.group_channels) * (1.0 + (columns["product"] == "bmm"))
    return geometry.element_bytes * elements * (spectra + tiled)


@register_variant("conv2d")
class Fft(Variant):
    """Real FFTs of input tiles and weight, their products summed over the channels, and the inverse.

    The number of operations hardly grows with the kernel, so that large kernels gain most. The channel sums run one
    channel after the other over whole spectra, or as one batched complex product with a matrix a frequency.
    """

    name = "fft"
    backend = "torch"
    doc = "torch.fft.rfft2, a product of spectra, torch.fft.irfft2"
    parameters = (
        Parameter(
            "tile",
            (0, 16, 32, 64, 128, 256),
            "rows and columns of a transform; 0 is the whole image",
            (0, 32, 128),
        ),
        Parameter("product", ("accumulate", "bmm"), "how spectra are summed over the input channels"),
    )
    source_modules = SHARED_MODULES
    rules = (
        HAS_IMAGES,
        UNIT_STRIDE,
        Rule(
            "float32",
            "FFTs of 16-bit numbers are not to be had on a CPU and lose accuracy on a GPU",
            check=lambda problem, columns, device: problem.dtype == "float32",
            explain=lambda problem, columns, device: problem.dtype,
        ),
        Rule(
            "tile-above-kernel",
            "a tile below twice the kernel's span overlaps its neighbours by more than half, and most of it is thrown away",
            check=lambda problem, columns, device: (
                (columns["tile"] == 0) | (columns["tile"] >= 2 * max(Geometry.of(problem).extent))
            ),
            explain=lambda problem, columns, device: (
                f"{columns['tile'][0]} < 2 * {max(Geometry.of(problem).extent)}"
            ),
        ),
        Rule(
            "tile-below-image",
            "a tile that covers the padded image is the whole image, which tile 0 is",
            check=lambda problem, columns, device: (
                (columns["tile"] == 0) | (columns["tile"] < max(transform_sizes(Geometry.of(problem), 0)))
            ),
            explain=lambda problem, columns, device: (
                f"{columns['tile'][0]} >= {max(transform_sizes(Geometry.of(problem), 0))}"
            ),
        ),
        Rule(
            "sum-of-channels",
            "with one channel in a group there is nothing to sum, so a matrix a frequency has one element",
            check=lambda problem, columns, device: (
                (columns["product"] == "accumulate") | (problem["c"] > problem["groups"])
            ),
            explain=lambda problem, columns, device: f"c={problem['c']}, groups={problem['groups']}",
        ),
        Rule(
            "few-channels",
            f"each input channel passes over the whole output spectrum: more than {MAX_ACCUMULATED} passes are slow",
            check=lambda problem, columns, device: (
                (columns["product"] == "bmm") | (problem["c"] // problem["groups"] <= MAX_ACCUMULATED)
            ),
            explain=lambda problem, columns, device: f"{problem['c'] // problem['groups']} channels",
        ),
        flops_rule(_flops, 4.0, "the transforms cost more than four times the operations of the sum itself"),
        scratch_rule(_held_bytes),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        elements, tiles = _each_size(geometry, columns)
        accumulated = columns["product"] == "accumulate"
        again = (
            geometry.n
            * geometry.k
            * tiles
            * elements
            * geometry.element_bytes
            * (geometry.group_channels - 1.0)
        )
        return Work(
            flops=_flops(geometry, columns),
            traffic_bytes=geometry.traffic_bytes,
            # Every channel but the first reads and writes the output's spectrum again.
            scratch_bytes=_held_bytes(geometry, columns) + accumulated * again,
            calls=5.0 + np.where(accumulated, geometry.group_channels, 4.0),
            programs=np.where(accumulated, np.nan, elements / 2.0 * geometry.groups),
            inner_steps=float(geometry.group_channels),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch
        from torch.fft import irfft2, rfft2

        g = Geometry.of(problem)
        height, width = transform_sizes(g, int(config["tile"]))
        m_h, m_w = height - g.extent[0] + 1, width - g.extent[1] + 1
        rows, columns = -(-g.p // m_h), -(-g.q // m_w)
        per_group, group_out = g.group_channels, g.k // g.groups
        frequencies = height * (width // 2 + 1)
        batched = config["product"] == "bmm"

        def flipped(weight: torch.Tensor) -> torch.Tensor:
            # torch's convolution is a correlation: flipping the kernel makes it the convolution that spectra multiply to.
            if g.dilation == (1, 1):
                return weight.flip(2, 3)
            spread = torch.zeros(g.k, per_group, *g.extent, dtype=weight.dtype, device=weight.device)
            spread[:, :, :: g.dilation[0], :: g.dilation[1]] = weight.flip(2, 3)
            return spread

        def accumulate(image: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
            image = image.unsqueeze(2)
            kernel = kernel.unsqueeze(3)
            out = image[:, :, :, 0] * kernel[:, :, 0]
            for channel in range(1, per_group):
                out.addcmul_(image[:, :, :, channel], kernel[:, :, channel])
            return out

        def batch(image: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
            # One [images * tiles, c / groups] @ [c / groups, k / groups] for each group and frequency.
            left = image.permute(1, 4, 0, 3, 2).reshape(g.groups * frequencies, -1, per_group)
            right = kernel.permute(0, 3, 2, 1).reshape(g.groups * frequencies, per_group, group_out)
            out = torch.bmm(left, right).view(g.groups, frequencies, g.n, rows * columns, group_out)
            return out.permute(2, 0, 4, 3, 1).contiguous()

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            full = ((rows - 1) * m_h + height, (columns - 1) * m_w + width)
            windows = (
                padded(x, *g.pad, *full, channels_last=False).unfold(2, height, m_h).unfold(3, width, m_w)
            )
            # [n, groups, c / groups, tiles, frequencies] and [groups, k / groups, c / groups, frequencies].
            image = rfft2(windows).reshape(g.n, g.groups, per_group, rows * columns, frequencies)
            kernel = rfft2(flipped(weight), s=(height, width)).reshape(
                g.groups, group_out, per_group, frequencies
            )
            product = batch(image, kernel) if batched else accumulate(image, kernel)
            product = product.reshape(g.n, g.k, rows, columns, height, width // 2 + 1)
            tiles = irfft2(product, s=(height, width))
            out = empty_images(g.n, g.k, g.p, g.q, channels_last=g.channels_last, like=x)
            # The first extent - 1 rows and columns of each tile hold sums that wrapped around.
            join_tiles(tiles[..., g.extent[0] - 1 :, g.extent[1] - 1 :], out)
            return out

        return run
