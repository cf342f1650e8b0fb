"""What a measurement needs around it: torch's switches as the problem has them, and enough memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, operation, variant
from kernelcast.kernels.problem import DTYPE_BYTES

#: Float64 copies of the inputs and the output for the reference, and the temporaries of the comparison, in bytes an
#: element of inputs and output together.
_REFERENCE_BYTES = 24

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Run with so many CPU threads; 0 leaves them as they are. What a candidate changes is undone too."""
    import torch

    before = torch.get_num_threads()
    if count and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 on GPUs, in matrix products and convolutions, and put torch's switches back."""
    import torch

    switches = [_switch("matmul"), _switch("conv")]
    before = [getattr(owner, name) for owner, name in switches]
    old = switches[0][1] == "allow_tf32"
    # The old switch of products is a view of this setting, which has a third value.
    precision = torch.get_float32_matmul_precision() if old else ""
    try:
        for owner, name in switches:
            setattr(owner, name, allowed if old else "tf32" if allowed else "ieee")
        yield
    finally:
        for (owner, name), value in zip(switches, before, strict=True):
            setattr(owner, name, value)
        if old:
            torch.set_float32_matmul_precision(precision)


def tf32_allowed(kind: str) -> bool:
    """Whether torch may round float32 inputs to TF32 now, in products (``"matmul"``) or convolutions (``"conv"``)."""
    owner, name = _switch(kind)
    return getattr(owner, name) in (True, "tf32")


def _switch(kind: str) -> tuple[Any, str]:
    """(owner, attribute) of torch's TF32 switch.

    Since 2.9 torch has ``fp32_precision`` beside ``allow_tf32``. Reading the old name raises once the new one has been
    used, and writing the old one makes other readings raise; the new one can be read, set and put back at any time.
    """
    import torch

    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return (
            torch.backends.cuda.matmul if kind == "matmul" else torch.backends.cudnn.conv
        ), "fp32_precision"
    return (torch.backends.cuda.matmul if kind == "matmul" else torch.backends.cudnn), "allow_tf32"


def require_memory(problem: Problem, device: Device, limit_bytes: float = math.inf) -> None:
    """Refuse a problem whose measurement may not fit beside what runs already.

    A GPU answers a request that is too large with an error; a CPU's system may end the process instead, so the need is
    estimated first.

    Raises:
        KernelcastError: it may not fit; the message says how much is needed and how much there is.
    """
    needed = measuring_bytes(problem)
    free = min(available_bytes(device.kind), limit_bytes)
    if needed > free:
        raise KernelcastError(
            f"Measuring {problem} needs about {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free. "
            "Forecast it with mode predict, or measure where there is more memory."
        )


def measuring_bytes(problem: Problem) -> float:
    """An estimate of what measuring a problem allocates at its peak: inputs, their copy, reference and comparison."""
    # Records of other tools may not say the dtype.
    element_bytes = DTYPE_BYTES.get(problem.dtype, 8)
    elements = operation(problem.operation).traffic_bytes(problem) / element_bytes
    return elements * (2.0 * element_bytes + _REFERENCE_BYTES)


def candidate_bytes(problem: Problem, candidates: Sequence[Candidate], device: Device) -> np.ndarray:
    """An estimate of the bytes that each candidate's measurement takes at its peak, scratch memory included.

    Scratch memory that a variant cannot state counts as none.
    """
    amounts: list[np.ndarray] = []
    for block in CandidateTable.of(candidates).blocks:
        work = variant(problem.operation, block.variant).work(problem, block.columns, device)
        amounts.append(np.nan_to_num(work.columns(block.length)["scratch_bytes"]))
    return measuring_bytes(problem) + np.concatenate([np.zeros(0), *amounts])


def available_bytes(kind: str) -> float:
    """Bytes that this process may still allocate; infinite where the system does not say."""
    if kind == "gpu":
        import torch

        free, _ = torch.cuda.mem_get_info()
        return float(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    limits = [_meminfo_bytes(_read(_MEMINFO))]
    own = next(
        (line[3:].strip("/") for line in _read(Path("/proc/self/cgroup")).splitlines() if line[:3] == "0::"),
        "",
    )
    for folder in {_CGROUP / own, _CGROUP}:
        limits.append(
            _cgroup_bytes(
                _read(folder / "memory.max"), _read(folder / "memory.current"), _read(folder / "memory.stat")
            )
        )
    return min(limits)


def _meminfo_bytes(text: str) -> float:
    """What ``/proc/meminfo`` says is available."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split()[:1] and value.split()[0].isdecimal():
            return float(value.split()[0]) * 1024.0
    return math.inf


def _cgroup_bytes(limit: str, current: str, stat: str) -> float:
    """What a control group leaves: its limit, less what is used and cannot be dropped (file caches can)."""
    if not (limit.isdecimal() and current.isdecimal()):
        return math.inf
    cached = dict(line.split()[:2] for line in stat.splitlines() if len(line.split()) >= 2).get(
        "inactive_file", "0"
    )
    return float(int(limit) - int(current) + (int(cached) if cached.isdecimal() else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
