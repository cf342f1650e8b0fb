"""Split-K batched_gemm in Triton: programs share the sum over k of one tile, and a second kernel adds their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.batched_gemm import triton_pieces as pieces
from kernelcast.kernels.ops.batched_gemm.schema import output_elements
from kernelcast.kernels.ops.gemm import triton_gemv as skinny
from kernelcast.kernels.ops.gemm import triton_split_k as single
from kernelcast.kernels.ops.gemm.triton_tiled import named_configs, tile_constants, tiled_traffic_bytes
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
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

#: The rules on the slices of one product, which the batch changes nothing about.
SLICE_RULES = tuple(
    rule for rule in single.TritonSplitK.rules if rule.name in ("slices-work", "slices-fill-stages")
)


def _parts_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    return float(single.PART_BYTES) * output_elements(problem) * columns["split_k"]


@register_variant("batched_gemm")
class TritonSplitK(Variant):
    """Slices of k in parallel, their parts in float32, then one sum over the parts of all products in a fixed order.

    Pays where the whole batch has fewer tiles than the device has cores and k is long. Without atomics the result is the
    same in every run.
    """

    name = "triton_split_k"
    backend = "triton"
    doc = "Triton: slices of k in parallel, then a sum"
    parameters = single.TritonSplitK.parameters
    rules = (
        *pieces.BATCHED_RULES,
        shared_memory_rule(single.PART_BYTES),
        GROUP_DIFFERS,
        *SLICE_RULES,
        skinny.parts_rule(_parts_bytes),
    )
    source_modules = (
        "kernelcast.kernels.ops.batched_gemm.triton_pieces",
        "kernelcast.kernels.ops.batched_gemm.triton_split_k_jit",
        "kernelcast.kernels.ops.batched_gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.gemm.triton_gemv",
        "kernelcast.kernels.ops.gemm.triton_split_k",
        "kernelcast.kernels.ops.gemm.triton_split_k_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the small tiles of gemm's list with two split factors."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs({"split_k": self.parameters[-1].quick}, most_elements=single.SMALL_TILE)
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        tiles_m, tiles_n, _ = (count.astype(np.float64) for count in tiles(problem, columns))
        steps = single.slice_steps(problem, columns).astype(np.float64)
        split = columns["split_k"].astype(np.float64)
        padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
        return Work(
            flops=split * (2.0 * problem["batch"] * padded + output_elements(problem)),
            traffic_bytes=problem["batch"] * tiled_traffic_bytes(problem, columns),
            scratch_bytes=_parts_bytes(problem, columns),
            calls=2.0,
            programs=pieces.programs(problem, columns) * split,
            warps=columns["num_warps"],
            shared_bytes=matmul_shared_bytes(problem, columns, device, output_bytes=single.PART_BYTES),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The multiplying kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.batched_gemm.triton_split_k_jit import batched_partial

        interpreted = not isinstance(batched_partial, triton.JITFunction)
        elements = output_elements(problem)
        block_k, split = int(config["block_k"]), int(config["split_k"])
        slice_k = math.ceil(math.ceil(problem["k"] / block_k) / split) * block_k
        return KernelSpec(
            kernel=batched_partial,
            tensors={
                **pieces.input_pointers(problem),
                "parts_ptr": Pointer("float32", single.PART_BYTES * elements * split),
            },
            integers={
                **pieces.sizes_and_strides(problem),
                "slice_k": slice_k,
                "part_elements": elements,
            },
            constants=tile_constants(problem, config, architecture, interpreted=interpreted),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        batch, m, n, split = problem["batch"], problem["m"], problem["n"], int(config["split_k"])
        count = batch * -(-m // int(config["block_m"])) * -(-n // int(config["block_n"]))
        multiply = self.compile_spec(problem, config, launch_architecture(problem)).bind((count, split))
        sums = -(-output_elements(problem) // single.SUM_BLOCK)
        add = skinny.sum_spec(problem, split, batch=batch).bind((sums,))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((batch, m, n), dtype=a.dtype, device=a.device)
            if count:
                parts = empty((split, batch, m, n), dtype=torch.float32, device=a.device)
                multiply(a, b, parts)
                add(parts, out)
            return out

        return run
