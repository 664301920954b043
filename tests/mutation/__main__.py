"""Mutation testing of the core modules: does a test fail when the code is wrong?

A seeded sample of the mutants that cosmic-ray knows of a module, spread over the modules by their size. Each mutant is
one change in a copy of the source tree, in which that module's tests run within a bound of CPU seconds. A mutant that
no test kills survives: it is equivalent to the original, or a test is missing. Annotations are left alone, as nothing
evaluates them, and so is what is for people and type checkers: protocols, that records are frozen, and that arguments
have to be named.

    make mutants ARGS="--sample 300 --seed 1"      the last line printed is one JSON object
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.commands.init import _operators
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parents[2]
MODULES = {  # and the tests that are to kill their mutants
    "areal_core/controller/core/gate.py": ("tests/unit/controller/core/test_gate.py",),
    "areal_core/controller/core/ledger.py": (
        "tests/unit/controller/core",
        "tests/unit/controller/test_restore.py",
        "tests/property/test_ledger.py",
    ),
    "areal_core/controller/core/controller.py": ("tests/property/test_controller.py",),
    "areal_core/api/rollouts.py": ("tests/unit/api/test_rollouts.py", "tests/property/test_controller.py"),
    "areal_core/algorithm/objectives.py": ("tests/unit/algorithm",),
    "areal_core/algorithm/advantages.py": ("tests/unit/algorithm/test_advantages.py",),
    "areal_core/training/batching/partition.py": (
        "tests/unit/training/test_batches.py",
        "tests/property/test_batching.py",
    ),
    "areal_core/storage/checkpoint.py": (
        "tests/unit/storage/test_checkpoint.py",
        "tests/unit/controller/test_restore.py",
    ),
    "areal_core/api/wire.py": ("tests/unit/api",),
}
CPU_S = 60
WALL_S = 180  # for tests that wait without working
_LEAST = 8  # mutants of a module, so that a small one is tested too
_COPIED = ("areal_core", "benchmarks", "flows", "tests", "conf", "docs", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Mutant:
    module: str
    operator: str
    arguments: str  # JSON
    occurrence: int
    line: int


def mutants(module: str) -> Iterator[Mutant]:
    """All mutants of a module that cosmic-ray knows, but for those in annotations."""
    text = (ROOT / module).read_text()
    silent = declarations(text)
    tree = get_ast(text)
    for name, arguments, operator in _operators({}):
        positions = ((start, end) for node in ast_nodes(tree) for start, end in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(low <= start < high for low, high in silent):
                yield Mutant(module, name, json.dumps(arguments), occurrence, start[0])


def declarations(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations, decorators of dataclasses, protocols and marks of keyword-only arguments begin and end, as
    (line, column)."""
    found: list[ast.expr | ast.stmt] = []
    marks: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [] if node.returns is None else [node.returns]
            if node.args.kwonlyargs and node.args.vararg is None:
                before = [*node.args.args, *node.args.defaults]
                start = max(
                    ((one.end_lineno or 0, one.end_col_offset or 0) for one in before), default=(node.lineno, 0)
                )
                marks.append((start, (node.args.kwonlyargs[0].lineno, node.args.kwonlyargs[0].col_offset)))
        elif isinstance(node, ast.ClassDef):
            protocol = any(ast.unparse(base).startswith("Protocol") for base in node.bases)
            found += node.body if protocol else []
            found += [one for one in node.decorator_list if "dataclass" in ast.unparse(one)]
    ends = [((one.lineno, one.col_offset), (one.end_lineno or one.lineno, one.end_col_offset or 0)) for one in found]
    return [*marks, *ends]


def sample(size: int, seed: int, modules: list[str]) -> list[Mutant]:
    """`size` mutants, from each module in proportion to how many it has, in a seeded order."""
    known = {module: list(mutants(module)) for module in modules}
    total = sum(map(len, known.values()))
    rng = random.Random(seed)
    chosen: list[Mutant] = []
    for found in known.values():
        chosen += rng.sample(found, min(len(found), max(_LEAST, round(size * len(found) / total))))
    rng.shuffle(chosen)
    return chosen


def judge(mutant: Mutant, tree: Path, python: str) -> tuple[str, str]:
    """What became of a mutant, killed or survived, and the change."""
    from cosmic_ray.plugins import get_operator

    file = tree / mutant.module
    original = (ROOT / mutant.module).read_text()
    operator = get_operator(mutant.operator)(**json.loads(mutant.arguments))
    changed = mutate_code(original, operator, mutant.occurrence)
    assert changed is not None, mutant
    diff = "\n".join(
        line
        for line in difflib.unified_diff(original.splitlines(), changed.splitlines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    )
    file.write_text(changed)
    try:
        command = [python, "-m", "pytest", "-x", "-q", "--no-header", *MODULES[mutant.module]]
        ended = subprocess.run(
            command,
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "mutants"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=WALL_S,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5)),
        )
        return ("survived" if ended.returncode == 0 else "killed"), diff
    except subprocess.TimeoutExpired:
        return "killed", diff
    finally:
        file.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--python", default=str(ROOT / ".venv" / "bin" / "python"), help="interpreter for the tests")
    parser.add_argument("--module", action="append", choices=list(MODULES), help="these alone")
    arguments = parser.parse_args()
    chosen = sample(arguments.sample, arguments.seed, arguments.module or list(MODULES))
    outcomes: Counter[tuple[str, str]] = Counter()
    survivors: list[dict[str, object]] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as scratch:
        trees: SimpleQueue[Path] = SimpleQueue()
        for worker in range(arguments.workers):
            tree = Path(scratch, str(worker))
            for name in _COPIED:
                source = ROOT / name
                copy = shutil.copytree if source.is_dir() else shutil.copy
                tree.mkdir(exist_ok=True)
                copy(source, tree / name)
            trees.put(tree)

        def one(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                outcome, diff = judge(mutant, tree, arguments.python)
            finally:
                trees.put(tree)
            with lock:
                outcomes[mutant.module, outcome] += 1
                print(
                    f"{sum(outcomes.values())}/{len(chosen)} {outcome} {mutant.module}:{mutant.line}", file=sys.stderr
                )
                if outcome == "survived":
                    survivors.append({"module": mutant.module, "line": mutant.line, "change": diff})

        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(one, chosen))
    killed = {module: outcomes[module, "killed"] for module in MODULES}
    sampled = {module: killed[module] + outcomes[module, "survived"] for module in MODULES}
    for survivor in sorted(survivors, key=lambda s: (str(s["module"]), int(str(s["line"])))):
        print(f"{survivor['module']}:{survivor['line']}\n{survivor['change']}\n")
    total, all_killed = sum(sampled.values()), sum(killed.values())
    print(
        json.dumps(
            {
                "sampled": total,
                "killed": all_killed,
                "share": round(all_killed / max(total, 1), 3),
                "modules": {module: [killed[module], sampled[module]] for module in MODULES if sampled[module]},
            }
        )
    )


if __name__ == "__main__":
    main()
