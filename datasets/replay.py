"""Recorded data in place of a device: any strategy is tried on what a store holds, and nothing is measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelcast.datasets.collect import CollectSummary, Progress
from kernelcast.datasets.jobs import Executor, Exhaustive, Job, Result, Strategy
from kernelcast.datasets.record import Measurement
from kernelcast.datasets.store import Store
from kernelcast.datasets.strategy import default_of
from kernelcast.datasets.timing import TimingPlan
from kernelcast.errors import StoreError, UnknownNameError
from kernelcast.kernels import Candidate, Device, Problem
from kernelcast.kernels.devices import device as known_device


@dataclass(frozen=True)
class Recording:
    """What a store holds of one operation on one device.

    Attributes:
        root: the store's folder.
        device: the hardware facts.
        problems: in a fixed order.
        tables: the candidates that were recorded of each, the default first, the others by key. There are no others,
            whatever the catalogue has.
        measurements: one of each candidate.
    """

    root: Path
    device: Device
    problems: tuple[Problem, ...]
    tables: tuple[tuple[Candidate, ...], ...]
    measurements: dict[tuple[Problem, Candidate], Measurement]

    @classmethod
    def read(
        cls,
        root: Path,
        operation: str,
        *,
        device: str | Device | None = None,
        workloads: Collection[str] | None = None,
    ) -> Recording:
        """Read a store.

        Of a problem that several workloads have, the one counts that has most of its candidates, as their times compare
        with one another. Of several records of one candidate the newest counts, of equally new ones the one with the
        largest id.

        Args:
            root: the store's folder.
            operation: its name; it need not be in the catalogue.
            device: a device, its name or its fingerprint; None where the store has one only.
            workloads: only these; all where None.

        Raises:
            StoreError: there is no store, or it holds nothing of the kind.
        """
        store = Store(root)
        found = _device_in(store, device)
        groups: dict[Problem, dict[str, dict[Candidate, Measurement]]] = {}
        missing = set(workloads or ())
        for each in store.measurements(operation=operation, device=found.fingerprint, workloads=workloads):
            missing.discard(each.workload)
            group = groups.setdefault(each.problem, {}).setdefault(each.workload, {})
            other = group.get(each.candidate)
            if other is None or (each.created_at, each.id) > (other.created_at, other.id):
                group[each.candidate] = each
        if not groups or missing:
            of = f" of the workload {', '.join(sorted(missing))}" if missing else ""
            raise StoreError(
                f"{root} holds no records of {operation} on {found.name}{of}; kernelcast data summary lists what it holds."
            )
        default = default_of(operation)
        tables: list[tuple[Candidate, ...]] = []
        measurements: dict[tuple[Problem, Candidate], Measurement] = {}
        for problem, by_workload in groups.items():
            name = min(by_workload, key=lambda name: (-len(by_workload[name]), name))
            group = by_workload[name]
            tables.append(tuple(sorted(group, key=lambda one: (one != default, one.key))))
            measurements |= {(problem, candidate): each for candidate, each in group.items()}
        return cls(Path(root), found, tuple(groups), tuple(tables), measurements)


class Recorded(Executor):
    """Answers jobs from a recording, at once. Samples, protocol, environment and workload are those recorded.

    A candidate that was not recorded is skipped, with a sentence that says so.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def run(
        self,
        jobs: Iterable[Job],
        *,
        plan: TimingPlan,
        workload: str,
        on_candidate: Callable[[Job, int], None] | None = None,
    ) -> Iterator[Result]:
        for job in jobs:
            held = [self._recording.measurements.get((job.problem, each)) for each in job.candidates]
            found = tuple(each for each in held if each is not None)
            absent = len(held) - len(found)
            if on_candidate is not None:
                on_candidate(job, len(held))
            yield Result(
                job, found, f"{absent} candidates of {job.problem} were not recorded." if absent else ""
            )


def replay(
    recording: Recording,
    store: Path,
    *,
    strategy: Strategy | None = None,
    budget_seconds: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> CollectSummary:
    """Collect from a recording: what the strategy asks for is copied into a store, from which a model is trained as ever.

    What the store holds already of the recording is known. Each round of the strategy is written as one segment: nothing
    is lost with an ended run but what can be had again at once.

    Args:
        recording: what there is.
        store: folder of the store to write; created if there is none.
        strategy: chooses; everything, where left out.
        budget_seconds: no further round is begun after this long.
        on_progress: called after each round.

    Raises:
        StoreError: the store cannot be written, is of a newer schema, or is the recording's own.
    """
    strategy = strategy or Exhaustive()
    started = time.monotonic()
    target = Store(store)
    if target.root.exists() and target.root.samefile(recording.root):
        raise StoreError(f"{store} is the store that is replayed. Name another one to write to.")
    target.add_device(recording.device)
    ids = target.ids()
    known = {
        (problem, candidate): each
        for problem, table in zip(recording.problems, recording.tables, strict=True)
        for candidate in table
        if (each := recording.measurements[problem, candidate]).id in ids
    }
    summary = CollectSummary(known=len(known))
    touched = {
        problem
        for problem, table in zip(recording.problems, recording.tables, strict=True)
        if all((problem, candidate) in known for candidate in table)
    }

    def report(problem: Problem | None) -> None:
        if on_progress is not None:
            done = summary.known + summary.measured
            on_progress(Progress(done, strategy.total, problem, summary.measured, summary.known))

    try:
        strategy.start(recording.problems, recording.tables, known)
        report(None)
        with Recorded(recording) as executor:
            while jobs := strategy.propose():
                if budget_seconds is not None and time.monotonic() - started > budget_seconds:
                    summary.complete = False
                    break
                results = list(executor.run(jobs, plan=TimingPlan(), workload=""))
                target.add_many(each for result in results for each in result.measurements)
                for result in results:
                    summary.outcomes.update(each.outcome for each in result.measurements)
                    summary.measured += len(result.measurements)
                    summary.skipped += [result.skipped] if result.skipped else []
                    touched.add(result.job.problem)
                    strategy.tell(result)
                report(jobs[-1].problem)
    except KeyboardInterrupt:
        summary.complete, summary.interrupted = False, True
    summary.problems = len(touched)
    summary.seconds = time.monotonic() - started
    return summary


def _device_in(store: Store, device: str | Device | None) -> Device:
    """The device that a store names so, or its only one."""
    held = store.devices()
    if device is None:
        if len(held) != 1:
            listed = ", ".join(sorted(f"{each.name} ({each.fingerprint})" for each in held.values()))
            raise StoreError(f"{store.root} has {len(held)} devices; name one of them: {listed or 'none'}.")
        return next(iter(held.values()))
    if isinstance(device, Device):
        named = {device.fingerprint}
    else:
        named = {device}
        with contextlib.suppress(UnknownNameError):  # a device of the store need not be in the table
            named.add(known_device(device).name)
    found = [each for each in held.values() if named & {each.name, each.fingerprint}]
    if not found:
        name = device.name if isinstance(device, Device) else device
        listed = ", ".join(sorted(each.name for each in held.values())) or "none"
        raise StoreError(f"{store.root} holds no records of {name}. Its devices: {listed}.")
    if len(found) > 1:
        prints = ", ".join(sorted(each.fingerprint for each in found))
        raise StoreError(
            f"{store.root} has {len(found)} devices with different facts of that name; name one by: {prints}."
        )
    return found[0]
