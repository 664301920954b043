"""The emulated cloud: instances are machines, and end as AWS's do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.stack import ROOT
from tests.emulated_cloud import EmulatedCloud
from tests.support.processes import wait_for

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.cpu_seconds(60)]

PYTHON = ROOT / ".venv" / "bin" / "python"
PORT = 8000
GET = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode(), end="")
"""
HOLDS = """
import sys, time
from pathlib import Path
from tests.emulated_cloud.cloud import EmulatedCloud
with EmulatedCloud(Path(sys.argv[1])) as cloud, cloud.inside():
    (instance,) = cloud.boot("#!/bin/bash\\nsleep 1000")
    while not (sleeping := cloud.machine_pids(instance["InstanceId"])):
        time.sleep(0.05)
    print(*sleeping, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedCloud]:
    """With an environment of the caller's that no machine may see."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("AWS_SESSION_TOKEN", "PREFECT_API_URL", "AREAL_PLANTED"):
            patched.setenv(name, "planted")
        with EmulatedCloud(tmp_path_factory.mktemp("emulated")) as running, running.inside():
            yield running


def test_machines_share_a_network_and_no_files(cloud: EmulatedCloud, tmp_path: Path) -> None:
    serves = (
        f"#!/bin/bash\nenv > /srv/environment\nhostname > /srv/name\nexec {PYTHON} -u -m http.server {PORT} -d /srv"
    )
    each = cloud.boot(serves, count=2)
    one, other = (instance["InstanceId"] for instance in each)
    names = ["ip-" + instance["PrivateIpAddress"].replace(".", "-") for instance in each]
    url = f"http://{each[0]['PrivateIpAddress']}:{PORT}"

    def served() -> bool:
        return subprocess.run([PYTHON, "-c", GET, f"{url}/name"], capture_output=True, text=True).returncode == 0

    wait_for(served, "what a machine serves to the control host")
    assert cloud.run_in(other, PYTHON, "-c", GET, f"{url}/name").strip() == names[0]
    assert cloud.run_in(other, "hostname").strip() == names[1]
    environment = cloud.run_in(other, PYTHON, "-c", GET, f"{url}/environment")
    variables = {line.partition("=")[0] for line in environment.splitlines()}
    assert {"PATH", "HOME", "LANG"} <= variables
    assert not [name for name in variables if name.startswith(("AWS_", "PREFECT_", "AREAL_", "PYTHON"))]
    cloud.run_in(one, "touch", "/srv/of-one", ROOT / "of-one", "/dev/shm/of-one")
    for folder in ("/srv", ROOT, "/dev/shm"):
        assert not cloud.run_in(other, "find", folder, "-maxdepth", 1, "-name", "of-one")
    assert not any((Path(folder) / "of-one").exists() for folder in ("/srv", ROOT, "/dev/shm"))
    (tmp_path / "of-the-test").touch()
    assert not cloud.run_in(one, "find", "/tmp", "-path", ROOT, "-prune", "-o", "-name", "of-the-test", "-print")


def test_a_cloud_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        processes = [int(pid) for pid in holder.stdout.readline().split()]
        own = f"areal-{holder.pid}-cloud*"
        assert len([*Path("/run/netns").glob(own)]) == 3
        holder.kill()
    assert processes
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "the end of all processes")
    wait_for(lambda: not [*Path("/run/netns").glob(own)], "the end of namespaces")
