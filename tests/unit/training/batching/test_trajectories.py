"""Where a rank reads its trajectories: in the run's folder, elsewhere from the data server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from areal_core.api.controller_client import ControllerClient
from areal_core.api.scored_groups import Span, pack_group
from areal_core.errors import ProcessError
from areal_core.storage.rundir import RunDir, write_json
from areal_core.training.batching import trajectories as module
from areal_core.training.batching.trajectories import Trajectories
from areal_core.types import BatchGroup, GroupPayload
from tests.support.remote import HeadNode

LENGTHS = (3, 1, 2)
TOKENS = np.arange(sum(LENGTHS), dtype=np.int32)
PAYLOAD, CHECKSUMS = pack_group(
    GroupPayload(
        prompt_tokens=np.array([7, 8], np.int32),
        lengths=np.array(LENGTHS, np.int32),
        tokens=TOKENS,
        loss_mask=np.ones(len(TOKENS), np.bool_),
        logprobs=np.full(len(TOKENS), -1.0, np.float32),
        versions=np.zeros(len(TOKENS), np.int32),
        truncated=np.zeros(len(LENGTHS), np.bool_),
    )
)
GROUP = BatchGroup(
    group_id=4, lengths=LENGTHS, rewards=(0.0,) * 3, truncated=(False,) * 3, ready_version=0, prompt_tokens=2,
    checksums=CHECKSUMS, segment="000001-000001", start=6,
)  # fmt: skip


class Controller(ControllerClient):
    """One that has the group."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def group(self, group_id: int, spans: Sequence[Span]) -> list[bytes]:
        self.asked.append(group_id)
        return [PAYLOAD[start:end] for start, end in spans]


@pytest.fixture
def segment(head_node: HeadNode) -> Path:
    """The one on the head node that the group is a part of."""
    head_node.run.payloads.mkdir()
    file = head_node.run.payloads / f"{GROUP.segment}.bin"
    file.write_bytes(b"others" + PAYLOAD + b"others")
    return file


@pytest.fixture
def copy(tmp_path: Path, head_node: HeadNode) -> RunDir:
    """Of the run's folder, on another machine."""
    run = RunDir(tmp_path / "copy")
    run.root.mkdir()
    write_json(run.copy_file, {"node": "a", "head": head_node.serve()})
    run.token_file.write_text(head_node.run.token())
    return run


def read(run: RunDir, controller: Controller, completions: Sequence[int] = (2, 0)) -> list[int]:
    """Tokens of completions, as a new reader has them."""
    return Trajectories(run).read(GROUP, completions, controller).tokens.tolist()


@pytest.mark.usefixtures("segment")
def test_beside_a_copy_they_come_from_the_head_node_and_not_of_its_controller(copy: RunDir) -> None:
    controller = Controller()
    assert read(copy, controller) == [4, 5, 0, 1, 2]
    assert read(copy, controller, range(3)) == TOKENS.tolist()
    assert controller.asked == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), "404: segment 000001-000001 can't be read: No such file or directory"),
        (lambda file: file.write_bytes(b"others"), "416: spans: must lie in segment 000001-000001, and be no more"),
        (lambda file: file.write_bytes(bytes(500)), "part 0 of a trajectory group is not what was stored"),
    ],
)
def test_the_controller_is_asked_for_what_is_damaged_or_gone(
    copy: RunDir, segment: Path, damage: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(segment)
    controller = Controller()
    with caplog.at_level(logging.WARNING):
        assert read(copy, controller) == [4, 5, 0, 1, 2]
    assert controller.asked == [4]
    assert f"group 4: the controller is asked for it: {said}" in caplog.text


@pytest.mark.usefixtures("segment")
def test_a_data_server_that_is_started_again_is_waited_for(
    copy: RunDir, head_node: HeadNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, controller = Trajectories(copy), Controller()
    assert reader.read(GROUP, [1], controller).tokens.tolist() == [3]
    port = int((copy.copy() or {})["head"].rpartition(":")[2])
    head_node.close()
    later = threading.Timer(0.5, lambda: head_node.serve(port))
    later.start()
    assert reader.read(GROUP, [1], controller).tokens.tolist() == [3]
    later.join()
    assert controller.asked == []
    head_node.close()
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with pytest.raises(ProcessError, match=r"^no trajectories within 0 s: the head node at http://\S+ does not answer"):
        read(copy, controller)
