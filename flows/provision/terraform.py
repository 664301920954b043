"""Terraform, or OpenTofu, on one root module, in a working copy of its own.

What would change is planned, and only what was planned is applied; ending everything is a plan like any other. What the
program says is read as the JSON that it prints for programs, and its errors become one line, in its own words. It is
asked to end in order when this process ends, is asked to, or has no right to go on (guard.py): it then finishes what it
is at, and lets go of the state.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from areal_core.errors import ConfigError, ProvisionError
from flows.places import FILES

INFRA = Path(os.environ.get("AREAL_INFRA", FILES / "infra" / "terraform"))
PLUGINS = "AREAL_TERRAFORM_PLUGINS"  # a folder that mirrors the providers, for machines that reach no registry
BINARY = "AREAL_TERRAFORM"  # another program than terraform

Action = Literal["create", "update", "replace", "delete"]

_TOLD = ("apply_start", "apply_complete", "apply_errored")  # of what it prints, what people want to see
_RULE = "This was checked by the validation rule"  # how it ends what is wrong with a variable
_GUARD = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
_MACHINE = ("-input=false", "-json")
_LOCKED = "acquiring the state lock"
_LATE_S = 0.5  # for a guard to see that what it guards is to be killed


class KilledError(ProvisionError):
    """It was killed. What it had locked may still be locked, and what it had just made be in no state."""


class LockedError(ProvisionError):
    """Somebody else has locked the state."""


@dataclass(frozen=True)
class Change:
    """What would become of one resource."""

    address: str
    action: Action


@dataclass(frozen=True)
class Plan:
    """What would change, in a file that `apply` takes."""

    path: Path
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        counts = Counter(change.action for change in self.changes)
        return ", ".join(f"{count} to {action}" for action, count in sorted(counts.items())) or "nothing to change"


class Terraform:
    """One root module of infra/terraform and its state. Raises ConfigError where the program is not there, and
    ProvisionError with what it says."""

    def __init__(
        self,
        root: str,
        folder: Path,
        *,
        backend: Mapping[str, str],
        lock_timeout_s: int | None = 30,
        log: Callable[[str], None] = print,
        remaining_s: Callable[[], float] = lambda: math.inf,
        grace_s: float = 60.0,
        stop_s: float = 60.0,
        keep: Sequence[int] = (),
    ) -> None:
        """`folder` is of this process alone, and may be there from earlier; `backend` says where the state lies;
        another process that works on it is waited for, for `lock_timeout_s`; None is for those who change nothing,
        and go beside it. What changes something may run for `remaining_s` from the moment on when that is asked, at its
        start and by `extend`; `grace_s` before its end it is asked to end in order. Where the thread that waits for it
        is interrupted, it is asked, too, and killed `stop_s` later. While it runs it holds the descriptors `keep`,
        whatever becomes of this process."""
        self._binary = os.environ.get(BINARY, "terraform")
        if shutil.which(self._binary) is None:
            raise ConfigError(
                f"{self._binary} is not on the PATH: needs terraform 1.11 or tofu 1.10, or newer ({BINARY} names one)"
            )
        self._folder, self._backend, self._log = folder, backend, log
        self._root = folder / "copy" / root
        self._lock = "-lock=false" if lock_timeout_s is None else f"-lock-timeout={lock_timeout_s}s"
        self._remaining_s, self._grace_s, self._stop_s, self._keep = remaining_s, grace_s, stop_s, keep
        self._right: int | None = None  # the pipe that the guard of what runs listens at
        self._telling = threading.Condition()
        self._stop_at = math.inf  # by CLOCK_BOOTTIME

    def init(self) -> None:
        """Make the working copy, and connect it with the state."""
        shutil.rmtree(self._folder / "copy", ignore_errors=True)
        shutil.copytree(INFRA, self._folder / "copy", ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
        plugins = [f"-plugin-dir={os.environ[PLUGINS]}"] if PLUGINS in os.environ else []
        backend = [f"-backend-config={name}={value}" for name, value in self._backend.items()]
        self._call("init", *_MACHINE, "-reconfigure", *plugins, *backend)

    def clean(self) -> None:
        """Leave nothing in the folder that `init` makes, programs of providers above all."""
        for made in ("copy", "data"):
            shutil.rmtree(self._folder / made, ignore_errors=True)

    def plan(self, variables: Mapping[str, Any], *, destroy: bool = False, replace: Iterable[str] = ()) -> Plan:
        """What is to change for the root module to be as `variables` say, or to be gone; `replace` are addresses of
        resources that are to be made anew."""
        (self._root / "given.auto.tfvars.json").write_text(json.dumps(variables))
        options = ["-destroy"] if destroy else [f"-replace={address}" for address in replace]
        path = self._root / f"plan-{secrets.token_hex(4)}"  # never another than was shown
        said = self._call("plan", *_MACHINE, self._lock, f"-out={path}", *options)
        planned = [each["change"] for each in said if each.get("type") == "planned_change"]
        changes = (Change(each["resource"]["addr"], each["action"]) for each in planned)
        return Plan(path, tuple(change for change in changes if change.action in get_args(Action)))

    def apply(self, plan: Plan) -> None:
        """Make it so. What has changed since the plan was made is an error, and nothing is changed then."""
        self._call("apply", *_MACHINE, self._lock, str(plan.path))

    def held(self) -> set[tuple[str, str]]:
        """Everything that the state holds: type and id."""
        pulled = self._output("state", "pull").strip()  # `show` would load the provider's schema, for seconds
        state = json.loads(pulled) if pulled else {"resources": []}
        return {
            (each["type"], str(instance["attributes"]["id"]))
            for each in state["resources"]
            if each["mode"] == "managed"
            for instance in each["instances"]
            if instance["attributes"].get("id")
        }

    def unlock(self, lock: str) -> None:
        """Remove the lock of this id, which nobody holds any more."""
        self._call("force-unlock", "-force", lock)

    def extend(self) -> None:
        """What runs may go on for `remaining_s` from now on."""
        with self._telling:
            if self._right is not None:
                self._tell(self._right)

    def outputs(self) -> dict[str, Any]:
        """What the root module says of what there is; nothing before it is applied."""
        return {name: output["value"] for name, output in json.loads(self._output("output", "-json")).items()}

    def _output(self, *arguments: str) -> str:
        ended = subprocess.run(
            [self._binary, *arguments], cwd=self._root, env=self._environment, capture_output=True, text=True
        )
        if ended.returncode:
            raise _failure(arguments[0], ended.returncode, " ".join(ended.stderr.split()))
        return ended.stdout

    def stop(self, within_s: float) -> bool:
        """End what runs, which another thread waits for, within so many seconds, and start nothing that changes
        something any more. Whether nothing of the kind runs now."""
        self._ask(within_s)
        with self._telling:
            return self._telling.wait_for(lambda: self._right is None, within_s + _LATE_S)

    def _ask(self, within_s: float) -> None:
        with self._telling:
            self._stop_at = time.clock_gettime(time.CLOCK_BOOTTIME) + within_s
            self.extend()

    def _call(self, *arguments: str) -> list[dict[str, Any]]:
        """A command that takes its time or changes something; what it has said meanwhile, message by message."""
        command = " ".join(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
        told: list[dict[str, Any]] = []
        errors: list[str] = []
        other: list[str] = []
        with self._started(arguments) as running:
            assert running.stdout is not None
            try:
                for line in running.stdout:
                    said = _parsed(line)
                    if said is None:
                        other.append(line)
                        continue
                    told.append(said)
                    if said.get("type") in _TOLD and said.get("hook", {}).get("action") != "read":
                        self._log(f"terraform: {said['@message']}")
                    elif (found := said.get("diagnostic", {})).get("severity") == "error":
                        errors.append(_one_line(found))
            except BaseException as error:
                if isinstance(error, Exception):
                    running.send_signal(signal.SIGINT)
                else:
                    self._ask(self._stop_s)
                running.stdout.read()  # to its end: it must not wait for a reader
                running.wait()
                raise
        if running.returncode:
            reason = "; ".join(dict.fromkeys(errors)) or " ".join("".join(other).split()[-60:])
            raise _failure(command, running.returncode, reason)
        return told

    @contextlib.contextmanager
    def _started(self, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        told, right = os.pipe()
        os.set_blocking(right, False)
        try:
            with self._telling:
                if self._stop_at < math.inf:
                    raise ProvisionError(f"terraform {arguments[0]}: was stopped before it started")
                self._tell(right)
                process = subprocess.Popen(
                    [*_GUARD, str(told), str(self._grace_s), self._binary, *arguments],
                    cwd=self._root,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,  # else Ctrl-C would be its second request to end, which it takes for "now"
                    pass_fds=(told, *self._keep),
                )
                self._right = right
            with process as running:
                yield running
        finally:
            os.close(told)
            with self._telling:
                self._right = None
                os.close(right)
                self._telling.notify_all()

    def _tell(self, right: int) -> None:
        end = min(time.clock_gettime(time.CLOCK_BOOTTIME) + self._remaining_s(), self._stop_at)
        if end < math.inf:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it has ended, or stands still
                os.write(right, f"{end}\n".encode())

    @property
    def _environment(self) -> dict[str, str]:
        settings = {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "TF_DATA_DIR": str(self._folder / "data")}
        return {**os.environ, **settings}


def _failure(command: str, code: int, reason: str) -> ProvisionError:
    message = f"terraform {command}: {reason or f'exited with code {code}'}"
    if code < 0:
        return KilledError(message)
    return (LockedError if _LOCKED in reason else ProvisionError)(message)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _one_line(diagnostic: Mapping[str, Any]) -> str:
    """What is wrong, and why: a diagnostic without where it stands."""
    why = " ".join(str(diagnostic.get("detail", "")).partition(_RULE)[0].split())
    what = " ".join(str(diagnostic.get("summary", "")).split())
    return f"{what}: {why}" if why else what
