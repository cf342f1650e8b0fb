"""The user's own kernels: one decorator makes an operation, or a further variant of one, of what is there already.

::

    @kernelcast.kernel(
        "row_scale",
        tensors={"x": ("rows", "columns"), "factor": ("rows",)},
        space={"chunk": (16, 64, 256)},
        reference=lambda x, factor: x * factor[:, None],
    )
    def row_scale(x, factor, *, chunk): ...

A ``@triton.jit`` kernel is taken as it is; its pointers, sizes and constants are found by the names of its parameters.
From then on the operation is one of the catalogue's: it is listed, measured, trained on and selected as the built-in ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from kernelcast.errors import InvalidRecordError, UnknownNameError
from kernelcast.kernels.operation import Operation, Tolerance
from kernelcast.kernels.problem import Dim, Option, OptionValue, Problem, ProblemSchema
from kernelcast.kernels.registry import operation as registered_operation
from kernelcast.kernels.registry import register_operation, register_variant
from kernelcast.kernels.user_definition import Definition, unwrap
from kernelcast.kernels.user_operation import (
    TensorSpec,
    UserOperation,
    dims_of,
)
from kernelcast.kernels.user_variant import CallableVariant, DefaultVariant, TritonVariant

FunctionT = TypeVar("FunctionT")

Space = Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]


def kernel(
    operation: str,
    *,
    variant: str | None = None,
    space: Space | None = None,
    tensors: Mapping[str, TensorSpec | Sequence[Any]] | None = None,
    output: str | TensorSpec | None = None,
    scratch: Sequence[str] = (),
    zeroed: Sequence[str] = (),
    mutates: Sequence[str] = (),
    scalars: Mapping[str, Any] | None = None,
    grid: Callable[[Problem, Mapping[str, Any]], Sequence[int]] | None = None,
    where: Mapping[str, Callable[[Problem, Mapping[str, Any]], Any]] | None = None,
    dims: Sequence[Dim | str] = (),
    options: Mapping[str, Sequence[OptionValue]] | None = None,
    dtypes: Sequence[str] = ("float32",),
    reference: Callable[..., Any] | None = None,
    default: Callable[..., Any] | None = None,
    tolerance: Tolerance | tuple[float, float] | Mapping[str, Tolerance | tuple[float, float]] | None = None,
    flops: Callable[[Problem], float] | None = None,
    traffic_bytes: Callable[[Problem], float] | None = None,
    doc: str = "",
) -> Callable[[FunctionT], FunctionT]:
    """Decorator: make a kernel a candidate. Returns the kernel itself, unchanged.

    The first kernel of a name describes the operation; a later one, or one of a built-in operation's name, adds a variant.

    Args:
        operation: the operation's name.
        variant: this variant's name; the function's own where left out.
        space: parameter -> values, whose product is the space; or a list of configs. Of a ``triton.autotune`` kernel its
            own configs where left out. ``num_warps``, ``num_stages`` and other options of Triton's compiler go here too.
        tensors: parameter -> shape, in the order of the arguments: names of dimensions, numbers, or functions of the
            problem; :class:`TensorSpec` states another dtype or range of values. Of a Triton kernel every pointer, outputs
            included; of a Python callable its inputs. A further variant needs it only where its parameters have other names.
        output: of a Triton kernel, the pointer that it writes its result to.
        scratch: pointers that it writes and nobody reads afterwards.
        zeroed: outputs and scratch that must be zero before the launch.
        mutates: inputs that the kernel writes to; it gets copies, so that callers' tensors stay as they are.
        scalars: parameter -> number or function of the problem, for what no dimension, option or config parameter is
            called: strides, a scale.
        grid: (problem, config) -> the launch grid of a Triton kernel, each size of one up to three.
        where: reason -> condition (problem, config): configs that do not meet it are refused with the reason. It is
            called with whole columns (arrays); where that fails or gives no array, config by config.
        dims: further dimensions, or those of ``tensors`` with a text and a minimum; all are found in ``tensors`` otherwise.
        options: further facts of a problem: name -> allowed values, the first being the default.
        dtypes: of the tensors without a dtype of their own.
        reference: the plain computation over the inputs, which it gets in float64; what the default computes where left out.
        default: what runs without kernelcast: a callable over the inputs, such as torch's own. Where left out, this kernel
            with the first config of its space.
        tolerance: (relative, absolute) of a right result, of all dtypes or of each; those of ``torch.testing`` by default.
        flops: problem -> floating-point operations; unknown where left out.
        traffic_bytes: problem -> bytes of every input and the output; of ``tensors`` where left out.
        doc: one phrase.

    Raises:
        InvalidRecordError: the description does not fit the kernel, or itself; the message says how.
        KernelcastError: the operation has a variant of that name.
    """

    def register(function: FunctionT) -> FunctionT:
        bare, found_space, told = unwrap(function, space)
        for word, value in (
            ("reference", reference),
            ("default", default),
            ("flops", flops),
            ("traffic_bytes", traffic_bytes),
        ):
            if value is not None and not callable(value):
                raise InvalidRecordError(f"{operation}: {word} is {value!r}; it must be a function.")
        if where is not None and not isinstance(where, Mapping):
            raise InvalidRecordError(f"{operation}: where is {where!r}; it must map reasons to conditions.")
        name = variant or _name_of(bare)
        try:
            known: Operation | None = registered_operation(operation)
        except UnknownNameError:
            known = None
        specs = {key: TensorSpec.of(value) for key, value in (tensors or {}).items()}
        if known is None and not specs:
            raise InvalidRecordError(
                f"There is no operation {operation!r} yet, and {name} states no tensors to describe it by."
            )
        if isinstance(known, UserOperation) and not specs:
            specs = known.signature
        definition = Definition(
            operation=operation,
            name=name,
            function=bare,
            space=found_space,
            tensors=specs,
            output=output,
            scratch=tuple(scratch),
            zeroed=(*zeroed, *told.get("zeroed", ())),
            mutates=(*mutates, *told.get("mutates", ())),
            scalars=dict(scalars or {}),
            grid=grid,
            where=dict(where or {}),
            doc=doc or _first_line(bare) or name,
        )
        definition.check()
        if known is None:
            described = UserOperation.subclass(
                name=operation,
                doc=doc or _first_line(bare) or operation,
                schema=_schema(operation, specs, dims, options or {}, dtypes),
                definition=definition,
                reference=reference,
                default=default,
                tolerance=tolerance,
                flops=flops,
                traffic_bytes=traffic_bytes,
            )
            definition.check_names(described.schema)
            register_operation(described)
            register_variant(operation)(DefaultVariant.subclass(definition, default))
        else:
            refused = {
                "dims": dims, "options": options, "reference": reference, "default": default,
                "tolerance": tolerance, "flops": flops, "traffic_bytes": traffic_bytes,
            }  # fmt: skip
            given = [word for word, value in refused.items() if value]
            if given:
                raise InvalidRecordError(
                    f"{operation} is there already, and {name} is one more variant of it: {', '.join(given)} "
                    "belong to its first kernel."
                )
            definition.check_names(known.schema)
        base = TritonVariant if definition.is_triton else CallableVariant
        register_variant(operation)(
            base.subclass(definition, without_first=known is None and default is None)
        )
        return function

    return register


def _schema(
    operation: str,
    tensors: Mapping[str, TensorSpec],
    dims: Sequence[Dim | str],
    options: Mapping[str, Sequence[OptionValue]],
    dtypes: Sequence[str],
) -> ProblemSchema:
    stated = {dim.name: dim for dim in (Dim(d, d) if isinstance(d, str) else d for d in dims)}
    found = {name: Dim(name, f"of {parameter}") for name, parameter in dims_of(tensors).items()}
    for name, values in options.items():
        if not values:
            raise InvalidRecordError(f"{operation}: the option {name!r} has no values.")
    return ProblemSchema(
        operation=operation,
        # The order of the tensors, whatever was stated in addition.
        dims=tuple({**found, **stated}.values()),
        dtypes=tuple(dtypes),
        options=tuple(Option(name, name, values[0], tuple(values)) for name, values in options.items()),
    )


def _name_of(function: Any) -> str:
    found = getattr(getattr(function, "fn", function), "__name__", "")
    if not found or found == "<lambda>":
        raise InvalidRecordError(
            f"{function!r} has no name; give the variant one: kernel(..., variant='...')."
        )
    return str(found)


def _first_line(function: Any) -> str:
    text = getattr(getattr(function, "fn", function), "__doc__", None) or ""
    return text.strip().split("\n")[0].rstrip(".")


__all__ = ["TensorSpec", "kernel"]
