"""Run an operation of the user's own with the selected candidate."""

from __future__ import annotations

from typing import Any

import torch

from kernelcast.errors import InvalidProblemError, KernelcastError
from kernelcast.kernels import Problem, operation, problem, variant
from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.user_operation import UserOperation
from kernelcast.runtime.dispatch import launchers, place, plain, rescue, resolve


def run(name: str, *tensors: torch.Tensor, **values: Any) -> torch.Tensor:
    """Run an operation that :func:`kernelcast.kernel` described, with the selected candidate.

    The problem is read from the tensors' shapes and dtypes. What runs without kernelcast runs here too, and nothing
    else happens, where a drop-in would leave a call to torch: where a gradient is needed, inside ``torch.compile``, for
    tensors that are not contiguous or empty, and when ``KERNELCAST_DISABLE=1``.

    Args:
        name: the operation.
        tensors: its inputs, in the order of its first kernel's arguments.
        values: options, and dimensions that no shape tells.

    Raises:
        UnknownNameError: no such operation.
        InvalidProblemError: the tensors do not have the shapes or dtypes that the operation states.
        KernelcastError: a built-in operation, which has a function of its own.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidProblemError(f"kernelcast.run takes tensors; {type(tensor).__name__} was given.")
    there = place(tensors[0]) if tensors else None
    key = (
        "run", name, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors), tuple(sorted(values.items())), there,
        _covered(tensors),
    )  # fmt: skip
    launch = launchers.get(key)
    if launch is None:
        launch = _resolve(key, name, tensors, values)
    try:
        return launch(*tensors)
    except Exception as error:  # noqa: BLE001 - as the drop-ins do
        return rescue(key, launch, error)(*tensors)


def _resolve(
    key: tuple[Any, ...], name: str, tensors: tuple[torch.Tensor, ...], values: dict[str, Any]
) -> Launcher:
    found = operation(name)
    if not isinstance(found, UserOperation):
        raise KernelcastError(
            f"kernelcast.run is for operations of your own; {name} is built in, and has a function such as kernelcast.matmul."
        )
    described = problem_of(found, tensors, values)
    own = variant(name, found.default_variant).build(described, {})
    if not key[-1]:
        return own
    return resolve(key, tensors, own, lambda: described)


def problem_of(found: UserOperation, tensors: tuple[torch.Tensor, ...], values: dict[str, Any]) -> Problem:
    """The problem that some tensors pose to a user's operation.

    Raises:
        InvalidProblemError: their number, shapes or dtypes do not fit, or a dimension is not told.
    """
    specs = found.inputs
    if len(tensors) != len(specs):
        raise InvalidProblemError(
            f"{found.name} takes {len(specs)} tensors ({', '.join(specs)}); {len(tensors)} were given."
        )
    sizes = dict(values)
    dtype = ""
    for (parameter, spec), tensor in zip(specs.items(), tensors, strict=True):
        if tensor.dim() != len(spec.shape):
            raise InvalidProblemError(
                f"{found.name}: {parameter} has {tensor.dim()} dimensions; it must have {len(spec.shape)}."
            )
        for size, seen in zip(spec.shape, tensor.shape, strict=True):
            if isinstance(size, str) and sizes.setdefault(size, seen) != seen:
                raise InvalidProblemError(
                    f"{found.name}: {parameter} has the shape {tuple(tensor.shape)}, where {size} is {sizes[size]}."
                )
        if spec.dtype is None:
            seen_dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype and seen_dtype != dtype:
                raise InvalidProblemError(
                    f"{found.name}: {parameter} is {seen_dtype}, and others are {dtype}."
                )
            dtype = seen_dtype
        elif tensor.dtype != getattr(torch, spec.dtype):
            raise InvalidProblemError(
                f"{found.name}: {parameter} is {tensor.dtype}; it must be {spec.dtype}."
            )
        if tensor.device != tensors[0].device:
            raise InvalidProblemError(
                f"{found.name}: {parameter} is on {tensor.device}, others are elsewhere."
            )
    on_cpu = not tensors or tensors[0].device.type == "cpu"
    described = problem(
        found.name,
        dtype=dtype or found.schema.dtypes[0],
        threads=torch.get_num_threads() if on_cpu else 0,
        **sizes,
    )
    for (parameter, spec), tensor in zip(specs.items(), tensors, strict=True):
        if tuple(tensor.shape) != spec.sizes(described):
            raise InvalidProblemError(
                f"{found.name}: {parameter} has the shape {tuple(tensor.shape)}; it must be {spec.sizes(described)}."
            )
    return described


def _covered(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether the catalogue may run these: contiguous, and otherwise as for the drop-ins."""
    return bool(tensors) and plain(*tensors) and all(tensor.is_contiguous() for tensor in tensors)
