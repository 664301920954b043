"""Checkpoints of a run in its store, each a folder whose `manifest.json` is written last.

    checkpoints/step-000010.2/...        of step 10, by the launcher with the fencing number 2 (storage/lease.py)
    payloads/2/000001-000007.bin         written once by that launcher, shared by its checkpoints

A checkpoint exists once its manifest does. The manifest holds size and hash of every file, so an interrupted checkpoint
is never used. A checkpoint with damaged files is marked, and an older one is used. If checkpoints were committed and
none is complete, the run does not start anew: that would hide the loss.

Names fence writes and deletes, because a check of the lease is outdated by the time of the write. A launcher may have
lost its run without noticing, and may continue at any point:

- Every name has the number of the launcher that wrote the object. A checkpoint refers only to objects of its own
  number. So no launcher overwrites or deletes objects that checkpoints of a later launcher need.
- A launcher deletes objects of its own number. Once it has committed a checkpoint, it also deletes the folders of
  earlier launchers that its manifest lists as superseded, except for checkpoints that it still keeps.
- Unlisted objects stay until the holder of the lease deletes the `leftovers` (`make prune`).

This module handles files only: it needs no torch and ignores their contents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from areal_core.errors import StorageError
from areal_core.storage import durable
from areal_core.storage.objects import DamagedError, MissingError, Storage
from areal_core.types import FORMAT

WEIGHTS = "weights.safetensors"  # the policy's weights in the layout of the training engine
OPTIMIZER = "optimizer.safetensors"  # all other arrays of the training engine
PAYLOADS = "payloads"  # folder of files that checkpoints share: the training data of the ledger's groups
VERSION = "version_digest"  # in a manifest's `extra`: the hash of the policy version that the checkpoint makes
BASE = "base_digest"  # likewise: hash of the base model of an adapter; null if all weights are trained
PROMPTS = "prompts"  # likewise: digests of the run's prompts, by the setting of their file
BLOCK_BYTES = 8 * 2**20  # bytes per CRC-32, so that parts of a file can be verified alone
_ROOT = "checkpoints"
_LEDGER = "ledger-"
_MANIFEST = "manifest.json"
_SEAL = "sha256"  # in a manifest: hash of all its other fields
_SET_ASIDE = "manifest.damaged.json"
_FOLDER = re.compile(rf"{_ROOT}/step-(\d{{6,18}})\.(\d{{1,9}})/")
_OWNED = re.compile(rf"(?:{_ROOT}/step-\d{{6,18}}\.|{PAYLOADS}/)(\d{{1,9}})(?=/)")
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")  # of a file inside the checkpoint's folder
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file in a manifest: its size in bytes and its hashes."""

    bytes: int
    sha256: str
    crc32: list[int]  # one per block of BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint."""

    step: int
    number: int  # fencing number of the launcher that wrote it
    files: dict[str, FileEntry]  # by name below `folder`
    shared: dict[str, FileEntry]  # by name in the run's store
    superseded: list[str]  # folders of earlier launchers that this launcher may delete
    extra: dict[str, Any]  # the argument of `save`

    @property
    def folder(self) -> str:
        """The checkpoint's folder in the run's store."""
        return folder_name(self.step, self.number)

    @property
    def ledger(self) -> str:
        """File name of the ledger snapshot. Raises KeyError if there is none."""
        for name in self.files:
            if name.startswith(_LEDGER):
                return name
        raise KeyError(_LEDGER)


def ledger_name(unique: str) -> str:
    """File name of a ledger snapshot."""
    return f"{_LEDGER}{unique}.sqlite"


def folder_name(step: int, number: int) -> str:
    """Folder of the checkpoint of `step` in the run's store; other processes may upload files to it first."""
    return f"{_ROOT}/step-{step:06d}.{number}"


def payload_name(segment: str, number: int) -> str:
    """Name of a payload segment's file in the run's store."""
    return f"{PAYLOADS}/{number}/{segment}"


def highest_number(storage: Storage) -> int:
    """The highest fencing number in the names of a run's store; 0 for an empty store."""
    return max((number for number, _ in _owners(_sizes(storage))), default=0)


def save(
    storage: Storage,
    step: int,
    files: Mapping[str, Path],
    extra: Mapping[str, Any],
    *,
    number: int = 0,
    uploaded: Mapping[str, FileEntry] | None = None,
    shared: Mapping[str, FileEntry] | None = None,
) -> None:
    """Upload `files` (name in the checkpoint -> local file) and commit the checkpoint of `step`.

    `uploaded` are files that other processes have already put into the checkpoint's folder. `shared` are files that
    they have put elsewhere in the store. The manifest lists both. Raises StorageError, and then the checkpoint does not
    exist.
    """
    target = storage.child(folder_name(step, number))
    if {_MANIFEST, _SET_ASIDE} & target.sizes().keys():  # an earlier trainer process wrote a checkpoint of this step
        target.put_bytes(_MANIFEST, _text({"replaced": True}))  # keeps the fact that a checkpoint existed
        target.delete(_SET_ASIDE)
    entries = dict(uploaded or {})
    for name, path in files.items():
        entries[name] = describe(path)
        target.put_file(path, name)
    sizes = _sizes(storage)
    superseded = {folder for owner, folder in _owners(sizes) if owner < number}
    problem = _problem(entries, _below(sizes, folder_name(step, number))) or _problem(shared or {}, sizes)
    if problem:
        raise StorageError(f"checkpoint {target.url} is not committed: {problem}")
    parts = {"files": entries, "shared": dict(shared or {})}
    info = CheckpointInfo(step=step, number=number, **parts, superseded=sorted(superseded), extra=dict(extra))
    manifest = {"format": FORMAT, **dataclasses.asdict(info)}
    target.put_bytes(_MANIFEST, _text(manifest | {_SEAL: _seal(manifest)}))


def describe(path: Path) -> FileEntry:
    """Size and hashes of a local file. Raises StorageError if the file can't be read."""
    digest, crc32 = hashlib.sha256(), list[int]()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                crc32.append(zlib.crc32(block))
            return FileEntry(bytes=file.tell(), sha256=digest.hexdigest(), crc32=crc32)
    except OSError as error:
        raise StorageError(f"can't read {path}: {error.strerror}") from error


def newest(storage: Storage, *, last: int | None = None) -> CheckpointInfo | None:
    """The newest complete checkpoint, at most of step `last`; None if no checkpoint was ever written.
    Skips incomplete checkpoints with a log line. Raises StorageError for a checkpoint of another format, and if
    checkpoints were written and none is complete."""
    later, sizes = False, _sizes(storage)
    for info in _complete(storage, sizes):
        if last is None or info.step <= last:
            return info
        later = True
    if later:
        said = f"no checkpoint of step {last} or earlier; another launcher has written the later ones"
        raise StorageError(f"{storage.url}/{_ROOT}: {said}; resume the run from them")
    return _refuse_unless_new(storage, sizes)


def at(storage: Storage, step: int, number: int) -> CheckpointInfo:
    """The complete checkpoint of a step by one launcher. Raises StorageError if there is none."""
    for info in _complete(storage, _sizes(storage)):
        if (info.step, info.number) == (step, number):
            return info
    raise StorageError(f"{storage.url}/{folder_name(step, number)}: no complete checkpoint")


def fetch(
    storage: Storage, info: CheckpointInfo, folder: Path, names: Collection[str] | None = None
) -> dict[str, Path]:
    """Download files of a checkpoint to `folder`: all, or those in `names`.
    Raises DamagedError if a file differs from its manifest entry."""
    source = storage.child(info.folder)
    return {
        name: _fetched(source, name, folder / name, entry)
        for name, entry in info.files.items()
        if names is None or name in names
    }


def fetch_shared(storage: Storage, info: CheckpointInfo, folder: Path) -> None:
    """Download the shared files of a checkpoint to `folder`, unless present, and sync them to disk.
    Raises the same errors as `fetch`."""
    for name, entry in info.shared.items():
        file = folder / name.rpartition("/")[2]
        if not file.exists() or describe(file) != entry:
            durable.sync(_fetched(storage, name, file, entry))
            durable.sync(folder)


def newest_of(storage: Storage, fetched: Callable[[CheckpointInfo], T]) -> tuple[CheckpointInfo, T] | None:
    """The newest undamaged checkpoint, and the result of `fetched` for it; None as for `newest`.
    Sets aside each checkpoint for which `fetched` raises DamagedError. Raises the same errors as `newest`."""
    sizes = _sizes(storage)
    for info in _complete(storage, sizes):
        try:
            return info, fetched(info)
        except DamagedError as error:
            set_aside(storage, info, str(error))
    return _refuse_unless_new(storage, sizes)


def set_aside(storage: Storage, info: CheckpointInfo, reason: str) -> None:
    """Mark a checkpoint as damaged, so that it is not used again unless its launcher replaces it."""
    _log.warning("%s; the run uses an older checkpoint", reason)
    storage.child(info.folder).put_bytes(_SET_ASIDE, _text({"reason": reason}))


def prune(
    storage: Storage,
    keep: int,
    *,
    number: int = 0,
    in_use: Collection[str] = (),
) -> int:
    """Delete old checkpoints except the newest `keep` complete ones, then unreferenced shared files.

    Also deletes incomplete checkpoints older than the newest complete one. Newer incomplete ones may still be in
    progress, and stay. Shared files in `in_use` stay. Deletes only objects that the launcher with this `number` may
    delete (see above). Returns the oldest step among the newest `keep` checkpoints, or 0 if the newest checkpoint is
    not this launcher's.
    """
    complete = list(_complete(storage, _sizes(storage)))
    if not complete or complete[0].number != number:
        return 0
    own = complete[0]
    kept = {info.folder: info for info in complete[:keep]}
    for found in _folders(storage.sizes(_ROOT)):
        folder = folder_name(found[1], found[0])
        its_own = found[0] == number and found < (number, own.step)
        if (its_own or folder in own.superseded) and folder not in kept:
            storage.delete(f"{folder}/{_MANIFEST}")  # first, so that a partly deleted checkpoint has no manifest
            storage.delete(folder)
    shared = {name for info in kept.values() for name in info.shared}
    for name in storage.sizes(PAYLOADS):
        owner, folder = next(_owners([name]), (None, ""))
        if (owner == number or folder in own.superseded) and name not in shared and name not in in_use:
            storage.delete(name)
    return min(info.step for info in kept.values())


def leftovers(storage: Storage, number: int) -> dict[str, int]:
    """Objects of launchers with a number below `number` that no complete checkpoint names: bytes by name.
    Only the holder of the lease with this number may call this. Empty if no checkpoint is complete, because a damaged
    one may be the only copy left."""
    named: set[str] = set()
    for info in _complete(storage, _sizes(storage)):
        named |= {f"{info.folder}/{name}" for name in (_MANIFEST, *info.files)} | info.shared.keys()
    sizes = _sizes(storage) if named else {}
    owners = {name: owner for name in sizes for owner, _ in _owners([name])}
    return {name: sizes[name] for name, owner in owners.items() if owner < number and name not in named}


def _fetched(source: Storage, name: str, file: Path, entry: FileEntry) -> Path:
    source.get_file(name, file)
    found = describe(file)
    if found != entry:
        raise DamagedError(
            f"checkpoint {source.url}/{name} is damaged: {found.bytes} bytes with sha256 {found.sha256}, "
            f"its manifest says {entry.bytes} bytes with {entry.sha256}"
        )
    return file


def _complete(
    storage: Storage, sizes: Mapping[str, int], gone: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[CheckpointInfo]:
    """Complete checkpoints of a listing, newest first: first by fencing number, then by step.
    If a checkpoint disappears before it is read and none was yielded yet, there are newer ones by now. Then the store
    is listed again, and the checkpoints in `gone` are skipped."""
    given = False
    for number, step in _folders(sizes):
        if (number, step) in gone:
            continue
        folder = folder_name(step, number)
        present = _below(sizes, folder)
        if _MANIFEST not in present or _SET_ASIDE in present:
            why = "it is marked as damaged" if _SET_ASIDE in present else "it has no manifest"
            _log.warning("skipping checkpoint %s/%s: %s", storage.url, folder, why)
            continue
        try:
            info = _read_manifest(storage, step, number)
        except MissingError:
            if given:
                continue
            yield from _complete(storage, _sizes(storage), gone | {(number, step)})
            return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _log.warning("skipping checkpoint %s/%s: its manifest is invalid: %r", storage.url, folder, error)
            continue
        problem = _problem(info.files, present) or _problem(info.shared, sizes)
        if problem:
            _log.warning("skipping checkpoint %s/%s: %s", storage.url, folder, problem)
            continue
        given = True
        yield info


def _refuse_unless_new(storage: Storage, sizes: Mapping[str, int]) -> None:
    """Raise StorageError unless the listing shows that no checkpoint was ever written.
    Uses the listing that was searched, because a checkpoint written meanwhile would look incomplete."""
    known = {name.rpartition("/")[0] for name in sizes if name.endswith((_MANIFEST, _SET_ASIDE))}
    if not known:
        return
    raise StorageError(
        f"{storage.url}/{_ROOT}: none of {len(known)} checkpoints is complete: restore the missing files, or start the "
        "run under another id"
    )


def _below(sizes: Mapping[str, int], folder: str) -> dict[str, int]:
    """The entries inside a folder, by their names relative to the folder."""
    return {name.removeprefix(f"{folder}/"): size for name, size in sizes.items() if name.startswith(f"{folder}/")}


def _sizes(storage: Storage) -> dict[str, int]:
    """Bytes of all objects of checkpoints, by name."""
    return storage.sizes(_ROOT) | storage.sizes(PAYLOADS)


def _owners(names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """The fencing number in each name, and the folder that carries the number; skips other names."""
    for name in names:
        if match := _OWNED.match(name):
            yield int(match[1]), match[0]


def _folders(sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """(fencing number, step) of all checkpoint folders, newest first."""
    found = {_FOLDER.match(name) for name in sizes}
    return sorted({(int(match[2]), int(match[1])) for match in found if match}, reverse=True)


def _read_manifest(storage: Storage, step: int, number: int) -> CheckpointInfo:
    folder = folder_name(step, number)
    manifest = json.loads(storage.get_bytes(f"{folder}/{_MANIFEST}"))
    if manifest.pop(_SEAL, None) != _seal(manifest):
        raise ValueError("its checksum does not match")
    if (found := manifest.get("format")) != FORMAT:
        raise StorageError(
            f"{storage.url}/{folder}: the checkpoint has format {found}, must be {FORMAT}; "
            "start the run under another id"
        )
    info = msgspec.convert(manifest, CheckpointInfo)
    if unsafe := [name for name in (*info.files, *info.shared) if not _NAME.fullmatch(name) or ".." in name.split("/")]:
        raise ValueError(f"{unsafe[0]!r} is not a valid name of a checkpoint file")
    if (info.step, info.number) != (step, number):
        raise ValueError(f"it names step {info.step} and number {info.number}")
    return info


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(manifest)).hexdigest()


def _text(manifest: Mapping[str, Any]) -> bytes:
    return json.dumps(manifest, indent=2, sort_keys=True).encode()


def _problem(entries: Mapping[str, FileEntry], present: Mapping[str, int]) -> str | None:
    """The first missing file, or file of another size, as a message; None if there is none."""
    for name, entry in entries.items():
        if name not in present:
            return f"{name} is missing"
        if present[name] != entry.bytes:
            return f"{name} has {present[name]} bytes, expected {entry.bytes}"
    return None
