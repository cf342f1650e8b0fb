"""The devices of this machine, and the CPU threads that torch will use.

What is detected names a device in records and caches, so it must be the same at every run on the same machine: nothing
here reads a current clock or measures. A fact that only a measurement could give is an estimate, stated where it is made.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast.errors import InvalidProblemError, KernelcastError, UnknownNameError
from kernelcast.kernels.device import Device
from kernelcast.kernels.devices import find_device
from kernelcast.kernels.devices_table import ARCHITECTURES, GIB, HALVED_ON_GEFORCE, KIB, Architecture

SYSFS_CPU = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")

#: Where neither the system nor the model's name says the clock (most virtual machines): the order of a server core's
#: clock with all cores busy. The "cpu MHz" of /proc/cpuinfo is the clock of the moment and differs at every reading.
ASSUMED_CPU_CLOCK_HZ = 3.0e9

#: The memory channels cannot be read without privileges. One core draws about this much, limited by the cache lines it
#: can have on their way; ...
ASSUMED_BANDWIDTH_PER_CORE = 12.8e9
#: ... and all cores together no more than eight channels of DDR4-3200, the usual server socket.
ASSUMED_BANDWIDTH_LIMIT = 204.8e9

#: For a GPU that is not in the table, where torch is too old to report a clock.
ASSUMED_GPU_CLOCK_HZ = 1.5e9
#: Likewise the memory: bytes a float32 FLOP, between the 0.03 of graphics cards and the 0.05 to 0.10 of HBM cards.
ASSUMED_BYTES_PER_FLOP = 0.04

#: Float32 multiply-adds a clock of one core, from the vendors' optimisation guides: width of a vector x vector units.
_X86_FMA = {"avx512": 16 * 2, "avx2": 8 * 2, "sse2": 4 * 1}
_ARM_FMA = 4 * 2
#: Arm's own cores: part number -> name and float32 multiply-adds a clock (software optimization guides).
_ARM_PARTS = {
    0xD08: ("cortex-a72", 4 * 2),
    0xD0B: ("cortex-a76", 4 * 2),
    0xD0C: ("neoverse-n1", 4 * 2),
    0xD40: ("neoverse-v1", 8 * 2),
    0xD49: ("neoverse-n2", 4 * 2),
    0xD4F: ("neoverse-v2", 4 * 4),
}
#: CPU implementer codes of the Arm architecture (MIDR_EL1).
_ARM_IMPLEMENTERS = {
    0x41: "arm", 0x46: "fujitsu", 0x48: "hisilicon", 0x4E: "nvidia", 0x51: "qualcomm", 0x61: "apple", 0xC0: "ampere",
}  # fmt: skip
_X86_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel", "HygonGenuine": "hygon"}

#: Settings that make an OpenMP bind its threads to CPUs.
_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

#: (flag of /proc/cpuinfo, dtype, its multiply-adds for one of float32), the fastest last. Dot-product instructions put
#: two 16-bit or four 8-bit products into one float32 lane; an AMX tile does 512 bfloat16 multiply-adds a clock where
#: the two AVX-512 units do 32 of float32.
_NARROW_DTYPES = (
    ("avx_vnni", "int8", 4),
    ("avx512_vnni", "int8", 4),
    ("avx512_bf16", "bfloat16", 2),
    ("avx512_fp16", "float16", 2),
    ("amx_int8", "int8", 32),
    ("amx_bf16", "bfloat16", 16),
    ("amx_fp16", "float16", 16),
    ("asimdhp", "float16", 2),
    ("bf16", "bfloat16", 2),
    ("asimddp", "int8", 4),
)


@dataclass(frozen=True)
class CpuCache:
    """One cache.

    Attributes:
        level: 1, 2, 3, ...
        size_bytes: of this instance.
        cpus: the logical CPUs that share it, as the system writes them: ``"0-7,64-71"``.
    """

    level: int
    size_bytes: int
    cpus: str


def detect(kind: str | None = None, index: int = 0) -> Device:
    """A device of this machine.

    Args:
        kind: ``"gpu"``, ``"cpu"``, or None for the GPU if torch sees one and else the CPU. ``"cpu"`` does not import torch.
        index: which GPU, in torch's order.

    Raises:
        UnknownNameError: another kind.
        KernelcastError: a GPU was asked for and torch sees none, or none of that index.
    """
    if kind not in (None, "gpu", "cpu"):
        raise UnknownNameError("kind of device", str(kind), ("cpu", "gpu"))
    if kind == "cpu":
        return _detect_cpu()
    count = _gpu_count()
    if not count:
        if kind is None:
            return _detect_cpu()
        raise KernelcastError(
            "A GPU was asked for, and torch sees none. Install a build of torch for CUDA or ROCm and check the driver, "
            "or ask for the CPU or for a known device by name."
        )
    if not 0 <= index < count:
        raise KernelcastError(f"There is no GPU {index}: torch sees {count}, counted from 0.")
    return _detect_gpu(index)


def torch_device(device: Device) -> str:
    """What to hand to torch to run on a device: ``"cpu"``, or ``"cuda:<i>"``, the current GPU if several are alike.

    Raises:
        KernelcastError: no GPU of this machine has the device's hardware facts.
    """
    if device.kind == "cpu":
        return "cpu"
    count = _gpu_count()
    found = [_detect_gpu(index) for index in range(count)]
    alike = [index for index, each in enumerate(found) if each.fingerprint == device.fingerprint]
    if not alike:
        here = ", ".join(each.name for each in found) or "none"
        raise KernelcastError(
            f"No GPU of this machine is a {device.name}; torch sees: {here}. Forecast only, or run there."
        )
    import torch

    current = torch.cuda.current_device()
    return f"cuda:{current if current in alike else alike[0]}"


def check_threads(threads: object, device: Device) -> None:
    """Refuse a thread count that a problem on a device cannot have.

    Raises:
        InvalidProblemError: on a GPU anything but 0; on a CPU 0, or more than twice the processors of this machine.
    """
    if not isinstance(threads, int) or isinstance(threads, bool):
        return  # the schema says so, with all that it allows
    most = 2 * (os.cpu_count() or 1)
    if device.kind == "gpu" and threads:
        raise InvalidProblemError(
            f"threads is {threads}; on a GPU, such as {device.name}, it is 0: leave it out."
        )
    if device.kind == "cpu" and not 1 <= threads <= most:
        raise InvalidProblemError(
            f"threads is {threads}; on {device.name} it must be from 1 to {most}. Leave it out for torch's own number."
        )


def default_threads() -> int:
    """The CPU threads that torch uses for one operation: as torch says if it is imported, else as it will choose.

    That is ``OMP_NUM_THREADS``, or one for each physical core that this process may use. It does not import torch.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    # A list gives the threads of nested levels; the outermost counts.
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    return physical_cores(usable_cpus())


# --- GPUs ---


def device_from_properties(properties: Any) -> Device:
    """The device that ``torch.cuda.get_device_properties`` describes.

    A card of the table is returned as the table has it, so that every machine with that card has the same fingerprint. Of
    another card, sizes are as reported, and the peak FLOP/s are those of its architecture's cores at its clock.

    Args:
        properties: any object with torch's attributes; those that came late to torch (clocks, bus width, shared memory and
            registers of a multiprocessor) may be missing.
    """
    # On CUDA builds torch repeats the card's name under this attribute.
    gcn = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    amd = gcn.startswith("gfx")
    architecture = gcn if amd else f"sm{properties.major}{properties.minor}"
    cores = int(properties.multi_processor_count)
    known = find_device(architecture, cores, int(properties.total_memory), properties.name)
    if known is not None:
        return known

    arch = _nearest(architecture)
    clock_hz = 1e3 * getattr(properties, "clock_rate", 0) or ASSUMED_GPU_CLOCK_HZ
    # An architecture before those of the table, or a graphics one of AMD's: 64 lanes are the least they have.
    fma = dict(arch.fma_per_clock) if arch else {"float32": 64}
    if "geforce" in properties.name.lower():
        fma = {dtype: rate // 2 if dtype in HALVED_ON_GEFORCE else rate for dtype, rate in fma.items()}
    peaks = {dtype: 2.0 * rate * cores * clock_hz for dtype, rate in fma.items()}
    l2_bytes = int(getattr(properties, "L2_cache_size", 0))
    per_block = getattr(properties, "shared_memory_per_block_optin", 0) or (
        arch.shared_bytes_per_block if arch else getattr(properties, "shared_memory_per_block", 0)
    )
    per_core = getattr(properties, "shared_memory_per_multiprocessor", 0) or (
        arch.shared_bytes if arch else per_block
    )
    # Data move at both edges of the memory's clock.
    bandwidth = (
        2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8
    )
    return Device(
        name=_slug(properties.name) or f"{architecture}-{cores}c",
        kind="gpu",
        vendor="amd" if amd else "nvidia",
        architecture=architecture,
        cores=cores,
        warp_size=int(getattr(properties, "warp_size", 0)) or (arch.warp_size if arch else 32),
        max_threads_per_core=int(properties.max_threads_per_multi_processor),
        registers_per_core=int(
            getattr(properties, "regs_per_multiprocessor", 0) or (arch.registers if arch else 0)
        ),
        shared_bytes_per_block=int(per_block),
        shared_bytes_per_core=int(max(per_core, per_block)),
        l2_bytes=l2_bytes,
        llc_bytes=max(l2_bytes, arch.memory_side_cache_bytes if arch else 0),
        memory_bytes=_whole_gib(int(properties.total_memory)),
        memory_bandwidth=bandwidth or ASSUMED_BYTES_PER_FLOP * peaks["float32"],
        clock_hz=clock_hz,
        peak_flops=tuple(sorted(peaks.items())),
    )


def _gpu_count() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _detect_gpu(index: int) -> Device:
    import torch

    return device_from_properties(torch.cuda.get_device_properties(index))


def _nearest(architecture: str) -> Architecture | None:
    """The architecture itself, or the newest known NVIDIA one that is not newer: sm103 is a kind of sm100."""
    if architecture in ARCHITECTURES or not architecture.startswith("sm"):
        return ARCHITECTURES.get(architecture)
    number = int(architecture.removeprefix("sm"))
    older = [int(name.removeprefix("sm")) for name in ARCHITECTURES if name.startswith("sm")]
    older = [each for each in older if each <= number]
    return ARCHITECTURES[f"sm{max(older)}"] if older else None


# --- CPUs ---


def cpu_from_text(
    cpuinfo: str,
    caches: Iterable[CpuCache],
    cores: int,
    *,
    machine: str,
    max_clock_hz: float = 0.0,
    memory_bytes: int = 0,
    fallback_name: str = "",
) -> Device:
    """The CPU that the system's files describe.

    Peak FLOP/s are cores x clock x lanes x units x 2, with two vector units for a multiply-add of full width, and one for
    AVX-512 on Zen 4, which runs it in halves. Cores that lower their clock under vector load do not reach it.

    Args:
        cpuinfo: the text of ``/proc/cpuinfo``, or ``""``.
        caches: each cache of the usable CPUs once.
        cores: physical cores that may be used.
        machine: as ``platform.machine()`` says: ``"x86_64"``, ``"aarch64"``, ``"arm64"``, ...
        max_clock_hz: the highest clock, 0 if the system does not say.
        memory_bytes: main memory, 0 if not known.
        fallback_name: the model, where ``cpuinfo`` has none.
    """
    facts = _first_processor(cpuinfo)
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    model = facts.get("model name", "") or fallback_name
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(machine.lower(), machine.lower())
    if machine == "aarch64":
        part = int(facts.get("CPU part", "0"), 16)
        vendor = _ARM_IMPLEMENTERS.get(int(facts.get("CPU implementer", "0"), 16), "unknown")
        part_name, fma = _ARM_PARTS.get(part, ("", _ARM_FMA)) if vendor == "arm" else ("", _ARM_FMA)
        model = f"{vendor} {part_name}" if part_name else model or vendor
        architecture = "aarch64-sve" if "sve" in flags else "aarch64-neon"
    else:
        vendor = _X86_VENDORS.get(facts.get("vendor_id", ""), "unknown")
        level = "avx512" if "avx512f" in flags else "avx2" if {"avx2", "fma"} <= flags else "sse2"
        fma = _X86_FMA[level]
        if level == "avx512" and vendor == "amd" and facts.get("cpu family") == "25":
            fma //= 2
        architecture = f"{machine}-{level}" if machine == "x86_64" else machine
        if "amx_tile" in flags:
            architecture += "-amx"

    stated = re.search(r"@\s*([\d.]+)\s*GHz", model)
    clock_hz = max_clock_hz or (float(stated[1]) * 1e9 if stated else ASSUMED_CPU_CLOCK_HZ)
    peak = 2.0 * fma * cores * clock_hz
    peaks = {"float64": peak / 2, "float32": peak}
    peaks.update({dtype: peak * factor for flag, dtype, factor in _NARROW_DTYPES if flag in flags})
    l2_bytes, llc_bytes = _cache_sizes(caches, vendor, facts.get("cache size", ""))
    return Device(
        name=f"{_slug(model) or machine or 'cpu'}-{cores}c",
        kind="cpu",
        vendor=vendor,
        architecture=architecture,
        cores=cores,
        warp_size=1,
        l2_bytes=l2_bytes,
        llc_bytes=llc_bytes,
        memory_bytes=_whole_gib(memory_bytes),
        memory_bandwidth=min(cores * ASSUMED_BANDWIDTH_PER_CORE, ASSUMED_BANDWIDTH_LIMIT),
        clock_hz=clock_hz,
        peak_flops=tuple(sorted(peaks.items())),
    )


def usable_cpus() -> list[int]:
    """The logical CPUs that this process may run on, sorted."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    cpus = set(os.sched_getaffinity(0))
    if any(os.environ.get(name, "false").lower() not in ("", "0", "false") for name in _BINDING):
        # An OpenMP that binds its threads leaves the calling thread one CPU; together they have what the process has.
        with contextlib.suppress(OSError):
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    cpus |= os.sched_getaffinity(int(thread.name))
    return sorted(cpus)


def physical_cores(cpus: Sequence[int], root: Path = SYSFS_CPU) -> int:
    """How many physical cores these logical CPUs are; as many as CPUs where the system does not say."""
    return len({_read(root / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def quota_cores(root: Path = CGROUP, membership: str | None = None) -> float:
    """The CPUs' worth of time that the control group allows this process, infinite without a limit.

    Args:
        root: where the control groups are mounted.
        membership: the text of ``/proc/self/cgroup``; None reads it.
    """
    membership = _read(Path("/proc/self/cgroup")) if membership is None else membership
    own = next((line[3:].strip("/") for line in membership.splitlines() if line.startswith("0::")), "")
    # Inside a container the group's own folder is the mount's root.
    limits = [_read(root / own / "cpu.max").split(), _read(root / "cpu.max").split()]
    limits.append([_read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")])
    allowed = [
        int(limit[0]) / int(limit[1])
        for limit in limits
        if len(limit) == 2 and all(map(str.isdecimal, limit))
    ]
    return min(allowed, default=math.inf)


def read_caches(cpus: Sequence[int], root: Path = SYSFS_CPU) -> list[CpuCache]:
    """The caches of data of these logical CPUs, each once. Empty where the system does not say."""
    found = set()
    for cpu in cpus:
        for folder in sorted((root / f"cpu{cpu}/cache").glob("index*")):
            size = re.fullmatch(r"(\d+)K", _read(folder / "size"))
            level = _read(folder / "level")
            if size and level.isdecimal() and _read(folder / "type") != "Instruction":
                found.add(CpuCache(int(level), int(size[1]) * KIB, _read(folder / "shared_cpu_list")))
    return sorted(found, key=lambda cache: (cache.level, cache.cpus))


def _detect_cpu() -> Device:
    cpus = usable_cpus()
    cores = physical_cores(cpus)
    quota = quota_cores()
    cpuinfo = _read(Path("/proc/cpuinfo"))
    clocks_khz = [_read(SYSFS_CPU / f"cpu{cpu}/cpufreq/cpuinfo_max_freq") for cpu in cpus]
    memory_bytes = 0
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cpu_from_text(
        cpuinfo,
        read_caches(cpus),
        cores if quota >= cores else max(1, math.ceil(quota)),
        machine=platform.machine(),
        max_clock_hz=1e3 * max((int(khz) for khz in clocks_khz if khz.isdecimal()), default=0),
        memory_bytes=memory_bytes,
        # On Linux this starts a process.
        fallback_name="" if cpuinfo else platform.processor(),
    )


def _first_processor(cpuinfo: str) -> dict[str, str]:
    facts: dict[str, str] = {}
    for line in cpuinfo.strip().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    return facts


def _cache_sizes(caches: Iterable[CpuCache], vendor: str, stated: str) -> tuple[int, int]:
    """Bytes of a core's level 2, and of all the last-level caches together."""
    caches = set(caches)
    if not caches:
        # /proc/cpuinfo gives one size: of the last level on Intel's, of level 2 on AMD's.
        size = re.fullmatch(r"(\d+) KB", stated)
        stated_bytes = int(size[1]) * KIB if size else 0
        return (0, stated_bytes) if vendor == "intel" else (stated_bytes, stated_bytes)
    last = max(cache.level for cache in caches)
    l2_bytes = max((cache.size_bytes for cache in caches if cache.level == 2), default=0)
    return l2_bytes, sum(cache.size_bytes for cache in caches if cache.level == last)


def _whole_gib(size_bytes: int) -> int:
    """Rounded up to GiB: what the firmware and the driver keep for themselves changes with their versions."""
    return math.ceil(size_bytes / GIB) * GIB


def _slug(model: str) -> str:
    """``"Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz"`` -> ``"intel-xeon-platinum-8370c"``; no ``nvidia``."""
    model = re.sub(
        r"\((r|tm|c)\)|@.*|\bw(ith|/) .*|\b\d+-core\b|\b(cpu|processor|nvidia)\b", " ", model.lower()
    )
    return "-".join(re.findall(r"[a-z0-9]+", model))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
