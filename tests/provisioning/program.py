"""A terraform by script, as quick as a process starts: what flows/provision/terraform.py says to it, and reads of it.

It keeps a state and its lock in the store's folder as the S3 backend does, refuses plans that have become stale, and
makes and ends things of a cloud that is a ledger (ledger.py). A state is written at the end alone, so that whoever dies
before loses what it was to say. Faults strike where `world.json` says (faults.py). Runs with `python -I -S`.
"""

import json
import os
import signal
import sys
import time

WORLD = os.environ["AREAL_SCRIPTED"]
sys.path.insert(0, os.environ["AREAL_SCRIPTED_CODE"])

import faults  # noqa: E402
import ledger  # noqa: E402

stopping = False


def read(path):
    with open(path) as file:
        return json.load(file)


def write(path, value):
    with open(path, "w") as file:
        json.dump(value, file)


def say(type_, message="", **fields):
    print(json.dumps({"type": type_, "@message": message, **fields}), flush=True)


class FailedError(Exception):
    """An error as terraform tells it."""


def fail(summary, detail=""):
    raise FailedError(json.dumps({"severity": "error", "summary": summary, "detail": detail}))


def stop(*_):
    global stopping
    stopping = True


class State:
    def __init__(self):
        told = read(os.path.join(os.environ["TF_DATA_DIR"], "backend.json"))
        self.path = os.path.join(WORLD, "store", told["key"])
        self.lock_path = self.path + ".tflock"
        self.run = told["key"].rpartition("/")[2].removesuffix(".tfstate")
        self.lock_id = None

    def read(self):
        try:
            return read(self.path)
        except FileNotFoundError:
            return {"serial": 0, "lineage": "", "resources": {}, "hosts": []}

    def write(self, state, kind="write"):
        state["serial"] += 1
        if faults.strike(WORLD, f"{kind}:write"):
            write("errored.tfstate", state)
            fail("Failed to save state", "Error saving state: operation error S3: PutObject, StatusCode: 503.")
        ledger.put(self.path, json.dumps(state).encode())

    def lock(self, operation):
        timeout = next((float(a[14:-1]) for a in sys.argv if a.startswith("-lock-timeout=")), 0.0)
        deadline = time.time() + min(timeout, 0.3)
        self.lock_id = os.urandom(8).hex()
        created = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now := ledger.wall(WORLD, actor_skew())))
        lock = {"ID": self.lock_id, "Operation": operation, "Who": f"{os.getpid()}@script"}
        lock["Created"] = f"{created}.{int(now % 1 * 1e9):09d}Z"
        os.makedirs(os.path.dirname(self.lock_path), exist_ok=True)
        while True:
            try:
                scratch = f"{self.lock_path}.{self.lock_id}.part"
                write(scratch, lock)
                os.link(scratch, self.lock_path)
                os.unlink(scratch)
                return
            except FileExistsError:
                os.unlink(scratch)
                if time.time() >= deadline:
                    self.lock_id = None
                    fail("Error acquiring the state lock", "Lock Info: held by another one")
                time.sleep(0.05)

    def unlock(self):
        if self.lock_id is None:
            return
        try:
            if read(self.lock_path)["ID"] == self.lock_id:
                os.unlink(self.lock_path)
        except FileNotFoundError:
            pass


def actor_skew():
    return float(os.environ.get("AREAL_SCRIPTED_SKEW", "0"))


def wanted(variables):
    """Everything that there should be, by its address, in the order in which it is made."""
    run = variables["run"]
    found = {"aws_security_group.nodes": {"type": "aws_security_group", "name": f"areal-{run}"}}
    for role in sorted(variables["nodes"]):
        prefix = f'module.nodes["{role}"].'
        found[f"{prefix}aws_launch_template.node"] = {"type": "aws_launch_template", "name": f"areal-{run}-{role}"}
    for role, nodes in sorted(variables["nodes"].items()):
        for index in range(nodes["count"]):
            name = f"{role}-{index}"
            host = {"type": "aws_instance", "name": name, "role": role, "spot": bool(nodes.get("spot"))}
            found[f'module.nodes["{role}"].aws_instance.node["{name}"]'] = host
    return found


def init():
    faults.strike(WORLD, "init", fail=fail)
    folder = os.environ["TF_DATA_DIR"]
    os.makedirs(folder, exist_ok=True)
    given = dict(a.removeprefix("-backend-config=").split("=", 1) for a in sys.argv if a.startswith("-backend-config="))
    write(os.path.join(folder, "backend.json"), given)


def plan():
    state, destroy = State(), "-destroy" in sys.argv
    kind = "destroy-plan" if destroy else "plan"
    variables = read("given.auto.tfvars.json")
    state.lock("OperationTypePlan")
    try:
        faults.strike(WORLD, f"{kind}:locked", fail=fail)
        there, living = state.read(), ledger.living(WORLD)
        known = {address: each for address, each in there["resources"].items() if each["id"] in living}
        bad = {a.removeprefix("-replace=") for a in sys.argv if a.startswith("-replace=")}
        actions = []
        should = {} if destroy else wanted(variables)
        for address in reversed(list(known)):
            if address not in should:
                actions.append((address, ["delete"]))
            elif address in bad:
                actions.append((address, ["delete", "create"]))
        actions += [(address, ["create"]) for address in should if address not in known]
        out = next(a.removeprefix("-out=") for a in sys.argv if a.startswith("-out="))
        made = {"serial": there["serial"], "destroy": destroy, "actions": actions, "wanted": should}
        write(out, made)
        for address, each in actions:
            say("planned_change", change={"resource": {"addr": address}, "action": "replace" if each[1:] else each[0]})
        faults.strike(WORLD, f"{kind}:end", fail=fail)
    finally:
        if faults.strike(WORLD, f"{kind}:unlock"):
            fail("Error releasing the state lock", "operation error S3: DeleteObject, StatusCode: 503.")
        state.unlock()


def state_pull():
    faults.strike(WORLD, "pull", fail=fail)
    there = State().read()
    resources = [
        {"mode": "managed", "type": each["type"], "instances": [{"attributes": {"id": each["id"]}}]}
        for each in there["resources"].values()
    ]
    if there["serial"]:
        print(json.dumps({"version": 4, "resources": resources}))


def apply():
    made, state = read(sys.argv[-1]), State()
    kind = "destroy" if made["destroy"] else "apply"
    state.lock("OperationTypeApply")
    try:
        faults.strike(WORLD, f"{kind}:start", fail=fail)
        there = state.read()
        if there["serial"] != made["serial"]:
            fail("Saved plan is stale", "The given plan file can no longer be applied.")
        living = ledger.living(WORLD)
        resources = {address: each for address, each in there["resources"].items() if each["id"] in living}
        error = None
        try:
            change(state.run, kind, made, resources)
        except FailedError as failed:
            error = failed
        there["resources"] = resources
        if error is None:
            there["hosts"] = [host(each) for each in resources.values() if each["type"] == "aws_instance"]
        faults.strike(WORLD, f"{kind}:end", fail=fail)
        state.write(there, kind)
        faults.strike(WORLD, f"{kind}:stored", fail=fail)
        if error is not None:
            raise error
    finally:
        if faults.strike(WORLD, f"{kind}:unlock"):
            fail("Error releasing the state lock", "operation error S3: DeleteObject, StatusCode: 503.")
        state.unlock()


def change(run, kind, made, resources):
    steps = [(address, action) for address, actions in made["actions"] for action in actions]
    for number, (address, action) in enumerate(steps):
        if stopping:
            fail("execution halted", "Two interrupts received.")
        if number:
            faults.strike(WORLD, f"{kind}:middle", fail=fail)
        say("apply_start", f"{address}: {action}...", hook={"action": action})
        if action == "delete":
            each = resources[address]
            ledger.end(WORLD, run, each["id"])
            faults.strike(WORLD, f"{kind}:unanswered", fail=fail)
            del resources[address]
        else:
            each = dict(made["wanted"][address])
            each["id"] = ledger.make(WORLD, run, each["type"], each["name"], each.get("role"))
            if each["id"] is None:
                fail(f"creating {each['type']}", f"{each['name']} already exists")
            faults.strike(WORLD, f"{kind}:unanswered", fail=fail)
            resources[address] = each


def host(each):
    found = {name: each[name] for name in ("name", "role", "id", "spot")}
    return {**found, "address": "10.0.0.1", "type": "m7i.2xlarge"}


def output():
    faults.strike(WORLD, "output", fail=fail)
    print(json.dumps({"hosts": {"value": State().read()["hosts"]}}))


def state_push():
    state, pushed = State(), read(sys.argv[-1])
    state.lock("OperationTypePush")
    try:
        faults.strike(WORLD, "push:start", fail=fail)
        there = state.read()
        if there["serial"] >= pushed["serial"]:
            fail("Failed to write state", f"cannot import state with serial {pushed['serial']} over newer state")
        ledger.put(state.path, json.dumps(pushed).encode())
    finally:
        state.unlock()


def force_unlock():
    state = State()
    faults.strike(WORLD, "force-unlock", fail=fail)
    if read(state.lock_path)["ID"] != sys.argv[-1]:
        fail("Failed to unlock state", "lock ID does not match")
    os.unlink(state.lock_path)


COMMANDS = {
    "init": init,
    "plan": plan,
    "apply": apply,
    "output": output,
    "state": lambda: {"pull": state_pull, "push": state_push}[sys.argv[2]](),
    "force-unlock": force_unlock,
}


def main():
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    try:
        COMMANDS[sys.argv[1]]()
    except FailedError as error:
        diagnostic = json.loads(str(error))
        if "-json" in sys.argv and sys.argv[1] in ("init", "plan", "apply"):
            say("diagnostic", diagnostic=diagnostic)
        else:
            print(f"Error: {diagnostic['summary']}: {diagnostic['detail']}", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
