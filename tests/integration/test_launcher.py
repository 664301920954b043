"""The launcher with stand-in roles: how a run starts, recovers and ends."""

import concurrent.futures
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.errors import ProcessError
from areal_core.launch.supervisor import RoleSpec
from areal_core.run import launcher as run_module
from areal_core.run.launcher import Run
from areal_core.run.roles import role_specs
from areal_core.storage.rundir import RunDir, RunInfo, write_json
from areal_core.types import RunSummary, TokenLedger
from tests.support.processes import wait_for
from tests.support.runs import merged

PATIENCE_S = 120.0


def config(root: Path, **fields: Any) -> RunConfig:
    values: dict[str, Any] = {
        "state_dir": str(root / "state"),
        "generation": {"servers": 1},
        "training": {"ranks": 1},
        "launch": {"restarts": 0, "stop_timeout_s": 5.0},
    }
    return load(merged(values, fields))


def folder(settings: RunConfig, **info: Any) -> RunDir:
    url = f"{settings.state_dir}/store/r"
    return RunDir.create(settings, RunInfo(run_id="r", model_path="/models/base", checkpoint_url=url, **info))


SUMMARY = RunSummary(
    run_id="r", name="n", mode="async", seed=1, reason="steps", steps=2, accuracy_before=0.1, accuracy_after=0.9,
    best_accuracy=0.9, rl_wall_s=1.0, time_to_score_s=None, effective_tokens_per_s=1.0, generated_tokens_per_s=1.0,
    staleness_mean=0.5, staleness_max=1, model_url="/store/r/final", incarnation=0,
    tokens=TokenLedger(generated=3, consumed=2, dropped=1, buffered=0, in_flight=0),
)  # fmt: skip

# The trainer waits until `servers` servers are registered; the controller waits for the trainer, the evaluator for the
# controller. A server may be registered more than once.
STAND_IN = """
import http.server, json, os, sys, threading, time
from pathlib import Path
from areal_core.launch import process
from areal_core.storage.rundir import RunDir, write_json
from areal_core.tracking.outbox import Outbox
role, index, run, plan = sys.argv[1], int(sys.argv[2]), RunDir(Path(sys.argv[3])), json.loads(sys.argv[4])
process.tie_to_parent(run.ready_file(role, index))
trained, joined = run.root / "trained", run.root / "joined"

def wait_for(condition):
    while not condition():
        time.sleep(0.02)

def registrations():
    return [line.split() for line in joined.read_text().splitlines()] if joined.exists() else []

def arrivals():
    return {(name, url) for _, name, url in registrations()}

class Handler(http.server.BaseHTTPRequestHandler):
    def respond(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        unknown = "reward accuracy staleness effective_tokens_per_s generated_tokens_per_s eta_s finished".split()
        values = {"step": time.monotonic_ns(), "steps": 2, "version": 0, "elapsed_s": 1.0, "lost_servers": []}
        self.respond({**values, **dict.fromkeys(unknown)})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/stop":
            with joined.open("a") as file:
                file.write(f"{os.getpid()} {body['name']} {body['url']}\\n")
        self.respond({})
    def log_message(self, *_):
        pass

if role == "controller":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process.announce_ready(run.ready_file(role, index), f"http://127.0.0.1:{server.server_port}")
    wait_for(trained.exists)
    write_json(run.summary, plan["summary"])
    sys.exit()
process.announce_ready(run.ready_file(role, index), f"http://{os.getpid()}.test" if role == "generation" else None)
if role in ("generation", "evaluation"):
    time.sleep(600)
elif role == "trainer":
    wait_for(lambda: len(arrivals()) >= plan["servers"])
    if plan.get("trainer") == "fails":
        sys.exit("the loss is not finite")
    wait_for(lambda: plan.get("trainer") != "hangs")
    trained.touch()
elif role == "evaluator":
    wait_for(run.summary.exists)
elif role == "tracker":
    if plan.get("tracker") == "fails":
        sys.exit("no tracking today")
    outbox = Outbox(run.outbox, "r")
    wait_for(outbox.ended)
    (run.root / "tracked").write_text(outbox.ended())
"""


class Stage:
    """A run whose roles are stand-ins that follow `plan`."""

    def __init__(self, settings: RunConfig, patch: pytest.MonkeyPatch, plan: dict[str, Any]) -> None:
        self.dir = folder(settings, tracking_uri="sqlite:///none", tracking_run_id="t")
        self.lines: list[str] = []
        plan = {"servers": settings.generation_servers, "summary": dataclasses.asdict(SUMMARY), **plan}

        def specs(run: RunDir, config: RunConfig, cores: list[int]) -> dict[str, RoleSpec]:
            def argv(role: str) -> Callable[[int], list[str]]:
                return lambda index: [sys.executable, "-c", STAND_IN, role, str(index), str(run.root), json.dumps(plan)]

            real = role_specs(run, config, cores)
            return {name: dataclasses.replace(spec, argv=argv(name), nice=0) for name, spec in real.items()}

        patch.setattr(run_module, "role_specs", specs)
        self.run = Run(self.dir, log=self.lines.append)

    def play(self, meanwhile: Callable[[], None] = lambda: None) -> dict[str, BaseException | None]:
        """Each role's exception once all have ended."""
        roles = (self.run.track, self.run.rollout, self.run.generate, self.run.train, self.run.evaluate)
        with concurrent.futures.ThreadPoolExecutor(len(roles)) as threads:
            running = {role.__name__: threads.submit(role) for role in roles}
            try:
                meanwhile()
                return {name: future.exception(PATIENCE_S) for name, future in running.items()}
            except BaseException:
                self.run.stop("the test failed")
                raise

    def pids(self) -> list[int]:
        return [json.loads(file.read_text())["pid"] for file in self.dir.ready.glob("*.json")]

    def wait_for(self, look: Callable[[], object]) -> None:
        wait_for(look, lambda: self.lines)

    def joined(self) -> list[list[str]]:
        file = self.dir.root / "joined"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    def make(plan: dict[str, Any] | None = None, **fields: Any) -> Stage:
        return Stage(config(tmp_path, **fields), monkeypatch, plan or {})

    return make


def nothing_left(stage: Stage) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in stage.pids())


def test_an_orderly_run_ends_with_its_summary(stage: Callable[..., Stage]) -> None:
    played = stage(generation={"servers": 2}, evaluation={"servers": 2})
    assert set(played.play().values()) == {None}
    assert played.run.report() == SUMMARY
    assert {name for _, name, _ in played.joined()} == {"generation-0", "generation-1"}
    assert (played.dir.root / "tracked").read_text() == "FINISHED"
    assert len(played.pids()) == 8
    assert nothing_left(played)


def test_the_first_failure_is_the_one_that_every_role_reports(stage: Callable[..., Stage]) -> None:
    played = stage({"trainer": "fails"})
    errors = played.play()
    with pytest.raises(ProcessError, match=r"trainer-0 exited with code 1; .* ends: the loss is not finite") as caught:
        played.run.report()
    assert errors == {
        "track": None,
        "rollout": caught.value,
        "generate": caught.value,
        "train": caught.value,
        "evaluate": caught.value,
    }
    assert (played.dir.root / "tracked").read_text() == "FAILED"
    assert not played.dir.summary.exists()
    assert (
        played.dir.log_file("launcher").read_text().endswith(f" ERROR launcher-0 the run has failed: {caught.value}\n")
    )
    assert nothing_left(played)


def test_a_run_goes_on_with_the_servers_that_it_has(stage: Callable[..., Stage]) -> None:
    """One has died and has no restart left."""
    played = stage({"trainer": "hangs"}, generation={"servers": 2})

    def meanwhile() -> None:
        played.wait_for(lambda: len(played.joined()) >= 2)
        os.kill(json.loads(played.dir.ready_file("generation", 1).read_text())["pid"], signal.SIGKILL)
        played.wait_for(lambda: any("has no restarts left: 1 of 2 continue" in line for line in played.lines))
        os.kill(json.loads(played.dir.ready_file("generation", 0).read_text())["pid"], signal.SIGKILL)

    error = played.play(meanwhile)["generate"]
    assert str(error).startswith("generation-0 was killed by SIGKILL; ")


def test_stop_ends_the_roles_and_the_run_can_be_resumed(stage: Callable[..., Stage]) -> None:
    played = stage({"trainer": "hangs"}, launch={"stop_timeout_s": 0.5})

    def meanwhile() -> None:
        played.wait_for(played.joined)
        status = played.run.status()
        assert status is not None
        assert status.steps == 2
        played.run.stop("enough")

    assert set(played.play(meanwhile).values()) == {None}
    with pytest.raises(ProcessError, match=r"run r was stopped \(enough\); resume it by its run_id"):
        played.run.report()
    assert played.run.status() is None
    assert any(
        line.startswith("the trainer did not finish its step within launch.stop_timeout_s") for line in played.lines
    )
    assert (played.dir.root / "tracked").read_text() == "KILLED"
    assert nothing_left(played)


def test_a_stop_is_announced_before_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops, heard = threading.Event(), []
    roles = ("track", "rollout", "generate", "train", "evaluate")
    run = SimpleNamespace(**dict.fromkeys(roles, lambda: heard.append(stops.wait(5))), stop=list)
    run.status = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(run_module, "prepare", lambda *_, **__: RunDir(tmp_path))
    monkeypatch.setattr(run_module, "Run", lambda *_, **__: run)
    with pytest.raises(KeyboardInterrupt):
        run_module.execute(RunConfig(), on_status=print, on_stop=stops.set)
    assert heard == [True] * len(roles)


def test_a_tracker_that_fails_stops_nothing(stage: Callable[..., Stage]) -> None:
    played = stage({"tracker": "fails"})
    assert set(played.play().values()) == {None}
    assert played.run.report() == SUMMARY
    assert any("the run continues without tracking" in line for line in played.lines)


@pytest.mark.parametrize(("remote_roles", "kept"), [("none", False), ("generation", True)])
def test_start_keeps_the_controllers_port_where_other_machines_know_it(
    tmp_path: Path, remote_roles: str, kept: bool
) -> None:
    """On one machine a port that another program has taken meanwhile keeps no run from being resumed."""
    run = folder(config(tmp_path, launch={"remote_roles": remote_roles}))
    write_json(run.port_file("controller"), 12345)
    Run(run).stop("it was enough to start")
    assert run.port_file("controller").exists() is kept
