"""The cloud by script: a ledger of everything that was made and ended, by whom, and who had the lease then.

Appended to by whole lines, under a lock; what there is follows from all of it. Also imported by program.py, which has
no packages: nothing but the standard library.
"""

import fcntl
import json
import os
import struct
import time
from contextlib import contextmanager

LEDGER, CLOCK = "ledger.jsonl", "clock"


def wall(world, skew=0.0):
    """Seconds since 1970 in this world, whose clocks can be set forward, by one that is off by `skew`."""
    return time.time() + offset(world) + skew


def offset(world):
    with open(os.path.join(world, CLOCK), "rb") as file:
        return struct.unpack("d", file.read(8))[0]


def forward(world, seconds):
    """Let time pass for everybody."""
    begin(world, offset(world) + seconds)


def begin(world, seconds=0.0):
    """The clocks of a world are so far ahead of those of this machine."""
    put(os.path.join(world, CLOCK), struct.pack("d", seconds))


def put(path, data):
    """A file that appears whole."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    scratch = f"{path}.{os.getpid()}.part"
    with open(scratch, "wb") as file:
        file.write(data)
    os.replace(scratch, path)


def make(world, run, kind, name, role=None):
    """The id of what is made; None where the name is taken, and names are once."""
    with _locked(world) as file:
        if kind != "aws_instance" and any(
            (each["kind"], each["name"]) == (kind, name) for each in _living(file).values()
        ):
            return None
        id_ = f"{kind.split('_')[1][0]}-{os.urandom(6).hex()}"
        _write(world, file, {"op": "make", "kind": kind, "id": id_, "name": name, "role": role, "run": run})
        return id_


def end(world, run, id_):
    """It is gone; again is fine."""
    with _locked(world) as file:
        found = _living(file).get(id_)
        if found is not None:
            _write(world, file, {**{k: found[k] for k in ("kind", "id", "name", "role")}, "op": "end", "run": run})


def write_lease(world, run, lease, write):
    """Somebody writes the lease of a run, None as it is given back, and says so: with whether who wrote it before
    lives. Returns what `write` gives."""
    with _locked(world) as file:
        written = write()
        before = [entry["pid"] for entry in _read(file) if entry["op"] == "lease" and entry["run"] == run][-1:]
        lives = bool(before) and before[0] != os.getpid() and _lives(before[0])
        entry = {"op": "lease", "run": run, "lease": lease, "pid": os.getpid(), "before_lives": lives}
        _append(world, file, entry)
    return written


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def living(world):
    """What there is, by its id."""
    with _locked(world) as file:
        return _living(file)


def entries(world):
    with _locked(world) as file:
        return _read(file)


@contextmanager
def _locked(world):
    with open(os.path.join(world, LEDGER), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _read(file):
    file.seek(0)
    return [json.loads(line) for line in file.read().splitlines()]


def _living(file):
    found = {}
    for entry in _read(file):
        if entry["op"] == "make":
            found[entry["id"]] = entry
        elif entry["op"] == "end":
            found.pop(entry["id"], None)
    return found


def _write(world, file, entry):
    """With who did it, and what the lease of the run says at this moment."""
    holders = json.loads(os.environ.get("AREAL_SCRIPTED_HOLDERS", "{}"))
    by = {"holder": holders.get(entry["run"])}
    try:
        with open(os.path.join(world, "store", "terraform", "leases", f"{entry['run']}.json"), "rb") as lease:
            said = json.loads(lease.read() or b"null")
    except FileNotFoundError:
        said = None
    lease = said and {name: said[name] for name in ("holder", "held_until", "by")}
    _append(world, file, {**entry, **by, "lease": lease})


def _append(world, file, entry):
    actor = os.environ.get("AREAL_SCRIPTED_ACTOR")
    file.write(json.dumps({**entry, "actor": actor, "at": wall(world)}) + "\n")
    file.flush()
