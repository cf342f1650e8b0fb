"""Flash attention in Triton: one program a tile of queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.attention import triton_pieces as pieces
from kernelcast.kernels.ops.attention.schema import SOFTMAX_FLOPS
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

# (block_m, block_n, num_stages, num_warps): what the published flash attention kernels use for heads of 64 and 128, then
# few queries, large heads, and float32 without tensor cores.
CONFIGS = (
    (128, 128, 2, 8),
    (128, 128, 3, 8),
    (128, 64, 2, 4),
    (128, 64, 3, 4),
    (128, 64, 2, 8),
    (128, 64, 3, 8),
    (128, 64, 4, 8),
    (128, 32, 3, 4),
    (128, 32, 4, 8),
    (64, 128, 2, 4),
    (64, 128, 2, 8),
    (64, 64, 1, 4),
    (64, 64, 2, 4),
    (64, 64, 3, 4),
    (64, 64, 4, 4),
    (64, 64, 2, 8),
    (64, 32, 2, 4),
    (64, 32, 3, 4),
    (64, 32, 4, 4),
    (64, 32, 2, 8),
    (64, 16, 3, 4),
    (32, 128, 2, 4),
    (32, 64, 2, 4),
    (32, 64, 3, 4),
    (32, 64, 2, 2),
    (32, 32, 2, 2),
    (32, 32, 3, 4),
    (32, 32, 2, 8),
    (16, 128, 2, 4),
    (16, 128, 3, 8),
    (16, 64, 3, 4),
    (16, 64, 2, 2),
    (16, 32, 3, 2),
    (16, 32, 2, 4),
    (16, 16, 2, 1),
    (16, 16, 2, 2),
)


def tiles(problem: Problem, columns: Columns) -> np.ndarray:
    """Tiles of queries of one head, the ragged last one included."""
    return -(-problem["q_len"] // columns["block_m"])


def steps_of_a_head(problem: Problem, columns: Columns) -> np.ndarray:
    """Blocks of keys, summed over the tiles of one head (float64). With a causal mask tile t ends at key (t + 1) block_m."""
    count = tiles(problem, columns).astype(np.float64)
    block_m, block_n = columns["block_m"].astype(np.float64), columns["block_n"].astype(np.float64)
    whole = np.ceil(problem["kv_len"] / block_n)
    if not problem["causal"]:
        return count * whole
    triangle = _tiles_before_the_end(problem, columns)
    # The sum of ceil(i / ratio) for i up to n: `ratio` times each number, then the rest.
    ratio = np.maximum(block_n / block_m, 1.0)
    groups = triangle // ratio
    ramp = ratio * groups * (groups + 1.0) / 2.0 + (triangle - groups * ratio) * (groups + 1.0)
    return ramp * np.maximum(block_m / block_n, 1.0) + (count - triangle) * whole


def keys_of_a_head(problem: Problem, columns: Columns) -> np.ndarray:
    """Keys that are read, summed over the tiles of one head (float64)."""
    count = tiles(problem, columns).astype(np.float64)
    if not problem["causal"]:
        return count * problem["kv_len"]
    triangle = _tiles_before_the_end(problem, columns)
    return columns["block_m"] * triangle * (triangle + 1.0) / 2.0 + (count - triangle) * problem["kv_len"]


def _tiles_before_the_end(problem: Problem, columns: Columns) -> np.ndarray:
    """Tiles that a causal mask ends at or before the last key."""
    return np.minimum(tiles(problem, columns), problem["kv_len"] // columns["block_m"]).astype(np.float64)


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    return tiles(problem, columns) * problem["batch"] * problem["heads"]


def _longest_loop(problem: Problem, columns: Columns) -> np.ndarray:
    """Steps of the tile that sees the most keys."""
    seen = min(problem["q_len"], problem["kv_len"]) if problem["causal"] else problem["kv_len"]
    return -(-seen // columns["block_n"])


@register_variant("attention")
class TritonFlash(Variant):
    """A program holds a tile of queries and goes through the keys in blocks, with the online softmax.

    FlashAttention-2 (Dao, arXiv:2307.08691), forward. Scores and sums are in float32; no score reaches memory. Blocks that
    a causal mask hides whole are skipped, and those that it leaves whole are not masked.
    """

    name = "triton_flash"
    backend = "triton"
    doc = "Triton: flash attention, one program a tile of queries"
    parameters = (
        Parameter("block_m", (16, 32, 64, 128), "queries of a tile"),
        Parameter("block_n", (16, 32, 64, 128), "keys a step"),
        Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
        Parameter("num_stages", (1, 2, 3, 4), "stages of the software pipeline"),
    )
    rules = (
        *pieces.COMMON_RULES,
        pieces.queries_rule(lambda problem: int(problem["q_len"])),
        pieces.stages_rule(_longest_loop),
        pieces.programs_rule(_programs),
    )
    source_modules = (
        "kernelcast.kernels.ops.attention.triton_flash_jit",
        "kernelcast.kernels.ops.attention.triton_pieces",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) a list of 36."""
        if subset != "default":
            return super().space(subset)
        rows = np.array(CONFIGS)
        columns = dict(zip(("block_m", "block_n", "num_stages", "num_warps"), rows.T, strict=True))
        return Block(self.name, {each.name: columns[each.name] for each in self.parameters}, len(rows))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        heads = float(problem["batch"]) * problem["heads"]
        block_m, depth = columns["block_m"].astype(np.float64), float(pieces.padded_head_dim(problem))
        steps = steps_of_a_head(problem, columns)
        # Two products and the softmax of a block of scores; rescaling the accumulator.
        step_flops = block_m * columns["block_n"] * (4.0 * depth + SOFTMAX_FLOPS) + block_m * depth
        elements = 2.0 * problem["head_dim"] * (problem["q_len"] + keys_of_a_head(problem, columns))
        return Work(
            flops=heads * steps * step_flops,
            traffic_bytes=problem.element_bytes * heads * elements,
            programs=_programs(problem, columns),
            warps=columns["num_warps"],
            shared_bytes=pieces.shared_bytes(problem, columns, device),
            accumulators=pieces.accumulators_per_thread(problem, columns, device),
            inner_steps=steps / np.maximum(tiles(problem, columns), 1),
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.attention.triton_flash_jit import attention_flash

        interpreted = not isinstance(attention_flash, triton.JITFunction)
        inputs = pieces.input_pointers(problem)
        shared = pieces.constants(
            problem, config, architecture, rows=problem["q_len"], interpreted=interpreted
        )
        return KernelSpec(
            kernel=attention_flash,
            tensors={**inputs, "out_ptr": Pointer(problem.dtype, inputs["q_ptr"].storage_bytes)},
            integers={
                "q_len": problem["q_len"],
                "kv_len": problem["kv_len"],
                "group": problem["heads"] // problem["kv_heads"],
            },
            constants={
                **shared,
                "EVEN_N": problem["kv_len"] % config["block_n"] == 0,
                "CAUSAL": problem["causal"],
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        programs = -(-problem["q_len"] // int(config["block_m"])) * problem["batch"] * problem["heads"]
        launch = self.compile_spec(problem, config, launch_architecture(problem)).bind((programs,))

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = empty(q.shape, dtype=q.dtype, device=q.device)
            if programs:
                launch(q, k, v, out)
            return out

        return run
