"""Entry point inside the sandbox: give up all remaining rights, then run an untrusted program.

    python -P -s -S confined.py SETTINGS    # JSON: the limits, and the file descriptor of the job, which is JSON too

This is the package's only file in the sandbox, so it imports nothing else of the package. A job is one of

- `run`: run a program as a script, with the input and output of this process
- `serve`: call a program's function: lines `call [args, kwargs]` come in, lines `value V` go out
- `check`: check a function in another process: lines `call` go out, `value` come in; then `passed` or `failed`

Values cross as JSON (`encode`, `decode`), so that only numbers, texts and collections arrive, never objects. Imports
are few: `json` and `signal` would cost every program 7 ms, so this file uses their C modules.
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

UNPARSABLE = 91  # exit code; a program that fakes it is incorrect anyway
STARTED = b"\0"  # written to stderr before the program runs
_OPEN_FILES = 64
_STACK_BYTES = 2**27  # the kernel reserves this much room; cached functions recurse on this stack
_RECURSION = 50_000  # LiveCodeBench's limit

# Modules that LiveCodeBench and APPS import for every program, with all their names. Slow ones are imported only if a
# program mentions the module or one of these names. If names collide, the last one counts.
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
    builtins.exit = builtins.quit = sys.exit  # the module `site` would define these
    {"run": run, "serve": serve, "check": check}[job["kind"]](job)


def divide() -> None:
    """Continue as a child. The first process of the namespace waits for the child and exits with its code.

    All other processes end with the first one. It keeps its user: with another user it would not end with bubblewrap
    (PR_SET_PDEATHSIG)."""
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # no process in the namespace can send SIGINT to the first one
    if (child := os.fork()) == 0:
        return
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def confine(settings: dict[str, Any]) -> None:
    """Set irrevocable limits and change to the sandbox's user; root is exempt from process limits."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills this process first
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
    """Compile the first of several readings of an answer that is a program; None if none is."""
    for source in sources:
        try:
            return compile(source, "<program>", "exec")
        except (SyntaxError, ValueError, OverflowError, RecursionError):
            continue
    return None


def prepared(program: types.CodeType) -> dict[str, Any]:
    """Python's builtins and the names that benchmarks import, separate from the program's own globals."""
    sys.setrecursionlimit(_RECURSION)
    parts = [program]
    for part in parts:
        parts += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
    used = {name for part in parts for name in part.co_names}  # includes attribute names
    modules = [module for module, known in _ON_DEMAND.items() if not used.isdisjoint([module, *known.split()])]
    names: dict[str, Any] = {}
    for module in modules + _ALWAYS:
        exec(f"from {module} import *", names)
    return {**names, **{module: sys.modules[module] for module in modules + _ALWAYS}, **vars(builtins)}


# -- functions called from another process -------------------------------------------------------------------------


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
    """Return a callable that looks up the program's function `entry` for each call.
    If the program's class `Solution` has this method, each call uses a new instance."""
    module = sys.modules["program"] = types.ModuleType("program")
    names, entry = module.__dict__, job["entry"]
    if job["before"] is None:
        names["__builtins__"] = prepared(program)
    else:
        exec(job["before"], names)
    names.pop(entry, None)  # the program must define the function itself
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
    except Exception:  # noqa: BLE001 - whatever the candidate's values make the check raise
        send("failed")
    else:
        send("passed")


def taken_over() -> tuple[Callable[[], str | None], Callable[[str], None]]:
    """Take over stdin and stdout, and return functions to receive and send a line.
    The program gets /dev/null."""
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
    """Convert a value to JSON. Values without a JSON type become a list of their kind and their parts."""
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
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return encode(value.tolist())
    if hasattr(value, "as_integer_ratio"):  # a Fraction or a Decimal
        return int(value) if value == int(value) else float(value)
    raise TypeError(type(value).__name__)


def decode(value: Any) -> Any:
    """Convert back an encoded value. Raises ValueError or TypeError for anything else."""
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
    """Settings of `json.JSONDecoder` for the C scanner."""

    strict, object_hook, object_pairs_hook, parse_float, parse_int = True, None, None, float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


_read = _json.make_scanner(_Json)  # pyright: ignore[reportArgumentType]
_written = _json.make_encoder(None, encode, _json.encode_basestring_ascii, None, ":", ",", False, False, True)


def loads(text: str) -> Any:
    try:
        return _read(text, 0)[0]
    except StopIteration as error:  # StopIteration would silently end a `map` of the checker
        raise ValueError("no JSON") from error


def dumps(value: Any) -> str:
    return "".join(_written(value, 0))


if __name__ == "__main__":
    main()
