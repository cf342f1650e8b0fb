"""Tracking: each training is an MLflow run, and no training ever fails because of it.

What cannot be uploaded is kept under ``<home>/spool`` and uploaded later by :func:`sync`::

    spool/<run>.json      parameters, metrics, tags, and which file goes where
    spool/<run>/          copies of the files

The tracking server is :func:`kernelcast.settings.tracking_uri`: a sqlite file under the home unless the environment
names another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelcast import settings
from kernelcast.datasets.journal import write_durably
from kernelcast.errors import MissingExtraError, StoreError
from kernelcast.training import mlflow_registry
from kernelcast.training.mlflow_registry import Registration

_log = logging.getLogger("kernelcast.tracking")

#: Names a run in the spool and on the server, so that an upload that was cut off is continued, not repeated.
RUN_TAG = "kernelcast.run"

#: MLflow alone would try an unreachable server for four minutes. Used where the environment does not say otherwise.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
#: Limits of one call of MLflow's interface, and of one parameter's text.
_PARAMETERS_A_CALL = 100
_METRICS_A_CALL = 1000
_PARAMETER_LENGTH = 6000


@dataclass(frozen=True)
class TrackedFile:
    """A file or folder to keep with a run: ``path`` here, ``folder`` among the run's artifacts (empty: the root)."""

    path: str
    folder: str = ""


@dataclass(frozen=True)
class Run:
    """What is known of one training.

    Attributes:
        experiment: such as ``"kernelcast/gemm"``.
        name: device and version.
        parameters: hyperparameters, seed, counts, dataset hash; any value with a text.
        metrics: held-out scores; values that are not finite are left out.
        tags: free texts.
        files: the artifact's folder, plots.
        start_s: seconds since the epoch.
        end_s: seconds since the epoch.
        registration: under which name to register the model, whose folder is the first of the files; None does not.
        id: 32 hexadecimal digits.
    """

    experiment: str
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    files: tuple[TrackedFile, ...] = ()
    start_s: float = field(default_factory=time.time)
    end_s: float = field(default_factory=time.time)
    registration: Registration | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Tracked:
    """Where a run went: to the server as ``run_id``, or into the spool as ``spooled``; neither if both failed."""

    run_id: str | None = None
    spooled: Path | None = None
    warning: str = ""


@dataclass(frozen=True)
class Synced:
    """What :func:`sync` did: (run, run id on the server) of the uploaded, (run, why not) of those still waiting."""

    uploaded: tuple[tuple[str, str], ...]
    waiting: tuple[tuple[str, str], ...]


def track(run: Run) -> Tracked:
    """Upload a run, or keep it for later with a warning. Never raises."""
    try:
        return Tracked(run_id=upload(run))
    except Exception as error:  # noqa: BLE001 - whatever a server does, the model has been trained
        reason = _first_line(error)
    try:
        spooled = _spool(run)
    except Exception as error:  # noqa: BLE001
        warning = (
            f"The run was not tracked ({reason}) and could not be kept for later ({_first_line(error)})."
        )
        _log.warning(warning)
        return Tracked(warning=warning)
    warning = f"The run was not tracked ({reason}). It is kept in {spooled}; upload it later with: kernelcast models sync"
    _log.warning(warning)
    return Tracked(spooled=spooled, warning=warning)


def upload(run: Run) -> str:
    """Upload a run to the tracking server; one that was uploaded in part is completed.

    Returns:
        The run's id on the server.

    Raises:
        MissingExtraError: MLflow is not installed.
        Exception: whatever MLflow raises where the server cannot be reached or refuses.
    """
    # Read when mlflow is imported: nothing is reported to its makers.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = settings.tracking_uri()
    with _environment(_PATIENCE), _creation_lock(uri):
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise MissingExtraError("mlflow", "train", "Tracking") from error
        # The first use of a database tells of every migration step.
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=uri)
        experiment = _experiment(client, run.experiment, uri)
        found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        if found:
            run_id = found[0].info.run_id
        else:
            created = client.create_run(
                experiment,
                start_time=int(run.start_s * 1000),
                run_name=run.name,
                tags={**run.tags, RUN_TAG: run.id},
            )
            run_id = created.info.run_id
        at = int(run.end_s * 1000)
        metrics = [Metric(name, float(v), at, 0) for name, v in run.metrics.items() if math.isfinite(v)]
        parameters = [Param(name, str(value)[:_PARAMETER_LENGTH]) for name, value in run.parameters.items()]
        for first in range(0, len(parameters), _PARAMETERS_A_CALL):
            client.log_batch(run_id, params=parameters[first : first + _PARAMETERS_A_CALL])
        for first in range(0, len(metrics), _METRICS_A_CALL):
            client.log_batch(run_id, metrics=metrics[first : first + _METRICS_A_CALL])
        for file in run.files:
            send = client.log_artifacts if Path(file.path).is_dir() else client.log_artifact
            send(run_id, file.path, file.folder or None)
        if run.registration is not None:
            mlflow_registry.register(client, run_id, Path(run.files[0].path), run.registration)
        client.set_terminated(run_id, "FINISHED", end_time=at)
    return run_id


def follow(device: str, operation: str, version: str) -> str:
    """Move the tracking server's alias ``champion`` to a version that was promoted by hand. Never raises.

    Returns:
        Why it was not moved, else empty. That nothing was ever tracked is no reason to complain.
    """
    uri = settings.tracking_uri()
    if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).is_file():
        return ""
    try:
        with _environment(_PATIENCE), _creation_lock(uri):
            mlflow_registry.set_champion(device, operation, version)
    except Exception as error:  # noqa: BLE001 - the registry on disk, which selections read, has been changed
        return f"The alias {mlflow_registry.CHAMPION} at {uri} was not moved ({_first_line(error)})."
    return ""


def sync() -> Synced:
    """Upload every run that waits in the spool, the oldest first; what is uploaded leaves the spool."""
    uploaded, waiting = [], []
    for path in spooled_runs():
        try:
            run_id = upload(_read_spooled(path))
        except Exception as error:  # noqa: BLE001 - one run's failure must not keep back the others
            waiting.append((path.stem, _first_line(error)))
            continue
        uploaded.append((path.stem, run_id))
        path.unlink(missing_ok=True)
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    return Synced(tuple(uploaded), tuple(waiting))


def spooled_runs() -> list[Path]:
    """The description of each run that waits, the oldest first."""
    return sorted(_spool_dir().glob("*.json"), key=lambda path: (path.stat().st_mtime, path.name))


def _spool(run: Run) -> Path:
    folder = _spool_dir() / run.id
    folder.mkdir(parents=True)
    kept = []
    for number, file in enumerate(run.files):
        source = Path(file.path)
        # A folder of its own for each: two files may have one name.
        target = folder / str(number) / source.name
        target.parent.mkdir()
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
        kept.append({"path": str(target.relative_to(folder)), "folder": file.folder})
    metrics = {name: value for name, value in run.metrics.items() if math.isfinite(value)}
    parameters = {name: str(value) for name, value in run.parameters.items()}
    data = {
        **asdict(run),
        "tags": dict(run.tags),
        "metrics": metrics,
        "parameters": parameters,
        "files": kept,
    }
    path = folder.with_suffix(".json")
    # Written last: a run without its description is not one that waits.
    write_durably(path, json.dumps(data, indent=1) + "\n")
    return path


def _read_spooled(path: Path) -> Run:
    try:
        data = json.loads(path.read_bytes())
        folder = path.with_suffix("")
        files = tuple(TrackedFile(str(folder / file["path"]), file["folder"]) for file in data.pop("files"))
        registration = data.pop("registration", None)
        return Run(
            **data, files=files, registration=None if registration is None else Registration(**registration)
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is not a run that waits to be tracked ({type(error).__name__}: {error})."
        ) from error


def _spool_dir() -> Path:
    return settings.home() / "spool"


def _experiment(client: Any, name: str, uri: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        # Without a location, a database keeps artifacts in the working directory. A server has its own place.
        location = (settings.home() / "mlartifacts").absolute().as_uri() if _is_database(uri) else None
        try:
            return client.create_experiment(name, artifact_location=location)
        except Exception:
            # Another process may have created it just now.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def _is_database(uri: str) -> bool:
    return uri.split(":", 1)[0].split("+", 1)[0] in ("sqlite", "postgresql", "mysql", "mssql")


@contextlib.contextmanager
def _creation_lock(uri: str) -> Iterator[None]:
    """One writer at a time for a sqlite file: two that create its tables at once break each other."""
    if not uri.startswith("sqlite:"):
        yield
        return
    from filelock import FileLock

    settings.home().mkdir(parents=True, exist_ok=True)
    with FileLock(settings.home() / ".mlflow.lock", timeout=120):
        _set_unfinished_aside(uri)
        yield


def _set_unfinished_aside(uri: str) -> None:
    """Rename a sqlite file whose creation was cut short: it has tables, but no schema version, and no run yet.

    MLflow would try to create the same tables again, and fail for ever. Called under the creation lock.
    """
    import sqlite3

    path = Path(uri.removeprefix("sqlite:///"))
    if not path.is_file():
        return
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            tables = {
                name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            stamped = (
                "alembic_version" in tables and database.execute("SELECT 1 FROM alembic_version").fetchone()
            )
            used = "runs" in tables and database.execute("SELECT 1 FROM runs LIMIT 1").fetchone()
    except sqlite3.Error:
        return  # MLflow says what is wrong with it
    if tables and not stamped and not used:
        aside = path.with_name(f"{path.name}.unfinished-{time.time_ns()}")
        path.replace(aside)
        _log.warning("The tracking database %s was never finished; it is now %s.", path, aside)


@contextlib.contextmanager
def _environment(defaults: Mapping[str, str]) -> Iterator[None]:
    """Variables that are set for a while, where they are not set already."""
    missing = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
