"""The analytic baseline: the roofline estimate as it stands, with no measurement behind it."""

from __future__ import annotations

import numpy as np

from kernelcast.costmodel.prediction import Prediction
from kernelcast.errors import UnknownNameError
from kernelcast.featurizer import analytic_costs
from kernelcast.kernels import CandidateTable, Device, Problem, variants

#: Of the roofline estimate, in log latency: it orders candidates and does not claim more.
_ERROR_LOG = 0.7


class AnalyticModel:
    """Ranks by :func:`kernelcast.featurizer.analytic_costs`. What selection uses where there is no model."""

    def predict(self, problem: Problem, table: CandidateTable, device: Device) -> Prediction:
        """Predict every candidate whose variant is in the catalogue; others are not covered."""
        try:
            known = variants(problem.operation)
        except UnknownNameError:
            known = {}
        log_latency = np.zeros(len(table))
        covered = np.zeros(len(table), dtype=bool)
        start = 0
        for block in table.blocks:
            rows = slice(start, start + block.length)
            start += block.length
            if block.variant not in known:
                continue
            work = known[block.variant].work(problem, block.columns, device).columns(block.length)
            roofline_us = analytic_costs(problem, work, device)["roofline_us"]
            log_latency[rows] = np.log(np.maximum(roofline_us, 1e-3))
            covered[rows] = True
        return Prediction(log_latency, np.full(len(table), _ERROR_LOG), covered)
