"""The command line: overrides, one-line errors, exit statuses, signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import areal_core.__main__ as command
from areal_core.config.files import configuration
from areal_core.config.schema import RunConfig
from areal_core.errors import ConfigError, ModelError, ProcessError, StorageError, TrackingError
from areal_core.run.command import Stopped
from tests.support.signals import pythons_own


@pytest.fixture(autouse=True)
def _signals() -> Any:
    with pythons_own():
        yield


def test_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: mine\ntraining: {steps: 7, learning_rate: 1.0e-3}\n")
    config = configuration(file, ["training.steps=9", "stop.score=null", "tracking.enabled=false", "mode=sync"])
    assert (config.name, config.mode, config.training.steps, config.training.learning_rate) == ("mine", "sync", 9, 1e-3)
    assert config.stop.score is None
    assert config.tracking.enabled is False
    assert configuration({}, []) == RunConfig()


@pytest.mark.parametrize(
    ("text", "overrides", "error"),
    [
        ("a: [", [], r"^configuration: can't read .*run\.yaml: "),
        ("- 1", [], r"^configuration: .* must be a mapping of fields to values"),
        ("", ["training.steps"], "^training.steps: must be of the form field=value"),
        ("", ["=3"], "^=3: must be of the form field=value"),
        ("", ["name=[1"], r"^name: must be a YAML value, got '\[1': "),
        ("", ["seed=" + "9" * 5000], r"^seed: must be a YAML value, got '9{79}: Exceeds the limit"),
        ("seed: " + "9" * 5000, [], r"^configuration: can't read .*: Exceeds the limit"),
        ("", ["training.steps=many"], r"^training\.steps: must be a whole number, got 'many'"),
        ("mode: 3", ["mode.x=1"], "^mode.x: mode is a value"),
    ],
)
def test_a_bad_override_or_file_is_named(tmp_path: Path, text: str, overrides: list[str], error: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=error) as caught:
        configuration(file, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("a.b: wrong"), 2, "error: a.b: wrong"),
        (ModelError("wrong"), 2, "error: wrong"),
        (StorageError("wrong"), 2, "error: wrong"),
        (TrackingError("wrong"), 2, "error: wrong"),
        (ProcessError("trainer-0 exited"), 1, "error: trainer-0 exited"),
        (Stopped(signal.SIGTERM), 143, "stopped"),
        (Stopped(signal.SIGINT), 130, "stopped"),
    ],
)
def test_exit_statuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    def execute(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(command, "execute", execute)
    assert command.main([]) == status
    assert capsys.readouterr() == ("", f"areal: {said}\n")


def test_a_signal_unwinds_once_and_the_second_ends_the_process() -> None:
    code = """
import os, signal, sys
import areal_core.__main__ as command
def execute(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("unwinds", flush=True)
        if "twice" in sys.argv:
            os.kill(os.getpid(), signal.SIGINT)
command.execute = execute
sys.exit(command.main([]))
"""
    for arguments, status in (([], 143), (["twice"], -signal.SIGINT)):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (status, "unwinds\n"), done.stderr


def test_commands_import_nothing_heavy() -> None:
    """One module after the other, in one process: the first that takes long is named."""
    code = f"""
import importlib, sys
for module in {LIGHT}:
    importlib.import_module(f"areal_core.{{module}}")
    heavy = [name for name in ("torch", "mlflow", "transformers", "prefect", "hydra", "s3fs") if name in sys.modules]
    assert heavy == [], (module, heavy)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


LIGHT = (
    "__main__", "generation.client", "controller.pool", "generation.vllm.server", "api.pending_completions",
    "controller.service", "generation.server.routes", "generation.engines.emulated", "training.recipe",
    "environments.source", "rewards.worker",
)  # fmt: skip
