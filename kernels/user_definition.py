"""What the decorator :func:`kernelcast.kernels.user.kernel` was told of one kernel, checked against the kernel itself."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.errors import InvalidRecordError
from kernelcast.kernels.candidate import column_of
from kernelcast.kernels.problem import Problem, ProblemSchema
from kernelcast.kernels.user_operation import TensorSpec

#: Config parameters that go to Triton's compiler, not to the kernel.
COMPILER_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")

Condition = Callable[[Problem, Mapping[str, Any]], Any]
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Definition:
    """What the decorator was told of one kernel. See :func:`kernelcast.kernels.user.kernel`.

    ``space`` is a list of configs, whether it was given as one or as a product.
    """

    operation: str
    name: str
    function: Any
    space: tuple[dict[str, Any], ...]
    tensors: dict[str, TensorSpec]
    output: str | TensorSpec | None
    scratch: tuple[str, ...]
    zeroed: tuple[str, ...]
    mutates: tuple[str, ...]
    scalars: dict[str, Any]
    grid: Callable[[Problem, Mapping[str, Any]], Sequence[int]] | None
    where: dict[str, Condition]
    doc: str

    @property
    def module(self) -> str:
        """The module that the kernel is in, whose text is its version."""
        return str(getattr(self.function, "__module__", None) or "__main__")

    @property
    def is_triton(self) -> bool:
        """Whether it is a Triton kernel, compiled or interpreted."""
        return is_triton(self.function)

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The tensors that a caller gives, in order."""
        made = {*self.scratch, *([self.output] if self.output not in self.mutates else [])}
        return {name: spec for name, spec in self.tensors.items() if name not in made}

    @property
    def output_spec(self) -> TensorSpec | None:
        """The output's tensor, where it is known."""
        return self.tensors[self.output] if isinstance(self.output, str) else self.output

    def grid_of(self, problem: Problem, config: Mapping[str, Any]) -> Sequence[Any]:
        """The sizes of the launch grid, or columns of them.

        Raises:
            TypeError: the user's function gives no tuple.
        """
        sizes = self.grid(problem, config) if self.grid else None
        if not isinstance(sizes, tuple | list) or not 1 <= len(sizes) <= 3:
            raise TypeError(
                f"it gives {sizes!r}, and must give a tuple of one to three sizes, such as (programs,)"
            )
        return sizes

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the function's parameters, in order."""
        return tuple(inspect.signature(getattr(self.function, "fn", self.function)).parameters)

    def check(self) -> None:
        """Raises InvalidRecordError where parts of the description contradict each other."""
        self._check_space()
        if not _IDENTIFIER.fullmatch(self.operation) or not _IDENTIFIER.fullmatch(self.name):
            self._refuse("names are of letters, digits and underscores")
        for reason, condition in self.where.items():
            if not callable(condition):
                self._refuse(
                    f"the condition {reason!r} is {condition!r}; it must be a function of (problem, config)"
                )
        for word in ("scratch", "zeroed", "mutates"):
            unknown = [name for name in getattr(self, word) if name not in self.tensors]
            if unknown:
                self._refuse(f"{word} names {', '.join(unknown)}, and its tensors are {listed(self.tensors)}")
        if not self.is_triton:
            for word in ("grid", "scratch", "zeroed", "scalars"):
                if getattr(self, word):
                    self._refuse(f"{word} is for Triton kernels, and this is a Python callable")
            if isinstance(self.output, str):
                self._refuse(
                    "a Python callable returns its output; give a TensorSpec where it is not like the first input"
                )
            return
        if not callable(self.grid):
            self._refuse("a Triton kernel needs a grid, such as lambda p, c: (-(-p['n'] // c['BLOCK']),)")
        if not isinstance(self.output, str) or self.output not in self.tensors:
            self._refuse(f"output is {self.output!r}; it must be one of its tensors: {listed(self.tensors)}")
        foreign = [name for name in self.tensors if name not in self.arguments]
        if foreign:
            self._refuse(
                f"it has no parameter {', '.join(foreign)}; its parameters are {listed(self.arguments)}"
            )
        inputs = self.inputs
        wrong = [name for name in self.mutates if name not in inputs]
        if wrong:
            self._refuse(f"mutates names {', '.join(wrong)}, which is no input")

    def check_names(self, schema: ProblemSchema) -> None:
        """Raises InvalidRecordError where a parameter of the function would get no value."""
        config = set(self.space[0])
        facts = {*(dim.name for dim in schema.dims), *(option.name for option in schema.options)}
        sizes = {size for spec in self.tensors.values() for size in spec.shape if isinstance(size, str)}
        if sizes - facts:
            self._refuse(
                f"its tensors have the sizes {listed(sorted(sizes - facts))}, which {self.operation} does not have; it has "
                f"{listed(sorted(facts))}"
            )
        both = sorted(config & facts)
        if both:
            self._refuse(
                f"{', '.join(both)} is a fact of the problem and in the space; each name has one meaning"
            )
        if not self.is_triton:
            parameters = inspect.signature(self.function).parameters
            free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            missing = sorted(config - set(parameters))
            if missing and not free:
                self._refuse(f"it takes no {', '.join(missing)}; its parameters are {listed(parameters)}")
            return
        known = {*self.tensors, *config, *facts, *self.scalars}
        signature = inspect.signature(getattr(self.function, "fn", self.function)).parameters
        missing = [
            name
            for name in self.arguments
            if name not in known and signature[name].default is inspect.Parameter.empty
        ]
        if missing:
            self._refuse(
                f"nothing gives its parameter {', '.join(missing)} a value: name it in tensors, scalars or the space, or "
                f"call it as a dimension or option is called ({listed(sorted(facts))})"
            )
        unused = sorted(config - set(self.arguments) - set(COMPILER_OPTIONS))
        if unused:
            self._refuse(
                f"the space has {', '.join(unused)}, which is no parameter of the kernel and no compiler option"
            )

    def _check_space(self) -> None:
        if not self.space:
            self._refuse("its space is empty")
        names = list(self.space[0])
        if any(list(config) != names for config in self.space):
            self._refuse("its configs do not all have the same parameters in the same order")
        for name in names:
            column_of(name, [config[name] for config in self.space])
        if len({tuple(config.items()) for config in self.space}) < len(self.space):
            self._refuse("a config occurs twice in its space")

    def _refuse(self, why: str) -> None:
        raise InvalidRecordError(f"The kernel {self.name!r} of {self.operation!r}: {why}.")


def is_triton(function: Any) -> bool:
    """Whether something is a Triton kernel, without importing triton."""
    return type(function).__module__.startswith("triton.") and hasattr(function, "fn")


def unwrap(function: Any, space: Any) -> tuple[Any, tuple[dict[str, Any], ...], dict[str, tuple[str, ...]]]:
    """(the bare kernel, its space as configs, what ``triton.autotune`` says of ``zeroed`` and ``mutates``).

    The space is the given one, else that of ``triton.autotune`` around the kernel.

    Raises:
        InvalidRecordError: a decorator of Triton's says what cannot be taken over, or the space is of no known form.
    """
    configs: Any = None
    told: dict[str, tuple[str, ...]] = {}
    while is_triton(function) and is_triton(function.fn):
        if type(function).__name__ == "Heuristics":
            raise InvalidRecordError(
                "kernelcast.kernel cannot see through triton.heuristics; state its values as scalars instead."
            )
        configs = getattr(function, "configs", configs)
        told = {
            "zeroed": tuple(getattr(function, "reset_to_zero", None) or ()),
            "mutates": tuple(getattr(function, "restore_value", None) or ()),
        }
        if getattr(function, "early_config_prune", None):
            raise InvalidRecordError(
                "triton.autotune around the kernel prunes configs early; state what it demands as conditions: where={...}."
            )
        function = function.fn
    if not (is_triton(function) or callable(function)):
        raise InvalidRecordError(f"{function!r} is neither a Triton kernel nor callable.")
    if space is None and configs is not None:
        given = [dict(config.all_kwargs()) for config in configs]
        names = {name for config in given for name in config}
        for config in given:
            missing = names - set(config)
            if missing:
                raise InvalidRecordError(
                    f"A config of triton.autotune lacks {listed(sorted(missing))}, which others have: {config}. Give every "
                    "config the same parameters, or list them as the space."
                )
        if any(getattr(config, "pre_hook", None) for config in configs):
            raise InvalidRecordError(
                "Configs of triton.autotune have a pre_hook, which kernelcast.kernel cannot take over; name what it zeroes "
                "in zeroed, and list the configs as the space."
            )
        return function, tuple({name: config[name] for name in given[0]} for config in given), told
    if space is None:
        return function, ({},), told
    if isinstance(space, Mapping):
        for name, values in space.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise InvalidRecordError(
                    f"The space gives {name} the values {values!r}; it must be a list of some."
                )
        count = math.prod(len(values) for values in space.values())
        rows = np.unravel_index(np.arange(count), [len(values) for values in space.values()]) if space else ()
        configs_of_product = tuple(
            {name: values[rows[at][row]] for at, (name, values) in enumerate(space.items())}
            for row in range(count)
        )
        return function, configs_of_product, told
    if isinstance(space, Sequence) and all(isinstance(config, Mapping) for config in space):
        return function, tuple(dict(config) for config in space), told
    raise InvalidRecordError(f"The space is {space!r}; it must map parameters to values, or list configs.")


def listed(names: Any) -> str:
    """Names for a message."""
    return ", ".join(names) or "none"
