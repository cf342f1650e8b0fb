"""Detection from what the system and the driver report, without needing either."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelcast.errors import KernelcastError, UnknownNameError
from kernelcast.kernels import detect as module
from kernelcast.kernels.detect import (
    CpuCache,
    cpu_from_text,
    default_threads,
    detect,
    device_from_properties,
    physical_cores,
    quota_cores,
    read_caches,
    torch_device,
    usable_cpus,
)
from kernelcast.kernels.devices import device
from kernelcast.kernels.devices_table import GIB, KIB, MIB

AMD = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model name\t: AMD EPYC 9575F 64-Core Processor
cpu MHz\t\t: 3312.448
cache size\t: 1024 KB
flags\t\t: fpu sse sse2 fma avx avx2 avx512f avx512_bf16 avx512_vnni avx_vnni

processor\t: 1
vendor_id\t: GenuineNonsense
"""

INTEL = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model name\t: Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz
cpu MHz\t\t: 1117.201
cache size\t: 49152 KB
flags\t\t: fpu sse sse2 fma avx avx2 avx512f avx512_vnni
"""

ARM = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd fphp asimdhp asimddp sve bf16 i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""


def cache(level: int, size_kib: int, cpus: str) -> CpuCache:
    return CpuCache(level, size_kib * KIB, cpus)


# --- CPUs ---


def test_amd_cpu() -> None:
    caches = [cache(1, 48, "0"), cache(2, 1024, "0"), cache(2, 1024, "1"), cache(3, 32768, "0-1")]
    seen = cpu_from_text(AMD, caches, 2, machine="x86_64", max_clock_hz=5.0e9, memory_bytes=24_684_092 * KIB)
    assert (seen.name, seen.vendor, seen.architecture) == ("amd-epyc-9575f-2c", "amd", "x86_64-avx512")
    assert (seen.kind, seen.cores, seen.warp_size, seen.clock_hz) == ("cpu", 2, 1, 5.0e9)
    assert (seen.l2_bytes, seen.llc_bytes, seen.memory_bytes) == (MIB, 32 * MIB, 24 * GIB)
    # Two 512-bit units: 32 float32 multiply-adds a clock and core.
    float32 = 2 * 5.0e9 * 32 * 2
    assert dict(seen.peak_flops) == {
        "float64": float32 / 2,
        "float32": float32,
        "bfloat16": float32 * 2,
        "int8": float32 * 4,
    }
    # No float16 arithmetic among the flags: it counts as float32.
    assert seen.flops_per_second("float16") == float32
    assert seen.memory_bandwidth == 25.6e9


def test_zen_4_runs_avx512_in_halves() -> None:
    zen5 = cpu_from_text(AMD, [], 2, machine="x86_64")
    zen4 = cpu_from_text(AMD.replace("family\t: 26", "family\t: 25"), [], 2, machine="x86_64")
    assert zen4.architecture == zen5.architecture
    assert zen4.flops_per_second("float32") * 2 == zen5.flops_per_second("float32")


def test_intel_cpu_takes_the_clock_of_its_name() -> None:
    seen = cpu_from_text(INTEL, [cache(2, 1280, "0,16"), cache(3, 49152, "0-31")], 16, machine="x86_64")
    assert (seen.name, seen.vendor, seen.architecture) == (
        "intel-xeon-platinum-8370c-16c",
        "intel",
        "x86_64-avx512",
    )
    assert seen.clock_hz == 2.8e9
    assert seen.flops_per_second("float32") == pytest.approx(16 * 2.8e9 * 32 * 2)
    assert (seen.l2_bytes, seen.llc_bytes) == (1280 * KIB, 48 * MIB)
    # Sixteen cores ask for as much as eight memory channels give.
    assert seen.memory_bandwidth == pytest.approx(204.8e9)


def test_amx_multiplies_sixteen_bit_and_eight_bit_numbers_only() -> None:
    plain = cpu_from_text(INTEL, [], 8, machine="x86_64")
    amx = cpu_from_text(
        INTEL.replace("avx512f", "avx512f amx_tile amx_bf16 amx_int8"), [], 8, machine="x86_64"
    )
    assert amx.architecture == "x86_64-avx512-amx"
    assert amx.flops_per_second("bfloat16") == 16 * plain.flops_per_second("float32")
    assert amx.flops_per_second("int8") == 32 * plain.flops_per_second("float32")
    assert amx.flops_per_second("float32") == plain.flops_per_second("float32")


@pytest.mark.parametrize(
    ("flags", "architecture", "fma"),
    [
        ("sse2 avx avx2 fma", "x86_64-avx2", 16),
        ("sse2 avx avx2", "x86_64-sse2", 4),
        ("sse2", "x86_64-sse2", 4),
    ],
)
def test_narrower_x86(flags: str, architecture: str, fma: int) -> None:
    seen = cpu_from_text(f"vendor_id : GenuineIntel\nflags : {flags}", [], 4, machine="AMD64")
    assert seen.architecture == architecture
    assert seen.name == "x86_64-4c"
    assert seen.flops_per_second("float32") == 4 * fma * 2 * module.ASSUMED_CPU_CLOCK_HZ


def test_arm_cpu_is_named_by_its_part() -> None:
    seen = cpu_from_text(
        ARM, [cache(2, 1024, str(cpu)) for cpu in range(4)], 4, machine="aarch64", max_clock_hz=2.6e9
    )
    assert (seen.name, seen.vendor, seen.architecture) == ("arm-neoverse-v1-4c", "arm", "aarch64-sve")
    float32 = 4 * 2.6e9 * 16 * 2
    assert dict(seen.peak_flops) == {
        "float64": float32 / 2,
        "float32": float32,
        "float16": float32 * 2,
        "bfloat16": float32 * 2,
        "int8": float32 * 4,
    }
    # Without a level 3 the last level is all the level-2 caches together.
    assert (seen.l2_bytes, seen.llc_bytes) == (MIB, 4 * MIB)


def test_a_system_without_cpuinfo() -> None:
    seen = cpu_from_text("", [], 8, machine="arm64", fallback_name="arm")
    assert (seen.name, seen.vendor, seen.architecture, seen.cores) == ("arm-8c", "unknown", "aarch64-neon", 8)
    assert seen.flops_per_second("float32") == 8 * 8 * 2 * module.ASSUMED_CPU_CLOCK_HZ
    assert (seen.l2_bytes, seen.llc_bytes, seen.memory_bytes) == (0, 0, 0)
    assert cpu_from_text("", [], 1, machine="riscv64").architecture == "riscv64"


def test_all_last_level_caches_count_once() -> None:
    two_dies = [
        cache(2, 512, "0"),
        cache(2, 512, "8"),
        cache(3, 32768, "0-7"),
        cache(3, 32768, "8-15"),
        cache(3, 32768, "0-7"),
    ]
    assert cpu_from_text(AMD, two_dies, 16, machine="x86_64").llc_bytes == 64 * MIB


def test_the_one_size_of_cpuinfo_is_another_level_on_each_vendor() -> None:
    intel, amd = (cpu_from_text(text, [], 2, machine="x86_64") for text in (INTEL, AMD))
    assert (intel.l2_bytes, intel.llc_bytes) == (0, 48 * MIB)
    assert (amd.l2_bytes, amd.llc_bytes) == (MIB, MIB)


@given(st.floats(400, 6000), st.floats(400, 6000), st.integers(0, 400 * MIB))
def test_the_clock_of_the_moment_and_the_firmwares_share_change_nothing(
    one: float, other: float, kept: int
) -> None:
    first = cpu_from_text(
        AMD.replace("3312.448", f"{one:.3f}"), [], 2, machine="x86_64", memory_bytes=24 * GIB
    )
    second = cpu_from_text(
        AMD.replace("3312.448", f"{other:.3f}"), [], 2, machine="x86_64", memory_bytes=24 * GIB - kept
    )
    assert first.fingerprint == second.fingerprint


def test_this_cpu_is_the_same_in_two_processes_and_needs_no_torch() -> None:
    code = (
        "import sys; from kernelcast.kernels.detect import detect; d = detect('cpu'); "
        "print(d.fingerprint, d.cores, 'torch' in sys.modules)"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    here = detect("cpu")
    assert runs == {f"{here.fingerprint} {here.cores} False\n"}
    assert here.kind == "cpu"
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert here.flops_per_second("float32") > 1e9


# --- the system's files ---


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_hyperthreads_are_one_core(tmp_path: Path) -> None:
    for cpu in range(4):
        write(tmp_path / f"cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}")
    assert physical_cores([0, 1, 2, 3], tmp_path) == 2
    assert physical_cores([0, 2], tmp_path) == 1
    assert physical_cores([0, 1, 2, 3], tmp_path / "absent") == 4


def test_caches_are_read_once_each_and_without_instructions(tmp_path: Path) -> None:
    for cpu in range(2):
        for index, (level, kind, size, shared) in enumerate(
            [
                ("1", "Data", "32K", cpu),
                ("1", "Instruction", "64K", cpu),
                ("2", "Unified", "1024K", cpu),
                ("3", "Unified", "32768K", "0-1"),
            ]
        ):
            folder = tmp_path / f"cpu{cpu}/cache/index{index}"
            files = {"level": level, "type": kind, "size": size, "shared_cpu_list": str(shared)}
            for name, text in files.items():
                write(folder / name, text)
    assert read_caches([0, 1], tmp_path) == [
        cache(1, 32, "0"), cache(1, 32, "1"), cache(2, 1024, "0"), cache(2, 1024, "1"), cache(3, 32768, "0-1"),
    ]  # fmt: skip
    assert [each.cpus for each in read_caches([1], tmp_path)] == ["1", "1", "0-1"]
    assert read_caches([0], tmp_path / "absent") == []


def test_control_group_quota(tmp_path: Path) -> None:
    assert quota_cores(tmp_path, "") == math.inf
    write(tmp_path / "cpu.max", "max 100000")
    assert quota_cores(tmp_path, "0::/") == math.inf
    write(tmp_path / "cpu.max", "350000 100000")
    assert quota_cores(tmp_path, "0::/") == 3.5
    write(tmp_path / "job/cpu.max", "50000 100000")
    assert quota_cores(tmp_path, "9:name=systemd:/\n0::/job") == 0.5


def test_control_group_quota_version_1(tmp_path: Path) -> None:
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1")
    assert quota_cores(tmp_path, "") == math.inf
    write(tmp_path / "cpu/cpu.cfs_quota_us", "200000")
    assert quota_cores(tmp_path, "") == 2.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
@pytest.mark.parametrize("bound", [False, True])
def test_usable_cpus(bound: bool) -> None:
    # A second thread has all CPUs, as the threads of an OpenMP pool have together; the calling thread has one.
    code = """
import os, threading
from kernelcast.kernels.detect import detect, usable_cpus
before = sorted(os.sched_getaffinity(0))
stop = threading.Event()
threading.Thread(target=stop.wait).start()
os.sched_setaffinity(0, before[:1])
try:
    print(usable_cpus() == before, usable_cpus() == before[:1], detect("cpu").cores)
finally:
    stop.set()
"""
    env = {**os.environ, "OMP_PROC_BIND": "close" if bound else "false"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    all_cpus, one_cpu, cores = run.stdout.split()
    if bound:
        assert all_cpus == "True"
    else:
        assert (one_cpu, cores) == ("True", "1")


# --- GPUs ---


def gpu(**changes: object) -> SimpleNamespace:
    """What torch reports of an A100-SXM4-80GB, with changes."""
    facts: dict[str, object] = {
        "name": "NVIDIA A100-SXM4-80GB", "major": 8, "minor": 0, "multi_processor_count": 108,
        "total_memory": 81050 * MIB, "max_threads_per_multi_processor": 2048, "warp_size": 32,
        "regs_per_multiprocessor": 65536, "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 166912,
        "shared_memory_per_multiprocessor": 167936, "L2_cache_size": 40 * MIB, "clock_rate": 1410000,
        "memory_clock_rate": 1593000, "memory_bus_width": 5120,
    }  # fmt: skip
    facts |= changes
    # CUDA builds of torch repeat the name here.
    return SimpleNamespace(**{"gcnArchName": facts["name"], **facts})


H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "multi_processor_count": 132, "total_memory": 81079 * MIB,
}  # fmt: skip
MI300X = {
    "name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4, "warp_size": 64,
    "multi_processor_count": 304, "total_memory": 196592 * MIB, "shared_memory_per_block_optin": 0,
    "shared_memory_per_block": 65536, "shared_memory_per_multiprocessor": 65536, "L2_cache_size": 4 * MIB,
}  # fmt: skip
RTX_A6000 = {
    "name": "NVIDIA RTX A6000", "minor": 6, "multi_processor_count": 84, "total_memory": 48541 * MIB,
    "max_threads_per_multi_processor": 1536, "shared_memory_per_block_optin": 101376,
    "shared_memory_per_multiprocessor": 102400, "L2_cache_size": 6 * MIB, "clock_rate": 1800000,
    "memory_clock_rate": 8001000, "memory_bus_width": 384,
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "name"), [({}, "a100-sxm4-80gb"), (H100, "h100-sxm5-80gb"), (MI300X, "mi300x-192gb")]
)
def test_a_card_of_the_table_is_the_tables(facts: dict[str, object], name: str) -> None:
    assert device_from_properties(gpu(**facts)) == device(name)


def test_a_card_that_is_not_in_the_table() -> None:
    seen = device_from_properties(gpu(**RTX_A6000))
    assert (seen.name, seen.kind, seen.vendor, seen.architecture) == ("rtx-a6000", "gpu", "nvidia", "sm86")
    assert (seen.cores, seen.max_threads_per_core, seen.registers_per_core) == (84, 1536, 65536)
    assert (seen.shared_bytes_per_block, seen.shared_bytes_per_core) == (101376, 102400)
    assert (seen.l2_bytes, seen.llc_bytes, seen.memory_bytes) == (6 * MIB, 6 * MIB, 48 * GIB)
    # The datasheet says 768 GB/s, 38.7 TFLOP/s and, with sparsity, 309.7.
    assert seen.memory_bandwidth == pytest.approx(768e9, rel=0.001)
    assert seen.flops_per_second("float32") == pytest.approx(38.7e12, rel=0.001)
    assert seen.flops_per_second("bfloat16") == pytest.approx(309.7e12 / 2, rel=0.001)


def test_a_geforce_sums_in_float32_at_half_rate() -> None:
    # An RTX 3080 of 10 GB; the GA102 whitepaper says 29.8 and 59.5 TFLOP/s.
    facts = {**RTX_A6000, "name": "NVIDIA GeForce RTX 3080", "multi_processor_count": 68}
    seen = device_from_properties(gpu(**(facts | {"clock_rate": 1710000})))
    assert seen.name == "geforce-rtx-3080"
    assert seen.flops_per_second("float32") == pytest.approx(29.8e12, rel=0.005)
    assert seen.flops_per_second("float16") == pytest.approx(59.5e12, rel=0.005)


def test_a_slice_of_a_card_is_not_the_card() -> None:
    seen = device_from_properties(
        gpu(name="NVIDIA A100-SXM4-80GB MIG 3g.40gb", multi_processor_count=42, total_memory=40192 * MIB)
    )
    assert seen.name == "a100-sxm4-80gb-mig-3g-40gb"
    assert seen.flops_per_second("float16") == pytest.approx(312e12 * 42 / 108, rel=0.002)


def test_a_newer_architecture_is_taken_for_the_last_known_one() -> None:
    seen = device_from_properties(
        gpu(name="NVIDIA B300", major=10, minor=3, multi_processor_count=160, clock_rate=1000000)
    )
    assert seen.architecture == "sm103"
    assert seen.flops_per_second("float16") == 160 * 4096 * 2 * 1e9


def test_an_architecture_before_the_table() -> None:
    seen = device_from_properties(
        gpu(name="Tesla P100", major=6, multi_processor_count=56, clock_rate=1480000)
    )
    assert seen.architecture == "sm60"
    # The datasheet says 10.6 TFLOP/s.
    assert dict(seen.peak_flops) == {"float32": pytest.approx(10.6e12, rel=0.01)}


def test_another_mi300_keeps_its_infinity_cache() -> None:
    facts = {**MI300X, "name": "AMD Instinct MI325X", "total_memory": 262128 * MIB, "clock_rate": 2100000}
    seen = device_from_properties(gpu(**facts))
    assert (seen.name, seen.vendor, seen.architecture) == ("amd-instinct-mi325x", "amd", "gfx942")
    assert seen.warp_size == 64
    assert seen.llc_bytes == 256 * MIB
    assert seen.shared_bytes_per_block == 65536
    assert seen.flops_per_second("float16") == pytest.approx(1307.4e12, rel=0.001)


def test_a_torch_that_reports_little() -> None:
    old = SimpleNamespace(
        name="NVIDIA RTX A6000", major=8, minor=6, multi_processor_count=84, total_memory=48_541 * MIB,
        max_threads_per_multi_processor=1536,
    )  # fmt: skip
    seen = device_from_properties(old)
    assert (seen.shared_bytes_per_block, seen.shared_bytes_per_core) == (101376, 102400)
    assert seen.registers_per_core == 65536
    assert seen.clock_hz == module.ASSUMED_GPU_CLOCK_HZ
    assert seen.memory_bandwidth == pytest.approx(0.04 * 84 * 128 * 2 * 1.5e9)
    assert seen.l2_bytes == 0


def test_the_drivers_share_of_memory_does_not_change_a_device() -> None:
    one = device_from_properties(gpu(**RTX_A6000))
    other = device_from_properties(gpu(**{**RTX_A6000, "total_memory": 48_900 * MIB}))
    assert one.fingerprint == other.fingerprint


def fake_torch(*gpus: SimpleNamespace, current: int = 0, threads: int = 5) -> SimpleNamespace:
    cuda = SimpleNamespace(
        is_available=lambda: bool(gpus),
        device_count=lambda: len(gpus),
        current_device=lambda: current,
        get_device_properties=lambda index: gpus[index],
    )
    return SimpleNamespace(cuda=cuda, get_num_threads=lambda: threads)


def test_detect_takes_the_gpu_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpu(), gpu(**H100)))
    assert detect().name == "a100-sxm4-80gb"
    assert detect("gpu", 1).name == "h100-sxm5-80gb"
    assert detect("cpu").kind == "cpu"
    with pytest.raises(KernelcastError, match="There is no GPU 2: torch sees 2"):
        detect("gpu", 2)
    with pytest.raises(KernelcastError, match="There is no GPU -1"):
        detect(index=-1)


def test_detect_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert detect() == detect("cpu")
    with pytest.raises(KernelcastError, match="torch sees none"):
        detect("gpu")
    with pytest.raises(UnknownNameError, match="Unknown kind of device 'tpu'"):
        detect("tpu")


def test_detect_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert detect() == detect("cpu")


def test_torch_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(gpu(**H100), gpu(), gpu(), current=2))
    assert torch_device(device("h100")) == "cuda:0"
    # Of two that are alike, the current one.
    assert torch_device(device("a100")) == "cuda:2"
    assert torch_device(detect("cpu")) == "cpu"
    with pytest.raises(
        KernelcastError, match=r"No GPU of this machine is a mi300x-192gb; torch sees: h100-sxm5-80gb, a100"
    ):
        torch_device(device("mi300x"))


# --- threads ---


def test_threads_are_torchs_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setitem(sys.modules, "torch", fake_torch(threads=5))
    assert default_threads() == 5


@pytest.mark.parametrize(
    ("setting", "threads"), [("3", 3), (" 4,2", 4), ("", None), ("0", None), ("many", None), ("-1", None)]
)
def test_threads_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, setting: str, threads: int | None
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert default_threads() == (threads or physical_cores(usable_cpus()))
    assert "torch" not in sys.modules


@pytest.mark.gpu
def test_this_machines_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    seen = detect("gpu")
    assert torch_device(seen).startswith("cuda:")
    assert seen.flops_per_second("float16") >= seen.flops_per_second("float32") > 1e12
    assert seen.memory_bandwidth > 1e11


def test_a_thread_count_must_fit_the_device():
    from kernelcast.errors import InvalidProblemError
    from kernelcast.kernels.detect import check_threads
    from kernelcast.kernels.devices import device

    cpu = detect("cpu")
    check_threads(1, cpu)
    check_threads(0, device("a100"))
    check_threads("two", cpu)  # the schema's to refuse
    for threads in (0, -1, 10**6):
        with pytest.raises(InvalidProblemError, match=r"it must be from 1 to \d+"):
            check_threads(threads, cpu)
    with pytest.raises(InvalidProblemError, match="on a GPU, such as a100-sxm4-80gb, it is 0"):
        check_threads(2, device("a100"))
