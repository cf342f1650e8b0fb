"""batched_gemm without tensor cores in Triton: one program a tile of one product, from outer products in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.batched_gemm import triton_pieces as pieces
from kernelcast.kernels.ops.gemm import triton_simd as single
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


@register_variant("batched_gemm")
class TritonSimd(Variant):
    """Outer products of columns of A and rows of B, by fused multiply-adds in float32, whatever the inputs' dtype.

    No tensor cores, no shared memory and no barriers, and tiles as small as the products: for many products that are too
    small for a tensor core's tile. TF32 is never used.
    """

    name = "triton_simd"
    backend = "triton"
    doc = "Triton: outer products in float32, without tensor cores"
    parameters = single.SIMD_PARAMETERS
    rules = (*single.SIMD_RULES, pieces.BATCHED_GRID)
    source_modules = (
        "kernelcast.kernels.ops.batched_gemm.triton_pieces",
        "kernelcast.kernels.ops.batched_gemm.triton_simd_jit",
        "kernelcast.kernels.ops.batched_gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.gemm.triton_simd",
        "kernelcast.kernels.ops.gemm.triton_simd_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the list of gemm's ``triton_simd``."""
        return single.quick_configs(self.name) if subset == "default" else super().space(subset)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        return single.simd_work(problem, columns, device, batch=problem["batch"])

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.batched_gemm.triton_simd_jit import batched_simd

        return KernelSpec(
            kernel=batched_simd,
            tensors={**pieces.input_pointers(problem), **pieces.output_pointer(problem)},
            integers=pieces.sizes_and_strides(problem),
            constants=single.simd_constants(problem, config),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        batch, m, n = problem["batch"], problem["m"], problem["n"]
        count = batch * -(-m // int(config["block_m"])) * -(-n // int(config["block_n"]))
        launch = self.compile_spec(problem, config).bind((count,))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((batch, m, n), dtype=a.dtype, device=a.device)
            if count:
                launch(a, b, out)
            return out

        return run
