"""Building a plan: forecast on a grid, cut it into few intervals, refine their borders, verify each once, cut again.

1. The model ranks the candidates at the smallest sizes of each cell of a coarse grid, even in logarithms, for each class of
   alignment. Those that lead somewhere contend for all.
2. :func:`kernelcast.runtime.plan_partition.partition` cuts the grid into the intervals with the least regret; each costs a
   penalty besides, and a regret below the threshold counts nothing: near ties do not split.
3. Where two intervals meet, the cell between is halved, and the grid is cut again, until the border is sharp.
4. Every interval's candidate is held against the rules at the sizes of its cells. Where one is not legal it is barred, and
   the grid is cut again.
5. In mode ``verify`` the largest interval is measured once, in its middle: its candidate, the default, its neighbours', and
   the next of the forecast. What was measured corrects the forecast around
   (:func:`kernelcast.runtime.plan_verify.corrected`), and steps 2 to 4 run again, and so on until every interval, and every
   piece of a wide one, holds a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.datasets.record import Environment
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Device, operation, variants
from kernelcast.runtime.compile_ahead import compile_ahead
from kernelcast.runtime.plan import Plan
from kernelcast.runtime.plan_cut import Cutter
from kernelcast.runtime.plan_family import Family, Sizes
from kernelcast.runtime.plan_partition import Box
from kernelcast.runtime.plan_table import Interval
from kernelcast.runtime.plan_verify import Point, founded, in_box, point_of, to_measure, touching
from kernelcast.runtime.verify import Verdict, verify

if TYPE_CHECKING:
    from kernelcast.runtime.selector import Selector

#: One measurement stands for so many octaves of a dimension at most, by what the forecast came from: a wider interval is
#: measured in several places. The roofline says little of who wins where.
_REACH = {"predicted": 4.0, "analytic": 2.0}
#: Measurements of a plan at most for wide intervals, and in all.
_MOST_PIECES = 16
_MOST_MEASURED = 32
#: What a verification measures at least: the default, the interval's own candidate, and others.
_LEAST_MEASURED = {"predicted": 4, "analytic": 8}


def build(selector: Selector, name: str, values: Mapping[str, Any], *, mode: str, least_gain: float) -> Plan:
    """The plan of :func:`kernelcast.runtime.plan.plan`, by a selector's model and on its device."""
    return _Builder(selector, Family(name, values, selector.device), least_gain).build(mode)


def environment_of(
    device: Device, name: str
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """(software facts, source hash of each variant of an operation) of this process."""
    here = Environment.current("", device_kind=device.kind)
    facts = (
        ("torch", here.torch),
        ("triton", here.triton),
        ("runtime", here.runtime),
        ("system", here.system),
    )
    return facts, tuple(sorted((each, found.source_hash()) for each, found in variants(name).items()))


class _Builder:
    def __init__(self, selector: Selector, family: Family, least_gain: float) -> None:
        self.selector = selector
        self.device = selector.device
        self.measurer = selector.measurer
        self.family = family
        self.least_gain = least_gain
        self.busy = 0

    def build(self, mode: str) -> Plan:
        if mode == "off":
            return self._plan([self._everything()], 0, 0, True, "mode off: the default, nothing was ranked")
        self.cutter = Cutter(self.family, self.selector.rank, self.device, self.least_gain)
        self.scores = self.cutter.scores
        boxes = self.cutter.settle([])
        proposed = len(boxes)
        points: list[Point] = []
        notes = [self.scores.reason]
        hindrance = ""
        if mode in ("verify", "tune"):
            hindrance = self.measurer.hindrance()
            if not hindrance:
                boxes, proposed, points = self._verified(boxes)
                notes.append(f"{len(points)} of {proposed} proposed intervals verified")
                if self.busy:
                    notes.append(f"the machine was busy while {self.busy} of them were")
        intervals = [self._interval(box, points) for box in boxes]
        return self._plan(
            intervals, proposed, len(points), self.cutter.proven, "; ".join(filter(None, [hindrance, *notes]))
        )

    # --- Measuring ---

    def _verified(self, boxes: list[Box]) -> tuple[list[Box], int, list[Point]]:
        """(the boxes that are left, how many measurements were wanted, what was measured).

        What one measurement teaches may make neighbours one, or draw an interval where nothing was measured. So the sizes are
        cut again before the next: no interval is measured that the last cut no longer has. With several dimensions a cut takes
        long, and all that one asks for is measured before the next.
        """
        points: list[Point] = []
        tried: set[Sizes] = set()
        self.cutter.hopeful = {box.choice for box in boxes}
        while wanted := self._wanted(boxes, points, tried):
            batch = wanted[:1] if len(self.cutter.grid.axes) == 1 else wanted
            tried |= {self.cutter.middle(box) for box in batch}
            found = self._verify(batch, points, boxes)
            if found:
                points += found
                boxes = self.cutter.settle(points)
        while points and (unfounded := [box for box in boxes if not founded(box, self.cutter.grid, points)]):
            for box in unfounded:
                self.cutter.bar(box)
            boxes = self.cutter.settle(points)
        return boxes, len(tried), points

    def _wanted(self, boxes: list[Box], points: list[Point], tried: set[Sizes]) -> list[Box]:
        """What to measure next, the largest first: the boxes whose candidate was measured nowhere in them; where there are none,
        pieces of wide boxes in which nothing was."""
        found = [
            box
            for box in boxes
            if not self._measured_in(box, points) and self.cutter.middle(box) not in tried
        ]
        if not found:
            found = [box for box in self._pieces(boxes) if not self._reached(box, tried)]
            found = found[: max(0, _MOST_PIECES - len(tried))]
        weights = self.cutter.grid.weights()
        found.sort(key=lambda box: -float(weights[tuple(slice(*span) for span in box.cells)].sum()))
        return found[: _MOST_MEASURED - len(tried)]

    def _reached(self, piece: Box, tried: set[Sizes]) -> bool:
        """Whether a measurement stands for a piece: one in it, or as near to its middle as half of what one stands for."""
        axes, middle = len(self.cutter.grid.axes), self.cutter.middle(piece)
        most = _REACH[self.scores.source] / 2 * math.log(2)
        for sizes in tried:
            cell = self.cutter.grid.cell_of(sizes)
            near = all(
                abs(math.log(size / wanted)) < most for size, wanted in zip(sizes, middle, strict=True)
            )
            if in_box(piece, cell) or (near and in_box(Box(piece.cells[:axes], 0), cell[:axes])):
                return True
        return False

    def _measured_in(self, box: Box, points: list[Point]) -> bool:
        """Whether a box's candidate was measured somewhere in it."""
        return any(
            math.isfinite(point.gain_log[box.choice]) and in_box(box, self.cutter.grid.cell_of(point.sizes))
            for point in points
        )

    def _pieces(self, boxes: list[Box]) -> list[Box]:
        """The boxes, cut where they are wider than one measurement reaches."""
        reach = _REACH[self.scores.source]
        while True:
            found = [piece for box in boxes for piece in self._cut_box(box, reach)]
            if len(found) <= max(_MOST_PIECES, len(boxes)):
                return found
            reach *= 1.5

    def _cut_box(self, box: Box, reach: float) -> list[Box]:
        count = len(self.cutter.grid.axes)
        spans: list[list[tuple[int, int]]] = [[span] for span in box.cells[:count]]
        for place, axis in enumerate(self.cutter.grid.axes):
            first, end = box.cells[count + place]
            low, high = axis.edges[first], axis.last(end)
            parts = max(1, math.ceil(math.log2((high + 1) / low) / reach - 0.1))
            wanted = [low * ((high + 1) / low) ** (part / parts) for part in range(1, parts)]
            cuts = sorted({first, end, *(axis.cell_of(max(low, round(size))) for size in wanted)})
            spans.append(list(pairwise(cuts)))
        return [Box(cells, box.choice) for cells in product(*spans)]

    def _verify(self, boxes: list[Box], before: list[Point], around: list[Box]) -> list[Point]:
        """Measure each box once, in its middle. What was found before, and the boxes around, help to choose what is measured."""
        most = max(_LEAST_MEASURED[self.scores.source], self.selector.top_k + 1)
        analytic = self.scores.source == "analytic"
        kinds = [each.variant for each in self.scores.contenders] if analytic else []
        axes = len(self.cutter.grid.axes)
        near = touching(boxes)
        points: dict[int, Point] = {}
        chosen_around = [box.choice for box in around]
        for place, box in enumerate(boxes):
            sizes = self.cutter.middle(box)
            logs, _ = self.scores.logs(sizes)
            choices = [points[each].winner if each in points else boxes[each].choice for each in near[place]]
            choices += [point.winner for point in before] + chosen_around
            chosen = [
                choice
                for choice in to_measure(box.choice, choices, logs, most, kinds)
                if choice == 0 or self.cutter.legal(sizes, self.scores.contenders[choice])
            ]
            verdict = self._measured(sizes, chosen)
            if verdict is None:
                continue
            point = point_of(sizes, box.cells[:axes], chosen, len(self.scores.contenders), verdict)
            if point is not None:
                points[place] = point
        return list(points.values())

    def _measured(self, sizes: Sizes, chosen: list[int]) -> Verdict | None:
        """Race some contenders, of which those are taken out whose compilation does harm. None if nothing can be measured."""
        problem, measurer = self.family.problem(sizes), self.measurer
        candidates = [self.scores.contenders[choice] for choice in chosen]
        try:
            harmful = compile_ahead(problem, candidates, self.device, time_limit_s=measurer.budget_seconds)
            chosen[:] = [
                choice for choice, each in zip(chosen, candidates, strict=True) if each not in harmful
            ]
            verdict = verify(
                problem,
                [self.scores.contenders[choice] for choice in chosen],
                self.device,
                plan=measurer.plan,
                workload=measurer.workload,
            )
        except KernelcastError:
            return None  # it may not fit in memory: the forecast stands there
        measurer.record(verdict.trial.measurements)
        self.busy += verdict.busy
        return verdict

    # --- The result ---

    def _interval(self, box: Box, points: list[Point]) -> Interval:
        axes, count = self.cutter.grid.axes, len(self.cutter.grid.axes)
        spans = box.cells[count:]
        first = tuple(axis.edges[start] for axis, (start, _) in zip(axes, spans, strict=True))
        last = tuple(axis.last(end) for axis, (_, end) in zip(axes, spans, strict=True))
        alignment = tuple(
            (axis.moduli[start] if start else 1, axis.moduli[end] if end < axis.classes else 0)
            for axis, (start, end) in zip(axes, box.cells[:count], strict=True)
        )
        candidate = self.scores.contenders[box.choice]
        middle = self.cutter.middle(box)
        inside = [
            point
            for point in points
            if in_box(box, self.cutter.grid.cell_of(point.sizes))
            and math.isfinite(point.latency_us[box.choice])
        ]
        inside.sort(key=lambda point: math.dist(np.log(point.sizes), np.log(middle)))
        where = inside[0].sizes if inside else middle
        logs, _ = self.scores.logs(where)
        interval = Interval(
            first=first,
            last=last,
            alignment=alignment,
            candidate=candidate,
            source="verified" if inside else self.scores.source or "default",
            point=where,
            predicted_us=_latency(logs[box.choice]),
            default_us=_latency(logs[0]),
        )
        if not inside:
            return interval
        return replace(
            interval,
            measured_us=float(inside[0].latency_us[box.choice]),
            # By the paired rounds: the machine may have been busy while one of the two medians was taken.
            default_us=float(inside[0].latency_us[box.choice] * np.exp(-inside[0].gain_log[box.choice])),
            confidence=inside[0].confidence,
        )

    def _everything(self) -> Interval:
        sizes = list(self.family.dynamic.values())
        return Interval(
            first=tuple(each[0] for each in sizes),
            last=tuple(each[-1] for each in sizes),
            alignment=((1, 0),) * len(sizes),
            candidate=operation(self.family.name).default,
            source="default",
            point=tuple(each[len(each) // 2] for each in sizes),
        )

    def _plan(
        self, intervals: list[Interval], proposed: int, verifications: int, proven: bool, reason: str
    ) -> Plan:
        environment, hashes = environment_of(self.device, self.family.name)
        return Plan(
            operation=self.family.name,
            fixed=self.family.fixed,
            dynamic=tuple(self.family.dynamic.items()),
            tied=self.family.tied,
            intervals=tuple(sorted(intervals, key=lambda each: (each.alignment, each.first))),
            device=self.device,
            environment=environment,
            variants=hashes,
            model_version=self.scores.model_version if proposed else "",
            least_gain=float(self.least_gain),
            proposed=proposed,
            verifications=verifications,
            proven=proven,
            reason=f"{reason[:1].upper()}{reason[1:].rstrip('.')}.",
        )


def _latency(log: float) -> float:
    return float(np.exp(log)) if math.isfinite(log) else math.nan
