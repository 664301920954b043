"""What nodes cost, by hand."""

from __future__ import annotations

import json

import pytest

from flows.provision.cost import Meter, split
from flows.provision.nodes import Host


def host(name: str, id_: str) -> Host:
    return Host(name=name, role=name.rpartition("-")[0], address="10.0.0.1", id=id_, type="m", spot=False)


TRAINER, FIRST, SECOND = host("trainer-0", "i-0"), host("generation-0", "i-1"), host("generation-0", "i-2")


def observed(prices: dict[str, float | None]) -> Meter:
    meter = Meter(prices)
    meter.observe([TRAINER, FIRST], 1000.0)
    meter.observe([TRAINER, FIRST], 1000.0 + 1800.0)
    meter.observe([TRAINER, SECOND], 1000.0 + 3600.0)  # the first one was replaced
    meter.observe([TRAINER, SECOND], 1000.0 + 7200.0)
    return meter


def test_each_node_counts_from_when_it_was_first_seen_to_when_it_was_last() -> None:
    meter = observed({"trainer": 30.0, "generation": 10.0})
    assert (meter.hours(), meter.dollars()) == ({"generation": 1.5, "trainer": 2.0}, 75.0)
    assert meter.by_role() == {"generation": 15.0, "trainer": 60.0}
    every = {"role": "all", "nodes": 3, "node-hours": "3.50", "$/h": "-", "cost": "$75.00"}
    generation = {"role": "generation", "nodes": 2, "node-hours": "1.50", "$/h": "10.00", "cost": "$15.00"}
    assert [meter.rows()[0], meter.rows()[-1]] == [generation, every]
    assert [meter.is_over(budget) for budget in (75.01, 75.0, 1.0)] == [False, True, True]
    assert not Meter({}).is_over(1.0)  # no node yet


def test_what_was_noted_goes_on_in_another_process() -> None:
    noted = json.loads(json.dumps(observed({"trainer": 30.0, "generation": 10.0}).state()))
    later = Meter({}, noted)
    later.observe([SECOND], 1000.0 + 10800.0)
    later.observe([TRAINER], 1000.0)  # a clock that is behind takes nothing away
    assert later.by_role() == {"generation": 25.0, "trainer": 60.0}
    assert Meter({"trainer": 1.0}, noted).by_role()["trainer"] == 2.0  # what is said now counts


def test_without_a_price_nobody_knows() -> None:
    meter = observed({"trainer": 30.0, "generation": None})
    assert meter.dollars() is None
    assert meter.by_role() == {"generation": None, "trainer": 60.0}
    assert [row["cost"] for row in meter.rows()] == ["unknown", "$60.00", "unknown"]
    assert not meter.is_over(None)
    assert not meter.is_over(100.0)  # a configuration with a budget has all prices


def test_the_cost_is_split_by_what_it_was_for() -> None:
    spent = {"generation": 15.0, "trainer": 60.0, "other": None}
    parts = split(spent, {"generation": {"idle": 0.2, "stale": 0.4}, "other": {"idle": 1.0}})
    assert parts["generation"] == pytest.approx({"useful": 6.0, "idle": 3.0, "stale": 6.0})
    assert parts["trainer"] == {"useful": 60.0}
    assert parts["other"] is None
    measured = split(spent, {"trainer": {"idle": 0.9, "stale": 0.3}})["trainer"]
    assert measured == pytest.approx({"useful": 0.0, "idle": 45.0, "stale": 15.0})
