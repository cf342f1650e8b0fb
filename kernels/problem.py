"""Problems: an operation with its dimensions, dtypes, layout, precision switches and thread count; never tensor values."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kernelcast.errors import InvalidProblemError, InvalidRecordError

#: Bytes an element takes, of every dtype that a problem may name.
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}

#: No dimension of a tensor in memory reaches this; larger ones are typing errors.
MAX_DIMENSION = 2**40
#: More threads than any machine runs.
MAX_THREADS = 65536

#: Keywords of :meth:`ProblemSchema.problem` that no dimension or option can be called.
_TAKEN = ("dtype", "allow_tf32", "threads")

_encode = json.JSONEncoder(separators=(",", ":")).encode

OptionValue = str | int | bool


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of an operation's problems.

    ``default`` is the value where the caller names none; ``None`` makes it required.
    """

    name: str
    doc: str
    default: int | None = None
    minimum: int = 0


@dataclass(frozen=True, slots=True)
class Option:
    """One further fact of an operation's problems: a layout, a flag, a stride.

    ``choices`` lists what is allowed; ``None`` allows any integer of at least ``minimum``.
    """

    name: str
    doc: str
    default: OptionValue
    choices: tuple[OptionValue, ...] | None = None
    minimum: int = 0


@dataclass(frozen=True, eq=False)
class Problem:
    """An operation with everything that can change which candidate is fastest, except the device and the software.

    Build one with :meth:`ProblemSchema.problem` (or ``kernelcast.problem``), which validates and fills defaults.

    Attributes:
        operation: registered name, such as ``"gemm"``.
        dims: (name, size) in the order of the schema.
        dtype: the main input's dtype.
        options: (name, value) in the order of the schema: layouts, flags, leading dimensions, second dtypes.
        allow_tf32: whether float32 inputs may be rounded to TF32, as torch's own switch says.
        threads: the process's CPU threads; 0 on a GPU, where they do not matter.

    Raises:
        InvalidProblemError: a field is of another type, a size is out of range, or a name occurs twice.
    """

    operation: str
    dims: tuple[tuple[str, int], ...]
    dtype: str
    options: tuple[tuple[str, OptionValue], ...] = ()
    allow_tf32: bool = False
    threads: int = 0

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise InvalidProblemError(f"Not a problem: {fault}.")

    def _fault(self) -> str:
        """What is wrong with the types and ranges of the fields; empty if nothing is."""
        for name in ("operation", "dtype"):
            if type(getattr(self, name)) is not str:
                return f"{name} is {getattr(self, name)!r}; it must be a text"
        if type(self.allow_tf32) is not bool:
            return f"allow_tf32 is {self.allow_tf32!r}; it must be true or false"
        if type(self.threads) is not int or self.threads < 0:
            return f"threads is {self.threads!r}; it must be an integer of at least 0"
        for name, size in self.dims:
            if type(size) is not int or not 0 <= size < MAX_DIMENSION:
                return f"{name} is {size!r}; it must be an integer of at least 0 and below 2**40"
        for name, value in self.options:
            if type(value) not in (str, int, bool):
                return f"{name} is {value!r}; it must be an integer, a text, or true or false"
        names = [name for name, _ in (*self.dims, *self.options)]
        if not all(type(name) is str for name in names) or len(set(names)) < len(names):
            return f"its dimensions and options are named {names}; the names must be different texts"
        return ""

    # By the key, as True equals 1 to Python, and the two may mean different things.
    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Problem) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def facts(self) -> dict[str, OptionValue]:
        """Dimensions and options by name."""
        return {**dict(self.dims), **dict(self.options)}

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What others have worked out from the problem's facts, by name and what else it took: kept so that it is done once."""
        return {}

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """The dimensions alone. Problems of one shape stay together when data are split."""
        return self.dims

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the main input."""
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def key(self) -> str:
        """A canonical text that holds every fact; two problems are equal exactly if their keys are."""
        return _encode(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The problem as plain JSON values; :meth:`from_dict` is its inverse."""
        return {
            "operation": self.operation,
            "dims": dict(self.dims),
            "dtype": self.dtype,
            "options": dict(self.options),
            "allow_tf32": self.allow_tf32,
            "threads": self.threads,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """Read what :meth:`to_dict` wrote. Names are not checked against a schema: records outlive schemas.

        Raises:
            InvalidProblemError: a field is missing or has another type.
        """
        try:
            return cls(
                operation=data["operation"],
                dims=tuple(data["dims"].items()),
                dtype=data["dtype"],
                options=tuple(data["options"].items()),
                allow_tf32=data["allow_tf32"],
                threads=data["threads"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidProblemError(
                f"Not a problem: {data!r} ({type(error).__name__}: {error})."
            ) from error

    def __str__(self) -> str:
        shown = [f"{name}={size}" for name, size in self.dims]
        shown.append(self.dtype)
        shown += [f"{name}={value}" for name, value in self.options if value not in (0, False)]
        if self.allow_tf32:
            shown.append("tf32")
        if self.threads:
            shown.append(f"threads={self.threads}")
        return f"{self.operation}({', '.join(shown)})"


@dataclass(frozen=True, slots=True)
class ProblemSchema:
    """What the problems of one operation are made of.

    Raises:
        InvalidRecordError: a name occurs twice or is taken, a dtype is unknown, or a default is not among the choices.
    """

    operation: str
    dims: tuple[Dim, ...]
    dtypes: tuple[str, ...]
    options: tuple[Option, ...] = ()

    def __post_init__(self) -> None:
        names = [*(dim.name for dim in self.dims), *(option.name for option in self.options), *_TAKEN]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidRecordError(f"The schema of {self.operation} uses a name twice: {', '.join(twice)}.")
        unknown = [dtype for dtype in self.dtypes if dtype not in DTYPE_BYTES]
        if unknown:
            raise InvalidRecordError(
                f"The schema of {self.operation} has the dtypes {', '.join(unknown)}; known are: {', '.join(DTYPE_BYTES)}."
            )
        for option in self.options:
            try:
                self._option(option, {})
            except InvalidProblemError as error:
                raise InvalidRecordError(f"The default does not fit: {error}") from error

    def problem(
        self,
        *,
        dtype: str = "float32",
        allow_tf32: bool = False,
        threads: int = 0,
        **values: OptionValue,
    ) -> Problem:
        """Validate values given by name, fill the defaults in, and return the problem.

        Raises:
            InvalidProblemError: an unknown, missing or impossible value; the message lists what is known.
        """
        known = [dim.name for dim in self.dims] + [option.name for option in self.options]
        for name in values:
            if name not in known:
                raise InvalidProblemError(
                    f"{self.operation} has no dimension or option {name!r}. It has: {', '.join(known)}, "
                    "dtype, allow_tf32, threads."
                )
        if dtype not in self.dtypes:
            raise InvalidProblemError(
                f"{self.operation} does not take dtype {dtype!r}. It takes: {', '.join(self.dtypes)}."
            )
        count = _integer(threads)
        if count is None or not 0 <= count <= MAX_THREADS:
            raise InvalidProblemError(
                f"threads is {threads!r}; it must be an integer from 0 (a GPU) to {MAX_THREADS}."
            )
        if not isinstance(allow_tf32, bool):
            raise InvalidProblemError(f"allow_tf32 is {allow_tf32!r}; it must be true or false.")
        return Problem(
            operation=self.operation,
            dims=tuple((dim.name, self._dimension(dim, values)) for dim in self.dims),
            dtype=dtype,
            options=tuple((option.name, self._option(option, values)) for option in self.options),
            # Rounding to TF32 is a matter of float32 alone; other dtypes must not make two keys of one problem.
            allow_tf32=allow_tf32 and dtype == "float32",
            threads=count,
        )

    def _dimension(self, dim: Dim, values: Mapping[str, Any]) -> int:
        value = values.get(dim.name, dim.default)
        if value is None:
            needed = ", ".join(d.name for d in self.dims if d.default is None)
            raise InvalidProblemError(
                f"{self.operation} needs the dimension {dim.name!r} ({dim.doc}). It needs: {needed}."
            )
        size = _integer(value)
        if size is None:
            raise InvalidProblemError(f"{self.operation}: {dim.name} is {value!r}; it must be an integer.")
        if not dim.minimum <= size < MAX_DIMENSION:
            raise InvalidProblemError(
                f"{self.operation}: {dim.name} is {size}; it must be at least {dim.minimum} and below 2**40."
            )
        return size

    def _option(self, option: Option, values: Mapping[str, Any]) -> OptionValue:
        value = values.get(option.name, option.default)
        if option.choices is not None:
            # bool is an int to Python: compare types too, or True would pass where 1 is meant.
            if not any(value == choice and type(value) is type(choice) for choice in option.choices):
                allowed = ", ".join(str(choice) for choice in option.choices)
                raise InvalidProblemError(
                    f"{self.operation}: {option.name} is {value!r}; it must be one of {allowed}."
                )
            return value
        number = _integer(value)
        if number is None or not option.minimum <= number < MAX_DIMENSION:
            raise InvalidProblemError(
                f"{self.operation}: {option.name} is {value!r}; it must be an integer of at least {option.minimum} "
                "and below 2**40."
            )
        return number


def _integer(value: Any) -> int | None:
    """A Python int from any integer (numpy's too), or None: bool is an int to Python and not to a problem."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
