"""From the words of `make compare` to the flow's parameters; what is wrong with them is one line."""

from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import ConfigError
from flows.compare_command import parameters
from flows.comparison.design import Comparison


def test_seeds_are_numbers_and_arms_are_names_with_their_overrides() -> None:
    assert parameters(overrides=[], seeds=" 1, 2 7 ")["seeds"] == [1, 2, 7]
    given = ["sync: mode=sync", "async-2:mode=async rollout.max_staleness=2 name='two words'", "as-it-is:"]
    assert parameters(overrides=[], arm=given)["arms"] == {
        "sync": ["mode=sync"],
        "async-2": ["mode=async", "rollout.max_staleness=2", "name=two words"],
        "as-it-is": [],
    }


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"arm": ["sync mode=sync"]}, r"arm: must be of the form 'name: field=value \.\.\.', got 'sync mode=sync'"),
        ({"arm": ["a: mode=sync", "a : mode=async"]}, "arm: a is there twice"),
        ({"arm": ["a: mode='sync", "b:"]}, 'arm: "a: mode=\'sync": No closing quotation'),
        ({"arm": ["a: mode=sync", "b: rollout.max_stalenes=1"]}, r"arms\.b: rollout\.max_stalenes: no such field"),
        ({"arm": ["a: mode=sync"]}, "arms: must be at least 2, got 1"),
        ({"seeds": "1,x"}, "seeds: must be whole numbers, as in 1,2,3, got 'x'"),
        ({"seeds": ""}, "seeds: must be whole numbers, as in 1,2,3, got ''"),
        ({"seeds": "1 1"}, "seeds: must be distinct"),
        ({"experiment": "cpu-asinc"}, "experiment: must be one of"),
        ({"overrides": ["training.stepz=3"]}, r"training\.stepz: no such field"),
        ({"name": "a/b"}, "comparison: a name must be letters"),
        ({"name": "x" * 300}, "comparison: a name must have at most 60 characters, got 300: x"),
    ],
)
def test_what_is_wrong_is_one_line(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}") as caught:
        parameters(**{"overrides": [], **asked})
    assert "\n" not in str(caught.value)


@pytest.fixture
def known(tmp_path: Path) -> Comparison:
    arms = {"sync": ["mode=sync"], "standard": ["algorithm=standard"]}
    comparison = Comparison(
        name="first", experiment="cpu-sync", arms=arms, seeds=[5], overrides=[f"state_dir={tmp_path}"]
    )
    comparison.write()
    return comparison


def test_known_comparison_is_continued_with_what_is_said(known: Comparison) -> None:
    assert Comparison(**parameters(overrides=known.overrides, name="first")) == known
    again = parameters(overrides=known.overrides, name="first", seeds="6", arm=["stale: mode=async"])
    assert (again["seeds"], again["arms"], again["experiment"]) == ([6], {"stale": ["mode=async"]}, "cpu-sync")
    with pytest.raises(ConfigError, match=r"^experiment: must be 'cpu-sync' as when comparison first was started"):
        parameters(overrides=known.overrides, name="first", experiment="cpu-async")
