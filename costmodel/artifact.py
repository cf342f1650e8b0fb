"""The artifact on disk: a folder with the trees in xgboost's JSON, the same as arrays, and a manifest with digests.

::

    manifest.json      operation, feature schema, facts of the training, SHA-256 of every other file, and of what
                       itself says; to be read it must be written just as here, white space included
    <head>.json        xgboost's own format: any xgboost reads it
    <head>.npz         the arrays of kernelcast.costmodel.forest, for a fast start without xgboost
    compiled.json      what the compiler made of candidates, where the features hold it

Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernelcast.costmodel.forest import Forest
from kernelcast.costmodel.heads import OTHER_HEADS, order_heads
from kernelcast.errors import ArtifactError, EarlierLayoutError

#: Version of the folder's layout. In 1 the order came from one head, which nothing here can rank by.
ARTIFACT_VERSION = 2

_MANIFEST = "manifest.json"
#: Files of a head: nothing that could lead out of the folder.
_FILE_PATTERN = re.compile(r"[A-Za-z0-9_]{1,64}\.(json|npz)")
#: A manifest or an array file beyond this is not one that this package wrote.
_MAX_FILE_BYTES = 512 * 2**20
_MAX_MANIFEST_BYTES = 16 * 2**20


def write_artifact(
    folder: Path,
    manifest: Mapping[str, Any],
    boosters: Mapping[str, bytes],
    forests: Mapping[str, Forest],
    more: Mapping[str, bytes] | None = None,
) -> None:
    """Write a folder, complete or not at all.

    Args:
        folder: where; must not exist.
        manifest: what to say of the model, in JSON values.
        boosters: each head in xgboost's JSON.
        forests: each head as arrays.
        more: further files by name.

    Raises:
        ArtifactError: the folder exists or cannot be written, or the manifest holds what is no JSON, such as NaN.
    """
    if folder.exists():
        raise ArtifactError(f"{folder} exists already; models are never overwritten.")
    files = {f"{name}.json": content for name, content in boosters.items()}
    files |= {f"{name}.npz": _npz(forest.arrays()) for name, forest in forests.items()}
    files |= more or {}
    full = {
        **manifest,
        "artifact_version": ARTIFACT_VERSION,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
    }
    try:
        full["digest"] = _digest(full)
        files[_MANIFEST] = _text(full)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"The manifest of {folder} is not plain JSON: {error}.") from error
    # A name of its own: another process may be writing the same model.
    partial = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        partial.replace(folder)
    except OSError as error:
        raise ArtifactError(f"{folder} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its digest checked.

    Raises:
        EarlierLayoutError: an earlier kernelcast wrote it.
        ArtifactError: there is none, it was changed, or it is of a newer layout.
    """
    path = folder / _MANIFEST
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{path} is larger than any manifest.")
        content = path.read_bytes()
        manifest = json.loads(content)
        manifest_version = manifest["artifact_version"]
        if type(manifest_version) is not int:
            raise TypeError(f"its layout is {manifest_version!r}")
        written = _text(manifest)
        intact = manifest.pop("digest") == _digest(manifest) and written == content
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder} is not a model: it has no {_MANIFEST}.") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ArtifactError(f"{path} is not a model's manifest ({type(error).__name__}: {error}).") from error
    if manifest_version > ARTIFACT_VERSION:
        raise ArtifactError(
            f"{folder} has layout {manifest_version}; this kernelcast reads up to {ARTIFACT_VERSION}. Upgrade kernelcast."
        )
    if not intact:
        raise ArtifactError(f"{path} was changed after it was written: its digest does not match.")
    if manifest_version < ARTIFACT_VERSION:
        raise EarlierLayoutError(
            f"{folder} was written by an earlier kernelcast (layout {manifest_version}) and cannot be used; train it again."
        )
    return manifest


def read_artifact(folder: Path) -> tuple[dict[str, Any], dict[str, Forest]]:
    """The manifest and the heads, every digest checked.

    Raises:
        ArtifactError: a file is missing, was changed, or is not what it should be.
    """
    manifest = read_manifest(folder)
    forests: dict[str, Forest] = {}
    for name, expected in _listed(folder, manifest).items():
        if not name.endswith(".npz"):
            continue  # xgboost's own form, which the run time never reads; `verify_files` checks it
        content = _read_checked(folder / name, expected)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                arrays = {
                    entry.removesuffix(".npy"): np.lib.format.read_array(
                        io.BytesIO(archive.read(entry)), allow_pickle=False
                    )
                    for entry in archive.namelist()
                }
        except Exception as error:  # zipfile, zlib and numpy raise more kinds than they document
            raise ArtifactError(
                f"{folder / name} is not an array file ({type(error).__name__}: {error})."
            ) from error
        forests[name.removesuffix(".npz")] = Forest.from_arrays(arrays)
    return manifest, forests


def read_file(folder: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """One file that a manifest lists, its digest checked.

    Raises:
        ArtifactError: it is not listed, missing, or was changed.
    """
    listed = _listed(folder, manifest)
    if name not in listed:
        raise ArtifactError(f"{folder}: the manifest does not list {name}, which the model needs.")
    return _read_checked(folder / name, listed[name])


def verify_files(folder: Path) -> None:
    """Check every file's digest, those included that only xgboost reads, and that each head is among them.

    Raises:
        ArtifactError: a file is missing or was changed.
    """
    manifest = read_manifest(folder)
    listed = _listed(folder, manifest)
    for head in (*order_heads(manifest.get("estimate")), *OTHER_HEADS):
        if f"{head}.npz" not in listed:
            raise ArtifactError(f"{folder}: The model has no head {head!r}. Train it again.")
    for name, expected in listed.items():
        _read_checked(folder / name, expected)


def _listed(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The files that a manifest lists, with their digests."""
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not listed:
        raise ArtifactError(f"{folder}: the manifest lists no files.")
    for name in listed:
        if not _FILE_PATTERN.fullmatch(name):
            raise ArtifactError(
                f"{folder}: the manifest names the file {name!r}, which is none of a model's."
            )
    return listed


def _read_checked(path: Path, expected: str) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ArtifactError(f"{path} is larger than any file of a model.")
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}.") from error
    if hashlib.sha256(content).hexdigest() != expected:
        raise ArtifactError(f"{path} was changed after it was written: its digest does not match.")
    return content


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _text(manifest: Mapping[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def _npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A zip of arrays whose bytes depend on the arrays alone (numpy's own writer stamps the time)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in sorted(arrays.items()):
            content = io.BytesIO()
            np.lib.format.write_array(content, np.asanyarray(array), allow_pickle=False)
            archive.writestr(
                zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0)), content.getvalue()
            )
    return buffer.getvalue()
