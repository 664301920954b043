"""What does a staleness bound for every token cost if some rollouts are long and a few hang?

    python -m benchmarks.stragglers [--seeds 1,2,3] [--steps 60] [--deadline 60]

The controller's own core (admission, gate, ledger, batches, environment) runs in virtual time, on one emulated server
with 64 slots. The time of a rollout is log-normal (median 1, sigma 1.2), and one in 200 hangs. A batch has 32 groups of
16, and eta is 4. Training takes a tenth of the generation time of a batch. The arms differ in
`rollout.batch_selection`; all have the same prompts, times and deadline.

- `over_admit`: trained rollouts per unit of time, over those of `admit`; the median over seeds;
- `staleness_max`: of the oldest token of a batch, in versions; eta is 4;
- `cut_share`: share of rollouts that do not hang but exceed the deadline;
- `deadline_percentile`: percentile of the deadline among the times of rollouts that do not hang;
- `longest_wait`: largest delay of a prompt in batches, compared with the order of prompts.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_core.api.pending_completions import PendingCompletions, receive
from areal_core.config.schema import RunConfig, load
from areal_core.controller.core.controller import RolloutController
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.environments.registry import open_environment
from areal_core.types import PolicyVersion, Prompt
from benchmarks import _harness
from tests.support.groups import RewardsHere
from tests.support.policies import END, TOKENIZER
from tests.support.rollout import FakePayloads, body
from tests.support.virtual import run_virtual

GROUP, GROUPS, SLOTS, ETA, SIGMA, HANGS = 16, 32, 64, 4, 1.2, 1 / 200
_TRAINING = 0.1  # of the time that it takes to generate a batch
_TOKENS_A_UNIT = 4
POLICIES = ("admit", "wait", "drop")


@dataclass(eq=False)
class Server:
    """Emulated server with 64 slots. The seed of a request sets the time of its completion, in all arms."""

    freed: Any = None
    version: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))
    in_flight: int = 0
    ended: int = 0  # completions that did not hang
    hung: int = 0  # completions that did, until they were cut

    @property
    def room(self) -> int:
        return max(0, SLOTS + GROUP - self.in_flight)

    async def generate(self, pending: PendingCompletions) -> None:
        pending.sent = True
        await asyncio.gather(*(self._complete(pending, index) for index in pending.unfinished()))

    async def _complete(self, pending: PendingCompletions, index: int) -> None:
        self.in_flight += 1
        hangs = False
        try:
            async with self.slots:
                time_s, version = drawn(pending.request.seed, index), self.version
                hangs = time_s is None
                await asyncio.sleep(1e9 if time_s is None else time_s)
                tokens = [5] * max(1, round(_TOKENS_A_UNIT * (time_s or 0.0))) + [END]
                pending.take([index], receive(body([(tokens, "stop")], version)))
                self.ended += 1
        finally:
            self.in_flight -= 1
            self.hung += hangs
            self.freed()

    async def load_version(self, version: PolicyVersion) -> None:
        self.version = version.version

    async def abort_all(self) -> None:
        """Hand over nothing: running completions are cancelled with their group."""


def drawn(seed: int, index: int) -> float | None:
    """Time of a completion; None: it hangs."""
    rng = random.Random(f"{seed}/{index}")
    return None if rng.random() < HANGS else rng.lognormvariate(0.0, SIGMA)


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, prompt_id=f"{index:x}", text="1=", token_ids=TOKENIZER.encode("1="), answer="1")


async def run(config: RunConfig) -> dict[str, float]:
    clock, server = asyncio.get_running_loop().time, Server()
    ledger = TrajectoryLedger(":memory:", group_size=GROUP)
    ledger.publish(PolicyVersion(version=0, path="", digest="0"))
    controller = RolloutController(
        config=config,
        source=Prompts(),
        engine=server,
        rewards=RewardsHere(
            open_environment(config, TOKENIZER, replacement=lambda _: lambda task, text: float(len(text) % 2)), config
        ),
        payloads=FakePayloads(),
        ledger=ledger,
        stop_token_ids={"": (END,)},
        opens_with_prompt={"": True},
    )
    server.freed = controller.freed.notify
    running = asyncio.ensure_future(controller.run())
    mean_s = 2.718281828 ** (SIGMA**2 / 2)
    lags, trained, longest_wait = list[int](), 0, 0
    for step in range(1, config.training.steps + 1):
        fixing = asyncio.ensure_future(controller.batch(step, timeout_s=1e9))
        await asyncio.wait((fixing, running), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        manifest = await fixing
        assert manifest is not None
        summaries = ledger.summaries(step)
        lags.append(step - 1 - min(group.min_version for group in summaries))
        trained += sum(group.judged for group in summaries)
        prompts = ledger.prompt_indices(step)
        longest_wait = max(longest_wait, *(step - 1 - prompt // GROUPS for prompt in prompts))
        await asyncio.sleep(_TRAINING * GROUPS * GROUP * mean_s / SLOTS)
        controller.publish(PolicyVersion(version=step, path="", digest=f"{step}"))
    end_s, cut = clock(), sum(ledger.cut().values()) - server.hung
    controller.finish("steps")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return {
        "rate": trained / end_s,
        "staleness_max": max(lags),
        "cut_share": max(0, cut) / max(1, server.ended),
        "longest_wait": longest_wait,
    }


def configured(policy: str, seed: int, steps: int, deadline: float) -> RunConfig:
    return load(
        {
            "seed": seed,
            "algorithm": {"group_size": GROUP},
            "rollout": {
                "batch_size": GROUP * GROUPS,
                "max_staleness": ETA,
                "batch_selection": policy,
                "deadline_s": deadline,
                "request_timeout_s": 1e9,
                "max_requeues": 1000,
            },
            "training": {"steps": steps, "ranks": 1},
            "task": {"max_new_tokens": 4000, "max_prompt_tokens": 10},
            "model": {"context": 4096},
            "environment": {"max_no_result": 1.0, "verify_truncated": True},
        }
    )


def measure(seeds: Sequence[int], steps: int, deadline: float) -> dict[str, Any]:
    rows: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for seed in seeds:
        for policy in POLICIES:
            rows[policy].append(run_virtual(run(configured(policy, seed, steps, deadline))))
            _harness.tell(f"seed {seed}, {policy}: {rows[policy][-1]}")
    times = [time_s for seed in range(200_000) if (time_s := drawn(seed, 0)) is not None]
    return {
        **{
            policy: {
                "over_admit": round(
                    statistics.median(a["rate"] / b["rate"] for a, b in zip(its, rows["admit"], strict=True)), 3
                ),
                "staleness_max": max(row["staleness_max"] for row in its),
                "cut_share": round(statistics.mean(row["cut_share"] for row in its), 5),
                "longest_wait": max(row["longest_wait"] for row in its),
            }
            for policy, its in rows.items()
        },
        "deadline_percentile": round(100 * sum(time_s <= deadline for time_s in times) / len(times), 2),
        "seeds": list(seeds),
    }


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2, 3])
    parser.add_argument("--steps", type=_harness.positive, default=60)
    parser.add_argument("--deadline", type=float, default=60.0)
    arguments = parser.parse_args()
    _harness.report(lambda: measure(arguments.seeds, arguments.steps, arguments.deadline))


if __name__ == "__main__":
    main()
