"""The lease of a run: which launcher runs it, on whatever machine, and a fencing number that only grows.

Every launcher that wants the run has an object of its own in the run's store, `lease/<owner>.json`, which nobody else
writes. Who goes first follows from all of them, by Lamport's bakery algorithm (CACM 17(8), 1974): a launcher says that
it is choosing, chooses a number above all that it sees, and waits for those that are choosing or have a lower one; of
two with the same number the owner's name decides. That takes no conditional writes, which stores do not have in common:
only that a list shows what was written before, as folders and S3 do.

The holder renews its object. One that was not renewed for `ttl_s`, by the clock of the one that looks and waits, is a
dead launcher's. One that comes back from such a silence finds a higher number, and ends. What it writes until then is
under its own number, in places where nobody takes it for newer (storage/checkpoint.py).
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from areal_core.errors import ProcessError
from areal_core.storage.objects import MissingError, Storage

logger = logging.getLogger(__name__)
_ROOT = "lease"
_LOOK_S = 0.2  # between two looks at the others


class LeaseLostError(ProcessError):
    """Another launcher has taken the run over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a launcher says of itself."""

    owner: str
    where: str  # a host and a folder, where one launcher at a time is alive
    state: Literal["choosing", "waiting", "held", "released", "withdrawn"]  # released: after it was held
    number: int = 0
    beat: int = 0  # how often it was renewed


@dataclass(slots=True)
class _Seen:
    """What a launcher has seen of another one."""

    claim: Claim  # the last
    since: float  # when it was new
    changed: bool = False  # since the first one


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
        self._storage = storage
        self._ttl_s = ttl_s
        self._clock, self._sleep = clock, sleep
        owner = f"{socket.gethostname()}-{secrets.token_hex(8)}"
        self._claim = Claim(owner=owner, where=where, state="choosing")
        self._said = self._clock()  # when this launcher last said something
        self._seen: dict[str, _Seen] = {}  # of others, by owner

    @property
    def number(self) -> int:
        """The fencing number: higher than that of every launcher that had the run before."""
        return self._claim.number

    @property
    def renewal_s(self) -> float:
        """How often it is to be renewed."""
        return self._ttl_s / 6

    def acquire(self) -> int:
        """Take the lease; returns its number. Waits for one that is held to be renewed: after `ttl_s` its launcher is
        dead. Raises ProcessError when another one runs the run, and StorageError."""
        self._say(replace(self._claim, state="choosing"))
        number = 1 + max((claim.number for claim in self._others()), default=0)
        self._say(replace(self._claim, state="waiting", number=number))
        try:
            while (others := self._ahead()) and not any(map(self._runs, others)):
                self._sleep(_LOOK_S)
            if others := [claim for claim in self._others() if self._runs(claim)]:
                where = others[0].where
                raise ProcessError(
                    f"run_id: the run is running already, on {where}; wait for its end or choose another"
                )
        except BaseException:
            self._say(replace(self._claim, state="withdrawn"))
            raise
        self._say(replace(self._claim, state="held"))
        for claim in self._others():
            if not self._may_live(claim):
                self._storage.delete(_name(claim.owner))
        return number

    def renew(self) -> None:
        """Say that this launcher lives. Raises LeaseLostError once another one has taken over, or is about to because
        this one was silent for too long, and StorageError."""
        silent = self._clock() - self._said >= self._ttl_s
        self._say(replace(self._claim, beat=self._claim.beat + 1))
        for claim in self._others():
            about_to = claim.state == "choosing" or (claim.state == "waiting" and claim.number > self.number)
            if _supersedes(claim, self.number) or (silent and about_to):
                raise _lost_to(claim)

    def release(self) -> None:
        """Give it back: the next launcher need not wait."""
        self._say(replace(self._claim, state="released"))

    # -- inside ------------------------------------------------------------------------------------------------

    def _say(self, claim: Claim) -> None:
        self._claim, self._said = claim, self._clock()
        self._storage.put_bytes(_name(claim.owner), json.dumps(asdict(claim)).encode())

    def _others(self) -> list[Claim]:
        """What others say now; when each of them last said something new is noted."""
        claims = [claim for claim in _claims(self._storage) if claim.owner != self._claim.owner]
        for claim in claims:
            seen = self._seen.setdefault(claim.owner, _Seen(claim, self._clock()))
            if seen.claim != claim:
                self._seen[claim.owner] = _Seen(claim, self._clock(), changed=True)
        return claims

    def _ahead(self) -> list[Claim]:
        """Those that go before this launcher."""
        return [claim for claim in self._others() if self._may_live(claim) and self._goes_before(claim)]

    def _goes_before(self, claim: Claim) -> bool:
        return claim.state == "choosing" or (claim.number, claim.owner) < (self.number, self._claim.owner)

    def _may_live(self, claim: Claim) -> bool:
        """Whether its launcher may be there, as far as this one has seen."""
        if claim.state in ("released", "withdrawn") or claim.where == self._claim.where:
            return False
        return self._clock() - self._seen[claim.owner].since < self._ttl_s

    def _runs(self, claim: Claim) -> bool:
        """Whether its launcher is known to run the run: it has renewed its lease, or has taken over from this one while
        this one was silent."""
        if claim.state != "held" or not self._may_live(claim):
            return False
        return self._seen[claim.owner].changed or not self._goes_before(claim)


def check(storage: Storage, number: int) -> None:
    """Before something is replaced in the run's store: raises LeaseLostError where a launcher with a higher number than
    this one has had the run."""
    for claim in _claims(storage):
        if _supersedes(claim, number):
            raise _lost_to(claim)


def _claims(storage: Storage) -> list[Claim]:
    claims: list[Claim] = []
    for name in storage.list(_ROOT):
        try:
            claims.append(Claim(**json.loads(storage.get_bytes(name))))
        except (ValueError, TypeError):
            logger.warning("%s/%s is no claim to the run", storage.url, name)
        except MissingError:
            continue  # it has gone meanwhile
    return claims


def _supersedes(claim: Claim, number: int) -> bool:
    return claim.number > number and claim.state in ("held", "released")


def _lost_to(claim: Claim) -> LeaseLostError:
    return LeaseLostError(f"run_id: another launcher has taken the run over, on {claim.where}")


def _name(owner: str) -> str:
    return f"{_ROOT}/{owner}.json"
