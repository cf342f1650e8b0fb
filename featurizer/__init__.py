"""(problem, candidates, device) -> features, with names, units and a schema; analytic costs."""

from kernelcast.featurizer.analytic import analytic_costs
from kernelcast.featurizer.featurizer import Featurizer
from kernelcast.featurizer.schema import FEATURE_VERSION, FeatureSchema

__all__ = ["FEATURE_VERSION", "FeatureSchema", "Featurizer", "analytic_costs"]
