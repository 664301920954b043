"""What runs in the sandbox: it gives up what it may still do, and then runs a program that nobody trusts.

    python -P -s -S confined.py SETTINGS    # JSON: the limits, and the file descriptor of the job, JSON as well

This file is all of the package that is visible there, so it imports nothing of it. A job is one of

- `run`: a program as a script, with the input and output of this process
- `serve`: a program whose function is called: lines `call [args, kwargs]` come in, lines `value V` go out
- `check`: a program that checks a function which is elsewhere: lines `call` go out and `value` come in, then `passed`

Values cross as JSON (`encode`, `decode`), so that what arrives is a number, a text or a collection, and no object.
"""

from __future__ import annotations

import builtins
import json
import os
import resource
import signal
import sys
import types

TYPE_CHECKING = False  # the module `typing` would cost every program milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UNPARSABLE, OUT_OF_MEMORY = 91, 92  # exit codes; a program may lie with them, and is wrong all the same
STARTED = b"\0"  # on stderr, before the program has had a say
_OPEN_FILES = 64


def main() -> None:
    settings = json.loads(sys.argv[1])
    with open(settings["job"], "rb") as file:
        job = json.loads(file.read())
    if os.getpid() == 1:
        divide()
    confine(settings)
    os.write(2, STARTED)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    builtins.exit = builtins.quit = sys.exit  # which the module `site` would define
    try:
        {"run": run, "serve": serve, "check": check}[job["kind"]](job)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def divide() -> None:
    """Go on as a child. The first process of a namespace waits for it, takes its exit code, and all others along. It
    stays the user that it is: another one's would not be ended with bubblewrap (PR_SET_PDEATHSIG)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which nobody in the namespace can send it then
    if (child := os.fork()) == 0:
        return
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def confine(settings: dict[str, Any]) -> None:
    """Limits that can't be raised again, and a user of its own: root is exempt from that of processes."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # whatever fills the machine's memory, this process goes first
    limits = {
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if settings["processes"] is not None:
        limits[resource.RLIMIT_NPROC] = settings["processes"]
    if settings["uid"] is not None:
        user = settings["uid"]
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))  # SIGXCPU, then SIGKILL


def run(job: dict[str, Any]) -> None:
    program = compiled(job["source"])
    if program is None:
        os._exit(UNPARSABLE)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["program.py"]
    exec(program, module.__dict__)


def compiled(source: str) -> types.CodeType | None:
    """None for what is no program."""
    try:
        return compile(source, "<program>", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError):
        return None


# -- functions that are called from elsewhere ----------------------------------------------------------------------


def serve(job: dict[str, Any]) -> None:
    receive, send = taken_over()
    source = next((source for source in job["sources"] if compiled(source) is not None), None)
    if source is None:
        send("unparsable")
        return
    function = found(job, source)
    send("ready")
    while (line := receive()) is not None:
        args, kwargs = decode(json.loads(line.partition(" ")[2]))
        send("value " + json.dumps(encode(function(*args, **kwargs))))


def found(job: dict[str, Any], source: str) -> Callable[..., Any]:
    """The function, or the method of a class `Solution`, that a program defines under a name."""
    module = sys.modules["program"] = types.ModuleType("program")
    names, entry = module.__dict__, job["entry"]
    exec(job["before"], names)
    names.pop(entry, None)  # it must be the program's own
    exec(compile(source, "<program>", "exec"), names)
    return names[entry] if entry in names else getattr(names["Solution"](), entry)


def check(job: dict[str, Any]) -> None:
    receive, send = taken_over()

    def candidate(*args: Any, **kwargs: Any) -> Any:
        send("call " + json.dumps(encode([args, kwargs])))
        kind, _, value = (receive() or "").partition(" ")
        if kind != "value":
            raise RuntimeError(kind)
        return decode(json.loads(value))

    names: dict[str, Any] = {"__name__": "check"}
    exec(job["before"], names)
    exec(job["test"], names)
    names[job["entry"]] = candidate
    judge = names["check"]
    send("ready")
    try:
        judge(candidate)
    except Exception:  # noqa: BLE001 - whatever the values that came in make it raise
        send("failed")
    else:
        send("passed")


def taken_over() -> tuple[Callable[[], str | None], Callable[[str], None]]:
    """Functions that receive a line and send one; what the program reads and prints goes nowhere."""
    lines, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 0)
    os.dup2(2, 1)

    def receive() -> str | None:
        return lines.readline().removesuffix("\n") or None

    def send(line: str) -> None:
        replies.write(line + "\n")
        replies.flush()

    return receive, send


def encode(value: Any) -> Any:
    """As JSON has it; in a list of its kind and its parts where JSON has no such value."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return ["list", [encode(part) for part in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(part)] for key, part in value.items()]]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(part) for part in value]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    raise TypeError(type(value).__name__)


def decode(value: Any) -> Any:
    """The value that was encoded. Raises ValueError or TypeError for anything else."""
    if not isinstance(value, list):
        return _plain(value)
    kind, parts = value
    if kind == "list":
        return [decode(part) for part in parts]
    if kind == "dict":
        return {decode(key): decode(part) for key, part in parts}
    if kind == "bytes":
        return bytes.fromhex(parts)
    if kind == "complex":
        return complex(*parts)
    if kind not in _COLLECTIONS:
        raise ValueError(kind)
    return _COLLECTIONS[kind](decode(part) for part in parts)


_COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError("an object")
    return value


if __name__ == "__main__":
    main()
