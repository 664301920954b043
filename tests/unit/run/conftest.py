"""Fixtures of the tests of a run's preparation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import write_tiny


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """A configuration with a model folder and without tracking."""
    return {
        "state_dir": str(tmp_path / "state"),
        "model": {"path": str(write_tiny(tmp_path / "model"))},
        "storage": {"url": str(tmp_path / "store")},
        "tracking": {"enabled": False},
    }
