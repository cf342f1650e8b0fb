"""Variants that :func:`kernelcast.kernels.user.kernel` makes of a user's kernel: a Python callable or a Triton kernel."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kernelcast.errors import IllegalCandidateError, InvalidRecordError
from kernelcast.kernels.candidate import Block, Columns, column_of
from kernelcast.kernels.compile import KernelSpec, Pointer
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Launcher, Parameter, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.registry import operation
from kernelcast.kernels.rule import Rule
from kernelcast.kernels.triton_rules import BLOCK_THREADS, NEEDS_GPU
from kernelcast.kernels.user_definition import COMPILER_OPTIONS, Condition, Definition
from kernelcast.kernels.user_operation import size_of
from kernelcast.kernels.work import Work

if TYPE_CHECKING:
    import torch


class _UserVariant(Variant):
    """What variants of users' kernels share."""

    definition: ClassVar[Definition]

    @classmethod
    def subclass(cls, definition: Definition, *, without_first: bool) -> type[_UserVariant]:
        """The variant's class, to be registered; ``without_first`` where the first config is the default."""
        names = list(definition.space[0])
        parameters = tuple(
            Parameter(name, tuple(dict.fromkeys(config[name] for config in definition.space)), name)
            for name in names
        )
        attributes = {
            "__module__": definition.module,
            "__doc__": definition.doc,
            "name": definition.name,
            "backend": "user",
            "doc": definition.doc,
            "parameters": parameters,
            "rules": (*cls.rules, *_rules_of(definition, without_first=without_first)),
            "definition": definition,
        }
        return type(f"User_{definition.operation}_{definition.name}", (cls,), attributes)

    @property
    def size(self) -> int:
        return len(self.definition.space)

    def space(self, subset: str = "full") -> Block:
        """Every config that the user listed, in both subsets."""
        configs = self.definition.space
        columns = {name: column_of(name, [config[name] for config in configs]) for name in configs[0]}
        return Block(self.name, columns, len(configs))

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        found = operation(problem.operation)
        warps: Any = columns.get("num_warps", math.nan)
        return Work(
            flops=found.flops(problem),
            traffic_bytes=found.traffic_bytes(problem),
            programs=self._programs(problem, columns),
            warps=warps,
        )

    def _programs(self, problem: Problem, columns: Columns) -> Any:
        return math.nan

    @classmethod
    def source_hash(cls) -> str:
        """Over the kernel's own text where it has one, so that the rest of its file does not age its records."""
        function = getattr(cls.definition.function, "fn", cls.definition.function)
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError):
            return super().source_hash()
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class CallableVariant(_UserVariant):
    """A Python callable over the inputs, with the config as keywords."""

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        function = self.definition.function
        facts = {
            name: value
            for name, value in problem.facts.items()
            if name in self.definition.arguments and name not in self.definition.tensors
        }
        keywords = {**facts, **config}
        places = [
            place for place, name in enumerate(self.definition.inputs) if name in self.definition.mutates
        ]

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            return function(*_copied(inputs, places), **keywords)

        return run


class TritonVariant(_UserVariant):
    """A Triton kernel whose arguments are found by the names of its parameters."""

    rules = (NEEDS_GPU,)

    def _programs(self, problem: Problem, columns: Columns) -> np.ndarray:
        length = len(next(iter(columns.values()), np.zeros(1)))

        def programs(described: Problem, config: Mapping[str, Any]) -> Any:
            product: Any = 1.0
            for size in self.definition.grid_of(described, config):
                product = product * size
            return product

        return vectorised(self.definition, "the grid", programs, problem, columns, length).astype(np.float64)

    def compile_spec(self, problem: Problem, config: Mapping[str, Any], architecture: str = "") -> KernelSpec:
        """The kernel of one config with all that its compilation depends on."""
        told = self.definition
        facts = problem.facts
        integers: dict[str, Any] = {}
        constants: dict[str, Any] = {}
        constant_names = _constexprs(told.function)
        parameters = inspect.signature(getattr(told.function, "fn", told.function)).parameters
        for name in told.arguments:
            if name in told.tensors:
                continue
            if name in config:
                value = config[name]
            elif name in told.scalars:
                value = _called(told, f"the scalar {name}", size_of, told.scalars[name], problem)
            elif name in facts:
                value = facts[name]
            else:
                value = parameters[name].default
            whole = type(value) is int or type(value) is float
            (constants if name in constant_names or not whole else integers)[name] = value
        return NamedKernelSpec(
            kernel=told.function,
            tensors={
                name: Pointer(spec.dtype or problem.dtype, spec.bytes(problem))
                for name, spec in told.tensors.items()
            },
            integers=integers,
            constants=constants,
            options={name: config[name] for name in COMPILER_OPTIONS if name in config},
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        import torch

        from kernelcast.kernels.memory import empty

        told = self.definition
        output = str(told.output)
        grid = tuple(int(size) for size in _called(told, "the grid", told.grid_of, problem, dict(config)))
        launch = self.compile_spec(problem, config).bind(grid)
        inputs = list(told.inputs)
        places = [place for place, name in enumerate(inputs) if name in told.mutates]
        shapes = {name: spec.sizes(problem) for name, spec in told.tensors.items() if name not in inputs}
        dtypes = {name: getattr(torch, told.tensors[name].dtype or problem.dtype) for name in shapes}
        described = operation(problem.operation)
        dense = hasattr(described, "signature")  # a built-in operation's problem states strides itself
        programs = math.prod(grid)

        def run(*given: torch.Tensor) -> torch.Tensor:
            if dense and not all(tensor.is_contiguous() for tensor in given):
                raise IllegalCandidateError(
                    f"{told.name} takes contiguous tensors; call .contiguous() on those that are not."
                )
            tensors = dict(zip(inputs, _copied(given, places), strict=True))
            for name, shape in shapes.items():
                make = torch.zeros if name in told.zeroed else empty
                tensors[name] = make(shape, dtype=dtypes[name], device=given[0].device)
            if programs:
                launch(*(tensors[name] for name in told.tensors))
            return tensors[output]

        return run


class DefaultVariant(Variant):
    """What a user has without kernelcast: the callable that was named, else the kernel with its first config."""

    backend = "user"
    definition: ClassVar[Definition]
    named: ClassVar[Callable[..., Any] | None]
    kernel: ClassVar[Variant | None]

    @classmethod
    def subclass(cls, definition: Definition, named: Callable[..., Any] | None) -> type[DefaultVariant]:
        """The variant's class, to be registered."""
        base = TritonVariant if definition.is_triton else CallableVariant
        kernel = None if named else base.subclass(definition, without_first=False)()
        attributes: dict[str, Any] = {
            "__module__": definition.module,
            "__doc__": definition.doc,
            "name": "vendor" if named else "default",
            "backend": "vendor" if named else "user",
            "doc": "what runs without kernelcast" if named else f"{definition.name} with its first config",
            "definition": definition,
            "named": staticmethod(named) if named else None,
            "kernel": kernel,
        }
        if isinstance(kernel, TritonVariant):
            attributes["compile_spec"] = _first_spec
        return type(f"User_{definition.operation}_default", (cls,), attributes)

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        if self.kernel is None:
            found = operation(problem.operation)
            return Work(flops=found.flops(problem), traffic_bytes=found.traffic_bytes(problem))
        first = self.definition.space[0]
        work = self.kernel.work(
            problem, {name: column_of(name, [value]) for name, value in first.items()}, device
        )
        return replace(
            work,
            **{
                name: float(column[0])
                for name, column in work.columns(1).items()
                if name in ("programs", "warps")
            },
        )

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Launcher:
        if self.kernel is not None:
            return self.kernel.build(problem, self.definition.space[0])
        assert self.named is not None
        return self.named

    @classmethod
    def source_hash(cls) -> str:
        """The kernel's, or that of the module where the callable was named."""
        return cls.kernel.source_hash() if cls.kernel is not None else super().source_hash()


def _first_spec(
    default: Any, problem: Problem, config: Mapping[str, Any], architecture: str = ""
) -> KernelSpec:
    """``compile_spec`` of the default where it is a Triton kernel: that of its first config."""
    spec: KernelSpec = default.kernel.compile_spec(problem, default.definition.space[0], architecture)
    return spec


class NamedKernelSpec(KernelSpec):
    """A kernel whose tensors, numbers and constants come in any order, and are passed by name."""

    def bind(self, grid: tuple[int, ...]) -> Callable[..., None]:
        import torch

        launch = self.kernel[grid]
        rest = {**self.integers, **self.constants, **self.options}
        names = list(self.tensors)

        def run(*tensors: torch.Tensor) -> None:
            index = tensors[0].get_device()
            arguments = dict(zip(names, tensors, strict=True))
            if index >= 0 and index != torch.cuda.current_device():
                with torch.cuda.device(index):
                    launch(**arguments, **rest)
            else:
                launch(**arguments, **rest)

        return run


def vectorised(
    definition: Definition, what: str, function: Condition, problem: Problem, columns: Columns, length: int
) -> np.ndarray:
    """A function of (problem, config) over whole columns where it gives an array of them, else config by config.

    Raises:
        InvalidRecordError: it fails for a config; the message names it.
    """
    with contextlib.suppress(Exception):  # written for one config: its own errors come again below
        found = np.asarray(function(problem, columns))
        if found.shape == (length,) and found.dtype.kind in "biuf":
            return found
    rows = ({name: column[row].item() for name, column in columns.items()} for row in range(length))
    return np.array([_called(definition, what, function, problem, row) for row in rows])


def _called(definition: Definition, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the user's gives.

    Raises:
        InvalidRecordError: it fails; the message says which function it is, and how.
    """
    try:
        return function(*arguments)
    except Exception as error:
        shown = ", ".join(str(each) for each in arguments)
        raise InvalidRecordError(
            f"The kernel {definition.name!r} of {definition.operation!r}: {what} fails for ({shown}): "
            f"{type(error).__name__}: {error}."
        ) from error


def _rules_of(definition: Definition, *, without_first: bool) -> tuple[Rule, ...]:
    rules = []
    if "num_warps" in definition.space[0]:
        rules.append(BLOCK_THREADS)
    if without_first:
        first = definition.space[0]

        def differs(problem: Problem, columns: Columns, device: Device) -> Any:
            same = [columns[name] == value for name, value in first.items()]
            return ~np.logical_and.reduce(same) if same else False

        rules.append(
            Rule(
                "not-the-default",
                "the first config is what runs without kernelcast: the default, which is listed on its own",
                check=differs,
                explain=lambda problem, columns, device: "the first of the space",
            )
        )
    for number, (reason, condition) in enumerate(definition.where.items()):

        def met(
            problem: Problem,
            columns: Columns,
            device: Device,
            condition: Condition = condition,
            what: str = f"the condition {reason!r}",
        ) -> np.ndarray:
            length = len(next(iter(columns.values()), np.zeros(1)))
            return vectorised(definition, what, condition, problem, columns, length).astype(bool)

        rules.append(
            Rule(
                f"where-{number + 1}",
                reason,
                check=met,
                explain=lambda problem, columns, device: ", ".join(
                    f"{name}={column[0]}" for name, column in columns.items()
                ),
            )
        )
    return tuple(rules)


def _constexprs(function: Any) -> set[str]:
    parameters = inspect.signature(getattr(function, "fn", function)).parameters
    return {name for name, found in parameters.items() if "constexpr" in str(found.annotation)}


def _copied(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> Sequence[torch.Tensor]:
    if not places:
        return tensors
    return [tensor.clone() if place in places else tensor for place, tensor in enumerate(tensors)]
