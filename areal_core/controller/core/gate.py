"""The staleness gate: the arithmetic of Eq. 3."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """Bounds how far generation may run ahead of training (paper, section 4.1, Eq. 3).

    B is the batch size in trajectories, and d the pipeline depth in batches. N_r counts the admitted trajectories
    without dropped ones. i is the lowest policy version loaded by any server that takes requests. A request is admitted
    only while N_r <= (i + d + 1) B, where N_r includes the request itself. With d = eta, the maximum staleness, this is
    Eq. 3: floor((N_r - 1) / B) <= i + eta. With d < eta, not necessarily a whole number, generation stays closer to
    training.
    """

    batch_size: int  # B, trajectories
    depth: float  # d, batches: at most eta
    steps: int  # the run's last step; no trajectory is admitted for later steps

    def limit(self, version: int) -> int:
        """Maximum of admitted trajectories while `version` is the lowest loaded version."""
        return math.floor(min(version + self.depth + 1, self.steps) * self.batch_size)

    def admits(self, trajectories: int, *, admitted: int, version: int) -> bool:
        """Whether `trajectories` more, the size of a whole group, may be admitted."""
        return admitted + trajectories <= self.limit(version)
