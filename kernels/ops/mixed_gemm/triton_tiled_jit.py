"""Kernels of ``triton_tiled``, and the parts that ``triton_split_k`` shares with them. Imported at launch alone."""

# Triton's compiler reads these bodies; their arguments are its own types.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from kernelcast.kernels.ops.gemm.triton_tiled_jit import load_tile, store_tile, tile_of

# Four bytes become four 16-bit numbers by NVIDIA's instructions: $2 holds the bytes, $0 and $1 two numbers each.

# float16 counts in steps of 1 from 1024 (0x6400) to 2048, so a byte below that exponent is 1024 + the byte. Signed
# bytes are offset by 128 first, which 1152 (0x6480) takes away.
INT8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 bytes, less;
    mov.b32 less, 0x64806480;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 $0, bytes, 0x64646464, 0x4140;
    prmt.b32 $1, bytes, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, less;
    sub.f16x2 $1, $1, less;
}""")
UINT8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 less;
    mov.b32 less, 0x64006400;
    prmt.b32 $0, $2, 0x64646464, 0x4140;
    prmt.b32 $1, $2, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, less;
    sub.f16x2 $1, $1, less;
}""")
# bfloat16 counts in steps of 1 from 128 (0x4300) to 256 alone: the low seven bits make 128 + their number. The top bit
# falls on the exponent and makes 128 or 256, which a signed byte takes away and an unsigned one adds, less 256.
INT8_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 low, high, one;
    mov.b32 one, 0x3f803f80;
    prmt.b32 low, $2, 0x43434343, 0x4140;
    prmt.b32 high, $2, 0x43434343, 0x4342;
    lop3.b32 $0, low, 0xff80ff80, 0x80008000, 0xea;
    lop3.b32 $1, high, 0xff80ff80, 0x80008000, 0xea;
    and.b32 low, low, 0xff7fff7f;
    and.b32 high, high, 0xff7fff7f;
    fma.rn.bf16x2 $0, low, one, $0;
    fma.rn.bf16x2 $1, high, one, $1;
}""")
UINT8_TO_BFLOAT16 = tl.constexpr("""{
    .reg .b32 low, high, one, less;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, 0xc380c380;
    prmt.b32 low, $2, 0x43434343, 0x4140;
    prmt.b32 high, $2, 0x43434343, 0x4342;
    and.b32 $0, low, 0xff80ff80;
    and.b32 $1, high, 0xff80ff80;
    and.b32 low, low, 0xff7fff7f;
    and.b32 high, high, 0xff7fff7f;
    fma.rn.bf16x2 low, low, one, less;
    fma.rn.bf16x2 high, high, one, less;
    fma.rn.bf16x2 $0, low, one, $0;
    fma.rn.bf16x2 $1, high, one, $1;
}""")


@triton.jit
def widen(tile, like: tl.constexpr, BITS: tl.constexpr):
    """8-bit integers as numbers of the dtype ``like``, which holds them exactly.

    BITS builds 16-bit numbers from bits: converting instructions run at a quarter or less of the rate of others, which
    is no more weights a second than memory delivers.
    """
    if not BITS:
        result = tile.to(like)
    elif like == tl.float16:
        if tile.dtype == tl.int8:
            result = tl.inline_asm_elementwise(
                INT8_TO_FLOAT16, "=&r,=&r,r", [tile], dtype=tl.float16, is_pure=True, pack=4
            )
        else:
            result = tl.inline_asm_elementwise(
                UINT8_TO_FLOAT16, "=&r,=&r,r", [tile], dtype=tl.float16, is_pure=True, pack=4
            )
    elif tile.dtype == tl.int8:
        result = tl.inline_asm_elementwise(
            INT8_TO_BFLOAT16, "=&r,=&r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        result = tl.inline_asm_elementwise(
            UINT8_TO_BFLOAT16, "=&r,=&r,r", [tile], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return result


@triton.jit
def multiply_mixed_tile(
    a_ptr,
    b_ptr,
    rows,
    columns,
    first,
    end,
    M,
    N,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
    BITS: tl.constexpr,
):
    """A[rows, first:end] @ B[first:end, columns] in float32, unscaled. ``first`` is a multiple of BLOCK_K.

    B's 8-bit integers become A's dtype in registers, which every floating-point dtype holds exactly. WIDE counts
    elements in 64 bits, for matrices of 2**31 elements and more.
    """
    offset: tl.constexpr = tl.int64 if WIDE else tl.int32
    depth = tl.arange(0, BLOCK_K)
    from_first = (first + depth).to(offset)
    a_pointers = a_ptr + (rows[:, None].to(offset) * stride_am + from_first[None, :] * stride_ak)
    b_pointers = b_ptr + (from_first[:, None] * stride_bk + columns[None, :].to(offset) * stride_bn)
    step = tl.full((), BLOCK_K, offset)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first, end, BLOCK_K):
        inside_k = depth < end - k
        a = load_tile(a_pointers, (rows < M)[:, None], inside_k[None, :], EVEN_M, EVEN_K, WIDEN)
        b = load_tile(b_pointers, inside_k[:, None], (columns < N)[None, :], EVEN_K, EVEN_N, False)
        accumulator = tl.dot(a, widen(b, a.dtype, BITS), accumulator, input_precision=PRECISION)
        a_pointers += step * stride_ak
        b_pointers += step * stride_bk
    return accumulator


@triton.jit
def mixed_gemm_tiled(
    a_ptr,
    b_ptr,
    scale_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    WIDEN: tl.constexpr,
    BITS: tl.constexpr,
):
    """C[M, N] = A[M, K] @ B[K, N] * scale[N]: one program a tile of C, over all of K. C is row-major."""
    row, column = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = multiply_mixed_tile(
        a_ptr, b_ptr, rows, columns, 0, K, M, N, stride_am, stride_ak, stride_bk, stride_bn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, PRECISION, WIDE, WIDEN, BITS,
    )  # fmt: skip
    scale = load_tile(scale_ptr + columns, columns < N, columns < N, EVEN_N, True, WIDEN)
    tile *= scale.to(tl.float32)[None, :]
    store_tile(c_ptr, tile, rows, columns, M, N, EVEN_M, EVEN_N, WIDE)
