"""Policy versions in a folder: `<folder>/v000007/model.safetensors` and, last, `manifest.json`.

With `training.lora` a version is an adapter to version 0, the base model, in peft's format: `adapter_model.safetensors`
and `adapter_config.json`. The latter follows from the header of the former. A version exists once its manifest does.
The manifest holds the hash of the weights file. This module handles files only: no torch.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from areal_core.errors import StorageError, one_line
from areal_core.models import adapters
from areal_core.models.spec import stored_tensors
from areal_core.models.tensorfile import as_float32, write_tensors
from areal_core.models.verified import verified, weights_digest
from areal_core.storage import durable
from areal_core.storage.rundir import write_json
from areal_core.types import Lora, PolicyVersion

_WEIGHTS = "model.safetensors"
_MANIFEST = "manifest.json"


def base_version(model_path: str) -> PolicyVersion:
    """Version 0: the base model's own folder. Raises StorageError."""
    try:
        return PolicyVersion(version=0, path=model_path, digest=weights_digest(Path(model_path)))
    except OSError as error:
        raise StorageError(f"can't read {error.filename}: {error.strerror}") from error


def publish(
    folder: Path, version: int, tensors: Mapping[str, NDArray[Any]], *, lora: Lora | None = None
) -> PolicyVersion:
    """Write the model weights of `version`, or its adapter with `lora`, and return the version.

    `tensors` have the served dtype, with bfloat16 as uint16. Equal tensors give equal bytes and thus an equal hash.
    Publishing equal weights again changes nothing; other weights replace the version. Raises StorageError.
    """
    path = version_folder(folder, version)
    file = path / (_WEIGHTS if lora is None else adapters.ADAPTER)
    scratch = path / f".{file.name}.{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if lora is None:
            written = write_tensors(scratch, tensors)
        else:
            written = adapters.write_adapter(scratch, tensors, lora)
        if (known := _complete(path)) and known.digest == written.digest:
            os.replace(scratch, file)  # equal bytes, which also repair a damaged file
            return known
        return adopt(folder, version, written.digest, scratch, lora)
    except OSError as error:
        raise StorageError(f"can't publish version {version} in {path}: {error.strerror}") from error


def read_manifest(path: Path) -> PolicyVersion:
    """The version in the folder `path`. Raises StorageError if the version is incomplete."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        version = PolicyVersion(version=int(manifest["version"]), path=str(path), digest=str(manifest["digest"]))
        size, wanted = weights_file(path).stat().st_size, int(manifest["bytes"])
    except OSError as error:
        raise StorageError(f"{path} holds no published model weights: {error.filename}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path / _MANIFEST} is not a valid manifest of model weights: {error!r}") from error
    if size != wanted:
        raise StorageError(f"{weights_file(path)} is damaged: {size} bytes, its manifest says {wanted}")
    return version


def weights_file(path: Path) -> Path:
    """The file with a version's model weights or adapter, in its folder `path`."""
    adapter = path / adapters.ADAPTER
    return adapter if adapter.exists() else path / _WEIGHTS


def adopt(folder: Path, version: int, digest: str, scratch: Path, lora: Lora | None = None) -> PolicyVersion:
    """Move a file with this `digest` into place as the weights or (with `lora`) adapter of `version`.
    Replaces an existing version of that number. Raises OSError."""
    path, size = version_folder(folder, version), scratch.stat().st_size
    path.mkdir(parents=True, exist_ok=True)
    (path / _MANIFEST).unlink(missing_ok=True)  # the version does not exist while its weights change
    if lora is not None:
        adapters.write_adapter_config(path, lora)
    os.replace(scratch, path / (_WEIGHTS if lora is None else adapters.ADAPTER))
    write_json(path / _MANIFEST, {"version": version, "digest": digest, "bytes": size})
    return PolicyVersion(version=version, path=str(path), digest=digest)


def is_whole(version: PolicyVersion) -> bool:
    """Whether a published version exists and is undamaged. Reads the whole file."""
    path = Path(version.path)
    try:
        return _complete(path) == version and weights_digest(path) == version.digest
    except OSError:
        return False


def newest(folder: Path) -> PolicyVersion | None:
    """The highest complete version; None if there is none."""
    complete = filter(None, map(_complete, folder.glob("v*")))
    return max(complete, key=lambda version: version.version, default=None)


def load(version: PolicyVersion) -> dict[str, NDArray[Any]]:
    """The float32 tensors of a published version, by the trainer's names; float32 files are memory-mapped.
    Raises StorageError for a file that differs from the published one."""
    path = Path(version.path)
    try:
        with verified(path, version.digest):
            stored = adapters.own_names(stored_tensors(weights_file(path)))
            return {name: as_float32(tensor) for name, tensor in stored.items()}
    except (OSError, ValueError) as error:
        raise StorageError(f"version {version.version} can't be read: {one_line(error)}") from error


def release(folder: Path, versions: Iterable[int]) -> None:
    """Delete obsolete versions; ignores versions that are already deleted."""
    released = {version_folder(folder, version) for version in versions}
    for path in released.intersection(folder.iterdir()):
        (path / _MANIFEST).unlink(missing_ok=True)  # first, so that a partly deleted version has no manifest
        shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    """Sync the versions in `folder` to disk, at the end of a run, as they can't be made again.
    Raises StorageError."""
    try:
        for path in (*folder.glob("v*/*"), *folder.glob("v*"), folder):
            durable.sync(path)
    except OSError as error:
        raise StorageError(f"can't sync {error.filename or folder}: {error.strerror}") from error


def version_folder(folder: Path, version: int) -> Path:
    """The folder of a version, which may not exist."""
    return folder / f"v{version:06d}"


def _complete(path: Path) -> PolicyVersion | None:
    try:
        return read_manifest(path)
    except StorageError:
        return None
