"""Terraform, or OpenTofu, on one root module, in a working copy of its own.

What would change is planned, and only what was planned is applied; ending everything is a plan like any other. What the
program says is read as the JSON that it prints for programs, and its errors become one line, in its own words. It is
asked to end in order when this process ends, or is asked to: it then finishes what it is at, and lets go of the state.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_core.errors import ConfigError, ProvisionError

_CHECKOUT = Path(__file__).resolve().parents[2]
INFRA = _CHECKOUT / "infra" / "terraform"
PLUGINS = "AREAL_TERRAFORM_PLUGINS"  # a folder that mirrors the providers, for machines that reach no registry
BINARY = "AREAL_TERRAFORM"  # another program than terraform

Action = Literal["create", "update", "replace", "delete"]

_ACTIONS: dict[tuple[str, ...], Action] = {
    ("create",): "create",
    ("update",): "update",
    ("delete",): "delete",
    ("delete", "create"): "replace",
    ("create", "delete"): "replace",
}
_PLAN = "plan-"  # how its files' names begin
_TOLD = ("apply_start", "apply_complete", "apply_errored")  # of what it prints, what people want to see
_RULE = "This was checked by the validation rule"  # how it ends what is wrong with a variable
# The kernel's tie to this process, which terraform itself has none of.
_TIED = (
    "import os, signal, sys; from areal_core.launch.process import die_with_parent; "
    "die_with_parent(signal.SIGTERM); os.execvp(sys.argv[1], sys.argv[1:])"
)


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
        lock_timeout_s: int = 30,
        log: Callable[[str], None] = print,
    ) -> None:
        """`folder` is of this process alone, and may be there from earlier; `backend` says where the state lies;
        another process that works on it is waited for, for `lock_timeout_s`."""
        self._binary = os.environ.get(BINARY, "terraform")
        if shutil.which(self._binary) is None:
            raise ConfigError(
                f"{self._binary} is not on the PATH: needs terraform 1.11 or tofu 1.10, or newer ({BINARY} names one)"
            )
        self._folder, self._backend, self._log = folder, backend, log
        self._root = folder / "copy" / root
        self._lock = f"-lock-timeout={lock_timeout_s}s"

    def init(self) -> None:
        """Make the working copy, and connect it with the state."""
        shutil.rmtree(self._folder / "copy", ignore_errors=True)
        for old in self._folder.glob(f"{_PLAN}*"):
            old.unlink()
        shutil.copytree(INFRA, self._folder / "copy", ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
        plugins = [f"-plugin-dir={os.environ[PLUGINS]}"] if PLUGINS in os.environ else []
        self._call("init", "-reconfigure", *plugins, *(f"-backend-config={k}={v}" for k, v in self._backend.items()))

    def plan(self, variables: Mapping[str, Any], *, destroy: bool = False, replace: Iterable[str] = ()) -> Plan:
        """What is to change for the root module to be as `variables` say, or to be gone; `replace` are addresses of
        resources that are to be made anew."""
        (self._root / "given.auto.tfvars.json").write_text(json.dumps(variables))
        options = ["-destroy"] if destroy else [f"-replace={address}" for address in replace]
        path = self._folder / f"{_PLAN}{secrets.token_hex(4)}"  # never another than was shown
        self._call("plan", self._lock, f"-out={path}", *options)
        changes = json.loads(self._output("show", "-json", str(path))).get("resource_changes", [])
        found = ((change["address"], tuple(change["change"]["actions"])) for change in changes)
        return Plan(
            path, tuple(Change(address, _ACTIONS[actions]) for address, actions in found if actions in _ACTIONS)
        )

    def apply(self, plan: Plan) -> None:
        """Make it so. What has changed since the plan was made is an error, and nothing is changed then."""
        self._call("apply", self._lock, str(plan.path))

    def outputs(self) -> dict[str, Any]:
        """What the root module says of what there is; nothing before it is applied."""
        return {name: output["value"] for name, output in json.loads(self._output("output", "-json")).items()}

    def _output(self, *arguments: str) -> str:
        ended = subprocess.run(
            [self._binary, *arguments], cwd=self._root, env=self._environment, capture_output=True, text=True
        )
        if ended.returncode:
            raise ProvisionError(f"terraform {arguments[0]}: {' '.join(ended.stderr.split())}")
        return ended.stdout

    def _call(self, command: str, *arguments: str) -> None:
        """A command that takes its time, and says what it is at."""
        argv = [sys.executable, "-c", _TIED, self._binary, command, "-input=false", "-json", *arguments]
        errors: list[str] = []
        other: list[str] = []
        with subprocess.Popen(
            argv,
            cwd=self._root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C would be its second request to end, which it takes for "now"
        ) as running:
            assert running.stdout is not None
            try:
                for line in running.stdout:
                    said = _parsed(line)
                    if said is None:
                        other.append(line)
                    elif said.get("type") in _TOLD and said.get("hook", {}).get("action") != "read":
                        self._log(f"terraform: {said['@message']}")
                    elif (found := said.get("diagnostic", {})).get("severity") == "error":
                        errors.append(_one_line(found))
            except BaseException:
                running.send_signal(signal.SIGINT)
                running.stdout.read()  # to its end: it must not wait for a reader
                running.wait()
                raise
        if running.returncode:
            reason = "; ".join(dict.fromkeys(errors)) or " ".join("".join(other).split()[-60:])
            raise ProvisionError(f"terraform {command}: {reason or f'exited with code {running.returncode}'}")

    @property
    def _environment(self) -> dict[str, str]:
        settings = {"TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1", "TF_DATA_DIR": str(self._folder / "data")}
        # It runs in a folder of its own, where this package may not be found otherwise.
        path = os.pathsep.join(filter(None, (str(_CHECKOUT), os.environ.get("PYTHONPATH"))))
        return {**os.environ, **settings, "PYTHONPATH": path}


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
