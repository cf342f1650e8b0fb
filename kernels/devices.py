"""Known devices by name: what a forecast can be asked for without having the hardware."""

from __future__ import annotations

import re

from kernelcast.errors import UnknownNameError
from kernelcast.kernels.device import Device
from kernelcast.kernels.devices_table import ALIASES, ARCHITECTURES, CARDS, TERA, Card

#: A driver reports less memory than the card's name says: error correction takes 1/16 of GDDR, the system some more.
MEMORY_TOLERANCE = 0.10


def device(name: str) -> Device:
    """A known device, by its name or an alias such as ``"a100"``. Case, spaces and underscores do not matter.

    Raises:
        UnknownNameError: there is none of that name; the message lists those there are.
    """
    if not isinstance(name, str):
        raise UnknownNameError("device", name, device_names())
    slug = re.sub(r"[\s_]+", "-", name.strip().lower())
    slug = ALIASES.get(slug, slug)
    for card in CARDS:
        if card.name == slug:
            return _device(card)
    raise UnknownNameError("device", name, device_names())


def device_names() -> list[str]:
    """The names of all known devices, sorted, without the aliases."""
    return sorted(card.name for card in CARDS)


def find_device(architecture: str, cores: int, memory_bytes: int, marketing_name: str) -> Device | None:
    """The known device with these hardware facts, or None.

    Names alone do not identify a card: drivers spell them in many ways and some leave them out. So architecture, core
    count and memory (within 10%) must agree, and words of the name only tell apart cards that agree in those.

    Args:
        architecture: ``"sm80"``, ``"gfx942"``, ...
        cores: streaming multiprocessors or compute units.
        memory_bytes: as the driver reports it.
        marketing_name: as the driver reports it: ``"NVIDIA A100-SXM4-80GB"``.
    """
    words = set(re.findall(r"[a-z0-9]+", marketing_name.lower()))
    for card in CARDS:
        if (
            card.architecture == architecture
            and card.cores == cores
            and abs(memory_bytes - card.memory_bytes) <= MEMORY_TOLERANCE * card.memory_bytes
            and words.issuperset(card.words)
            and words.isdisjoint(card.other_words)
        ):
            return _device(card)
    return None


def _device(card: Card) -> Device:
    arch = ARCHITECTURES[card.architecture]
    return Device(
        name=card.name,
        kind="gpu",
        vendor=arch.vendor,
        architecture=arch.name,
        cores=card.cores,
        warp_size=arch.warp_size,
        max_threads_per_core=arch.max_threads,
        registers_per_core=arch.registers,
        shared_bytes_per_block=arch.shared_bytes_per_block,
        shared_bytes_per_core=arch.shared_bytes,
        l2_bytes=card.l2_bytes,
        llc_bytes=max(card.l2_bytes, arch.memory_side_cache_bytes),
        memory_bytes=card.memory_bytes,
        memory_bandwidth=card.memory_bandwidth,
        clock_hz=card.clock_hz,
        # Sorted, so that a device written to JSON with sorted keys and read back has the same fingerprint.
        peak_flops=tuple(sorted((dtype, peak * TERA) for dtype, peak in card.peak_teraflops)),
    )
