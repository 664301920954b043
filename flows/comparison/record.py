"""What a comparison is, written down in its folder, so that it can be continued.

<state_dir>/comparisons/<name>/
    plan.json                experiment, arms, seeds, overrides
    tracking.json            the parent run in MLflow, if it is tracked
    report.md                with a picture: `flows.comparison.report`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from areal_core.errors import ConfigError
from areal_core.storage.rundir import write_json
from flows.comparison.design import Trial, check_name, plan_trials
from flows.compose import compose


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared: arms times seeds over one experiment."""

    name: str
    experiment: str
    arms: Mapping[str, Sequence[str]]  # name -> overrides; the first is the reference
    seeds: Sequence[int]
    overrides: Sequence[str] = ()  # of every arm

    def trials(self) -> list[Trial]:
        """All of them, in the order in which to run them. Raises ConfigError, as `plan_trials` does."""
        return plan_trials(self.name, self.experiment, self.arms, self.seeds, self.overrides)

    def folder(self) -> Path:
        """Where its record and its report go: below `state_dir`, as it is for all arms. Raises ConfigError."""
        check_name("comparison", self.name)
        return Path(compose(self.experiment, self.overrides).state_dir).absolute() / "comparisons" / self.name

    def continuing(self, known: Comparison) -> Comparison:
        """The same with all that `known`, of the same name, has: its arms and seeds first, its reference.

        Raises ConfigError, one line that names the field, where the two can't be one comparison.
        """
        self._check("experiment", self.experiment, known.experiment)
        self._check("overrides", list(self.overrides), list(known.overrides))
        arms = dict(known.arms)
        for arm, overrides in self.arms.items():
            self._check(f"arms.{arm}", list(overrides), list(arms.setdefault(arm, overrides)))
        return replace(self, arms=arms, seeds=list(dict.fromkeys((*known.seeds, *self.seeds))))

    def write(self) -> None:
        folder = self.folder()
        folder.mkdir(parents=True, exist_ok=True)
        arms = [{"name": arm, "overrides": overrides} for arm, overrides in self.arms.items()]  # a list keeps the order
        plan = {"experiment": self.experiment, "arms": arms, "seeds": self.seeds, "overrides": self.overrides}
        write_json(folder / "plan.json", plan)

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
        return Comparison(**known | {"name": folder.name, "arms": arms})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"comparison: {file} is damaged ({error!r}); restore it, or remove it to plan {folder.name} anew"
        ) from error
