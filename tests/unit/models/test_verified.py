"""A version is checked once a machine; what is damaged, torn or mislabelled is refused by every process."""

import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from areal_core.models import verified as module
from areal_core.models.verified import verified, weights_digest


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "marks").mkdir()
    monkeypatch.setattr(module, "_MARKS", tmp_path / "marks")
    return tmp_path / "marks" / f"areal-verified-{os.getuid()}"


@pytest.fixture
def checks(marks: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests that were looked for."""
    seen: list[str] = []
    check = module._check
    monkeypatch.setattr(module, "_check", lambda source, digest: (seen.append(digest), check(source, digest)))
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"w": torch.ones(1000), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def load(source: Path, digest: str) -> None:
    with verified(source, digest):
        pass


def test_first_of_many_checks_a_version_until_it_changes(file: Path, checks: list[str]) -> None:
    digest = weights_digest(file)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: load(file.parent, digest), range(16)))
    assert checks == [digest]
    file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(ValueError, match=rf"^digest: .* has .*, expected {digest}$"):
        load(file.parent, digest)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda file: file.write_bytes(file.read_bytes()[:-1]), Path.unlink])
def test_damage_is_refused_again_and_again(file: Path, checks: list[str], damage: Callable[[Path], object]) -> None:
    digest = weights_digest(file)
    damage(file)
    for _ in range(2):
        with pytest.raises((ValueError, FileNotFoundError)):
            load(file.parent, digest)
    assert len(checks) in (0, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.usefixtures("marks")
def test_numbers_that_are_not_finite_are_refused_by_name(file: Path, dtype: torch.dtype, value: float) -> None:
    numbers = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
    for name, last in (("sound", torch.finfo(dtype).min), ("broken", value)):
        numbers[-1] = last
        save_file({name: numbers, "n": torch.ones(2, dtype=torch.int64)}, file)
        if name == "sound":
            load(file, weights_digest(file))
    with pytest.raises(ValueError, match=r"^broken: holds numbers that are not finite$"):
        load(file, weights_digest(file))


@pytest.mark.usefixtures("marks")
def test_a_version_replaced_while_it_is_read_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match="was replaced while it was read"), verified(file, weights_digest(file)):
        os.replace(shutil.copyfile(file, file.with_name("other")), file)


@pytest.mark.usefixtures("marks")
def test_a_version_may_be_linked_while_it_is_read(file: Path) -> None:
    with verified(file, weights_digest(file)):
        os.link(file, file.with_name("backup"))


def test_a_verifier_that_dies_blocks_nobody(file: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    digest = weights_digest(file)
    if not (child := os.fork()):
        monkeypatch.setattr(module, "_check", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        load(file, digest)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    load(file, digest)
    assert checks == [digest]


def test_a_verifier_that_stands_still_is_not_waited_for(
    file: Path, marks: Path, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHECK_S", 0.1)
    digest = weights_digest(file)
    load(file, digest)
    (mark,) = marks.iterdir()
    with mark.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        load(file, digest)
        assert len(checks) == 1
        mark.write_bytes(b"")
        load(file, digest)
    assert len(checks) == 2


def test_marks_are_few_and_this_users_alone(file: Path, marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MARKS_KEPT", 3)
    for value in range(6):
        save_file({"w": torch.full((1,), float(value))}, file)
        load(file, weights_digest(file))
    assert len(list(marks.iterdir())) == 3
    marks.chmod(0o770)
    with pytest.raises(PermissionError, match="must be a folder that only this user can write to"):
        load(file, weights_digest(file))
