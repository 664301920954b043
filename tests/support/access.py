"""Requests to the services of a run, with its token and without."""

from __future__ import annotations

import http.client
import json
import urllib.parse

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from areal_core.api.access import authorization
from tests.support.runs import Launched

# What a page of another site can have a browser send, without asking first.
CROSS_SITE = {"Origin": "https://example.org", "Content-Type": "text/plain", "Cookie": "token=x"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    *("version", "path", "digest", "name", "url", "stager", "rows", "kind", "step", "data", "job", "timeout_s"),
    *("update_info", "role", "first", "count", "address", "over", "ready", "pulses"),
)
BODIES = st.binary(max_size=64) | (JSON | st.dictionaries(st.sampled_from(FIELDS), JSON)).map(
    lambda value: json.dumps(value).encode()
)
PLACES = st.sampled_from(("0", "1", "-1", "999999", "x", "%00", "..%2F..", "1e9")) | st.text(
    "0123456789abc.-_", min_size=1
)
FUZZED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def ask(
    run: Launched, service: str, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """Status and text of an answer; `service` is a role, whose process has a ready file, or a URL."""
    where = urllib.parse.urlsplit(service if "://" in service else run.url(service))
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def token(run: Launched) -> dict[str, str]:
    return authorization(run.run.token())
