"""What a grouped_gemm problem is made of, and what its declared distribution of rows lets one expect.

The offsets themselves are data: no problem, rule or amount of work depends on them. What can be known beforehand follows
from the number of groups, the number of rows and the distribution, and is stated here once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels.problem import Dim, Option, OptionValue, Problem, ProblemSchema

DISTRIBUTIONS = ("balanced", "random", "skewed")
LAYOUTS = ("nn", "nt")

#: Offsets are int32, as torch's are.
MAX_ROWS = 2**31 - 1
#: Far more experts than models have.
MAX_GROUPS = 2**16


class GroupedGemmSchema(ProblemSchema):
    """The schema of grouped_gemm: rows are counted in 32 bits."""

    __slots__ = ()

    def problem(
        self, *, dtype: str = "float32", allow_tf32: bool = False, threads: int = 0, **values: OptionValue
    ) -> Problem:
        """As :meth:`ProblemSchema.problem`.

        Raises:
            InvalidProblemError: also where there are more rows than 32-bit offsets count, or too many groups.
        """
        built = super().problem(dtype=dtype, allow_tf32=allow_tf32, threads=threads, **values)
        for name, most, why in (
            ("m", MAX_ROWS, "offsets are int32"),
            ("groups", MAX_GROUPS, "their shares are worked out one by one"),
        ):
            if built[name] > most:
                raise InvalidProblemError(
                    f"grouped_gemm: {name} is {built[name]}; it must be at most {most}, as {why}."
                )
        return built


GROUPED_GEMM = GroupedGemmSchema(
    operation="grouped_gemm",
    dims=(
        Dim("groups", "matrices of B, such as experts", minimum=1),
        Dim("m", "rows of A and C, of all groups together"),
        Dim("n", "columns of each matrix of B, and of C"),
        Dim("k", "columns of A, rows of each matrix of B"),
    ),
    dtypes=("float32", "float16", "bfloat16"),
    options=(
        Option(
            "layout",
            "of A and of each matrix of B: n is row-major, t is column-major (a transposed view)",
            default="nn",
            choices=LAYOUTS,
        ),
        Option(
            "distribution",
            "of rows over groups: balanced (equal up to one row), random (each row goes to a group drawn uniformly), "
            "skewed (as random, by Zipf's law over three quarters of the groups; the others are empty)",
            default="random",
            choices=DISTRIBUTIONS,
        ),
    ),
)


def shares(groups: int, distribution: str) -> np.ndarray:
    """The probability that a row belongs to each group, the largest first; they sum to 1.

    Zipf's law: the group of rank r has a share in proportion to 1 / r.
    """
    if distribution != "skewed":
        return np.full(groups, 1.0 / groups)
    active = -(-3 * groups // 4)
    weights = np.zeros(groups)
    weights[:active] = 1.0 / np.arange(1, active + 1)
    return weights / weights.sum()


def draw_ends(problem: Problem, seed: int) -> np.ndarray:
    """The end row of each group (int32; the last is m), drawn from the problem's distribution by a seed."""
    groups, m, distribution = problem["groups"], problem["m"], problem["distribution"]
    if distribution == "balanced":
        return (np.arange(1, groups + 1, dtype=np.int64) * m // groups).astype(np.int32)
    generator = np.random.default_rng(seed)
    sizes = generator.multinomial(m, generator.permutation(shares(groups, distribution)))
    return np.cumsum(sizes).astype(np.int32)


def row_tiles_bound(problem: Problem, rows: np.ndarray | int) -> np.ndarray:
    """The most tiles of so many rows that any offsets can need, where no tile has rows of two groups.

    A group of x > 0 rows needs ceil(x / rows) tiles, which hold at most x + rows - 1 rows, and at most min(groups, m)
    groups have any: together at most (m + min(groups, m) (rows - 1)) / rows.
    """
    m = problem["m"]
    return np.asarray((m + min(problem["groups"], m) * (np.asarray(rows, dtype=np.int64) - 1)) // rows)


def expected_row_tiles(problem: Problem, rows: np.ndarray) -> np.ndarray:
    """Expected tiles of so many rows (one number a candidate) under the problem's distribution.

    Balanced: exact. Else the rows X of a group of share p are binomial(m, p), and with tiles of b rows
    E[ceil(X / b)] = sum over j >= 0 of P(X > j b). P(X > 0) = 1 - (1 - p)^m; the others follow from the normal
    distribution of the same mean and variance, with the correction for continuity. Where its standard deviation is b
    or more, X modulo b is uniform for practical purposes, and the sum is m p / b + (b - 1) / (2 b).
    """
    facts = (problem["groups"], problem["m"], problem["distribution"])
    values, places = np.unique(rows, return_inverse=True)
    return np.array([_row_tiles(*facts, int(value)) for value in values])[places]


def expected_busy_groups(problem: Problem) -> float:
    """Expected number of groups that have rows: their weights are what must be read."""
    return _busy_groups(problem["groups"], problem["m"], problem["distribution"])


def expected_group_rows(problem: Problem) -> int:
    """Expected rows of the group that a row drawn at random belongs to, rounded up: what a tile of C sees of m.

    The row itself, and each of the m - 1 others with the probability that it shares the group: 1 + (m - 1) sum(p^2).
    """
    return _group_rows(problem["groups"], problem["m"], problem["distribution"])


@lru_cache(maxsize=4096)
def _row_tiles(groups: int, m: int, distribution: str, rows: int) -> float:
    if m == 0:
        return 0.0
    if distribution == "balanced":
        small, larger = divmod(m, groups)
        return float(larger * -(-(small + 1) // rows) + (groups - larger) * -(-small // rows))
    values, counts = np.unique(shares(groups, distribution), return_counts=True)
    mean = m * values
    deviation = np.sqrt(np.maximum(mean * (1.0 - values), 1e-12))
    some = _has_rows(m, values)
    first = np.maximum(np.floor(mean / rows) - 4.0, 1.0)
    edges = (first[:, None] + np.arange(9)) * rows
    tails = _normal_tail((edges + 0.5 - mean[:, None]) / deviation[:, None])
    found = np.where(
        deviation >= rows,
        mean / rows + (rows - 1) / (2.0 * rows),
        some + (first - 1.0) + tails.sum(axis=1),
    )
    # Approximate or not, tiles hold all rows, and every group that has rows has one.
    return float((counts * np.where(values > 0, np.maximum(np.maximum(found, mean / rows), some), 0.0)).sum())


@lru_cache(maxsize=4096)
def _busy_groups(groups: int, m: int, distribution: str) -> float:
    if distribution == "balanced":
        return float(min(groups, m))
    return float(_has_rows(m, shares(groups, distribution)).sum())


@lru_cache(maxsize=4096)
def _group_rows(groups: int, m: int, distribution: str) -> int:
    if distribution == "balanced":
        return -(-m // groups)
    return int(np.ceil(min(1.0 + (m - 1) * float((shares(groups, distribution) ** 2).sum()), m)))


def _has_rows(m: int, share: np.ndarray) -> np.ndarray:
    """The probability that a group of a share has any of m rows."""
    certain = share >= 1.0
    none = m * np.log1p(-np.where(certain, 0.0, share))
    return np.where(certain, float(m > 0), -np.expm1(none))


def _normal_tail(z: np.ndarray) -> np.ndarray:
    """P(Z > z) of a standard normal Z, to 1.4e-4.

    Bowling, Khasawneh, Kaewkuekool and Cho, "A logistic approximation to the cumulative normal distribution", J. Ind. Eng.
    Manag. 2 (2009).
    """
    near = np.clip(z, -8.0, 8.0)
    return 1.0 / (1.0 + np.exp(0.07056 * near**3 + 1.5976 * near))
