"""The staleness gate: the arithmetic of Eq. 3 and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """Bounds how far generation may run ahead of training (paper, section 4.1, Eq. 3).

    With B the batch size in trajectories, N_r the trajectories admitted so far (dropped ones gave their slots back), i
    the lowest policy version loaded by any server that takes work and d the depth, a request is admitted only while
    N_r <= (i + d + 1) B, N_r counting the request itself. With d = eta, the maximum staleness, that is Eq. 3:
    floor((N_r - 1) / B) <= i + eta. With less, which need not be a whole number, it is kept all the more, and the
    system is not as far ahead as it may be.
    """

    batch_size: int  # B, trajectories
    depth: float  # d, batches: at most eta
    steps: int  # the run's last step: what no step will consume is never admitted

    def limit(self, version: int) -> int:
        """Trajectories that may have been admitted while `version` is the lowest loaded one."""
        return math.floor(min(version + self.depth + 1, self.steps) * self.batch_size)

    def admits(self, trajectories: int, *, admitted: int, version: int) -> bool:
        """Whether `trajectories` more may be admitted, all or none: a group is admitted whole."""
        return admitted + trajectories <= self.limit(version)
