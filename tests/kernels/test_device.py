"""Device records: one piece of hardware has one fingerprint, and facts that make no sense are refused."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from cases import for_each

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels import Device

GPU = Device(
    "toy", "gpu", "nvidia", "sm80", 108, 32, 2048, 65536, 166_912, 167_936, 2**20, 2**22, 2**34, 2e12, 1.4e9,
    (("float32", 2e13), ("tf32", 1e14), ("float16", 3e14)),
)  # fmt: skip


def test_every_fact_but_the_name_changes_the_fingerprint():
    assert dataclasses.replace(GPU, name="other").fingerprint == GPU.fingerprint
    changes = {
        "kind": "cpu", "vendor": "amd", "architecture": "sm90", "peak_flops": (("float32", 1e13),),
    }  # fmt: skip
    for field in dataclasses.fields(Device):
        if field.name == "name":
            continue
        value = changes.get(field.name, getattr(GPU, field.name))
        if field.name not in changes:
            value += 1
        assert dataclasses.replace(GPU, **{field.name: value}).fingerprint != GPU.fingerprint, field.name


def test_the_type_and_order_of_numbers_do_not_count():
    facts = GPU.to_dict()
    loose = {
        name: float(value) if isinstance(value, int) else int(value) if isinstance(value, float) else value
        for name, value in facts.items()
    }
    loose["peak_flops"] = {dtype: int(peak) for dtype, peak in reversed(facts["peak_flops"].items())}
    read = Device.from_dict(loose)
    assert read == GPU
    assert read.fingerprint == GPU.fingerprint
    assert type(read.cores) is int
    assert type(read.memory_bandwidth) is float
    assert Device.from_dict(json.loads(json.dumps(facts, sort_keys=True))) == GPU


@for_each(
    ("name", "value"),
    [
        ("kind", "tpu"), ("name", None), ("vendor", 5), ("architecture", ["sm80"]), ("cores", 0), ("cores", -1),
        ("cores", 1.5), ("cores", "108"), ("cores", True), ("cores", None), ("warp_size", -32), ("l2_bytes", 0.5),
        ("memory_bandwidth", math.nan), ("memory_bandwidth", math.inf), ("memory_bandwidth", -1.0),
        ("memory_bandwidth", "fast"), ("clock_hz", None), ("peak_flops", (("float32", math.nan),)),
        ("peak_flops", (("float32", -1.0),)), ("peak_flops", (("float32", 1.0), ("float32", 2.0))),
    ],
    ids=str,
)  # fmt: skip
def test_facts_that_make_no_sense_are_refused(name, value):
    with pytest.raises(InvalidRecordError):
        dataclasses.replace(GPU, **{name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"peak_flops": None}, {"peak_flops": [1]}, {"peak_flops": {"float32": "fast"}}, {"cores": 10**400},
        {"memory_bandwidth": 10**400}, {"no_such_fact": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_what_is_no_device_is_refused(changes):
    with pytest.raises(InvalidRecordError):
        Device.from_dict({**GPU.to_dict(), **changes})
    for data in (None, [], "gpu", {}):
        with pytest.raises(InvalidRecordError):
            Device.from_dict(data)


def test_the_peak_of_a_dtype():
    assert GPU.flops_per_second("float16") == 3e14
    assert GPU.flops_per_second("float32") == 2e13
    assert GPU.flops_per_second("float32", allow_tf32=True) == 1e14
    assert GPU.flops_per_second("float16", allow_tf32=True) == 3e14
    assert GPU.flops_per_second("int8") == 2e13
    assert dataclasses.replace(GPU, peak_flops=()).flops_per_second("float32") == 0


def test_numpy_numbers_of_a_driver():
    read = dataclasses.replace(GPU, memory_bandwidth=np.float64(2e12))
    assert read == GPU
