"""Plans: which candidate to run at every size of one, two or more dynamic dimensions.

A plan is a table of intervals (boxes, with several dimensions), made once from the model and a few measurements. It
answers any size by bisection, and never learns from a call: the order of calls changes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelcast.errors import InvalidProblemError, InvalidRecordError, SettingsError
from kernelcast.kernels import Candidate, Device, Problem, operation, problem
from kernelcast.kernels.registry import require_legal
from kernelcast.runtime.options import check_device, check_kind, check_mode, check_problem, path_of
from kernelcast.runtime.plan_table import Interval, Table
from kernelcast.runtime.selection import Selection

if TYPE_CHECKING:
    from kernelcast.runtime.selector import Selector


class PlanWarning(UserWarning):
    """A plan was made in another environment: what it measured counts as a forecast."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A table of intervals for one operation, with everything but some dimensions fixed. :func:`plan` makes one.

    Attributes:
        operation: such as ``"attention"``.
        fixed: what every problem of it has: (name, value) of dimensions and options, ``dtype``, ``allow_tf32``, ``threads``.
        dynamic: (dimension, its sizes), in the order of the intervals' tuples.
        tied: (dimension, the dynamic one that it equals).
        intervals: every combination of sizes lies in exactly one.
        device: the hardware that it was made for.
        environment: torch, triton, runtime and system that it was made in.
        variants: (name, source hash) of the operation's variants then.
        model_version: of the model that forecast; empty without one.
        least_gain: what a gain had to exceed to begin an interval, as a ratio.
        proposed: intervals, and pieces of wide ones, that were to be measured while it was made, or else how many intervals.
        verifications: how many of them were measured; see :attr:`probes`.
        proven: whether every interval's candidate was held against the rules at every size; if not, at some sizes of each
            cell, and :meth:`select` asks the rules again.
        reason: how it was made, one sentence.
        stale: why its measurements count as forecasts here; empty if they do not.

    Raises:
        InvalidRecordError: a combination of sizes lies in no interval, or in two.
        InvalidProblemError: the fixed values make no problem of the operation.
    """

    operation: str
    fixed: tuple[tuple[str, Any], ...]
    dynamic: tuple[tuple[str, range], ...]
    tied: tuple[tuple[str, str], ...]
    intervals: tuple[Interval, ...]
    device: Device
    environment: tuple[tuple[str, str], ...] = ()
    variants: tuple[tuple[str, str], ...] = ()
    model_version: str = ""
    least_gain: float = 0.02
    proposed: int = 0
    verifications: int = 0
    proven: bool = True
    reason: str = ""
    stale: str = ""
    _table: Table = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", Table(self.dynamic, self.intervals))

    # --- What it answers ---

    def candidate(self, *unnamed: object, **sizes: int) -> Candidate:
        """The candidate to run at some sizes: one of each dynamic dimension, by name. The default outside the plan's sizes.

        Raises:
            InvalidProblemError: a dimension is missing, not named, or not one of the plan's; or a size is no integer.
        """
        interval = self.interval(*unnamed, **sizes)
        return self._default if interval is None else interval.candidate

    def interval(self, *unnamed: object, **sizes: int) -> Interval | None:
        """The interval that some sizes lie in; None where they are outside the plan's.

        Raises:
            InvalidProblemError: a dimension is missing, not named, or not one of the plan's; or a size is no integer.
        """
        try:
            if unnamed or len(sizes) != len(self.dynamic):
                raise KeyError
            place = self._table.find(sizes)
        except KeyError:
            raise self._asks(sizes, unnamed) from None
        except TypeError:
            raise InvalidProblemError(
                f"{', '.join(f'{name} is {size!r}' for name, size in sizes.items())}; sizes must be integers."
            ) from None
        return None if place < 0 else self.intervals[place]

    def select(self, problem: Problem | None = None, **sizes: int) -> Selection:
        """The selection of a problem, or of some sizes by name. Never measures.

        Its source is ``"cached"`` where the interval was verified here, else that of the forecast; outside the plan's sizes it
        is the default, and the reason says so.

        Raises:
            InvalidProblemError: the problem is of another family than the plan's, or sizes are missing.
        """
        if problem is None:
            problem = self.problem(**sizes)
        elif sizes:
            raise InvalidProblemError("A plan selects for a problem or for sizes; both were given.")
        check_problem(problem)
        if not self._related(problem):
            raise InvalidProblemError(f"{problem} is not of this plan's family: {self.title}.")
        if not self.within(problem):
            return self._outside(problem, "outside the plan's sizes")
        interval = self.intervals[self._table.find(problem.facts)]
        if not self.proven and interval.candidate != self._default:
            try:
                require_legal(problem, self.device, interval.candidate)
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the default works
                return self._outside(problem, f"in {self.describe(interval)}, but {error}")
        verified = interval.source == "verified" and not self.stale
        notes = [f"the plan's interval {self.describe(interval)}"]
        if self.stale:
            notes.append(self.stale)
        return Selection(
            problem=problem,
            device=self.device.name,
            candidate=interval.candidate,
            source="cached" if verified else _FORECAST[interval.source],
            # The figures are those of the interval's point, not of this size: only their ratio is told.
            confidence=interval.confidence if verified else math.nan,
            candidates=0,
            model_version=self.model_version,
            reason=f"{'; '.join(notes)}."[0].upper() + f"{'; '.join(notes)}."[1:],
        )

    def covers(self, problem: Problem) -> bool:
        """Whether a problem is of the plan's family, and its sizes are within the plan's."""
        check_problem(problem)
        return self._related(problem) and self.within(problem)

    def within(self, problem: Problem) -> bool:
        """Whether the sizes of a problem of the plan's family are within the plan's."""
        facts = problem.facts
        if not self._ties_hold(facts) or self._table.find(facts) < 0:
            return False
        # Where a schema states a fact otherwise at some sizes (a matrix of one row has no leading dimension), a problem of
        # the one family may have sizes that belong to the other.
        return len(self.families) == 1 or problem == self.problem(
            **{name: int(facts[name]) for name in self.names}
        )

    def problem(self, **sizes: int) -> Problem:
        """The problem at some sizes, one of each dynamic dimension.

        Raises:
            InvalidProblemError: a dimension is missing or not one of the plan's, or the sizes make no problem.
        """
        if sorted(sizes) != sorted(self.names):
            raise self._asks(sizes)
        return build_problem(self.operation, self.fixed, self.tied, sizes)

    def problems(self) -> list[Problem]:
        """One problem of each interval: that of its figures."""
        return [
            self.problem(**dict(zip(self.names, interval.point, strict=True))) for interval in self.intervals
        ]

    # --- What it is ---

    @property
    def names(self) -> tuple[str, ...]:
        """The dynamic dimensions."""
        return tuple(name for name, _ in self.dynamic)

    @cached_property
    def families(self) -> frozenset[tuple[Any, ...]]:
        """:func:`family_of` the plan's problems. One, unless a schema states a fact otherwise at the ends of the range."""
        ends = product(*({sizes[0], sizes[len(sizes) // 2], sizes[-1]} for _, sizes in self.dynamic))
        found = set()
        for sizes in ends:
            found.add(family_of(self.problem(**dict(zip(self.names, sizes, strict=True))), self.free))
        return frozenset(found)

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The dynamic and the tied dimensions, sorted: what :func:`family_of` leaves out."""
        return tuple(sorted({*self.names, *(name for name, _ in self.tied)}))

    @property
    def verified(self) -> int:
        """How many intervals were verified here."""
        return 0 if self.stale else sum(each.source == "verified" for each in self.intervals)

    @property
    def probes(self) -> int:
        """How many of the measurements lie in an interval that has another, or whose candidate they speak against.

        They are of wide intervals, and of those that became one with a neighbour by what was measured.
        """
        return 0 if self.stale else max(0, self.verifications - self.verified)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits over what it answers: two plans of equal digests answer alike."""
        text = "\n".join(
            f"{each.first} {each.last} {each.alignment} {each.candidate.key}" for each in self.intervals
        )
        facts = f"{self.operation} {self.fixed} {self.dynamic} {self.tied}\n{text}"
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The operation with its fixed, dynamic and tied values, on one line."""
        spans = [f"{name}={_span(sizes)}" for name, sizes in self.dynamic]
        ties = [f"{name}={of}" for name, of in self.tied]
        rest = [f"{name}={value}" for name, value in self.fixed]
        return f"{self.operation} {' '.join([*spans, *ties, *rest])}"

    def describe(self, interval: Interval) -> str:
        """An interval's sizes, such as ``"q_len 65..512 (multiples of 16)"``."""
        parts = []
        for name, low, high, (multiple, other) in zip(
            self.names, interval.first, interval.last, interval.alignment, strict=True
        ):
            text = f"{name} {low}" if low == high else f"{name} {low}..{high}"
            kinds = [f"multiples of {multiple}"] if multiple > 1 else []
            kinds += [f"not of {other}" if kinds else f"no multiples of {other}"] if other else []
            parts.append(f"{text} ({', '.join(kinds)})" if kinds else text)
        return ", ".join(parts)

    def __str__(self) -> str:
        from kernelcast.runtime.plan_draw import table

        return table(self)

    def draw(self, width: int = 72) -> str:
        """The intervals over their sizes, as text; see :func:`kernelcast.runtime.plan_draw.draw`."""
        from kernelcast.runtime.plan_draw import draw

        return draw(self, width)

    def to_svg(self) -> str:
        """The drawing as an SVG picture; see :func:`kernelcast.runtime.plan_draw.svg`."""
        from kernelcast.runtime.plan_draw import svg

        return svg(self)

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` is its inverse."""
        from kernelcast.runtime.plan_file import to_json

        return to_json(self)

    def to_python(self) -> str:
        """The plan as a function in Python that imports nothing; see :func:`kernelcast.runtime.plan_file.to_python`."""
        from kernelcast.runtime.plan_file import to_python

        return to_python(self)

    @classmethod
    def from_json(cls, text: str, device: Device | None = None) -> Plan:
        """Read what :meth:`to_json` wrote, for a device: :meth:`for_device`. Without one it is read as it stands.

        Raises:
            InvalidRecordError: the text is no plan, or one of another version.
            ArtifactError: it was made for other hardware.
            SettingsError: the device is none.
        """
        from kernelcast.runtime.plan_file import from_json

        if not isinstance(text, str):
            raise InvalidRecordError(f"Not a plan: it is of type {type(text).__name__}, not the text of one.")
        found = from_json(text)
        return found if device is None else found.for_device(device)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file: JSON, or Python where the name ends in ``.py``. Folders that lack are made.

        Raises:
            InvalidRecordError: another ending.
            KernelcastError: the file cannot be written.
        """
        from kernelcast.runtime.plan_file import save

        save(self, path_of("path", path))

    @classmethod
    def load(cls, path: str | Path, device: Device | None = None) -> Plan:
        """Read a plan's JSON file, for a device; for this machine's where None.

        Raises:
            InvalidRecordError: the file cannot be read, is no plan, or one of another version.
            ArtifactError: it was made for other hardware.
            SettingsError: the path or the device is none.
        """
        from kernelcast.kernels.detect import detect
        from kernelcast.runtime.plan_file import read

        text = read(path_of("path", path))
        return cls.from_json(text, detect() if device is None else device)

    def for_device(self, device: Device) -> Plan:
        """The plan as it holds on a device in this process's environment.

        What was measured in another environment (torch, triton, driver, a variant's source) counts as a forecast, with a
        :class:`PlanWarning`.

        Raises:
            ArtifactError: the device is other hardware than the plan was made for.
            SettingsError: the device is none.
        """
        from kernelcast.runtime.plan_file import for_device

        check_device(device)
        return for_device(self, device)

    # --- Within ---

    @cached_property
    def _default(self) -> Candidate:
        return operation(self.operation).default

    def _asks(self, sizes: Mapping[str, Any], unnamed: tuple[object, ...] = ()) -> InvalidProblemError:
        given = ", ".join([*(f"{each!r} without a name" for each in unnamed), *sizes]) or "nothing"
        return InvalidProblemError(
            f"This plan of {self.operation} asks for {', '.join(self.names)}; {given} was given. Name each size: "
            f"{', '.join(f'{name}={span[0]}' for name, span in self.dynamic)}."
        )

    def _related(self, problem: Problem) -> bool:
        return problem.operation == self.operation and family_of(problem, self.free) in self.families

    def _ties_hold(self, facts: Mapping[str, Any]) -> bool:
        return all(facts[name] == facts[of] for name, of in self.tied)

    def _outside(self, problem: Problem, why: str) -> Selection:
        return Selection(
            problem=problem,
            device=self.device.name,
            candidate=self._default,
            source="default",
            reason=f"The default: {why.rstrip('.')} ({self.title}).",
        )


#: Source of a selection, by the source of an interval that was not verified here.
_FORECAST = {
    "verified": "predicted",
    "predicted": "predicted",
    "analytic": "analytic",
    "default": "default",
}


class PlanBook:
    """Plans of one device, found by problem. Of several that cover a problem the last one added answers."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], list[Plan]] = {}
        #: By operation: which dimensions its plans leave free.
        self._free: dict[str, list[tuple[str, ...]]] = {}

    def add(self, plan: Plan) -> None:
        """Put a plan in. One with the same family and sizes is replaced."""
        for key in plan.families:
            others = [each for each in self._plans.get(key, []) if each.dynamic != plan.dynamic]
            self._plans[key] = [plan, *others]
        free = self._free.setdefault(plan.operation, [])
        if plan.free in free:
            free.remove(plan.free)
        free.insert(0, plan.free)

    def find(self, problem: Problem) -> Plan | None:
        """The plan that covers a problem, or None."""
        for free in self._free.get(problem.operation, ()):
            for plan in self._plans.get(family_of(problem, free), ()):
                if plan.within(problem):
                    return plan
        return None

    def clear(self) -> None:
        """Take all out."""
        self._plans.clear()
        self._free.clear()

    def __iter__(self) -> Iterator[Plan]:
        seen: dict[int, Plan] = {}
        for plans in self._plans.values():
            seen |= {id(plan): plan for plan in plans}
        return iter(seen.values())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def family_of(problem: Problem, free: tuple[str, ...]) -> tuple[Any, ...]:
    """Everything of a problem but the dimensions that are free: the key by which a plan is found."""
    return (
        problem.operation,
        problem.dtype,
        problem.allow_tf32,
        problem.threads,
        free,
        # True equals 1 to Python, and may mean something else.
        tuple([(name, value, type(value)) for name, value in problem.facts.items() if name not in free]),
    )


def build_problem(
    name: str, fixed: tuple[tuple[str, Any], ...], tied: tuple[tuple[str, str], ...], sizes: Mapping[str, int]
) -> Problem:
    """The problem of an operation at some sizes.

    Raises:
        InvalidProblemError: the values make no problem.
    """
    ties = {each: sizes[of] for each, of in tied}
    return problem(name, **{**dict(fixed), **sizes, **ties})


def plan(
    operation: str,
    *,
    mode: str | None = None,
    least_gain: float = 0.02,
    selector: Selector | None = None,
    **values: Any,
) -> Plan:
    """Plan an operation over a range of sizes: which candidate runs where.

    >>> import kernelcast as kc
    >>> table = kc.plan("attention", q_len=range(1, 4097), kv_len="q_len", batch=1, heads=8, head_dim=64)  # doctest: +SKIP

    Args:
        operation: such as ``"attention"``.
        mode: ``"verify"`` measures once in each interval that the model proposes; ``"predict"`` measures nothing; ``"off"``
            gives the default everywhere. The configured mode where None; ``tune`` does as ``verify``, ``cached`` as ``predict``.
        least_gain: a new interval begins only for a gain above this ratio, and above what the ranker is unsure of.
        selector: for its device; this machine's where None.
        values: those of ``kernelcast.problem``. A dynamic dimension is a ``range``, a text ``"1..4096"`` or a pair
            ``(1, 4096)`` (both with their ends; a range of one size is one); the name of a dynamic dimension makes another one equal to it.

    Raises:
        InvalidProblemError: no dimension is dynamic, more than four are, a range is empty, descends or begins below 1, or the
            values make no problem.
        SettingsError: an unknown mode, no selector, or a ``least_gain`` that is not from 0 to 1.
        UnknownNameError: no such operation.
    """
    from kernelcast.runtime.plan_build import build

    if isinstance(least_gain, bool) or not isinstance(least_gain, int | float) or not 0 <= least_gain <= 1:
        raise SettingsError(f"least_gain is {least_gain!r}; it must be a ratio from 0 to 1, such as 0.02.")
    if selector is None:
        import torch

        from kernelcast.kernels.detect import detect, torch_device
        from kernelcast.runtime.dispatch import selector_for

        selector = selector_for(torch.device(torch_device(detect())))
    from kernelcast.runtime.selector import Selector

    check_kind("selector", selector, Selector, "a Selector, or None for this machine's device")
    mode = selector.mode if mode is None else mode
    check_mode(mode)
    return build(selector, operation, values, mode=mode, least_gain=least_gain)


def _span(sizes: range) -> str:
    """``"1..4096"``, or ``"64..4096..64"``."""
    step = f"..{sizes.step}" if sizes.step > 1 else ""
    return f"{sizes[0]}..{sizes[-1]}{step}"
