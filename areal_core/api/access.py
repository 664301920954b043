"""Check the run's token, which every request to a process of the run must carry.

The token lies in a file of the run's folder that only its user can read. Requests carry it in the header
`Authorization: Bearer TOKEN`. A page of another site can't make a browser send this header.
"""

from __future__ import annotations

import hmac

REFUSED = "Authorization: must be Bearer TOKEN, with the run's token from the file `token` of its folder"


def authorization(token: str | None) -> dict[str, str]:
    """Return the request header that carries `token`; empty for None."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def admits(token: str, header: str | None) -> bool:
    """Whether a request with this `Authorization` header may pass; never with an empty token."""
    expected = authorization(token)["Authorization"]
    return bool(token) and hmac.compare_digest((header or "").encode(errors="replace"), expected.encode())
