"""The work of ranks that tests start as processes of their own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from areal_core.errors import ProcessError
from areal_core.training.distributed.ranks import RankGroup

TIMEOUT_S = 4.0  # for a collective operation


def summing(rank: int, size: int, where: str, go: Path, join_s: float) -> None:
    """A rank that sums once, prints the result, and sums again once `go` exists, which it may never do."""
    try:
        rendezvous = where if where.count(":") else Path(where)
        group = RankGroup(rank, size, rendezvous=rendezvous, timeout_s=TIMEOUT_S, join_s=join_s)
        print("sum", *group.all_reduce_sum(np.array([rank, 1.0])), "max", *group.all_reduce_max(np.array([rank])))
        while not go.exists():
            time.sleep(0.01)
        print("sum", *group.all_reduce_sum(np.array([rank, 1.0])))
        group.close()
    except ProcessError as error:
        sys.exit(f"{error}")
