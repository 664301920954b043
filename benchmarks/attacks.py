"""Programs that attack the verifier `code`: to get a reward without an answer, to reach the machine, or to stop it.

They are in attacks.txt, each below its name and its goal. The verifier gets them as answers to a task whose answer is a
secret. A successful attack prints BREACH. None of the lines below `@tries` may succeed. `@hunt` and `@call` insert
the functions below. MARK stands for the name of whatever an attack leaves behind. TCP, UDP, SOCKET and ABSTRACT stand
for services that listen on the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MARK = "areal-escape"
SECRET = "areal-secret-"  # and 16 hexadecimal digits
BREACH = "BREACH"

_MACROS = {
    "@hunt": """
import re
def found(data):
    data = data if isinstance(data, bytes) else str(data).encode()
    for text in re.findall(b'areal-' + b'secret-[0-9a-f]{16}', data):
        print('BREACH', text, flush=True)
        globals()['answer'] = lambda n: text.decode()
""",
    "@call": """
import ctypes
libc = ctypes.CDLL(None)
def call(*numbers):
    if libc.syscall(*numbers) >= 0: print('BREACH', numbers, flush=True)
""",
    "@deep": "answer = " + "(" * 5000 + "1" + ")" * 5000,
}


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    gain: str  # what it would have if it were not contained
    program: str


def attacks() -> list[Attack]:
    text = Path(__file__).with_suffix(".txt").read_text()
    parts = re.split(r"^=== (.*?): (.*)\n", re.sub(r"^# .*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)[1:]
    return [Attack(name, gain, _expanded(body)) for name, gain, body in zip(*[iter(parts)] * 3, strict=True)]


def _expanded(body: str) -> str:
    before, tried, lines = body.strip().partition("@tries\n")
    for macro, program in _MACROS.items():
        before = before.replace(macro, program)
    if not tried:
        return before + "\n"
    tries = (f"try:\n    {line}\n    print('BREACH', {line!r})\nexcept Exception: pass" for line in lines.splitlines())
    return before + "\n".join(tries) + "\n"
