"""The independent checker: reads what a run has left, and finds whatever was promised and does not hold.

It shares no code with areal_core: SQL, JSON and hashes, and the history (history.py) of what was seen while the run
ran. Where areal_core and this file disagree on what a file means, one of them is wrong.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_core.models.verified import weights_digest
from tests.faults.history import Look, Moved, look_at

_ETA = {"async": 2, "sync": 0}  # where rollout.max_staleness is not set


class Findings(defaultdict[str, list[str]]):
    """What does not hold, in lines by kind; nothing, where everything does. The kinds are

    - lost: batches and versions
    - used_twice: groups and prompts
    - staleness: groups beyond the bound, under `wait` and `drop`
    - tokens: a ledger that does not balance
    - versions: hashes that are not those that were published
    - checkpoints: files that are not what their manifest says
    - orphans: processes that nobody owns
    - unresumable: runs that did not come to their end
    """

    def __init__(self) -> None:
        super().__init__(list)
        self.admitted_stale = 0  # groups beyond the bound under `admit`, where that is allowed

    def problems(self) -> list[str]:
        """All lines, each with what it is."""
        return [f"{kind}: {line}" for kind, lines in self.items() for line in lines]

    def add(self, others: Findings) -> None:
        for kind, lines in others.items():
            self[kind] += lines
        self.admitted_stale += others.admitted_stale


@dataclass(slots=True)
class Outcome:
    """What was done to a run, or to what is around it, and what came of it."""

    faults: Counter[str] = field(default_factory=Counter[str])
    findings: Findings = field(default_factory=Findings)
    output: str = ""  # of its launchers

    def unresumable(self, what: str) -> None:
        """A run has not come to its end."""
        self.findings["unresumable"].append(f"{what}: {(self.output.strip().splitlines() or ['nothing'])[-1]}")


def check(run: Path, store: Path, looks: Iterable[Look | Moved | None], *, steps: int) -> Findings:
    """Check a run that should have come to its end after `steps` steps. `run` is its folder, `store` its part of the
    store, and `looks` its history."""
    findings = Findings()
    if not (run / "summary.json").exists():
        findings["unresumable"].append(f"{run} has no summary.json")
        return findings
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        ledger.row_factory = sqlite3.Row
        rows, versions = _check_history(ledger, looks, findings)
        _check_batches(ledger, rows, steps, findings)
        _check_staleness(rows, json.loads((run / "config.json").read_text()), findings)
        _check_tokens(ledger, json.loads((run / "summary.json").read_text()), findings)
        _check_weights(ledger, run / "weights", findings)
        _check_checkpoints(versions, store, steps, findings)
    return findings


def _check_batches(
    ledger: sqlite3.Connection, rows: dict[int, list[list[int]]], steps: int, findings: Findings
) -> None:
    """Every step has a batch, all of one size, and every version is published; no prompt is trained on twice. Of folded
    steps that nobody saw before, the totals have the number of groups."""
    folded = ledger.execute("SELECT step FROM forgotten").fetchone()[0]
    sizes = {step: len(groups) for step, groups in rows.items()}
    size = max(sizes.values(), default=0)
    published = {row[0] for row in ledger.execute("SELECT version FROM versions")}
    for step in range(1, steps + 1):
        if step not in sizes and step >= folded:
            findings["lost"].append(f"step {step} has no batch")
        elif sizes.get(step, size) != size:
            findings["lost"].append(f"the batch of step {step} has {sizes[step]} groups, others {size}")
        if step not in published and step >= folded:
            findings["lost"].append(f"version {step} is not published")
    total = ledger.execute("SELECT SUM(groups) FROM totals WHERE state = 'consumed'").fetchone()[0]
    if total != max(rows, default=0) * size:
        findings["lost"].append(f"{total} groups are consumed, by {max(rows, default=0)} batches of {size}")
    prompts = Counter(prompt for groups in rows.values() for _, prompt, _, _ in groups)
    findings["used_twice"] += [f"prompt {prompt} in {count} groups" for prompt, count in prompts.items() if count > 1]


def _check_history(
    ledger: sqlite3.Connection, looks: Iterable[Look | Moved | None], findings: Findings
) -> tuple[dict[int, list[list[int]]], dict[int, str]]:
    """Within an incarnation, a batch that was fixed and a version that was published stay what they were. Returns the
    groups of all batches and the hashes of all versions: the ledger's, and those that were seen before it folded
    them."""
    rows: dict[int, list[list[int]]] = {}
    versions: dict[int, str] = {}
    steps_of: dict[int, int] = {}  # group -> step
    current = 0
    last = look_at(ledger)

    def forget(beyond: int) -> None:
        """What may come out otherwise from this step on."""
        for known in (rows, versions):
            for step in [step for step in known if step >= beyond]:
                del known[step]
        for group in [group for group, step in steps_of.items() if step >= beyond]:
            del steps_of[group]

    previous = None
    for look in (*looks, last):
        if isinstance(look, Moved):  # what came after the newest checkpoint is lost with the machine
            forget(look.step + 1)
            current = -1
        if not isinstance(look, Look):
            previous = None
            continue
        if current == -1:
            current = look.incarnation
        if look.incarnation < current:
            findings["lost"].append(f"incarnation {current} was followed by {look.incarnation}")
        if look.incarnation != current:
            current = look.incarnation
            forget(look.folded)  # nothing that earlier steps depend on changes any more
        if previous is not None and previous.incarnation == current:
            gone = [step for step in previous.rows if step not in look.rows and step >= look.folded]
            findings["lost"] += [f"the batch of step {step} was fixed, and was gone later" for step in gone]
        previous = look
        for step, batch in look.rows.items():
            groups, before = _groups(batch), _groups(rows.setdefault(step, batch))
            if before != groups:
                findings["lost"].append(f"the batch of step {step} was {before}, and {groups} later")
            for group in groups:
                if steps_of.setdefault(group, step) != step:
                    findings["used_twice"].append(f"group {group} in the batches of steps {steps_of[group]} and {step}")
        for version, digest in look.versions.items():
            if versions.setdefault(version, digest) != digest:
                findings["versions"].append(f"version {version} was {versions[version]}, and {digest} later")
        versions.update(look.versions)
        rows.update(look.rows)
    for what, known, held in (("the batch of step", rows, last.rows), ("version", versions, last.versions)):
        missing = [number for number in known if number not in held and number >= last.folded]
        findings["lost"] += [f"{what} {number} is gone at the end" for number in missing]
    return {step: groups for step, groups in rows.items() if step in last.rows or step < last.folded}, versions


def _groups(batch: list[list[int]]) -> list[int]:
    return [group for group, *_ in batch]


def _check_staleness(rows: dict[int, list[list[int]]], config: dict[str, Any], findings: Findings) -> None:
    """Step k trains on version k - 1; its oldest token is at most eta versions older."""
    eta = config["rollout"]["max_staleness"]
    eta = _ETA[config["mode"]] if eta is None else eta
    for step, group, oldest, newest in (
        (step, row[0], row[2], row[3]) for step, of in sorted(rows.items()) for row in of
    ):
        if newest > step - 1:
            findings["staleness"].append(
                f"group {group} of step {step} holds tokens of version {newest}, of the future"
            )
        if step - 1 - oldest <= eta:
            continue
        if config["rollout"]["batch_selection"] == "admit":
            findings.admitted_stale += 1
        else:
            findings["staleness"].append(
                f"group {group} of step {step} holds tokens of version {oldest}: staleness {step - 1 - oldest}, "
                f"bound {eta}"
            )


def _check_tokens(ledger: sqlite3.Connection, summary: dict[str, Any], findings: Findings) -> None:
    """The servers' count against that of the groups; the summary says the same as the ledger."""
    states = dict(ledger.execute("SELECT state, SUM(tokens) FROM totals GROUP BY state").fetchall())
    lost, unread = ledger.execute("SELECT SUM(lost_tokens), SUM(unread_tokens) FROM totals").fetchone()
    generated, uncounted = ledger.execute(
        "SELECT SUM(counted - joined), SUM(uncounted) FROM server_sessions"
    ).fetchone()
    accounted = sum(states.values()) + lost
    if abs((generated or 0) - accounted) > unread + (uncounted or 0):
        findings["tokens"].append(
            f"{generated} sampled by the servers, {accounted} by the groups; allowance {unread} + {uncounted}"
        )
    told = summary["tokens"]
    if (told["consumed"], told["generated"]) != (states.get("consumed", 0), generated or 0):
        findings["tokens"].append(f"the summary says {told}, the ledger {states} and {generated} sampled")


def _check_weights(ledger: sqlite3.Connection, folder: Path, findings: Findings) -> None:
    """Versions whose folders are there, and which are not known to be damaged, are what was published."""
    for version, digest in ledger.execute("SELECT version, digest FROM versions WHERE version > 0 AND NOT damaged"):
        at = folder / f"v{version:06d}"
        if not (at / "manifest.json").exists():
            continue
        file, told = at / "model.safetensors", (at / "manifest.json").read_text(errors="replace")
        found = weights_digest(file) if file.exists() else "missing"
        if found != digest or f'"digest": "{digest}"' not in told:
            findings["versions"].append(
                f"version {version} was published as {digest}, its file is {found}, its manifest {told!r}"
            )


def _check_checkpoints(published: dict[int, str], store: Path, steps: int, findings: Findings) -> None:
    """Files are what their manifest says, and a state makes the version that was published; the last step has one."""
    manifests = sorted(store.glob("checkpoints/step-*/manifest.json"))
    if not any(file.parent.name.partition(".")[0] == f"step-{steps:06d}" for file in manifests):
        findings["lost"].append(f"there is no checkpoint of the last step, {steps}")
    for file in manifests:
        manifest = json.loads(file.read_text())
        findings["checkpoints"] += _wrong_files(file.parent, manifest["files"])
        findings["checkpoints"] += _wrong_files(store, manifest["shared"])
        if manifest["extra"]["version_digest"] != published.get(manifest["step"]):
            findings["checkpoints"].append(f"{file.parent} is of a version that was not published")
    if not list(store.glob("final/*.safetensors")):
        findings["lost"].append(f"{store}/final holds no model")


def _wrong_files(folder: Path, entries: dict[str, dict[str, Any]]) -> Iterable[str]:
    for name, entry in entries.items():
        file = folder / name
        if not file.exists():
            yield f"{file} is missing"
        elif file.stat().st_size != entry["bytes"] or hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
            yield f"{file} is not what its manifest says"


def totals(found: Iterable[Findings]) -> Counter[str]:
    """Lines of each kind, over several runs."""
    total: Counter[str] = Counter()
    for findings in found:
        total.update({kind: len(lines) for kind, lines in findings.items()}, admitted_stale=findings.admitted_stale)
    return total
