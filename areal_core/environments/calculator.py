"""Chained arithmetic with a tool: whenever the policy writes `=`, a calculator appends the result."""

from __future__ import annotations

import re

from areal_core.environments.environment import EnvContext, Environment, Policy
from areal_core.types import Prompt, Rollout

_STEP = re.compile(r"(\d)([-+*])(\d)=$")


class Calculator(Environment):
    """prompt | `1-1=` | `0` | `;0-7=` | `3` | `#3`: policy and calculator alternate after the prompt."""

    max_turns = 32

    def __init__(self, context: EnvContext) -> None:
        super().__init__(context)
        self._equals = context.tokenizer.encode("=")  # raises for a tokenizer without `=`

    async def rollout(self, task: Prompt, policy: Policy) -> Rollout:
        text, calls = list(task.token_ids), 0
        while True:
            turn = await policy.sample(text, stop=self._equals)
            step = _STEP.search(self.context.tokenizer.decode(turn.token_ids.tolist()))
            if step is None:
                return self.context.scored(await self.context.judge(task, turn), calls=calls)
            left, sign, right = int(step[1]), step[2], int(step[3])
            result = {"+": left + right, "-": left - right, "*": left * right}[sign] % 10
            text += [*turn.token_ids.tolist(), *self.context.tokenizer.encode(str(result))]
            calls += 1
