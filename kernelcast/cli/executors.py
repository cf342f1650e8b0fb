"""Which processes and devices ``kernelcast collect`` measures with: its options, and the executor that they describe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kernelcast.errors import SettingsError

if TYPE_CHECKING:
    from kernelcast.datasets.isolation import Limits
    from kernelcast.datasets.jobs import Executor
    from kernelcast.kernels import Device

EXECUTORS = ("local", "processes", "ray")
ISOLATION = ("auto", "always", "never")

ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor",
        help="local: on this machine's device; processes: on all its GPUs that are alike; ray: on those of a Ray cluster.",
    ),
]
RayAddressOption = Annotated[
    str | None, typer.Option("--ray-address", help="Of the cluster's head; else the one that ray finds.")
]
WorkerDeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="With ray, or --replay: name of the device, if there are several."),
]
IsolateOption = Annotated[
    str,
    typer.Option(
        "--isolate",
        help="Measure in a child process: auto (Triton and user kernels), always or never.",
    ),
]
MaxMemoryOption = Annotated[
    str | None, typer.Option("--max-memory", help="What a measurement may allocate: 8GiB, 500MB.")
]
TimeLimitOption = Annotated[
    str | None,
    typer.Option("--time-limit", help="For compiling, running and checking one candidate: 90s, 2m."),
]

_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class ExecutorChoice:
    """What the options say.

    Raises:
        SettingsError: one has an unknown value, or contradicts another one.
    """

    executor: str = "local"
    isolate: str = "auto"
    max_memory: str | None = None
    time_limit: str | None = None
    ray_address: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--executor", self.executor, EXECUTORS),
            ("--isolate", self.isolate, ISOLATION),
        ):
            if value not in known:
                raise SettingsError(
                    f"{option} is {value!r}; it must be {', '.join(known[:-1])} or {known[-1]}."
                )
        for option, text in (("--ray-address", self.ray_address), ("--device", self.device)):
            if text is not None and self.executor != "ray":
                raise SettingsError(f"{option} goes with --executor ray; the executor is {self.executor}.")
        if self.isolate == "never":
            if self.executor != "local":
                raise SettingsError(
                    f"--executor {self.executor} measures in child processes; --isolate never goes with local."
                )
            for option, text in (("--max-memory", self.max_memory), ("--time-limit", self.time_limit)):
                if text is not None:
                    raise SettingsError(
                        f"{option} limits a child process; with --isolate never there is none. Leave one of the two out."
                    )
        self.limits()

    def limits(self) -> Limits:
        """What one candidate may take."""
        from kernelcast.cli.collect import parse_duration
        from kernelcast.datasets.isolation import Limits

        given = {"seconds": parse_duration(self.time_limit), "memory_bytes": parse_bytes(self.max_memory)}
        return Limits(**{name: value for name, value in given.items() if value is not None})

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Executor, Device, list[str]]]:
        """(the executor, the device that it measures on, names of other devices that stay idle).

        Raises:
            KernelcastError: there is no such device or cluster, or ray is not installed.
        """
        from kernelcast.cli.common import resolve_device
        from kernelcast.datasets.isolation import Isolated
        from kernelcast.datasets.jobs import InProcess

        measuring: Executor
        device, idle = None, []
        if self.executor == "ray":
            from kernelcast.datasets.ray_executor import RayExecutor

            measuring = cluster = RayExecutor(self.device, address=self.ray_address, limits=self.limits())
            device, idle = cluster.device, cluster.left_out
        else:
            device = resolve_device(None)
            if self.executor == "processes":
                from kernelcast.datasets.pool import ProcessPool

                measuring = pool = ProcessPool(device, limits=self.limits())
                idle = pool.left_out
            elif self.isolate == "never":
                measuring = InProcess(device)
            else:
                limited = self.max_memory is not None or self.time_limit is not None
                measuring = Isolated(
                    device, limits=self.limits(), only_untrusted=self.isolate == "auto" and not limited
                )
        with measuring:
            yield measuring, device, idle


def parse_bytes(text: str | None) -> float | None:
    """``"8GiB"``, ``"500MB"``, ``"2G"`` or plain bytes -> bytes.

    Raises:
        SettingsError: the text is none of these, or not positive.
    """
    if text is None:
        return None
    number = text.strip().rstrip("BKMGTIbkmgti")
    unit = text.strip()[len(number) :].upper()
    try:
        amount = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        amount = 0.0
    if not 1 <= amount < float("inf"):
        raise SettingsError(
            f"The amount of memory {text!r} is not a positive number with a unit behind it, such as 8GiB or 500MB."
        )
    return amount
