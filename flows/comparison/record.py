"""What a comparison is, written down in its folder, so that it can be continued.

<state_dir>/comparisons/<name>/
    plan.json                experiment, arms, seeds, overrides
    tracking.json            the parent run in MLflow, if it is tracked
    report.md  report.html   with pictures and traces: `flows.comparison.report`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.errors import ConfigError
from areal_core.storage.rundir import write_json
from flows.comparison.plan import Arm, Trial, plan
from flows.compose import compose


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared: arms times seeds over one experiment."""

    name: str
    experiment: str
    arms: tuple[Arm, ...]  # the first is the reference
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]  # of every arm

    @classmethod
    def of(
        cls,
        name: str,
        experiment: str,
        arms: Mapping[str, Sequence[str]],
        seeds: Sequence[int],
        overrides: Sequence[str] = (),
    ) -> Comparison:
        return cls(
            name=name,
            experiment=experiment,
            arms=tuple(Arm(name=arm, overrides=tuple(own)) for arm, own in arms.items()),
            seeds=tuple(seeds),
            overrides=tuple(overrides),
        )

    def trials(self) -> list[Trial]:
        """All of them, in the order in which to run them. Raises ConfigError, as `plan` does."""
        return plan(self.name, self.experiment, self._overrides_of_arms(), self.seeds, self.overrides)

    def folder(self) -> Path:
        """Where its record and its report go: below `state_dir`, as it is for all arms. Raises ConfigError."""
        return Path(compose(self.experiment, self.overrides).state_dir).absolute() / "comparisons" / self.name

    def continuing(self, known: Comparison) -> Comparison:
        """The same with all that `known`, of the same name, has: its arms and seeds first, its reference.

        Raises ConfigError, one line that names the field, where the two can't be one comparison.
        """
        self._check("experiment", self.experiment, known.experiment)
        self._check("overrides", list(self.overrides), list(known.overrides))
        arms = known._overrides_of_arms()
        for arm in self.arms:
            self._check(f"arms.{arm.name}", list(arm.overrides), list(arms.setdefault(arm.name, arm.overrides)))
        seeds = dict.fromkeys((*known.seeds, *self.seeds))
        return Comparison.of(self.name, self.experiment, arms, [*seeds], self.overrides)

    def to_dict(self) -> dict[str, Any]:
        """As in plan.json."""
        return {
            "experiment": self.experiment,
            "arms": [{"name": arm.name, "overrides": list(arm.overrides)} for arm in self.arms],
            "seeds": list(self.seeds),
            "overrides": list(self.overrides),
        }

    def write(self) -> None:
        folder = self.folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "plan.json", self.to_dict())

    def _overrides_of_arms(self) -> dict[str, tuple[str, ...]]:
        return {arm.name: arm.overrides for arm in self.arms}

    def _check(self, field: str, asked: object, known: object) -> None:
        if asked != known:
            raise ConfigError(
                f"{field}: must be {known!r} as when comparison {self.name} was started, got {asked!r}; "
                "a comparison that goes on may only get new arms and seeds"
            )


def read_comparison(folder: Path) -> Comparison | None:
    """The comparison that was started in `folder`; None if there is none. Raises ConfigError where it can't be read."""
    file = folder / "plan.json"
    try:
        known = json.loads(file.read_text())
        arms = {arm["name"]: arm["overrides"] for arm in known["arms"]}
        return Comparison.of(folder.name, known["experiment"], arms, known["seeds"], known["overrides"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"comparison: {file} is damaged ({error!r}); restore it, or remove it to plan {folder.name} anew"
        ) from error
