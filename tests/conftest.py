"""What all tests share: threads, examples, the order of files, and what every test cost."""

import os

# One thread a process, as in a run: workers of pytest share the cores, and sums do not depend on how many there are.
os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.cpu_seconds import CpuSeconds

# Property tests try the same examples at every run; HYPOTHESIS_PROFILE=explore tries others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_FIRST = ("integration", "conformance", "hosts", "chaos")  # folders of processes, which take longest
_SHARING = ("conformance", "hosts")  # folders whose files share a server or a network


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: _folder(item.nodeid) not in _FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _Scheduling(config, log)


class _Scheduling(LoadScopeScheduling):
    """A worker takes whole files, or a whole folder, so that what its tests share is started once."""

    def _split_scope(self, nodeid: str) -> str:
        if (folder := _folder(nodeid)) in _SHARING:
            return f"{folder} of vllm" if "[vllm" in nodeid else folder
        return nodeid.partition("::")[0]


def _folder(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).parts[1]
