"""A plan to look at: as a table, as a drawing in text, and as an SVG picture."""

from __future__ import annotations

import math
from itertools import product
from string import ascii_lowercase, ascii_uppercase
from xml.sax.saxutils import escape

from kernelcast.kernels import Candidate
from kernelcast.runtime.plan import Plan
from kernelcast.runtime.plan_table import Interval

_LETTERS = ascii_uppercase + ascii_lowercase
#: Colours that remain distinct to the colour-blind (Okabe and Ito, "Color Universal Design", 2008).
_COLOURS = ("#999999", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
#: Rows of a drawing of two dimensions.
_ROWS = 16


def table(plan: Plan) -> str:
    """A plan as a table: sizes, candidate, figures and the gain over the default, one interval a line."""
    head = ("sizes", "candidate", "at", "predicted us", "measured us", "default us", "gain", "source")
    rows = [head, *(_row(plan, interval) for interval in plan.intervals)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    numeric = range(3, 7)
    lines = [
        "  ".join(
            cell.rjust(width) if column in numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    stale = f" Stale: {plan.stale}." if plan.stale else ""
    return "\n".join(
        [f"{plan.title} on {plan.device.name}", *lines, f"{plan.reason}{stale} Plan {plan.digest}."]
    )


def draw(plan: Plan, width: int = 72) -> str:
    """The intervals over their sizes, as text: a letter a candidate, sizes on a logarithmic scale.

    One dimension is a bar; two are a field, the second upwards; of more the others are at the middle of their sizes. Where
    multiples count apart there is one drawing for each class.

    Args:
        plan: what to draw.
        width: letters in a line, at least 8.
    """
    width = max(width, 8)
    letters = _letters(plan)
    lines = [f"{letter}  {candidate}" for candidate, letter in letters.items()]
    for title, kinds in _classes(plan):
        lines += ["", *([title] if title else [])]
        (name, sizes), *rest = plan.dynamic
        across = _scale(sizes, width)
        upwards = _scale(rest[0][1], _ROWS)[::-1] if rest else [0]
        margin = max(len(str(size)) for size in upwards) if rest else 0
        for size in upwards:
            marks = "".join(letters[_at(plan, (column, size), kinds).candidate] for column in across)
            lines.append(f"{size:>{margin}} {marks}" if rest else marks)
        scale = f"{sizes[0]}{str(sizes[-1]).rjust(width - len(str(sizes[0])))}"
        lines.append(f"{' ' * (margin + 1) if rest else ''}{scale}  {name}")
        if rest:
            lines.append(f"(upwards: {rest[0][0]})")
        lines += [f"(at {other} {_middle(span)})" for other, span in rest[1:]]
    return "\n".join(lines)


def svg(plan: Plan) -> str:
    """The drawing as an SVG picture: a rectangle an interval, sizes on logarithmic scales, a line of legend a candidate."""
    left, wide, gap = 60, 640, 44
    high = 320 if len(plan.dynamic) > 1 else 48
    letters = _letters(plan)
    colours = {each: _COLOURS[place % len(_COLOURS)] for place, each in enumerate(letters)}
    parts, top = [], 30
    parts.append(f'<text x="{left}" y="18">{escape(plan.title)} on {escape(plan.device.name)}</text>')
    for title, kinds in _classes(plan):
        if title:
            parts.append(f'<text x="{left}" y="{top + 14}">{escape(title)}</text>')
            top += 20
        (name, sizes), *rest = plan.dynamic
        for interval in plan.intervals:
            others = all(
                low <= _middle(span) <= last
                for (_, span), low, last in zip(rest[1:], interval.first[2:], interval.last[2:], strict=True)
            )
            if not others or not _of_classes(interval, kinds):
                continue
            x, to_x = (left + wide * share for share in _shares(sizes, interval.first[0], interval.last[0]))
            y, to_y = (0.0, 1.0) if not rest else _shares(rest[0][1], interval.first[1], interval.last[1])
            y, to_y = top + high * (1 - to_y), top + high * (1 - y)
            label = escape(f"{plan.describe(interval)}: {interval.candidate}", {'"': "&quot;"})
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{to_x - x:.1f}" height="{to_y - y:.1f}" '
                f'fill="{colours[interval.candidate]}" stroke="white"><title>{label}</title></rect>'
            )
            if to_x - x > 14:
                parts.append(
                    f'<text x="{(x + to_x) / 2:.1f}" y="{(y + to_y) / 2 + 4:.1f}" text-anchor="middle">'
                    f"{letters[interval.candidate]}</text>"
                )
        below = top + high + 16
        parts.append(f'<text x="{left}" y="{below}">{sizes[0]}</text>')
        parts.append(f'<text x="{left + wide}" y="{below}" text-anchor="end">{sizes[-1]}</text>')
        parts.append(f'<text x="{left + wide / 2}" y="{below}" text-anchor="middle">{escape(name)}</text>')
        if rest:
            parts.append(f'<text x="{left - 4}" y="{top + high}" text-anchor="end">{rest[0][1][0]}</text>')
            parts.append(f'<text x="{left - 4}" y="{top + 10}" text-anchor="end">{rest[0][1][-1]}</text>')
            parts.append(
                f'<text x="{left - 4}" y="{top + high / 2}" text-anchor="end">{escape(rest[0][0])}</text>'
            )
        top += high + gap
    for candidate, letter in letters.items():
        parts.append(f'<rect x="{left}" y="{top - 10}" width="12" height="12" fill="{colours[candidate]}"/>')
        parts.append(f'<text x="{left + 18}" y="{top}">{letter}  {escape(str(candidate))}</text>')
        top += 18
    size = f'width="{left + wide + 20}" height="{top}" viewBox="0 0 {left + wide + 20} {top}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'


def _row(plan: Plan, interval: Interval) -> tuple[str, ...]:
    gain = "" if math.isnan(interval.speedup) else f"{interval.speedup:.2f}x"
    return (
        plan.describe(interval),
        str(interval.candidate),
        ", ".join(str(size) for size in interval.point),
        _figure(interval.predicted_us),
        _figure(interval.measured_us),
        _figure(interval.default_us),
        gain,
        interval.source,
    )


def _figure(value_us: float) -> str:
    return "" if math.isnan(value_us) else f"{value_us:,.1f}"


def _letters(plan: Plan) -> dict[Candidate, str]:
    """A letter a candidate, in the order of the intervals; more than 52 share the last."""
    found: dict[Candidate, str] = {}
    for interval in plan.intervals:
        found.setdefault(interval.candidate, _LETTERS[min(len(found), len(_LETTERS) - 1)])
    return found


def _classes(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """(title, the modulus that a size of each dimension is a multiple of, and of no larger one) of each drawing."""
    choices = []
    for place in range(len(plan.dynamic)):
        pairs = [interval.alignment[place] for interval in plan.intervals]
        choices.append(sorted({1, *(each for pair in pairs for each in pair if each > 1)}))
    found = []
    for kinds in product(*choices):
        parts = []
        for name, kind, moduli in zip(plan.names, kinds, choices, strict=True):
            if len(moduli) > 1:
                larger = next((each for each in moduli if each > kind), 0)
                text = f"{name}: multiples of {kind}" if kind > 1 else f"{name}: no multiples of {larger}"
                parts.append(f"{text}, not of {larger}" if kind > 1 and larger else text)
        found.append(("; ".join(parts), kinds))
    return found


def _of_classes(interval: Interval, kinds: tuple[int, ...]) -> bool:
    return all(
        kind % multiple == 0 and (not other or kind % other != 0)
        for kind, (multiple, other) in zip(kinds, interval.alignment, strict=True)
    )


def _at(plan: Plan, sizes: tuple[int, int], kinds: tuple[int, ...]) -> Interval:
    """The interval of a class at some sizes of the first two dimensions, whatever class those sizes are of."""
    wanted = [*sizes[: len(plan.dynamic)], *(_middle(span) for _, span in plan.dynamic[2:])]
    return next(
        interval
        for interval in plan.intervals
        if _of_classes(interval, kinds)
        and all(
            first <= size <= _reach(span, last)
            for size, first, last, (_, span) in zip(
                wanted, interval.first, interval.last, plan.dynamic, strict=True
            )
        )
    )


def _reach(sizes: range, last: int) -> int:
    """The largest number before the size of a range that follows ``last``."""
    after = -((sizes[0] - last - 1) // sizes.step)
    return sizes[after] - 1 if after < len(sizes) else sizes[-1]


def _scale(sizes: range, count: int) -> list[int]:
    """``count`` numbers over a range, even in their logarithm."""
    ratio = sizes[-1] / sizes[0]
    return [round(sizes[0] * ratio ** (place / (count - 1))) for place in range(count)]


def _shares(sizes: range, first: int, last: int) -> tuple[float, float]:
    """Where an interval begins and ends in a range, in logarithms, from 0 to 1."""
    span = math.log((sizes[-1] + 1) / sizes[0])
    return math.log(first / sizes[0]) / span, math.log((_reach(sizes, last) + 1) / sizes[0]) / span


def _middle(sizes: range) -> int:
    """The size in the middle of a range, in logarithms."""
    return (
        min(sizes, key=lambda size: abs(math.log(size * size / (sizes[0] * sizes[-1]))))
        if len(sizes) < 4096
        else (sizes[max(0, -((sizes[0] - math.isqrt(sizes[0] * sizes[-1])) // sizes.step))])
    )
