r"""Do verifiers reward correct answers and nothing else, and at what cost?

    python -m benchmarks.verifiers [--data FOLDER] [--seed 1]

The verifier `mathematics` judges gold answers of `benchmarks/answers.jsonl`, and of GSM8K, AIME24, AMC23 and Minerva if
FOLDER has their files (gsm8k-test.jsonl, aime24.jsonl, amc23.jsonl, minerva-math.jsonl). The verifier `code` judges
HumanEval (humaneval.jsonl), or `benchmarks/problems.jsonl` without FOLDER:

- `math_gold`: per benchmark, share of gold answers judged correct at the end of a sentence, in a box, and as a formula
- `math_reformatted`: per form, share judged correct: other spacing, \dfrac, decimal for fraction and fraction for
  decimal if exact, thousands separators, a unit
- `math_wrong_accepted`: per kind, share of incorrect answers judged correct: a changed digit or sign, another problem's
  answer, a part of the gold answer, its beginning, an inverted fraction
- `e1_wrong`: of pairs with an undisputed verdict, those that get the other one
- `math_per_cpu_s`: verdicts of all of these per CPU second; `_by`: per benchmark
- `cases_correct`, `cases_false_accept`: of `benchmarks/math_cases.jsonl`, the share with the expected verdict, and the
  number of incorrect answers judged correct
- `evaluator_mixed`: number of verdicts assigned to a wrong problem, among 2,000 formulas that the evaluator judges 1, 8
  and 64 at a time
- `plain_per_cpu_s`, `formulas_per_cpu_s`: verdicts per CPU second on whole numbers, and on distinct formulas
- `hostile_cpu_s`: CPU seconds of the most expensive of the answers that are made to slow a verifier down
- `math_p99_ms`: 99th percentile of the time of an honest answer in one of two reward workers, while the other one gets
  hostile answers all the time
- `reasoning_gym_per_cpu_s`: verdicts on correct and incorrect answers of ten data sets, without repetition, per CPU
  second of the verifier, its fork server and the forks; the entries are generated before

- `gym_gold`: of 25 entries of each data set of reasoning-gym, share whose gold answer, or a computed solution, gets the
  full score; `gym_unmeasured`: data sets that have neither, or make no entry by default
- `gym_hedge`: of hedges (None, junk, the gold answer beside others), those that score above the rule of the data set;
  `gym_raised`: those without a verdict, each of which costs a group an attempt

- `human_eval_pass`: of `human_eval_problems` solutions, those that pass
- `programs_per_cpu_s`: verdicts on these solutions per CPU second of the verifier and its sandboxes
- `code_cases_correct`: of `code_cases` answers (`benchmarks/code_cases.jsonl`), those with the expected verdict;
  `code_cases_false_accept`: incorrect ones judged correct
- `mutants_pass`: of one mutant of each solution, those that pass; `mutants_equivalent` of these make no difference, for
  a reason in `benchmarks/_mutants.py`. `mutants_redrawn` were replaced: they passed, but agree with the solution on
  every input of the problem's tests, so that no verifier could tell them apart
- `attacks_contained`: of `attacks` programs (`benchmarks/attacks.txt`), those that gain nothing
- `code_per_s`: verdicts per second on these solutions, with two reward workers

Progress lines list every rejected gold answer, every accepted incorrect one, every passing mutant and every successful
attack.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil

from areal_core.environments.mathematics import gold_answer
from areal_core.environments.procedural import entry, procedural
from areal_core.environments.registry import mathematics
from areal_core.errors import ConfigError
from areal_core.rewards.pool import RewardPool
from areal_core.types import Outcome, Prompt
from benchmarks._gym import measure_gym
from benchmarks._harness import parser, report, tell
from benchmarks._math_cases import measure_cases
from benchmarks._programs import measure_programs

OWN = Path(__file__).with_name("answers.jsonl")
FILES = {  # benchmark -> file, fields that may hold the answer
    "gsm8k": ("gsm8k-test.jsonl", ("answer",)),
    "aime24": ("aime24.jsonl", ("answer",)),
    "amc23": ("amc23.jsonl", ("answer",)),
    "minerva": ("minerva-math.jsonl", ("solution",)),
}
SENTENCES = (
    "The answer is {}.",
    "Therefore \\boxed{{{}}}, as was asked.",
    "so that the final answer is: ${}$",
    "#### {}",
)
CERTAIN = (  # gold, answer, right
    (r"\frac{3}{4}", r"\boxed{4}", False),
    (r"3\sqrt{2}", "2", False),
    ("(1,2)", "12", False),
    ("(1,2)", "(1, 2)", True),
    (r"\frac{3}{4}", "0.75", True),
    ("4.5e33", "33", False),
    ("4.5e33", r"4.5 \times 10^{33}", True),
    ("1.6e-9", "0", False),
)
GENERATED = (
    "basic_arithmetic", "chain_sum", "countdown", "leg_counting", "maze", "n_queens", "needle_haystack",
    "number_sorting", "polynomial_equations", "spell_backward",
)  # fmt: skip
HOSTILE = (
    "9^{9^{9^{9}}}",
    "1000000!",
    "(((99^{99})^{99})^{99})^{99}",
    r"\sum_{n=1}^{10000000} \frac{1}{n^n}",
    r"\int_0^1 \frac{\sin(x^{x^x})}{x^x+1} dx",
    "(x+y+z)^{200}",
    r"\binom{100000000}{50000000}",
    r"\sqrt{" * 40 + "x" + "}" * 40,
    "1" * 500 + "^{" + "9" * 50 + "}",
    "(" * 50 + "x" + ")" * 50,
)


def main() -> None:
    command = parser(__doc__, overrides=False)
    command.add_argument("--data", type=Path, help="folder with the files of the benchmarks")
    command.add_argument("--seed", type=int, default=1)
    given = command.parse_args()
    report(
        lambda: (
            measure(given.data, given.seed)
            | measure_cases(given.seed)
            | measure_gym(given.seed)
            | measure_programs(given.data, given.seed)
        )
    )


def measure(data: Path | None, seed: int) -> dict[str, Any]:
    golds = gold_answers(data)
    judged = Judged()
    result: dict[str, Any] = {
        "math_gold": {name: judged.gold(name, answers) for name, answers in golds.items()},
        "math_reformatted": judged.reformatted(golds),
        "math_wrong_accepted": judged.wrong(golds, random.Random(seed)),
        "e1_wrong": sum((verdict(gold, text) is Outcome.CORRECT) != right for gold, text, right in CERTAIN),
    }
    counted = {name: (judged.count[name], judged.cpu_s[name]) for name in golds}
    result["math_per_cpu_s"] = round(sum(n for n, _ in counted.values()) / sum(s for _, s in counted.values()))
    result["math_per_cpu_s_by"] = {name: round(n / s) for name, (n, s) in counted.items()}
    result["hostile_cpu_s"] = round(max(hostile_cpu_s(text) for text in HOSTILE), 2)
    honest = [(gold, SENTENCES[1].format(gold)) for answers in golds.values() for gold in answers]
    result["reasoning_gym_per_cpu_s"] = reasoning_gym_per_cpu_s()
    result["math_p99_ms"] = round(asyncio.run(_p99_ms(random.Random(seed).sample(honest, min(500, len(honest))))), 1)
    return result


def gold_answers(data: Path | None) -> dict[str, list[str]]:
    """Benchmark -> its gold answers."""
    found = {"own": [json.loads(line)["answer"] for line in OWN.read_text().splitlines()]}
    for name, (file, fields) in FILES.items() if data is not None else ():
        path = data / file
        if not path.is_file():
            raise ConfigError(f"--data: must be a folder with the file {path.name}, got {path.parent}")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        answers = [gold_answer(str(next(row[field] for field in fields if field in row))) for row in rows]
        found[name] = [answer for answer in answers if answer is not None]
        if len(found[name]) < len(rows):
            tell(f"{name}: {len(rows) - len(found[name])} of {len(rows)} rows have no gold answer")
    return found


def verdict(gold: str, text: str) -> Outcome:
    return mathematics(Prompt(index=0, prompt_id="", text="", token_ids=(), answer=gold), text).outcome


def cpu_s() -> float:
    """CPU seconds of this process and its children, including dead ones."""
    spent = time.process_time()
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        spent += times.user + times.system + times.children_user + times.children_system
    return spent


class Judged:
    """Verdicts, and their cost by benchmark."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        self.cpu_s: dict[str, float] = {}

    def gold(self, name: str, answers: Sequence[str]) -> float:
        texts = [(answer, sentence.format(answer)) for answer in answers for sentence in SENTENCES]
        missed = [(gold, text, found) for gold, text, found in self._verdicts(name, texts) if found != Outcome.CORRECT]
        for gold, text, found in missed:
            tell(f"{name}: {found}: {text!r} for {gold!r}")
        return round(1 - len(missed) / len(texts), 4)

    def reformatted(self, golds: Mapping[str, Sequence[str]]) -> dict[str, float | None]:
        return {form.__name__: self._right(golds, form) for form in FORMS}

    def wrong(self, golds: Mapping[str, Sequence[str]], rng: random.Random) -> dict[str, float | None]:
        return {
            kind.__name__: self._right(
                golds, lambda gold, kind=kind: _changed(gold, kind(gold, golds, rng)), wrong=True
            )
            for kind in WRONG
        }

    def _right(
        self, golds: Mapping[str, Sequence[str]], change: Callable[[str], str | None], *, wrong: bool = False
    ) -> float | None:
        right = total = 0
        for name, answers in golds.items():
            changed = [(gold, text) for gold in answers if (text := change(gold)) is not None]
            total += len(changed)
            for gold, text, found in self._verdicts(name, [(g, SENTENCES[1].format(text)) for g, text in changed]):
                right += found is Outcome.CORRECT
                if (found is Outcome.CORRECT) == wrong:
                    tell(f"{name}: {found}: {text!r} for {gold!r}")
        return round(right / total, 4) if total else None

    def _verdicts(self, name: str, texts: Sequence[tuple[str, str]]) -> list[tuple[str, str, Outcome]]:
        before = cpu_s()
        found = [(gold, text, verdict(gold, text)) for gold, text in texts]
        self.count[name] = self.count.get(name, 0) + len(texts)
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + cpu_s() - before
        return found


def reasoning_gym_per_cpu_s(entries: int = 20) -> int:
    tasks = []
    for name in GENERATED:
        for draw in range(entries):
            answer = entry(name, "", 5, draw)["answer"]
            told = {"answer": answer, "dataset": name, "options": "", "seed": 5, "draw": draw}
            tasks.append((Prompt(index=0, prompt_id="", text="", token_ids=(), answer=json.dumps(told)), str(answer)))
    for task, _ in tasks:
        procedural(task, "none")
    before = cpu_s()
    for task, answer in tasks:
        right = procedural(task, f"<answer>{answer}</answer>").score
        assert right == 1.0, task.answer
        procedural(task, f"<answer>{answer[:-1]}?</answer>")
    return round(2 * len(tasks) / (cpu_s() - before))


# -- the same answers, written otherwise -------------------------------------------------------------------------------


def spacing(gold: str) -> str:
    return (
        re.sub(r"(?<![eE\\{])([-+=<>,])(?=.)", r" \1\\, ", gold.replace(r"\,", "")) if not _plain(gold) else f" {gold} "
    )


def dfrac(gold: str) -> str | None:
    return gold.replace(r"\frac", r"\dfrac") if r"\frac" in gold else None


def decimal_or_fraction(gold: str) -> str | None:
    number = _fraction(gold)
    if number is None or abs(number) > 10**12 or (number != 0 and abs(number) < Fraction(1, 10**6)):
        return None
    if re.fullmatch(r"-?\d+\.\d+", gold.strip()) and number.denominator > 1:
        sign = "-" if number < 0 else ""
        return rf"{sign}\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"
    text = f"{float(number):.6f}".rstrip("0")
    return text + "0" * text.endswith(".") if Fraction(text + "0" * text.endswith(".")) == number else None


def thousands(gold: str) -> str | None:
    plain = gold.strip().replace(",", "")
    return f"{int(plain):,}" if re.fullmatch(r"-?\d{4,}", plain) else None


def unit(gold: str) -> str | None:
    return rf"{gold} \text{{ cm}}" if _fraction(gold) is not None else None


FORMS = (spacing, dfrac, decimal_or_fraction, thousands, unit)


# -- wrong answers -----------------------------------------------------------------------------------------------------

Golds = Mapping[str, Sequence[str]]


def neighbour(gold: str, golds: Golds, rng: random.Random) -> str | None:
    digits = list(re.finditer(r"\d", gold))
    if not digits:
        return None
    chosen = rng.choice(digits)
    return f"{gold[: chosen.start()]}{(int(chosen[0]) + 1) % 10}{gold[chosen.end() :]}"


def sign(gold: str, golds: Golds, rng: random.Random) -> str | None:
    if _plain(gold):
        return gold[1:] if gold.startswith("-") else f"-{gold}"
    return None if re.search(r"[=,]", gold) else f"-\\left({gold}\\right)"


def another(gold: str, golds: Golds, rng: random.Random) -> str | None:
    return rng.choice(next(answers for answers in golds.values() if gold in answers))


def part(gold: str, golds: Golds, rng: random.Random) -> str | None:
    parts = re.findall(r"[A-Za-z0-9.]+", gold)
    return rng.choice(parts) if len(parts) > 1 else None


def truncated(gold: str, golds: Golds, rng: random.Random) -> str | None:
    return gold[: rng.randrange(1, len(gold))] if len(gold) > 1 else None


def inverted(gold: str, golds: Golds, rng: random.Random) -> str | None:
    swapped = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\\frac{\2}{\1}", gold, count=1)
    slashed = re.fullmatch(r"(-?)(\d+)/(\d+)", gold)
    return f"{slashed[1]}{slashed[3]}/{slashed[2]}" if slashed else swapped if swapped != gold else None


WRONG = (neighbour, sign, another, part, truncated, inverted)


def _changed(gold: str, text: str | None) -> str | None:
    """A changed answer; None if the change makes no difference."""
    if text is None or text.strip() == gold.strip():
        return None
    same = _fraction(gold) is not None and _fraction(gold) == _fraction(text)
    return None if same else text


def _plain(text: str) -> bool:
    return _fraction(text) is not None and "\\" not in text


def _fraction(text: str) -> Fraction | None:
    """Value of a number in Python's notation, or of a LaTeX fraction of two; None for anything else."""
    text = re.sub(r"^(-?)\\frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", text.strip().replace(",", "")).rstrip(".")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None


# -- answers that are made to hold a verifier up -----------------------------------------------------------------------


def hostile_cpu_s(text: str) -> float:
    before = cpu_s()
    found = verdict(r"\sqrt{2}", rf"\boxed{{{text}}}")
    verdict(r"\sqrt{2}", r"\boxed{x^2+x}")  # after which the last one's cost is counted
    spent = cpu_s() - before
    tell(f"{found} after {spent:.2f} CPU s: {text[:60]}")
    return spent


def _judged(message: tuple[str, str]) -> str:
    return verdict(*message)


async def _p99_ms(honest: Sequence[tuple[str, str]]) -> float:
    from benchmarks import verifiers  # workers look for functions by module, and this one may be __main__

    pool = RewardPool(2, timeout_s=60, function=verifiers._judged)
    try:
        warm = (r"2\sqrt{2}", r"\boxed{\sqrt{8}}")
        await asyncio.gather(*(pool.ask(warm) for _ in range(4)))

        async def attack() -> None:
            for text in _for_ever(HOSTILE):
                await pool.ask((r"\sqrt{2}", rf"\boxed{{{text}}}"))

        attacking = asyncio.create_task(attack())
        taken = []
        for message in honest:
            start = time.perf_counter()
            await pool.ask(message)
            taken.append(time.perf_counter() - start)
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
        return sorted(taken)[int(0.99 * len(taken))] * 1e3
    finally:
        await pool.close()


def _for_ever(texts: Sequence[str]) -> Iterator[str]:
    while True:
        yield from texts


if __name__ == "__main__":
    main()
