"""T1 files, in which auto-tuners describe a search space: the kernel, its problem size, parameters and constraints.

A file is one JSON object; ``ConfigurationSpace`` has ``TuningParameters`` (each ``Name`` and ``Values``, a list or the text
of one) and ``Conditions`` (each an ``Expression`` of the parameters in Python's words), ``KernelSpecification`` the
``KernelName`` and ``ProblemSize``. Source of the format: the BAT benchmark suite and the FAIR benchmark hub of Kernel Tuner.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from kernelcast.datasets.imported import read_json, shortened
from kernelcast.errors import ImportFileError

#: Arithmetic and comparisons alone: an expression of a file must be able to do nothing, and to be done at once.
_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub,
    ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In,
    ast.NotIn, ast.Tuple, ast.List, ast.Name, ast.Load, ast.Constant,
)  # fmt: skip

_LONGEST_EXPRESSION = 2000

_INT64 = 2**63


@dataclass(frozen=True)
class Condition:
    """A constraint of a space: its text, and the same compiled."""

    text: str
    code: CodeType

    def met(self, config: Mapping[str, Any]) -> bool:
        """Whether a config meets it. A division by zero does not."""
        try:
            # What is evaluated is numbers, names of parameters, arithmetic and comparisons: see _condition.
            return bool(eval(self.code, {"__builtins__": {}}, dict(config)))
        except (ArithmeticError, TypeError, ValueError):
            return False


@dataclass(frozen=True)
class Space:
    """A search space.

    Attributes:
        kernel: the kernel's name.
        size: the problem's size as the file says it; None where it does not.
        parameters: each with its values, in the order of the file.
        conditions: what every config meets.
    """

    kernel: str
    size: Any
    parameters: dict[str, tuple[Any, ...]]
    conditions: tuple[Condition, ...]

    def fault(self, config: Mapping[str, Any]) -> str:
        """Why a config is none of this space; empty if it is one."""
        if set(config) != set(self.parameters):
            return f"it has the parameters {shortened(sorted(config))}, the space {shortened(sorted(self.parameters))}"
        for name, values in self.parameters.items():
            if not any(value == config[name] and type(value) is type(config[name]) for value in values):
                return f"{name} is {shortened(config[name])}, none of {shortened(list(values))}"
        for condition in self.conditions:
            if not condition.met(config):
                return f"it breaks the condition {condition.text!r}"
        return ""


def read_t1(file: str, *, on_bytes: Callable[[int], None] = lambda _: None) -> Space:
    """Read the description of a space.

    Raises:
        ImportFileError: the file is broken, or a condition is more than arithmetic and comparisons.
    """
    _, data = read_json(file, on_bytes=on_bytes)
    space = data.get("ConfigurationSpace") if isinstance(data, dict) else None
    listed = space.get("TuningParameters") if isinstance(space, dict) else None
    if not isinstance(space, dict) or not isinstance(listed, list) or not listed:
        raise ImportFileError(file, "it is no T1 file: its JSON has no ConfigurationSpace.TuningParameters.")
    parameters: dict[str, tuple[Any, ...]] = {}
    for number, each in enumerate(listed):
        name = each.get("Name") if isinstance(each, dict) else None
        values = _values(each.get("Values")) if isinstance(each, dict) else None
        if not isinstance(name, str) or not name or name in parameters or not values:
            raise ImportFileError(
                file,
                f"TuningParameters[{number}] is {shortened(each)}; it must have a name of its own and a list of values.",
            )
        parameters[name] = values
    conditions = space.get("Conditions", [])
    if not isinstance(conditions, list):
        raise ImportFileError(file, f"Conditions is {shortened(conditions)}; it must be a list.")
    specification = data.get("KernelSpecification")
    if not isinstance(specification, dict) or not isinstance(specification.get("KernelName"), str):
        raise ImportFileError(file, "it has no KernelSpecification.KernelName, which names the kernel.")
    return Space(
        kernel=specification["KernelName"],
        size=specification.get("ProblemSize"),
        parameters=parameters,
        conditions=tuple(
            _condition(file, number, each, parameters) for number, each in enumerate(conditions)
        ),
    )


def _values(value: Any) -> tuple[Any, ...]:
    """The values of a parameter; none where they cannot be read."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return ()
    if not isinstance(value, list | tuple):
        return ()
    plain = all(
        isinstance(each, bool | str | float) or (isinstance(each, int) and abs(each) < _INT64)
        for each in value
    )
    return tuple(value) if plain else ()


def _condition(file: str, number: int, each: Any, parameters: Mapping[str, tuple[Any, ...]]) -> Condition:
    where = f"Conditions[{number}]"
    text = each.get("Expression") if isinstance(each, dict) else None
    if not isinstance(text, str) or len(text) > _LONGEST_EXPRESSION:
        raise ImportFileError(file, f"{where} is {shortened(each)}; it must have an Expression.")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ImportFileError(file, f"{where}: {shortened(text)} is no expression ({error}).") from error
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    # Texts and lists may be compared, not multiplied into the memory.
    sequences = any(
        isinstance(part, ast.List | ast.Tuple)
        or (
            isinstance(part, ast.Name)
            and any(isinstance(value, str) for value in parameters.get(part.id, ()))
        )
        or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for node in nodes
        if isinstance(node, ast.BinOp)
        for part in ast.walk(node)
    )
    if (
        not all(isinstance(node, _ALLOWED) for node in nodes)
        or not names <= set(parameters)
        or not all(isinstance(value, int | float | str) for value in constants)
        or any(isinstance(value, int) and abs(value) >= _INT64 for value in constants)
        or sequences
    ):
        raise ImportFileError(
            file,
            f"{where}: {shortened(text)} must compare and reckon with the parameters and numbers, and nothing else.",
        )
    try:
        return Condition(text, compile(tree, "<condition>", "eval"))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ImportFileError(file, f"{where}: {shortened(text)} is no expression ({error}).") from error
