"""Faults of the API: which calls they meet, and what AWS's errors look like."""

from __future__ import annotations

import json
import random
from fnmatch import fnmatchcase
from typing import Literal
from xml.sax.saxutils import escape

import msgspec

from tests.emulated_cloud.calls import Call

Kind = Literal["refuse", "delay", "drop", "lose", "twice"]

# The status of errors; of others, 400.
_STATUS = {
    "AccessDenied": 403,
    "AccessDeniedException": 403,
    "InsufficientInstanceCapacity": 500,
    "InternalError": 500,
    "InternalFailure": 500,
    "RequestLimitExceeded": 503,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
    "UnauthorizedOperation": 403,
    "Unavailable": 503,
}
_ID = "00000000-0000-4000-8000-000000000000"  # of a request


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes of calls whose name matches `call`, a pattern as of a shell: of the next `count` ones, or all."""

    call: str
    kind: Kind
    code: str = "InternalError"  # of what is refused
    status: int | None = None  # None: the one that goes with the code
    message: str = "As the test has asked for."
    delay_s: float = 0.0  # before it is carried out
    count: int | None = 1
    probability: float = 1.0  # that a call which matches meets it; it counts only then
    seed: int = 0


class Faults:
    """Those that are still to come, first come first met; a call meets one at most."""

    def __init__(self) -> None:
        self._pending: list[tuple[Fault, random.Random]] = []

    def add(self, fault: Fault) -> None:
        self._pending.append((fault, random.Random(fault.seed)))

    def clear(self) -> None:
        self._pending.clear()

    @property
    def pending(self) -> list[Fault]:
        return [fault for fault, _ in self._pending]

    def of(self, call: Call) -> Fault | None:
        """The fault that this call meets."""
        for place, (fault, chance) in enumerate(self._pending):
            if fnmatchcase(call.name, fault.call) and chance.random() < fault.probability:
                if fault.count is not None:
                    fault.count -= 1
                    if fault.count == 0:
                        del self._pending[place]
                return fault
        return None


def error(call: Call, fault: Fault) -> tuple[int, str, bytes]:
    """A refusal as the service that was called writes it: status, content type, body."""
    status = fault.status or _STATUS.get(fault.code, 400)
    code, message = escape(fault.code), escape(fault.message)
    if call.service == "ssm":
        text = json.dumps({"__type": fault.code, "message": fault.message})
        return status, "application/x-amz-json-1.1", text.encode()
    inner = f"<Code>{code}</Code><Message>{message}</Message>"
    if call.service == "ec2":
        text = f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>{_ID}</RequestID></Response>"
    elif call.service == "s3":
        text = f"<Error>{inner}<RequestId>{_ID}</RequestId></Error>"
    else:  # of IAM and STS
        whose = "Sender" if status < 500 else "Receiver"
        namespace = f"https://{call.service}.amazonaws.com/doc/2010-05-08/"
        text = (
            f'<ErrorResponse xmlns="{namespace}"><Error><Type>{whose}</Type>{inner}</Error>'
            f"<RequestId>{_ID}</RequestId></ErrorResponse>"
        )
    return status, "text/xml", f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
