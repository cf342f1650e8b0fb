"""Names of the choices that torch.compile's autotuner (Inductor) times for a matrix product, as candidates.

Inductor names a choice in two ways. A collection of AutoHeuristic, and ``autoheuristic_id()`` of a choice, say
``extern_mm`` and ``type=triton_BLOCK-M=64_BLOCK-K=32_BLOCK-N=64_numstages=3_numwarps=4``. The choice's own name says the
template: ``triton_mm_12``, ``decompose_k_mm_8_split_3``, ``cpp_CppMicroGemmFP32Vec_0``. Source:
torch/_inductor/select_algorithm.py, PyTorch 2.5 to 2.13.

A kernel of Inductor's that works as a variant of the catalogue does has that variant's name; every other has a name of
its own that begins with ``inductor_``, under which its timings are recorded, and nothing here can run it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelcast.kernels.candidate import Candidate, ConfigValue

#: Order of tiles of the template where a name does not say it: groups of eight rows of tiles.
GROUP_M = 8

#: Begins the names of what has no like in the catalogue.
FOREIGN = "inductor_"

_TILE = re.compile(
    r"type=triton_BLOCK-M=(?P<m>\d{1,9})_BLOCK-K=(?P<k>-1|\d{1,9})_BLOCK-N=(?P<n>\d{1,9})"
    r"_numstages=(?P<stages>\d{1,9})_numwarps=(?P<warps>\d{1,9})"
)
_TEMPLATE = re.compile(r"triton_(?P<template>[a-z0-9_]*[a-z])_\d+")
_SPLIT = re.compile(r"decompose_k_mm_(?P<split>\d{1,9})_split_\d+")
_CPP = re.compile(r"cpp_(?P<micro>[A-Za-z0-9]+)_\d+")
_CONTIGUOUS = re.compile(r"contiguous_(?:add)?mm_\d+")


@dataclass(frozen=True)
class Product:
    """One of Inductor's matrix products.

    Attributes:
        name: Inductor's own: ``"addmm"``.
        operation: of the catalogue, whose model ranks its choices.
        template: of the Triton kernel that works as the catalogue's ``triton_tiled``.
        library: names of the choices that call torch's own operator, the usual one first.
    """

    name: str
    operation: str
    template: str
    library: tuple[str, ...]


PRODUCTS = (
    Product("mm", "gemm", "mm", ("extern_mm",)),
    Product("addmm", "gemm", "mm", ("extern_addmm", "extern_bias_addmm")),
    Product("bmm", "batched_gemm", "bmm", ("extern_bmm",)),
    Product("baddbmm", "batched_gemm", "bmm", ("extern_baddbmm",)),
    Product("mixed_mm", "mixed_gemm", "mm", ("extern_fallback_mixed_mm",)),
)


def tile(name: str, *, over_k: bool, group_m: int = GROUP_M) -> dict[str, ConfigValue] | None:
    """The config that the name of a Triton choice holds; None for another name, or a size of 0.

    Args:
        name: as AutoHeuristic writes it.
        over_k: whether the kernel has a tile size along k (``BLOCK-K=-1`` where it has none).
        group_m: of a kernel with one, which the name leaves out.
    """
    found = _TILE.fullmatch(name)
    if found is None or (found["k"] != "-1") != over_k:
        return None
    sizes: dict[str, ConfigValue] = {"block_m": int(found["m"]), "block_n": int(found["n"])}
    if over_k:
        sizes |= {"block_k": int(found["k"]), "group_m": group_m}
    sizes |= {"num_stages": int(found["stages"]), "num_warps": int(found["warps"])}
    return sizes if all(sizes.values()) else None


def template_of(name: str) -> str:
    """The template of a Triton choice's own name: ``"mm"`` of ``triton_mm_12``; empty for another name."""
    found = _TEMPLATE.fullmatch(name)
    return found["template"] if found else ""


def candidate_of(product: Product, identity: str, name: str, group_m: int = GROUP_M) -> Candidate | None:
    """The candidate that a choice of a product is; None where it is not known.

    Args:
        product: what the choice computes.
        identity: as AutoHeuristic writes it: the choice's ``autoheuristic_id()``.
        name: the choice's own name.
        group_m: of a Triton template with one.
    """
    if identity in product.library:
        # A second call of the library differs in what it makes of the bias, which no problem of the catalogue has.
        return Candidate.of("vendor") if identity == product.library[0] else None
    template = template_of(name)
    if template:
        config = tile(identity, over_k=True, group_m=group_m)
        own = template == product.template
        return (
            None
            if config is None
            else Candidate.of("triton_tiled" if own else f"{FOREIGN}{template}", config)
        )
    split = _SPLIT.fullmatch(name)
    if split:
        return Candidate.of(f"{FOREIGN}decompose_k", {"split": int(split["split"])})
    cpp = _CPP.fullmatch(name)
    if cpp:
        return Candidate.of(f"{FOREIGN}cpp", {"micro_gemm": cpp["micro"]})
    if _CONTIGUOUS.fullmatch(name):
        return Candidate.of(f"{FOREIGN}contiguous")
    return None
