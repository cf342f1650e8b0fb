"""The featurizer: (problem, candidates, device) -> an array of numbers, with names and units."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable
from functools import cached_property

import numpy as np

from kernelcast.errors import ModelError
from kernelcast.featurizer.analytic import ANALYTIC_UNITS, analytic_rows, resident_blocks
from kernelcast.featurizer.compiled import CompiledFacts
from kernelcast.featurizer.extra import alignment, extra_features, extra_names, left_out
from kernelcast.featurizer.schema import Coding, FeatureSchema
from kernelcast.kernels import Block, CandidateTable, Columns, Device, Problem, operation, variants
from kernelcast.kernels.candidate import KeptColumns, remembered
from kernelcast.kernels.problem import DTYPE_BYTES
from kernelcast.kernels.work import WORK_NAMES

#: Ratios and amounts taken from :class:`kernelcast.kernels.Work`, by name and unit.
_WORK_UNITS = {
    "flops_waste": "log2",
    "traffic_reuse": "log2",
    "scratch_share": "1",
    "calls": "1",
    "programs": "log2",
    "warps": "warps",
    "shared_bytes": "bytes",
    "accumulators": "registers",
    "inner_steps": "log2",
}
#: What the compiler made of a candidate, by name and unit.
COMPILED_UNITS = {
    "compiled_registers": "registers",
    "compiled_spills": "registers",
    "compiled_shared_bytes": "bytes",
    "compiled_blocks_per_core": "blocks",
}

#: Facts of the device, by name and unit, for models of several devices.
DEVICE_UNITS = {
    "device_cores": "log2",
    "device_bandwidth": "log2 bytes/s",
    "device_peak": "log2 FLOP/s",
    "device_l2_bytes": "log2 bytes",
    "device_shared_bytes": "log2 bytes",
}

#: (problem, its FLOPs, its compulsory traffic in bytes, device) -> the value of a column that all of its candidates share.
_Shared = Callable[[Problem, float, float, Device], float]
_local = threading.local()
#: Values of the largest array that a thread keeps.
_MOST_HELD = 2**19
#: Beyond it lies what the trees are told of an amount of nothing, or of one without end.
_LARGEST = 1e30


class Featurizer:
    """Computes the columns that a :class:`FeatureSchema` names.

    Amounts that span orders of magnitude are given as log2, so that trees split them evenly whatever the binning.
    What does not apply to a candidate (another variant's parameter, a closed library's grid) is NaN.

    Args:
        schema: names the columns.
        compiled: facts for the columns that a schema with ``compile_facts`` has; NaN where they are not among them.
        needed: names of the columns that will be looked at; the others may stay NaN, which takes less time. None: all.
    """

    def __init__(
        self,
        schema: FeatureSchema,
        compiled: CompiledFacts | None = None,
        needed: Collection[str] | None = None,
    ) -> None:
        self.schema = schema
        self._compiled = compiled
        self._needed = None if needed is None else frozenset(needed)
        self._known = set(schema.variants)
        self._variant_at = {name: index for index, name in enumerate(dict(schema.variants))}
        self._parameter_at = {coding.name: index for index, coding in enumerate(schema.parameters)}
        self._seen = {name: np.array(values, dtype=np.float64) for name, values in schema.seen}
        #: Of variants without parameters: what :meth:`_config_features` gives.
        self._alone: dict[str, np.ndarray] = {}
        self._columns = list(self._units)
        self._shared = len(self._kept)
        self._own = len(self._variant_at) + len(schema.parameters)
        self._wants_times = self._wants(ANALYTIC_UNITS)
        self._wants_work = self._wants_times or self._wants(_WORK_UNITS)
        self._extra = len(extra_names(schema.operation)) if schema.with_work else 0
        self._wants_extra = self._wants(extra_names(schema.operation))
        self._wants_compiled = compiled is not None and schema.compile_facts and self._wants(COMPILED_UNITS)
        # Amounts of work come first among the columns of what candidates make the hardware do.
        known = len(_WORK_UNITS) + len(ANALYTIC_UNITS)
        self._unwanted = 0 if self._wants_work or self._wants_compiled else known
        self._logs = _runs(
            [
                self._units.get(name, "").startswith("log2")
                and (self._wants_work if name in _WORK_UNITS else self._wants_times)
                for name in (*_WORK_UNITS, *ANALYTIC_UNITS)
            ]
        )

    def _wants(self, names: Iterable[str]) -> bool:
        """Whether any of some columns is looked at."""
        return self._needed is None or not self._needed.isdisjoint(names)

    @property
    def names(self) -> list[str]:
        """The columns' names, in order."""
        return list(self._columns)

    @property
    def units(self) -> list[str]:
        """The columns' units, in order; ``"1"`` is a pure number."""
        return list(self._units.values())

    @cached_property
    def _problem_units(self) -> dict[str, str]:
        """The columns that all candidates of a problem share, those included that the operation does without."""
        schema = self.schema
        units = {f"log2_{name}": "log2" for name in schema.dims}
        units |= {f"alignment_{name}": "log2" for name in schema.dims}
        units |= {
            f"option_{coding.name}": "code" if coding.categories else "log2" for coding in schema.options
        }
        units |= {"dtype": "code", "dtype_bytes": "bytes", "allow_tf32": "1", "threads": "threads"}
        if schema.with_device:
            units |= DEVICE_UNITS
        if schema.with_work:
            units |= {
                "needed_flops": "log2 FLOP",
                "needed_bytes": "log2 bytes",
                "intensity": "log2 FLOP/byte",
            }
        return units

    @cached_property
    def _kept(self) -> list[str]:
        """Names of the shared columns that stay."""
        without = left_out(self.schema.operation)
        return [name for name in self._problem_units if name not in without]

    @cached_property
    def _units(self) -> dict[str, str]:
        schema = self.schema
        units = {name: self._problem_units[name] for name in self._kept}
        units |= {f"variant_{name}": "1" for name in self._variant_at}
        units |= {
            f"parameter_{coding.name}": "code" if coding.categories else "1" for coding in schema.parameters
        }
        if schema.with_work:
            units |= _WORK_UNITS
            units |= {name: f"log2 {unit}" if unit == "us" else unit for name, unit in ANALYTIC_UNITS.items()}
            units |= extra_names(schema.operation)
            if schema.compile_facts:
                units |= COMPILED_UNITS
        return units

    def covers(self, table: CandidateTable) -> np.ndarray:
        """A bool array over the table's rows: True where a candidate's like occurred in fitting.

        That is the variant with just these parameters, each of a value that occurred: trees give a tile size that was
        never measured the prediction of its neighbour, which is no knowledge. A number with very many values may be any.
        """
        covered = np.ones(len(table), dtype=bool)
        start = 0
        for block in table.blocks:
            rows = slice(start, start + block.length)
            start += block.length
            if not self._covers_whole(block):
                covered[rows] = self._covers(block)
        return covered

    def _covers_whole(self, block: Block) -> bool:
        """Whether a block is known to be of kept ones that are covered to the last row."""
        if not block.columns:
            return (block.variant, ()) in self._known
        if not isinstance(block.columns, KeptColumns):
            return False
        key = "covered to the last row", self.schema.hash
        memo = block.columns.memo
        known = memo.get(key)
        if known is None:
            whole = block.columns.whole or block.columns
            rows = len(next(iter(whole.values())))
            known = memo[key] = np.array(self._covers(Block(block.variant, whole, rows)).all())
        return bool(known)

    def _covers(self, block: Block) -> np.ndarray:
        kind = block.variant, tuple(block.columns)
        if kind not in self._known:
            if (block.variant, tuple(sorted(block.columns))) not in self.schema.variants:
                return np.zeros(block.length, dtype=bool)
            self._known.add(kind)
        if not block.columns:
            return np.ones(block.length, dtype=bool)
        return remembered(block.columns, ("covered", self.schema.hash), self._covered)

    def _covered(self, columns: Columns) -> np.ndarray:
        rows = []
        for name, column in columns.items():
            code = self.schema.parameters[self._parameter_at[name]].encode_column(column)
            rows.append(np.isin(code, self._seen[name]) if name in self._seen else ~np.isnan(code))
        return np.logical_and.reduce(rows)

    def __call__(self, problem: Problem, table: CandidateTable, device: Device) -> np.ndarray:
        """The features of every candidate.

        Returns:
            float32, [candidates, features]. Infinities do not occur.

        Raises:
            ModelError: the problem is of another operation, or lacks a dimension or option that the features need.
        """
        out = np.empty((len(table), len(self._columns)), dtype=np.float32)
        self._fill(problem, table, device, out)
        return out

    def borrowed(self, problem: Problem, table: CandidateTable, device: Device) -> np.ndarray:
        """As :meth:`__call__`, in an array that the next call of this thread overwrites: no memory is asked for."""
        out = _scratch("features", np.float32, len(table), len(self._columns))
        self._fill(problem, table, device, out)
        return out

    def _fill(self, problem: Problem, table: CandidateTable, device: Device, out: np.ndarray) -> None:
        schema = self.schema
        if problem.operation != schema.operation:
            raise ModelError(f"The model is of {schema.operation}; the problem is {problem}.")
        try:
            needed = (0.0, 0.0)
            if schema.with_work:
                of = operation(schema.operation)
                needed = of.flops(problem), of.traffic_bytes(problem)
            out[:, : self._shared] = [value(problem, *needed, device) for value in self._shared_values]
            start = 0
            for block in table.blocks:
                rows = slice(start, start + block.length)
                start += block.length
                out[rows, self._shared : self._shared + self._own] = self._config_features(block)
            if schema.with_work:
                first = self._shared + self._own + self._unwanted
                out[:, self._shared + self._own : first] = math.nan
                out[:, first:] = self._amounts(problem, table, device, *needed).T
        except KeyError as error:
            raise ModelError(
                f"{problem} lacks {error}, which the model's features need. Train it again."
            ) from error

    @cached_property
    def _shared_values(self) -> list[_Shared]:
        """What computes each shared column that stays."""
        schema = self.schema
        found: dict[str, _Shared] = {}
        for name in schema.dims:
            found[f"log2_{name}"] = _of_size(name, _log2)
            found[f"alignment_{name}"] = _of_size(name, alignment)
        for coding in schema.options:
            found[f"option_{coding.name}"] = _of_option(coding)
        codes = {dtype: float(code) for code, dtype in enumerate(schema.dtypes)}
        found["dtype"] = lambda problem, flops, moved, device: codes.get(problem.dtype, math.nan)
        found["dtype_bytes"] = lambda problem, flops, moved, device: DTYPE_BYTES.get(problem.dtype, 0)
        found["allow_tf32"] = lambda problem, flops, moved, device: problem.allow_tf32
        found["threads"] = lambda problem, flops, moved, device: problem.threads
        found["needed_flops"] = lambda problem, flops, moved, device: _log2(flops)
        found["needed_bytes"] = lambda problem, flops, moved, device: _log2(moved)
        found["intensity"] = lambda problem, flops, moved, device: _log2(flops) - _log2(moved)
        found["device_cores"] = lambda problem, flops, moved, device: _log2(device.cores)
        found["device_bandwidth"] = lambda problem, flops, moved, device: _log2(device.memory_bandwidth)
        found["device_peak"] = lambda problem, flops, moved, device: _log2(
            device.flops_per_second(problem.dtype, allow_tf32=problem.allow_tf32)
        )
        found["device_l2_bytes"] = lambda problem, flops, moved, device: _log2(device.l2_bytes)
        found["device_shared_bytes"] = lambda problem, flops, moved, device: _log2(
            device.shared_bytes_per_core
        )
        return [found[name] for name in self._kept]

    def _config_features(self, block: Block) -> np.ndarray:
        """The columns that a candidate's variant and config decide alone: float32 [rows, variants + parameters]."""
        if not block.columns:
            alone = self._alone.get(block.variant)
            if alone is None:
                alone = self._alone[block.variant] = self._encoded(block.variant, block.columns, 1).T
            return alone
        return remembered(
            block.columns,
            ("config", block.variant, self.schema.hash),
            lambda columns: self._encoded(block.variant, columns, len(next(iter(columns.values())))),
        ).T

    def _encoded(self, variant: str, columns: Columns, length: int) -> np.ndarray:
        out = np.full((self._own, length), np.nan, dtype=np.float32)
        out[: len(self._variant_at)] = 0.0
        if variant in self._variant_at:
            out[self._variant_at[variant]] = 1.0
        for name, column in columns.items():
            index = self._parameter_at.get(name)
            if index is not None:
                out[len(self._variant_at) + index] = self.schema.parameters[index].encode_column(column)
        return out

    def _amounts(
        self, problem: Problem, table: CandidateTable, device: Device, flops: float, moved_bytes: float
    ) -> np.ndarray:
        """The columns of what candidates make the hardware do, without the first ones where these are unwanted.

        float64 [columns, rows].
        """
        count = len(self._columns) - self._shared - self._own - self._unwanted
        known = variants(self.schema.operation)
        out = _scratch("amounts", np.float64, count, len(table))
        out.fill(np.nan)
        own = len(WORK_NAMES)
        work = out[: 0 if self._unwanted else own]  # the first columns are ratios of these amounts
        unknown = []  # recorded under a variant that this version does not have
        start = 0
        for block in table.blocks:
            rows = slice(start, start + block.length)
            start += block.length
            found = known.get(block.variant)
            if found is None:
                unknown.append(rows)
                continue
            if self._wants_work or self._wants_compiled:
                found.work(problem, block.columns, device).fill(work[:, rows])
            self._more(problem, block, work[:, rows], device, out[:, rows])
        if self._wants_work:
            with np.errstate(divide="ignore", invalid="ignore"):
                if self._wants_times:
                    analytic_rows(problem, work, device, out[own : own + len(ANALYTIC_UNITS)])
                out[0] /= max(flops, 1.0)
                out[1:3] /= max(moved_bytes, 1.0)
                for run in self._logs:
                    np.log2(out[run], out=out[run])
        for rows in unknown:
            out[:, rows] = np.nan
        # log2(0) is, to the trees, simply very small. Not as small as float32 goes: xgboost puts its outermost
        # thresholds at twice the largest value, which must be finite too.
        np.maximum(out, -_LARGEST, out=out)
        return np.minimum(out, _LARGEST, out=out)

    def _more(
        self, problem: Problem, block: Block, work: np.ndarray, device: Device, out: np.ndarray
    ) -> None:
        """Fill in the columns of the operation and of the compiler: ``out`` is [columns, rows of the block]."""
        if self._wants_extra:
            first = len(_WORK_UNITS) + len(ANALYTIC_UNITS) - self._unwanted
            extra_features(problem, block, device, out[first : first + self._extra])
        compiled = self._compiled if self._wants_compiled else None
        if compiled is not None and compiled.target == device.architecture:
            facts = compiled.lookup(problem, block)
            out[-len(COMPILED_UNITS) : -1] = facts.T
            out[-1] = resident_blocks(facts, work[WORK_NAMES.index("warps")], device)


def _scratch(name: str, dtype: type, rows: int, columns: int) -> np.ndarray:
    """An array [rows, columns] of this thread with anything in it, for one use at a time.

    Fresh memory of this size comes from the system, page by page, which may take longer than what is done in it.
    """
    size = rows * columns
    held: np.ndarray | None = getattr(_local, name, None)
    if held is None or len(held) < size:
        held = np.empty(size, dtype=dtype)
        if size <= _MOST_HELD:
            setattr(_local, name, held)
    return held[:size].reshape(rows, columns)


def _of_size(name: str, change: Callable[[int], float]) -> _Shared:
    return lambda problem, flops, moved, device: change(problem.facts[name])  # type: ignore[arg-type]


def _of_option(coding: Coding) -> _Shared:
    def value(problem: Problem, flops: float, moved: float, device: Device) -> float:
        code = coding.encode(problem.facts[coding.name])
        return code if coding.categories or math.isnan(code) else _log2(code)

    return value


def _log2(value: float) -> float:
    return math.log2(value) if value > 0 else -1.0


def _runs(flags: list[bool]) -> list[slice]:
    """Slices of the places that hold True, neighbours together."""
    runs: list[slice] = []
    for place, flag in enumerate(flags):
        if flag and runs and runs[-1].stop == place:
            runs[-1] = slice(runs[-1].start, place + 1)
        elif flag:
            runs.append(slice(place, place + 1))
    return runs
