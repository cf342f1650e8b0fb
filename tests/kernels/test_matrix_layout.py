from __future__ import annotations

from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.kernels.ops.gemm.schema import matrix_layout

sizes = st.integers(1, 5)
strides = st.integers(0, 7)


@given(sizes, sizes, strides, strides)
def test_a_layout_addresses_the_elements_that_the_strides_do(
    rows: int, columns: int, stride_0: int, stride_1: int
) -> None:
    wanted = [[i * stride_0 + j * stride_1 for j in range(columns)] for i in range(rows)]
    layout = matrix_layout(rows, columns, stride_0, stride_1)
    if layout is None:
        # Neither dimension can be the adjacent one: not with stride 1, or with elements that overlap.
        by_rows = (stride_1 == 1 or columns == 1) and (stride_0 >= columns or rows == 1)
        by_columns = (stride_0 == 1 or rows == 1) and (stride_1 >= rows or columns == 1)
        assert not by_rows
        assert not by_columns
        return
    letter, leading = layout
    tight = columns if letter == "n" else rows
    assert leading == 0 or leading > tight
    step = leading or tight
    steps = (step, 1) if letter == "n" else (1, step)
    assert [[i * steps[0] + j * steps[1] for j in range(columns)] for i in range(rows)] == wanted


@for_each(
    ("matrix", "expected"),
    [
        ((64, 32, 32, 1), ("n", 0)),
        ((64, 32, 1, 64), ("t", 0)),
        ((64, 32, 40, 1), ("n", 40)),
        ((64, 32, 1, 72), ("t", 72)),
        ((1, 32, 32, 1), ("n", 0)),
        ((1, 32, 1, 1), ("t", 0)),
        ((1, 32, 4096, 1), ("n", 0)),
        ((1, 32, 4096, 7), ("t", 7)),
        ((64, 1, 1, 1), ("n", 0)),
        ((64, 1, 1, 64), ("t", 0)),
        ((64, 1, 9, 5), ("n", 9)),
        ((1, 1, 1, 1), ("n", 0)),
        ((64, 32, 0, 1), None),
        ((64, 32, 64, 2), None),
    ],
)
def test_layouts(matrix: tuple[int, int, int, int], expected: tuple[str, int] | None) -> None:
    assert matrix_layout(*matrix) == expected
