"""Hostile answers, run as Python by the worst of scorers, reach nothing and change no other verdict."""

import errno
import itertools
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_core.environments import confinement
from areal_core.environments.confinement import COMPUTING, allowing
from areal_core.environments.fork_server import ForkServer, Reply
from areal_core.errors import ConfigError, RewardError
from tests.support.processes import wait_for

EVALUATING = "tests.support.scorers:Evaluating"
CPU_S = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    opened = ForkServer(EVALUATING, cpu_s=CPU_S)
    yield opened
    opened.close()


_tasks = itertools.count()


def said(reply: str, *, ends: bool = True) -> str:
    """An answer that writes a reply to whatever is open, and ends its process at once or not."""
    written = f"[os.write(fd, {reply}) for fd in range(64) if stopped(lambda: os.fstat(fd))[0] == 'did']"
    return f"[{written}, os._exit(0)]" if ends else written


def judged(server: ForkServer, answer: str) -> Reply:
    """The reply of a new fork: no task is asked for twice, so none is known already."""
    return server.ask(next(_tasks), answer)


def test_files_network_and_processes_are_out_of_reach(server: ForkServer, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    secret.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for code in (
            f"open('{tmp_path}/made', 'w')",
            f"open('{secret}').read()",
            f"os.listdir('{tmp_path}')",
            f"os.unlink('{secret}')",
            f"os.chmod('{secret}', 0o777)",
            f"os.rename('{secret}', '{tmp_path}/moved')",
            f"os.truncate('{secret}', 0)",
            "open('/proc/self/environ').read()",
            "open(f'/proc/{os.getppid()}/mem', 'wb')",
            "os.kill(os.getppid(), 9)",
            "os.fork()",
            f"__import__('socket').create_connection(('127.0.0.1', {port}))",
            "__import__('subprocess').run(['/bin/true'])",
            "os.execv('/bin/true', ['true'])",
            "__import__('time').sleep(5)",
            "os.setpriority(0, 0, -20)",
            "__import__('fcntl').fcntl(0, 8, os.getppid())",  # F_SETOWN: signals by way of the kernel
            "__import__('fcntl').fcntl(0, 1024, 1)",  # F_SETLEASE
            "__import__('fcntl').ioctl(0, 0x40086602, b'0' * 8)",  # FS_IOC_SETFLAGS
        ):
            reply = judged(server, f"stopped(lambda: {code})")
            assert (reply.status, reply.value[0]) == ("done", "stopped"), (code, reply)
    assert secret.read_text() == "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("GOLD.update(answer='5')", "done"),
        ("9**9**9**9", "timed_out"),
        ("[__import__('signal').signal(27, 1), [0 for _ in iter(int, 1)]]", "timed_out"),  # SIGPROF ignored
        ("__import__('signal').setitimer(2, 0)", "raised"),
        ("bytearray(2**40)", "raised"),
        ("os._exit(0)", "died"),
        ("__import__('ctypes').string_at(0)", "died"),
        (said("""b'["done", 1.0]'""", ends=False), "died"),  # said twice
        ("'x' * 10**6", "died"),
        (said("b'5'"), "died"),
        (said("b'[[]]'"), "died"),
        (said("b'[\"done\",' + b'[' * 900 + b']' * 901"), "died"),
        (said("b'\\xff'"), "died"),
    ],
)
def test_an_answer_is_limited_and_changes_no_later_verdict(server: ForkServer, answer: str, status: str) -> None:
    assert judged(server, answer).status == status
    assert judged(server, "gold") == Reply("done", "4")


def test_threads_get_their_own_verdicts(server: ForkServer) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: judged(server, str(number % 8)), range(80)))
    assert found == [Reply("done", number % 8) for number in range(80)]


@pytest.fixture
def start() -> Iterator[Callable[..., ForkServer]]:
    """Start a server of the test's own."""
    servers: list[ForkServer] = []

    def made(**settings: Any) -> ForkServer:
        servers.append(ForkServer(EVALUATING, **{"cpu_s": CPU_S, **settings}))
        return servers[-1]

    yield made
    for one in servers:
        one.close()


def test_a_reply_is_kept_for_the_same_task_and_answer(start: Callable[..., ForkServer]) -> None:
    server, random = start(), "os.getrandom(8).hex()"
    assert server.ask("a", random) == server.ask("a", random) != server.ask("b", random)


def test_a_lost_server_is_an_error_and_the_next_answer_starts_another(start: Callable[..., ForkServer]) -> None:
    server = start()
    assert judged(server, "1") == Reply("done", 1)
    assert server.process is not None
    first = psutil.Process(server.process.pid)
    first.kill()
    with pytest.raises(RewardError, match="has exited"):
        judged(server, "1")
    assert judged(server, "2") == Reply("done", 2)
    second = psutil.Process(server.process.pid)
    server.close()
    assert not first.is_running()
    assert not second.is_running()


def test_a_server_ends_with_its_client_in_the_middle_of_an_answer() -> None:
    waits = "[lock.acquire() for lock in [__import__('_thread').allocate_lock()] * 2]"
    asks = (
        "from tests.unit.environments.test_fork_server import *; server = ForkServer(EVALUATING, cpu_s=60)\n"
        f"print(server.ask(0, '1'), server.process.pid, flush=True); server.ask(1, {waits!r})"
    )
    with subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        server = psutil.Process(int(client.stdout.readline().split()[-1]))
        wait_for(server.children)
        family = [server, *server.children()]
        client.kill()
    _, alive = psutil.wait_procs(family, 30)  # the answer may take ten minutes
    assert alive == []


def test_a_fork_whose_server_has_ended_ends() -> None:
    code = "from areal_core.environments.confinement import *; confine_fork({}, server={}); print('runs')"
    for server, said in (("os.getppid()", b"runs"), ("os.getppid() + 1", b"")):
        limits = "9.0, 2**40, confined=False"
        ended = subprocess.run([sys.executable, "-c", code.format(limits, server)], capture_output=True)
        assert ended.stdout.strip() == said


@pytest.mark.parametrize("allowed", [{1, 2, 3, 7, 9, 10, 400}, {0, 5}, {4}, set(COMPUTING.values())])
def test_a_filter_allows_the_calls_of_its_list_alone(allowed: set[int]) -> None:
    program = list(struct.iter_unpack("=HBBI", allowing({str(number): number for number in allowed})))

    def returned(architecture: int, number: int) -> int:
        """Classic BPF, as far as filters of calls use it."""
        place, value = 0, 0
        while True:
            code, yes, no, operand = program[place]
            if code == 0x06:
                return operand
            if code == 0x20:
                value = {0: number, 4: architecture}[operand]
            else:
                place += yes if {0x15: value == operand, 0x35: value >= operand}[code] else no
            place += 1

    assert {number for number in range(600) if returned(0xC000003E, number) == 0x7FFF0000} == allowed
    assert {returned(0xC000003E, number) for number in range(600)} == {0x7FFF0000, 0x50000 | errno.EPERM}
    assert returned(0xC000003E, 0x40000000 + min(allowed)) == returned(3, min(allowed)) == 0x80000000


def test_a_scorer_that_fails_on_its_task_is_an_error(server: ForkServer, start: Callable[..., ForkServer]) -> None:
    with pytest.raises(RewardError, match="the scorer failed on its own task: KeyError: 'broken'"):
        server.ask("broken", "1")
    assert judged(server, "1") == Reply("done", 1)
    with pytest.raises(RewardError, match="has exited"):
        start(cpu_s=-1.0).ask(None, "1")  # a timer that the kernel refuses: its forks can't be confined


def test_waived_isolation_still_limits_time(start: Callable[..., ForkServer]) -> None:
    server = start(isolation="none")
    assert judged(server, "9**9**9**9") == Reply("timed_out")
    assert judged(server, "os.path.exists('/proc/self/environ')") == Reply("done", True)


def test_a_kernel_without_landlock_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    confinement.check("bubblewrap")
    monkeypatch.setattr(confinement, "_landlock_version", lambda: -1)
    confinement.check("none")
    with pytest.raises(ConfigError, match=r"^environment\.sandbox: .*Landlock.*; set environment\.sandbox=none"):
        confinement.check("bubblewrap")
