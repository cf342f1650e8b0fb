"""What the drop-ins share in stating the problem of a call."""

from __future__ import annotations

from typing import Any

import torch

from kernelcast.datasets.timing import tf32_allowed
from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Problem, problem
from kernelcast.runtime.dispatch import DTYPES


def problem_for(name: str, sample: torch.Tensor, **values: Any) -> Problem:
    """The problem of an operation with the dtype of a tensor, and the switches that hold on its device.

    Args:
        name: the operation.
        sample: the main input.
        values: dimensions and options.

    Raises:
        InvalidProblemError: the operation cannot be described so.
    """
    on_cpu = sample.is_cpu
    if sample.dtype not in DTYPES:
        raise InvalidProblemError(f"No candidate of {name} takes {sample.dtype}.")
    return problem(
        name,
        dtype=DTYPES[sample.dtype],
        threads=torch.get_num_threads() if on_cpu else 0,
        allow_tf32=not on_cpu and tf32_allowed("conv" if name == "conv2d" else "matmul"),
        **values,
    )
