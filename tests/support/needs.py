"""What tests of a folder need of the machine."""

from __future__ import annotations

import os

import pytest


def skip_without(lack: str | None, required: str) -> None:
    """Skip the test where the machine lacks something, or fail it where the variable `required` says that it may not.
    To be called by a folder's `pytest_runtest_setup`, not by a fixture: pytest then tells the reason once, not for
    every test."""
    if lack is not None:
        if os.environ.get(required):
            pytest.fail(f"{lack}; {required} is set")
        pytest.skip(lack)
