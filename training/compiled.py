"""From the cache of compiles to features: what is known of the candidates that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelcast.costmodel import ProblemData
from kernelcast.errors import KernelcastError
from kernelcast.featurizer.compiled import CompiledFacts, CompiledRow
from kernelcast.kernels import Block, Candidate, CandidateTable, Problem, operation_names, variants
from kernelcast.kernels.compile import TARGETS, CompileFacts, candidate_spec, code_key, refuse_interpreter
from kernelcast.kernels.compile_cache import CompileCache
from kernelcast.kernels.compile_classes import class_key, find_levels

#: Share of the measured Triton candidates that must have been compiled before their facts become features: columns that
#: are mostly empty teach the trees which problems were compiled, not what the facts mean.
LEAST_SHARE = 0.8


@dataclass(frozen=True)
class Gathered:
    """What a cache of compiles says of some measured candidates.

    Attributes:
        compiled: the facts; None where they are not used.
        share: of the measured Triton candidates that have facts.
        reason: why they are used or not, in one sentence.
    """

    compiled: CompiledFacts | None
    share: float
    reason: str

    def to_json(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {
            "used": self.compiled is not None,
            "share": self.share,
            "rows": 0 if self.compiled is None else len(self.compiled),
            "reason": self.reason,
        }


def gather(data: Sequence[ProblemData], cache: CompileCache | None) -> Gathered:
    """Facts of the measured candidates of one device, and of those of the quick subsets on the same problems.

    A class of problems of which two members differ in the code of a config leaves that config out.

    Args:
        data: measured problems of one operation on one device.
        cache: what was compiled; None where facts are not wanted.
    """
    if cache is None:
        return Gathered(None, 0.0, "They were not asked for.")
    target = data[0].device.architecture
    if target not in TARGETS:
        return Gathered(None, 0.0, f"{data[0].device.name} is no target of the compiler.")
    if not cache.count(target):
        return Gathered(None, 0.0, f"Nothing is compiled for {target}; see: kernelcast kernels compile.")
    try:
        refuse_interpreter()
        import triton  # noqa: F401 - without it, no candidate's code is known
    except (ImportError, KernelcastError) as error:
        return Gathered(None, 0.0, str(error))
    levels: dict[str, dict[str, int]] = {}
    rows: list[CompiledRow] = []
    for name in _compilable(data):
        problems = list(dict.fromkeys(item.problem for item in data if _blocks(item.table, name)))
        measured = {
            each.key: each for item in data for block in _blocks(item.table, name) for each in _spread(block)
        }
        levels[name] = find_levels(problems, list(measured.values()), target)
        rows += _rows(data, name, levels[name], cache, target)
    compiled = CompiledFacts(target, levels, rows)
    share = _share(data, compiled)
    enough = share >= LEAST_SHARE
    verdict = f"{share:.0%} of the measured Triton candidates were compiled; {LEAST_SHARE:.0%} are needed."
    return Gathered(compiled if enough else None, share, verdict)


def _compilable(data: Sequence[ProblemData]) -> list[str]:
    operation = data[0].problem.operation
    known = variants(operation) if operation in operation_names() else {}
    found = {block.variant for item in data for block in item.table.blocks}
    return sorted(
        name
        for name in found
        if hasattr(known.get(name), "compile_spec")
        and any(
            sorted(block.columns) == sorted(each.name for each in known[name].parameters)
            for item in data
            for block in _blocks(item.table, name)
        )
    )


def _blocks(table: CandidateTable, name: str) -> list[Block]:
    return [block for block in table.blocks if block.variant == name]


def _spread(block: Block) -> list[Candidate]:
    """A few candidates of a block, at even distances."""
    places = np.unique(np.linspace(0, block.length - 1, num=min(block.length, 8)).astype(int))
    return [block.at(int(place)) for place in places]


def _rows(
    data: Sequence[ProblemData], name: str, levels: dict[str, int], cache: CompileCache, target: str
) -> Iterator[CompiledRow]:
    found = variants(data[0].problem.operation)[name]
    parameters = sorted(each.name for each in found.parameters)
    quick = list(CandidateTable([found.space("default")]))
    # The first and the last problem of each class, with the configs that were measured on any of them.
    members: dict[str, list[Problem]] = {}
    configs: dict[str, dict[str, Candidate]] = {}
    for item in data:
        key = class_key(item.problem, levels)
        members.setdefault(key, [item.problem, item.problem])[1] = item.problem
        wanted = configs.setdefault(key, {each.key: each for each in quick})
        for block in _blocks(item.table, name):
            if sorted(block.columns) == parameters:
                wanted |= {each.key: each for each in CandidateTable([block])}
    for key, chosen in configs.items():
        for candidate in chosen.values():
            facts = _facts(members[key], candidate, cache, target)
            if facts is not None:
                yield CompiledRow(key, candidate, facts.registers, facts.spills, facts.shared_bytes)


def _facts(
    members: Sequence[Problem], candidate: Candidate, cache: CompileCache, target: str
) -> CompileFacts | None:
    try:
        keys = {
            code_key(candidate_spec(problem, candidate, target), target) for problem in dict.fromkeys(members)
        }
    # A quick config that is not legal here, or a record of another version of the variant, may break it in any way.
    except Exception:  # noqa: BLE001
        return None
    facts = cache.get(target, keys.pop()) if len(keys) == 1 else None
    return facts if facts is not None and facts.outcome == "ok" else None


def _share(data: Sequence[ProblemData], compiled: CompiledFacts) -> float:
    known = total = 0
    for item in data:
        for block in item.table.blocks:
            if block.variant in compiled.levels:
                facts = compiled.lookup(item.problem, block)
                known += int(np.isfinite(facts[:, 0]).sum())
                total += block.length
    return known / total if total else 0.0
