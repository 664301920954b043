"""A run that everything of was killed goes on, whatever its folder or its store has lost meanwhile, or `make prune` has
deleted. One whose processes die, whose disk is full, or whose verifier has a bug recovers, or ends in order and says
why."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from areal_core.config.groups import LoraConfig
from areal_core.config.schema import RunConfig
from areal_core.controller.core.ledger import TrajectoryLedger
from areal_core.models.adapters import ADAPTER, merged, read_adapter
from areal_core.models.spec import read_arrays, read_spec
from areal_core.run.command import run_command
from areal_core.run.launcher import read_summary
from areal_core.storage import checkpoint
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from flows.commands import prune as prune_command
from tests.support.models import put_base_model
from tests.support.processes import TIMEOUT_S
from tests.support.runs import Launched, tiny


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return tiny(
        tmp_path,
        rollout={"batch_size": 16},
        training={"steps": 8, "checkpoint_every": 2, "keep_checkpoints": 2},
        evaluation={"enabled": False},
    )


def killed(config: RunConfig, step: int) -> RunDir:
    """The run once it has committed a checkpoint of `step` or later, and all of its processes were killed."""
    with Launched(config, "r") as run:
        run.wait_for(f"a checkpoint of step {step}", lambda: (_newest(config) or 0) >= step)
    return run.run


def finished(config: RunConfig) -> str:
    """The output of the run, which goes on and ends in order."""
    with Launched(config, "r") as run:
        assert run.end() == 0, run.output()
        summary = read_summary(run.run)
        assert (summary.steps, summary.reason) == (8, "steps")
        assert summary.tokens.balanced
        return run.output()


@pytest.mark.recovery
def test_a_stopped_run_resumes_from_the_step_that_it_was_stopped_at(config: RunConfig) -> None:
    config = replace(config, training=replace(config.training, ranks=2, steps=4000, checkpoint_every=4000))
    with Launched(config, "r") as run:
        run.until_step(2)
        run.launcher.send_signal(signal.SIGINT)
        assert run.end() == 130, run.output()
        step = run.step()
    assert _newest(config) == step
    with Launched(replace(config, training=replace(config.training, steps=step + 1)), "r") as run:
        assert run.end() == 0, run.output()
        assert f"resumed from the checkpoint of step {step}" in run.output()
    summary = read_summary(run.run)
    assert (summary.steps, summary.incarnation, summary.tokens.balanced) == (step + 1, 0, True)


@pytest.mark.recovery
def test_a_second_signal_ends_a_run_at_once(config: RunConfig) -> None:
    with Launched(replace(config, launch=replace(config.launch, stop_timeout_s=5.0)), "r") as run:
        os.kill(run.pid("trainer"), signal.SIGSTOP)  # it ends no step
        run.launcher.send_signal(signal.SIGINT)
        run.wait_for("the run stops", lambda: "stopping the run: " in run.output())
        run.launcher.send_signal(signal.SIGINT)
        assert run.launcher.wait(TIMEOUT_S) == -signal.SIGINT
        run.gone()


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _store(config: RunConfig) -> Storage:
    return Storage.open(f"{config.storage.url}/runs/r")


def _newest(config: RunConfig) -> int | None:
    return None if (found := checkpoint.newest(_store(config))) is None else found.step


@pytest.mark.nightly
def test_a_run_with_an_adapter_goes_on_on_a_new_machine_with_its_own_base_model(config: RunConfig) -> None:
    """Another base model is refused. Its version comes from the checkpoint, and what it adds to from the base model
    that is there. The final model is that with the adapter beside it. The policy is too weak for rewards to differ; its
    entropy gives it a gradient."""
    training = replace(config.training, lora=LoraConfig(rank=2))
    adapted = replace(config, training=training, algorithm=replace(config.algorithm, entropy_coef=0.01))
    run = killed(adapted, 4)
    model = Path(run.info().model_path) / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(_flipped(whole))
    with Launched(adapted, "r") as other:
        assert other.end() == 2
        assert "model.path: must be the base model of the checkpoint of step " in other.output()
    model.write_bytes(whole)
    shutil.rmtree(run.root)
    assert "restored the ledger from the checkpoint of step" in finished(adapted)
    base, store = Path(run.info().model_path), Path(adapted.storage.url) / "runs" / "r"
    spec, lora = read_spec(base), adapted.training.lora.adapter
    assert lora is not None
    last = read_adapter(store / "adapter" / ADAPTER, spec, lora)
    assert any(array.any() for name, array in last.items() if "lora_B" in name)
    final, merge = read_arrays(store / "final", spec), merged(read_arrays(base, spec), last, lora)
    assert all((final[name] == array).all() for name, array in merge.items())
    assert json.loads((store / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


@pytest.mark.recovery
def test_resume_makes_a_damaged_version_again_from_the_checkpoint_before_a_damaged_one(config: RunConfig) -> None:
    run = killed(config, 4)
    with closing(TrajectoryLedger(run.ledger, group_size=config.algorithm.group_size)) as ledger:
        version = ledger.versions.newest()  # the folder may hold one more, that was not announced any more
    assert version is not None
    newest = checkpoint.newest(_store(config))
    assert newest is not None
    before = checkpoint.newest(_store(config), last=newest.step - 1)
    assert before is not None
    optimizer = Path(config.storage.url) / "runs" / "r" / newest.folder / checkpoint.OPTIMIZER
    optimizer.write_bytes(_flipped(optimizer.read_bytes()))
    weights = Path(version.path) / "model.safetensors"
    weights.write_bytes(_flipped(weights.read_bytes()))
    output = finished(config)
    assert f"version {version.version} is damaged: " in output
    assert "is removed" not in output  # no server was given it
    assert f"{newest.folder}/{checkpoint.OPTIMIZER} is damaged" in output
    assert f"resumed from the checkpoint of step {before.step}" in output


@pytest.mark.recovery
def test_two_launchers_of_one_run_on_two_machines(config: RunConfig, tmp_path: Path) -> None:
    """One store, two state folders: the second is refused, and the first goes on."""
    elsewhere = replace(config, state_dir=str(tmp_path / "elsewhere"), training=replace(config.training, steps=4000))
    put_base_model(elsewhere)
    with Launched(elsewhere, "r") as first:
        first.until_step(1)
        with Launched(replace(elsewhere, state_dir=config.state_dir), "r") as second:
            assert "run_id: the run is already running, on " in second.failed()
        first.until_step(first.step() + 2)


@pytest.mark.nightly
def test_a_launcher_that_was_stopped_while_another_took_the_run_over(config: RunConfig, tmp_path: Path) -> None:
    elsewhere = replace(config, state_dir=str(tmp_path / "elsewhere"))
    put_base_model(elsewhere)
    with Launched(elsewhere, "r") as first:
        first.wait_for("a checkpoint", lambda: _newest(config))
        for pid in first.processes():
            os.kill(pid, signal.SIGSTOP)
        finished(config)  # once the lease of the first has run out
        for pid in first.processes():
            os.kill(pid, signal.SIGCONT)
        assert "run_id: another launcher has taken over the run, on " in first.failed()
    assert _newest(config) == 8


@pytest.mark.slow
def test_run_without_its_leftovers_resumes_and_is_deleted_once_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, training={"steps": 40, "checkpoint_every": 2}, evaluation={"enabled": False})
    given = [f"state_dir={config.state_dir}", f"storage.url={config.storage.url}"]

    def prune(*options: str) -> tuple[int, str, str]:
        status = run_command(lambda: prune_command.main([*options, *given]))
        told = capsys.readouterr()
        return status, told.out, told.err

    def row(table: str) -> list[str]:
        (found,) = (line.split() for line in table.splitlines() if line.startswith("first "))
        return found

    with Launched(config, "first") as run:
        run.until_step(3)
        status, out, _ = prune()
        assert (status, "running" in row(out)) == (0, True)
        assert prune("--run", "first", "--yes")[::2] == (2, "areal: error: --run: first is running; stop it first\n")
        run.launcher.send_signal(signal.SIGTERM)
        assert run.end() == 143
    store = Storage.open(config.storage.url).child("runs/first")
    store.put_bytes("checkpoints/step-000099.1/optimizer.safetensors", bytes(5_000_000))
    status, out, _ = prune()
    assert (status, "stopped" in row(out)) == (0, True)
    assert (float(row(out)[-2]) >= 5, row(out)[-1]) == (True, "MB")
    assert prune("--run", "first")[0] == 1  # nobody says yes
    assert "checkpoints/step-000099.1/optimizer.safetensors" in store.list()
    assert prune("--yes")[0] == 0
    assert "checkpoints/step-000099.1/optimizer.safetensors" not in store.list()
    with Launched(config, "first") as run:
        run.finished()
    assert "finished" in row(prune()[1])
    assert prune("--older", "1", "--yes")[0] == 0  # it is younger
    assert run.run.summary.exists()
    status, out, _ = prune("--run", "first", "--yes")
    assert (status, out.splitlines()[-1].startswith("first: ")) == (0, True)
    assert not run.run.root.exists()
    assert store.list() == ("lease.json",)
    assert prune()[1].startswith("No runs in ")


ROLES = ("trainer", "controller", "generation")


@pytest.mark.recovery
def test_a_run_recovers_from_the_death_of_each_of_its_processes(tmp_path: Path) -> None:
    config = tiny(tmp_path, training={"steps": 12, "checkpoint_every": 2}, evaluation={"enabled": False})
    with Launched(config, "short") as run:
        for role in ROLES:
            pid = run.pid(role)
            run.until_step(run.step() + 2)
            os.kill(pid, signal.SIGKILL)
            assert run.pid(role, but=pid)
        tokens = run.finished().tokens
        assert tokens.allowance <= 2 * 32 * 24 * len(ROLES)  # of what died: what it was asked for, at most
        for role in ROLES:
            assert run.output().count(f"{role}-0 was killed by SIGKILL: restart 1 of 2") == 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder of its own file system."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk: needs root, and leave to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(file: Path, *, but_mib: float) -> None:
    """Write into `file` until no more than so much is free."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):  # there is nothing left
        while shutil.disk_usage(file.parent).free >= but_mib * 2**20:
            os.write(descriptor, bytes(4096))
    os.close(descriptor)


@pytest.mark.recovery
@pytest.mark.nightly
def test_a_run_on_a_full_disk_ends_in_order_and_goes_on_later(disk: Path) -> None:
    limits = {"disk_min_gib": 8 / 1024, "disk_low_gib": 8 / 1024}
    config = tiny(disk, training={"steps": 60, "checkpoint_every": 3}, evaluation={"enabled": False}, launch=limits)
    with Launched(config, "full") as run:
        run.until_step(4)
        fill(disk / "filler", but_mib=4)
        assert run.end() == 2
        assert not run.run.summary.exists()
        last = run.output().rstrip().splitlines()[-1]
        assert re.fullmatch(
            r"areal: error: state_dir: \S+ has 0\.0[01] GiB left, .*free some space, then resume it", last
        )
        assert "Traceback" not in run.output()
    (disk / "filler").unlink()
    with Launched(config, "full") as run:
        run.finished()


VERIFIERS = """
def first_call(task, completion):
    return float({}["anwser"])

def completions(task, completion):
    return 2.0 if completion != task.answer else 1.0
"""


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The import path of a module, less its name."""
    (tmp_path / "own_verifiers.py").write_text(VERIFIERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path) + os.pathsep + os.environ.get("PYTHONPATH", ""))
    return "own_verifiers"


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("first_call", 3, "KeyError: 'anwser'"),
        pytest.param(
            *("completions", None, "ValueError: a verifier must return a score from 0 to 1, or a Verdict, got 2.0"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bug_ends_the_run_without_a_restart(
    tmp_path: Path, verifiers: str, name: str, line: int | None, said: str
) -> None:
    config = tiny(tmp_path, environment={"verifier": f"{verifiers}:{name}"})
    with Launched(config, name) as run:
        assert run.end() == 1
        output = run.output()
        at = "" if line is None else f" ({tmp_path}/own_verifiers.py:{line})"
        first = f"environment.verifier {verifiers}:{name}: {said}{at}"
        end = next(each for each in output.splitlines() if each.startswith("areal: error: "))
        assert end.startswith(f"areal: error: {first}")
        assert "restart" not in output
        assert not run.run.summary.exists()
    for shown in ("prompt:", "completion:"):
        assert f"    {shown}\n" in output
    if line is not None:
        assert f'File "{tmp_path}/own_verifiers.py", line {line}, in {name}' in output
    if name == "first_call":
        assert not run.run.logs.exists()  # no process of the run was started
