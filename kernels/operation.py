"""The two base contracts of the catalogue: an operation, and a variant that realises it.

Call order, for one operation and problem::

    operation.schema.problem(...)            -> Problem
    registry.candidates(problem, device)     -> CandidateTable (each variant's block, less what a rule refuses)
    operation.make_inputs(problem, seed=0)   -> tensors
    variant.build(problem, config)           -> a callable over those tensors
    operation.check(problem, inputs, output) -> None, or what is wrong with the output

Neither module imports torch or triton: candidates can be listed, refused and ranked where those are absent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels.candidate import (
    Block,
    Candidate,
    Columns,
    ConfigValue,
    KeptColumns,
    column_of,
    remembered,
)
from kernelcast.kernels.device import Device
from kernelcast.kernels.problem import Problem, ProblemSchema
from kernelcast.kernels.rule import Refusal, Rule
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch

Launcher = Callable[..., "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a variant's config.

    Attributes:
        name: such as ``"block_m"``.
        values: the full space.
        doc: one phrase, with the unit.
        quick: the values of the quick subset (``subset="default"``); all of them where empty.

    Raises:
        InvalidRecordError: there is no value, one occurs twice, they are of several types, or a quick one is not
            among them.
    """

    name: str
    values: tuple[ConfigValue, ...]
    doc: str
    quick: tuple[ConfigValue, ...] = ()

    def __post_init__(self) -> None:
        column_of(self.name, self.values)
        if not self.values or len(set(self.values)) < len(self.values):
            raise InvalidRecordError(
                f"The parameter {self.name!r} has the values {self.values}; it needs some, each once."
            )
        foreign = set(self.quick) - set(self.values)
        if foreign:
            raise InvalidRecordError(
                f"The quick values {foreign} of the parameter {self.name!r} are not among its values {self.values}."
            )


@dataclass(frozen=True, slots=True)
class Tolerance:
    """An output is right where ``|out - reference| <= absolute + relative * |reference|``, element by element."""

    relative: float
    absolute: float


class Operation(ABC):
    """A mathematical function with one reference implementation.

    Subclasses are registered with :func:`kernelcast.kernels.registry.register_operation`.
    """

    name: ClassVar[str]
    doc: ClassVar[str]
    schema: ClassVar[ProblemSchema]
    #: The variant that a user has without kernelcast. It has no parameters and no rules: it always works.
    default_variant: ClassVar[str] = "vendor"

    @abstractmethod
    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """Random normal tensors of the problem's shapes, dtypes and layouts on a torch device."""

    @abstractmethod
    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        """The result in float64, computed as plainly as possible."""

    @abstractmethod
    def tolerance(self, problem: Problem) -> Tolerance:
        """How far from the reference a right result may lie on inputs of :meth:`make_inputs`, for every variant."""

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """Floating-point operations of the definition, without padding."""

    @abstractmethod
    def traffic_bytes(self, problem: Problem) -> float:
        """Compulsory traffic: every input read once and the output written once."""

    def output_dtype(self, problem: Problem) -> str:
        """The dtype of the output; the problem's, unless an operation says otherwise."""
        return problem.dtype

    @property
    def default(self) -> Candidate:
        """The candidate that a user has without kernelcast."""
        return Candidate.of(self.default_variant)

    def check(self, problem: Problem, reference: torch.Tensor, output: torch.Tensor) -> str | None:
        """Compare an output with the reference. Returns what is wrong, or None.

        The shape must be the reference's and the dtype :meth:`output_dtype`, no NaN may be where the reference has none, and every element must
        lie within :meth:`tolerance`.
        """
        import torch

        if tuple(output.shape) != tuple(reference.shape):
            return f"the output has shape {tuple(output.shape)}; the reference has {tuple(reference.shape)}"
        if output.dtype != getattr(torch, self.output_dtype(problem)):
            return f"the output is {output.dtype}; it must be {self.output_dtype(problem)}"
        if output.numel() == 0:
            return None
        tolerance = self.tolerance(problem)
        if _all_close(output, reference, tolerance):
            return None
        wide = output.to(torch.float64)
        expected = reference.to(device=output.device, dtype=torch.float64)
        error = (wide - expected).abs()
        # A NaN compares as false. An infinite reference would make the tolerance infinite too.
        close = (error <= tolerance.absolute + tolerance.relative * expected.abs()) & expected.isfinite()
        outside = ~(close | (wide == expected) | (wide.isnan() & expected.isnan()))
        if not bool(outside.any()):
            return None
        count = int(outside.sum())
        unwritten = int(wide.isnan().logical_and(~expected.isnan()).sum())
        worst = float(error[outside].nan_to_num(nan=math.inf, posinf=math.inf).max())
        return (
            f"{count} of {output.numel()} elements differ from the reference by more than "
            f"{tolerance.absolute:.2g} + {tolerance.relative:.2g} * |reference|; the largest difference is {worst:.3g}"
            + (f", {unwritten} are NaN" if unwritten else "")
        )


#: Elements that are compared at once on a CPU: few enough that what is computed of them stays in its caches.
_COMPARED = 65536


def _all_close(output: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> bool:
    """Whether every element is finite in the reference and surely within the tolerance; False leaves it open."""
    import torch

    wide, expected = output.reshape(-1), reference.to(output.device).reshape(-1)
    at_once = _COMPARED if output.device.type == "cpu" else output.numel()
    for first in range(0, output.numel(), at_once):
        # A copy: the output and the reference stay as they are.
        found = wide[first : first + at_once].to(torch.float64, copy=True)
        wanted = expected[first : first + at_once].to(torch.float64)
        error = found.sub_(wanted).abs_()
        bound = wanted.abs().mul_(tolerance.relative).add_(tolerance.absolute)
        # An infinite reference would make the bound infinite too; a NaN compares as false.
        if not bool((error <= bound).all()) or not float(bound.max()) < math.inf:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _SortedRules:
    """A variant's rules by what they look at, each kind in the order of the rules.

    Attributes:
        alone: the problem and the device alone.
        of_class: the config and a class of problems.
        others: the config and the problem.
        classes: what gives the classes of those in ``of_class``, each once.
    """

    alone: tuple[Rule, ...]
    of_class: tuple[Rule, ...]
    others: tuple[Rule, ...]
    classes: tuple[Callable[[Problem, Device], Hashable], ...]


class Variant(ABC):
    """One way to realise an operation.

    Subclasses are registered with :func:`kernelcast.kernels.registry.register_variant`.
    """

    name: ClassVar[str]
    #: ``"vendor"`` (torch's own), ``"torch"`` (composed of torch calls), ``"triton"`` or ``"user"``.
    backend: ClassVar[str]
    doc: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    rules: ClassVar[tuple[Rule, ...]] = ()
    #: Further modules whose text is part of this variant (the ``@jit`` bodies), for :meth:`source_hash`.
    source_modules: ClassVar[tuple[str, ...]] = ()
    #: Whether it may be measured in the process that collects. Where None its backend says so: what ``"user"`` and
    #: ``"triton"`` kernels do wrong may end the process, or spoil the device for it.
    trusted: ClassVar[bool | None] = None

    @abstractmethod
    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        """What each candidate makes the hardware do. Vectorised: columns in, arrays out."""

    @abstractmethod
    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        """A callable over the operation's inputs. Whatever may be imported or prepared is done here, not at the call."""

    @property
    def size(self) -> int:
        """Configs of the whole space, legal or not."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    def space(self, subset: str = "full") -> Block:
        """Every config of the space (``"full"``) or of the quick subset (``"default"``), legal or not."""
        chosen = [
            (parameter.quick or parameter.values) if subset == "default" else parameter.values
            for parameter in self.parameters
        ]
        length = math.prod(len(values) for values in chosen)
        columns, block = {}, length
        # Row by row as itertools.product counts, the last parameter fastest.
        for parameter, values in zip(self.parameters, chosen, strict=True):
            block //= len(values)
            column = np.repeat(column_of(parameter.name, values), block)
            columns[parameter.name] = np.tile(column, length // len(column))
        return Block(self.name, columns, length)

    def serves(self, problem: Problem, device: Device) -> bool:
        """Whether every rule of the problem and the device alone is met; if not, no config of the space is legal."""
        return all(rule.check(problem, {}, device) for rule in self._sorted_rules.alone)

    def legal(self, problem: Problem, device: Device, block: Block) -> np.ndarray:
        """A bool array over the block's rows: True where every rule is met."""
        if not self.serves(problem, device):
            return np.zeros(block.length, dtype=bool)
        return self.legal_rows(problem, device, block)

    def legal_rows(self, problem: Problem, device: Device, block: Block) -> np.ndarray:
        """:meth:`legal` for a problem and a device that the variant :meth:`serves`."""
        rules = self._sorted_rules
        met = np.ones(block.length, dtype=bool)
        some, others = bool(block.length), rules.others
        if not block.columns or not isinstance(block.columns, KeptColumns):
            others = (*others, *rules.of_class)
        elif rules.of_class:
            classes = tuple([class_of(problem, device) for class_of in rules.classes])

            def all_met(columns: Columns) -> np.ndarray:
                length = len(next(iter(columns.values())))
                return np.logical_and.reduce(
                    [rule.met(problem, columns, device, length) for rule in rules.of_class]
                )

            met = remembered(block.columns, (self, classes), all_met)
            some = bool(met.any())
        for rule in others:
            # Some rules may ask what others have refused: a step of a sum that has none.
            if not some:
                break
            answer = rule.check(problem, block.columns, device)
            if answer is not True:
                met = met & np.asarray(answer, dtype=bool)
                some = bool(met.any())
        return met

    @cached_property
    def _sorted_rules(self) -> _SortedRules:
        alone = tuple(rule for rule in self.rules if rule.of_problem)
        of_class = tuple(rule for rule in self.rules if not rule.of_problem and rule.class_of is not None)
        return _SortedRules(
            alone,
            of_class,
            tuple(rule for rule in self.rules if rule not in (*alone, *of_class)),
            tuple(dict.fromkeys(rule.class_of for rule in of_class if rule.class_of is not None)),
        )

    def refusals(self, problem: Problem, device: Device, block: Block) -> list[Refusal]:
        """The first broken rule of each row that is not legal."""
        refused: list[Refusal] = []
        open_rows = np.ones(block.length, dtype=bool)
        for rule in self.rules:
            broken = open_rows & ~rule.met(problem, block.columns, device, block.length)
            for row in np.flatnonzero(broken):
                single = {name: column[row : row + 1] for name, column in block.columns.items()}
                seen = rule.explain(problem, single, device) if rule.explain else ""
                refused.append(Refusal(block.at(int(row)), rule.name, rule.reason, seen))
            open_rows &= ~broken
        return refused

    @classmethod
    def source_hash(cls) -> str:
        """16 hexadecimal digits over the text of this variant's modules, so that a change ages its records alone."""
        return _hash_modules((cls.__module__, *cls.source_modules))


@cache
def _hash_modules(names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        source = _source_file(name)
        digest.update(source.read_bytes() if source else name.encode())
    return digest.hexdigest()[:16]


def _source_file(module: str) -> Path | None:
    """The file of a module without importing it; None where it has none, as in a notebook."""
    if module in sys.modules:  # find_spec cannot answer for a script, which is `__main__`
        origin = getattr(sys.modules[module], "__file__", None)
    else:
        spec = importlib.util.find_spec(module)
        origin = spec.origin if spec else None
    return Path(origin) if origin and Path(origin).is_file() else None
