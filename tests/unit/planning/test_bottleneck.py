"""What bounded a run, on timelines that were made up so that the bottleneck is known."""

from typing import Any

import pytest

from areal_core.config.schema import RunConfig, load
from areal_core.planning.bottleneck import describe_bottleneck, explain, usage
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


def judged(chosen: RunConfig, found: list[Span], *, used: float | None = None, controller_cpu_s: float = 0.0) -> str:
    """The report of ten seconds."""
    counted = usage(found, chosen, start_s=START, end_s=START + 10, controller_cpu_s=controller_cpu_s)
    return describe_bottleneck(counted, chosen, used=used)


def both(servers: list[Doing], ranks: list[Doing], count: int = 2) -> dict[str, list[Doing]]:
    """So many servers and ranks, all of which do the same."""
    return {
        f"{role}_{i}": doings for role, doings in (("generation", servers), ("trainer", ranks)) for i in range(count)
    }


# -- adding up ---------------------------------------------------------------------------------------------------------


def test_a_role_has_the_time_of_its_processes_and_an_edge_cuts_a_span() -> None:
    found = spans(
        4.0,
        generation_0=[("generate", -6, 2), ("wait", 2, 14), ("generate", 14, 20)],
        generation_1=[("generate", 0, 2), ("update", 2, 3), ("wait", 3, 8)],
    )
    counted = usage(found, cores(), start_s=START, end_s=START + 8)
    assert counted.wall_s == 8
    assert counted.share("generation", "generate") == pytest.approx(4 / 16)
    assert counted.share("generation", "wait", "update") == pytest.approx(12 / 16)
    assert counted.share("rewards", "score") == 0
    assert counted.cpu_s["generation"] == pytest.approx(4 * 2 / 8 + 4 * 6 / 12 + 12)


def test_devices_are_occupied_by_as_many_as_there_are() -> None:
    """Two cores: three processes want them from 2 to 4, nobody from 6 to 10. An emulated trainer stands for its
    ranks."""
    found = spans(
        generation_0=[("generate", 0, 4), ("wait", 4, 10)],
        generation_1=[("generate", 2, 4), ("update", 4, 5)],
        trainer_0=[("train", 2, 6)],
    )
    assert usage(found, cores(), start_s=START, end_s=START + 10).occupied == pytest.approx((2 + 4 + 2) / 20)
    engine = {"engine": "emulated"}
    emulated = load({"generation": engine, "training": engine | {"ranks": 3}, "launch": {"devices": 4}})
    found = spans(generation_0=[("generate", 0, 10)], trainer_0=[("train", 0, 5)])
    assert usage(found, emulated, start_s=START, end_s=START + 10).occupied == pytest.approx((10 + 15) / 40)


def test_reward_workers_of_other_machines_take_nothing_from_the_runs_cores() -> None:
    found = spans(cpu_s=4.0, rewards_0=[("score", 0, 5)], rewards_1=[("score", 0, 5)], rewards_2=[("score", 5, 10)])
    counted = usage(found, cores(), start_s=START, end_s=START + 10)
    assert (counted.share("rewards", "score"), counted.cpu_s["rewards"]) == (pytest.approx(0.5), pytest.approx(4.0))


# -- stages with devices of their own ----------------------------------------------------------------------------------


def test_generation_is_what_the_trainer_waits_for() -> None:
    found = spans(**both([("generate", 0, 10)], [("wait", 0, 6), ("recompute", 6, 7), ("train", 7, 10)]))
    assert judged(config(), found) == (
        "Generation limited this run of 10.0 s. 2 ranks worked 40 % of the time (10 % on proximal log-probabilities). "
        "2 servers generated 100 % of the time. Scoring took 0 %. Ranks waited 60 % of the time for a batch. Servers "
        "waited 0 % for requests and 0 % for new model weights. Upper bounds on the speed-up: 1.00x without idle time, "
        "2.50x with more capacity for generation. Then training would limit the run. More devices for generation "
        "would help."
    )


@pytest.mark.parametrize(
    ("servers", "ranks", "used", "said"),
    [
        pytest.param(  # held back by the staleness bound, servers run few completions at once
            [("generate", 0, 10)],
            [("wait", 0, 0.4), ("train", 0.4, 10)],
            0.5,
            "1.04x without idle time, 2.00x with more capacity for training. Then generation would limit the run. "
            "More devices for training would help (training.ranks).",
            id="servers with room",
        ),
        pytest.param(
            [("generate", 0, 6), ("wait", 6, 9), ("update", 9, 10)],
            [("wait", 0, 6), ("train", 6, 10)],
            None,
            "1.67x without idle time. A larger rollout.max_staleness would help.",
            id="staleness",
        ),
    ],
)
def test_what_limits_stages_with_devices_of_their_own(
    servers: list[Doing], ranks: list[Doing], used: float | None, said: str
) -> None:
    text = judged(config(), spans(**both(servers, ranks)), used=used)
    assert text.endswith(f"Upper bounds on the speed-up: {said}")
    assert ("generated 100 % of the time, at 50 % of their full rate." in text) == (used is not None)


def test_synchronous_stages_take_turns() -> None:
    stages = both([("generate", 0, 5), ("wait", 5, 10)], [("wait", 0, 6), ("train", 6, 9)], count=4)
    assert judged(config(mode="sync", training={"ranks": 4}), spans(**stages)) == (
        "Synchronous mode limited this run of 10.0 s. Devices generated 50 % of the time (including the wait for the "
        "longest completion of each batch), trained 30 % and were idle 20 %. Upper bounds on the speed-up: 1.25x "
        "without idle time, 3.33x if generation took no time. mode=async generates and trains at the same time."
    )


# -- stages on the same cores ------------------------------------------------------------------------------------------


def test_cores_that_always_have_work_bound_a_run() -> None:
    """Ten seconds of two cores: each rank has used five of them, each server three, the controller two."""
    stages = both([("generate", 0, 10)], [])
    found = spans(3.0, **stages) + spans(2.5, **both([], [("wait", 0, 5), ("train", 5, 10)]))
    assert judged(cores(), found, controller_cpu_s=2.0) == (
        "The CPU cores limited this run. It had work for 2 cores during 100 % of 10.0 s. It used 90 % of their time: "
        "training (50 %), generation (30 %) and the controller (10 %). Ranks waited 50 % of the time for a batch. "
        "Servers waited 0 % for requests and 0 % for new model weights. Upper bounds on the speed-up: 1.00x if the "
        "cores always had work, 2.25x if training took no time. More cores would help (launch.devices)."
    )


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_the_window_is_from_the_first_version_to_the_last() -> None:
    """Before it ranks had nothing to train on; after it servers had nothing to do. The controller's CPU seconds are
    the window's part of all."""
    found = spans(
        5.0,
        publisher_0=[("publish", 9, 10), ("publish", 15, 16), ("publish", 19, 20)],
        generation_0=[("generate", 0, 10), ("generate", 10, 20), ("wait", 20, 100)],
        trainer_0=[("wait", 0, 8), ("train", 8, 9), ("wait", 10, 15), ("train", 15, 20), ("wait", 20, 100)],
    )
    told = explain(cores(), found, {}, start_s=START, controller_cpu_s=4.0)
    assert told is not None
    assert told.idle == {"generation": 0.0, "trainer": 0.5}
    assert " of 10.0 s." in told.text
    assert "and the controller (10 %)." in told.text
