"""A comparison is written down, read back, and continued only by what it can be continued by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import ConfigError
from flows.comparison.design import Comparison, read_comparison

_ARMS = {"sync": ["mode=sync"], "async-1": ["mode=async", "rollout.max_staleness=1"]}


def _comparison(
    arms: Mapping[str, Sequence[str]] = _ARMS,
    seeds: Sequence[int] = (1, 2),
    experiment: str = "cpu-async",
    overrides: Sequence[str] = ("training.steps=10",),
) -> Comparison:
    return Comparison(name="study", experiment=experiment, arms=arms, seeds=list(seeds), overrides=list(overrides))


def test_comparison_is_written_read_and_continued(tmp_path: Path) -> None:
    comparison = _comparison(overrides=[f"state_dir={tmp_path}"])
    assert comparison.folder() == tmp_path / "comparisons" / "study"
    assert read_comparison(comparison.folder()) is None
    comparison.write()
    assert read_comparison(comparison.folder()) == comparison
    asked = _comparison({"async-4": ["mode=async", "rollout.max_staleness=4"], "sync": ["mode=sync"]}, (3, 1))
    joined = asked.continuing(_comparison())
    assert (list(joined.arms), joined.seeds) == (["sync", "async-1", "async-4"], [1, 2, 3])
    assert joined.continuing(joined) == joined


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"experiment": "cpu-sync"}, "experiment: must be 'cpu-async' as when comparison study was started"),
        ({"overrides": ()}, "overrides: must be ['training.steps=10'] as when comparison study was started, got []"),
        ({"arms": {"sync": []}}, "arms.sync: must be ['mode=sync'] as when comparison study was started, got []"),
    ],
)
def test_what_was_decided_stays(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _comparison(**changed).continuing(_comparison())
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"experiment": "cpu-as', '{"experiment": "cpu-async"}', "[]"])
def test_damaged_plan_is_one_line(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^comparison: .*plan\.json is damaged") as caught:
        read_comparison(folder)
    assert "\n" not in str(caught.value)
