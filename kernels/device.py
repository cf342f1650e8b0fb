"""Devices: the hardware facts that decide which candidates are legal and how fast they can be."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from kernelcast.errors import InvalidRecordError

_COUNTS = (
    "cores",
    "warp_size",
    "max_threads_per_core",
    "registers_per_core",
    "shared_bytes_per_block",
    "shared_bytes_per_core",
    "l2_bytes",
    "llc_bytes",
    "memory_bytes",
)


@dataclass(frozen=True)
class Device:
    """The hardware facts of one device. A fact that is not known is 0.

    Attributes:
        name: a slug, such as ``"a100-sxm4-80gb"``: what users type, and never what identifies the device.
        kind: ``"gpu"`` or ``"cpu"``.
        vendor: ``"nvidia"``, ``"amd"``, ``"intel"``, ...
        architecture: ``"sm80"``, ``"gfx942"``, ``"x86_64-avx512"``, ...
        cores: streaming multiprocessors, compute units, or physical CPU cores.
        warp_size: threads that run in lockstep; 1 on a CPU.
        max_threads_per_core: resident threads of one streaming multiprocessor.
        registers_per_core: 32-bit registers of one streaming multiprocessor.
        shared_bytes_per_block: shared memory that one block may use (with opt-in).
        shared_bytes_per_core: shared memory of one streaming multiprocessor.
        l2_bytes: level-2 cache: of the whole GPU, or of one CPU core.
        llc_bytes: the last-level cache that a flush must exceed.
        memory_bytes: device memory.
        memory_bandwidth: bytes per second.
        clock_hz: boost clock.
        peak_flops: (dtype, FLOP/s), dense, without sparsity; ``"tf32"`` is float32 input on tensor cores.

    Raises:
        InvalidRecordError: a fact is of another type, negative or not finite.
    """

    name: str
    kind: str
    vendor: str
    architecture: str
    cores: int
    warp_size: int = 32
    max_threads_per_core: int = 0
    registers_per_core: int = 0
    shared_bytes_per_block: int = 0
    shared_bytes_per_core: int = 0
    l2_bytes: int = 0
    llc_bytes: int = 0
    memory_bytes: int = 0
    memory_bandwidth: float = 0.0
    clock_hz: float = 0.0
    peak_flops: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "kind", "vendor", "architecture"):
            if type(getattr(self, name)) is not str:
                raise InvalidRecordError(
                    f"Device {self.name!r}: {name} is {getattr(self, name)!r}; it must be a text."
                )
        if self.kind not in ("gpu", "cpu"):
            raise InvalidRecordError(f"Device {self.name!r} has kind {self.kind!r}; it must be gpu or cpu.")
        # One device, one fingerprint: whatever order or number type a file or a table wrote its facts in.
        for name in _COUNTS:
            object.__setattr__(self, name, int(self._amount(name, getattr(self, name), whole=True)))
        for name in ("memory_bandwidth", "clock_hz"):
            object.__setattr__(self, name, self._amount(name, getattr(self, name)))
        peaks = sorted(
            (dtype, self._amount(f"peak_flops of {dtype}", peak)) for dtype, peak in self.peak_flops
        )
        if len(dict(peaks)) < len(peaks):
            raise InvalidRecordError(f"Device {self.name!r} has two peak_flops of one dtype.")
        object.__setattr__(self, "peak_flops", tuple(peaks))
        if self.cores < 1:
            raise InvalidRecordError(f"Device {self.name!r} has {self.cores} cores; it must have at least 1.")

    def _amount(self, fact: str, value: Any, *, whole: bool = False) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0 or (whole and value != int(value)):
            wanted = "whole number" if whole else "number"
            raise InvalidRecordError(
                f"Device {self.name!r}: {fact} is {value!r}; it must be a finite {wanted} of at least 0."
            )
        return value if whole else float(value)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over every fact but the name: equal hardware is equal whatever it is called."""
        facts = asdict(self)
        del facts["name"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def flops_per_second(self, dtype: str, *, allow_tf32: bool = False) -> float:
        """Peak FLOP/s for a dtype; float32's where the dtype is not listed, and 0 where nothing is."""
        peaks = dict(self.peak_flops)
        if allow_tf32 and dtype == "float32" and "tf32" in peaks:
            return peaks["tf32"]
        return peaks.get(dtype, peaks.get("float32", 0.0))

    def to_dict(self) -> dict[str, Any]:
        """The device as plain JSON values; :meth:`from_dict` is its inverse."""
        return {**asdict(self), "peak_flops": dict(self.peak_flops)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """Read what :meth:`to_dict` wrote.

        Raises:
            InvalidRecordError: a field is missing, unknown, or of another type.
        """
        try:
            fields = dict(data)
            peaks = tuple(fields.pop("peak_flops").items())
            return cls(**fields, peak_flops=peaks)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InvalidRecordError(f"Not a device: {data!r} ({type(error).__name__}: {error}).") from error
