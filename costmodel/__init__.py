"""Rankers behind one small contract: the boosted trees, the analytic baseline, and the artifact on disk."""

from kernelcast.costmodel.analytic import AnalyticModel
from kernelcast.costmodel.artifact import read_manifest, verify_files
from kernelcast.costmodel.forest import Forest
from kernelcast.costmodel.model import ProblemData, RankingModel
from kernelcast.costmodel.prediction import Prediction, Ranker

__all__ = [
    "AnalyticModel",
    "CostModel",
    "Forest",
    "Prediction",
    "ProblemData",
    "Ranker",
    "RankingModel",
    "read_manifest",
    "verify_files",
]


def __getattr__(name: str) -> object:
    # The estimator needs scikit-learn, which the run time does without.
    if name == "CostModel":
        from kernelcast.costmodel.estimator import CostModel

        return CostModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
