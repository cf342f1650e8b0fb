"""The kernel of ``triton_implicit_gemm``.

Imported at launch alone: everything else of the variant works where triton is absent.
"""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import load_tile, tile_of


@triton.jit
def inside_image(row, column, H, W, PAD_H: tl.constexpr, PAD_W: tl.constexpr):
    """Whether input positions exist. Along an axis without padding every tap of an output does."""
    if PAD_H > 0 and PAD_W > 0:
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W)
    elif PAD_H > 0:
        inside = (row >= 0) & (row < H) & (column == column)
    elif PAD_W > 0:
        inside = (column >= 0) & (column < W) & (row == row)
    else:
        inside = (row == row) & (column == column)
    return inside


@triton.jit
def conv2d_implicit_gemm(
    x_ptr,
    weight_ptr,
    out_ptr,
    pixels,
    filters,
    depth,
    H,
    W,
    HW,
    PQ,
    Q,
    C,
    K,
    CHANNELS: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WHOLE_TAPS: tl.constexpr,
    SAME_PIXELS: tl.constexpr,
    GROUPED: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program a tile of output pixels x filters of one group, over the whole sum of ``depth`` products.

    The adjacent axis of the input is the last of its tile: the sum runs over (r, s, channel) for ``CHANNELS_LAST``,
    and the product is [pixels, depth] @ [depth, filters]; else over (channel, r, s), which is how the weight is
    stored then, and the product is [filters, depth] @ [depth, pixels].

    Args:
        pixels: output pixels of all images.
        filters: output channels of a group.
        depth: CHANNELS * R * S.
        HW: input pixels of one image, in H rows of W.
        PQ: output pixels of one image, in rows of Q.
        C: input channels of all groups; K: output channels.
        CHANNELS: input channels of a group.
        WHOLE_TAPS: BLOCK_K divides CHANNELS, so that each step lies within one tap (channels last alone).
        SAME_PIXELS: the output's pixels are the input's.
        WIDE: elements are counted in 64 bits, for tensors of 2**31 elements and more.
        WIDEN: cast to float32, as the interpreter computes wrong products of bfloat16.
    """
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    program = tl.program_id(0)
    if GROUPED:
        tiles = tl.cdiv(pixels, BLOCK_M) * tl.cdiv(filters, BLOCK_N)
        group = program // tiles
        program = program % tiles
    else:
        group = 0
    tile_m, tile_n = tile_of(program, pixels, filters, BLOCK_M, BLOCK_N, GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    image = (m // PQ).to(offset)
    within = m % PQ
    # Input position of the first tap; it may lie in the padding.
    top = within // Q * STRIDE_H - PAD_H
    left = within % Q * STRIDE_W - PAD_W
    if SAME_PIXELS:
        start = image * HW * C + within * C if CHANNELS_LAST else image * C * HW + within
    elif CHANNELS_LAST:
        start = ((image * H + top) * W + left) * C
    else:
        start = (image * C * H + top) * W + left
    if GROUPED:
        start += (tl.full((), CHANNELS, offset) * group) * (1 if CHANNELS_LAST else HW)
    filter = group * filters + f
    weight_start = filter.to(offset) * depth
    in_m = m < pixels
    in_f = f < filters

    if CHANNELS_LAST:
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    else:
        accumulator = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, depth, BLOCK_K):
        in_k = steps < depth - k
        if WHOLE_TAPS:
            tap = k // CHANNELS
            row = tap // S * DILATION_H
            column = tap % S * DILATION_W
            jump = (row.to(offset) * W + column) * C + k % CHANNELS
            inside = in_m & inside_image(top + row, left + column, H, W, PAD_H, PAD_W)
            x_pointers = x_ptr + ((start + jump)[:, None] + steps[None, :])
            x = load_tile(
                x_pointers, inside[:, None], in_k[None, :], EVEN_M and PAD_H + PAD_W == 0, True, WIDEN
            )
        else:
            each = k + steps
            if CHANNELS_LAST:
                tap = each // CHANNELS
                channel = each % CHANNELS
                row = tap // S * DILATION_H
                column = tap % S * DILATION_W
                jump = (row.to(offset) * W + column) * C + channel
                inside = inside_image(
                    top[:, None] + row[None, :], left[:, None] + column[None, :], H, W, PAD_H, PAD_W
                )
                x_pointers = x_ptr + (start[:, None] + jump[None, :])
                inside = inside & in_m[:, None]
                x = load_tile(x_pointers, inside, in_k[None, :], EVEN_M and PAD_H + PAD_W == 0, EVEN_K, WIDEN)
            else:
                channel = each // (R * S)
                tap = each % (R * S)
                row = tap // S * DILATION_H
                column = tap % S * DILATION_W
                jump = channel.to(offset) * HW + (row.to(offset) * W + column)
                inside = inside_image(
                    top[None, :] + row[:, None], left[None, :] + column[:, None], H, W, PAD_H, PAD_W
                )
                x_pointers = x_ptr + (start[None, :] + jump[:, None])
                inside = inside & in_m[None, :]
                x = load_tile(x_pointers, in_k[:, None], inside, EVEN_K, EVEN_M and PAD_H + PAD_W == 0, WIDEN)
        if CHANNELS_LAST:
            w_pointers = weight_ptr + (weight_start[None, :] + (k + steps)[:, None])
            w = load_tile(w_pointers, in_k[:, None], in_f[None, :], EVEN_K, EVEN_N, WIDEN)
            accumulator = tl.dot(x, w, accumulator, input_precision=PRECISION)
        else:
            w_pointers = weight_ptr + (weight_start[:, None] + (k + steps)[None, :])
            w = load_tile(w_pointers, in_f[:, None], in_k[None, :], EVEN_N, EVEN_K, WIDEN)
            accumulator = tl.dot(w, x, accumulator, input_precision=PRECISION)

    value = accumulator.to(out_ptr.dtype.element_ty)
    if CHANNELS_LAST:
        pointers = out_ptr + (m.to(offset)[:, None] * K + filter[None, :])
        inside = in_m[:, None] & in_f[None, :]
    else:
        pointers = out_ptr + ((image * K * PQ + within)[None, :] + filter.to(offset)[:, None] * PQ)
        inside = in_f[:, None] & in_m[None, :]
    if EVEN_M and EVEN_N:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=inside)
