"""What several variants of conv2d share: rules, memory orders, padding, and cutting outputs out of tiles.

*Channels first* and *channels last* name the order in memory; tensors are always indexed as [n, channels, rows, columns].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount

if TYPE_CHECKING:
    import torch

#: Further module of every variant that uses these helpers, for its source hash.
SHARED_MODULES = ("kernelcast.kernels.ops.conv2d.shared", "kernelcast.kernels.ops.conv2d.schema")

#: The most temporary memory that a variant may hold at once.
MAX_SCRATCH_BYTES = 2**31

ORDERS = ("first", "last")

HAS_IMAGES = Rule(
    "has-images",
    "without images there is nothing to compute, and some libraries refuse empty batches",
    check=lambda problem, columns, device: problem["n"] > 0,
    explain=lambda problem, columns, device: "n=0",
)

DENSE = Rule(
    "dense",
    "it multiplies all input channels with all output channels at once, which groups rule out",
    check=lambda problem, columns, device: problem["groups"] == 1,
    explain=lambda problem, columns, device: f"groups={problem['groups']}",
)

UNIT_STRIDE = Rule(
    "unit-stride",
    "it computes every position; a stride would throw most of them away",
    check=lambda problem, columns, device: problem["stride_h"] == problem["stride_w"] == 1,
    explain=lambda problem, columns, device: f"stride {problem['stride_h']}x{problem['stride_w']}",
)


def is_plain_product(problem: Problem) -> bool:
    """Whether the output's pixels are the input's, each multiplied with one matrix."""
    facts = ("r", "s", "stride_h", "stride_w", "groups")
    return all(problem[name] == 1 for name in facts) and problem["pad_h"] == problem["pad_w"] == 0


NOT_A_PLAIN_PRODUCT = Rule(
    "not-a-plain-product",
    "for a 1x1 kernel over all pixels matmul_1x1 is the same product without the detours",
    check=lambda problem, columns, device: not is_plain_product(problem),
    explain=lambda problem, columns, device: "1x1, stride 1, no padding, one group",
)

#: A rule of every variant with the parameter ``images`` (images a pass; 0 is all of them at once).
PASSES_DIFFER = Rule(
    "passes-differ",
    "one image a pass is the same as all at once where there is one image",
    check=lambda problem, columns, device: (columns["images"] == 0) | (problem["n"] > 1),
    explain=lambda problem, columns, device: f"n={problem['n']}",
)


def scratch_rule(held_bytes: Callable[[Geometry, Columns], Amount]) -> Rule:
    """The rule that bounds what a variant holds at once besides input, weight and output."""
    return Rule(
        "scratch-fits",
        "more than 2 GiB of temporary tensors at once would crowd out the caller's memory",
        check=lambda problem, columns, device: held_bytes(Geometry.of(problem), columns) <= MAX_SCRATCH_BYTES,
        explain=lambda problem, columns, device: (
            f"{float(np.max(held_bytes(Geometry.of(problem), columns))):.3g} bytes"
        ),
    )


def flops_rule(flops: Callable[[Geometry, Columns], Amount], factor: float, reason: str) -> Rule:
    """The rule that a fast algorithm may not execute more than ``factor`` times the definition's operations."""

    def check(problem: Problem, columns: Columns, device: Device) -> np.ndarray | bool:
        geometry = Geometry.of(problem)
        return flops(geometry, columns) <= factor * geometry.flops

    def explain(problem: Problem, columns: Columns, device: Device) -> str:
        geometry = Geometry.of(problem)
        return f"{float(np.max(flops(geometry, columns))):.3g} against {geometry.flops:.3g} operations"

    return Rule("few-operations", reason, check, explain)


def pass_images(geometry: Geometry, columns: Columns) -> np.ndarray:
    """Images that one pass holds, for the parameter ``images``."""
    return np.where(columns["images"] == 0, geometry.n, columns["images"])


def passes(geometry: Geometry, images: int) -> list[slice]:
    """The images of each pass."""
    step = images or geometry.n
    return [slice(start, min(start + step, geometry.n)) for start in range(0, geometry.n, step)]


def in_order(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """The tensor itself if it is dense in that memory order, else a copy that is."""
    import torch

    return tensor.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def empty_images(n: int, c: int, h: int, w: int, *, channels_last: bool, like: torch.Tensor) -> torch.Tensor:
    """An uninitialised [n, c, h, w] in a memory order, of the dtype and device of ``like``."""
    from kernelcast.kernels.memory import empty

    if channels_last:
        return empty((n, h, w, c), dtype=like.dtype, device=like.device).permute(0, 3, 1, 2)
    return empty((n, c, h, w), dtype=like.dtype, device=like.device)


def padded(
    x: torch.Tensor, top: int, left: int, height: int, width: int, *, channels_last: bool
) -> torch.Tensor:
    """``x`` at (top, left) of [n, c, height, width] zeros, dense in a memory order; ``x`` itself if it is that already.

    Padding and the change of order are one pass over the input.
    """
    import torch

    n, c, h, w = x.shape
    if (height, width) == (h, w):
        return in_order(x, channels_last)
    if channels_last:
        out = torch.zeros((n, height, width, c), dtype=x.dtype, device=x.device).permute(0, 3, 1, 2)
    else:
        out = torch.zeros((n, c, height, width), dtype=x.dtype, device=x.device)
    out[:, :, top : top + h, left : left + w] = x
    return out


def join_tiles(tiles: torch.Tensor, out: torch.Tensor) -> None:
    """Write [n, k, tile rows, tile columns, m, m'] tiles into ``out`` [n, k, p, q], cutting off what lies outside it.

    Whole tiles, the ragged right edge, the ragged bottom edge and their corner are each one copy, so that no element
    is written twice, whatever the memory orders are.
    """
    m_h, m_w = tiles.shape[4:]
    rows, bottom = divmod(out.shape[2], m_h)
    columns, right = divmod(out.shape[3], m_w)
    h, w = rows * m_h, columns * m_w
    if rows and columns:
        whole = out[:, :, :h, :w].unflatten(3, (columns, m_w)).unflatten(2, (rows, m_h))
        whole.copy_(tiles[:, :, :rows, :columns].transpose(3, 4))
    if bottom and columns:
        out[:, :, h:, :w].unflatten(3, (columns, m_w)).copy_(
            tiles[:, :, rows, :columns, :bottom].transpose(2, 3)
        )
    if rows and right:
        out[:, :, :h, w:].unflatten(2, (rows, m_h)).copy_(tiles[:, :, :rows, columns, :, :right])
    if bottom and right:
        out[:, :, h:, w:].copy_(tiles[:, :, rows, columns, :bottom, :right])
