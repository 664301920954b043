"""The lease of a run: which launcher runs it, on whatever machine, and a fencing number that only grows.

One object, `lease.json` of the run's store, changed only by whoever has read it last (`Storage.put_over`). So of two
launchers that take the lease at once one has it, and no number is given twice. The number is part of the names of all
that a launcher writes: one that is stopped and comes back too late touches nothing of its successor's
(storage/checkpoint.py).

The holder renews its lease. One that was not renewed for `ttl_s`, by the clock of the one that looks and waits, is a
dead launcher's. One that comes back from such a silence finds another holder, and ends. Clocks of two machines are
never compared.

A malformed object counts as a lease that nobody renews. A holder that lives writes over it.
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
_LOOK_S = 0.2  # between two looks at a lease that is waited for
_MOST = 10**9 - 1  # a number has at most nine digits


class LeaseLostError(ProcessError):
    """Another launcher has taken the run over."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What the object says."""

    number: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
    holder: str  # nobody else's
    where: str  # a machine and a folder, where one launcher at a time is alive
    held: bool = True  # false: given back
    beat: int = 0  # how often it was renewed
    ttl_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 0.0  # after which without that its holder is dead


class Lease:
    """The lease of one run, as one launcher sees it. `acquire` before all else; not thread-safe."""

    def __init__(
        self,
        storage: Storage,
        where: str,
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`storage` is the run's; `where` names the one folder whose lock the caller holds: whoever had the lease there
        is dead."""
        self._object = Marked(storage, NAME)
        self._url = storage.url
        self._where = where
        self._ttl_s = ttl_s
        self._clock, self._sleep = clock, sleep
        self._holder = f"{socket.gethostname()}-{secrets.token_hex(8)}"
        self._claim: Claim | None = None
        self._mark: str | None = None  # of the object as this launcher wrote it

    @property
    def number(self) -> int:
        """The fencing number: higher than that of every launcher that had the run before."""
        assert self._claim is not None, "acquire first"
        return self._claim.number

    @property
    def renewal_s(self) -> float:
        """How often it is to be renewed."""
        return self._ttl_s / 6

    def acquire(self, *, above: Callable[[], int] = lambda: 0) -> int:
        """Take the lease; returns its number, above what `above` gives, too: the highest that the store's names show.
        Waits for a lease that is held to be renewed: its launcher is dead after its `ttl_s`, or this one's if longer.
        Raises ProcessError when another one runs the run, and StorageError."""
        seen, since = None, 0.0
        while True:
            found, mark = _read(self._object)
            if seen is None or seen != (found, mark):
                if seen is not None and found is not None and found.held and _follows(seen[0], found):
                    raise ProcessError(
                        f"run_id: the run is running already, on {found.where}; wait for its end or choose another"
                    )
                seen, since = (found, mark), self._clock()
            patience_s = max(self._ttl_s, found.ttl_s if found else 0.0)
            if self._is_free(found, mark) or self._clock() - since >= patience_s:
                number = 1 + max(above(), found.number if found else 0)
                if number > _MOST:
                    raise StorageError(f"{self._url}: its number would be above {_MOST}; use another run id")
                if self._write(Claim(number=number, holder=self._holder, where=self._where, ttl_s=self._ttl_s), mark):
                    return number
            else:
                self._sleep(_LOOK_S)

    def renew(self) -> None:
        """Say that this launcher lives. Raises LeaseLostError once another one has taken over, and StorageError."""
        assert self._claim is not None, "acquire first"
        self._change(msgspec.structs.replace(self._claim, beat=self._claim.beat + 1))

    def release(self) -> None:
        """Give it back: the next launcher need not wait. Where another one has it already, nothing is done."""
        assert self._claim is not None, "acquire first"
        try:
            self._change(msgspec.structs.replace(self._claim, held=False))
        except LeaseLostError as error:
            logger.info("%s", error)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_free(self, found: Claim | None, mark: str | None) -> bool:
        """Whether it can be had at once."""
        if found is None:
            return mark is None
        return not found.held or found.where == self._where

    def _change(self, claim: Claim) -> None:
        if not self._write(claim, self._mark):
            raise _lost_to(_read(self._object)[0])

    def _write(self, claim: Claim, mark: str | None) -> bool:
        put = self._object.write(msgspec.json.encode(claim), mark, self._is_ours)
        if put is not None:
            self._claim, self._mark = claim, put
        return put is not None

    def _is_ours(self, data: bytes | None) -> bool:
        """Whether this launcher, once it has the lease, may write over it: what it has put, and what is no lease."""
        found = _claim_of(data)
        return self._claim is not None and (found is None or found.holder == self._holder)


def check(storage: Storage, number: int) -> None:
    """Before something is replaced in the run's store: raises LeaseLostError where a launcher with a higher number than
    this one has had the run."""
    found = _read(Marked(storage, NAME))[0]
    if found is not None and found.number > number:
        raise _lost_to(found)


def held_s(storage: Storage) -> float:
    """For how long after its last renewal a launcher that has the run may live; 0.0 where none has it."""
    found = _read(Marked(storage, NAME))[0]
    return found.ttl_s if found is not None and found.held else 0.0


def _read(marked: Marked) -> tuple[Claim | None, str | None]:
    """The claim, None for what is no claim, and the mark of its object, None where there is none."""
    data, mark = marked.read()
    return _claim_of(data), mark


def _claim_of(data: bytes | None) -> Claim | None:
    try:
        return None if data is None else msgspec.json.decode(data, type=Claim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("%s is no lease: %s", NAME, error)
        return None


def _follows(before: Claim | None, found: Claim) -> bool:
    """Whether who waits has seen the holder of a lease renew it, or get it."""
    return before is None or found.holder != before.holder or found.beat > before.beat


def _lost_to(claim: Claim | None) -> LeaseLostError:
    where = f", on {claim.where}" if claim else ""
    return LeaseLostError(f"run_id: another launcher has taken the run over{where}")


class Marked:
    """One object, by its name. Raises StorageError."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage, self._name = storage, name

    def read(self) -> tuple[bytes | None, str | None]:
        """What it holds, and the mark to write over it; None twice where there is none."""
        try:
            return self._storage.get_marked(self._name)
        except MissingError:
            return None, None

    def write(self, data: bytes, mark: str | None, mine: Callable[[bytes | None], bool]) -> str | None:
        """Put `data` over what has this mark, None being no object; returns the new mark, or None where somebody else
        has written meanwhile. `mine` tells whether this writer may write over what it finds then (None: no object), as
        what it has put itself: the answer to that was lost."""
        while True:
            try:
                return self._storage.put_over(self._name, data, mark)
            except ChangedError:
                found, mark = self.read()
                if found == data:
                    return mark
                if not mine(found):
                    return None
