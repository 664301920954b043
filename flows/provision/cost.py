"""Cost of a run's nodes: node-hours and dollars by role.

A node counts from its first to its last sighting. Dollars are an estimate: whole seconds times the configured price,
without disks and traffic. `split` divides the cost into useful, idle and stale by the run's bottleneck report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flows.provision.nodes import CloudResource, Host

_HOUR_S = 3600.0


class Meter:
    """The nodes of one run, by the cloud's ids. A replacement counts as another node."""

    def __init__(self, prices: Mapping[str, float | None], state: Mapping[str, Any] | None = None) -> None:
        """`prices` are dollars an hour of a node, by role; None if unknown.
        `state` is the result of `state()` in an earlier process of the same run."""
        state = state or {}
        known = {role: price for role, price in prices.items() if price is not None}
        self._prices: dict[str, float] = {**state.get("prices", {}), **known}
        self._nodes: dict[str, list[Any]] = {id_: list(node) for id_, node in state.get("nodes", {}).items()}

    def observe(self, hosts: Iterable[Host | CloudResource], now: float) -> None:
        """Record that these nodes exist at `now`, in seconds since 1970."""
        for host in hosts:
            node = self._nodes.setdefault(host.id, [host.role or "-", now, now])
            node[2] = max(node[2], now)

    def state(self) -> dict[str, Any]:
        """The whole state as a JSON-compatible dict."""
        return {"prices": self._prices, "nodes": self._nodes}

    def hours(self) -> dict[str, float]:
        """Node-hours by role."""
        hours: defaultdict[str, float] = defaultdict(float)
        for role, first, last in self._nodes.values():
            hours[role] += (last - first) / _HOUR_S
        return dict(sorted(hours.items()))

    def by_role(self) -> dict[str, float | None]:
        """Dollars by role; None where the price is unknown."""
        return {
            role: None if (price := self._prices.get(role)) is None else price * hours
            for role, hours in self.hours().items()
        }

    def dollars(self) -> float | None:
        """Dollars of all roles; None if any price is unknown."""
        each = list(self.by_role().values())
        known = [dollars for dollars in each if dollars is not None]
        return sum(known) if len(known) == len(each) else None

    def is_over(self, budget: float | None) -> bool:
        """Whether the budget, in dollars, is spent. False without a budget, or if the cost is unknown."""
        dollars = self.dollars()
        return budget is not None and dollars is not None and dollars >= budget

    def rows(self) -> list[dict[str, Any]]:
        """Table rows: one per role, and a total if there are several roles."""
        hours, dollars = self.hours(), self.by_role()
        ever = {role: sum(node[0] == role for node in self._nodes.values()) for role in hours}
        rows = [_row(role, ever[role], hours[role], self._prices.get(role), dollars[role]) for role in hours]
        if len(rows) > 1:
            rows.append(_row("all", sum(ever.values()), sum(hours.values()), None, self.dollars()))
        return rows


def split(
    dollars: Mapping[str, float | None], shares: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float] | None]:
    """Divide each role's cost by its use; None where the cost is unknown.

    `shares` are fractions of the role's time by use, such as idle and stale; the rest is useful. Measured shares that
    add up to more than 1 are scaled to 1."""
    parts: dict[str, dict[str, float] | None] = {}
    for role, spent in dollars.items():
        its = {what: max(0.0, share) for what, share in shares.get(role, {}).items()}
        all_ = max(1.0, sum(its.values()))
        its = {"useful": 1.0 - sum(its.values()) / all_} | {what: share / all_ for what, share in its.items()}
        parts[role] = None if spent is None else {what: spent * share for what, share in its.items()}
    return parts


def _row(role: str, nodes: int, hours: float, price: float | None, dollars: float | None) -> dict[str, Any]:
    return {
        "role": role,
        "nodes": nodes,
        "node-hours": f"{hours:.2f}",
        "$/h": "-" if price is None else f"{price:.2f}",
        "cost": "unknown" if dollars is None else f"${dollars:.2f}",
    }
