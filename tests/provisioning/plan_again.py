"""`python -m tests.provisioning.plan_again FILE`: what a next run of the same name would make, planned and not made.

FILE has the variables of each run, by their names; the last line of the output has what each plan would create, or why
there is none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal_core.errors import ArealError
from flows.provision.leased import LeasedNodes
from flows.provision.terraform import Plan
from flows.stack import STATE


class _SeenError(Exception):
    """A plan that is not to be applied."""


def planned(request: Mapping[str, Any]) -> int | str:
    plans: list[Plan] = []

    def refuse(plan: Plan) -> None:
        plans.append(plan)
        raise _SeenError

    try:
        with LeasedNodes(request, STATE, length_s=60.0, log=print) as nodes:
            nodes.make(refuse)
    except _SeenError:
        return sum(change.action == "create" for change in plans[0].changes)
    except ArealError as error:
        return str(error)
    raise AssertionError


def main() -> None:
    requests: dict[str, dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    with ThreadPoolExecutor(2) as threads:
        found = dict(zip(requests, threads.map(planned, requests.values()), strict=True))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
