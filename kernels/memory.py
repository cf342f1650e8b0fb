"""Where variants get their outputs from, so that a check can poison them first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_poison: ContextVar[bool] = ContextVar("kernelcast_poison", default=False)


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An uninitialised tensor; inside :func:`poisoned` one full of NaN (of the largest value, for integers and bool).

    Launchers take every output and scratch tensor that a kernel fills from here: a part that the kernel does not
    write then shows in the result check, instead of holding what an earlier candidate left in that memory.
    """
    import torch

    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if _poison.get():
        if dtype.is_floating_point or dtype.is_complex:
            out.fill_(float("nan"))
        else:
            out.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)
    return out


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what :func:`empty` hands out with NaN, within this block and thread."""
    token = _poison.set(True)
    try:
        yield
    finally:
        _poison.reset(token)
