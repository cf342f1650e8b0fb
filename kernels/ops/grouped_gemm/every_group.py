"""Every group times every row, then each row's own product: no row is moved, and the offsets stay on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

MOST_ROWS = 128
MAX_PRODUCTS_BYTES = 2**30


def _products_bytes(problem: Problem) -> float:
    return float(problem.element_bytes) * problem["groups"] * problem["m"] * problem["n"]


@register_variant("grouped_gemm")
class EveryGroup(Variant):
    """A batched product of all rows with every group, of which the rows of the group itself are kept.

    Pays for few rows, where reading the weights takes longer than multiplying by them.
    """

    name = "every_group"
    backend = "torch"
    doc = "torch.bmm of all rows with every group, then a selection"
    parameters = (
        Parameter(
            "product",
            ("batched", "wide"),
            "batched: one torch.bmm; wide: one torch.mm with the weights of all groups side by side",
        ),
    )
    rules = (
        Rule(
            "several-groups",
            "with one group nothing is to be selected",
            check=lambda problem, columns, device: problem["groups"] > 1,
            explain=lambda problem, columns, device: f"groups={problem['groups']}",
        ),
        Rule(
            "few-rows",
            f"a weight read from memory serves m products in the meantime; beyond {MOST_ROWS} rows no device reads so "
            "slowly that the products of other groups are free",
            check=lambda problem, columns, device: problem["m"] <= MOST_ROWS,
            explain=lambda problem, columns, device: f"m={problem['m']}",
        ),
        Rule(
            "products-fit",
            "the products of all groups are held at once: more than 1 GiB of them costs more than it saves",
            check=lambda problem, columns, device: _products_bytes(problem) <= MAX_PRODUCTS_BYTES,
            explain=lambda problem, columns, device: f"{_products_bytes(problem):.0f} bytes",
        ),
        Rule(
            "side-by-side",
            "weights lie side by side as one matrix only where each is stored [n, k]; else they would be copied",
            check=lambda problem, columns, device: (
                (columns["product"] == "batched") | (problem["layout"] == "nt")
            ),
            explain=lambda problem, columns, device: f"layout={problem['layout']}",
        ),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        groups, m, n, k = (float(problem[name]) for name in ("groups", "m", "n", "k"))
        return Work(
            flops=2.0 * groups * m * n * k,
            traffic_bytes=problem.element_bytes * (m * k + groups * k * n + m * n),
            scratch_bytes=_products_bytes(problem),
            calls=4.0,
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        groups, m, n, k = (problem[name] for name in ("groups", "m", "n", "k"))
        wide = config["product"] == "wide"

        def run(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(m, dtype=offsets.dtype, device=a.device)
            # Rows beyond the last group's end, which there should be none of, must not index beyond the groups.
            own = torch.searchsorted(offsets, rows, right=True).clamp_(max=groups - 1)
            if wide:
                side_by_side = b.transpose(1, 2).reshape(groups * n, k).t()
                return torch.mm(a, side_by_side).view(m, groups, n)[rows, own]
            return torch.bmm(a.expand(groups, m, k), b)[own, rows]

        return run
