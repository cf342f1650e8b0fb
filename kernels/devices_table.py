"""The facts behind :mod:`kernelcast.kernels.devices`: what each architecture's core can do, and each card's own figures.

Sources, named in the rows by their short form:

- *CUDA guide*: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Arithmetic
  Instructions": warps, registers and shared memory of a streaming multiprocessor.
- *tuning guide*: NVIDIA's Volta ... Blackwell tuning guides: shared memory that a block may opt in to, L2.
- *V100 / Turing / A100 / GA102 / H100 / Ada / RTX Blackwell whitepaper*: NVIDIA's architecture whitepapers.
- *datasheet*: the vendor's datasheet or product brief of that card.
- *driver*: what the driver reports of the card, where no document gives the figure.
- *CDNA2 / CDNA3 / CDNA4 whitepaper*, *ROCm specifications* (rocm.docs.amd.com, "AMD GPU specifications").

Peaks are dense: where a datasheet gives figures with 2:4 sparsity, half of them. Of the units that can do a dtype the
fastest counts (tensor or matrix cores, for float64 too), summing in float32 (int32 for int8), as torch and Triton do. A
dtype without units of its own is left out, and so counts as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TERA = 1e12

#: GeForce cards sum 16-bit and TF32 products in float32 at half the rate of the professional cards with the same
#: streaming multiprocessor (GA102 whitepaper, table 2; Ada whitepaper, appendix A; RTX Blackwell whitepaper, appendix A).
HALVED_ON_GEFORCE = ("tf32", "float16", "bfloat16")


@dataclass(frozen=True)
class Architecture:
    """What one core (streaming multiprocessor or compute unit) of an architecture has.

    Attributes:
        name: ``"sm80"``, ``"gfx942"``, ...
        vendor: ``"nvidia"`` or ``"amd"``.
        warp_size: threads that run in lockstep.
        max_threads: resident threads of one core.
        registers: 32-bit registers of one core.
        shared_bytes_per_block: shared memory that one block may use, with opt-in.
        shared_bytes: shared memory of one core.
        fma_per_clock: (dtype, fused multiply-adds that one core starts in one clock).
        memory_side_cache_bytes: a cache between the L2 and the memory, of the whole device; 0 if there is none.
    """

    name: str
    vendor: str
    warp_size: int
    max_threads: int
    registers: int
    shared_bytes_per_block: int
    shared_bytes: int
    fma_per_clock: tuple[tuple[str, int], ...]
    memory_side_cache_bytes: int = 0


@dataclass(frozen=True)
class Card:
    """One card, and the words by which drivers name it.

    Attributes:
        name: the slug that users type.
        architecture: a key of :data:`ARCHITECTURES`.
        cores: streaming multiprocessors or compute units that are switched on.
        clock_hz: boost clock.
        l2_bytes: level-2 cache of the whole device.
        memory_bytes: nominal; drivers report up to 9% less (ECC, reserved pages).
        memory_bandwidth: bytes per second.
        peak_teraflops: (dtype, 10^12 FLOP/s), dense.
        words: each must be among the words of the driver's name for the card.
        other_words: none may be: they name a sibling with the same core count and memory.
    """

    name: str
    architecture: str
    cores: int
    clock_hz: float
    l2_bytes: int
    memory_bytes: int
    memory_bandwidth: float
    peak_teraflops: tuple[tuple[str, float], ...]
    words: tuple[str, ...] = ()
    other_words: tuple[str, ...] = ()


def _nvidia(name: str, threads: int, per_block: int, shared: int, **fma: int) -> Architecture:
    # Every architecture since Volta has warps of 32 and 64 Ki registers (CUDA guide).
    return Architecture(name, "nvidia", 32, threads, 65536, per_block, shared, tuple(fma.items()))


def _amd(name: str, lds: int, cache: int, **fma: int) -> Architecture:
    # Wavefronts of 64, 4 SIMD units of 8 wavefronts, 512 KiB of vector registers (ROCm specifications, CDNA whitepapers).
    return Architecture(name, "amd", 64, 2048, 131072, lds, lds, tuple(fma.items()), cache)


#: Shared memory, registers and threads: CUDA guide and tuning guides; from sm80 on a block can have all of a core's
#: shared memory but 1 KiB, which the system keeps. Multiply-adds a clock: the architecture's whitepaper.
ARCHITECTURES: dict[str, Architecture] = {
    arch.name: arch
    for arch in (
        _nvidia("sm70", 2048, 96 * KIB, 96 * KIB, float64=32, float32=64, float16=512),
        _nvidia("sm75", 1024, 64 * KIB, 64 * KIB, float64=2, float32=64, float16=512, int8=1024),
        # float64 on tensor cores.
        _nvidia(
            "sm80", 2048, 163 * KIB, 164 * KIB,
            float64=64, float32=64, tf32=512, float16=1024, bfloat16=1024, int8=2048,
        ),
        _nvidia(
            "sm86", 1536, 99 * KIB, 100 * KIB,
            float64=2, float32=128, tf32=256, float16=512, bfloat16=512, int8=1024,
        ),
        _nvidia(
            "sm89", 1536, 99 * KIB, 100 * KIB,
            float64=2, float32=128, tf32=256, float16=512, bfloat16=512, int8=1024,
        ),
        # float64 on tensor cores.
        _nvidia(
            "sm90", 2048, 227 * KIB, 228 * KIB,
            float64=128, float32=128, tf32=1024, float16=2048, bfloat16=2048, int8=4096,
        ),
        _nvidia(
            "sm100", 2048, 227 * KIB, 228 * KIB,
            float64=64, float32=128, tf32=2048, float16=4096, bfloat16=4096, int8=8192,
        ),
        _nvidia(
            "sm120", 1536, 99 * KIB, 100 * KIB,
            float64=2, float32=128, tf32=256, float16=512, bfloat16=512, int8=1024,
        ),
        # float32 and float64 on matrix cores; the packed float32 of the vector units has the same rate.
        _amd("gfx90a", 64 * KIB, 0, float64=128, float32=128, float16=512, bfloat16=512, int8=512),
        _amd(
            "gfx942", 64 * KIB, 256 * MIB,
            float64=128, float32=128, tf32=512, float16=1024, bfloat16=1024, int8=2048,
        ),
        # CDNA4 has no TF32 of its own any more, and half of CDNA3's float64 matrix rate.
        _amd("gfx950", 160 * KIB, 256 * MIB, float64=64, float32=128, float16=2048, bfloat16=2048, int8=4096),
    )
}  # fmt: skip


def _peaks(**teraflops: float) -> tuple[tuple[str, float], ...]:
    return tuple(teraflops.items())


_A100 = _peaks(float64=19.5, float32=19.5, tf32=156, float16=312, bfloat16=312, int8=624)
_H100_SXM = _peaks(float64=66.9, float32=66.9, tf32=494.7, float16=989.4, bfloat16=989.4, int8=1978.9)

CARDS: tuple[Card, ...] = (
    # A100 whitepaper and datasheet. The PCIe card of 40 GB has the same facts under a lower power limit.
    Card("a100-sxm4-40gb", "sm80", 108, 1.410e9, 40 * MIB, 40 * GIB, 1555e9, _A100, ("a100",)),
    Card("a100-sxm4-80gb", "sm80", 108, 1.410e9, 40 * MIB, 80 * GIB, 2039e9, _A100, ("a100", "sxm4")),
    Card("a100-pcie-80gb", "sm80", 108, 1.410e9, 40 * MIB, 80 * GIB, 1935e9, _A100, ("a100", "pcie")),
    # H100 whitepaper (final figures) and datasheet. The tensor peaks are given at 1.83 GHz, float32 at 1.98.
    Card("h100-sxm5-80gb", "sm90", 132, 1.980e9, 50 * MIB, 80 * GIB, 3352e9, _H100_SXM, ("h100",)),
    # H100 datasheet. The tensor peaks are given at 1.62 GHz, float32 at 1.755.
    Card(
        "h100-pcie-80gb", "sm90", 114, 1.755e9, 50 * MIB, 80 * GIB, 2039e9,
        _peaks(float64=51.2, float32=51.2, tf32=378, float16=756, bfloat16=756, int8=1513), ("h100",),
    ),
    # H200 datasheet; L2 from the driver (60 MiB: more of the same die is switched on than in an H100). The NVL card of
    # the same size has a lower clock.
    Card("h200-sxm-141gb", "sm90", 132, 1.980e9, 60 * MIB, 141 * GIB, 4800e9, _H100_SXM, ("h200",), ("nvl",)),
    # HGX B200 datasheet (an eighth of the board's figures); SMs, L2 (126.5 MiB), clock and bandwidth (7,680 bits at
    # 3.996 GHz, both edges) from the driver; the Blackwell tuning guide says 126 MB too.
    Card(
        "b200-sxm-180gb", "sm100", 148, 1.965e9, 253 * MIB // 2, 180 * GIB, 7672e9,
        _peaks(float64=37, float32=75, tf32=1125, float16=2250, bfloat16=2250, int8=4500), ("b200",),
    ),
    # L4 datasheet; L2 from the Ada whitepaper; float64 is 1/64 of float32 (CUDA guide).
    Card(
        "l4-24gb", "sm89", 58, 2.040e9, 48 * MIB, 24 * GIB, 300e9,
        _peaks(float64=0.473, float32=30.3, tf32=60, float16=121, bfloat16=121, int8=242), ("l4",),
    ),
    # L40S datasheet; L2 from the Ada whitepaper; float64 is 1/64 of float32 (CUDA guide).
    Card(
        "l40s-48gb", "sm89", 142, 2.520e9, 96 * MIB, 48 * GIB, 864e9,
        _peaks(float64=1.43, float32=91.6, tf32=183, float16=362, bfloat16=362, int8=733), ("l40s",),
    ),
    # Turing whitepaper, T4 datasheet; float64 is 1/32 of float32 (CUDA guide).
    Card(
        "t4-16gb", "sm75", 40, 1.590e9, 4 * MIB, 16 * GIB, 320e9,
        _peaks(float64=0.254, float32=8.14, float16=65, int8=130), ("t4",),
    ),
    # V100 whitepaper and datasheet.
    Card(
        "v100-sxm2-32gb", "sm70", 80, 1.530e9, 6 * MIB, 32 * GIB, 900e9,
        _peaks(float64=7.8, float32=15.7, float16=125), ("v100", "sxm2"),
    ),
    # A10 datasheet; L2 from the GA102 whitepaper; float64 is 1/64 of float32 (CUDA guide).
    Card(
        "a10-24gb", "sm86", 72, 1.695e9, 6 * MIB, 24 * GIB, 600e9,
        _peaks(float64=0.488, float32=31.2, tf32=62.5, float16=125, bfloat16=125, int8=250), ("a10",),
    ),
    # RTX A4000 datasheet (19.2 and, with sparsity, 153.4 TFLOPS); the other rates of the GA10x SM (GA102 whitepaper).
    Card(
        "rtx-a4000-16gb", "sm86", 48, 1.560e9, 4 * MIB, 16 * GIB, 448e9,
        _peaks(float64=0.3, float32=19.2, tf32=38.3, float16=76.7, bfloat16=76.7, int8=153.4), ("rtx", "a4000"),
    ),
    # GA102 whitepaper, table 2.
    Card(
        "rtx-3090-24gb", "sm86", 82, 1.695e9, 6 * MIB, 24 * GIB, 936e9,
        _peaks(float64=0.556, float32=35.6, tf32=35.6, float16=71, bfloat16=71, int8=284), ("rtx", "3090"),
    ),
    # Ada whitepaper, appendix A.
    Card(
        "rtx-4090-24gb", "sm89", 128, 2.520e9, 72 * MIB, 24 * GIB, 1008e9,
        _peaks(float64=1.29, float32=82.6, tf32=82.6, float16=165.2, bfloat16=165.2, int8=660.6), ("rtx", "4090"),
    ),
    # RTX Blackwell whitepaper, appendix A. The card "5090 D" has slower tensor cores.
    Card(
        "rtx-5090-32gb", "sm120", 170, 2.407e9, 96 * MIB, 32 * GIB, 1792e9,
        _peaks(float64=1.64, float32=104.8, tf32=104.8, float16=209.5, bfloat16=209.5, int8=838),
        ("rtx", "5090"), ("d",),
    ),
    # CDNA2 whitepaper, MI250X datasheet. The module of 128 GB is two dies (GCD), and ROCm shows each as a device of its
    # own: every figure here is of one die, half of the datasheet's. No sibling has 110 compute units, so the name, which
    # some drivers leave out, is not asked.
    Card(
        "mi250x-128gb", "gfx90a", 110, 1.700e9, 8 * MIB, 64 * GIB, 1638.4e9,
        _peaks(float64=47.9, float32=47.9, float16=191.5, bfloat16=191.5, int8=191.5),
    ),
    # CDNA3 whitepaper, MI300X datasheet, ROCm specifications. L2: 4 MiB in each of 8 dies (a driver reports one die's);
    # last level: 256 MiB of Infinity Cache. 304 compute units with 192 GB name it, as above.
    Card(
        "mi300x-192gb", "gfx942", 304, 2.100e9, 32 * MIB, 192 * GIB, 5325e9,
        _peaks(float64=163.4, float32=163.4, tf32=653.7, float16=1307.4, bfloat16=1307.4, int8=2614.9),
    ),
    # CDNA4 whitepaper, MI355X datasheet, ROCm specifications. The MI350X has the same sizes and a lower clock.
    Card(
        "mi355x-288gb", "gfx950", 256, 2.400e9, 32 * MIB, 288 * GIB, 8000e9,
        _peaks(float64=78.6, float32=157.3, float16=2516.6, bfloat16=2516.6, int8=5033.2), ("mi355x",),
    ),
)  # fmt: skip

ALIASES: dict[str, str] = {
    "a100": "a100-sxm4-80gb",
    "a100-40gb": "a100-sxm4-40gb",
    "a100-80gb": "a100-sxm4-80gb",
    "a100-pcie": "a100-pcie-80gb",
    "h100": "h100-sxm5-80gb",
    "h100-sxm": "h100-sxm5-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h200": "h200-sxm-141gb",
    "b200": "b200-sxm-180gb",
    "l4": "l4-24gb",
    "l40s": "l40s-48gb",
    "t4": "t4-16gb",
    "v100": "v100-sxm2-32gb",
    "a10": "a10-24gb",
    "a4000": "rtx-a4000-16gb",
    "rtx-a4000": "rtx-a4000-16gb",
    "rtx-3090": "rtx-3090-24gb",
    "rtx-4090": "rtx-4090-24gb",
    "rtx-5090": "rtx-5090-32gb",
    "mi250x": "mi250x-128gb",
    "mi300x": "mi300x-192gb",
    "mi355x": "mi355x-288gb",
}
