"""Where registered models lie, and which of them stands for a device and an operation. Standard library alone.

::

    models/
        <device>/
            device.json                   the hardware facts; what a lookup compares, whatever the folder is called
            <operation>/
                champion.json             {"version": "0002-3f2a9c1b", "previous": ["0001-77ab0c12"]}
                0001-77ab0c12/            an artifact: kernelcast.costmodel.artifact
                0002-3f2a9c1b/

:mod:`kernelcast.training.registry` writes it; the run time only looks up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelcast.errors import ArtifactError, InvalidRecordError
from kernelcast.kernels import Device
from kernelcast.kernels.devices import MEMORY_TOLERANCE

ALIAS_FILE = "champion.json"
DEVICE_FILE = "device.json"

#: Counter and the first digits of the dataset's hash.
VERSION_PATTERN = re.compile(r"(\d{4,9})-[0-9a-f]{8}")
#: Names of operations and folders that cannot lead out of the place they are put in.
SAFE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}")

#: A device's facts and an alias take a few kilobytes.
_MAX_BYTES = 2**20


@dataclass(frozen=True)
class Alias:
    """Which version stands, and which stood before it, the latest last."""

    version: str
    previous: tuple[str, ...] = ()


def find_champion(models_dir: Path, device: Device, operation: str) -> Path | None:
    """The folder of the model that stands for an operation on a device; None where there is none.

    Devices are compared by their hardware facts: one that is equal in all of them comes before one that is
    :func:`same_hardware`. Of the latter, one of the same name comes first; the name decides nothing else.

    Raises:
        ArtifactError: there is one by the records, but the alias file is broken or names a folder that is gone.
    """
    if not SAFE_NAME_PATTERN.fullmatch(operation):
        return None
    for folder in matching_folders(models_dir, device):
        alias = read_alias(folder / operation)
        if alias is None:
            continue
        found = folder / operation / alias.version
        if not found.is_dir():
            raise ArtifactError(
                f"{folder / operation / ALIAS_FILE} names {alias.version}, which is gone. "
                "Choose another with: kernelcast models promote"
            )
        return found
    return None


def matching_folders(models_dir: Path, device: Device) -> list[Path]:
    """The folders of a device's models: of equal facts first, then of the same hardware, its own name before others."""
    ranked = []
    for folder, recorded in device_folders(models_dir):
        if recorded.fingerprint == device.fingerprint:
            ranked.append((0, folder))
        elif same_hardware(recorded, device):
            ranked.append((1 if recorded.name == device.name else 2, folder))
    return [folder for _, folder in sorted(ranked)]


def device_folders(models_dir: Path) -> Iterator[tuple[Path, Device]]:
    """(folder, hardware facts) of every device with models, sorted by name. What is no such folder is passed over."""
    if not models_dir.is_dir():
        return
    for path in sorted(models_dir.glob(f"*/{DEVICE_FILE}")):
        try:
            if path.stat().st_size <= _MAX_BYTES:
                yield path.parent, Device.from_dict(json.loads(path.read_bytes()))
        except (OSError, ValueError, InvalidRecordError):
            # One broken folder must not hide the models of all other devices.
            continue


def same_hardware(one: Device, other: Device) -> bool:
    """Whether two devices agree in what a driver reports: architecture, cores, and memory within 10%.

    Their fingerprints may still differ, as when a later table corrects a clock rate.
    """
    return (
        (one.kind, one.vendor, one.architecture, one.cores) == (other.kind, other.vendor, other.architecture, other.cores)
        and abs(one.memory_bytes - other.memory_bytes) <= MEMORY_TOLERANCE * max(one.memory_bytes, other.memory_bytes)
    )  # fmt: skip


def read_alias(folder: Path) -> Alias | None:
    """The alias of one operation's folder; None where nothing has been promoted.

    Raises:
        ArtifactError: the file is broken.
    """
    path = folder / ALIAS_FILE
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ArtifactError(f"{path} is larger than any alias file.")
        data = json.loads(path.read_bytes())
        version, previous = data["version"], tuple(data["previous"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path} is not an alias file ({type(error).__name__}: {error}).") from error
    for name in (version, *previous):
        if not (isinstance(name, str) and VERSION_PATTERN.fullmatch(name)):
            raise ArtifactError(f"{path} names {name!r}, which is not a version such as 0001-3f2a9c1b.")
    return Alias(version, previous)
