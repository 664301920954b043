"""The parent's side, with real processes and real signals."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_core.config.groups import LaunchConfig
from areal_core.errors import ProcessError
from areal_core.launch.supervisor import FileLock, RoleSpec, StopSignal, Supervisor
from areal_core.storage.rundir import RunDir
from tests.support.processes import command_line, wait_for

PATIENCE_S = 120.0
ADOPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from areal_core.launch import process
ready, scratch = Path(sys.argv[1]), Path(sys.argv[2])
process.tie_to_parent(ready)
"""
READY = ADOPT + "process.announce_ready(ready, 'http://127.0.0.1:7');"
SERVE = READY + "time.sleep(600)"
# Goes on once its on_ready was called: by then priority and affinity, which the parent sets, are there.
SETTLED = (
    READY
    + """
while not (scratch / "go").exists():
    time.sleep(0.01)
"""
)
FLAKY = (
    ADOPT
    + """
with (scratch / "starts").open("a") as file:
    file.write("x")
print("some talk", flush=True)
raise SystemExit("no luck")
"""
)


class Rig:
    """A run folder, and supervisors in it whose logs and ready calls are recorded."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir(root / "run")
        self.scratch = root / "scratch"
        for folder in (self.run.ready, self.run.heartbeats, self.run.logs, self.scratch):
            folder.mkdir(parents=True)
        self.stop = StopSignal()
        self.lines: list[str] = []
        self.ready: list[tuple[int, dict[str, Any]]] = []
        self.on_ready: Callable[[], None] = lambda: None

    def supervisor(self, code: str, launch: LaunchConfig, **spec: Any) -> Supervisor:
        def argv(index: int) -> list[str]:
            return [sys.executable, "-c", code, str(self.run.ready_file("role", index)), str(self.scratch)]

        def on_ready(index: int, info: dict[str, Any]) -> None:
            self.ready.append((index, info))
            self.on_ready()

        role = RoleSpec(name="role", argv=argv, **spec)
        return Supervisor(self.run, role, launch, stop=self.stop, on_ready=on_ready, log=self.lines.append)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def launch(**changes: Any) -> LaunchConfig:
    return LaunchConfig(**{"restarts": 0, "start_timeout_s": PATIENCE_S, "stop_timeout_s": PATIENCE_S, **changes})


def gone(pid: int) -> bool:
    """Whether `pid` is no process any more, waiting for its end within our patience."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended = bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    if not ended:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    return ended


def test_process_gets_environment_and_cores_at_its_start_and_is_nice_once_it_is_ready(rig: Rig) -> None:
    """By its own value and by that of its session, where the kernel weighs sessions against each other."""
    rig.on_ready = (rig.scratch / "go").touch
    look = """
group = Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), group.read_text().split()[-1] if group.exists() else "-", flush=True)
"""
    told = "print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'], os.environ['EXTRA'], sys.stdin.read() == '')"
    own, core = os.getpriority(os.PRIO_PROCESS, 0), min(os.sched_getaffinity(0))
    settings = {"nice": own + 3, "cpus": frozenset({core}), "env": lambda index: {"EXTRA": "yes"}}
    rig.supervisor(ADOPT + look + SETTLED.removeprefix(ADOPT) + look + told, launch(), **settings).run()
    groups = Path("/proc/self/autogroup").exists()
    assert rig.lines == [
        f"role-0: {own} {0 if groups else '-'}",
        f"role-0: {own + 3} {own + 3 if groups else '-'}",
        f"role-0: {{{core}}} 1 yes True",
    ]


def test_stopped_process_that_ignores_sigterm_is_killed(rig: Rig) -> None:
    rig.on_ready = rig.stop.set
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN); process.announce_ready"
    code = SERVE.replace("process.announce_ready", ignores)
    rig.supervisor(code, launch(stop_timeout_s=0.3)).run()
    ((index, info),) = rig.ready
    assert (index, info["url"]) == (0, "http://127.0.0.1:7")
    assert gone(info["pid"])
    assert rig.lines == ["role-0 did not end within 0.3 s of SIGTERM: killed"]


def test_process_whose_ready_file_is_anothers_is_not_ready(rig: Rig) -> None:
    rig.run.ready_file("role").write_text('{"pid": 1, "url": "stale"}')
    orphan = "from areal_core.storage.rundir import write_json; write_json(ready, {'pid': 1, 'url': 'of an orphan'});"
    code = ADOPT + orphan + "time.sleep(600)"
    with pytest.raises(ProcessError, match=r"role-0 was not ready within 1.5 s \(launch.start_timeout_s\)"):
        rig.supervisor(code, launch(start_timeout_s=1.5)).run()
    assert rig.ready == []


def test_error_names_role_code_and_last_log_lines_when_restarts_are_spent(rig: Rig) -> None:
    with pytest.raises(ProcessError, match=r"^role-0 exited with code 1 after 1 restarts; ") as caught:
        rig.supervisor(FLAKY, launch(restarts=1)).run()
    message = str(caught.value)
    assert message.endswith("role-0.log ends: some talk | no luck")  # of the last start only
    assert "\n" not in message
    assert (rig.scratch / "starts").read_text() == "xx"


def test_a_gang_is_started_again_as_a_whole(rig: Rig) -> None:
    code = (
        READY
        + """
with (scratch / f"starts-{ready.stem}").open("a") as file:
    file.write(os.environ["AREAL_ATTEMPT"] + "\\n")
if len((scratch / f"starts-{ready.stem}").read_text().split()) == 1:
    if ready.stem == "role-1":
        while not (scratch / "starts-role-0").exists():
            time.sleep(0.01)
        raise SystemExit(3)
    time.sleep(600)
"""
    )
    rig.supervisor(code, launch(restarts=1), count=2, gang=True).run()
    starts = [(rig.scratch / f"starts-role-{i}").read_text().split() for i in range(2)]
    assert starts[0] == starts[1]
    assert len(set(starts[0])) == 2


def test_lines_of_a_process_are_forwarded_without_their_format(rig: Rig) -> None:
    code = READY + "from areal_core.launch import logs; logs.start('role')\nlogs.logger.info('talk')"
    forwarded: list[str] = []
    supervisor = rig.supervisor(code, launch(), first=3)
    supervisor.forward = forwarded.append
    supervisor.run()
    assert (forwarded, rig.lines) == (["role-3: talk"], [])
    assert rig.run.log_file("role", 3).read_text().endswith("Z INFO role-3 talk\n")


@pytest.mark.parametrize("breaks_at", ["talk", "last words"])
def test_a_log_that_fails_leaves_no_process(rig: Rig, breaks_at: str) -> None:
    def broken(line: str) -> None:
        if breaks_at in line:
            raise BrokenPipeError

    def ready() -> None:
        if len(rig.ready) == 2 and breaks_at != "talk":
            rig.stop.set()

    ends = "signal.signal(signal.SIGTERM, lambda *_: (print('last words', flush=True), time.sleep(600)));"
    code = READY.replace("process.announce_ready", ends + "process.announce_ready")
    supervisor = rig.supervisor(
        code + "print('talk', flush=True); time.sleep(600)", launch(stop_timeout_s=0.5), count=2
    )
    supervisor.log, rig.on_ready = broken, ready
    with pytest.raises(BrokenPipeError):
        supervisor.run()
    assert all(gone(json.loads(file.read_text())["pid"]) for file in rig.run.ready.glob("*.json"))


LAUNCHER = """
import sys
from pathlib import Path
from areal_core.config.groups import LaunchConfig
from areal_core.launch.supervisor import RoleSpec, StopSignal, Supervisor
from areal_core.storage.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
argv = [sys.executable, "-c", sys.argv[2], str(run.ready_file("role")), sys.argv[3]]
role = RoleSpec(name="role", argv=lambda index: argv)
Supervisor(run, role, LaunchConfig(stop_timeout_s=0.5), stop=StopSignal(), log=lambda line: None,
           on_ready=lambda index, info: print(info["pid"], flush=True)).run()
"""


@contextmanager
def launcher_of(rig: Rig, code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A launcher in a process of its own, and the process that it runs, once that is ready."""
    argv = [sys.executable, "-c", LAUNCHER, str(rig.run.root), code, str(rig.scratch)]
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    try:
        yield launcher, int(launcher.stdout.readline())
    finally:
        launcher.kill()
        launcher.communicate()


def test_a_stopped_process_and_its_stopped_descendants_do_not_outlive_a_killed_launcher(rig: Rig) -> None:
    with launcher_of(rig, STRAYS.format(then="time.sleep(600)")) as (launcher, child):
        os.kill(child, signal.SIGSTOP)
        launcher.kill()
        assert gone(child)
        assert gone(int((rig.scratch / "child").read_text()))


def test_a_descendant_without_the_mark_is_found_by_its_session(rig: Rig) -> None:
    """Who writes a title over its environment, as vLLM's engines do, has no mark any more."""
    code = ADOPT + (
        "child = subprocess.Popen(['sleep', '600'], env={}); (scratch / 'child').write_text(str(child.pid));"
        "child.send_signal(signal.SIGSTOP); process.announce_ready(ready); time.sleep(600)"
    )
    with launcher_of(rig, code) as (launcher, child):
        launcher.kill()
        assert gone(child)
        assert gone(int((rig.scratch / "child").read_text()))


def test_a_sweeper_that_is_killed_is_replaced_while_its_launcher_lives(rig: Rig) -> None:
    with launcher_of(rig, SERVE) as (launcher, child):
        (first,) = sweepers(launcher.pid)
        os.kill(first, signal.SIGTERM)  # which it ignores
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        second = wait_for(lambda: sweepers(launcher.pid))
        os.kill(child, signal.SIGSTOP)
        launcher.kill()
        assert gone(child)
        assert gone(second[0])


def sweepers(launcher: int) -> list[int]:
    """The living children of a launcher that are sweepers."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [pid for pid in map(int, children) if "sweeper.py" in command_line(pid)]


def test_file_lock_is_held_until_every_process_that_inherited_it_is_gone(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", timeout_s=0.0, busy="the run is busy")
    child = subprocess.Popen(["sleep", "600"], pass_fds=(lock.fd,))
    lock.release()
    with pytest.raises(ProcessError, match=re.escape("the run is busy")):
        FileLock(tmp_path / "lock", timeout_s=0.2, busy="the run is busy")
    child.kill()
    child.wait()
    FileLock(tmp_path / "lock", timeout_s=0.0, busy="the run is busy").release()


# Starts a process in a session of its own, which is stopped, and goes on as it is told.
STRAYS = (
    ADOPT
    + """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
child.send_signal(signal.SIGSTOP)
(scratch / "child").write_text(str(child.pid))
process.announce_ready(ready)
{then}
"""
)


@pytest.mark.parametrize("then", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_stopped_grandchild_in_a_session_of_its_own_does_not_outlive_the_process(rig: Rig, then: str) -> None:
    supervisor = rig.supervisor(STRAYS.format(then=then), launch(restarts=0), sessions=True)
    if "SIGKILL" in then:
        with pytest.raises(ProcessError, match="was killed by SIGKILL"):
            supervisor.run()
    else:
        rig.on_ready = rig.stop.set
        supervisor.run()
    assert gone(int((rig.scratch / "child").read_text()))


# At its first start it hangs as it is told, later ones end with 0.
HANGS = (
    READY
    + """
from areal_core.launch import heartbeat
first = not (scratch / "first").exists()
(scratch / "first").touch()
def work():
    if first:
        {how}
work()
"""
)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGSTOP)",
            r"has sent no heartbeat for 2 s \(launch.liveness_timeout_s\): T \(stopped\); \w+; "
            r"its stacks are not available: killed",
            id="stopped",
        ),
        pytest.param(
            "heartbeat.report('step 3: training'); time.sleep(600)",
            r"has made no progress for 3 s \(launch.stall_timeout_s\): S \(sleeping\); step 3: training for \d+ s; "
            r"its stacks are in .*role-0.log: killed",
            id="no-progress",
        ),
    ],
)
def test_a_process_that_hangs_is_named_killed_and_started_again(rig: Rig, how: str, told: str) -> None:
    rig.supervisor(HANGS.format(how=how), launch(restarts=1, liveness_timeout_s=2.0, stall_timeout_s=3.0)).run()
    (line,) = [line for line in rig.lines if "restart" in line]
    assert re.fullmatch(rf"role-0 {told}: restart 1 of 1", line)
    assert ("in work" in rig.run.log_file("role").read_text()) == ("stacks are in" in told)


# Number 1 fails at its first two starts.
ONE_FAILS = (
    READY
    + """
with (scratch / ready.stem).open("a") as file:
    file.write("x")
if ready.stem == "role-1" and (scratch / ready.stem).stat().st_size <= 2:
    sys.exit(3)
time.sleep(600)
"""
)


def test_others_go_on_without_one_whose_restarts_are_spent_until_one_has_come_back(rig: Rig) -> None:
    rig.on_ready = lambda: rig.stop.set() if len(rig.lines) == 3 else None  # number 1 was started again twice
    rig.supervisor(ONE_FAILS, launch(restarts=1, restart_refill_s=2.0), count=2, spare=True).run()
    first, spent, again = rig.lines
    assert first == "role-1 exited with code 3: restart 1 of 1"
    assert re.match(
        r"role-1 exited with code 3, and has no restarts left: 1 of 2 continue, next restart in \d+ s; ", spent
    )
    assert again == "role-1 can restart again: restart 1 of 1"
