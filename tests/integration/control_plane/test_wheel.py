"""The wheel works in an environment of its own, outside the checkout, with the same commands."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from flows.places import FILES
from tests.support.control import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def areal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that has the wheel, and borrows all other packages from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(FILES))
    subprocess.run([sys.executable, *build], check=True)
    venv.create(folder / "env", with_pip=False)
    [wheel] = folder.glob("areal_flows-*.whl")
    python = folder / "env" / "bin" / "python"
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel], check=True)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "env" / "bin" / "areal"


def run(areal: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "AREAL_STATE_DIR")}
    command = [str(areal), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_commands_read_the_files_of_the_wheel(areal: Path, tmp_path: Path) -> None:
    assert run(areal, tmp_path, "--help").stdout.startswith("usage: areal COMMAND")
    printed = run(areal, tmp_path, "train", "experiment=cpu-tools", "--cfg", "job")
    assert (printed.returncode, printed.stdout.splitlines()[0]) == (0, "name: cpu-tools")
    planned = run(areal, tmp_path, "plan", "launch.device_memory_gib=80")
    assert planned.returncode == 0, planned.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly  # the kernels are compiled anew
def test_a_run_keeps_its_state_in_the_working_directory(areal: Path, tmp_path: Path) -> None:
    done = run(areal, tmp_path, "train", "training.steps=1", *tiny(tmp_path / ".areal"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / ".areal" / "prefect").is_dir()
    assert len(list((tmp_path / ".areal" / "runs").iterdir())) == 1
