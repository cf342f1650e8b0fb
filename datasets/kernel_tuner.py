"""Import of Kernel Tuner cache files: one kernel and problem size, every config that was tried, on one device.

A file is one JSON object (``device_name``, ``kernel_name``, ``problem_size``, ``tune_params_keys``, ``cache``).
``cache`` maps a config to an entry with the parameters, ``time`` (the mean in milliseconds, or a word for a failure) and
``times``. Kernel Tuner appends entries while it runs, and does not require the two last brackets.
Source of the format: kernel_tuner/schema/cache and ``process_cache`` in kernel_tuner/util.py of Kernel Tuner 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kernelcast.datasets.imported import (
    MAX_JSON_BYTES,
    Records,
    check_device,
    operation_name,
    plain_configs,
    problem_of,
    read_json,
    samples_us_of,
    shortened,
    slug,
)
from kernelcast.datasets.importing import Importer, ImportOption, Parsed, register_importer
from kernelcast.datasets.record import Environment
from kernelcast.errors import ImportFileError, InvalidProblemError
from kernelcast.kernels import Device, Problem

#: What Kernel Tuner's words for a failure mean. It calls invalid what has more threads than a block may have, and lets a
#: run fail only where the launch lacks registers or local memory: other errors end the tuning.
FAILURES = {
    "InvalidConfig": "out_of_resources",
    "CompilationFailedConfig": "compile_error",
    "RuntimeFailedConfig": "out_of_resources",
}

OPERATION = ImportOption(
    "operation", "The operation's name in the store. [default: made of the kernel's or the file's name]"
)

#: Kernel Tuner's problem size is that of the grid.
_DIMS = ("x", "y", "z")

#: One for a file that does not say the size.
_NO_SIZE = {"x": 1}

_US_PER_MS = 1e3


@register_importer
class KernelTuner(Importer):
    """Files that ``kernel_tuner.tune_kernel(cache=...)`` wrote."""

    name = "kernel-tuner"
    doc = "Cache files of Kernel Tuner (JSON); plain, .gz or in a .zip. Each kernel becomes an operation of its own."
    example = "gemm_RTX_3090.json.gz --device rtx-3090 --workload benchmark-hub"
    options = (OPERATION,)
    max_bytes = MAX_JSON_BYTES

    def parse(self, file: str, *, device: Device, workload: str, on_bytes: Callable[[int], None]) -> Parsed:
        content, data = read_json(file, on_bytes=on_bytes, max_bytes=self.max_bytes, unclosed="}}")
        if not isinstance(data, dict):
            raise ImportFileError(file, "it is no Kernel Tuner cache: its JSON is no object.")
        kernel, cache = _field(file, data, "kernel_name", str), _field(file, data, "cache", dict)
        check_device(file, _field(file, data, "device_name", str), device)
        parameters = _parameters(file, data)
        operation = operation_name(self.given.get("operation"), kernel_operation(kernel))
        problem = sized_problem(file, operation, data.get("problem_size"))
        entries = list(cache.items())

        def where(number: int) -> str:
            return f"cache[{shortened(entries[number][0])}]"

        for number, (_, entry) in enumerate(entries):
            missing = (
                parameters
                if not isinstance(entry, dict)
                else [name for name in parameters if name not in entry]
            )
            if missing:
                raise ImportFileError(file, f"{where(number)} lacks {', '.join(map(shortened, missing))}.")
        configs = plain_configs(
            file, [{name: entry[name] for name in parameters} for _, entry in entries], where
        )
        records = Records(
            file,
            environment=Environment(source=f"{self.name}:{content.name}"),
            protocol=self.name,
            device=device,
            workload=workload,
        )
        objective = data.get("objective", "time")
        for number, ((_, entry), config) in enumerate(zip(entries, configs, strict=True)):
            _add(file, where(number), records, problem, config, entry, objective)
        return records.parsed()


def kernel_operation(kernel: str) -> str:
    """The operation of a kernel that is not of the catalogue: ``"convolution_kernel"`` -> ``"kt_convolution"``."""
    return f"kt_{slug(kernel).removesuffix('_kernel')}"


def created_at(file: str, where: str, timestamp: Any) -> float:
    """Seconds since the epoch of an ISO time (of UTC, where it does not say); 0 where there is none.

    Raises:
        ImportFileError: it is no time.
    """
    if timestamp is None:
        return 0.0
    try:
        found = datetime.fromisoformat(timestamp)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError) as error:
        raise ImportFileError(
            file,
            f"{where}: the timestamp is {shortened(timestamp)}; it must be a time such as 2023-12-22 09:54.",
        ) from error


def sized_problem(file: str, operation: str, size: Any) -> Problem:
    """The one problem of a file, from what it says of the size: numbers, an expression, or nothing.

    Raises:
        ImportFileError: a size is not possible.
    """
    values = size if isinstance(size, list) else [] if size is None else [size]
    if not all(type(value) in (int, str) for value in values) or len(values) > len(_DIMS):
        raise ImportFileError(
            file, f"the problem size is {shortened(size)}; it must be one to three whole numbers."
        )
    texts = [str(value).strip() for value in values]
    try:
        if texts and all(text.isascii() and text.isdecimal() and len(text) < 20 for text in texts):
            if not all(map(int, texts)):
                raise InvalidProblemError("a size is 0; it must be at least 1.")
            return problem_of(operation, dict(zip(_DIMS, map(int, texts), strict=False)), "unknown", {})
        # An expression of the parameters, or a function of the tuning script: it names the problem as well.
        options = {"problem_size": ",".join(texts)} if texts else {}
        return problem_of(operation, _NO_SIZE, "unknown", options)
    except InvalidProblemError as error:
        raise ImportFileError(file, f"the problem size is {shortened(size)}: {error}") from error


def _field(file: str, data: dict[str, Any], name: str, kind: type[str | dict[str, Any] | list[str]]) -> Any:
    value = data.get(name)
    if not isinstance(value, kind):
        words = {"str": "a text", "dict": "an object", "list": "a list"}
        raise ImportFileError(
            file,
            f"it is no Kernel Tuner cache: {name} is {shortened(value)}; it must be {words[kind.__name__]}.",
        )
    return value


def _parameters(file: str, data: dict[str, Any]) -> list[str]:
    names: list[str] = _field(file, data, "tune_params_keys", list)
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ImportFileError(
            file, f"tune_params_keys is {shortened(names)}; it must name the parameters, each once."
        )
    return names


def _add(
    file: str,
    where: str,
    records: Records,
    problem: Problem,
    config: dict[str, Any],
    entry: dict[str, Any],
    objective: Any,
) -> None:
    """Take one entry. The word for a failure stands where the objective would."""
    if "time" not in entry and objective not in entry:
        raise ImportFileError(file, f"{where} has no time.")
    words = [entry[name] for name in ("time", objective) if isinstance(entry.get(name), str)]
    when = created_at(file, where, entry.get("timestamp"))
    if words:
        if words[0] not in FAILURES:
            raise ImportFileError(
                file,
                f"{where}: time is {shortened(words[0])}; it must be a number of milliseconds, or one of "
                f"{', '.join(FAILURES)}.",
            )
        outcome = FAILURES[words[0]]
        records.add(
            problem, "kernel_tuner", config, where=where, outcome=outcome, detail=words[0], created_at=when
        )
        return
    times = entry.get("times")
    field, values = ("time", [entry.get("time", math.nan)]) if not times else ("times", times)
    samples_us = samples_us_of(file, f"{where}.{field}", values, _US_PER_MS)
    records.add(problem, "kernel_tuner", config, where=where, samples_us=samples_us, created_at=when)
