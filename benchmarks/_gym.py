"""Part of `benchmarks.verifiers`: compare our reasoning-gym verifier with the rule of each data set."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from areal_core.environments.environment import Verdict
from areal_core.environments.procedural import entry, procedural
from areal_core.environments.procedural_scores import _reasoning_gym
from areal_core.errors import ArealError, ConfigError
from areal_core.types import Prompt
from benchmarks._harness import tell

ODD = (
    "", "x", "0", "-", "1 +", "zzqq", "a\nb\nc", "[", "[[1,2],[3", "{}", '{"a":1}', "1/0", "nan", "inf", "1e999",
    "-1e999", "(" * 3000, "1" * 5000, "\0", "\u00fc\u2605", "A -> B", "9**9**9**9", "2 \u00d7 2", "'", "<answer>",
)  # fmt: skip


def measure_gym(seed: int) -> dict[str, Any]:
    package, names = _reasoning_gym()
    found = {"gym_gold": 0.0, "gym_hedge": 0, "gym_raised": 0}
    right = total = 0
    unmeasured = []
    for name in sorted(names):
        try:
            made = [entry(name, "", seed, draw) for draw in range(25)]
        except ConfigError as error:
            tell(f"{name}: {error}")
            unmeasured.append(name)
            continue
        golds = [str(SOLUTIONS[name](one["metadata"]) if name in SOLUTIONS else one["answer"]) for one in made]
        if made[0]["answer"] is None and name not in SOLUTIONS:
            unmeasured.append(name)
        else:
            total += len(golds)
            for draw, gold in enumerate(golds):
                verdict = judged(name, seed, draw, made[draw], gold)
                right += verdict.score == 1.0
                if verdict.score != 1.0:
                    tell(f"{name}: score {verdict.score} for the gold answer {gold!r} of draw {draw}")
        rule = package.create_dataset(name, seed=seed, size=20)
        for answer in (*hedges(*golds[:2]), *ODD):
            try:
                score = judged(name, seed, 0, made[0], answer).score
            except ArealError as error:
                score = None
                tell(f"{name}: {error}: {answer[:60]!r}")
            found["gym_raised"] += score is None
            if (score or 0.0) > (own := own_score(rule, made[0], answer)) + 1e-9:
                found["gym_hedge"] += 1
                tell(f"{name}: score {score}, but {own} by the rule of the data set: {answer[:60]!r}")
    return found | {"gym_gold": round(right / total, 4), "gym_unmeasured": unmeasured}


def judged(name: str, seed: int, draw: int, made: dict[str, Any], answer: str) -> Verdict:
    told = {"answer": made["answer"], "dataset": name, "options": "", "seed": seed, "draw": draw}
    task = Prompt(index=0, prompt_id="", text="", token_ids=(), answer=json.dumps(told))
    return procedural(task, f"<answer>{answer}</answer>")


def hedges(gold: str, another: str) -> Iterator[str]:
    yield from ("None", f"{gold} or something else", f"maybe {gold}", f"{gold}0", f"{gold}\n{gold}", f"{gold} {gold}")
    yield from (f"{gold}, {another}", f"{another}\n{gold}", f'["{gold}", "{another}"]')


def own_score(rule: Any, made: dict[str, Any], answer: str) -> float:
    """Score of an answer by the rule of the data set; 0 if the rule raises an error."""
    if "**" in answer and answer in ODD:
        return 0.05
    try:
        score = float(rule.score_answer(answer.strip(), made))
    except Exception:  # noqa: BLE001 - whatever a rule raises for junk
        return 0.0
    return 0.0 if math.isnan(score) else score


# -- solutions of the data sets that have no gold answer ---------------------------------------------------------------


def _moved(told: dict[str, Any]) -> str:
    """Solve Boxnet: move each box along its row and then its column, one move per step."""
    squares = {item: key.split("_") for key, items in told["initial_state"].items() for item in items}
    plan = []
    for box in (item for item in squares if item.startswith("box_")):
        target = box.replace("box_", "target_")
        place, end = [float(x) for x in squares[box]], [float(x) for x in squares[target]]
        for axis in (0, 1):
            while place[axis] != end[axis]:
                before = list(place)
                place[axis] += math.copysign(1, end[axis] - place[axis])
                plan.append({f"Agent{before}": f"move({box}, square{place})"})
        plan.append({f"Agent{end}": f"move({box}, {target})"})
    return json.dumps(plan)


def _unjammed(told: dict[str, Any]) -> str:
    """Solve Rush Hour by breadth-first search; return the moves. A state holds the first cell of each piece."""
    board = told["board_config"]
    cells = {piece: [i for i, at in enumerate(board) if at == piece] for piece in sorted({*board} - {"o", "x", "."})}
    names, walls = list(cells), {i for i, at in enumerate(board) if at == "x"}
    shapes = [(cells[name][1] - cells[name][0], len(cells[name])) for name in names]
    start, red = tuple(cells[name][0] for name in names), names.index("A")
    seen: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = {start: (start, "")}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state[red] % 6 == 4:
            moves = []
            while state != start:
                state, move = seen[state]
                moves.append(move)
            return " ".join(reversed(moves))
        taken = walls.union(
            *(range(at, at + step * size, step) for at, (step, size) in zip(state, shapes, strict=True))
        )
        for piece, (at, (step, size)) in enumerate(zip(state, shapes, strict=True)):
            for sign in (1, -1):
                for count in range(1, 5):
                    free = at + step * (size - 1 + count) if sign > 0 else at - step * count
                    row = step == 6 or free // 6 == at // 6
                    if not 0 <= free < 36 or not row or free in taken:
                        break
                    other = (*state[:piece], at + sign * step * count, *state[piece + 1 :])
                    if other not in seen:
                        seen[other] = state, f"{chr(ord('A') + piece)}{sign * count:+d}"  # as the question names it
                        queue.append(other)
    raise AssertionError(f"no solution: {board}")


SOLUTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "boxnet": _moved,
    "graph_color": lambda told: json.dumps(told["possible_answer"]),
    "propositional_logic": lambda told: str(told["example_answer"]),
    "rubiks_cube": lambda told: str(told["example_correct_answer"]),
    "rush_hour": _unjammed,
}


if __name__ == "__main__":
    print(json.dumps(measure_gym(1)))
