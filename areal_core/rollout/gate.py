"""The staleness gate: the arithmetic of Eq. 3 and nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessGate:
    """Bounds how far generation may run ahead of training (paper, section 4.1, Eq. 3).

    With B the batch size in trajectories, N_r the trajectories admitted so far (dropped ones gave their slots back), i
    the lowest policy version loaded by any server that takes work and eta the maximum staleness, a request is admitted
    only while floor((N_r - 1) / B) <= i + eta, that is N_r <= (i + eta + 1) B, N_r counting the request itself.
    """

    batch_size: int  # B, trajectories
    max_staleness: int  # eta, versions
    steps: int  # the run's last step: what no step will consume is never admitted

    def limit(self, version: int) -> int:
        """Trajectories that may have been admitted while `version` is the lowest loaded one."""
        return min(version + self.max_staleness + 1, self.steps) * self.batch_size

    def admits(self, trajectories: int, *, admitted: int, version: int) -> bool:
        """Whether `trajectories` more may be admitted, all or none: a group is admitted whole."""
        return admitted + trajectories <= self.limit(version)
