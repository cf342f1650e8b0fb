"""Measuring on every device of this machine: one child process a device, each with one job at a time.

A machine with one GPU, or none, has one child: two measurements at a time on one device would disturb each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernelcast.datasets.isolation import Limits, Supervisor, run_jobs
from kernelcast.datasets.jobs import Executor, Job, Result
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Device
from kernelcast.kernels.detect import detect


@dataclass(frozen=True)
class Place:
    """A device of this machine, and the variables of the environment with which a process sees it alone."""

    device: Device
    environment: tuple[tuple[str, str], ...] = ()


def places() -> list[Place]:
    """The GPUs of this machine, each by itself; its CPU where torch sees none."""
    first = detect()
    if first.kind == "cpu":
        return [Place(first)]
    import torch

    devices = [detect("gpu", index) for index in range(torch.cuda.device_count())]
    name = "HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"
    visible = visible_devices(os.environ.get(name), len(devices))
    return [
        Place(
            device,
            ((name, shown), ("CUDA_DEVICE_ORDER", os.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST"))),
        )
        for device, shown in zip(devices, visible, strict=True)
    ]


def visible_devices(setting: str | None, count: int) -> list[str]:
    """How each of the GPUs that this process sees is named in ``CUDA_VISIBLE_DEVICES``: by number or by UUID."""
    listed = [each.strip() for each in (setting or "").split(",") if each.strip()]
    return listed[:count] if len(listed) >= count else [str(index) for index in range(count)]


class ProcessPool(Executor):
    """Measures on every GPU of this machine that is the device asked for, or on its CPU.

    Args:
        device: what the records are of.
        limits: of each candidate.
        found: the devices of this machine; looked up where left out.
        workers: children for each device. More than one is for tests alone: they disturb each other's timing.

    Attributes:
        left_out: names of devices of this machine that are others, and stay idle.

    Raises:
        KernelcastError: no device of this machine is the one asked for.
    """

    def __init__(
        self,
        device: Device,
        *,
        limits: Limits | None = None,
        found: Sequence[Place] | None = None,
        workers: int = 1,
    ) -> None:
        here = places() if found is None else list(found)
        alike = [place for place in here if place.device.fingerprint == device.fingerprint]
        self.left_out = [place.device.name for place in here if place not in alike]
        if not alike:
            raise KernelcastError(
                f"No device of this machine is a {device.name}; it has: {', '.join(self.left_out) or 'none'}."
            )
        self._supervisors = [
            Supervisor(place.device, limits or Limits(), _environment(place.environment))
            for place in alike
            for _ in range(workers)
        ]

    def __len__(self) -> int:
        """Children at most."""
        return len(self._supervisors)

    def run(
        self,
        jobs: Iterable[Job],
        *,
        plan: TimingPlan,
        workload: str,
        on_candidate: Callable[[Job, int], None] | None = None,
    ) -> Iterator[Result]:
        return run_jobs(self._supervisors, jobs, plan=plan, workload=workload, on_candidate=on_candidate)

    def close(self) -> None:
        for supervisor in self._supervisors:
            supervisor.close()


def _environment(pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    return dict(pairs)
