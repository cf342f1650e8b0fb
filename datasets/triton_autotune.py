"""Import of what ``triton.autotune(cache_results=True)`` keeps: one kernel and tuning key, every config that was timed.

Triton writes ``<hash>/<kernel>.autotune.json`` into its cache, one file a key::

    {"key": [1024, 512, 64, "torch.float16", "torch.float16"],
     "configs_timings": [[{"kwargs": {"BLOCK_M": 64}, "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": null,
                           "pre_hook": null, "ir_override": null}, [0.25, 0.24, 0.27]], ...]}

``key`` has the values of the arguments that ``autotune(key=[...])`` names, then the dtype of every tensor argument. The
timings are milliseconds: the median and the quantiles 0.2 and 0.8, or one number where ``do_bench`` was the user's own;
infinite for a config that did not compile or fit. Source of the format: triton/runtime/autotuner.py of Triton 3.9
(``Autotuner.check_disk_cache``).

The file names neither the arguments nor the GPU, and its folder's hash tells of the configs and the compiler alone: what
the values are, the operation and the device must be said.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernelcast.datasets.imported import (
    MAX_JSON_BYTES,
    Records,
    RowFault,
    known_operation,
    plain_configs,
    problem_of_facts,
    read_json,
    samples_us_of,
    shortened,
    slug,
)
from kernelcast.datasets.importing import Importer, ImportOption, Parsed, register_importer
from kernelcast.datasets.record import Environment
from kernelcast.errors import ImportFileError, InvalidProblemError, SettingsError
from kernelcast.kernels import Device, Problem, variants

_US_PER_MS = 1e3

#: How dtypes stand in a key.
_DTYPE = "torch."

#: Numbers of timings that a config may have: one, or the median and two quantiles.
_TIMINGS = (1, 3)

#: Place of a value in ``--key`` that is no part of the problem.
_PASSED_OVER = "-"


@dataclass(frozen=True)
class _Key:
    """What ``--key`` says: the names of the first values, and facts that are the same in every file."""

    names: tuple[str, ...]
    constants: dict[str, str]


@register_importer
class TritonAutotune(Importer):
    """Files that Triton's autotuner keeps in Triton's cache."""

    name = "triton-autotune"
    doc = (
        "Timings that triton.autotune keeps with cache_results (*.autotune.json); plain, .gz or in a .zip. Each is one "
        "tuning key of one kernel."
    )
    example = "~/.triton/cache/*/matmul_kernel.autotune.json --operation gemm --key m,n,k --device h100 --workload mine"
    options = (
        ImportOption(
            "operation", "The operation that the kernel computes. [default: made of the file's name]"
        ),
        ImportOption(
            "key",
            "What the values of autotune's key are, in order: NAME,NAME,...; - passes one over, NAME:=VALUE adds a fact.",
        ),
        ImportOption("variant", "The variant that the kernel is. [default: triton_ and the file's name]"),
    )
    max_bytes = MAX_JSON_BYTES

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__(given)
        self._key = None if "key" not in given else _read_key(given["key"])
        for name in ("operation", "variant"):
            value = given.get(name)
            if value is not None and value != slug(value) and known_operation(value) is None:
                raise SettingsError(
                    f"--{name} is {value!r}; it takes lower-case letters, digits and underscores."
                )

    def parse(self, file: str, *, device: Device, workload: str, on_bytes: Callable[[int], None]) -> Parsed:
        content, data = read_json(file, on_bytes=on_bytes, max_bytes=self.max_bytes)
        if not isinstance(data, dict):
            raise ImportFileError(file, "it is no file of Triton's autotuner: its JSON is no object.")
        timings = data.get("configs_timings")
        if not isinstance(timings, list) or not isinstance(data.get("key"), list):
            raise ImportFileError(
                file, "it is no file of Triton's autotuner: it must have the lists key and configs_timings."
            )
        kernel = slug(content.name.split(".")[0])
        operation = self.given.get("operation", f"triton_{kernel.removesuffix('_kernel')}")
        variant = self.given.get("variant", f"triton_{kernel.removeprefix('triton_')}")
        if "variant" not in self.given and known_operation(operation) and variant in variants(operation):
            raise SettingsError(
                f"{operation} has a variant {variant} of its own, which the kernel in {file} need not be. Name the "
                "kernel's with --variant."
            )
        problem = self._problem(file, operation, data["key"])
        configs = plain_configs(
            file,
            [_config(file, number, pair) for number, pair in enumerate(timings)],
            lambda number: f"configs_timings[{number}]",
        )
        # All files of one kernel are one source: what tells them apart is their content.
        digest = hashlib.sha256(content.data).hexdigest()[:16]
        records = Records(
            file,
            environment=Environment(source=f"{self.name}:{content.name}", variant_hash=digest),
            protocol=self.name,
            device=device,
            workload=workload,
        )
        for number, (pair, config) in enumerate(zip(timings, configs, strict=True)):
            where = f"configs_timings[{number}]"
            values = pair[1] if isinstance(pair[1], list) else [pair[1]]
            if len(values) not in _TIMINGS:
                raise ImportFileError(
                    file,
                    f"{where} has {len(values)} timings; it must have the median and two quantiles, or one time.",
                )
            if all(value == math.inf for value in values):
                # Shared memory or registers that do not fit, by far the commonest; an assertion of the kernel's own; or
                # an error of the assembler.
                records.add(
                    problem,
                    variant,
                    config,
                    where=where,
                    outcome="out_of_resources",
                    detail="recorded as inf",
                )
                continue
            samples_us = samples_us_of(file, f"{where}: timing", values, _US_PER_MS)
            records.add(problem, variant, config, where=where, samples_us=samples_us)
        return replace(records.parsed(), identity=digest)

    def _problem(self, file: str, operation: str, key: list[Any]) -> Problem:
        """The problem of a file's key.

        Raises:
            ImportFileError: ``--key`` does not say what each value is, or the values make no problem.
        """
        named = self._key or _Key((), {})
        seen = f"its key has {len(key)} values, {shortened(key)}"
        if len(named.names) > len(key):
            raise ImportFileError(file, f"{seen}; --key names {len(named.names)}. Name these, in order.")
        rest = key[len(named.names) :]
        dtypes = [value.removeprefix(_DTYPE) for value in rest if _is_dtype(value)]
        unnamed = len(rest) - len(dtypes)
        if unnamed:
            raise ImportFileError(
                file,
                f"{seen}, and no names of them. Say with --key what each of the first {len(key) - len(dtypes)} is, as "
                "autotune(key=[...]) lists them: --key m,n,k, with - for one that is no part of the problem.",
            )
        facts: dict[str, Any] = dict(named.constants)
        for name, value in zip(named.names, key, strict=False):
            if name != _PASSED_OVER:
                facts[name] = _fact(name, value)
        if "dtype" not in facts:
            if known_operation(operation) is not None and len(set(dtypes)) != 1:
                raise ImportFileError(
                    file,
                    f"{seen}, with {'several dtypes' if dtypes else 'no dtype'}. Say which is that of the problem: name "
                    "its place dtype in --key and pass over the others with -, or add dtype:=float16.",
                )
            if dtypes:
                facts["dtype"] = dtypes[0]
            if len(set(dtypes)) > 1:
                facts["option.dtypes"] = ",".join(dtypes)
        try:
            return problem_of_facts(operation, facts)
        except (InvalidProblemError, RowFault) as error:
            raise ImportFileError(file, f"{seen}, of which --key makes no problem: {error}") from error


def _read_key(text: str) -> _Key:
    names: list[str] = []
    constants: dict[str, str] = {}
    for word in text.split(","):
        name, constant, value = (part.strip() for part in word.partition(":="))
        if not name or "=" in name or (constant and (not value or name == _PASSED_OVER)):
            raise SettingsError(f"--key: {word!r} must be NAME, NAME:=VALUE, or - for what is passed over.")
        if name != _PASSED_OVER and (name in names or name in constants):
            raise SettingsError(f"--key gives {name} twice.")
        if constant:
            constants[name] = value
        else:
            names.append(name)
    return _Key(tuple(names), constants)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_DTYPE)


def _fact(name: str, value: Any) -> Any:
    """A value of a key as a problem holds it; what is neither number, text nor flag becomes text."""
    if _is_dtype(value):
        return value.removeprefix(_DTYPE)
    return json.dumps(value) if name.startswith("option.") and type(value) not in (int, str, bool) else value


def _config(file: str, number: int, pair: Any) -> dict[str, Any]:
    """The parameters of a config: its keywords, and those of the compiler that are set."""
    where = f"configs_timings[{number}]"
    if not isinstance(pair, list) or len(pair) != 2:
        raise ImportFileError(file, f"{where} is {shortened(pair)}; it must be a config with its timings.")
    config = pair[0]
    keywords = config.get("kwargs") if isinstance(config, dict) else None
    if not isinstance(keywords, dict):
        raise ImportFileError(file, f"{where}: the config is {shortened(config)}; it must have kwargs.")
    options = {name: value for name, value in config.items() if name != "kwargs" and value is not None}
    twice = sorted(set(options) & set(keywords))
    if twice or "pre_hook" in options:
        raise ImportFileError(
            file,
            f"{where}: {', '.join(twice) or 'pre_hook'} is {'given twice' if twice else 'set'}, which Triton "
            "never writes. The file was changed.",
        )
    return {**keywords, **options}
