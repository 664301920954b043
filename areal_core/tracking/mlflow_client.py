"""Access to MLflow: check it before a run, and open, extend and end runs.

Ids are always explicit: neither MLFLOW_RUN_ID nor an active run matters.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # MLflow reads these at its import or at each call
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # the forwarder itself retries
os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "10"

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from requests import HTTPError

from areal_core.config.fields import leaves
from areal_core.errors import TrackingError
from areal_core.tracking.outbox import EndStatus
from areal_core.tracking.pages import NOTE, VIEW_TAG, table_path, view

FAILURES = (MlflowException, OSError)  # OSError: raised by requests when sending an artifact
MAX_METRICS = 1000  # per request
# Statuses below 500 that do not reject the data: access or address must be corrected, or the server is overloaded.
_NO_REFUSALS = (401, 403, 404, 408, 429)
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_MAX_DIGEST = 36  # characters of a data set's digest
_MAX_NAME, _MAX_PARAM, _MAX_TAG = 250, 6000, 5000  # characters


def check_reachable(uri: str) -> None:
    """Raise TrackingError, naming tracking.uri, unless MLflow responds within 10 seconds."""
    _check_file(uri)
    with _connected(uri) as client:
        client.search_experiments(max_results=1)


def start_run(
    uri: str,
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
    inputs: Iterable[Mapping[str, str]] = (),
) -> str:
    """Open a run and return its id. Raises TrackingError.

    `params` is the resolved configuration; it becomes parameters with dotted names, and config.json. `inputs` are data
    sets with name, digest, source and context (training or evaluation). Values above MLflow's length limits are cut and
    marked.
    """
    with _connected(uri) as client:
        run = client.create_run(
            _experiment(client, uri, _cut(experiment, _MAX_NAME)),
            run_name=_cut(name, _MAX_NAME),
            tags={row.key: row.value for row in map(tag, tags, tags.values())},
        )
        run_id: str = run.info.run_id
        client.log_batch(
            run_id, params=[Param(_name(key), _cut(str(value), _MAX_PARAM)) for key, value in leaves(params)]
        )
        client.log_dict(run_id, dict(params), "config.json")
        for each in inputs:
            name, digest = _cut(each["name"], _MAX_NAME), each["digest"][:_MAX_DIGEST]
            data_set = Dataset(name=name, digest=digest, source_type="local", source=each["source"])
            client.log_inputs(run_id, [DatasetInput(data_set, [InputTag("mlflow.data.context", each["context"])])])
    return run_id


def resume_run(uri: str, run_id: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> bool:
    """Reopen an earlier run with new tags and config.json; parameters can't change. Raises TrackingError.
    Returns False if the run does not exist any more."""
    with _connected(uri) as client:
        if not _exists(client, run_id):
            return False
        client.update_run(run_id, status="RUNNING")
        client.log_batch(run_id, tags=[tag(key, value) for key, value in tags.items()])
        client.log_dict(run_id, dict(params), "config.json")
    return True


def add_to_run(
    uri: str,
    run_id: str,
    *,
    metrics: Mapping[str, float],
    step: int,
    folder: str = "",
    files: Iterable[Path] = (),
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> None:
    """Log metrics of one step, and add files and tables to artifacts in `folder`. Raises TrackingError.
    `tables` maps the name of a table to its rows."""
    now_ms = int(time.time() * 1000)
    with _connected(uri) as client:
        client.log_batch(run_id, metrics=[Metric(_name(key), value, now_ms, step) for key, value in metrics.items()])
        for file in files:
            client.log_artifact(run_id, str(file), folder)
        for name, rows in (tables or {}).items():
            put_table(client, run_id, f"{folder}/{name}.json", rows)


def put_table(client: MlflowClient, run_id: str, path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table to a run's artifacts, in the format of `MlflowClient.log_table`.
    That method would append the rows again when it is called again."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}
    client.log_text(run_id, json.dumps(table), path)
    listing = "mlflow.loggedArtifacts"  # MLflow's page shows these artifacts as tables
    try:
        before = json.loads(client.get_run(run_id).data.tags.get(listing, "[]"))
    except ValueError:  # a server may have cut the value
        before = []
    entry = {"path": path, "type": "table"}
    listed = [*(other for other in before if other != entry), entry]
    while len(json.dumps(listed)) > _MAX_TAG:
        listed.pop(0)
    client.set_tag(run_id, listing, json.dumps(listed))


def append_note(client: MlflowClient, run_id: str, text: str) -> None:
    """Append a paragraph to a run's description unless present; cuts the earlier text to make room."""
    before = client.get_run(run_id).data.tags.get(NOTE, "")
    if text not in before:
        before = _cut(before, _MAX_TAG - len(text) - 2)
        client.set_tag(run_id, NOTE, tag(NOTE, f"{before}\n\n{text}".strip()).value)


def end_run(uri: str, run_id: str, status: EndStatus) -> None:
    """Record how a run ended. Raises TrackingError."""
    with _connected(uri) as client:
        client.set_terminated(run_id, status)


def experiment_of(uri: str, run_id: str) -> str:
    """The id of a run's experiment. Raises TrackingError."""
    with _connected(uri) as client:
        return str(client.get_run(run_id).info.experiment_id)


def tag(key: str, value: str) -> RunTag:
    """A tag, cut to MLflow's length limits."""
    return RunTag(_name(key), _cut(value, _MAX_TAG))


def refuses(error: BaseException) -> bool:
    """Whether the server has rejected the data, so that sending them again would fail again."""
    if isinstance(error, MlflowException):
        status = error.get_http_status_code()
    elif isinstance(error, HTTPError) and error.response is not None:  # raised for an artifact
        status = error.response.status_code
    else:
        return False
    return 400 <= status < 500 and status not in _NO_REFUSALS


def _exists(client: MlflowClient, run_id: str) -> bool:
    try:
        return client.get_run(run_id).info.lifecycle_stage != "deleted"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _experiment(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment `name`, created if missing, with its description and tags up to date."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            made = client.create_experiment(name, artifact_location=_artifact_folder(uri))
            found = client.get_experiment(made)
        except MlflowException:  # another process created it meanwhile
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if _is_database(uri) and str(found.artifact_location).startswith("mlflow-artifacts:"):
        raise TrackingError(
            f"tracking.uri: experiment {name!r} keeps its artifacts on an MLflow server; set the server's URL, "
            f"got {shown(uri)}"
        )
    table = f"Training runs: [table with modes, scores and speeds]({table_path(found.experiment_id)})"
    tags = {
        "mlflow.experimentKind": "custom_model_development",  # selects MLflow's pages for training runs
        VIEW_TAG: view(found.creation_time or 0),
        NOTE: found.tags.get(NOTE, table),  # keeps a description that a person has written
    }
    for key, value in tags.items():
        if found.tags.get(key) != value:
            client.set_experiment_tag(found.experiment_id, key, value)
    return found.experiment_id


def _artifact_folder(uri: str) -> str | None:
    """The artifact folder beside an SQLite database; None for servers, which have their own."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "artifacts").as_uri()


def _check_file(uri: str) -> None:
    """Raise TrackingError for an unwritable SQLite file, which MLflow would retry for minutes."""
    if uri.startswith("sqlite:///"):
        try:
            with closing(sqlite3.connect(uri.removeprefix("sqlite:///"), timeout=2.0)) as database:
                database.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise TrackingError(f"tracking.uri: can't write to {shown(uri)}: {error}") from error


def _is_database(uri: str) -> bool:
    return urlsplit(uri).scheme.partition("+")[0] in _DATABASES


def _name(text: str) -> str:
    """A parameter or tag name with only the characters and length that MLflow accepts."""
    name = posixpath.normpath(re.sub(r"[^\w\-. /]", "_", text)).lstrip("./") or "_"
    # The checksum keeps long names with equal beginnings distinct.
    return name if len(name) <= _MAX_NAME else f"{_cut(name, _MAX_NAME - 8)}{zlib.crc32(name.encode()):08x}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(0, length - 3)] + "..."


@contextmanager
def _connected(uri: str) -> Iterator[MlflowClient]:
    """A client of MLflow at `uri`. Within the `with`, its errors become TrackingError."""
    if not _is_database(uri) and urlsplit(uri).scheme not in ("http", "https"):
        raise TrackingError(
            f"tracking.uri: {shown(uri)!r} is not supported; use http(s)://host:port of an MLflow server or sqlite:////path/mlflow.db"
        )
    try:
        yield MlflowClient(uri)
    except FAILURES as error:
        named = os.environ.get("MLFLOW_TRACKING_URI") == uri
        field = "MLFLOW_TRACKING_URI" if named else "tracking.uri"
        remedy = "; start MLflow there, set another URI, or set tracking.enabled=false" if named else ""
        raise TrackingError(f"{field}: can't use MLflow at {shown(uri)}: {reason(error)}{remedy}") from error


def shown(uri: str) -> str:
    """A URI without its password."""
    return re.sub(r"//[^/@]*@", "//", uri)


def reason(error: BaseException) -> str:
    """The root cause of an error chain, such as MlflowException <- requests <- urllib3, in one line."""
    root = error
    while below := root.__cause__ or root.__context__:
        root = below
    if isinstance(root, TimeoutError):
        return "no response in time"
    if isinstance(root, OSError) and root.strerror:
        return root.strerror
    return _cut(" ".join(str(root).split()) or type(root).__name__, 300)
