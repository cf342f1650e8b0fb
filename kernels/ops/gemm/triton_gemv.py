"""Skinny gemm in Triton: few rows (or, transposed, few columns) times a large matrix that is read once, in wide loads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.gemm.triton_split_k import MAX_PARTS_BYTES, PART_BYTES, SUM_BLOCK
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_options
from kernelcast.kernels.triton_operands import Operand
from kernelcast.kernels.triton_rules import (
    BLOCK_THREADS,
    DTYPE_SUPPORTED,
    MAX_ACCUMULATORS,
    MAX_INT32,
    NEEDS_GPU,
    needs_wide_offsets,
    operands,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: Beyond so many rows on its shorter side a product is no matter of reading one matrix alone.
MAX_FEW = 16
#: The widest load of one thread.
LOAD_BYTES = 16
#: The pieces in which GPUs move memory.
SECTOR_BYTES = 32
#: More than the steps of k that the last of 64 slices of blocks of 512 may reach beyond k.
LARGEST_PADDING = 2**16
#: Registers of one thread for its sums and for the elements of one turn of the loop.
MAX_WORDS = 176

# (block_n, block_k, num_warps): wide along n, wide along k, and square.
CONFIGS = (
    (16, 64, 4),
    (16, 128, 4),
    (16, 16, 1),
    (16, 256, 8),
    (32, 16, 1),
    (32, 64, 4),
    (32, 128, 4),
    (64, 16, 2),
    (64, 16, 4),
    (64, 32, 4),
    (64, 64, 8),
    (128, 8, 4),
    (128, 32, 4),
    (256, 4, 4),
    (256, 16, 4),
    (512, 8, 8),
    (8, 128, 4),
    (8, 256, 4),
    (4, 256, 4),
    (4, 512, 4),
)


@dataclass(frozen=True, slots=True)
class Skinny:
    """A product of a matrix of few rows with a long one, or of the two transposed.

    Attributes:
        flipped: whether the few rows are the columns of B, and the output is written transposed.
        few: the number of the few rows.
        long: the other side of the output.
        few_operand: the matrix of few rows; B if flipped.
        few_strides: its elements between rows and along k.
        long_operand: the other matrix.
        long_strides: its elements along k and along the long side.
        output_strides: elements between the few rows and along the long side of the output.
    """

    flipped: bool
    few: int
    long: int
    few_operand: Operand
    few_strides: tuple[int, int]
    long_operand: Operand
    long_strides: tuple[int, int]
    output_strides: tuple[int, int]

    @property
    def rows(self) -> int:
        """The few rows, rounded up to a power of two."""
        return 1 << max(self.few - 1, 0).bit_length()


def skinny(problem: Problem) -> Skinny:
    """The problem with its shorter side first."""
    a, b = operands(problem)
    m, n = problem["m"], problem["n"]
    if n < m:
        return Skinny(True, n, m, b, b.strides[::-1], a, a.strides[::-1], (1, n))
    return Skinny(False, m, n, a, a.strides, b, b.strides, (n, 1))


def blocks(problem: Problem, columns: Columns) -> np.ndarray:
    """Blocks of the long side, the ragged last one included."""
    return np.asarray(-(-skinny(problem).long // columns["block_n"]))


def slice_steps(problem: Problem, columns: Columns) -> np.ndarray:
    """Blocks of k of each slice (the last may have fewer)."""
    return np.asarray(-(-_steps(problem, columns) // columns["split_k"]))


def _steps(problem: Problem, columns: Columns) -> np.ndarray:
    return np.asarray(-(-problem["k"] // columns["block_k"]))


def elements_per_thread(columns: Columns, device: Device) -> np.ndarray:
    """Elements of the long matrix that one thread loads in one turn of the loop."""
    threads = columns["num_warps"] * max(device.warp_size, 1)
    return np.asarray(columns["block_n"] * columns["block_k"] / threads)


def sums_per_thread(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """float32 sums of one thread: one for every row and element that it loads in one turn."""
    return skinny(problem).rows * elements_per_thread(columns, device)


def words_per_thread(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """32-bit words that one thread holds: its sums, its elements, and addresses where elements are loaded one by one.

    An element that is loaded alone takes a register, a mask and an address of two; a group shares them. Triton groups
    neighbours where it knows addresses and bounds to be multiples of 16.
    """
    operand = skinny(problem).long_operand
    adjacent = operand.rows if operand.transposed else operand.columns
    grouped = operand.leading % 16 == 0 and adjacent % 16 == 0
    each = operand.element_bytes / 4.0 if grouped else 4.0
    return sums_per_thread(problem, columns, device) + each * elements_per_thread(columns, device)


def parts_bytes(problem: Problem, columns: Columns, *, batch: int = 1) -> np.ndarray:
    """Bytes of the parts that a second kernel adds up; none where k is not split."""
    split = columns["split_k"]
    return np.where(split > 1, float(PART_BYTES) * batch * problem["m"] * problem["n"] * split, 0.0)


def _run_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Bytes of the long matrix that lie one after the other in a tile."""
    view = skinny(problem)
    along = columns["block_n"] if view.long_strides[1] == 1 else columns["block_k"]
    return np.asarray(along * view.long_operand.element_bytes)


def _every_slice_works(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    steps = _steps(problem, columns)
    used = -(-steps // np.maximum(slice_steps(problem, columns), 1))
    return np.asarray((columns["split_k"] == 1) | (used == columns["split_k"]))


def _blocks_fit(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    view = skinny(problem)
    return np.asarray(
        (columns["block_n"] <= 2 * max(view.long, 4)) & (columns["block_k"] <= 2 * max(problem["k"], 4))
    )


FEW_ROWS = Rule(
    "few-rows",
    f"every row takes a sum of its own for each element in flight, and the registers hold those of {MAX_FEW} rows; more "
    "of them reuse what they load in a tile, where tensor cores are faster",
    check=lambda problem, columns, device: min(problem["m"], problem["n"]) <= MAX_FEW,
    explain=lambda problem, columns, device: f"m={problem['m']}, n={problem['n']}",
)
DIMENSIONS = Rule(
    "dimensions",
    "places and steps of k are counted in 32 bits, the padding of the last block and of the last slice included "
    "(elements are counted in 64 if need be)",
    check=lambda problem, columns, device: (
        max(problem[name] for name in ("m", "n", "k")) <= MAX_INT32 - LARGEST_PADDING
    ),
    explain=lambda problem, columns, device: f"m={problem['m']}, n={problem['n']}, k={problem['k']}",
)
BLOCKS_FIT = Rule(
    "blocks-fit",
    "a block of more than twice a dimension loads mostly nothing",
    check=_blocks_fit,
    explain=lambda problem, columns, device: (
        f"block_n={columns['block_n'][0]} for {skinny(problem).long}, block_k={columns['block_k'][0]} for "
        f"k={problem['k']}"
    ),
)
WIDE_LOADS = Rule(
    "wide-loads",
    f"a thread loads {LOAD_BYTES} bytes at once; with a smaller share of a tile it keeps too few bytes in flight to hide "
    "how long memory takes",
    check=lambda problem, columns, device: (
        elements_per_thread(columns, device) * problem.element_bytes >= LOAD_BYTES
    ),
    explain=lambda problem, columns, device: (
        f"{elements_per_thread(columns, device)[0] * problem.element_bytes:g} bytes a thread"
    ),
)
SECTORS = Rule(
    "sectors",
    f"memory moves in sectors of {SECTOR_BYTES} bytes: a tile that is narrower along rows in memory fetches bytes that it "
    "does not use",
    check=lambda problem, columns, device: _run_bytes(problem, columns) >= SECTOR_BYTES,
    explain=lambda problem, columns, device: f"{_run_bytes(problem, columns)[0]} bytes",
)
SUMS = Rule(
    "sums",
    f"a thread has 255 registers: more than {MAX_ACCUMULATORS} sums spill to memory inside the loop",
    check=lambda problem, columns, device: sums_per_thread(problem, columns, device) <= MAX_ACCUMULATORS,
    explain=lambda problem, columns, device: (
        f"{sums_per_thread(problem, columns, device)[0]:g} > {MAX_ACCUMULATORS} sums a thread"
    ),
)
REGISTERS = Rule(
    "registers",
    "sums, elements in flight and their addresses share the 255 registers of a thread",
    check=lambda problem, columns, device: words_per_thread(problem, columns, device) <= MAX_WORDS,
    explain=lambda problem, columns, device: (
        f"{words_per_thread(problem, columns, device)[0]:g} > {MAX_WORDS} words a thread"
    ),
)
SLICES_WORK = Rule(
    "slices-work",
    "a slice that lies beyond k multiplies nothing and still writes a part that must be added",
    check=_every_slice_works,
    explain=lambda problem, columns, device: (
        f"{_steps(problem, columns)[0]} steps of block_k in {columns['split_k'][0]} slices"
    ),
)


def parts_rule(parts: Any) -> Rule:
    """At most :data:`MAX_PARTS_BYTES` of parts; ``parts`` counts them from the problem and the columns."""
    return Rule(
        "parts-fit",
        "the parts are held at once: more than 1 GiB of them costs more than it saves",
        check=lambda problem, columns, device: parts(problem, columns) <= MAX_PARTS_BYTES,
        explain=lambda problem, columns, device: f"{parts(problem, columns)[0]:.0f} bytes",
    )


#: The rules of every skinny product, less those on the grid and on the parts.
SKINNY_RULES = (
    FEW_ROWS,
    NEEDS_GPU,
    DTYPE_SUPPORTED,
    DIMENSIONS,
    BLOCK_THREADS,
    BLOCKS_FIT,
    WIDE_LOADS,
    SECTORS,
    SUMS,
    REGISTERS,
    SLICES_WORK,
)
SKINNY_PARAMETERS = (
    Parameter("block_n", (4, 8, 16, 32, 64, 128, 256, 512), "of a tile: places along the long side"),
    Parameter("block_k", (4, 8, 16, 32, 64, 128, 256, 512), "of a tile: steps of k"),
    Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
    Parameter("split_k", (1, 2, 4, 8, 16, 32, 64), "slices of k", quick=(1, 4, 16)),
)


def quick_configs(variant: str) -> Block:
    """The quick subset."""
    splits = SKINNY_PARAMETERS[-1].quick
    rows = np.array([(*config, split) for config in CONFIGS for split in splits])
    names = [parameter.name for parameter in SKINNY_PARAMETERS]
    return Block(variant, dict(zip(names, rows.T, strict=True)), len(rows))


def skinny_constants(problem: Problem, config: Mapping[str, Any]) -> dict[str, Any]:
    """The constants of the kernels of this kind, in their order."""
    view = skinny(problem)
    return {
        "ROWS": view.rows,
        "BLOCK_N": int(config["block_n"]),
        "BLOCK_K": int(config["block_k"]),
        "EVEN_ROWS": view.few == view.rows,
        "EVEN_N": view.long % config["block_n"] == 0,
        "EVEN_K": problem["k"] % config["block_k"] == 0,
        "WIDE": needs_wide_offsets(problem),
    }


def skinny_integers(
    problem: Problem,
    config: Mapping[str, Any],
    *,
    batch_strides: Mapping[str, int] | None = None,
    part_elements: int,
) -> dict[str, int]:
    """The integers of the kernels of this kind, in their order; ``batch_strides`` come after the parts."""
    view = skinny(problem)
    block_k = int(config["block_k"])
    return {
        "FEW": view.few,
        "LONG": view.long,
        "K": problem["k"],
        "slice_k": math.ceil(math.ceil(problem["k"] / block_k) / int(config["split_k"])) * block_k,
        "part_elements": part_elements,
        **(batch_strides or {}),
        **dict(zip(("stride_fs", "stride_fk"), view.few_strides, strict=True)),
        **dict(zip(("stride_lk", "stride_ll"), view.long_strides, strict=True)),
        **dict(zip(("stride_os", "stride_ol"), view.output_strides, strict=True)),
    }


def skinny_pointers(
    problem: Problem, config: Mapping[str, Any], *, copies: tuple[int, int] = (1, 1), batch: int = 1
) -> dict[str, Pointer]:
    """The pointers of the kernels of this kind, in their order; ``copies`` of A and of B lie one after the other."""
    view = skinny(problem)
    found = {}
    for name, operand in (("few_ptr", view.few_operand), ("long_ptr", view.long_operand)):
        stored_rows = operand.columns if operand.transposed else operand.rows
        count = copies[0] if operand.name == "a" else copies[1]
        size = count * stored_rows * operand.leading * operand.element_bytes
        found[name] = Pointer(problem.dtype, size)
    elements = batch * problem["m"] * problem["n"]
    split = int(config["split_k"])
    if split > 1:
        return {**found, "out_ptr": Pointer("float32", PART_BYTES * elements * split)}
    return {**found, "out_ptr": Pointer(problem.dtype, elements * problem.element_bytes)}


def skinny_work(problem: Problem, columns: Columns, device: Device, *, batch: int = 1) -> Work:
    """The work of ``batch`` products. Every block of the long side reads the few rows again."""
    view = skinny(problem)
    along, steps = (
        blocks(problem, columns).astype(np.float64),
        slice_steps(problem, columns).astype(np.float64),
    )
    split = columns["split_k"].astype(np.float64)
    padded = view.rows * along * columns["block_n"] * steps * columns["block_k"] * split
    few, long, k = float(view.few), float(view.long), float(problem["k"])
    # The sums of one thread are added up after the loop.
    added = view.rows * along * columns["block_n"] * columns["block_k"] * split
    parts = np.where(split > 1, split * few * long, 0.0)
    return Work(
        flops=batch * (2.0 * padded + added + parts),
        traffic_bytes=batch * problem.element_bytes * (few * k * along + k * long + few * long),
        scratch_bytes=parts_bytes(problem, columns, batch=batch),
        calls=np.where(split > 1, 2.0, 1.0),
        programs=batch * along * split,
        warps=columns["num_warps"],
        accumulators=sums_per_thread(problem, columns, device),
        inner_steps=steps,
    )


def sum_spec(problem: Problem, split: int, *, batch: int = 1) -> KernelSpec:
    """The kernel that adds ``split`` parts up, always in the same order."""
    from kernelcast.kernels.ops.gemm.triton_split_k_jit import sum_parts

    elements = batch * problem["m"] * problem["n"]
    return KernelSpec(
        kernel=sum_parts,
        tensors={
            "parts_ptr": Pointer("float32", PART_BYTES * elements * split),
            "c_ptr": Pointer(problem.dtype, elements * problem.element_bytes),
        },
        integers={"part_elements": elements},
        constants={"SPLIT": split, "BLOCK": SUM_BLOCK},
        options={"num_warps": 4, "enable_fp_fusion": True},
    )


def skinny_launcher(
    problem: Problem, spec: KernelSpec, config: Mapping[str, Any], *, shape: tuple[int, ...], batch: int = 1
) -> Launcher:
    """A callable over A and B that fills an output of ``shape``."""
    import torch

    from kernelcast.kernels.memory import empty

    flipped, split = skinny(problem).flipped, int(config["split_k"])
    elements = math.prod(shape)
    along = -(-skinny(problem).long // int(config["block_n"]))
    multiply = spec.bind((along * batch, split))
    add = sum_spec(problem, split, batch=batch).bind((-(-elements // SUM_BLOCK),)) if split > 1 else None

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = empty(shape, dtype=a.dtype, device=a.device)
        if elements:
            pair = (b, a) if flipped else (a, b)
            if add is None:
                multiply(*pair, out)
            else:
                parts = empty((split, *shape), dtype=torch.float32, device=a.device)
                multiply(*pair, parts)
                add(parts, out)
        return out

    return run


@register_variant("gemm")
class TritonGemv(Variant):
    """Few rows against a large matrix that is read once, in loads as wide as its rows in memory allow.

    The limit is memory, not arithmetic: no tensor cores, products and sums in float32, TF32 never. Slices of k may run in
    parallel, their parts added up by a second kernel, in the same order in every run.
    """

    name = "triton_gemv"
    backend = "triton"
    doc = "Triton: few rows or columns against a matrix that is read once"
    parameters = SKINNY_PARAMETERS
    rules = (
        *SKINNY_RULES,
        Rule(
            "grid",
            "the first dimension of a grid holds at most 2**31 - 1 blocks",
            check=lambda problem, columns, device: blocks(problem, columns) <= MAX_INT32,
            explain=lambda problem, columns, device: f"{blocks(problem, columns)[0]} blocks",
        ),
        parts_rule(parts_bytes),
    )
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_gemv_jit",
        "kernelcast.kernels.ops.gemm.triton_split_k",
        "kernelcast.kernels.ops.gemm.triton_split_k_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) a list of 20 tiles with three splits each."""
        return quick_configs(self.name) if subset == "default" else super().space(subset)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        return skinny_work(problem, columns, device)

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The multiplying kernel of one config with all that its compilation depends on."""
        from kernelcast.kernels.ops.gemm.triton_gemv_jit import gemm_gemv

        return KernelSpec(
            kernel=gemm_gemv,
            tensors=skinny_pointers(problem, config),
            integers=skinny_integers(problem, config, part_elements=problem["m"] * problem["n"]),
            constants=skinny_constants(problem, config),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        spec = self.compile_spec(problem, config)
        return skinny_launcher(problem, spec, config, shape=(problem["m"], problem["n"]))
