"""Who may talk to the processes of a run: whoever has the run's token, a file in its folder that its user alone can
read.

Requests carry it in a header, `Authorization: Bearer TOKEN`, which no page of another site can have a browser send.
"""

from __future__ import annotations

import hmac

REFUSED = "needs the run's token, from the file `token` of its folder: Authorization: Bearer TOKEN"


def authorization(token: str | None) -> dict[str, str]:
    """The header of a request."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def admits(token: str, header: str | None) -> bool:
    """Whether a request with this header may pass; none may where the token is empty."""
    expected = authorization(token)["Authorization"]
    return bool(token) and hmac.compare_digest((header or "").encode(errors="replace"), expected.encode())
