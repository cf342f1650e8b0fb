"""Why a candidate was selected: what the model saw, what each feature added, and why the runners-up lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kernelcast.costmodel.prediction import Contribution
from kernelcast.errors import ModelError
from kernelcast.featurizer import analytic_costs
from kernelcast.featurizer.analytic import ANALYTIC_UNITS
from kernelcast.kernels import Candidate, CandidateTable, Device, Problem, variants
from kernelcast.runtime.ranking import Ranking
from kernelcast.runtime.selection import Selection

if TYPE_CHECKING:
    from kernelcast.costmodel import RankingModel

#: Features that are named against a runner-up.
_REASONS = 3
#: Features that the text of an explanation lists.
_LISTED = 12


def text_of(part: Contribution) -> str:
    """A feature with its value and what it does, such as ``waves = 2 (+3.1%)``."""
    unit = "" if part.unit == "1" else f" {part.unit}"
    effect = "" if math.isnan(part.contribution_log) else f" ({math.expm1(part.contribution_log):+.1%})"
    return f"{part.feature} = {part.value:.4g}{unit}{effect}"


@dataclass(frozen=True)
class Rival:
    """A candidate that was not selected.

    Attributes:
        candidate: which.
        predicted_us: predicted latency in microseconds; NaN where the model does not cover it.
        ratio: predicted latency over that of the selected candidate.
        because: the features that speak most against it, each with the difference of its contributions.
    """

    candidate: Candidate
    predicted_us: float
    ratio: float
    because: tuple[Contribution, ...]

    def __str__(self) -> str:
        reasons = ", ".join(map(text_of, self.because)) or "no feature speaks against it"
        return f"{self.candidate}: predicted {self.predicted_us:,.1f} us ({self.ratio:.2f}x), {reasons}"


@dataclass(frozen=True)
class Explanation:
    """What was known when a candidate was selected.

    Attributes:
        selection: the answer.
        ranked_by: ``"predicted"`` (a model) or ``"analytic"`` (the roofline), as the ranking is now.
        place: of the selected candidate in the ranking, from 1; 0 where it is not in it.
        features: of the selected candidate, those that matter most first.
        rivals: the first others of the ranking, in its order.
    """

    selection: Selection
    ranked_by: str
    place: int
    features: tuple[Contribution, ...]
    rivals: tuple[Rival, ...]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain JSON values; NaN as None."""
        return {
            "selection": self.selection.to_dict(),
            "ranked_by": self.ranked_by,
            "place": self.place,
            "features": [_plain(each) for each in self.features],
            "rivals": [
                {
                    "candidate": {"variant": each.candidate.variant, "config": each.candidate.parameters},
                    "predicted_us": _finite(each.predicted_us),
                    "ratio": _finite(each.ratio),
                    "because": [_plain(feature) for feature in each.because],
                }
                for each in self.rivals
            ],
        }

    def __str__(self) -> str:
        chosen = self.selection
        by = f"model {chosen.model_version}" if chosen.model_version else "the roofline"
        lines = [
            f"{chosen.problem} on {chosen.device}: {chosen.candidate} ({chosen.source}). {chosen.reason}"
        ]
        if self.place:
            lines.append(f"Number {self.place} of {chosen.candidates or 'the'} ranked by {by}, for these:")
        lines += [f"  {text_of(each)}" for each in self.features[:_LISTED]]
        if self.rivals:
            lines.append("The runners-up, and what speaks against them:")
        lines += [f"  {rival}" for rival in self.rivals]
        return "\n".join(lines)


def explain(
    selection: Selection, ranking: Ranking, device: Device, model: RankingModel | None, *, rivals: int
) -> Explanation:
    """Explain a selection by the ranking of its problem.

    The contributions are those of the trees' paths (:meth:`kernelcast.costmodel.RankingModel.explain`): they add up to the
    prediction. They say what the model made of a feature, not what would happen if the feature alone were another.

    Args:
        selection: what was selected.
        ranking: of its problem.
        device: where.
        model: that ranked; None for the roofline.
        rivals: how many others to explain.
    """
    order = ranking.order().tolist()
    row = ranking.row_of(selection.candidate)
    known = model if ranking.source == "predicted" else None
    others = [each for each in order if each != row][:rivals]
    own = {} if row is None else _features(selection.problem, ranking.table, device, row, known)
    return Explanation(
        selection=selection,
        ranked_by=ranking.source,
        place=0 if row is None else order.index(row) + 1,
        features=tuple(own.values()),
        rivals=tuple(
            Rival(
                candidate=ranking.table[other],
                predicted_us=_predicted(ranking, other),
                ratio=math.nan if row is None else _predicted(ranking, other) / _predicted(ranking, row),
                because=_against(_features(selection.problem, ranking.table, device, other, known), own),
            )
            for other in others
        ),
    )


def _features(
    problem: Problem, table: CandidateTable, device: Device, row: int, model: RankingModel | None
) -> dict[str, Contribution]:
    """Features of a row by name, the most telling first: of a model, or else the terms of the roofline."""
    if model is not None:
        try:
            parts = model.explain(problem, table, device, row)
            return {each.feature: each for each in parts if each.feature}  # the first is what all start from
        except ModelError:
            return {}
    start = 0
    for block in table.blocks:
        if row < start + block.length:
            found = variants(problem.operation)[block.variant]
            work = found.work(problem, block.columns, device).columns(block.length)
            costs = analytic_costs(problem, work, device)
            return {
                name: Contribution(name, unit, float(costs[name][row - start]), math.nan)
                for name, unit in ANALYTIC_UNITS.items()
                if not math.isnan(costs[name][row - start])  # what a device or a closed library does not have
            }
        start += block.length
    return {}


def _against(
    features: Mapping[str, Contribution], own: Mapping[str, Contribution]
) -> tuple[Contribution, ...]:
    """The features by which a rival falls behind the selected candidate, those that cost most first."""
    behind = []
    for name, feature in features.items():
        if name not in own:
            continue
        more = feature.contribution_log - own[name].contribution_log
        if math.isnan(more):
            # The roofline has no contributions: its times and shares, where the rival's are larger.
            worse = feature.value > own[name].value and feature.unit == "us"
            more = math.log(feature.value / own[name].value) if worse and own[name].value > 0 else 0.0
        if more > 0.0:
            behind.append(replace(feature, contribution_log=more))
    return tuple(sorted(behind, key=lambda each: (-each.contribution_log, each.feature))[:_REASONS])


def _predicted(ranking: Ranking, row: int) -> float:
    covered = bool(ranking.prediction.covered[row])
    return math.exp(ranking.prediction.log_latency[row]) if covered else math.nan


def _plain(feature: Contribution) -> dict[str, Any]:
    return {
        "name": feature.feature,
        "unit": feature.unit,
        "value": _finite(feature.value),
        "contribution_log": _finite(feature.contribution_log),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
