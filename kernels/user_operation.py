"""Operations that :func:`kernelcast.kernels.user.kernel` makes from the description of a user's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kernelcast.errors import InvalidProblemError, InvalidRecordError
from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.problem import DTYPE_BYTES, Problem, ProblemSchema

if TYPE_CHECKING:
    import torch

Size = int | str | Callable[[Problem], int]

#: (relative, absolute), as torch.testing.assert_close compares by default
#: (https://pytorch.org/docs/stable/testing.html); whole numbers must be equal.
DEFAULT_TOLERANCES = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
}


@dataclass(frozen=True)
class TensorSpec:
    """A contiguous tensor of a kernel.

    Attributes:
        shape: each size as the name of a dimension, a number, or a function of the problem.
        dtype: its dtype where it is not the problem's.
        low: the least value that tests and measurements put into a tensor of whole numbers.
        high: one more than the largest: a number or the name of a dimension, such as the rows that an index points into.

    Raises:
        InvalidRecordError: a size is none of these, or the dtype is unknown.
    """

    shape: tuple[Size, ...]
    dtype: str | None = None
    low: int = 0
    high: int | str = 128

    def __post_init__(self) -> None:
        for size in self.shape:
            if not (callable(size) or isinstance(size, str) or (type(size) is int and size >= 0)):
                raise InvalidRecordError(
                    f"A tensor has the size {size!r}; it must be the name of a dimension, a number, or a function of "
                    "the problem."
                )
        if self.dtype is not None and self.dtype not in DTYPE_BYTES:
            raise InvalidRecordError(
                f"A tensor has the dtype {self.dtype!r}; known are: {', '.join(DTYPE_BYTES)}."
            )

    @classmethod
    def of(cls, value: TensorSpec | Sequence[Any]) -> TensorSpec:
        """A spec from itself or from a bare shape: ``("rows", "columns")``.

        Raises:
            InvalidRecordError: it is neither.
        """
        if isinstance(value, TensorSpec):
            return value
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise InvalidRecordError(
                f"A tensor is described by {value!r}; it must be a shape such as ('rows', 'columns'), or a TensorSpec."
            )
        return cls(tuple(value))

    def sizes(self, problem: Problem) -> tuple[int, ...]:
        """The shape for one problem.

        Raises:
            InvalidProblemError: a function of the problem gives no size.
        """
        found = tuple(size_of(size, problem) for size in self.shape)
        for size in found:
            if type(size) is not int or size < 0:
                raise InvalidProblemError(f"{problem}: a tensor has the size {size!r}.")
        return found

    def bytes(self, problem: Problem) -> int:
        """Bytes of all elements."""
        return math.prod(self.sizes(problem)) * DTYPE_BYTES[self.dtype or problem.dtype]

    def make(self, problem: Problem, generator: torch.Generator, device: str) -> torch.Tensor:
        """Standard normal numbers; whole numbers from ``low`` to ``high``, and flags, evenly."""
        import torch

        sizes, dtype = self.sizes(problem), self.dtype or problem.dtype
        if dtype.startswith(("float", "bfloat")):
            values = torch.randn(sizes, generator=generator, dtype=torch.float32)
        elif dtype == "bool":
            values = torch.rand(sizes, generator=generator) < 0.5
        else:
            high = size_of(self.high, problem)
            values = torch.randint(self.low, max(int(high), self.low + 1), sizes, generator=generator)
        return values.to(dtype=getattr(torch, dtype), device=device)


def size_of(size: Any, problem: Problem) -> Any:
    """The value of a size or scalar for one problem: a name is looked up, a function is called."""
    if callable(size):
        return size(problem)
    return problem[size] if isinstance(size, str) else size


def dims_of(tensors: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Names of dimensions in the order in which they occur, each with the parameter where it occurs first."""
    found: dict[str, str] = {}
    for parameter, spec in tensors.items():
        for size in spec.shape:
            if isinstance(size, str):
                found.setdefault(size, parameter)
    return found


class UserOperation(Operation):
    """An operation that a user's kernel describes. The class attributes are what the decorator was given."""

    default_variant = "default"
    #: Every tensor of the first kernel by parameter, outputs and scratch included.
    signature: ClassVar[dict[str, TensorSpec]]
    #: The inputs alone, in the order of the arguments.
    inputs: ClassVar[dict[str, TensorSpec]]
    output: ClassVar[TensorSpec | None]
    plain: ClassVar[Any]
    tolerances: ClassVar[dict[str, Tolerance]]
    counted_flops: ClassVar[Any]
    counted_bytes: ClassVar[Any]

    @classmethod
    def subclass(
        cls,
        *,
        name: str,
        doc: str,
        schema: ProblemSchema,
        definition: Any,
        reference: Callable[..., Any] | None,
        default: Callable[..., Any] | None,
        tolerance: Any,
        flops: Callable[[Problem], float] | None,
        traffic_bytes: Callable[[Problem], float] | None,
    ) -> type[UserOperation]:
        """The operation's class, to be registered.

        Raises:
            InvalidRecordError: the tolerance is of no known form.
        """
        attributes = {
            "__module__": definition.module,
            "__doc__": doc,
            "name": name,
            "doc": doc,
            "schema": schema,
            "signature": definition.tensors,
            "inputs": definition.inputs,
            "output": definition.output_spec,
            # Functions among a class's attributes would become its methods.
            "plain": staticmethod(reference) if reference else None,
            "tolerances": _tolerances(name, tolerance, schema.dtypes),
            "counted_flops": staticmethod(flops) if flops else None,
            "counted_bytes": staticmethod(traffic_bytes) if traffic_bytes else None,
            "default_variant": "vendor" if default else "default",
        }
        return type(f"User_{name}", (cls,), attributes)

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """Contiguous tensors in the order of the kernel's arguments."""
        import torch

        generator = torch.Generator(device="cpu").manual_seed(seed)
        return tuple(spec.make(problem, generator, device) for spec in self.inputs.values())

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        """The user's reference on float64 copies; what the default computes where there is none."""
        copies = [tensor.clone() for tensor in inputs]
        if self.plain is None:
            from kernelcast.kernels.registry import variant

            result = variant(self.name, self.default_variant).build(problem, {})(*copies)
        else:
            result = self.plain(*(t.double() if t.is_floating_point() else t for t in copies))
        return result.double()

    def tolerance(self, problem: Problem) -> Tolerance:
        return self.tolerances[problem.dtype]

    def flops(self, problem: Problem) -> float:
        """What the user counted; 0 where nobody did, so that the estimate is that of the memory traffic."""
        return float(self.counted_flops(problem)) if self.counted_flops else 0.0

    def traffic_bytes(self, problem: Problem) -> float:
        """What the user counted, or the bytes of every input and the output."""
        if self.counted_bytes:
            return float(self.counted_bytes(problem))
        specs = [*self.inputs.values(), *([self.output] if self.output else [])]
        return float(sum(spec.bytes(problem) for spec in specs))

    def output_dtype(self, problem: Problem) -> str:
        return (self.output.dtype if self.output else None) or problem.dtype

    def check(self, problem: Problem, reference: torch.Tensor, output: torch.Tensor) -> str | None:
        """As :meth:`Operation.check`, which takes for granted that a kernel returns a tensor."""
        import torch

        if not isinstance(output, torch.Tensor):
            return f"the kernel returned {type(output).__name__}, not a tensor"
        return super().check(problem, reference, output)


def _tolerances(name: str, given: Any, dtypes: Sequence[str]) -> dict[str, Tolerance]:
    found: dict[str, Tolerance] = {}
    for dtype in dtypes:
        value = given.get(dtype) if isinstance(given, Mapping) else given
        if value is None:
            value = DEFAULT_TOLERANCES.get(dtype, (0.0, 0.0))
        if not isinstance(value, Tolerance):
            try:
                relative, absolute = (float(part) for part in value)
            except (TypeError, ValueError):
                raise InvalidRecordError(
                    f"{name}: the tolerance of {dtype} is {value!r}; it must be (relative, absolute)."
                ) from None
            value = Tolerance(relative, absolute)
        if not (0 <= value.relative < math.inf and 0 <= value.absolute < math.inf):
            raise InvalidRecordError(
                f"{name}: the tolerance of {dtype} is {value}; both parts must be finite."
            )
        found[dtype] = value
    return found
