"""What a plan is of: an operation with some values fixed, some equal to others, and some dimensions dynamic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kernelcast.errors import InvalidProblemError
from kernelcast.kernels import Device, Problem, operation
from kernelcast.kernels.detect import check_threads, default_threads
from kernelcast.runtime.plan import build_problem
from kernelcast.runtime.plan_axes import Axis, split_values

Sizes = tuple[int, ...]


class Family:
    """The problems that one plan is of.

    Args:
        name: of the operation.
        values: of a problem, those of dynamic dimensions ranges.
        device: where; on a CPU the thread count is filled in.

    Attributes:
        dynamic: the sizes of each dynamic dimension.
        tied: (dimension, the dynamic one that it equals).
        fixed: (name, value) of everything else.

    Raises:
        InvalidProblemError: no dimension is dynamic, more than four are, or the values make no problem.
        UnknownNameError: no such operation.
    """

    def __init__(self, name: str, values: Mapping[str, Any], device: Device) -> None:
        self.name = name
        self._schema = operation(name).schema
        self.dynamic, tied, fixed = split_values(values)
        self.tied = tuple(tied.items())
        if device.kind == "cpu":
            fixed.setdefault("threads", default_threads())
        if "threads" in fixed:
            check_threads(fixed["threads"], device)
        self.fixed = self._fixed(fixed)
        self._values: dict[str, Any] = dict(self.fixed)

    @property
    def sizes(self) -> int:
        """How many combinations of sizes there are."""
        return math.prod(len(sizes) for sizes in self.dynamic.values())

    def problem(self, sizes: Sizes) -> Problem:
        """The problem at some sizes, in the order of the dynamic dimensions."""
        named = dict(zip(self.dynamic, sizes, strict=True))
        # By the schema itself: thousands of sizes are held against the rules.
        values: dict[str, Any] = {**self._values, **named, **{name: named[of] for name, of in self.tied}}
        return self._schema.problem(**values)

    def _fixed(self, given: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Every value but the dynamic ones, what was not given as the schema fills it; checked at both ends."""
        for name, sizes in self.dynamic.items():
            Axis(name, sizes)  # refuses what is no range of sizes
        self._check_names(given)
        ends = [{n: s[0] for n, s in self.dynamic.items()}, {n: s[-1] for n, s in self.dynamic.items()}]
        first, _ = (build_problem(self.name, tuple(given.items()), self.tied, end) for end in ends)
        facts = {
            **first.facts,
            "dtype": first.dtype,
            "allow_tf32": first.allow_tf32,
            "threads": first.threads,
        }
        free = {*self.dynamic, *dict(self.tied)}
        for name in free:
            if name not in first.facts or type(first.facts[name]) is not int:
                raise InvalidProblemError(f"{self.name} has no dimension {name!r} that could be dynamic.")
        return tuple((n, given.get(n, value)) for n, value in facts.items() if n not in free)

    def _check_names(self, given: Mapping[str, Any]) -> None:
        """Say of ranges and texts in the wrong place what is meant there, before a problem is made of one of the sizes."""
        dims = [dim.name for dim in self._schema.dims]
        known = {option.name: option for option in self._schema.options}
        for name in self.dynamic:
            if name in ("dtype", "allow_tf32", "threads") or (
                name in known and known[name].choices is not None
            ):
                raise InvalidProblemError(
                    f"{self.name} has no dimension {name!r} that could be dynamic. Its dimensions: {', '.join(dims)}."
                )
        for name, value in given.items():
            if name in dims and isinstance(value, str):
                raise InvalidProblemError(
                    f"{self.name}: {name} is {value!r}; it must be an integer, a range such as '1..4096', or the name of a dynamic "
                    f"dimension ({', '.join(self.dynamic)})."
                )
