"""What the choice of a Triton kernel's config may depend on: the arguments' key, and never a value in a tensor.

Two keys are made of a call. The fast one is a tuple for the memory of one process: it begins as that of Triton's own
autotuner does (the values of the key arguments, then the dtype of every tensor) and adds what the compiler specialises on.
The complete one (:class:`TunedKey`) has the device, the software and the kernel's source in it too, and names a file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kernelcast.datasets.record import Environment
from kernelcast.kernels import Device, Problem
from kernelcast.kernels.problem import MAX_DIMENSION

#: How an argument is specialised: wholly, but for its alignment, not at all, or by its value.
_WHOLLY, _UNALIGNED, _NEVER, _BY_VALUE = range(4)

#: Whole numbers from here on are compiled as 64 bits.
_BEYOND_INT32 = 2**31

#: Bytes and elements that the compiler takes as "divisible" (triton/backends/compiler.py, ``BaseBackend``).
_DIVISIBLE = 15

#: Longer names do not fit into folders (kernelcast.costmodel.locate).
_MOST_CHARACTERS = 120

#: ``grid`` and ``warmup``, which every launch has among its keywords.
_LAUNCH_OPTIONS = 2

_dtype_names: dict[Any, str] = {}


@dataclass(frozen=True)
class Call:
    """One call of a kernel, as far as a choice may depend on it.

    Attributes:
        values: (name, value) of the arguments that the tuner's key names, in that order.
        constants: (name, value) of the ``tl.constexpr`` arguments that the caller gave and the key does not name.
        dtypes: of every tensor, in the order of the arguments: ``"torch.float16"``.
        specialization: a letter or more for each argument: what the compiler takes as known of it.
        device: the first tensor's torch device; None without tensors.
    """

    values: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[str, Any], ...]
    dtypes: tuple[str, ...]
    specialization: str
    device: Any

    def rounded(self, rounding: Mapping[str, Callable[[Any], Any]]) -> Call:
        """The call that stands for all whose key arguments round to the same values."""
        values = tuple(
            (name, rounding[name](value) if name in rounding else value) for name, value in self.values
        )
        return replace(self, values=values)

    def problem(self, operation: str, *, threads: int = 0) -> Problem:
        """The call as a problem: whole numbers of the key are dimensions, everything else is an option.

        ``dtype`` is that of the first tensor (``"unknown"`` without one), the option ``dtypes`` has those of all.
        """
        dims, options = {}, {}
        for name, value in self.values:
            if type(value) is int and 0 <= value < MAX_DIMENSION:
                dims[name] = value
            else:
                options[name] = _as_option(value)
        for name, value in self.constants:
            options.setdefault(name, _as_option(value))
        dtypes = [name.removeprefix("torch.") for name in self.dtypes]
        for name, value in (("dtypes", ",".join(dtypes)), ("specialization", self.specialization)):
            options[name if name not in dims and name not in options else f"_{name}"] = value
        return Problem(
            operation=operation,
            dims=tuple(dims.items()),
            dtype=dtypes[0] if dtypes else "unknown",
            options=tuple(options.items()),
            threads=threads,
        )


@dataclass(frozen=True)
class TunedKey:
    """Every fact that can change which config of a kernel is fastest.

    Attributes:
        operation: :func:`operation_name` of the kernel.
        source: :func:`source_hash` of the kernel and of the heuristics between it and the tuner.
        problem: :attr:`kernelcast.kernels.Problem.key` of the call.
        device: the hardware's fingerprint.
        environment: torch, triton, the runtime, the system, the compiler, and its settings.
    """

    operation: str
    source: str
    problem: str
    device: str
    environment: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits: the entry's file name."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


class Signature:
    """Makes the keys of a kernel's calls.

    Args:
        arg_names: of the kernel, in order.
        keys: names of the arguments whose values are part of the key. A name that the kernel lacks is passed over, as the
            older versions of Triton do; newer ones have refused it before.
        kernel: what ``@triton.jit`` made: says which arguments the compiler specialises on.
        rounding: makes one value of several of a key argument, by its name. The fast key has what it gives.
    """

    def __init__(
        self,
        arg_names: Sequence[str],
        keys: Iterable[str],
        kernel: Any,
        rounding: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.arg_names = tuple(arg_names)
        self._kinds = _kinds(self.arg_names, kernel)
        self._parameters = tuple(zip(self._kinds, self.arg_names, strict=True))
        places = {name: place for place, name in enumerate(self.arg_names)}
        self._keys = tuple((name, places[name]) for name in keys if name in places)
        self._key_places = [place for _, place in self._keys]
        self._last_key = max(self._key_places, default=-1)
        self._keyed = {name for name, _ in self._keys}
        self._rounding = dict(rounding or {})

    def key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The fast key of a call. Arguments by position and by name give the same one."""
        count = len(args)
        if count > self._last_key:
            parts = [args[place] for place in self._key_places]
        else:
            parts = [
                args[place] if place < count else kwargs[name]
                for name, place in self._keys
                if place < count or name in kwargs
            ]
        if self._rounding:
            present = [name for name, place in self._keys if place < count or name in kwargs]
            parts = [
                self._rounding[name](value) if name in self._rounding else value
                for name, value in zip(present, parts, strict=True)
            ]
        codes: list[str] = []
        constants: list[Any] = []
        device = _read(zip(self._kinds, args, strict=False), parts, codes, constants)
        # Beside arguments of the kernel there are grid and warmup, and whatever the launch is told of the compiler.
        named = None
        if len(kwargs) > _LAUNCH_OPTIONS or "grid" not in kwargs or "warmup" not in kwargs:
            named = [(kind, kwargs[name]) for kind, name in self._parameters[count:] if name in kwargs]
        if named:
            found = _read(named, parts, codes, constants)
            device = found if device is None else device
        if constants:
            codes.append("|")
            parts.extend(constants)
        parts.append("".join(codes))
        parts.append(device)
        return tuple(parts)

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """What :meth:`key` says of a call, by names."""
        given = dict(zip(self.arg_names, args, strict=False))
        given |= {name: kwargs[name] for name in self.arg_names if name in kwargs}
        kinds = dict(zip(self.arg_names, self._kinds, strict=True))
        dtypes: list[str] = []
        codes: list[str] = []
        pairs = [(kinds[name], given[name]) for name in self.arg_names if name in given]
        device = _read(pairs, dtypes, codes, [])
        return Call(
            values=tuple((name, given[name]) for name, _ in self._keys if name in given),
            constants=tuple(
                (name, value)
                for name, value in given.items()
                if kinds[name] == _BY_VALUE and name not in self._keyed
            ),
            dtypes=tuple(dtypes),
            specialization="".join(codes),
            device=device,
        )


def _read(pairs: Iterable[tuple[int, Any]], dtypes: list[Any], codes: list[str], constants: list[Any]) -> Any:
    """Append the dtype of each tensor, the code of each argument and each constant. Returns the first tensor's device.

    The code of a whole number is ``1`` for one, ``d`` for a multiple of 16 and ``i`` for another, a capital letter where it
    takes 64 bits; that of a tensor is ``A`` where it is aligned to 16 bytes, and ``P`` otherwise.
    """
    device = None
    # Runs at every launch: calls of functions would be half of its time.
    for kind, value in pairs:
        if kind == _BY_VALUE:
            codes.append("c")
            # The class too: True and 1.0 equal 1, and are other constants.
            constants.append((type(value), value if isinstance(value, int | str | float) else str(value)))
        elif type(value) is int:
            if value == 1 and kind != _NEVER:
                codes.append("1")
            elif -_BEYOND_INT32 <= value < _BEYOND_INT32:
                codes.append("i" if value & _DIVISIBLE or kind != _WHOLLY else "d")
            else:
                codes.append("I" if value & _DIVISIBLE or kind != _WHOLLY else "D")
        else:
            pointer = getattr(value, "data_ptr", None)
            if pointer is None:
                codes.append(_other_code(kind, value, dtypes))
                if device is None:
                    device = getattr(getattr(value, "base", None), "device", None)
                continue
            dtype = value.dtype
            dtypes.append(_dtype_names.get(dtype) or _dtype_names.setdefault(dtype, str(dtype)))
            codes.append("P" if kind != _WHOLLY or pointer() & _DIVISIBLE else "A")
            if device is None:
                device = value.device
    return device


def _other_code(kind: int, value: Any, dtypes: list[Any]) -> str:
    """The code of what is neither a whole number nor a tensor."""
    if value is None:
        return "n"
    if isinstance(value, bool):
        return "b"
    if isinstance(value, float):
        return "f"
    if isinstance(value, tuple):
        inner: list[str] = []
        _read([(kind, each) for each in value], dtypes, inner, [])
        return f"({''.join(inner)})"
    base: Any = getattr(value, "base", None)
    if hasattr(base, "data_ptr"):
        # A tensor descriptor: its block's shape is compiled in.
        return f"<{base.dtype},{getattr(value, 'block_shape', '')}>"
    return f"<{type(value).__name__}>"


def _kinds(arg_names: Sequence[str], kernel: Any) -> tuple[int, ...]:
    """How each argument is specialised, as its kernel declares it; the interpreter's kernels keep their options too."""
    options = getattr(kernel, "kwargs", None)
    options = options if isinstance(options, dict) else {}

    def listed(name: str) -> set[Any]:
        return set(getattr(kernel, name, None) or options.get(name) or ())

    never, unaligned = listed("do_not_specialize"), listed("do_not_specialize_on_alignment")
    annotations = {name: str(parameter.annotation) for name, parameter in _parameters(kernel).items()}
    kinds = []
    for place, name in enumerate(arg_names):
        if "constexpr" in annotations.get(name, ""):
            kinds.append(_BY_VALUE)
        elif name in never or place in never:
            kinds.append(_NEVER)
        else:
            kinds.append(_UNALIGNED if name in unaligned or place in unaligned else _WHOLLY)
    return tuple(kinds)


def _parameters(kernel: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function_of(kernel)).parameters
    except (TypeError, ValueError):
        return {}


def _as_option(value: Any) -> Any:
    """A value as a problem holds it. Of a tensor only its dtype: values never matter."""
    if hasattr(value, "data_ptr"):
        return str(value.dtype)
    if type(value) in (int, str, bool):
        return value
    return str(value)


def kernel_of(fn: Any) -> Any:
    """What ``@triton.jit`` made, below autotuners and heuristics."""
    while not inspect.isfunction(fn) and not inspect.isfunction(getattr(fn, "fn", None)):
        fn = fn.fn
    return fn


def function_of(fn: Any) -> Callable[..., Any]:
    """The Python function that a kernel was written as."""
    while not inspect.isfunction(fn):
        fn = fn.fn
    return fn


def operation_name(fn: Any) -> str:
    """The operation that a kernel's records are of: ``triton.<module>.<qualified name>``.

    A kernel of a script has the script's name for its module. What cannot stand in a file name becomes ``_``.
    """
    function = function_of(fn)
    module = function.__module__ or "unknown"
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        module = Path(file).stem if file else module
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"triton.{module}.{function.__qualname__}")
    if len(name) > _MOST_CHARACTERS:
        name = f"{name[: _MOST_CHARACTERS - 13]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return name


def variant_name(fn: Any) -> str:
    """The variant that a kernel is: its name, after ``triton_``."""
    return f"triton_{re.sub(r'[^A-Za-z0-9_]', '_', function_of(fn).__name__).removeprefix('triton_')}"


def source_hash(fn: Any) -> str:
    """16 hexadecimal digits over a kernel's source with all that it calls, and over the heuristics above it."""
    digest = hashlib.sha256()
    while not inspect.isfunction(fn):
        for name, function in sorted(getattr(fn, "values", {}).items()):
            digest.update(f"{name}={code_hash(function)};".encode())
        known = getattr(fn, "cache_key", None)
        if isinstance(known, str):
            digest.update(known.encode())
        fn = fn.fn
    digest.update(code_hash(fn).encode())
    return digest.hexdigest()[:16]


def code_hash(function: Any) -> str:
    """A hash of what a Python function does: its code with its constants, or else its name."""
    if function is None:
        return ""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{type(function).__module__}.{type(function).__qualname__}"
    # The order of a set differs from process to process.
    plain = [
        sorted(map(repr, c)) if isinstance(c, frozenset) else c
        for c in code.co_consts
        if not inspect.iscode(c)
    ]
    named = f"{code.co_names}{plain}"
    inner = "".join(code_hash(_Code(each)) for each in code.co_consts if inspect.iscode(each))
    return hashlib.sha256(code.co_code + named.encode() + inner.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Code:
    __code__: Any


def environment_of(device: Device, kernel: Any) -> tuple[str, ...]:
    """The software facts that a choice holds for; those of the compiler where the kernel is compiled."""
    here = Environment.current("", device_kind=device.kind)
    found = [here.torch, here.triton, here.runtime, here.system]
    if not hasattr(kernel, "cache_key"):
        return (*found, "interpreter")
    from triton._C.libtriton import get_cache_invalidating_env_vars

    found.append(str(sorted(get_cache_invalidating_env_vars().items())))
    if device.kind == "gpu":
        from triton.compiler.compiler import make_backend
        from triton.runtime.driver import driver

        # Names the assembler and its version.
        found.append(str(make_backend(driver.active.get_current_target()).hash()))
    return tuple(found)
