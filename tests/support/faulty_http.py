"""A server on the loopback that hands requests on to another one, and spoils some."""

from __future__ import annotations

import http.client
import http.server
import socket
import struct
import threading
from collections import deque
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 60.0
_CODES = {429: "TooManyRequests", 500: "InternalError", 503: "SlowDown", 403: "AccessDenied"}


class FaultyServer:
    """A context. `faults` are those of the next requests, one each:

    - a status: an error of S3's with it
    - "reset": the connection is reset
    - "close": it is closed without a response
    - "cut": of the response's body half is sent (requests without one are handed on)
    - None: nothing
    """

    def __init__(self, url: str) -> None:
        self.faults: deque[int | str | None] = deque()
        self.requests: list[str] = []  # all that came, as "GET /path"
        self._upstream = urlsplit(url).netloc
        handler = type("Handler", (_Handler,), {"faulty": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def next_fault(self, request: str) -> int | str | None:
        self.requests.append(request)
        try:
            return self.faults.popleft()
        except IndexError:
            return None

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._upstream, timeout=_TIMEOUT_S)
        connection.request(method, path, body, headers)
        return connection.getresponse()


class _Handler(http.server.BaseHTTPRequestHandler):
    faulty: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        fault = self.faulty.next_fault(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault in ("reset", "close"):
            self.connection.close()
            self.close_connection = True
        elif isinstance(fault, int):
            text = f"<Error><Code>{_CODES[fault]}</Code><Message>as told</Message></Error>".encode()
            self._send(fault, {"Content-Length": str(len(text)), "Content-Type": "application/xml"}, text)
        else:
            with self.faulty.ask(self.command, self.path, body, dict(self.headers)) as response:
                data = response.read()
                headers = {name: value for name, value in response.getheaders() if name.lower() != "transfer-encoding"}
                if self.command != "HEAD":
                    headers |= {"Content-Length": str(len(data))}
                half = fault == "cut" and bool(data)
                self._send(response.status, headers, data[: len(data) // 2] if half else data)
                self.close_connection = half

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815 - the names that the library looks for
