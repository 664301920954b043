"""How evenly is work distributed? Completions over slots, over time until they are scored, and over training ranks.

    python -m benchmarks.balance [--groups 512] [--seeds 1,2,3]

Lengths are log-normal (median 7,360, sigma .8, truncated at 27,648 tokens), and groups have 16 completions, as in the
paper's runs on mathematics (source: docs/emulation.md). Two parts, both with the real code:

- a rollout controller with gate and ledger, a pool of eight servers of 64 slots, pending completions, and the
  environment `single_turn`, in virtual time. A slot decodes one token per unit of time. A message takes two units. The
  trainer takes no time, so that work is always admitted.
- the partition of a batch over training ranks, by the arithmetic of a 7B model.

The JSON of the last line has means over seeds:

- `slot_use`: share of decoding slots, from the first time that all decode until the last admission
- `reward_wait_tokens`: tokens decoded between the end of a completion and its verification, in the same time: `median`
  and `worst` of all; `first` and `last`, the means of the first and last completion of a group; `by_groups`, the median
  if verification waited for the end of the group
- `rank_share`: by number of ranks, the share of ideal: the mean rank's work over that of the slowest rank, over four
  minibatches
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import orjson

from areal_core.api.pending_completions import receive
from areal_core.api.wire import ServerLoad
from areal_core.config.schema import RunConfig, load
from areal_core.controller import pool as pool_module
from areal_core.controller.core.controller import RolloutController
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.controller.core.tables import Place
from areal_core.controller.pool import GenerationPool
from areal_core.environments.dialogue import Dialogue
from areal_core.environments.environment import EnvContext, SingleTurn
from areal_core.generation.data_plane import Take
from areal_core.models.tokenizer import EOS, char_tokenizer
from areal_core.planning.time_model import SPECS
from areal_core.training.batching.partition import Part, PromptCost, shard
from areal_core.training.flops import training_cost
from areal_core.types import GenerationRequest, PolicyVersion, Prompt
from benchmarks import _harness
from tests.support.groups import RewardsHere
from tests.support.virtual import run_virtual

T = TypeVar("T")

MEDIAN, SIGMA, LONGEST, PROMPT = 7360, 0.8, 27_648, 300  # tokens
GROUP, MINIBATCHES = 16, 4
RANKS = (32, 48, 64, 96, 128, 192, 256, 384)
SERVERS, SLOTS = 8, 64
_SCALE = 64  # tokens that one of the wire stands for
_UNDER_WAY_S = 2.0 / _SCALE  # virtual seconds are tokens of the wire
MODEL = SPECS["7b"]
TOKENIZER = char_tokenizer()
END = TOKENIZER.token_id(EOS)


def lengths(rng: np.random.Generator, groups: int) -> np.ndarray:
    """Tokens of the completions, [groups, GROUP]."""
    return np.minimum(rng.lognormal(np.log(MEDIAN), SIGMA, (groups, GROUP)), LONGEST).astype(np.int64)


def rank_share(seed: int, groups: int) -> dict[int, float]:
    drawn = lengths(np.random.default_rng(seed), groups).tolist()
    # Where a GPU trains, every completion has its prompt to itself.
    costs = [training_cost(MODEL, PROMPT, completions, shared=False)[1] for completions in drawn]
    total = sum(map(sum, costs))
    return {ranks: total / ranks / _ends(costs, ranks, seed) for ranks in RANKS}


def _ends(costs: Sequence[Sequence[float]], ranks: int, seed: int) -> float:
    """Work of the slowest rank, summed over all minibatches: ranks wait for each other at the end of each."""
    groups = [[PromptCost(0, completions, range(GROUP))] for completions in costs]
    shares = shard(groups, MINIBATCHES, ranks, seed=seed, step=1)

    def work(parts: Sequence[Part]) -> float:
        return sum(costs[part.group][index] for part in parts for index in part.sequences)

    return sum(max(map(work, of_ranks)) for of_ranks in zip(*shares, strict=True))


# -- servers and rewards ---------------------------------------------------------------------------------------


@dataclass
class Record:
    """Times of events, in virtual seconds."""

    ended: dict[int, float] = field(default_factory=dict[int, float])  # completion -> when its last token was sampled
    scored: dict[int, float] = field(default_factory=dict[int, float])
    groups: list[range] = field(default_factory=list[range])  # completions of each
    changes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # of the slots in use
    admitted_s: float = 0.0  # the last admission


class Client:
    """Emulated generation server with the interface of its client: slots, and completions that wait in order."""

    record: Record
    rng: np.random.Generator

    def __init__(self, url: str, **_: Any) -> None:
        self.url = url
        self.resubmitted_tokens = 0
        self._slots = asyncio.Semaphore(SLOTS)
        self._sampled = 0

    async def generate(self, request: GenerationRequest, take: Take) -> None:
        first = sum(map(len, self.record.groups))
        self.record.groups.append(range(first, first + request.n))
        self.record.admitted_s = _now()
        tokens = -(-lengths(self.rng, 1)[0] // _SCALE)
        await asyncio.gather(*(self._complete(first, index, int(tokens[index]), take) for index in range(request.n)))

    async def _complete(self, first: int, index: int, tokens: int, take: Take) -> None:
        async with self._slots:
            self.record.changes.append((_now(), 1))
            await asyncio.sleep(tokens)
            self.record.changes.append((_now(), -1))
        self.record.ended[first + index] = _now()
        self._sampled += tokens
        await asyncio.sleep(_UNDER_WAY_S)
        take((index,), receive(_body(first + index, tokens)))

    async def load(self) -> ServerLoad:
        none = dict.fromkeys(("completion_s", "idle_s", "paused_s", "swap_ms", "recompute_ms"), 0.0)
        return ServerLoad(
            running=0,
            waiting=0,
            generated_tokens=self._sampled,
            rollout_tokens=self._sampled,
            recomputed_tokens=0,
            **none,
        )

    async def loaded_version(self) -> int:
        return 0

    async def is_sleeping(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
        async def nothing(*_: object) -> None:
            return None

        return nothing


def _body(completion: int, tokens: int) -> bytes:
    """Response with a completion that contains its number, of the requested length."""
    said = [*TOKENIZER.encode(f"{completion}=")]
    ids = [*said, *[said[-1]] * (tokens - len(said) - 1), END]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": ids,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        "logprobs": {"content": [{"token_id": token, "logprob": -1.0} for token in ids]},
    }
    return orjson.dumps({"usage": {"completion_tokens": len(ids)}, "choices": [choice]})


class Rewards(RewardsHere):
    """The environment, run in this process as reward workers run it."""

    def __init__(self, config: RunConfig, record: Record) -> None:
        def verify(_: Prompt, text: str) -> float:
            record.scored[int(text.partition("=")[0])] = _now()
            return 1.0

        environment = SingleTurn(
            EnvContext(
                environment=config.environment,
                task=config.task,
                algorithm=config.algorithm,
                tokenizer=TOKENIZER,
                dialogue=Dialogue(config.task.chat, TOKENIZER),
                verify=verify,
            )
        )
        super().__init__(environment, config)


class Prompts:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, prompt_id=f"{index:x}", text="1=", token_ids=TOKENIZER.encode("1="), answer="1")


class Payloads:
    async def append(self, payload: bytes) -> Place:
        return Place(segment="", start=0, bytes=len(payload), crc32=0)


# -- a run -----------------------------------------------------------------------------------------------------


async def roll_out(seed: int, groups: int) -> Record:
    """Roll out the requested number of groups, and the groups in flight beside them."""
    batch = 64 * GROUP
    config = load(
        {
            "seed": seed,
            "algorithm": {"group_size": GROUP},
            # Whatever the age: all tokens say that version 0 has sampled them.
            "rollout": {
                "batch_size": batch,
                "max_staleness": 2,
                "batch_selection": "admit",
                "request_timeout_s": 1e6,
            },
            "training": {"steps": -(-groups * GROUP // batch)},
            "task": {"max_prompt_tokens": 8, "max_new_tokens": -(-LONGEST // _SCALE) + 1},
            "model": {"context": 1024},
            "generation": {"slots": SLOTS, "servers": SERVERS},
        }
    )
    Client.record = record = Record()
    Client.rng = np.random.default_rng(seed)
    servers = GenerationPool(completions_per_server=config.completions_per_server, patience_s=1e6)
    ledger = TrajectoryLedger(":memory:", group_size=GROUP)
    base = PolicyVersion(version=0, path="", digest="0")
    ledger.publish(base)
    controller = RolloutController(
        config=config,
        source=Prompts(),
        engine=servers,
        rewards=Rewards(config, record),
        payloads=Payloads(),
        ledger=ledger,
        stop_token_ids={"": (END,)},
        opens_with_prompt={"": True},
    )
    servers.freed = controller.freed.notify
    servers.registry.subscribe(lambda *_: controller.notify())
    for index in range(SERVERS):
        await servers.join(f"generation-{index}", f"http://{index}", lambda: base)
    running = asyncio.ensure_future(controller.run())
    for step in range(1, config.training.steps + 1):
        assert await controller.batch(step, timeout_s=1e9) is not None
        controller.publish(PolicyVersion(version=step, path="", digest=f"{step}"))
    controller.finish("steps")
    await running
    await servers.close()
    return record


def measured(record: Record) -> dict[str, Any]:
    """Slot use and waits, from the moment that all slots decode until the last admission."""
    slots = SERVERS * SLOTS
    in_use, start, used, last = 0, None, 0.0, 0.0
    for at, change in record.changes:
        if at > record.admitted_s:
            break
        if start is not None:
            used += in_use * (at - last)
        in_use, last = in_use + change, at
        if start is None and in_use == slots:
            start = at
    assert start is not None
    waits: dict[int, float] = {}
    first, final, by_groups = list[float](), list[float](), list[float]()
    for group in record.groups:
        ended = sorted((record.ended[index], index) for index in group if index in record.scored)
        if len(ended) < len(group) or not start <= ended[0][0] <= record.admitted_s:
            continue
        waits |= {index: _SCALE * (record.scored[index] - at) for at, index in ended}
        first.append(waits[ended[0][1]])
        final.append(waits[ended[-1][1]])
        by_groups += [_SCALE * (ended[-1][0] - at) for at, _ in ended]
    return {
        "slot_use": used / slots / (last - start),
        "median": statistics.median(waits.values()),
        "worst": max(waits.values()),
        "first": statistics.mean(first),
        "last": statistics.mean(final),
        "by_groups": statistics.median(by_groups),
    }


def _now() -> float:
    return asyncio.get_running_loop().time()


def balance(seeds: Sequence[int], groups: int) -> dict[str, Any]:
    rows, shares = list[dict[str, float]](), list[dict[int, float]]()
    original, pool_module.GenerationClient = pool_module.GenerationClient, Client  # type: ignore[misc]
    try:
        for seed in seeds:
            rows.append(measured(run_virtual(roll_out(seed, groups))))
            shares.append(rank_share(seed, groups))
            _harness.tell(f"seed {seed}: {rows[-1]}, rank share {shares[-1]}")
    finally:
        pool_module.GenerationClient = original
    means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    return {
        "rank_share": {ranks: round(statistics.mean(share[ranks] for share in shares), 4) for ranks in RANKS},
        "slot_use": round(means.pop("slot_use"), 4),
        "reward_wait_tokens": {key: round(value, 1) for key, value in means.items()},
        "seeds": list(seeds),
    }


def main() -> None:
    parser = _harness.parser(__doc__, overrides=False)
    parser.add_argument("--groups", type=_harness.positive, default=512)
    parser.add_argument("--seeds", type=_harness.numbers, default=[1, 2, 3])
    arguments = parser.parse_args()
    _harness.report(lambda: balance(arguments.seeds, arguments.groups))


if __name__ == "__main__":
    main()
