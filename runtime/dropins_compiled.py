"""Drop-ins inside ``torch.compile``: custom operators, so that a graph holds a call whose candidate is chosen when it runs.

A candidate cannot be chosen while a graph is traced: that would measure inside the compiler, and fix in the graph what a
cache may forget. So a traced drop-in is one opaque operator, ``kernelcast::<name>``, that calls the drop-in at run time.
Its output is contiguous, whatever ran, as its fake implementation says; graphs rely on strides.

The operators are defined with ``torch.library.Library``: one made by ``torch.library.custom_op`` takes three times as long
to call, for an autograd rule that these never need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from kernelcast import settings
from kernelcast.runtime.dispatch import DTYPES

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMESPACE = "kernelcast"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
# A kernel is chosen for the strides that were seen: no compiler may hand in others. torch has the exact tag since 2.7.
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),)
# Absent before torch 2.7, where an export cannot be told from another compilation: then graphs hold torch's own.
_is_exporting = getattr(torch.compiler, "is_exporting", None)


def operator(schema: str, drop_in: Callable[..., torch.Tensor], own: Callable[..., torch.Tensor]) -> Any:
    """Define an operator that runs a drop-in, and return it.

    Args:
        schema: name, arguments and result, as ``torch.library`` writes them; all outputs are new tensors.
        drop_in: what runs.
        own: torch's operator with the same arguments; gives the shape, the dtype and the errors while tracing.
    """
    name = schema[: schema.index("(")]

    def run(*arguments: Any) -> torch.Tensor:
        return drop_in(*arguments).contiguous()

    def fake(*arguments: Any) -> torch.Tensor:
        out = own(*arguments)
        return out.new_empty(out.shape)

    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def traced(*tensors: torch.Tensor) -> bool:
    """Whether a graph is traced in which an operator may stand for a drop-in on these tensors.

    Not where a gradient is needed, in programs for export (which would need kernelcast to load), and where the drop-ins
    leave a call to torch outside of graphs for a reason that is known beforehand. What the operators do when they
    run is for the drop-ins to decide, again.
    """
    # First and alone: outside of graphs nothing else is evaluated.
    if not torch.compiler.is_dynamo_compiling():
        return False
    if _is_exporting is None or _is_exporting():
        return False
    needs_grad = torch.is_grad_enabled()
    device = tensors[0].device
    for tensor in tensors:
        if (
            type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.device != device
            or (needs_grad and tensor.requires_grad)
        ):
            return False
    return device.type in ("cpu", "cuda") and _undisturbed(device.type)


def traced_alike(*tensors: torch.Tensor) -> bool:
    """Whether these are :func:`traced`, and of one dtype that the catalogue knows."""
    if not traced(*tensors):
        return False
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(tensor.dtype is dtype for tensor in tensors)


def _undisturbed(device_type: str) -> bool:
    """Whether nothing acts on a graph from outside; evaluated by the tracer, which guards its graphs by these states."""
    return not (
        torch.is_autocast_enabled(device_type)
        or torch.are_deterministic_algorithms_enabled()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or settings.disabled()
    )


# What torch.compiler.assume_constant_result sets. That function imports the compiler, which takes a second and needs libraries
# that the run time does without.
_undisturbed._dynamo_marked_constant = True  # type: ignore[attr-defined]
