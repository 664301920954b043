"""What the head node of a run does: the launcher, with all roles that other nodes don't have."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from prefect import get_client
from prefect.runtime import flow_run

from areal_core.api.controller_client import ControllerClient
from areal_core.config.schema import RunConfig
from areal_core.errors import ArealError, StorageError
from areal_core.run import launcher as core
from areal_core.storage.objects import Storage
from areal_core.storage.rundir import RunDir
from areal_core.types import RunSummary
from flows import whereabouts
from flows.page import Progress, seen_where_it_answers
from flows.roles import opened, report, run_roles
from flows.shared import PROGRESS
from flows.shares import FINISH

_PATIENCE_S = 1.0  # with the controller: the next look asks again

Log = Callable[[str], None]


def lead(config: RunConfig, run_id: str, known_by: str, log: Log, reclaimed: Callable[[], str | None]) -> RunSummary:
    """Run it to its end. `known_by` is the flow run that people know the run by; `reclaimed` says that this node is to
    be. What people will ask for once the node is gone is put into the store, whatever the end."""
    with Progress(PROGRESS) as progress:
        if known := whereabouts.ask(run_id):  # there was another head node
            core.run_folder(config, run_id).keep_token(known.token)
        run_dir = opened(config, run_id, progress, known_by)
        try:
            if run_dir.summary.exists():
                summary = core.read_summary(run_dir)
            else:
                summary = run_roles(run_dir, progress, log, on_look=_Looks(run_dir, log, reclaimed))
        finally:
            _keep(run_dir, config, log)
    report(summary, run_dir)
    return summary


class _Looks:
    """What the launcher of a head node sees to besides."""

    def __init__(self, run_dir: RunDir, log: Log, reclaimed: Callable[[], str | None]) -> None:
        self._run_dir, self._log, self._reclaimed = run_dir, log, reclaimed
        self._told: whereabouts.Whereabouts | None = None
        self._asked: str | None = None

    def __call__(self, run: core.Run) -> None:
        if why := self._reclaimed():
            run.stop(f"the head node can't go on: {why}")
            return
        with seen_where_it_answers():
            self._tell()
            if not self._run_dir.summary.exists():
                self._finish_if_asked()

    def _tell(self) -> None:
        if info := self._run_dir.ready_info("files"):
            now = whereabouts.Whereabouts(url=info["url"], token=self._run_dir.token())
            if now != self._told:
                whereabouts.tell(self._run_dir.info().run_id, now)
                self._told = now

    def _finish_if_asked(self) -> None:
        with get_client(sync_client=True) as client:
            tags = client.read_flow_run(UUID(flow_run.id)).tags
        if asked := next((tag.removeprefix(FINISH) for tag in tags if tag.startswith(FINISH)), None):
            client = ControllerClient(self._run_dir, patience_s=_PATIENCE_S)
            try:
                client.stop(asked)
            except ArealError as error:  # it is being restarted: the next look asks again
                self._log(f"the run is to end ({asked}), and its controller does not answer: {error}")
                return
            finally:
                client.close()
            if asked != self._asked:
                self._asked = asked
                self._log(f"the run ends after this step: {asked}")


def _keep(run_dir: RunDir, config: RunConfig, log: Log) -> None:
    """Summary, logs and evaluations, in the run's folder of the store."""
    store = Storage.open(run_dir.info().checkpoint_url, config.storage.endpoint_url, config.storage.patience_s)
    files = [run_dir.summary, run_dir.root / "config.json", run_dir.root / "run.json"]
    files += [*run_dir.logs.glob("*"), *run_dir.evaluations.rglob("*")]
    try:
        for file in (file for file in files if file.is_file()):
            store.put_file(file, str(file.relative_to(run_dir.root)))
    except StorageError as error:
        log(f"what is left of the run on this node is lost with it: {error}")
    else:
        log(f"summary, logs and evaluations are kept in {store.url}")
