"""The trainer's batch: its partition, where a rank reads trajectories, its layout, the settings that shape it."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_core.api.controller_client import ControllerClient
from areal_core.api.scored_groups import Span, pack_group
from areal_core.config.schema import AlgorithmConfig, load
from areal_core.errors import ConfigError, ProcessError
from areal_core.storage.rundir import RunDir, write_json
from areal_core.training.batching import trajectories as module
from areal_core.training.batching.partition import (
    Part,
    PromptCost,
    allocate,
    allocate_groups,
    cut_minibatches,
    partition,
)
from areal_core.training.batching.trajectories import Trajectories
from areal_core.training.engines.engine import TrainingBatch, build_batch
from areal_core.training.trainer import Trainer
from areal_core.types import BatchGroup, BatchManifest, GroupPayload
from tests.support.records import batch_group, credits_of, group_payload
from tests.support.remote import HeadNode
from tests.support.training import SPEC, shares_of, whole


@pytest.mark.parametrize(
    ("lengths", "capacity", "microbatches"),
    [
        # Longest first: 9 and 7 open one each; 5 fits only beside 7 (12); 4 fits nowhere and opens the third; 3 fits
        # beside 9 and beside 4, which hold one sequence each: the first; 2 fits only beside 4.
        ([4, 9, 2, 7, 3, 5], 12, [[1, 4], [3, 5], [0, 2]]),
        # 8 and 6 don't fit together, 3 fits beside 6 only; both then have room for 1, and 8 is alone.
        ([8, 6, 3, 1], 10, [[0, 3], [1, 2]]),
        ([], 10, []),
    ],
)
def test_sequences_fill_microbatches_longest_first(lengths, capacity, microbatches):
    assert allocate(lengths, capacity) == microbatches


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: allocate([3, 11], 10), "microbatch_tokens: must hold the longest sequence, 11 tokens, got 10"),
        (lambda: allocate_groups([5], [[2, 6]], 10), "microbatch_tokens: must hold the longest sequence, 11 tokens"),
        (
            lambda: cut_minibatches(4, 0, seed=0, step=0),
            r"minibatches: must be between 1 and the groups in a batch \(4",
        ),
        (
            lambda: cut_minibatches(4, 5, seed=0, step=0),
            r"minibatches: must be between 1 and the groups in a batch \(4",
        ),
    ],
)
def test_impossible_cuts_are_refused(call, said):
    with pytest.raises(ConfigError, match=rf"^training\.{said}"):
        call()


def test_completions_fill_an_item_to_the_last_token_of_its_room():
    """Of the six tokens that the prompt leaves, the longest takes four and another the last two."""
    assert allocate_groups([4], [[1, 4, 2]], 10) == [[[(0, 1), (0, 2)]], [[(0, 0)]]]


def test_minibatches_are_keyed_by_seed_and_step():
    # Fixed values: the order is part of what a resumed run must reproduce.
    assert cut_minibatches(8, 3, seed=1, step=1) == [[3, 2], [4, 6, 1], [5, 7, 0]]
    assert cut_minibatches(8, 3, seed=1, step=2) != cut_minibatches(8, 3, seed=1, step=1)
    assert cut_minibatches(8, 3, seed=2, step=1) != cut_minibatches(8, 3, seed=1, step=1)


@pytest.mark.parametrize(
    ("groups", "shares"),
    [
        # Of single completions: 9 -> rank 0, 7 -> 1, 5 -> 1 (12), 4 -> 0 (13), 3 -> 1 (15), 2 -> 0 (15)
        (
            [(0, [cost]) for cost in (4, 9, 2, 7, 3, 5)],
            [[(i, (0,)) for i in (0, 1, 2)], [(i, (0,)) for i in (3, 4, 5)]],
        ),
        # No further than balance gains.
        ([(0, [8, 2]), (0, [3, 7])], [[(0, (0, 1))], [(1, (0, 1))]]),
        # Halves, each the dearest first to the cheaper one: 8 | 7, 3 -> 7, 2 -> 8.
        ([(0, [8, 7, 2, 3])], [[(0, (0, 2))], [(0, (1, 3))]]),
        # Whole, 112 and 104; halved, each rank pays for both prompts.
        ([(100, [3, 3, 3, 3]), (100, [2, 2])], [[(0, (0, 1, 2, 3))], [(1, (0, 1))]]),
        ([(2, [30, 30])], [[(0, (0,))], [(0, (1,))]]),
        # Whole, 90 and 60. In halves 10 + 40 on one rank; on the other 10 + 40 as well, then one half of 60 each.
        ([(10, [20, 20, 20, 20]), (0, [30, 30])], [[(0, (0, 2)), (1, (0,))], [(0, (1, 3)), (1, (1,))]]),
        # Whole, 4 and 2.
        ([(0, [1, 1, 1, 1]), (0, [1]), (0, [1])], [[(0, (0, 2)), (1, (0,))], [(0, (1, 3)), (2, (0,))]]),
        # Whole, 1002 and 998, which is good enough; halved, 1001 and 999.
        ([(0, [501, 501]), (0, [500, 498])], [[(0, (0, 1))], [(1, (0, 1))]]),
        # The dearest is placed first, its prompt included.
        ([(3, [2]), (0, [4]), (0, [3])], [[(0, (0,))], [(1, (0,)), (2, (0,))]]),
        # The prompt of completions that cost nothing is not paid: they are placed last, on the rank with the fewest.
        ([(9, [0]), (0, [4]), (0, [3, 2])], [[(2, (0, 1))], [(0, (0,)), (1, (0,))]]),
        # The dearest is placed first, however little it costs beside its prompt.
        ([(9, [0.5]), (0, [5]), (0, [4])], [[(0, (0,))], [(1, (0,)), (2, (0,))]]),
        # Completions that cost nothing go with their group, or to the rank with the fewest.
        ([(5, [9, 0, 0]), (5, [0, 0]), (5, [0])], [[(0, (0, 1, 2))], [(1, (0, 1)), (2, (0,))]]),
    ],
)  # fmt: skip
def test_groups_are_partitioned_by_cost(groups, shares):
    """A rank pays once for the prompt of the completions that it has of a group."""
    found = partition([PromptCost(*group, range(len(group[1]))) for group in groups], 2)
    assert found == shares


def sampled(*lengths: int) -> GroupPayload:
    """A group of completions of these lengths for a prompt of two tokens."""
    total = sum(lengths)
    return group_payload(
        np.array([7, 8], np.int32),
        np.array(lengths, np.int32),
        tokens=np.arange(total, dtype=np.int32),
        logprobs=np.full(total, -1.0, np.float32),
    )


GROUPS = {number: sampled(*lengths) for number, lengths in {0: (1, 4), 1: (3, 4), 4: (3, 1, 2)}.items()}
STORED = {number: pack_group(group) for number, group in GROUPS.items()}  # and its checksums


def described(number: int, *, start: int = 0, **fields: Any) -> BatchGroup:
    given = {"group_id": number, "segment": f"000001-{number:06d}", "start": start}
    return batch_group(GROUPS[number], STORED[number][1], **given | fields)


class Controller(ControllerClient):
    """One that has these groups."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def group(self, group_id: int, spans: Sequence[Span]) -> list[bytes]:
        self.asked.append(group_id)
        return [STORED[group_id][0][start:end] for start, end in spans]


@pytest.fixture
def segment(head_node: HeadNode) -> Path:
    """The one on the head node that the group is a part of."""
    head_node.run.payloads.mkdir()
    file = head_node.run.payloads / "000001-000004.bin"
    file.write_bytes(b"others" + STORED[4][0] + b"others")
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
    return Trajectories(run).read(described(4, start=6), completions, controller).tokens.tolist()


@pytest.mark.usefixtures("segment")
def test_beside_a_copy_they_come_from_the_head_node_and_not_of_its_controller(copy: RunDir) -> None:
    controller = Controller()
    assert read(copy, controller) == [4, 5, 0, 1, 2]
    assert read(copy, controller, range(3)) == list(range(6))
    assert controller.asked == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.unlink(), "404: segment 000001-000004 can't be read: No such file or directory"),
        (lambda file: file.write_bytes(b"others"), "416: spans: must lie within segment 000001-000004, and add up"),
        (
            lambda file: file.write_bytes(bytes(500)),
            "part 0 of a trajectory group is damaged: its length or CRC-32 does not match",
        ),
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
    assert f"group 4: can't read it, requesting it from the controller: {said}" in caplog.text


@pytest.mark.usefixtures("segment")
def test_a_data_server_that_is_started_again_is_waited_for(
    copy: RunDir, head_node: HeadNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, controller = Trajectories(copy), Controller()
    assert reader.read(described(4, start=6), [1], controller).tokens.tolist() == [3]
    port = int((copy.copy() or {})["head"].rpartition(":")[2])
    head_node.close()
    later = threading.Timer(0.5, lambda: head_node.serve(port))
    later.start()
    assert reader.read(described(4, start=6), [1], controller).tokens.tolist() == [3]
    later.join()
    assert controller.asked == []
    head_node.close()
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with pytest.raises(ProcessError, match=r"^no trajectories within 0 s: http://\S+ does not respond"):
        read(copy, controller)


GROUP = replace(
    sampled(3, 1),
    tokens=np.array([10, 11, 1, 12], np.int32),
    logprobs=np.array([-0.1, -0.2, -0.3, -0.4], np.float32),
    versions=np.array([4, 4, 5, 5], np.int32),
    truncated=np.array([False, True]),
)
OTHER = replace(GROUP, prompts=(np.array([9], np.int32),))
ADVANTAGES = credits_of([[0.5, -0.5], [0.0, 0.0], [2.0, -2.0]], [GROUP] * 3)


def built(*shares: list[int], payloads: dict[int, GroupPayload], **how: Any) -> TrainingBatch:
    return build_batch(6, whole(payloads, *shares), payloads, ADVANTAGES, capacity=64, **how)


def test_layout_of_a_share():
    batch = built([2], [], [0], payloads={0: GROUP, 2: OTHER})
    assert batch.step == 6
    assert batch.tokens.tolist() == [9, 10, 11, 1, 9, 12, 7, 8, 10, 11, 1, 7, 8, 12]
    assert batch.lengths.tolist() == [4, 2, 5, 3]
    assert batch.prompt_lengths.tolist() == [1, 1, 2, 2]
    assert batch.loss_mask.tolist() == [bool(b) for b in (0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1)]
    assert batch.versions.tolist() == [-1, 4, 4, 5, -1, 5, -1, -1, 4, 4, 5, -1, -1, 5]
    np.testing.assert_allclose(batch.behaviour_logprobs[:6], [0, -0.1, -0.2, -0.3, 0, -0.4])
    assert batch.advantages.tolist() == [0, 2, 2, 2, 0, -2, 0, 0, 0.5, 0.5, 0.5, 0, 0, -0.5]
    assert batch.minibatches == ((0, 1), (), (2, 3))
    assert batch.loss_tokens == [4, 0, 4]


def test_a_share_may_hold_some_of_a_groups_completions():
    """As many as `payloads` has of it, with the advantages that these have."""
    share = [[Part(0, (1,))], [Part(2, (0,))]]
    batch = build_batch(6, share, shares_of({0: GROUP, 2: OTHER}, share), ADVANTAGES, capacity=64, share_prompts=True)
    assert batch.tokens.tolist() == [7, 8, 12, 9, 10, 11, 1]
    assert batch.advantages.tolist() == [0, 0, -0.5, 0, 2, 2, 2]
    assert batch.minibatches == ((0,), (1,))
    assert batch.prompts is not None
    assert batch.prompts.tolist() == [0, 1]


def test_what_the_policy_did_not_sample_is_no_loss_token():
    """One token of the first trajectory is the environment's: it counts in no mean, and not as sampled."""
    sampled = np.array([True, False, True, True])
    versions = np.where(sampled, GROUP.versions, -1).astype(np.int32)
    group = replace(GROUP, loss_mask=sampled, versions=versions, loss_tokens=np.array([2, 1], np.int32))
    batch = built([0], payloads={0: group}, algorithm=AlgorithmConfig(loss_mean="sequence"))
    assert batch.loss_mask.tolist() == [False, False, True, False, True, False, False, True]
    assert batch.versions.tolist() == [-1, -1, 4, -1, 5, -1, -1, 5]
    assert batch.weights[[2, 4, 7]].tolist() == [0.5, 0.5, 1.0]
    assert batch.loss_tokens == [3]
    both = built([0], payloads={0: group}, algorithm=AlgorithmConfig(truncated="mask"))
    assert both.loss_tokens == [2]


def trained_on(
    folder: Path = Path("/nowhere"), cut_off: tuple[bool, bool] = (False, True), **algorithm: Any
) -> TrainingBatch:
    trainer = Trainer.__new__(Trainer)
    trainer._trajectories = Trajectories(RunDir(folder))
    trainer.config = load(
        {
            "algorithm": {"group_size": 2, "advantage": "group_mean", **algorithm},
            "rollout": {"batch_size": 4},
            "task": {"max_new_tokens": 4},
            "training": {"minibatches": 1, "ranks": 1},
        }
    )
    trainer.rank = 0
    trainer.spec = SPEC
    # In the second group both are correct.
    rewards = ((0.0, 1.0), (1.0, 1.0))
    groups = tuple(described(group, rewards=rewards[group], truncated=cut_off) for group in (0, 1))
    return trainer._build(BatchManifest(step=1, groups=groups), CONTROLLER)


CONTROLLER = Controller()


def completions(batch: TrainingBatch, values: np.ndarray) -> list[float]:
    """Of the last token of each completion."""
    return values[np.cumsum(batch.lengths) - 1].tolist()


@pytest.mark.parametrize(
    ("algorithm", "cut_off", "advantages", "loss_tokens", "denominators"),
    [
        ({}, (False, True), [-0.5, 0.5, 0, 0], [12], [12]),
        # Nothing up to 2 tokens, half at 3, all at 4: rewards 0 and 1 - 1, 1 - 0.5 and 1 - 1.
        ({"overlong_cache": 2}, (False, True), [0, 0, 0.25, -0.25], [12], [12]),
        ({"truncated": "mask"}, (True, True), [-0.5, 0.5, 0, 0], [0], [0]),
        ({"loss_mean": "sequence"}, (False, True), [-0.5, 0.5, 0, 0], [12], [4]),
        ({"loss_mean": "constant"}, (False, True), [-0.5, 0.5, 0, 0], [12], [4 * 4]),
        ({"loss_mean": "constant", "truncated": "mask"}, (False, True), [-0.5, 0.5, 0, 0], [4], [2 * 4]),
    ],
)
def test_settings_of_the_algorithm_reach_the_batch(
    algorithm: dict[str, Any],
    cut_off: tuple[bool, bool],
    advantages: list[float],
    loss_tokens: list[int],
    denominators: list[float],
) -> None:
    batch = trained_on(cut_off=cut_off, **algorithm)
    assert completions(batch, batch.advantages) == advantages
    assert (batch.loss_tokens, batch.denominators) == (loss_tokens, denominators)


def test_regularisation_takes_in_completions_without_an_advantage() -> None:
    assert trained_on().has_gradient.tolist() == [True, True, False, False]
    assert trained_on(kl_coef=0.1).has_gradient.all()
    assert trained_on(entropy_coef=0.1).has_gradient.all()


def test_segments_are_read_where_they_are_and_the_controller_is_asked_for_the_others(tmp_path: Path) -> None:
    """One of the two is damaged here: the controller is asked for it, which finds out, too."""
    (folder := tmp_path / "payloads").mkdir()
    (folder / "000001-000000.bin").write_bytes(STORED[0][0])
    (folder / "000001-000001.bin").write_bytes(STORED[1][0][:-1])
    CONTROLLER.asked.clear()
    here = trained_on(tmp_path)
    assert CONTROLLER.asked == [1]
    CONTROLLER.asked.clear()
    elsewhere = trained_on()
    assert CONTROLLER.asked == [0, 1]
    for name in ("tokens", "behaviour_logprobs", "versions", "advantages"):
        np.testing.assert_array_equal(getattr(here, name), getattr(elsewhere, name))
