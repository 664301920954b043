"""`python -m tests.provisioning.reap_once`: a reaper whose leases are short, so that another one may soon follow it."""

from __future__ import annotations

from flows.provision.leased import cloud_of, store_of
from flows.provision.leases import Leases
from flows.provision.nodes import control_outputs
from flows.provision.reaper import Reaper
from flows.stack import STATE

_LEASE_S = 30.0


def main() -> None:
    foundation = control_outputs(STATE)["foundation"]
    leases = Leases(store_of(foundation, 5.0))
    Reaper(leases, STATE, cloud_of=cloud_of, foundation=foundation, length_s=_LEASE_S).reap()


if __name__ == "__main__":
    main()
