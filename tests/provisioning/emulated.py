"""Runs on nodes of an emulated cloud under faults, with everything that is real but the cloud: flows, workers, Prefect,
terraform, and processes that are killed. What is left afterwards is looked for in the cloud itself.

A scene has one to three runs. A fault is asked for before the phase that it is to strike in, or done once that is
there. Runs end in order, or are left behind by who has died; in the end the reaper looks once, and the verdict counts:

- leaked: what there is of a run without a live owner
- wrongly destroyed: nodes that ended while their flow had them and did not say that it wanted them gone
- unfinished states: a state that is not empty or is locked, a lease that was not given back, a next run of the same
  name that can't be planned
- whether runs of which a spot node was reclaimed went on and completed
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from flows.provision.leases import MARGIN_S
from tests.provisioning.cloud_world import LEASE_S, Run, World, worker_on, world
from tests.support.cloud import BUCKET

_STATE, _LEASE = f"/{BUCKET}/terraform/runs/*.tfstate", f"/{BUCKET}/terraform/leases/*"
_THROTTLED, _BUSY = "RequestLimitExceeded", "ServiceUnavailable"
_END_S = 60.0  # for machines to end


@dataclass
class Verdict:
    leaked: list[str] = field(default_factory=list[str])
    wrongly_destroyed: list[str] = field(default_factory=list[str])
    unfinished_states: list[str] = field(default_factory=list[str])
    survived: list[bool] = field(default_factory=list[bool])  # runs of which a spot node was reclaimed
    failed: list[str] = field(default_factory=list[str])  # scenes that did not come to their end


# ---- scenes ----


def api(w: World) -> list[bool]:
    """Errors of every API in every phase of one run, a spot node reclaimed between; it completes."""
    w.spoil("plan", "DescribeSubnets", "refuse", _THROTTLED, 2)
    w.spoil("plan", f"GET {_STATE}", "refuse", "SlowDown", 2)
    w.spoil("plan", f"GET {_STATE}", "drop")
    w.spoil("plan", "Describe*", "refuse", _BUSY)
    w.spoil("apply", "CreateLaunchTemplate", "refuse", _THROTTLED, 2)
    w.spoil("apply", "CreateLaunchTemplate", "lose")
    w.spoil("apply", "CreateSecurityGroup", "refuse", _BUSY)
    w.spoil("apply", "CreateRole", "refuse", "Throttling")
    w.spoil("apply", "CreateRole", "lose")
    w.spoil("apply", "CreateInstanceProfile", "drop")
    w.spoil("apply", "PutRolePolicy", "twice")
    w.spoil("apply", "RunInstances", "refuse", "InsufficientInstanceCapacity")
    w.spoil("apply", "RunInstances", "lose")
    w.spoil("apply", "RunInstances", "delay")
    w.spoil("apply", f"PUT {_STATE}", "refuse", "InternalError", 2)
    w.spoil("apply", f"PUT {_LEASE}", "lose", count=2)
    w.cloud.boot_delay(20.0)
    run = w.start()
    run.until_at_work()
    w.settle()
    w.act("late boot", "bootstrap")
    run.until_trains()
    w.spoil("replace", "RunInstances", "refuse", "InsufficientInstanceCapacity")
    w.spoil("replace", "RunInstances", "twice")
    w.spoil("replace", "TerminateInstances", "refuse", _THROTTLED)
    w.spoil("replace", f"PUT {_STATE}", "lose")
    reclaimed = run.doom("generation-0")
    w.cloud.reclaim(reclaimed, 45.0)
    w.act("reclaimed with notice", "run")
    run.until_at_work(reclaimed)
    w.settle()
    run.until_trains()
    w.spoil("destroy", "TerminateInstances", "refuse", _THROTTLED, 2)
    w.spoil("destroy", "TerminateInstances", "lose")
    w.spoil("destroy", "DeleteLaunchTemplate", "drop")
    w.spoil("destroy", "DeleteRole", "refuse", _BUSY, 2)
    w.spoil("destroy", "DeleteInstanceProfile", "lose")
    w.spoil("destroy", f"PUT {_STATE}", "drop")
    w.spoil("destroy", f"DELETE {_STATE}.tflock", "lose")
    w.spoil("destroy", f"PUT {_LEASE}", "lose")
    run.finish()
    run.until_state("Completed", "Failed")
    w.settle()
    return [run.state == "Completed"]


def deaths(w: World) -> list[bool]:
    """Flows, terraform and processes of shares that are killed. One run completes, the other one is left dead amidst
    its teardown."""
    one = w.start()
    one.until("it plans", lambda: one.terraform("plan"))
    one.kill("plan")
    one.retry()
    one.until("it applies", one.terraform)
    one.kill("apply")
    one.retry()
    other = w.start()
    w.spoil("apply", "RunInstances", "delay", count=2)
    other.until("its state is locked", lambda: other.terraform() and other.is_locked())
    other.kill_terraform("apply")
    one.until("its nodes are made", lambda: one.logged("nodes: generation-0"))
    one.kill("bootstrap")
    one.retry()
    for run in (one, other):
        run.until_at_work()
        run.until_trains()
    w.settle()
    one.kill("run")
    other.kill_share("trainer-0")
    other.kill_share("generation-0")
    one.retry()
    for run in (one, other):
        run.until_at_work()
        run.until_trains()
    for run in (one, other):
        run.finish()
    other.until("it destroys", other.terraform)
    other.kill_terraform("destroy")
    one.until("it destroys", one.terraform)
    one.kill("destroy")
    one.leave()
    other.until_state("Completed", "Failed")
    return [other.state == "Completed"]


def servers(w: World) -> list[bool]:
    """Prefect's server and the worker of flows, killed in every phase; the run is left in the end."""
    run = w.start()
    run.until("it applies", run.terraform)
    w.kill_prefect("apply")
    run.until("its nodes are made", lambda: run.logged("nodes: generation-0"))
    w.kill_prefect("bootstrap")
    run.until_at_work()
    run.until_trains()
    lost = run.doom("generation-0")
    w.kill_prefect("run", lambda: w.cloud.lose(lost))
    w.act("node lost", "run")
    run.until("another node is made", lambda: run.terraform() or run.nodes().get("generation-0", lost) != lost)
    w.kill_worker("replace")
    run.retry()
    run.until_at_work(lost)
    run.until_trains()
    run.finish()
    run.until("it destroys", run.terraform)
    w.kill_worker("destroy")
    run.leave()
    return [True]


def nodes(w: World) -> list[bool]:
    """Nodes that do not come up, are lost, freeze, lose their worker or are reclaimed, head nodes among them, and what
    replaces them can't be had at first. Both runs complete."""
    w.cloud.boot_never(1)
    w.cloud.boot_fails(1)
    one = w.start()
    one.until("its nodes are made", lambda: one.logged("nodes: generation-0"))
    w.act("boot that never comes", "bootstrap")
    w.act("user data that fails", "bootstrap")
    one.doomed |= {*one.nodes().values()}
    other = w.start()
    for run in (one, other):
        run.until_at_work(*run.doomed)
        run.until_trains()
    w.spoil("replace", "RunInstances", "refuse", "VcpuLimitExceeded")
    w.spoil("replace", "CreateTags", "drop")
    w.cloud.lose(one.doom("generation-0"))
    w.act("node lost", "run")
    w.cloud.lose(other.doom("trainer-0"))
    w.act("head node lost", "run")
    worker_on(w, other.doom("generation-0")).kill()
    w.act("node's worker killed", "run")
    for run in (one, other):
        run.until_at_work(*run.doomed)
        run.until_trains()
    w.settle()
    w.cloud.freeze(one.doom("generation-0"))
    w.act("node frozen", "run")
    w.cloud.freeze(other.doom("trainer-0"))
    w.act("head node frozen", "run")
    w.cloud.reclaim(one.doom("trainer-0"), 45.0)
    w.act("head node reclaimed with notice", "run")
    w.cloud.reclaim(other.doom("generation-0"), 45.0)
    w.act("reclaimed with notice", "run")
    for run in (one, other):
        run.until_at_work(*run.doomed)
        run.until_trains()
        run.finish()
    for run in (one, other):
        run.until_state("Completed", "Failed")
    return [run.state == "Completed" for run in (one, other)]


def left(w: World) -> list[bool]:
    """Runs that are cancelled, or die with their terraform, or whose nodes end by themselves, and whom nobody starts
    again: the reaper has them."""
    dies, cancelled = w.start(), w.start()
    w.spoil("apply", "RunInstances", "delay", count=4)
    cancelled.until("it applies", cancelled.terraform)
    cancelled.cancel("apply")
    dies.until("its state is locked", lambda: dies.terraform() and dies.is_locked())
    dies.kill_terraform("apply")
    dies.kill("apply")
    dies.leave()
    cancelled.until_state("Cancelled", "Crashed", "Failed")
    w.settle()
    alone, other = w.start("provision.hours=0.5"), w.start()
    for run in (alone, other):
        run.until_at_work()
    w.spoil("reap", "TerminateInstances", "refuse", _THROTTLED)
    w.spoil("reap", "DeleteRole", "lose")
    other.cancel("run")
    alone.kill("run")
    alone.leave()
    other.until_state("Cancelled", "Crashed", "Failed")
    w.until("the reaper has the run that was cancelled", lambda: w.cloud.left(other.id) == {})
    w.settle()
    return [True]


def reaper(w: World) -> list[bool]:
    """The reaper is killed while it ends what others have left."""
    over = w.until("a lease is over", lambda: next((run for run in w.runs if _has_run_out(run)), None))
    w.spoil("reap", "DescribeInstances", "refuse", _BUSY)
    w.spoil("reap", f"GET {_LEASE}", "drop")
    reaper = w.python("tests.provisioning.reap_once")
    w.until("it is at it", lambda: over.terraform(of="reap"))
    reaper.kill()
    reaper.wait()
    w.act("reaper killed", "reap")
    w.settle()
    return [True]


SCENES: dict[str, Callable[[World], list[bool]]] = {
    "api": api,
    "deaths": deaths,
    "servers": servers,
    "nodes": nodes,
    "left": left,
    "reaper": reaper,
}


# ---- the campaign ----


def campaign(seed: int, only: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """What was found, by name."""
    verdict = Verdict()
    began = time.monotonic()
    with world(seed, tell) as w:
        tell(f"  the cloud is there after {time.monotonic() - began:.0f} s")
        for name in only:
            _play(w, name, verdict)
        _reap(w)
        _judge(w, verdict)
        return _result(w, verdict, time.monotonic() - began)


def _play(w: World, name: str, verdict: Verdict) -> None:
    before, began, first = Counter(w.struck), time.monotonic(), len(w.runs)
    w.tell(f"  {name}")
    try:
        survived = SCENES[name](w)
        verdict.survived += survived
        how = "done" if all(survived) else "a run did not go on"
    except (AssertionError, httpx.HTTPError) as error:
        how = f"not done: {error}"
        verdict.failed.append(f"{name}: {error}")
        for run in w.runs[first:]:
            _abandon(run)
    finally:
        w.settle()
    faults = (w.struck - before).total()
    w.tell(f"  {name}: {faults} faults, {time.monotonic() - began:.0f} s: {how}")


def _abandon(run: Run) -> None:
    """A scene did not come to its end: the reaper has its nodes."""
    if (process := run.process()) is not None:
        process.kill()
    if run.ends_at is None:
        run.leave()


def _reap(w: World) -> None:
    """Once, after the last lease is over; two look at the same moment, and what one of them is at is struck."""
    w.until("all leases are over", lambda: all(_is_over(run) for run in w.runs), LEASE_S + 2 * MARGIN_S + 600.0)
    some = next((run for run in w.runs if _has_run_out(run)), None)
    if some is not None:
        w.spoil("reap", "TerminateInstances", "lose")
        w.spoil("reap", "DeleteLaunchTemplate", "refuse", _BUSY)
        w.spoil("reap", f"PUT {_STATE}", "refuse", "InternalError")
        w.spoil("reap", f"PUT {_LEASE}", "lose")
    reapers = [w.python("flows.reap_command") for _ in range(2)]
    if some is not None:
        some.kill_terraform("reap", of="reap")
    for reaper in reapers:
        told = reaper.communicate(timeout=500.0)[0]
        for line in told.splitlines()[-12:]:
            w.tell(f"    {line}")
    w.settle()


def _is_over(run: Run) -> bool:
    lease = run.lease()
    return lease is None or run.world.leases.is_over(lease)


def _has_run_out(run: Run) -> bool:
    """And there is something to reap."""
    return run.lease() is not None and _is_over(run)


def _judge(w: World, verdict: Verdict) -> None:
    deadline = time.monotonic() + _END_S
    while (running := [start for start in w.cloud.starts if start.run and start.ended_at is None]) and (
        time.monotonic() < deadline
    ):
        time.sleep(1.0)
    verdict.leaked += [f"{start.run}: the machine {start.instance} runs" for start in running]
    requests = {run.id: run.request for run in w.runs if run.request is not None}
    file = w.plane.state / "again.json"
    file.write_text(json.dumps(requests))
    again = w.python("tests.provisioning.plan_again", str(file)).communicate(timeout=400.0)[0]
    planned: dict[str, Any] = json.loads(again.splitlines()[-1])
    for run in w.runs:
        verdict.leaked += [f"{run.id}: {kind} {name}" for kind, names in w.cloud.left(run.id).items() for name in names]
        verdict.wrongly_destroyed += _wrongly_destroyed(run)
        state = w.object(f"terraform/runs/{run.id}.tfstate")
        if state is not None and json.loads(state)["resources"]:
            verdict.unfinished_states.append(f"{run.id}: its state is not empty")
        if w.object(f"terraform/runs/{run.id}.tfstate.tflock") is not None:
            verdict.unfinished_states.append(f"{run.id}: its state is locked")
        if w.object(f"terraform/leases/{run.id}.json"):
            verdict.unfinished_states.append(f"{run.id}: its lease was not given back")
        if run.id in planned and not isinstance(planned[run.id], int):
            verdict.unfinished_states.append(f"{run.id}: it can't be planned again: {planned[run.id]}")


def _wrongly_destroyed(run: Run) -> list[str]:
    """Nodes at work that have ended, unless they were struck, or the flow says why, or the run was over."""
    log, found = run.world.plane.logs(run.flow_run), list[str]()
    for start in run.world.cloud.starts:
        over = run.ends_at is not None and start.ended_at is not None and start.ended_at >= run.ends_at
        named = f"({start.instance})" in log or f"node {start.instance} " in log
        if start.instance in run.guarded - run.doomed and start.ended_at is not None and not over and not named:
            found.append(f"{run.id}: {start.node} {start.instance} {start.why}")
    return found


def _result(w: World, verdict: Verdict, seconds: float) -> dict[str, Any]:
    for what in ("leaked", "wrongly_destroyed", "unfinished_states", "failed"):
        for each in getattr(verdict, what):
            w.tell(f"  {what}: {each}")
    by_phase, by_kind = Counter[str](), Counter[str]()
    for (kind, phase), count in w.struck.items():
        by_phase[phase] += count
        by_kind[kind] += count
    w.tell(f"  by phase: {dict(by_phase)}")
    w.tell(f"  by kind: {dict(by_kind)}")
    if w.missed:
        w.tell(f"  struck nothing: {', '.join(w.missed)}")
    return {
        "emulated_faults": w.struck.total(),
        "emulated_kinds": len(by_kind),
        "emulated_runs": len(w.runs),
        "leaked": len(verdict.leaked),
        "wrongly_destroyed": len(verdict.wrongly_destroyed),
        "unfinished_states": len(verdict.unfinished_states),
        "reclaimed_spot_survived": bool(verdict.survived) and all(verdict.survived),
        "scenes_failed": len(verdict.failed),
        "emulated_seconds": round(seconds),
    }
