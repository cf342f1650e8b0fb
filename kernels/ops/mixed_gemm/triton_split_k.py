"""Split-K mixed_gemm in Triton: programs share the sum over k of one tile of C; a second kernel adds and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.triton_split_k import (
    PART_BYTES,
    SUM_BLOCK,
    slice_steps,
)
from kernelcast.kernels.ops.gemm.triton_split_k import TritonSplitK as GemmSplitK
from kernelcast.kernels.ops.gemm.triton_tiled import operand_strides
from kernelcast.kernels.ops.mixed_gemm.triton_pieces import (
    MIXED_RULES,
    MIXED_TILE_PARAMETERS,
    launch_target,
    mixed_constants,
    mixed_pointers,
    mixed_traffic_bytes,
    named_configs,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_rules import (
    GROUP_DIFFERS,
    accumulators_per_thread,
    matmul_shared_bytes,
    shared_memory_rule,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Rows of a tile in the quick subset: where C has more, there are tiles for every core without a split.
MAX_ROWS = 64
#: gemm's rules on slices of k and their parts, which are float32 here too.
SLICE_RULES = tuple(
    rule for rule in GemmSplitK.rules if rule.name in ("slices-work", "slices-fill-stages", "parts-fit")
)


@register_variant("mixed_gemm")
class TritonSplitK(Variant):
    """Slices of k in parallel, their unscaled parts in float32, then one sum in a fixed order that also scales.

    Pays where C has fewer tiles than the device has cores, as in decoding. Without atomics the result is the same in
    every run.
    """

    name = "triton_split_k"
    backend = "triton"
    doc = "Triton: slices of k in parallel, then a sum that scales"
    parameters = (*MIXED_TILE_PARAMETERS, Parameter("split_k", (2, 4, 8, 16), "slices of k", quick=(4, 8)))
    rules = (*MIXED_RULES, shared_memory_rule(PART_BYTES), GROUP_DIFFERS, *SLICE_RULES)
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_split_k",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.mixed_gemm.triton_pieces",
        "kernelcast.kernels.ops.mixed_gemm.triton_split_k_jit",
        "kernelcast.kernels.ops.mixed_gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the lower tiles of ``triton_tiled``'s list with two split factors."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs({"split_k": self.parameters[-1].quick}, most_rows=MAX_ROWS)
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        tiles_m, tiles_n, _ = (count.astype(np.float64) for count in tiles(problem, columns))
        steps = slice_steps(problem, columns).astype(np.float64)
        split = columns["split_k"].astype(np.float64)
        padded = (
            tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"] * split
        )
        outputs = float(problem["m"]) * problem["n"]
        return Work(
            flops=2.0 * padded + (split + 1.0) * outputs,
            traffic_bytes=mixed_traffic_bytes(problem, columns),
            scratch_bytes=PART_BYTES * outputs * split,
            calls=2.0,
            programs=tiles_m * tiles_n * split,
            warps=columns["num_warps"],
            shared_bytes=matmul_shared_bytes(problem, columns, device, output_bytes=PART_BYTES),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The multiplying kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.mixed_gemm.triton_split_k_jit import mixed_gemm_partial

        interpreted = not isinstance(mixed_gemm_partial, triton.JITFunction)
        elements = problem["m"] * problem["n"]
        block_k, split = int(config["block_k"]), int(config["split_k"])
        slice_k = math.ceil(math.ceil(problem["k"] / block_k) / split) * block_k
        return KernelSpec(
            kernel=mixed_gemm_partial,
            tensors={
                **mixed_pointers(problem),
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
            constants=mixed_constants(problem, config, architecture, interpreted=interpreted),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty
        from kernelcast.kernels.ops.mixed_gemm.triton_split_k_jit import sum_and_scale

        m, n, split = problem["m"], problem["n"], int(config["split_k"])
        programs = -(-m // config["block_m"]) * -(-n // config["block_n"])
        multiply = self.compile_spec(problem, config, launch_target()).bind((programs, split))
        add = KernelSpec(
            kernel=sum_and_scale,
            tensors={
                "parts_ptr": Pointer("float32", PART_BYTES * m * n * split),
                "scale_ptr": Pointer(problem.dtype, n * problem.element_bytes),
                "c_ptr": Pointer(problem.dtype, m * n * problem.element_bytes),
            },
            integers={"N": n, "part_elements": m * n},
            constants={"SPLIT": split, "BLOCK": SUM_BLOCK},
            options={"num_warps": 4, "enable_fp_fusion": True},
        ).bind((-(-m * n // SUM_BLOCK),))

        def run(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                parts = empty((split, m, n), dtype=torch.float32, device=a.device)
                multiply(a, b, parts)
                add(parts, scale, out)
            return out

        return run
