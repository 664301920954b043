"""What tests of untrusted programs share."""

import pytest

from areal_core.environments.sandbox import Sandbox
from areal_core.errors import ConfigError


def _missing() -> str | None:
    try:
        Sandbox("bubblewrap", memory_mib=256, processes=8).check()
    except ConfigError as error:
        return str(error)
    return None


_why = _missing()
needs_sandbox = pytest.mark.skipif(_why is not None, reason=_why or "")
