"""What can run: problems, devices, candidates, rules and the registry of operations and variants."""

from kernelcast.kernels.candidate import Block, Candidate, CandidateTable, Columns
from kernelcast.kernels.device import Device
from kernelcast.kernels.operation import Operation, Parameter, Tolerance, Variant
from kernelcast.kernels.problem import Dim, Option, Problem, ProblemSchema
from kernelcast.kernels.registry import (
    candidates,
    operation,
    operation_names,
    problem,
    refusals,
    register_operation,
    register_variant,
    require_legal,
    variant,
    variants,
)
from kernelcast.kernels.rule import Refusal, Rule
from kernelcast.kernels.work import Work

__all__ = [
    "Block",
    "Candidate",
    "CandidateTable",
    "Columns",
    "Device",
    "Dim",
    "Operation",
    "Option",
    "Parameter",
    "Problem",
    "ProblemSchema",
    "Refusal",
    "Rule",
    "Tolerance",
    "Variant",
    "Work",
    "candidates",
    "operation",
    "operation_names",
    "problem",
    "refusals",
    "register_operation",
    "register_variant",
    "require_legal",
    "variant",
    "variants",
]
