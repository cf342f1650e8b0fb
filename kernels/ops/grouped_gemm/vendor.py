"""torch's grouped product, where it takes the problem; elsewhere a product a group, as a torch user would write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.ops.grouped_gemm.schema import expected_busy_groups
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation, register_variant
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: grouped_mm demands strides and addresses that are multiples of it, as bulk copies (TMA) do.
ALIGNMENT_BYTES = 16
#: grouped_mm's GPU kernels prepare their arguments in one block, a thread a group.
MOST_GROUPS = 1023


def grouped_mm_takes(problem: Problem) -> bool:
    """Whether ``torch.nn.functional.grouped_mm`` takes a problem (on inputs whose storage is aligned).

    Beyond what it checks itself, the rows of the output must be aligned: it would leave gaps between them otherwise.
    """
    m, n, k = problem["m"], problem["n"], problem["k"]
    aligned = all(size * problem.element_bytes % ALIGNMENT_BYTES == 0 for size in (n, k))
    return aligned and min(m, n, k) > 0 and problem["groups"] <= MOST_GROUPS


def multiply_groups(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """One ``torch.mm`` a group. Reads the offsets on the host, and so waits for the GPU."""
    import torch

    from kernelcast.kernels.memory import empty

    out = empty((a.shape[0], b.shape[2]), dtype=a.dtype, device=a.device)
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(a[start:end], b[group], out=out[start:end])
        start = end
    return out


@register_variant("grouped_gemm")
class Vendor(Variant):
    """``torch.nn.functional.grouped_mm``, which torch has since 2.10.

    For bfloat16 on sm90 and sm100 it is one kernel that reads the offsets on the GPU; elsewhere it is itself a loop that
    reads them on the host. Where it does not take the problem, or torch is older, the user has the loop of
    ``group_loop``, which waits for the GPU in the same way.
    """

    name = "vendor"
    backend = "vendor"
    doc = "torch's grouped_mm; torch.mm group by group where it does not apply"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        grouped = operation("grouped_gemm")
        # One kernel where it is known to be; elsewhere one a group.
        single = (
            grouped_mm_takes(problem)
            and problem.dtype == "bfloat16"
            and device.architecture in ("sm90", "sm100")
        )
        return Work(
            flops=grouped.flops(problem),
            traffic_bytes=grouped.traffic_bytes(problem),
            calls=1.0 if single else max(expected_busy_groups(problem), 1.0),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        from torch.nn import functional

        grouped_mm = getattr(functional, "grouped_mm", None)
        if grouped_mm is None or not grouped_mm_takes(problem):
            return multiply_groups

        def run(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            # A slice of a user's tensor may begin anywhere.
            if (a.data_ptr() | b.data_ptr()) % ALIGNMENT_BYTES:
                return multiply_groups(a, b, offsets)
            return grouped_mm(a, b, offs=offsets)

        return run
