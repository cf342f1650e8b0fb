"""Split-K grouped gemm in Triton: programs share the sum over k of one tile of C, and a second kernel adds their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.triton_split_k import PART_BYTES, SUM_BLOCK, TritonSplitK, slice_steps
from kernelcast.kernels.ops.gemm.triton_tiled import TILE_PARAMETERS, named_configs
from kernelcast.kernels.ops.grouped_gemm.schema import row_tiles_bound
from kernelcast.kernels.ops.grouped_gemm.triton_grouped import (
    GROUPED_RULES,
    expected_tiles,
    grouped_spec,
    grouped_work,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture
from kernelcast.kernels.triton_rules import STAGES_FILLED, matmul_shared_bytes, shared_memory_rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Tiles for every core from which on the device has enough to do without splitting.
MOST_TILES_A_CORE = 4
#: Of gemm's rules, those on slices and parts; they hold here for the same reasons.
SLICE_RULES = tuple(
    rule for rule in TritonSplitK.rules if rule.name in ("slices-work", "slices-fill-stages", "parts-fit")
)


@register_variant("grouped_gemm")
class TritonGroupedSplitK(Variant):
    """Slices of k in parallel, their parts in float32, then one sum over the parts in a fixed order.

    Pays while decoding: few rows, and so few tiles, over a long k. Without atomics the result is the same in every run.
    """

    name = "triton_grouped_split_k"
    backend = "triton"
    doc = "Triton: slices of k in parallel, then a sum"
    parameters = (*TILE_PARAMETERS, Parameter("split_k", (2, 4, 8, 16), "slices of k", quick=(4,)))
    rules = (
        *(rule for rule in GROUPED_RULES if rule.name not in ("shared-memory", STAGES_FILLED.name)),
        shared_memory_rule(PART_BYTES),
        *SLICE_RULES,
        Rule(
            "tiles-too-few",
            f"with more than {MOST_TILES_A_CORE} tiles for each core the device is full, and parts are written and read "
            "for nothing",
            check=lambda problem, columns, device: (
                expected_tiles(problem, columns) <= MOST_TILES_A_CORE * device.cores
            ),
            explain=lambda problem, columns, device: (
                f"{expected_tiles(problem, columns)[0]:.0f} tiles expected, {device.cores} cores"
            ),
        ),
    )
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_split_k",
        "kernelcast.kernels.ops.gemm.triton_split_k_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.grouped_gemm.schema",
        "kernelcast.kernels.ops.grouped_gemm.triton_grouped",
        "kernelcast.kernels.ops.grouped_gemm.triton_grouped_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) gemm's list of 55 with one split factor."""
        if subset != "default":
            return super().space(subset)
        columns = named_configs({"split_k": self.parameters[-1].quick})
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        whole = grouped_work(problem, columns, device)
        split = columns["split_k"].astype(np.float64)
        steps = slice_steps(problem, columns).astype(np.float64)
        elements = float(problem["m"]) * problem["n"]
        # The last slice is padded like the others.
        padding = steps * split / np.maximum(np.asarray(whole.inner_steps), 1.0)
        return replace(
            whole,
            flops=whole.flops * padding + split * elements,
            scratch_bytes=PART_BYTES * split * elements,
            calls=2.0,
            programs=whole.programs * split,
            shared_bytes=matmul_shared_bytes(problem, columns, device, output_bytes=PART_BYTES),
            inner_steps=steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The multiplying kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.grouped_gemm.triton_grouped_jit import grouped_partial

        elements = problem["m"] * problem["n"]
        block_k, split = int(config["block_k"]), int(config["split_k"])
        integers = {
            "row_tiles": int(row_tiles_bound(problem, int(config["block_m"]))),
            "slice_k": math.ceil(math.ceil(problem["k"] / block_k) / split) * block_k,
            "part_elements": elements,
        }
        spec = grouped_spec(grouped_partial, integers, problem, config, architecture)
        tensors = dict(spec.tensors)
        del tensors["c_ptr"]
        return replace(
            spec, tensors={**tensors, "parts_ptr": Pointer("float32", PART_BYTES * elements * split)}
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty
        from kernelcast.kernels.ops.gemm.triton_split_k_jit import sum_parts

        m, n, split = problem["m"], problem["n"], int(config["split_k"])
        programs = int(row_tiles_bound(problem, int(config["block_m"]))) * -(-n // int(config["block_n"]))
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

        def run(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if programs:
                parts = empty((split, m, n), dtype=torch.float32, device=a.device)
                multiply(a, b, offsets, parts)
                add(parts, out)
            return out

        return run
