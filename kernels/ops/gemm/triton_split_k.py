"""Split-K gemm in Triton: programs share the sum over k of one tile of C, and a second kernel adds their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.triton_tiled import (
    TILE_PARAMETERS,
    named_configs,
    operand_pointers,
    operand_strides,
    tile_constants,
    traffic_of_tiles,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import (
    GROUP_DIFFERS,
    MATMUL_RULES,
    STAGES_FILLED,
    shared_memory_rule,
    stages_filled,
    tile_facts,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Elements of C that one program of the summing kernel adds up.
SUM_BLOCK = 1024
#: Bytes of one element of a part (float32).
PART_BYTES = 4
MAX_PARTS_BYTES = 2**30
#: Elements of the largest tile in the quick subset.
SMALL_TILE = 64 * 64


def slice_steps(problem: Problem, columns: Columns) -> np.ndarray:
    """Iterations of block_k that each slice of k holds (the last may hold fewer)."""
    return -(-tiles(problem, columns)[2] // columns["split_k"])


def _every_slice_works(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    steps = tiles(problem, columns)[2]
    used = -(-steps // np.maximum(slice_steps(problem, columns), 1))
    return (steps > 0) & (used == columns["split_k"])


def _parts_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    return float(PART_BYTES) * problem["m"] * problem["n"] * columns["split_k"]


@register_variant("gemm")
class TritonSplitK(Variant):
    """Slices of k in parallel, their parts in float32, then one sum over the parts in a fixed order.

    Pays where C has fewer tiles than the device has cores and k is long. Without atomics the result is the same in
    every run.
    """

    name = "triton_split_k"
    backend = "triton"
    doc = "Triton: slices of k in parallel, then a sum"
    parameters = (*TILE_PARAMETERS, Parameter("split_k", (2, 4, 8, 16), "slices of k", quick=(4, 8)))
    rules = (
        *MATMUL_RULES,
        shared_memory_rule(PART_BYTES),
        GROUP_DIFFERS,
        Rule(
            "slices-work",
            "a slice that lies beyond k multiplies nothing and still writes a part that must be added",
            check=_every_slice_works,
            explain=lambda problem, columns, device: (
                f"{tiles(problem, columns)[2][0]} steps of block_k in {columns['split_k'][0]} slices"
            ),
        ),
        Rule(
            "slices-fill-stages",
            STAGES_FILLED.reason,
            check=lambda problem, columns, device: stages_filled(columns, slice_steps(problem, columns)),
            explain=lambda problem, columns, device: (
                f"{columns['num_stages'][0]} stages, {slice_steps(problem, columns)[0]} steps a slice"
            ),
        ),
        Rule(
            "parts-fit",
            "the parts are held at once: more than 1 GiB of them costs more than it saves",
            check=lambda problem, columns, device: _parts_bytes(problem, columns) <= MAX_PARTS_BYTES,
            explain=lambda problem, columns, device: f"{_parts_bytes(problem, columns)[0]:.0f} bytes",
        ),
    )
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_split_k_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the small tiles of ``triton_tiled``'s list with two split factors.

        Slices pay where C has few tiles; a C that large tiles cover has few of them too, and small ones divide it further.
        """
        if subset != "default":
            return super().space(subset)
        columns = named_configs({"split_k": self.parameters[-1].quick}, most_elements=SMALL_TILE)
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        facts = tile_facts(problem, columns, device, output_bytes=PART_BYTES)
        tiles_m, tiles_n, all_steps = facts.counts(problem)
        split = columns["split_k"].astype(np.float64)
        steps = np.ceil(all_steps / split)
        programs = tiles_m * tiles_n * split
        area = float(problem["m"] * problem["n"])
        return Work(
            flops=2.0 * programs * steps * facts.volume + split * area,
            traffic_bytes=traffic_of_tiles(problem, tiles_m, tiles_n),
            scratch_bytes=float(PART_BYTES) * area * split,
            calls=2.0,
            programs=programs,
            warps=facts.warps,
            shared_bytes=facts.shared_bytes,
            accumulators=facts.accumulators,
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The multiplying kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.gemm.triton_split_k_jit import gemm_partial

        interpreted = not isinstance(gemm_partial, triton.JITFunction)
        elements = problem["m"] * problem["n"]
        block_k, split = int(config["block_k"]), int(config["split_k"])
        slice_k = math.ceil(math.ceil(problem["k"] / block_k) / split) * block_k
        return KernelSpec(
            kernel=gemm_partial,
            tensors={
                **operand_pointers(problem),
                "parts_ptr": Pointer("float32", PART_BYTES * elements * split),
            },
            integers={
                "M": problem["m"],
                "N": problem["n"],
                "K": problem["k"],
                "slice_k": slice_k,
                "part_elements": elements,
                **operand_strides(problem),
            },
            constants=tile_constants(problem, config, architecture, interpreted=interpreted),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty
        from kernelcast.kernels.ops.gemm.triton_split_k_jit import sum_parts

        m, n, split = problem["m"], problem["n"], int(config["split_k"])
        programs = -(-m // config["block_m"]) * -(-n // config["block_n"])
        multiply = self.compile_spec(problem, config, launch_architecture(problem)).bind((programs, split))
        add = KernelSpec(
            kernel=sum_parts,
            tensors={
                "parts_ptr": Pointer("float32", PART_BYTES * m * n * split),
                "c_ptr": Pointer(problem.dtype, m * n * problem.element_bytes),
            },
            integers={"part_elements": m * n},
            constants={"SPLIT": split, "BLOCK": SUM_BLOCK},
            options={"num_warps": 4, "enable_fp_fusion": True},
        ).bind((-(-m * n // SUM_BLOCK),))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                parts = empty((split, m, n), dtype=torch.float32, device=a.device)
                multiply(a, b, parts)
                add(parts, out)
            return out

        return run
