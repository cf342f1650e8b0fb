"""Training: measured problems in, a judged, registered and tracked model out."""

from __future__ import annotations

import hashlib
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from kernelcast.costmodel import ProblemData, RankingModel, read_manifest
from kernelcast.costmodel.heads import order_heads
from kernelcast.costmodel.locate import read_alias
from kernelcast.errors import ArtifactError, EarlierLayoutError, ModelError
from kernelcast.kernels import Device
from kernelcast.kernels.compile_cache import CompileCache
from kernelcast.training import held_out as held
from kernelcast.training import registry
from kernelcast.training.compiled import gather
from kernelcast.training.data import dataset_hash
from kernelcast.training.drawing import Tuned, draw_hyperparameters
from kernelcast.training.gate import Decision, Scores, Standing, judge
from kernelcast.training.metrics import KS
from kernelcast.training.mlflow_registry import Registration
from kernelcast.training.recipe import hyperparameters
from kernelcast.training.structure import check_facts
from kernelcast.training.tracking import Run, Tracked, TrackedFile, track
from kernelcast.training.transfer import problem_weights

if TYPE_CHECKING:
    from kernelcast.costmodel.estimator import CostModel

_log = logging.getLogger("kernelcast.training")

#: Called with what is being done and the share of the whole that is done, 0 to 1.
OnProgress = Callable[[str, float], None]

_LIBRARIES = ("numpy", "xgboost", "xgboost-cpu", "scikit-learn", "torch", "triton")


@dataclass(frozen=True)
class TrainResult:
    """What a training left behind.

    Attributes:
        model_dir: the artifact's folder in the registry.
        run_id: of the MLflow run; None where it was not tracked, or waits in the spool.
        scores: efficiencies on held-out problems of the model and the baselines: the manifest's ``held_out``.
        promoted: whether the model now stands for its device and operation.
        reason: why, with the figures.
        tracking_warning: why the run was not uploaded, else empty.
        drawn: what came of other hyperparameters (:class:`kernelcast.training.drawing.Tuned`), as plain JSON values; None where
            none were drawn.
    """

    model_dir: Path
    run_id: str | None
    scores: dict[str, Any]
    promoted: bool
    reason: str
    tracking_warning: str = ""
    drawn: dict[str, Any] | None = None


def train(
    data: Sequence[ProblemData],
    *,
    device: Device,
    seed: int = 0,
    estimator_params: Mapping[str, Any] | None = None,
    holdout: float = 0.2,
    models_dir: Path,
    tracking: bool = True,
    compile_cache: CompileCache | None = None,
    others: Sequence[ProblemData] = (),
    draws: int = 0,
    on_progress: OnProgress | None = None,
) -> TrainResult:
    """Fit, judge, register and track a model, and promote it if it passes :mod:`kernelcast.training.gate`.

    The scores are of a model of the same recipe that did not see the held-out shapes
    (:func:`kernelcast.training.held_out.splits`); the registered model is fitted on everything.

    Args:
        data: measured problems of one operation, all on ``device``; may be empty where there are ``others``.
        device: the hardware facts.
        seed: of the trees. Data and seed determine the artifact, but for the time in its manifest.
        estimator_params: parameters of the estimator other than :func:`hyperparameters` gives.
        holdout: share of the shapes to hold out.
        models_dir: root of the registry.
        tracking: whether to write an MLflow run.
        compile_cache: what the compiler made of candidates; part of the features where enough of those that were measured
            are in it (:data:`kernelcast.training.compiled.LEAST_SHARE`).
        others: problems of the operation measured on other devices, to learn from as well
            (:mod:`kernelcast.training.transfer`). The model is judged on this device's problems alone.
        draws: other hyperparameters that are tried by cross-validation (:mod:`kernelcast.training.drawing`); 0 takes those of
            :func:`hyperparameters`. The models that are judged on held-out shapes choose theirs without these.
        on_progress: see :data:`OnProgress`.

    Raises:
        ModelError: nothing to train on, data of several operations or devices, a parameter out of range, or a registry
            that cannot be written; all before anything is fitted.
    """
    started = time.time()
    operation = _check(data, device, others)
    tell = on_progress or (lambda _stage, _share: None)
    params = hyperparameters(len(data) + len(others), estimator_params, seed=seed)
    registry.require_writable(models_dir, device, operation)

    def fit(part: Sequence[ProblemData], chosen: Mapping[str, Any]) -> RankingModel:
        weights = problem_weights(others, part)
        return RankingModel.fit(
            [*others, *part], _estimator(chosen), compiled=gathered.compiled, weights=weights
        )

    # The error head does not take part in the order, so the models that are only judged do without it.
    def fit_order(part: Sequence[ProblemData], changes: Mapping[str, Any]) -> RankingModel:
        return fit(part, {**params, **changes, "error_folds": 1})

    def tuned(part: Sequence[ProblemData], share: float) -> Tuned | None:
        if not draws:
            return None
        return draw_hyperparameters(
            part,
            fit_order,
            draws=draws,
            seed=seed,
            on_fit=lambda done, fits: tell(f"trying hyperparameters, fit {done} of {fits}", share),
        )

    def fit_tuned(part: Sequence[ProblemData]) -> RankingModel:
        found = tuned(part, 0.0)
        return fit_order(part, found.changes if found else {})

    tell("reading compiled facts", 0.0)
    gathered = gather(data, compile_cache if data else None)
    tell("fitting without the held-out shapes", 0.0)
    results = held.judge_held_out(
        data,
        fit_tuned,
        holdout=holdout,
        on_split=lambda done, parts: tell("fitting without the held-out shapes", 0.5 * done / parts),
    )
    chosen = tuned(data, 0.5)
    params |= chosen.changes if chosen else {}
    tell("fitting on everything", 0.5)
    model = fit(data, params)
    tell("registering", 0.9)
    record = held.record(results, data, _importance(model))
    data_hash = dataset_hash([*data, *others])
    scores = {} if results is None else results.summary()
    facts = {
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "kernelcast_version": _installed("kernelcast"),
        "device": device.to_dict(),
        "operation": operation,
        "dataset_hash": data_hash,
        **_composition(data),
        **({"others": _composition_of_others(others)} if others else {}),
        "seed": int(seed),
        "hyperparameters": params,
        **({"drawn": chosen.to_json()} if chosen else {}),
        "compile_facts": gathered.to_json(),
        "libraries": {name: found for name in _LIBRARIES if (found := _installed(name)) != "absent"},
        "python": platform.python_version(),
        "held_out": {**scores, "file": held.FILE, "sha256": hashlib.sha256(record).hexdigest()},
    }

    with registry.locked(models_dir):
        # Under the lock: the champion that the model was judged against is the one that it replaces.
        decision = _decide(models_dir, results, len(data), device, operation)
        model.facts = {**facts, "gate": decision.to_json()}

        def save(folder: Path) -> None:
            model.save(folder)
            (folder / held.FILE).write_bytes(record)

        path = registry.add(models_dir, save, device=device, operation=operation, dataset_hash=data_hash)
        if decision.promoted:
            registry.set_champion(path)

    tracked = Tracked()
    if tracking:
        tell("tracking", 0.95)
        tracked = _track(path, results, decision, started)
    tell("done", 1.0)
    return TrainResult(
        path,
        tracked.run_id,
        scores,
        decision.promoted,
        decision.reason,
        tracked.warning,
        chosen.to_json() if chosen else None,
    )


def _check(data: Sequence[ProblemData], device: Device, others: Sequence[ProblemData]) -> str:
    """The operation that all data are of."""
    if not data and not others:
        raise ModelError("There is no measured problem to train on. Collect or import some.")
    operations = sorted({item.problem.operation for item in (*data, *others)})
    if len(operations) > 1:
        raise ModelError(
            f"The problems are of {', '.join(operations)}; a model is of one operation. Train each alone."
        )
    elsewhere = sorted({item.device.name for item in data if item.device.fingerprint != device.fingerprint})
    if elsewhere:
        raise ModelError(
            f"Some problems were measured on {', '.join(elsewhere)}, which has other facts than {device.name}."
        )
    if any(item.device.fingerprint == device.fingerprint for item in others):
        raise ModelError(f"{device.name} is among the other devices; its own problems are given apart.")
    return operations[0]


def _estimator(params: Mapping[str, Any]) -> CostModel:
    from kernelcast.costmodel.estimator import CostModel

    return CostModel(**params)


def _importance(model: RankingModel) -> dict[str, float]:
    """Share of each feature in the gain of all splits of the heads that order, the largest first."""
    assert model.estimator is not None
    gains: Counter[str] = Counter()
    for name in order_heads(model.estimate):
        of_head = model.estimator.boosters_[name].get_score(importance_type="total_gain")
        # The heads' targets differ in scale: each counts as much as another.
        total = sum(of_head.values()) or 1.0
        gains.update({feature: gain / total for feature, gain in of_head.items()})
    total = sum(gains.values()) or 1.0
    named = {name: gains.get(f"f{index}", 0.0) / total for index, name in enumerate(model.feature_names)}
    return dict(sorted(named.items(), key=lambda pair: (-pair[1], pair[0])))


def _composition(data: Sequence[ProblemData]) -> dict[str, Any]:
    candidates = sum(len(item.table) for item in data)
    failures = sum(len(item.failed) for item in data)
    return {
        "problems": len(data),
        "shapes": len({held.shape_hash(item.problem) for item in data}),
        "candidates": candidates,
        "measurements": candidates + failures,
        "failures": failures,
        "workloads": dict(sorted(Counter(item.workload for item in data).items())),
        "dtypes": dict(sorted(Counter(item.problem.dtype for item in data).items())),
    }


def _composition_of_others(others: Sequence[ProblemData]) -> dict[str, Any]:
    return {
        "problems": len(others),
        "devices": dict(sorted(Counter(item.device.name for item in others).items())),
        "measurements": sum(len(item.table) + len(item.failed) for item in others),
    }


def _decide(
    models_dir: Path, results: held.HeldOut | None, trained_on: int, device: Device, operation: str
) -> Decision:
    if results is None:
        return Decision(
            False,
            "All problems have one shape, so nothing can be held out and the model cannot be judged."
            if trained_on
            else f"No problem was measured on {device.name}, so the model cannot be judged. Promote it by hand to use it.",
        )
    folder = registry.operation_folder(models_dir, device, operation)
    try:
        alias = None if folder is None else read_alias(folder)
    except ArtifactError as error:
        return Decision(False, f"{error} Promote a model by hand to mend it.")
    standing = None if folder is None or alias is None else standing_of(folder / alias.version, results)
    return judge(
        results.scores(),
        {name: results.scores(name) for name in results.baselines()},
        constant=results.constant,
        problems=len(results.cases),
        trained_on=trained_on,
        standing=standing,
    )


def standing_of(champion: Path, results: held.HeldOut) -> Standing | None:
    """How the champion does on held-out problems, where that can be told fairly.

    The champion was fitted on all of its data, so it is judged on a problem only if it did not see the shape, by its
    predictions; or if that problem, with the same measurements, was held out in its own training, by the efficiencies
    noted then. Problems that it cannot predict are left out.

    Returns:
        None where the champion is gone: then nothing stands. Of one that is broken, or that an earlier kernelcast wrote,
        what is wrong with it.
    """
    if not champion.is_dir():
        return None
    try:
        manifest = read_manifest(champion)
        check_facts(champion, manifest)
        model = RankingModel.load(champion)
    except EarlierLayoutError:
        return Standing(champion.name, 0, unusable="is of an earlier layout")
    except ArtifactError:
        return Standing(champion.name, 0, unusable="is broken")
    trained_on = manifest["facts"]["problems"]
    try:
        record = held.read_record(champion, manifest)
    except ArtifactError:
        return Standing(champion.name, trained_on)
    noted_curves = record["curves_with_default"].get("model", [])
    noted = {item["evidence"]: curve for item, curve in zip(record["problems"], noted_curves, strict=True)}
    seen = set(record["trained_shapes"])
    rows, curves = [], []
    for row, case in enumerate(results.cases):
        if results.evidence[row] in noted:
            curve = np.asarray(noted[results.evidence[row]], dtype=np.float64)
        elif held.shape_hash(case.problem) in seen:
            continue
        else:
            try:
                curve = held.curve_of(model, case)
            except ModelError:
                continue
        rows.append(row)
        curves.append(curve)
    if not rows:
        return Standing(champion.name, trained_on)
    theirs: Scores = held.scores_of(np.array(curves))
    return Standing(champion.name, trained_on, len(rows), theirs, results.scores(rows=rows))


def _track(path: Path, results: held.HeldOut | None, decision: Decision, started: float) -> Tracked:
    manifest = read_manifest(path)
    facts = manifest["facts"]
    operation, device, name = facts["operation"], facts["device"]["name"], path.name
    metrics = {
        f"dataset_{key}": float(facts[key]) for key in ("problems", "shapes", "measurements", "failures")
    }
    if results is not None:
        metrics |= _metrics(facts["held_out"]["rankers"])
        metrics["held_out_problems"] = float(len(results.cases))
    metrics["promoted"] = float(decision.promoted)
    composition = {
        **{f"workload_{key or 'none'}": count for key, count in facts["workloads"].items()},
        **{f"dtype_{key}": count for key, count in facts["dtypes"].items()},
    }
    with ExitStack() as stack:
        files = [TrackedFile(str(path), "model")]
        warning = ""
        try:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="kernelcast-")))
            files += _plots(path, folder)
        except Exception as error:  # noqa: BLE001 - a plot that cannot be drawn must not end a training
            warning = f"No plots were kept with the run ({type(error).__name__}: {error})."
            _log.warning(warning)
        tracked = track(
            Run(
                experiment=f"kernelcast/{operation}",
                name=f"{device} {name}",
                parameters={
                    **{f"estimator.{key}": value for key, value in facts["hyperparameters"].items()},
                    "seed": facts["seed"],
                    "dataset_hash": facts["dataset_hash"],
                    "held_out": facts["held_out"].get("how", "nothing"),
                    "schema_hash": manifest["schema_hash"],
                    **composition,
                },
                metrics=metrics,
                tags={
                    "device": device,
                    "operation": operation,
                    "version": name,
                    "kernelcast_version": facts["kernelcast_version"],
                    "promoted": str(decision.promoted).lower(),
                    "gate": decision.reason,
                    **{f"library.{key}": value for key, value in facts["libraries"].items()},
                },
                files=tuple(files),
                start_s=started,
                end_s=time.time(),
                registration=Registration(path.parent.parent.name, operation, name, decision.promoted),
            )
        )
    return (
        tracked
        if not warning
        else Tracked(tracked.run_id, tracked.spooled, f"{tracked.warning} {warning}".strip())
    )


def _metrics(rankers: Mapping[str, Any]) -> dict[str, float]:
    """Held-out efficiencies by name: ``efficiency_at_3_with_default``, ``baseline_random_efficiency_at_1``, ..."""
    found = {}
    for ranker, kinds in rankers.items():
        prefix = "" if ranker == "model" else f"baseline_{ranker}_"
        for kind, suffix in (("with_default", "_with_default"), ("without_default", "")):
            for k in KS:
                values = kinds[kind][str(k)]
                found[f"{prefix}efficiency_at_{k}{suffix}"] = values["geomean"]
                if ranker == "model":
                    found[f"efficiency_p5_at_{k}{suffix}"] = values["p5"]
                    found[f"efficiency_worst_at_{k}{suffix}"] = values["worst"]
    return found


def _plots(path: Path, folder: Path) -> list[TrackedFile]:
    from kernelcast.training.report import write_report
    from kernelcast.training.report_plots import plots_of

    manifest = read_manifest(path)
    record = held.read_record(path, manifest)
    files = []
    for name, svg in plots_of(record).items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
        files.append(TrackedFile(str(folder / f"{name}.svg"), "plots"))
    write_report(folder / "report.html", [registry.model_at(path)])
    files.append(TrackedFile(str(folder / "report.html")))
    return files


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
