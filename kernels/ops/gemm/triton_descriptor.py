"""Gemm in Triton with tensor descriptors: the tensor memory accelerator (TMA) of NVIDIA's sm90 and later moves whole tiles."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.errors import IllegalCandidateError
from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.triton_persistent_pieces import (
    FLATTEN,
    PIPELINE_FILLED,
    SUM_NOT_EMPTY,
    kept_output_bytes,
    launch_persistent,
    program_count,
    quick_columns,
    residency_rule,
    rounds,
    tile_count,
)
from kernelcast.kernels.ops.gemm.triton_tiled import (
    TILE_PARAMETERS,
    operand_pointers,
    tile_constants,
    tiled_traffic_bytes,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import (
    GROUP_DIFFERS,
    MATMUL_RULES,
    accumulators_per_thread,
    compute_capability,
    matmul_class,
    operands,
    output_shared_bytes,
    pipeline_buffers,
    reads_operands_from_shared,
    shared_memory_rule,
    tiles,
    uses_tensor_cores,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Base addresses and the strides between rows are multiples of so many bytes, and no box is narrower
#: (CUDA driver API, cuTensorMapEncodeTiled).
ALIGNMENT_BYTES = 16
#: The longest side of a box, in elements.
MAX_BOX = 256
#: Strides lie below so many bytes.
MAX_STRIDE_BYTES = 2**40
#: Barriers of one stage.
BARRIER_BYTES = 16

PROGRAMS_PER_CORE = Parameter("programs_per_core", (1, 2), "programs for each core of the device")
DESCRIBED_STORE = Parameter(
    "described_store", (False, True), "whether C is stored through a descriptor, from shared memory"
)


def unaligned(problem: Problem) -> list[str]:
    """The operands whose rows (columns, if transposed) do not start at multiples of 16 bytes, and by how much."""
    return [
        f"{operand.name.upper()}'s rows are {operand.leading * operand.element_bytes} bytes apart"
        for operand in operands(problem)
        if operand.leading * operand.element_bytes % ALIGNMENT_BYTES
        or operand.leading * operand.element_bytes >= MAX_STRIDE_BYTES
    ]


def _c_rows_aligned(problem: Problem) -> bool:
    row_bytes = problem["n"] * problem.element_bytes
    return row_bytes % ALIGNMENT_BYTES == 0 and row_bytes < MAX_STRIDE_BYTES


def _boxes_fit(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    widest = np.maximum(np.maximum(columns["block_m"], columns["block_n"]), columns["block_k"])
    narrowest = np.minimum(np.minimum(columns["block_m"], columns["block_n"]), columns["block_k"])
    return (widest <= MAX_BOX) & (narrowest * problem.element_bytes >= ALIGNMENT_BYTES)


def _one_tile_each(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    return rounds(problem, columns, device) <= 1


def _differs_from_plain(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    more_than_cores = tile_count(problem, columns) > max(device.cores, 1)
    return (~columns["flatten"] | ~_one_tile_each(problem, columns, device)) & (
        (columns["programs_per_core"] == 1) | more_than_cores
    )


def descriptor_shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of one block, in bytes: the buffered tiles, the stored one besides, and a few barriers.

    Every tile may be buffered ahead, whatever its alignment. A pipeline of one stage holds one tile at a time.
    """
    a_bytes, b_bytes = (
        float(operand.element_bytes) * columns["block_k"] * columns[side]
        for operand, side in zip(operands(problem), ("block_m", "block_n"), strict=True)
    )
    from_shared = reads_operands_from_shared(problem, columns, device)
    loaded = pipeline_buffers(problem, columns, device) * (a_bytes + b_bytes)
    if problem.element_bytes == 4 and compute_capability(device.architecture) // 10 in (10, 11):
        # tcgen05 reads 4-byte elements along k alone: others are transposed into two more tiles.
        a, b = operands(problem)
        loaded = loaded + from_shared * 2 * (a_bytes * a.transposed + b_bytes * (not b.transposed))
    unpipelined = columns["num_stages"] == 1
    loaded = np.where(unpipelined & ~from_shared, np.maximum(a_bytes, b_bytes), loaded)
    tile = float(problem.element_bytes) * columns["block_m"] * columns["block_n"]
    kept = kept_output_bytes(problem, columns, device)
    after = output_shared_bytes(problem, columns, device)
    besides = np.where(columns["described_store"], tile, np.where(columns["flatten"], kept, 0.0))
    barriers = BARRIER_BYTES * columns["num_stages"]
    in_turn = np.where(columns["described_store"], tile, after)
    return (
        np.where(unpipelined, np.maximum(loaded, in_turn), np.maximum(loaded + besides, in_turn)) + barriers
    )


@register_variant("gemm")
class TritonDescriptor(Variant):
    """Programs that stay, and load whole tiles of A and B through descriptors.

    One thread asks for a tile and the accelerator computes the addresses, masks what lies outside (as zeros) and swizzles
    the rows over the banks, so no registers go into addresses. A transposed operand is described as it is stored, and the
    product reads its tile transposed from shared memory.

    The kernel builds its descriptors itself, once a program, in a few hundred bytes of scratch; programs therefore make
    more than one tile each where there are more tiles than programs. Descriptors that are built on the host would cost
    the caller's thread several microseconds a call.
    """

    name = "triton_descriptor"
    backend = "triton"
    doc = "Triton: tiles moved by the tensor memory accelerator (sm90 and later)"
    parameters = (*TILE_PARAMETERS, PROGRAMS_PER_CORE, FLATTEN, DESCRIBED_STORE)
    rules = (
        Rule(
            "has-tma",
            "the tensor memory accelerator came with compute capability 9.0",
            check=lambda problem, columns, device: compute_capability(device.architecture) >= 90,
            explain=lambda problem, columns, device: device.architecture,
        ),
        Rule(
            "tensor-cores",
            "tiles are swizzled for tensor cores; read by other units, one element after the other, they spill a "
            "thread's registers many times over",
            check=lambda problem, columns, device: uses_tensor_cores(problem, device),
            explain=lambda problem, columns, device: f"{problem.dtype}, allow_tf32={problem.allow_tf32}",
        ),
        SUM_NOT_EMPTY,
        Rule(
            "rows-aligned",
            "a descriptor holds strides as multiples of 16 bytes, below 2**40 bytes",
            check=lambda problem, columns, device: not unaligned(problem),
            explain=lambda problem, columns, device: " and ".join(unaligned(problem)),
        ),
        *MATMUL_RULES,
        Rule(
            "boxes-fit",
            f"a box of the accelerator has at most {MAX_BOX} elements a side and rows of at least 16 bytes",
            check=_boxes_fit,
            explain=lambda problem, columns, device: (
                f"{columns['block_m'][0]} x {columns['block_n'][0]} x {columns['block_k'][0]} "
                f"elements of {problem.element_bytes} bytes"
            ),
        ),
        Rule(
            "stored-rows-aligned",
            "the rows of C must start at multiples of 16 bytes to be stored through a descriptor",
            check=lambda problem, columns, device: ~columns["described_store"] | _c_rows_aligned(problem),
            explain=lambda problem, columns, device: f"rows of {problem['n'] * problem.element_bytes} bytes",
        ),
        Rule(
            "programs-differ",
            "where each program makes one tile at most, more programs a core and a pipeline that runs on to the next tile "
            "are the same kernel twice",
            check=_differs_from_plain,
            explain=lambda problem, columns, device: (
                f"{tile_count(problem, columns)[0]} tiles, {program_count(columns, device)[0]} programs, "
                f"{max(device.cores, 1)} cores"
            ),
        ),
        shared_memory_rule(estimate=descriptor_shared_bytes, class_of=matmul_class),
        residency_rule(descriptor_shared_bytes, class_of=matmul_class),
        PIPELINE_FILLED,
        GROUP_DIFFERS,
    )
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_descriptor_jit",
        "kernelcast.kernels.ops.gemm.triton_persistent_pieces",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the 14 tiles of ``triton_persistent``, flattened or not, with both stores."""
        if subset != "default":
            return super().space(subset)
        columns = quick_columns(
            {
                PROGRAMS_PER_CORE.name: (1,),
                FLATTEN.name: FLATTEN.values,
                DESCRIBED_STORE.name: DESCRIBED_STORE.values,
            }
        )
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
        padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
        return Work(
            flops=2.0 * padded,
            traffic_bytes=tiled_traffic_bytes(problem, columns),
            programs=np.minimum(tiles_m * tiles_n, program_count(columns, device)),
            warps=columns["num_warps"],
            shared_bytes=descriptor_shared_bytes(problem, columns, device),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=rounds(problem, columns, device) * steps,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on: the same for every number of cores."""
        import triton

        from kernelcast.kernels.ops.gemm.triton_descriptor_jit import gemm_descriptor

        interpreted = not isinstance(gemm_descriptor, triton.JITFunction)
        constants = tile_constants(problem, config, architecture, interpreted=interpreted)
        del constants["EVEN_K"]  # the accelerator fills in zeros
        a, b = operands(problem)
        output_bytes = problem["m"] * problem["n"] * problem.element_bytes
        return KernelSpec(
            kernel=gemm_descriptor,
            tensors={**operand_pointers(problem), "c_ptr": Pointer(problem.dtype, output_bytes)},
            integers={
                "M": problem["m"],
                "N": problem["n"],
                "K": problem["k"],
                "leading_a": a.leading,
                "leading_b": b.leading,
            },
            constants={
                **constants,
                "TRANSPOSED_A": a.transposed,
                "TRANSPOSED_B": b.transposed,
                "DESCRIBED_STORE": bool(config["described_store"]),
                "FLATTEN": bool(config["flatten"]),
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        """As :meth:`Variant.build`.

        Raises:
            IllegalCandidateError: here, if rows are not aligned as descriptors need them; from the launcher, if a tensor is
                not (a view that starts inside another tensor).
        """
        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        empty_side = not m * n * problem["k"]
        wrong = [] if empty_side else unaligned(problem)
        if config["described_store"] and not empty_side and not _c_rows_aligned(problem):
            wrong.append(f"C's rows are {n * problem.element_bytes} bytes apart")
        if wrong:
            raise IllegalCandidateError(
                f"{self.name} describes rows that are a multiple of {ALIGNMENT_BYTES} bytes apart, but "
                f"{' and '.join(wrong)}. Use triton_tiled or another variant for this problem."
            )
        count = -(-m // config["block_m"]) * -(-n // config["block_n"])
        spec = self.compile_spec(problem, config, launch_architecture(problem))
        launch = launch_persistent(spec, count, int(config["programs_per_core"]))

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            for name, tensor in (("A", a), ("B", b)):
                if tensor.data_ptr() % ALIGNMENT_BYTES:
                    raise IllegalCandidateError(
                        f"{self.name} reads through descriptors, whose addresses are multiples of {ALIGNMENT_BYTES}; "
                        f"{name} begins at {tensor.data_ptr():#x}. Clone the view, or use triton_tiled."
                    )
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if empty_side:  # which no descriptor has
                return out.zero_()
            with_scratch(launch, a, b, out)
            return out

        return run


def with_scratch(launch: Callable[..., None], *tensors: torch.Tensor) -> None:
    """Launch a kernel that needs scratch for its descriptors, from torch's allocator.

    Triton's allocator is a context variable that only a call can set, and none restores. A context of the launch's own
    leaves the caller's, and those of other threads, as they are.
    """
    contextvars.copy_context().run(_launch, launch, tensors)


def _launch(launch: Callable[..., None], tensors: tuple[torch.Tensor, ...]) -> None:
    import torch
    import triton

    device = tensors[0].device

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        # On the current stream, which Triton launches on; torch aligns to more than the 128 bytes of a descriptor.
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)
    launch(*tensors)
