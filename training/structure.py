"""What JSON that is read back must look like: the facts in a manifest, the record of held-out problems.

A digest says that a file is as it was written, not that this package wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast.datasets.journal import quoted
from kernelcast.errors import ArtifactError, KernelcastError
from kernelcast.kernels import Device


@dataclass(frozen=True)
class Kind:
    """A value that is no list and no object: what it must be in words, and whether one is that."""

    what: str
    holds: Callable[[Any], bool]


#: No number of ours is as large: a float can hold it, and is neither infinite nor NaN.
_BEYOND = 1e300


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _BEYOND


def _is_device(value: Any) -> bool:
    try:
        Device.from_dict(value)
    except KernelcastError:
        return False
    return True


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number of at least 0", lambda value: type(value) is int and 0 <= value < 2**63)
NUMBER = Kind("a number", _is_number)
NUMBER_OR_NULL = Kind("a number or null", lambda value: value is None or _is_number(value))
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
POSITIVE_OR_NULL = Kind("a number above 0, or null", lambda value: value is None or POSITIVE.holds(value))
DEVICE = Kind("a device's facts", _is_device)

#: A kind; ``[form]`` a list of any length; ``{str: form}`` an object with any names; any other object the fields that
#: it must have, and with ``?`` behind the name may have. What else it has is not looked at.
Form = Kind | list[Any] | dict[Any, Any]

_FIGURES = {"with_default": {k: {"geomean": NUMBER_OR_NULL} for k in ("1", "3")}}

#: The facts that :mod:`kernelcast.training.train` writes, as far as anything reads them.
FACTS: Form = {
    "created_at": TEXT,
    "device": DEVICE,
    "dataset_hash": TEXT,
    "problems": COUNT,
    "shapes": COUNT,
    "measurements": COUNT,
    "failures": COUNT,
    "workloads": {str: COUNT},
    "dtypes": {str: COUNT},
    "seed": COUNT,
    "hyperparameters": {str: NUMBER_OR_NULL},
    "libraries": {str: TEXT},
    "held_out": {"sha256": TEXT, "how?": TEXT, "rankers?": {"model": _FIGURES}},
    "gate": {"promoted": FLAG, "reason": TEXT},
}


def check_facts(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Check the facts in a registered model's manifest.

    Raises:
        ArtifactError: names the first field that is missing or of another kind.
    """
    try:
        check(manifest.get("facts"), FACTS, f"{folder / 'manifest.json'}: facts")
    except ArtifactError as error:
        raise ArtifactError(f"{error} Train the model again.") from error


def check(value: Any, form: Form, name: str) -> None:
    """Compare a value that JSON was read as with what it must be.

    Args:
        value: of any structure.
        form: see :data:`Form`.
        name: of the value, for messages.

    Raises:
        ArtifactError: names the first part that is missing or of another kind.
    """
    if isinstance(form, Kind):
        if not form.holds(value):
            raise _wrong(value, name, form.what)
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise _wrong(value, name, "a list")
        for place, item in enumerate(value):
            check(item, form[0], f"{name}[{place}]")
    elif not isinstance(value, dict):
        raise _wrong(value, name, "an object")
    elif str in form:
        for key, item in value.items():
            check(item, form[str], f"{name}.{quoted(key)}")
    else:
        for key, inner in form.items():
            field = key.removesuffix("?")
            if field in value:
                check(value[field], inner, f"{name}.{field}")
            elif field == key:
                raise ArtifactError(f"{name} has no {field}.")


def _wrong(value: Any, name: str, what: str) -> ArtifactError:
    return ArtifactError(f"{name} has {quoted(repr(value))} where {what} must be.")
