"""Groups padded to whole chunks of rows, and one batched product over the chunks; the offsets stay on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.grouped_gemm.schema import expected_group_rows, row_tiles_bound
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

MAX_COPIES_BYTES = 2**30
#: Small library calls around the product: sizes, prefix sums, searches, gathers.
CALLS = 16.0


def _copies_bytes(problem: Problem, columns: Columns) -> np.ndarray:
    """Bytes of the chunks' rows, weights and products."""
    n, k = problem["n"], problem["k"]
    chunk = columns["chunk"].astype(np.float64)
    chunks = row_tiles_bound(problem, columns["chunk"]).astype(np.float64)
    return problem.element_bytes * chunks * (chunk * (k + n) + float(k) * n)


@register_variant("grouped_gemm")
class ChunkedBmm(Variant):
    """``torch.bmm`` over chunks of rows of one group each, with the weights of its group copied for each chunk.

    There are as many chunks as any offsets could need, so that their number does not depend on the offsets. Pays where
    weights are small and groups are many.
    """

    name = "chunked_bmm"
    backend = "torch"
    doc = "torch.bmm over chunks of rows, weights gathered for each"
    parameters = (Parameter("chunk", (16, 32, 64, 128, 256), "rows of a chunk", quick=(16, 64, 256)),)
    rules = (
        Rule(
            "not-empty",
            "without rows there is no chunk",
            check=lambda problem, columns, device: problem["m"] > 0,
            explain=lambda problem, columns, device: f"m={problem['m']}",
        ),
        Rule(
            "several-groups",
            "with one group nothing is to be gathered",
            check=lambda problem, columns, device: problem["groups"] > 1,
            explain=lambda problem, columns, device: f"groups={problem['groups']}",
        ),
        Rule(
            "chunk-fits",
            "a chunk of more than twice the rows that a group is expected to have (at least 16) is mostly padding",
            check=lambda problem, columns, device: (
                columns["chunk"] <= 2 * max(expected_group_rows(problem), 16)
            ),
            explain=lambda problem, columns, device: (
                f"chunk={columns['chunk'][0]}, {expected_group_rows(problem)} rows"
            ),
        ),
        Rule(
            "copies-fit",
            "the chunks and a copy of the weights for each are held at once: more than 1 GiB costs more than it saves",
            check=lambda problem, columns, device: _copies_bytes(problem, columns) <= MAX_COPIES_BYTES,
            explain=lambda problem, columns, device: f"{_copies_bytes(problem, columns)[0]:.0f} bytes",
        ),
    )
    source_modules = ("kernelcast.kernels.ops.grouped_gemm.schema",)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        groups, m, n, k = (float(problem[name]) for name in ("groups", "m", "n", "k"))
        rows = row_tiles_bound(problem, columns["chunk"]) * columns["chunk"].astype(np.float64)
        return Work(
            flops=2.0 * rows * n * k,
            traffic_bytes=problem.element_bytes * (m * k + groups * k * n + m * n),
            scratch_bytes=_copies_bytes(problem, columns),
            calls=CALLS,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        groups, m, n, k = (problem[name] for name in ("groups", "m", "n", "k"))
        chunk = int(config["chunk"])
        chunks = int(row_tiles_bound(problem, chunk))
        transposed = problem["layout"] == "nt"

        def run(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            ends = offsets.long()
            starts = torch.nn.functional.pad(ends[:-1], (1, 0))
            counts = (ends - starts + (chunk - 1)) // chunk
            last = counts.cumsum(0)
            # Where each group's rows would begin, were every group padded and had a first chunk at `last - counts`.
            shift = (last - counts) * chunk - starts
            slots = torch.arange(chunks, device=a.device)
            # Chunks beyond the last one needed compute something, of the last group, that nobody reads.
            group_of_slot = torch.searchsorted(last, slots, right=True).clamp_(max=groups - 1)
            padded = torch.arange(chunks * chunk, device=a.device).view(chunks, chunk)
            # Padding repeats rows of neighbours, whose products nobody reads either.
            source = (padded - shift[group_of_slot][:, None]).clamp_(0, m - 1)
            if transposed:
                weights = b.transpose(1, 2).index_select(0, group_of_slot).transpose(1, 2)
            else:
                weights = b.index_select(0, group_of_slot)
            products = torch.bmm(a.index_select(0, source.view(-1)).view(chunks, chunk, k), weights)
            rows = torch.arange(m, device=a.device)
            own = torch.searchsorted(ends, rows, right=True).clamp_(max=groups - 1)
            return products.view(chunks * chunk, n).index_select(0, rows + shift[own])

        return run
