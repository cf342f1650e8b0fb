"""Measuring on the devices of a Ray cluster: one actor a device, each with one job at a time.

An actor has a child process of its own (:mod:`kernelcast.datasets.isolation`) and passes on what the child tells, so that the
collecting process, which alone writes the store, can go on from there when an actor or its whole machine is lost. ray is
imported when an executor is made.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kernelcast.datasets.isolation import START_LIMIT_S, Limits, Supervisor
from kernelcast.datasets.isolation_child import described
from kernelcast.datasets.isolation_job import JobState, Message
from kernelcast.datasets.jobs import Executor, Job, Result
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import KernelcastError, MissingExtraError
from kernelcast.kernels import Device
from kernelcast.kernels.detect import detect

#: Seconds for which an actor waits for its child before it answers with nothing.
POLL_S = 1.0
#: Seconds between two looks for machines that have joined, or come back.
RENEW_S = 10.0


class Actor:
    """Measures on one device of a cluster. Its methods are called one at a time, and none of them waits long."""

    def __init__(self, kind: str, limits: Mapping[str, float]) -> None:
        self._device = detect(kind)
        self._supervisor = Supervisor(self._device, Limits(**limits))

    def describe(self) -> dict[str, Any]:
        """The device, and the process."""
        return {"device": self._device.to_dict(), "pid": os.getpid()}

    def begin(self, request: Mapping[str, Any]) -> list[Message]:
        """Begin a job, or what is left of one. Returns what is known of it at once."""
        wanted = Device.from_dict(request["device"])
        if wanted.fingerprint != self._device.fingerprint:
            detail = f"The job is for a {wanted.name}; this worker has a {self._device.name}."
            return [{"kind": "refused", "detail": detail}]
        try:
            problem, candidates = described(request)
        except KernelcastError as error:
            return [{"kind": "refused", "detail": str(error)}]
        seconds = math.inf if request["seconds"] is None else request["seconds"]
        numbers = [number for number, _ in request["candidates"]]
        state = JobState(
            Job(problem, tuple(candidates), seconds),
            self._device,
            TimingPlan(**request["plan"]),
            "",
            numbers,
        )
        return self._supervisor.begin(state)

    def poll(self) -> list[Message]:
        """What has been told since the last call; waits a little for something."""
        from multiprocessing.connection import wait

        end_s = time.monotonic() + POLL_S
        told: list[Message] = []
        while not told and self._supervisor.pending and (left_s := end_s - time.monotonic()) > 0:
            wait([self._supervisor.fileno()], timeout=min(left_s, self._supervisor.patience_s))
            told = self._supervisor.attend()
        return told

    def stop(self) -> None:
        """End the child, and the job in hand."""
        self._supervisor.close()


class RayExecutor(Executor):
    """Measures on every device of a cluster that is the one asked for.

    Args:
        device: what the records are of, or its name; where left out, the device of the cluster, if all are alike.
            Machines without a GPU count only where no machine has one, or their CPU is asked for.
        address: of the cluster; where left out, the one that ray finds, or a new local one.
        limits: of each candidate.
        workers: actors for each machine without a GPU. More than one is for tests alone: they disturb each other's timing.
        init: further arguments of ``ray.init``.

    Attributes:
        device: what the records are of.
        left_out: names of the cluster's devices that are others, and stay idle.

    Raises:
        MissingExtraError: ray is not installed.
        KernelcastError: there is no cluster, its devices differ and none was asked for, or none is the one asked for.
    """

    def __init__(
        self,
        device: Device | str | None = None,
        *,
        address: str | None = None,
        limits: Limits | None = None,
        workers: int = 1,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", "ray", "Measuring on a cluster") from error
        self._ray: Any = ray
        self._limits = dataclasses.asdict(limits or Limits())
        self._workers = workers
        self._seats: list[_Seat] = []
        self._given_up: set[tuple[str, int]] = set()
        self._why = "it has none"
        self._renewed_s = -math.inf
        self._mine = not ray.is_initialized()
        if self._mine:
            try:
                ray.init(
                    **{
                        "address": address,
                        "include_dashboard": None if address else False,
                        "log_to_driver": False,
                    }
                    | dict(init or {})
                )
            except Exception as error:
                raise KernelcastError(
                    f"There is no Ray cluster to measure on ({type(error).__name__}: {error})."
                ) from error
        try:
            self.device, self.left_out = self._choose(device)
        except BaseException:
            self.close()
            raise

    def _choose(self, wanted: Device | str | None) -> tuple[Device, list[str]]:
        """Have an actor on every device of a kind, and keep those on the one asked for."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
        self._kind = wanted.kind if isinstance(wanted, Device) else "gpu" if has_gpus else "cpu"
        self._fill()
        found = {seat.device.fingerprint: seat.device for seat in self._seats if seat.device is not None}
        names = ", ".join(sorted(each.name for each in found.values())) or "none"
        if wanted is None:
            if len(found) != 1:
                raise KernelcastError(
                    f"The cluster's devices are: {names}. Records are of one device: name the one to measure on with --device."
                    if found
                    else f"No worker could be started on a device of the Ray cluster: {self._why}."
                )
            (wanted,) = found.values()
        if isinstance(wanted, str):
            wanted = self._named(wanted, found.values(), names)
        if wanted.fingerprint not in found:
            raise KernelcastError(f"No device of the Ray cluster is a {wanted.name}; it has: {names}.")
        self.device = wanted
        self._dismiss()
        return wanted, sorted(each.name for each in found.values() if each.fingerprint != wanted.fingerprint)

    @staticmethod
    def _named(name: str, found: Iterable[Device], names: str) -> Device:
        for each in found:
            if each.name == name:
                return each
        raise KernelcastError(f"No device of the Ray cluster is a {name}; it has: {names}.")

    def _dismiss(self) -> None:
        """Release the actors on other devices."""
        for seat in self._seats:
            if seat.device is not None and seat.device.fingerprint != self.device.fingerprint:
                seat.release()

    def _fill(self) -> None:
        """Start an actor on each device of the machines that are there and have none."""
        ray = self._ray
        self._renewed_s = time.monotonic()
        new: list[_Seat] = []
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            resources = node["Resources"]
            if self._kind == "gpu":
                count = int(resources.get("GPU", 0))
            else:
                count = self._workers if resources.get("CPU", 0) >= 1 else 0
            for index in range(count):
                place = (node["NodeID"], index)
                taken = any(seat.place == place and seat.usable for seat in self._seats)
                if not taken and place not in self._given_up:
                    new.append(_Seat(ray, place, self._kind, self._limits))
        ready: list[Any] = []
        if new:
            ready, _ = ray.wait([seat.pending for seat in new], num_returns=len(new), timeout=START_LIMIT_S)
        for seat in new:
            self._seats = [each for each in self._seats if each.place != seat.place]
            if seat.pending in ready and seat.described():
                self._seats.append(seat)
            else:  # taken by another program, or without what an actor needs
                self._given_up.add(seat.place)
                self._why = seat.why
                seat.kill()

    @property
    def pids(self) -> list[int]:
        """Processes of the actors that measure."""
        return [seat.pid for seat in self._seats if seat.usable and not seat.released]

    def run(
        self,
        jobs: Iterable[Job],
        *,
        plan: TimingPlan,
        workload: str,
        on_candidate: Callable[[Job, int], None] | None = None,
    ) -> Iterator[Result]:
        waiting = iter(jobs)
        returned: list[JobState] = []  # of actors that were lost
        more = True
        try:
            while True:
                seats = self._usable(need=bool(returned))
                for seat in [each for each in seats if each.state is None]:
                    state = returned.pop() if returned else None
                    if state is None and more:
                        job = next(waiting, None)
                        more = job is not None
                        state = None if job is None else JobState(job, self.device, plan, workload)
                    if state is None:
                        break
                    seat.begin(state)
                busy = [each for each in seats if each.state is not None]
                if not busy and not returned:
                    return
                if not busy:
                    continue
                ready, _ = self._ray.wait([each.pending for each in busy], timeout=POLL_S)
                for seat in [each for each in busy if each.pending in ready]:
                    yield from self._attend(seat, returned, on_candidate)
        except (KeyboardInterrupt, KernelcastError):
            busy = [seat for seat in self._seats if seat.state is not None]
            for state in [*returned, *(seat.state for seat in busy if seat.state is not None)]:
                state.interrupt()
                if (result := state.result()).measurements:
                    yield result
            raise
        finally:
            for seat in self._seats:
                if seat.state is not None:
                    seat.finish()
                    seat.kill()  # in the middle of something

    def _attend(
        self, seat: _Seat, returned: list[JobState], on_candidate: Callable[[Job, int], None] | None
    ) -> Iterator[Result]:
        state = seat.state
        assert state is not None
        try:
            told = self._ray.get(seat.pending)
        except self._ray.exceptions.RayActorError as error:
            seat.lost()
            detail = f"the worker was lost: {str(error).splitlines()[0]}"
            state.take(
                {"kind": "lost", "number": None, "outcome": "crash", "detail": detail, "outside": True}
            )
            if state.ended:
                yield state.result()
            else:
                returned.append(state)
            return
        except self._ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, KernelcastError) else KernelcastError(str(error)) from error
        for message in told:
            state.take(message)
        if told and state.checked and on_candidate is not None:
            on_candidate(state.job, state.checked)
        if state.ended:
            yield seat.finish()
        else:
            seat.poll()

    def _usable(self, *, need: bool) -> list[_Seat]:
        """Actors that measure. Now and then lost ones are replaced and new machines looked for; at once, where one is needed."""
        found = [seat for seat in self._seats if seat.usable and not seat.released]
        lost = any(not seat.usable for seat in self._seats)
        if not found or (lost and need) or time.monotonic() - self._renewed_s > RENEW_S:
            self._fill()
            self._dismiss()
            found = [seat for seat in self._seats if seat.usable and not seat.released]
        if not found:
            raise KernelcastError(
                f"The Ray cluster has lost every worker on a {self.device.name}. What was measured is kept; the same "
                "command goes on from there."
            )
        return found

    def close(self) -> None:
        for seat in self._seats:
            seat.kill()
        self._seats = []
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()


class _Seat:
    """One actor, as the collecting process sees it.

    Attributes:
        place: (node, which device of it).
        usable: whether it is alive, as far as is known.
        why: what is known of one that does not start.
        released: whether its device is another than what is measured.
        pending: what it has been asked last.
        state: of the job that it has.
    """

    def __init__(self, ray: Any, place: tuple[str, int], kind: str, limits: Mapping[str, float]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.place = place
        self.usable, self.released = True, False
        self.device: Device | None = None
        self.pid = 0
        self.why = f"it did not start within {START_LIMIT_S:g} s"
        self.state: JobState | None = None
        self._ray = ray
        passed = {
            name: value for name, value in os.environ.items() if name.startswith(("KERNELCAST_", "OMP_"))
        }
        self._actor = (
            ray.remote(Actor)
            .options(
                num_gpus=1 if kind == "gpu" else 0,
                num_cpus=0 if kind == "gpu" else 1,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place[0], soft=False),
                runtime_env={"env_vars": passed} if passed else None,
            )
            .remote(kind, dict(limits))
        )
        self.pending: Any = self._actor.describe.remote()

    def described(self) -> bool:
        """Take in what the actor says of itself; False where it cannot."""
        try:
            said = self._ray.get(self.pending)
        except self._ray.exceptions.RayError as error:
            self.why = str(error).strip()[-300:]
            return False
        self.device, self.pid = Device.from_dict(said["device"]), int(said["pid"])
        return True

    def begin(self, state: JobState) -> None:
        """Hand over a job, or what is left of one."""
        self.state = state
        self.pending = self._actor.begin.remote(state.request())

    def poll(self) -> None:
        """Ask what is new."""
        self.pending = self._actor.poll.remote()

    def finish(self) -> Result:
        """Take the job away, with what came of it."""
        assert self.state is not None
        result, self.state = self.state.result(), None
        return result

    def lost(self) -> None:
        """Note that the actor is gone."""
        self.usable, self.state = False, None

    def release(self) -> None:
        """Let the device go, and leave it alone from now on."""
        self.released = True
        self._ray.kill(self._actor)

    def kill(self) -> None:
        """End the actor; its child ends with it."""
        if self.usable and not self.released:
            self._ray.kill(self._actor)
        self.usable = False
