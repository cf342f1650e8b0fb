"""What to compile for a target: its representative card, problems that stand for an operation, their legal candidates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelcast.errors import KernelcastError, UnknownNameError
from kernelcast.kernels.compile import TARGETS, CompileFacts
from kernelcast.kernels.compile_many import CompileRequest
from kernelcast.kernels.device import Device
from kernelcast.kernels.devices import device
from kernelcast.kernels.problem import OptionValue, Problem
from kernelcast.kernels.registry import operation, variant, variants

#: Target -> the card whose shared memory counts. All cards of an architecture have the same a block.
CARDS = {
    "sm80": "a100-sxm4-80gb",
    "sm86": "a10-24gb",
    "sm89": "l40s-48gb",
    "sm90": "h100-sxm5-80gb",
    "sm100": "b200-sxm-180gb",
    "sm120": "rtx-5090-32gb",
    "gfx942": "mi300x-192gb",
    "gfx950": "mi355x-288gb",
}

_SQUARE: dict[str, OptionValue] = {"m": 4096, "n": 4096, "k": 4096}
_FEW_ROWS: dict[str, OptionValue] = {"m": 8, "n": 4096, "k": 4096, "layout": "nt"}
_ROWS: tuple[dict[str, OptionValue], ...] = (
    {"rows": 4096, "columns": 4096},
    {"rows": 64, "columns": 131_072},
    {"rows": 65_536, "columns": 128},
)
_CONVOLUTION: dict[str, OptionValue] = {
    "n": 32,
    "c": 128,
    "h": 28,
    "w": 28,
    "k": 128,
    "r": 3,
    "s": 3,
    "pad_h": 1,
    "pad_w": 1,
}
_DEPTHWISE: dict[str, OptionValue] = {"n": 8, "c": 128, "h": 56, "w": 56, "k": 128, "r": 7, "s": 7, "pad_h": 3, "pad_w": 3, "groups": 128}  # fmt: skip
_PREFILL: dict[str, OptionValue] = {
    "batch": 4,
    "heads": 32,
    "kv_heads": 8,
    "q_len": 2048,
    "kv_len": 2048,
    "head_dim": 128,
}

#: Problems that stand for an operation. A variant is compiled for the first on which it has a legal candidate: no single
#: problem suits a variant for decoding and one for long sequences.
REPRESENTATIVES: dict[str, tuple[dict[str, OptionValue], ...]] = {
    "gemm": ({**_SQUARE}, {**_FEW_ROWS}, {"m": 1, "n": 4096, "k": 4096, "layout": "nt"}),
    "batched_gemm": (
        {"batch": 64, "m": 512, "n": 512, "k": 512},
        {"batch": 64, "m": 8, "n": 512, "k": 512},
    ),
    "mixed_gemm": ({**_SQUARE}, {**_FEW_ROWS}),
    "grouped_gemm": (
        {"groups": 8, **_SQUARE},
        {"groups": 64, "m": 64, "n": 2048, "k": 4096, "layout": "nt"},
    ),
    "conv2d": (
        {**_CONVOLUTION},
        {**_CONVOLUTION, "layout": "nhwc"},
        {**_DEPTHWISE},
        {**_DEPTHWISE, "layout": "nhwc"},
    ),
    "attention": (
        {**_PREFILL, "causal": True},
        {"batch": 64, "heads": 16, "q_len": 128, "kv_len": 128, "head_dim": 64},
        {"batch": 4, "heads": 32, "kv_heads": 8, "q_len": 1, "kv_len": 8192, "head_dim": 128},
    ),
    "softmax": _ROWS,
    "layernorm": _ROWS,
    "rmsnorm": _ROWS,
}
#: The dtype where none is named and the operation takes it.
DTYPE = "float16"


@dataclass(frozen=True, slots=True)
class Planned:
    """A candidate to compile, and the shared memory that its variant's rules estimate (NaN where they cannot)."""

    request: CompileRequest
    estimated_shared_bytes: float


@dataclass(frozen=True)
class Plan:
    """What to compile.

    Attributes:
        target: for which.
        device: the target's representative card.
        rows: the candidates.
        left_out: Triton variants that have no legal candidate on any of the problems.
    """

    target: str
    device: Device
    rows: tuple[Planned, ...]
    left_out: tuple[str, ...]


def target_device(target: str) -> Device:
    """The representative card of a target.

    Raises:
        UnknownNameError: no such target.
    """
    if target not in TARGETS:
        raise UnknownNameError("target", target, TARGETS)
    return device(CARDS[target])


def problems_to_compile(operation_name: str, values: Mapping[str, Any] | None = None) -> list[Problem]:
    """Problems that stand for an operation, or the one that ``values`` make of the first of them.

    Args:
        operation_name: of an operation in the catalogue.
        values: dimensions, options, ``dtype`` and ``allow_tf32`` that differ. Where nothing but the last two is given,
            they hold for every representative problem.

    Raises:
        UnknownNameError: no such operation.
        InvalidProblemError: a value is unknown or impossible, or missing where the operation has no representative.
    """
    schema = operation(operation_name).schema
    given = dict(values or {})
    named: dict[str, Any] = {name: given.pop(name) for name in ("dtype", "allow_tf32") if name in given}
    named.setdefault("dtype", DTYPE if DTYPE in schema.dtypes else schema.dtypes[0])
    known = list(REPRESENTATIVES.get(operation_name, ({},)))
    chosen = [{**known[0], **given}] if given else known
    found: list[Problem] = []
    for each in chosen:
        complete: dict[str, Any] = dict(each)
        complete.update(named)
        found.append(schema.problem(**complete))
    return found


def triton_variants(operation_name: str) -> list[str]:
    """Names of the variants whose kernels can be compiled.

    Raises:
        KernelcastError: there is none.
    """
    found = [name for name, each in variants(operation_name).items() if hasattr(each, "compile_spec")]
    if not found:
        raise KernelcastError(
            f"{operation_name} has no Triton variant, so there is nothing to compile. See: kernelcast kernels."
        )
    return found


def plan(
    problems: Sequence[Problem], target: str, *, subset: str = "default", names: Iterable[str] | None = None
) -> Plan:
    """The legal candidates of an operation's Triton variants, each variant on the first problem that it can take.

    Args:
        problems: of one operation.
        target: a key of :data:`kernelcast.kernels.compile.TARGETS`.
        subset: ``"full"`` or ``"default"``.
        names: variants; all that have a Triton kernel where None.

    Raises:
        UnknownNameError: no such target or variant.
        KernelcastError: a variant has no Triton kernel.
    """
    card = target_device(target)
    name = problems[0].operation
    compilable = triton_variants(name)
    chosen = compilable if names is None else list(names)
    for each in chosen:
        variant(name, each)
        if each not in compilable:
            raise KernelcastError(
                f"{each} of {name} has no Triton kernel to compile; those that have: {', '.join(compilable)}."
            )
    rows: list[Planned] = []
    left_out: list[str] = []
    for each in chosen:
        found = variant(name, each)
        block = found.space(subset)
        for problem in problems:
            legal = block.take(found.legal(problem, card, block))
            if legal.length:
                estimates = found.work(problem, legal.columns, card).columns(legal.length)["shared_bytes"]
                rows += [
                    Planned(CompileRequest(problem, legal.at(row)), float(estimates[row]))
                    for row in range(legal.length)
                ]
                break
        else:
            left_out.append(each)
    return Plan(target, card, tuple(rows), tuple(left_out))


def row_of(planned: Planned, facts: CompileFacts, card: Device) -> dict[str, Any]:
    """One row of the table of compiles, as plain values. Numbers of what did not compile are None.

    ``estimate_ratio`` is the rules' estimate over the compiler's shared memory: 1 where both are 0, infinite where the
    compiler alone allots none, and None where the rules do not estimate.
    """
    problem, candidate = planned.request.problem, planned.request.candidate
    compiled = facts.outcome == "ok"
    estimate = None if math.isnan(planned.estimated_shared_bytes) else planned.estimated_shared_bytes
    ratio = None
    if compiled and estimate is not None:
        ratio = _ratio(estimate, facts.shared_bytes)
    return {
        "operation": problem.operation,
        "problem": problem.key,
        "dtype": problem.dtype,
        "variant": candidate.variant,
        "candidate": candidate.key,
        "registers": facts.registers if compiled else None,
        "spills": facts.spills if compiled else None,
        "shared_bytes": facts.shared_bytes if compiled else None,
        "estimated_shared_bytes": estimate,
        "estimate_ratio": ratio,
        "over_limit": facts.shared_bytes > card.shared_bytes_per_block if compiled else None,
        "uses_tensor_cores": facts.uses_tensor_cores if compiled else None,
        "compile_seconds": facts.compile_seconds,
        "outcome": facts.outcome,
        "detail": facts.detail,
    }


def _ratio(estimate: float, shared_bytes: int) -> float:
    if shared_bytes:
        return estimate / shared_bytes
    return math.inf if estimate else 1.0


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts and ranges over rows of :func:`row_of`; None where there is nothing to count."""
    compiled = [row for row in rows if row["outcome"] == "ok"]
    ratios = sorted(row["estimate_ratio"] for row in compiled if row["estimate_ratio"] is not None)
    narrow = [row for row in compiled if row["dtype"] in ("float16", "bfloat16")]
    seconds = sorted(row["compile_seconds"] for row in compiled)
    return {
        "candidates": len(rows),
        "outcomes": dict(sorted(Counter(row["outcome"] for row in rows).items())),
        "ratio_min": ratios[0] if ratios else None,
        "ratio_max": ratios[-1] if ratios else None,
        "over_limit": sum(row["over_limit"] for row in compiled),
        "spilling": sum(row["spills"] > 0 for row in compiled),
        "most_spills": max((row["spills"] for row in compiled), default=None),
        "tensor_core_share_16_bit": (
            sum(row["uses_tensor_cores"] for row in narrow) / len(narrow) if narrow else None
        ),
        "median_compile_seconds": seconds[len(seconds) // 2] if seconds else None,
    }
