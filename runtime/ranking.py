"""Ranking a problem's legal candidates: by the device's model, or else by the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kernelcast.costmodel import AnalyticModel, Prediction, RankingModel
from kernelcast.costmodel.locate import VERSION_PATTERN, find_champion, matching_folders
from kernelcast.errors import KernelcastError, ModelError, warn
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, candidates, operation

#: Rows in which a default that has parameters is looked for.
_DEFAULT_WITHIN = 64

#: With a target regret, the most candidates that are measured.
MOST_MEASURED = 10


class ModelWarning(UserWarning):
    """A model could not be used; selection fell back to the analytic ranking."""


@dataclass(frozen=True)
class Ranking:
    """A problem's legal candidates with what the ranker says of them.

    Attributes:
        table: the candidates, the default first.
        prediction: one row a candidate.
        source: ``"predicted"`` (a model) or ``"analytic"``.
        model_version: empty without a model.
        reason: why this ranker.
        default: the default's row; None where it is not legal.
        rejected: rows that failed here, and are not selected.
    """

    table: CandidateTable
    prediction: Prediction
    source: str
    model_version: str
    reason: str
    default: int | None = None
    rejected: frozenset[int] = frozenset()

    def order(self) -> np.ndarray:
        """Row numbers, the fastest first, without those that were rejected."""
        order = self.prediction.order()
        return order[~np.isin(order, list(self.rejected))] if self.rejected else order

    def confidence(self, row: int) -> float:
        """Probability that no other covered candidate is faster than a row, by the model's own error; NaN without another."""
        said = self.prediction
        with np.errstate(invalid="ignore"):
            scores = (said.log_latency - said.log_latency[row]) / np.maximum(said.error_log, 1e-9)
        scores[~said.covered] = np.inf
        scores[row] = np.inf
        closest = float(np.fmin.reduce(scores))
        return 0.5 * (1.0 + math.erf(closest / math.sqrt(2.0))) if closest < math.inf else math.nan

    def rejecting(self, candidates: Iterable[Candidate]) -> Ranking:
        """The same without some candidates, the default excepted."""
        rows = {_row_of(self.table, each, len(self.table)) for each in candidates} - {None, self.default}
        return replace(self, rejected=frozenset(row for row in rows if row is not None))

    def including(self, candidates: Iterable[Candidate]) -> Ranking:
        """The same with legal candidates that are not listed, such as those of a large space, put at the end: not covered."""
        new = [
            each for each in dict.fromkeys(candidates) if _row_of(self.table, each, len(self.table)) is None
        ]
        if not new:
            return self
        more = CandidateTable(block for each in new for block in CandidateTable.of([each]).blocks)
        said = self.prediction
        unknown = np.full(len(more), np.nan)
        prediction = replace(
            said,
            log_latency=np.concatenate([said.log_latency, unknown]),
            error_log=np.concatenate([said.error_log, unknown]),
            covered=np.concatenate([said.covered, np.zeros(len(more), dtype=bool)]),
        )
        return replace(self, table=CandidateTable((*self.table.blocks, *more.blocks)), prediction=prediction)

    def shortlist(self, k: int) -> list[int]:
        """Rows to measure: the default, then the first k - 1 others of the ranking. Also the order that breaks ties."""
        others = [row for row in self.order()[: k + 1].tolist() if row != self.default]
        return others[:k] if self.default is None else [self.default, *others[: k - 1]]

    def fewest(self, target_regret: float) -> list[int]:
        """Rows to measure: as few as keep the expected regret under a target; see :mod:`kernelcast.costmodel.adaptive`."""
        from kernelcast.costmodel.adaptive import choose

        if not len(self.table):
            return []
        chosen = choose(
            self.prediction, default=self.default, target_regret=target_regret, most=MOST_MEASURED
        )
        return [int(row) for row in chosen.rows if int(row) not in self.rejected]

    def row_of(self, candidate: Candidate) -> int | None:
        """A candidate's row; None where it is not among the legal ones, or was rejected."""
        row = _row_of(self.table, candidate, len(self.table))
        return None if row in self.rejected else row


class Rankers:
    """The models of one device, loaded when first asked for.

    Args:
        device: the hardware facts.
        folder: of registered models.
    """

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = device
        self.folder = folder
        self._models: dict[str, tuple[RankingModel | None, str]] = {}

    def rank(self, problem: Problem, *, whole: bool = False) -> Ranking:
        """Legal candidates with their predictions, from the device's model or else the roofline.

        The model ranks the candidates whose like it was fitted on. The roofline, which cannot tell thousands of tile sizes
        apart, ranks the quick subset of those variants that have so many. With ``whole`` every legal candidate is there.
        """
        model, reason = self.model(problem.operation)
        if model is not None:
            try:
                table = candidates(problem, self.device, spaces=None if whole else model.spaces())
                prediction = model.predict(problem, table, self.device)
                if prediction.covered.any():
                    version = str(model.facts.get("version", ""))
                    return Ranking(
                        table, prediction, "predicted", version, reason, default_row(table, problem)
                    )
                reason = "the model covers none of the legal candidates"
            except ModelError as error:
                reason = str(error)
        table = candidates(problem, self.device, subset="full" if whole else "auto")
        prediction = AnalyticModel().predict(problem, table, self.device)
        return Ranking(table, prediction, "analytic", "", reason, default_row(table, problem))

    def model(self, operation_name: str) -> tuple[RankingModel | None, str]:
        """(the model that stands for an operation, or None; why)."""
        found = self._models.get(operation_name)
        if found is None:
            found = self._models[operation_name] = self._load(operation_name)
        return found

    def _load(self, operation_name: str) -> tuple[RankingModel | None, str]:
        try:
            folder = find_champion(self.folder, self.device, operation_name)
            if folder is None:
                why = f"no model of {operation_name} stands for {self.device.name}"
                command = promotion(self.folder, self.device, operation_name)
                there = f", though some are registered (choose one: {command})" if command else ""
                return None, f"{why}{there}: ranked by the roofline"
            model = RankingModel.load(folder)
            model.facts.setdefault("version", folder.name)
            return model, f"ranked by model {folder.name}"
        except (KernelcastError, KeyError) as error:
            warn(f"{error} Ranking by the roofline instead.", ModelWarning)
            return None, f"the model of {operation_name} cannot be used ({error})"


def promotion(models_dir: Path, device: Device, operation_name: str) -> str:
    """The command that makes the latest registered model of an operation stand for a device; empty where there is none."""
    for folder in matching_folders(models_dir, device):
        named = [each.name for each in (folder / operation_name).glob("*") if each.is_dir()]
        numbers = {int(match[1]): match[0] for each in named if (match := VERSION_PATTERN.fullmatch(each))}
        if numbers:
            return f"kernelcast models promote {numbers[max(numbers)]} --op {operation_name} --device {folder.name}"
    return ""


def default_row(table: CandidateTable, problem: Problem) -> int | None:
    """The row of the default, which is of the first variant of a table; None where it is not legal."""
    default = operation(problem.operation).default
    if not table.blocks or table.blocks[0].variant != default.variant:
        return None
    if not table.blocks[0].columns:
        return 0 if table.blocks[0].length else None
    return _row_of(table, default, min(len(table), _DEFAULT_WITHIN))


def _row_of(table: CandidateTable, candidate: Candidate, rows: int) -> int | None:
    start = 0
    wanted = dict(candidate.config)
    for block in table.blocks:
        if start >= rows:
            break
        if block.variant == candidate.variant and set(block.columns) == set(wanted):
            matches = np.ones(block.length, dtype=bool)
            for name, column in block.columns.items():
                matches &= column == wanted[name]
            for row in np.flatnonzero(matches):
                if start + row < rows and table[int(start + row)] == candidate:
                    return int(start + row)
        start += block.length
    return None
