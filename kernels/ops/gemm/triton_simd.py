"""gemm without tensor cores in Triton: one program a tile of C, from outer products in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.triton_tiled import operand_pointers, operand_strides, tiled_traffic_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_rules import (
    BLOCK_THREADS,
    DIMENSIONS,
    DTYPE_SUPPORTED,
    GRID,
    NEEDS_GPU,
    accumulators_per_thread,
    needs_wide_offsets,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Registers of one thread for its accumulators and the elements in flight. The compiler asks for all loads of one turn
#: of the loop before it multiplies; with their addresses and masks more of them spill.
MAX_WORDS = 168
#: Rows of tiles that neighbouring programs share.
GROUP_M = 8

# (block_m, block_n, block_k, num_warps)
CONFIGS = (
    (2, 16, 16, 1),
    (2, 64, 8, 1),
    (4, 8, 16, 1),
    (4, 16, 4, 1),
    (4, 16, 16, 1),
    (4, 32, 8, 1),
    (4, 64, 8, 2),
    (4, 128, 8, 1),
    (8, 8, 4, 1),
    (8, 8, 16, 1),
    (8, 16, 8, 1),
    (8, 32, 8, 1),
    (8, 32, 4, 2),
    (8, 64, 8, 1),
    (8, 64, 8, 2),
    (8, 128, 4, 1),
    (8, 128, 8, 2),
    (8, 256, 4, 2),
    (16, 16, 8, 1),
    (16, 16, 4, 2),
    (16, 32, 8, 1),
    (16, 32, 8, 2),
    (16, 64, 4, 1),
    (16, 64, 8, 2),
    (16, 128, 4, 1),
    (16, 128, 4, 2),
    (16, 256, 4, 2),
    (16, 256, 4, 4),
    (32, 32, 4, 2),
    (32, 32, 8, 4),
    (32, 64, 4, 2),
    (32, 64, 4, 4),
    (32, 128, 2, 2),
    (32, 128, 2, 4),
    (32, 256, 2, 4),
    (32, 256, 2, 8),
    (64, 64, 2, 4),
    (64, 64, 4, 4),
)


def threads(columns: Columns, device: Device) -> np.ndarray:
    """Threads of one program."""
    return columns["num_warps"] * max(device.warp_size, 1)


def words_per_thread(columns: Columns, device: Device) -> np.ndarray:
    """32-bit words that one thread holds: its accumulators, and the rows and columns of one turn of the loop.

    Threads lie side by side along n first, and in rows above each other where n has no place for more.
    """
    across = np.minimum(columns["block_n"], threads(columns, device))
    rows = columns["block_m"] * across / threads(columns, device)
    held = columns["block_k"] * (np.maximum(rows, 1.0) + columns["block_n"] / across)
    return np.asarray(accumulators_per_thread(columns, device) + held)


def most_block(size: int) -> int:
    """The largest block worth its padding: twice the dimension, rounded up to a power of two."""
    return 2 << max(size - 1, 0).bit_length()


BLOCKS_FIT = Rule(
    "blocks-fit",
    "a tile of more than twice a dimension (rounded up to a power of two) multiplies mostly padding",
    check=lambda problem, columns, device: (
        # A tile of 4 x 16 is the smallest that gives each thread of a warp of 64 an element.
        (columns["block_m"] <= max(most_block(problem["m"]), 4))
        & (columns["block_n"] <= max(most_block(problem["n"]), 16))
        & (columns["block_k"] <= max(most_block(problem["k"]), 4))
    ),
    explain=lambda problem, columns, device: (
        f"a tile of {columns['block_m'][0]} x {columns['block_n'][0]} in steps of {columns['block_k'][0]} for "
        f"m={problem['m']}, n={problem['n']}, k={problem['k']}"
    ),
)
OUTPUTS_FILL_THREADS = Rule(
    "outputs-fill-threads",
    "a thread keeps at least one element of the tile; with more threads than elements some compute what others do",
    check=lambda problem, columns, device: (
        columns["block_m"] * columns["block_n"] >= threads(columns, device)
    ),
    explain=lambda problem, columns, device: (
        f"{columns['block_m'][0] * columns['block_n'][0]} elements for {threads(columns, device)[0]} threads"
    ),
)
COLUMN_OF_A = Rule(
    "column-of-a",
    "a column of A with an element for every thread is loaded once and dealt out through shared memory, with two "
    "barriers a step of k; a shorter one each thread loads for itself from the cache",
    check=lambda problem, columns, device: columns["block_m"] < threads(columns, device),
    explain=lambda problem, columns, device: (
        f"block_m={columns['block_m'][0]}, {threads(columns, device)[0]} threads"
    ),
)
REGISTERS = Rule(
    "registers",
    "the accumulators and the elements that one turn of the loop loads share the 255 registers of a thread with "
    "addresses and masks",
    check=lambda problem, columns, device: words_per_thread(columns, device) <= MAX_WORDS,
    explain=lambda problem, columns, device: (
        f"{words_per_thread(columns, device)[0]:g} > {MAX_WORDS} words a thread"
    ),
)
#: The rules of every product of this kind, less the one on the grid.
SIMD_RULES = (
    NEEDS_GPU,
    DTYPE_SUPPORTED,
    DIMENSIONS,
    BLOCK_THREADS,
    BLOCKS_FIT,
    OUTPUTS_FILL_THREADS,
    COLUMN_OF_A,
    REGISTERS,
)
SIMD_PARAMETERS = (
    Parameter("block_m", (2, 4, 8, 16, 32, 64), "rows of a tile of C"),
    Parameter("block_n", (8, 16, 32, 64, 128, 256), "columns of a tile of C"),
    Parameter("block_k", (2, 4, 8, 16), "steps of k in one turn of the loop"),
    Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
)


def quick_configs(variant: str) -> Block:
    """The quick subset."""
    rows = np.array(CONFIGS)
    names = [parameter.name for parameter in SIMD_PARAMETERS]
    return Block(variant, dict(zip(names, rows.T, strict=True)), len(rows))


def simd_constants(problem: Problem, config: Mapping[str, Any]) -> dict[str, Any]:
    """The constants of the kernels of this kind, in their order."""
    return {
        "BLOCK_M": int(config["block_m"]),
        "BLOCK_N": int(config["block_n"]),
        "BLOCK_K": int(config["block_k"]),
        "GROUP_M": GROUP_M,
        "EVEN_M": problem["m"] % config["block_m"] == 0,
        "EVEN_N": problem["n"] % config["block_n"] == 0,
        "EVEN_K": problem["k"] % config["block_k"] == 0,
        "WIDE": needs_wide_offsets(problem),
    }


def simd_work(problem: Problem, columns: Columns, device: Device, *, batch: int = 1) -> Work:
    """The work of ``batch`` products."""
    tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
    padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
    return Work(
        flops=2.0 * batch * padded,
        traffic_bytes=batch * tiled_traffic_bytes(problem, columns),
        programs=batch * tiles_m * tiles_n,
        warps=columns["num_warps"],
        shared_bytes=0.0,
        accumulators=accumulators_per_thread(columns, device),
        inner_steps=steps,
    )


@register_variant("gemm")
class TritonSimd(Variant):
    """Outer products of columns of A and rows of B, by fused multiply-adds in float32, whatever the inputs' dtype.

    No tensor cores, no shared memory and no barriers, and tiles as small as the product: for products that are too small
    for a tensor core's tile. TF32 is never used.
    """

    name = "triton_simd"
    backend = "triton"
    doc = "Triton: outer products in float32, without tensor cores"
    parameters = SIMD_PARAMETERS
    rules = (*SIMD_RULES, GRID)
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_simd_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) a list of 38."""
        return quick_configs(self.name) if subset == "default" else super().space(subset)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        return simd_work(problem, columns, device)

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.gemm.triton_simd_jit import gemm_simd

        output_bytes = problem["m"] * problem["n"] * problem.element_bytes
        return KernelSpec(
            kernel=gemm_simd,
            tensors={**operand_pointers(problem), "c_ptr": Pointer(problem.dtype, output_bytes)},
            integers={"M": problem["m"], "N": problem["n"], "K": problem["k"], **operand_strides(problem)},
            constants=simd_constants(problem, config),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        programs = -(-m // config["block_m"]) * -(-n // config["block_n"])
        launch = self.compile_spec(problem, config).bind((programs,))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                launch(a, b, out)
            return out

        return run
