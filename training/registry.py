"""The registry: models on disk, numbered, with one of them standing for each device and operation.

:mod:`kernelcast.costmodel.locate` says how the folders lie. Every change happens under one lock, in an order that a
kill at any point leaves either the old state or the new.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelcast.costmodel import RankingModel, read_manifest, verify_files
from kernelcast.costmodel.locate import (
    ALIAS_FILE,
    DEVICE_FILE,
    SAFE_NAME_PATTERN,
    VERSION_PATTERN,
    Alias,
    device_folders,
    read_alias,
    same_hardware,
)
from kernelcast.datasets.journal import sync_folder, write_durably
from kernelcast.errors import (
    ArtifactError,
    EarlierLayoutError,
    ModelError,
    UnknownNameError,
)
from kernelcast.kernels import Device
from kernelcast.training import held_out
from kernelcast.training.structure import check_facts

#: Digits of the dataset's hash in a version.
_HASH_DIGITS = 8
#: What an exported model may hold; a file beyond is not one that this package wrote.
_MAX_EXPORT_FILES = 64
_MAX_EXPORT_BYTES = 1 << 30

#: Writes an artifact into a folder that does not exist yet, as :meth:`kernelcast.costmodel.RankingModel.save` does.
Save = Callable[[Path], object]


@dataclass(frozen=True)
class RegisteredModel:
    """One model of the registry.

    Attributes:
        path: the artifact's folder.
        device: name of the device's folder.
        operation: what it ranks.
        version: counter and dataset hash, such as ``"0001-3f2a9c1b"``.
        champion: whether it stands for its device and operation.
        manifest: the artifact's manifest; empty where it is broken.
        broken: what is wrong with it, else empty. What is broken cannot be used.
        outdated: whether what is wrong is that an earlier kernelcast wrote it.
        unrecorded: what is wrong with its record of held-out problems, else empty. Selections can use it all the same.
    """

    path: Path
    device: str
    operation: str
    version: str
    champion: bool
    manifest: dict[str, Any] = field(default_factory=dict, compare=False)
    broken: str = ""
    outdated: bool = False
    unrecorded: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of its training; empty where it is broken."""
        return dict(self.manifest.get("facts", {}))


@contextlib.contextmanager
def locked(models_dir: Path, *, timeout_s: float = 600.0) -> Iterator[None]:
    """Keep every other process and thread from changing the registry. Not to be entered twice.

    Raises:
        ModelError: the folder cannot be written, or another process held the lock for all of the timeout.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(models_dir / ".lock", thread_local=False)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout_s)
    except Timeout as error:
        raise ModelError(
            f"Another process has been changing {models_dir} for {timeout_s:.0f} s; wait for it to end and try again."
        ) from error
    except OSError as error:
        raise _cannot_write(models_dir, error) from error
    try:
        yield
    finally:
        lock.release()


def require_writable(models_dir: Path, device: Device, operation: str) -> None:
    """Write where models of a device and operation are added: to be called before one is fitted.

    Raises:
        ModelError: a model could not be registered.
    """
    with locked(models_dir):
        known = (_find_device_folder(models_dir, device), operation_folder(models_dir, device, operation))
        for folder in filter(None, (models_dir, *known)):
            try:
                # Without a name where the system can: whatever ends this process, nothing is left.
                with tempfile.TemporaryFile(dir=folder) as file:
                    file.write(b"\n")
                    file.flush()
            except OSError as error:
                raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"Cannot write to the models folder {folder}: {error.strerror or error}. "
        "Choose a folder that can be written with KERNELCAST_HOME."
    )


def verified(path: Path) -> dict[str, Any]:
    """The manifest of a model that is sound: every digest is right, its facts are such as a training writes, and it loads.

    Raises:
        ArtifactError: it is not.
    """
    verify_files(path)
    manifest = read_manifest(path)
    check_facts(path, manifest)
    RankingModel.load(path)
    return manifest


def register(models_dir: Path, save: Save, *, device: Device, operation: str, dataset_hash: str) -> Path:
    """Add a model under the next version. It does not stand until it is promoted.

    Returns:
        The artifact's folder.

    Raises:
        ModelError: the operation's name or the hash cannot be part of a path, or the registry is locked for long.
    """
    with locked(models_dir):
        return add(models_dir, save, device=device, operation=operation, dataset_hash=dataset_hash)


def add(models_dir: Path, save: Save, *, device: Device, operation: str, dataset_hash: str) -> Path:
    """:func:`register` for a caller that holds :func:`locked`."""
    if not SAFE_NAME_PATTERN.fullmatch(operation):
        raise ModelError(
            f"An operation called {operation!r} cannot be registered; use letters, digits, '_', '-', '.'."
        )
    digits = dataset_hash[:_HASH_DIGITS].lower()
    if not re.fullmatch(rf"[0-9a-f]{{{_HASH_DIGITS}}}", digits):
        raise ModelError(
            f"The dataset hash is {dataset_hash!r}; it must begin with {_HASH_DIGITS} hexadecimal digits."
        )
    folder = _device_folder(models_dir, device) / operation
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_next_number(folder):04d}-{digits}"
    staging = folder / f".staging-{secrets.token_hex(8)}"
    try:
        save(staging)
        staging.replace(path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    sync_folder(folder)
    return path


def operation_folder(models_dir: Path, device: Device, operation: str) -> Path | None:
    """The folder of a device's models of an operation; None where there is none."""
    folder = _find_device_folder(models_dir, device)
    return None if folder is None or not (folder / operation).is_dir() else folder / operation


def model_at(path: Path) -> RegisteredModel:
    """The registered model in a folder."""
    return next(model for model in _models_of(path.parent) if model.path == path)


def list_models(
    models_dir: Path, *, device: str | None = None, operation: str | None = None
) -> list[RegisteredModel]:
    """Every registered model, by device, operation and version; broken ones included, with what is wrong."""
    found = []
    for folder, _ in device_folders(models_dir):
        if device is not None and folder.name != device:
            continue
        for operation_folder in sorted(path for path in folder.iterdir() if path.is_dir()):
            if operation is None or operation_folder.name == operation:
                found += _models_of(operation_folder)
    return found


def find_model(
    models_dir: Path, *, device: str | None = None, operation: str | None = None, version: str | None = None
) -> RegisteredModel:
    """The one model that fits: of the version given, else the champion.

    Args:
        device: name of its folder; may be left out where only one device fits.
        operation: may be left out where only one fits.
        version: in full, or its counter alone (``"3"``).

    Raises:
        UnknownNameError: there is none; the message lists those there are.
        ModelError: several fit, or none of those that fit stands.
    """
    everything = list_models(models_dir)
    _check_known("device with models", device, {model.device for model in everything})
    _check_known("operation with models", operation, {model.operation for model in everything})
    fitting = [
        model
        for model in everything
        if device in (None, model.device)
        and operation in (None, model.operation)
        and _is_version(model, version)
    ]
    if not fitting:
        if version is None:
            where = f" of {operation} on {device}" if device and operation else ""
            raise ModelError(
                f"{models_dir} holds no champion{where}. Train one, or promote a version that is listed."
            )
        raise UnknownNameError("model version", version, [_label(model) for model in everything])
    if len(fitting) > 1:
        listed = ", ".join(_label(model) for model in fitting)
        raise ModelError(f"Several models fit: {listed}. Say which with --device, --op and a version.")
    return fitting[0]


def promote(models_dir: Path, model: RegisteredModel) -> Alias:
    """Make a model stand for its device and operation. What stood before can be had back with :func:`rollback`.

    Raises:
        ArtifactError: the model is broken; nothing was changed.
    """
    with locked(models_dir):
        return set_champion(model.path)


def set_champion(path: Path) -> Alias:
    """:func:`promote` for a caller that holds :func:`locked`, by the artifact's folder."""
    verified(path)
    try:
        standing = read_alias(path.parent)
    except ArtifactError:
        # Promoting is how a broken alias file is mended; which models stood before is lost with it.
        standing = None
    if standing is None:
        alias = Alias(path.name)
    elif standing.version == path.name:
        return standing
    else:
        alias = Alias(path.name, (*standing.previous, standing.version))
    _write_alias(path.parent, alias)
    return alias


def rollback(models_dir: Path, *, device: str, operation: str) -> Alias:
    """Let the version stand that stood before, or the one before that where its folder is gone.

    Raises:
        ModelError: nothing stood before.
        ArtifactError: the version to go back to is broken; nothing was changed.
    """
    if not SAFE_NAME_PATTERN.fullmatch(device) or not SAFE_NAME_PATTERN.fullmatch(operation):
        raise ModelError(f"{device!r} and {operation!r} do not name a device and an operation.")
    folder = models_dir / device / operation
    with locked(models_dir):
        standing = read_alias(folder)
        previous = [name for name in standing.previous if (folder / name).is_dir()] if standing else []
        if not previous:
            raise ModelError(
                f"No earlier model of {operation} on {device} has stood; there is nothing to go back to."
            )
        verified(folder / previous[-1])
        alias = Alias(previous[-1], tuple(previous[:-1]))
        _write_alias(folder, alias)
        return alias


def export(model: RegisteredModel, file: Path) -> Path:
    """Write a model as one zip file, whose bytes depend on the model alone.

    Raises:
        ArtifactError: the model or its record of held-out problems is broken.
        ModelError: the file exists.
    """
    manifest = verified(model.path)
    if file.exists():
        raise ModelError(f"{file} exists already; name another file, or remove it.")
    names = ["manifest.json", *sorted(manifest["files"])]
    if (model.path / held_out.FILE).exists():
        held_out.read_record(model.path, manifest)
        names.append(held_out.FILE)
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, (model.path / name).read_bytes())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return file


def import_(models_dir: Path, file: Path) -> RegisteredModel:
    """Add a model that :func:`export` wrote, under the next version here. It does not stand until it is promoted.

    Every digest is checked, and that this kernelcast can load it, before anything is kept.

    Raises:
        ArtifactError: the file is not an exported model, was changed, or names files outside its folder.
        ModelError: the same model is registered already; the message says how to promote it.
    """
    if not file.is_file():
        raise ArtifactError(f"{file} is not a file.")
    with locked(models_dir):
        unpacked = models_dir / f".import-{secrets.token_hex(8)}"
        try:
            _unpack(file, unpacked)
            manifest = verified(unpacked)
            if (unpacked / held_out.FILE).exists():
                held_out.read_record(unpacked, manifest)
            facts, operation = manifest["facts"], manifest["operation"]
            for model in list_models(models_dir, operation=operation):
                if model.manifest == manifest:
                    raise ModelError(
                        f"{file} is registered already: {_label(model)}. To make it the champion: kernelcast models promote "
                        f"{model.version} --op {model.operation} --device {model.device}"
                    )

            path = add(
                models_dir,
                unpacked.replace,
                device=Device.from_dict(facts["device"]),
                operation=operation,
                dataset_hash=facts["dataset_hash"],
            )
        except ArtifactError as error:
            # The folder that it was unpacked into is gone by the time that anyone reads this.
            raise type(error)(str(error).replace(str(unpacked), str(file))) from error
        finally:
            shutil.rmtree(unpacked, ignore_errors=True)
    return model_at(path)


def _unpack(file: Path, folder: Path) -> None:
    """Unpack into a new folder. Only plain files of plain names: nothing can land outside."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if (
                len(entries) > _MAX_EXPORT_FILES
                or sum(entry.file_size for entry in entries) > _MAX_EXPORT_BYTES
            ):
                raise ArtifactError(f"{file} holds more than any exported model; it was not unpacked.")
            for entry in entries:
                kind = stat.S_IFMT(entry.external_attr >> 16)
                if not SAFE_NAME_PATTERN.fullmatch(entry.filename) or kind not in (0, stat.S_IFREG):
                    raise ArtifactError(
                        f"{file} holds {entry.filename!r}, which is not a plain file of a model; it was not unpacked."
                    )
            if len({entry.filename for entry in entries}) != len(entries):
                raise ArtifactError(f"{file} holds two files of one name; it was not unpacked.")
            folder.mkdir()
            for entry in entries:
                # The sizes in the directory may lie; reading one byte more than stated finds out.
                with archive.open(entry) as source:
                    content = source.read(entry.file_size + 1)
                if len(content) != entry.file_size:
                    raise ArtifactError(f"{file}: {entry.filename} is not as long as stated.")
                (folder / entry.filename).write_bytes(content)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ArtifactError(f"{file} is not a zip file of a model ({error}).") from error


def _find_device_folder(models_dir: Path, device: Device) -> Path | None:
    for folder, recorded in device_folders(models_dir):
        # A card of another name may be the same hardware to a lookup, and still has models of its own.
        named_alike = recorded.name == device.name and same_hardware(recorded, device)
        if recorded.fingerprint == device.fingerprint or named_alike:
            return folder
    return None


def _device_folder(models_dir: Path, device: Device) -> Path:
    """The folder of a device, made where there is none."""
    found = _find_device_folder(models_dir, device)
    if found is not None:
        return found
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", device.name).strip("-.")[:80] or "device"
    folder = models_dir / slug
    if (folder / DEVICE_FILE).exists():
        # Other hardware of the same name: two machines may call themselves alike.
        folder = models_dir / f"{slug}-{device.fingerprint[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / DEVICE_FILE, json.dumps(device.to_dict(), indent=1, sort_keys=True) + "\n")
    sync_folder(models_dir)
    return folder


def _next_number(folder: Path) -> int:
    names = [path.name for path in folder.iterdir()]
    with contextlib.suppress(ArtifactError):
        # Versions that stood once count too, so that a deleted folder's number is not given again.
        alias = read_alias(folder)
        names += [alias.version, *alias.previous] if alias else []
    numbers = [int(match.group(1)) for name in names if (match := VERSION_PATTERN.fullmatch(name))]
    return max(numbers, default=0) + 1


def _models_of(folder: Path) -> list[RegisteredModel]:
    try:
        alias = read_alias(folder)
    except ArtifactError:
        # Nothing stands that can be found; the models are still there to be promoted.
        alias = None
    paths = [path for path in folder.iterdir() if path.is_dir() and VERSION_PATTERN.fullmatch(path.name)]
    return [_read(path, alias) for path in sorted(paths, key=lambda path: int(path.name.partition("-")[0]))]


def _read(path: Path, alias: Alias | None) -> RegisteredModel:
    manifest, broken, outdated, unrecorded = {}, "", False, ""
    try:
        manifest = verified(path)
    except ArtifactError as error:
        broken, outdated = str(error), isinstance(error, EarlierLayoutError)
    else:
        try:
            held_out.read_record(path, manifest)
        except ArtifactError as error:
            unrecorded = str(error)
    return RegisteredModel(
        path=path,
        device=path.parent.parent.name,
        operation=path.parent.name,
        version=path.name,
        champion=alias is not None and alias.version == path.name,
        manifest=manifest,
        broken=broken,
        outdated=outdated,
        unrecorded=unrecorded,
    )


def _write_alias(folder: Path, alias: Alias) -> None:
    text = json.dumps({"version": alias.version, "previous": list(alias.previous)}, indent=1) + "\n"
    write_durably(folder / ALIAS_FILE, text)


def _is_version(model: RegisteredModel, version: str | None) -> bool:
    if version is None:
        return model.champion
    if version.isdecimal():
        return int(version) == int(model.version.partition("-")[0])
    return version == model.version


def _check_known(kind: str, name: str | None, known: set[str]) -> None:
    if name is not None and name not in known:
        raise UnknownNameError(kind, name, sorted(known))


def _label(model: RegisteredModel) -> str:
    return f"{model.device}/{model.operation}/{model.version}"
