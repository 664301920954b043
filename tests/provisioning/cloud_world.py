"""A campaign's world on the emulated cloud: what faults are asked for, which of them have struck, and runs on nodes as
they are seen, struck and read from outside."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import httpx
import psutil
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry

from areal_core.launch.supervisor import FileLock
from flows.on_nodes import REAPER
from flows.provision.leased import store_of
from flows.provision.leases import Lease, Leases
from flows.shares import CHECKED, NODE
from flows.stack import ROOT
from tests.emulated_cloud import EmulatedCloud
from tests.emulated_cloud.faults import Kind
from tests.support.cloud import BUCKET, MLFLOW_PARAMETER, PARAMETER
from tests.support.models import write_tiny
from tests.support.plane import SECRETS, Plane, plane_on
from tests.support.terraform import CREDENTIALS, REGION, Root, emulated_infra

T = TypeVar("T")
Found = dict[tuple[str, str], int]  # kind and phase

LEASE_S, LOST_S, BOOT_S = 45, 60, 100
MINUTE_S = 10.0  # of instances: an hour takes ten minutes
SHARES = ("trainer-0", "generation-0")
_WAIT_S = 420.0  # for whatever a scene waits for
_DEPLOYMENT = "areal/train-cloud"


class World:
    """What a campaign does and knows."""

    def __init__(self, cloud: EmulatedCloud, plane: Plane, model: Path, seed: int, tell: Callable[[str], None]) -> None:
        self.cloud, self.plane, self.model, self.tell = cloud, plane, model, tell
        self.rng = random.Random(seed)
        self.struck: Counter[tuple[str, str]] = Counter()  # by kind and phase
        self.missed: list[str] = []
        self.runs: list[Run] = []
        self._asked: dict[int, tuple[str, str, int]] = {}  # by a number: kind, phase, count
        self._number = 0

    # -- faults --------------------------------------------------------------------------------------------------------

    def spoil(self, phase: str, call: str, kind: Kind, code: str = "InternalError", count: int = 1) -> None:
        """The next calls that match meet a fault, which counts as one of this phase."""
        self._number += 1
        number = self._number
        name = code if kind == "refuse" else kind
        self._asked[number] = (f"{name} {call.rpartition('/')[2]}", phase, count)
        delay_s = self.rng.uniform(3.0, 8.0) if kind == "delay" else 0.0
        self.cloud.fault(call, kind, code=code, delay_s=delay_s, count=count, seed=number)

    def settle(self) -> None:
        """Count which calls were spoilt since the last time, and leave the rest alone."""
        pending = {fault.seed: fault.count or 0 for fault in self.cloud.faults()}
        for number, (kind, phase, count) in self._asked.items():
            struck = count - pending.get(number, 0)
            if struck:
                self.struck[kind, phase] += struck
            else:
                self.missed.append(f"{kind} ({phase})")
        self._asked.clear()
        self.cloud.clear()

    def act(self, kind: str, phase: str) -> None:
        """A fault that is done at once."""
        self.struck[kind, phase] += 1
        self.tell(f"    {kind} ({phase})")

    # -- runs ----------------------------------------------------------------------------------------------------------

    def start(self, *overrides: str) -> Run:
        asked = [*self._overrides(), *overrides]
        run = Run(self, self.plane.train(_DEPLOYMENT, *asked, steps=100_000))
        self.runs.append(run)
        return run

    def _overrides(self) -> list[str]:
        environment = {
            "AWS_DEFAULT_REGION": REGION,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "5",
        }
        return [
            *(f"provision.{role}.{field}" for role in ("generation", "trainer") for field in ("gpu=none", "gpus=0")),
            *("provision.generation.spot=true", "provision.generation.max_price=0.2", "provision.trainer.price=0.4"),
            *(f"provision.image={self.cloud.image()}", f"provision.software={ROOT}", "provision.replacements=30"),
            *("provision.owner=somebody@example.org", f"provision.prefect_api_url={self.plane.api}"),
            *(f"provision.lease_s={LEASE_S}", f"provision.lost_s={LOST_S}", f"provision.boot_s={BOOT_S}"),
            f"provision.environment='{' '.join(f'{name}={value}' for name, value in environment.items())}'",
            f"provision.secrets='PREFECT_API_AUTH_STRING={SECRETS['PREFECT_API_AUTH_STRING']}'",
            *("name=emulated", "generation.engine=emulated", "training.engine=emulated", "emulation.speed=10"),
            *(f"model.path={self.model}", "tracking.enabled=false", "task.held_out=16", "algorithm.group_size=4"),
            *("rollout.batch_size=16", "training.minibatches=2", "training.checkpoint_every=2", "launch.restarts=20"),
            *("storage.lease_s=5", "launch.disk_low_gib=0.2", "launch.disk_min_gib=0.1"),
        ]

    def pause_reaper(self) -> None:
        """It looks when a scene wants it to."""
        deployment = self.plane.client.read_deployment_by_name(REAPER)
        for schedule in deployment.schedules:
            path = f"/deployments/{deployment.id}/schedules/{schedule.id}"
            self.plane.client.request("PATCH", path, json={"active": False})  # pyright: ignore[reportArgumentType]

    # -- what is there -------------------------------------------------------------------------------------------------

    def until(self, what: str, look: Callable[[], T | None], timeout_s: float = _WAIT_S) -> T:
        deadline = time.monotonic() + timeout_s
        while not (found := look()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.5)
        return found

    @property
    def leases(self) -> Leases:
        return Leases(store_of({"bucket": BUCKET}, 10.0))

    def object(self, name: str) -> bytes | None:
        """What the store holds."""
        store = self.cloud.client("s3")
        try:
            return store.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        except store.exceptions.NoSuchKey:
            return None

    def python(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of the checkout's on the control host."""
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=self.plane.settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill_prefect(self, phase: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Prefect's server, which is away for a few seconds."""
        self.plane.kill_prefect()
        self.act("Prefect killed", phase)
        meanwhile()
        time.sleep(self.rng.uniform(2.0, 8.0))
        self.plane.start_prefect()

    def kill_worker(self, phase: str) -> None:
        """The worker of flows, with all flow runs that it has started, by its own tie to them; another one is there
        then."""
        own = str(self.plane.state)
        (worker,) = (each for each in _processes("-m\0flows.worker") if own in _environment(each))
        worker.kill()
        self.act("worker of flows killed", phase)
        self.until("the stack ends", lambda: not FileLock.is_held(self.plane.state / "stack.lock"))
        self.plane.up()
        self.pause_reaper()  # which is deployed anew


class Run:
    """One run on nodes of its own."""

    def __init__(self, world: World, flow_run: UUID) -> None:
        self.world, self.flow_run = world, flow_run
        self.id = f"emulated-async-{str(flow_run)[-12:]}"
        self.guarded: set[str] = set()  # instances that nobody but the flow may end, for reasons that it tells
        self.doomed: set[str] = set()  # those that were struck
        self.ends_at: float | None = None  # from when its nodes may end, in seconds since 1970
        self.request: dict[str, Any] | None = None

    # -- what is seen of it --------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        found = self.world.plane.run(self.flow_run).state
        return (found and found.name) or ""

    def nodes(self) -> dict[str, str]:
        return {name: each["InstanceId"] for name, each in self.world.cloud.instances(self.id).items()}

    def lease(self) -> Lease | None:
        lease = self.world.leases.read(self.id)
        if lease is not None and lease.request is not None:
            self.request = lease.request
        return lease

    def share(self, name: str) -> FlowRun:
        return self.world.plane.shares(self.id)[name][-1]

    def node_of(self, name: str) -> str:
        return next(tag.removeprefix(NODE) for tag in self.share(name).tags if tag.startswith(NODE))

    def until(self, what: str, look: Callable[[], T | None], timeout_s: float = _WAIT_S) -> T:
        def alive() -> T | None:
            with suppress(httpx.HTTPError):  # while Prefect starts again
                assert self.state not in ("Failed", "Completed"), f"{self.id} is over"
                return look()
            return None

        try:
            return self.world.until(f"{self.id}: {what}", alive, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.world.plane.logs(self.flow_run)[-3000:]}") from None

    def until_at_work(self, *other: str) -> None:
        """All shares are with nodes that are there; none with one of the `other` instances."""

        def there() -> bool:
            shares, nodes = self.world.plane.shares(self.id), set(self.nodes().values())
            if set(shares) != set(SHARES):
                return False
            for runs in shares.values():
                state, tags = runs[-1].state, runs[-1].tags
                node = next((tag.removeprefix(NODE) for tag in tags if tag.startswith(NODE)), None)
                if (
                    node not in nodes
                    or node in other
                    or CHECKED not in tags
                    or state is None
                    or state.name != "Running"
                ):
                    return False
            return True

        self.until("all nodes are at work", there)
        self.lease()
        self.guarded |= {*self.nodes().values()}

    def until_trains(self) -> None:
        """The head node has made a step since now."""
        share = self.share("trainer-0").id
        self.until("it trains", lambda: self.world.plane.step(share) >= 2)

    def until_state(self, *names: str) -> None:
        self.world.until(f"{self.id} is {names}", lambda: self.state in names)

    def logged(self, text: str) -> bool:
        return text in self.world.plane.logs(self.flow_run)

    def process(self) -> psutil.Process | None:
        """Of its flow run."""
        return process_of(self.flow_run)

    def terraform(self, command: str = "apply", of: str = "provision") -> psutil.Process | None:
        """The terraform that is at its nodes. `of`: a flow's, or with `reap` a reaper's."""
        folder = f"{self.world.plane.state}/{of}/{self.id}/"
        for each in _processes(f"\0{command}\0"):
            try:
                if os.path.basename(each.cmdline()[0]) == "terraform" and each.cwd().startswith(folder):
                    return each
            except (psutil.Error, IndexError):
                continue
        return None

    # -- what is done to it --------------------------------------------------------------------------------------------

    def kill(self, phase: str) -> None:
        """The process of its flow run. It is crashed then."""
        process = self.until("its process", self.process)
        process.kill()
        self.world.act("flow killed", phase)
        self.until_state("Crashed")

    def kill_terraform(self, phase: str, of: str = "provision") -> None:
        terraform = self.world.until("terraform", lambda: self.terraform(of=of))
        terraform.kill()
        self.world.act("terraform killed", phase)

    def kill_share(self, name: str) -> None:
        """The process of a node's flow run."""
        share = self.share(name).id
        process = self.until(f"the process of {name}", lambda: process_of(share))
        process.kill()
        self.world.act(f"process of {name} killed", "run")
        self.until(f"{name} is given out again", lambda: self.share(name).id != share)

    def is_locked(self) -> bool:
        """Terraform's state of it."""
        return self.world.object(f"terraform/runs/{self.id}.tfstate.tflock") is not None

    def retry(self) -> None:
        """As the button on its page; again where Prefect's worker, which tells of a death twice, was later."""

        def goes_on() -> bool:
            if self.state == "Crashed":
                self._set_awaiting()
            return self.process() is not None

        self._set_awaiting()
        self.until("it is tried again", goes_on)

    def _set_awaiting(self) -> None:
        self.world.plane.client.set_flow_run_state(self.flow_run, AwaitingRetry(), force=True)

    def leave(self) -> None:
        """It was killed, and nobody starts it again: its nodes live as long as its lease."""
        lease = self.lease()
        self.ends_at = lease.held_until if lease is not None and lease.held_until is not None else time.time()

    def cancel(self, phase: str) -> None:
        self.ends_at = time.time()
        done = self.world.plane.prefect("flow-run", "cancel", str(self.flow_run))
        assert done.returncode == 0, done.stdout + done.stderr
        self.world.act("flow cancelled", phase)

    def doom(self, name: str) -> str:
        """The instance of a node that is to be struck."""
        instance = self.nodes()[name]
        self.doomed.add(instance)
        return instance

    def finish(self) -> None:
        self.lease()
        self.ends_at = time.time()
        self.world.plane.finish(self.id)


def process_of(flow_run: UUID) -> psutil.Process | None:
    """The process of a flow run, on whichever machine of the cloud."""
    asked = f"PREFECT__FLOW_RUN_ID={flow_run}"
    return next((each for each in _processes("prefect.engine") if asked in _environment(each)), None)


def worker_on(world: World, instance: str) -> psutil.Process:
    """The worker of a node."""
    for pid in world.cloud.machine_pids(instance):
        process = psutil.Process(pid)
        if "worker start" in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"no worker runs on {instance}")


def _processes(text: str) -> Iterator[psutil.Process]:
    """Those whose command line has this in it."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                yield psutil.Process(int(folder.name))
        except (OSError, psutil.NoSuchProcess):
            continue


def _environment(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


@contextmanager
def world(seed: int, tell: Callable[[str], None]) -> Iterator[World]:
    """An emulated cloud with what outlives runs, and a control plane; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="areal-") as scratch, tempfile.TemporaryDirectory(dir="/var/lib") as model:
        folder = Path(scratch)
        (folder / "cloud").mkdir()
        write_tiny(Path(model))
        with EmulatedCloud(folder / "cloud", minute_s=MINUTE_S, power_off_s=5.0) as cloud, cloud.inside():
            infra, state = emulated_infra(folder / "infra"), folder / "plane"
            state.mkdir()
            cloud.boot_never(None)
            _control(cloud, infra)
            cloud.clear()
            (state / "control").mkdir()
            shutil.copy(infra / "control" / "terraform.tfstate", state / "control")
            before = {name: os.environ.get(name) for name in cloud.environment}
            os.environ.update(cloud.environment)
            try:
                with plane_on(cloud, state, infra, tracked=False) as plane:
                    made = World(cloud, plane, Path(model), seed, tell)
                    made.pause_reaper()
                    yield made
            except BaseException:
                tell((folder / "cloud" / "daemon.log").read_text()[-2000:])  # where it is the cloud that has failed
                raise
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value


def _control(cloud: EmulatedCloud, infra: Path) -> None:
    root = Root(infra / "control", AWS_ENDPOINT_URL=cloud.endpoint, **CREDENTIALS)
    root.init()
    root.apply(
        {
            "region": REGION,
            "zones": [f"{REGION}a", f"{REGION}b"],
            "bucket": BUCKET,
            "image": cloud.image(),
            "secrets": {"prefect": PARAMETER, "mlflow": MLFLOW_PARAMETER},
            "software": {"path": str(ROOT)},
        }
    )
    # The emulated cloud does not look at the condition of a denial, which is that a request is not encrypted.
    cloud.client("s3").delete_bucket_policy(Bucket=BUCKET)
