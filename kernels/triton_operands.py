"""The operands of a matrix product as a Triton kernel sees them, and the classes of problems that its rules tell apart."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

from kernelcast.kernels.device import Device
from kernelcast.kernels.problem import DTYPE_BYTES, Problem

#: Sides of the smallest tile that a tensor core multiplies.
MIN_TILE = 16
#: The side of the largest tile.
LARGEST_BLOCK = 256
#: The fewest bytes that one asynchronous copy moves.
BYTES_OF_ONE_COPY = 4


@dataclass(frozen=True, slots=True)
class Operand:
    """One matrix of a product, as a kernel sees it.

    Attributes:
        name: ``"a"`` or ``"b"``.
        rows: logical rows.
        columns: logical columns.
        transposed: whether it is stored column-major.
        leading: elements between stored rows.
        element_bytes: bytes of one element.
    """

    name: str
    rows: int
    columns: int
    transposed: bool
    leading: int
    element_bytes: int

    @property
    def strides(self) -> tuple[int, int]:
        """Elements between rows and between columns."""
        return (1, self.leading) if self.transposed else (self.leading, 1)

    @property
    def elements(self) -> int:
        """Elements from the first to the last, with the sides of the largest block added."""
        stored_rows = self.columns if self.transposed else self.rows
        return (stored_rows + LARGEST_BLOCK) * self.leading

    @property
    def vectorised(self) -> bool:
        """Whether the compiler may copy several elements at once, which asynchronous copies need.

        An asynchronous copy moves at least 4 bytes. Narrower elements are grouped only where Triton knows addresses
        and bounds to be multiples of 16, which it learns from the sizes that the launch passes.
        """
        adjacent = self.rows if self.transposed else self.columns
        return self.element_bytes >= BYTES_OF_ONE_COPY or (self.leading % 16 == 0 and adjacent % 16 == 0)


def operands(problem: Problem) -> tuple[Operand, Operand]:
    """A [m, k] and B [k, n] of a problem with the options ``layout``, ``lda`` and ``ldb`` (absent: row-major, dense).

    B has the dtype that the option ``weight_dtype`` names (absent: the problem's).
    """
    found: tuple[Operand, Operand] | None = problem.derived.get("operands")
    if found is None:
        found = problem.derived["operands"] = _operands(problem)
    return found


def _operands(problem: Problem) -> tuple[Operand, Operand]:
    facts = problem.facts
    weight_bytes = DTYPE_BYTES[str(facts.get("weight_dtype", problem.dtype))]
    layout = str(facts.get("layout", "nn"))
    found = []
    for name, rows, columns, letter, element_bytes in (
        ("a", problem["m"], problem["k"], layout[0], problem.element_bytes),
        ("b", problem["k"], problem["n"], layout[1], weight_bytes),
    ):
        transposed = letter == "t"
        leading = max(int(facts.get(f"ld{name}", 0)), rows if transposed else columns, 1)
        found.append(Operand(name, rows, columns, transposed, leading, element_bytes))
    return found[0], found[1]


@lru_cache(maxsize=64)
def compute_capability(architecture: str) -> int:
    """80 of ``"sm80"``, 90 of ``"sm90a"``, 0 of anything that is not NVIDIA's."""
    match = re.match(r"sm_?(\d+)", architecture)
    return int(match[1]) if match else 0


def matmul_class(problem: Problem, device: Device) -> Hashable:
    """What of a problem and a device the estimates and rules below look at, those aside that count tiles.

    Problems of one class have the same dtypes, precision and layout, know the same of their operands' alignment, and
    every tile that fits the one fits the other.
    """
    key = "matmul class", device.fingerprint
    found: Hashable = problem.derived.get(key)
    if found is None:
        a, b = operands(problem)
        m, n, k = problem["m"], problem["n"], problem["k"]
        found = problem.derived[key] = (
            device.fingerprint,
            problem.dtype,
            problem.allow_tf32,
            (a.element_bytes, a.vectorised, a.transposed),
            (b.element_bytes, b.vectorised, b.transposed),
            n % 16 == 0,
            min(largest_useful_block(m), LARGEST_BLOCK),
            min(largest_useful_block(n), LARGEST_BLOCK),
            min(largest_useful_block(k), LARGEST_BLOCK),
        )
    return found


def device_class(problem: Problem, device: Device) -> Hashable:
    """The class of problems for rules that look at the device alone."""
    return device.fingerprint


def largest_useful_block(size: int) -> int:
    """The largest side of a block worth its padding along a dimension of this size."""
    return 2 * max(MIN_TILE, 1 << max(size - 1, 0).bit_length())
