"""Stream-K gemm in Triton: whole rounds of tiles first, then the tiles left over, divided evenly by steps of k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.gemm.triton_persistent_pieces import (
    PROGRAMS_PER_CORE,
    SUM_NOT_EMPTY,
    core_count,
    program_count,
    quick_columns,
    residency_rule,
    tile_count,
)
from kernelcast.kernels.ops.gemm.triton_split_k import MAX_PARTS_BYTES, PART_BYTES, SUM_BLOCK
from kernelcast.kernels.ops.gemm.triton_tiled import (
    TILE_PARAMETERS,
    operand_pointers,
    operand_strides,
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
    STAGES_FILLED,
    accumulators_per_thread,
    matmul_class,
    matmul_shared_bytes,
    operands,
    shared_memory_rule,
    stages_filled,
    tiles,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: The least part of the steps that sharing must save; less goes into the second kernel.
LEAST_SAVING = 1 / 32


def stream_k_shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of one block, in bytes: parts are stored in float32."""
    return matmul_shared_bytes(problem, columns, device, output_bytes=PART_BYTES)


def division(
    problem: Problem, columns: Columns, device: Device
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rounds of whole tiles, tiles left over, steps of a tile, steps of a program's share), as the kernel divides."""
    count, programs = tile_count(problem, columns), program_count(columns, device)
    steps = np.maximum(tiles(problem, columns)[2], 1)
    left = count % programs
    return count // programs, left, steps, -(-left * steps // programs)


def _parts(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Places for parts: a new one begins with every program that has a share, and with every tile."""
    _, left, steps, share = division(problem, columns, device)
    return np.where(left > 0, -(-left * steps // np.maximum(share, 1)) + left - 1, 0)


def _parts_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    part = float(PART_BYTES) * columns["block_m"] * columns["block_n"]
    return part * _parts(problem, columns, device)


def _saving(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """The part of the longest program's steps that sharing saves; 0 where nothing is left over."""
    whole, left, steps, share = division(problem, columns, device)
    return np.where(left > 0, (steps - share) / ((whole + 1) * steps), 0.0)


def _bytes_of_share_and_part(
    problem: Problem, columns: Columns, device: Device
) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of the operands of one share, bytes of a part written and read)."""
    a, b = operands(problem)
    share = division(problem, columns, device)[3]
    step = columns["block_k"] * (columns["block_m"] * a.element_bytes + columns["block_n"] * b.element_bytes)
    return share * step, 2 * PART_BYTES * columns["block_m"] * columns["block_n"]


def _share_pays(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    operand_bytes, part_bytes = _bytes_of_share_and_part(problem, columns, device)
    return operand_bytes >= part_bytes


@register_variant("gemm")
class TritonStreamK(Variant):
    """Every program makes the same number of steps of k, though the tiles do not divide evenly among the programs.

    P programs first make as many rounds of P whole tiles as there are. The steps of the R < P tiles left over, in one
    row, are cut into P equal shares, so a share lies in two tiles at most. Its partial products go to float32 scratch,
    and a second kernel adds the parts of each tile in the order of k. (Stream-K: Osama, Merrill, Cecka, Garland, Owens,
    "Stream-K: work-centric parallel decomposition for dense matrix-matrix multiplication on the GPU", PPoPP 2023; the
    hybrid with whole rounds is theirs.)

    Why a second kernel: parts added by atomics come in another order in every run, and programs that wait for one another
    hang where not all of them are resident. A kernel boundary costs a launch and the parts' way through the cache, and
    needs neither; the same bits come out in every run. Whole tiles come first: programs then march through A and B in
    step, and the parts, written last, are still in the cache for the second kernel.
    """

    name = "triton_stream_k"
    backend = "triton"
    doc = "Triton: the steps of k divided evenly over a fixed number of programs, then a sum"
    parameters = (*TILE_PARAMETERS, PROGRAMS_PER_CORE)
    rules = (
        SUM_NOT_EMPTY,
        *MATMUL_RULES,
        Rule(
            "tiles-left-over",
            "where the tiles fill every round of programs, none is left to share: triton_persistent or triton_tiled again",
            check=lambda problem, columns, device: division(problem, columns, device)[1] > 0,
            explain=lambda problem, columns, device: (
                f"{tile_count(problem, columns)[0]} tiles, {program_count(columns, device)[0]} programs"
            ),
        ),
        Rule(
            "sharing-saves",
            "the second kernel costs a few percent of the time; sharing a last round that is nearly full, or one after "
            "many others, saves less",
            check=lambda problem, columns, device: _saving(problem, columns, device) >= LEAST_SAVING,
            explain=lambda problem, columns, device: (
                f"saves {_saving(problem, columns, device)[0]:.1%} of the steps"
            ),
        ),
        Rule(
            "shares-pay",
            "a part is written and read again in float32: where that moves more than its operands, memory is the limit",
            check=_share_pays,
            explain=lambda problem, columns, device: "{} < {} bytes".format(
                *(amount[0] for amount in _bytes_of_share_and_part(problem, columns, device))
            ),
        ),
        shared_memory_rule(estimate=stream_k_shared_bytes, class_of=matmul_class),
        residency_rule(stream_k_shared_bytes, class_of=matmul_class),
        Rule(
            "shares-fill-stages",
            STAGES_FILLED.reason,
            check=lambda problem, columns, device: stages_filled(
                columns, division(problem, columns, device)[3]
            ),
            explain=lambda problem, columns, device: (
                f"{columns['num_stages'][0]} stages, {division(problem, columns, device)[3][0]} steps a share"
            ),
        ),
        GROUP_DIFFERS,
        Rule(
            "parts-fit",
            "the parts are held at once: more than 1 GiB of them costs more than it saves",
            check=lambda problem, columns, device: _parts_bytes(problem, columns, device) <= MAX_PARTS_BYTES,
            explain=lambda problem, columns, device: f"{_parts_bytes(problem, columns, device)[0]:.0f} bytes",
        ),
    )
    source_modules = (
        "kernelcast.kernels.ops.gemm.triton_persistent_pieces",
        "kernelcast.kernels.ops.gemm.triton_split_k",
        "kernelcast.kernels.ops.gemm.triton_stream_k_jit",
        "kernelcast.kernels.ops.gemm.triton_tiled",
        "kernelcast.kernels.ops.gemm.triton_tiled_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) the 14 tiles of ``triton_persistent`` with one and two programs a core."""
        if subset != "default":
            return super().space(subset)
        columns = quick_columns({PROGRAMS_PER_CORE.name: PROGRAMS_PER_CORE.quick})
        return Block(self.name, columns, len(columns["block_m"]))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        tiles_m, tiles_n, steps = (count.astype(np.float64) for count in tiles(problem, columns))
        padded = tiles_m * columns["block_m"] * tiles_n * columns["block_n"] * steps * columns["block_k"]
        whole, _, whole_steps, share = division(problem, columns, device)
        parts_bytes = _parts_bytes(problem, columns, device)
        return Work(
            flops=2.0 * padded + parts_bytes / PART_BYTES,
            traffic_bytes=tiled_traffic_bytes(problem, columns),
            scratch_bytes=parts_bytes,
            calls=2.0,
            programs=program_count(columns, device),
            warps=columns["num_warps"],
            shared_bytes=stream_k_shared_bytes(problem, columns, device),
            accumulators=accumulators_per_thread(columns, device),
            inner_steps=whole * whole_steps + share,
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The multiplying kernel of one config with all that its compilation depends on.

        The kernel divides the work by the programs it runs with, so one code serves every number of cores.
        """
        import triton

        from kernelcast.kernels.ops.gemm.triton_stream_k_jit import gemm_stream_k

        interpreted = not isinstance(gemm_stream_k, triton.JITFunction)
        return KernelSpec(
            kernel=gemm_stream_k,
            tensors={
                **operand_pointers(problem),
                "c_ptr": Pointer(problem.dtype, problem["m"] * problem["n"] * problem.element_bytes),
                # How many there are depends on the device; the rules keep them below what 32-bit offsets reach.
                "parts_ptr": Pointer("float32", MAX_PARTS_BYTES),
            },
            integers={"M": problem["m"], "N": problem["n"], "K": problem["k"], **operand_strides(problem)},
            constants=tile_constants(problem, config, architecture, interpreted=interpreted),
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        m, n = problem["m"], problem["n"]
        block_m, block_n = int(config["block_m"]), int(config["block_n"])
        count = -(-m // block_m) * -(-n // block_n)
        programs_per_core = int(config["programs_per_core"])
        multiply = self.compile_spec(problem, config, launch_architecture(problem))
        bound: dict[int, tuple[Callable[..., None], Callable[..., None], int]] = {}

        def bind(index: int) -> tuple[Callable[..., None], Callable[..., None], int]:
            """(the multiplying kernel, the summing kernel, places for parts) on a device."""
            programs = programs_per_core * core_count(index)
            left = count % programs
            slots = programs + left - 1 if left else 0
            return multiply.bind((programs,)), _bind_sum(multiply, programs, left), slots

        def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            out = empty((m, n), dtype=a.dtype, device=a.device)
            if count:
                index = a.get_device()
                if index not in bound:
                    bound[index] = bind(index)
                launch, add, slots = bound[index]
                parts = empty((max(slots, 1), block_m, block_n), dtype=torch.float32, device=a.device)
                launch(a, b, out, parts)
                if slots:
                    add(parts, out)
            return out

        return run


def _bind_sum(multiply: KernelSpec, programs: int, left: int) -> Callable[..., None]:
    """The summing kernel that goes with a multiplying one, for so many tiles left over."""
    from kernelcast.kernels.ops.gemm.triton_stream_k_jit import sum_shared_tiles

    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "EVEN_M", "EVEN_N", "WIDE")
    constants = {name: multiply.constants[name] for name in names}
    rows = max(1, min(constants["BLOCK_M"], SUM_BLOCK // constants["BLOCK_N"]))
    spec = KernelSpec(
        kernel=sum_shared_tiles,
        tensors={name: multiply.tensors[name] for name in ("parts_ptr", "c_ptr")},
        integers={**{name: multiply.integers[name] for name in "MNK"}, "programs": programs},
        constants={**constants, "SUM_M": rows},
        options={"num_warps": 4, "enable_fp_fusion": True},
    )
    return spec.bind((left, constants["BLOCK_M"] // rows))
