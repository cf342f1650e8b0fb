"""The fitted ranker of one operation on one device: features, trees, and the facts of its training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.costmodel.adaptive import Adaptive
from kernelcast.costmodel.artifact import read_artifact, read_file, write_artifact
from kernelcast.costmodel.forest import Forest
from kernelcast.costmodel.heads import OTHER_HEADS, combined, contributions, order_heads
from kernelcast.costmodel.prediction import Contribution, Prediction
from kernelcast.costmodel.walk import Walk
from kernelcast.errors import ArtifactError, InvalidRecordError, ModelError
from kernelcast.featurizer import FeatureSchema, Featurizer
from kernelcast.featurizer.compiled import CompiledFacts
from kernelcast.featurizer.extra import estimate_place, spared
from kernelcast.kernels import Block, CandidateTable, Device, Problem, operation, operation_names, variants
from kernelcast.kernels.registry import space_of

if TYPE_CHECKING:
    from kernelcast.costmodel.estimator import CostModel

#: Candidates up to this much slower than the first, in log latency, set a problem's level.
_NEAR = 0.7

#: The file of compiled facts in an artifact.
COMPILED_FILE = "compiled.json"

#: No prediction claims to be surer than this, in log latency.
_LEAST_ERROR = 0.005


@dataclass(frozen=True, eq=False)
class ProblemData:
    """The measured candidates of one problem: what a model is fitted on and judged by.

    Attributes:
        problem: what was computed.
        device: where.
        table: every candidate with a latency.
        log_latency: natural logarithm of the latency in microseconds, float64 [candidates].
        error_log: standard error of each, float64 [candidates]; NaN where unknown.
        failed: candidates that were tried and did not work.
        workload: the set of problems that this one was taken from.

    Raises:
        InvalidRecordError: an array does not have one value a candidate, or a latency is not finite.
    """

    problem: Problem
    device: Device
    table: CandidateTable
    log_latency: np.ndarray
    error_log: np.ndarray
    failed: tuple[Any, ...] = ()
    workload: str = ""

    def __post_init__(self) -> None:
        for name in ("log_latency", "error_log"):
            if getattr(self, name).shape != (len(self.table),):
                raise InvalidRecordError(
                    f"{name} of {self.problem} has the shape {getattr(self, name).shape}; "
                    f"it must be ({len(self.table)},), one value a candidate."
                )
        if not np.isfinite(self.log_latency).all():
            raise InvalidRecordError(
                f"{int((~np.isfinite(self.log_latency)).sum())} latencies of {self.problem} are not finite; "
                "a candidate that failed belongs in `failed`."
            )


@dataclass
class RankingModel:
    """A fitted ranker. :meth:`fit` makes one, :meth:`save` and :meth:`load` keep it, :meth:`predict` asks it.

    Attributes:
        schema: what its features are.
        facts: the manifest's free part: device, dataset hash, versions, held-out scores, ...
        compiled: what the compiler made of candidates, where the schema has features of it.
        adaptive: what it knows of its own limits; None where it was not asked.
        estimate: the feature that estimates the time, which the order adds to; None where there is none.
    """

    schema: FeatureSchema
    forests: dict[str, Forest]
    level_mean: float
    error_mean: float
    facts: dict[str, Any] = field(default_factory=dict)
    estimator: CostModel | None = None
    compiled: CompiledFacts | None = None
    adaptive: Adaptive | None = None
    estimate: int | None = None

    def __post_init__(self) -> None:
        self._complete = Featurizer(self.schema, self.compiled)
        names = self._complete.names
        looked_at = {
            int(place)
            for forest in self.forests.values()
            for place in np.unique(forest.feature % forest.width)
        }
        if self.estimate is not None:
            if not 0 <= self.estimate < len(names):
                raise ArtifactError(
                    f"The model's estimate is feature {self.estimate}; there are {len(names)}."
                )
            looked_at.add(self.estimate)
        # What no tree looks at is not worked out for a prediction.
        needed = [names[place] for place in sorted(looked_at) if place < len(names)]
        self._featurizer = Featurizer(self.schema, self.compiled, needed)
        self._spaces: tuple[list[str], dict[str, Block]] | None = None
        self._walks: dict[bool, Walk] = {}
        if not (math.isfinite(self.level_mean) and math.isfinite(self.error_mean)):
            raise ArtifactError(
                f"The model's level is {self.level_mean} and its error {self.error_mean}; both must be finite."
            )
        self._order = order_heads(self.estimate)
        for name in (*self._order, *OTHER_HEADS):
            if name not in self.forests:
                raise ArtifactError(f"The model has no head {name!r}. Train it again.")
            if self.forests[name].width != len(self._featurizer.names):
                raise ArtifactError(
                    f"The model's trees take {self.forests[name].width} features; its schema, as this kernelcast "
                    f"computes it, has {len(self._featurizer.names)}. Train the model again."
                )

    @property
    def operation(self) -> str:
        """The operation it ranks."""
        return self.schema.operation

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, in the order of the trees."""
        return self._featurizer.names

    @classmethod
    def fit(
        cls,
        data: Sequence[ProblemData],
        estimator: CostModel | None = None,
        compiled: CompiledFacts | None = None,
        weights: np.ndarray | None = None,
    ) -> RankingModel:
        """Fit on measured problems of one operation.

        Args:
            data: at least one problem with two candidates.
            estimator: hyperparameters and seed; the defaults where None. It is copied, not fitted itself.
            compiled: makes what the compiler made of the candidates a part of the features.
            weights: [problems] what each problem counts, above 0; all alike where None.

        Raises:
            ModelError: nothing to fit on, a weight too many or too few, or as :meth:`CostModel.fit`.
        """
        from kernelcast.costmodel.estimator import CostModel

        if not data:
            raise ModelError("There is no measured problem to fit on. Collect or import some.")
        if weights is not None and np.shape(weights) != (len(data),):
            raise ModelError(
                f"The weights are {np.shape(weights)}; there must be one for each of the {len(data)} problems."
            )
        schema = schema_of(data, compile_facts=compiled is not None)
        X, y, groups = design(data, schema, compiled)
        from sklearn.base import clone

        from kernelcast.costmodel.calibrate import assess
        from kernelcast.costmodel.uncertainty import regions

        # A copy: two models fitted with one estimator must not save each other's trees.
        problems = [item.problem for item in data]
        copy = CostModel() if estimator is None else clone(estimator)
        featurizer = Featurizer(schema, compiled)
        X[:, spared(featurizer.names, X)] = math.nan
        fitted = copy.fit(
            X,
            y,
            groups=groups,
            estimate=estimate_place(featurizer.names, X),
            sample_weight=None if weights is None else np.asarray(weights)[groups],
            clusters=regions(problems)[groups],
        )
        return cls(
            schema,
            fitted.forests_,
            fitted.level_mean_,
            fitted.error_mean_,
            estimator=fitted,
            compiled=compiled if schema.compile_facts else None,
            adaptive=assess(problems, [item.table for item in data], y, groups, fitted.left_out_),
            estimate=fitted.estimate_,
        )

    def features(self, problem: Problem, table: CandidateTable, device: Device) -> np.ndarray:
        """What the trees were fitted on: float32 [candidates, features]."""
        return self._complete(problem, table, device)

    def predict(
        self, problem: Problem, table: CandidateTable, device: Device, *, uncertainty: bool = True
    ) -> Prediction:
        """Predict every candidate of a table.

        Args:
            problem: what is computed.
            table: the candidates.
            device: where.
            uncertainty: whether the error of a difference is wanted; without, it is NaN, and the prediction takes less time.

        Raises:
            ModelError: the problem is of another operation or lacks a fact that the features need.
        """
        features = self._featurizer.borrowed(problem, table, device)
        covered = self._featurizer.covers(table)
        heads = self._walk(uncertainty).predict(features)
        relative = combined(heads, features, self.estimate)
        level = heads[len(self._order)]
        # The level is the mean over the candidates that the model knows and that may be chosen: others, of which a large
        # space has far more than any problem in fitting had, must not shift it.
        every = covered.all() or not covered.any()
        best = (relative if every else relative[covered]).min(initial=np.inf)
        near = relative <= best + _NEAR
        if not every:
            near &= covered
        shift = self.level_mean + (level - relative)[near].sum() / max(np.count_nonzero(near), 1)
        if uncertainty:
            error = np.maximum(np.exp(self.error_mean + heads[-1]), _LEAST_ERROR)
        else:
            error = np.full(len(table), math.nan)
        if self.adaptive is None:
            return Prediction(relative + shift, error, covered)
        reach, calibration = self.adaptive.reach, self.adaptive.calibration
        return Prediction(relative + shift, error, covered, calibration, partial(reach.novelty, problem))

    def explain(
        self, problem: Problem, table: CandidateTable, device: Device, row: int
    ) -> list[Contribution]:
        """What of a candidate moves its place in the order, the largest part first.

        The parts, the first of them what all candidates start from, sum to the predicted log latency up to a constant of
        the problem; where those of two candidates differ is why one ranks before the other.

        Raises:
            ModelError: as :meth:`predict`, or the model's trees cannot explain themselves.
            IndexError: there is no such row.
        """
        values = self._complete(problem, table, device)[row]
        start, parts = contributions(self.forests, values[None], self.estimate)
        found = [
            Contribution(name, unit, float(value), float(part))
            for name, unit, value, part in zip(
                self._featurizer.names, self._featurizer.units, values, parts[0], strict=True
            )
            if part
        ]
        found.sort(key=lambda each: -abs(each.contribution_log))
        return [Contribution("", "", math.nan, start), *found]

    def _walk(self, uncertainty: bool) -> Walk:
        """The walk through all heads, or through all but that of the error."""
        found = self._walks.get(uncertainty)
        if found is None:
            names = (*self._order, *(OTHER_HEADS if uncertainty else OTHER_HEADS[:-1]))
            found = self._walks[uncertainty] = Walk([self.forests[name] for name in names])
        return found

    def spaces(self) -> dict[str, Block]:
        """Variant -> the configs of its whole space that the model covers; nothing is known of the others.

        The default is always there: it is measured whatever is known of it. Found once for each version of the catalogue: a
        space may have tens of thousands of configs, most of which were never measured.
        """
        known, default = variants(self.operation), operation(self.operation).default_variant
        if self._spaces is None or self._spaces[0] != list(known):
            found, seen = {}, {name for name, _ in self.schema.variants}
            for name, each in known.items():
                if name not in seen and name != default:
                    continue
                block = space_of(each, "full")
                block = block.take(self._featurizer.covers(CandidateTable([block])))
                if block.length or name == default:
                    found[name] = block.keep() if block.length else space_of(each, "full")
            self._spaces = list(known), found
        return self._spaces[1]

    def save(self, folder: str | Path) -> None:
        """Write the artifact: the heads in xgboost's JSON and as arrays, and a manifest with their digests.

        Raises:
            ArtifactError: the folder exists or cannot be written, or ``facts`` hold what is no JSON, such as NaN.
            ModelError: the model was loaded, so xgboost's own form is not at hand: copy its folder instead.
        """
        if self.estimator is None:
            raise ModelError("A loaded model has no xgboost booster to save; copy its folder instead.")
        boosters = {
            name: bytes(booster.save_raw("json")) for name, booster in self.estimator.boosters_.items()
        }
        more = {} if self.compiled is None else {COMPILED_FILE: self.compiled.to_json()}
        write_artifact(Path(folder), {**self._stated(), "facts": self.facts}, boosters, self.forests, more)

    def _stated(self) -> dict[str, Any]:
        """What the manifest says of the model itself."""
        return {
            "operation": self.operation,
            "schema": self.schema.to_dict(),
            "schema_hash": self.schema.hash,
            "feature_names": self.feature_names,
            "level_mean": self.level_mean,
            "error_mean": self.error_mean,
            **({} if self.estimate is None else {"estimate": self.estimate}),
            **({} if self.adaptive is None else {"adaptive": self.adaptive.to_dict()}),
        }

    @classmethod
    def load(cls, folder: str | Path) -> RankingModel:
        """Read an artifact that :meth:`save` wrote; needs numpy alone.

        Raises:
            ArtifactError: a file is missing or was changed, or the model was made for other features.
        """
        folder = Path(folder)
        manifest, forests = read_artifact(folder)
        try:
            schema = FeatureSchema.from_dict(manifest["schema"])
            if schema.hash != manifest["schema_hash"]:
                raise ArtifactError(f"{folder}: the feature schema does not match its hash.")
            model = cls(
                schema,
                forests,
                float(manifest["level_mean"]),
                float(manifest["error_mean"]),
                dict(manifest["facts"]),
                compiled=(
                    CompiledFacts.from_json(read_file(folder, manifest, COMPILED_FILE))
                    if schema.compile_facts
                    else None
                ),
                adaptive=Adaptive.from_dict(manifest["adaptive"]) if "adaptive" in manifest else None,
                estimate=int(manifest["estimate"]) if "estimate" in manifest else None,
            )
        except ArtifactError as error:
            # What is built from the parts does not know where they came from.
            if str(folder) in str(error):
                raise
            raise ArtifactError(f"{folder}: {error}") from error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArtifactError(
                f"{folder}: the manifest is incomplete ({type(error).__name__}: {error})."
            ) from error
        if model.operation != manifest.get("operation"):
            raise ArtifactError(f"{folder}: the manifest and the feature schema name different operations.")
        if model.feature_names != manifest.get("feature_names"):
            raise ArtifactError(
                f"{folder}: the model was fitted on other features than this kernelcast computes. Train it again."
            )
        # Values of another type may have been read as the right ones: a number in a text, a text as a list of letters.
        stated = model._stated()
        written = {name: manifest.get(name) for name in stated}
        if json.dumps(stated, sort_keys=True) != json.dumps(written, sort_keys=True) or not isinstance(
            manifest["facts"], dict
        ):
            raise ArtifactError(f"{folder}: the manifest does not state the model as this kernelcast does.")
        return model


def schema_of(data: Sequence[ProblemData], *, compile_facts: bool = False) -> FeatureSchema:
    """The feature schema of everything that occurs in some data."""
    return FeatureSchema.infer(
        [item.problem for item in data],
        [item.table for item in data],
        with_work=data[0].problem.operation in operation_names(),
        compile_facts=compile_facts,
        with_device=len({item.device.fingerprint for item in data}) > 1,
    )


def design(
    data: Iterable[ProblemData], schema: FeatureSchema, compiled: CompiledFacts | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features float32 [rows, features], log latency [rows], number of the problem [rows]) of some data."""
    featurizer = Featurizer(schema, compiled)
    blocks, targets, groups = [], [], []
    for index, item in enumerate(data):
        blocks.append(featurizer(item.problem, item.table, item.device))
        targets.append(item.log_latency)
        groups.append(np.full(len(item.table), index))
    return np.concatenate(blocks), np.concatenate(targets), np.concatenate(groups)
