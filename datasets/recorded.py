"""Operations that are known from records alone, such as the kernels of Kernel Tuner's files.

The records of a store say what their problems are made of, which parameters a variant has, and which configs were
tried: from these an operation is built whose candidates can be listed, ranked and searched as those of the catalogue
are. There is no kernel behind it, so nothing of it can be run or measured here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from kernelcast.datasets.store import Store
from kernelcast.errors import InvalidProblemError, KernelcastError, StoreError, UnknownNameError
from kernelcast.kernels import (
    Block,
    Candidate,
    CandidateTable,
    Columns,
    Device,
    Dim,
    Operation,
    Option,
    Parameter,
    Problem,
    ProblemSchema,
    Rule,
    Tolerance,
    Variant,
    Work,
    operation,
    register_operation,
    register_variant,
)
from kernelcast.kernels.candidate import ConfigValue

if TYPE_CHECKING:
    import pandas as pd
    import torch

_COLUMNS = ("variant", "candidate_key", "problem", "device_fingerprint", "outcome")

#: The values of a config in the order of the parameters' names.
Values = tuple[ConfigValue, ...]


@dataclass(frozen=True)
class RecordedSchema(ProblemSchema):
    """What recorded problems are made of: dtypes may be those of another tool (``"unknown"``), and so may options be.

    Attributes:
        others: further forms that problems of the operation were recorded in, with other dimensions or options: files of one
            kernel may state its size in different ways.
        recorded: keys of the recorded problems.
    """

    others: tuple[RecordedSchema, ...] = ()
    recorded: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Records are as they are: nothing is refused."""

    def problem(
        self, *, dtype: str = "", allow_tf32: bool = False, threads: int = 0, **values: Any
    ) -> Problem:
        """As :meth:`ProblemSchema.problem`; the dtype may be left out where the records have one alone.

        Of several forms that take the values, one counts in which they name a recorded problem, then one that has no other
        dimensions and options than those named, then the one of most problems.

        Raises:
            InvalidProblemError: the values fit no form, or leave open which of several recorded problems is meant.
        """
        found: list[Problem] = []
        faults: list[InvalidProblemError] = []
        for form in (self, *self.others):
            try:
                found.append(form._of_this_form(dtype, allow_tf32, threads, values))
            except InvalidProblemError as error:
                faults.append(error)
        meant = [each for each in found if each.key in self.recorded]
        exact = [each for each in meant or found if each.facts.keys() == values.keys()]
        if exact or (found and len(meant) <= 1):
            return (exact or meant or found)[0]
        if meant:
            raise InvalidProblemError(
                f"These values leave open which recorded problem of {self.operation} is meant: "
                f"{'; '.join(map(str, meant))}. Name all dimensions and options of one."
            )
        if not self.others:
            raise faults[0]
        forms = "; ".join(form._names() for form in (self, *self.others))
        raise InvalidProblemError(
            f"The records of {self.operation} state their problems in {len(self.others) + 1} forms: {forms}. These values "
            f"fit none of them: {' '.join(str(fault) for fault in faults)}"
        )

    def _of_this_form(self, dtype: str, allow_tf32: bool, threads: int, values: Mapping[str, Any]) -> Problem:
        if not dtype and len(self.dtypes) > 1:
            raise InvalidProblemError(f"{self.operation} needs a dtype: {', '.join(self.dtypes)}.")
        return super().problem(
            dtype=dtype or self.dtypes[0], allow_tf32=allow_tf32, threads=threads, **values
        )

    def _names(self) -> str:
        return (
            " ".join([dim.name for dim in self.dims] + [option.name for option in self.options]) or "nothing"
        )


class RecordedOperation(Operation):
    """An operation without a reference and without kernels."""

    #: Folder of the store that it was built from.
    root: ClassVar[Path]

    def make_inputs(self, problem: Problem, *, seed: int, device: str) -> tuple[torch.Tensor, ...]:
        """Raises KernelcastError: there is nothing to run."""
        _refuse_to_run(self.name)

    def reference(self, problem: Problem, *inputs: torch.Tensor) -> torch.Tensor:
        """Raises KernelcastError: there is nothing to run."""
        _refuse_to_run(self.name)

    def tolerance(self, problem: Problem) -> Tolerance:
        """Raises KernelcastError: there is nothing to run."""
        _refuse_to_run(self.name)

    def flops(self, problem: Problem) -> float:
        """Unknown: 0."""
        return 0.0

    def traffic_bytes(self, problem: Problem) -> float:
        """Unknown: 0."""
        return 0.0


class RecordedVariant(Variant):
    """A variant whose space is what was recorded of it."""

    operation_name: ClassVar[str]
    block: ClassVar[Block]

    def space(self, subset: str = "full") -> Block:
        """Every config that was recorded for any problem, whatever the subset."""
        return self.block

    def work(self, problem: Problem, columns: Columns, device: Device) -> Work:
        """Unknown."""
        return Work(flops=float("nan"), traffic_bytes=float("nan"))

    def build(self, problem: Problem, config: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
        """Raises KernelcastError: there is nothing to run."""
        _refuse_to_run(self.operation_name)


def register_recorded(root: Path, name: str) -> Operation:
    """Add an operation to the catalogue that a store has records of, and give it back; once a process.

    Args:
        root: folder of the store.
        name: of the operation.

    Raises:
        UnknownNameError: neither the catalogue nor the store has it; the message lists the operations of both.
        KernelcastError: it was built from the records of another store already.
        StoreError: the store cannot be read.
    """
    try:
        known = operation(name)
    except UnknownNameError as error:
        return _build(Path(root), name, error)
    if isinstance(known, RecordedOperation) and known.root != Path(root).resolve():
        raise KernelcastError(
            f"{name} was built from the records in {known.root}; start another process for those in {root}."
        )
    return known


def _build(root: Path, name: str, unknown: UnknownNameError) -> Operation:
    store = Store(root)
    if not (root / "store.json").is_file():
        raise unknown
    try:
        frame = store.frame(list(_COLUMNS), operation=name)
        if frame.empty:
            recorded = set(store.frame(["operation"])["operation"].astype(object))
            raise UnknownNameError("operation", name, sorted({*unknown.known, *recorded}))
    except StoreError as error:
        raise StoreError(f"{name} is no operation of the catalogue, and: {error}") from error
    problems = {
        text: Problem.from_dict(json.loads(text)) for text in sorted(frame["problem"].astype(object).unique())
    }
    measured = set(
        zip(*(frame[column].astype(object) for column in ("problem", "device_fingerprint")), strict=True)
    )
    variants = [
        _variant(name, str(variant), rows, measured)
        for variant, rows in frame.groupby(frame["variant"].astype(object), sort=True)
    ]
    count = f"{len(problems):,} recorded problem{'s' if len(problems) > 1 else ''}"
    register_operation(
        type(
            f"Recorded_{name}",
            (RecordedOperation,),
            {
                "__module__": __name__,
                "name": name,
                "doc": f"Known from {count} alone: nothing of it can be run here.",
                "schema": _schema(name, list(problems.values())),
                "root": root.resolve(),
            },
        )
    )
    for variant in variants:
        register_variant(name)(variant)
    return operation(name)


def _schema(name: str, problems: list[Problem]) -> RecordedSchema:
    """The forms of the problems: dimensions and options, that of most problems first. What all have alike is the default."""
    forms: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Problem]] = {}
    for problem in problems:
        forms.setdefault((tuple(dict(problem.dims)), tuple(dict(problem.options))), []).append(problem)
    # Of equally many, that with numbers for sizes before that with a text.
    first, *others = sorted(forms.values(), key=lambda alike: (-len(alike), -len(alike[0].dims)))
    return replace(
        _form(name, first),
        others=tuple(_form(name, alike) for alike in others),
        recorded=frozenset(problem.key for problem in problems),
    )


def _form(name: str, alike: list[Problem]) -> RecordedSchema:
    def values(of: str) -> list[Any]:
        return list(dict.fromkeys(problem.facts[of] for problem in alike))

    return RecordedSchema(
        operation=name,
        dims=tuple(
            Dim(dim, "as recorded", default=values(dim)[0] if len(values(dim)) == 1 else None)
            for dim, _ in alike[0].dims
        ),
        dtypes=tuple(sorted({problem.dtype for problem in alike})),
        options=tuple(
            Option(option, "as recorded", default=values(option)[0], choices=tuple(values(option)))
            for option, _ in alike[0].options
        ),
    )


def _variant(
    operation_name: str, name: str, rows: pd.DataFrame, measured: Collection[tuple[str, str]]
) -> type[RecordedVariant]:
    keys = sorted(rows["candidate_key"].astype(object).unique())
    candidates = {key: Candidate.from_key(key) for key in keys}
    # Columns have one set of parameters; configs that have another are few, and not listed.
    (parameters, _), *others = Counter(
        tuple(n for n, _ in c.config) for c in candidates.values()
    ).most_common()
    listed = {key: c for key, c in candidates.items() if tuple(n for n, _ in c.config) == parameters}
    block = CandidateTable.of(listed.values()).blocks[0]
    outcomes: dict[tuple[str, str], dict[Values, str]] = {}
    for key, problem, fingerprint, outcome in zip(
        *(rows[column].astype(object) for column in _COLUMNS[1:]), strict=True
    ):
        if key in listed:
            values = tuple(value for _, value in listed[key].config)
            found = outcomes.setdefault((problem, fingerprint), {})
            # Of several records of one candidate, one that worked shows that it can.
            if found.get(values) != "ok":
                found[values] = outcome

    def recorded(problem: Problem, columns: Columns, device: Device) -> list[str] | None:
        """The outcome of each row, ``""`` where it was not tried; None if the problem was not recorded there at all."""
        where = problem.key, device.fingerprint
        if where not in measured:
            return None
        found = outcomes.get(where, {})
        values = list(zip(*(columns[parameter].tolist() for parameter in parameters), strict=True))
        return [found.get(each, "") for each in values or [()]]

    def tried(problem: Problem, columns: Columns, device: Device) -> np.ndarray | bool:
        found = recorded(problem, columns, device)
        return True if found is None else np.array([bool(outcome) for outcome in found])

    def worked(problem: Problem, columns: Columns, device: Device) -> np.ndarray | bool:
        found = recorded(problem, columns, device)
        return True if found is None else np.array([outcome in ("", "ok") for outcome in found])

    def outcome_of(problem: Problem, columns: Columns, device: Device) -> str:
        return (recorded(problem, columns, device) or [""])[0]

    left_out = sum(number for _, number in others)
    more = f" {left_out} configs with other parameters are not listed." if left_out else ""
    return type(
        f"Recorded_{operation_name}_{name}",
        (RecordedVariant,),
        {
            "__module__": __name__,
            "name": name,
            "operation_name": operation_name,
            "backend": next((each for each in ("triton", "vendor") if name.startswith(each)), "unknown"),
            "doc": f"Recorded configs, measured elsewhere.{more}",
            "block": block,
            "parameters": tuple(
                Parameter(parameter, tuple(sorted(set(block.columns[parameter].tolist()))), "as recorded")
                for parameter in parameters
            ),
            "rules": (
                Rule(
                    "recorded",
                    "Where a problem was recorded, what was not tried on it breaks a constraint of the kernel's space.",
                    tried,
                ),
                Rule(
                    "worked", "It failed when it was recorded on this problem and device.", worked, outcome_of
                ),
            ),
        },
    )


def _refuse_to_run(name: str) -> NoReturn:
    raise KernelcastError(
        f"{name} is known from records alone, and there is no kernel here to run. Train and evaluate on its records, or "
        "select with --mode predict."
    )
