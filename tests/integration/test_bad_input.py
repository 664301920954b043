"""Mistakes of a user end with one line on stderr that names what is wrong and with exit status 2, and leave nothing: no
process, no run's folder, no MLflow run."""

import json
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_core.__main__ import main
from tests.support.models import write_tiny


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="module")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def model(sound_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_model, tmp_path / "model"))


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command in this process and return its error, after a look at what must not be there."""
    state = tmp_path / "state"

    def refused(*arguments: str) -> str:
        children = psutil.Process().children()
        base = (f"state_dir={state}", f"storage.url={tmp_path}/store", "task.held_out=8")
        assert main([*base, *arguments]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert psutil.Process().children() == children
        assert not (state / "runs").exists()
        assert not (state / "cache").exists()
        assert not (state / "mlflow" / "mlflow.db").exists()
        assert line.startswith("areal: error: ")
        return line.removeprefix("areal: error: ")

    return refused


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["training.steps"], "training.steps: must be of the form field=value, such as training.steps=5"),
        (["training.steps=many"], "training.steps: must be a whole number, got 'many'"),
        (["training.steps=[1"], "training.steps: must be a YAML value, got '[1': "),
        (["--run-id", "../up"], "run_id: must be letters, digits, dots, dashes and underscores, got '../up'"),
        (["--run-identity", "x"], "unrecognized arguments: --run-identity x; see python -m areal_core --help"),
        (["environment.verifier=no_module:exact"], "environment.verifier: no_module:exact can't be imported: No modu"),
        (["--run-id", "x" * 300], "run_id: must have at most 160 bytes, got 300; shorten xxx"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_settings(refused: Callable[..., str], arguments: list[str], error: str) -> None:
    assert refused(*arguments).startswith(error)


# -- what is beyond this process ---------------------------------------------------------------------------------------


def test_folders_that_can_t_be_written(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = f"{tmp_path}/file/inside"
    assert refused(f"state_dir={inside}") == f"state_dir: can't write to {inside}: Not a directory"
    assert refused(f"storage.url={inside}").startswith(f"storage.url: can't write {inside}/")
    assert refused(f"tracking.uri=sqlite:///{inside}.db") == (
        f"tracking.uri: can't write to sqlite:///{inside}.db: unable to open database file"
    )


@pytest.mark.slow
def test_a_tracking_server_that_does_not_answer(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert refused(f"tracking.uri={url}") == f"tracking.uri: can't use MLflow at {url}: no response in time"


# -- model folders -----------------------------------------------------------------------------------------------------


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("break_it", "error"),
    [
        (shutil.rmtree, "model.path: {model}: is not a model folder, it has no config.json"),
        (lambda m: cut(m / "model.safetensors"), "model.path: {model}/model.safetensors: not a readable safetensors"),
        (lambda m: edit(m, intermediate_size=16), "model.path: {model}: model.layers.0.mlp.gate_proj.weight: expected"),
        (lambda m: edit(m, max_position_embeddings=100), "task.max_new_tokens: prompt and completion need 152 tokens "),
        (
            lambda m: edit(m, architectures=["Olmo2ForCausalLM"]),
            "generation.engine: must be vllm for {model}, got 'embedded', which does not support this model: "
            "architectures must name one of Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, got "
            "'Olmo2ForCausalLM'",
        ),
    ],
)
def test_broken_models(
    refused: Callable[..., str], model: Path, break_it: Callable[[Path], object], error: str
) -> None:
    break_it(model)
    assert refused(f"model.path={model}").startswith(error.format(model=model))


# -- a process of its own ----------------------------------------------------------------------------------------------


def test_resuming_with_another_configuration(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from areal_core.config.files import configuration
    from areal_core.run.prepare import prepare

    base = [f"state_dir={tmp_path}/state", f"storage.url={tmp_path}/store", f"model.path={model}"]
    base += ["tracking.enabled=false", "task.held_out=8"]
    run = prepare(configuration({}, base), run_id="r", log=print)
    files = {file: file.stat().st_mtime_ns for file in run.root.rglob("*")}
    assert main(["--run-id", "r", *base, "algorithm.clip_eps=0.1"]) == 2
    assert capsys.readouterr().err.startswith(
        "areal: error: algorithm.clip_eps: must be 0.2 as when this run was started, got 0.1; a resumed run may only"
    )
    assert {file: file.stat().st_mtime_ns for file in run.root.rglob("*")} == files
