"""The measurement record: one candidate on one problem on one device in one environment, with every sample."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kernelcast.datasets.migrations import SCHEMA_VERSION as SCHEMA_VERSION
from kernelcast.datasets.migrations import migrate_record, require_readable
from kernelcast.errors import InvalidProblemError, InvalidRecordError
from kernelcast.kernels import Candidate, Problem

OUTCOMES = ("ok", "compile_error", "out_of_resources", "wrong_result", "timeout", "crash")


def problem_id(problem: Problem) -> str:
    """16 hexadecimal digits that name a problem: a hash of its key."""
    return hashlib.sha256(problem.key.encode()).hexdigest()[:16]


def shape_id(problem: Problem) -> str:
    """16 hexadecimal digits that name an operation and its dimensions, so whatever the dtype and the layout.

    Data are split by it: what is learned of a shape in one dtype gives the same shape in another away.
    """
    facts = json.dumps([problem.operation, dict(problem.shape)], separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def record_id(problem_key: str, candidate_key: str, device_fingerprint: str, environment: Environment) -> str:
    """32 hexadecimal digits that name the problem, candidate, device and environment of a record."""
    facts = [problem_key, candidate_key, device_fingerprint, environment.to_dict()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Environment:
    """The software facts of a measurement. A fact that is not known is ``"unknown"``.

    Attributes:
        source: who measured: ``"kernelcast"``, or the tool and file that a record was imported from.
        torch: version of torch, with its build tag.
        triton: version of triton.
        runtime: CUDA or ROCm version that torch was built for, ``"cpu"`` on a CPU.
        system: operating system and machine.
        variant_hash: :meth:`kernelcast.kernels.Variant.source_hash` of the variant that ran.
    """

    source: str = "kernelcast"
    torch: str = "unknown"
    triton: str = "unknown"
    runtime: str = "unknown"
    system: str = "unknown"
    variant_hash: str = "unknown"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not str:
                raise InvalidRecordError(f"{name} of an environment is {value!r}; it must be a text.")

    def to_dict(self) -> dict[str, str]:
        """The facts as plain JSON values."""
        # The fields are flat: dataclasses.asdict would copy each deeply, at ten times the cost.
        return dict(vars(self))

    @classmethod
    def current(cls, variant_hash: str, *, device_kind: str) -> Environment:
        """The environment of this process, for one variant."""
        torch_version, triton_version, runtime, system = _software(device_kind)
        return cls(
            torch=torch_version,
            triton=triton_version,
            runtime=runtime,
            system=system,
            variant_hash=variant_hash,
        )


@dataclass(frozen=True)
class Protocol:
    """How the samples were taken.

    Attributes:
        name: the procedure and its version, such as ``"interleaved-rounds-1"``.
        cache: ``"warm"`` (back to back), ``"cold"`` (the last-level cache flushed before each sample), ``"unknown"``.
        dispatch: ``"eager"``, ``"graph"`` (replayed from a CUDA graph) or ``"unknown"``.
        flush_bytes: bytes written before each sample to empty the caches.
        inputs: distribution of the input values, ``"normal"`` or ``"unknown"``.
        seed: of the inputs and of the order of the rounds.
        error_log: standard error of the log latency, from the spread of the samples; NaN if fewer than two.
    """

    name: str
    cache: str = "unknown"
    dispatch: str = "unknown"
    flush_bytes: int = 0
    inputs: str = "unknown"
    seed: int = 0
    error_log: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """The protocol as plain JSON values: an unknown ``error_log`` is None."""
        return {**vars(self), "error_log": None if math.isnan(self.error_log) else self.error_log}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """Read what :meth:`to_dict` wrote.

        Raises:
            TypeError, ValueError, KeyError: a field is missing, unknown, or of another type.
        """
        error_log = data["error_log"]
        found = cls(**{**data, "error_log": math.nan if error_log is None else float(error_log)})
        kinds = {"name": str, "cache": str, "dispatch": str, "inputs": str, "flush_bytes": int, "seed": int}
        for name, kind in kinds.items():
            if type(getattr(found, name)) is not kind:
                raise TypeError(
                    f"{name} of the protocol is {getattr(found, name)!r}; it must be {kind.__name__}"
                )
        if not (math.isnan(found.error_log) or 0 <= found.error_log < math.inf):
            raise ValueError(f"error_log of the protocol is {error_log!r}; it must be a number of at least 0")
        return found


@dataclass(frozen=True)
class Measurement:
    """What happened when one candidate ran on one problem.

    Attributes:
        problem: what was computed.
        candidate: how.
        device: the device's name.
        device_fingerprint: what identifies the device: :attr:`kernelcast.kernels.Device.fingerprint`.
        environment: the software.
        protocol: how the samples were taken.
        samples_us: every sample in microseconds, in the order taken; empty unless ``outcome`` is ``"ok"``.
        outcome: one of :data:`OUTCOMES`. A failure is an outcome, never a magic time.
        detail: for a failure, what the error said.
        workload: the set of problems this one was taken from; not part of the identity.
        created_at: seconds since the epoch, 0 if unknown; not part of the identity.

    Raises:
        InvalidRecordError: an unknown outcome, ``ok`` without samples, a failure with some, or a sample that is not
            a positive finite number.
    """

    problem: Problem
    candidate: Candidate
    device: str
    device_fingerprint: str
    environment: Environment
    protocol: Protocol
    samples_us: tuple[float, ...] = ()
    outcome: str = "ok"
    detail: str = ""
    workload: str = ""
    created_at: float = 0.0

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise InvalidRecordError(f"Outcome {self.outcome!r} is none of {', '.join(OUTCOMES)}.")
        if (self.outcome == "ok") != bool(self.samples_us):
            raise InvalidRecordError(
                f"A measurement with outcome {self.outcome!r} has {len(self.samples_us)} samples; "
                "ok needs at least one, a failure has none."
            )
        for sample in self.samples_us:
            if not (math.isfinite(sample) and sample > 0):
                raise InvalidRecordError(f"A latency of {sample!r} us is not a positive finite number.")

    @cached_property
    def id(self) -> str:
        """32 hexadecimal digits that name the problem, candidate, device and environment."""
        return record_id(self.problem.key, self.candidate.key, self.device_fingerprint, self.environment)

    @property
    def latency_us(self) -> float:
        """The median of the samples; NaN for a failure."""
        return statistics.median(self.samples_us) if self.samples_us else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values (``id`` included, for readers); :meth:`from_dict` is its inverse."""
        return {
            "schema": SCHEMA_VERSION,
            "id": self.id,
            "problem": self.problem.to_dict(),
            "candidate": {"variant": self.candidate.variant, "config": self.candidate.parameters},
            "device": self.device,
            "device_fingerprint": self.device_fingerprint,
            "environment": self.environment.to_dict(),
            "protocol": self.protocol.to_dict(),
            "samples_us": list(self.samples_us),
            "outcome": self.outcome,
            "detail": self.detail,
            "workload": self.workload,
            "created_at": self.created_at,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Read what :meth:`to_dict` wrote.

        Raises:
            InvalidRecordError: a field is missing, of another type, or contradicts another; or the schema is newer.
        """
        try:
            schema = int(data["schema"])
            require_readable(schema, "The record", InvalidRecordError)
            data = migrate_record(data, schema)
            return cls(
                problem=Problem.from_dict(data["problem"]),
                candidate=Candidate.of(data["candidate"]["variant"], dict(data["candidate"]["config"])),
                device=str(data["device"]),
                device_fingerprint=str(data["device_fingerprint"]),
                environment=Environment(**data["environment"]),
                protocol=Protocol.from_dict(data["protocol"]),
                samples_us=tuple(float(sample) for sample in data["samples_us"]),
                outcome=str(data["outcome"]),
                detail=str(data["detail"]),
                workload=str(data["workload"]),
                created_at=float(data["created_at"]),
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            InvalidProblemError,
        ) as error:
            raise InvalidRecordError(f"Not a measurement ({type(error).__name__}: {error}).") from error


@lru_cache(maxsize=2)
def _software(device_kind: str) -> tuple[str, str, str, str]:
    """Versions of torch, triton, the runtime and the system. Reads torch only where it is imported already."""
    runtime = "cpu"
    if device_kind == "gpu":
        torch = sys.modules.get("torch")
        if torch is not None:
            runtime = f"rocm-{torch.version.hip}" if torch.version.hip else f"cuda-{torch.version.cuda}"
        else:
            runtime = "unknown"
    return (
        _installed("torch"),
        _installed("triton"),
        runtime,
        f"{platform.system()}-{platform.machine()}".lower(),
    )


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
