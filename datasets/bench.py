"""Building one candidate after another on the inputs of a problem, and checking what each computes, before any is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelcast.datasets.clocks import Clock
from kernelcast.datasets.observing import Observer
from kernelcast.datasets.surroundings import require_memory
from kernelcast.errors import KernelcastError
from kernelcast.kernels import Candidate, Device, Problem, operation, variant
from kernelcast.kernels.memory import poisoned


class Bench:
    """The inputs and the reference of one problem, and what came of each candidate on them.

    Attributes:
        calls: candidate's number -> what to time; right ones only.
        estimates_us: candidate's number -> rough time of a call.
        failures: candidate's number -> (outcome, detail).
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        where: str,
        clock: Clock,
        seed: int,
        observer: Observer,
        memory_bytes: float,
    ) -> None:
        require_memory(problem, device, memory_bytes)
        self.observer = observer
        self.calls: dict[int, Callable[[], Any]] = {}
        self.estimates_us: dict[int, float] = {}
        self.failures: dict[int, tuple[str, str]] = {}
        self._problem, self._clock = problem, clock
        self._operation = operation(problem.operation)
        self._make = lambda: self._operation.make_inputs(problem, seed=seed, device=where)
        try:
            self._inputs = list(self._make())
            self._pristine = [tensor.clone() for tensor in self._inputs]
            self._expected = self._operation.reference(problem, *self._inputs)
        except Exception as error:
            raise KernelcastError(
                f"The inputs and the reference of {problem} cannot be made ({type(error).__name__}: {error})."
            ) from error

    def prepare(self, number: int, candidate: Candidate) -> None:
        """Build one candidate and check its result."""
        self.observer.preparing(number)
        self._prepare(number, candidate)
        self.observer.prepared(number)

    def refuse(self, number: int, needed_bytes: float, limit_bytes: float) -> None:
        """Note that a candidate may need too much memory to be run."""
        self._note(
            number,
            "out_of_resources",
            f"needs about {needed_bytes / 2**30:.2f} GiB with its scratch memory; the limit is {limit_bytes / 2**30:.2f} GiB",
        )
        self.observer.prepared(number)

    def _prepare(self, number: int, candidate: Candidate) -> None:
        output: list[Any] = []
        try:
            launch = variant(self._problem.operation, candidate.variant).build(
                self._problem, candidate.parameters
            )
            with poisoned():
                launch(*self._inputs)  # compiles, fills caches
                first_us = self._clock.single_us(lambda: output.append(launch(*self._inputs)))
            wrong = self._operation.check(self._problem, self._expected, output.pop())
        except Exception as error:  # noqa: BLE001 - whatever a candidate raises is its outcome
            self.fail(number, error)
            self._changed()
            return
        if self._changed():
            wrong = "changed its inputs"
        if wrong is not None:
            self._note(number, "wrong_result", wrong)
            return
        self.calls[number] = lambda: launch(*self._inputs)
        self.estimates_us[number] = first_us

    def fail(self, number: int, error: Exception) -> None:
        """Note what a candidate raised."""
        self._note(number, outcome_of(error), f"{type(error).__name__}: {error}"[:500])

    def _note(self, number: int, outcome: str, detail: str) -> None:
        self.failures[number] = outcome, detail
        self.observer.failed(number, outcome, detail)

    def _changed(self) -> bool:
        """Whether the inputs are not what they were; then they are made anew."""
        import torch

        if all(map(torch.equal, self._inputs, self._pristine)):
            return False
        self._inputs[:] = self._make()
        return True


def outcome_of(error: Exception) -> str:
    """The outcome that an exception stands for, by its name: triton need not be importable here."""
    name = type(error).__name__
    if name in ("OutOfMemoryError", "OutOfResources", "MemoryError"):
        return "out_of_resources"
    if name in (
        "CompilationError",
        "CompileTimeAssertionFailure",
        "UnsupportedLanguageConstruct",
        "PTXASError",
    ):
        return "compile_error"
    return "out_of_resources" if "can't allocate memory" in str(error) else "crash"
