"""Which problems have the same machine code: facts that were compiled for one of them hold for all.

A kernel is specialised for dtype, layout, divisibility and constants, seldom for exact sizes. How finely each size of a
problem counts is a property of the variant, and is found by trying: sizes are exchanged for others that a coarser view
cannot tell apart, and if the code of any config changes, the view is too coarse. So a new variant has nothing to declare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kernelcast.kernels.candidate import Candidate
from kernelcast.kernels.compile import candidate_spec, code_key
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation

#: How a size counts, coarsest first: whether it is 0, 1, a multiple of 16; by which power of two up to 256 it can be
#: divided; that, and the next power of two; as it is.
LEVELS = ("multiple of 16", "alignment", "alignment and magnitude", "exact")
EXACT = len(LEVELS) - 1

#: Tensors of so many bytes may be near those from which on kernels count in 64 bits, which no single size decides: half
#: of 2**31, for what blocks reach beyond the edges. Their problems count as they are.
LARGE_BYTES = 2**30
_MOST_ALIGNED = 8
#: Problems and configs on which levels are tried.
PROBE_PROBLEMS = 6
PROBE_CANDIDATES = 12


def sizes_of(problem: Problem) -> dict[str, int]:
    """The dimensions and the options that are numbers."""
    numbers = {
        name: value
        for name, value in problem.options
        if isinstance(value, int) and not isinstance(value, bool)
    }
    return {**dict(problem.dims), **numbers}


def class_key(problem: Problem, levels: Mapping[str, int]) -> str:
    """A text that problems share whose code is the same in every config. A size without a level counts as it is."""
    sizes = sizes_of(problem)
    large = _is_large(problem, sizes)
    return json.dumps(
        [
            problem.dtype,
            problem.allow_tf32,
            {name: value for name, value in problem.options if name not in sizes},
            {name: view(size, EXACT if large else levels.get(name, EXACT)) for name, size in sizes.items()},
        ],
        sort_keys=True,
        separators=(",", ":"),
    )


def view(size: int, level: int) -> list[int]:
    """What a level sees of a size."""
    if level == EXACT or size < 2:
        return [size]
    if level == 0:
        return [-1, int(size % 16 == 0)]
    alignment = min((size & -size).bit_length() - 1, _MOST_ALIGNED)
    return [-2, alignment] if level == 1 else [-3, alignment, (size - 1).bit_length()]


def find_levels(problems: Sequence[Problem], candidates: Sequence[Candidate], target: str) -> dict[str, int]:
    """The coarsest level of each size at which the code of some candidates does not depend on it.

    A level at which there was nothing to try is not taken: what was not seen counts as it is.

    Args:
        problems: of one operation. For each size, those are tried that differ most in it, and some others, as one size
            may matter only beside another.
        candidates: of one variant that has ``compile_spec``; some of them, at even distances, are tried.
        target: a key of :data:`kernelcast.kernels.compile.TARGETS`.
    """
    usable = [each for each in problems if not _is_large(each, sizes_of(each))]
    chosen = _spread(candidates, PROBE_CANDIDATES)
    # Problems that differ in more than exact sizes, in an order that does not depend on that of the data.
    distinct = {class_key(each, dict.fromkeys(sizes_of(each), EXACT - 1)): each for each in usable}
    others = _spread([distinct[key] for key in sorted(distinct)], PROBE_PROBLEMS)
    known: dict[str, list[str] | None] = {}

    def keys(problem: Problem) -> list[str] | None:
        if problem.key not in known:
            known[problem.key] = _keys(problem, chosen, target)
        return known[problem.key]

    def holds(problem: Problem, name: str, level: int) -> bool | None:
        """Whether the code stays as it is; None where there was nothing to try."""
        found = None
        for size in _others(sizes_of(problem)[name], level):
            changed = _with_size(problem, name, size)
            if _is_large(changed, sizes_of(changed)):
                continue
            if keys(problem) is None or keys(changed) != keys(problem):
                return False
            found = True
        return found

    levels = {}
    for name in sizes_of(usable[0]) if usable else ():
        # By alignment and magnitude; the most aligned last, which a spread always takes.
        by_view = {tuple(view(sizes_of(each)[name], EXACT - 1)): each for each in distinct.values()}
        tried = _spread(
            [by_view[seen] for seen in sorted(by_view, key=lambda seen: seen[1:])], PROBE_PROBLEMS
        )
        tried = list(dict.fromkeys([*tried, *others]))
        levels[name] = EXACT
        for level in range(EXACT):
            found = {holds(problem, name, level) for problem in tried}
            if False not in found and True in found:
                levels[name] = level
                break
    return levels


def _keys(problem: Problem, candidates: Sequence[Candidate], target: str) -> list[str] | None:
    try:
        return [code_key(candidate_spec(problem, each, target), target) for each in candidates]
    # A problem that the schema would refuse may break a variant in any way: then nothing is known.
    except Exception:  # noqa: BLE001
        return None


def _others(size: int, level: int) -> Iterator[int]:
    """Sizes that a level cannot tell from this one, such as show what finer levels see."""
    seen = view(size, level)
    step = size & -size
    nearby = (size + step * offset for offset in (-4, -2, 2, 4, 6))
    below = 1 << max((size - 1).bit_length() - 1, 0)
    for other in dict.fromkeys(
        (2, 3, 7, 15, 16, 17, 48, 64, 80, 256, 768, 4096, 2 * size, 3 * size, below + step, *nearby)
    ):
        if other > 1 and other != size and view(other, level) == seen:
            yield other


def _with_size(problem: Problem, name: str, size: int) -> Problem:
    def changed(pairs: tuple) -> tuple:
        return tuple((each, size if each == name else value) for each, value in pairs)

    return replace(problem, dims=changed(problem.dims), options=changed(problem.options))


def _is_large(problem: Problem, sizes: Mapping[str, int]) -> bool:
    largest = sorted(sizes.values())[-2:]
    product = problem.element_bytes
    for size in largest:
        product *= max(size, 1)
    try:
        traffic = operation(problem.operation).traffic_bytes(problem)
    except ArithmeticError:
        return True
    return not (product < LARGE_BYTES and traffic < LARGE_BYTES)


def _spread(items: Sequence, count: int) -> list:
    """At most so many of some items, at even distances."""
    if len(items) <= count:
        return list(items)
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]
