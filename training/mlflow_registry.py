"""MLflow's model registry: each trained model under the name of its device and operation, with a signature.

The registry that selections read is :mod:`kernelcast.training.registry`, on disk. This one is for people and for other tools:
the alias ``champion`` of a name is the version that stands there.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelcast import settings
from kernelcast.errors import MissingExtraError

#: The alias of the version that stands.
CHAMPION = "champion"
#: Where the served model lies among a run's artifacts.
ARTIFACT = "served_model"
#: A tag of a version: that of kernelcast's own registry.
VERSION_TAG = "kernelcast.version"

_CODE = Path(__file__).with_name("mlflow_code.py")


@dataclass(frozen=True)
class Registration:
    """What to register of a run.

    Attributes:
        device: name of the device's folder in the registry on disk.
        operation: what the model ranks.
        version: of the registry on disk, such as ``"0001-3f2a9c1b"``.
        champion: whether the gate promoted it.
    """

    device: str
    operation: str
    version: str
    champion: bool

    @property
    def name(self) -> str:
        """The registered model's name: one for each device and operation."""
        return model_name(self.device, self.operation)


def model_name(device: str, operation: str) -> str:
    """Such as ``"kernelcast.a100-sxm4-80gb.gemm"``."""
    return f"kernelcast.{device}.{operation}"


def register(client: Any, run_id: str, folder: Path, registration: Registration) -> str:
    """Add an artifact to a run as a model with a signature, and register it. Doing it again changes nothing.

    Args:
        client: an ``MlflowClient``.
        run_id: the run.
        folder: the artifact.
        registration: under which name.

    Returns:
        The version in MLflow's registry.
    """
    from mlflow.exceptions import MlflowException

    name = registration.name
    with contextlib.suppress(MlflowException):  # it is there already
        client.create_registered_model(name)
    known = [each for each in client.search_model_versions(f"name = '{name}'") if each.run_id == run_id]
    if known:
        version = str(known[0].version)
    else:
        with _served(folder) as model:
            client.log_artifacts(run_id, str(model), ARTIFACT)
        source = f"{client.get_run(run_id).info.artifact_uri}/{ARTIFACT}"
        made = client.create_model_version(
            name, source, run_id=run_id, tags={VERSION_TAG: registration.version}
        )
        version = str(made.version)
    if registration.champion:
        client.set_registered_model_alias(name, CHAMPION, version)
    return version


def set_champion(device: str, operation: str, version: str) -> bool:
    """Move the alias to a version of the registry on disk. Returns whether the tracking server knows that version.

    Raises:
        Exception: whatever MLflow raises where the server cannot be reached.
    """
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=settings.tracking_uri())
    name = model_name(device, operation)
    for each in client.search_model_versions(f"name = '{name}'"):
        if each.tags.get(VERSION_TAG) == version:
            client.set_registered_model_alias(name, CHAMPION, each.version)
            return True
    return False


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[Path]:
    """The artifact as an MLflow model, in a folder for a while."""
    try:
        import pandas as pd  # noqa: F401  # without it MLflow has no signatures, and does not say why
    except ImportError as error:
        raise MissingExtraError("pandas", "train", "Registering a model with MLflow") from error
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema

    signature = ModelSignature(
        inputs=Schema([ColSpec("string", "problem"), ColSpec("string", "candidate")]),
        outputs=Schema([ColSpec("double", "log_latency"), ColSpec("double", "error_log")]),
    )
    with tempfile.TemporaryDirectory(prefix="kernelcast-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow would like an example of the input beside the signature
        path = Path(scratch) / "model"
        mlflow.pyfunc.save_model(
            str(path),
            python_model=str(_CODE),
            artifacts={"kernelcast": str(folder)},
            signature=signature,
            # Named, not found out: MLflow would load the model in a process of its own to see what it imports.
            pip_requirements=["kernelcast", "pandas", "mlflow"],
        )
        yield path
