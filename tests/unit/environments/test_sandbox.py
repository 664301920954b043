import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from areal_core.environments import bubblewrap
from areal_core.environments.bubblewrap import control_group, remove_abandoned
from areal_core.environments.confinement import REFUSED
from areal_core.environments.sandbox import Limits, Sandbox, Status
from areal_core.errors import ConfigError
from tests.support.sandboxes import needs_sandbox

BOX = Sandbox("bubblewrap", memory_mib=256, processes=8)
BARE = Sandbox("none", memory_mib=256, processes=8)
LIMITS = Limits(cpu_s=1, wall_s=20, output_bytes=10_000)


@needs_sandbox
@pytest.mark.parametrize("box", [BOX, BARE], ids=["bubblewrap", "none"])
@pytest.mark.parametrize(
    ("program", "status", "stdout"),
    [
        ("print(input()[::-1])", Status.FINISHED, b"olleh\n"),
        ("exit(3)", Status.CRASHED, b""),
        ("1 / 0", Status.CRASHED, b""),
        ("import os; os.kill(os.getpid(), 11)", Status.CRASHED, b""),
        ("import os; os.close(1); print(2)", Status.CRASHED, b""),
        ("def", Status.UNPARSABLE, b""),
        ("\0", Status.UNPARSABLE, b""),
        ("bytearray(2**29)", Status.CRASHED, b""),
        ("while True: pass", Status.TIMED_OUT, b""),
        ("print('x' * 10_001)", Status.CRASHED, b"x" * 10_000),
        ("import sys; print(len(sys.stdin.read()), __name__, sys.argv)", Status.FINISHED, None),
    ],
)
def test_how_programs_end(box, program, status, stdout):
    result = box.run(program, b"hello\n", LIMITS)
    assert result.status is status
    assert stdout in (None, result.stdout)
    assert result.error == ""
    assert 0 < result.cpu_s < 2


@needs_sandbox
@pytest.mark.parametrize(
    "program", ["time.sleep(1000)", "os.close(1); os.kill(os.getpid(), 19)", "all(True for _ in iter(int, 1))"]
)
def test_wall_time_is_limited_apart_from_cpu_time(program):
    assert BOX.run("import os, time; " + program, b"", Limits(cpu_s=1000, wall_s=1)).status is Status.OVERDUE


def script(folder, commands):
    """A program in the place of bubblewrap."""
    file = folder / "bwrap"
    file.write_text(f"#!/bin/sh\n{commands}\n")
    file.chmod(0o755)
    return str(file)


@needs_sandbox
def test_time_is_the_programs_from_its_start_on(monkeypatch, tmp_path):
    slow = script(tmp_path, f'sleep 2\nexec {shutil.which("bwrap")} "$@"')
    monkeypatch.setattr(shutil, "which", lambda name: slow)
    assert BOX.run("print(1)", b"", Limits(cpu_s=1, wall_s=1)).status is Status.FINISHED


@needs_sandbox
def test_a_sandbox_that_does_not_start_or_is_killed_has_failed(monkeypatch):
    with BOX.start({"kind": "run", "sources": ["import time; time.sleep(1000)"]}, LIMITS, b"") as running:
        while not psutil.Process(running._process.pid).children(recursive=True)[1:]:
            time.sleep(0.01)
        os.kill(running._process.pid, signal.SIGKILL)
        assert running.finish().status is Status.FAILED
    monkeypatch.setattr(bubblewrap, "_system", lambda: ("--ro-bind", "/nowhere", "/usr"))
    result = BOX.run("print(1)", b"", LIMITS)
    assert (result.status, result.stdout) == (Status.FAILED, b"")
    assert "/nowhere" in result.error


SEES = """
import os
print(sorted(os.listdir('/')), os.listdir('.'), sorted(os.environ), len(os.listdir('/proc/self/fd')))
status = open('/proc/self/status').readlines()
print(os.getuid() != 0, [line for line in status if line.startswith(('CapEff', 'NoNewPrivs', 'Seccomp:'))])
print([int(name) for name in os.listdir('/proc') if name.isdigit()])
print({'some', 'words', 'in', 'a', 'set'})
open('own', 'w').write('x' * 1000)
"""


@needs_sandbox
def test_a_program_sees_a_python_an_empty_folder_and_itself():
    seen = BOX.run(SEES, b"", LIMITS).stdout.decode()
    first, second, third, _ = seen.splitlines()
    shown = {"usr", "bin", "lib", "lib64", "etc", "dev", "proc", "box", "confined.pyc", "packages"}
    shown.add(Path(sys.base_prefix).parts[1])
    assert set(re.findall(r"'([\w.]+)'", first.partition("]")[0])) <= shown
    assert first.endswith("[] ['LC_CTYPE', 'OPENBLAS_NUM_THREADS', 'PWD', 'PYTHONHASHSEED'] 4")
    assert second == ("True ['CapEff:\\t0000000000000000\\n', 'NoNewPrivs:\\t1\\n', 'Seccomp:\\t2\\n']")
    assert third == "[1, 2]"
    assert BOX.run(SEES, b"", LIMITS).stdout.decode() == seen  # nothing is left of the first one's folder


@needs_sandbox
def test_many_at_a_time_do_not_share_their_limits():
    """More processes than one may have, over all of them."""
    program = "import os\nfor _ in range(6):\n    if os.fork() == 0: import time; time.sleep(0.2); os._exit(0)\n"
    program += "for _ in range(6): print(os.wait()[1])\n"
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: BOX.run(program, b"", LIMITS), range(8)))
    assert [result.stdout for result in results] == [b"0\n" * 6] * 8


FORKS = """
import os, time
forked = 0
try:
    while True:
        if os.fork() == 0: time.sleep(9)
        forked += 1
except OSError: print(forked)
"""
HOARDS = """
import os, time
for _ in range(2): os.fork()
kept = bytearray(200 * 2**20)
time.sleep(1)
"""


@needs_sandbox
def test_processes_and_memory_are_limited_together():
    assert BOX.run(FORKS, b"", LIMITS).stdout == b"7\n"  # and the first one
    with control_group(2**28, 9) as group:
        if group is None:
            pytest.skip("no control group may be made here: memory is limited for each process")
    assert BOX.run(HOARDS, b"", LIMITS).status is Status.CRASHED


OWNER = """
from areal_core.environments.sandbox import Limits, Sandbox
box = Sandbox("bubblewrap", memory_mib=256, processes=8)
job = {"kind": "run", "sources": ["print(1, flush=True); import time; time.sleep(1000)"]}
with box.start(job, Limits(cpu_s=9, wall_s=900), b"") as running:
    running.receive()
    print("up", flush=True)
    running.finish()
"""


@needs_sandbox
def test_a_sandbox_ends_with_the_process_that_made_it_and_its_control_group_is_removed_later():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert len(below) == 3  # bubblewrap, the first process inside, the program
    owner.kill()
    owner.communicate()
    assert psutil.wait_procs(below, timeout=30)[1] == []
    remove_abandoned()
    groups = [name for _, folders, _ in os.walk("/sys/fs/cgroup") for name in folders]  # others come and go meanwhile
    assert [name for name in groups if name.startswith(f"areal-{owner.pid}-")] == []


def test_a_sandbox_that_does_not_work_is_one_line(monkeypatch, tmp_path, caplog):
    broken = script(tmp_path, "echo 'bwrap: no namespaces here' >&2\nexit 1")
    for found, said in (
        (broken, "does not work here (bwrap: no namespaces here); apt-get install bubble"),
        (None, "is not installed; apt-get install "),
    ):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        with pytest.raises(ConfigError, match=rf"^environment\.sandbox: bubblewrap {re.escape(said)}"):
            BOX.check()
    BARE.check()
    assert "environment.sandbox=none: programs run with this user's rights" in caplog.text


@needs_sandbox
def test_calls_that_a_program_is_refused_fail_and_others_do_not():
    """By number, with arguments that a call of this name would take for wrong: EPERM comes before that."""
    program = (
        "import ctypes, sys\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in map(int, sys.stdin.read().split()):\n"
    )
    program += "    libc.syscall(n, -1, -1, -1, -1, -1)\n    print(ctypes.get_errno())\n"
    numbers = [*REFUSED.values(), 435, 3]  # clone3 is absent, close is there
    result = BOX.run(program, " ".join(map(str, numbers)).encode(), LIMITS)
    assert list(map(int, result.stdout.split())) == [*[1] * len(REFUSED), 38, 9]


def test_numbers_of_calls_are_those_of_this_machine():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("needs the kernel's headers")
    known = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    assert {name: int(known.get(name, number)) for name, number in REFUSED.items()} == REFUSED
