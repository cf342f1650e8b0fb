"""Patches laid out as a matrix, then one product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernelcast.kernels.candidate import Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.ops.conv2d.schema import Geometry
from kernelcast.kernels.ops.conv2d.shared import (
    HAS_IMAGES,
    NOT_A_PLAIN_PRODUCT,
    ORDERS,
    PASSES_DIFFER,
    SHARED_MODULES,
    empty_images,
    in_order,
    padded,
    pass_images,
    passes,
    scratch_rule,
)
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import register_variant
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.work import Amount, Work

if TYPE_CHECKING:
    import torch


def _patch_bytes(geometry: Geometry) -> float:
    """Bytes of one image's patches."""
    return float(geometry.element_bytes) * geometry.c * geometry.taps * geometry.p * geometry.q


def _held_bytes(geometry: Geometry, columns: Columns) -> Amount:
    return pass_images(geometry, columns) * _patch_bytes(geometry)


@register_variant("conv2d")
class Im2col(Variant):
    """im2col: a copy of every patch that the kernel meets, and a product with the flattened weight.

    Channels first: ``torch.nn.functional.unfold`` gives [c * r * s, p * q]. Channels last: a strided view of the
    padded input gives [p * q, r * s * c], copied in runs of c.
    """

    name = "im2col"
    backend = "torch"
    doc = "unfold the patches, then torch.matmul"
    parameters = (
        Parameter("channels", ORDERS, "memory order of the patches: channels first or last"),
        Parameter("images", (1, 0), "images unfolded at once; 0 is all"),
    )
    source_modules = SHARED_MODULES
    rules = (
        HAS_IMAGES,
        PASSES_DIFFER,
        NOT_A_PLAIN_PRODUCT,
        Rule(
            "patches-reused",
            "with one output channel a group every patch is read once, so that nothing repays its copy",
            check=lambda problem, columns, device: problem["groups"] == 1 or problem["k"] > problem["groups"],
            explain=lambda problem, columns, device: f"k={problem['k']}, groups={problem['groups']}",
        ),
        scratch_rule(_held_bytes),
    )

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        geometry = Geometry.of(problem)
        last = columns["channels"] == "last"
        converted = geometry.input_bytes + geometry.output_bytes
        pads = last & (geometry.pad != (0, 0))
        rounds = geometry.n / pass_images(geometry, columns).clip(min=1)
        return Work(
            flops=geometry.flops,
            traffic_bytes=geometry.traffic_bytes,
            scratch_bytes=geometry.n * _patch_bytes(geometry)
            + (last != geometry.channels_last) * converted
            + pads * geometry.input_bytes,
            calls=2.0 * rounds + 1.0 * pads + 2.0 * (last != geometry.channels_last),
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch
        from torch.nn.functional import unfold

        g = Geometry.of(problem)
        chunks = passes(g, int(config["images"]))
        per_group, group_out = g.reduction, g.k // g.groups

        def first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            matrix = in_order(weight, False).view(1, g.groups, group_out, per_group)
            out = empty_images(g.n, g.k, g.p, g.q, channels_last=False, like=x)
            for chunk in chunks:
                patches = unfold(x[chunk], (g.r, g.s), g.dilation, g.pad, g.stride)
                patches = patches.unflatten(1, (g.groups, per_group))
                torch.matmul(matrix, patches, out=out[chunk].view(-1, g.groups, group_out, g.p * g.q))
            return in_order(out, g.channels_last)

        def last(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            # [groups, (r, s, c / groups), k / groups], in the order of the patches below.
            matrix = weight.unflatten(0, (g.groups, group_out)).permute(0, 3, 4, 2, 1)
            matrix = matrix.reshape(g.groups, per_group, group_out)
            image = padded(x, *g.pad, *g.padded, channels_last=True)
            windows = image.unfold(2, g.extent[0], g.stride[0]).unfold(3, g.extent[1], g.stride[1])
            windows = windows[..., :: g.dilation[0], :: g.dilation[1]].unflatten(
                1, (g.groups, g.group_channels)
            )
            out = empty_images(g.n, g.k, g.p, g.q, channels_last=True, like=x)
            pixels = out.permute(0, 2, 3, 1).view(g.n, g.p * g.q, g.k)
            for chunk in chunks:
                patches = windows[chunk].permute(1, 0, 3, 4, 5, 6, 2).reshape(g.groups, -1, per_group)
                target = pixels[chunk].flatten(0, 1)
                if g.groups == 1:
                    torch.mm(patches[0], matrix[0], out=target)
                else:
                    product = torch.bmm(patches, matrix)
                    target.unflatten(1, (g.groups, group_out)).copy_(product.transpose(0, 1))
            return in_order(out, g.channels_last)

        return last if config["channels"] == "last" else first
