"""Completions of a benchmark from real servers: the same records whatever serves them, however often it is stopped."""

import asyncio
import contextlib
import dataclasses

import pytest

from areal_core.config.schema import load
from areal_core.environments.environment import Verdict
from areal_core.environments.registry import open_environment
from areal_core.errors import ServerLostError
from areal_core.evaluation.sampling import Benchmark, Collector
from areal_core.evaluation.scores import RecordFile
from areal_core.evaluation.servers import OwnEngine
from areal_core.generation.client import GenerationClient
from areal_core.generation.engines.embedded import Engine
from areal_core.models.spec import read_arrays, read_spec
from areal_core.storage.weights import base_version
from areal_core.types import Outcome, PolicyVersion, Prompt
from tests.support.groups import RewardsHere
from tests.support.live_servers import serving
from tests.support.models import write_tiny
from tests.support.policies import END, TOKENIZER

PROBLEMS = [
    Prompt(index=i, prompt_id=f"{i:064x}", text=f"{i}+1=", token_ids=TOKENIZER.encode(f"{i}+1="), answer=str(i + 1))
    for i in range(24)
]
CONFIG = load({"evaluation": {"samples": 3}, "task": {"max_new_tokens": 12}})
BENCHMARK = Benchmark(name="b", config=CONFIG, problems=PROBLEMS, about={})


BASE = PolicyVersion(version=0, path="", digest="")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving("embedded", model, folder / f"{i}.json", "--slots", 8)) for i in range(2)]


def verify(task, text):
    return Verdict.of(Outcome.CORRECT if task.answer in text else Outcome.INCORRECT, text[-1:])


def rewards(check):
    """The single-turn environment with a verifier, in this process."""
    return RewardsHere(open_environment(CONFIG, TOKENIZER, replacement=lambda _: check), CONFIG)


def collect(file, urls, *, completions=16, check=verify, until=None):
    """The records; with `until` it is stopped after so many."""

    async def run(records):
        clients = [GenerationClient(url) for url in urls]
        enough = asyncio.Event()

        def on_record(done):
            if done == until:
                enough.set()

        collector = Collector(
            BENCHMARK, records, TOKENIZER, rewards(check), stop_token_ids={"": (END,)}, on_record=on_record
        )

        async def work(client):
            with contextlib.suppress(ServerLostError):
                await collector.work(client, completions)

        working = [asyncio.create_task(work(client)) for client in clients]
        ending = [asyncio.ensure_future(collector.finished()), asyncio.ensure_future(enough.wait())]
        await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        for task in (*working, *ending):
            task.cancel()
        await asyncio.gather(*working, *ending, return_exceptions=True)
        for client in clients:
            await client.close()

    with RecordFile(file, {"benchmark": {"name": "b"}}) as records:
        asyncio.run(run(records))
        return records.records


@pytest.fixture(scope="module")
def alone(servers, tmp_path_factory):
    """The records of one server that does one problem at a time."""
    return collect(tmp_path_factory.mktemp("alone") / "b.jsonl", [servers[0].url], completions=1)


def test_records_hold_every_problem_with_its_completions_and_verdicts(alone):
    assert [record.problem for record in alone] == list(range(24))
    assert [record.prompt for record in alone] == [problem.text for problem in PROBLEMS]
    assert all(len(record.samples) == 3 for record in alone)
    samples = [sample for record in alone for sample in (record.greedy, *record.samples)]
    assert {sample.truncated for sample in samples} == {True, False}
    assert all(sample.tokens == 12 for sample in samples if sample.truncated)
    assert all(sample.outcome is Outcome.INCORRECT for sample in samples if sample.truncated)  # and not verified
    assert len({sample.text for record in alone for sample in record.samples}) > 48  # each from a seed of its own
    for record in alone:
        for sample in (record.greedy, *record.samples):
            if not sample.truncated:
                assert sample.correct == (record.gold in sample.text)


@pytest.mark.parametrize("completions", [4, 100])
def test_scores_depend_neither_on_concurrency_nor_on_servers(servers, alone, tmp_path, completions):
    assert collect(tmp_path / "b.jsonl", [server.url for server in servers], completions=completions) == alone


def collect_here(file, engine, version=BASE):
    """The records of an engine that this process steps itself."""

    async def run(records):
        ends = {"stop_token_ids": {"": (END,)}, "version": version.version}
        collector = Collector(BENCHMARK, records, TOKENIZER, rewards(verify), **ends)
        async with asyncio.timeout(240):
            await OwnEngine(engine, slots=8).work_on(collector, version)
            await collector.finished()

    with RecordFile(file, {"benchmark": {"name": "b"}}) as records:
        asyncio.run(run(records))
        return records.records


def test_an_engine_in_the_same_process_scores_as_servers_do(alone, model, tmp_path):
    spec = read_spec(model)
    engine = Engine(spec, read_arrays(model, spec), slots=8)
    assert collect_here(tmp_path / "b.jsonl", engine) == alone
    version = dataclasses.replace(base_version(str(model)), version=7)
    assert collect_here(tmp_path / "c.jsonl", engine, version) == alone


def test_what_was_stopped_goes_on_and_comes_to_the_same(servers, alone, tmp_path):
    file = tmp_path / "b.jsonl"
    part = collect(file, [servers[0].url], until=7)
    assert 7 <= len(part) < 24
    assert part == [alone[record.problem] for record in part]
    asked = []

    def counted(task, text):
        asked.append(task.index)
        return verify(task, text)

    assert collect(file, [servers[1].url], check=counted) == alone
    assert not {record.problem for record in part} & set(asked)  # what was recorded is not done again


def test_a_server_that_is_lost_leaves_its_problems_to_others(servers, alone, model, tmp_path):
    with contextlib.suppress(AssertionError), serving("embedded", model, tmp_path / "ready.json", "--slots", 8) as lost:
        killed = False

        def check(task, text):
            nonlocal killed
            if not killed:
                lost.process.kill()
                killed = True
            return verify(task, text)

        found = collect(tmp_path / "b.jsonl", [lost.url, servers[0].url], check=check)
    assert killed
    assert found == alone
