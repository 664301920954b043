"""Which requests a token admits."""

from __future__ import annotations

from areal_core.api.access import admits, authorization


def test_run_admits_its_own_header_alone() -> None:
    assert authorization(None) == {}
    assert admits("token", authorization("token")["Authorization"])
    for header in (None, "", "token", "Bearer", "Bearer ", "Bearer toke", "bearer token", "Bearer tokén"):
        assert not admits("token", header)
        assert not admits("", header)  # an empty token admits nobody
