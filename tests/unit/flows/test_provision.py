"""Terraform's program as this project drives it: what it is told, what becomes of what it says. A script stands in for
it here; tests/cloud has the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import ConfigError, ProcessError, ProvisionError
from flows.commands import nodes as nodes_command
from flows.provision import terraform
from flows.provision.nodes import Nodes
from flows.provision.terraform import KilledError, Terraform
from tests.support import signals

REQUEST: dict[str, Any] = {"run": "r", "foundation": {"bucket": "b", "region": "us-east-1"}}
_TIMEOUT_S = 20.0

_WAITS = """\
if command == 'apply':
  for signum in (signal.SIGINT, signal.SIGTERM): signal.signal(signum, end)
  open({note!r}, 'w').write('at it')
  while True: time.sleep(0.05)
"""

Says = Callable[..., None]  # what the script is to do, in Python


@pytest.fixture(autouse=True)
def python_s_own_signals() -> Iterator[None]:
    with signals.pythons_own():
        yield


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    def install(body: str = "") -> None:
        program = tmp_path / "terraform"
        program.write_text(
            f"#!{sys.executable}\nimport json, os, signal, sys, time\ncommand = sys.argv[1]\n"
            f"def say(**said): print(json.dumps(said), flush=True)\n{body}\n"
            "print('{}')\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv(terraform.BINARY, str(program))

    return install


def made(tmp_path: Path, **options: Any) -> Terraform:
    root = Terraform("run", tmp_path / "work", backend={"bucket": "b", "key": "k"}, **options)
    root.init()
    return root


def test_what_a_state_holds(says: Says, tmp_path: Path) -> None:
    says()
    root = made(tmp_path)

    def of(kind: str, *ids: str | None, mode: str = "managed") -> dict[str, Any]:
        return {"mode": mode, "type": kind, "instances": [{"attributes": {"id": each}} for each in ids]}

    resources = [of("aws_iam_role", "r"), of("aws_instance", "i-1", "i-0", None), of("aws_region", "e", mode="data")]
    held = {("aws_iam_role", "r"), ("aws_instance", "i-1"), ("aws_instance", "i-0")}
    for printed, found in (("", set[Any]()), (json.dumps({"resources": resources}), held)):
        says(f"print({printed!r}) or sys.exit()")
        assert root.resources() == found


def test_errors_are_one_line_in_its_own_words(says: Says, tmp_path: Path) -> None:
    says(
        "if command == 'apply':\n"
        "  warning = {'severity': 'warning', 'summary': 'Old', 'detail': ''}\n"
        "  quota = {'severity': 'error', 'summary': 'creating EC2 Instance', 'detail': 'VcpuLimitExceeded:\\n of 0.'}\n"
        "  rule = {'severity': 'error', 'summary': 'Invalid value', 'detail': 'nodes: no.\\n\\n"
        "This was checked by the validation rule at variables.tf:29.'}\n"
        "  for each in (warning, quota, quota, rule): say(type='diagnostic', diagnostic=each)\n"
        "  sys.exit(1)"
    )
    root = made(tmp_path)
    with pytest.raises(ProvisionError) as failed:
        root.apply(root.plan({}))
    assert (
        str(failed.value)
        == "terraform apply: creating EC2 Instance: VcpuLimitExceeded: of 0.; Invalid value: nodes: no."
    )


def until(note: Path, text: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not (note.exists() and note.read_text() == text):
        assert time.monotonic() < deadline, note.read_text() if note.exists() else "nothing"
        time.sleep(0.02)


def test_it_ends_in_order_when_this_process_is_interrupted(says: Says, tmp_path: Path) -> None:
    note = tmp_path / "note"
    says(
        "def end(signum, _):\n"
        "  time.sleep(0.3)\n"  # it takes a moment
        f"  open({str(note)!r}, 'w').write(signal.Signals(signum).name)\n"
        f"  sys.exit(1)\n{_WAITS.format(note=str(note))}"
    )
    root = made(tmp_path)
    plan = root.plan({})

    def interrupt() -> None:
        until(note, "at it")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        root.apply(plan)
    assert note.read_text() == "SIGTERM"  # and it was waited for


@pytest.mark.parametrize("stopped", [False, True])
def test_it_is_asked_to_end_and_then_killed_when_its_right_is_over(says: Says, tmp_path: Path, stopped: bool) -> None:
    note, asked, left_s = tmp_path / "note", tmp_path / "asked", [60.0]
    says(
        f"def end(signum, _): open({str(asked)!r}, 'a').write(signal.Signals(signum).name)\n"
        f"{_WAITS.format(note=str(note))}"
    )
    root = made(tmp_path, remaining_s=lambda: left_s[0], grace_s=0.9)
    plan = root.plan({})

    def shorten() -> None:
        until(note, "at it")
        if stopped:
            ended.append(root.stop(1.0))
        left_s[0] = 1.0
        root.extend()

    ended: list[bool] = []
    shortening = threading.Thread(target=shorten)
    shortening.start()
    with pytest.raises(KilledError, match=r"^terraform apply: exited with code -9$"):
        root.apply(plan)
    shortening.join()
    assert asked.read_text() == "SIGTERM"  # and once
    assert ended == [True] * stopped
    if stopped:
        with pytest.raises(
            ProvisionError, match=r"^terraform plan: not started, as the nodes are being handed over to the reaper$"
        ):
            root.plan({})


def test_nodes_are_locked_until_the_terraform_of_a_dead_owner_has_ended(says: Says, tmp_path: Path) -> None:
    note = tmp_path / "note"
    says(
        "def end(*_):\n"
        f"  while open({str(note)!r}).read() != 'go': time.sleep(0.02)\n"
        f"  sys.exit(1)\n{_WAITS.format(note=str(note))}"
    )
    program = (
        "import json, sys; from pathlib import Path; from flows.provision.nodes import Nodes\n"
        "with Nodes(json.loads(sys.argv[1]), Path(sys.argv[2])) as nodes: nodes.terraform.apply(nodes.plan())"
    )
    command = [sys.executable, "-c", program, json.dumps(REQUEST), str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(terraform.__file__).parents[2]) as owner:
        try:
            until(note, "at it")
        finally:
            owner.kill()
    with pytest.raises(ProcessError, match="another command on this machine is changing its nodes"):
        Nodes(REQUEST, tmp_path, busy_s=0.3)
    note.write_text("go")
    with Nodes(REQUEST, tmp_path, busy_s=_TIMEOUT_S):
        pass


def test_what_control_has_made_need_not_be_said(says: Says, tmp_path: Path) -> None:
    says()
    for request, said in (({}, "run: must be given"), ({"run": "r"}, "foundation: must be given")):
        with pytest.raises(ConfigError, match=f"^{said}"):
            Nodes(request, tmp_path)
    foundation = {"bucket": "b", "region": "eu-west-1", "vpc_id": "vpc-1"}
    (tmp_path / "control").mkdir()
    outputs = {"foundation": {"value": foundation}, "prefect_api_url": {"value": "http://10.64.0.10:4200/api"}}
    (tmp_path / "control" / "terraform.tfstate").write_text(json.dumps({"outputs": outputs}))
    prefect = {"api_url": "http://10.64.0.10:4200/api", "work_pool": "areal-nodes"}
    with Nodes({"run": "r"}, tmp_path) as nodes:
        assert nodes.variables == {"run": "r", "foundation": foundation, "prefect": prefect}
        assert nodes.hosts() == []


def test_command_reads_a_request(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    for text in ("- a list", "a: [", None):
        if text is not None:
            file.write_text(text)
        else:
            file.unlink()
        with pytest.raises(ConfigError, match=r"nodes\.yaml: "):
            nodes_command.read(file)
    file.write_text("lease: {expires_at: 2037-01-31T14:00:00+02:00}\nzones: [a]\n")
    assert nodes_command.read(file) == {"lease": {"expires_at": "2037-01-31T12:00:00Z"}, "zones": ["a"]}
