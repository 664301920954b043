"""Part of `benchmarks.verifiers`: mathematical answers with undisputed verdicts, and the speed of verdicts."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from areal_core.config.schema import load
from areal_core.environments.mathematics import gold_answer
from areal_core.environments.registry import mathematics
from areal_core.evaluation.sampling import Benchmark, Collector
from areal_core.evaluation.scores import RecordFile
from areal_core.models.tokenizer import Tokenizer
from areal_core.rewards.pool import open_rewards
from areal_core.types import Completion, GenerationRequest, Outcome, Prompt
from benchmarks._harness import tell

CASES = Path(__file__).with_name("math_cases.jsonl")
AT_ONCE = (1, 8, 64)  # completions that the evaluator has judged at the same time
LETTERS = "abcdkmnpqrtuvxyz"


def long_cases() -> Iterator[tuple[str, str, bool]]:
    """Gold answer, completion and correctness of each case whose completion is too long for a file."""
    yield "3", r"\boxed{3}" + " filler 5" * 60_000, True
    yield "3", "1," * 200_000, False
    yield "3", " \t" * 300_000 + "3", True
    yield "3", "answer" * 50_000, False
    yield "3", r"\boxed{" + "9" * 590 + "}", False
    yield "3", r"\boxed{" + "1+" * 250 + "1}", False
    yield "3", r"\boxed{" + "(" * 58 + "3" + ")" * 58 + "}", True
    yield r"\sqrt{2}", r"\boxed{" + r"\frac{1}{1+" * 39 + "1" + "}" * 40, False


def cases() -> Iterator[tuple[str, str, bool]]:
    """Gold answer, completion and correctness of each case."""
    for line in CASES.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        yield gold_answer(str(case["gold"])) or str(case["gold"]), case["completion"], case["expected"]
    yield from long_cases()


def formulas(count: int, seed: int) -> list[tuple[str, str, bool]]:
    """Distinct pairs of formulas; every other pair is equal."""
    rng, made = random.Random(seed), list[tuple[str, str, bool]]()
    for place in range(count):
        x, y = rng.sample(LETTERS, 2)
        a, b, c = (rng.randrange(2, 10_000) for _ in range(3))
        right = place % 2 == 0
        d = b if right else b + 1
        made.append(
            rng.choice(
                (
                    (f"({x}+{a})({x}-{b})", f"{x}^2-{a * b}+{a}{x}-{d}{x}", right),
                    (
                        rf"\frac{{{a}{x}}}{{{b}}}+\sqrt{{{c}{y}}}",
                        rf"\sqrt{{{y}}}\sqrt{{{c}}}+\frac{{{a}{x}}}{{{d}}}",
                        right,
                    ),
                    (rf"e^{{{a}{x}}}\sin({b}{y})", rf"\sin({d}{y})e^{{{a}{x}}}", right),
                    (rf"\ln({a}{x})+{b}", rf"\ln {a}+\ln {x}+{d}", right),
                    (rf"{a}\sqrt{{{b}}}+{c}", rf"\sqrt{{{a * a * d}}}+{c}", right),
                )
            )
        )
    return made


def measure_cases(seed: int) -> dict[str, Any]:
    wrong = [(gold, text, right) for gold, text, right in cases() if _is_right(gold, text) != right]
    for gold, text, right in wrong:
        tell(f"{'refused' if right else 'accepted'}: {text[:100]!r} for {gold!r}")
    total = sum(1 for _ in cases())
    made = formulas(2000, seed)
    plain = [(str(n), rf"so it is \boxed{{{n if n % 2 else n + 1}}}.", n % 2 == 1) for n in range(10_000, 30_000)]
    boxed = [(gold, rf"\boxed{{{answer}}}", right) for gold, answer, right in formulas(2000, seed + 1)]
    return {
        "cases_correct": round(1 - len(wrong) / total, 4),
        "cases_false_accept": sum(not right for *_, right in wrong),
        "evaluator_mixed": sum(asyncio.run(_mixed(made, at_once)) for at_once in AT_ONCE),
        "plain_per_cpu_s": _per_cpu_s(plain),
        "formulas_per_cpu_s": _per_cpu_s(boxed),
    }


def _is_right(gold: str, text: str) -> bool:
    prompt = Prompt(index=0, prompt_id="", text="", token_ids=(), answer=gold)
    return mathematics(prompt, text).outcome is Outcome.CORRECT


def _per_cpu_s(judged: list[tuple[str, str, bool]]) -> int:
    before = time.process_time()
    assert all(_is_right(gold, text) == right for gold, text, right in judged)
    return round(len(judged) / (time.process_time() - before))


class _Completing:
    """Server that completes each request at once with the text given for its problem."""

    url = "stand-in"

    def __init__(self, texts: list[str], tokenizer: Tokenizer) -> None:
        self._texts, self._tokenizer = texts, tokenizer

    async def complete(self, request: GenerationRequest) -> list[Completion]:
        ids = np.array(self._tokenizer.encode(self._texts[int(request.request_id.split("-")[1])]), np.int32)
        zeros = np.zeros(len(ids), np.int32)
        return [Completion(token_ids=ids, logprobs=zeros.astype(np.float32), versions=zeros, finish_reason="stop")]


async def _mixed(judged: list[tuple[str, str, bool]], at_once: int) -> int:
    """Number of verdicts that the evaluator assigns to a wrong problem."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(code): code for code in range(128)}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = Tokenizer(inner)
    problems = [
        Prompt(index=index, prompt_id=f"{index:064x}", text="?", token_ids=(1,), answer=gold)
        for index, (gold, _, _) in enumerate(judged)
    ]
    server = _Completing([rf"\boxed{{{answer}}}" for _, answer, _ in judged], tokenizer)
    config = load({"environment": {"verifier": "mathematics"}})
    benchmark = Benchmark(name="own", config=config, problems=problems, about={})
    with tempfile.TemporaryDirectory() as folder, RecordFile(Path(folder) / "r", {"a": 1}) as records:
        inner.save(f"{folder}/tokenizer.json")
        rewards = open_rewards(config, folder, workers=2)
        try:
            collector = Collector(benchmark, records, tokenizer, rewards, stop_token_ids={"": ()})
            await collector.work(server, at_once)
        finally:
            await rewards.close()
        found = records.records
    assert len(found) == len(judged)
    return sum((record.greedy.outcome is Outcome.CORRECT) != judged[record.problem][2] for record in found)
