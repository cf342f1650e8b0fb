"""What the steps of the GPU check share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelcast.kernels import Device

DETAIL_CHARACTERS = 500


class Broken(Exception):
    """The device's context no longer works: an earlier kernel read or wrote where it must not."""


def device_of(spec: Mapping[str, Any]) -> Device:
    """The device that a step runs on."""
    from kernelcast.kernels.detect import detect

    return detect(spec["device"])


def require_sound(device: Device) -> None:
    """Wait for the device. After an illegal access every further call of this process fails.

    Raises:
        Broken: the device answers with an error.
    """
    if device.kind != "gpu":
        return
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise Broken(str(error)) from error
