"""batched_gemm in Triton with tensor descriptors: the tensor memory accelerator of sm90 and later moves whole tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.errors import IllegalCandidateError
from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.batched_gemm import triton_persistent_pieces as stay
from kernelcast.kernels.ops.batched_gemm import triton_pieces as pieces
from kernelcast.kernels.ops.batched_gemm.schema import batch_strides, copies, output_elements
from kernelcast.kernels.ops.gemm import triton_descriptor as single
from kernelcast.kernels.ops.gemm.triton_persistent_pieces import FLATTEN, launch_persistent, quick_columns
from kernelcast.kernels.ops.gemm.triton_tiled import tile_constants
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import operands
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


def unaligned(problem: Problem) -> list[str]:
    """The operands whose rows or matrices do not start where a descriptor may step to, and how far apart they are."""
    found = single.unaligned(problem)
    for name, stride, count in zip("AB", batch_strides(problem), copies(problem), strict=True):
        apart = stride * problem.element_bytes
        if count > 1 and (apart % single.ALIGNMENT_BYTES or apart >= single.MAX_STRIDE_BYTES):
            found.append(f"{name}'s matrices are {apart} bytes apart")
    return found


def _c_aligned(problem: Problem) -> bool:
    row_bytes = problem["n"] * problem.element_bytes
    return row_bytes % single.ALIGNMENT_BYTES == 0 and problem["m"] * row_bytes < single.MAX_STRIDE_BYTES


def _differs_from_plain(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    more_than_cores = pieces.programs(problem, columns) > max(device.cores, 1)
    return (~columns["flatten"] | (stay.rounds(problem, columns, device) > 1)) & (
        (columns["programs_per_core"] == 1) | more_than_cores
    )


_SINGLE_RULES = {rule.name: rule for rule in single.TritonDescriptor.rules}
ALIGNED = replace(
    _SINGLE_RULES["rows-aligned"],
    check=lambda problem, columns, device: not unaligned(problem),
    explain=lambda problem, columns, device: " and ".join(unaligned(problem)),
)
STORED_ROWS_ALIGNED = replace(
    _SINGLE_RULES["stored-rows-aligned"],
    check=lambda problem, columns, device: ~columns["described_store"] | _c_aligned(problem),
    explain=lambda problem, columns, device: (
        f"{problem['m']} rows of {problem['n'] * problem.element_bytes} bytes"
    ),
)
PROGRAMS_DIFFER = replace(
    _SINGLE_RULES["programs-differ"],
    check=_differs_from_plain,
    explain=lambda problem, columns, device: (
        f"{stay.seen_tiles(problem, columns, device)}, {max(device.cores, 1)} cores"
    ),
)


@register_variant("batched_gemm")
class TritonDescriptor(Variant):
    """Programs that stay, and load whole tiles of A and B of all products through descriptors.

    A descriptor has three dimensions, the batch first, and is built once a program: the accelerator finds the product as it
    finds the row, and masks what lies outside of it. One matrix for the whole batch is described with two. The rest is
    as in gemm's ``triton_descriptor``.
    """

    name = "triton_descriptor"
    backend = "triton"
    doc = "Triton: tiles of the whole batch moved by the tensor memory accelerator (sm90 and later)"
    parameters = single.TritonDescriptor.parameters
    rules = stay.over_the_batch(
        single.TritonDescriptor.rules,
        {rule.name: rule for rule in (ALIGNED, STORED_ROWS_ALIGNED, PROGRAMS_DIFFER)},
    )
    source_modules = (
        "kernelcast.kernels.ops.batched_gemm.triton_descriptor_jit",
        "kernelcast.kernels.ops.batched_gemm.triton_persistent_pieces",
        "kernelcast.kernels.ops.batched_gemm.triton_pieces",
        "kernelcast.kernels.ops.batched_gemm.triton_tiled_jit",
        "kernelcast.kernels.ops.gemm.triton_descriptor",
        "kernelcast.kernels.ops.gemm.triton_descriptor_jit",
        "kernelcast.kernels.ops.gemm.triton_persistent_pieces",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the list of gemm's ``triton_descriptor``."""
        if subset != "default":
            return super().space(subset)
        columns = quick_columns(
            {
                single.PROGRAMS_PER_CORE.name: (1,),
                FLATTEN.name: FLATTEN.values,
                single.DESCRIBED_STORE.name: single.DESCRIBED_STORE.values,
            }
        )
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        shared_bytes = single.descriptor_shared_bytes(problem, columns, device)
        return stay.persistent_work(problem, columns, device, shared_bytes=shared_bytes)

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on: the same for every number of cores."""
        import triton

        from kernelcast.kernels.ops.batched_gemm.triton_descriptor_jit import batched_descriptor

        interpreted = not isinstance(batched_descriptor, triton.JITFunction)
        constants = tile_constants(problem, config, architecture, interpreted=interpreted)
        del constants["EVEN_K"]  # the accelerator fills in zeros
        a, b = operands(problem)
        copies_a, copies_b = copies(problem)
        stride_a, stride_b = batch_strides(problem)
        return KernelSpec(
            kernel=batched_descriptor,
            tensors={**pieces.input_pointers(problem), **pieces.output_pointer(problem)},
            integers={
                "batch": problem["batch"],
                "M": problem["m"],
                "N": problem["n"],
                "K": problem["k"],
                "batch_stride_a": stride_a,
                "batch_stride_b": stride_b,
                "batch_stride_c": problem["m"] * problem["n"],
                "leading_a": a.leading,
                "leading_b": b.leading,
            },
            constants={
                **constants,
                "TRANSPOSED_A": a.transposed,
                "TRANSPOSED_B": b.transposed,
                "SHARED_A": copies_a == 1,
                "SHARED_B": copies_b == 1,
                "DESCRIBED_STORE": bool(config["described_store"]),
                "FLATTEN": bool(config["flatten"]),
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        """As :meth:`Variant.build`.

        Raises:
            IllegalCandidateError: here, if rows or matrices are not aligned as descriptors need them; from the launcher, if a
                tensor is not (a view that starts inside another tensor).
        """
        from kernelcast.kernels.memory import empty

        batch, m, n = problem["batch"], problem["m"], problem["n"]
        empty_side = not output_elements(problem) * problem["k"]
        wrong = [] if empty_side else unaligned(problem)
        if config["described_store"] and not empty_side and not _c_aligned(problem):
            wrong.append(f"C's rows are {n * problem.element_bytes} bytes apart")
        if wrong:
            raise IllegalCandidateError(
                f"{self.name} describes rows that are a multiple of {single.ALIGNMENT_BYTES} bytes apart, but "
                f"{' and '.join(wrong)}. Use triton_tiled or another variant for this problem."
            )
        count = batch * -(-m // int(config["block_m"])) * -(-n // int(config["block_n"]))
        spec = self.compile_spec(problem, config, launch_architecture(problem))
        launch = launch_persistent(spec, count, int(config["programs_per_core"]))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            for name, tensor in (("A", a), ("B", b)):
                if tensor.data_ptr() % single.ALIGNMENT_BYTES:
                    raise IllegalCandidateError(
                        f"{self.name} reads through descriptors, whose addresses are multiples of "
                        f"{single.ALIGNMENT_BYTES}; {name} begins at {tensor.data_ptr():#x}. Clone the view, or use "
                        "triton_tiled."
                    )
            out = empty((batch, m, n), dtype=a.dtype, device=a.device)
            if empty_side:  # which no descriptor has
                return out.zero_()
            single.with_scratch(launch, a, b, out)
            return out

        return run
