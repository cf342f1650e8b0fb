"""The featurizer: (problem, candidates, device) -> an array of numbers, with names and units."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from kernelcast.errors import ModelError
from kernelcast.featurizer.analytic import ANALYTIC_UNITS, analytic_costs, resident_blocks
from kernelcast.featurizer.compiled import CompiledFacts
from kernelcast.featurizer.extra import alignment, extra_features, extra_names, left_out
from kernelcast.featurizer.schema import FeatureSchema
from kernelcast.kernels import Block, CandidateTable, Device, Problem, operation, variants
from kernelcast.kernels.problem import DTYPE_BYTES

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


class Featurizer:
    """Computes the columns that a :class:`FeatureSchema` names.

    Amounts that span orders of magnitude are given as log2, so that trees split them evenly whatever the binning.
    What does not apply to a candidate (another variant's parameter, a closed library's grid) is NaN.

    Args:
        schema: names the columns.
        compiled: facts for the columns that a schema with ``compile_facts`` has; NaN where they are not among them.
    """

    def __init__(self, schema: FeatureSchema, compiled: CompiledFacts | None = None) -> None:
        self.schema = schema
        self._compiled = compiled
        self._known = set(schema.variants)
        self._variant_at = {name: index for index, name in enumerate(dict(schema.variants))}
        self._parameter_at = {coding.name: index for index, coding in enumerate(schema.parameters)}
        self._seen = {name: np.array(values, dtype=np.float64) for name, values in schema.seen}
        self._columns = list(self._units)

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
        if schema.with_work:
            units |= {
                "needed_flops": "log2 FLOP",
                "needed_bytes": "log2 bytes",
                "intensity": "log2 FLOP/byte",
            }
        return units

    @cached_property
    def _kept(self) -> list[int]:
        """Places of the shared columns that stay."""
        without = left_out(self.schema.operation)
        return [place for place, name in enumerate(self._problem_units) if name not in without]

    @cached_property
    def _units(self) -> dict[str, str]:
        schema = self.schema
        shared = list(self._problem_units.items())
        units = dict(shared[place] for place in self._kept)
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
        rows = [self._covers(block) for block in table.blocks]
        return np.concatenate(rows) if rows else np.zeros(0, dtype=bool)

    def _covers(self, block: Block) -> np.ndarray:
        covered = np.full(block.length, (block.variant, tuple(sorted(block.columns))) in self._known)
        if covered.any():
            for name, column in block.columns.items():
                code = self.schema.parameters[self._parameter_at[name]].encode_column(column)
                covered &= np.isin(code, self._seen[name]) if name in self._seen else ~np.isnan(code)
        return covered

    def __call__(self, problem: Problem, table: CandidateTable, device: Device) -> np.ndarray:
        """The features of every candidate.

        Returns:
            float32, [candidates, features]. Infinities do not occur.

        Raises:
            ModelError: the problem is of another operation, or lacks a dimension or option that the features need.
        """
        schema = self.schema
        if problem.operation != schema.operation:
            raise ModelError(f"The model is of {schema.operation}; the problem is {problem}.")
        out = np.full((len(table), len(self._columns)), np.nan)
        try:
            out[:, : len(self._kept)] = self._problem_features(problem)
            start = 0
            for block in table.blocks:
                rows = slice(start, start + block.length)
                start += block.length
                self._candidate_features(problem, block, device, out[rows])
        except KeyError as error:
            raise ModelError(
                f"{problem} lacks {error}, which the model's features need. Train it again."
            ) from error
        # log2(0) is, to the trees, simply very small. Not as small as float32 goes: xgboost puts its outermost
        # thresholds at twice the largest value, which must be finite too.
        return np.clip(out, -1e30, 1e30).astype(np.float32)

    def _problem_features(self, problem: Problem) -> list[float]:
        schema = self.schema
        facts = problem.facts
        sizes = [int(facts[name]) for name in schema.dims]
        values = [_log2(size) for size in sizes]
        values += [alignment(size) for size in sizes]
        for coding in schema.options:
            code = coding.encode(facts[coding.name])
            values.append(code if coding.categories or math.isnan(code) else _log2(code))
        values.append(
            float(schema.dtypes.index(problem.dtype)) if problem.dtype in schema.dtypes else math.nan
        )
        values += [
            float(DTYPE_BYTES.get(problem.dtype, 0)),
            float(problem.allow_tf32),
            float(problem.threads),
        ]
        if schema.with_work:
            found = operation(schema.operation)
            flops, traffic = found.flops(problem), found.traffic_bytes(problem)
            values += [_log2(flops), _log2(traffic), _log2(flops) - _log2(traffic)]
        return [values[place] for place in self._kept]

    def _candidate_features(self, problem: Problem, block: Block, device: Device, out: np.ndarray) -> None:
        schema = self.schema
        at = len(self._kept)
        out[:, at : at + len(self._variant_at)] = 0.0
        if block.variant in self._variant_at:
            out[:, at + self._variant_at[block.variant]] = 1.0
        at += len(self._variant_at)
        for name, column in block.columns.items():
            index = self._parameter_at.get(name)
            if index is not None:
                out[:, at + index] = schema.parameters[index].encode_column(column)
        at += len(schema.parameters)
        if not schema.with_work:
            return
        found = variants(schema.operation).get(block.variant)
        if found is None:  # recorded under a variant that this version does not have
            return
        work = found.work(problem, block.columns, device).columns(block.length)
        flops = operation(schema.operation).flops(problem)
        traffic = operation(schema.operation).traffic_bytes(problem)
        with np.errstate(divide="ignore", invalid="ignore"):
            amounts = [
                np.log2(work["flops"] / max(flops, 1.0)),
                np.log2(work["traffic_bytes"] / max(traffic, 1.0)),
                work["scratch_bytes"] / max(traffic, 1.0),
                work["calls"],
                np.log2(work["programs"]),
                work["warps"],
                work["shared_bytes"],
                work["accumulators"],
                np.log2(work["inner_steps"]),
            ]
            costs = analytic_costs(problem, work, device)
            amounts += [
                np.log2(costs[name]) if unit == "us" else costs[name] for name, unit in ANALYTIC_UNITS.items()
            ]
        amounts += extra_features(problem, block, work, device)
        compiled = self._compiled if schema.compile_facts else None
        if compiled is not None and compiled.target == device.architecture:
            facts = compiled.lookup(problem, block)
            amounts += [*facts.T, resident_blocks(facts, work["warps"], device)]
        for offset, amount in enumerate(amounts):
            out[:, at + offset] = amount


def _log2(value: float) -> float:
    return math.log2(value) if value > 0 else -1.0
