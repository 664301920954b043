"""A real S3 server on the loopback: Ceph's gateway, over one monitor and one object store that keeps all in memory."""

from __future__ import annotations

import shutil
import signal
import subprocess
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from tests.support.processes import TIMEOUT_S, free_port, wait_for

PACKAGES = "radosgw ceph-mon ceph-osd"  # of Debian
REQUIRE_S3 = "AREAL_REQUIRE_S3"  # set: a machine that lacks them fails these tests instead of skipping them
_COMMANDS = ("setpriv", "monmaptool", "ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin")
_OWNER = "areal"
_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
; by hand: a store that is refused (see below) ends
osd crush update on start = false
osd class update on start = false
osd objectstore = memstore
memstore device bytes = 2147483648
admin socket =
run dir = {folder}
log file = {folder}/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw thread pool size = 64
; else a change would wait half a minute for a killed gateway to confirm it
rgw cache enabled = false
"""


def missing() -> str | None:
    """What this machine lacks for it, on one line; None if nothing."""
    absent = [command for command in _COMMANDS if shutil.which(command) is None]
    return f"needs {', '.join(absent)}: apt install {PACKAGES}" if absent else None


class RadosGateway:
    """A context, entered by the main thread: what it starts dies with this process, at the latest.

    Only the gateway is stopped and killed: objects lie beneath it, and are there when it comes back.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._configuration = folder / "ceph.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._gateway: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RadosGateway:
        try:
            self._start_store()
            self.credentials = self.add_user(_OWNER)
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def start(self) -> None:
        """Start the gateway and wait until it responds."""
        self._gateway = self._daemon("radosgw", "--name", "client.rgw")
        wait_for(self._responds, self._logs)

    def kill(self) -> None:
        """SIGKILL to the gateway: connections are reset, and new ones refused."""
        if self._gateway is not None:
            self._gateway.kill()
            self._gateway.wait()
            self._gateway = None

    def stop(self) -> None:
        """SIGSTOP: it takes connections and says nothing."""
        assert self._gateway is not None
        self._gateway.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._gateway is not None
        self._gateway.send_signal(signal.SIGCONT)

    def add_user(self, name: str, *arguments: str) -> dict[str, str]:
        """The environment in which boto acts for a new user. `arguments` are those of `radosgw-admin user create`."""
        key, secret = f"{name}-key", f"{name}-secret"
        keys = ("--access-key", key, "--secret-key", secret)
        self._run("radosgw-admin", "user", "create", "--uid", name, "--display-name", name, *keys, *arguments)
        return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_DEFAULT_REGION": "us-east-1"}

    def _start_store(self) -> None:
        fsid, store, monitor = str(uuid.uuid4()), str(uuid.uuid4()), free_port()
        self._configuration.write_text(
            _CONFIGURATION.format(fsid=fsid, monitor=monitor, gateway=self.port, folder=self.folder)
        )
        monmap = str(self.folder / "monmap")
        where = ("--addv", "a", f"v1:127.0.0.1:{monitor}")
        subprocess.run(["monmaptool", "--create", "--fsid", fsid, *where, monmap], check=True, capture_output=True)
        self._run("ceph-mon", "--mkfs", "--id", "a", "--monmap", monmap)
        self._daemons.append(self._daemon("ceph-mon", "--id", "a"))
        # A command may reach a monitor that has just begun before its own id has come back, and is refused.
        add = ("osd", "crush", "add", "0", "1.0", "root=default", "host=here")
        wait_for(lambda: self._try("ceph", "osd", "new", store, "0").returncode == 0, self._logs)
        wait_for(lambda: self._try("ceph", *add).returncode == 0, self._logs)
        (self.folder / "osd").mkdir()
        self._run("ceph-osd", "--id", "0", "--mkfs", "--osd-uuid", store)
        self._daemons.append(self._daemon("ceph-osd", "--id", "0"))

    def _try(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [command, "--conf", str(self._configuration), *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    def _run(self, command: str, *arguments: str) -> None:
        done = self._try(command, *arguments)
        assert done.returncode == 0, f"{command} {' '.join(arguments)}: {done.stderr}\n{self._logs()}"

    def _daemon(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        tie = ("setpriv", "--pdeathsig", "KILL")
        with (self.folder / f"{command}.txt").open("ab") as output:
            return subprocess.Popen(
                [*tie, command, "--conf", str(self._configuration), *arguments, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _responds(self) -> bool:
        assert self._gateway is not None
        assert self._gateway.poll() is None, self._logs()
        try:
            with urllib.request.urlopen(self.endpoint_url, timeout=TIMEOUT_S) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def _logs(self) -> str:
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in sorted(self.folder.glob("*.txt")))
