"""``kernelcast.triton.perf_model``: a model of ours behind an unmodified ``@triton.autotune``."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from kernelcast import settings
from kernelcast.costmodel import AnalyticModel, RankingModel
from kernelcast.errors import InvalidRecordError, UnknownNameError, warn
from kernelcast.kernels import Candidate, CandidateTable, Device, Operation, Problem, operation, variant
from kernelcast.runtime import ModelWarning
from kernelcast.runtime.dispatch import selector_for
from kernelcast.runtime.triton_configs import candidates_of
from kernelcast.runtime.triton_key import (
    Call,
    Signature,
    function_of,
    kernel_of,
    operation_name,
    variant_name,
)

#: What Triton names of a config on every kernel, and what the catalogue's variants call it.
_COMPILER_OPTIONS = ("num_warps", "num_stages", "num_ctas")

#: Keys whose estimates are kept.
_MOST_KEYS = 10_000

Size = str | int | Callable[[Mapping[str, Any]], Any]


class PerfModel(ABC):
    """What Triton asks for the time of each config, with all of a call's arguments and the config's, by name.

    The estimates of a key are made at once for every config that was seen, and remembered. A fault of the model is a warning,
    once, and the configs keep the order in which they are declared.
    """

    def __init__(self, configs: Iterable[Any]) -> None:
        self._candidates: dict[Candidate, None] = {}
        self._estimates: dict[Any, dict[Candidate, float]] = {}
        self._loaded: dict[Any, tuple[Device, RankingModel | AnalyticModel | None]] = {}
        self._warned = False
        for config in configs:
            self._candidates[self._candidate(config.all_kwargs())] = None

    def __call__(self, **given: Any) -> float:
        """The estimated latency of one config, in microseconds. 0 without an estimate, infinite for what cannot run."""
        try:
            if settings.disabled():
                return 0.0
            return self._estimate(given)
        except Exception as error:  # noqa: BLE001 - a forecast must not end what runs without it
            if not self._warned:
                self._warned = True
                warn(
                    f"No forecast ({type(error).__name__}: {error}). The configs keep the order in which they are declared.",
                    ModelWarning,
                )
            return 0.0

    def _estimate(self, given: Mapping[str, Any]) -> float:
        candidate = self._candidate(given)
        where = _device_of(given)
        key = self._key(given), where
        known = self._estimates.get(key)
        if known is None or candidate not in known:
            self._candidates[candidate] = None
            if len(self._estimates) >= _MOST_KEYS:
                self._estimates.clear()
            # The whole of what was seen so far: a new key asks for the same configs as the last one did.
            known = self._estimates[key] = self._rank(self._problem(given, where), where)
        return known[candidate]

    def _rank(self, problem: Problem, where: torch.device) -> dict[Candidate, float]:
        device, model = self._model(where)
        candidates = list(self._candidates)
        if model is None:
            return dict.fromkeys(candidates, 0.0)
        found: dict[Candidate, float] = {}
        for group in _alike(candidates):
            table = CandidateTable.of(group)
            prediction = model.predict(problem, table, device)
            latency_us = prediction.latency_us
            for place, candidate in enumerate(group):
                # A config whose like was never measured comes after those that are known, and before those that cannot run.
                known = bool(prediction.covered[place]) and math.isfinite(latency_us[place])
                found[candidate] = float(latency_us[place]) if known else 1e30
            for place in self._refused(problem, table, device):
                found[group[place]] = math.inf
        return found

    def _model(self, where: torch.device) -> tuple[Device, RankingModel | AnalyticModel | None]:
        if where not in self._loaded:
            selector = selector_for(where)
            model, _ = selector.rankers.model(self._operation_name)
            self._loaded[where] = selector.device, model or self._without_model(selector.device)
        return self._loaded[where]

    # What the two kinds differ in.
    _operation_name: str

    @abstractmethod
    def _candidate(self, given: Mapping[str, Any]) -> Candidate: ...

    @abstractmethod
    def _key(self, given: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def _problem(self, given: Mapping[str, Any], where: torch.device) -> Problem: ...

    @abstractmethod
    def _without_model(self, device: Device) -> AnalyticModel | None: ...

    def _refused(self, problem: Problem, table: CandidateTable, device: Device) -> Sequence[int]:
        return ()


class _OfOperation(PerfModel):
    """For a kernel that does what a variant of the catalogue does."""

    def __init__(
        self,
        described: Operation,
        *,
        dims: Mapping[str, Size],
        variant_name: str,
        parameters: Mapping[str, str],
        fixed: Mapping[str, Any],
        dtype: str | None,
        options: Mapping[str, Any],
        configs: Iterable[Any],
    ) -> None:
        self._operation = described
        self._operation_name = described.name
        self._variant = variant(described.name, variant_name)
        self._fixed = dict(fixed)
        self._dtype = dtype
        self._values = {**dims, **options}
        self._dims = set(dims)
        known = {dim.name for dim in described.schema.dims} | {each.name for each in described.schema.options}
        own = {parameter.name for parameter in self._variant.parameters}
        self._names = {name: name for name in _COMPILER_OPTIONS if name in own} | dict(parameters)
        for what, names, among in (
            (f"dimension or option of {described.name}", self._values, known),
            (f"parameter of {variant_name}", {*self._names.values(), *fixed}, own),
        ):
            for name in names:
                if name not in among:
                    raise UnknownNameError(what, name, sorted(among))
        missing = sorted(own - set(self._names.values()) - set(fixed))
        if missing:
            raise InvalidRecordError(
                f"{variant_name} has parameters that the kernel's configs do not name: {', '.join(missing)}. Map them with "
                "parameters={'BLOCK_M': 'block_m', ...}, or say what they are with fixed={...}."
            )
        super().__init__(configs)

    def _candidate(self, given: Mapping[str, Any]) -> Candidate:
        try:
            config = {own: given[theirs] for theirs, own in self._names.items() if own not in self._fixed}
        except KeyError as error:
            raise InvalidRecordError(
                f"The kernel has no argument or config parameter {error}, which parameters names."
            ) from error
        return Candidate.of(self._variant.name, {**config, **self._fixed})

    def _key(self, given: Mapping[str, Any]) -> Any:
        return (*(_value(name, size, given, name in self._dims) for name, size in self._values.items()),
                self._dtype_of(given))  # fmt: skip

    def _dtype_of(self, given: Mapping[str, Any]) -> str:
        found = _first_tensor(given) if self._dtype is None else given.get(self._dtype, self._dtype)
        found = getattr(found, "dtype", found)
        if found is None:
            raise InvalidRecordError(
                "The kernel has no tensor argument; say the problem's dtype with dtype='float16'."
            )
        return str(found).removeprefix("torch.")

    def _problem(self, given: Mapping[str, Any], where: torch.device) -> Problem:
        values = {name: _value(name, size, given, name in self._dims) for name, size in self._values.items()}
        threads = torch.get_num_threads() if where.type == "cpu" else 0
        return self._operation.schema.problem(dtype=self._dtype_of(given), threads=threads, **values)

    def _without_model(self, device: Device) -> AnalyticModel:
        return AnalyticModel()

    def _refused(self, problem: Problem, table: CandidateTable, device: Device) -> Sequence[int]:
        """Rows that a rule of the hardware refuses, such as shared memory that the device does not have."""
        (block,) = table.blocks
        legal = self._variant.legal(problem, device, block)
        return [place for place in range(block.length) if not legal[place]]


class _OfKernel(PerfModel):
    """For a kernel that a model was trained for, on its own records."""

    def __init__(self, fn: Any, keys: Sequence[str], configs: Sequence[Any]) -> None:
        self._operation_name = operation_name(fn)
        self._variant_name = variant_name(fn)
        kernel = kernel_of(fn)
        self._signature = Signature(list(_arguments(fn)), keys, kernel)
        among = candidates_of(configs, self._variant_name) if configs else []
        self._parameters = tuple(among[0].parameters) if among else ()
        super().__init__(())
        self._candidates |= dict.fromkeys(among)
        if not configs:
            raise InvalidRecordError(
                f"perf_model of the kernel {self._operation_name} needs its configs, as its autotuner has them."
            )

    def _candidate(self, given: Mapping[str, Any]) -> Candidate:
        return Candidate.of(
            self._variant_name,
            {
                name: value if isinstance(value := given.get(name, 0), int | str) else str(value)
                for name in self._parameters
            },
        )

    def _key(self, given: Mapping[str, Any]) -> Any:
        return self._signature.key((), self._outside(given))

    def _outside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The call's own arguments: those of the config are no part of the key."""
        return {name: value for name, value in given.items() if name not in self._parameters}

    def _problem(self, given: Mapping[str, Any], where: torch.device) -> Problem:
        call: Call = self._signature.describe((), self._outside(given))
        threads = torch.get_num_threads() if where.type == "cpu" else 0
        return call.problem(self._operation_name, threads=threads)

    def _without_model(self, device: Device) -> None:
        warn(
            f"There is no model of {self._operation_name} for {device.name}; the configs keep the order in which they are "
            f"declared. Record timings with kernelcast.triton.record() and train one: kernelcast train --op "
            f"{self._operation_name}",
            ModelWarning,
        )


def perf_model(
    kernel_or_operation: Any,
    *,
    dims: Mapping[str, Size] | None = None,
    variant: str = "triton_tiled",
    parameters: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    key: Sequence[str] = (),
    configs: Sequence[Any] = (),
) -> PerfModel:
    """A function for ``triton.autotune(..., prune_configs_by={"perf_model": perf_model(...), "top_k": 3})``.

    For a kernel that computes an operation of the catalogue, name the operation, what its dimensions are among the kernel's
    arguments, and what the config's parameters are among a variant's. The device's model ranks, or the roofline where there is
    none; what the variant's rules refuse comes last. For any other kernel give the ``@triton.jit`` function, and the ``key`` and
    ``configs`` of its autotuner: the model that was trained on its records ranks. Without one the order stays as declared.

    Args:
        kernel_or_operation: an operation's name, or a kernel.
        dims: dimension -> the argument that holds it, a number, or a function of all arguments by name.
        variant: of the operation.
        parameters: a config's parameter -> the variant's; ``num_warps`` and ``num_stages`` need no mention.
        fixed: parameters of the variant that the kernel's configs do not have.
        dtype: name of the tensor argument whose dtype is the problem's, or the dtype itself; the first tensor's where None.
        options: option of the operation -> its value, or a function of all arguments by name.
        key: of a kernel: that of its autotuner.
        configs: those of the autotuner. Of an operation they may be left out: then the first key asks for one after another.

    Raises:
        UnknownNameError: no such operation, variant, dimension, option or parameter.
        InvalidRecordError: a parameter of the variant is neither mapped nor fixed, or a kernel's configs are not given.
    """
    if not isinstance(kernel_or_operation, str):
        return _OfKernel(kernel_or_operation, key, configs)
    return _OfOperation(
        operation(kernel_or_operation),
        dims=dims or {},
        variant_name=variant,
        parameters=parameters or {},
        fixed=fixed or {},
        dtype=dtype,
        options=options or {},
        configs=configs,
    )


def _value(name: str, size: Any, given: Mapping[str, Any], by_argument: bool) -> Any:
    if callable(size):
        return size(given)
    if by_argument and isinstance(size, str):
        if size not in given:
            raise InvalidRecordError(f"The kernel has no argument {size!r}, which dims names for {name}.")
        return given[size]
    return size


def _arguments(fn: Any) -> Sequence[str]:
    names = getattr(fn, "arg_names", None)
    return names if names is not None else function_of(fn).__code__.co_varnames


def _first_tensor(given: Mapping[str, Any]) -> Any:
    return next((value for value in given.values() if hasattr(value, "data_ptr")), None)


def _device_of(given: Mapping[str, Any]) -> torch.device:
    found = getattr(_first_tensor(given), "device", None)
    if found is not None:
        return found
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _alike(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Candidates in groups of one type a parameter, as a table holds them."""
    groups: dict[tuple[Any, ...], list[Candidate]] = {}
    for candidate in candidates:
        kinds = tuple((name, type(value)) for name, value in candidate.config)
        groups.setdefault(kinds, []).append(candidate)
    return list(groups.values())
