"""HTTP client of the controller, for the trainer, the evaluator and the launcher.

Synchronous. A restarted controller may listen on another port. After a failed connection the client reads the address
again from the controller's ready file, for a bounded time. Every call is safe to repeat.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import secrets
import time
import urllib.parse
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from areal_core.api.access import authorization
from areal_core.api.scored_groups import Span, cut, spans_text
from areal_core.errors import ProcessError, RunFinished
from areal_core.storage.rundir import RunDir
from areal_core.types import BatchManifest, Evaluation, MetricRow, PolicyVersion, RunStatus

_POLL_S = 20.0  # the longest wait of one long poll
_RETRY_S = 0.2  # between two attempts to connect


class ControllerClient:
    """Client with one connection, for one caller at a time.

    Calls raise ProcessError if the controller can't be reached for `patience_s` seconds. A connection without a byte
    for `timeout_s` seconds counts as failed.
    """

    def __init__(self, run: RunDir, *, patience_s: float = 60.0, timeout_s: float = 3 * _POLL_S) -> None:
        self._run = run
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    # -- trainer -----------------------------------------------------------------------------------------------

    def batch(self, step: int) -> BatchManifest:
        """Wait for the batch of `step`. Raises RunFinished. The launcher ends the run if no batch ever comes."""
        body = self._poll("GET", f"/batch/{step}?timeout_s={_POLL_S}")
        return msgspec.json.decode(body, type=BatchManifest)

    def group(self, group_id: int, spans: Sequence[Span]) -> list[bytes]:
        """Fetch parts of a group's payload. A span is the first byte of a part and the byte after its last."""
        body = self._call("GET", f"/groups/{group_id}?spans={spans_text(spans)}")
        assert body is not None
        return cut(body, spans)

    def announce(self, version: PolicyVersion) -> list[int]:
        """Publish a version. Returns the versions whose folders can be deleted."""
        return self._json("POST", "/versions", dataclasses.asdict(version))["release"]

    def metrics(self, rows: Iterable[MetricRow]) -> None:
        self._json("POST", "/metrics", {"rows": [[row.key, row.step, row.value, row.time_s] for row in rows]})

    def document(self, kind: str, step: int, data: dict[str, Any]) -> None:
        self._json("POST", "/documents", {"kind": kind, "step": step, "data": data})

    def snapshot(self, step: int) -> dict[str, dict[str, dict[str, Any]]]:
        """Store a snapshot of the ledger beside the checkpoint of `step`; waits as long as the store takes.
        Returns the manifest's entries `files` and `shared`, each by name."""
        body = {"job": secrets.token_hex(8), "timeout_s": _POLL_S}
        return json.loads(self._poll("POST", f"/checkpoints/{step}", body))

    def report_checkpoint(self, step: int) -> None:
        """Report that the checkpoint of `step` is complete, so that the controller can delete obsolete files."""
        self._json("POST", f"/checkpoints/{step}/committed", {})

    def finish(self, reason: str, version: int, model_url: str) -> None:
        self._json("POST", "/finish", {"reason": reason, "version": version, "model_url": model_url})

    # -- evaluator ---------------------------------------------------------------------------------------------

    def next_evaluation(self) -> PolicyVersion:
        """Wait for the next version to evaluate. Raises RunFinished."""
        return PolicyVersion(**json.loads(self._poll("GET", f"/evaluation?timeout_s={_POLL_S}")))

    def report_evaluation(self, evaluation: Evaluation) -> bool:
        """Report a version's score. Returns whether more versions will come."""
        return self._json("POST", "/evaluations", dataclasses.asdict(evaluation))["more"]

    # -- launcher ----------------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        return msgspec.convert(self._json("GET", "/status"), RunStatus)

    def join(self, name: str, url: str, *, stager: str | None = None) -> None:
        """Register a generation server. Returns once the server has loaded the newest version and takes work."""
        while not self.register(name, url, timeout_s=_POLL_S, stager=stager):
            pass

    def register(self, name: str, url: str, *, timeout_s: float, stager: str | None = None) -> bool:
        """Register a generation server.
        Returns whether it takes work within `timeout_s` seconds; if not, call again. `stager` is the URL of the process
        that fetches versions onto the server's machine, if it needs one."""
        body = {"name": name, "url": url, "timeout_s": timeout_s, "stager": stager}
        return self._call("POST", "/servers", body) is not None

    def stop(self, reason: str) -> None:
        """Ask the run to end after its current step, with a checkpoint.
        A restarted controller forgets the request."""
        self._json("POST", "/stop", {"reason": reason})

    def servers(self) -> list[dict[str, Any]]:
        """List the generation servers of the controller: name, url, stager, state and completions in flight."""
        return self._json("GET", "/servers")

    def leave(self, name: str) -> None:
        """Make a generation server leave: it gets no more work.
        Returns once it has handed over its completions."""
        self._json("DELETE", f"/servers/{urllib.parse.quote(name, safe='')}")

    # -- inside ------------------------------------------------------------------------------------------------

    @cached_property
    def _authorization(self) -> dict[str, str]:
        return authorization(self._run.token())

    def _poll(self, method: str, path: str, body: Any = None) -> bytes:
        """Repeat a long poll until the controller sends a body."""
        while (answer := self._call(method, path, body)) is None:
            pass
        return answer

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        return json.loads(self._call(method, path, body) or b"null")

    def _call(self, method: str, path: str, body: Any = None) -> bytes | None:
        """Return the body of a 200, None for a 204.
        Raises RunFinished for a 410, ProcessError for other statuses."""
        payload = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                connection = self._connect()
                content_type = {"Content-Type": "application/json"} if payload else {}
                connection.request(method, path, payload, self._authorization | content_type)
                response = connection.getresponse()
                content = response.read()
                if response.status == 503:  # the controller is about to restart
                    raise ConnectionError("the controller is shutting down")
                if response.status == 200 and not content:
                    raise ConnectionError("the response was incomplete")
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise ProcessError(
                        f"controller: no response to {method} {path} within {self._patience_s:.0f} s ({error})"
                    ) from error
                time.sleep(_RETRY_S)
        if response.status == 200:
            return content
        if response.status == 204:
            return None
        reason = content.decode(errors="replace").strip()
        if response.status == 410:
            raise RunFinished(reason)
        raise ProcessError(f"controller: {method} {path} answered {response.status}: {reason}")

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            url = self._run.controller_url()
            if url is None:
                raise ConnectionError("the controller is not ready")
            parts = urllib.parse.urlsplit(url)
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self._timeout_s)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
