"""Drop-in operations with torch's signatures: they run the selected candidate.

Each falls back to torch's own operator, and nothing else happens, where a gradient is needed (of any mode), inside
``torch.func`` transforms, tracing, export and autocast, under ``torch.use_deterministic_algorithms``, for tensor
subclasses, sparse, nested and empty tensors, for arguments that the catalogue does not cover (named in each docstring),
and when ``KERNELCAST_DISABLE=1``. The choice depends on shapes, dtypes, strides, the device and torch's switches, never on
values; the caller's tensors are only read. A candidate that fails is forgotten, and torch's own runs.

Inside ``torch.compile`` a drop-in is a custom operator that does all this when the graph runs (see
:mod:`kernelcast.runtime.dropins_compiled`). conv2d and attention are torch's own there: a compiler chooses the memory format
of convolutions for the whole graph, and the output of torch's attention has other strides than that of other candidates, so
that an operator of fixed strides would copy it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernelcast.kernels import Problem
from kernelcast.kernels.operation import Launcher
from kernelcast.kernels.ops.gemm.schema import matrix_layout
from kernelcast.runtime.dispatch import eligible, launchers, pair_at, place, rescue, resolve
from kernelcast.runtime.dropins_compiled import operator, traced_alike
from kernelcast.runtime.dropins_matmul import batched, folded, rows_of
from kernelcast.runtime.dropins_problem import problem_for


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``torch.matmul``: [m, k] @ [k, n] -> [m, n], with leading dimensions in the ways that torch runs as one product.

    A contiguous [..., m, k] by a matrix is one product of all rows. Two batches of matrices are multiplied as
    :func:`kernelcast.bmm` does; one of them may hold a single matrix. torch's own for other ranks, dtypes other than
    float32, float16 and bfloat16, and operands of which no dimension is adjacent in memory.
    """
    where = pair_at(a, b)
    if where is not None:
        # A contiguous tensor is told by its shape: strides of dimensions of size 1, which may be anything, mean nothing.
        dense_a, dense_b = a.is_contiguous(), b.is_contiguous()
        shape_a, shape_b = a.shape, b.shape
        key = (
            "gemm", shape_a, shape_b, None if dense_a else a.stride(), None if dense_b else b.stride(), a.dtype, where,
        )  # fmt: skip
        launch = launchers.get(key)
        if launch is None:
            ranks = len(shape_a), len(shape_b)
            if ranks == (3, 3):
                found = _as_batch(a, b)
                return torch.matmul(a, b) if found is None else batched(*found)
            if ranks[1] != 2 or ranks[0] < 2 or shape_a[-1] != shape_b[0] or (ranks[0] > 2 and not dense_a):
                return torch.matmul(a, b)
            own = torch.mm if ranks[0] == 2 else torch.matmul
            launch = resolve(key, (a, b), own, lambda: _gemm_problem(a, b), folded(shape_a, shape_b[1]))
        try:
            return launch(a, b)
        except Exception as error:  # noqa: BLE001 - see rescue
            return rescue(key, launch, error)(a, b)
    elif traced_alike(a, b) and ((a.dim() >= 2 and b.dim() == 2) or (a.dim() == 3 and b.dim() == 3)):
        return _MATMUL(a, b)
    return torch.matmul(a, b)


def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """``torch.nn.functional.conv2d``: [n, c, h, w] with [k, c / groups, r, s] -> [n, k, p, q].

    A bias is added to the output of the convolution. torch's own for unbatched inputs, padding given as a word, and
    inputs that are neither contiguous nor channels-last.
    """
    usual = (input, weight) if bias is None else (input, weight, bias)
    strides, paddings, dilations = _pair(stride), _pair(padding), _pair(dilation)
    if (
        strides is not None
        and paddings is not None
        and dilations is not None
        and type(groups) is int
        and eligible(*usual)
        and input.dim() == 4
        and weight.dim() == 4
        and (bias is None or bias.shape == weight.shape[:1])
    ):
        steps = (strides, paddings, dilations, groups)
        key = (
            "conv2d", input.shape, weight.shape, input.stride(), weight.stride(), input.dtype, steps, place(input),
        )  # fmt: skip
        launch = launchers.get(key)
        if launch is None:

            def own(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
                return F.conv2d(x, w, b, stride, padding, dilation, groups)

            launch = resolve(key, usual, own, lambda: _conv2d_problem(input, weight, *steps), _then_bias)
        try:
            return launch(input, weight, bias)
        except Exception as error:  # noqa: BLE001 - see rescue
            return rescue(key, launch, error)(input, weight, bias)
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention``: [batch, heads, q_len, d] x [batch, kv_heads, kv_len, d] -> [batch, heads, q_len, d].

    torch's own with a mask, dropout, another scale than ``1 / sqrt(d)``, other ranks, values of another width than the
    keys, and inputs that are not contiguous.
    """
    plain = attn_mask is None and dropout_p == 0.0 and scale is None
    tensors = (query, key, value)
    if plain and eligible(*tensors) and all(t.dim() == 4 and t.is_contiguous() for t in tensors):
        found = (
            "attention", query.shape, key.shape, value.shape, query.dtype, is_causal, enable_gqa,
            place(query),
        )  # fmt: skip
        launch = launchers.get(found)
        if launch is None:

            def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

            launch = resolve(
                found, tensors, own, lambda: _attention_problem(query, key, value, is_causal, enable_gqa)
            )
        try:
            return launch(query, key, value)
        except Exception as error:  # noqa: BLE001 - see rescue
            return rescue(found, launch, error)(query, key, value)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def softmax(input: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``torch.softmax`` over the last dimension of a contiguous tensor.

    torch's own over another dimension, with another output dtype, and for inputs that are not contiguous.
    """
    if (
        eligible(input)
        and input.dim() > 0
        and type(dim) is int  # 1.0 and True equal 1 to Python, and torch refuses them
        and dim in (-1, input.dim() - 1)
        and dtype in (None, input.dtype)
        and input.is_contiguous()
        and input.shape[-1]  # rows of nothing cannot be counted
    ):
        columns = input.shape[-1]
        flat = input.view(-1, columns)
        key = ("softmax", flat.shape, input.dtype, place(input))
        launch = launchers.get(key)
        if launch is None:
            launch = resolve(
                key,
                (input,),
                lambda x: torch.softmax(x, -1),
                lambda: problem_for("softmax", input, rows=flat.shape[0], columns=columns),
            )
        try:
            return launch(flat).view(input.shape)
        except Exception as error:  # noqa: BLE001 - see rescue
            return rescue(key, launch, error)(flat).view(input.shape)
    if (
        traced_alike(input)
        and input.dim() > 0
        and type(dim) is int
        and dim in (-1, input.dim() - 1)
        and dtype in (None, input.dtype)
        and input.is_contiguous()
    ):
        return _SOFTMAX(input)
    return torch.softmax(input, dim, dtype)


def _then_bias(run: Launcher) -> Launcher:
    def launch(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        out = run(x, w)
        return out if b is None else out.add_(b.view(1, -1, 1, 1))

    return launch


def _gemm_problem(a: torch.Tensor, b: torch.Tensor) -> Problem | None:
    (m, k), strides = rows_of(a)
    (rows, columns), strides_b = rows_of(b)
    of_a, of_b = matrix_layout(m, k, *strides), matrix_layout(rows, columns, *strides_b)
    if of_a is None or of_b is None:
        return None
    (letter_a, lda), (letter_b, ldb) = of_a, of_b
    return problem_for("gemm", a, m=m, k=k, n=b.shape[1], layout=letter_a + letter_b, lda=lda, ldb=ldb)


def _as_batch(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The operands of the torch.bmm that torch.matmul of two batches is; None where it is none."""
    if a.shape[2] != b.shape[1]:
        return None
    if a.shape[0] == b.shape[0]:
        return a, b
    if a.shape[0] == 1:
        return a.expand(b.shape[0], -1, -1), b
    return (a, b.expand(a.shape[0], -1, -1)) if b.shape[0] == 1 else None


def _conv2d_problem(
    x: torch.Tensor,
    w: torch.Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Problem | None:
    if x.is_contiguous() and w.is_contiguous():
        layout = "nchw"
    elif x.is_contiguous(memory_format=torch.channels_last) and w.is_contiguous(
        memory_format=torch.channels_last
    ):
        layout = "nhwc"
    else:
        return None
    n, c, h, width = x.shape
    k, c_group, r, s = w.shape
    if c_group * groups != c:
        return None
    return problem_for(
        "conv2d", x, n=n, c=c, h=h, w=width, k=k, r=r, s=s, stride_h=stride[0], stride_w=stride[1],
        pad_h=padding[0], pad_w=padding[1], dil_h=dilation[0], dil_w=dilation[1], groups=groups, layout=layout,
    )  # fmt: skip


def _attention_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, grouped: bool
) -> Problem | None:
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1], k.shape[2]
    if (
        k.shape != v.shape
        or k.shape[0] != batch
        or k.shape[3] != head_dim
        or (kv_heads != heads and not grouped)
    ):
        return None
    return problem_for(
        "attention", q, batch=batch, heads=heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=head_dim,
        causal=causal,
    )  # fmt: skip


def _pair(value: Any) -> tuple[int, int] | None:
    """(rows, columns) of what torch takes as one or two integers; None for what is left to torch."""
    if type(value) is int:
        return value, value
    if isinstance(value, tuple | list) and len(value) in (1, 2) and all(type(each) is int for each in value):
        return value[0], value[-1]
    return None


_MATMUL = operator("matmul(Tensor a, Tensor b) -> Tensor", matmul, torch.matmul)
_SOFTMAX = operator("softmax(Tensor input) -> Tensor", softmax, lambda input: torch.softmax(input, -1))
