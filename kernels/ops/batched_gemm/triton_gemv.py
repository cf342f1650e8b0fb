"""Skinny batched_gemm in Triton: few rows (or, transposed, few columns) of each product against its larger matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.batched_gemm.schema import batch_strides, copies, output_elements
from kernelcast.kernels.ops.gemm import triton_gemv as single
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_rules import MAX_INT32
from kernelcast.kernels.work import Work


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return np.asarray(float(problem["batch"]) * single.blocks(problem, columns))


def _parts_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    return single.parts_bytes(problem, columns, batch=problem["batch"])


@register_variant("batched_gemm")
class TritonGemv(Variant):
    """Few rows of each product against its larger matrix, which is read once, in loads as wide as its layout allows.

    The limit is memory, not arithmetic: no tensor cores, products and sums in float32, TF32 never. Slices of k may run in
    parallel, their parts added up by a second kernel, in the same order in every run.
    """

    name = "triton_gemv"
    backend = "triton"
    doc = "Triton: few rows or columns of each product against a matrix that is read once"
    parameters = single.SKINNY_PARAMETERS
    rules = (
        *single.SKINNY_RULES,
        Rule(
            "grid",
            "the batch takes turns with the blocks of columns in the first dimension of a grid, which holds at most "
            "2**31 - 1 blocks (the others hold 65535)",
            check=lambda problem, columns, device: _programs(problem, columns) <= MAX_INT32,
            explain=lambda problem, columns, device: f"{_programs(problem, columns)[0]:.0f} blocks",
        ),
        single.parts_rule(_parts_bytes),
    )
    source_modules = (
        "kernelcast.kernels.ops.batched_gemm.triton_gemv_jit",
        "kernelcast.kernels.ops.gemm.triton_gemv",
        "kernelcast.kernels.ops.gemm.triton_gemv_jit",
        "kernelcast.kernels.ops.gemm.triton_split_k",
        "kernelcast.kernels.ops.gemm.triton_split_k_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the list of gemm's ``triton_gemv``."""
        return single.quick_configs(self.name) if subset == "default" else super().space(subset)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        return single.skinny_work(problem, columns, device, batch=problem["batch"])

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The multiplying kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.batched_gemm.triton_gemv_jit import batched_gemv

        of_a, of_b = batch_strides(problem)
        few, long = (of_b, of_a) if single.skinny(problem).flipped else (of_a, of_b)
        return KernelSpec(
            kernel=batched_gemv,
            tensors=single.skinny_pointers(
                problem, config, copies=copies(problem), batch=int(problem["batch"])
            ),
            integers=single.skinny_integers(
                problem,
                config,
                batch_strides={"batch_stride_few": few, "batch_stride_long": long},
                part_elements=output_elements(problem),
            ),
            constants=single.skinny_constants(problem, config),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        batch, m, n = (int(problem[name]) for name in ("batch", "m", "n"))
        spec = self.compile_spec(problem, config)
        return single.skinny_launcher(problem, spec, config, shape=(batch, m, n), batch=batch)
