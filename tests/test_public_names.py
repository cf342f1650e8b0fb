"""The public names, pinned: adding one is a decision, taking one away breaks users."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest
from cases import for_each

import kernelcast

PUBLIC = {
    "kernelcast": [
        "Candidate", "Device", "KernelcastError", "Problem", "Selection", "Selector", "TensorSpec", "attention", "bmm",
        "configure", "conv2d", "device", "explain", "fused_moe", "grouped_matmul", "inductor", "kernel", "layer_norm",
        "matmul", "mixed_matmul", "plan", "problem", "rms_norm", "run", "select", "softmax", "triton", "warmup",
    ],
    "kernelcast.kernels": [
        "Block", "Candidate", "CandidateTable", "Columns", "Device", "Dim", "Operation", "Option", "Parameter",
        "Problem", "ProblemSchema", "Refusal", "Rule", "Tolerance", "Variant", "Work", "candidates", "operation",
        "operation_names", "problem", "refusals", "register_operation", "register_variant", "require_legal",
        "variant", "variants",
    ],
    "kernelcast.featurizer": ["FEATURE_VERSION", "FeatureSchema", "Featurizer", "analytic_costs"],
    "kernelcast.costmodel": [
        "AnalyticModel", "CostModel", "Forest", "Prediction", "ProblemData", "Ranker", "RankingModel",
        "read_manifest", "verify_files",
    ],
    "kernelcast.datasets": [
        "OUTCOMES", "SCHEMA_VERSION", "AddResult", "Environment", "ImportSummary", "Journal", "Measurement",
        "Protocol", "RewriteResult", "ShapeKFold", "Store", "by_shape", "by_workload", "import_files", "importers",
        "problem_id", "shape_id",
    ],
    "kernelcast.runtime": [
        "SOURCES", "CacheKey", "CacheWarning", "ModelWarning", "Ranking", "Selection", "SelectionCache", "Selector",
    ],
    "kernelcast.training": [],
    "kernelcast.cli": ["main"],
}  # fmt: skip
ROOMS = ["kernels", "featurizer", "datasets", "costmodel", "training", "runtime"]


def public_names(module):
    return list(getattr(module, "__all__", []))


@for_each("module", PUBLIC)
def test_the_public_names_are_these(module):
    assert sorted(public_names(importlib.import_module(module))) == sorted(PUBLIC[module])


@pytest.mark.parametrize("module", ["kernelcast", *(f"kernelcast.{room}" for room in ROOMS)])
def test_every_public_name_is_there(module):
    found = importlib.import_module(module)
    names = public_names(found)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(found, name) is not None, name
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018


def test_names_are_the_same_objects_wherever_they_are_imported_from():
    from kernelcast import api, errors, kernels, runtime
    from kernelcast.runtime import dropins

    assert kernelcast.Problem is kernels.Problem
    assert kernelcast.Selector is runtime.Selector
    assert kernelcast.KernelcastError is errors.KernelcastError
    assert kernelcast.select is api.select
    assert kernelcast.matmul is dropins.matmul
    for name in kernelcast._MODULES:
        assert getattr(kernelcast, name) is importlib.import_module(f"kernelcast.{name}")
    for name in set(kernelcast.__all__) - set(kernelcast._MODULES):
        assert getattr(kernelcast, name) is getattr(importlib.import_module(kernelcast._HOMES[name]), name)


def test_dir_lists_every_public_name_once():
    listed = dir(kernelcast)
    assert set(kernelcast.__all__) <= set(listed)
    assert len(listed) == len(set(listed))


def test_every_error_is_a_kernelcast_error_with_a_docstring():
    from kernelcast import errors

    found = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)]
    assert len(found) >= 11
    for cls in found:
        assert issubclass(cls, errors.KernelcastError)
        assert cls.__doc__
        assert f" {cls.__name__} " in errors.__doc__ or cls is errors.KernelcastError


@pytest.mark.parametrize("module", [f"kernelcast.{room}" for room in ROOMS])
def test_every_room_says_what_it_is(module):
    assert importlib.import_module(module).__doc__


def test_the_version_is_that_of_the_distribution():
    assert kernelcast.__version__ == importlib.metadata.version("kernelcast")
