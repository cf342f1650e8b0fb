"""What MLflow runs to serve a registered model: an artifact's folder behind MLflow's own interface. No pickle is involved.

MLflow keeps this file beside the artifact ("models from code") and runs it when ``mlflow.pyfunc.load_model`` is called.

Input: one row a candidate; ``problem`` is :attr:`kernelcast.kernels.Problem.key` and ``candidate``
:attr:`kernelcast.kernels.Candidate.key`, both JSON. Output: ``log_latency``, natural logarithm of microseconds, and
``error_log``, standard deviation of the error of a difference to another candidate of the same problem.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd

from kernelcast.costmodel import RankingModel
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem


class ServedModel(mlflow.pyfunc.PythonModel):
    """Predicts the rows of a frame, those of one problem together."""

    def load_context(self, context: Any) -> None:
        """Read the artifact, its digests checked."""
        self._model = RankingModel.load(Path(context.artifacts["kernelcast"]))
        self._device = Device.from_dict(self._model.facts["device"])

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """See the module. A candidate that the model does not cover has NaN."""
        found = np.full((len(model_input), 2), np.nan)
        places = model_input.reset_index(drop=True).groupby("problem", sort=False).indices
        for text, rows in places.items():
            problem = Problem.from_dict(json.loads(str(text)))
            candidates = [Candidate.from_key(str(key)) for key in model_input["candidate"].iloc[rows]]
            # A table puts candidates of one variant beside each other.
            order = sorted(range(len(candidates)), key=lambda at: candidates[at].variant)
            table = CandidateTable.of(candidates[at] for at in order)
            prediction = self._model.predict(problem, table, self._device)
            values = np.column_stack([prediction.log_latency, prediction.error_log])
            values[~prediction.covered] = np.nan
            found[np.asarray(rows)[order]] = values
        return pd.DataFrame(found, columns=["log_latency", "error_log"], index=model_input.index)


mlflow.models.set_model(ServedModel())
