"""The kernel of ``triton_depthwise``.

Imported at launch alone: everything else of the variant works where triton is absent.
"""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_tap(
    accumulator,
    x_pointers,
    weight_pointers,
    top,
    left,
    row,
    column,
    inside,
    in_k,
    H,
    W,
    step_h,
    step_w,
    step_tap,
    S: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Add one tap's products, of input pixels that exist and in float32."""
    if PADDED:
        y = top + row * DILATION_H
        x = left + column * DILATION_W
        inside = inside & ((y >= 0) & (y < H) & (x >= 0) & (x < W))
    values = tl.load(x_pointers + (row * step_h + column * step_w), mask=inside & in_k, other=0.0)
    factors = tl.load(weight_pointers + (row * S + column) * step_tap, mask=in_k, other=0.0)
    return accumulator + values.to(tl.float32) * factors.to(tl.float32)


@triton.jit
def conv2d_depthwise(
    x_ptr,
    weight_ptr,
    out_ptr,
    H,
    W,
    HW,
    P,
    Q,
    PQ,
    C,
    K,
    stride_wk,
    stride_wt,
    MULTIPLIER: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    UNROLL_ROWS: tl.constexpr,
    UNROLL_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a tile of BLOCK_H x BLOCK_W output pixels of one image and BLOCK_C output channels.

    Output channel ``k`` reads input channel ``k // MULTIPLIER``. Tiles that share input rows and channels are
    neighbours: columns of the grid first, then rows, then channels, then images. The adjacent axis is a tile's last.

    The weight's channels are ``stride_wk`` elements apart, its taps ``stride_wt``.

    UNROLL_ROWS and UNROLL_COLUMNS unroll the loops over the kernel, which large kernels would make slow to compile.
    """
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    program = tl.program_id(0)
    tiles_w = tl.cdiv(Q, BLOCK_W)
    tiles_h = tl.cdiv(P, BLOCK_H)
    tiles_k = tl.cdiv(K, BLOCK_C)
    tile_w = program % tiles_w
    program = program // tiles_w
    tile_h = program % tiles_h
    program = program // tiles_h
    tile_k = program % tiles_k
    image = (program // tiles_k).to(offset)

    pixels = tl.arange(0, BLOCK_H * BLOCK_W)
    p = tile_h * BLOCK_H + pixels // BLOCK_W
    q = tile_w * BLOCK_W + pixels % BLOCK_W
    k = tile_k * BLOCK_C + tl.arange(0, BLOCK_C)
    if CHANNELS_LAST:
        p = p[:, None]
        q = q[:, None]
        k = k[None, :]
    else:
        p = p[None, :]
        q = q[None, :]
        k = k[:, None]
    inside = (p < P) & (q < Q)
    in_k = k < K
    top = p * STRIDE_H - PAD_H
    left = q * STRIDE_W - PAD_W
    channel = k // MULTIPLIER
    if CHANNELS_LAST:
        x_pointers = x_ptr + (((image * H + top) * W + left) * C + channel)
        step = C.to(offset)
        out_pointers = out_ptr + (((image * P + p) * Q + q) * K + k)
        accumulator = tl.zeros((BLOCK_H * BLOCK_W, BLOCK_C), dtype=tl.float32)
    else:
        x_pointers = x_ptr + ((image * C + channel) * HW + (top.to(offset) * W + left))
        step = tl.full((), 1, offset)
        out_pointers = out_ptr + ((image * K + k) * PQ + (p.to(offset) * Q + q))
        accumulator = tl.zeros((BLOCK_C, BLOCK_H * BLOCK_W), dtype=tl.float32)
    step_w = step * DILATION_W
    step_h = step * W * DILATION_H
    step_tap = tl.full((), 1, offset) * stride_wt
    weight_pointers = weight_ptr + k.to(offset) * stride_wk
    PADDED: tl.constexpr = PAD_H + PAD_W > 0

    if UNROLL_ROWS:
        for row in tl.static_range(R):
            for column in tl.static_range(S):
                accumulator = add_tap(
                    accumulator, x_pointers, weight_pointers, top, left, row, column, inside, in_k, H, W,
                    step_h, step_w, step_tap, S, DILATION_H, DILATION_W, PADDED,
                )  # fmt: skip
    else:
        for row in range(R):
            if UNROLL_COLUMNS:
                for column in tl.static_range(S):
                    accumulator = add_tap(
                        accumulator, x_pointers, weight_pointers, top, left, row, column, inside, in_k, H, W,
                        step_h, step_w, step_tap, S, DILATION_H, DILATION_W, PADDED,
                    )  # fmt: skip
            else:
                for column in range(S):
                    accumulator = add_tap(
                        accumulator, x_pointers, weight_pointers, top, left, row, column, inside, in_k, H, W,
                        step_h, step_w, step_tap, S, DILATION_H, DILATION_W, PADDED,
                    )  # fmt: skip
    tl.store(out_pointers, accumulator.to(out_ptr.dtype.element_ty), mask=inside & in_k)
