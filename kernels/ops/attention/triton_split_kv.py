"""Split-KV attention in Triton, for decoding: slices of the keys in parallel, and a second kernel combines their parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.attention import triton_pieces as pieces
from kernelcast.kernels.ops.attention.schema import SOFTMAX_FLOPS, folded
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

# (block_m, block_n, num_stages, num_warps): few queries against many keys.
CONFIGS = (
    (16, 32, 2, 2),
    (16, 32, 4, 2),
    (16, 32, 3, 4),
    (16, 64, 2, 2),
    (16, 64, 3, 4),
    (16, 64, 4, 4),
    (16, 128, 2, 4),
    (16, 128, 3, 8),
    (32, 64, 3, 4),
    (32, 128, 2, 4),
    (64, 64, 2, 4),
    (64, 64, 3, 4),
)
#: Query rows beyond which there are tiles enough without splitting.
MOST_ROWS = 128
#: Bytes of one element of a part (float32).
PART_BYTES = 4
MAX_PARTS_BYTES = 2**30


def rows_of_group(problem: Problem) -> int:
    """Query rows that share one head of k and v."""
    return folded(problem)[1]


def tiles(problem: Problem, columns: Columns) -> np.ndarray:
    """Tiles of the query rows that share one head, the ragged last one included."""
    return -(-rows_of_group(problem) // columns["block_m"])


def blocks(problem: Problem, columns: Columns) -> np.ndarray:
    """Blocks of keys."""
    return -(-problem["kv_len"] // columns["block_n"])


def slice_steps(problem: Problem, columns: Columns) -> np.ndarray:
    """Blocks of keys of each slice (the last may have fewer)."""
    return -(-blocks(problem, columns) // columns["split"])


def _every_slice_works(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    return -(-blocks(problem, columns) // slice_steps(problem, columns)) == columns["split"]


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return tiles(problem, columns) * columns["split"] * folded(problem)[0]


def _parts_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    products, rows = folded(problem)
    return float(PART_BYTES) * products * rows * (problem["head_dim"] + 1) * columns["split"]


@register_variant("attention")
class TritonSplitKv(Variant):
    """Slices of the keys in parallel, their parts in float32, then their weighted average in a fixed order.

    Flash decoding: pays where sequences and heads are fewer than the device has cores, and keys are many. The heads that
    share keys are rows of one tile, so that k and v are read once.
    """

    name = "triton_split_kv"
    backend = "triton"
    doc = "Triton: slices of the keys in parallel, then their weighted average"
    parameters = (
        Parameter("block_m", (16, 32, 64), "query rows of a tile, over all heads that share keys"),
        Parameter("block_n", (32, 64, 128), "keys a step"),
        Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
        Parameter("num_stages", (1, 2, 3, 4), "stages of the software pipeline"),
        Parameter("split", (2, 4, 8, 16, 32), "slices of the keys", quick=(4, 16)),
    )
    rules = (
        *pieces.COMMON_RULES,
        Rule(
            "no-mask",
            "few queries under a causal mask see few keys, so there is nothing to split",
            check=lambda problem, columns, device: not problem["causal"],
            explain=lambda problem, columns, device: "causal=True",
        ),
        Rule(
            "few-queries",
            f"the parts of every query row are written and read again: beyond {MOST_ROWS} rows to a head of k there are "
            "tiles enough without",
            check=lambda problem, columns, device: rows_of_group(problem) <= MOST_ROWS,
            explain=lambda problem, columns, device: f"{rows_of_group(problem)} query rows to a head of k",
        ),
        pieces.queries_rule(rows_of_group),
        Rule(
            "slices-work",
            "a slice beyond the last key attends to nothing, and its part would have no weights to average with",
            check=_every_slice_works,
            explain=lambda problem, columns, device: (
                f"{blocks(problem, columns)[0]} blocks of keys in {columns['split'][0]} slices"
            ),
        ),
        pieces.stages_rule(slice_steps),
        Rule(
            "parts-fit",
            "the parts are held at once: more than 1 GiB of them costs more than it saves",
            check=lambda problem, columns, device: _parts_bytes(problem, columns) <= MAX_PARTS_BYTES,
            explain=lambda problem, columns, device: f"{_parts_bytes(problem, columns)[0]:.0f} bytes",
        ),
        pieces.programs_rule(_programs),
    )
    source_modules = (
        "kernelcast.kernels.ops.attention.triton_flash_jit",
        "kernelcast.kernels.ops.attention.triton_pieces",
        "kernelcast.kernels.ops.attention.triton_split_kv_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) a list of 12 with two splits each."""
        if subset != "default":
            return super().space(subset)
        splits = self.parameters[-1].quick
        rows = np.array([(*config, split) for config in CONFIGS for split in splits])
        names = ("block_m", "block_n", "num_stages", "num_warps", "split")
        columns = dict(zip(names, rows.T, strict=True))
        return Block(self.name, {each.name: columns[each.name] for each in self.parameters}, len(rows))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        products, rows = folded(problem)
        count = products * tiles(problem, columns).astype(np.float64)
        block_m, depth = columns["block_m"].astype(np.float64), float(pieces.padded_head_dim(problem))
        step_flops = block_m * columns["block_n"] * (4.0 * depth + SOFTMAX_FLOPS) + block_m * depth
        # Each part is multiplied by its weight and added.
        combined = 2.0 * products * rows * columns["split"] * problem["head_dim"]
        elements = 2.0 * problem["head_dim"] * (float(products) * rows + count * problem["kv_len"])
        return Work(
            flops=count * blocks(problem, columns) * step_flops + combined,
            traffic_bytes=problem.element_bytes * elements,
            scratch_bytes=_parts_bytes(problem, columns),
            calls=2.0,
            programs=_programs(problem, columns),
            warps=columns["num_warps"],
            shared_bytes=pieces.shared_bytes(problem, columns, device),
            accumulators=pieces.accumulators_per_thread(problem, columns, device),
            inner_steps=slice_steps(problem, columns),
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The attending kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.attention.triton_split_kv_jit import attention_partial

        interpreted = not isinstance(attention_partial, triton.JITFunction)
        products, rows = folded(problem)
        block_n, split = int(config["block_n"]), int(config["split"])
        slice_keys = math.ceil(math.ceil(problem["kv_len"] / block_n) / split) * block_n
        shared = pieces.constants(problem, config, architecture, rows=rows, interpreted=interpreted)
        return KernelSpec(
            kernel=attention_partial,
            tensors={**pieces.input_pointers(problem), **_part_pointers(problem, split)},
            integers={
                "rows_of_group": rows,
                "all_rows": products * rows,
                "kv_len": problem["kv_len"],
                "slice_keys": slice_keys,
            },
            constants={**shared, "SPLIT": split},
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty
        from kernelcast.kernels.ops.attention.triton_split_kv_jit import combine_parts

        products, rows = folded(problem)
        split, all_rows, head_dim = int(config["split"]), products * rows, problem["head_dim"]
        programs = -(-rows // int(config["block_m"])) * split * products
        attend = self.compile_spec(problem, config, launch_architecture(problem)).bind((programs,))
        combine = KernelSpec(
            kernel=combine_parts,
            tensors={
                **_part_pointers(problem, split),
                "out_ptr": Pointer(problem.dtype, all_rows * head_dim * problem.element_bytes),
            },
            integers={"all_rows": all_rows},
            constants={"HEAD_DIM": head_dim, "BLOCK_D": pieces.padded_head_dim(problem), "SPLIT": split},
            options={"num_warps": 4, "enable_fp_fusion": True},
        ).bind((all_rows,))

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = empty(q.shape, dtype=q.dtype, device=q.device)
            if programs:
                parts = empty((split, all_rows, head_dim), dtype=torch.float32, device=q.device)
                logs = empty((split, all_rows), dtype=torch.float32, device=q.device)
                attend(q, k, v, parts, logs)
                combine(parts, logs, out)
            return out

        return run


def _part_pointers(problem: Problem, split: int) -> dict[str, Pointer]:
    products, rows = folded(problem)
    logs = PART_BYTES * split * products * rows
    return {
        "parts_ptr": Pointer("float32", logs * problem["head_dim"]),
        "logs_ptr": Pointer("float32", logs),
    }
