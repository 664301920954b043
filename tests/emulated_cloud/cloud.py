"""An emulated cloud as tests use it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from flows.places import FILES
from tests.emulated_cloud import init
from tests.emulated_cloud.daemon import ADDRESS, CONTROL, CONTROL_HOST, PORT, STARTS, Options
from tests.support import namespaces
from tests.support.cloud import Cloud
from tests.support.processes import wait_for
from tests.support.terraform import CREDENTIALS

_numbers = itertools.count()
_END_S = 30.0  # that the daemon has to end in order
_ASK_S = 60.0
_COMMANDS = ("unshare", "nsenter")
# What a machine is made of, tried: a file system of its own over this one, and processes of its own.
_PROBE = """
folder=$(mktemp -d) && mount -t tmpfs tmpfs "$folder" && mkdir "$folder"/{upper,work,all} \
  && mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/all" \
  && mount -t proc proc "$folder/all/proc"; ended=$?
umount -R "$folder" && rmdir "$folder"; exit $ended
"""


def missing() -> str | None:
    """What this machine lacks for an emulated cloud, on one line; None if nothing."""
    for command in _COMMANDS:
        if shutil.which(command) is None:
            return f"needs the command {command}: apt install util-linux"
    if lack := namespaces.missing():
        return lack
    probe = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", _PROBE]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"needs file systems that overlay the root one (overlayfs), as root: {' '.join(tried.stderr.split())}"
    return None


@dataclass(frozen=True)
class Start:
    """One time that a machine ran."""

    instance: str
    run: str | None  # what the tag areal:run says
    started_at: float  # seconds since 1970
    ended_at: float | None = None
    why: str | None = None  # terminated, powered off, reclaimed, crashed, the cloud ends


class EmulatedCloud(Cloud):
    """A context: AWS's API on a control host, and a machine for every instance that runs.

    **Where things are.** The control host is a network namespace with the address `address`; machines have one each,
    with the `PrivateIpAddress` of their instance. All are at one switch, and nothing else is. What is to reach the API
    or machines, or to be reached by them, has to be there:

        with EmulatedCloud(tmp_path) as cloud, cloud.inside():
            server = subprocess.Popen([..., "--host", cloud.address])    # Prefect's, MLflow's, a flow's worker
            cloud.client("ec2").run_instances(...)

    `inside` moves the calling thread, and whatever that starts; contexts may be nested. Child processes find the API by
    `environment`. What asks the API is to be called inside; the rest works outside as well. What has been started there
    and still runs at the end of the cloud is killed.

    **Machines** share no file that anybody writes: each sees this host's root file system with a layer of its own above
    it, and fresh /tmp, /var/tmp, /run, home and .areal of the checkout. They have their own processes and host name
    (ip-10-64-0-4). User data is run at first boot, as root, with the environment of `init.ENVIRONMENT` and nothing of
    the caller's; there is no systemd. boto3 finds the API by the configuration in ~, and credentials by the metadata
    service, which wants a token. `shutdown -P +N` powers a machine off after N minutes; the instance is then
    terminated. A machine whose instance was terminated gets SIGTERM, and SIGKILL `power_off_s` later.

    **The API** is moto's, with what `proxy` adds.

    Files in `folder`: logs/INSTANCE.log, starts.jsonl, moto.log, daemon.log.
    """

    address = ADDRESS  # of the control host

    def __init__(self, folder: Path, *, power_off_s: float = 2.0) -> None:
        """`folder` is there."""
        super().__init__(f"http://{ADDRESS}:{PORT}")
        self.folder = folder
        self._own = f"{namespaces.PREFIX}-{os.getpid()}-cloud{next(_numbers)}"
        self._options = Options(own=self._own, folder=str(folder), power_off_s=power_off_s)
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmulatedCloud:
        """The thread that enters has to be there as long as the cloud: the daemon ends with it."""
        command = [sys.executable, "-m", "tests.emulated_cloud", "--serve", msgspec.json.encode(self._options).decode()]
        with (self.folder / "daemon.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                command,
                cwd=FILES,
                env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._daemon.stdout is not None
        if not self._daemon.stdout.readline():
            self.__exit__()
            raise AssertionError((self.folder / "daemon.log").read_text())
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of it is left, nor of what was started on its control host."""
        assert self._daemon is not None
        with self._daemon as daemon:
            daemon.terminate()
            try:
                daemon.wait(_END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
        namespaces.end(self._own)  # if it was killed

    @property
    def control_host(self) -> str:
        """Name of its namespace, for `ip netns exec`."""
        return f"{self._own}-{CONTROL_HOST}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which AWS's tools and terraform on the control host find the API."""
        return {"AWS_ENDPOINT_URL": self.endpoint, "TF_CLI_CONFIG_FILE": "/dev/null", **CREDENTIALS}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread, and what it starts, is on the control host."""
        with namespaces.entered(self.control_host):
            yield

    def have_boot(self, boots: bool) -> None:
        """Whether machines run anything from now on: else they are on the network, and that is all."""
        self._ask("have_boot", boots=boots)

    def reclaim(self, instance: str, notice_s: float) -> None:
        """The machine's metadata tells of its end, which comes after `notice_s`."""
        self._ask("reclaim", instance=instance, notice_s=notice_s)

    # What there is.

    @property
    def starts(self) -> list[Start]:
        """Every machine that has run, in the order of their starts."""
        begun: list[Start] = []
        for line in (self.folder / STARTS).read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "start":
                begun.append(Start(event["instance"], event["run"], event["at"]))
            else:
                place = next(place for place, each in enumerate(begun) if each.instance == event["instance"])
                begun[place] = replace(begun[place], ended_at=event["at"], why=event["why"])
        return begun

    def running(self) -> dict[str, int]:
        """The instances whose machines run, and the first process of each, as this host numbers it."""
        return self._ask("machines")

    def machine_log(self, instance: str) -> str:
        """What its user data has said, and its first process."""
        file = self.folder / "logs" / f"{instance}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def run_in(self, instance: str, *argv: object) -> str:
        """The output of a command on a machine. AssertionError with all that it said if it fails."""
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        command = ["nsenter", "--target", str(self.running()[instance]), *spaces, *map(str, argv)]
        done = subprocess.run(command, env=init.ENVIRONMENT, capture_output=True, text=True, timeout=_ASK_S)
        assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def boot(self, user_data: str) -> str:
        """A new instance, once its machine runs, or has run. To be called inside."""
        asked = {"ImageId": self.image(), "InstanceType": "m7i.2xlarge", "MinCount": 1, "MaxCount": 1}
        (made,) = self.client("ec2").run_instances(**asked, UserData=user_data)["Instances"]
        wait_for(lambda: made["InstanceId"] in {start.instance for start in self.starts}, "the machine")
        return made["InstanceId"]

    def _ask(self, what: str, **arguments: object) -> Any:
        with self.inside():
            answer = httpx.post(f"{self.endpoint}{CONTROL}{what}", json=arguments, timeout=_ASK_S)
        assert answer.is_success, f"{what}: {answer.text}"
        return answer.json()
