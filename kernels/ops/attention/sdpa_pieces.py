"""What the variants share that call one fused kernel behind ``scaled_dot_product_attention``: rules, and a careful launcher.

The rules say, with a reason each, what torch's own checks say (pytorch: aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp and sdp_utils_cpp.h). Where these differ between versions of torch, or where a library of the system decides,
the rules take the narrower answer. Before its first call a launcher asks torch's checks all the same, and raises where they
say no: no candidate may run another kernel than the one that it is named for.

The operators are called directly. The context manager ``torch.nn.attention.sdpa_kernel`` flips switches of the whole
process: two threads that leave it in the wrong order would leave them flipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernelcast.errors import IllegalCandidateError
from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import compute_capability
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

#: AMD's chips that AOTriton, which holds torch's fused attention there, supports without an opt-in.
AMD_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
#: Blocks along the second and third dimension of a grid, on every NVIDIA GPU.
MAX_GRID = 65535
#: The largest head dimension of AOTriton's kernels, in every version.
MAX_HEAD_DIM_AMD = 256
#: What the kernels read at once.
VECTOR_BYTES = 16

NOT_EMPTY = Rule(
    "not-empty",
    "the fused kernels refuse empty tensors",
    check=lambda problem, columns, device: min(problem["batch"], problem["q_len"]) > 0,
    explain=lambda problem, columns, device: f"batch={problem['batch']}, q_len={problem['q_len']}",
)
SIXTEEN_BITS = Rule(
    "16-bit",
    "the kernel multiplies float16 and bfloat16 on tensor cores, and nothing else",
    check=lambda problem, columns, device: problem.element_bytes == 2,
    explain=lambda problem, columns, device: problem.dtype,
)
SQUARE_MASK = Rule(
    "square-mask",
    "aligned at the bottom right in this kernel, or not the same in all of its versions: a causal mask is the operation's "
    "(aligned at the top left) for sure only where queries and keys are as many",
    check=lambda problem, columns, device: not problem["causal"] or problem["q_len"] == problem["kv_len"],
    explain=lambda problem, columns, device: f"q_len={problem['q_len']}, kv_len={problem['kv_len']}",
)
GRID = Rule(
    "grid",
    f"sequences and heads are the second and third dimension of the grid, which hold at most {MAX_GRID} blocks",
    check=lambda problem, columns, device: max(problem["batch"], problem["heads"]) <= MAX_GRID,
    explain=lambda problem, columns, device: f"batch={problem['batch']}, heads={problem['heads']}",
)


def gpu_rule(reason: str) -> Rule:
    """Refuses CPUs, for a reason that the variant gives."""
    return Rule(
        "needs-gpu",
        reason,
        check=lambda problem, columns, device: device.kind == "gpu",
        explain=lambda problem, columns, device: f"{device.name} is a {device.kind}",
    )


def architecture_rule(lowest: int, highest: int, *, amd: bool) -> Rule:
    """NVIDIA's compute capabilities (ten times the number), both included, and AMD's supported chips if ``amd``."""

    def met(problem: Problem, columns: Columns, device: Device) -> bool:
        if device.vendor == "amd":
            return amd and device.architecture in AMD_ARCHITECTURES
        return lowest <= compute_capability(device.architecture) <= highest

    others = f", and for {', '.join(AMD_ARCHITECTURES)}" if amd else ""
    return Rule(
        "architecture",
        f"the kernel is compiled, or known to work, for compute capability {lowest / 10} to {highest / 10}{others}",
        check=met,
        explain=lambda problem, columns, device: f"{device.vendor} {device.architecture}",
    )


def head_dim_rule(largest: int | None) -> Rule:
    """Whole vectors of 16 bytes (of 8 elements on AMD's chips), and at most so many elements (256 on AMD's chips)."""

    def multiple(problem: Problem, device: Device) -> int:
        return 8 if device.vendor == "amd" else VECTOR_BYTES // problem.element_bytes

    def limit(problem: Problem, device: Device) -> int:
        return MAX_HEAD_DIM_AMD if device.vendor == "amd" else largest or problem["head_dim"]

    return Rule(
        "head-dim",
        f"the kernel reads whole vectors of {VECTOR_BYTES} bytes: other heads would have to be padded by a copy; and it holds "
        "a head's part of a tile on chip, which has a limit",
        check=lambda problem, columns, device: (
            problem["head_dim"] % multiple(problem, device) == 0
            and problem["head_dim"] <= limit(problem, device)
        ),
        explain=lambda problem, columns, device: (
            f"head_dim={problem['head_dim']}; multiples of {multiple(problem, device)}"
            + (f" up to {limit(problem, device)}" if largest or device.vendor == "amd" else "")
        ),
    )


class FusedVariant(Variant):
    """The common part of the variants of one fused kernel each. The library is closed: its tiles are not known."""

    backend = "vendor"

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        attention = operation("attention")
        return Work(flops=attention.flops(problem), traffic_bytes=attention.traffic_bytes(problem))


def checked(
    problem: Problem,
    kernel: str,
    usable: Callable[[Any, bool], bool],
    attend: Launcher,
    *,
    fold_groups: bool = False,
) -> Launcher:
    """``attend``, contiguous, behind one question to torch before the first call.

    Args:
        problem: what the inputs are like.
        kernel: its name, for the error.
        usable: one of ``torch.backends.cuda.can_use_*_attention``: (parameters, whether to warn of reasons) -> answer.
        attend: (q, k, v) -> output.
        fold_groups: whether the queries of the heads that share keys become more queries of one head (a view).

    The returned callable raises :class:`IllegalCandidateError` where torch says that the kernel cannot run.
    """
    from torch.backends.cuda import SDPAParams

    causal = problem["causal"]
    shape = (problem["batch"], problem["heads"], problem["q_len"], problem["head_dim"])
    seen = (problem["batch"], problem["kv_heads"], -1, problem["head_dim"]) if fold_groups else shape
    grouped = problem["heads"] != problem["kv_heads"] and not fold_groups
    asked = False

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal asked
        queries = q.reshape(seen)
        if not asked:
            parameters = SDPAParams(queries, k, v, None, 0.0, causal, grouped)
            if not usable(parameters, False):
                raise IllegalCandidateError(_refusal(problem, kernel, parameters, usable))
            asked = True
        # Some kernels store the heads of one query side by side.
        return attend(queries, k, v).contiguous().view(shape)

    return run


def _refusal(problem: Problem, kernel: str, parameters: Any, usable: Callable[[Any, bool], bool]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable(parameters, True)
    reasons = " ".join(str(each.message).split("(Triggered internally")[0].strip() for each in caught)
    return (
        f"torch cannot run {kernel} on {problem} here: {reasons or 'it gives no reason (it may have printed one).'} "
        "Use another candidate, such as vendor, which takes whatever backend works."
    )
