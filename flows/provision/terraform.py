"""Run Terraform or OpenTofu on one root module, in a working copy.

`apply` applies exactly what `plan` has shown; a teardown is a plan too. The JSON output is parsed, and errors become
one line in Terraform's own words. The guard (guard.py) ends Terraform in order if this process ends, is asked to end or
loses the right to continue. Terraform then completes its current operation and releases the state lock.
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
PLUGINS = "AREAL_TERRAFORM_PLUGINS"  # a folder with a mirror of the providers, for machines that can't reach a registry
BINARY = "AREAL_TERRAFORM"  # the program to run in place of terraform

Action = Literal["create", "update", "replace", "delete"]

_LOGGED_TYPES = ("apply_start", "apply_complete", "apply_errored")  # message types to log
_RULE = "This was checked by the validation rule"  # end of the detail of a variable's error
_GUARD = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py"))]
_MACHINE = ("-input=false", "-json")
_LOCKED = "acquiring the state lock"
_LATE_S = 0.5  # time for the guard to notice a new deadline


class KilledError(ProvisionError):
    """Terraform was killed. Its lock may remain, and a resource just created may be in no state."""


class LockedError(ProvisionError):
    """Another process has locked the state."""


@dataclass(frozen=True)
class Change:
    """A planned change of one resource."""

    address: str
    action: Action


@dataclass(frozen=True)
class Plan:
    """Planned changes, and the plan file for `apply`."""

    path: Path
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        counts = Counter(change.action for change in self.changes)
        return ", ".join(f"{count} to {action}" for action, count in sorted(counts.items())) or "nothing to change"


class Terraform:
    """One root module of infra/terraform and its state.
    Raises ConfigError if the program is missing, and ProvisionError with its message."""

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
        """Prepare; nothing runs yet.

        `folder` belongs to this process alone and may exist. `backend` is the backend configuration of the state.
        `lock_timeout_s` is the longest wait for the state lock in seconds; None takes no lock and is for read-only use.
        A command may run for `remaining_s` seconds, which is evaluated at its start and by `extend`. It is asked to end
        `grace_s` before that time. If the waiting thread is interrupted, the command is asked to end, and killed after
        `stop_s`. The command inherits the descriptors `keep` and so holds them even if this process dies."""
        self._binary = os.environ.get(BINARY, "terraform")
        if shutil.which(self._binary) is None:
            raise ConfigError(
                f"{self._binary} is not on the PATH; install terraform 1.11 or tofu 1.10, or newer, or set {BINARY}"
            )
        self._folder, self._backend, self._log = folder, backend, log
        self._root = folder / "copy" / root
        self._lock = "-lock=false" if lock_timeout_s is None else f"-lock-timeout={lock_timeout_s}s"
        self._remaining_s, self._grace_s, self._stop_s, self._keep = remaining_s, grace_s, stop_s, keep
        self._deadline_pipe: int | None = None  # write end of the running guard's pipe
        self._condition = threading.Condition()
        self._stop_at = math.inf  # in seconds of CLOCK_BOOTTIME

    def init(self) -> None:
        """Make the working copy and initialise it with its backend."""
        shutil.rmtree(self._folder / "copy", ignore_errors=True)
        shutil.copytree(INFRA, self._folder / "copy", ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
        plugins = [f"-plugin-dir={os.environ[PLUGINS]}"] if PLUGINS in os.environ else []
        backend = [f"-backend-config={name}={value}" for name, value in self._backend.items()]
        self._call("init", *_MACHINE, "-reconfigure", *plugins, *backend)

    def clean(self) -> None:
        """Delete the files of `init`, mainly the large provider programs."""
        for made in ("copy", "data"):
            shutil.rmtree(self._folder / made, ignore_errors=True)

    def plan(self, variables: Mapping[str, Any], *, destroy: bool = False, replace: Iterable[str] = ()) -> Plan:
        """Plan the changes that bring the resources in line with `variables`, or that `destroy` all of them.
        `replace` are addresses of resources to recreate."""
        (self._root / "given.auto.tfvars.json").write_text(json.dumps(variables))
        options = ["-destroy"] if destroy else [f"-replace={address}" for address in replace]
        path = self._root / f"plan-{secrets.token_hex(4)}"  # unique: apply takes exactly the plan that was shown
        said = self._call("plan", *_MACHINE, self._lock, f"-out={path}", *options)
        planned = [each["change"] for each in said if each.get("type") == "planned_change"]
        changes = (Change(each["resource"]["addr"], each["action"]) for each in planned)
        return Plan(path, tuple(change for change in changes if change.action in get_args(Action)))

    def apply(self, plan: Plan) -> None:
        """Apply a plan. A plan that has become stale raises ProvisionError and changes nothing."""
        self._call("apply", *_MACHINE, self._lock, str(plan.path))

    def resources(self) -> set[tuple[str, str]]:
        """Type and id of every resource in the state."""
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
        """Remove the state lock with this id, whose holder has ended."""
        self._call("force-unlock", "-force", lock)

    def extend(self) -> None:
        """Let a running command continue for `remaining_s` from now."""
        with self._condition:
            if self._deadline_pipe is not None:
                self._send_deadline(self._deadline_pipe)

    def outputs(self) -> dict[str, Any]:
        """Outputs of the root module; empty before the first apply."""
        return {name: output["value"] for name, output in json.loads(self._output("output", "-json")).items()}

    def _output(self, *arguments: str) -> str:
        ended = subprocess.run(
            [self._binary, *arguments], cwd=self._root, env=self._environment, capture_output=True, text=True
        )
        if ended.returncode:
            raise _failure(arguments[0], ended.returncode, " ".join(ended.stderr.split()))
        return ended.stdout

    def stop(self, within_s: float) -> bool:
        """End a running command within `within_s` seconds and refuse new ones.
        Return whether none is running."""
        self._ask(within_s)
        with self._condition:
            return self._condition.wait_for(lambda: self._deadline_pipe is None, within_s + _LATE_S)

    def _ask(self, within_s: float) -> None:
        with self._condition:
            self._stop_at = time.clock_gettime(time.CLOCK_BOOTTIME) + within_s
            self.extend()

    def _call(self, *arguments: str) -> list[dict[str, Any]]:
        """Run a command under the guard and return its JSON messages."""
        command = " ".join(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
        messages: list[dict[str, Any]] = []
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
                    messages.append(said)
                    if said.get("type") in _LOGGED_TYPES and said.get("hook", {}).get("action") != "read":
                        self._log(f"terraform: {said['@message']}")
                    elif (found := said.get("diagnostic", {})).get("severity") == "error":
                        errors.append(_one_line(found))
            except BaseException as error:
                if isinstance(error, Exception):
                    running.send_signal(signal.SIGINT)
                else:
                    self._ask(self._stop_s)
                running.stdout.read()  # read to the end: terraform must not block on a full pipe
                running.wait()
                raise
        if running.returncode:
            reason = "; ".join(dict.fromkeys(errors)) or " ".join("".join(other).split()[-60:])
            raise _failure(command, running.returncode, reason)
        return messages

    @contextlib.contextmanager
    def _started(self, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        try:
            with self._condition:
                if self._stop_at < math.inf:
                    raise ProvisionError(
                        f"terraform {arguments[0]}: not started, as the nodes are being handed over to the reaper"
                    )
                self._send_deadline(write_end)
                process = subprocess.Popen(
                    [*_GUARD, str(read_end), str(self._grace_s), self._binary, *arguments],
                    cwd=self._root,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,  # or Ctrl-C would be its second signal, which means "at once"
                    pass_fds=(read_end, *self._keep),
                )
                self._deadline_pipe = write_end
            with process as running:
                yield running
        finally:
            os.close(read_end)
            with self._condition:
                self._deadline_pipe = None
                os.close(write_end)
                self._condition.notify_all()

    def _send_deadline(self, write_end: int) -> None:
        end = min(time.clock_gettime(time.CLOCK_BOOTTIME) + self._remaining_s(), self._stop_at)
        if end < math.inf:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):  # the guard has ended or is suspended
                os.write(write_end, f"{end}\n".encode())

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
    with contextlib.suppress(ValueError):
        if isinstance(said := json.loads(line), dict):
            return said
    return None


def _one_line(diagnostic: Mapping[str, Any]) -> str:
    """A diagnostic as one line: summary and detail, without its position in the source."""
    why = " ".join(str(diagnostic.get("detail", "")).partition(_RULE)[0].split())
    what = " ".join(str(diagnostic.get("summary", "")).split())
    return f"{what}: {why}" if why else what
