"""Which requests a token admits."""

from __future__ import annotations

import pytest

from areal_core.api.access import admits, authorization


def test_its_own_header_alone() -> None:
    assert admits("token", authorization("token")["Authorization"])
    assert authorization(None) == {}


@pytest.mark.parametrize(
    "header", [None, "", "token", "Bearer", "Bearer ", "Bearer toke", "bearer token", "Bearer tokén"]
)
def test_nothing_else(header: str | None) -> None:
    assert not admits("token", header)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer "])
def test_an_empty_token_admits_nobody(header: str | None) -> None:
    assert not admits("", header)
