"""Roles of one machine end together, with the first failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.config.schema import LaunchConfig
from areal_core.errors import ProcessError
from areal_core.launch.supervisor import StopSignal
from areal_core.run.supervision import Supervision
from areal_core.storage.rundir import RunDir


class Roles(Supervision):
    def __init__(self, root: Path) -> None:
        self.stop = StopSignal()
        super().__init__(
            RunDir(root),
            LaunchConfig(),
            log=print,
            forward=print,
            end=self.stop.set,
            counts=lambda error: str(error) != "a consequence",
        )

    def wait(self) -> None:
        assert self.stop.wait(30.0)

    def fails(self, line: str) -> None:
        raise ProcessError(line)


@pytest.fixture
def roles(tmp_path: Path) -> Roles:
    return Roles(tmp_path)


def test_first_failure_of_a_thread_ends_the_others(roles: Roles) -> None:
    with roles.beside("waits", roles.wait), roles.beside("fails", lambda: roles.fails("no memory")):
        roles.wait()
    roles.fail(ProcessError("later"))
    assert str(roles.failure) == "no memory"


def test_error_beside_a_thread_ends_the_thread(roles: Roles) -> None:
    with pytest.raises(ProcessError, match=r"^no disk$"), roles.beside("waits", roles.wait):
        roles.fails("no disk")
    assert str(roles.failure) == "no disk"


def test_consequence_is_no_failure(roles: Roles) -> None:
    roles.guarded(lambda: roles.fails("a consequence"))
    assert (roles.failure, roles.stop.is_set()) == (None, False)


def test_file_that_can_not_be_used_is_one_line(roles: Roles, tmp_path: Path) -> None:
    roles.guarded((tmp_path / "ready.json").touch)
    roles.guarded((tmp_path / "nowhere" / "ready.json").touch)
    assert str(roles.failure) == (
        f"the run's folder can't be used: {tmp_path}/nowhere/ready.json: No such file or directory"
    )
