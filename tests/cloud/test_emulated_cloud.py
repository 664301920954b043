"""The emulated cloud: instances are machines, and what is asked to go wrong does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from flows.stack import ROOT
from tests.emulated_cloud import EmulatedCloud, missing
from tests.support.cloud import tags_of
from tests.support.needs import skip_without
from tests.support.processes import wait_for
from tests.support.terraform import REQUIRE_CLOUD

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.cpu_seconds(60)]

PYTHON = ROOT / ".venv" / "bin" / "python"
PORT = 8000
ONCE = Config(retries={"max_attempts": 0}, read_timeout=60)  # boto3 repeats what fails
SERVES = f"#!/bin/bash\nexec {PYTHON} -u -m http.server {PORT} --directory /srv\n"
GET = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read().decode(), end="")
"""
METADATA = """
import json, sys, urllib.error, urllib.request
def ask(path, method="GET", **headers):
    request = urllib.request.Request("http://169.254.169.254" + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
_, token = ask("/latest/api/token", "PUT", **{"X-aws-ec2-metadata-token-ttl-seconds": "60"})
found = {path: ask(path, **{"X-aws-ec2-metadata-token": token}) for path in sys.argv[1:]}
print(json.dumps([ask(sys.argv[1])[0], found]))
"""
IDENTITY = """
import boto3
print(boto3.Session().get_credentials().access_key)
print(boto3.client("s3", region_name="us-east-1").get_object(Bucket="shared", Key="told")["Body"].read().decode())
"""
HOLDS = """
import sys, time
from pathlib import Path
from tests.emulated_cloud.cloud import EmulatedCloud
with EmulatedCloud(Path(sys.argv[1])) as cloud, cloud.inside():
    data = "#!/bin/bash\\nsleep 1000"
    ran = cloud.client("ec2").run_instances(ImageId=cloud.image(), MinCount=1, MaxCount=1, UserData=data)
    instance = ran["Instances"][0]["InstanceId"]
    cloud.wait_for_machine(instance)
    while not (sleeping := cloud.machine_pids(instance)):
        time.sleep(0.05)
    print(cloud.daemon_pid, *sleeping, flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module", autouse=True)
def _needed() -> None:
    skip_without(missing(), REQUIRE_CLOUD)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedCloud]:
    """With an environment of the caller's that no machine may see, and minutes of a second."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("AWS_SESSION_TOKEN", "PREFECT_API_URL", "AREAL_PLANTED"):
            patched.setenv(name, "planted")
        with EmulatedCloud(tmp_path_factory.mktemp("emulated"), minute_s=1.0) as running:
            yield running


@pytest.fixture(autouse=True)
def _nothing_goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cloud" in request.fixturenames:
        emulated: EmulatedCloud = request.getfixturevalue("cloud")
        emulated.clear()
        end(emulated, *emulated.instances())


def start(cloud: EmulatedCloud, user_data: str | None, count: int = 1, **asked: Any) -> list[dict[str, Any]]:
    with cloud.inside():
        given = {} if user_data is None else {"UserData": user_data}
        asked = {"ImageId": cloud.image(), "InstanceType": "m7i.2xlarge"} | given | asked
        return cloud.client("ec2").run_instances(MinCount=count, MaxCount=count, **asked)["Instances"]


def booted(cloud: EmulatedCloud, user_data: str, count: int = 1, **asked: Any) -> list[str]:
    """Their ids, once the machines are there."""
    instances = [instance["InstanceId"] for instance in start(cloud, user_data, count, **asked)]
    for instance in instances:
        cloud.wait_for_machine(instance)
    return instances


def end(cloud: EmulatedCloud, *instances: str) -> None:
    if instances:
        with cloud.inside():
            cloud.client("ec2").terminate_instances(InstanceIds=list(instances))
        wait_for(lambda: not set(instances) & set(cloud.running()), "the end of machines")


def state(cloud: EmulatedCloud, instance: str) -> str:
    with cloud.inside():
        found = cloud.client("ec2").describe_instances(InstanceIds=[instance])
    return found["Reservations"][0]["Instances"][0]["State"]["Name"]


def address(cloud: EmulatedCloud, instance: str) -> str:
    return cloud.instances()[instance]["PrivateIpAddress"]


def reached(cloud: EmulatedCloud, instance: str, url: str, timeout_s: float = 10.0) -> bool:
    try:
        cloud.run_in(instance, PYTHON, "-c", GET, url, timeout_s)
    except AssertionError:
        return False
    return True


def why(cloud: EmulatedCloud, instance: str) -> list[str | None]:
    return [start.why for start in cloud.starts if start.instance == instance]


@contextmanager
def api(cloud: EmulatedCloud, service: str, config: Config = ONCE) -> Iterator[Any]:
    with cloud.inside():
        yield cloud.client(service, config)


# Machines.


def test_machines_share_a_network_and_no_files(cloud: EmulatedCloud, tmp_path: Path) -> None:
    writes = "#!/bin/bash\nenv > /srv/environment\nhostname > /srv/name\nls /run/systemd/system\n"
    one, other = booted(cloud, writes + SERVES.partition("\n")[2], count=2)
    url = f"http://{address(cloud, one)}:{PORT}"
    wait_for(lambda: reached(cloud, other, f"{url}/name"), "what one machine serves")
    names = {each: "ip-" + address(cloud, each).replace(".", "-") for each in (one, other)}
    assert cloud.run_in(other, PYTHON, "-c", GET, f"{url}/name", 30).strip() == names[one]
    assert cloud.run_in(other, "cat", "/srv/name").strip() == names[other]
    assert names[one] != names[other]
    with cloud.inside():  # the control host is at the same switch
        served = subprocess.run([PYTHON, "-c", GET, f"{url}/environment", "30"], capture_output=True, text=True)
    variables = {line.partition("=")[0] for line in served.stdout.splitlines()}
    assert {"PATH", "HOME", "LANG"} <= variables
    assert not [name for name in variables if name.startswith(("AWS_", "PREFECT_", "AREAL_", "PYTHON"))]
    assert not Path("/srv/environment").exists()
    cloud.run_in(one, "touch", "/srv/of-one", ROOT / "of-one", "/dev/shm/of-one")
    for folder in ("/srv", ROOT, "/dev/shm"):
        assert not cloud.run_in(other, "find", folder, "-maxdepth", 1, "-name", "of-one")
    assert not (ROOT / "of-one").exists()
    (tmp_path / "of-the-test").touch()
    assert not cloud.run_in(one, "find", "/tmp", "-path", ROOT, "-prune", "-o", "-name", "of-the-test", "-print")
    assert "No such file" in cloud.machine_log(one)  # of systemd


def test_all_processes_of_a_machine_end_with_it(cloud: EmulatedCloud) -> None:
    (instance,) = booted(cloud, "#!/bin/bash\ntrap '' TERM\nsetsid sleep 1000 &\n(sleep 1001 &)\nsleep 1002\n")
    wait_for(lambda: len(cloud.machine_pids(instance)) == 4, "its processes")
    processes = cloud.machine_pids(instance)
    end(cloud, instance)
    assert [pid for pid in processes if Path(f"/proc/{pid}").exists()] == []
    wait_for(lambda: why(cloud, instance) == ["terminated"], "the ledger")


def test_a_machine_powers_itself_off(cloud: EmulatedCloud) -> None:
    later, cancelled, stops = (
        *booted(cloud, "#!/bin/bash\nshutdown -P +1 'Until then.'\n", InstanceInitiatedShutdownBehavior="terminate"),
        *booted(cloud, "#!/bin/bash\nshutdown -P +1\nshutdown -c\n", InstanceInitiatedShutdownBehavior="terminate"),
        *booted(cloud, "#!/bin/bash\n/sbin/shutdown now\n"),
    )
    wait_for(lambda: state(cloud, later) == "terminated", "the end of the instance")
    wait_for(lambda: state(cloud, stops) == "stopped", "the stop of the instance")
    assert why(cloud, later) == why(cloud, stops) == ["powered off"]
    assert cloud.running() == [cancelled]
    with cloud.inside():
        cloud.client("ec2").start_instances(InstanceIds=[stops])
    wait_for(lambda: why(cloud, stops) == ["powered off"] * 2, "its second boot, and the end of that")
    with pytest.raises(AssertionError, match=r"takes -P, -c, now and \+MINUTES"):
        cloud.run_in(cancelled, "shutdown", "-r", "now")


def test_a_machine_is_told_what_it_is(cloud: EmulatedCloud) -> None:
    with cloud.inside():
        iam, s3 = cloud.client("iam"), cloud.client("s3")
        iam.create_role(RoleName="reader", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="profile")
        iam.add_role_to_instance_profile(InstanceProfileName="profile", RoleName="reader")
        s3.create_bucket(Bucket="shared")
        s3.put_object(Bucket="shared", Key="told", Body=b"by the test")
    tags = [{"Key": "areal:node", "Value": "trainer-0"}, {"Key": "areal:run", "Value": "paper"}]
    (instance,) = booted(
        cloud,
        SERVES,
        IamInstanceProfile={"Name": "profile"},
        MetadataOptions={"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
    )
    meta = "/latest/meta-data"
    paths = ("instance-id", "local-ipv4", "placement/availability-zone", "placement/region", "tags/instance/areal:node")
    asked = [
        f"{meta}/{path}" for path in (*paths, "tags/instance/", "spot/instance-action", "iam/security-credentials/")
    ]
    document = "/latest/dynamic/instance-identity/document"
    without, found = json.loads(cloud.run_in(instance, PYTHON, "-c", METADATA, *asked, document))
    assert without == 401
    values = [found[f"{meta}/{path}"][1] for path in paths]
    assert values == [instance, address(cloud, instance), "us-east-1a", "us-east-1", "trainer-0"]
    assert found[f"{meta}/tags/instance/"] == [200, "areal:node\nareal:run"]
    assert found[f"{meta}/spot/instance-action"][0] == 404
    assert found[f"{meta}/iam/security-credentials/"] == [200, "reader"]
    assert json.loads(found[document][1])["instanceId"] == instance
    key, told = cloud.run_in(instance, PYTHON, "-c", IDENTITY).split("\n", 1)
    assert (key[:4], told) == ("ASIA", "by the test\n")
    assert [(start.node, start.run) for start in cloud.starts if start.instance == instance] == [("trainer-0", "paper")]
    assert list(cloud.instances("paper")) == ["trainer-0"]


def test_what_a_launch_template_says_is_heeded(cloud: EmulatedCloud) -> None:
    with cloud.inside():
        ec2 = cloud.client("ec2")
        vpc = ec2.create_vpc(CidrBlock="10.64.0.0/20")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.64.2.0/24", AvailabilityZone="us-east-1b")["Subnet"]
        group = ec2.create_security_group(GroupName="nodes", Description="-", VpcId=vpc)["GroupId"]
        data = {
            "ImageId": cloud.image(),
            "InstanceInitiatedShutdownBehavior": "terminate",
            "InstanceMarketOptions": {"MarketType": "spot"},
            "MetadataOptions": {"HttpTokens": "required"},
            "NetworkInterfaces": [
                {"DeviceIndex": 0, "SubnetId": subnet["SubnetId"], "Groups": [group], "AssociatePublicIpAddress": False}
            ],
            "TagSpecifications": [{"ResourceType": "instance", "Tags": [{"Key": "areal:run", "Value": "templated"}]}],
        }
        ec2.create_launch_template(LaunchTemplateName="nodes", LaunchTemplateData=data)
        (started,) = ec2.run_instances(LaunchTemplate={"LaunchTemplateName": "nodes"}, MinCount=1, MaxCount=1)[
            "Instances"
        ]
    found = cloud.instances()[started["InstanceId"]]
    assert found["PrivateIpAddress"].startswith("10.64.2.")
    assert found["Placement"]["AvailabilityZone"] == "us-east-1b"
    assert (found["InstanceLifecycle"], found["MetadataOptions"]["HttpTokens"]) == ("spot", "required")
    assert tags_of(found)["areal:run"] == "templated"
    assert [each["GroupId"] for each in found["NetworkInterfaces"][0]["Groups"]] == [group]
    cloud.wait_for_machine(started["InstanceId"])
    cloud.run_in(started["InstanceId"], "shutdown", "+1")  # not now: it would be ended with its machine
    wait_for(lambda: state(cloud, started["InstanceId"]) == "terminated", "the end of the instance")


# Faults of machines.


def test_a_machine_that_is_reclaimed_hears_of_it(cloud: EmulatedCloud) -> None:
    (instance,) = booted(cloud, "#!/bin/bash\nsleep 1000\n")
    path = "/latest/meta-data/spot/instance-action"
    cloud.reclaim(instance, notice_s=3600)
    _, found = json.loads(cloud.run_in(instance, PYTHON, "-c", METADATA, path))
    notice = json.loads(found[path][1])
    assert notice["action"] == "terminate"
    assert notice["time"].endswith("Z")
    cloud.reclaim(instance, notice_s=0)
    wait_for(lambda: state(cloud, instance) == "terminated", "the end of the instance")
    wait_for(lambda: why(cloud, instance) == ["reclaimed"], "the end of the machine")


def test_a_machine_whose_first_process_dies_is_down_and_still_costs(cloud: EmulatedCloud) -> None:
    (instance,) = booted(cloud, "#!/bin/bash\nsleep 1000\n")
    wait_for(lambda: len(cloud.machine_pids(instance)) == 2, "its processes")
    user_data, sleeping = cloud.machine_pids(instance)
    os.kill(psutil.Process(user_data).ppid(), signal.SIGKILL)
    wait_for(lambda: why(cloud, instance) == ["crashed"], "the end of the machine")
    assert not running(sleeping)
    assert state(cloud, instance) == "running"
    with pytest.raises(AssertionError, match=f"no machine {instance} runs"):
        cloud.run_in(instance, "true")


# Faults of the API.


@pytest.mark.parametrize(
    ("service", "call", "action", "arguments", "code"),
    [
        ("ec2", "RunInstances", "run_instances", {"MinCount": 1, "MaxCount": 1}, "InsufficientInstanceCapacity"),
        ("s3", "PUT /some-bucket", "create_bucket", {"Bucket": "some-bucket"}, "SlowDown"),
    ],
)
def test_refused_call_has_the_error_of_its_service(
    cloud: EmulatedCloud, service: str, call: str, action: str, arguments: dict[str, Any], code: str
) -> None:
    cloud.fault(call, "refuse", code=code)
    with api(cloud, service) as client, pytest.raises(ClientError) as refused:
        getattr(client, action)(**arguments)
    assert refused.value.response["Error"] == {"Code": code, "Message": "As the test has asked for."}
    assert cloud.faults() == []


def test_what_is_stored_comes_back_whole(cloud: EmulatedCloud) -> None:
    """Through the proxy, with a body above what clients send at once."""
    body = os.urandom(3 * 2**20)
    with api(cloud, "s3") as s3:
        s3.create_bucket(Bucket="whole")
        s3.put_object(Bucket="whole", Key="a folder/ä+b%20", Body=body)
        assert s3.head_object(Bucket="whole", Key="a folder/ä+b%20")["ContentLength"] == len(body)
        assert s3.get_object(Bucket="whole", Key="a folder/ä+b%20")["Body"].read() == body
        assert [each["Key"] for each in s3.list_objects_v2(Bucket="whole")["Contents"]] == ["a folder/ä+b%20"]


# Its end.


def namespaces_of(pid: int) -> list[str]:
    return [entry.name for entry in Path("/run/netns").glob(f"areal-{pid}-cloud*")]


def test_two_clouds_side_by_side_and_one_whose_daemon_is_killed(cloud: EmulatedCloud, tmp_path: Path) -> None:
    before = namespaces_of(os.getpid())
    (here,) = booted(cloud, "#!/bin/bash\nsleep 1000\n")
    with EmulatedCloud(tmp_path) as other:
        (there,) = booted(other, "#!/bin/bash\nsleep 1000\n")
        assert (list(cloud.instances()), list(other.instances())) == ([here], [there])
        wait_for(lambda: len(other.machine_pids(there)) == 2, "its processes")
        with other.inside():
            left = subprocess.Popen(["sleep", "1000"])
        processes = [other.daemon_pid, *other.machine_pids(there)]
        os.kill(other.daemon_pid, signal.SIGKILL)
        wait_for(lambda: not any(running(pid) for pid in processes), "the end of all processes")
    assert left.wait() == -signal.SIGKILL
    assert cloud.running() == [here]
    end(cloud, here)
    wait_for(lambda: namespaces_of(os.getpid()) == before, "the end of namespaces")


def test_a_cloud_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        processes = [int(pid) for pid in holder.stdout.readline().split()]
        assert len(namespaces_of(holder.pid)) == 3
        holder.kill()
    assert len(processes) >= 2
    wait_for(lambda: not any(running(pid) for pid in processes), "the end of all processes")
    wait_for(lambda: namespaces_of(holder.pid) == [], "the end of namespaces")


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_instance_can_be_ended_again_as_in_aws(cloud: EmulatedCloud) -> None:
    one, other = (instance["InstanceId"] for instance in start(cloud, None, 2))
    end(cloud, one)
    end(cloud, one, other)
    assert [state(cloud, instance) for instance in (one, other)] == ["terminated", "terminated"]
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        end(cloud, "i-0123456789abcdef0")
