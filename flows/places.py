"""Paths of this project's files and state, in a checkout or an installed wheel."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent if (_PACKAGE.parent / "conf").is_dir() else None

FILES = _CHECKOUT or _PACKAGE / "files"  # holds conf/, infra/terraform/, requirements/ and prefect.yaml
WORK = _CHECKOUT or Path.cwd()  # commands and flow runs resolve relative paths here
STATE = Path(os.environ.get("AREAL_STATE_DIR", WORK / ".areal")).absolute()
