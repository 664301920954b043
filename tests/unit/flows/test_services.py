"""Processes that end together, whoever of them or above them goes first."""

import os
import re
import select
import sys
from pathlib import Path

import pytest

from areal_core.errors import ProcessError
from flows.services import Services


def services_of(folder: Path) -> Services:
    return Services(cwd=folder, logs=folder)


def test_only_a_needed_service_ends_the_others(tmp_path: Path) -> None:
    with services_of(tmp_path) as services:
        services.start("luxury", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}, needed=False)
        happenings = services.watch()
        assert re.match(r"luxury was killed by SIGKILL: .*", next(happenings))
        services.start("short", [sys.executable, "-c", "print('no luck'); raise SystemExit(3)"], {})
        with pytest.raises(ProcessError, match=r"^short exited with code 3: no luck"):
            next(happenings)


def test_service_is_started_again_as_often_as_it_may(tmp_path: Path) -> None:
    with services_of(tmp_path) as services:
        services.start("brief", [sys.executable, "-c", "raise SystemExit(3)"], {}, restarts=2)
        services.start("last", [sys.executable, "-c", "import time; time.sleep(60)"], {})
        happenings = services.watch()
        for _ in range(2):
            assert re.match(r"brief exited with code 3: .*; it is started again", next(happenings))
            assert [service.process.name for service in services._services] == ["brief", "last"]
        with pytest.raises(ProcessError, match=r"^brief exited with code 3"):
            next(happenings)


def test_leaving_ends_every_process_of_every_service(tmp_path: Path) -> None:
    """Even of one whose child ignores SIGTERM, as a server's worker may."""
    child = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with services_of(tmp_path) as services:
        services.start("family", [sys.executable, "-c", parent], {})
        (family,) = services._services
        services.until_ready({"family": lambda: family.process.log.path.read_text().endswith("\n")})
        pidfd = os.pidfd_open(int(family.process.log.path.read_text()))
    assert select.select([pidfd], [], [], 10)[0], "the child outlived the stack"
    os.close(pidfd)
