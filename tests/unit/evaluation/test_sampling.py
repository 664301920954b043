"""Rollouts of many problems at once, in reward workers, and their samples."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import GenerationError, UserCodeError
from areal_core.evaluation.sampling import Benchmark, Collector, Server
from areal_core.evaluation.scores import Record, RecordFile, scored
from areal_core.rewards.pool import open_rewards
from areal_core.types import Completion, GenerationRequest, Outcome, Prompt
from tests.support.policies import END, TOKENIZER, completion
from tests.support.verifiers import DIES, FAILS, HANGS

CONFIG = load({"environment": {"verifier": "tests.support.verifiers:costly"}, "rollout": {"reward_timeout_s": 1.0}})


class Completing:
    """A server that completes at once, with the texts that it has for a problem: the greedy one first."""

    url = "stand-in"

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self._texts = texts

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        first, *others = self._texts[TOKENIZER.decode(request.token_ids)]
        return [completion(text) for text in ([first] if request.greedy else others)]


def collected(
    folder: Path,
    texts: Mapping[str, Sequence[str]],
    config: RunConfig = CONFIG,
    *,
    further: Mapping[str, Sequence[str]] = {},
    server: Server | None = None,
) -> list[Record]:
    """Records of problems whose prompts, and `further` texts of environments, have these completions. The gold answer
    is the digit before the last sign."""
    TOKENIZER.save(folder / "tokenizer.json")
    problems = [
        Prompt(index=index, prompt_id=f"{index:x}", text=text, token_ids=TOKENIZER.encode(text), answer=text[-2])
        for index, text in enumerate(texts)
    ]
    samples = len(next(iter(texts.values()))) - 1

    async def run() -> list[Record]:
        changed = load(config.to_dict() | {"evaluation": config.to_dict()["evaluation"] | {"samples": samples or None}})
        benchmark = Benchmark(name="own", config=changed, problems=problems, about={})
        with RecordFile(folder / "records", {"a": 1}) as records:
            rewards = open_rewards(changed, str(folder), 1)
            try:
                collector = Collector(benchmark, records, TOKENIZER, rewards, stop_token_ids={"": (END,)})
                await collector.work(server or Completing({**texts, **further}), 32)
                assert asyncio.all_tasks() == {asyncio.current_task()}
                await collector.finished()
            finally:
                await rewards.close()
            return records.records

    return asyncio.run(run())


def test_completions_that_cost_a_worker_its_process_cost_no_other_its_verdict(tmp_path: Path) -> None:
    texts = {f"{first}{second}=": (str(second), "0") for first in range(4) for second in range(1, 6)}
    texts |= {"16=": ("6", HANGS), "26=": ("6", DIES)}
    found = collected(tmp_path, texts)
    assert all(record.greedy.outcome is Outcome.CORRECT for record in found)
    assert [sample.outcome for record in found[-2:] for sample in record.samples] == [Outcome.TIMED_OUT] * 2
    assert {record.samples[0].outcome for record in found[:-2]} == {Outcome.INCORRECT}
    assert [record.greedy.answer for record in found] == [text[0] for text in texts.values()]


def test_a_verifier_with_a_bug_ends_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="KeyError: '9'"):
        collected(tmp_path, {f"{first}{second}=": (FAILS,) for first in range(4) for second in range(8)})


class Refusing(Completing):
    """A server that refuses greedy requests, and never completes others."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        if request.greedy:
            await self._begun.wait()
            raise GenerationError("it refuses")
        self._begun.set()
        return await asyncio.Future()


def test_a_refused_request_ends_the_others_of_its_problem(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="it refuses"):
        collected(tmp_path, {"12=": ("2", "2")}, server=Refusing())


def test_a_problem_is_scored_by_all_turns_of_its_environment(tmp_path: Path) -> None:
    """One is right at once, one at the second try, one never."""
    config = load({"environment": {"name": "two_turn", "verifier": "tests.support.verifiers:costly"}})
    further = {"+2=1=": ("2",), "+3=1=": ("4",)}
    found = collected(tmp_path, {"+1=": ("1",), "+2=": ("1",), "+3=": ("1",)}, config, further=further)
    assert [record.greedy.outcome for record in found] == [Outcome.CORRECT, Outcome.CORRECT, Outcome.INCORRECT]
    assert [record.greedy.text for record in found] == ["1", "1=2", "1=4"]
    assert [record.greedy.score for record in found] == [1.0, 0.5, 0.0]
    assert [record.greedy.tokens for record in found] == [2, 4, 4]
    assert scored(found).greedy.value == pytest.approx(2 / 3)
