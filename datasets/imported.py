"""What the importers of JSON files and tables share: reading, checking, and gathering repeats into records."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernelcast.datasets import segments
from kernelcast.datasets.importing import Content, Parsed, read_content, shortened
from kernelcast.datasets.json_place import place_at, place_of_twice, place_of_unreadable
from kernelcast.datasets.record import Environment, Measurement, Protocol
from kernelcast.datasets.timing import RaceResult
from kernelcast.errors import (
    ImportFileError,
    InvalidProblemError,
    InvalidRecordError,
    SettingsError,
    UnknownNameError,
)
from kernelcast.kernels import Candidate, Device, Problem, operation
from kernelcast.kernels.candidate import ConfigValue
from kernelcast.kernels.devices_table import CARDS
from kernelcast.kernels.problem import OptionValue

#: A JSON file larger than this is refused: what it becomes takes ten times its size.
MAX_JSON_BYTES = 512 * 2**20

#: A thousand years in microseconds. Nothing that was measured took longer.
MAX_US = 3.2e16

#: Longest name that is made of what a file says.
_NAME_LENGTH = 60

_WHOLE = re.compile(r"[+-]?\d{1,18}")

#: Half of a character that JSON writes as two escapes. Alone it is no text.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(
    file: str,
    *,
    on_bytes: Callable[[int], None],
    max_bytes: int = MAX_JSON_BYTES,
    unclosed: str | None = None,
) -> tuple[Content, Any]:
    """A file's own name and content, and what its JSON says.

    Args:
        file: as the user wrote it; see :func:`kernelcast.datasets.importing.read_content`.
        on_bytes: called with the number of bytes unpacked since the last call.
        max_bytes: more is refused.
        unclosed: the ending that the format's own tool lets be absent, after a comma or none.

    Raises:
        ImportFileError: it cannot be read, is too large, or is not JSON; or an object holds one name twice.
    """
    content = read_content(file, on_bytes=on_bytes, max_bytes=max_bytes)
    text = text_of(file, content)
    if not text.strip():
        raise ImportFileError(file, "it is empty.")

    def load(text: str) -> Any:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) < len(pairs):
                names = [name for name, _ in pairs]
                twice = next(name for name in names if names.count(name) > 1)
                place = place_of_twice(text)
                raise ImportFileError(
                    file, f"{place or 'the object of all'} holds the name {shortened(twice)} twice."
                )
            return found

        return json.loads(text, object_pairs_hook=unique)

    try:
        try:
            value = load(text)
        except json.JSONDecodeError:
            if unclosed is None:
                raise
            try:
                value = load(text.rstrip().removesuffix(",") + unclosed)
            except json.JSONDecodeError:
                # The error of the file as it is says more than that of the attempt.
                value = load(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = place_at(text, error.pos)
        where = f", in {place}" if place else ""
        raise ImportFileError(
            file,
            f"it is not JSON ({error.msg}, column {error.colno}{where}). It was cut short or changed: fetch it again.",
            line=error.lineno,
        ) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, brackets a thousand deep, half a character.
        place = place_of_unreadable(text)
        said = "nested too deeply" if isinstance(error, RecursionError) else shortened(str(error))
        raise ImportFileError(
            file, f"its JSON cannot be read{f' in {place}' if place else ''} ({said})."
        ) from error
    return content, value


def text_of(file: str, content: Content) -> str:
    """A file's text.

    Raises:
        ImportFileError: it is not in UTF-8.
    """
    try:
        return content.data.decode()
    except UnicodeDecodeError as error:
        line = content.data.count(b"\n", 0, error.start) + 1
        raise ImportFileError(file, "it is not text in UTF-8.", line=line) from error


def slug(text: str) -> str:
    """Lower-case letters, digits and single underscores; never empty, and different for texts without any of them."""
    found = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:_NAME_LENGTH].strip("_")
    return found or hashlib.sha256(text.encode()).hexdigest()[:8]


def operation_name(given: str | None, otherwise: str) -> str:
    """The operation that a file's measurements get, which must be none of the catalogue's.

    Raises:
        SettingsError: the given one is no plain name, or is taken.
    """
    name = otherwise if given is None else given
    if name != slug(name):
        raise SettingsError(f"--operation is {name!r}; it takes lower-case letters, digits and underscores.")
    if known_operation(name) is not None:
        raise SettingsError(
            f"--operation is {name!r}, an operation of the catalogue, whose problems these files do not state. "
            f"Choose another name, such as {otherwise!r}."
        )
    return name


def known_operation(name: str) -> Any:
    """The operation of the catalogue with that name, or None; one that was built from records is none of it."""
    from kernelcast.datasets.recorded import RecordedOperation

    try:
        found = operation(name)
    except UnknownNameError:
        return None
    return None if isinstance(found, RecordedOperation) else found


def problem_of(
    name: str,
    dims: Mapping[str, int],
    dtype: str,
    options: Mapping[str, OptionValue],
    *,
    allow_tf32: bool = False,
    threads: int = 0,
) -> Problem:
    """A problem, by the schema if the catalogue has the operation.

    Raises:
        InvalidProblemError: a name or value is not possible.
    """
    known = known_operation(name)
    if known is None:
        return Problem(name, tuple(dims.items()), dtype, tuple(options.items()), allow_tf32, threads)
    values: dict[str, Any] = {**dims, **options}
    if len(values) < len(dims) + len(options) or {"dtype", "allow_tf32", "threads", "self"} & set(values):
        raise InvalidProblemError(f"{name}: a name is used twice, or for something else than it means.")
    found: Problem = known.schema.problem(dtype=dtype, allow_tf32=allow_tf32, threads=threads, **values)
    return found


class RowFault(ValueError):
    """A value of a row is not what its name takes; the text says why."""


def typed(value: Any) -> Any:
    """A value of a table: what a text says, if it is a whole number or a flag."""
    if not isinstance(value, str):
        return value
    word = value.strip()
    if _WHOLE.fullmatch(word):
        return int(word)
    return word.lower() == "true" if word.lower() in ("true", "false") else word


def whole(name: str, value: Any) -> int:
    """A whole number.

    Raises:
        RowFault: it is none.
    """
    found = typed(value)
    # Parquet columns with gaps hold whole numbers as fractions.
    if isinstance(found, float) and found.is_integer() and abs(found) < 2**53:
        found = int(found)
    if type(found) is not int:
        raise RowFault(f"{name} is {shortened(value)}; it must be a whole number.")
    return found


def problem_of_facts(operation: str, facts: Mapping[str, Any]) -> Problem:
    """A problem from values by name, as a table's columns or a tuning key hold them.

    A name is ``dtype``, ``allow_tf32``, ``threads``, ``option.NAME`` (of an operation that the catalogue lacks), an
    option of the catalogue's schema, or else a dimension.

    Raises:
        RowFault: a value is not what its name takes.
        InvalidProblemError: the catalogue's schema refuses it.
    """
    known = known_operation(operation)
    options: dict[str, Any] = {}
    dims: dict[str, int] = {}
    kinds = {} if known is None else {option.name: option for option in known.schema.options}
    for name, value in facts.items():
        if name in ("dtype", "allow_tf32", "threads"):
            continue
        if name.startswith("option."):
            options[name.removeprefix("option.")] = typed(value)
        elif name in kinds:
            options[name] = typed(value)
        else:
            dims[name] = whole(name, value)
    allow_tf32 = typed(facts.get("allow_tf32", False))
    dtype = facts.get("dtype", "unknown" if known is None else "float32")
    if not isinstance(dtype, str) or not isinstance(allow_tf32, bool):
        raise RowFault(
            f"dtype is {shortened(dtype)} and allow_tf32 {shortened(allow_tf32)}; they must be a text and a flag."
        )
    return problem_of(
        operation,
        dims,
        dtype.strip(),
        options,
        allow_tf32=allow_tf32,
        threads=whole("threads", facts.get("threads", 0)),
    )


def check_device(file: str, recorded_name: str, device: Device) -> None:
    """Refuse a device of another architecture than the card that a driver's name says, if the name tells.

    Raises:
        ImportFileError: it is another one.
    """
    words = set(re.findall(r"[a-z0-9]+", recorded_name.lower()))
    cards = [
        card
        for card in CARDS
        if card.words and words.issuperset(card.words) and words.isdisjoint(card.other_words)
    ]
    if cards and device.architecture not in {card.architecture for card in cards}:
        known = ", ".join(card.name for card in cards)
        raise ImportFileError(
            file,
            f"it was measured on {shortened(recorded_name)} ({known}), but --device is {device.name} "
            f"({device.architecture}). Give the right --device.",
        )


def plain_configs(
    file: str, configs: Sequence[Mapping[str, Any]], where: Callable[[int], str]
) -> list[dict[str, ConfigValue]]:
    """Configs as candidates hold them. A parameter with fractions, nothing, or several types becomes text throughout.

    Args:
        file: named in errors.
        configs: parameter -> value of JSON.
        where: what a message calls a config, by its number.

    Raises:
        ImportFileError: a value is a list or an object.
    """
    kinds: dict[str, set[type]] = {}
    for number, config in enumerate(configs):
        for name, value in config.items():
            if not isinstance(value, str | int | float | None):
                raise ImportFileError(
                    file,
                    f"{where(number)}: {shortened(name)} is {shortened(value)}; it must be a number, a text or a flag.",
                )
            kinds.setdefault(name, set()).add(type(value))
    as_text = {name for name, found in kinds.items() if len(found) > 1 or found & {float, type(None)}}
    return [
        {
            name: json.dumps(value) if name in as_text and not isinstance(value, str) else value
            for name, value in config.items()
        }
        for config in configs
    ]


def samples_us_of(file: str, where: str, values: Any, scale: float) -> tuple[float, ...]:
    """A list of latencies in another unit, checked, in microseconds.

    Raises:
        ImportFileError: it is no list, or a value is not a positive number.
    """
    if not isinstance(values, list):
        raise ImportFileError(file, f"{where} is {shortened(values)}; it must be a list of latencies.")
    for number, value in enumerate(values):
        if type(value) not in (int, float) or not 0 < value * scale <= MAX_US:
            raise ImportFileError(
                file,
                f"{where}[{number}] is {shortened(value)}; a latency is a positive number of at most {MAX_US / scale:.3g}.",
            )
    return tuple(value * scale for value in values)


@dataclass
class _Group:
    """What was seen of one candidate on one problem."""

    problem: Problem
    candidate: Candidate
    samples_us: list[float] = field(default_factory=list)
    outcome: str = ""
    detail: str = ""
    failures: int = 0
    created_at: float = 0.0


class Records:
    """Gathers a file's measurements: repeats of one candidate on one problem become one record, in their order.

    Args:
        file: as the user wrote it.
        environment: the software, with the tool and the file as its source.
        protocol: the procedure, as the records name it.
        device: where it was measured.
        workload: the set of problems.
    """

    def __init__(
        self, file: str, *, environment: Environment, protocol: str, device: Device, workload: str
    ) -> None:
        self._file = file
        self._environment = environment
        self._protocol = protocol
        self._device = device
        self._workload = workload
        self._groups: dict[tuple[str, str], _Group] = {}
        self._rows = 0

    def add(
        self,
        problem: Problem,
        variant: str,
        config: Mapping[str, ConfigValue],
        *,
        where: str = "",
        line: int | None = None,
        samples_us: Sequence[float] = (),
        outcome: str = "ok",
        detail: str = "",
        created_at: float = 0.0,
    ) -> None:
        """Take one measurement.

        Raises:
            ImportFileError: the config is none that a candidate can have.
        """
        try:
            candidate = Candidate.of(variant, config)
        except InvalidRecordError as error:
            raise ImportFileError(
                self._file, f"{where}: {str(error)[:200]}" if where else str(error)[:200], line=line
            ) from error
        key = problem.key, candidate.key
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(problem, candidate)
        self._rows += 1
        group.created_at = max(group.created_at, created_at)
        if outcome == "ok":
            group.samples_us += samples_us
        else:
            group.failures += 1
            group.outcome = group.outcome or outcome
            group.detail = group.detail or detail

    def parsed(self) -> Parsed:
        """All of them as rows of the store's columns.

        Raises:
            ImportFileError: there is none.
        """
        if not self._groups:
            raise ImportFileError(self._file, "it holds no measurement.")
        return Parsed(
            source=self._environment.source,
            table=segments.table_of(map(self._record, self._groups.values())),
            rows=self._rows,
            problems=len({key for key, _ in self._groups}),
            # Repeats that failed while others worked are in no record.
            dropped=sum(group.failures for group in self._groups.values() if group.samples_us),
        )

    def _record(self, group: _Group) -> Measurement:
        ok = bool(group.samples_us)
        error_log = math.nan
        if len(group.samples_us) > 1:
            error_log = float(RaceResult(np.array(group.samples_us)[:, None]).error_log()[0])
        return Measurement(
            problem=group.problem,
            candidate=group.candidate,
            device=self._device.name,
            device_fingerprint=self._device.fingerprint,
            environment=self._environment,
            protocol=Protocol(self._protocol, error_log=error_log),
            samples_us=tuple(group.samples_us),
            outcome="ok" if ok else group.outcome,
            detail="" if ok else group.detail,
            workload=self._workload,
            created_at=group.created_at,
        )
