"""Attention in Triton for short sequences: a whole row of scores at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Block, Columns
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.attention import triton_pieces as pieces
from kernelcast.kernels.ops.attention.pieces import reach
from kernelcast.kernels.ops.attention.schema import SOFTMAX_FLOPS, folded
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_launch import launch_architecture, launch_options
from kernelcast.kernels.triton_rules import (
    BLOCK_THREADS,
    DTYPE_SUPPORTED,
    GFX950_PADDING,
    MIN_TILE,
    NEEDS_GPU,
    TENSOR_CORES,
    compute_capability,
    pipeline_buffers,
    reads_operands_from_shared,
)
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: The longest row of scores that registers hold.
MAX_KEYS = 256

# (block_m, heads_per_program, num_warps, num_stages)
CONFIGS = (
    (16, 1, 1, 1),
    (16, 1, 2, 1),
    (16, 1, 4, 1),
    (16, 1, 8, 1),
    (16, 2, 1, 2),
    (16, 4, 1, 2),
    (16, 4, 1, 3),
    (16, 4, 2, 2),
    (16, 8, 1, 2),
    (16, 8, 2, 3),
    (16, 8, 4, 2),
    (16, 8, 8, 2),
    (32, 1, 1, 1),
    (32, 1, 2, 1),
    (32, 1, 4, 1),
    (32, 1, 8, 1),
    (32, 2, 2, 2),
    (32, 2, 4, 2),
    (32, 4, 2, 2),
    (32, 4, 4, 2),
    (32, 8, 2, 2),
    (64, 1, 2, 1),
    (64, 1, 4, 1),
    (64, 1, 8, 1),
    (64, 2, 4, 1),
    (64, 2, 4, 2),
    (64, 4, 4, 2),
    (64, 4, 4, 3),
    (64, 4, 8, 2),
    (128, 1, 4, 1),
    (128, 1, 8, 1),
    (128, 2, 8, 1),
    (128, 2, 4, 2),
    (128, 4, 8, 2),
)


def padded_keys(problem: Problem) -> int:
    """The power of two, at least a tensor core's tile, that a row of scores is padded to."""
    return max(MIN_TILE, 1 << (reach(problem) - 1).bit_length())


def rows_of_group(problem: Problem) -> int:
    """Query rows that share one head of k and v."""
    return folded(problem)[1]


def _programs(problem: Problem, columns: Columns) -> np.ndarray:
    tiles = -(-rows_of_group(problem) // columns["block_m"])
    return tiles * (folded(problem)[0] // columns["heads_per_program"])


def _whole_rows(problem: Problem, columns: Columns) -> Columns:
    """The columns with ``block_n``: all keys."""
    return {**columns, "block_n": np.full(len(columns["block_m"]), padded_keys(problem))}


def _of_whole_rows(rule: Rule) -> Rule:
    """A rule on tiles of queries and keys, where the tile of keys is all of them."""
    explain = rule.explain
    return Rule(
        rule.name,
        rule.reason,
        check=lambda problem, columns, device: rule.check(problem, _whole_rows(problem, columns), device),
        explain=explain
        and (lambda problem, columns, device: explain(problem, _whole_rows(problem, columns), device)),
    )


def shared_bytes(problem: Problem, columns: Columns, device: Device) -> np.ndarray:
    """Shared memory of one program, in bytes: queries, keys and values, as often as the pipeline over the heads holds them.

    The weights take the place of the keys, unless the pipeline loads the next ones there. A pipelined output is rearranged
    into whole rows in a place of its own: a single warp does that in two halves.
    """
    tile = _whole_rows(problem, columns)
    depth, element = pieces.padded_head_dim(problem), float(problem.element_bytes)
    q, keys = tile["block_m"] * depth * element, tile["block_n"] * depth * element
    weights = np.where(
        pieces.weights_exchanged(problem, tile, device), tile["block_m"] * tile["block_n"] * element, 0.0
    )
    pipelined = (columns["num_stages"] > 1) & (not pieces.loads_one_by_one(problem))
    buffers = pipeline_buffers(problem, tile, device).astype(np.float64)
    if device.architecture.startswith("gfx"):
        # Unpipelined, everything takes turns.
        passing = np.where(pieces.queries_pass_through_shared(problem, tile), q, 0.0)
        padding = GFX950_PADDING if device.architecture.startswith("gfx95") else 1.0
        taking_turns = np.maximum(np.maximum(passing, keys), weights)
        return padding * np.where(pipelined, buffers * (q + 2.0 * keys) + weights, taking_turns)
    # tcgen05 has the queries once.
    from_shared = reads_operands_from_shared(problem, tile, device)
    once = from_shared & (100 <= compute_capability(device.architecture) < 120)
    queries = np.where(once, 1.0, buffers) * q
    output = np.where(columns["num_warps"] > 1, q, q / 2.0)
    loaded = queries + 2.0 * buffers * keys + np.maximum(weights, output)
    return np.where(pipelined, loaded, np.maximum(q + 2.0 * keys, keys + weights))


@register_variant("attention")
class TritonShort(Variant):
    """A program holds a tile of queries and all the keys and values that they see: one softmax, with nothing to rescale.

    The heads that share keys are rows of one tile, so that k and v are read once. Where a head is too small to keep a
    program busy, a program goes through several, and loads the next one while it works on one.
    """

    name = "triton_short"
    backend = "triton"
    doc = f"Triton: whole rows of scores in one program, for up to {MAX_KEYS} keys"
    parameters = (
        Parameter("block_m", (16, 32, 64, 128), "query rows of a tile, over all heads that share keys"),
        Parameter("heads_per_program", (1, 2, 4, 8), "heads of k and v that a program goes through"),
        Parameter("num_warps", (1, 2, 4, 8), "warps of a program"),
        Parameter("num_stages", (1, 2, 3), "stages of the software pipeline over the heads"),
    )
    rules = (
        NEEDS_GPU,
        DTYPE_SUPPORTED,
        TENSOR_CORES,
        Rule(
            "row-fits",
            f"a program holds whole rows of scores in registers: at most {MAX_KEYS} keys that some query sees",
            check=lambda problem, columns, device: reach(problem) <= MAX_KEYS,
            explain=lambda problem, columns, device: f"keys that are seen: {reach(problem)}",
        ),
        pieces.HEAD_FITS,
        pieces.OFFSETS,
        BLOCK_THREADS,
        pieces.queries_rule(rows_of_group),
        Rule(
            "heads-divide",
            "a program with fewer heads than the others would make the loop's length unknown, and its loads ahead guarded",
            check=lambda problem, columns, device: folded(problem)[0] % columns["heads_per_program"] == 0,
            explain=lambda problem, columns, device: (
                f"heads_per_program={columns['heads_per_program'][0]}, {folded(problem)[0]} heads of k and v"
            ),
        ),
        Rule(
            "stages-filled",
            "the pipeline runs over the heads of a program: with no more of them than stages less one it is not filled, and "
            "with a single one every num_stages is the same kernel",
            check=lambda problem, columns, device: columns["num_stages"] - 1 < columns["heads_per_program"],
            explain=lambda problem, columns, device: (
                f"num_stages={columns['num_stages'][0]}, heads_per_program={columns['heads_per_program'][0]}"
            ),
        ),
        _of_whole_rows(pieces.ACCUMULATORS),
        _of_whole_rows(pieces.REGISTERS),
        _of_whole_rows(pieces.THREADS_BUSY),
        pieces.shared_memory_rule(shared_bytes),
        pieces.programs_rule(_programs),
    )
    source_modules = (
        "kernelcast.kernels.ops.attention.triton_flash_jit",
        "kernelcast.kernels.ops.attention.triton_pieces",
        "kernelcast.kernels.ops.attention.triton_short_jit",
        "kernelcast.kernels.triton_launch",
        "kernelcast.kernels.triton_rules",
    )

    def space(self, subset: str = "full") -> Block:
        """Every config, or (``"default"``) a list of 34."""
        if subset != "default":
            return super().space(subset)
        rows = np.array(CONFIGS)
        columns = {each.name: rows[:, place] for place, each in enumerate(self.parameters)}
        return Block(self.name, columns, len(rows))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        products, rows = folded(problem)
        keys, depth = float(padded_keys(problem)), float(pieces.padded_head_dim(problem))
        block_m = columns["block_m"].astype(np.float64)
        tiles = np.ceil(rows / block_m)
        # Every tile of queries reads the keys and values.
        elements = 2.0 * products * problem["head_dim"] * (rows + tiles * reach(problem))
        return Work(
            flops=products * tiles * block_m * keys * (4.0 * depth + SOFTMAX_FLOPS),
            traffic_bytes=problem.element_bytes * elements,
            programs=_programs(problem, columns),
            warps=columns["num_warps"],
            shared_bytes=shared_bytes(problem, columns, device),
            accumulators=pieces.accumulators_per_thread(problem, _whole_rows(problem, columns), device),
            inner_steps=columns["heads_per_program"],
        )

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        import triton

        from kernelcast.kernels.ops.attention.triton_short_jit import attention_short

        interpreted = not isinstance(attention_short, triton.JITFunction)
        rows = rows_of_group(problem)
        keys = padded_keys(problem)
        inputs = pieces.input_pointers(problem)
        shared = pieces.constants(
            problem, {**config, "block_n": keys}, architecture, rows=rows, interpreted=interpreted
        )
        return KernelSpec(
            kernel=attention_short,
            tensors={**inputs, "out_ptr": Pointer(problem.dtype, inputs["q_ptr"].storage_bytes)},
            integers={
                "rows_of_group": rows,
                "q_len": problem["q_len"],
                "kv_len": problem["kv_len"],
                "keys_seen": reach(problem),
            },
            constants={
                **shared,
                "EVEN_N": reach(problem) == keys,
                "CAUSAL": problem["causal"],
                "GROUPED": problem["heads"] != problem["kv_heads"],
                "HEADS": int(config["heads_per_program"]),
            },
            options=launch_options(config),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from kernelcast.kernels.memory import empty

        products, rows = folded(problem)
        tiles = -(-rows // int(config["block_m"]))
        programs = tiles * (products // int(config["heads_per_program"]))
        launch = self.compile_spec(problem, config, launch_architecture(problem)).bind((programs,))

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = empty(q.shape, dtype=q.dtype, device=q.device)
            if programs:
                launch(q, k, v, out)
            return out

        return run
