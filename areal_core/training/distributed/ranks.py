"""The ranks of a data-parallel group: their rendezvous and their collectives.

The rendezvous is a store. On one machine it is a file, on several it is the rendezvous process beside the controller
(`rendezvous_of_ranks`). No rank hosts it, so it outlives ranks that hang or die. The other ranks can then find out
which one is missing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported first beside a group, its defaults would keep that group alive
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from areal_core.errors import ProcessError, one_line

logger = logging.getLogger(__name__)
T = TypeVar("T")

RENDEZVOUS = "AREAL_RENDEZVOUS"  # "<address>:<port>" of the rendezvous of ranks on several machines
ADDRESS = "AREAL_ADDRESS"  # of a rank's machine, for error messages
_JOIN_S = 120.0  # seconds for all ranks of a group to join
_POLL_S = 0.01  # minimum seconds between two checks for missing ranks
_GRACE_S = 3.0  # seconds for the other ranks to report a failed collective


def rendezvous_of_ranks(environment: Mapping[str, str], folder: Path) -> Path | str:
    """Return the rendezvous of ranks: "<address>:<port>/<name>" of a store, or a file in `folder`.

    torchrun finds a free port for every round of ranks. Nothing listens on it, but it names the round.
    """
    if store := environment.get(RENDEZVOUS):
        return f"{store}/{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return folder / f"rendezvous-{environment.get('AREAL_ATTEMPT', '0')}"


class RankGroup:
    """This rank among `size` ranks. All methods are collective: every rank calls them in the same order.

    Ranks find each other at `rendezvous` (see `rendezvous_of_ranks`), which must not be left over from an earlier
    group. `timeout_s` bounds every wait for another rank, and `join_s` the first one. A group of one needs none of
    these.

    `backend` is torch.distributed's: tensors on GPUs need "cpu:gloo,cuda:nccl" and a GPU for each rank. Raises
    ProcessError naming the ranks that did not join.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        rendezvous: Path | str | None = None,
        timeout_s: float = 120.0,
        join_s: float = _JOIN_S,
        backend: str = "gloo",
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._collectives = self._meetings = 0  # so far
        if size > 1:
            assert rendezvous is not None
            self._store = _store(rendezvous, size, join_s)
            self._store.set(f"host/{rank}", os.environ.get(ADDRESS, "127.0.0.1"))
            self._wait_for_all(join_s)
            try:
                dist.init_process_group(
                    backend,
                    store=PrefixStore("group", self._store),
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout_s),
                )
            except RuntimeError as error:
                raise ProcessError(f"rank {rank} can't connect to the others: {one_line(error)}") from error

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over ranks."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the elementwise sum over ranks."""
        self._reduce(torch.from_numpy(values := values.copy()), dist.ReduceOp.SUM)
        return values

    def meet(self, patience_s: float) -> None:
        """Wait until every rank is here, up to `patience_s` longer than a collective waits.

        A store that is away may delay a rank so long. Raises ProcessError naming the ranks that did not come.
        """
        if self.size == 1:
            return
        self._meetings += 1
        keys = [f"met/{self._meetings}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "")
        bound_s, since = self._timeout_s + patience_s, time.monotonic()
        while missing := _bounded(lambda: self._named(keys)):
            if (waited_s := time.monotonic() - since) > bound_s:
                raise ProcessError(f"{missing} did not reach the others within {bound_s:g} s")
            time.sleep(min(1.0, max(_POLL_S, waited_s / 20)))
        if missing is None:
            raise ProcessError(f"rank {self.rank} lost the rendezvous while it waited for the other ranks")

    def all_reduce_max(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elementwise maximum over ranks."""
        self._reduce(torch.from_numpy(values := values.copy()), dist.ReduceOp.MAX)
        return values

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order. They are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._collectives += 1
        with self.naming():
            dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the group. Nothing may refer to the group then.

        Its threads must end here: a thread that frees a tensor while the interpreter exits crashes the process.
        """
        if self.size > 1:
            dist.destroy_process_group()

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Context manager that adds the missing rank to errors of other code's gloo collectives."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or "gloo" not in str(error):
                raise
            raise ProcessError(self._who_is_missing(one_line(error))) from error

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        if self.size == 1:
            return
        self._collectives += 1
        try:
            dist.all_reduce(tensor, operation)
        except RuntimeError as error:  # gloo: a timeout, or another rank ended and closed its connection
            raise ProcessError(self._who_is_missing(one_line(error))) from error

    def _who_is_missing(self, error: str) -> str:
        """Compose the error message. Ranks whose collective failed post that in the store; the others are missing."""
        number = self._collectives
        posts = [f"stopped/{number}/{rank}" for rank in range(self.size)]

        def describe() -> str:
            self._store.set(posts[self.rank], "")
            try:
                self._store.wait(posts, timedelta(seconds=_GRACE_S))
                return f"the connection between ranks broke in all_reduce {number}: {error}"
            except RuntimeError:  # DistStoreError: some posts are missing
                return f"{self._named(posts)} did not reach all_reduce {number} {bound}"

        timed_out = "timed out" in error.lower()
        bound = (
            f"within {self._timeout_s:g} s (training.collective_timeout_s)"
            if timed_out
            else "where the others wait, and a connection was closed"
        )
        return _bounded(describe) or f"rank {self.rank} lost the rendezvous and the other ranks in all_reduce {number}"

    def _wait_for_all(self, join_s: float) -> None:
        keys = [f"host/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=join_s))
        except RuntimeError as error:
            missing = _bounded(lambda: ", ".join(str(rank) for rank in self._missing(keys))) or "(unknown)"
            raise ProcessError(f"rank {missing} did not join the rendezvous within {join_s:g} s") from error

    def _named(self, posts: Sequence[str]) -> str:
        """Return the ranks whose post is missing, with their hosts."""
        hosts = {rank: self._store.get(f"host/{rank}").decode() for rank in self._missing(posts)}
        return ", ".join(f"rank {rank} (host {host})" for rank, host in hosts.items())

    def _missing(self, keys: Sequence[str]) -> list[int]:
        """Return the ranks whose key is missing. `keys` has one for each rank."""
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]


def _store(rendezvous: Path | str, size: int, join_s: float) -> Store:
    if isinstance(rendezvous, Path):
        return FileStore(str(rendezvous.absolute()), size)
    where, _, name = rendezvous.partition("/")
    address, _, port = where.rpartition(":")
    try:
        store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=join_s))
    except RuntimeError as error:
        raise ProcessError(f"no rendezvous at {where}: {one_line(error)}") from error
    return PrefixStore(name, store)


def _bounded(call: Callable[[], str]) -> str | None:
    """Return the result of `call`; None if it fails or takes too long.

    A store on a disconnected machine never responds, and its client has no timeout.
    """
    found: list[str] = []

    def try_to() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            logger.warning("the rendezvous failed: %s", one_line(error))

    looking = threading.Thread(target=try_to, name="look for ranks", daemon=True)
    looking.start()
    looking.join(2 * _GRACE_S)
    return found[0] if found else None
