"""Faults that strike where they are told to, once each: in the program, in the processes that start it, in the store.

A fault is due the n-th time that somebody comes to its place; `faults.json` of a world has them all, and there is a
file for each time. Also imported by program.py, which has no packages: nothing but the standard library.
"""

import fcntl
import json
import os
import signal
import time

PLAN, STRUCK = "faults.json", "struck"
_LEDGER = "ledger.jsonl"  # ledger.py's, which program.py imports by another name than the tests do
ERRORS = {
    "throttling": "operation error EC2: RunInstances, StatusCode: 400, api error RequestLimitExceeded: later.",
    "unavailable": "operation error EC2: RunInstances, StatusCode: 503, api error ServiceUnavailable: later.",
    "quota": "operation error EC2: RunInstances, StatusCode: 400, api error VcpuLimitExceeded: more than allowed.",
    "capacity": "operation error EC2: RunInstances, StatusCode: 500, api error InsufficientInstanceCapacity: none.",
}


def strike(world, place, fail=None):
    """Whoever comes to a place is struck by what is due there. Returns the kinds of what was, where it goes on."""
    try:
        with open(os.path.join(world, PLAN)) as file:
            planned = json.load(file)
    except FileNotFoundError:
        return []
    actor = os.environ.get("AREAL_SCRIPTED_ACTOR", "")
    struck = []
    for fault in planned:
        if fault["place"] != place or not actor.startswith(fault["actor"]) or not _is_due(world, fault):
            continue
        struck.append(fault["kind"])
        _strike(world, fault, fail)
    return struck


def struck(world):
    """Those that have struck."""
    with open(os.path.join(world, PLAN)) as file:
        planned = json.load(file)
    return [fault for fault in planned if os.path.exists(_file(world, fault, fault["nth"]))]


def _is_due(world, fault):
    for number in range(fault["nth"] + 1):
        try:
            os.close(os.open(_file(world, fault, number), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number == fault["nth"]
    return False


def _file(world, fault, number):
    return os.path.join(world, STRUCK, f"{fault['id']}-{number}")


def _strike(world, fault, fail):
    kind = fault["kind"]
    if kind in ERRORS and fail is not None:
        fail("creating EC2 Instance", ERRORS[kind])
    if kind == "slow":
        time.sleep(fault["seconds"])
    if kind in ("kill owner", "kill both"):
        _kill_owner()
    if kind in ("kill", "kill both"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "kill owner":
        time.sleep(fault["seconds"])
    if kind in ("stop owner", "stall"):
        _stop_owner(world)
    if kind == "stall":  # and goes on for longer than the lease lasts
        time.sleep(fault["stall_s"])


def _kill_owner():
    """Unless it is gone: its number may be another one's by now."""
    if (owner := _owner()) is not None:
        os.kill(owner, signal.SIGKILL)


def _stop_owner(world):
    """While none of its threads has the ledger, which the others go on with."""
    owner = _owner()
    if owner is None:
        return
    stopper = os.fork()
    if stopper == 0:
        try:
            with open(os.path.join(world, _LEDGER), "a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.kill(owner, signal.SIGSTOP)
        finally:
            os._exit(0)  # whatever happens, it must not go on as its parent does
    os.waitpid(stopper, 0)


def _owner():
    """Whoever this process does it for, as long as he is there: itself, or a parent, with a guard between or not."""
    owner, parent = int(os.environ["AREAL_SCRIPTED_OWNER"]), os.getppid()
    return owner if owner in (os.getpid(), parent, _parent_of(parent)) else None


def _parent_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0
