"""Import and export of the T4 format, in which auto-tuners exchange results: one problem on one device.

A file is one JSON object; each of its ``results`` has a ``configuration``, ``times`` with ``runtimes``, an ``invalidity``
(what went wrong, or ``"correct"``) and ``measurements``. ``metadata.timeunit`` names the unit; milliseconds where it does
not. Source of the format: kernel_tuner/schema/T4/1.0.0/results-schema.json of Kernel Tuner 1.0.

The format says neither operation, problem nor variant. They are made of the file's name, given, or read from the T1 file
that describes the space. An export of ours adds them (``metadata.kernelcast``, and ``kernelcast`` in each result with all
else that a record holds), where other readers pass over them: such a file comes back as the same records.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from kernelcast.datasets import segments
from kernelcast.datasets.imported import (
    MAX_JSON_BYTES,
    Records,
    operation_name,
    plain_configs,
    problem_of,
    read_json,
    samples_us_of,
    shortened,
    slug,
)
from kernelcast.datasets.importing import Importer, ImportOption, Parsed, register_importer
from kernelcast.datasets.journal import write_durably
from kernelcast.datasets.kernel_tuner import (
    FAILURES,
    OPERATION,
    created_at,
    kernel_operation,
    sized_problem,
)
from kernelcast.datasets.query import Conditions
from kernelcast.datasets.record import Environment, Measurement
from kernelcast.datasets.records_file import record_fault
from kernelcast.datasets.store import Store
from kernelcast.datasets.t1 import read_t1
from kernelcast.errors import ImportFileError, InvalidProblemError, InvalidRecordError, StoreError
from kernelcast.kernels import Device, Problem

#: What ``invalidity`` means. A config against the constraints was not run.
_OUTCOMES = {
    "correct": "ok",
    "compile": "compile_error",
    "runtime": "crash",
    "correctness": "wrong_result",
    "timeout": "timeout",
    "constraints": "out_of_resources",
}

#: An outcome as (invalidity, the word in the place of the time).
_EXPORTED = {
    "compile_error": ("compile", "CompilationFailedConfig"),
    "out_of_resources": ("runtime", "RuntimeFailedConfig"),
    "crash": ("runtime", "crash"),
    "wrong_result": ("correctness", "wrong_result"),
    "timeout": ("timeout", "timeout"),
}

#: Microseconds of each unit. The benchmark hub's own files spell the commonest one with one l.
_UNITS_US = {
    "nanoseconds": 1e-3,
    "ns": 1e-3,
    "microseconds": 1.0,
    "us": 1.0,
    "milliseconds": 1e3,
    "miliseconds": 1e3,
    "ms": 1e3,
    "seconds": 1e6,
    "s": 1e6,
}


@register_importer
class T4(Importer):
    """Files of results in the T4 format."""

    name = "t4"
    doc = "Results in the T4 format of auto-tuners (JSON); plain, .gz or in a .zip. Each file becomes an operation."
    example = "convolution_milo_A100_T4.json.gz --device a100 --workload benchmark-hub"
    options = (
        OPERATION,
        ImportOption(
            "space",
            "The T1 file of the space, which says kernel, size and what configs there are; those of the results are checked.",
        ),
        ImportOption("problem-size", "The problem's size, which the format does not say: X, X,Y or X,Y,Z."),
    )

    max_bytes = MAX_JSON_BYTES

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__(given)
        self._space = read_t1(given["space"]) if "space" in given else None

    def parse(self, file: str, *, device: Device, workload: str, on_bytes: Callable[[int], None]) -> Parsed:
        content, data = read_json(file, on_bytes=on_bytes, max_bytes=self.max_bytes)
        results = data.get("results") if isinstance(data, dict) else None
        if not isinstance(results, list):
            raise ImportFileError(file, "it is no T4 file: its JSON has no list of results.")
        metadata = data.get("metadata", {})
        if not isinstance(metadata, dict):
            raise ImportFileError(file, f"metadata is {shortened(metadata)}; it must be an object.")
        unit = metadata.get("timeunit", "milliseconds")
        if not isinstance(unit, str) or unit not in _UNITS_US:
            raise ImportFileError(
                file, f"metadata.timeunit is {shortened(unit)}; it must be one of {', '.join(_UNITS_US)}."
            )
        exported = metadata.get("kernelcast")
        for number, result in enumerate(results):
            if not isinstance(result, dict) or not isinstance(result.get("configuration"), dict):
                raise ImportFileError(file, f"results[{number}] has no configuration.")
        if (
            isinstance(exported, dict)
            and not self.given
            and results
            and all(isinstance(each.get("kernelcast"), dict) for each in results)
        ):
            stated = exported.get("problem")
            return _own_records(file, content.name, stated, results, device, workload)
        problem = self._problem(file, content.name, exported)
        configs = [result["configuration"] for result in results]
        for number, config in enumerate(configs if self._space else ()):
            fault = self._space.fault(config) if self._space else ""
            if fault and results[number].get("invalidity") != "constraints":
                raise ImportFileError(
                    file,
                    f"results[{number}].configuration is not of the space in {self.given['space']}: {fault}.",
                )
        if exported is None:
            configs = plain_configs(file, configs, lambda number: f"results[{number}].configuration")
        records = Records(
            file,
            environment=Environment(source=f"{self.name}:{content.name}"),
            protocol=self.name,
            device=device,
            workload=workload,
        )
        for number, (result, config) in enumerate(zip(results, configs, strict=True)):
            where = f"results[{number}]"
            variant = result.get("variant", "t4")
            if not isinstance(variant, str) or not variant:
                raise ImportFileError(
                    file, f"{where}: the variant is {shortened(variant)}; it must be a text."
                )
            outcome, detail = _outcome(file, where, result)
            records.add(
                problem,
                variant,
                config,
                where=where,
                samples_us=_samples_us(file, where, result, _UNITS_US[unit]) if outcome == "ok" else (),
                outcome=outcome,
                detail=detail,
                created_at=created_at(file, where, result.get("timestamp")),
            )
        return records.parsed()

    def _problem(self, file: str, name: str, exported: Any) -> Problem:
        """The file's problem: as an export says, or from the options and the file's name."""
        if exported is not None and not self.given:
            try:
                found = Problem.from_dict(exported["problem"])
                return problem_of(
                    found.operation,
                    dict(found.dims),
                    found.dtype,
                    dict(found.options),
                    allow_tf32=found.allow_tf32,
                    threads=found.threads,
                )
            except (KeyError, TypeError, InvalidProblemError) as error:
                raise ImportFileError(
                    file, f"metadata.kernelcast holds no problem: {shortened(str(error))}."
                ) from error
        otherwise = f"t4_{slug(name.split('.')[0]).removesuffix('_t4')}"
        if self._space is not None:
            otherwise = kernel_operation(self._space.kernel)
        size = self.given.get("problem-size")
        return sized_problem(
            file,
            operation_name(self.given.get("operation"), otherwise),
            size.split(",") if size is not None else self._space.size if self._space else None,
        )


def _own_records(
    file: str, name: str, problem: Any, results: list[dict[str, Any]], device: Device, workload: str
) -> Parsed:
    """The records of an export of ours, as they were but for the workload."""
    records: dict[str, Measurement] = {}
    for number, result in enumerate(results):
        where = f"results[{number}]"
        times, rest = result.get("times"), result["kernelcast"]
        try:
            record = Measurement.from_dict(
                {
                    **rest,
                    "problem": problem,
                    "candidate": {"variant": result["variant"], "config": result["configuration"]},
                    "samples_us": times.get("runtimes", []) if isinstance(times, dict) else None,
                    "workload": workload,
                }
            )
            fault = record_fault(record)
        except (InvalidRecordError, KeyError, TypeError) as error:
            raise ImportFileError(file, f"{where} is no record: {shortened(str(error))}.") from error
        if not fault and record.id != rest.get("id"):
            fault = f"the id {shortened(rest.get('id'))} is not that of the record; the file was changed."
        if not fault and record.device_fingerprint != device.fingerprint:
            fault = (
                f"it was measured on {shortened(record.device)} ({shortened(record.device_fingerprint)}), but --device "
                f"is {device.name} ({device.fingerprint})."
            )
        if fault:
            raise ImportFileError(file, f"{where}: {fault}")
        records[record.id] = record
    return Parsed(
        source=name,
        table=segments.table_of(records.values()),
        rows=len(results),
        problems=1,
        dropped=0,
        identity=file,
    )


def export_t4(store: Store, path: Path, *, overwrite: bool = False, **conditions: Unpack[Conditions]) -> int:
    """Write the records of one problem on one device to a file in the T4 format, in microseconds.

    Returns:
        The number of records written.

    Raises:
        StoreError: the name does not end in .json; the file is there and ``overwrite`` is false; or the records are
            of no problem, of several, or of several devices.
    """
    if path.suffix != ".json":
        raise StoreError(f"{path} ends in {path.suffix or 'nothing'}; a T4 export is a .json file.")
    if path.exists() and not overwrite:
        raise StoreError(f"{path} is there already. Choose another name, or allow it to be overwritten.")
    records = list(store.measurements(**conditions))
    problems = {record.problem.key for record in records}
    devices = sorted({record.device for record in records})
    if len(problems) != 1 or len({record.device_fingerprint for record in records}) != 1:
        raise StoreError(
            f"A T4 file holds one problem on one device; the conditions leave {len(problems)} problems on "
            f"{len(devices)} devices ({', '.join(devices) or 'none'}). Narrow them, or export to .parquet."
        )
    data = {
        "schema_version": "1.0.0",
        "metadata": {
            "timeunit": "microseconds",
            "kernelcast": {"problem": records[0].problem.to_dict(), "device": devices[0]},
        },
        "results": [_result(record) for record in records],
    }
    try:
        write_durably(path, json.dumps(data) + "\n")
    except OSError as error:
        raise StoreError(f"Cannot write {path}: {error.strerror or error}.") from error
    return len(records)


def _result(record: Measurement) -> dict[str, Any]:
    ok = record.outcome == "ok"
    invalidity, word = ("correct", "") if ok else _EXPORTED[record.outcome]
    timestamp = {}
    # A time that no calendar has stands in the record alone.
    with contextlib.suppress(ValueError, OverflowError, OSError):
        if record.created_at:
            timestamp = {"timestamp": datetime.fromtimestamp(record.created_at, UTC).isoformat()}
    stated = ("problem", "candidate", "samples_us", "workload")
    return {
        **timestamp,
        "kernelcast": {name: value for name, value in record.to_dict().items() if name not in stated},
        "configuration": record.candidate.parameters,
        "variant": record.candidate.variant,
        "times": {"runtimes": list(record.samples_us)} if ok else {},
        "invalidity": invalidity,
        "correctness": int(ok),
        "measurements": [
            {"name": "time", "value": record.latency_us if ok else word, "unit": "us" if ok else ""}
        ],
        "objectives": ["time"],
    }


def _outcome(file: str, where: str, result: dict[str, Any]) -> tuple[str, str]:
    """(outcome, what the file says of a failure). A tool's own word says more than the invalidity."""
    invalidity = result.get("invalidity")
    if not isinstance(invalidity, str) or invalidity not in _OUTCOMES:
        raise ImportFileError(
            file,
            f"{where}: invalidity is {shortened(invalidity)}; it must be one of {', '.join(_OUTCOMES)}.",
        )
    outcome = _OUTCOMES[invalidity]
    if outcome == "ok":
        # What ran to the end with a wrong result may be told by the second field alone.
        wrong = result.get("correctness", 1) == 0
        return ("wrong_result", "correctness is 0") if wrong else ("ok", "")
    word = _time(result)
    if isinstance(word, str) and word in FAILURES:
        return FAILURES[word], word
    return outcome, invalidity


def _samples_us(file: str, where: str, result: dict[str, Any], scale: float) -> tuple[float, ...]:
    times = result.get("times", {})
    runtimes = times.get("runtimes") if isinstance(times, dict) else times
    if runtimes is None or runtimes == []:
        return samples_us_of(file, f"{where}: the measured time", [_time(result)], scale)
    return samples_us_of(file, f"{where}.times.runtimes", runtimes, scale)


def _time(result: dict[str, Any]) -> Any:
    """The value of the measurement called time; None if there is none."""
    measurements = result.get("measurements")
    for each in measurements if isinstance(measurements, list) else []:
        if isinstance(each, dict) and each.get("name") == "time":
            return each.get("value")
    return None
