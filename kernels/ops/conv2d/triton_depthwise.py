"""Depthwise convolution in Triton: each output channel reads one input channel, so that there is no matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import SHARED_MODULES, empty_images
from kernelcast.kernels.ops.conv2d.triton_pieces import (
    POSITIONS,
    needs_wide_offsets,
    pointers,
    window_constants,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_rules import BLOCK_THREADS, DTYPE_SUPPORTED, MAX_INT32, NEEDS_GPU
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Kernels of up to so many taps are unrolled; of larger ones each row of up to so many columns. Beyond, compilation
#: would take longer than the kernel saves.
UNROLLED_TAPS = 9
UNROLLED_COLUMNS = 7
#: float32 sums of one thread, where it loads several neighbours at once, and where it loads them one at a time: then
#: each has an address of its own. With twice as many the loads in flight need more registers than there are.
MAX_SUMS = 32
MAX_SINGLE_SUMS = 16
#: Bytes that memory hands out at once.
SECTOR_BYTES = 32
SMALLEST_BLOCK_W = 4
WEIGHT_ORDERS = ("by_channel", "by_tap")

# (block_h, block_w, block_c, num_warps): for channels last, with either order of the weight, and for channels first.
QUICK_LAST = (
    (2, 4, 32, 1),
    (4, 8, 16, 2),
    (4, 8, 32, 4),
    (8, 8, 32, 4),
    (2, 8, 64, 4),
    (4, 4, 64, 2),
    (4, 8, 64, 2),
    (4, 8, 64, 4),
    (8, 8, 64, 4),
    (8, 8, 64, 8),
    (1, 8, 128, 4),
    (4, 4, 128, 4),
    (4, 8, 128, 4),
)
QUICK_FIRST = (
    (4, 32, 1, 1),
    (8, 32, 1, 1),
    (8, 32, 1, 2),
    (16, 32, 1, 2),
    (16, 32, 1, 4),
    (4, 64, 1, 2),
    (8, 64, 1, 4),
    (16, 64, 1, 4),
    (16, 64, 1, 8),
    (16, 16, 1, 2),
    (16, 16, 2, 4),
    (8, 16, 4, 4),
    (16, 16, 4, 4),
    (8, 8, 2, 1),
    (8, 8, 4, 2),
    (8, 8, 8, 2),
    (8, 8, 8, 4),
    (8, 8, 16, 4),
)


def _tiles(geometry: Geometry, columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles along the output rows, the output columns and the output channels."""
    along = ((geometry.p, "block_h"), (geometry.q, "block_w"), (geometry.k, "block_c"))
    rows, across, channels = (-(-size // columns[name]) for size, name in along)
    return rows, across, channels


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    rows, across, channels = _tiles(Geometry.of(problem), columns)
    return problem["n"] * rows * across * channels


def _elements(columns: Columns) -> np.ndarray:
    return columns["block_h"] * columns["block_w"] * columns["block_c"]


def _sums(columns: Columns, device: Device) -> np.ndarray:
    """float32 sums that one thread holds."""
    return _elements(columns) / (max(device.warp_size, 1) * columns["num_warps"])


def _allowed_sums(problem: Problem) -> int:
    g = Geometry.of(problem)
    return MAX_SUMS if g.channels_last and g.k == g.c and g.c % 16 == 0 else MAX_SINGLE_SUMS


def _limits(problem: Problem) -> tuple[tuple[str, int, int], ...]:
    """(parameter, size, largest useful block) of each side of a tile."""
    g = Geometry.of(problem)
    return tuple(
        (name, size, max(smallest, 1 << (size - 1).bit_length()))
        for name, size, smallest in (
            ("block_h", g.p, 1),
            ("block_w", g.q, SMALLEST_BLOCK_W),
            ("block_c", g.k, 1),
        )
    )


def _tile_fits(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    met = np.ones(len(columns["block_h"]), dtype=bool)
    for name, _, largest in _limits(problem):
        met &= columns[name] <= largest
    return met


def _adjacent(problem: Problem) -> tuple[str, int]:
    """The side of a tile whose elements are neighbours in memory, and the size of that dimension."""
    g = Geometry.of(problem)
    return ("block_c", g.k) if g.channels_last else ("block_w", g.q)


def _fills_sectors(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    name, size = _adjacent(problem)
    block = columns[name]
    return (block * problem.element_bytes >= SECTOR_BYTES) | (block >= size)


def _patch(size: int, outputs: int, block: np.ndarray, stride: int, extent: int) -> np.ndarray:
    """Input rows (or columns) that all tiles read along one axis: each its own, with those around them."""
    return np.minimum((block - 1.0) * stride + extent, size) * -(-outputs // block)


@register_variant("conv2d")
class TritonDepthwise(Variant):
    """A program adds up one tile of output pixels x channels, tap after tap, in float32.

    No tensor core could help. Neighbouring taps find their inputs in the level-1 cache. Channels last, a thread loads
    several channels at once; the weight is stored channel by channel, and ``by_tap`` turns it round first, so that its
    loads can do the same.
    """

    name = "triton_depthwise"
    backend = "triton"
    doc = "Triton: tiles of pixels x channels of a depthwise convolution, tap after tap"
    parameters = (
        Parameter("block_h", (1, 2, 4, 8, 16), "output rows of a tile"),
        Parameter("block_w", (SMALLEST_BLOCK_W, 8, 16, 32, 64), "output columns of a tile"),
        Parameter("block_c", (1, 2, 4, 8, 16, 32, 64, 128), "output channels of a tile"),
        Parameter("weight", WEIGHT_ORDERS, "order of the weight: as it is stored, or turned round first"),
        Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
    )
    rules = (
        NEEDS_GPU,
        DTYPE_SUPPORTED,
        Rule(
            "depthwise",
            "with several input channels a group, sums over channels are a matrix product",
            check=lambda problem, columns, device: problem["groups"] == problem["c"],
            explain=lambda problem, columns, device: f"c={problem['c']}, groups={problem['groups']}",
        ),
        POSITIONS,
        BLOCK_THREADS,
        Rule(
            "tile-fits",
            "a side of more than its dimension (rounded up to a power of two) computes only padding there",
            check=_tile_fits,
            explain=lambda problem, columns, device: ", ".join(
                f"{name}={columns[name][0]} for {size}"
                for name, size, largest in _limits(problem)
                if columns[name][0] > largest
            ),
        ),
        Rule(
            "grid",
            "the first dimension of a grid holds at most 2**31 - 1 blocks",
            check=lambda problem, columns, device: _programs(problem, columns) <= MAX_INT32,
            explain=lambda problem, columns, device: f"{_programs(problem, columns)[0]} blocks",
        ),
        Rule(
            "sums",
            "a thread has 255 registers: each sum has a load in flight, and an address where neighbours are not known to "
            "be aligned",
            check=lambda problem, columns, device: _sums(columns, device) <= _allowed_sums(problem),
            explain=lambda problem, columns, device: (
                f"{_sums(columns, device)[0]:g} > {_allowed_sums(problem)} sums a thread"
            ),
        ),
        Rule(
            "threads-busy",
            "threads beyond the tile's elements repeat the work of others",
            check=lambda problem, columns, device: _sums(columns, device) >= 1,
            explain=lambda problem, columns, device: (
                f"{_elements(columns)[0]} elements for {max(device.warp_size, 1) * columns['num_warps'][0]} threads"
            ),
        ),
        Rule(
            "fills-sectors",
            f"memory hands out {SECTOR_BYTES} bytes at once: a tile that is narrower along the adjacent dimension drops "
            "part of what it reads",
            check=_fills_sectors,
            explain=lambda problem, columns, device: (
                f"{_adjacent(problem)[0]}={columns[_adjacent(problem)[0]][0]} of {problem.element_bytes}-byte elements"
            ),
        ),
        Rule(
            "weight-as-stored",
            "channels first, the threads of a channel share one factor a tap, which no other order makes cheaper",
            check=lambda problem, columns, device: (
                (columns["weight"] == "by_channel") | (problem["layout"] == "nhwc")
            ),
            explain=lambda problem, columns, device: f"layout={problem['layout']}",
        ),
    )
    source_modules = (
        *SHARED_MODULES,
        "kernelcast.kernels.ops.conv2d.triton_depthwise_jit",
        "kernelcast.kernels.ops.conv2d.triton_pieces",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the lists above; the rules leave those of the problem's layout."""
        if subset != "default":
            return super().space(subset)
        sizes = np.array([*QUICK_LAST, *QUICK_LAST, *QUICK_FIRST])
        turned = np.arange(len(sizes)) // len(QUICK_LAST) == 1
        columns = {
            "block_h": sizes[:, 0],
            "block_w": sizes[:, 1],
            "block_c": sizes[:, 2],
            "weight": np.where(turned, "by_tap", "by_channel"),
            "num_warps": sizes[:, 3],
        }
        return Block(self.name, columns, len(sizes))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        g = Geometry.of(problem)
        rows, across, channels = (count.astype(np.float64) for count in _tiles(g, columns))
        turned = columns["weight"] == "by_tap"
        patches = _patch(g.h, g.p, columns["block_h"], g.stride[0], g.extent[0]) * _patch(
            g.w, g.q, columns["block_w"], g.stride[1], g.extent[1]
        )
        programs = g.n * rows * across * channels
        return Work(
            flops=2.0 * g.taps * programs * _elements(columns),
            # Tiles read the pixels around them again. What strides leave out is read with its neighbours.
            traffic_bytes=g.output_bytes
            + np.maximum(g.input_bytes, float(g.element_bytes) * g.n * g.c * patches)
            + g.weight_bytes * np.maximum(g.n * rows * across, 1.0),
            scratch_bytes=g.weight_bytes * turned,
            calls=1.0 + turned,
            programs=programs,
            warps=columns["num_warps"],
            shared_bytes=0.0,
            accumulators=_sums(columns, device),
            inner_steps=float(g.taps),
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.conv2d.triton_depthwise_jit import conv2d_depthwise

        g = Geometry.of(problem)
        stride_k, stride_tap = (1, g.k) if config["weight"] == "by_tap" else (g.taps, 1)
        return KernelSpec(
            kernel=conv2d_depthwise,
            tensors=pointers(problem),
            integers={
                "H": g.h,
                "W": g.w,
                "HW": g.h * g.w,
                "P": g.p,
                "Q": g.q,
                "PQ": g.p * g.q,
                "C": g.c,
                "K": g.k,
                "stride_wk": stride_k,
                "stride_wt": stride_tap,
            },
            constants={
                "MULTIPLIER": g.k // g.c,
                **window_constants(g),
                "BLOCK_H": int(config["block_h"]),
                "BLOCK_W": int(config["block_w"]),
                "BLOCK_C": int(config["block_c"]),
                "CHANNELS_LAST": g.channels_last,
                "UNROLL_ROWS": g.taps <= UNROLLED_TAPS,
                "UNROLL_COLUMNS": g.s <= UNROLLED_COLUMNS,
                "WIDE": needs_wide_offsets(g),
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        g = Geometry.of(problem)
        single = {name: np.array([value]) for name, value in config.items()}
        programs = int(_programs(problem, single)[0])
        launch = self.compile_spec(problem, config).bind((programs,))
        turned = config["weight"] == "by_tap"

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = empty_images(g.n, g.k, g.p, g.q, channels_last=g.channels_last, like=x)
            if not programs:
                return out
            if turned:
                by_tap = empty((g.taps, g.k), dtype=weight.dtype, device=weight.device)
                weight = by_tap.copy_(weight.reshape(g.k, g.taps).t())
            launch(x, weight, out)
            return out

        return run
