"""The whole ring on one machine: every role a process of its own, a tiny model, a few steps."""

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from moto.server import ThreadedMotoServer

from areal_core.config.schema import RunConfig
from areal_core.models.folders import read_weights
from areal_core.models.spec import read_spec
from areal_core.run.launcher import execute, run_folder
from areal_core.run.progress import conclude
from areal_core.storage import checkpoint, weights
from areal_core.storage.objects import Storage
from areal_core.tracking.outbox import Outbox
from areal_core.tracking.timeline import read_timeline
from areal_core.types import RunStatus, RunSummary
from tests.support.generation import by_transformers, request
from tests.support.runs import Launched, merged, tiny
from tests.support.trajectories import ServerView


def small(root: Path, *, warm: bool = True, **groups: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "storage": {"url": str(root / "store")},
        "task": {"held_out": 16},
        "rollout": {"batch_size": 16},
        "training": {"steps": 2},
        "launch": {"restarts": 0},
    }
    return tiny(root / "state", warm=warm, **merged(base, groups))


@pytest.mark.nightly
def test_ranks_that_partition_the_model_publish_and_save_all_of_it(tmp_path: Path) -> None:
    training = {"engine": "deepspeed", "zero_stage": 3, "ranks": 2, "checkpoint_every": 1}
    config = small(tmp_path, training=training, evaluation={"enabled": False})
    summary = execute(config, run_id="r", log=print)
    assert (summary.reason, summary.steps) == ("steps", 2)
    assert summary.tokens.balanced
    _check_final_model(config, version=2)
    newest = checkpoint.newest(Storage.open(str(tmp_path / "store" / "runs" / "r")))
    assert newest is not None
    assert (newest.step, newest.extra["engine"]) == (2, {"updates": 4, "control": {}})
    store = {"url": str(tmp_path / "store")}
    for steps, ranks, stage in ((3, 1, 1), (4, 2, 2)):  # on other machines, where other ranks read what they hold
        changed = training | {"steps": steps, "ranks": ranks, "zero_stage": stage}
        there, lines = tmp_path / str(steps), list[str]()
        config = small(there, storage=store, training=changed, evaluation={"enabled": False})
        summary = execute(config, run_id="r", log=lines.append)
        assert (summary.steps, summary.incarnation) == (steps, 0)
        assert f"trainer-0: resumed from the checkpoint of step {steps - 1}" in lines


@pytest.mark.nightly
def test_a_run_whose_token_ledger_does_not_balance_fails_once_its_model_is_safe(tmp_path: Path) -> None:
    """A request from outside the run has an id like those of its groups, so that its tokens are counted."""
    with Launched(tiny(tmp_path, training={"steps": 4}), "unbalanced") as run:
        run.until_step(1)
        sampled = ServerView(run.url("generation"), run.run.token()).ask(request("group-1000-0"))
        line = run.failed()
        found = re.search(r"balance: ([\d,]+) generated; ledger: ([\d,]+) = ", line)
        assert found, line
        servers, ledger = (int(figure.replace(",", "")) for figure in found.groups())
        assert servers - ledger == sampled > 0
        assert "restart" not in run.output()
        store = Storage.open(run.run.info().checkpoint_url)
        newest = checkpoint.newest(store)
        assert newest is not None
        assert newest.step == 4
        assert "model.safetensors" in store.child("final").sizes()


@pytest.mark.recovery
def test_from_nothing_to_s3_and_on_from_there_on_a_new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    store = {"url": "s3://runs/areal", "endpoint_url": f"http://{host}:{port}"}
    try:
        steps = {"steps": 3, "checkpoint_every": 2}
        config = small(tmp_path, warm=False, storage=store, training=steps, evaluation={"every": 1})
        lines: list[str] = []
        first = execute(config, run_id="r", log=lines.append)
        assert (first.reason, first.steps) == ("steps", 3)
        assert first.model_url.startswith("s3://runs/areal/")
        assert any(line.startswith("warmup-0: warm-up: worked completions, step 1 of 1") for line in lines)
        _check_account(config, first, lines)
        _check_final_model(config, version=3)
        shutil.rmtree(tmp_path / "state")  # its published versions and its base model are gone
        later = {"steps": 5, "checkpoint_every": 2}
        config = small(tmp_path / "new", storage=store, training=later, evaluation={"every": 1})
        second = execute(config, run_id="r", log=print)
        assert second.steps == 5
        assert second.incarnation == 0
        assert second.tokens.balanced
        assert sum(second.staleness_tokens.values()) == second.tokens.consumed  # those of the checkpoint's step as well
        assert second.tokens.consumed > first.tokens.consumed
        storage = Storage.open(f"{store['url']}/runs/r", store["endpoint_url"])
        newest = checkpoint.newest(storage)
        assert newest is not None
        assert newest.step == 5
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
            Path(name).name for name in storage.sizes("final")
        }
    finally:
        server.stop()


def _check_account(config: RunConfig, summary: RunSummary, lines: list[str]) -> None:
    """What the summary and the launcher's last lines say; nothing runs any more, and the run is not run again."""
    assert summary.tokens.generated == summary.tokens.accounted > summary.tokens.in_flight
    assert summary.tokens.allowance == 0
    assert f"controller-0: tokens: {summary.tokens}" in lines
    assert sum(summary.staleness_tokens.values()) == summary.tokens.consumed
    assert summary.bound is not None
    assert re.search(r"limited this run\. 2 cores had work \d+ % of \d+\.\d s\.", summary.bound)
    ready = run_folder(config, "r").ready.glob("[!.]*.json")
    assert not any(Path(f"/proc/{json.loads(file.read_text())['pid']}").exists() for file in ready)
    assert execute(config, run_id="r", log=lines.append) == summary


def _check_final_model(config: RunConfig, *, version: int) -> None:
    """The saved model is the last published version, and transformers can load it."""
    folder = run_folder(config, "r").root / "final"
    spec = read_spec(folder)
    saved = read_weights(folder, spec)
    published = weights.newest(run_folder(config, "r").weights)
    assert published is not None
    assert published.version == version
    for name, array in weights.load(published).items():
        assert torch.equal(saved[name], torch.from_numpy(array))
    loaded = by_transformers(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())


STEPS = 3


@pytest.mark.slow
def test_emulated_run_balances_its_tokens_and_names_what_it_emulates(tmp_path: Path) -> None:
    config = tiny(
        tmp_path,
        task={"max_operations": 3, "max_prompt_tokens": 8, "max_new_tokens": 32, "held_out": 16},
        generation={"engine": "emulated", "slots": 8},
        rollout={"batch_size": 16},
        training={"engine": "emulated", "steps": STEPS},
        launch={"devices": 3, "restarts": 0},
        emulation={"speed": 200.0, "length_median": 1500.0, "handover_s": 2.0},
    )
    seen: list[RunStatus] = []
    summary = execute(config, run_id="r", log=print, on_status=seen.append)
    assert (summary.reason, summary.steps, summary.incarnation) == ("steps", STEPS, 0)
    assert (summary.tokens.generated, summary.tokens.allowance) == (summary.tokens.accounted, 0)
    assert summary.tokens.consumed > 0
    assert summary.tokens.dropped == 0
    assert summary.accuracy_before is summary.accuracy_after is summary.best_accuracy is None
    assert not summary.alerts  # that nothing is learnt is no news
    assert summary.emulated == "qwen-1.5b on 3 h800, 200 s in one, 128 tokens as one"
    assert f"emulated: {summary.emulated}" in conclude(summary)
    assert summary.name == "emulated-cpu-async"
    assert seen
    assert all(status.emulated for status in seen)
    # Tokens a second are the emulated cluster's, token counts and seconds this machine's.
    real = summary.tokens.consumed / summary.rl_wall_s
    assert summary.effective_tokens_per_s == pytest.approx(real * 128 / 200)
    run = run_folder(config, "r")
    spans = read_timeline(run.timeline)
    # One trainer for all devices, spans of servers and trainer, no evaluation.
    assert {span.process for span in spans} == {"generation-0", "trainer-0", "publisher-0", "rewards-0"}
    assert [span.step for span in spans if span.kind == "train"] == list(range(1, STEPS + 1))
    with closing(Outbox(run.outbox, "r")) as outbox:
        curves = outbox.history()
    assert [step for step, _ in curves["throughput/effective_tokens_per_s"]] == list(range(1, STEPS + 1))
    assert "heldout/accuracy" not in curves
    assert not list(run.logs.glob("evaluator*"))
    assert [json.loads((run.weights / f"v{STEPS:06d}" / "manifest.json").read_text())["version"]] == [STEPS]
