"""Consistent snapshots of a run in its store: `checkpoints/step-000010/...` with `manifest.json` put last.

A checkpoint exists once its manifest does. The manifest holds size and hash of every file, so a snapshot that was cut
short at any point is never taken for one; one whose files turn out to be others is set aside, and an older one taken.
Files only: no torch, and nothing about what the files mean.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.errors import StorageError
from areal_core.storage.objects import DamagedError, Storage
from areal_core.types import FORMAT

STATE = "state.safetensors"  # the training engine's arrays
LEDGER = "ledger.sqlite"  # the controller's snapshot
VERSION = "version_sha256"  # in a manifest's `extra`: the hash of the version that its state makes
_ROOT = "checkpoints"
_MANIFEST = "manifest.json"
_SET_ASIDE = "manifest.damaged.json"
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")  # of a file, below the checkpoint's folder and nowhere else
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What a manifest says of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint."""

    step: int
    folder: str  # name in the run's store
    files: dict[str, FileEntry]  # by name below `folder`
    extra: dict[str, Any]  # what `save` was given


def folder_name(step: int) -> str:
    """Where the checkpoint of `step` lives in the run's store; other processes may put files of it there before."""
    return f"{_ROOT}/step-{step:06d}"


def save(
    storage: Storage,
    step: int,
    files: Mapping[str, Path],
    extra: Mapping[str, Any],
    uploaded: Mapping[str, FileEntry] | None = None,
) -> None:
    """Upload `files` (name in the checkpoint -> local file) and commit the checkpoint of `step`.

    `uploaded` are files that another process has put into the folder already; the manifest vouches for them too.
    Raises StorageError, and then the checkpoint does not exist.
    """
    target = storage.child(folder_name(step))
    target.delete(_MANIFEST)
    entries = dict(uploaded or {})
    for name, path in files.items():
        entries[name] = describe(path)
        target.put_file(path, name)
    problem = _problem(entries, target.sizes())
    if problem:
        raise StorageError(f"checkpoint {target.url} is not committed: {problem}")
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {name: dataclasses.asdict(entry) for name, entry in entries.items()},
        "extra": dict(extra),
    }
    target.put_bytes(_MANIFEST, json.dumps(manifest, indent=2, sort_keys=True).encode())


def describe(path: Path) -> FileEntry:
    """Size and hash of a local file. Raises StorageError when it can't be read."""
    try:
        with path.open("rb") as file:
            return FileEntry(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}") from error


def newest(storage: Storage) -> CheckpointInfo | None:
    """The complete checkpoint of the highest step; broken ones are skipped with a line in the log. Raises StorageError
    for one of another format."""
    return next(_complete(storage), None)


def fetch(storage: Storage, info: CheckpointInfo, folder: Path) -> dict[str, Path]:
    """Download a checkpoint's files to `folder`. Raises DamagedError when one is not what the manifest says."""
    source = storage.child(info.folder)
    files: dict[str, Path] = {}
    for name, entry in info.files.items():
        files[name] = folder / name
        source.get_file(name, files[name])
        found = describe(files[name])
        if found != entry:
            raise DamagedError(
                f"checkpoint {source.url}/{name} is damaged: {found.bytes} bytes with sha256 {found.sha256}, "
                f"its manifest says {entry.bytes} bytes with {entry.sha256}"
            )
    return files


def fetch_newest(
    storage: Storage, folder: Path, *, last: int | None = None
) -> tuple[CheckpointInfo, dict[str, Path]] | None:
    """Download the newest checkpoint whose files are what its manifest says, of step `last` at most; None where there
    is none. Those that are found to be damaged are set aside, with a line in the log: nobody takes them again."""
    for info in _complete(storage):
        if last is not None and info.step > last:
            continue
        try:
            return info, fetch(storage, info, folder)
        except DamagedError as error:
            _log.warning("%s; it is set aside, and an older one is taken", error)
            at = storage.child(info.folder)
            at.put_bytes(_SET_ASIDE, at.get_bytes(_MANIFEST))
            at.delete(_MANIFEST)
    return None


def at_step(storage: Storage, step: int) -> CheckpointInfo:
    """The complete checkpoint of a step. Raises StorageError when there is none."""
    for info in _complete(storage):
        if info.step == step:
            return info
    raise StorageError(f"{storage.url}/{folder_name(step)}: there is no complete checkpoint")


def prune(storage: Storage, keep: int) -> int:
    """Delete all but the newest `keep` complete checkpoints, and the broken ones older than the newest complete one.

    A broken one that is newer may be on its way to completion and stays. Returns the step of the oldest complete one
    that is left; 0 if there is none.
    """
    complete = [info.step for info in _complete(storage)]
    kept = set(complete[:keep])
    for step in _steps(storage.sizes(_ROOT)):
        if complete and step < complete[0] and step not in kept:
            storage.delete(f"{folder_name(step)}/{_MANIFEST}")  # first: half a checkpoint must not look like one
            storage.delete(folder_name(step))
    return min(kept, default=0)


def _complete(storage: Storage) -> Iterator[CheckpointInfo]:
    """Complete checkpoints, the newest first."""
    sizes = storage.sizes(_ROOT)
    for step in _steps(sizes):
        folder = folder_name(step)
        present = {
            name.removeprefix(f"{folder}/"): size for name, size in sizes.items() if name.startswith(f"{folder}/")
        }
        if _MANIFEST not in present:
            _log.warning("skipping checkpoint %s/%s: it has no manifest", storage.url, folder)
            continue
        try:
            info = _read_manifest(storage, folder)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("skipping checkpoint %s/%s: its manifest is broken: %r", storage.url, folder, error)
            continue
        problem = _problem(info.files, present)
        if problem:
            _log.warning("skipping checkpoint %s/%s: %s", storage.url, folder, problem)
            continue
        yield info


def _steps(sizes: Mapping[str, int]) -> list[int]:
    """Steps that have a folder, the highest first."""
    folders = {name.split("/")[1] for name in sizes}
    digits = (folder.removeprefix("step-") for folder in folders if folder.startswith("step-"))
    return sorted((int(number) for number in digits if number.isdigit()), reverse=True)


def _read_manifest(storage: Storage, folder: str) -> CheckpointInfo:
    manifest = json.loads(storage.get_bytes(f"{folder}/{_MANIFEST}"))
    files = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
    if unsafe := [name for name in files if not _NAME.fullmatch(name) or ".." in name.split("/")]:
        raise ValueError(f"{unsafe[0]!r} is no name of a file of a checkpoint")
    info = CheckpointInfo(step=int(manifest["step"]), folder=folder, files=files, extra=manifest["extra"])
    if (found := manifest.get("format", 1)) != FORMAT:
        raise StorageError(
            f"{storage.url}/{folder}: a checkpoint of format {found}, needed is {FORMAT}; "
            "start the run under another id"
        )
    return info


def _problem(entries: Mapping[str, FileEntry], present: Mapping[str, int]) -> str | None:
    """What keeps a checkpoint from being complete, if anything."""
    for name, entry in entries.items():
        if name not in present:
            return f"{name} is missing"
        if present[name] != entry.bytes:
            return f"{name} has {present[name]} bytes, not {entry.bytes}"
    return None
