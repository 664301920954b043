"""Faults of the API: which calls they meet, and what AWS's errors look like."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal
from xml.sax.saxutils import escape

import msgspec

from tests.emulated_cloud.calls import Call

Kind = Literal["refuse", "delay"]

# The status of errors; of others, 400.
_STATUS = {
    "AccessDenied": 403,
    "InsufficientInstanceCapacity": 500,
    "InternalError": 500,
    "RequestLimitExceeded": 503,
    "ServiceUnavailable": 503,
    "SlowDown": 503,
    "UnauthorizedOperation": 403,
}
_ID = "00000000-0000-4000-8000-000000000000"  # of a request


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes of calls whose name matches `call`, a pattern as of a shell: of the next `count` ones, or all."""

    call: str
    kind: Kind
    code: str = "InternalError"  # of what is refused
    delay_s: float = 0.0  # before it is carried out
    count: int | None = 1


class Faults:
    """Those that are still to come, first come first met; a call meets one at most."""

    def __init__(self) -> None:
        self.pending: list[Fault] = []

    def of(self, call: Call) -> Fault | None:
        """The fault that this call meets."""
        for place, fault in enumerate(self.pending):
            if fnmatchcase(call.name, fault.call):
                if fault.count is not None:
                    fault.count -= 1
                    if fault.count == 0:
                        del self.pending[place]
                return fault
        return None


def error(call: Call, fault: Fault) -> tuple[int, bytes]:
    """A refusal as EC2 or S3 writes it: status and body."""
    inner = f"<Code>{escape(fault.code)}</Code><Message>As the test has asked for.</Message>"
    text = f"<Error>{inner}<RequestId>{_ID}</RequestId></Error>"
    if call.service == "ec2":
        text = f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>{_ID}</RequestID></Response>"
    return _STATUS.get(fault.code, 400), f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
