"""The emulated cloud: instances are machines, and end as AWS's do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

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
IDENTITY = """
import json, urllib.error, urllib.request
import boto3
from flows import machine
try:
    urllib.request.urlopen("http://169.254.169.254/latest/meta-data/instance-id", timeout=30)
except urllib.error.HTTPError as error:
    refused = error.code
key = boto3.Session().get_credentials().access_key
told = boto3.client("s3", region_name="us-east-1").get_object(Bucket="shared", Key="told")["Body"].read().decode()
print(json.dumps([refused, machine.identity(), machine.metadata("spot/instance-action"), key[:4], told]))
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


def end(cloud: EmulatedCloud, *instances: str) -> None:
    cloud.client("ec2").terminate_instances(InstanceIds=list(instances))
    wait_for(lambda: not set(instances) & cloud.running().keys(), "the end of machines")


def state(cloud: EmulatedCloud, instance: str) -> str:
    found = cloud.client("ec2").describe_instances(InstanceIds=[instance])
    return found["Reservations"][0]["Instances"][0]["State"]["Name"]


def why(cloud: EmulatedCloud, instance: str) -> str | None:
    return next(start.why for start in cloud.starts if start.instance == instance)


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


def test_all_of_a_machine_ends_with_its_instance_which_can_be_ended_again(cloud: EmulatedCloud) -> None:
    (instance,) = cloud.boot("#!/bin/bash\ntrap '' TERM\nsetsid sleep 1000 &\n(sleep 1001 &)\nsleep 1002\n")
    id_ = instance["InstanceId"]
    wait_for(lambda: len(cloud.machine_pids(id_)) == 4, "its processes")
    processes = cloud.machine_pids(id_)
    end(cloud, id_)
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
    wait_for(lambda: why(cloud, id_) == "terminated", "the ledger")
    end(cloud, id_)
    assert state(cloud, id_) == "terminated"
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        end(cloud, "i-0123456789abcdef0")


def test_a_machine_that_powers_off_ends_its_instance(cloud: EmulatedCloud) -> None:
    (instance,) = cloud.boot("#!/bin/bash\n/sbin/shutdown -P now 'Until then.'\n")
    wait_for(lambda: state(cloud, instance["InstanceId"]) == "terminated", "the end of the instance")
    assert why(cloud, instance["InstanceId"]) == "powered off"


def test_a_machine_is_told_what_it_is_and_that_it_is_reclaimed(cloud: EmulatedCloud) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket="shared")
    s3.put_object(Bucket="shared", Key="told", Body=b"by the test")
    (instance,) = cloud.boot("#!/bin/bash\nsleep 1000\n")
    id_ = instance["InstanceId"]
    ask = ["env", "-C", ROOT, PYTHON, "-c", IDENTITY]
    assert json.loads(cloud.run_in(id_, *ask)) == [401, id_, None, "ASIA", "by the test"]
    cloud.reclaim(id_, notice_s=3600)
    notice = json.loads(json.loads(cloud.run_in(id_, *ask))[2])
    assert notice["action"] == "terminate"
    cloud.reclaim(id_, notice_s=0)
    wait_for(lambda: state(cloud, id_) == "terminated", "the end of the instance")
    wait_for(lambda: why(cloud, id_) == "reclaimed", "the end of the machine")


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
