"""What runs in the sandbox: it gives up what it may still do, and then runs a program that nobody trusts.

    python -P -s -S confined.py SETTINGS    # JSON: the limits, and the file descriptor of the job, JSON as well

This file is all of the package that is visible there, so it imports nothing of it. A job is one of

- `run`: a program as a script, with the input and output of this process
- `serve`: a program whose function is called: lines `call [args, kwargs]` come in, lines `value V` go out
- `check`: a program that checks a function which is elsewhere: lines `call` go out and `value` come in, then `passed`

Values cross as JSON (`encode`, `decode`), so that what arrives is a number, a text or a collection, and no object.
Imports are few: `json` and `signal` would cost every program 7 ms, so their halves that are written in C stand here.
"""

from __future__ import annotations

import _json
import _signal  # pyright: ignore[reportMissingImports]
import builtins
import os
import resource
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

UNPARSABLE = 91  # an exit code; a program may lie with it, and is wrong all the same
STARTED = b"\0"  # on stderr, before the program has had a say
_OPEN_FILES = 64
_STACK_BYTES = 2**27  # the kernel leaves that much room; cached functions recurse on this stack
_RECURSION = 50_000  # LiveCodeBench's limit

# Modules that LiveCodeBench and APPS import for every program, with all their names; the slow ones only for a program
# that mentions the module or one of these names. Of equal names the last counts.
_ON_DEMAND = {
    "typing": "Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator List Literal Mapping "
    "NamedTuple NewType NoReturn Optional Protocol Sequence Set Tuple Type TypedDict TypeVar Union",
    "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque namedtuple",
    "copy": "deepcopy",
    "datetime": "date timedelta timezone",
    "fractions": "Fraction",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce singledispatch total_ordering wraps",
    "json": "dumps loads",
    "random": "Random choice choices gauss getrandbits randint randrange sample seed shuffle uniform",
    "re": "Match Pattern findall finditer fullmatch",
    "statistics": "fmean mean median median_high median_low mode multimode pstdev pvariance stdev variance",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits hexdigits octdigits punctuation whitespace",
    "time": "",
}
_ALWAYS = ["bisect", "heapq", "io", "itertools", "math", "operator", "sys"]


def main() -> None:
    settings = loads(sys.argv[1])
    with open(settings["job"]) as file:
        job = loads(file.read())
    if os.getpid() == 1:
        divide()
    confine(settings)
    os.write(2, STARTED)
    sys.path += settings["packages"]
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    builtins.exit = builtins.quit = sys.exit  # which the module `site` would define
    {"run": run, "serve": serve, "check": check}[job["kind"]](job)


def divide() -> None:
    """Go on as a child. The first process of a namespace waits for it, takes its exit code, and all others along. It
    stays the user that it is: another one's would not be ended with bubblewrap (PR_SET_PDEATHSIG)."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # which nobody in the namespace can send it then
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
    if "processes" in settings:
        limits[resource.RLIMIT_NPROC] = settings["processes"]
    if (user := settings.get("uid")) is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES if most < 0 else min(_STACK_BYTES, most), most))
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))  # SIGXCPU, then SIGKILL


def run(job: dict[str, Any]) -> None:
    program = first_compiled(job["sources"])
    if program is None:
        os._exit(UNPARSABLE)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["program.py"]
    module.__dict__["__builtins__"] = prepared(program)
    exec(program, module.__dict__)


def first_compiled(sources: Sequence[str]) -> types.CodeType | None:
    """The first of several readings of an answer that is a program; None where none is."""
    for source in sources:
        try:
            return compile(source, "<program>", "exec")
        except (SyntaxError, ValueError, OverflowError, RecursionError):
            continue
    return None


def prepared(program: types.CodeType) -> dict[str, Any]:
    """Python's own names, and those that the benchmarks import: below what a program defines, and apart from it."""
    sys.setrecursionlimit(_RECURSION)
    parts = [program]
    for part in parts:
        parts += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
    used = {name for part in parts for name in part.co_names}  # attributes among them
    modules = [module for module, known in _ON_DEMAND.items() if not used.isdisjoint([module, *known.split()])]
    names: dict[str, Any] = {}
    for module in modules + _ALWAYS:
        exec(f"from {module} import *", names)
    return {**names, **{module: sys.modules[module] for module in modules + _ALWAYS}, **vars(builtins)}


# -- functions that are called from elsewhere ----------------------------------------------------------------------


def serve(job: dict[str, Any]) -> None:
    receive, send = taken_over()
    program = first_compiled(job["sources"])
    if program is None:
        send("unparsable")
        return
    function = found(job, program)
    send("ready")
    while (line := receive()) is not None:
        args, kwargs = decode(loads(line.partition(" ")[2]))
        send("value " + dumps(encode(function()(*args, **kwargs))))


def found(job: dict[str, Any], program: types.CodeType) -> Callable[[], Callable[..., Any]]:
    """What gives the function that a program defines under a name, for each call: the method of a new `Solution`, where
    that class has it."""
    module = sys.modules["program"] = types.ModuleType("program")
    names, entry = module.__dict__, job["entry"]
    if job["before"] is None:
        names["__builtins__"] = prepared(program)
    else:
        exec(job["before"], names)
    names.pop(entry, None)  # it must be the program's own
    exec(program, names)
    made: Any = names.get("Solution")
    return lambda: getattr(made(), entry) if hasattr(made, entry) else names[entry]


def check(job: dict[str, Any]) -> None:
    receive, send = taken_over()

    def candidate(*args: Any, **kwargs: Any) -> Any:
        send("call " + dumps(encode([args, kwargs])))
        kind, _, value = (receive() or "").partition(" ")
        if kind != "value":
            raise RuntimeError(kind)
        return decode(loads(value))

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
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(part)] for key, part in value.items()]]
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return [name, [encode(part) for part in value]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if hasattr(value, "tolist"):  # numpy's
        return encode(value.tolist())
    if hasattr(value, "as_integer_ratio"):  # a Fraction or a Decimal
        return int(value) if value == int(value) else float(value)
    raise TypeError(type(value).__name__)


def decode(value: Any) -> Any:
    """The value that was encoded. Raises ValueError or TypeError for anything else."""
    if isinstance(value, dict):
        raise ValueError("an object")
    if not isinstance(value, list):
        return value
    kind, parts = value
    if kind == "dict":
        return {decode(key): decode(part) for key, part in parts}
    if kind == "bytes":
        return bytes.fromhex(parts)
    if kind == "complex":
        return complex(*parts)
    if kind not in _COLLECTIONS:
        raise ValueError(kind)
    return _COLLECTIONS[kind](decode(part) for part in parts)


_COLLECTIONS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class _Json:
    """How JSON is read: what `json.JSONDecoder` says to the scanner of both."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int = True, None, None, float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


_read = _json.make_scanner(_Json)  # pyright: ignore[reportArgumentType]
_written = _json.make_encoder(None, encode, _json.encode_basestring_ascii, None, ":", ",", False, False, True)


def loads(text: str) -> Any:
    try:
        return _read(text, 0)[0]
    except StopIteration as error:  # which would end a `map` of the checker's as if all were well
        raise ValueError("no JSON") from error


def dumps(value: Any) -> str:
    return "".join(_written(value, 0))


if __name__ == "__main__":
    main()
