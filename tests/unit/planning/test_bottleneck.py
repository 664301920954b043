"""What bounded a run, on timelines that were made up so that the bottleneck is known."""

from __future__ import annotations

from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.planning.bottleneck import account, bound, explain
from areal_core.tracking.timeline import Span

START = 1000.0  # s since the Unix epoch
Doing = tuple[str, float, float]  # kind, from, to: seconds since START


def config(**fields: Any) -> RunConfig:
    """Two servers and two ranks, each with a GPU of its own."""
    launch = {"accelerator": "cuda", "devices": 4} | fields.pop("launch", {})
    return load({"launch": launch, "training": {"ranks": 2}, **fields})


def cores(**fields: Any) -> RunConfig:
    return load({"launch": {"devices": 2}, **fields})


def spans(cpu_s: float | None = None, **processes: list[Doing]) -> list[Span]:
    """By process, `generation_0` for generation-0; each span with so many CPU seconds."""
    return [
        Span(process=name.replace("_", "-"), kind=kind, start_s=START + start, end_s=START + end, cpu_s=cpu_s)
        for name, doings in processes.items()
        for kind, start, end in doings
    ]


def judged(chosen: RunConfig, found: list[Span], *, seconds: float = 10.0, **known: Any):
    cpu_s = known.pop("controller_cpu_s", 0.0)
    counted = account(found, chosen, start_s=START, end_s=START + seconds, controller_cpu_s=cpu_s)
    return bound(counted, chosen, **known)


# -- adding up ---------------------------------------------------------------------------------------------------------


def test_a_role_has_the_time_of_its_processes() -> None:
    found = spans(
        generation_0=[("generate", 0, 6), ("wait", 6, 10)],
        generation_1=[("generate", 0, 2), ("update", 2, 3), ("wait", 3, 10)],
        trainer_0=[("wait", 0, 4), ("recompute", 4, 5), ("train", 5, 10)],
    )
    counted = account(found, config(), start_s=START, end_s=START + 10)
    assert counted.wall_s == 10
    assert counted.share("generation", "generate") == pytest.approx(8 / 20)
    assert counted.share("generation", "wait", "update") == pytest.approx(12 / 20)
    assert counted.share("trainer", "recompute", "train") == pytest.approx(6 / 10)
    assert counted.share("rewards", "score") == 0


def test_what_reaches_over_an_edge_counts_in_part() -> None:
    found = spans(4.0, generation_0=[("generate", -6, 2), ("wait", 2, 14), ("generate", 14, 20)])
    counted = account(found, cores(), start_s=START, end_s=START + 8)
    assert counted.roles["generation"].seconds == {"generate": 2, "wait": 6}
    assert counted.roles["generation"].cpu_s == pytest.approx(4 * 2 / 8 + 4 * 6 / 12)
    assert counted.cpu_share("generation", 2) == pytest.approx(3 / 16)


def test_devices_are_occupied_by_as_many_as_there_are() -> None:
    """Two cores: three processes want them from 2 to 4, nobody from 6 to 10."""
    found = spans(
        generation_0=[("generate", 0, 4), ("wait", 4, 10)],
        generation_1=[("generate", 2, 4), ("update", 4, 5)],
        trainer_0=[("train", 2, 6)],
    )
    assert account(found, cores(), start_s=START, end_s=START + 10).occupied == pytest.approx((2 + 4 + 2) / 20)


def test_an_emulated_trainer_stands_for_its_ranks() -> None:
    emulated = load(
        {
            "generation": {"engine": "emulated"},
            "training": {"engine": "emulated", "ranks": 3},
            "launch": {"devices": 4},
        }
    )
    found = spans(generation_0=[("generate", 0, 10)], trainer_0=[("train", 0, 5)])
    assert account(found, emulated, start_s=START, end_s=START + 10).occupied == pytest.approx((10 + 15) / 40)


# -- stages with devices of their own ----------------------------------------------------------------------------------


def ranks(*doings: Doing) -> dict[str, list[Doing]]:
    return {f"trainer_{rank}": list(doings) for rank in range(2)}


def servers(*doings: Doing) -> dict[str, list[Doing]]:
    return {f"generation_{index}": list(doings) for index in range(2)}


def test_generation_is_what_the_trainer_waits_for() -> None:
    found = spans(**servers(("generate", 0, 10)), **ranks(("wait", 0, 6), ("recompute", 6, 7), ("train", 7, 10)))
    result = judged(config(), found)
    assert result.bottleneck == "generation"
    assert (result.busy, result.relieved) == (pytest.approx(1.0), pytest.approx(1 / 0.4))
    assert result.text == (
        "Generation limited this run of 10.0 s. 2 ranks worked 40 % of the time (10 % on proximal log-probabilities). "
        "2 servers generated 100 % of the time. Scoring took 0 %. Ranks waited 60 % of the time for a batch. Servers "
        "waited 0 % for requests and 0 % for new model weights. Upper bounds on the speed-up: 1.00x without idle time, "
        "2.50x with more capacity for generation. Then training would limit the run. More devices for generation "
        "would help."
    )


def test_training_is_what_the_servers_wait_for() -> None:
    found = spans(**servers(("generate", 0, 5), ("wait", 5, 10)), **ranks(("wait", 0, 0.5), ("train", 0.5, 10)))
    result = judged(config(), found)
    assert result.bottleneck == "training"
    assert (result.busy, result.relieved) == (pytest.approx(0.95), pytest.approx(2.0))
    assert "More devices for training would help (training.ranks)." in result.text


def test_servers_that_generate_all_the_time_may_still_have_room() -> None:
    """Held back by the staleness bound they run few completions at once."""
    found = spans(**servers(("generate", 0, 10)), **ranks(("wait", 0, 0.4), ("train", 0.4, 10)))
    assert judged(config(), found).bottleneck == "generation"
    result = judged(config(), found, used=0.5)
    assert result.bottleneck == "training"
    assert result.relieved == pytest.approx(2.0)
    assert "2 servers generated 100 % of the time, at 50 % of their full rate." in result.text


def test_a_bound_that_is_too_tight_keeps_both_waiting() -> None:
    found = spans(
        **servers(("generate", 0, 6), ("wait", 6, 9), ("update", 9, 10)), **ranks(("wait", 0, 6), ("train", 6, 10))
    )
    result = judged(config(), found)
    assert result.bottleneck == "staleness"
    assert (result.busy, result.relieved) == (pytest.approx(0.6), pytest.approx(1 / 0.6))
    assert "Upper bounds on the speed-up: 1.67x without idle time. A larger" in result.text
    assert result.text.endswith("A larger rollout.max_staleness would help.")


def test_slow_verifiers_bound_a_run() -> None:
    found = spans(
        rewards_0=[("score", 0, 9.5)],
        **servers(("generate", 0, 3), ("wait", 3, 10)),
        **ranks(("wait", 0, 6), ("train", 6, 10)),
    )
    result = judged(config(), found)
    assert result.bottleneck == "rewards"
    assert result.relieved == pytest.approx(1 / 0.4)
    assert result.text.endswith(
        "Then training would limit the run. More reward workers would help (rollout.reward_workers, or other machines)."
    )


def test_synchronous_stages_take_turns() -> None:
    synchronous = config(mode="sync", training={"ranks": 4})
    found = spans(
        **{f"generation_{index}": [("generate", 0, 5), ("wait", 5, 10)] for index in range(4)},
        **{f"trainer_{rank}": [("wait", 0, 6), ("train", 6, 9)] for rank in range(4)},
    )
    result = judged(synchronous, found)
    assert result.bottleneck == "turns"
    assert (result.busy, result.relieved) == (pytest.approx(0.8), pytest.approx(1 / 0.3))
    assert "generated 50 % of the time" in result.text
    assert "trained 30 % and were idle 20 %." in result.text


def test_reward_workers_of_other_machines_take_nothing_from_the_runs_cores() -> None:
    found = spans(cpu_s=4.0, rewards_0=[("score", 0, 5)], rewards_1=[("score", 0, 5)], rewards_2=[("score", 5, 10)])
    role = account(found, cores(), start_s=START, end_s=START + 10).roles["rewards"]
    assert (role.processes, role.seconds["score"], role.cpu_s) == (3, pytest.approx(15), pytest.approx(4.0))


# -- stages on the same cores ------------------------------------------------------------------------------------------


def test_cores_that_always_have_work_bound_a_run() -> None:
    """Ten seconds of two cores: each rank has used five of them, each server three, the controller two."""
    found = spans(
        generation_0=[("generate", 0, 10)],
        generation_1=[("generate", 0, 10)],
        trainer_0=[("wait", 0, 5), ("train", 5, 10)],
        trainer_1=[("wait", 0, 5), ("train", 5, 10)],
    )
    used = {"generation": 3.0, "trainer": 2.5}
    found = [
        Span(process=s.process, kind=s.kind, start_s=s.start_s, end_s=s.end_s, cpu_s=used[s.process.split("-")[0]])
        for s in found
    ]
    result = judged(cores(), found, controller_cpu_s=2.0)
    assert result.bottleneck == "cores"
    assert result.busy == pytest.approx(1.0)
    assert result.relieved == pytest.approx(1 / (1 - 10 / 18))
    assert result.text == (
        "The CPU cores limited this run. 2 cores had work 100 % of 10.0 s. The run used 90 % of the CPU time: training "
        "(50 %), generation (30 %) and the controller (10 %). Ranks waited 50 % of the time for a batch. Servers "
        "waited 0 % for requests and 0 % for new model weights. Upper bounds on the speed-up: 1.00x if the cores "
        "always had work, 2.25x if training took no time. More cores would help (launch.devices)."
    )


@pytest.mark.parametrize(("mode", "bottleneck"), [("async", "staleness"), ("sync", "turns")])
def test_cores_without_work(mode: str, bottleneck: str) -> None:
    found = spans(
        2.0,
        generation_0=[("generate", 0, 5), ("wait", 5, 10)],
        generation_1=[("generate", 0, 3), ("wait", 3, 10)],
        trainer_0=[("wait", 0, 5), ("train", 5, 9)],
        trainer_1=[("wait", 0, 5), ("train", 5, 9)],
    )
    result = judged(cores(mode=mode), found)
    assert result.bottleneck == bottleneck
    assert result.busy == pytest.approx((5 + 3 + 4 + 4) / 20)


def test_what_a_controller_does_is_work_for_cores_too() -> None:
    found = spans(2.5, generation_0=[("generate", 0, 5), ("wait", 5, 10)], trainer_0=[("train", 0, 5), ("wait", 5, 10)])
    result = judged(cores(), found, controller_cpu_s=9.0)
    assert result.busy == pytest.approx((5 + 5 + 9) / 20)  # and not half, as servers and ranks are
    assert "2 cores had work 95 % of 10.0 s. The run used 95 % of the CPU time:" in result.text


def test_cores_that_others_use_are_not_taken_for_our_own() -> None:
    text = judged(cores(), spans(3.0, generation_0=[("generate", 0, 10)], trainer_0=[("train", 0, 10)])).text
    assert "used 30 % of the CPU time: generation (15 %) and training (15 %). Other programs used this machine" in text
    text = judged(cores(), spans(9.0, generation_0=[("generate", 0, 10)], trainer_0=[("train", 0, 10)])).text
    assert "Other programs" not in text
    unmeasured = spans(generation_0=[("generate", 0, 10)]) + spans(3.0, trainer_0=[("train", 0, 10)])
    assert "Other programs" not in judged(cores(), unmeasured).text  # vLLM's servers don't say what they use


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_the_window_is_from_the_first_version_to_the_last() -> None:
    """Before it ranks had nothing to train on; after it servers had nothing to do."""
    found = spans(
        publisher_0=[("publish", 9, 10), ("publish", 15, 16), ("publish", 19, 20)],
        **servers(("generate", 0, 20), ("wait", 20, 100)),
        **ranks(("wait", 0, 8), ("train", 8, 9), ("wait", 9, 14), ("train", 14, 19), ("wait", 19, 100)),
    )
    told = explain(config(), found, {}, start_s=START, controller_cpu_s=0.0)
    assert told is not None
    assert told.idle == {"generation": 0.0, "trainer": 0.5}
    assert told.text.startswith("Generation limited this run of 10.0 s. 2 ranks worked 50 % of the time")


def test_the_controllers_share_is_that_of_the_window() -> None:
    found = spans(
        5.0,
        publisher_0=[("publish", 9, 10), ("publish", 19, 20)],
        generation_0=[("generate", 0, 10), ("generate", 10, 20)],
        trainer_0=[("train", 0, 10), ("train", 10, 20)],
    )
    told = explain(cores(), found, {}, start_s=START, controller_cpu_s=4.0)
    assert told is not None
    assert "used 60 % of the CPU time: generation (25 %), training (25 %) and the controller (10 %)." in told.text


@pytest.mark.parametrize("published", [[], [("publish", -3, -2), ("publish", 3, 4)]])
def test_without_two_versions_there_is_nothing_to_explain(published: list[Doing]) -> None:
    found = spans(**servers(("generate", 0, 8)), publisher_0=published)
    assert explain(config(), found, {}, start_s=START, controller_cpu_s=0.0) is None
