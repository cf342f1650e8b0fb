"""The measurement record, its store, the timing protocol, collection, import and export, and splits.

Importing this touches neither pandas nor pyarrow: they are imported when a store is read or written in bulk.
"""

from kernelcast.datasets.importing import ImportSummary, import_files, importers
from kernelcast.datasets.journal import Journal
from kernelcast.datasets.record import (
    OUTCOMES,
    SCHEMA_VERSION,
    Environment,
    Measurement,
    Protocol,
    problem_id,
    shape_id,
)
from kernelcast.datasets.splits import ShapeKFold, by_shape, by_workload
from kernelcast.datasets.store import AddResult, RewriteResult, Store

__all__ = [
    "OUTCOMES",
    "SCHEMA_VERSION",
    "AddResult",
    "Environment",
    "ImportSummary",
    "Journal",
    "Measurement",
    "Protocol",
    "RewriteResult",
    "ShapeKFold",
    "Store",
    "by_shape",
    "by_workload",
    "import_files",
    "importers",
    "problem_id",
    "shape_id",
]
