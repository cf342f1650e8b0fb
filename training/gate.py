"""The gate: which newly trained models may stand for a device.

All figures are geometric-mean efficiencies on problems whose shapes were held out of the fit, at k = 1 (the first of
the ranking) and k = 3 with the default among the three. A model is promoted if

1. it ranks at all: a model whose predictions are equal within every problem is never promoted, whatever its figures;
2. it is better than every baseline, the default alone among them, at k = 1 and at k = 3. Where a baseline is perfect at
   one k, being perfect too is enough there. Beside a baseline that is perfect at both no model is promoted, as none can
   gain anything over it;
3. it is better than the standing champion on the problems on which both can be judged fairly: worse at neither k by more
   than :data:`TIE`, and better by more at one. In a tie, or where no problem allows the comparison, the newer model is
   promoted only if it was trained on more problems. A champion that cannot be used at all, such as one of an earlier
   layout, is no hindrance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Mean efficiencies closer than this are equal: the noise floor of repeated measurements is 0.998 and better.
TIE = 0.002
#: Efficiencies are ratios of floats: differences below this are rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Scores:
    """Geometric-mean efficiency at k = 1, and at k = 3 with the default."""

    at_1: float
    at_3: float

    def __str__(self) -> str:
        return f"{self.at_1:.4f} at 1 and {self.at_3:.4f} at 3"

    def to_json(self) -> dict[str, float]:
        """The figures by name."""
        return {"efficiency_at_1": self.at_1, "efficiency_at_3_with_default": self.at_3}


@dataclass(frozen=True)
class Standing:
    """The champion, and how it compares.

    Attributes:
        version: its version.
        trained_on: problems it was trained on.
        problems: held-out problems on which both can be judged fairly.
        champion: its scores on those.
        model: the new model's scores on those.
        unusable: why it cannot be used at all, in a few words such as "is of an earlier layout"; else empty.
    """

    version: str
    trained_on: int
    problems: int = 0
    champion: Scores | None = None
    model: Scores | None = None
    unusable: str = ""


@dataclass(frozen=True)
class Decision:
    """Whether a model may stand, and why, with the figures."""

    promoted: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"promoted": self.promoted, "reason": self.reason}


def judge(
    model: Scores,
    baselines: Mapping[str, Scores],
    *,
    constant: bool,
    problems: int,
    trained_on: int,
    standing: Standing | None = None,
) -> Decision:
    """Decide whether a model is promoted.

    Args:
        model: scores on all held-out problems.
        baselines: scores of each baseline on the same problems, the default alone among them where the data have one.
        constant: whether the model's predictions are equal within every held-out problem.
        problems: number of held-out problems.
        trained_on: number of problems that the model was trained on.
        standing: the champion, if there is one.
    """
    if constant:
        return Decision(
            False, f"It predicts one latency for all candidates of a problem, in each of {problems} problems."
        )
    for name, baseline in baselines.items():
        if _perfect(baseline.at_1) and _perfect(baseline.at_3):
            return Decision(
                False,
                f"The baseline {name!r} is perfect on {problems} held-out problems, at 1 and at 3, so no model can be better "
                f"there; this one has {model}. To use it all the same: kernelcast models promote",
            )
        if not _beats(model, baseline):
            return Decision(
                False,
                f"It does not beat the baseline {name!r} on {problems} held-out problems: efficiency {model}, "
                f"the baseline {baseline}.",
            )
    beaten = (
        f"Efficiency {model} on {problems} held-out problems; the best baselines have {_best(baselines)}."
    )
    if standing is None:
        return Decision(True, f"{beaten} No champion stands yet.")
    if standing.unusable:
        return Decision(
            True,
            f"{beaten} The champion {standing.version} {standing.unusable} and cannot be compared: it is replaced.",
        )
    more = trained_on > standing.trained_on
    amounts = f"trained on {trained_on} problems, the champion {standing.version} on {standing.trained_on}"
    if standing.champion is None or standing.model is None:
        outcome = f"No held-out problem allows a fair comparison with the champion; it was {amounts}."
        return Decision(more, f"{beaten} {outcome}")
    compared = (
        f"On the {standing.problems} problems that allow a comparison it has {standing.model}, "
        f"the champion {standing.version} {standing.champion}"
    )
    gains = (standing.model.at_1 - standing.champion.at_1, standing.model.at_3 - standing.champion.at_3)
    if min(gains) < -TIE:
        return Decision(False, f"{beaten} {compared}: worse.")
    if max(gains) > TIE:
        return Decision(True, f"{beaten} {compared}: better.")
    return Decision(more, f"{beaten} {compared}: a tie, decided by the number of problems: {amounts}.")


def _beats(model: Scores, baseline: Scores) -> bool:
    pairs = ((model.at_1, baseline.at_1), (model.at_3, baseline.at_3))
    better = [ours > theirs + _ROUNDING for ours, theirs in pairs]
    perfect = [_perfect(theirs) and _perfect(ours) for ours, theirs in pairs]
    return any(better) and all(b or p for b, p in zip(better, perfect, strict=True))


def _perfect(efficiency: float) -> bool:
    return efficiency >= 1 - _ROUNDING


def _best(baselines: Mapping[str, Scores]) -> Scores:
    """The best at each k, not necessarily of one baseline."""
    at_1 = max((scores.at_1 for scores in baselines.values()), default=0.0)
    at_3 = max((scores.at_3 for scores in baselines.values()), default=0.0)
    return Scores(at_1, at_3)
