"""The catalogue: which operations and variants there are, and which candidates are legal."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kernelcast import settings
from kernelcast.errors import IllegalCandidateError, KernelcastError, SettingsError, UnknownNameError, warn
from kernelcast.kernels.candidate import Block, Candidate, CandidateTable
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Operation, Variant
from kernelcast.kernels.problem import Problem
from kernelcast.kernels.rule import Refusal

#: Packages that bring operations of their own name a module under this entry-point group.
ENTRY_POINT_GROUP = "kernelcast.operations"

#: What of each variant's space is listed: every config, its quick subset, or every config unless there are more than
#: :data:`MOST_LISTED` of them.
SUBSETS = ("full", "default", "auto")
MOST_LISTED = 500

_operations: dict[str, Operation] = {}
_variants: dict[str, dict[str, Variant]] = {}
_loaded: set[str] = set()
#: Of the operations that :func:`variants` was asked for: what was registered then, and the same in order.
_in_order: dict[str, tuple[dict[str, Variant], dict[str, Variant]]] = {}
#: What KERNELCAST_IMPORT named and was imported, or is being imported by this thread.
_imported: set[str] = set()
_importing = threading.RLock()
#: Told the name of an operation that has a new variant.
_listeners: list[Callable[[str], None]] = []

OperationT = TypeVar("OperationT", bound=type[Operation])
VariantT = TypeVar("VariantT", bound=type[Variant])


def register_operation(cls: OperationT) -> OperationT:
    """Class decorator: add an operation to the catalogue.

    Raises:
        KernelcastError: another operation has that name.
    """
    if cls.name in _operations:
        raise KernelcastError(f"The operation {cls.name!r} is registered twice; names are unique.")
    _operations[cls.name] = cls()
    _variants[cls.name] = {}
    return cls


def register_variant(operation_name: str) -> Callable[[VariantT], VariantT]:
    """Class decorator: add a variant to an operation.

    Raises:
        UnknownNameError: no such operation.
        KernelcastError: the operation has a variant of that name.
    """

    def register(cls: VariantT) -> VariantT:
        if operation_name not in _operations:
            operation(operation_name)
        known = _variants[operation_name]
        if cls.name in known:
            raise KernelcastError(
                f"The variant {cls.name!r} of {operation_name!r} is registered twice; names are unique."
            )
        known[cls.name] = cls()
        for told in _listeners:
            told(operation_name)
        return cls

    return register


def on_change(listener: Callable[[str], None]) -> None:
    """Have a function called with the name of an operation whenever that gets a variant. For the life of the process."""
    _listeners.append(listener)


def operation(name: str) -> Operation:
    """The operation of that name.

    Raises:
        UnknownNameError: there is none; the message lists those there are.
    """
    # Not `name not in _operations`: another thread may be importing it, with half of its variants registered.
    if name not in _loaded:
        _load(name)
    if name not in _operations:
        raise UnknownNameError("operation", name, operation_names())
    return _operations[name]


def operation_names() -> list[str]:
    """The names of all operations, sorted."""
    for name in _builtin_names():
        _load(name)
    _load_imports()
    _load_entry_points()
    return sorted(_operations)


def variants(operation_name: str) -> dict[str, Variant]:
    """All variants of an operation by name: the default's first, then by name.

    Raises:
        UnknownNameError: no such operation.
    """
    default = operation(operation_name).default_variant
    registered = _variants[operation_name]
    before = _in_order.get(operation_name)
    if before is None or before[0] != registered:
        now = dict(registered)
        # By name, not as registered: the order of candidates must not depend on the order of imports.
        before = now, dict(sorted(now.items(), key=lambda item: (item[0] != default, item[0])))
        _in_order[operation_name] = before
    return dict(before[1])


def variant(operation_name: str, name: str) -> Variant:
    """One variant of an operation.

    Raises:
        UnknownNameError: no such operation, or no such variant of it.
    """
    found = variants(operation_name)
    if name not in found:
        raise UnknownNameError(f"variant of {operation_name}", name, found)
    return found[name]


def problem(operation_name: str, **values: Any) -> Problem:
    """Validate values given by name and build a problem of an operation.

    Raises:
        UnknownNameError: no such operation.
        InvalidProblemError: an unknown, missing or impossible value.
    """
    return operation(operation_name).schema.problem(**values)


def candidates(
    problem: Problem,
    device: Device,
    *,
    subset: str = "full",
    backends: Collection[str] | None = None,
    spaces: Mapping[str, Block] | None = None,
) -> CandidateTable:
    """Every legal candidate of a problem on a device, the default's variant first.

    Args:
        problem: what is to be computed.
        device: where.
        subset: ``"full"``, ``"default"`` (each variant's quick subset) or ``"auto"`` (the quick subset of those variants
            that have more than :data:`MOST_LISTED` configs).
        backends: keep variants of these backends only.
        spaces: variant -> the configs to choose among, instead of its subset; variants that are not named are left out.

    Raises:
        UnknownNameError: no such operation or subset.
    """
    _check_subset(subset)
    blocks: list[Block] = []
    for found in variants(problem.operation).values():
        if backends is not None and found.backend not in backends:
            continue
        if (spaces is not None and found.name not in spaces) or not found.serves(problem, device):
            continue
        block = space_of(found, subset) if spaces is None else spaces[found.name]
        met = found.legal_rows(problem, device, block)
        blocks.append(block if np.count_nonzero(met) == block.length else block.take(met))
    return CandidateTable(blocks)


@lru_cache(maxsize=256)
def space_of(found: Variant, subset: str) -> Block:
    """A variant's space, listed once: the largest have tens of thousands of configs. Its columns cannot be written to."""
    if subset == "auto":
        return space_of(found, "full" if found.size <= MOST_LISTED else "default")
    return found.space(subset).keep()


def refusals(problem: Problem, device: Device, *, subset: str = "full") -> list[Refusal]:
    """Every candidate that is not legal, with the first rule that it breaks.

    Raises:
        UnknownNameError: no such operation or subset.
    """
    _check_subset(subset)
    found: list[Refusal] = []
    for each in variants(problem.operation).values():
        found += each.refusals(problem, device, space_of(each, subset))
    return found


def require_legal(problem: Problem, device: Device, candidate: Candidate) -> Variant:
    """The candidate's variant.

    Raises:
        UnknownNameError: no such variant.
        IllegalCandidateError: it is not in the variant's space, or breaks a rule; the message says which and why.
    """
    found = variant(problem.operation, candidate.variant)
    space = {parameter.name: parameter.values for parameter in found.parameters}
    config = candidate.parameters
    if sorted(space) != sorted(config):
        raise IllegalCandidateError(
            f"{candidate} does not have the parameters of {found.name}, which are: {', '.join(space) or 'none'}."
        )
    for name, value in config.items():
        if not any(value == allowed and type(value) is type(allowed) for allowed in space[name]):
            allowed_values = ", ".join(map(str, space[name]))
            raise IllegalCandidateError(
                f"{candidate}: {name} is {value!r}; it must be one of {allowed_values}."
            )
    block = CandidateTable.of([candidate]).blocks[0]
    broken = found.refusals(problem, device, block)
    if broken:
        raise IllegalCandidateError(f"Not legal for {problem} on {device.name}: {broken[0]}.")
    return found


def _check_subset(subset: str) -> None:
    if subset not in SUBSETS:
        raise UnknownNameError("subset", subset, SUBSETS)


@lru_cache(maxsize=1)
def _builtin_names() -> list[str]:
    ops = importlib.import_module("kernelcast.kernels.ops")
    return sorted(module.name for module in pkgutil.iter_modules(ops.__path__) if module.ispkg)


def _load(name: str) -> None:
    """Import one operation's folder, or look for the name among other packages' entry points."""
    if name in _builtin_names():
        try:
            importlib.import_module(f"kernelcast.kernels.ops.{name}")
        except BaseException:
            _forget_failed()
            raise
        _loaded.add(name)
        _load_imports()
        return
    _load_imports()
    if name not in _operations:
        _load_entry_points()


def _forget_failed() -> None:
    """Undo what an import that failed half-way has registered, so that the next try fails in the same way."""
    for name in _builtin_names():
        package = f"kernelcast.kernels.ops.{name}"
        if package not in sys.modules:
            _operations.pop(name, None)
            _variants.pop(name, None)
            for module in [found for found in sys.modules if found.startswith(f"{package}.")]:
                del sys.modules[module]


def _load_imports() -> None:
    """Import what ``KERNELCAST_IMPORT`` names: modules, or files by their path.

    Raises:
        SettingsError: one of them cannot be imported.
    """
    named = settings.imports()
    if not named or _imported.issuperset(named):
        return
    with _importing:
        for name in named:
            if name in _imported:
                continue
            # Before the import, which registers kernels and so comes here again.
            _imported.add(name)
            try:
                import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
            except Exception as error:
                _imported.discard(name)
                raise SettingsError(
                    f"{name!r}, which --import or KERNELCAST_IMPORT names, cannot be imported ({type(error).__name__}: {error})."
                ) from error


def import_file(path: Path, name: str = "") -> None:
    """Import a file as the module that its name says (or ``name``), so that its text is its kernels' version."""
    name = name or path.stem
    found = importlib.util.spec_from_file_location(name, path.expanduser().resolve())
    if found is None or found.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _load_entry_points() -> None:
    # The scan takes tens of milliseconds, so it happens once, and never for a built-in operation.
    if "entry points" in _loaded:
        return
    _loaded.add("entry points")
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:  # noqa: BLE001 - another package's fault must not take the catalogue away
            warn(f"The operations of {entry.value} cannot be loaded ({type(error).__name__}: {error}).")
