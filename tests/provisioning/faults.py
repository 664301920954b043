"""Faults that strike where they are told to, once each: in the program, in the store and in the cloud.

A fault is due the n-th time that somebody comes to its place; `faults.json` of a world has them all, and there is a
file for each time. Also imported by program.py, which has no packages: nothing but the standard library.
"""

import json
import os
import signal
import time

PLAN, STRUCK = "faults.json", "struck"
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
    struck = []
    for fault in planned:
        if fault["place"] != place or not _is_due(world, fault):
            continue
        struck.append(fault["kind"])
        _strike(fault, fail)
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


def _strike(fault, fail):
    kind = fault["kind"]
    if kind in ERRORS and fail is not None:
        fail("creating EC2 Instance", ERRORS[kind])
    if kind == "slow":
        time.sleep(fault["seconds"])
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
