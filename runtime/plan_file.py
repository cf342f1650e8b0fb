"""Plans on disk: JSON that is checked when read, and a function in plain Python that imports nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelcast.datasets.journal import write_durably
from kernelcast.errors import (
    ArtifactError,
    InvalidProblemError,
    InvalidRecordError,
    KernelcastError,
    UnknownNameError,
    warn,
)
from kernelcast.kernels import Candidate, Device, operation, variant
from kernelcast.runtime.plan import Plan, PlanWarning, build_problem
from kernelcast.runtime.plan_table import Interval

#: Version of the JSON's layout; another is refused.
PLAN_VERSION = 1

#: No plan's file is longer: a table of thousands of intervals takes less.
_MOST_CHARACTERS = 2**24
_FIGURES = ("predicted_us", "measured_us", "default_us", "confidence")


def to_json(plan: Plan) -> str:
    """A plan as JSON text, one interval a line; :func:`from_json` is its inverse."""
    head = {
        "plan_version": PLAN_VERSION,
        "digest": plan.digest,
        "operation": plan.operation,
        "fixed": dict(plan.fixed),
        "dynamic": {
            name: {"first": sizes[0], "last": sizes[-1], "step": sizes.step} for name, sizes in plan.dynamic
        },
        "tied": dict(plan.tied),
        "device": plan.device.to_dict(),
        "environment": dict(plan.environment),
        "variants": dict(plan.variants),
        "model_version": plan.model_version,
        "least_gain": plan.least_gain,
        "proposed": plan.proposed,
        "verifications": plan.verifications,
        "proven": plan.proven,
        "reason": plan.reason,
    }
    lines = ",\n    ".join(json.dumps(_interval(plan, each), allow_nan=False) for each in plan.intervals)
    text = json.dumps(head, indent=2, allow_nan=False)
    return f'{text[:-2]},\n  "intervals": [\n    {lines}\n  ]\n}}\n'


def from_json(text: str) -> Plan:
    """Read what :func:`to_json` wrote. For which device it holds is another question: :func:`for_device`.

    Raises:
        InvalidRecordError: the text is no plan, one of another version, or was changed.
    """
    if len(text) > _MOST_CHARACTERS:
        raise InvalidRecordError(f"Not a plan: the text has over {_MOST_CHARACTERS} characters.")
    try:
        data = json.loads(text)
        version = data["plan_version"]
        if version != PLAN_VERSION:
            raise InvalidRecordError(
                f"This plan has layout {version!r}; this kernelcast reads {PLAN_VERSION}. Make the plan again."
            )
        names = list(data["dynamic"])
        plan = Plan(
            operation=_text(data, "operation"),
            fixed=tuple(data["fixed"].items()),
            dynamic=tuple((name, _range(name, each)) for name, each in data["dynamic"].items()),
            tied=tuple((name, str(of)) for name, of in data["tied"].items()),
            intervals=tuple(_read_interval(each, names) for each in data["intervals"]),
            device=Device.from_dict(data["device"]),
            environment=tuple((name, str(value)) for name, value in data["environment"].items()),
            variants=tuple((name, str(value)) for name, value in data["variants"].items()),
            model_version=_text(data, "model_version"),
            least_gain=_number(data["least_gain"]),
            proposed=_count(data, "proposed"),
            verifications=_count(data, "verifications"),
            proven=data["proven"] is True,
            reason=_text(data, "reason"),
        )
        _check(plan)
        if data["digest"] != plan.digest:
            raise InvalidRecordError(
                f"This plan was changed: its digest is {data['digest']!r}, and its content's {plan.digest}."
            )
    except InvalidRecordError:
        raise
    except (
        KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, InvalidProblemError,
        UnknownNameError,
    ) as error:  # fmt: skip
        raise InvalidRecordError(f"Not a plan ({type(error).__name__}: {error}).") from error
    return plan


def save(plan: Plan, path: Path) -> None:
    """Write a plan to a file: Python where the name ends in ``.py``, JSON where it ends in ``.json``.

    Raises:
        InvalidRecordError: another ending.
        KernelcastError: the file cannot be written.
    """
    writers = {".py": to_python, ".json": to_json}
    if path.suffix not in writers:
        raise InvalidRecordError(f"{path} is no name for a plan; it must end in {' or '.join(writers)}.")
    write_text(path, writers[path.suffix](plan))


def write_text(path: Path, text: str) -> None:
    """Write a plan's text, or a drawing's, whole or not at all; folders that lack are made.

    Raises:
        KernelcastError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text)
    except OSError as error:
        raise _cannot_write(path, error) from error


def require_writable(path: Path) -> None:
    """Refuse a file that could not be written, before time is spent on what is to be in it; folders that lack are made.

    Raises:
        KernelcastError: it is a folder, or its folder cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"\n")
            file.flush()
    except OSError as error:
        raise _cannot_write(path, error) from error


def read(path: Path) -> str:
    """The text of a plan's file.

    Raises:
        InvalidRecordError: it cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRecordError(f"{path} is not a plan: it is no text ({error}).") from error
    except OSError as error:
        raise InvalidRecordError(
            f"The plan {path} cannot be read: {error.strerror or error}. Plan.save and kernelcast plan --export write one."
        ) from error


def _cannot_write(path: Path, error: OSError) -> KernelcastError:
    where = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
    return KernelcastError(
        f"The plan {path} cannot be written: {error.strerror or error}{where}. Choose another file."
    )


def for_device(plan: Plan, device: Device) -> Plan:
    """A plan as it holds on a device here; see :meth:`Plan.for_device`."""
    from kernelcast.costmodel.locate import same_hardware
    from kernelcast.runtime.plan_build import environment_of

    if plan.device.fingerprint != device.fingerprint and not same_hardware(plan.device, device):
        raise ArtifactError(
            f"This plan of {plan.operation} was made for {plan.device.name} ({plan.device.architecture}, "
            f"{plan.device.cores} cores); it says nothing of {device.name} ({device.architecture}, {device.cores} cores). "
            "Make one there: kernelcast plan"
        )
    environment, hashes = environment_of(device, plan.operation)
    changed = [
        f"{name} is {dict(environment).get(name)!r}, was {value!r}"
        for name, value in plan.environment
        if dict(environment).get(name) != value
    ]
    before, now = dict(plan.variants), dict(hashes)
    other = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    changed += [f"the variant {name} has changed" for name in other[:3]]
    if plan.device.fingerprint != device.fingerprint:
        changed.append("the device's facts have changed")
    if not changed:
        return plan if plan.device == device else replace(plan, device=device)
    stale = f"its measurements are of another environment ({'; '.join(changed)})"
    warn(f"The plan {plan.title} counts as a forecast: {stale}. Make it again.", PlanWarning)
    return replace(plan, device=device, stale=stale)


# --- Python ---


def to_python(plan: Plan) -> str:
    """A plan as a module with one function, which imports nothing and answers as :meth:`Plan.candidate` does.

    The function takes the dynamic dimensions and returns (variant, config).
    """
    names = plan.names
    default = operation(plan.operation).default
    facts = ", ".join(f"{name}={value!r}" for name, value in plan.fixed)
    ties = "".join(f" {name} equals {of}." for name, of in plan.tied)
    made = ", ".join(f"{name} {value}" for name, value in plan.environment)
    lines = [
        f'"""Which candidate of {plan.operation} to run, by {" and ".join(names)}. Written by kernelcast."""',
        "",
        "",
        f"def select({', '.join(names)}):",
        '    """(variant, config) to run at some sizes.',
        "",
        f"    Of {plan.operation} with {facts}.{ties}",
        f"    Made for {plan.device.name} ({made}); {plan.verified} of {len(plan.intervals)} intervals verified.",
        f"    Plan {plan.digest}.",
        '    """',
    ]
    outside = " or ".join(f"not {_within(name, sizes)}" for name, sizes in plan.dynamic)
    lines += [f"    if {outside}:", f"        return {_answer(default)}  # outside the plan: the default"]
    simple = len(names) == 1 and all(each.alignment == ((1, 0),) for each in plan.intervals)
    ordered = sorted(plan.intervals, key=lambda each: each.first) if simple else list(plan.intervals)
    for interval in ordered[:-1]:
        test = f"{names[0]} <= {interval.last[0]}" if simple else _test(plan, interval)
        lines += [f"    if {test}:", f"        return {_answer(interval.candidate)}{_note(interval)}"]
    lines.append(f"    return {_answer(ordered[-1].candidate)}{_note(ordered[-1])}")
    return "\n".join(lines) + "\n"


def _within(name: str, sizes: range) -> str:
    if sizes.step == 1:
        return f"{sizes[0]} <= {name} <= {sizes[-1]}"
    return f"({sizes[0]} <= {name} <= {sizes[-1]} and ({name} - {sizes[0]}) % {sizes.step} == 0)"


def _test(plan: Plan, interval: Interval) -> str:
    """What an interval asks of the sizes, as far as the plan's range does not."""
    tests = []
    for place, (name, sizes) in enumerate(plan.dynamic):
        low, high = interval.first[place], interval.last[place]
        if low == high:
            tests.append(f"{name} == {low}")
        elif low > sizes[0] and high < sizes[-1]:
            tests.append(f"{low} <= {name} <= {high}")
        elif low > sizes[0]:
            tests.append(f"{name} >= {low}")
        elif high < sizes[-1]:
            tests.append(f"{name} <= {high}")
        multiple, other = interval.alignment[place]
        tests += [f"{name} % {multiple} == 0"] if multiple > 1 else []
        tests += [f"{name} % {other} != 0"] if other else []
    return " and ".join(tests) or "True"


def _answer(candidate: Candidate) -> str:
    return f"({candidate.variant!r}, {candidate.parameters!r})"


def _note(interval: Interval) -> str:
    if math.isnan(interval.latency_us):
        return ""
    how = "measured" if interval.source == "verified" else interval.source
    gain = "" if math.isnan(interval.speedup) else f", {interval.speedup:.2f}x the default's speed"
    return f"  # {interval.latency_us:.4g} us {how}{gain}"


# --- JSON, field by field ---


def _interval(plan: Plan, interval: Interval) -> dict[str, Any]:
    names = plan.names
    return {
        "sizes": {
            name: [low, high] for name, low, high in zip(names, interval.first, interval.last, strict=True)
        },
        "alignment": {
            name: list(pair) for name, pair in zip(names, interval.alignment, strict=True) if pair != (1, 0)
        },
        "candidate": {"variant": interval.candidate.variant, "config": interval.candidate.parameters},
        "source": interval.source,
        "point": dict(zip(names, interval.point, strict=True)),
        **{name: value if math.isfinite(value := getattr(interval, name)) else None for name in _FIGURES},
    }


def _read_interval(data: Mapping[str, Any], names: list[str]) -> Interval:
    if sorted(data["sizes"]) != sorted(names) or not set(data["alignment"]) <= set(names):
        raise InvalidRecordError(
            f"An interval has the sizes {data['sizes']!r}; the plan's dimensions are {names}."
        )
    candidate = data["candidate"]
    figures = {name: math.nan if data[name] is None else _number(data[name]) for name in _FIGURES}
    return Interval(
        first=tuple(data["sizes"][name][0] for name in names),
        last=tuple(data["sizes"][name][1] for name in names),
        alignment=tuple(_pair(data["alignment"].get(name, (1, 0))) for name in names),
        candidate=Candidate.of(_text(candidate, "variant"), candidate["config"]),
        source=data["source"],
        point=tuple(data["point"][name] for name in names),
        **figures,
    )


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return first, second


def _check(plan: Plan) -> None:
    """That the catalogue knows what a plan names, and that its values make problems of the operation."""
    for interval in plan.intervals:
        variant(plan.operation, interval.candidate.variant)
    names = plan.names
    free = {*names, *(name for name, _ in plan.tied)}
    if not set(dict(plan.tied).values()) <= set(names) or free & set(dict(plan.fixed)):
        raise InvalidRecordError(
            f"The plan's tied dimensions {dict(plan.tied)} and fixed ones {list(dict(plan.fixed))} contradict its dynamic "
            f"ones, {list(names)}."
        )
    for end in (0, -1):
        build_problem(
            plan.operation, plan.fixed, plan.tied, {name: sizes[end] for name, sizes in plan.dynamic}
        )


def _range(name: str, data: Mapping[str, Any]) -> range:
    first, last, step = (_count(data, each) for each in ("first", "last", "step"))
    if not 1 <= first <= last < 2**40 or step < 1:
        raise InvalidRecordError(f"The plan's {name} goes from {first} to {last} in steps of {step}.")
    return range(first, last + 1, step)


def _text(data: Mapping[str, Any], name: str) -> str:
    if type(data[name]) is not str:
        raise InvalidRecordError(f"A plan's {name} is {data[name]!r}; it must be a text.")
    return str(data[name])


def _count(data: Mapping[str, Any], name: str) -> int:
    if type(data[name]) is not int or data[name] < 0:
        raise InvalidRecordError(
            f"A plan's {name} is {data[name]!r}; it must be a whole number of at least 0."
        )
    return int(data[name])


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise InvalidRecordError(f"A figure of a plan is {value!r}; it must be a finite number.")
    return float(value)
