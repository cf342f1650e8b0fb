"""The table of known devices agrees with itself, and with what drivers report of the cards."""

from __future__ import annotations

import json

import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import InvalidRecordError, UnknownNameError
from kernelcast.kernels.device import Device
from kernelcast.kernels.devices import device, device_names, find_device
from kernelcast.kernels.devices_table import ALIASES, ARCHITECTURES, CARDS, GIB, HALVED_ON_GEFORCE, KIB, MIB

NAMES = [
    "a10-24gb", "a100-pcie-80gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "b200-sxm-180gb", "h100-pcie-80gb",
    "h100-sxm5-80gb", "h200-sxm-141gb", "l4-24gb", "l40s-48gb", "mi250x-128gb", "mi300x-192gb", "mi355x-288gb",
    "rtx-3090-24gb", "rtx-4090-24gb", "rtx-5090-32gb", "rtx-a4000-16gb", "t4-16gb", "v100-sxm2-32gb",
]  # fmt: skip

# As drivers spell them and as torch reports their memory, in MiB.
REPORTED = [
    ("sm80", 108, 40326, "NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
    ("sm80", 108, 40326, "NVIDIA A100-PCIE-40GB", "a100-sxm4-40gb"),
    ("sm80", 108, 81050, "NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
    ("sm80", 108, 81050, "NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
    ("sm90", 132, 81079, "NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
    ("sm90", 114, 81079, "NVIDIA H100 PCIe", "h100-pcie-80gb"),
    ("sm90", 132, 143156, "NVIDIA H200", "h200-sxm-141gb"),
    ("sm100", 148, 182631, "NVIDIA B200", "b200-sxm-180gb"),
    ("sm89", 58, 22563, "NVIDIA L4", "l4-24gb"),
    ("sm89", 142, 45469, "NVIDIA L40S", "l40s-48gb"),
    ("sm75", 40, 15102, "Tesla T4", "t4-16gb"),
    ("sm70", 80, 32510, "Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
    ("sm86", 72, 22731, "NVIDIA A10", "a10-24gb"),
    ("sm86", 48, 16101, "NVIDIA RTX A4000", "rtx-a4000-16gb"),
    ("sm86", 82, 24268, "NVIDIA GeForce RTX 3090", "rtx-3090-24gb"),
    ("sm89", 128, 24217, "NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
    ("sm120", 170, 32120, "NVIDIA GeForce RTX 5090", "rtx-5090-32gb"),
    ("gfx90a", 110, 65520, "AMD Instinct MI250X", "mi250x-128gb"),
    ("gfx90a", 110, 65520, "", "mi250x-128gb"),
    ("gfx942", 304, 196592, "AMD Instinct MI300X", "mi300x-192gb"),
    ("gfx942", 304, 196592, "AMD Radeon Graphics", "mi300x-192gb"),
    ("gfx950", 256, 294896, "AMD Instinct MI355X", "mi355x-288gb"),
]

# Siblings whose facts differ in something that the table would get wrong.
OTHERS = [
    ("sm80", 108, 81050, "NVIDIA A800-SXM4-80GB"),
    ("sm80", 42, 40326, "NVIDIA A100-SXM4-80GB MIG 3g.40gb"),
    ("sm86", 80, 22731, "NVIDIA A10G"),
    ("sm89", 142, 45469, "NVIDIA L40"),
    ("sm89", 142, 48508, "NVIDIA RTX 6000 Ada Generation"),
    ("sm90", 132, 95346, "NVIDIA H100 NVL"),
    ("sm90", 132, 143156, "NVIDIA H200 NVL"),
    ("sm90", 132, 146480, "NVIDIA GH200 144G HBM3e"),
    ("sm120", 170, 32120, "NVIDIA GeForce RTX 5090 D"),
    ("gfx942", 38, 196592, "AMD Instinct MI300X"),
    ("gfx942", 304, 262128, "AMD Instinct MI325X"),
    ("gfx950", 256, 294896, "AMD Instinct MI350X"),
]


def test_names_are_pinned_and_sorted() -> None:
    assert device_names() == NAMES


@for_each("name", NAMES)
def test_name_returns_its_own_device(name: str) -> None:
    assert device(name).name == name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a100", "a100-sxm4-80gb"),
        ("A4000", "rtx-a4000-16gb"),
        ("RTX 3090", "rtx-3090-24gb"),
        (" h100_pcie ", "h100-pcie-80gb"),
    ],
)
def test_aliases_case_and_separators(typed: str, name: str) -> None:
    assert device(typed).name == name


def test_every_alias_leads_to_a_device_and_hides_none() -> None:
    assert {device(alias).name for alias in ALIASES} == {ALIASES[alias] for alias in ALIASES}
    assert not set(ALIASES) & set(NAMES)


def test_unknown_name_lists_the_known_ones_and_the_closest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"Unknown device 'h100-sxm-80gb'. Did you mean 'h100-sxm5-80gb'\?"
    ) as seen:
        device("h100-sxm-80gb")
    assert list(seen.value.known) == NAMES


def test_facts_of_an_a100() -> None:
    a100 = device("a100-sxm4-80gb")
    assert (a100.cores, a100.warp_size, a100.max_threads_per_core, a100.registers_per_core) == (
        108,
        32,
        2048,
        65536,
    )
    assert (a100.shared_bytes_per_block, a100.shared_bytes_per_core) == (166912, 167936)
    assert (a100.l2_bytes, a100.llc_bytes, a100.memory_bytes) == (40 * MIB, 40 * MIB, 80 * GIB)
    assert a100.memory_bandwidth == 2039e9
    assert a100.flops_per_second("float16") == 312e12
    assert a100.flops_per_second("float32") == 19.5e12
    assert a100.flops_per_second("float32", allow_tf32=True) == 156e12


@for_each(
    ("name", "per_block"),
    [
        ("v100", 98304), ("t4", 65536), ("a100", 166912), ("rtx-3090", 101376), ("l4", 101376), ("h100", 232448),
        ("b200", 232448), ("rtx-5090", 101376), ("mi250x", 65536), ("mi300x", 65536), ("mi355x", 163840),
    ],
)  # fmt: skip
def test_shared_memory_of_a_block(name: str, per_block: int) -> None:
    assert device(name).shared_bytes_per_block == per_block


def test_a_flush_of_an_mi300x_must_exceed_its_infinity_cache() -> None:
    assert device("mi300x").l2_bytes == 32 * MIB
    assert device("mi300x").llc_bytes == 256 * MIB


@for_each("name", NAMES)
def test_datasheet_peaks_follow_from_cores_and_clock(name: str) -> None:
    card = next(card for card in CARDS if card.name == name)
    rates = dict(ARCHITECTURES[card.architecture].fma_per_clock)
    for dtype, peak in device(name).peak_flops:
        halved = name in ("rtx-3090-24gb", "rtx-4090-24gb", "rtx-5090-32gb") and dtype in HALVED_ON_GEFORCE
        expected = card.cores * rates[dtype] * (0.5 if halved else 1) * 2 * card.clock_hz
        # Hopper's and B200's tensor peaks are given at a clock up to 8% below the boost clock.
        slower_tensor_clock = card.architecture in ("sm90", "sm100") and dtype not in ("float32", "float64")
        assert peak == pytest.approx(expected, rel=0.09 if slower_tensor_clock else 0.05), dtype


def test_peaks_name_every_dtype_that_the_architecture_has() -> None:
    for card in CARDS:
        assert (
            dict(card.peak_teraflops).keys() == dict(ARCHITECTURES[card.architecture].fma_per_clock).keys()
        ), card.name


@for_each("name", NAMES)
def test_sizes_and_rates_are_plausible(name: str) -> None:
    d = device(name)
    assert d.kind == "gpu"
    assert d.vendor == ("amd" if d.architecture.startswith("gfx") else "nvidia")
    assert d.warp_size == (64 if d.vendor == "amd" else 32)
    assert 48 * KIB < d.shared_bytes_per_block <= d.shared_bytes_per_core <= 256 * KIB
    assert 4 * MIB <= d.l2_bytes <= d.llc_bytes <= 256 * MIB
    assert d.llc_bytes < d.memory_bytes
    assert 0.3e12 <= d.memory_bandwidth <= 8e12
    assert 1.3e9 <= d.clock_hz <= 2.6e9
    peaks = dict(d.peak_flops)
    assert peaks["float64"] <= peaks["float32"] <= peaks["float16"] <= peaks.get("int8", peaks["float16"])
    assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"]
    # The arithmetic intensity at which memory stops being the limit, in FLOPs a byte.
    assert 9 <= peaks["float32"] / d.memory_bandwidth <= 110


def test_fingerprints_are_unique() -> None:
    assert len({device(name).fingerprint for name in NAMES}) == len(NAMES)


@for_each("name", NAMES)
def test_json_with_sorted_keys_keeps_device_and_fingerprint(name: str) -> None:
    read = Device.from_dict(json.loads(json.dumps(device(name).to_dict(), sort_keys=True)))
    assert read == device(name)
    assert read.fingerprint == device(name).fingerprint


@for_each(("architecture", "cores", "mebibytes", "marketing", "name"), REPORTED)
def test_driver_report_finds_the_card(
    architecture: str, cores: int, mebibytes: int, marketing: str, name: str
) -> None:
    assert find_device(architecture, cores, mebibytes * MIB, marketing) == device(name)


def test_every_card_is_among_the_reports() -> None:
    assert {report[-1] for report in REPORTED} == set(NAMES)


@for_each(("architecture", "cores", "mebibytes", "marketing"), OTHERS)
def test_a_sibling_is_not_taken_for_a_card(
    architecture: str, cores: int, mebibytes: int, marketing: str
) -> None:
    assert find_device(architecture, cores, mebibytes * MIB, marketing) is None


sizes = st.integers(0, 2**48)
rates = st.floats(0, 1e16)
devices = st.builds(
    Device,
    name=st.text(max_size=12),
    kind=st.sampled_from(["gpu", "cpu"]),
    vendor=st.sampled_from(["nvidia", "amd", "intel"]),
    architecture=st.text(max_size=8),
    cores=st.integers(1, 1024),
    warp_size=st.sampled_from([1, 32, 64]),
    max_threads_per_core=sizes,
    registers_per_core=sizes,
    shared_bytes_per_block=sizes,
    shared_bytes_per_core=sizes,
    l2_bytes=sizes,
    llc_bytes=sizes,
    memory_bytes=sizes,
    memory_bandwidth=rates,
    clock_hz=rates,
    peak_flops=st.dictionaries(st.sampled_from(["float64", "float32", "tf32", "float16", "int8"]), rates).map(
        lambda peaks: tuple(sorted(peaks.items()))
    ),
)


@given(devices)
def test_any_device_survives_json(original: Device) -> None:
    read = Device.from_dict(json.loads(json.dumps(original.to_dict())))
    assert read == original
    assert read.fingerprint == original.fingerprint


@given(devices, devices)
def test_fingerprint_is_equal_just_when_all_but_the_name_is(one: Device, other: Device) -> None:
    one_facts, other_facts = one.to_dict(), other.to_dict()
    renamed = Device.from_dict({**one_facts, "name": "renamed"})
    assert renamed.fingerprint == one.fingerprint
    del one_facts["name"], other_facts["name"]
    assert (one.fingerprint == other.fingerprint) == (one_facts == other_facts)


@given(
    devices, st.sampled_from(["cores", "llc_bytes", "memory_bytes", "shared_bytes_per_block", "warp_size"])
)
def test_every_changed_size_changes_the_fingerprint(original: Device, field: str) -> None:
    facts = original.to_dict()
    facts[field] += 1
    assert Device.from_dict(facts).fingerprint != original.fingerprint


def test_a_dictionary_that_is_no_device_is_refused() -> None:
    facts = device("a100").to_dict()
    with pytest.raises(InvalidRecordError, match="Not a device"):
        Device.from_dict({**facts, "tensor_cores": 4})
    del facts["cores"]
    with pytest.raises(InvalidRecordError, match="Not a device"):
        Device.from_dict(facts)
