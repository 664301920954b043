"""What all tests share: threads, examples, the order of files, and what every test cost."""

import os

# One thread a process, as in a run: workers of pytest share the cores, and sums do not depend on how many there are.
os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.cpu_seconds import CpuSeconds

# Property tests try the same examples at every run; HYPOTHESIS_PROFILE=explore tries others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

_FIRST = ("integration", "conformance", "hosts", "chaos")  # folders of processes, which take longest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A worker takes whole files, so that what a file's tests share is made once: the long ones first."""

    def late(item: pytest.Item) -> bool:
        return Path(item.location[0]).parts[1] not in _FIRST

    items.sort(key=late)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            shared = "vllm" if item.get_closest_marker("vllm") else item.location[0]  # one of its servers for all
            item.add_marker(pytest.mark.xdist_group(shared))
