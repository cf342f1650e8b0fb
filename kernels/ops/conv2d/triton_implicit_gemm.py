"""Implicit GEMM in Triton: the convolution as a matrix product whose input operand is gathered, never stored.

Source of the mapping: Chetlur et al., "cuDNN: efficient primitives for deep learning" (arXiv 1410.0759), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
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
from kernelcast.kernels.ops.gemm.schema import GEMM
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import (
    ACCUMULATORS,
    BLOCK_THREADS,
    BLOCKS_FIT,
    DIMENSIONS,
    DTYPE_SUPPORTED,
    GRID,
    GROUP_DIFFERS,
    MAX_INT32,
    MAX_REGISTERS,
    MIN_TILE,
    NEEDS_GPU,
    REGISTERS,
    STAGES_FILLED,
    TENSOR_CORES,
    THREADS_BUSY,
    accumulators_per_thread,
    input_precision,
    matmul_shared_bytes,
    shared_memory_rule,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Of an element that is loaded alone: itself, and its address of 64 bits.
REGISTERS_OF_ONE_LOAD = 3


@lru_cache(maxsize=1024)
def product_of(problem: Problem) -> Problem:
    """The gemm that a convolution is, of one group: m output pixels, n filters, k products a sum."""
    g = Geometry.of(problem)
    return GEMM.problem(
        m=g.n * g.p * g.q,
        n=g.k // g.groups,
        k=g.reduction,
        dtype=problem.dtype,
        allow_tf32=problem.allow_tf32,
        layout="nt",
    )


def same_pixels(geometry: Geometry) -> bool:
    """Whether the output's pixels are the input's."""
    return geometry.taps == 1 and geometry.stride == (1, 1) and geometry.pad == (0, 0)


def input_is_grouped(geometry: Geometry) -> bool:
    """Whether the compiler knows that 16 neighbours of an input tile are neighbours in memory, and aligned."""
    if geometry.channels_last:
        return geometry.group_channels % 16 == 0
    return same_pixels(geometry) and (geometry.h * geometry.w) % 16 == 0


@lru_cache(maxsize=1024)
def multiplied(problem: Problem) -> Problem:
    """The gemm as the compiler sees it: its rows first, and with a leading dimension that lets it group loads, or not.

    Channels last: pixels are rows, and neighbouring channels are neighbours in memory. Channels first: filters are
    rows, and neighbouring pixels are neighbours in memory only where no kernel row, stride or padding comes between.
    """
    g = Geometry.of(problem)
    product = product_of(problem)
    m, n, k = (product[name] for name in ("m", "n", "k"))
    common: dict[str, Any] = {"dtype": problem.dtype, "allow_tf32": problem.allow_tf32, "k": k}
    # One element more than adjacent rows have: of the two numbers one is no multiple of 16.
    if g.channels_last:
        return GEMM.problem(m=m, n=n, layout="nt", lda=0 if input_is_grouped(g) else k + 1, **common)
    return GEMM.problem(m=n, n=m, layout="nn", ldb=0 if input_is_grouped(g) else m + 1, **common)


def multiplied_columns(problem: Problem, columns: Columns) -> Columns:
    """The tiles of :func:`multiplied`."""
    if problem["layout"] == "nhwc":
        return columns
    return {**columns, "block_m": columns["block_n"], "block_n": columns["block_m"]}


def _of_product(rule: Rule) -> Rule:
    """A rule of matrix products, asked about the product of one group in the config's terms."""

    def explain(problem: Problem, columns: Columns, device: Device) -> str:
        return rule.explain(product_of(problem), columns, device) if rule.explain else ""

    return Rule(
        rule.name,
        rule.reason,
        lambda problem, columns, device: rule.check(product_of(problem), columns, device),
        explain,
    )


def _of_multiplied(rule: Rule) -> Rule:
    """A rule of matrix products on the resources of a program, asked about the product that is compiled."""

    def explain(problem: Problem, columns: Columns, device: Device) -> str:
        if not rule.explain:
            return ""
        return rule.explain(multiplied(problem), multiplied_columns(problem, columns), device)

    return Rule(
        rule.name,
        rule.reason,
        lambda problem, columns, device: rule.check(
            multiplied(problem), multiplied_columns(problem, columns), device
        ),
        explain,
    )


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    tiles_m, tiles_n, _ = tiles(product_of(problem), columns)
    return tiles_m * tiles_n * problem["groups"]


def _single_registers(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Registers of one thread for its sums, and for one step's elements that are loaded one at a time."""
    g = Geometry.of(problem)
    alone = columns["block_m"] * (not input_is_grouped(g)) + columns["block_n"] * (g.reduction % 16 != 0)
    threads = max(device.warp_size, 1) * columns["num_warps"]
    registers: np.ndarray = (
        accumulators_per_thread(columns, device)
        + REGISTERS_OF_ONE_LOAD * alone * columns["block_k"] / threads
    )
    return registers


def shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of one block, in bytes."""
    return matmul_shared_bytes(multiplied(problem), multiplied_columns(problem, columns), device)


_GRID = Rule(
    "grid",
    GRID.reason,
    check=lambda problem, columns, device: _programs(problem, columns) <= MAX_INT32,
    explain=lambda problem, columns, device: f"{_programs(problem, columns)[0]} blocks",
)

# (block_m, block_n, block_k, num_stages, num_warps); group_m is 8. Few filters (16 to 64), then square and wide tiles.
QUICK_CONFIGS = (
    (64, 16, 32, 3, 2),
    (64, 16, 64, 3, 4),
    (128, 16, 32, 3, 4),
    (128, 16, 64, 3, 8),
    (256, 16, 32, 3, 8),
    (64, 32, 32, 3, 2),
    (64, 32, 64, 3, 4),
    (128, 32, 32, 3, 4),
    (128, 32, 64, 4, 4),
    (256, 32, 64, 3, 8),
    (16, 64, 64, 4, 4),
    (16, 128, 64, 4, 4),
    (32, 32, 32, 3, 2),
    (32, 32, 64, 4, 4),
    (32, 64, 64, 3, 4),
    (32, 128, 64, 3, 4),
    (64, 64, 32, 2, 4),
    (64, 64, 32, 4, 4),
    (64, 64, 64, 2, 4),
    (64, 64, 64, 3, 4),
    (64, 64, 128, 3, 8),
    (64, 128, 32, 3, 4),
    (64, 128, 64, 3, 4),
    (64, 128, 64, 3, 8),
    (128, 64, 32, 3, 4),
    (128, 64, 64, 2, 4),
    (128, 64, 64, 3, 4),
    (128, 64, 64, 3, 8),
    (128, 128, 32, 4, 4),
    (128, 128, 32, 3, 8),
    (128, 128, 64, 2, 8),
    (128, 128, 64, 3, 4),
    (128, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 256, 64, 3, 8),
    (256, 64, 64, 2, 8),
    (256, 64, 64, 3, 8),
    (256, 128, 64, 3, 8),
)


@register_variant("conv2d")
class TritonImplicitGemm(Variant):
    """A program multiplies one tile of output pixels x filters of a group over all taps and channels.

    Channels last, the sum runs over (r, s, channel), so that neighbouring loads are neighbours in memory; channels
    first, over (channel, r, s), as the weight is stored, with neighbouring pixels side by side. Tensor cores multiply
    where the dtype allows it.
    """

    name = "triton_implicit_gemm"
    backend = "triton"
    doc = "Triton: tiles of output pixels x filters, the input gathered in the kernel"
    parameters = (
        Parameter("block_m", (16, 32, 64, 128, 256), "output pixels of a tile"),
        Parameter("block_n", (16, 32, 64, 128, 256), "filters of a tile"),
        Parameter("block_k", (16, 32, 64, 128), "products that one iteration adds to each sum"),
        Parameter("group_m", (1, 4, 8, 16), "rows of tiles that neighbouring programs share"),
        Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
        Parameter("num_stages", (1, 2, 3, 4, 5), "stages of the software pipeline"),
    )
    rules = (
        NEEDS_GPU,
        DTYPE_SUPPORTED,
        TENSOR_CORES,
        Rule(
            "matrix-product",
            f"a group with one input channel and fewer than {MIN_TILE} filters fills a small part of the smallest tile "
            "that a tensor core multiplies; triton_depthwise needs no tiles",
            check=lambda problem, columns, device: (
                not (problem["groups"] == problem["c"] > 1 and problem["k"] // problem["groups"] < MIN_TILE)
            ),
            explain=lambda problem, columns, device: (
                f"c={problem['c']}, groups={problem['groups']}, k={problem['k']}"
            ),
        ),
        POSITIONS,
        _of_product(DIMENSIONS),
        BLOCK_THREADS,
        _of_product(BLOCKS_FIT),
        _GRID,
        ACCUMULATORS,
        _of_multiplied(REGISTERS),
        Rule(
            "single-loads",
            "a thread has 255 registers: elements whose neighbours are not known to be aligned are loaded one at a time, "
            "and each keeps its address beside it",
            check=lambda problem, columns, device: (
                _single_registers(problem, columns, device) <= MAX_REGISTERS
            ),
            explain=lambda problem, columns, device: (
                f"about {_single_registers(problem, columns, device)[0]:.0f} > {MAX_REGISTERS} registers a thread"
            ),
        ),
        _of_product(THREADS_BUSY),
        _of_multiplied(shared_memory_rule()),
        _of_product(STAGES_FILLED),
        _of_product(GROUP_DIFFERS),
    )
    source_modules = (
        *SHARED_MODULES,
        "kernelcast.kernels.ops.conv2d.triton_implicit_gemm_jit",
        "kernelcast.kernels.ops.conv2d.triton_pieces",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the list :data:`QUICK_CONFIGS`."""
        if subset != "default":
            return super().space(subset)
        rows = np.array(QUICK_CONFIGS)
        columns = {
            "block_m": rows[:, 0],
            "block_n": rows[:, 1],
            "block_k": rows[:, 2],
            "group_m": np.full(len(rows), 8),
            "num_warps": rows[:, 4],
            "num_stages": rows[:, 3],
        }
        return Block(self.name, columns, len(rows))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        g = Geometry.of(problem)
        product = product_of(problem)
        tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(product, columns))
        padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
        return Work(
            flops=2.0 * padded * g.groups,
            # Each column of tiles reads the input again, and each row the weight; the taps that a program's pixels
            # share come from its level-1 cache.
            traffic_bytes=g.input_bytes * tiles_n + g.weight_bytes * tiles_m + g.output_bytes,
            programs=tiles_m * tiles_n * g.groups,
            warps=columns["num_warps"],
            shared_bytes=shared_bytes(problem, columns, device),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.conv2d.triton_implicit_gemm_jit import conv2d_implicit_gemm

        g = Geometry.of(problem)
        product = product_of(problem)
        interpreted = not isinstance(conv2d_implicit_gemm, triton.JITFunction)
        return KernelSpec(
            kernel=conv2d_implicit_gemm,
            tensors=pointers(problem),
            integers={
                "pixels": product["m"],
                "filters": product["n"],
                "depth": product["k"],
                "H": g.h,
                "W": g.w,
                "HW": g.h * g.w,
                "PQ": g.p * g.q,
                "Q": g.q,
                "C": g.c,
                "K": g.k,
            },
            constants={
                "CHANNELS": g.group_channels,
                **window_constants(g),
                "BLOCK_M": int(config["block_m"]),
                "BLOCK_N": int(config["block_n"]),
                "BLOCK_K": int(config["block_k"]),
                "GROUP_M": int(config["group_m"]),
                "CHANNELS_LAST": g.channels_last,
                "WHOLE_TAPS": g.channels_last and g.group_channels % config["block_k"] == 0,
                "SAME_PIXELS": same_pixels(g),
                "GROUPED": g.groups > 1,
                "EVEN_M": product["m"] % config["block_m"] == 0,
                "EVEN_N": product["n"] % config["block_n"] == 0,
                "EVEN_K": product["k"] % config["block_k"] == 0,
                "PRECISION": input_precision(problem, architecture),
                "WIDE": needs_wide_offsets(g),
                "WIDEN": interpreted and problem.dtype == "bfloat16",
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        g = Geometry.of(problem)
        single = {name: np.array([value]) for name, value in config.items()}
        programs = int(_programs(problem, single)[0])
        launch = self.compile_spec(problem, config, launch_architecture(problem)).bind((programs,))

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            out = empty_images(g.n, g.k, g.p, g.q, channels_last=g.channels_last, like=x)
            if programs:
                launch(x, weight, out)
            return out

        return run
