"""The short form of `make bench NAME=provisioning`: some scenes of its half by script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.provisioning import campaign, world

pytestmark = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.recovery
@pytest.mark.cpu_seconds(60)
def test_scenes_of_all_kinds(tmp_path: Path) -> None:
    outcomes = campaign.run(tmp_path, 15, 1, print, at_once=3)
    assert [line for outcome in outcomes for line in outcome.findings.problems()] == []
    assert sum(len(outcome.struck) for outcome in outcomes) >= 15


def test_every_place_is_one_that_somebody_comes_to() -> None:
    """A place whose name has changed would never be struck."""
    text = "".join((Path(world.__file__).with_name(name)).read_text() for name in ("program.py", "world.py"))
    places = set(re.findall(r'f?"([a-z{}-]+:[a-z{}-]+|init|pull|output|force-unlock)"', text))
    kinds = ("plan", "destroy-plan", "apply", "destroy")
    whats = ("acquire", "renewal", "release")
    named = {place.format(kind=kind, what=what) for place in places for kind in kinds for what in whats}
    assert {fault["place"] for fault in campaign.faults()} - named == set()
