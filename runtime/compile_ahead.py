"""Compiling what a verification is about to launch, in several processes at a time."""

from __future__ import annotations

from collections.abc import Sequence

from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, Device, Problem, variant
from kernelcast.kernels.compile import TARGETS
from kernelcast.kernels.compile_many import CompileRequest, compile_many, default_workers

#: Fewer kernels are compiled by their launches, as starting the workers takes longer.
LEAST_KERNELS = 3


def compile_ahead(
    problem: Problem, chosen: Sequence[Candidate], device: Device, *, time_limit_s: float
) -> frozenset[Candidate]:
    """Compile Triton candidates into Triton's cache, where a launch finds them, on a GPU that can be compiled for.

    Returns:
        Candidates whose compilation ended its process or took longer than the limit: a launch would do the same here. What
        a compiler refuses is left to the launch, which says why.
    """
    if device.kind != "gpu" or device.architecture not in TARGETS:
        return frozenset()
    kernels = [each for each in chosen if hasattr(variant(problem.operation, each.variant), "compile_spec")]
    if len(kernels) < LEAST_KERNELS:
        return frozenset()
    harmful = set()
    try:
        for request, facts in compile_many(
            [CompileRequest(problem, candidate) for candidate in kernels],
            device.architecture,
            workers=min(default_workers(), len(kernels)),
            time_limit_s=time_limit_s,
            fill=True,
        ):
            if facts.outcome in ("timeout", "crash"):
                harmful.add(request.candidate)
    except KernelcastError:
        return frozenset()  # no Triton, or its interpreter: the launches say what they need
    return frozenset(harmful)
