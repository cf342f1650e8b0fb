"""Winograd's minimal filtering for 3x3 kernels: fewer multiplications, between transforms that only add and scale.

Source: Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016 (arXiv 1509.09308), section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import (
    DENSE,
    HAS_IMAGES,
    ORDERS,
    PASSES_DIFFER,
    SHARED_MODULES,
    UNIT_STRIDE,
    empty_images,
    flops_rule,
    join_tiles,
    padded,
    pass_images,
    passes,
    scratch_rule,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch

#: By output tile: the matrices B^T (input), G (weight) and A^T (output) of F(tile, 3). In one dimension
#: y = A^T [(G g) * (B^T d)], for an input d of tile + 2 elements and a kernel g of 3.
TRANSFORMS = {
    2: (
        ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
        ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
        ((1, 1, 1, 0), (0, 1, -1, -1)),
    ),
    4: (
        (
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        (
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
        ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
    ),
}


def transforms_2d(tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """B^T, G and A^T for both dimensions at once (float64): they act on flattened patches, kernels and tiles."""
    b, g, a = (np.array(matrix, dtype=np.float64) for matrix in TRANSFORMS[tile])
    return np.kron(b, b), np.kron(g, g), np.kron(a, a)


def _tiles(geometry: Geometry, tile: Any) -> Any:
    """Tiles of one image."""
    return -(-geometry.p // tile) * -(-geometry.q // tile)


def _flops(geometry: Geometry, columns: Columns) -> Amount:
    tile = columns["tile"].astype(np.float64)
    points = (tile + 2.0) ** 2
    tiles = geometry.n * _tiles(geometry, tile)
    weight = 2.0 * points * geometry.taps * geometry.k * geometry.c
    around = 2.0 * points * tiles * (points * geometry.c + tile**2 * geometry.k)
    return weight + around + 2.0 * points * tiles * geometry.k * geometry.c


def _pass_bytes(geometry: Geometry, tile: Any) -> Any:
    """Temporary bytes of one image: its patches, both sides of the product, and its output tiles."""
    points = (tile + 2.0) ** 2
    elements = points * (2.0 * geometry.c + geometry.k) + tile**2 * geometry.k
    return geometry.element_bytes * elements * _tiles(geometry, tile)


def _fixed_bytes(geometry: Geometry, tile: Any) -> Any:
    """Temporary bytes beside the passes: the transformed weight and the padded input."""
    weight = (tile + 2.0) ** 2 * geometry.k * geometry.c
    rows, columns = (-(-size // tile) * tile + 2.0 for size in (geometry.p, geometry.q))
    return geometry.element_bytes * (weight + geometry.n * geometry.c * rows * columns)


def _held_bytes(geometry: Geometry, columns: Columns) -> Amount:
    tile = columns["tile"].astype(np.float64)
    return _fixed_bytes(geometry, tile) + pass_images(geometry, columns) * _pass_bytes(geometry, tile)


@register_variant("conv2d")
class Winograd(Variant):
    """F(tile x tile, 3x3): tiles and weight are transformed, multiplied point by point over the channels, and back.

    Each transform is one product with a Kronecker matrix, and the channel sums are one batched product of
    (tile + 2)^2 matrices, so that libraries do all the arithmetic: (tile + 2)^2 multiplications a tile and pair of
    channels, where the definition has 9 tile^2.
    """

    name = "winograd"
    backend = "torch"
    doc = "Winograd F(tile x tile, 3x3) by torch.mm and torch.bmm"
    parameters = (
        Parameter("tile", (2, 4), "output rows and columns of a tile"),
        Parameter(
            "channels", ORDERS, "memory order of the transformed tiles: channels before or after tiles"
        ),
        Parameter("images", (1, 0), "images transformed at once; 0 is all"),
    )
    source_modules = SHARED_MODULES
    rules = (
        HAS_IMAGES,
        PASSES_DIFFER,
        Rule(
            "kernel-3x3",
            "the transforms here are those of 3x3 kernels without gaps",
            check=lambda problem, columns, device: (
                problem["r"] == problem["s"] == 3 and problem["dil_h"] == problem["dil_w"] == 1
            ),
            explain=lambda problem, columns, device: (
                f"a {problem['r']}x{problem['s']} kernel, dilation {problem['dil_h']}x{problem['dil_w']}"
            ),
        ),
        UNIT_STRIDE,
        DENSE,
        Rule(
            "full-float32",
            "the transforms subtract numbers several times larger than the result, which leaves too little of 16 bits "
            "or of TF32's 11",
            check=lambda problem, columns, device: problem.dtype == "float32" and not problem.allow_tf32,
            explain=lambda problem, columns, device: "tf32" if problem.allow_tf32 else problem.dtype,
        ),
        flops_rule(_flops, 2.0, "the transforms cost more than twice the operations of the sum itself"),
        scratch_rule(_held_bytes),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        tile = columns["tile"].astype(np.float64)
        rounds = geometry.n / pass_images(geometry, columns).clip(min=1)
        return Work(
            flops=_flops(geometry, columns),
            traffic_bytes=geometry.traffic_bytes,
            scratch_bytes=_fixed_bytes(geometry, tile) + geometry.n * _pass_bytes(geometry, tile),
            calls=3.0 + 5.0 * rounds,
            programs=(tile + 2.0) ** 2,
            inner_steps=float(geometry.c),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        g = Geometry.of(problem)
        m = int(config["tile"])
        last = config["channels"] == "last"
        chunks = passes(g, int(config["images"]))
        points, rows, columns = (m + 2) ** 2, -(-g.p // m), -(-g.q // m)
        to_input, to_weight, to_output = (torch.from_numpy(matrix).float() for matrix in transforms_2d(m))
        matrices = {torch.device("cpu"): (to_input, to_weight, to_output)}

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if x.device not in matrices:
                matrices[x.device] = (to_input.to(x.device), to_weight.to(x.device), to_output.to(x.device))
            b, u, a = matrices[x.device]
            # [points, k, c], or [points, c, k]: the order that the batched product reads.
            taps = weight.permute(2, 3, 1, 0) if last else weight.permute(2, 3, 0, 1)
            kernels = torch.mm(u, taps.reshape(9, -1)).view(points, *taps.shape[2:])
            image = padded(x, *g.pad, rows * m + 2, columns * m + 2, channels_last=last)
            windows = image.unfold(2, m + 2, m).unfold(3, m + 2, m)
            out = empty_images(g.n, g.k, g.p, g.q, channels_last=g.channels_last, like=x)
            for chunk in chunks:
                images = chunk.stop - chunk.start
                if last:
                    patches = windows[chunk].permute(4, 5, 0, 2, 3, 1).reshape(points, -1)
                    product = torch.bmm(torch.mm(b, patches).view(points, -1, g.c), kernels)
                    tiles = torch.mm(a, product.view(points, -1)).view(m, m, images, rows, columns, g.k)
                    join_tiles(tiles.permute(2, 5, 3, 4, 0, 1), out[chunk])
                else:
                    patches = windows[chunk].permute(4, 5, 1, 0, 2, 3).reshape(points, -1)
                    product = torch.bmm(kernels, torch.mm(b, patches).view(points, g.c, -1))
                    tiles = torch.mm(a, product.view(points, -1)).view(m, m, g.k, images, rows, columns)
                    join_tiles(tiles.permute(3, 2, 4, 5, 0, 1), out[chunk])
            return out

        return run
