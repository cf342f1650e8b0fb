"""Feature schemas: which features a model was fitted on, and what each column means."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernelcast.errors import ArtifactError, ModelError
from kernelcast.kernels import CandidateTable, Problem

#: Raised whenever the meaning of a column changes; models of another version are refused.
FEATURE_VERSION = 1

#: A numeric parameter with more values than this is a quantity, between whose values trees interpolate; with fewer it is
#: a choice, and nothing is known of one that was never measured.
MOST_SEEN = 64


@dataclass(frozen=True, slots=True)
class Coding:
    """How a named value becomes a number: as it is, or by its place among the categories.

    ``categories`` is empty for a number.
    """

    name: str
    categories: tuple[str, ...] = ()

    def encode(self, value: Any) -> float:
        """The value's number; NaN for a category that was not seen in fitting, or for no number where one was seen."""
        if not self.categories:
            return float(value) if isinstance(value, int) and not isinstance(value, bool) else float("nan")
        text = str(value)
        return float(self.categories.index(text)) if text in self.categories else float("nan")

    def encode_column(self, column: np.ndarray) -> np.ndarray:
        """:meth:`encode` over an array."""
        if not self.categories:
            return column.astype(np.float64) if column.dtype.kind in "iu" else np.full(column.shape, np.nan)
        codes = np.full(column.shape, np.nan)
        as_text = column.astype(str)
        for code, category in enumerate(self.categories):
            codes[as_text == category] = code
        return codes


@dataclass(frozen=True)
class FeatureSchema:
    """What the columns of a feature matrix are, for the problems and candidates of one operation.

    It names the variants, parameters and categories that occurred in fitting, so that a variant added later neither
    shifts a column nor breaks a model: the model does not cover it, and says so.

    Attributes:
        operation: the operation's name.
        dims: names of the dimensions.
        dtypes: dtypes that occurred.
        options: coding of each option.
        variants: variants that occurred, with the names of their parameters; records of several versions of one
            variant may name it more than once.
        parameters: coding of each parameter; variants share those of one name.
        with_work: whether the operation is in the catalogue, so that its variants state their work.
        seen: values of each numeric parameter that occurred; a parameter with more than :data:`MOST_SEEN` is left out.
        version: :data:`FEATURE_VERSION` when it was made.
        compile_facts: whether there are columns for what the compiler made of a candidate; they are NaN where that is not
            known. Such a schema says so in its JSON, and others do not mention it.
        with_device: whether there are columns for the facts of the device: where the data are of several. Named in the JSON
            only where it is so.
    """

    operation: str
    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    options: tuple[Coding, ...]
    variants: tuple[tuple[str, tuple[str, ...]], ...]
    parameters: tuple[Coding, ...]
    with_work: bool
    seen: tuple[tuple[str, tuple[int, ...]], ...] = ()
    version: int = FEATURE_VERSION
    compile_facts: bool = False
    with_device: bool = False

    @classmethod
    def infer(
        cls,
        problems: Iterable[Problem],
        tables: Iterable[CandidateTable],
        *,
        with_work: bool,
        compile_facts: bool = False,
        with_device: bool = False,
    ) -> FeatureSchema:
        """The schema of everything that occurs in some problems and their candidates.

        Raises:
            ModelError: there is no problem, or they are of several operations or have different dimensions.
        """
        problems = list(problems)
        if not problems:
            raise ModelError("There is no problem to take a feature schema from.")
        first = problems[0]
        options: dict[str, set[Any]] = {name: set() for name, _ in first.options}
        for problem in problems:
            if problem.operation != first.operation or [d for d, _ in problem.dims] != [
                d for d, _ in first.dims
            ]:
                raise ModelError(f"{problem} and {first} do not have the same operation and dimensions.")
            for name, value in problem.options:
                options.setdefault(name, set()).add(value)
        variants: set[tuple[str, tuple[str, ...]]] = set()
        parameters: dict[str, set[Any]] = {}
        for table in tables:
            for block in table.blocks:
                variants.add((block.variant, tuple(sorted(block.columns))))
                for name, column in block.columns.items():
                    parameters.setdefault(name, set()).update(np.unique(column).tolist())
        return cls(
            operation=first.operation,
            dims=tuple(name for name, _ in first.dims),
            dtypes=tuple(sorted({problem.dtype for problem in problems})),
            options=tuple(_coding(name, values) for name, values in options.items()),
            variants=tuple(sorted(variants)),
            parameters=tuple(_coding(name, values) for name, values in sorted(parameters.items())),
            with_work=with_work,
            seen=tuple(
                (name, tuple(sorted(values)))
                for name, values in sorted(parameters.items())
                if not _coding(name, values).categories and len(values) <= MOST_SEEN
            ),
            # Occupancy needs the warps that a variant of the catalogue states.
            compile_facts=compile_facts and with_work,
            with_device=with_device,
        )

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits over every field."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The schema as plain JSON values; :meth:`from_dict` is its inverse."""
        return {
            "operation": self.operation,
            "dims": list(self.dims),
            "dtypes": list(self.dtypes),
            "options": [[coding.name, list(coding.categories)] for coding in self.options],
            "variants": [[name, list(parameters)] for name, parameters in self.variants],
            "parameters": [[coding.name, list(coding.categories)] for coding in self.parameters],
            "with_work": self.with_work,
            "seen": [[name, list(values)] for name, values in self.seen],
            "version": self.version,
            # Named only where it is so: the hash of a schema without it is what it was before there was such a thing.
            **({"compile_facts": True} if self.compile_facts else {}),
            **({"with_device": True} if self.with_device else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FeatureSchema:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ArtifactError: a field is missing or of another type, or the version is not this kernelcast's.
        """
        try:
            version = int(data["version"])
            if version != FEATURE_VERSION:
                raise ArtifactError(
                    f"The model's features have version {version}; this kernelcast computes version "
                    f"{FEATURE_VERSION}. Train the model again."
                )
            schema = cls(
                operation=str(data["operation"]),
                dims=tuple(map(str, data["dims"])),
                dtypes=tuple(map(str, data["dtypes"])),
                options=tuple(Coding(str(name), tuple(map(str, found))) for name, found in data["options"]),
                variants=tuple((str(name), tuple(map(str, found))) for name, found in data["variants"]),
                parameters=tuple(
                    Coding(str(name), tuple(map(str, found))) for name, found in data["parameters"]
                ),
                with_work=bool(data["with_work"]),
                seen=tuple((str(name), tuple(map(int, values))) for name, values in data["seen"]),
                version=version,
                compile_facts=bool(data.get("compile_facts", False)),
                with_device=bool(data.get("with_device", False)),
            )
            # A value of another type may be read as the right one: 0 as no, a text of one letter as a list.
            if json.dumps(schema.to_dict(), sort_keys=True) != json.dumps(dict(data), sort_keys=True):
                raise ValueError("it is not written as a schema is")
            return schema
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            raise ArtifactError(f"Not a feature schema ({type(error).__name__}: {error}).") from error


def _coding(name: str, values: set[Any]) -> Coding:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return Coding(name)
    return Coding(name, tuple(sorted({str(value) for value in values})))
