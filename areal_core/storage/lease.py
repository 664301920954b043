"""The lease of a run: names the one launcher that runs it, with an increasing fencing number.

The lease is one object, `lease.json` in the run's store, and changes only by compare-and-swap
(`Storage.put_if_unchanged`). If two launchers take the lease at once, exactly one succeeds, and no number is issued
twice. The number is part of the name of every object that a launcher writes. So a launcher that was suspended and
resumes too late touches no object of its successor (storage/checkpoint.py).

The holder renews its lease. A waiting launcher measures time by its own clock. If it sees no renewal for `ttl_s`, the
holder counts as dead. A holder that resumes later finds a new holder, and exits. Clocks of two machines are never
compared.

A malformed object counts as a lease that is not being renewed. A live holder overwrites it.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from areal_core.errors import ProcessError, StorageError
from areal_core.storage.objects import ChangedError, MissingError, Storage

logger = logging.getLogger(__name__)
NAME = "lease.json"
_POLL_S = 0.2  # between two reads while waiting for a lease
_MOST = 10**9 - 1  # a number has at most nine digits


class LeaseLostError(ProcessError):
    """Another launcher has taken over the run."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of lease.json."""

    number: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
    holder: str  # unique per launcher
    where: str  # machine and folder, in which only one launcher is alive
    held: bool = True  # false: released
    beat: int = 0  # number of renewals
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0  # its holder is dead without a renewal for so long


class Lease:
    """The lease of one run, from the view of one launcher. Call `acquire` first; not thread-safe."""

    def __init__(
        self,
        storage: Storage,
        where: str,
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`storage` is the run's. `where` names the folder whose lock the caller holds.
        So an earlier holder with the same `where` is dead."""
        self._object = CasObject(storage, NAME)
        self._url = storage.url
        self._where = where
        self._ttl_s = ttl_s
        self._clock, self._sleep = clock, sleep
        self._holder = f"{socket.gethostname()}-{secrets.token_hex(8)}"
        self._claim: Claim | None = None
        self._etag: str | None = None  # of the object that this launcher wrote last

    @property
    def number(self) -> int:
        """The fencing number: higher than that of every earlier launcher of the run."""
        assert self._claim is not None, "acquire first"
        return self._claim.number

    @property
    def renewal_s(self) -> float:
        """Interval between two renewals, in seconds."""
        return self._ttl_s / 6

    def acquire(self, *, above: Callable[[], int] = lambda: 0) -> int:
        """Take the lease and return its fencing number. Raises ProcessError for a running run, StorageError.
        The number is also above `above()`, the highest number in the store's names. Waits for a renewal by the present
        holder, for its `ttl_s` or this launcher's, whichever is longer. Without a renewal the holder is dead."""
        seen, since = None, 0.0
        while True:
            found, etag = _read(self._object)
            if seen is None or seen != (found, etag):
                if seen is not None and found is not None and found.held and _follows(seen[0], found):
                    raise ProcessError(
                        f"run_id: the run is already running, on {found.where}; wait for its end or choose another"
                    )
                seen, since = (found, etag), self._clock()
            patience_s = max(self._ttl_s, found.ttl_s if found else 0.0)
            if self._is_free(found, etag) or self._clock() - since >= patience_s:
                number = 1 + max(above(), found.number if found else 0)
                if number > _MOST:
                    raise StorageError(f"{self._url}: its number would exceed {_MOST}; use another run id")
                if self._write(Claim(number=number, holder=self._holder, where=self._where, ttl_s=self._ttl_s), etag):
                    return number
            else:
                self._sleep(_POLL_S)

    def renew(self) -> None:
        """Renew the lease. Raises LeaseLostError if another launcher has taken over, and StorageError."""
        assert self._claim is not None, "acquire first"
        self._change(msgspec.structs.replace(self._claim, beat=self._claim.beat + 1))

    def release(self) -> None:
        """Release the lease, so that the next launcher need not wait. Does nothing if another one holds it."""
        assert self._claim is not None, "acquire first"
        try:
            self._change(msgspec.structs.replace(self._claim, held=False))
        except LeaseLostError as error:
            logger.info("%s", error)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_free(self, found: Claim | None, etag: str | None) -> bool:
        """Whether the lease can be taken at once."""
        if found is None:
            return etag is None
        return not found.held or found.where == self._where

    def _change(self, claim: Claim) -> None:
        if not self._write(claim, self._etag):
            raise _lost_to(_read(self._object)[0])

    def _write(self, claim: Claim, etag: str | None) -> bool:
        put = self._object.write(msgspec.json.encode(claim), etag, self._is_ours)
        if put is not None:
            self._claim, self._etag = claim, put
        return put is not None

    def _is_ours(self, data: bytes | None) -> bool:
        """Whether the holder of the lease may overwrite the object: its own one, or one that is not a lease."""
        found = _claim_of(data)
        return self._claim is not None and (found is None or found.holder == self._holder)


def check(storage: Storage, number: int) -> None:
    """Raise LeaseLostError if a later launcher has had the run; call before replacing any object."""
    found = _read(CasObject(storage, NAME))[0]
    if found is not None and found.number > number:
        raise _lost_to(found)


def held_s(storage: Storage) -> float:
    """Time after its last renewal for which the present holder may be alive; 0.0 without a holder."""
    found = _read(CasObject(storage, NAME))[0]
    return found.ttl_s if found is not None and found.held else 0.0


def _read(stored: CasObject) -> tuple[Claim | None, str | None]:
    """The claim, or None if invalid or missing, and the ETag of its object, or None if missing."""
    data, etag = stored.read()
    return _claim_of(data), etag


def _claim_of(data: bytes | None) -> Claim | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=Claim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("%s is not a valid lease: %s", NAME, error)
        return None


def _follows(before: Claim | None, found: Claim) -> bool:
    """Whether the waiting launcher has seen another one renew or take the lease."""
    return before is None or found.holder != before.holder or found.beat > before.beat


def _lost_to(claim: Claim | None) -> LeaseLostError:
    where = f", on {claim.where}" if claim else ""
    return LeaseLostError(f"run_id: another launcher has taken over the run{where}")


class CasObject:
    """One object of a store, read and replaced by compare-and-swap. Raises StorageError."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name

    def read(self) -> tuple[bytes | None, str | None]:
        """The contents and the ETag for `write`; (None, None) if the object is missing."""
        try:
            return self._storage.get_with_etag(self._name)
        except MissingError:
            return None, None

    def write(self, data: bytes, etag: str | None, is_own: Callable[[bytes | None], bool]) -> str | None:
        """Replace the object with this `etag` (None: no object) by `data`; None if another writer was faster.
        Returns the new ETag otherwise. The response to an earlier write may have been lost. So `is_own` decides whether
        this writer may overwrite the object found (None: no object)."""
        while True:
            try:
                return self._storage.put_if_unchanged(self._name, data, etag)
            except ChangedError:
                found, etag = self.read()
                if found == data:
                    return etag
                if not is_own(found):
                    return None
