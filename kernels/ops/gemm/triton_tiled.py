"""Tiled gemm in Triton: one program a tile of C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import (
    GROUP_DIFFERS,
    MATMUL_RULES,
    STAGES_FILLED,
    input_precision,
    needs_wide_offsets,
    operands,
    shared_memory_rule,
    tile_facts,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

TILE_PARAMETERS = (
    Parameter("block_m", (16, 32, 64, 128, 256), "rows of a tile of C"),
    Parameter("block_n", (16, 32, 64, 128, 256), "columns of a tile of C"),
    Parameter("block_k", (16, 32, 64, 128), "steps of k that one iteration loads"),
    Parameter("group_m", (1, 4, 8, 16), "rows of tiles that neighbouring programs share"),
    Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
    Parameter("num_stages", (1, 2, 3, 4, 5), "stages of the software pipeline"),
)

# (block_m, block_k, block_n, num_stages, num_warps), the order of PyTorch's names; group_m is 8, as in PyTorch.
# What torch.compile's matrix-product template tried on nearly every problem of the AutoHeuristic collection.
INDUCTOR_CONFIGS = (
    (16, 16, 32, 3, 2),
    (16, 32, 32, 4, 2),
    (16, 32, 32, 5, 2),
    (32, 16, 32, 1, 2),
    (32, 32, 64, 5, 8),
    (32, 128, 32, 2, 4),
    (64, 16, 64, 2, 4),
    (64, 32, 32, 5, 8),
    (64, 32, 64, 2, 4),
    (64, 32, 128, 3, 4),
    (64, 32, 128, 4, 8),
    (64, 64, 64, 3, 8),
    (64, 64, 128, 3, 4),
    (64, 128, 32, 5, 4),
    (64, 128, 64, 3, 4),
    (64, 128, 64, 5, 4),
    (64, 128, 128, 4, 4),
    (128, 32, 64, 2, 2),
    (128, 32, 64, 3, 4),
    (128, 32, 64, 4, 8),
    (128, 32, 128, 2, 8),
    (128, 32, 128, 3, 4),
    (128, 32, 128, 4, 4),
    (128, 64, 64, 3, 8),
    (128, 64, 128, 3, 4),
    (128, 64, 128, 3, 8),
    (128, 64, 128, 5, 4),
    (128, 64, 128, 5, 8),
    (128, 128, 64, 4, 8),
)
# Few rows or columns (decoding), a short k, and the wide tiles of chips that multiply from shared memory.
FURTHER_CONFIGS = (
    (128, 128, 128, 4, 8),
    (16, 32, 16, 2, 1),
    (16, 64, 32, 4, 2),
    (16, 64, 64, 4, 4),
    (16, 128, 32, 3, 4),
    (16, 128, 64, 3, 4),
    (16, 64, 128, 4, 4),
    (32, 64, 32, 3, 4),
    (32, 64, 64, 4, 4),
    (32, 64, 128, 3, 4),
    (32, 64, 256, 3, 8),
    (64, 64, 16, 4, 4),
    (128, 64, 16, 3, 4),
    (64, 64, 32, 4, 4),
    (128, 64, 32, 4, 4),
    (64, 64, 64, 2, 4),
    (128, 64, 128, 2, 8),
    (64, 32, 256, 3, 8),
    (64, 64, 256, 3, 8),
    (128, 32, 256, 3, 8),
    (128, 64, 256, 3, 8),
    (128, 64, 256, 4, 8),
    (256, 32, 64, 3, 8),
    (256, 32, 128, 3, 8),
    (256, 64, 128, 3, 8),
    (256, 64, 64, 3, 8),
)


def named_configs(
    extra: Mapping[str, tuple[Any, ...]] | None = None, *, most_elements: int | None = None
) -> dict[str, np.ndarray]:
    """The quick subset as columns, crossed with every value of the ``extra`` parameters.

    ``most_elements`` leaves out tiles of C with more elements.
    """
    rows = np.array(INDUCTOR_CONFIGS + FURTHER_CONFIGS)
    if most_elements is not None:
        rows = rows[rows[:, 0] * rows[:, 2] <= most_elements]
    columns = {
        "block_m": rows[:, 0],
        "block_n": rows[:, 2],
        "block_k": rows[:, 1],
        "group_m": np.full(len(rows), 8),
        "num_warps": rows[:, 4],
        "num_stages": rows[:, 3],
    }
    for name, values in (extra or {}).items():
        count = len(next(iter(columns.values())))
        columns = {key: np.tile(column, len(values)) for key, column in columns.items()}
        columns[name] = np.repeat(np.array(values), count)
    return columns


def tile_constants(
    problem: Problem, config: Mapping[str, Any], architecture: str, *, interpreted: bool
) -> dict[str, Any]:
    """The constants that the kernels of ``triton_tiled_jit`` share, in their order."""
    return {
        "BLOCK_M": int(config["block_m"]),
        "BLOCK_N": int(config["block_n"]),
        "BLOCK_K": int(config["block_k"]),
        "GROUP_M": int(config["group_m"]),
        "EVEN_M": problem["m"] % config["block_m"] == 0,
        "EVEN_N": problem["n"] % config["block_n"] == 0,
        "EVEN_K": problem["k"] % config["block_k"] == 0,
        "PRECISION": input_precision(problem, architecture),
        "WIDE": needs_wide_offsets(problem),
        "WIDEN": interpreted and problem.dtype == "bfloat16",
    }


def operand_pointers(problem: Problem) -> dict[str, Pointer]:
    """The pointers to A and B, as the kernels name them."""
    found = {}
    for operand in operands(problem):
        stored_rows = operand.columns if operand.transposed else operand.rows
        found[f"{operand.name}_ptr"] = Pointer(
            problem.dtype, stored_rows * operand.leading * operand.element_bytes
        )
    return found


def operand_strides(problem: Problem) -> dict[str, int]:
    """The strides of A and B in elements, as the kernels name them."""
    a, b = operands(problem)
    return dict(
        zip(("stride_am", "stride_ak", "stride_bk", "stride_bn"), (*a.strides, *b.strides), strict=True)
    )


def tiled_traffic_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Bytes of A, read once for every column of tiles, of B, once for every row of tiles, and of C."""
    tiles_m, tiles_n, _ = tiles(problem, columns)
    return traffic_of_tiles(problem, tiles_m, tiles_n)


def traffic_of_tiles(problem: Problem, tiles_m: np.ndarray, tiles_n: np.ndarray) -> np.ndarray:
    """:func:`tiled_traffic_bytes` of so many tiles along m and n."""
    size = float(problem.element_bytes)
    m, n, k = problem["m"], problem["n"], problem["k"]
    traffic = tiles_n * (size * m * k)
    traffic += tiles_m * (size * k * n)
    traffic += size * m * n
    return traffic


@register_variant("gemm")
class TritonTiled(Variant):
    """A program multiplies one tile of C over all of k, on tensor cores where the dtype allows it."""

    name = "triton_tiled"
    backend = "triton"
    doc = "Triton: one program a tile of C"
    parameters = TILE_PARAMETERS
    rules = (*MATMUL_RULES, shared_memory_rule(), STAGES_FILLED, GROUP_DIFFERS)
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) a list of 55 that are known to serve."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs()
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        facts = tile_facts(problem, columns, device)
        tiles_m, tiles_n, steps = facts.counts(problem)
        programs = tiles_m * tiles_n
        return Work(
            flops=2.0 * programs * steps * facts.volume,
            traffic_bytes=traffic_of_tiles(problem, tiles_m, tiles_n),
            programs=programs,
            warps=facts.warps,
            shared_bytes=facts.shared_bytes,
            accumulators=facts.accumulators,
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.gemm.triton_tiled_jit import gemm_tiled

        interpreted = not isinstance(gemm_tiled, triton.JITFunction)
        output_bytes = problem["m"] * problem["n"] * problem.element_bytes
        return KernelSpec(
            kernel=gemm_tiled,
            tensors={**operand_pointers(problem), "c_ptr": Pointer(problem.dtype, output_bytes)},
            integers={"M": problem["m"], "N": problem["n"], "K": problem["k"], **operand_strides(problem)},
            constants=tile_constants(problem, config, architecture, interpreted=interpreted),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        programs = -(-m // config["block_m"]) * -(-n // config["block_n"])
        launch = self.compile_spec(problem, config, launch_architecture(problem)).bind((programs,))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                launch(a, b, out)
            return out

        return run
